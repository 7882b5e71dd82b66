"""The README's tables: made from results, left alone where there are none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pymesh3d.bench import tables

WHERE = {"date": "2025-01-31T12:00:00+00:00", "versions": {"torch": "2.13.0", "triton": "3.9.0"}}
RECORDS = {
    "train.json": {
        **WHERE,
        "cards": [{"name": "NVIDIA H100"}] * 2,
        "rows": [
            {"tp": 1, "pp": 1, "dp": 1, "loss_first": 5.5496, "loss_last": 2.5, "largest_difference": 0.0, "mean_difference": 0.0},
            {"tp": 2, "pp": 1, "dp": 1, "loss_first": 5.5497, "loss_last": 2.51, "largest_difference": 0.0123, "mean_difference": 0.001},
        ],
    },
    "check-cpu-world8-all.json": [
        {"loss_difference": 1e-16, "gradients": 3e-15, "parameters": 1e-14},
        {"loss_difference": 4e-16, "gradients": 2e-15, "parameters": 5e-13},
    ],
    "philox.json": {
        **WHERE,
        "cards": [],
        "rows": [{"elements": 1048576, "philox_ms": 0.1, "torch_normal_ms": 0.05, "floor_ms": 0.0123}],
    },
    "p2p-2xH200.json": {
        **WHERE,
        "cards": [{"name": "NVIDIA H100"}] * 2,
        "rows": [{"pattern": "ring", "bytes": 2**16, "nccl_us": 29.6, "torch_us": 116.4, "nccl_host_us": 20.4, "torch_host_us": 99.7}],
    },
    **{
        f"{name}-2xH200.json": {
            **WHERE,
            "name": name,
            "rounds": 50,
            "commit": "0123abc",
            "cards": [{"name": "NVIDIA H100"}] * 2,
            "rows": [
                {"layer": layer, "mode": mode, "tokens": 2048, "product_us": 156.2, "floor_us": 157.0, "unfused_us": 1300.4}
                | ({} if name == "matmul_all_reduce" else {"torch_us": 200.0})
                | {"ours_us": 170.0, "speed": speed}
                for layer, mode, speed in (
                    ("llama-8b qkv", "graph", 2.0),
                    ("llama-8b qkv", "eager", 9.0),
                    ("llama-70b up, backward", "graph", 0.5),
                )
            ],
        }
        for name in ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")
    },
    "model-2xH200.json": {
        **WHERE,
        "cards": [{"name": "NVIDIA H100"}] * 2,
        "rows": [
            {"case": "dp 2", "global_batch": 16, "micro_batch": 2, "seq": 4096, "tokens_per_s": 60000.4, "mfu": 0.4987, "memory_gib": 22.76}
            | {"matrix products": 0.604, "attention": 0.196, "communication": 0.04, "idle": 0.03}
            | {"compiled": 0.02, "optimizer": 0.03, "copies": 0.004, "other": 0.1},
            {"case": "tp 2", "global_batch": 16, "micro_batch": 4, "seq": 4096, "tokens_per_s": 50000.0, "mfu": 0.4, "memory_gib": 20.0}
            | {"matrix products": 0.5, "attention": 0.2, "communication": 0.3, "idle": 0.02}
            | {"compiled": 0.0, "optimizer": 0.01, "copies": 0.0, "other": 0.1},
        ],
    },
    "zero_step-2xH200.json": {
        **WHERE,
        "cards": [{"name": "NVIDIA H100"}] * 2,
        "rows": [
            {"ranks": 2, "parameters_mi": 1024.0, "mode": mode, "floor_us": 6075.4, "serial_us": 14000.0, "overlapped_us": 12000.0}
            | {"one_pass_us": 6200.0, "clipped_us": 8000.4, "of_overlapped": 1.935}
            for mode in ("eager", "graph")
        ],
    },
    "zero_train-2xH200.json": {
        **WHERE,
        "cards": [{"name": "NVIDIA H100"}] * 2,
        **{"model": "1b", "global_batch": 16, "micro_batch": 2, "seq": 4096, "compile": True, "timed_steps": 16},
        "rows": [
            {"name": "stage1", "case": "ZeRO 1", "tokens_per_s": 70000.4, "step_ms": 468.11, "speed": 1.0234, "state_gib": 12.4}
            | {"against": "FSDP2, summed once in float32", "table_gib": 12.375, "of_table": 1.002},
            {"name": "fsdp-each", "case": "FSDP2, summed each microbatch", "tokens_per_s": 68000.0, "step_ms": 481.9, "state_gib": 6.19},
            {"name": "hidden", "case": "ZeRO 1, its sum over ranks", "hidden": 0.914, "sum_ms": 12.34, "left_ms": 1.06, "longer_ms": 3.21},
        ],
    },
}
TABLES = {
    "train": """| tp x pp x dp | first loss | loss after 100 steps | largest difference of a step | mean difference |
| --- | ---: | ---: | ---: | ---: |
| 1 x 1 x 1 | 5.5496 | 2.5000 | 0.0e+00 | 0.0e+00 |
| 2 x 1 x 1 | 5.5497 | 2.5100 | 1.2e-02 | 1.0e-03 |

Bounds: 0.15 for a step, 0.02 on average. 2 x NVIDIA H100, torch 2.13.0, triton 3.9.0, 2025-01-31; `pymesh3d bench train`.""",
    "check": """| layouts | loss | gradients | parameters after 3 AdamW steps |
| --- | ---: | ---: | ---: |
| 2 | 4.0e-16 | 3.0e-15 | 5.0e-13 |""",
    "philox": """| float32 elements | philox ms | torch normal_ ms | only writing, ms |
| --- | ---: | ---: | ---: |
| 1,048,576 | 0.100 | 0.050 | 0.012 |

CPU, torch 2.13.0, triton 3.9.0, 2025-01-31; `pymesh3d bench philox`.""",
    "p2p": """|  | ours, us | `batch_isend_irecv`, us | ours, us of the host | `batch_isend_irecv`, us of the host |
| --- | ---: | ---: | ---: | ---: |
| ring, 0.0625 MiB | 30 | 116 | 20 | 100 |

2 x NVIDIA H100, torch 2.13.0, triton 3.9.0, 2025-01-31; `pymesh3d bench p2p`.""",
    **{
        name: f"|  | tokens | product alone, us | floor, us | product and NCCL, us |{head} ours, us | speed, best other = 1 |"
        f"""
| --- | ---: | ---: | ---: | ---: | ---: |{" ---: |" if head else ""} ---: |
| qkv | 2,048 | 156 | 157 | 1,300 |{" 200 |" if head else ""} 170 | 2.00 |

Of llama-8b and llama-70b together, 2 products: geometric mean of the speed in a graph 1.00, at least 0.98 in 1; """
        "in eager calls 9.00, at least 0.98 in 1. Medians of 50 rounds by turns. "
        f"2 x NVIDIA H100, torch 2.13.0, triton 3.9.0, 2025-01-31, commit 0123abc; `pymesh3d bench {name}`."
        for name, head in (
            ("all_gather_matmul", " torch's fused, us |"),
            ("matmul_reduce_scatter", " torch's fused, us |"),
            ("matmul_all_reduce", ""),
        )
    },
    "model": """|  | tokens/s a GPU | MFU | GiB, fullest rank | products | attention | communication | idle | all other kernels |
| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |
| dp 2 | 60,000 | 49.9% | 22.8 | 60% | 20% | 4% | 3% | 15% |
| tp 2 | 50,000 | 40.0% | 20.0 | 50% | 20% | 30% | 2% | 11% |

16 sequences of 4,096 tokens a step, 2 or 4 a microbatch, bfloat16. """
    "2 x NVIDIA H100, torch 2.13.0, triton 3.9.0, 2025-01-31; `pymesh3d bench model`.",
    "zero_step": """| parameters | floor, us | NCCL, us | NCCL by buckets, us | ours, us | ours, clipped, us | speed, NCCL by buckets = 1 |
| --- | ---: | ---: | ---: | ---: | ---: | ---: |
| 1,024 Mi | 6,075 | 14,000 | 12,000 | 6,200 | 8,000 | 1.94 |
| 1,024 Mi, in a graph | 6,075 | 14,000 | 12,000 | 6,200 | 8,000 | 1.94 |

Over 2 ranks. 2 x NVIDIA H100, torch 2.13.0, triton 3.9.0, 2025-01-31; `pymesh3d bench zero_step`.""",
    "zero_train": "|  | tokens/s a GPU | ms a step | speed, FSDP2 = 1 | which FSDP2 | GiB kept | GiB by the table | kept, table = 1 |"
    """
| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |
| ZeRO 1 | 70,000 | 468.1 | 1.023 | summed once in float32 | 12.40 | 12.38 | 1.002 |
| FSDP2, summed each microbatch | 68,000 | 481.9 |  |  | 6.19 |  |  |

Stage 1 hides 91% of its sum over ranks: 1.1 ms of it come after backward, 12.3 where all of it does; beside backward it makes a step """
    "3.2 ms longer than one without any sum. Medians of 16 steps; model 1b, 16 sequences of 4,096 tokens a step, 2 a microbatch, "
    "bfloat16, compiled. 2 x NVIDIA H100, torch 2.13.0, triton 3.9.0, 2025-01-31; `pymesh3d bench zero_train`.",
}
README = "before\n" + "".join(f"<!-- table {name} -->\nold {name}\n<!-- end -->\nafter {name}\n" for name in TABLES)


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder of results, below the folder of a README."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "README.md").write_text(README)
    (tmp_path / tables.RESULTS).mkdir(parents=True)
    return tmp_path / tables.RESULTS


def test_tables_are_made_where_results_are(results: Path) -> None:
    assert [*TABLES] == [*tables.TABLES]
    text = README
    for number, (file, name) in enumerate(zip(RECORDS, TABLES, strict=True), 1):
        (results / file).write_text(json.dumps(RECORDS[file]))
        text = text.replace(f"old {name}", TABLES[name])
        assert tables.fill(README) == text and text.count("old ") == len(TABLES) - number
        assert tables.fill(text) == text


def test_the_command_writes_or_tells(results: Path) -> None:
    assert tables.main(check_only=True) == 0  # there is nothing to write
    (results / "philox.json").write_text(json.dumps(RECORDS["philox.json"]))
    assert tables.main(check_only=True) == 1 and Path("README.md").read_text() == README
    assert tables.main(check_only=False) == 0 and Path("README.md").read_text() == README.replace("old philox", TABLES["philox"])
    assert tables.main(check_only=True) == 0


def test_the_readme_has_every_table_once() -> None:
    text = (Path(__file__).parents[2] / "README.md").read_text()
    assert [text.count(f"<!-- table {name} -->") for name in tables.TABLES] == [1] * len(tables.TABLES)
    assert text.count("<!-- table ") == text.count("<!-- end -->") == len(tables.TABLES)

"""The benchmark of whole steps: its cases, its arithmetic, and one run of it on the CPU."""

from __future__ import annotations

import json
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

from pymesh3d.bench import model
from pymesh3d.config import MODELS


def test_cases_of_two_gpus_are_those_that_others_are_measured_with() -> None:
    """Eight sequences a GPU: 8 microbatches in a pipeline of two, 4 elsewhere; each layout eager and compiled, but for ZB-H1."""
    found = {model.name(case): case["train"] for case in model.cases(2, MODELS["1b"], 4096)}
    assert list(found) == [
        "dp 2", "dp 2, compiled", "pp 2", "pp 2, compiled", "pp 2, interleaved", "pp 2, interleaved, compiled", "pp 2, zb-h1",
        "tp 2", "tp 2, compiled",
    ]  # fmt: skip
    assert all(train["global_batch"] == 16 and train["seq"] == 4096 for train in found.values())
    assert (found["pp 2"]["micro_batch"], found["dp 2"]["micro_batch"], found["tp 2"]["micro_batch"]) == (2, 2, 4)
    assert found["tp 2"]["sequence_parallel"] and not found["pp 2"]["sequence_parallel"]
    assert [model.name(case) for case in model.cases(1, MODELS["1b"], 4096)] == ["one rank", "one rank, compiled"]
    assert len({model.name(case) for case in model.cases(4, MODELS["1b"], 4096)}) == 21


def test_time_that_is_covered() -> None:
    assert model.union([]) == 0
    assert model.union([(5, 6), (0, 2), (1, 3), (1, 2), (3, 4)]) == 5


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", "communication"),
        ("nvjet_tst_256x128_64x4_1x2_h_bz_coopB_NNT", "matrix products"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n", "matrix products"),
        ("void pytorch_flash::flash_fwd_kernel<...>", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma", "attention"),
        ("void at::native::multi_tensor_apply_kernel<..., FusedAdamMathFunctor>", "optimizer"),
        ("triton_poi_fused__scaled_dot_product_flash_attention_add_3", "compiled"),
        ("Memcpy DtoD (Device -> Device)", "copies"),
        ("void at::native::vectorized_elementwise_kernel<4, ...>", "other"),
    ],
)
def test_kinds_of_kernels(kernel: str, kind: str) -> None:
    assert model.kind_of(kernel) == kind


def test_a_run_on_cpu_says_how_fast_each_case_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And names a case that fails."""
    file = tmp_path / "model.json"
    good, bad = model.cases(2, MODELS["tiny"], 32)[2:4]  # "pp 2", and the next, made impossible
    bad = {"layout": {"tp": 3, "pp": 1, "dp": 1}, "train": {**bad["train"], "compile": False}}
    monkeypatch.setattr(model, "cases", lambda *_: [good, bad])
    assert model.main(str(file)) == 1
    record = json.loads(file.read_text())
    (row,) = record["rows"]
    assert (row["case"], row["global_batch"], row["micro_batch"]) == ("pp 2", 16, 2)
    assert row["tokens_per_s"] == pytest.approx(16 * 32 / 2 / row["step_ms"] * 1e3)
    assert row["slowest_step_ms"] >= row["step_ms"] > 0
    assert "failed: tp 3" in capsys.readouterr().err


def stand_in(monkeypatch: pytest.MonkeyPatch, statuses: list[int], file: Path) -> list[str]:
    """Runs of four cases end with these statuses; those that succeed leave a row. The cases that were begun, and how many rows `file` has
    by then."""
    begun = []

    def launch(argv: Sequence[str], _: int) -> int:
        options = dict(zip(argv[2::2], argv[3::2], strict=True))
        rows = len(json.loads(file.read_text())["rows"]) if file.exists() else 0
        begun.append(f"{model.name(json.loads(options['--case']))} after {rows}")
        Path(options["--json"]).write_text(json.dumps({"case": "some", "step_ms": 2.0}))
        return statuses[len(begun) - 1]

    monkeypatch.setattr(model, "launch", launch)
    monkeypatch.setattr(model.torch.cuda, "is_available", lambda: False)
    return begun


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_all_cases_and_leaves_what_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], number: int
) -> None:
    file = tmp_path / "model.json"
    begun = stand_in(monkeypatch, [0, 128 + number], file)
    assert model.main(str(file)) == 128 + number
    assert begun == ["dp 2 after 0", "dp 2, compiled after 1"]
    assert len(json.loads(file.read_text())["rows"]) == 1
    assert "Training tiny on 2 processes" in " ".join(capsys.readouterr().out.split())


def test_a_rank_that_the_system_ends_is_a_case_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As where memory runs out: the other cases may fit."""
    statuses = [128 + signal.SIGKILL, 128 + signal.SIGSEGV, 1, *[0] * 20]
    begun = stand_in(monkeypatch, statuses, tmp_path / "model.json")
    assert model.main(str(tmp_path / "model.json")) == 1
    assert len(begun) == 9 and len(json.loads((tmp_path / "model.json").read_text())["rows"]) == 6
    assert capsys.readouterr().err == "failed: dp 2; dp 2, compiled; pp 2\n"

"""The benchmark of whole steps: its cases, its arithmetic, and one run of it on the CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pymesh3d.bench import model
from pymesh3d.config import MODELS


def test_cases_of_two_gpus_are_those_that_others_are_measured_with() -> None:
    """Eight sequences a GPU: 8 microbatches in a pipeline of two, 4 elsewhere; each layout eager and compiled."""
    found = {model.name(case): case["train"] for case in model.cases(2, MODELS["1b"], 4096)}
    assert list(found) == [
        "dp 2", "dp 2, compiled", "pp 2", "pp 2, compiled", "pp 2, interleaved", "pp 2, interleaved, compiled", "tp 2", "tp 2, compiled"
    ]  # fmt: skip
    assert all(train["global_batch"] == 16 and train["seq"] == 4096 for train in found.values())
    assert (found["pp 2"]["micro_batch"], found["dp 2"]["micro_batch"], found["tp 2"]["micro_batch"]) == (2, 2, 4)
    assert found["tp 2"]["sequence_parallel"] and not found["pp 2"]["sequence_parallel"]
    assert [model.name(case) for case in model.cases(1, MODELS["1b"], 4096)] == ["one rank", "one rank, compiled"]
    assert len({model.name(case) for case in model.cases(4, MODELS["1b"], 4096)}) == 18


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

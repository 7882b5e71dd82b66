"""The benchmarks of products run where there is no GPU, and say what they have measured."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from pymesh3d.bench import matmul
from pymesh3d.triton_kernels import backend

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(100)
@pytest.mark.parametrize("name", ["all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"])
def test_it_runs_between_two_processes(tmp_path: Path, name: str) -> None:
    file = tmp_path / "times.json"
    code = f"import sys; from pymesh3d.bench import {name} as bench; sys.exit(bench.main({str(file)!r}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=90, cwd=ROOT)
    assert done.returncode == 0 and "over 2 ranks on cpu" in done.stdout, done
    (row,) = json.loads(file.read_text())["rows"]
    assert (row["ranks"], row["tokens"], row["cols"], row["depth"]) == (2, 32, 24, 16)
    assert all(row[f"{name}_us"] > 0 for name in ("unfused", "product", "collective"))
    assert ("plain_us" in row) == backend.available and "hopper_us" not in row
    if backend.available:
        assert row["speed"] == pytest.approx(row["unfused_us"] / row["plain_us"])


def test_the_plain_product_is_timed_against_torch(tmp_path: Path) -> None:
    assert matmul.main(str(tmp_path / "times.json")) == 0
    for row in json.loads((tmp_path / "times.json").read_text())["rows"]:
        assert row["torch_ms"] > 0 and ("matmul_ms" in row) == backend.available
        if backend.available:
            assert row["of_torch"] == pytest.approx(row["torch_ms"] / row["matmul_ms"])
            assert row["tflops"] == pytest.approx(2 * row["tokens"] * row["cols"] * row["depth"] / row["matmul_ms"] / 1e9)

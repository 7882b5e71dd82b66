"""The benchmark of ZeRO's stages and FSDP2: its arithmetic, what it refuses, and one run of it on the CPU."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pymesh3d import cli
from pymesh3d.bench import zero_train
from pymesh3d.bench.timing import wall_seconds
from pymesh3d.bench.zero_train import gathered_bytes, shares, table_bytes
from pymesh3d.config import MODELS
from pymesh3d.errors import ConfigError
from pymesh3d.mesh import init_mesh

Ranks = Callable[..., list[Any]]
ROOT = Path(__file__).parents[2]
WITHOUT_GPUS = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}


def test_bytes_are_those_of_the_readme() -> None:
    """Of the 1B model: 1,107,363,840 parameters, of which 134,219,776 are outside of layers: embedding, head, and the last norm."""
    model, every, outside = MODELS["1b"], 1_107_363_840, 134_219_776
    bucket = 2 * 32768 * 2048  # the embedding is larger than a bucket is otherwise
    assert [table_bytes(stage, model, 2) for stage in range(4)] == [
        18 * every,
        12 * every,
        10 * every + bucket,
        9 * (every - outside) + 10 * outside + bucket,
    ]
    assert [table_bytes(stage, model, 8) for stage in range(4)] == [
        18 * every,
        7.5 * every,
        4 * every + bucket,
        2.25 * (every - outside) + 4 * outside + bucket,
    ]
    assert [gathered_bytes(stage, model) for stage in range(4)] == [0, 0, 0, 4 * (every - outside) // 16]


def test_a_bucket_is_as_large_as_buckets_are() -> None:
    """Of the 8B model that is the embedding, of a tiny one all of it."""
    assert table_bytes(2, MODELS["8b"], 16) == 3 * 7_248_023_552 + 2 * 32768 * 4096
    tiny = table_bytes(1, MODELS["tiny"], 1) // 18
    assert table_bytes(2, MODELS["tiny"], 1) == 18 * tiny + 2 * tiny


def test_what_is_hidden_does_not_come_after_backward() -> None:
    """Of a sum of 10 ms after a backward of 90 ms."""
    found = shares(beside=92.5, after=100.0, left=1.0, whole=10.0)
    assert found == {"beside_ms": 92.5, "after_ms": 100.0, "sum_ms": 10.0, "left_ms": 1.0, "hidden": 0.9, "longer_ms": 2.5}
    assert shares(beside=100.0, after=100.0, left=10.0, whole=10.0)["hidden"] == 0.0


def test_every_stage_is_compared_with_what_is_as_precise() -> None:
    assert set(zero_train.COMPARABLE) == set(zero_train.STAGES) and set(zero_train.CASES) == {*zero_train.STAGES, *zero_train.SETTINGS}
    for others in zero_train.COMPARABLE.values():
        for setting in (zero_train.SETTINGS[other] for other in others):
            assert setting.each or setting.reduce == torch.float32, "gradients add up in float32"


def test_cases_that_do_not_exist_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"--cases stage4: no such cases\. Use stage0 or stage1 or"):
        zero_train.main(cases="stage1,stage4")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ConfigError, match="1 GPU: ranks share out what they keep"):
        zero_train.main()


def test_the_command_line_hands_on_what_is_asked_for(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(zero_train, "main", lambda file, **given: asked.append({"file": file, **given}) or 0)
    assert cli.main(["bench", "zero_train", "--compile", "--cases", "stage1,fsdp-each"]) == 0
    assert asked == [{"file": None, "compile": True, "cases": "stage1,fsdp-each"}]
    assert cli.main(["bench", "zero_train", "philox", "--compile"]) == 2
    assert "bench philox --compile: only zero_train has that. Leave it out" in capsys.readouterr().err
    assert cli.main(["bench", "zero_train", "--tune"]) == 2
    assert "bench zero_train --tune: only all_gather_matmul, " in capsys.readouterr().err


@pytest.mark.timeout(100)
def test_it_trains_every_case_on_two_processes(tmp_path: Path) -> None:
    """All start from the same numbers and take the same steps; in float32 even FSDP2's agree with ours."""
    file = tmp_path / "times.json"
    done = subprocess.run(
        [sys.executable, "-m", "pymesh3d", "bench", "zero_train", "--json", str(file)],
        capture_output=True, text=True, timeout=90, cwd=ROOT, env=WITHOUT_GPUS,
    )  # fmt: skip
    assert done.returncode == 0 and done.stderr == "" and "data-parallel over 2 ranks on cpu, float32" in done.stdout, done
    record = json.loads(file.read_text())
    assert (record["model"], record["global_batch"], record["micro_batch"], record["compile"]) == ("tiny", 16, 2, False)
    *rows, hidden = record["rows"]
    assert [row["name"] for row in rows] == [*zero_train.CASES] and hidden["name"] == "hidden"
    times = {row["case"]: row["step_ms"] for row in rows}
    for row in rows:
        assert row["loss_first"] == pytest.approx(rows[0]["loss_first"], rel=1e-6)
        assert row["loss_warm"] == pytest.approx(rows[0]["loss_warm"], rel=1e-5)
        assert math.isfinite(row["loss_last"]) and row["loss_last"] < row["loss_warm"] < row["loss_first"]
        assert row["tokens_per_s"] == pytest.approx(8 * 32 / row["step_ms"] * 1e3)
        assert ("speed" in row) == (row["name"] in zero_train.STAGES) and "state_gib" not in row, "there is no memory of GPUs"
        if "speed" in row:
            others = [times[zero_train.CASES[name]] for name in zero_train.COMPARABLE[row["name"]]]
            assert times[row["against"]] == min(others) and row["speed"] == pytest.approx(min(others) / row["step_ms"])
    assert hidden["sum_ms"] > 0 and hidden["left_ms"] > 0
    names = {"beside": "beside_ms", "after": "after_ms", "left": "left_ms", "whole": "sum_ms"}
    right = shares(**{name: hidden[key] for name, key in names.items()})
    assert {key: hidden[key] for key in right} == pytest.approx(right)


@pytest.mark.timeout(100)
def test_only_what_is_asked_for_is_measured(tmp_path: Path) -> None:
    file = tmp_path / "times.json"
    code = f"import sys; from pymesh3d.bench import zero_train; sys.exit(zero_train.main({str(file)!r}, cases='stage2,stage2'))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=90, cwd=ROOT, env=WITHOUT_GPUS)
    assert done.returncode == 0 and re.search(r"ZeRO 2: loss \d\.\d{4}\n", done.stdout), done
    (row,) = json.loads(file.read_text())["rows"]
    assert row["name"] == "stage2" and "speed" not in row


def steps_in_parts() -> tuple[list[float], list[float], bool]:
    """Losses of an evaluation after each step: taken whole, with sums beside backward, after it."""
    mesh = init_mesh(dp=-1, device="cpu")
    job = zero_train.Job.of(mesh, MODELS["tiny"], compiled=False)
    whole, parts = (zero_train.Ours(job, 1) for _ in range(2))
    spent = []
    found: tuple[list[float], list[float]] = ([], [])
    for beside in (True, False):
        whole.step()
        spent.append(parts.step_in_parts(beside=beside))
        for losses, case in zip(found, (whole, parts), strict=True):
            losses.append(case.engine.eval_step(job.batch))
    mesh.close()
    return *found, all(ms > 0 for ms in spent)


def test_a_step_in_parts_is_a_step(ranks: Ranks) -> None:
    for whole, parts, timed in ranks(2, steps_in_parts):
        assert parts == pytest.approx(whole, rel=1e-6) and timed


def test_seconds_of_a_call() -> None:
    calls: list[int] = []
    assert 0 <= wall_seconds(lambda: calls.append(1), "cpu") < 1 and calls == [1]

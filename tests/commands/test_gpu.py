"""The main job and the check on this machine's GPUs, as users start them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
GPUS = torch.cuda.device_count()
WORLDS = [world for world in (1, 2, 4, 8) if world <= GPUS] or [1]


def pymesh3d(*arguments: str) -> str:
    done = subprocess.run([sys.executable, "-m", "pymesh3d", *arguments], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, f"{arguments} ended with {done.returncode}:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


@pytest.mark.parametrize("world", WORLDS)
def test_layouts_agree_with_float64_within_the_bounds_of_bf16(world: int) -> None:
    assert "layouts agree with one process in bfloat16" in pymesh3d("check", f"--world={world}", "--device=cuda")


def losses(tmp_path: Path, *options: str) -> list[float]:
    log = tmp_path / f"{'_'.join(options)}.jsonl".replace("-", "")
    pymesh3d("train", "--device=cuda", "--dtype=bfloat16", "--steps=12", "--model=tiny", f"--log-json={log}", *options)
    return [json.loads(line)["loss"] for line in log.read_text().splitlines()]


def test_compiled_layers_train_as_eager_ones(tmp_path: Path) -> None:
    eager = losses(tmp_path)
    for options in (["--compile"], ["--compile", f"--tp={WORLDS[-1] if WORLDS[-1] <= 4 else 4}", "--sequence-parallel"]):
        assert losses(tmp_path, *options) == pytest.approx(eager, abs=0.02), options


def test_recomputed_layers_train_as_kept_ones(tmp_path: Path) -> None:
    kept, dropped = losses(tmp_path), losses(tmp_path, "--dropout=0.2")
    for recompute in ("full", "selective"):
        assert losses(tmp_path, f"--recompute={recompute}") == pytest.approx(kept, abs=0.02), recompute
        assert losses(tmp_path, f"--recompute={recompute}", "--dropout=0.2") == pytest.approx(dropped, abs=0.02), recompute
    assert max(abs(one - other) for one, other in zip(kept, dropped, strict=True)) > 0.02, "dropout changes the losses"

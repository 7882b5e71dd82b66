"""What the README shows is what happens."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from pymesh3d.bench import tables
from pymesh3d.cli import parser
from pymesh3d.config import ModelConfig

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
PYTHON = re.findall(r"^```python\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)


def printed(code: str, ranks: int, folder: Path, *, gpus: bool = False) -> str:
    """What the script prints as that many ranks, without `gpus` on the CPU; as one it is started plainly, without torchrun or `launch`."""
    script = folder / "train.py"
    script.write_text(code)
    launcher = ["-c", f"import sys; from pymesh3d.launch import launch; sys.exit(launch([{str(script)!r}], {ranks}))"]
    done = subprocess.run(
        [sys.executable, *(launcher if ranks > 1 else [str(script)])],
        env={name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
        | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}  # threads wait for each other where cores are few
        | ({} if gpus else {"CUDA_VISIBLE_DEVICES": ""}),
        capture_output=True,
        text=True,
        timeout=110,
        cwd=folder,
    )
    assert done.returncode == 0 and (gpus or done.stderr == ""), done
    return done.stdout


def curve(out: str, mesh: str, steps: int) -> list[tuple[float, float]]:
    """Loss and norm of each step, after looking at the rest of what the training script printed."""
    assert out.startswith(f"{mesh} rank(s) on 1 host(s), cpu\n")
    found = re.findall(r"^step (\d+)  loss (\d\.\d{4})  gradient norm (\d+\.\d{3})$", out, re.MULTILINE)
    assert [int(step) for step, _, _ in found] == list(range(1, steps + 1))
    return [(float(loss), float(norm)) for _, loss, norm in found]


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[float, float]]:
    """All ten steps of the training script."""
    return curve(printed(PYTHON[0], 1, tmp_path_factory.mktemp("one")), "pp 1 x dp 1 x tp 1 = 1", 10)


def test_the_training_script_trains(one_process: list[tuple[float, float]]) -> None:
    losses = [loss for loss, _ in one_process]
    assert losses[0] == pytest.approx(5.55, abs=0.05) and losses[-1] < 4.8


@pytest.mark.parametrize(("ranks", "mesh"), [(2, "pp 1 x dp 1 x tp 2"), (4, "pp 2 x dp 1 x tp 2")])
def test_the_training_script_on_more_ranks(tmp_path: Path, one_process: list[tuple[float, float]], ranks: int, mesh: str) -> None:
    """The same numbers; three steps are enough to see it."""
    assert PYTHON[0].count("range(10)") == 1
    out = printed(PYTHON[0].replace("range(10)", "range(3)"), ranks, tmp_path)
    for (loss, norm), (expected_loss, expected_norm) in zip(curve(out, f"{mesh} = {ranks}", 3), one_process, strict=False):
        assert loss == pytest.approx(expected_loss, abs=2e-4) and norm == pytest.approx(expected_norm, abs=2e-3)


def test_the_layers_in_a_model_of_ones_own(tmp_path: Path) -> None:
    losses, weights = [], []
    for ranks in (1, 2):
        found = re.fullmatch(r"loss (0\.\d{4})  gradient norm 0\.\d{4}\n", printed(PYTHON[1], ranks, tmp_path))
        assert found
        losses.append(float(found[1]))
        weights.append(load_file(tmp_path / "weights.safetensors"))
    assert losses[0] == pytest.approx(losses[1], abs=2e-4) and losses[0] < 0.6
    unsharded = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
    for state in weights:
        unsharded.load_state_dict(state)
        x = torch.randn(32, 16, generator=torch.Generator().manual_seed(1))
        assert (unsharded(x) - x).square().mean().item() == pytest.approx(losses[0], abs=0.03), "the saved model is the trained one"
    assert len(PYTHON) == 2, "a new example needs a test"


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_layers_in_a_model_of_ones_own_on_gpus(tmp_path: Path, ranks: int) -> None:
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    found = re.search(r"^loss (0\.\d{4})  ", printed(PYTHON[1], ranks, tmp_path, gpus=True), re.MULTILINE)
    assert found and float(found[1]) < 0.6


def test_the_scripts_are_short() -> None:
    """The page promises a training script of about 20 lines."""
    assert len([line for line in PYTHON[0].splitlines() if line.strip()]) <= 20


def test_the_model_file_is_the_tiny_model(tmp_path: Path) -> None:
    (example,) = re.findall(r'`(\{"vocab".*?\})`', README)
    (tmp_path / "model.json").write_text(example)
    assert ModelConfig.load(str(tmp_path / "model.json")) == ModelConfig.load("tiny")
    assert len(json.loads(example)) == 6


def test_every_command_is_understood() -> None:
    spans = re.findall(r"`([^`\n]+)`", README) + re.findall(r"^(pymesh3d [^#\n]+)", README, re.MULTILINE)
    lines = [found[1] for span in spans if (found := re.match(r"(?:torchrun .*-m )?pymesh3d ((?:train|check|draw|bench|env)\b.*)", span))]
    assert len(lines) >= 8
    for line in lines:
        if "--help" not in line:
            parser().parse_args(shlex.split(line))
    rows = re.findall(r"^\| `pymesh3d (\w+)", README, re.MULTILINE)
    assert rows == ["train", "check", "draw", "bench", "env"], "every command stands in the table"


def test_every_target_and_test_exists() -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(re.findall(r"^make ([a-z-]+)", README, re.MULTILINE)) <= set(targets)
    paths = [path for command in re.findall(r"`pytest ([^`]+)`", README) for path in command.split()]
    assert len(paths) >= 4 and all((ROOT / path).exists() for path in paths)
    assert all((ROOT / path).exists() for path in re.findall(r"`((?:pymesh3d|tests|bench)/[\w/.]+)`", README))


def test_the_tables_are_those_of_the_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert tables.fill(README) == README, "run python -m pymesh3d.bench.tables"

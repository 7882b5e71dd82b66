"""What the README shows is what happens."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from pymesh3d.bench import tables
from pymesh3d.cli import parser
from pymesh3d.config import ModelConfig
from pymesh3d.launch import launch

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
PYTHON = re.findall(r"^```python\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)


@pytest.fixture(autouse=True)
def at_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scripts import pymesh3d of this checkout and run on the CPU, outside of any launch."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


def printed(code: str, ranks: int, folder: Path, capfd: pytest.CaptureFixture[str]) -> str:
    """What the script prints as that many ranks."""
    script = folder / "train.py"
    script.write_text(code)
    status = launch([str(script)], ranks)
    out, err = capfd.readouterr()
    assert (status, err) == (0, "")
    return out


def test_the_training_script(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """On 1, 2 and 4 ranks: the mesh that it says, and the same losses and norms. All ten steps on 1 rank, three on more."""
    curves = []
    assert PYTHON[0].count("range(10)") == 1
    for ranks, steps, mesh in ((1, 10, "pp 1 x dp 1 x tp 1"), (2, 3, "pp 1 x dp 1 x tp 2"), (4, 3, "pp 2 x dp 1 x tp 2")):
        out = printed(PYTHON[0].replace("range(10)", f"range({steps})"), ranks, tmp_path, capfd)
        assert out.startswith(f"{mesh} = {ranks} rank(s) on 1 host(s), cpu\n")
        found = re.findall(r"^step (\d+)  loss (\d\.\d{4})  gradient norm (\d+\.\d{3})$", out, re.MULTILINE)
        assert [int(step) for step, _, _ in found] == list(range(1, steps + 1))
        curves.append([(float(loss), float(norm)) for _, loss, norm in found])
    for curve in curves[1:]:
        for (loss, norm), (expected_loss, expected_norm) in zip(curve, curves[0], strict=False):
            assert loss == pytest.approx(expected_loss, abs=2e-4) and norm == pytest.approx(expected_norm, abs=2e-3)
    losses = [loss for loss, _ in curves[0]]
    assert losses[0] == pytest.approx(5.55, abs=0.05) and losses[-1] == min(losses) < 4.8


def test_the_layers_in_a_model_of_ones_own(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    one, two = (printed(PYTHON[1], ranks, tmp_path, capfd) for ranks in (1, 2))
    found = [re.fullmatch(r"loss (0\.\d{4})\n", out) for out in (one, two)]
    assert found[0] and found[1]
    assert float(found[0][1]) == pytest.approx(float(found[1][1]), abs=2e-4) and float(found[0][1]) < 0.6
    assert len(PYTHON) == 2, "a new example needs a test"


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


def test_the_tables_are_those_of_the_results() -> None:
    assert tables.fill(README) == README, "run python -m pymesh3d.bench.tables"

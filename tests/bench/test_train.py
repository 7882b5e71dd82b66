"""The benchmark of layouts: which it runs, what it makes of their logs, and that a failed run is not passed over."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from pymesh3d.bench import train

LINES = [{"step": n, "loss": 5.0 - n, "tps": 100.0 * n, "mfu": None, "memory_gib": 1.0 + (n == 2)} for n in range(1, 6)]


def test_every_layout_of_every_power_of_two() -> None:
    assert train.layouts(1) == [{"tp": 1, "pp": 1, "dp": 1}]
    found = [tuple(layout.values()) for layout in train.layouts(4)]
    assert found[0] == (1, 1, 1)
    assert set(found[1:4]) == {(2, 1, 1), (1, 2, 1), (1, 1, 2)}
    assert set(found[4:]) == {(4, 1, 1), (1, 4, 1), (1, 1, 4), (2, 2, 1), (2, 1, 2), (1, 2, 2)}
    assert len(found) == len(set(found)) == 10 and train.layouts(7) == train.layouts(4)
    assert all(list(layout) == ["tp", "pp", "dp"] for layout in train.layouts(8))


def test_a_row_is_of_the_steady_half_and_the_worst_step() -> None:
    layout = {"tp": 2, "pp": 1, "dp": 1}
    shifted = [{**line, "loss": line["loss"] + (0.5 if line["step"] == 3 else 0.0), "mfu": 0.1 * line["step"]} for line in LINES]
    assert train.compare(layout, LINES, LINES, (0.0, 0.0)) == {
        **layout,
        "tokens_per_s": 400.0,  # the median of steps 3, 4, 5
        "mfu": None,
        "memory_gib": 2.0,
        "loss_first": 4.0,
        "loss_last": 0.0,
        "largest_difference": 0.0,
        "mean_difference": 0.0,
        "within_bounds": True,
    }
    row = train.compare(layout, shifted, LINES, (0.5, 0.1))
    assert (row["largest_difference"], row["mean_difference"], row["mfu"], row["within_bounds"]) == (0.5, 0.1, 0.4, True)
    assert not train.compare(layout, shifted, LINES, (0.4, 0.1))["within_bounds"]
    assert not train.compare(layout, shifted, LINES, (0.5, 0.09))["within_bounds"]
    with pytest.raises(ValueError, match="longer"):
        train.compare(layout, LINES[:4], LINES, (1.0, 1.0))
    alone = train.compare(layout, LINES, None, (0.0, 0.0))
    assert alone["tokens_per_s"] == 400.0 and not {"largest_difference", "mean_difference", "within_bounds"} & alone.keys()


@pytest.mark.parametrize("loss", [None, math.nan, math.inf])
@pytest.mark.parametrize("step", [1, 5])
def test_a_loss_that_is_not_finite_is_a_failure(loss: float | None, step: int) -> None:
    """Of any run, that of one process included."""
    spoiled: list[dict[str, Any]] = [{**line, "loss": loss} if line["step"] == step else line for line in LINES]
    for reference in (LINES, spoiled):
        with pytest.raises(RuntimeError, match=rf"tp 2 x dp 1: the loss of step {step} is not finite"):
            train.compare({"tp": 2, "dp": 1}, spoiled, reference, (math.inf, math.inf))  # type: ignore[arg-type]


def test_one_run_is_the_main_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """On one process, for real; and one that the main job refuses."""
    monkeypatch.chdir(Path(__file__).parents[2])
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    small = ["--device=cpu", "--seq=16", "--global-batch-size=2", "--steps=2"]
    lines = train.run({"tp": 1, "pp": 1, "dp": 1}, small)
    assert [line["step"] for line in lines] == [1, 2] and [line["tokens"] for line in lines] == [32, 32]
    with pytest.raises(RuntimeError, match="ended with 2:\n\npymesh3d: --steps 0: steps must be a positive integer"):
        train.run({"tp": 1, "pp": 1, "dp": 1}, [*small, "--steps=0"])
    monkeypatch.setattr(train, "LIMIT", 0.1)
    with pytest.raises(RuntimeError, match=r"-m pymesh3d train --tp=1 .* took more than 0\.1 s$"):
        train.run({"tp": 1, "pp": 1, "dp": 1}, small)


def test_all_layouts_are_compared_with_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    asked = []

    def run(layout: dict[str, int], options: list[str]) -> list[dict[str, float]]:
        asked.append((tuple(layout.values()), options))
        return [{**line, "loss": line["loss"] + 5e-6 * (layout["tp"] - 1)} for line in LINES]  # type: ignore[dict-item]

    monkeypatch.setattr(train, "run", run)
    monkeypatch.setattr(train.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(train, "CPU_RANKS", 4)
    assert train.main(str(tmp_path / "train.json"), steps=5, options=("--seed=1",)) == 0
    options = ["--model=tiny", "--steps=5", "--dtype=float32", "--device=cpu", "--seed=1"]
    assert asked == [(tuple(layout.values()), options) for layout in train.layouts(4)]
    record = json.loads((tmp_path / "train.json").read_text())
    assert (record["options"], record["bounds"]) == (options, list(train.BOUNDS["float32"]))
    assert [row["largest_difference"] for row in record["rows"]] == pytest.approx(
        [5e-6 * (layout["tp"] - 1) for layout in train.layouts(4)]
    )
    assert record["losses"]["4x1x1"] == pytest.approx([line["loss"] + 1.5e-5 for line in LINES]) and len(record["losses"]) == 10
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "10 layouts of up to 4 ranks, 5 steps each"
    assert lines[1:3] == ["tp 1 x pp 1 x dp 1: loss from 4.0000 to 0.0000", "tp 1 x pp 1 x dp 2: loss from 4.0000 to 0.0000"]
    assert lines[11].strip() == "tiny, float32, 5 steps; each layout against one process"
    assert lines[-1].split() == ["4", "1", "1", "400", "2.00", "4.0000", "0.0000", "1.5e-05", "1.5e-05", "yes"]
    monkeypatch.setitem(train.BOUNDS, "float32", (1e-4, 1e-6))
    assert train.main(steps=5) == 1
    monkeypatch.undo()
    asked.clear()
    monkeypatch.setattr(train, "run", run)
    monkeypatch.setattr(train.torch.cuda, "is_available", lambda: False)
    assert train.main() == 0, "a small form"
    assert [(sizes, options[1]) for sizes, options in asked] == [(tuple(layout.values()), "--steps=20") for layout in train.layouts(2)]


@pytest.mark.parametrize("failing", [(1, 1, 1), (1, 2, 1)])
def test_a_layout_that_fails_is_named_and_the_others_go_on(
    failing: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whether it ends with an error or learns nothing; without one process to compare with, speed is all that rows tell."""

    def run(layout: dict[str, int], _: list[str]) -> list[dict[str, Any]]:
        if tuple(layout.values()) == failing:
            raise RuntimeError("ended with 1:\n[rank 0] out of memory")
        return [{**line, "loss": math.nan if layout["dp"] == 4 else line["loss"]} for line in LINES]

    monkeypatch.setattr(train, "run", run)
    monkeypatch.setattr(train.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(train, "CPU_RANKS", 4)
    file = tmp_path / "train.json"
    assert train.main(str(file), steps=5) == 1
    said, errors = capsys.readouterr()
    name = " x ".join(f"{axis} {size}" for axis, size in zip(("tp", "pp", "dp"), failing, strict=True))
    assert f"{name} failed: ended with 1:\n[rank 0] out of memory\n" in said
    assert "tp 1 x pp 1 x dp 4 failed: tp 1 x pp 1 x dp 4: the loss of step 1 is not finite" in said
    assert set(errors.removeprefix("failed: ").rstrip().split("; ")) == {name, "tp 1 x pp 1 x dp 4"}
    record = json.loads(file.read_text())
    good = [sizes for layout in train.layouts(4) if (sizes := tuple(layout.values())) not in (failing, (1, 1, 4))]
    assert [(row["tp"], row["pp"], row["dp"]) for row in record["rows"]] == good and len(record["losses"]) == len(good) == 8
    assert set(record["failed"]) == {name, "tp 1 x pp 1 x dp 4"}
    assert [row.get("within_bounds") for row in record["rows"]] == [None if failing == (1, 1, 1) else True] * 8
    assert "4 1 1 400 2.00 4.0000 0.0000" in " ".join(said.split())


def test_an_interrupted_run_leaves_what_it_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(layout: dict[str, int], _: list[str]) -> list[dict[str, Any]]:
        if layout["tp"] == 2:
            raise KeyboardInterrupt
        return LINES

    monkeypatch.setattr(train, "run", run)
    monkeypatch.setattr(train.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(train, "CPU_RANKS", 4)
    with pytest.raises(KeyboardInterrupt):
        train.main(str(tmp_path / "train.json"), steps=5)
    record = json.loads((tmp_path / "train.json").read_text())
    assert list(record["losses"]) == ["1x1x1", "1x1x2", "1x2x1"] and len(record["rows"]) == 3

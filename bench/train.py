"""Trains the same model on the same data in every layout of the GPUs that are here (or of 2 CPU processes) and compares the loss curves.

Each row is one run of `pymesh3d train`: throughput (median of the second half of the steps), memory of the fullest rank, and how far its
losses are from those of one process. Layouts round at different places and training amplifies that, in bf16 at once, in float32 after
some dozens of steps; BOUNDS says by how much curves may differ.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from . import report

STEPS = {"cuda": 100, "cpu": 20}
CPU_RANKS = 2
LIMIT = 600.0  # seconds that one run may take
COLUMNS = {
    "tp": ("tp", ""),
    "pp": ("pp", ""),
    "dp": ("dp", ""),
    "tokens_per_s": ("tokens/s", ",.0f"),
    "mfu": ("MFU", ".1%"),
    "memory_gib": ("GiB\na rank", ".2f"),
    "loss_first": ("first\nloss", ".4f"),
    "loss_last": ("last\nloss", ".4f"),
    "largest_difference": ("largest\ndifference", ".1e"),
    "mean_difference": ("mean\ndifference", ".1e"),
    "within_bounds": ("in\nbounds", ""),
}
# Over 100 steps of the default job, or fewer: the largest difference of one step's loss, and the mean difference.
BOUNDS = {"float32": (1e-4, 2e-5), "bfloat16": (1.5e-1, 2e-2)}


def layouts(world: int) -> list[dict[str, int]]:
    """One process first, then every tp x pp x dp of 2, 4, ... `world` ranks."""
    found = [{"tp": 1, "pp": 1, "dp": 1}]
    ranks = 2
    while ranks <= world:
        sizes = [n for n in range(1, ranks + 1) if ranks % n == 0]
        found += [{"tp": tp, "pp": pp, "dp": ranks // tp // pp} for tp in sizes for pp in sizes if ranks % (tp * pp) == 0]
        ranks *= 2
    return found


def run(layout: dict[str, int], options: list[str]) -> list[dict[str, float]]:
    """The lines that one training run logs. Raises RuntimeError for a run that fails or takes too long."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log.jsonl"
        axes = [f"--{axis}={size}" for axis, size in layout.items()]
        command = [sys.executable, "-m", "pymesh3d", "train", *axes, *options, f"--log-json={log}"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=False)
        except subprocess.TimeoutExpired as error:
            raise RuntimeError(f"{' '.join(command)} took more than {LIMIT:g} s") from error
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
        return [json.loads(line) for line in log.read_text().splitlines()]


def compare(
    layout: dict[str, int], lines: list[dict[str, float]], reference: list[dict[str, float]] | None, bounds: tuple[float, float]
) -> report.Row:
    """One row: speed and memory of a run, and its losses against the reference's, where there is one.

    Raises RuntimeError for a loss that is not finite.
    """
    for line in lines:
        if line["loss"] is None or not math.isfinite(line["loss"]):  # a log says null, and nan would be within any bounds
            raise RuntimeError(f"{_name(layout)}: the loss of step {line['step']} is not finite, so there is nothing to compare")
    steady = lines[len(lines) // 2 :]
    row: report.Row = {
        **layout,
        "tokens_per_s": statistics.median(line["tps"] for line in steady),
        "mfu": statistics.median(line["mfu"] for line in steady) if steady[0]["mfu"] else None,
        "memory_gib": max(line["memory_gib"] for line in lines),
        "loss_first": lines[0]["loss"],
        "loss_last": lines[-1]["loss"],
    }
    if reference is None:
        return row
    differences = [abs(line["loss"] - other["loss"]) for line, other in zip(lines, reference, strict=True)]
    return {
        **row,
        "largest_difference": max(differences),
        "mean_difference": statistics.fmean(differences),
        "within_bounds": max(differences) <= bounds[0] and statistics.fmean(differences) <= bounds[1],
    }


def _name(layout: dict[str, int]) -> str:
    return " x ".join(f"{axis} {size}" for axis, size in layout.items())


def main(json_file: str | None = None, *, model: str = "tiny", steps: int | None = None, options: tuple[str, ...] = ()) -> int:
    """Run all layouts, print the table, and write it with every loss to `json_file`. 1 if a row is outside its bounds, else 0.

    A layout that fails is named, and the others go on; then the status is 1 too.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype, world = ("bfloat16", torch.cuda.device_count()) if device == "cuda" else ("float32", CPU_RANKS)
    steps = STEPS[device] if steps is None else steps
    common = [f"--model={model}", f"--steps={steps}", f"--dtype={dtype}", f"--device={device}", *options]
    rows: list[report.Row] = []
    curves: dict[str, list[float]] = {}
    failed: list[str] = []
    reference: list[dict[str, float]] | None = None
    todo = layouts(world)
    columns = (TextColumn("training {task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("layouts"), TimeElapsedColumn())
    console = Console(highlight=False)
    console.print(f"{len(todo)} layouts of up to {world} ranks, {steps} steps each")
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=len(todo))
        for layout in todo:
            bar.update(task, description=_name(layout))
            try:
                lines = run(layout, common)
                rows.append(compare(layout, lines, lines if layout == todo[0] else reference, BOUNDS[dtype]))
            except RuntimeError as error:
                failed.append(_name(layout))
                console.print(f"{failed[-1]} failed: {error}", markup=False, soft_wrap=True)
            else:
                reference = lines if layout == todo[0] else reference
                curves["x".join(map(str, layout.values()))] = [line["loss"] for line in lines]
                console.print(f"{_name(layout)}: loss from {lines[0]['loss']:.4f} to {lines[-1]['loss']:.4f}")
            if json_file:  # each time, so that a run that is interrupted leaves what it measured
                report.write("train", rows, Path(json_file), options=common, bounds=BOUNDS[dtype], losses=curves, failed=failed)
            bar.advance(task)
    console.print(report.table(rows, COLUMNS, f"{model}, {dtype}, {steps} steps; each layout against one process"))
    if failed:
        print(f"failed: {'; '.join(failed)}", file=sys.stderr)
    return 0 if not failed and all(row["within_bounds"] for row in rows) else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--steps", type=int)
    parser.add_argument("options", nargs="*", help="further options of `pymesh3d train`, after --")
    given = parser.parse_args()
    sys.exit(main(given.json, model=given.model, steps=given.steps, options=tuple(given.options)))

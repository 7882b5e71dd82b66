"""How products that talk to other ranks in one kernel are timed against torch's product and the collective, and against torch's own.

Sizes are those of the layers of models: M tokens over all ranks; what belongs to a backward pass has its weights turned. All take turns,
eager, and captured in a CUDA graph.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
import os
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from rich.progress import track

from ..axis import Axis
from ..comm.agree import exchange_numbers
from ..comm.workspace import Workspace
from ..errors import ConfigError
from ..launch import launch
from ..mesh import Mesh, init_mesh
from ..ops.choose import IMPLEMENTATIONS, can, keep
from ..ops.fused import FUSED
from . import picture, report
from .timing import barrier, captured, milliseconds

TOKENS = {"cuda": (512, 2048, 8192, 16384), "cpu": (32,)}
COLUMN = ("qkv", "up", "head")  # layers that gather tokens before their product; others scatter them after it. Backward it is the reverse
LAYERS = {  # out features, in features; qkv and up are of all matrices that share an input
    "tiny": {"up": (24, 16), "down": (24, 16)},
    "1b": {"qkv": (3072, 2048), "out": (2048, 2048), "up": (16384, 2048), "down": (2048, 8192), "head": (32768, 2048)},
    "llama-8b": {"qkv": (6144, 4096), "out": (4096, 4096), "up": (28672, 4096), "down": (4096, 14336)},
    "llama-70b": {"qkv": (10240, 8192), "out": (8192, 8192), "up": (57344, 8192), "down": (8192, 28672)},
}
SHAPES = {"cuda": "1b,llama-8b,llama-70b", "cpu": "tiny"}
ROUNDS = {"cuda": 50, "cpu": 1}
MOST, LEAST, ENOUGH = 20, 2, 2e12  # calls that are timed as one: so many operations, that the host's head start does not count
LINK = 64 << 20  # bytes that are copied to measure the link
COLUMNS = {
    "layer": ("", ""),
    "tokens": ("M", ","),
    "cols": ("N", ","),
    "depth": ("K", ","),
    "mode": ("", ""),
    "product_us": ("product\nalone, us", ",.1f"),
    "floor_us": ("floor,\nus", ",.1f"),
    "unfused_us": ("product and\ncollective, us", ",.1f"),
    "torch_us": ("torch's\nfused, us", ",.1f"),
    "ours_us": ("ours,\nus", ",.1f"),
    "ours": ("", ""),
    "speed": ("speed, best\nother = 1", ".2f"),
    "of_floor": ("time,\nfloor = 1", ".2f"),
    "hidden": ("hidden of\nthe rest", ".0%"),
}


class Cell(NamedTuple):
    """A product of M tokens: [M, K] times weights [N, K]^T, over all ranks; `turned`: the transpose of the weights is what is kept."""

    layer: str
    tokens: int
    cols: int
    depth: int
    turned: bool

    def over(self, ranks: int, gathers: bool) -> Cell:
        """The largest product within it of which each of so many ranks has an equal part."""
        tokens, cols, depth = (size // ranks * ranks for size in (self.tokens, self.cols, self.depth))
        return self._replace(tokens=tokens, cols=cols) if gathers else self._replace(tokens=tokens, depth=depth)


@dataclasses.dataclass(frozen=True)
class Op:
    """`name`: as in `FUSED`. `gathers`: its collective comes before the product, whose rows it gathers, and each rank has a part of N;
    otherwise it comes after, and each has a part of K. `sent`: the share of the gathered rows, or of the result, that a rank receives.
    """

    name: str
    gathers: bool
    sent: Callable[[int], float]
    collective: Callable[[torch.Tensor, Axis], Any]
    torch_fused: Callable[[torch.Tensor, torch.Tensor, str], torch.Tensor] | None = None


def cells(op: Op, models: Sequence[str], tokens: Sequence[int]) -> Iterator[Cell]:
    """Those of the layers of these models in which the op occurs."""
    for model in models:
        for layer, (out, into) in LAYERS[model].items():
            for count in tokens:
                if (layer in COLUMN) == op.gathers:
                    yield Cell(f"{model} {layer}", count, out, into, False)
                else:
                    yield Cell(f"{model} {layer}, backward", count, into, out, True)


def measure(op: Op, mesh: Mesh, cell: Cell, shares: dict[str, Workspace], link: float | None, rounds: int) -> list[report.Row]:
    """A row for eager calls and, on GPUs, one for a graph: medians in us, in bfloat16, the largest over ranks."""
    axis, ranks = mesh.tp, mesh.tp.size
    cell = cell.over(ranks, op.gathers)
    rows = cell.tokens // ranks if op.gathers else cell.tokens
    cols, depth = (cell.cols // ranks, cell.depth) if op.gathers else (cell.cols, cell.depth // ranks)
    a = torch.randn(rows, depth, device=mesh.device).to(torch.bfloat16)
    b = torch.randn(depth, cols, device=mesh.device).to(torch.bfloat16).t()
    b = b if cell.turned else b.contiguous()
    whole = op.collective(a, axis).wait() if op.gathers else a @ b.t()
    runs: dict[str, Callable[[], object]] = {
        "product": lambda: (whole if op.gathers else a) @ b.t(),
        "collective": lambda: op.collective(a if op.gathers else whole, axis).wait(),
        "unfused": (lambda: op.collective(a, axis).wait() @ b.t()) if op.gathers else (lambda: op.collective(a @ b.t(), axis).wait()),
    }
    if op.torch_fused is not None and mesh.device.type == "cuda":
        runs["torch"] = functools.partial(op.torch_fused, a, b.t(), axis.group.group_name)
    able = [name for name in IMPLEMENTATIONS if can(name, op.name, (rows, cols, depth), a, ranks)]
    ours = [name for name in able if name != "plain"] or able  # the plain kernel is for GPUs that have no other
    for name in ours:
        if name not in shares:
            shares[name] = Workspace(f"{op.name} ({name})", axis, mesh.device)
        # the backward pass of a row-parallel layer multiplies the gathered rows once more
        runs[name] = functools.partial(FUSED[op.name], name, shares[name], axis, a, b, **({"keep": cell.turned} if op.gathers else {}))
    if cell.turned and not op.gathers:
        runs |= _with_weights(op, axis, a, b, {name: runs[name] for name in ours})
    received = op.sent(ranks) * whole.numel() * whole.element_size()
    repeats = max(LEAST, min(MOST, int(ENOUGH / (2 * cell.tokens * cell.cols * cell.depth / ranks)))) if link else 1
    found: list[report.Row] = []
    for mode in ("eager", "graph") if mesh.device.type == "cuda" else ("eager",):
        times = _medians(runs, mesh, mode, repeats, rounds)
        floor = max(times["product"], received / link * 1e6 if link else 0.0)
        row: dict[str, Any] = {"op": op.name, "ranks": ranks, **cell._asdict(), "mode": mode, "floor_us": floor}
        row |= {"rows": rows, "rank_cols": cols, "rank_depth": depth}
        row |= {f"{name}_us": time for name, time in times.items()}
        if ours:
            best = min(ours, key=times.__getitem__)
            other = min(times[name] for name in ("unfused", "torch") if name in times)
            row |= {"ours": best, "ours_us": times[best], "speed": other / times[best], "of_floor": times[best] / floor}
            row["hidden"] = (other - times[best]) / (other - floor) if other >= 1.1 * floor else None
        found.append(row)
    for share in shares.values():
        share.check()
    return found


def _with_weights(
    op: Op, axis: Axis, a: torch.Tensor, b: torch.Tensor, ours: dict[str, Callable[[], object]]
) -> dict[str, Callable[[], object]]:
    """What the backward pass of a column-parallel layer does: the product for its weights follows, and hides the collective, if there is
    one.
    """
    x = torch.randn(a.shape[0], b.shape[0], device=a.device).to(a.dtype)

    def unfused() -> object:
        pending = op.collective(a @ b.t(), axis)
        return a.t() @ x, pending.wait()

    return {"unfused_layer": unfused} | {f"{name}_layer": functools.partial(_both, run, a, x) for name, run in ours.items()}


def _both(run: Callable[[], object], a: torch.Tensor, x: torch.Tensor) -> object:
    return run(), a.t() @ x


def _medians(runs: dict[str, Callable[[], object]], mesh: Mesh, mode: str, repeats: int, rounds: int) -> dict[str, float]:
    """In us of one call, by turns."""
    calls: dict[str, Callable[[], None]] = {name: functools.partial(_repeated, run, repeats) for name, run in runs.items()}
    for call in calls.values():
        call()  # compiles, and makes what ranks share
    if mode == "graph":
        calls = {name: captured(call) for name, call in calls.items()}
    times: dict[str, list[float]] = {name: [] for name in runs}
    barrier(mesh)
    for _ in range(rounds + 1):
        for name, call in calls.items():
            times[name].append(milliseconds(call, mesh.device.type, head_start=False) / repeats * 1e3)
    medians = torch.tensor([statistics.median(taken[1:]) for taken in times.values()], dtype=torch.float64)
    return dict(zip(times, exchange_numbers(medians, mesh, "comparing times").amax(0).tolist(), strict=True))


def _repeated(run: Callable[[], object], repeats: int) -> None:
    for _ in range(repeats):
        run()


def link_rate(mesh: Mesh) -> float | None:
    """Bytes in a second that a copy engine fetches from the next rank, while all do; None where there are no GPUs."""
    if mesh.device.type != "cuda":
        return None
    share = Workspace("the link", mesh.tp, mesh.device)
    share.slots(LINK // 2, 1)
    here, there = (share.parts[(mesh.tp.rank + turn) % mesh.tp.size] for turn in (0, 1))
    mine = torch.empty_like(here)
    seconds = _medians({"copy": lambda: mine.copy_(there)}, mesh, "eager", 1, 10)["copy"] / 1e6
    return LINK / seconds


def choices(rows: Sequence[report.Row]) -> list[dict[str, Any]]:
    """What `ops.choose` keeps: for each product in a graph, the fastest of those that layers can use, with what follows it in a layer."""
    found = []
    for row in rows:
        if row["mode"] == "graph":
            kind = "layer_us" if "unfused_layer_us" in row else "us"
            times = {name: row.get(f"{'unfused' if name == 'torch' else name}_{kind}") for name in IMPLEMENTATIONS}
            best = min(times, key=lambda name: float(times[name] or math.inf))
            sizes = {"rows": row["rows"], "cols": row["rank_cols"], "depth": row["rank_depth"]}
            kept = {key: row[key] for key in ("op", "ranks", "turned")}
            found.append({**kept, "card": torch.cuda.get_device_name(), **sizes, "best": best})
    return found


def main(
    op: Op,
    json_file: str | None = None,
    *,
    tp: int | None = None,
    shapes: str | None = None,
    rounds: int = 0,
    tuning: bool = False,
    out: str = "",
) -> int:
    """Measures over `tp` GPUs of this machine (by default all), or as many processes on the CPU (2); prints the table, writes `json_file`
    and draws `out`. `shapes`: names of LAYERS, with commas between them. `tuning`: the layers shall choose what was the fastest. Raises
    ConfigError.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    here = torch.cuda.device_count() if device == "cuda" else 8
    world = (here if device == "cuda" else 2) if tp is None else tp
    if not 2 <= world <= min(here, 8):
        raise ConfigError(f"a product over {world} ranks", f"2 to {min(here, 8)} can talk to each other here", "Use --tp 2")
    names = report.chosen("shapes", shapes, LAYERS, SHAPES[device])
    if tuning and device == "cpu":
        raise ConfigError("--tune", "there is no GPU whose kernels could be chosen", "Leave it out")
    if device == "cpu" and names != [SHAPES[device]]:
        raise ConfigError(f"--shapes {shapes}", "on a CPU the interpreter would take hours", f"Use --shapes {SHAPES[device]}")
    arguments = ["--shapes", ",".join(names), "--rounds", str(rounds or ROUNDS[device])]
    arguments += [*(["--json", json_file] if json_file else []), *(["--out", out] if out else []), *(["--tune"] if tuning else [])]
    return launch(["-m", f"pymesh3d.bench.{op.name}", *arguments], world)


def run_ranks(op: Op, doc: str | None) -> None:
    """What each rank does."""
    parser = argparse.ArgumentParser(prog=f"python -m pymesh3d.bench.{op.name}", description=(doc or "").splitlines()[0])
    parser.add_argument("--json", metavar="FILE", help="also write the measurements here")
    parser.add_argument("--out", metavar="FILE", help="also draw a picture")
    parser.add_argument("--shapes", required=True, help=f"of {', '.join(LAYERS)}, with commas between them")
    parser.add_argument("--rounds", type=int, required=True, help="how often each takes its turn")
    parser.add_argument("--tune", action="store_true", help="let the layers choose on this machine what was the fastest")
    given = parser.parse_args()
    mesh = init_mesh(tp=-1, dp=1)
    shares: dict[str, Workspace] = {}
    rate = link_rate(mesh)
    rows: list[report.Row] = []
    todo = list(cells(op, given.shapes.split(","), TOKENS[mesh.device.type]))
    for cell in track(todo, op.name, disable=mesh.rank != 0 or not sys.stderr.isatty()):
        rows += measure(op, mesh, cell, shares, rate, given.rounds)
    if mesh.rank == 0:
        title = f"{op.name.replace('_', ' ')} over {mesh.tp.size} ranks on {mesh.device.type}, in bfloat16"
        if rate:
            title += f"; the link carries {rate / 1e9:.0f} GB/s"
        report.publish(op.name, rows, COLUMNS, title, given.json, rounds=given.rounds)
        if given.out:
            picture.save(rows, given.out, title)
        if given.tune:
            keep(choices(rows))
    mesh.close()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may still let go of Python objects

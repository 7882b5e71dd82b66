"""How products that talk to other ranks in one kernel are timed against torch's product and the collective: by turns, eager."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ..axis import Axis
from ..comm.symmetric import SymmetricBuffer
from ..launch import launch
from ..mesh import Mesh, init_mesh
from ..triton_kernels import backend
from ..triton_kernels.matmul_hopper import fits
from ..triton_kernels.matmul_reduce_scatter import Slots
from ..triton_kernels.signals import Counters
from . import report
from .p2p import timed

ROUNDS = {"cuda": 50, "cpu": 1}
COLUMNS = {
    "tokens": ("M", ","),
    "cols": ("N", ","),
    "depth": ("K", ","),
    "plain_us": ("one plain\nkernel, us", ",.0f"),
    "hopper_us": ("one for\nHopper, us", ",.0f"),
    "unfused_us": ("product and\ncollective, us", ",.0f"),
    "product_us": ("product\nalone, us", ",.0f"),
    "collective_us": ("collective\nalone, us", ",.0f"),
    "speed": ("speed,\nboth = 1", ".2f"),
}
# M, N, K over all ranks: the projections down, or up, of the 8B and the 70B model
DOWN = {"cuda": [(m, *size) for size in ((4096, 14336), (8192, 28672)) for m in (512, 2048, 8192)], "cpu": [(32, 24, 16)]}
UP = {"cuda": [(m, *size) for size in ((28672, 4096), (57344, 8192)) for m in (512, 2048, 8192)], "cpu": [(32, 24, 16)]}

Slotted = Callable[[torch.Tensor, torch.Tensor, SymmetricBuffer, Slots, Counters, Axis], torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Form:
    """A kernel: `needed(ranks, M, N, K)` is the size and length of its slots, `run` starts it, `fits` says whether it can."""

    needed: Callable[[int, int, int, int], tuple[int, int]]
    run: Slotted
    fits: Callable[[torch.Tensor, torch.Tensor], bool]


@dataclasses.dataclass(frozen=True)
class Op:
    """`name`: of the benchmark's file. `gathers`: its collective comes before the product, whose rows it gathers, and each rank has a part
    of N; otherwise it comes after, and each has a part of K."""

    name: str
    gathers: bool
    sizes: Mapping[str, Sequence[tuple[int, int, int]]]
    collective: Callable[[torch.Tensor, Axis], Any]
    forms: Mapping[str, Form]


def measure(op: Op, mesh: Mesh, tokens: int, cols: int, depth: int) -> report.Row:
    """Medians in us, in bfloat16."""
    axis, ranks = mesh.tp, mesh.tp.size
    rows, across, along = (tokens // ranks, cols // ranks, depth) if op.gathers else (tokens, cols, depth // ranks)
    a, b = (torch.randn(size, along, device=mesh.device).to(torch.bfloat16) for size in (rows, across))
    whole = op.collective(a, axis).wait() if op.gathers else a @ b.t()
    runs: dict[str, Callable[[], object]] = {
        "unfused": (lambda: op.collective(a, axis).wait() @ b.t()) if op.gathers else (lambda: op.collective(a @ b.t(), axis).wait()),
        "product": lambda: (whole if op.gathers else a) @ b.t(),
        "collective": lambda: op.collective(a if op.gathers else whole, axis).wait(),
    }
    counters = {name: Counters.on(mesh.device) for name, form in op.forms.items() if backend.available and form.fits(a, b)}
    for name, counts in counters.items():
        size, length = op.forms[name].needed(ranks, tokens, cols, depth)
        size = -(-size // 512) * 512
        memory, flags = SymmetricBuffer(2 * size, axis, mesh.device), SymmetricBuffer(4 * ranks * length, axis, mesh.device)
        slots = Slots(memory.addresses, flags.addresses, size, length)
        runs[name] = functools.partial(_kept, op.forms[name].run, a, b, memory, slots, counts, axis, flags)
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(ROUNDS[mesh.device.type] + 1):
        for name, run in runs.items():
            times[name].append(timed(run, mesh, iterations=1)[0])
    for counts in counters.values():
        assert counts.missing() is None, f"rank {mesh.rank} has waited in vain for {counts.missing()}"
    medians = {f"{name}_us": statistics.median(taken[1:]) for name, taken in times.items()}  # the first compiles and warms up
    row: dict[str, str | int | float | bool | None] = {"ranks": ranks, "tokens": tokens, "cols": cols, "depth": depth, **medians}
    if counters:
        row["speed"] = medians["unfused_us"] / min(medians[f"{name}_us"] for name in counters)
    return row


def _kept(
    run: Slotted, a: torch.Tensor, b: torch.Tensor, memory: SymmetricBuffer, slots: Slots, counters: Counters, axis: Axis, _: object
) -> torch.Tensor:
    """`run`, with all that it needs kept alive."""
    return run(a, b, memory, slots, counters, axis)


def plain(launch: Callable[..., torch.Tensor], needed: Callable[[int, int, int, int], tuple[int, int]]) -> Form:
    """A plain kernel, which takes anything."""
    return Form(needed, lambda a, b, memory, slots, counters, axis: launch(a, b, axis.rank, slots, counters), lambda a, b: True)


def hopper(launch: Callable[..., torch.Tensor], needed: Callable[[int, int, int, int], tuple[int, int]], least: int = 1) -> Form:
    """A kernel in Gluon, for at least so many rows of a."""

    def run(a: torch.Tensor, b: torch.Tensor, memory: SymmetricBuffer, slots: Slots, counters: Counters, axis: Axis) -> torch.Tensor:
        parts = [memory.part(rank, (2 * slots.size,), torch.uint8) for rank in range(axis.size)]
        return launch(a, b, axis.rank, slots, parts, counters)

    def can(a: torch.Tensor, b: torch.Tensor) -> bool:
        return a.is_cuda and torch.cuda.get_device_capability(a.device) == (9, 0) and a.shape[0] >= least and fits(a, b)

    return Form(needed, run, can)


def main(op: Op, json_file: str | None = None) -> int:
    """Measures over all GPUs of this machine, or 2 processes on the CPU; prints the table and writes `json_file`."""
    world = torch.cuda.device_count() if torch.cuda.is_available() else 2
    return launch(["-m", f"pymesh3d.bench.{op.name}", *(["--json", json_file] if json_file else [])], world)


def run_ranks(op: Op, doc: str | None) -> None:
    """What each rank does."""
    parser = argparse.ArgumentParser(prog=f"python -m pymesh3d.bench.{op.name}", description=(doc or "").splitlines()[0])
    parser.add_argument("--json", metavar="FILE", help="also write the measurements here")
    json_file = parser.parse_args().json
    mesh = init_mesh(tp=-1, dp=1)
    rows = [measure(op, mesh, *size) for size in op.sizes[mesh.device.type]]
    if mesh.rank == 0:
        title = f"{op.name.replace('_', ' ')} over {mesh.tp.size} ranks on {mesh.device.type}, in bfloat16"
        report.publish(op.name, rows, COLUMNS, title, json_file)
    mesh.close()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may still let go of Python objects

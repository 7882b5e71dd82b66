"""How products that talk to other ranks in one kernel are timed against torch's product and the collective: by turns, eager."""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch

from ..axis import Axis
from ..comm.symmetric import SymmetricBuffer
from ..launch import launch
from ..mesh import Mesh, init_mesh
from ..triton_kernels import backend
from ..triton_kernels.matmul_reduce_scatter import Slots
from ..triton_kernels.signals import Counters
from . import report
from .p2p import timed

ROUNDS = {"cuda": 50, "cpu": 1}
COLUMNS = {
    "tokens": ("M", ","),
    "cols": ("N", ","),
    "depth": ("K,\nall ranks", ","),
    "fused_us": ("one\nkernel, us", ",.0f"),
    "unfused_us": ("product and\ncollective, us", ",.0f"),
    "product_us": ("product\nalone, us", ",.0f"),
    "collective_us": ("collective\nalone, us", ",.0f"),
    "speed": ("speed,\nboth = 1", ".2f"),
}
# M, N, K over all ranks: the projection down of the 8B and the 70B model
SIZES = {"cuda": [(m, *size) for size in ((4096, 14336), (8192, 28672)) for m in (512, 2048, 8192)], "cpu": [(32, 24, 16)]}


@dataclasses.dataclass(frozen=True)
class Op:
    """`name`: of the benchmark's file. `needed(ranks, M, N, dtype)`: the size and length of its slots. `kernel` runs it as the others do,
    `collective` what follows the product otherwise."""

    name: str
    needed: Callable[[int, int, int, torch.dtype], tuple[int, int]]
    kernel: Callable[[torch.Tensor, torch.Tensor, int, Slots, Counters], torch.Tensor]
    collective: Callable[[torch.Tensor, Axis], Any]


def measure(op: Op, mesh: Mesh, tokens: int, cols: int, depth: int) -> report.Row:
    """Medians in us, in bfloat16."""
    axis, dtype = mesh.tp, torch.bfloat16
    a, b = (torch.randn(size, depth // axis.size, device=mesh.device).to(dtype) for size in (tokens, cols))
    whole = a @ b.t()
    runs: dict[str, Callable[[], object]] = {
        "unfused": lambda: op.collective(a @ b.t(), axis).wait(),
        "product": lambda: a @ b.t(),
        "collective": lambda: op.collective(whole, axis).wait(),
    }
    counters = Counters.on(mesh.device)
    if backend.available:
        size, length = op.needed(axis.size, tokens, cols, dtype)
        memory, flags = SymmetricBuffer(2 * size, axis, mesh.device), SymmetricBuffer(4 * axis.size * length, axis, mesh.device)
        slots = Slots(memory.addresses, flags.addresses, size, length)
        runs["fused"] = lambda: op.kernel(a, b, axis.rank, slots, counters)
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(ROUNDS[mesh.device.type] + 1):
        for name, run in runs.items():
            times[name].append(timed(run, mesh, iterations=1)[0])
    assert counters.missing() is None, f"rank {mesh.rank} has waited in vain for {counters.missing()}"
    medians = {f"{name}_us": statistics.median(taken[1:]) for name, taken in times.items()}  # the first compiles and warms up
    row: dict[str, str | int | float | bool | None] = {"ranks": axis.size, "tokens": tokens, "cols": cols, "depth": depth, **medians}
    if "fused" in runs:
        row["speed"] = medians["unfused_us"] / medians["fused_us"]
    return row


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
    rows = [measure(op, mesh, *size) for size in SIZES[mesh.device.type]]
    if mesh.rank == 0:
        title = f"{op.name.replace('_', ' ')} over {mesh.tp.size} ranks on {mesh.device.type}, in bfloat16"
        report.publish(op.name, rows, COLUMNS, title, json_file)
    mesh.close()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may still let go of Python objects

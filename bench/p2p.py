"""Times a pipeline's sends and receives over our NCCL bindings against torch's `batch_isend_irecv`, in one run, taking turns.

Each rank of a ring sends to the next and receives from the one before, as stages do in the steady state; `one way` has rank 0 send to
rank 1 alone. GB/s are of one direction. Host time is what it costs to start a send and a receive and to wait for what is received.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from ..axis import Axis
from ..comm import native
from ..comm.agree import exchange_numbers
from ..comm.links import Expected, Link
from ..comm.p2p import open_links
from ..errors import ConfigError
from ..launch import launch
from ..mesh import Mesh, init_mesh
from . import report
from .timing import barrier

ROUNDS = 24
WARM = 5  # transfers before the clock starts: a GPU that was idle takes its first launches slowly, and stages never wait
SIZES = {"cuda": [2**16, 2**20, 2**23, 2**25, 2**27], "cpu": [2**10, 2**16]}  # bytes
ITERATIONS = {"cuda": 20, "cpu": 3}
COLUMNS = {
    "pattern": ("", ""),
    "bytes": ("bytes", ","),
    "nccl_us": ("ours,\nus", ",.1f"),
    "torch_us": ("torch's,\nus", ",.1f"),
    "nccl_gb_s": ("ours,\nGB/s", ",.1f"),
    "torch_gb_s": ("torch's,\nGB/s", ",.1f"),
    "nccl_host_us": ("ours, us\nof the host", ",.1f"),
    "torch_host_us": ("torch's, us\nof the host", ",.1f"),
}


def exchange_over(after: Link | None, before: Link | None, data: torch.Tensor, receives: bool) -> Callable[[], None]:
    """To the rank after and from the rank before. Between two ranks that is one link, which takes both ways in one transfer."""
    expected = Expected(tuple(data.shape), data.dtype, 0)  # as stages have it: torch.Size would cost the host 2 us more

    def run() -> None:
        if after is not None and after is before and receives:
            after.send(data, 0, expected)
        else:
            if after is not None:
                after.send(data, 0)
            if before is not None and receives:
                before.post(expected)
        if before is not None and receives:
            before.take()

    return run


def exchange_by_torch(line: Axis, to: int | None, source: int | None, data: torch.Tensor) -> Callable[[], None]:
    """The same by `batch_isend_irecv`."""

    def run() -> None:
        operations = []
        if to is not None:
            operations.append(dist.P2POp(dist.isend, data, to, group=line.group))
        if source is not None:
            operations.append(dist.P2POp(dist.irecv, torch.empty_like(data), source, group=line.group))
        for work in dist.batch_isend_irecv(operations) if operations else []:
            work.wait()

    return run


def timed(run: Callable[[], object], mesh: Mesh, iterations: int) -> tuple[float, float]:
    """Microseconds of one run, of the device and of the host, the largest over ranks."""
    on_gpu = mesh.device.type == "cuda"
    barrier(mesh)
    for _ in range(WARM):
        run()
    if on_gpu:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
    began = time.perf_counter()
    for _ in range(iterations):
        run()
    host = (time.perf_counter() - began) / iterations * 1e6
    device = host
    if on_gpu:
        end.record()
        end.synchronize()
        device = begin.elapsed_time(end) / iterations * 1e3
    both = exchange_numbers(torch.tensor([device, host], dtype=torch.float64), mesh, "comparing times").amax(0).tolist()
    return both[0], both[1]


def measure(mesh: Mesh) -> list[report.Row]:
    """Medians over rounds in which ours and torch's take turns."""
    world, rank = mesh.layout.world, mesh.rank
    after, before = (rank + 1) % world, (rank - 1) % world
    links: list[Link | None] = []
    if mesh.device.type == "cuda" and not native.no_nccl():
        ring = [[sender, (sender + 1) % world] for sender in range(world if world > 2 else 1)]
        links = open_links(mesh, [[pair] for pair in ring], "nccl")
    rows: list[report.Row] = []
    kind = mesh.device.type
    for pattern in ("ring", "one way"):
        sends, receives = (True, True) if pattern == "ring" else (rank == 0, rank == 1)
        for size in SIZES[kind]:
            data = torch.ones(size, dtype=torch.uint8, device=mesh.device)
            runs = {"torch": exchange_by_torch(mesh.all, after if sends else None, before if receives else None, data)}
            if links:
                to, source = links[rank % len(links)], links[before % len(links)]
                runs["nccl"] = exchange_over(to if sends else None, source if receives else None, data, receives)
            times: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
            for _ in range(ROUNDS + 1):
                for name, run in runs.items():
                    times[name].append(timed(run, mesh, ITERATIONS[kind]))
            row: dict[str, str | int | float | bool | None] = {"pattern": pattern, "bytes": size, "ranks": world}
            for name, taken in times.items():
                device = statistics.median(device for device, _ in taken[1:])
                row |= {f"{name}_us": device, f"{name}_gb_s": size / device / 1e3}
                row[f"{name}_host_us"] = statistics.median(host for _, host in taken[1:])
            rows.append(row)
    return rows


def run_ranks(json_file: str | None) -> int:
    """What each rank does."""
    mesh = init_mesh(pp=-1, dp=1)
    rows = measure(mesh)
    if mesh.rank == 0:
        report.publish("p2p", rows, COLUMNS, f"Sends and receives between {mesh.layout.world} ranks on {mesh.device.type}", json_file)
    mesh.close()
    return 0


def main(json_file: str | None = None) -> int:
    """Measures between all GPUs of this machine, or between 2 processes on the CPU; prints the table and writes `json_file`."""
    world = torch.cuda.device_count() if torch.cuda.is_available() else 2
    if world < 2:
        raise ConfigError("1 GPU", "messages go between two", "Run it where there are more, or on the CPU with CUDA_VISIBLE_DEVICES=")
    return launch(["-m", "pymesh3d.bench.p2p", *(["--json", json_file] if json_file else [])], world)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m pymesh3d.bench.p2p", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", metavar="FILE", help="also write the measurements here")
    status = run_ranks(parser.parse_args().json)
    sys.stdout.flush()
    os._exit(status)  # gloo's threads may still let go of Python objects

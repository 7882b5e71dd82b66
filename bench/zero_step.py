"""Times a ZeRO step, reduction, AdamW and the new parameters to all ranks, by kernels over shared memory and by NCCL with torch's AdamW."""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from ..comm.agree import exchange_numbers
from ..comm.collectives import all_gather, gather_rows, reduce_scatter
from ..comm.symmetric import SymmetricBuffer
from ..launch import launch
from ..mesh import Mesh, init_mesh
from ..triton_kernels.signals import Counters, meet
from ..triton_kernels.zero_reduce import TILE, reduce_shard
from ..triton_kernels.zero_step import AdamW, update
from . import report
from .timing import barrier, captured, milliseconds

MI = 2**20
NUMBERS = {"cuda": (64 * MI, 512 * MI, 1024 * MI, 2048 * MI), "cpu": (2**14,)}  # parameters of a model
BUCKET = {"cuda": 32 * MI, "cpu": 2**13}
ROUNDS = {"cuda": 10, "cpu": 1}
PROGRAMS = {"cuda": 528, "cpu": 2}
LINK = 64 * MI  # bytes that are copied to measure the link
RULE = AdamW(lr=1e-4, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, step=10)
COLUMNS = {
    "parameters_mi": ("parameters,\nMi", ","),
    "mode": ("", ""),
    "floor_us": ("floor,\nus", ",.0f"),
    "serial_us": ("NCCL,\nserial, us", ",.0f"),
    "overlapped_us": ("NCCL by buckets,\noverlapped, us", ",.0f"),
    "one_pass_us": ("ours,\nus", ",.0f"),
    "clipped_us": ("ours,\nclipped, us", ",.0f"),
    "of_serial": ("speed,\nserial = 1", ".2f"),
    "of_overlapped": ("speed,\noverlapped = 1", ".2f"),
    "of_floor": ("time,\nfloor = 1", ".2f"),
    "clipping": ("clipping\ntakes", "+.0%"),
}


class Model:
    """Gradients and parameters in bfloat16 on every rank, and a shard of the rest in float32, all in buckets."""

    def __init__(self, mesh: Mesh, numbers: int) -> None:
        axis, device = mesh.dp, mesh.device
        self.mesh, self.axis, self.device = mesh, axis, device
        self.bucket = BUCKET[device.type]
        self.buckets = numbers // self.bucket
        self.shard = self.bucket // axis.size
        self._grads, self._weights = (SymmetricBuffer(2 * numbers, axis, device) for _ in range(2))
        self.grads, self.weights = (memory.part(axis.rank, (numbers,), torch.bfloat16) for memory in (self._grads, self._weights))
        self.grads.normal_(0, 1e-3, generator=torch.Generator(device).manual_seed(axis.rank))
        self.masters, self.averages, self.squares, self.sums = (torch.zeros(numbers // axis.size, device=device) for _ in range(4))
        at = 2 * self.bucket * torch.arange(self.buckets, device=device)[:, None]
        self._of_grads, self._of_weights = ((memory.addresses + at).unbind() for memory in (self._grads, self._weights))
        self._flags, self._counters = SymmetricBuffer(4 * axis.size, axis, device), Counters.on(device)
        self._told = torch.zeros(self.buckets, PROGRAMS[device.type], dtype=torch.float64, device=device)
        self._one = torch.ones(1, dtype=torch.float64, device=device)
        self._parameters = [nn.Parameter(part) for part in self.masters.chunk(self.buckets)]
        options: dict[str, Any] = {"lr": RULE.lr, "betas": (RULE.beta1, RULE.beta2), "weight_decay": RULE.weight_decay}
        options |= {"fused": True, "capturable": True} if device.type == "cuda" else {}
        self._optimizers = [torch.optim.AdamW([parameter], **options) for parameter in self._parameters]
        self._whole = torch.optim.AdamW(self._parameters, **options)

    def _of(self, flat: torch.Tensor, bucket: int) -> torch.Tensor:
        return flat[bucket * self.shard : (bucket + 1) * self.shard]

    def serial(self) -> None:
        """One collective after the other: reduce-scatter, torch's fused AdamW, all-gather."""
        summed = reduce_scatter(self.grads, self.axis).wait().to(torch.float32)
        for parameter, grad in zip(self._parameters, summed.chunk(self.buckets), strict=True):
            parameter.grad = grad
        self._whole.step()
        all_gather(self.masters.to(torch.bfloat16), self.axis, out=self.weights).wait()

    def overlapped(self) -> None:
        """Bucket after bucket: one is summed, one updated and one given back at the same time."""
        summed = [reduce_scatter(self.grads[b * self.bucket : (b + 1) * self.bucket], self.axis) for b in range(self.buckets)]
        sent = []
        for b, (pending, parameter, optimizer) in enumerate(zip(summed, self._parameters, self._optimizers, strict=True)):
            parameter.grad = pending.wait().to(torch.float32)
            optimizer.step()
            new = parameter.detach().to(torch.bfloat16)
            sent.append(all_gather(new, self.axis, out=self.weights[b * self.bucket : (b + 1) * self.bucket]))
        for pending in sent:
            pending.wait()

    def one_pass(self) -> None:
        """A kernel for each bucket sums this rank's shard, updates it, and gives all ranks the new parameters."""
        self._meet()
        for b in range(self.buckets):
            self._update(b, contributions=self._of_grads[b])
        self._meet()

    def clipped(self) -> None:
        """A kernel for each bucket sums this rank's shard; when all ranks have agreed on the norm, a second one does the rest."""
        self._meet()
        for b in range(self.buckets):
            reduce_shard(
                self._of_grads[b],
                self._of(self.sums, b),
                self._told[b],
                first=self.axis.rank * self.shard // TILE,
                rank=self.axis.rank,
                wire=torch.bfloat16,
                accumulated=torch.bfloat16,
            )
        norm = gather_rows(self._told.sum(), self.axis).sum().sqrt()
        factor = torch.where(norm.isfinite(), (1.0 / (norm + 1e-6)).clamp(max=1.0), torch.nan)
        for b in range(self.buckets):
            self._update(b, grads=self._of(self.sums, b), scale=factor)
        self._meet()

    def _update(self, bucket: int, scale: torch.Tensor | None = None, **grads: torch.Tensor) -> None:
        update(
            RULE,
            self._of(self.masters, bucket),
            (self._of(self.averages, bucket), self._of(self.squares, bucket)),
            self._of_weights[bucket],
            torch.bfloat16,
            self._one if scale is None else scale,
            shard=self.axis.rank,
            rank=self.axis.rank,
            push=True,
            wire=torch.bfloat16,
            accumulated=torch.bfloat16,
            **grads,
        )

    def _meet(self) -> None:
        meet(self._flags.addresses, self._counters, self.axis.rank, 1)

    def link(self) -> float | None:
        """Bytes in a second that a copy engine fetches from the next rank, while all do; None where there are no GPUs."""
        if self.device.type != "cuda":
            return None
        there = self._weights.part((self.axis.rank + 1) % self.axis.size, (LINK,), torch.uint8)
        mine = torch.empty_like(there)
        return LINK / medians({"copy": lambda: mine.copy_(there)}, self.mesh)["copy"] * 1e6


def medians(runs: dict[str, Callable[[], object]], mesh: Mesh) -> dict[str, float]:
    """In us, by turns, the largest over ranks."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(ROUNDS[mesh.device.type] + 1):  # the first compiles and warms up
        for name, run in runs.items():
            barrier(mesh)
            times[name].append(milliseconds(run, mesh.device.type) * 1e3)
    found = torch.tensor([statistics.median(taken[1:]) for taken in times.values()], dtype=torch.float64)
    return dict(zip(times, exchange_numbers(found, mesh, "comparing times").amax(0).tolist(), strict=True))


def measure(mesh: Mesh, numbers: int) -> list[report.Row]:
    """A row for eager calls and, on GPUs, one for graphs, of a model of so many parameters."""
    model = Model(mesh, numbers)
    on_gpu, ranks = mesh.device.type == "cuda", mesh.dp.size
    rate = model.link()
    runs = {name: getattr(model, name) for name in ("serial", "overlapped", "one_pass", "clipped")}
    rows: list[report.Row] = []
    for mode in ("eager", "graph") if on_gpu else ("eager",):
        if mode == "graph":
            runs = {name: captured(run) for name, run in runs.items()}
        times = medians(runs, mesh)
        row: dict[str, Any] = {"ranks": ranks, "parameters": numbers, "parameters_mi": numbers / MI, "mode": mode}
        row |= {f"{name}_us": time for name, time in times.items()}
        if rate:  # both ways, as gradients and as parameters, of 2 bytes
            row |= {"link_gb_s": rate / 1e9, "floor_us": 4 * numbers * (ranks - 1) / ranks / rate * 1e6}
            row["of_floor"] = row["one_pass_us"] / row["floor_us"]
        row |= {f"of_{name}": times[name] / times["one_pass"] for name in ("serial", "overlapped")}
        row["clipping"] = times["clipped"] / times["one_pass"] - 1
        rows.append(row)
    return rows


def main(json_file: str | None = None) -> int:
    """Measures over the GPUs of this machine, or 2 processes where there are fewer than 2; prints the table and writes `json_file`."""
    gpus = torch.cuda.device_count()
    if gpus == 1:
        print("zero_step needs two GPUs to exchange anything", file=sys.stderr)
        return 2
    return launch(["-m", "pymesh3d.bench.zero_step", *(["--json", json_file] if json_file else [])], gpus or 2)


def run_rank(arguments: Sequence[str] | None = None) -> None:
    """What each rank does."""
    parser = argparse.ArgumentParser(prog="python -m pymesh3d.bench.zero_step", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", metavar="FILE", help="also write the measurements here")
    given = parser.parse_args(arguments)
    mesh = init_mesh(dp=-1)
    rows = [row for numbers in NUMBERS[mesh.device.type] for row in measure(mesh, numbers)]
    if mesh.rank == 0:
        title = f"ZeRO step over {mesh.dp.size} ranks on {mesh.device.type}, gradients and parameters in bfloat16"
        report.publish("zero_step", rows, COLUMNS, title, given.json)
    mesh.close()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may still let go of Python objects


if __name__ == "__main__":
    run_rank()

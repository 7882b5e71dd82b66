"""How kernels are timed against each other."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from ..mesh import Mesh
from . import report

ROUNDS = 10
HEAD_START = 2_000_000  # cycles that a GPU first sleeps, about a millisecond: the host has queued all by then, and its time does not count


def medians_in_turns(candidates: Mapping[str, Callable[[], object]], device: str) -> dict[str, float]:
    """The median time in ms of each, on `device` (not of the host that starts them); they take turns, so that all see the same clocks."""
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(ROUNDS + 1):
        for name, run in candidates.items():
            times[name].append(milliseconds(run, device))
    return {name: statistics.median(taken[1:]) for name, taken in times.items()}  # the first round compiles and warms up


def compiled(function: Callable[..., Any], device: str) -> Callable[..., Any]:
    """By torch.compile, for the sizes of its first call alone: otherwise a second size would make it one for any."""
    torch._dynamo.reset()
    return torch.compile(function, dynamic=False, backend="inductor" if device == "cuda" else "aot_eager")


def rows_of_passes(ours: str, passes: Mapping[str, Mapping[str, Callable[[], object]]], device: str, **sizes: int) -> list[report.Row]:
    """A row for each pass: its candidates' medians, and how many times as fast as "compiled_ms" `ours` is."""
    rows: list[report.Row] = []
    for name, candidates in passes.items():
        medians = medians_in_turns(candidates, device)
        rows.append({"device": device, "pass": name, **sizes, **medians, "of_compiled": medians["compiled_ms"] / medians[ours]})
    return rows


def captured(run: Callable[[], None]) -> Callable[[], None]:
    """The same as a CUDA graph."""
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        run()
    replay: Callable[[], None] = graph.replay
    return replay


def milliseconds(run: Callable[[], object], device: str, *, head_start: bool = True) -> float:
    """Of one run, on `device`; without a head start, a GPU that is idle waits for the host."""
    if device == "cpu":
        start = time.perf_counter()
        run()
        return (time.perf_counter() - start) * 1e3
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    if head_start:
        torch.cuda._sleep(HEAD_START)
    begin.record()
    run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def wall_seconds(run: Callable[[], object], device: str) -> float:
    """Of one run, from an idle device to an idle device, with the host's share."""
    if device == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    run()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def barrier(mesh: Mesh) -> None:
    """All ranks go on together. Torch warns where it is not told which GPU to use."""
    dist.barrier(device_ids=None if mesh.device.index is None else [mesh.device.index])

"""How kernels are timed against each other."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import torch

ROUNDS = 10
HEAD_START = 2_000_000  # cycles that a GPU first sleeps, about a millisecond: the host has queued all by then, and its time does not count


def medians_in_turns(candidates: Mapping[str, Callable[[], object]], device: str) -> dict[str, float]:
    """The median time in ms of each, on `device` (not of the host that starts them); they take turns, so that all see the same clocks."""
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(ROUNDS + 1):
        for name, run in candidates.items():
            times[name].append(_milliseconds(run, device))
    return {name: statistics.median(taken[1:]) for name, taken in times.items()}  # the first round compiles and warms up


def _milliseconds(run: Callable[[], object], device: str) -> float:
    if device == "cpu":
        start = time.perf_counter()
        run()
        return (time.perf_counter() - start) * 1e3
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(HEAD_START)
    begin.record()
    run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)

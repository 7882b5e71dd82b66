"""GEMM + reduce-scatter across processes that share memory: values, order, repetition, late ranks and ranks that never come."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pymesh3d.launch import launch as launch_ranks
from pymesh3d.triton_kernels.matmul_reduce_scatter import Slots, launch, matmul_reduce_scatter_ref, needed
from pymesh3d.triton_kernels.signals import Counters
from tests.kernels import DEVICE, bits, needs_kernels, noise
from tests.products import BOUNDS, PATIENCE, SMALL, Bench, Shape

Ranks = Callable[..., list[Any]]
SHAPES: list[Shape] = [(19, 37, 21), (1, 1, 1), (16, 5, 50), (0, 8, 8), (5, 6, 0)]


def wanted(ranks: int, shape: Shape, dtype: torch.dtype) -> tuple[int, int]:
    """The slots that a shape needs."""
    return needed(ranks, *shape[:2], dtype, SMALL)


def call(bench: Bench, shape: Shape, seed: int, patience: float = PATIENCE) -> torch.Tensor:
    """By the kernel; `shape` has the rows of one rank."""
    a, b = bench.operands(shape[0] * bench.ranks, *shape[1:], seed)
    found = launch(a[bench.rank], b[bench.rank], bench.rank, bench.slots, bench.counters, tiles=SMALL, patience=patience)
    if found.is_cuda:
        torch.cuda.synchronize()
    return found


def agrees(bench: Bench, found: torch.Tensor, shape: Shape, seed: int) -> bool:
    """The kernel's result, and the reference."""
    a, b = bench.operands(shape[0] * bench.ranks, *shape[1:], seed)
    rows = slice(bench.rank * shape[0], (bench.rank + 1) * shape[0])
    return all(bench.agrees(y, a, b, rows) for y in (found, matmul_reduce_scatter_ref(a, b, bench.rank)))


def values(dtype: torch.dtype, device: str = "cpu") -> bool:
    """Shapes by turns over the same slots, each twice with the same numbers: the same bits."""
    bench = Bench(SHAPES, dtype, device, wanted)
    right = True
    for seed, shape in enumerate([*SHAPES, SHAPES[0]]):
        found, again = call(bench, shape, seed), call(bench, shape, seed)
        right = right and agrees(bench, found, shape, seed) and torch.equal(bits(found), bits(again))
    assert bench.counters.missing() is None
    assert bench.counters.calls.tolist() == [2 * 5, 0, 0, 0]  # nothing is started for a result of no rows
    bench.mesh.close()
    return right


@needs_kernels
@pytest.mark.parametrize(
    ("world", "dtype"),
    [(1, torch.float64), (2, torch.float64), (2, torch.float32), (2, torch.bfloat16), (3, torch.float64), (4, torch.bfloat16)],
)
def test_values(ranks: Ranks, world: int, dtype: torch.dtype) -> None:
    assert ranks(world, values, dtype, timeout=100.0) == [True] * world


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("dtype", BOUNDS)
def test_values_between_gpus(dtype: torch.dtype) -> None:
    script = f"import torch; from tests.triton_kernels.test_matmul_reduce_scatter import values; assert values({dtype}, 'cuda')"
    assert launch_ranks(["-c", script], torch.cuda.device_count()) == 0


def far_ahead(calls: int) -> bool:
    """One rank is late at random, then the other: each runs as far ahead as the other lets it."""
    shape = (20, 20, 10)
    bench = Bench([shape], torch.float64, "cpu", wanted)
    dice, right = random.Random(bench.rank), True
    for seed in range(calls):
        time.sleep(dice.random() * 0.02 * ((seed // 5) % bench.ranks == bench.rank))
        right = right and agrees(bench, call(bench, shape, seed), shape, seed)
    bench.mesh.close()
    return right


@needs_kernels
def test_a_rank_that_is_ahead_waits(ranks: Ranks) -> None:
    assert ranks(2, far_ahead, 20, timeout=100.0) == [True] * 2


def without_a_rank() -> tuple[tuple[int, int] | None, float]:
    """Rank 1 makes one call, the others two; what they find missing, and how long that took."""
    shape = (20, 40, 8)
    bench = Bench([shape], torch.float32, "cpu", wanted)
    call(bench, shape, 0)
    began = time.monotonic()
    if bench.rank != 1:
        call(bench, shape, 1, patience=0.5)
    missing, seconds = bench.counters.missing(), time.monotonic() - began
    dist.barrier()
    bench.mesh.close()
    return missing, seconds


@needs_kernels
def test_a_rank_that_never_comes_is_named(ranks: Ranks) -> None:
    """The first tile that it owes; all that is owed after that costs no patience any more."""
    first, second, third = ranks(3, without_a_rank)
    assert first[0] == third[0] == (1, 0) and second[0] is None
    assert 0.5 <= first[1] < 3.0 and 0.5 <= third[1] < 3.0


@needs_kernels
def test_what_does_not_fit_is_refused() -> None:
    slots = Slots(torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64), 64, 1)
    counters = Counters.on(torch.device("cpu"))
    for a, b, text in [
        (noise(4, 3), noise(5, 2), "times"),
        (noise(3, 3), noise(5, 3), "3 rows for 2 ranks"),
        (noise(40, 3), noise(5, 3), "800 bytes and 2 flags in slots of 64 and 1"),
    ]:
        with pytest.raises(AssertionError, match=text):
            launch(a.to(DEVICE), b.to(DEVICE), 0, slots, counters, tiles=SMALL)

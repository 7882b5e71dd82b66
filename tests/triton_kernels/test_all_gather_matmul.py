"""All-gather + GEMM across processes that share memory: values, order, repetition, late ranks and ranks that never come."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pymesh3d.launch import launch as launch_ranks
from pymesh3d.triton_kernels.all_gather_matmul import all_gather_matmul_ref, launch, needed
from pymesh3d.triton_kernels.matmul_reduce_scatter import Slots
from pymesh3d.triton_kernels.signals import Counters
from tests.kernels import DEVICE, bits, needs_kernels, noise
from tests.products import PATIENCE, SMALL, Bench, Shape, close

Ranks = Callable[..., list[Any]]
SHAPES: list[Shape] = [(19, 37, 21), (1, 1, 1), (16, 5, 50), (40, 20, 16), (0, 8, 8), (5, 6, 0)]  # rows of one rank


def wanted(ranks: int, shape: Shape, dtype: torch.dtype) -> tuple[int, int]:
    """The slots that a shape needs."""
    return needed(ranks, shape[0], shape[2], dtype, SMALL)


def call(bench: Bench, shape: Shape, seed: int, patience: float = PATIENCE) -> torch.Tensor:
    """By the kernel; every rank has other weights."""
    a, b = bench.operands(*shape, seed)
    found = launch(a[bench.rank], b[bench.rank], bench.rank, bench.slots, bench.counters, tiles=SMALL, patience=patience)
    if found.is_cuda:
        torch.cuda.synchronize()
    return found


def agrees(bench: Bench, found: torch.Tensor, shape: Shape, seed: int) -> bool:
    """The kernel's result, and the reference."""
    a, b = bench.operands(*shape, seed)
    return all(close(y, [torch.cat(a)], [b[bench.rank]]) for y in (found, all_gather_matmul_ref(a, b[bench.rank])))


def values(dtype: torch.dtype, device: str = "cpu") -> bool:
    """Shapes by turns over the same slots, each twice with the same numbers: the same bits."""
    bench = Bench(SHAPES, dtype, device, wanted)
    right = True
    for seed, shape in enumerate([*SHAPES, SHAPES[0]]):
        found, again = call(bench, shape, seed), call(bench, shape, seed)
        right = right and agrees(bench, found, shape, seed) and torch.equal(bits(found), bits(again))
        if found.numel() and shape[2] and bench.ranks > 1:  # the gathered rows are there for another product
            rows = torch.cat(bench.operands(*shape, seed)[0])
            right = right and torch.equal(bits(bench.memory.part(bench.rank, tuple(rows.shape), dtype)), bits(rows))
    assert bench.counters.missing() is None
    assert bench.counters.calls.tolist() == [2 * 5, 0, 0, 0]  # nothing is started for no rows, nor for no depth
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
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_values_between_gpus(dtype: torch.dtype) -> None:
    script = f"import torch; from tests.triton_kernels.test_all_gather_matmul import values; assert values({dtype}, 'cuda')"
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
        call(bench, shape, 1, patience=3.0)  # rank 2 waits for rank 0 first, which comes, but not at once
    missing, seconds = bench.counters.missing(), time.monotonic() - began
    dist.barrier()
    bench.mesh.close()
    return missing, seconds


@needs_kernels
def test_a_rank_that_never_comes_is_named(ranks: Ranks) -> None:
    """With the first run of rows that it owes; all that is owed after that costs no patience any more."""
    first, second, third = ranks(3, without_a_rank)
    assert first[0] == third[0] == (1, 0) and second[0] is None
    assert 3.0 <= first[1] < 6.0 and 3.0 <= third[1] < 6.0


@needs_kernels
def test_what_does_not_fit_is_refused() -> None:
    slots = Slots(torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64), 64, 1)
    counters = Counters.on(torch.device("cpu"))
    for a, b, text in [(noise(4, 3), noise(5, 2), "times"), (noise(20, 3), noise(5, 3), "480 bytes and 3 flags in slots of 64 and 1")]:
        with pytest.raises(AssertionError, match=text):
            launch(a.to(DEVICE), b.to(DEVICE), 0, slots, counters, tiles=SMALL)

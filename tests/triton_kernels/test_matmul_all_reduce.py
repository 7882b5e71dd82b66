"""GEMM + all-reduce across processes that share memory: the same bits on every rank, whatever the number of rows."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pymesh3d.launch import launch as launch_ranks
from pymesh3d.triton_kernels import matmul_reduce_scatter as reduce_scatter
from pymesh3d.triton_kernels.matmul_all_reduce import launch, matmul_all_reduce_ref, needed
from pymesh3d.triton_kernels.matmul_reduce_scatter import Slots
from pymesh3d.triton_kernels.signals import Counters
from tests.kernels import DEVICE, bits, needs_kernels, noise
from tests.products import BOUNDS, PATIENCE, SMALL, Bench, Shape

Ranks = Callable[..., list[Any]]
# rows of all ranks: also fewer than there are ranks, and such that the last rank owns fewer than the others, or none
SHAPES: list[Shape] = [(37, 37, 21), (1, 1, 1), (5, 20, 9), (64, 5, 50), (0, 8, 8), (9, 6, 0)]


def wanted(ranks: int, shape: Shape, dtype: torch.dtype) -> tuple[int, int]:
    """The slots that a shape needs."""
    return needed(ranks, *shape[:2], dtype, SMALL)


def call(bench: Bench, shape: Shape, seed: int, patience: float = PATIENCE) -> torch.Tensor:
    a, b = bench.operands(*shape, seed)
    found = launch(a[bench.rank], b[bench.rank], bench.rank, bench.slots, bench.counters, tiles=SMALL, patience=patience)
    if found.is_cuda:
        torch.cuda.synchronize()
    return found


def agrees(bench: Bench, found: torch.Tensor, shape: Shape, seed: int) -> bool:
    """The kernel's result, and the reference."""
    a, b = bench.operands(*shape, seed)
    return all(bench.agrees(y, a, b, slice(None)) for y in (found, matmul_all_reduce_ref(a, b)))


def values(dtype: torch.dtype, device: str = "cpu") -> tuple[bool, list[list[int]]]:
    """Whether shapes by turns over the same slots, each twice, are right and repeat; the bits of the first."""
    bench = Bench(SHAPES, dtype, device, wanted)
    right, first = True, None
    for seed, shape in enumerate([*SHAPES, SHAPES[0]]):
        found, again = call(bench, shape, seed), call(bench, shape, seed)
        first = found if first is None else first
        right = right and agrees(bench, found, shape, seed) and torch.equal(bits(found), bits(again))
    assert bench.counters.missing() is None
    assert bench.counters.calls.tolist() == [2 * 6, 0, 0, 0]  # nothing is started for a result of no rows
    bench.mesh.close()
    assert first is not None
    return right, bits(first).tolist()


@needs_kernels
@pytest.mark.parametrize(
    ("world", "dtype"), [(1, torch.float64), (2, torch.float64), (2, torch.float32), (3, torch.bfloat16), (4, torch.float64)]
)
def test_values(ranks: Ranks, world: int, dtype: torch.dtype) -> None:
    found = ranks(world, values, dtype, timeout=100.0)
    assert found == [(True, found[0][1])] * world, "every rank has the same bits"


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("dtype", BOUNDS)
def test_values_between_gpus(dtype: torch.dtype) -> None:
    script = f"import torch; from tests.triton_kernels.test_matmul_all_reduce import values; assert values({dtype}, 'cuda')[0]"
    assert launch_ranks(["-c", script], torch.cuda.device_count()) == 0


def far_ahead(calls: int) -> bool:
    """By turns with reduce-scatter over the same slots. One rank is late at random, then the other: each runs as far ahead as it may."""
    shape = (34, 20, 10)
    wanted = needed(2, 34, 20, torch.float64, SMALL), reduce_scatter.needed(2, 17, 20, torch.float64, SMALL)
    bench = Bench([shape], torch.float64, "cpu", lambda *_: (max(wanted)[0], max(wanted)[1]))
    rows = slice(bench.rank * 17, bench.rank * 17 + 17)
    dice, right = random.Random(bench.rank), True
    for seed in range(calls):
        time.sleep(dice.random() * 0.02 * ((seed // 5) % bench.ranks == bench.rank))
        a, b = bench.operands(*shape, seed)
        one = seed % 2 == 0
        found = (launch if one else reduce_scatter.launch)(
            a[bench.rank], b[bench.rank], bench.rank, bench.slots, bench.counters, tiles=SMALL
        )
        right = right and bench.agrees(found, a, b, slice(None) if one else rows)
    bench.mesh.close()
    return right


@needs_kernels
def test_a_rank_that_is_ahead_waits(ranks: Ranks) -> None:
    assert ranks(2, far_ahead, 60, timeout=100.0) == [True] * 2


def without_a_rank() -> tuple[int, int] | None:
    """Rank 1 makes one call, rank 0 two; what it finds missing."""
    shape = (40, 20, 8)
    bench = Bench([shape], torch.float32, "cpu", wanted)
    call(bench, shape, 0)
    if bench.rank != 1:
        call(bench, shape, 1, patience=0.5)
    missing = bench.counters.missing()
    dist.barrier()
    bench.mesh.close()
    return missing


@needs_kernels
def test_a_rank_that_never_comes_is_named(ranks: Ranks) -> None:
    assert ranks(2, without_a_rank) == [(1, 0), None]


@needs_kernels
def test_what_does_not_fit_is_refused() -> None:
    slots = Slots(torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64), 128, 2)
    counters = Counters.on(torch.device("cpu"))
    for a, b, text in [
        (noise(4, 3), noise(5, 2), "times"),
        (noise(10, 3), noise(5, 3), "400 bytes and 2 flags in slots of 128 and 2"),
        (noise(1, 3), noise(17, 3), "272 bytes and 4 flags in slots of 128 and 2"),
    ]:
        with pytest.raises(AssertionError, match=text):
            launch(a.to(DEVICE), b.to(DEVICE), 0, slots, counters, tiles=SMALL)

"""GEMM + reduce-scatter across processes that share memory: values, order, repetition, late ranks and ranks that never come."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pymesh3d.comm.symmetric import SymmetricBuffer
from pymesh3d.launch import launch as launch_ranks
from pymesh3d.mesh import init_mesh
from pymesh3d.triton_kernels.matmul import Tiles
from pymesh3d.triton_kernels.matmul_reduce_scatter import Slots, launch, matmul_reduce_scatter_ref, needed
from pymesh3d.triton_kernels.signals import Counters
from tests.kernels import DEVICE, bits, needs_kernels, noise

Ranks = Callable[..., list[Any]]
Shape = tuple[int, int, int]  # rows of each rank, columns, depth
SMALL = Tiles(16, 16, 16, 4, 2)
# the error of one rounding of a part and of the sum (the interpreter's rounds towards zero), and of a float32 product
BOUNDS = {torch.float64: 1e-14, torch.float32: 1e-5, torch.bfloat16: 2**-6}
POISON = 0x7F  # bytes of a NaN in every dtype


class Bench:
    """One rank's slots, counters and operands."""

    def __init__(self, shapes: list[Shape], dtype: torch.dtype, device: str) -> None:
        self.mesh = init_mesh(tp=-1, dp=1, device=device)
        self.ranks, self.rank, self.dtype = self.mesh.tp.size, self.mesh.rank, dtype
        wanted = [needed(self.ranks, rows, cols, dtype, SMALL) for rows, cols, _ in shapes]
        size, length = -(-max(size for size, _ in wanted) // 64) * 64, max(length for _, length in wanted)
        self.memory = SymmetricBuffer(2 * max(size, 64), self.mesh.tp, self.mesh.device)
        self.flags = SymmetricBuffer(4 * self.ranks * max(length, 1), self.mesh.tp, self.mesh.device)
        self.slots = Slots(self.memory.addresses, self.flags.addresses, max(size, 64), max(length, 1))
        self.counters = Counters.on(self.mesh.device)
        self.memory.part(self.rank, (2 * max(size, 64),), torch.uint8).fill_(POISON)
        dist.barrier()

    def operands(self, shape: Shape, seed: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Those of all ranks."""
        rows, cols, depth = shape
        pairs = [
            (noise(self.ranks * rows, depth, dtype=self.dtype, seed=9 * seed + rank), noise(cols, depth, dtype=self.dtype, seed=-rank - 1))
            for rank in range(self.ranks)
        ]
        return [a.to(self.mesh.device) for a, _ in pairs], [b.to(self.mesh.device) for _, b in pairs]

    def call(self, shape: Shape, seed: int, patience: float = 30.0) -> torch.Tensor:
        a, b = self.operands(shape, seed)
        found = launch(a[self.rank], b[self.rank], self.rank, self.slots, self.counters, tiles=SMALL, patience=patience)
        if found.is_cuda:
            torch.cuda.synchronize()
        return found

    def agrees(self, found: torch.Tensor, shape: Shape, seed: int) -> bool:
        a, b = self.operands(shape, seed)
        exact = sum(x.double() @ y.double().t() for x, y in zip(a, b, strict=True)).chunk(self.ranks)[self.rank]
        size = sum(x.double().abs() @ y.double().abs().t() for x, y in zip(a, b, strict=True)).chunk(self.ranks)[self.rank]
        assert found.shape == exact.shape == shape[:2] and found.dtype == self.dtype
        reference = matmul_reduce_scatter_ref(a, b, self.rank)
        return all(bool(((y.double() - exact).abs() <= BOUNDS[self.dtype] * size).all()) for y in (found, reference))


SHAPES: list[Shape] = [(19, 37, 21), (1, 1, 1), (16, 5, 50), (0, 8, 8), (5, 6, 0)]


def values(dtype: torch.dtype, device: str = "cpu") -> bool:
    """Shapes by turns over the same slots, each twice with the same numbers: the same bits."""
    bench = Bench(SHAPES, dtype, device)
    right = True
    for seed, shape in enumerate([*SHAPES, SHAPES[0]]):
        found, again = bench.call(shape, seed), bench.call(shape, seed)
        right = right and bench.agrees(found, shape, seed) and torch.equal(bits(found), bits(again))
    assert bench.counters.missing() is None
    assert bench.counters.calls.tolist() == [2 * 5, 0]  # nothing is started for a result of no rows
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
    bench = Bench([shape], torch.float64, "cpu")
    dice, right = random.Random(bench.rank), True
    for seed in range(calls):
        time.sleep(dice.random() * 0.02 * ((seed // 5) % bench.ranks == bench.rank))
        right = right and bench.agrees(bench.call(shape, seed), shape, seed)
    bench.mesh.close()
    return right


@needs_kernels
def test_a_rank_that_is_ahead_waits(ranks: Ranks) -> None:
    assert ranks(2, far_ahead, 20, timeout=100.0) == [True] * 2


def without_a_rank() -> tuple[tuple[int, int] | None, float]:
    """Rank 1 makes one call, the others two; what they find missing, and how long that took."""
    shape = (20, 40, 8)
    bench = Bench([shape], torch.float32, "cpu")
    bench.call(shape, 0)
    began = time.monotonic()
    if bench.rank != 1:
        bench.call(shape, 1, patience=0.5)
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

"""GEMM + all-reduce on Hopper against float64, late ranks, and the same bits on all ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from pymesh3d.comm.native import starter
from pymesh3d.launch import launch
from pymesh3d.triton_kernels.launch_hopper import Tiles
from pymesh3d.triton_kernels.matmul_all_reduce_hopper import needed, prepare
from tests.hopper import TILES, by_turns, needs_hopper
from tests.products import Bench, Shape

SHAPES: list[Shape] = [(300, 520, 200), (128, 256, 64), (128, 8, 8), (1024, 4096, 1024), (300, 520, 200)]  # rows of one rank


def values(half: int, n: int, k: int, stages: int) -> bool:
    """Shapes by turns over the same slots, each often, with ranks that are late by turns: right, and the same bits every time."""
    tiles = Tiles(half, n, k, stages)
    bench = Bench(SHAPES, torch.bfloat16, "cuda", lambda ranks, shape, _: needed(ranks, *shape[:2], tiles))
    given = bench.rank, bench.slots, bench.parts(), bench.counters
    for seed, (rows, cols, depth) in enumerate(SHAPES):
        a, b = bench.operands(rows * bench.ranks, cols, depth, seed)
        found = by_turns(bench, a, b, lambda rows, weights, _: prepare(rows, weights, *given, tiles=tiles, starter=starter))
        assert bench.agrees(found[0], a, b, slice(None)), (rows, cols, depth)
        dist.broadcast(first := found[0].clone(), 0)
        assert all(torch.equal(first, other) for other in found)
    bench.mesh.close()
    return True


@pytest.mark.gpu
@needs_hopper(2)
@pytest.mark.parametrize("tiles", TILES, ids=str)
def test_values_between_gpus(tiles: Tiles) -> None:
    script = f"from tests.triton_kernels.test_matmul_all_reduce_hopper import values; assert values(*{tuple(tiles)})"
    assert launch(["-c", script], torch.cuda.device_count()) == 0


def test_slots_hold_whole_tiles_of_parts_and_of_sums() -> None:
    assert needed(2, 129, 257, Tiles(64, 256, 64, 3)) == (2 * 2 * 4 * 128 * 256 * 2, 2 * 4)

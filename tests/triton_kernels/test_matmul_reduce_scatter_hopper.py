"""GEMM + reduce-scatter on Hopper against float64 and against the plain kernel, and late ranks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, strategies

from pymesh3d.comm.native import starter
from pymesh3d.launch import launch
from pymesh3d.triton_kernels.launch_hopper import LARGE, SMALL, Tiles
from pymesh3d.triton_kernels.matmul_reduce_scatter_hopper import late_by, needed, prepare, scattered_job
from tests.hopper import TILES, by_turns, needs_hopper
from tests.products import Bench, Shape

SHAPES: list[Shape] = [(300, 520, 200), (128, 256, 64), (8, 8, 8), (2048, 4096, 1024), (300, 520, 200)]  # rows of one rank


def values(half: int, n: int, k: int, stages: int) -> bool:
    """Shapes by turns over the same slots, each often, with ranks that are late by turns: right, and the same bits every time."""
    tiles = Tiles(half, n, k, stages)
    bench = Bench(SHAPES, torch.bfloat16, "cuda", lambda ranks, shape, _: needed(ranks, *shape[:2], tiles))
    shared = bench.rank, bench.slots, bench.parts(), bench.counters
    for seed, (rows, cols, depth) in enumerate(SHAPES):
        a, b = bench.operands(rows * bench.ranks, cols, depth, seed)
        found = by_turns(bench, a, b, lambda rows, weights, _: prepare(rows, weights, *shared, tiles=tiles, starter=starter))
        assert bench.agrees(found[0], a, b, slice(bench.rank * rows, (bench.rank + 1) * rows)), (rows, cols, depth)
        assert all(torch.equal(found[0], other) for other in found)
    bench.mesh.close()
    return True


@pytest.mark.gpu
@needs_hopper(2)
@pytest.mark.parametrize("tiles", TILES, ids=str)
def test_values_between_gpus(tiles: Tiles) -> None:
    script = f"from tests.triton_kernels.test_matmul_reduce_scatter_hopper import values; assert values(*{tuple(tiles)})"
    assert launch(["-c", script], torch.cuda.device_count()) == 0


def test_slots_hold_whole_tiles() -> None:
    assert needed(2, 129, 257, Tiles(64, 256, 64, 3)) == (2 * 4 * 128 * 256 * 2, 4)


@given(tiles=strategies.integers(1, 60), share=strategies.floats(0, 1), ranks=strategies.integers(2, 8))
def test_tiles_of_this_rank_come_later_than_the_parts_that_they_wait_for(tiles: int, share: float, ranks: int) -> None:
    late = round(share * tiles)
    order = [scattered_job.fn(place, tiles, late, ranks) for place in range(tiles * ranks)]
    assert sorted(order) == list(range(tiles * ranks)), "each job once"
    assert all(scattered_job.fn(tiles * ranks + beyond, tiles, late, ranks) >= tiles * ranks for beyond in range(200)), "then no more"
    places = {job: place for place, job in enumerate(order)}
    for tile in range(tiles):
        own = places[(ranks - 1) * tiles + tile]
        assert own > max(places[turn * tiles + tile] for turn in range(ranks - 1))
        before = sum(job < (ranks - 1) * tiles for job in order[:own]) // (ranks - 1)
        assert before == min(tile + late + (late < tiles - tile), tiles), "own tiles are `late` tiles behind, or at the end"


def test_own_tiles_come_a_wave_later() -> None:
    assert late_by(2, 8192, 4096, 7168, LARGE, 132) == 132, "what the programs compute at once"
    assert late_by(4, 4096, 8192, 2048, LARGE, 132) == 44, "the others have three tiles in the time of one"
    assert late_by(2, 1024, 2048, 8192, LARGE, 128) == 64, "no more than there are"
    assert late_by(4, 4096, 8192, 2048, LARGE, 130) == 44 and late_by(2, 8192, 2048, 1024, SMALL, 64) == 1024
    assert late_by(2, 8192, 2048, 1024, SMALL, 132) == 132 and late_by(2, 8192, 2048, 1536, SMALL, 132) == 132
    assert late_by(2, 8192, 4096, 2048, SMALL, 132) == 2048, "small tiles come last, where the link is fast enough"

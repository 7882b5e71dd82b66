"""All-gather + GEMM on Hopper against float64, and late ranks."""

from __future__ import annotations

import pytest
import torch

from pymesh3d.launch import launch as launch_ranks
from pymesh3d.triton_kernels.all_gather_matmul_hopper import launch, needed
from pymesh3d.triton_kernels.matmul_hopper import Tiles
from tests.hopper import TILES, needs_hopper
from tests.products import Bench, Shape, close

SHAPES: list[Shape] = [(300, 520, 200), (128, 256, 64), (128, 8, 8), (1024, 4096, 4096), (300, 520, 200)]  # rows of one rank


def values(half: int, n: int, k: int, stages: int) -> bool:
    """Shapes by turns over the same slots, each often, with ranks that are late by turns: right, and the same bits every time."""
    tiles = Tiles(half, n, k, stages)
    bench = Bench(SHAPES, torch.bfloat16, "cuda", lambda ranks, shape, _: needed(ranks, shape[0], shape[2], shape[1], tiles))
    parts = [bench.memory.part(rank, (2 * bench.slots.size,), torch.uint8) for rank in range(bench.ranks)]
    for seed, shape in enumerate(SHAPES):
        a, b = bench.operands(*shape, seed)
        found = []
        for turn in range(12):
            if turn % bench.ranks == bench.rank:
                torch.cuda._sleep(1_000_000 * (turn % 3))
            weights = b[bench.rank] if turn % 2 else b[bench.rank].t().contiguous().t()
            found.append(launch(a[bench.rank], weights, bench.rank, bench.slots, parts, bench.counters, tiles=tiles))
        torch.cuda.synchronize()
        assert bench.counters.missing() is None, bench.counters.missing()
        assert close(found[0], [torch.cat(a)], [b[bench.rank]]), shape
        assert all(torch.equal(found[0], other) for other in found)
        rows = torch.cat(a)
        assert torch.equal(bench.memory.part(bench.rank, tuple(rows.shape), torch.bfloat16), rows), "gathered, for another product"
    bench.mesh.close()
    return True


@pytest.mark.gpu
@needs_hopper(2)
@pytest.mark.parametrize("tiles", TILES, ids=str)
def test_values_between_gpus(tiles: Tiles) -> None:
    script = f"from tests.triton_kernels.test_all_gather_matmul_hopper import values; assert values(*{tuple(tiles)})"
    assert launch_ranks(["-c", script], torch.cuda.device_count()) == 0


def test_slots_hold_the_rows_and_a_flag_for_each_run() -> None:
    assert needed(2, 129, 65, 8, Tiles(64, 256, 64, 3)) == (2 * 129 * 65 * 2, 3)

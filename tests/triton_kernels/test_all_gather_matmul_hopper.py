"""All-gather + GEMM on Hopper against float64, and late ranks."""

from __future__ import annotations

import pytest
import torch

from pymesh3d.comm.native import starter
from pymesh3d.launch import launch
from pymesh3d.triton_kernels.all_gather_matmul_hopper import needed, prepare, shares
from pymesh3d.triton_kernels.launch_hopper import LARGE, SMALL, Prepared, Tiles
from tests.hopper import TILES, TURNS, by_turns, needs_hopper
from tests.products import Bench, Shape, close

SHAPES: list[Shape] = [(300, 520, 200), (128, 256, 64), (128, 8, 8), (1024, 4096, 4096), (300, 520, 200)]  # rows of one rank


def values(half: int, n: int, k: int, stages: int) -> bool:
    """Shapes by turns over the same slots, each often, with ranks that are late by turns: right, and the same bits every time."""
    tiles = Tiles(half, n, k, stages)
    bench = Bench(SHAPES, torch.bfloat16, "cuda", lambda ranks, shape, _: needed(ranks, shape[0], shape[2], shape[1], tiles))
    given = bench.rank, bench.slots, bench.parts(), bench.counters

    def prepared(rows: torch.Tensor, weights: torch.Tensor, turn: int) -> Prepared:
        last = turn == TURNS - 1
        if last:  # the last call alone brings its own rows
            torch.cuda.synchronize()
            bench.memory.part(bench.rank, (bench.ranks, *rows.shape), torch.bfloat16)[bench.rank].fill_(torch.nan)
        return prepare(rows, weights, *given, tiles=tiles, keep=turn % 3 != 1 or last, starter=starter)

    for seed, shape in enumerate(SHAPES):
        a, b = bench.operands(*shape, seed)
        found = by_turns(bench, a, b, prepared)
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
    assert launch(["-c", script], torch.cuda.device_count()) == 0


def test_slots_hold_the_rows_and_flags_for_each_run_and_for_all() -> None:
    assert needed(2, 129, 65, 8, Tiles(64, 256, 64, 3)) == (2 * 129 * 65 * 2, 4)


@pytest.mark.parametrize("tiles", [LARGE, SMALL], ids=str)
@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize("sizes", [(128, 8, 8), (128, 65536, 8), (16384, 8, 16384), (8192, 7168, 8192), (1000, 520, 200)], ids=str)
def test_who_would_wait_gives_rows_away(sizes: tuple[int, int, int], ranks: int, tiles: Tiles) -> None:
    rows, cols, depth = sizes
    width, narrow, first, givers, lead = shares(ranks, *sizes, tiles, 132)
    down, across, blocks = -(-rows // 128), -(-cols // tiles.n), -(-depth // 64)
    held = 1 + tiles.n // (2 * tiles.half)
    for strip in (width, narrow):
        assert strip % held == 0 and 1 <= strip < min(blocks, 64) + held
    assert 1 <= lead <= across and narrow <= width
    if ranks * down * across <= 132:
        assert (givers, lead) == (0, across), "whoever has a tile of this rank's rows must not wait, so the others come last"
    else:
        assert 8 <= givers <= 32 and first + givers == 132, "those that take their first tile last"
        assert down * -(-blocks // width) >= min(2 * givers, down), "strips for all of them"


def test_more_programs_give_where_there_is_less_to_multiply() -> None:
    assert shares(2, 4096, 3072, 4096, LARGE, 132).givers == 13 > shares(2, 4096, 14336, 4096, LARGE, 132).givers == 8
    assert shares(2, 256, 28672, 8192, LARGE, 132).lead == 66, "as many as 132 programs multiply at once"
    assert shares(2, 4096, 14336, 4096, LARGE, 132).lead == 56, "all, of many rows"
    assert shares(2, 256, 3072, 4096, SMALL, 132) == (2, 2, 0, 0, 24), "84 programs without a tile of these 2 runs of rows give 64 strips"
    assert shares(2, 256, 5120, 8192, SMALL, 132).width == 4, "52 programs would wait for 80 of their tiles: 64 strips"
    assert shares(2, 1024, 4096, 8192, LARGE, 132) == (51, 3, 122, 10, 16)

"""The product on Hopper: values, edges, repetition; and what it can take."""

from __future__ import annotations

import pytest
import torch

from pymesh3d.triton_kernels.matmul_hopper import Tiles, fits, launch, tiles_for
from tests.hopper import TILES, needs_hopper
from tests.kernels import noise
from tests.products import close


@pytest.mark.gpu
@needs_hopper()
@pytest.mark.parametrize("tiles", TILES, ids=str)
@pytest.mark.parametrize("shape", [(4096, 4096, 4096), (1000, 520, 200), (40, 8, 72), (8, 2056, 8), (512, 14336, 4096)], ids=str)
def test_values(shape: tuple[int, int, int], tiles: Tiles) -> None:
    rows, cols, depth = shape
    a, b = (noise(size, depth, dtype=torch.bfloat16, seed=size).cuda() for size in (rows, cols))
    found, again = launch(a, b, tiles), launch(a, b, tiles)
    torch.cuda.synchronize()
    assert close(found, [a], [b]) and torch.equal(found, again)
    apart = torch.full((rows, depth + 64), torch.nan, dtype=torch.bfloat16, device="cuda")[:, :depth]
    assert torch.equal(launch(apart.copy_(a), b, tiles), found)
    assert torch.equal(launch(a, b.t().contiguous().t(), tiles), found)


def test_what_fits() -> None:
    def operand(rows: int, depth: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.zeros(rows, depth, dtype=dtype)

    b = operand(16, 8)
    assert fits(operand(1, 8), b) and fits(operand(5, 24)[:, 8:16], b)
    assert not fits(operand(5, 8), operand(12, 8)), "rows of the result would not be aligned"
    assert not fits(operand(5, 4), operand(16, 4)) and not fits(operand(5, 12)[:, :8], b)
    assert fits(operand(5, 16), operand(16, 8).t()), "weights may be the transpose of what is kept"
    assert not fits(operand(8, 5).t(), operand(16, 8)) and not fits(operand(5, 24)[:, 4:12], b)
    assert not fits(operand(0, 8), b) and not fits(operand(5, 8, torch.float32), operand(16, 8, torch.float32))


def test_small_results_get_small_tiles() -> None:
    assert tiles_for(8192, 4096).n == 256 and tiles_for(1024, 4096).n == tiles_for(512, 4096).n == 128
    assert Tiles(64, 256, 64, 3).of(129, 257) == 4

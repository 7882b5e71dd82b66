"""The product on Hopper: values, edges, repetition."""

from __future__ import annotations

import pytest
import torch

from pymesh3d.comm.native import starter
from pymesh3d.triton_kernels.launch_hopper import Tiles
from pymesh3d.triton_kernels.matmul_hopper import prepare
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
    by_triton, native = prepare(a, b, tiles), prepare(a, b, tiles, starter)
    found = by_triton(a, b)
    assert close(found, [a], [b])
    for one in (by_triton, native, native):
        assert torch.equal(one(a, b), found) and torch.equal(one(a.clone(), b.clone()), found)
    apart = torch.full((rows, depth + 64), torch.nan, dtype=torch.bfloat16, device="cuda")[:, :depth].copy_(a)
    turned = b.t().contiguous().t()
    for x, y in ((apart, b), (a, turned)):
        one = prepare(x, y, tiles, starter)
        assert all(torch.equal(one(x, y), found) for _ in range(3))

"""a b^T for a [M, K] and weights b [N, K] as torch keeps them: what the products that talk to other ranks are made of.

It takes any M, N, K, on any GPU and in the interpreter.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from .backend import available, constant, interpreted, jit, tl
from .precision import compute_dtype, wide
from .rows import as_rows

BY_HAND = constant(interpreted)  # the interpreter's product takes the bits of bfloat16 for integers
GROUP = 8  # rows of tiles whose tiles are neighbours in time, so that they find each other's operands in the cache


class Tiles(NamedTuple):
    """The size of a program's tile of the result [M, N], its step along K, and how it is computed."""

    m: int
    n: int
    k: int
    warps: int
    stages: int

    def of(self, rows: int, cols: int) -> int:
        """How many tiles a result has."""
        return -(-rows // self.m) * -(-cols // self.n)

    def options(self) -> dict[str, Any]:
        """As a kernel takes them."""
        return {"BLOCK_M": self.m, "BLOCK_N": self.n, "BLOCK_K": self.k, "num_warps": self.warps, "num_stages": self.stages}


def tiles_for(dtype: torch.dtype) -> Tiles:
    """For operands of this dtype."""
    if interpreted:
        return Tiles(32, 32, 32, 1, 1)
    return {8: Tiles(64, 64, 16, 4, 2), 4: Tiles(64, 64, 32, 4, 2), 2: Tiles(128, 128, 64, 8, 3)}[dtype.itemsize]


@jit
def place_of(tile, rows, cols, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr):  # type: ignore[no-untyped-def]
    """The first row and column of a tile."""
    down, across = tl.cdiv(rows, BLOCK_M), tl.cdiv(cols, BLOCK_N)
    first = tile // (GROUP * across) * GROUP
    high = tl.minimum(down - first, GROUP)
    within = tile % (GROUP * across)
    return (first + within % high) * BLOCK_M, within // high * BLOCK_N


@jit
def product(  # type: ignore[no-untyped-def]
    a,  # [rows, depth], its rows stride_a apart
    b,  # [cols, depth], its rows stride_b apart
    row,
    col,
    rows,
    cols,
    depth,
    stride_a,
    stride_b,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """The tile of a b^T at `row` and `col`, unrounded: float32, or float64 of float64. Outside of the result it is 0."""
    down, across = row + tl.arange(0, BLOCK_M), col + tl.arange(0, BLOCK_N)
    sums = tl.float64 if a.dtype.element_ty == tl.float64 else tl.float32
    tile = tl.zeros((BLOCK_M, BLOCK_N), dtype=sums)
    for start in range(0, depth, BLOCK_K):
        along = start + tl.arange(0, BLOCK_K)
        inside = along[None, :] < depth
        x = tl.load(a + down[:, None] * stride_a + along[None, :], mask=(down[:, None] < rows) & inside, other=0.0)
        y = tl.load(b + across[:, None] * stride_b + along[None, :], mask=(across[:, None] < cols) & inside, other=0.0)
        if BY_HAND:
            x, y = wide(x), wide(y)
        tile = tl.dot(x, tl.trans(y), tile, input_precision="ieee", out_dtype=sums)
    return tile


@jit
def put(tile, y, row, col, rows, cols, stride):  # type: ignore[no-untyped-def]
    """Store a tile at its place in y [rows, cols], its rows `stride` apart."""
    down, across = row + tl.arange(0, tile.shape[0]), col + tl.arange(0, tile.shape[1])
    place = y + down[:, None] * stride + across[None, :]
    tl.store(place, tile.to(y.dtype.element_ty), mask=(down[:, None] < rows) & (across[None, :] < cols))


@jit
def get(y, row, col, rows, cols, stride, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):  # type: ignore[no-untyped-def]
    """The tile of y [rows, cols] at its place, 0 outside."""
    down, across = row + tl.arange(0, BLOCK_M), col + tl.arange(0, BLOCK_N)
    inside = (down[:, None] < rows) & (across[None, :] < cols)
    return tl.load(y + down[:, None] * stride + across[None, :], mask=inside, other=0.0)


@jit
def matmul_kernel(  # type: ignore[no-untyped-def]
    a,  # [rows, depth]
    b,  # [cols, depth]
    y,  # [rows, cols], contiguous
    rows: tl.int64,
    cols: tl.int64,
    depth: tl.int64,
    stride_a: tl.int64,
    stride_b: tl.int64,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    """A program computes one tile."""
    row, col = place_of(tl.program_id(0), rows, cols, BLOCK_M, BLOCK_N, GROUP)
    tile = product(a, b, row, col, rows, cols, depth, stride_a, stride_b, BLOCK_M, BLOCK_N, BLOCK_K)
    put(tile, y, row, col, rows, cols, cols)


def matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a [..., K] times b^T for b [N, K]: [..., N], new and contiguous, in their dtype (float32, float64 or bfloat16); one rounding."""
    return launch(a, b) if a.is_cuda and available else matmul_ref(a, b)


def launch(a: torch.Tensor, b: torch.Tensor, tiles: Tiles | None = None) -> torch.Tensor:
    """`matmul` by the kernel, whatever the device."""
    y = torch.empty(*a.shape[:-1], _columns(a, b), dtype=a.dtype, device=a.device)
    if not a.shape[-1]:
        y.zero_()
    elif y.numel():
        a, b, tiles = as_rows(a), as_rows(b), tiles or tiles_for(a.dtype)
        grid = (tiles.of(a.shape[0], b.shape[0]),)
        with torch.cuda.device_of(a):
            matmul_kernel[grid](a, b, y, a.shape[0], *b.shape, a.stride(0), b.stride(0), GROUP=GROUP, **tiles.options())
    return y


def matmul_ref(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """`matmul` in plain torch."""
    _columns(a, b)
    sums = compute_dtype(a.dtype)
    return (a.to(sums) @ b.to(sums).t()).to(a.dtype).contiguous()


def _columns(a: torch.Tensor, b: torch.Tensor) -> int:
    """N."""
    assert b.dim() == 2 and a.shape[-1] == b.shape[1] and a.dtype == b.dtype, f"{tuple(a.shape)} {a.dtype} times {tuple(b.shape)} {b.dtype}"
    return b.shape[0]

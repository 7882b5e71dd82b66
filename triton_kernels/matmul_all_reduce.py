"""a b^T summed over ranks, all of which get the whole: a row-parallel linear without sequence parallelism, in two shots and one kernel.

Each rank owns an equal run of rows. It multiplies the rows of the others first and leaves the tiles with their owners, as in
`matmul_reduce_scatter`; sums its own, and leaves the sums with all the others; and last it copies from its slots what they have left. Every
rank so has the same bits.
"""

from __future__ import annotations

import torch

from .backend import jit, tl
from .matmul import Tiles, place_of, product, put, tiles_for
from .matmul_reduce_scatter import Slots, give, start, take
from .precision import compute_dtype, wide
from .signals import PATIENCE, Counters, end_of_program, take_job


def needed(ranks: int, rows: int, cols: int, dtype: torch.dtype, tiles: Tiles | None = None) -> tuple[int, int]:
    """The least `size` and `length` of slots for a result [rows, cols]: for parts from all ranks, and for sums from all."""
    share = -(-rows // ranks)
    return 2 * ranks * share * cols * dtype.itemsize, 2 * (tiles or tiles_for(dtype)).of(share, cols)


@jit
def matmul_all_reduce_kernel(  # type: ignore[no-untyped-def]
    a,  # [rows, depth]
    b,  # [cols, depth]
    y,  # [rows, cols], contiguous
    memory,  # int64 [ranks]: where each rank's slots are, bytes [2, size]
    flags,  # int64 [ranks]: where each rank's flags are, int32 [ranks, length], those for parts before those for sums
    calls,
    trouble,
    told,
    rank,
    rows: tl.int64,
    cols: tl.int64,
    depth: tl.int64,
    stride_a: tl.int64,
    stride_b: tl.int64,
    size: tl.int64,
    length: tl.int64,
    patience: tl.int64,
    RANKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    """A program does one tile of all ranks' rows after the other, this rank's last: those wait. Then it copies sums."""
    call = tl.load(calls) + 1
    share = tl.cdiv(rows, RANKS)
    tiles = tl.cdiv(share, BLOCK_M) * tl.cdiv(cols, BLOCK_N)
    sums = RANKS * share * cols  # where they begin
    half = (call & 1) * size
    number = take_job(calls, 0)
    while number < tiles * RANKS:
        owner = (rank + 1 + number // tiles) % RANKS
        tile = number % tiles
        first = owner * share
        owned = tl.minimum(share, rows - first)  # the last ranks may own fewer, or none
        row, col = place_of(tile, share, cols, BLOCK_M, BLOCK_N, GROUP)
        if row < owned:
            result = product(a + first * stride_a, b, row, col, owned, cols, depth, stride_a, stride_b, BLOCK_M, BLOCK_N, BLOCK_K)
            if owner != rank:
                give(result, y, memory, flags, owner, rank * share * cols, rank * length + tile, row, col, owned, cols, call, half)
            else:
                for other in range(RANKS):
                    if other != rank:
                        part = take(
                            y, memory, flags, rank, other, other * share * cols, other * length + tile, row, col, owned, cols, call, half,
                            trouble, told, tile, patience, BLOCK_M, BLOCK_N,
                        )  # fmt: skip
                        result += wide(part)
                for other in range(RANKS):
                    if other != rank:
                        flag = rank * length + tiles + tile
                        give(result, y, memory, flags, other, sums + first * cols, flag, row, col, owned, cols, call, half)
                put(result, y + first * cols, row, col, owned, cols, cols)
        number = take_job(calls, 0)
    number = take_job(calls, 1)
    while number < tiles * (RANKS - 1):
        owner = (rank + 1 + number // tiles) % RANKS
        tile = number % tiles
        first = owner * share
        owned = tl.minimum(share, rows - first)
        row, col = place_of(tile, share, cols, BLOCK_M, BLOCK_N, GROUP)
        if row < owned:
            result = take(
                y, memory, flags, rank, owner, sums + first * cols, owner * length + tiles + tile, row, col, owned, cols, call, half,
                trouble, told, tiles + tile, patience, BLOCK_M, BLOCK_N,
            )  # fmt: skip
            put(result, y + first * cols, row, col, owned, cols, cols)
        number = take_job(calls, 1)
    end_of_program(calls, call)


def launch(
    a: torch.Tensor,
    b: torch.Tensor,
    rank: int,
    slots: Slots,
    counters: Counters,
    *,
    tiles: Tiles | None = None,
    patience: float = PATIENCE,
) -> torch.Tensor:
    """The ranks' sum of a [M, K] times b^T for b [N, K]: [M, N] on every rank, new and contiguous, in their dtype.

    All ranks must call with the same shapes and tiles, one call after the other. `counters.missing()` says, once the kernel has ended,
    whether another rank has not been there for `patience` seconds; the result is worth nothing then.
    """
    ranks, tiles = slots.memory.numel(), tiles or tiles_for(a.dtype)
    y = torch.empty(a.shape[0], b.shape[0], dtype=a.dtype, device=a.device)
    wanted = needed(ranks, y.shape[0], y.shape[1], a.dtype, tiles)
    jobs = ranks * tiles.of(-(-y.shape[0] // ranks), y.shape[1])
    start(matmul_all_reduce_kernel, a, b, y, rank, slots, counters, wanted, jobs, tiles, patience)
    return y


def matmul_all_reduce_ref(a: list[torch.Tensor], b: list[torch.Tensor]) -> torch.Tensor:
    """What `launch` returns, in plain torch, from the operands of all ranks."""
    sums = compute_dtype(a[0].dtype)
    parts = [x.to(sums) @ y.to(sums).t() for x, y in zip(a, b, strict=True)]
    share = max(1, -(-a[0].shape[0] // len(a)))
    rows = []
    for owner, run in enumerate(parts[0].split(share)):
        total = parts[owner].split(share)[owner] if run.numel() else run
        for other, part in enumerate(parts):
            if other != owner:
                total = total + part.split(share)[owner].to(a[0].dtype).to(sums)
        rows.append(total)
    return torch.cat(rows).to(a[0].dtype)

"""The ranks' rows gathered, times b^T: a column-parallel linear under sequence parallelism, in one kernel.

Its programs first copy this rank's rows, piece by piece, to all the others, and set a flag there when all pieces of a run of rows have
been copied. Then they multiply this rank's own rows, and by that time those of the next ranks have come.

Before a rank copies it waits for all the others to have come to the same call: what they were given in the call before has served them
then. Until the next call the gathered rows stay where they are, for whoever multiplies them once more.
"""

from __future__ import annotations

import torch

from .backend import jit, tl
from .matmul import Tiles, get, place_of, product, put, tiles_for
from .matmul_reduce_scatter import Slots, start
from .precision import compute_dtype
from .signals import PATIENCE, Counters, end_of_program, missing_word, signal, take_job, wait


def needed(ranks: int, rows: int, depth: int, dtype: torch.dtype, tiles: Tiles | None = None) -> tuple[int, int]:
    """The least `size` and `length` of slots for [rows, depth] of each rank. The gathered rows [ranks * rows, depth] begin them."""
    return ranks * rows * depth * dtype.itemsize, 1 + -(-rows // (tiles or tiles_for(dtype)).m)


@jit
def all_gather_matmul_kernel(  # type: ignore[no-untyped-def]
    a,  # [rows / RANKS, depth], this rank's
    b,  # [cols, depth]
    y,  # [rows, cols], contiguous
    memory,  # int64 [ranks]: where each rank's slots are, bytes [2, size]
    flags,  # int64 [ranks]: where each rank's flags are, int32 [ranks, length]: of having come, and of runs of rows; by its own it counts
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
    """A program copies one piece after the other, until there are no more, and then computes tiles, this rank's first: the others wait."""
    call = tl.load(calls) + 1
    share = rows // RANKS
    across = tl.cdiv(depth, BLOCK_N)
    mine = tl.load(flags + rank).to(tl.pointer_type(tl.int32))
    if RANKS > 1:
        piece = take_job(calls, 1)
        if piece == 0:
            for other in range(RANKS):
                if other != rank:
                    signal(tl.load(flags + other).to(tl.pointer_type(tl.int32)) + rank * length, call)
        for other in range(RANKS):
            if other != rank:
                wait(mine + other * length, call, trouble, told, missing_word(other, 0), patience)
        while piece < tl.cdiv(share, BLOCK_M) * across:
            run = piece // across
            row, col = run * BLOCK_M, piece % across * BLOCK_N
            copied = get(a, row, col, share, depth, stride_a, BLOCK_M, BLOCK_N)
            for other in range(RANKS):
                slot = tl.load(memory + other).to(tl.pointer_type(a.dtype.element_ty)) + rank * share * depth
                put(copied, slot, row, col, share, depth, depth)
            tl.debug_barrier()
            count = mine + rank * length + 1 + run
            if tl.atomic_add(count, 1, sem="acq_rel") == across - 1:  # the run is complete, whoever has copied it
                tl.store(count, 0)
                for other in range(RANKS):
                    if other != rank:
                        signal(tl.load(flags + other).to(tl.pointer_type(tl.int32)) + rank * length + 1 + run, call)
            piece = take_job(calls, 1)
    tiles = tl.cdiv(share, BLOCK_M) * tl.cdiv(cols, BLOCK_N)
    here = tl.load(memory + rank).to(tl.pointer_type(a.dtype.element_ty))
    number = take_job(calls, 0)
    while number < tiles * RANKS:
        source = (rank + number // tiles) % RANKS
        row, col = place_of(number % tiles, share, cols, BLOCK_M, BLOCK_N, GROUP)
        first, stride = a, stride_a
        if source != rank:
            run = row // BLOCK_M
            wait(mine + source * length + 1 + run, call, trouble, told, missing_word(source, run), patience)
            first, stride = here + source * share * depth, depth
        tile = product(first, b, row, col, share, cols, depth, stride, stride_b, BLOCK_M, BLOCK_N, BLOCK_K)
        put(tile, y + source * share * cols, row, col, share, cols, cols)
        number = take_job(calls, 0)
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
    """The ranks' a [R, K], one below the other, times b^T for this rank's b [N, K]: [ranks * R, N], new and contiguous, in their dtype.

    All ranks must call with the same shapes (N may differ) and tiles, one call after the other. `counters.missing()` says, once the kernel
    has ended, whether another rank has not been there for `patience` seconds, and with which run of rows; the result is worth nothing then.
    """
    ranks, tiles = slots.memory.numel(), tiles or tiles_for(a.dtype)
    y = torch.empty(ranks * a.shape[0], b.shape[0], dtype=a.dtype, device=a.device)
    if not a.shape[1]:
        return y.zero_()
    wanted = needed(ranks, a.shape[0], a.shape[1], a.dtype, tiles)
    start(all_gather_matmul_kernel, a, b, y, rank, slots, counters, wanted, ranks * tiles.of(a.shape[0], b.shape[0]), tiles, patience)
    return y


def all_gather_matmul_ref(a: list[torch.Tensor], b: torch.Tensor) -> torch.Tensor:
    """What `launch` returns on a rank, in plain torch, from all ranks' a and its own b."""
    sums = compute_dtype(b.dtype)
    return (torch.cat(a).to(sums) @ b.to(sums).t()).to(b.dtype).contiguous()

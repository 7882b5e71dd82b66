"""A rank's shard of the sum of all ranks' gradients, read out of their memory: what is sent is rounded, and then added up by its owner.

Legend: a bucket is a flat run of gradients, alike on all ranks, whose shards, one a rank, consist of tiles of TILE numbers. What a rank
contributes is rounded once, to the wire's dtype: by whoever reads it, or before, to halve what crosses the links. Then it is rounded where
it lies, each tile to the front of the memory that it has taken: no second copy is needed, and what others read lies in runs of 2 KiB. The
sum is float32 (float64 for float64), in the order of ranks, and stays so.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .backend import jit, tl
from .precision import compute_dtype, nearest, triton_dtype

TILE = 1024  # numbers that are rounded together


@jit
def aligned(address, DTYPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """A pointer to what lies at an address in memory, whose 16 bytes may be moved at once."""
    return tl.multiple_of(tl.load(address).to(tl.pointer_type(DTYPE)), 16)


@jit
def summed(contributions, at, DTYPE: tl.constexpr, WIRE: tl.constexpr, SUM: tl.constexpr, RANKS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The sum over ranks, in their order, of what lies at `at` from where the contribution of each begins: in DTYPE, rounded to WIRE."""
    total = nearest(tl.load(aligned(contributions, DTYPE) + at), WIRE).to(SUM)
    for rank in tl.static_range(1, RANKS):
        total += nearest(tl.load(aligned(contributions + rank, DTYPE) + at), WIRE).to(SUM)
    return total


@jit
def round_in_place_kernel(grads, wire, largest, TILE: tl.constexpr, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """A program rounds a tile. `wire`: the same memory, in the wire's dtype, of which WIDTH numbers fit into the place of one. `largest`,
    float32 [tiles] or None: the absolute value of what the tile has become, infinite where a number is not finite."""
    tile = tl.program_id(0).to(tl.int64)
    number = tl.arange(0, TILE)
    value = tl.load(grads + tile * TILE + number)
    tl.debug_barrier()  # all of the tile has been read
    value = nearest(value, wire.dtype.element_ty)
    tl.store(wire + tile * (TILE * WIDTH) + number, value)
    if largest is not None:
        size = tl.abs(value.to(tl.float32))
        tl.store(largest + tile, tl.max(tl.where(size == size, size, float("inf"))))


@jit(do_not_specialize=["first", "tiles"])
def reduce_shard_kernel(  # type: ignore[no-untyped-def]
    contributions,  # int64 [RANKS]: where the bucket begins on each rank
    out,  # [tiles * TILE]: the sum
    copies,  # int64 [RANKS]: where the whole bucket begins on each rank, which then all get the sum; or None
    squares,  # float64 [SQUARES]: the sum of squares of what each program has made, and zeros
    first: tl.int32,  # the tile with which the shard begins
    tiles: tl.int32,
    ADD: tl.constexpr,  # the sum to what `out` has
    DTYPE: tl.constexpr,  # of what lies there
    WIRE: tl.constexpr,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    TILE: tl.constexpr,
    WIDTH: tl.constexpr,
    SQUARES: tl.constexpr,
):
    """The programs take turns at tiles. Few of them would read too little at once."""
    SUM: tl.constexpr = tl.float64 if out.dtype.element_ty == tl.float64 else tl.float32
    col = tl.arange(0, TILE)
    square = tl.zeros((TILE,), tl.float64)
    for turn in range(tl.program_id(0), tiles, tl.num_programs(0)):
        tile = tl.cast(turn, tl.int64)
        value = summed(contributions, (first + tile) * (TILE * WIDTH) + col, DTYPE, WIRE, SUM, RANKS)
        number = tile * TILE + col
        if ADD:
            value += tl.load(out + number)
        value = nearest(value, out.dtype.element_ty)
        tl.debug_barrier()  # all of the tile has been read, where the sum comes to lie upon it
        if copies is None:
            tl.store(out + number, value)
        else:
            number += tl.cast(first, tl.int64) * TILE
            for following in tl.static_range(0, RANKS):
                there = aligned(copies + (RANK + following) % RANKS, out.dtype.element_ty)
                tl.store(there + number, value)
        square += value.to(tl.float64) * value.to(tl.float64)
    tl.store(squares + tl.program_id(0), tl.sum(square))
    for unused in range(tl.program_id(0) + tl.num_programs(0), SQUARES, tl.num_programs(0)):
        tl.store(squares + unused, 0.0)


def width(grads: torch.dtype, wire: torch.dtype) -> int:
    """How many numbers of the wire fit into the place of one gradient."""
    assert wire.itemsize <= grads.itemsize, f"gradients of {grads} would be sent as {wire}, which is wider"
    return grads.itemsize // wire.itemsize


def round_in_place(grads: torch.Tensor, wire: torch.dtype, largest: torch.Tensor | None = None) -> None:
    """Round a bucket of gradients [tiles * TILE], contiguous, to what is sent; `rounded` shows it. Nothing to do for their own dtype, for
    which `largest`, float32 [tiles], must be None: else it becomes each tile's absolute maximum then, infinite if one is not finite."""
    assert wire != grads.dtype or largest is None, f"nothing is rounded from {wire} to {grads.dtype}"
    if wire != grads.dtype:
        constants = {"TILE": TILE, "WIDTH": width(grads.dtype, wire)}
        round_in_place_kernel[(grads.numel() // TILE,)](grads, grads.view(wire), largest, **constants, num_warps=4)


def rounded(grads: torch.Tensor, wire: torch.dtype) -> torch.Tensor:
    """A view [tiles, TILE] of what `round_in_place` has left in a bucket."""
    return grads.view(wire).view(-1, TILE * width(grads.dtype, wire))[:, :TILE]


def round_in_place_ref(grads: torch.Tensor, wire: torch.dtype, largest: torch.Tensor | None = None) -> None:
    """The same in plain torch."""
    if wire != grads.dtype:
        rounded(grads, wire).copy_(grads.to(wire).view(-1, TILE))
    if largest is not None:
        largest.copy_(rounded(grads, wire).float().abs().nan_to_num(torch.inf, torch.inf).amax(1))


def reduce_shard(
    contributions: torch.Tensor,
    out: torch.Tensor,
    squares: torch.Tensor,
    *,
    first: int,
    rank: int,
    wire: torch.dtype,
    rounded: bool = True,
    accumulated: torch.dtype | None = None,
    programs: int | None = None,
    add: bool = False,
    copies: torch.Tensor | None = None,
) -> None:
    """The sum over ranks of a bucket's tiles from `first` on, into `out` [tiles * TILE], or with `add` added to it; rounded to its dtype.

    `contributions`, int64 [ranks], says where on each rank the bucket begins, `accumulated` in that dtype (by default in that of `out`):
    `rounded` to `wire` already, or to be rounded on the way. The sums of the squares of the result go to `squares`, float64, one for each
    of so many `programs` (by default as many as it has room for), and zeros to the rest. With `copies`, int64 [ranks], the shard of the
    buckets that begin there becomes the sum on all ranks; `out` is this rank's.
    """
    assert out.numel() % TILE == 0 and out.is_contiguous(), f"{tuple(out.shape)}, {out.stride()}"
    programs = squares.numel() if programs is None else programs
    assert 0 < programs <= squares.numel(), f"{programs} programs, {squares.numel()} places for their squares"
    tiles, accumulated = out.numel() // TILE, out.dtype if accumulated is None else accumulated
    reduce_shard_kernel[(programs,)](
        contributions,
        out,
        copies,
        squares,
        first,
        tiles,
        ADD=add,
        DTYPE=triton_dtype(wire if rounded else accumulated),
        WIRE=triton_dtype(wire),
        RANK=rank,
        RANKS=contributions.numel(),
        TILE=TILE,
        WIDTH=width(accumulated, wire) if rounded else 1,
        SQUARES=squares.numel(),
        num_warps=4,
    )


def reduce_shard_ref(contributions: Sequence[torch.Tensor], out: torch.Tensor, *, add: bool = False) -> torch.Tensor:
    """The sum of squares, float64 [], of what `out` becomes; `contributions` are the ranks' own, of this shard."""
    total = contributions[0].to(compute_dtype(out.dtype))
    for part in contributions[1:]:
        total = total + part.to(total.dtype)
    out.copy_(total.view_as(out) + out if add else total.view_as(out))
    return out.double().square().sum()

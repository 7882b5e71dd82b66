"""a b^T summed over ranks, each of which keeps its share of the rows: a row-parallel linear under sequence parallelism.

Each rank multiplies the rows of the others first, in the order in which they follow it, and writes every tile where its owner will look
for it, in the owner's own memory. Then it multiplies its own rows, and adds to each tile what the others have left there. No collective
runs, nothing is reduced by a kernel of its own, and the sum has a fixed order: own first, then by rank.

What a rank sends is rounded to the dtype once; the sum is in float32 (float64 of float64). What the others send in one call lies apart from
what they send in the next: a rank that is quicker can be one call ahead, not two, because each call waits for all the others.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from .backend import interpreted, jit, tl
from .matmul import GROUP, Tiles, get, place_of, product, put, tiles_for
from .precision import compute_dtype, wide
from .signals import PATIENCE, Counters, end_of_program, missing_word, signal, take_job, wait


class Slots(NamedTuple):
    """Where ranks leave tiles for each other: `size` bytes for each of two calls that may be under way, and `length` flags for each rank.

    `memory` and `flags`, int64 [ranks], hold where these lie on every rank: bytes [2, size] and int32 [ranks, length].
    """

    memory: torch.Tensor
    flags: torch.Tensor
    size: int
    length: int

    def require(self, size: int, length: int) -> None:
        """They must have so much at least: what is written beyond them would be other memory of other ranks."""
        assert size <= self.size and length <= self.length, f"{size} bytes and {length} flags in slots of {self.size} and {self.length}"


def needed(ranks: int, rows: int, cols: int, dtype: torch.dtype, tiles: Tiles | None = None) -> tuple[int, int]:
    """The least `size` and `length` of slots for a result [rows, cols] on each rank."""
    return ranks * rows * cols * dtype.itemsize, (tiles or tiles_for(dtype)).of(rows, cols)


@jit
def give(tile, like, memory, flags, to, place, flag, row, col, rows, cols, call, half):  # type: ignore[no-untyped-def]
    """Leave a tile with rank `to`, in its slots from number `place` on, where it has the dtype of `like`; and say so by a flag."""
    slot = (tl.load(memory + to) + half).to(tl.pointer_type(like.dtype.element_ty)) + place
    put(tile, slot, row, col, rows, cols, cols)
    signal(tl.load(flags + to).to(tl.pointer_type(tl.int32)) + flag, call)


@jit
def take(  # type: ignore[no-untyped-def]
    like, memory, flags, rank, source, place, flag, row, col, rows, cols, call, half, trouble, told, what, patience,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The tile that rank `source` leaves in this rank's slots."""
    wait(tl.load(flags + rank).to(tl.pointer_type(tl.int32)) + flag, call, trouble, told, missing_word(source, what), patience)
    slot = (tl.load(memory + rank) + half).to(tl.pointer_type(like.dtype.element_ty)) + place
    return get(slot, row, col, rows, cols, cols, BLOCK_M, BLOCK_N)


@jit
def matmul_reduce_scatter_kernel(  # type: ignore[no-untyped-def]
    a,  # [ranks * rows, depth]
    b,  # [cols, depth]
    y,  # [rows, cols], contiguous
    memory,  # int64 [ranks]: where each rank's slots are, bytes [2, size]
    flags,  # int64 [ranks]: where each rank's flags are, int32 [ranks, length]
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
    """A program does one tile of all ranks' results after the other, this rank's last: those wait."""
    call = tl.load(calls) + 1
    tiles = tl.cdiv(rows, BLOCK_M) * tl.cdiv(cols, BLOCK_N)
    half = (call & 1) * size
    number = take_job(calls, 0)
    while number < tiles * RANKS:
        owner = (rank + 1 + number // tiles) % RANKS
        tile = number % tiles
        row, col = place_of(tile, rows, cols, BLOCK_M, BLOCK_N, GROUP)
        result = product(a + owner * rows * stride_a, b, row, col, rows, cols, depth, stride_a, stride_b, BLOCK_M, BLOCK_N, BLOCK_K)
        if owner != rank:
            give(result, y, memory, flags, owner, rank * rows * cols, rank * length + tile, row, col, rows, cols, call, half)
        else:
            for other in range(RANKS):
                if other != rank:
                    part = take(
                        y, memory, flags, rank, other, other * rows * cols, other * length + tile, row, col, rows, cols, call, half,
                        trouble, told, tile, patience, BLOCK_M, BLOCK_N,
                    )  # fmt: skip
                    result += wide(part)
            put(result, y, row, col, rows, cols, cols)
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
    """This rank's rows of the ranks' sum of a [ranks * R, K] times b^T for b [N, K]: [R, N], new and contiguous, in their dtype.

    All ranks must call with the same shapes and tiles, one call after the other. `counters.missing()` says, once the kernel has ended,
    whether another rank has not been there for `patience` seconds; the result is worth nothing then.
    """
    ranks, tiles = slots.memory.numel(), tiles or tiles_for(a.dtype)
    assert a.shape[0] % ranks == 0, f"{a.shape[0]} rows for {ranks} ranks"
    y = torch.empty(a.shape[0] // ranks, b.shape[0], dtype=a.dtype, device=a.device)
    wanted = needed(ranks, y.shape[0], y.shape[1], a.dtype, tiles)
    start(matmul_reduce_scatter_kernel, a, b, y, rank, slots, counters, wanted, ranks * tiles.of(*y.shape), tiles, patience)
    return y


def start(
    kernel: Any,
    a: torch.Tensor,
    b: torch.Tensor,
    y: torch.Tensor,
    rank: int,
    slots: Slots,
    counters: Counters,
    wanted: tuple[int, int],
    jobs: int,
    tiles: Tiles,
    patience: float,
) -> None:
    """Start a kernel that multiplies a with b^T, talks to other ranks over slots of at least the size and length `wanted`, and writes y.

    `jobs`: how many tiles its programs share.
    """
    assert a.dim() == b.dim() == 2 and a.shape[1] == b.shape[1] and a.dtype == b.dtype, f"{a.shape} {a.dtype} times {b.shape} {b.dtype}"
    slots.require(*wanted)
    ranks = slots.memory.numel()
    if y.numel():
        a = a if a.stride(1) == 1 else a.contiguous()
        b = b if b.stride(1) == 1 else b.contiguous()
        # the interpreter runs one program after the other: none may wait for what a later one of another rank does
        programs = 1 if interpreted else torch.cuda.get_device_properties(a.device).multi_processor_count
        with torch.cuda.device_of(a):
            kernel[(min(programs, jobs),)](
                a, b, y, slots.memory, slots.flags, *counters, rank, *y.shape, a.shape[1], a.stride(0), b.stride(0),
                slots.size, slots.length, int(patience * 1e9), RANKS=ranks, GROUP=GROUP, **tiles.options(),
            )  # fmt: skip


def matmul_reduce_scatter_ref(a: list[torch.Tensor], b: list[torch.Tensor], rank: int) -> torch.Tensor:
    """What `launch` returns on a rank, in plain torch, from the operands of all ranks."""
    sums = compute_dtype(a[0].dtype)
    parts = [(x.to(sums) @ y.to(sums).t()).chunk(len(a))[rank] for x, y in zip(a, b, strict=True)]
    total = parts[rank]
    for other, part in enumerate(parts):
        if other != rank:
            total = total + part.to(a[0].dtype).to(sums)
    return total.to(a[0].dtype)

"""GEMM + reduce-scatter on Hopper, in Gluon: `matmul_reduce_scatter` with the parts of `matmul_hopper`.

The warp that stores also talks to the other ranks: it copies a tile of their rows from shared memory into their slots, and sets the flag
once all of it is there; to a tile of this rank's rows it fetches what the others have left while its products still run. In the slots a
tile is as large as one that is cut by no edge, its rows one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .backend import gl, gluon_jit, hopper, load_tile, store_tile, tl
from .matmul import place_of
from .matmul_hopper import (
    REGISTERS,
    Tiles,
    descriptor,
    fence_accelerator,
    load_tiles,
    multiply_tiles,
    next_job,
    programs,
    shared,
    stores_have_arrived,
    tiles_for,
    turned,
    weights,
)
from .matmul_reduce_scatter import Slots
from .signals import PATIENCE, Counters, end_of_program, missing_word, signal, wait


@gluon_jit
def exchange_tiles(  # type: ignore[no-untyped-def]
    y, here, others, flags, upper, lower, jobs, offered, read, free, ready, come, taken, calls, trouble, told, rank, rows, cols,
    slot_rows, length, patience,
    RANKS: gl.constexpr, HALF: gl.constexpr, BLOCK_N: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """Give away this program's tiles of the other ranks' rows; add up those of this rank's, and store them in y."""
    call = gl.load(calls) + 1
    first = call % 2 * slot_rows
    tiles = gl.cdiv(rows, 2 * HALF) * gl.cdiv(cols, BLOCK_N)
    mine = gl.load(flags + rank).to(gl.pointer_type(gl.int32))
    done = 0
    again = 0
    number = next_job(jobs, offered, read, done, 1)
    while number < tiles * RANKS:
        turn = number // tiles
        tile = number % tiles
        owner = (rank + 1 + turn) % RANKS
        if owner == rank:
            for part in gl.static_range(1, RANKS):
                source = part - 1 + (part > rank)
                wait(mine + source * length + tile, call, trouble, told, missing_word(source, tile), patience)
                fence_accelerator()
                if part > 1:
                    hopper.mbarrier.wait(taken, again & 1)
                    again += 1
                place = first + (source * tiles + tile) * 2 * HALF
                hopper.mbarrier.expect(come, 2 * HALF * BLOCK_N * 2)
                load_tile(here, [place, 0], come, upper)
                load_tile(here, [place + HALF, 0], come, lower)
        hopper.mbarrier.wait(ready, done & 1)
        if owner == rank:
            row, col = place_of(tile, rows, cols, 2 * HALF, BLOCK_N, GROUP)
            store_tile(y, [row, col], upper)
            store_tile(y, [row + HALF, col], lower)
        else:
            place = first + (rank * tiles + tile) * 2 * HALF
            for following in gl.static_range(RANKS - 1):
                if turn == following:
                    store_tile(others[following], [place, 0], upper)
                    store_tile(others[following], [place + HALF, 0], lower)
        hopper.tma.store_wait(0)
        hopper.mbarrier.arrive(free)
        if owner != rank:
            stores_have_arrived()
            signal(gl.load(flags + owner).to(gl.pointer_type(gl.int32)) + rank * length + tile, call)
        done += 1
        number = next_job(jobs, offered, read, done, 1)
    end_of_program(calls, call)


@gluon_jit
def matmul_reduce_scatter_kernel(  # type: ignore[no-untyped-def]
    a,  # descriptor of [RANKS * rows, depth]
    b,  # descriptor of [cols, depth]
    y,  # descriptor of [rows, cols]
    here,  # descriptor of this rank's slots [2 * slot_rows, BLOCK_N]
    other_1, other_2, other_3, other_4, other_5, other_6, other_7,  # those of rank + 1, rank + 2, ...; None where there are fewer
    flags, calls, trouble, told, rank, rows, cols, depth, slot_rows, length, patience: tl.int64,
    RANKS: gl.constexpr, HALF: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
    TURNED: gl.constexpr, SECOND: gl.constexpr, LOADS: gl.constexpr, STORES: gl.constexpr,
):  # fmt: skip
    """A program does one tile of all ranks' results after the other, this rank's last: those wait."""
    others = (other_1, other_2, other_3, other_4, other_5, other_6, other_7)  # one by one: triton 3.6 starts no kernel with a tuple of them
    uppers, lowers, columns, upper, lower, full, empty, jobs, offered, read, free, ready, come, taken = shared(
        a, b, y, HALF, BLOCK_N, BLOCK_K, STAGES
    )
    gl.warp_specialize(
        [
            (multiply_tiles, (uppers, columns, upper, full, empty, jobs, offered, read, free, ready, come, taken, rank, 1, rows, cols,
                              depth, TURNED, True, RANKS, HALF, BLOCK_N, BLOCK_K, STAGES)),
            (multiply_tiles, (lowers, columns, lower, full, empty, jobs, offered, read, free, ready, come, taken, rank, 1, rows, cols,
                              depth, TURNED, True, RANKS, HALF, BLOCK_N, BLOCK_K, STAGES)),
            (load_tiles, (a, b, uppers, lowers, columns, full, empty, jobs, offered, read, calls, rank, 1, rows, cols, depth,
                          True, TURNED, RANKS, HALF, BLOCK_N, BLOCK_K, STAGES, GROUP)),
            (exchange_tiles, (y, here, others, flags, upper, lower, jobs, offered, read, free, ready, come, taken, calls,
                              trouble, told, rank, rows, cols, slot_rows, length, patience, RANKS, HALF, BLOCK_N, GROUP)),
        ],
        [4, 1, 1],
        [SECOND, LOADS, STORES],
    )  # fmt: skip


def needed(ranks: int, rows: int, cols: int, tiles: Tiles | None = None) -> tuple[int, int]:
    """The least `size` and `length` of slots for a result [rows, cols] on each rank."""
    tiles = tiles or tiles_for(rows, cols)
    return ranks * tiles.of(rows, cols) * 2 * tiles.half * tiles.n * 2, tiles.of(rows, cols)


def launch(
    a: torch.Tensor,
    b: torch.Tensor,
    rank: int,
    slots: Slots,
    parts: Sequence[torch.Tensor],
    counters: Counters,
    *,
    tiles: Tiles | None = None,
    patience: float = PATIENCE,
) -> torch.Tensor:
    """As that of `matmul_reduce_scatter`, in bfloat16. `parts`: every rank's slots, bytes."""
    ranks = len(parts)
    rows, cols = a.shape[0] // ranks, b.shape[0]
    tiles = tiles or tiles_for(rows, cols)
    y = torch.empty(rows, cols, dtype=a.dtype, device=a.device)
    memory = [descriptor(part.view(a.dtype).view(-1, tiles.n), tiles.half, tiles.n) for part in parts]
    grid = (min(programs(a.device), ranks * tiles.of(rows, cols)),)
    matmul_reduce_scatter_kernel[grid](
        descriptor(a, tiles.half, tiles.k), weights(b, tiles), descriptor(y, tiles.half, tiles.n),
        memory[rank], *(memory[(rank + turn) % ranks] if turn < ranks else None for turn in range(1, 8)), slots.flags, *counters, rank,
        rows, cols, a.shape[1], slots.size // tiles.n // 2, slots.length, int(patience * 1e9), TURNED=turned(b), RANKS=ranks,
        SECOND=REGISTERS[0], LOADS=REGISTERS[1], STORES=REGISTERS[2], **tiles.options(),
    )  # fmt: skip
    return y

"""All-gather + GEMM on Hopper, in Gluon: `all_gather_matmul` with the parts of `matmul_hopper`.

One warp more copies this rank's rows to the others, through a piece of shared memory of its own, while the first tiles are multiplied. A
run of rows is as many as a tile has; where they do not divide this rank's rows, the last tile begins earlier, and what it shares with the
one before is computed twice.
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
    load_columns,
    multiply_tiles,
    next_job,
    offer_job,
    programs,
    shared,
    stores_have_arrived,
    tiles_for,
    turned,
    weights,
)
from .matmul_reduce_scatter import Slots
from .signals import PATIENCE, Counters, end_of_program, missing_word, signal, take_job, wait


@gluon_jit
def give_rows(  # type: ignore[no-untyped-def]
    a, ranks, flags, piece, come, ended, calls, trouble, told, rank, rows, depth, length, width, patience,
    RANKS: gl.constexpr, HALF: gl.constexpr, BLOCK_K: gl.constexpr,
):  # fmt: skip
    """Copy one strip after the other of this rank's rows into the slots of all `ranks`: `width` blocks [HALF, BLOCK_K] each."""
    call = gl.load(calls) + 1
    runs = gl.cdiv(rows, 2 * HALF)
    blocks = gl.cdiv(depth, BLOCK_K)
    across = gl.cdiv(blocks, width)
    mine = gl.load(flags + rank).to(gl.pointer_type(gl.int32))
    strip = take_job(calls, 1)
    if strip == 0:
        for following in gl.static_range(1, RANKS):
            signal(gl.load(flags + (rank + following) % RANKS).to(gl.pointer_type(gl.int32)) + rank * length, call)
    for following in gl.static_range(1, RANKS):
        other = (rank + following) % RANKS
        wait(mine + other * length, call, trouble, told, missing_word(other, 0), patience)
    fence_accelerator()
    counts = mine + rank * length + 1
    come_so_far = 0
    while strip < runs * 2 * across:
        run = strip // (2 * across)
        half = strip // across % 2
        first = strip % across * width
        last = gl.minimum(first + width, blocks)
        row = gl.minimum(run * 2 * HALF, rows - 2 * HALF) + half * HALF
        hopper.mbarrier.expect(come.index(come_so_far % 2), HALF * BLOCK_K * 2)
        load_tile(a, [row, first * BLOCK_K], come.index(come_so_far % 2), piece.index(come_so_far % 2))
        for block in range(first, last):
            turn = come_so_far % 2
            hopper.mbarrier.wait(come.index(turn), come_so_far // 2 & 1)
            for following in gl.static_range(RANKS):
                store_tile(ranks[following], [rank * rows + row, block * BLOCK_K], piece.index(turn))
            hopper.tma.store_wait(RANKS)  # the block before has been read
            if block + 1 < last:
                hopper.mbarrier.expect(come.index(1 - turn), HALF * BLOCK_K * 2)
                load_tile(a, [row, (block + 1) * BLOCK_K], come.index(1 - turn), piece.index(1 - turn))
            come_so_far += 1
        stores_have_arrived()
        tl.debug_barrier()
        if tl.atomic_add(counts + run, 1, sem="acq_rel") == 2 * across - 1:  # the run is complete, whoever has copied it
            gl.store(counts + run, 0)
            for following in gl.static_range(1, RANKS):
                signal(gl.load(flags + (rank + following) % RANKS).to(gl.pointer_type(gl.int32)) + rank * length + 1 + run, call)
        strip = take_job(calls, 1)
    hopper.mbarrier.arrive(ended)


@gluon_jit
def load_gathered_tiles(  # type: ignore[no-untyped-def]
    a, b, here, flags, uppers, lowers, columns, full, empty, jobs, offered, read, calls, trouble, told, rank, rows, cols, depth, length,
    patience,
    TURNED: gl.constexpr, RANKS: gl.constexpr, HALF: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
    GROUP: gl.constexpr,
):  # fmt: skip
    """Fill the ring with the operands of this program's tiles: of this rank's rows, then of those that come from rank + 1, rank + 2, ..."""
    call = gl.load(calls) + 1
    tiles = gl.cdiv(rows, 2 * HALF) * gl.cdiv(cols, BLOCK_N)
    mine = gl.load(flags + rank).to(gl.pointer_type(gl.int32))
    loaded = 0
    count = 0
    number = offer_job(jobs, offered, read, count, calls, True)
    while number < tiles * RANKS:
        source = (rank + number // tiles) % RANKS
        row, col = place_of(number % tiles, rows, cols, 2 * HALF, BLOCK_N, GROUP)
        run = row // (2 * HALF)
        row = gl.minimum(row, rows - 2 * HALF)
        if source != rank:
            wait(mine + source * length + 1 + run, call, trouble, told, missing_word(source, run), patience)
            fence_accelerator()
        for start in range(0, depth, BLOCK_K):
            stage = loaded % STAGES
            hopper.mbarrier.wait(empty.index(stage), loaded // STAGES & 1 ^ 1)
            hopper.mbarrier.expect(full.index(stage), (2 * HALF + BLOCK_N) * BLOCK_K * 2)
            if source == rank:
                load_tile(a, [row, start], full.index(stage), uppers.index(stage))
                load_tile(a, [row + HALF, start], full.index(stage), lowers.index(stage))
            else:
                load_tile(here, [source * rows + row, start], full.index(stage), uppers.index(stage))
                load_tile(here, [source * rows + row + HALF, start], full.index(stage), lowers.index(stage))
            load_columns(b, col, start, full.index(stage), columns.index(stage), TURNED)
            loaded += 1
        count += 1
        number = offer_job(jobs, offered, read, count, calls, True)


@gluon_jit
def store_gathered_tiles(  # type: ignore[no-untyped-def]
    y, upper, lower, jobs, offered, read, free, ready, ended, calls, rank, rows, cols,
    RANKS: gl.constexpr, HALF: gl.constexpr, BLOCK_N: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """Store this program's tiles at their places in y."""
    call = gl.load(calls) + 1
    tiles = gl.cdiv(rows, 2 * HALF) * gl.cdiv(cols, BLOCK_N)
    stored = 0
    number = next_job(jobs, offered, read, stored, 1)
    while number < tiles * RANKS:
        row, col = place_of(number % tiles, rows, cols, 2 * HALF, BLOCK_N, GROUP)
        row = gl.minimum(row, rows - 2 * HALF) + (rank + number // tiles) % RANKS * rows
        hopper.mbarrier.wait(ready, stored & 1)
        store_tile(y, [row, col], upper)
        store_tile(y, [row + HALF, col], lower)
        hopper.tma.store_wait(0)
        hopper.mbarrier.arrive(free)
        stored += 1
        number = next_job(jobs, offered, read, stored, 1)
    hopper.mbarrier.wait(ended, 0)  # what copies has read the number of calls too
    end_of_program(calls, call)


@gluon_jit
def all_gather_matmul_kernel(  # type: ignore[no-untyped-def]
    a,  # descriptor of [rows, depth], this rank's
    b,  # descriptor of [cols, depth]
    y,  # descriptor of [RANKS * rows, cols]
    here,  # descriptor of this rank's slots [RANKS * rows, depth]
    other_1, other_2, other_3, other_4, other_5, other_6, other_7,  # those of rank + 1, rank + 2, ...; None where there are fewer
    flags, calls, trouble, told, rank, rows, cols, depth, length, width, patience: tl.int64,
    RANKS: gl.constexpr, HALF: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
    TURNED: gl.constexpr, SECOND: gl.constexpr, LOADS: gl.constexpr, STORES: gl.constexpr,
):  # fmt: skip
    """A program copies one strip after the other, and computes one tile after the other, those of this rank's rows first."""
    ranks = (here, other_1, other_2, other_3, other_4, other_5, other_6, other_7)  # one by one: triton 3.6 starts no kernel with a tuple
    uppers, lowers, columns, upper, lower, full, empty, jobs, offered, read, free, ready, come, taken = shared(
        a, b, y, HALF, BLOCK_N, BLOCK_K, STAGES
    )
    piece = gl.allocate_shared_memory(a.dtype, [2, HALF, BLOCK_K], a.layout)
    copies = gl.allocate_shared_memory(gl.int64, [3, 1], hopper.mbarrier.MBarrierLayout())
    for barrier in gl.static_range(3):
        hopper.mbarrier.init(copies.index(barrier), count=1)
    hopper.fence_async_shared()
    gl.warp_specialize(
        [
            (multiply_tiles, (uppers, columns, upper, full, empty, jobs, offered, read, free, ready, come, taken, rank, 0, rows, cols,
                              depth, TURNED, False, RANKS, HALF, BLOCK_N, BLOCK_K, STAGES)),
            (multiply_tiles, (lowers, columns, lower, full, empty, jobs, offered, read, free, ready, come, taken, rank, 0, rows, cols,
                              depth, TURNED, False, RANKS, HALF, BLOCK_N, BLOCK_K, STAGES)),
            (load_gathered_tiles, (a, b, here, flags, uppers, lowers, columns, full, empty, jobs, offered, read, calls, trouble, told,
                                   rank, rows, cols, depth, length, patience, TURNED, RANKS, HALF, BLOCK_N, BLOCK_K, STAGES, GROUP)),
            (store_gathered_tiles, (y, upper, lower, jobs, offered, read, free, ready, copies.index(2), calls, rank, rows, cols,
                                    RANKS, HALF, BLOCK_N, GROUP)),
            (give_rows, (a, ranks, flags, piece, copies, copies.index(2), calls, trouble, told, rank, rows, depth, length, width, patience,
                         RANKS, HALF, BLOCK_K)),
        ],
        [4, 1, 1, 1],
        [SECOND, LOADS, STORES, STORES],
    )  # fmt: skip


def needed(ranks: int, rows: int, depth: int, tiles: Tiles) -> tuple[int, int]:
    """The least `size` and `length` of slots for [rows, depth] of each rank. The gathered rows [ranks * rows, depth] begin them."""
    return ranks * rows * depth * 2, 1 + -(-rows // (2 * tiles.half))


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
    """As that of `all_gather_matmul`, in bfloat16, for at least as many rows as a tile has. `parts`: every rank's slots, bytes."""
    ranks, (rows, depth), cols = len(parts), a.shape, b.shape[0]
    tiles = tiles or tiles_for(ranks * rows, cols)
    y = torch.empty(ranks * rows, cols, dtype=a.dtype, device=a.device)
    memory = [descriptor(part[: ranks * rows * depth * 2].view(a.dtype).view(-1, depth), tiles.half, tiles.k) for part in parts]
    jobs, blocks = ranks * tiles.of(rows, cols), -(-depth // tiles.k)
    running = min(programs(a.device), jobs)
    width = min(blocks, max(1, 2 * -(-rows // (2 * tiles.half)) * blocks // running))
    all_gather_matmul_kernel[(running,)](
        descriptor(a, tiles.half, tiles.k), weights(b, tiles), descriptor(y, tiles.half, tiles.n),
        memory[rank], *(memory[(rank + turn) % ranks] if turn < ranks else None for turn in range(1, 8)), slots.flags, *counters, rank,
        rows, cols, depth, slots.length, width, int(patience * 1e9), TURNED=turned(b), RANKS=ranks,
        SECOND=REGISTERS[0], LOADS=REGISTERS[1], STORES=REGISTERS[2], **tiles.options(),
    )  # fmt: skip
    return y

"""GEMM + all-reduce on Hopper, in Gluon: `matmul_reduce_scatter_hopper`, whose sums then go to all other ranks in the same call.

Each rank sums up its share of the rows, and gives every tile of the sum to the others as it did with the parts. When a program has no
product left to compute, it fetches sums of other ranks into its own result. Where tiles do not divide a rank's share, the last one begins
earlier, and what it shares with the one before is computed twice, with the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .backend import gl, gluon_jit, hopper, store_tile, tl
from .launch_hopper import WIDTH, Prepared, Starter, Tiles, descriptor, programs
from .matmul import place_of
from .matmul_hopper import LOADS, SECOND, STORES, multiply_tiles, next_job, shared
from .matmul_reduce_scatter import Slots
from .matmul_reduce_scatter_hopper import BOX, fetch_parts, fetch_tile, give_part, give_tile, late_by, load_scattered_tiles
from .signals import PATIENCE, Counters, end_of_program, fence_accelerator, missing_word, take_job, tell_others, wait


@gluon_jit
def exchange_sums(  # type: ignore[no-untyped-def]
    y, here, memory, flags, upper, lower, jobs, offered, read, free, ready, come, taken, fetched, calls, trouble, told, rank, rows, cols,
    slot_rows, length, patience,
    RANKS: gl.constexpr, HALF: gl.constexpr, BLOCK_N: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """Give away this program's tiles of the other ranks' rows; add up those of this rank's, store them in y, and give them away; at last
    store in y what the others have added up.
    """
    ACROSS: gl.constexpr = BLOCK_N // BOX
    TILE: gl.constexpr = 2 * ACROSS * HALF
    call = gl.load(calls) + 1
    first = (call & 1) * slot_rows
    tiles = gl.cdiv(rows, 2 * HALF) * gl.cdiv(cols, BLOCK_N)
    sums = first + RANKS * tiles * TILE
    mine = gl.load(flags + rank).to(gl.pointer_type(gl.int32))
    done = 0
    again = 0
    number = next_job(jobs, offered, read, done, 1)
    while number < tiles * RANKS:
        tile = number % tiles
        owner = (rank + 1 + number // tiles) % RANKS
        if owner == rank:
            again = fetch_parts(
                here, flags, upper, lower, come, taken, again, call, trouble, told, rank, tile, first, tiles, length, patience,
                RANKS, ACROSS, HALF,
            )  # fmt: skip
        hopper.mbarrier.wait(ready, done & 1)
        if owner == rank:
            row, col = place_of(tile, rows, cols, 2 * HALF, BLOCK_N, GROUP)
            row = gl.minimum(row, rows - 2 * HALF) + rank * rows
            store_tile(y, [row, col], upper)
            store_tile(y, [row + HALF, col], lower)
            place = (sums + (rank * tiles + tile) * TILE).to(gl.int64) * BOX * 2
            for following in gl.static_range(1, RANKS):
                give_tile(gl.load(memory + (rank + following) % RANKS) + place, upper, lower, ACROSS, HALF)
            hopper.tma.store_wait(0)
            hopper.mbarrier.arrive(free)
            tell_others(flags, rank, rank * length + tiles + tile, call, RANKS)
        else:
            give_part(memory, flags, upper, lower, free, call, rank, owner, tile, first, tiles, length, ACROSS, HALF)
        done += 1
        number = next_job(jobs, offered, read, done, 1)
    count = 0
    sum_number = take_job(calls, 1)
    while sum_number < tiles * (RANKS - 1):
        source = (rank + 1 + sum_number % (RANKS - 1)) % RANKS
        tile = sum_number // (RANKS - 1)
        wait(mine + source * length + tiles + tile, call, trouble, told, missing_word(source, tiles + tile), patience)
        fence_accelerator()
        fetch_tile(here, sums + (source * tiles + tile) * TILE, fetched, upper, lower, ACROSS, HALF)
        hopper.mbarrier.wait(fetched, count & 1)
        row, col = place_of(tile, rows, cols, 2 * HALF, BLOCK_N, GROUP)
        row = gl.minimum(row, rows - 2 * HALF) + source * rows
        store_tile(y, [row, col], upper)
        store_tile(y, [row + HALF, col], lower)
        hopper.tma.store_wait(0)
        count += 1
        sum_number = take_job(calls, 1)
    end_of_program(calls, call)


@gluon_jit(do_not_specialize=["rank", "rows", "cols", "depth", "slot_rows", "length", "late_by", "patience"])
def matmul_all_reduce_kernel(  # type: ignore[no-untyped-def]
    a,  # descriptor of [RANKS * rows, depth]
    b,  # descriptor of [cols, depth]
    y,  # descriptor of [RANKS * rows, cols]
    here,  # descriptor of this rank's slots [2 * slot_rows, BOX]
    memory, flags, calls, trouble, told, rank, rows, cols, depth, slot_rows, length, late_by, patience: tl.int64,
    RANKS: gl.constexpr, TURNED: gl.constexpr, HALF: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
    GROUP: gl.constexpr,
):  # fmt: skip
    """A program does one tile of all ranks' rows after the other, of which this rank's wait; then it fetches the others' sums."""
    uppers, lowers, columns, upper, lower, full, empty, jobs, offered, read, free, ready, come, taken = shared(
        a, b, y, HALF, BLOCK_N, BLOCK_K, STAGES
    )
    fetched = gl.allocate_shared_memory(gl.int64, [1], hopper.mbarrier.MBarrierLayout())
    hopper.mbarrier.init(fetched, count=1)
    hopper.fence_async_shared()
    gl.warp_specialize(
        [
            (multiply_tiles, (uppers, columns, upper, full, empty, jobs, offered, read, free, ready, come, taken, rows, cols, depth,
                              TURNED, True, RANKS, HALF, BLOCK_N, BLOCK_K, STAGES)),
            (multiply_tiles, (lowers, columns, lower, full, empty, jobs, offered, read, free, ready, come, taken, rows, cols, depth,
                              TURNED, True, RANKS, HALF, BLOCK_N, BLOCK_K, STAGES)),
            (load_scattered_tiles, (a, b, uppers, lowers, columns, full, empty, jobs, offered, read, calls, rank, rows, cols, depth,
                                    late_by, TURNED, True, RANKS, HALF, BLOCK_N, BLOCK_K, STAGES, GROUP)),
            (exchange_sums, (y, here, memory, flags, upper, lower, jobs, offered, read, free, ready, come, taken, fetched, calls,
                             trouble, told, rank, rows, cols, slot_rows, length, patience, RANKS, HALF, BLOCK_N, GROUP)),
        ],
        [4, 1, 1],
        [SECOND, LOADS, STORES],
    )  # fmt: skip


def needed(ranks: int, rows: int, cols: int, tiles: Tiles) -> tuple[int, int]:
    """The least `size` and `length` of slots for a result of which each rank sums up [rows, cols]."""
    return 2 * ranks * tiles.of(rows, cols) * 2 * tiles.half * tiles.n * 2, 2 * tiles.of(rows, cols)


def prepare(
    a: torch.Tensor,
    b: torch.Tensor,
    rank: int,
    slots: Slots,
    parts: Sequence[torch.Tensor],
    counters: Counters,
    *,
    tiles: Tiles,
    patience: float = PATIENCE,
    starter: Starter | None = None,
) -> Prepared:
    """As `launch` of `matmul_all_reduce`, in bfloat16, for rows that the ranks divide into shares of at least a tile's. `parts`: every
    rank's slots, bytes.
    """
    ranks, (count, depth), cols = len(parts), a.shape, b.shape[0]
    rows = count // ranks
    slots.require(*needed(ranks, rows, cols, tiles))
    assert count == ranks * rows and rows >= 2 * tiles.half, f"{count} rows of {ranks} ranks, by tiles of {2 * tiles.half}"
    here = descriptor(parts[rank].view(a.dtype).view(-1, WIDTH), tiles.half, WIDTH)
    running = min(programs(a.device), ranks * tiles.of(rows, cols))
    late = late_by(ranks, rows, cols, depth, tiles, running)
    sizes = rows, cols, depth, slots.size // 2 // WIDTH, slots.length, late, int(patience * 1e9)
    rest = here, *slots[:2], *counters, rank, *sizes
    return Prepared(matmul_all_reduce_kernel, running, a, b, (count, cols), tiles, rest, {"RANKS": ranks}, starter)

"""GEMM + reduce-scatter on Hopper, in Gluon: `matmul_reduce_scatter` with the parts of `matmul_hopper`.

The warp that stores also talks to the other ranks: it copies a tile of their rows from shared memory into their slots, and sets the flag
once all of it is there; to a tile of this rank's rows it fetches what the others have left while its products still run. In the slots a
tile is as large as one that is cut by no edge, and lies there as boxes of `WIDTH` columns, one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .backend import constant, gl, gluon_jit, hopper, load_tile, store_tile, tl
from .launch_hopper import LARGE, LINK, SPEED, WIDTH, Prepared, Starter, Tiles, descriptor, programs
from .matmul import place_of
from .matmul_hopper import LOADS, SECOND, STORES, load_operands, multiply_tiles, next_job, offer_job, shared
from .matmul_reduce_scatter import Slots
from .signals import PATIENCE, Counters, end_of_program, fence_accelerator, missing_word, signal, take_job, wait

BOX = constant(WIDTH)  # columns
SLOW = 1.4  # the link's time for a tile over that of its product, below which small tiles of own rows come last (2 x H200, as in `late_by`)


@gluon_jit
def give_tile(address, upper, lower, ACROSS: gl.constexpr, HALF: gl.constexpr):  # type: ignore[no-untyped-def]
    """Store the halves of a tile in another rank's slots, box after box.

    By the warp itself: behind what the accelerator stores over a busy link, the loads of the next tile's operands would have to wait (2 x
    H200, 8192x4096x7168 on each: 751 us against 798).
    """
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0])
    places = gl.arange(0, 8, gl.SliceLayout(1, layout))[:, None] * BOX + gl.arange(0, BOX, gl.SliceLayout(0, layout))[None, :]
    to = gl.multiple_of(address.to(gl.pointer_type(upper.dtype)), 16) + places  # so a thread stores 16 bytes at once
    for box in gl.static_range(ACROSS):
        for strip in gl.static_range(HALF // 8):
            gl.store(to + (box * HALF + strip * 8) * BOX, upper.slice(box * BOX, BOX, 1).slice(strip * 8, 8, 0).load(layout))
            gl.store(to + ((ACROSS + box) * HALF + strip * 8) * BOX, lower.slice(box * BOX, BOX, 1).slice(strip * 8, 8, 0).load(layout))
    tl.debug_barrier()


@gluon_jit
def fetch_tile(here, place, come, upper, lower, ACROSS: gl.constexpr, HALF: gl.constexpr):  # type: ignore[no-untyped-def]
    """Begin to load what another rank has left in this rank's slots; `come` tells when it is there."""
    hopper.mbarrier.expect(come, 2 * ACROSS * HALF * BOX * 2)
    for box in gl.static_range(ACROSS):
        load_tile(here, [place + box * HALF, 0], come, upper.slice(box * BOX, BOX, 1))
        load_tile(here, [place + (ACROSS + box) * HALF, 0], come, lower.slice(box * BOX, BOX, 1))


@gluon_jit
def fetch_parts(  # type: ignore[no-untyped-def]
    here, flags, upper, lower, come, taken, again, call, trouble, told, rank, tile, first, tiles, length, patience,
    RANKS: gl.constexpr, ACROSS: gl.constexpr, HALF: gl.constexpr,
):  # fmt: skip
    """Fetch what the other ranks have left for a tile of this rank's rows, one after the other, as soon as the one before is `taken`; how
    often that had happened `again` then.
    """
    mine = gl.load(flags + rank).to(gl.pointer_type(gl.int32))
    for part in gl.static_range(1, RANKS):
        source = part - 1 + (part > rank)
        wait(mine + source * length + tile, call, trouble, told, missing_word(source, tile), patience)
        fence_accelerator()
        if part > 1:
            hopper.mbarrier.wait(taken, again & 1)
            again += 1
        fetch_tile(here, first + (source * tiles + tile) * 2 * ACROSS * HALF, come, upper, lower, ACROSS, HALF)
    return again


@gluon_jit
def give_part(  # type: ignore[no-untyped-def]
    memory, flags, upper, lower, free, call, rank, owner, tile, first, tiles, length, ACROSS: gl.constexpr, HALF: gl.constexpr,
):  # fmt: skip
    """Leave this rank's part of a tile of its `owner`'s rows in that one's slots."""
    place = first + (rank * tiles + tile) * 2 * ACROSS * HALF
    give_tile(gl.load(memory + owner) + place.to(gl.int64) * BOX * 2, upper, lower, ACROSS, HALF)
    hopper.mbarrier.arrive(free)
    signal(gl.load(flags + owner).to(gl.pointer_type(gl.int32)) + rank * length + tile, call)


@gluon_jit
def scattered_job(place, tiles, late_by, RANKS: gl.constexpr):  # type: ignore[no-untyped-def]
    """The number of the job at a place of the queue; beyond the last, RANKS * tiles or more.

    Tile by tile come those of the rows of rank + 1, rank + 2, ..., and each tile of this rank's rows after the others' that are `late_by`
    further on. All ranks have one order, in which what a tile waits for stands before it: so the first of all that are under way waits for
    nothing.
    """
    OTHERS: gl.constexpr = RANKS - 1
    mixed = place - late_by * OTHERS  # from here on each tile is followed by one of this rank's
    last = mixed - (tiles - late_by) * RANKS  # from here on there are no others
    if mixed < 0:
        turn = place % OTHERS
        tile = place // OTHERS
    elif last < 0:
        turn = mixed % RANKS
        tile = mixed // RANKS
        if turn < OTHERS:
            tile += late_by
    else:
        turn = OTHERS
        tile = tiles - late_by + last
    return turn * tiles + tile


@gluon_jit
def load_scattered_tiles(  # type: ignore[no-untyped-def]
    a, b, uppers, lowers, columns, full, empty, jobs, offered, read, calls, rank, rows, cols, depth,
    late_by,
    TURNED: gl.constexpr, WITHIN: gl.constexpr, RANKS: gl.constexpr, HALF: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """Fill the ring with the operands of this program's tiles. WITHIN: the last tile begins earlier, where it would go beyond the rows of
    its rank.
    """
    tiles = gl.cdiv(rows, 2 * HALF) * gl.cdiv(cols, BLOCK_N)
    loaded = 0
    count = 0
    number = scattered_job(take_job(calls, 0), tiles, late_by, RANKS)
    offer_job(jobs, offered, read, count, number)
    while number < tiles * RANKS:
        row, col = place_of(number % tiles, rows, cols, 2 * HALF, BLOCK_N, GROUP)
        if WITHIN:
            row = gl.minimum(row, rows - 2 * HALF)
        row += (rank + 1 + number // tiles) % RANKS * rows
        loaded = load_operands(a, b, row, col, depth, uppers, lowers, columns, full, empty, loaded, TURNED, HALF, BLOCK_N, BLOCK_K, STAGES)
        count += 1
        number = scattered_job(take_job(calls, 0), tiles, late_by, RANKS)
        offer_job(jobs, offered, read, count, number)


@gluon_jit
def exchange_tiles(  # type: ignore[no-untyped-def]
    y, here, memory, flags, upper, lower, jobs, offered, read, free, ready, come, taken, calls, trouble, told, rank, rows, cols,
    slot_rows, length, patience,
    RANKS: gl.constexpr, HALF: gl.constexpr, BLOCK_N: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """Give away this program's tiles of the other ranks' rows; add up those of this rank's, and store them in y."""
    ACROSS: gl.constexpr = BLOCK_N // BOX
    call = gl.load(calls) + 1
    first = (call & 1) * slot_rows
    tiles = gl.cdiv(rows, 2 * HALF) * gl.cdiv(cols, BLOCK_N)
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
            store_tile(y, [row, col], upper)
            store_tile(y, [row + HALF, col], lower)
            hopper.tma.store_wait(0)
            hopper.mbarrier.arrive(free)
        else:
            give_part(memory, flags, upper, lower, free, call, rank, owner, tile, first, tiles, length, ACROSS, HALF)
        done += 1
        number = next_job(jobs, offered, read, done, 1)
    end_of_program(calls, call)


@gluon_jit(do_not_specialize=["rank", "rows", "cols", "depth", "slot_rows", "length", "late_by", "patience"])
def matmul_reduce_scatter_kernel(  # type: ignore[no-untyped-def]
    a,  # descriptor of [RANKS * rows, depth]
    b,  # descriptor of [cols, depth]
    y,  # descriptor of [rows, cols]
    here,  # descriptor of this rank's slots [2 * slot_rows, BOX]
    memory, flags, calls, trouble, told, rank, rows, cols, depth, slot_rows, length, late_by, patience: tl.int64,
    RANKS: gl.constexpr, TURNED: gl.constexpr, HALF: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
    GROUP: gl.constexpr,
):  # fmt: skip
    """A program does one tile of all ranks' results after the other. Those of this rank's wait."""
    uppers, lowers, columns, upper, lower, full, empty, jobs, offered, read, free, ready, come, taken = shared(
        a, b, y, HALF, BLOCK_N, BLOCK_K, STAGES
    )
    gl.warp_specialize(
        [
            (multiply_tiles, (uppers, columns, upper, full, empty, jobs, offered, read, free, ready, come, taken, rows, cols, depth,
                              TURNED, True, RANKS, HALF, BLOCK_N, BLOCK_K, STAGES)),
            (multiply_tiles, (lowers, columns, lower, full, empty, jobs, offered, read, free, ready, come, taken, rows, cols, depth,
                              TURNED, True, RANKS, HALF, BLOCK_N, BLOCK_K, STAGES)),
            (load_scattered_tiles, (a, b, uppers, lowers, columns, full, empty, jobs, offered, read, calls, rank, rows, cols, depth,
                                    late_by, TURNED, False, RANKS, HALF, BLOCK_N, BLOCK_K, STAGES, GROUP)),
            (exchange_tiles, (y, here, memory, flags, upper, lower, jobs, offered, read, free, ready, come, taken, calls,
                              trouble, told, rank, rows, cols, slot_rows, length, patience, RANKS, HALF, BLOCK_N, GROUP)),
        ],
        [4, 1, 1],
        [SECOND, LOADS, STORES],
    )  # fmt: skip


def needed(ranks: int, rows: int, cols: int, tiles: Tiles) -> tuple[int, int]:
    """The least `size` and `length` of slots for a result [rows, cols] on each rank."""
    return ranks * tiles.of(rows, cols) * 2 * tiles.half * tiles.n * 2, tiles.of(rows, cols)


def late_by(ranks: int, rows: int, cols: int, depth: int, tiles: Tiles, running: int) -> int:
    """By how many tiles this rank's own come after those of the other ranks' rows, for results [rows, cols] of two ranks or more: by as
    many as the `running` programs compute at once.

    If all came last, the link would stand still while they are computed. But operands of own and of other rows are in the cache together
    then, and small tiles read them more often: those come last, unless the link is much the slower. (2 x H200, own tiles a wave later
    against last: [8192, 2048] of depth 1024 137 us against 164, with small tiles 144 against 167; [8192, 4096] of depth 3072 694 against
    698, with small tiles 738 against 693.) Constants of an H200 cost time elsewhere, and change no value.
    """
    count = tiles.of(rows, cols)
    carried, computed = 4 * tiles.half * tiles.n / LINK, 4 * tiles.half * tiles.n * depth / SPEED / running  # seconds of a tile
    if tiles.n < LARGE.n and carried < SLOW * computed:
        return count
    return min(count, -(-running // (ranks - 1)))


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
    """As `launch` of `matmul_reduce_scatter`, in bfloat16. `parts`: every rank's slots, bytes."""
    ranks, depth, cols = len(parts), a.shape[1], b.shape[0]
    rows = a.shape[0] // ranks
    slots.require(*needed(ranks, rows, cols, tiles))
    assert a.shape[0] == ranks * rows, f"{a.shape[0]} rows of {ranks} ranks"
    here = descriptor(parts[rank].view(a.dtype).view(-1, WIDTH), tiles.half, WIDTH)
    running = min(programs(a.device), ranks * tiles.of(rows, cols))
    late = late_by(ranks, rows, cols, depth, tiles, running)
    sizes = rows, cols, depth, slots.size // 2 // WIDTH, slots.length, late, int(patience * 1e9)
    rest = here, *slots[:2], *counters, rank, *sizes
    return Prepared(matmul_reduce_scatter_kernel, running, a, b, (rows, cols), tiles, rest, {"RANKS": ranks}, starter)

"""All-gather + GEMM on Hopper, in Gluon: `all_gather_matmul` with the parts of `matmul_hopper`.

Some programs give this rank's rows to the others before they multiply, through the ring in which they keep operands later: a few at the
start, and whichever would have to wait for other ranks' rows, or has nothing to multiply. The rest multiplies this rank's rows meanwhile.
(If all gave a little, all would wait: what the accelerator loads stands behind what it stores over the link.) A run of rows is as many as a
tile has; where they do not divide this rank's rows, the last tile begins earlier, and what it shares with the one before is computed twice.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from .backend import gl, gluon_jit, hopper, load_tile, store_tile, tl
from .launch_hopper import LINK, SPEED, Prepared, Starter, Tiles, descriptor, programs
from .matmul import GROUP, place_of
from .matmul_hopper import (
    LOADS,
    SECOND,
    STORES,
    load_operands,
    multiply_tiles,
    next_job,
    offer_job,
    shared,
)
from .matmul_reduce_scatter import Slots
from .signals import (
    PATIENCE,
    Counters,
    end_of_program,
    fence_accelerator,
    has_come,
    missing_word,
    stores_have_arrived,
    take_job,
    tell_others,
    wait,
)

LEAST_GIVERS, MOST_GIVERS = 8, 32  # programs that give rows away before they multiply, where they have several tiles each
STRIP = 64  # blocks that one of them gives away at a time, at most; before the next, what it has stored must have arrived
LATENCY, GIVEN = 20e-6, 40e9  # of an H200: seconds until rows begin to come, bytes in a second of one program that gives


@gluon_jit
def piece(uppers, lowers, columns, stage, number: gl.constexpr, TURNED: gl.constexpr, HALF: gl.constexpr):  # type: ignore[no-untyped-def]
    """One of the pieces [HALF, BLOCK_K] of shared memory that a stage of the ring consists of; where the columns are TURNED, HALF is
    BLOCK_K.
    """
    if number == 0:
        return uppers.index(stage)
    elif number == 1:
        return lowers.index(stage)
    elif TURNED:
        return columns.index(stage).slice((number - 2) * HALF, HALF, 1)
    else:
        return columns.index(stage).slice((number - 2) * HALF, HALF, 0)


@gluon_jit
def copy_rows(  # type: ignore[no-untyped-def]
    a, ranks, uppers, lowers, columns, come, copied, strip, rank, rows, depth, width,
    TURNED: gl.constexpr, FROM: gl.constexpr, TO: gl.constexpr, HALF: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Copy a strip of this rank's rows, `width` blocks [2 * HALF, BLOCK_K], to its place in the slots of those of `ranks`, as many blocks
    at a time as a stage of the ring can hold. How many stages were `copied` then.
    """
    AHEAD: gl.constexpr = STAGES // 2  # stages that are loaded before the first is stored
    HELD: gl.constexpr = 1 + BLOCK_N // (2 * HALF)
    blocks = gl.cdiv(depth, BLOCK_K)
    across = gl.cdiv(blocks, width)
    first = strip % across * width
    count = gl.cdiv(gl.minimum(width, blocks - first), HELD)  # what lies beyond the last block is neither loaded nor stored
    row = gl.minimum(strip // across * 2 * HALF, rows - 2 * HALF)
    for step in range(count + AHEAD):
        if step < count:
            stage = (copied + step) % STAGES
            hopper.tma.store_wait((STAGES - 1 - AHEAD) * 2 * HELD * (TO - FROM))  # what was in this stage has been read
            hopper.mbarrier.expect(come.index(stage), HELD * 2 * HALF * BLOCK_K * 2)
            for number in gl.static_range(2 * HELD):
                at = [row + number % 2 * HALF, (first + step * HELD + number // 2) * BLOCK_K]
                load_tile(a, at, come.index(stage), piece(uppers, lowers, columns, stage, number, TURNED, HALF))
        if step >= AHEAD:
            done = step - AHEAD
            stage = (copied + done) % STAGES
            hopper.mbarrier.wait(come.index(stage), (copied + done) // STAGES & 1)
            for number in gl.static_range(2 * HELD):
                at = [rank * rows + row + number % 2 * HALF, (first + done * HELD + number // 2) * BLOCK_K]
                for following in gl.static_range(FROM, TO):
                    store_tile(ranks[following], at, piece(uppers, lowers, columns, stage, number, TURNED, HALF))
    stores_have_arrived()
    tl.debug_barrier()
    return copied + count


@gluon_jit
def give_rows(  # type: ignore[no-untyped-def]
    a, ranks, flags, uppers, lowers, columns, come, calls, call, trouble, told, rank, rows, depth, length, width, patience,
    TURNED: gl.constexpr, RANKS: gl.constexpr, HALF: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Copy into the slots of all other ranks one strip after the other that no program has taken yet. How many stages were copied, and the
    strip that was taken last.
    """
    runs = gl.cdiv(rows, 2 * HALF)
    across = gl.cdiv(gl.cdiv(depth, BLOCK_K), width)
    mine = gl.load(flags + rank).to(gl.pointer_type(gl.int32))
    counts = mine + rank * length + 1
    strip = take_job(calls, 1)
    if strip < runs * across:
        for following in gl.static_range(1, RANKS):
            other = (rank + following) % RANKS
            wait(mine + other * length, call, trouble, told, missing_word(other, 0), patience)
        fence_accelerator()
    copied = 0
    while strip < runs * across:
        copied = copy_rows(
            a, ranks, uppers, lowers, columns, come, copied, strip, rank, rows, depth, width,
            TURNED, 1, RANKS, HALF, BLOCK_N, BLOCK_K, STAGES,
        )  # fmt: skip
        run = strip // across
        if tl.atomic_add(counts + run, 1, sem="acq_rel") == across - 1:  # the run is complete, whoever has copied it
            gl.store(counts + run, 0)
            tell_others(flags, rank, rank * length + 1 + run, call, RANKS)
            if tl.atomic_add(counts + runs, 1, sem="acq_rel") == runs - 1:  # and so are all
                gl.store(counts + runs, 0)
                tell_others(flags, rank, rank * length + 1 + runs, call, RANKS)
        strip = take_job(calls, 1)
    return copied, strip


@gluon_jit
def ring_is_free(empty, loaded, STAGES: gl.constexpr):  # type: ignore[no-untyped-def]
    """Wait until all that was loaded has been multiplied."""
    for step in range(gl.maximum(loaded - STAGES, 0), loaded):
        hopper.mbarrier.wait(empty.index(step % STAGES), step // STAGES & 1)


@gluon_jit
def load_gathered_tiles(  # type: ignore[no-untyped-def]
    a, b, here, ranks, flags, uppers, lowers, columns, full, empty, come, jobs, offered, read, calls, trouble, told, rank, rows, cols,
    depth, length, width, narrow, first, givers, lead, patience,
    TURNED: gl.constexpr, KEEP: gl.constexpr, RANKS: gl.constexpr, HALF: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """Fill the ring with the operands of this program's tiles. It gives rows away, if its first tile is one of `givers` from number `first`
    on, and otherwise before it needs those of other ranks, or ends.

    First come the tiles of this rank's rows in the first `lead` columns of tiles; then in all other columns those of all ranks; then in the
    first columns those of the other ranks. Tile [i, j] of the rows of rank + turn is number (turn * across + j) * down + i.
    """
    call = gl.load(calls) + 1
    down = gl.cdiv(rows, 2 * HALF)
    across = gl.cdiv(cols, BLOCK_N)
    mine = gl.load(flags + rank).to(gl.pointer_type(gl.int32))
    loaded = 0
    count = 0
    given = 0
    copied = 0
    strip = 0
    whole = 0  # bit `turn`: all rows of rank + turn are known to have come
    more = 1
    job = take_job(calls, 0)
    if job == 0:  # this rank's slots may be written: the sooner others know, the sooner rows come
        tell_others(flags, rank, rank * length, call, RANKS)
    while more > 0:
        mixed = job - lead * down
        late = mixed - (across - lead) * down * RANKS
        if mixed < 0:
            turn = 0
            row, col = place_of(job, rows, lead * BLOCK_N, 2 * HALF, BLOCK_N, GROUP)
        elif late < 0:
            turn = mixed // down % RANKS
            row = mixed % down * 2 * HALF
            col = (lead + mixed // (down * RANKS)) * BLOCK_N
        else:
            turn = 1 + late // (lead * down)
            row, col = place_of(late % (lead * down), rows, lead * BLOCK_N, 2 * HALF, BLOCK_N, GROUP)
        if (given == 0) & (((job >= first) & (job < first + givers)) | (turn > 0)):
            given = 1
            ring_is_free(empty, loaded, STAGES)
            copied, strip = give_rows(
                a, ranks, flags, uppers, lowers, columns, come, calls, call, trouble, told, rank, rows, depth, length, width, patience,
                TURNED, RANKS, HALF, BLOCK_N, BLOCK_K, STAGES,
            )  # fmt: skip
        if job < down * across * RANKS:
            run = row // (2 * HALF)
            offer_job(jobs, offered, read, count, (turn * across + col // BLOCK_N) * down + run)
            row = gl.minimum(row, rows - 2 * HALF)
            if turn == 0:
                loaded = load_operands(
                    a, b, row, col, depth, uppers, lowers, columns, full, empty, loaded, TURNED, HALF, BLOCK_N, BLOCK_K, STAGES
                )
            else:
                source = (rank + turn) % RANKS
                if (whole >> turn & 1) == 0:
                    all_have = has_come(mine + source * length + 1 + down, call)
                    fence_accelerator()
                    if all_have:
                        whole = whole | (1 << turn)
                    else:
                        wait(mine + source * length + 1 + run, call, trouble, told, missing_word(source, run), patience)
                        fence_accelerator()
                loaded = load_operands(
                    here, b, source * rows + row, col, depth, uppers, lowers, columns, full, empty, loaded,
                    TURNED, HALF, BLOCK_N, BLOCK_K, STAGES,
                )  # fmt: skip
            count += 1
            job = take_job(calls, 0)
        else:
            more = 0
    if KEEP:  # by those that have nothing to multiply any more: what givers copy besides would keep them from their tiles
        ring_is_free(empty, loaded, STAGES)
        blocks = gl.cdiv(depth, BLOCK_K)
        strip -= down * gl.cdiv(blocks, width)
        while strip < down * gl.cdiv(blocks, narrow):
            copied = copy_rows(
                a, ranks, uppers, lowers, columns, come, copied, strip, rank, rows, depth, narrow,
                TURNED, 0, 1, HALF, BLOCK_N, BLOCK_K, STAGES,
            )  # fmt: skip
            strip = take_job(calls, 1) - down * gl.cdiv(blocks, width)
    offer_job(jobs, offered, read, count, job)


@gluon_jit
def store_gathered_tiles(  # type: ignore[no-untyped-def]
    y, upper, lower, jobs, offered, read, free, ready, calls, rank, rows, cols,
    RANKS: gl.constexpr, HALF: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    """Store this program's tiles at their places in y."""
    call = gl.load(calls) + 1
    down = gl.cdiv(rows, 2 * HALF)
    across = gl.cdiv(cols, BLOCK_N)
    stored = 0
    number = next_job(jobs, offered, read, stored, 1)
    while number < down * across * RANKS:
        row = gl.minimum(number % down * 2 * HALF, rows - 2 * HALF) + (rank + number // (down * across)) % RANKS * rows
        col = number // down % across * BLOCK_N
        hopper.mbarrier.wait(ready, stored & 1)
        store_tile(y, [row, col], upper)
        store_tile(y, [row + HALF, col], lower)
        hopper.tma.store_wait(0)
        hopper.mbarrier.arrive(free)
        stored += 1
        number = next_job(jobs, offered, read, stored, 1)
    end_of_program(calls, call)


@gluon_jit(do_not_specialize=["rank", "rows", "cols", "depth", "length", "width", "narrow", "first", "givers", "lead", "patience"])
def all_gather_matmul_kernel(  # type: ignore[no-untyped-def]
    a,  # descriptor of [rows, depth], this rank's
    b,  # descriptor of [cols, depth]
    y,  # descriptor of [RANKS * rows, cols]
    here,  # descriptor of this rank's slots [RANKS * rows, depth]
    other_1, other_2, other_3, other_4, other_5, other_6, other_7,  # those of rank + 1, rank + 2, ...; None where there are fewer
    flags, calls, trouble, told, rank, rows, cols, depth, length, width, narrow, first, givers, lead, patience: tl.int64,
    RANKS: gl.constexpr, TURNED: gl.constexpr, KEEP: gl.constexpr, HALF: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """A program copies one strip after the other, and computes one tile after the other, those of this rank's rows first."""
    ranks = (here, other_1, other_2, other_3, other_4, other_5, other_6, other_7)  # one by one: triton 3.6 starts no kernel with a tuple
    uppers, lowers, columns, upper, lower, full, empty, jobs, offered, read, free, ready, none, taken = shared(
        a, b, y, HALF, BLOCK_N, BLOCK_K, STAGES
    )
    come = gl.allocate_shared_memory(gl.int64, [STAGES, 1], hopper.mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        hopper.mbarrier.init(come.index(stage), count=1)
    hopper.fence_async_shared()
    gl.warp_specialize(
        [
            (multiply_tiles, (uppers, columns, upper, full, empty, jobs, offered, read, free, ready, none, taken, rows, cols, depth,
                              TURNED, False, RANKS, HALF, BLOCK_N, BLOCK_K, STAGES)),
            (multiply_tiles, (lowers, columns, lower, full, empty, jobs, offered, read, free, ready, none, taken, rows, cols, depth,
                              TURNED, False, RANKS, HALF, BLOCK_N, BLOCK_K, STAGES)),
            (load_gathered_tiles, (a, b, here, ranks, flags, uppers, lowers, columns, full, empty, come, jobs, offered, read, calls,
                                   trouble, told, rank, rows, cols, depth, length, width, narrow, first, givers, lead, patience,
                                   TURNED, KEEP, RANKS, HALF, BLOCK_N, BLOCK_K, STAGES, GROUP)),
            (store_gathered_tiles, (y, upper, lower, jobs, offered, read, free, ready, calls, rank, rows, cols, RANKS, HALF, BLOCK_N)),
        ],
        [4, 1, 1],
        [SECOND, LOADS, STORES],
    )  # fmt: skip


def needed(ranks: int, rows: int, depth: int, cols: int, tiles: Tiles) -> tuple[int, int]:
    """The least `size` and `length` of slots for [rows, depth] of each rank. The gathered rows [ranks * rows, depth] begin them."""
    return ranks * rows * depth * 2, 2 + -(-rows // (2 * tiles.half))


class Shares(NamedTuple):
    """Who gives rows away: `givers` programs from the one with tile `first` on, before they multiply, in strips of `width` blocks; whoever
    keeps some copies strips of `narrow` blocks. In the first `lead` columns of tiles this rank's rows come first.
    """

    width: int
    narrow: int
    first: int
    givers: int
    lead: int


def shares(ranks: int, rows: int, cols: int, depth: int, tiles: Tiles, running: int) -> Shares:
    """Rows must not be on their way still when this rank's are done, so programs give twice as fast as that takes; and so many columns come
    first as are multiplied in the meantime. All do where the rows do not fit into the cache together; otherwise b is read once for those
    that come with the others. Those give that take their first tile last, since other ranks' rows may be in it; there is a strip for each
    that would only wait otherwise. Where no program has more than one tile, none but these give.
    """
    down, across = -(-rows // (2 * tiles.half)), -(-cols // tiles.n)
    blocks, held = -(-depth // tiles.k), 1 + tiles.n // (2 * tiles.half)
    sent, job = (ranks - 1) * rows * depth * 2, 4 * tiles.half * tiles.n * depth / SPEED

    def strip(programs: int) -> int:
        return held * -(-min(blocks, STRIP, max(1, down * blocks // programs)) // held)

    narrow = strip(2 * running)
    if ranks * down * across <= running:
        return Shares(strip(running - down * across), narrow, 0, 0, across)
    own = down * across * job / running
    givers = min(running, MOST_GIVERS, max(LEAST_GIVERS, math.ceil(2 * sent / own / GIVEN)))
    rounds = math.ceil(1.2 * (LATENCY + sent / min(LINK, givers * GIVEN)) / job)
    lead = across if down > GROUP else min(across, -(-running * rounds // down))
    return Shares(strip(max(2 * givers, running - down * across)), narrow, running - givers, givers, lead)


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
    keep: bool = True,
    starter: Starter | None = None,
) -> Prepared:
    """As `launch` of `all_gather_matmul`, in bfloat16, for at least as many rows as a tile has. `parts`: every rank's slots, bytes. `keep`:
    this rank's rows shall stand among the gathered ones in its slots.
    """
    ranks, (rows, depth), cols = len(parts), a.shape, b.shape[0]
    slots.require(*needed(ranks, rows, depth, cols, tiles))
    assert rows >= 2 * tiles.half, f"{rows} rows, fewer than the {2 * tiles.half} of a tile"
    memory = [descriptor(part[: ranks * rows * depth * 2].view(a.dtype).view(-1, depth), tiles.half, tiles.k) for part in parts]
    others = [memory[(rank + turn) % ranks] if turn < ranks else None for turn in range(1, 8)]
    running = programs(a.device)  # those that have no tile give rows away
    sizes = rows, cols, depth, slots.length, *shares(ranks, rows, cols, depth, tiles, running), int(patience * 1e9)
    rest = memory[rank], *others, slots.flags, *counters, rank, *sizes
    constants = {"RANKS": ranks, "KEEP": keep}
    return Prepared(all_gather_matmul_kernel, running, a, b, (ranks * rows, cols), tiles, rest, constants, starter)

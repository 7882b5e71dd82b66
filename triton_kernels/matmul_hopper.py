"""a b^T on Hopper, in Gluon: what `matmul` is in plain Triton, and the parts of which the products that talk to other ranks are made.

A program has four parts that run side by side. One warp loads, by the tensor memory accelerator, into a ring of stages in shared memory;
two groups of four warps multiply, each the upper or the lower half of a tile; one warp stores what they leave in shared memory. So the next
tile's operands are loaded, and its products begin, while a tile is stored. Between two parts stand barriers in shared memory, whose phase
is the parity of how often they have been passed. What loads also says which tile is next.
"""

from __future__ import annotations

import torch

from .backend import constant, gl, gluon_jit, hopper, load_tile, store_tile, tl
from .launch_hopper import Prepared, Starter, Tiles, programs
from .matmul import place_of

SECOND, LOADS, STORES = constant(232), constant(40), constant(40)  # registers of a thread in the second group that multiplies, and in the
# warps that load and store: so almost nothing is spilt, over few ranks


@gluon_jit
def offer_job(jobs, offered, read, count, number):  # type: ignore[no-untyped-def]
    """Tell all parts the number of the next job, after `count` others."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    hopper.mbarrier.wait(read.index(count % 2), count // 2 & 1 ^ 1)
    jobs.index(count % 2).store(gl.full([1], number, gl.int32, layout))
    tl.debug_barrier()
    hopper.mbarrier.arrive(offered.index(count % 2))


@gluon_jit
def next_job(jobs, offered, read, count, WARPS: gl.constexpr):  # type: ignore[no-untyped-def]
    """The number that a part which has done `count` jobs is told next."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    hopper.mbarrier.wait(offered.index(count % 2), count // 2 & 1)
    number = gl.max(jobs.index(count % 2).load(layout), 0)
    tl.debug_barrier()
    hopper.mbarrier.arrive(read.index(count % 2))
    return number


@gluon_jit
def load_operands(  # type: ignore[no-untyped-def]
    a, b, row, col, depth, uppers, lowers, columns, full, empty, loaded,
    TURNED: gl.constexpr, HALF: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Fill the ring with those of one tile, after `loaded` steps of others; how many there are then."""
    for start in range(0, depth, BLOCK_K):
        stage = loaded % STAGES
        hopper.mbarrier.wait(empty.index(stage), loaded // STAGES & 1 ^ 1)
        hopper.mbarrier.expect(full.index(stage), (2 * HALF + BLOCK_N) * BLOCK_K * 2)
        load_tile(a, [row, start], full.index(stage), uppers.index(stage))
        load_tile(a, [row + HALF, start], full.index(stage), lowers.index(stage))
        if TURNED:
            load_tile(b, [start, col], full.index(stage), columns.index(stage))
        else:
            load_tile(b, [col, start], full.index(stage), columns.index(stage))
        loaded += 1
    return loaded


@gluon_jit
def load_tiles(  # type: ignore[no-untyped-def]
    a, b, uppers, lowers, columns, full, empty, jobs, offered, read, rows, cols, depth,
    TURNED: gl.constexpr, HALF: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """Fill the ring with the operands of this program's tiles, every so many-th."""
    loaded = 0
    count = 0
    number = gl.program_id(0)
    offer_job(jobs, offered, read, count, number)
    while number < gl.cdiv(rows, 2 * HALF) * gl.cdiv(cols, BLOCK_N):
        row, col = place_of(number, rows, cols, 2 * HALF, BLOCK_N, GROUP)
        loaded = load_operands(a, b, row, col, depth, uppers, lowers, columns, full, empty, loaded, TURNED, HALF, BLOCK_N, BLOCK_K, STAGES)
        count += 1
        number += gl.num_programs(0)
        offer_job(jobs, offered, read, count, number)


@gluon_jit
def multiply_tiles(  # type: ignore[no-untyped-def]
    halves, columns, result, full, empty, jobs, offered, read, free, ready, come, taken, rows, cols, depth,
    TURNED: gl.constexpr, ADD: gl.constexpr, RANKS: gl.constexpr, HALF: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Leave half of each of this program's tiles in `result`, one after the other. ADD: what comes from the other ranks is added to tiles
    of this rank's rows, which are numbered last.
    """
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 16])
    tiles = gl.cdiv(rows, 2 * HALF) * gl.cdiv(cols, BLOCK_N)
    used = 0
    left = 0
    added = 0
    number = next_job(jobs, offered, read, left, 4)
    while number < tiles * RANKS:
        sums = gl.zeros((HALF, BLOCK_N), gl.float32, layout)
        for start in range(0, depth, BLOCK_K):
            stage = used % STAGES
            hopper.mbarrier.wait(full.index(stage), used // STAGES & 1)
            factor = columns.index(stage) if TURNED else columns.index(stage).permute((1, 0))
            product = hopper.warpgroup_mma(halves.index(stage), factor, sums, is_async=True)
            sums = hopper.warpgroup_mma_wait(1, deps=(product,))
            hopper.mbarrier.arrive(empty.index((used + STAGES - 1) % STAGES), pred=start > 0)  # the step before has been multiplied
            used += 1
        sums = hopper.warpgroup_mma_wait(0, deps=(sums,))
        hopper.mbarrier.arrive(empty.index((used + STAGES - 1) % STAGES))
        hopper.mbarrier.wait(free, left & 1 ^ 1)
        if ADD:
            if number >= tiles * (RANKS - 1):
                for part in gl.static_range(1, RANKS):
                    hopper.mbarrier.wait(come, added & 1)
                    sums += result.load(layout).to(gl.float32)
                    tl.debug_barrier()
                    if part < RANKS - 1:
                        hopper.mbarrier.arrive(taken)
                    added += 1
        result.store(sums.to(result.dtype))
        hopper.fence_async_shared()
        tl.debug_barrier()
        hopper.mbarrier.arrive(ready)
        left += 1
        number = next_job(jobs, offered, read, left, 4)


@gluon_jit
def store_tiles(  # type: ignore[no-untyped-def]
    y, upper, lower, jobs, offered, read, free, ready, rows, cols, HALF: gl.constexpr, BLOCK_N: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """Store this program's tiles at their places in y."""
    stored = 0
    number = next_job(jobs, offered, read, stored, 1)
    while number < gl.cdiv(rows, 2 * HALF) * gl.cdiv(cols, BLOCK_N):
        row, col = place_of(number, rows, cols, 2 * HALF, BLOCK_N, GROUP)
        hopper.mbarrier.wait(ready, stored & 1)
        store_tile(y, [row, col], upper)
        store_tile(y, [row + HALF, col], lower)
        hopper.tma.store_wait(0)
        hopper.mbarrier.arrive(free)
        stored += 1
        number = next_job(jobs, offered, read, stored, 1)


@gluon_jit
def shared(  # type: ignore[no-untyped-def]
    a, b, y, HALF: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The ring, the halves of a tile of the result, and barriers: full, empty; what jobs are told by: jobs, offered, read; barriers: free,
    ready; come, taken.
    """
    uppers = gl.allocate_shared_memory(a.dtype, [STAGES, HALF, BLOCK_K], a.layout)
    lowers = gl.allocate_shared_memory(a.dtype, [STAGES, HALF, BLOCK_K], a.layout)
    columns = gl.allocate_shared_memory(b.dtype, [STAGES, b.block_shape[0], b.block_shape[1]], b.layout)
    upper = gl.allocate_shared_memory(y.dtype, [HALF, BLOCK_N], y.layout)
    lower = gl.allocate_shared_memory(y.dtype, [HALF, BLOCK_N], y.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], hopper.mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], hopper.mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        hopper.mbarrier.init(full.index(stage), count=1)
        hopper.mbarrier.init(empty.index(stage), count=2)
    jobs = gl.allocate_shared_memory(gl.int32, [2, 1], hopper.mbarrier.MBarrierLayout())
    offered = gl.allocate_shared_memory(gl.int64, [2, 1], hopper.mbarrier.MBarrierLayout())
    read = gl.allocate_shared_memory(gl.int64, [2, 1], hopper.mbarrier.MBarrierLayout())
    for slot in gl.static_range(2):
        hopper.mbarrier.init(offered.index(slot), count=1)
        hopper.mbarrier.init(read.index(slot), count=3)
    turns = gl.allocate_shared_memory(gl.int64, [4, 1], hopper.mbarrier.MBarrierLayout())
    hopper.mbarrier.init(turns.index(0), count=1)
    hopper.mbarrier.init(turns.index(1), count=2)
    hopper.mbarrier.init(turns.index(2), count=1)
    hopper.mbarrier.init(turns.index(3), count=2)
    hopper.fence_async_shared()
    free, ready, come, taken = turns.index(0), turns.index(1), turns.index(2), turns.index(3)
    return uppers, lowers, columns, upper, lower, full, empty, jobs, offered, read, free, ready, come, taken


@gluon_jit(do_not_specialize=["rows", "cols", "depth"])
def matmul_kernel(  # type: ignore[no-untyped-def]
    a, b, y, rows, cols, depth,
    TURNED: gl.constexpr, HALF: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """A program does every so many-th tile. a, b, y are descriptors."""
    uppers, lowers, columns, upper, lower, full, empty, jobs, offered, read, free, ready, come, taken = shared(
        a, b, y, HALF, BLOCK_N, BLOCK_K, STAGES
    )
    gl.warp_specialize(
        [
            (multiply_tiles, (uppers, columns, upper, full, empty, jobs, offered, read, free, ready, come, taken, rows, cols, depth,
                              TURNED, False, 1, HALF, BLOCK_N, BLOCK_K, STAGES)),
            (multiply_tiles, (lowers, columns, lower, full, empty, jobs, offered, read, free, ready, come, taken, rows, cols, depth,
                              TURNED, False, 1, HALF, BLOCK_N, BLOCK_K, STAGES)),
            (load_tiles, (a, b, uppers, lowers, columns, full, empty, jobs, offered, read, rows, cols, depth,
                          TURNED, HALF, BLOCK_N, BLOCK_K, STAGES, GROUP)),
            (store_tiles, (y, upper, lower, jobs, offered, read, free, ready, rows, cols, HALF, BLOCK_N, GROUP)),
        ],
        [4, 1, 1],
        [SECOND, LOADS, STORES],
    )  # fmt: skip


def prepare(a: torch.Tensor, b: torch.Tensor, tiles: Tiles, starter: Starter | None = None) -> Prepared:
    """a [M, K] times b^T for b [N, K], in bfloat16: [M, N]. N and K are multiples of 8. Layers take torch's product; this shows what the
    parts that all products on Hopper are made of compute, and how fast, without other ranks.
    """
    (rows, depth), cols = a.shape, b.shape[0]
    running = min(programs(a.device), tiles.of(rows, cols))
    return Prepared(matmul_kernel, running, a, b, (rows, cols), tiles, (rows, cols, depth), {}, starter)

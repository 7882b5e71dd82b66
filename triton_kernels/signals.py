"""How kernels of different ranks tell each other that something is there to be read.

A flag is a number (int32) in memory that the ranks share. It counts calls, and so need not be reset: a CUDA graph can be replayed, and a
call that was given up leaves nothing behind that the next would take for its own.
"""

from __future__ import annotations

import time
from typing import NamedTuple

import torch

from .backend import constant, gl, gluon_jit, interpreted, jit, tl

PATIENCE = 10.0  # seconds that a kernel waits for another rank
LOOKS = constant(16)  # at a flag, for one at the clock and at `trouble`


def _clock() -> int:
    """The clock that the interpreter looks at. Who waits looks again and again, and lets another process have the core meanwhile."""
    time.sleep(1e-4)
    return time.monotonic_ns()


@jit
def _clock_of_the_gpu():  # type: ignore[no-untyped-def]
    """The clock that all programs of a GPU share."""
    return tl.extra.cuda.globaltimer()


clock = _clock if interpreted else _clock_of_the_gpu  # nanoseconds


@jit
def signal(flag, call):  # type: ignore[no-untyped-def]
    """Set a flag. Whoever then finds it set, on whatever GPU, sees all that this program has stored before."""
    tl.debug_barrier()  # the release below is one thread's: first all must have stored
    tl.atomic_xchg(flag, call, sem="release", scope="sys")


@jit
def has_come(flag, call):  # type: ignore[no-untyped-def]
    """Whether a flag has been set in this call, or in the next, which a quicker rank may be in already. All may load then."""
    seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
    tl.debug_barrier()  # the acquire was one thread's
    return seen - call >= 0


@jit
def wait(flag, call, trouble, told, what, patience):  # type: ignore[no-untyped-def]
    """Wait until `has_come`.

    After `patience` nanoseconds it writes `what` to `trouble` and `told`, and goes on: every wait that shares `trouble` ends then, the next
    time that it looks there. `told` is in memory of the host, too slow to be looked at in a loop.
    """
    seen = call - 1
    late = tl.cast(0, tl.int64)  # not known before the first look at the clock
    ended = tl.cast(0, tl.int64)
    looks = 0
    while (seen - call < 0) & (ended == 0):
        seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
        looks += 1
        if looks == LOOKS:  # the flag alone is looked at in between: whoever waits shall go on soon
            looks = 0
            now = clock()
            late = tl.where(late == 0, now + patience, late)
            ended = tl.atomic_add(trouble, 0, sem="relaxed")
            if now > late:
                tl.atomic_xchg(told, what, sem="relaxed", scope="sys")
                tl.atomic_xchg(trouble, what, sem="relaxed")
    tl.debug_barrier()  # the acquire was one thread's: now all may load


class Counters(NamedTuple):
    """What the programs of one rank count in, in memory of its GPU, and where they tell the host what went wrong.

    `calls`, int32 [4]: calls that have ended here, programs of this call that have, and how many jobs of its two queues are taken.
    `trouble`, int64 [1], and `told`, the same in memory of the host: 0, or what a wait in vain has left there.
    """

    calls: torch.Tensor
    trouble: torch.Tensor
    told: torch.Tensor

    @staticmethod
    def on(device: torch.device) -> Counters:
        """New ones."""
        told = torch.zeros(1, dtype=torch.int64, pin_memory=device.type == "cuda")
        return Counters(torch.zeros(4, dtype=torch.int32, device=device), torch.zeros(1, dtype=torch.int64, device=device), told)

    def missing(self) -> tuple[int, int] | None:
        """The rank and the tile that a program has waited for in vain, if one has."""
        what = int(self.told)
        return divmod(what - 1, 1 << 32) if what else None


@jit
def tell_others(flags, rank, index, call, RANKS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Set flag `index` of all other ranks."""
    for following in tl.static_range(1, RANKS):
        signal(tl.load(flags + (rank + following) % RANKS).to(tl.pointer_type(tl.int32)) + index, call)


@jit(do_not_specialize=["rank", "length", "call"])
def tell_ranks_kernel(flags, rank, length, call, RANKS: tl.constexpr):  # type: ignore[no-untyped-def]
    """One program, which sets this rank's first flag on every other rank."""
    tell_others(flags, rank, rank * length, call, RANKS)


@jit
def wait_for_others(flags, trouble, told, rank, length, call, patience, RANKS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Wait until the first flag of every other rank has come."""
    mine = tl.load(flags + rank).to(tl.pointer_type(tl.int32))
    for following in tl.static_range(1, RANKS):
        source = (rank + following) % RANKS
        wait(mine + source * length, call, trouble, told, missing_word(source, 0), patience)


@jit(do_not_specialize=["rank", "length", "call", "patience"])
def wait_for_ranks_kernel(flags, trouble, told, rank, length, call, patience: tl.int64, RANKS: tl.constexpr):  # type: ignore[no-untyped-def]
    """One program, which ends when the first flag of every other rank has come."""
    wait_for_others(flags, trouble, told, rank, length, call, patience, RANKS)


@jit(do_not_specialize=["rank", "length", "patience"])
def meet_kernel(flags, calls, trouble, told, rank, length, patience: tl.int64, RANKS: tl.constexpr):  # type: ignore[no-untyped-def]
    """One program, which tells all other ranks, and ends when all have told this one. It counts its calls itself: it can be replayed."""
    call = tl.load(calls) + 1
    tell_others(flags, rank, rank * length, call, RANKS)
    wait_for_others(flags, trouble, told, rank, length, call, patience, RANKS)
    tl.store(calls, call)


def meet(flags: torch.Tensor, counters: Counters, rank: int, length: int, patience: float = PATIENCE) -> None:
    """What the stream does next finds what all ranks' streams have done before they met, or, after `patience` seconds in vain, what there
    is, as with `wait_for_ranks`. Not for flags that others set too.
    """
    nanoseconds = int(patience * 1e9)
    meet_kernel[(1,)](flags, *counters, rank, length, nanoseconds, RANKS=flags.numel(), num_warps=1)


def tell_ranks(flags: torch.Tensor, rank: int, length: int, call: int) -> None:
    """Set the first flag of this `rank` on all others, which see then all that it has stored before. `flags` and `length` are those of
    `Slots`; `call`, int32, is what they wait for.
    """
    tell_ranks_kernel[(1,)](flags, rank, length, call, RANKS=flags.numel(), num_warps=1)


def wait_for_ranks(flags: torch.Tensor, counters: Counters, rank: int, length: int, call: int, patience: float = PATIENCE) -> None:
    """What the stream does next finds what all other ranks have done before they told this `rank`, or, after `patience` seconds in vain,
    what there is: `counters` name one that did not come then.
    """
    nanoseconds = int(patience * 1e9)
    wait_for_ranks_kernel[(1,)](flags, counters.trouble, counters.told, rank, length, call, nanoseconds, RANKS=flags.numel(), num_warps=1)


@jit
def missing_word(rank, tile):  # type: ignore[no-untyped-def]
    """What `Counters.missing` reads as this rank and this tile."""
    return (tl.cast(rank, tl.int64) << 32) + tile + 1


@jit
def take_job(calls, QUEUE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The next number of queue 0 or 1 that no program has taken yet.

    So whichever programs run do all the jobs, those that others wait for first: a call ends though some of its programs find no room
    beside another kernel, even one that waits, over other ranks, for this call to end.
    """
    return tl.atomic_add(calls + 2 + QUEUE, 1, sem="relaxed")


@jit
def end_of_program(calls, call):  # type: ignore[no-untyped-def]
    """The last program to end counts the call. All have read how many there were before, as they do when they begin."""
    tl.debug_barrier()
    if tl.atomic_add(calls + 1, 1, sem="acq_rel") == tl.num_programs(0) - 1:
        for counter in range(1, 4):
            tl.store(calls + counter, 0)
        tl.store(calls, call)


@gluon_jit
def stores_have_arrived():  # type: ignore[no-untyped-def]
    """Wait until all that this thread has stored from shared memory can be seen by others; Gluon's own wait is for having been read."""
    gl.inline_asm_elementwise("cp.async.bulk.wait_group 0; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon_jit
def fence_accelerator():  # type: ignore[no-untyped-def]
    """What a flag has shown to this thread holds for all that the accelerator does from here on."""
    gl.inline_asm_elementwise("fence.proxy.async; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)

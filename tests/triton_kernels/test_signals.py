"""Flags: who finds one set sees what was written before; who waits in vain says for whom, once for all that wait."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pymesh3d.comm.symmetric import SymmetricBuffer
from pymesh3d.launch import launch
from pymesh3d.mesh import init_mesh
from pymesh3d.triton_kernels.backend import jit, tl
from pymesh3d.triton_kernels.signals import Counters, end_of_program, has_come, meet, missing_word, signal, take_job, wait
from tests.kernels import DEVICE, needs_kernels

Ranks = Callable[..., list[Any]]
ROUNDS, NUMBERS = 50, 64


@jit
def pass_on_kernel(memory, flags, mine, next, counters, trouble, told, patience: tl.int64, ROUNDS: tl.constexpr, NUMBERS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Numbers go around: each rank waits for those of the one before, adds 1, and gives them to the next."""
    here = tl.load(memory + mine).to(tl.pointer_type(tl.int64)) + tl.arange(0, NUMBERS)
    there = tl.load(memory + next).to(tl.pointer_type(tl.int64)) + tl.arange(0, NUMBERS)
    for number in range(1, ROUNDS + 1):
        if (number > 1) | (mine > 0):
            wait(tl.load(flags + mine).to(tl.pointer_type(tl.int32)), number - (mine == 0), trouble, told, missing_word(9, 7), patience)
        tl.store(there, tl.load(here) + 1)
        signal(tl.load(flags + next).to(tl.pointer_type(tl.int32)), number)
    end_of_program(counters, ROUNDS)


def passed_on() -> tuple[list[int], list[int], Any]:
    mesh = init_mesh(tp=-1, dp=1, device="cpu")
    axis = mesh.tp
    memory, flags = (SymmetricBuffer(size, axis, mesh.device) for size in (8 * NUMBERS, 4))
    counters = Counters.on(mesh.device)
    dist.barrier()
    options = {"patience": 20_000_000_000, "ROUNDS": ROUNDS, "NUMBERS": NUMBERS}
    pass_on_kernel[(1,)](memory.addresses, flags.addresses, axis.rank, (axis.rank + 1) % axis.size, *counters, **options)
    dist.barrier()
    found = sorted(set(memory.part(axis.rank, (NUMBERS,), torch.int64).tolist()))
    mesh.close()
    return found, counters.calls.tolist(), counters.missing()


@needs_kernels
@pytest.mark.parametrize("world", [2, 3])
def test_numbers_go_around(ranks: Ranks, world: int) -> None:
    expected = [ROUNDS * world] + [(ROUNDS - 1) * world + rank for rank in range(1, world)]
    assert ranks(world, passed_on) == [([number], [ROUNDS, 0, 0, 0], None) for number in expected]


@jit
def come_kernel(flags, found, call):  # type: ignore[no-untyped-def]
    program = tl.program_id(0)
    tl.store(found + program, has_come(flags + program, call).to(tl.int32))


@needs_kernels
def test_a_flag_of_this_call_or_the_next_has_come() -> None:
    flags, found = torch.tensor([3, 4, 5], dtype=torch.int32, device=DEVICE), torch.full((3,), 9, dtype=torch.int32, device=DEVICE)
    come_kernel[(3,)](flags, found, 4)
    assert found.tolist() == [0, 1, 1]


@jit
def jobs_kernel(done, calls, count, programs, QUEUE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Count in `done` how often each job is done, and in `programs` by how many."""
    job = take_job(calls, QUEUE)
    if job < count:
        tl.atomic_add(programs, 1)
    while job < count:
        tl.atomic_add(done + job, 1)
        job = take_job(calls, QUEUE)
    end_of_program(calls, tl.load(calls) + 1)


@needs_kernels
@pytest.mark.parametrize("queue", [0, 1])
def test_every_job_is_done_once_in_every_call(queue: int) -> None:
    calls, programs = (torch.zeros(size, dtype=torch.int32, device=DEVICE) for size in (4, 1))
    done = torch.zeros(50, dtype=torch.int32, device=DEVICE)
    for call in range(1, 4):
        jobs_kernel[(7,)](done, calls, 50, programs, QUEUE=queue)
        assert done.tolist() == [call] * 50 and calls.tolist() == [call, 0, 0, 0]
    assert programs.item() >= 3


@jit
def wait_kernel(flags, calls, trouble, told, call, patience: tl.int64):  # type: ignore[no-untyped-def]
    """A program for each of two flags."""
    wait(flags + tl.program_id(0), call, trouble, told, missing_word(tl.program_id(0) + 3, 5), patience)
    end_of_program(calls, call)


def waited(flags: list[int], call: int, seconds: float, counters: Counters) -> float:
    began = time.monotonic()
    wait_kernel[(2,)](torch.tensor(flags, dtype=torch.int32, device=DEVICE), *counters, call, patience=int(seconds * 1e9))
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    return time.monotonic() - began


@needs_kernels
def test_a_flag_of_this_call_or_the_next_is_enough() -> None:
    counters = Counters.on(torch.device(DEVICE))
    assert waited([4, 5], 4, 30.0, counters) < 20.0
    assert counters.missing() is None and counters.calls.tolist() == [4, 0, 0, 0]
    assert waited([-(2**31), 2**31 - 1], 2**31 - 1, 30.0, counters) < 20.0, "counts go on after the largest number"


@needs_kernels
@pytest.mark.parametrize(("flags", "named"), [([3, 4], {(3, 5)}), ([4, 3], {(4, 5)}), ([0, 0], {(3, 5), (4, 5)})])
def test_who_waits_in_vain_says_for_whom_and_ends(flags: list[int], named: set[tuple[int, int]]) -> None:
    counters = Counters.on(torch.device(DEVICE))
    assert 0.3 <= waited(flags, 4, 0.3, counters) < 10.0
    assert counters.missing() in named
    assert counters.calls.tolist() == [4, 0, 0, 0], "the call has ended nevertheless"
    assert waited([0, 0], 5, 30.0, counters) < 20.0, "nobody has patience after that"


LENGTH = 3  # flags that each rank has of every other


def met(device: str, calls: int, pause: float) -> bool:
    """Call after call, each rank gives numbers to all others, meets them, and finds theirs; they meet again, and it gives the next.

    Ranks are late at random, by up to `pause` seconds.
    """
    mesh = init_mesh(tp=-1, dp=1, device=device)
    axis, late = mesh.tp, random.Random(mesh.rank)
    memory, flags = SymmetricBuffer(8 * NUMBERS * axis.size, axis, mesh.device), SymmetricBuffer(4 * LENGTH * axis.size, axis, mesh.device)
    counters = Counters.on(mesh.device)
    dist.barrier()
    mine, found = memory.part(axis.rank, (axis.size, NUMBERS), torch.int64), []
    for call in range(1, calls + 1):
        if device == "cpu":
            time.sleep(pause * late.random())
        else:
            torch.cuda._sleep(int(pause * 2e9 * late.random()))
        for rank in range(axis.size):
            memory.part(rank, (axis.size, NUMBERS), torch.int64)[axis.rank].fill_(1000 * call + axis.rank)
        meet(flags.addresses, counters, axis.rank, LENGTH, 20.0)
        found.append(mine.clone())
        meet(flags.addresses, counters, axis.rank, LENGTH, 20.0)
    expected = torch.arange(axis.size)[:, None].expand(axis.size, NUMBERS)
    right = all(torch.equal(one.cpu(), expected + 1000 * call) for call, one in enumerate(found, 1))
    others = [rank for rank in range(axis.size) if rank != axis.rank]
    told = flags.part(axis.rank, (axis.size, LENGTH), torch.int32).cpu()
    assert counters.missing() is None and counters.calls.tolist() == [2 * calls, 0, 0, 0], (counters.missing(), counters.calls)
    dist.barrier()
    assert told[axis.rank].tolist() == [0] * LENGTH and not told[:, 1:].any(), "a rank's first flag of each other is set, and no more"
    mesh.close()
    return right and told[others, 0].tolist() == [2 * calls] * len(others)


@needs_kernels
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_who_has_met_sees_what_all_have_stored(ranks: Ranks, world: int) -> None:
    assert ranks(world, met, "cpu", 15, 0.01) == [True] * world


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_who_has_met_sees_what_all_have_stored_between_gpus() -> None:
    script = "from tests.triton_kernels.test_signals import met; assert met('cuda', 200, 0.001)"
    assert launch(["-c", script], torch.cuda.device_count()) == 0


@needs_kernels
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_who_does_not_come_is_named(rank: int) -> None:
    """All others have come, of three; then the one that had not."""
    flags = [torch.zeros(3 * LENGTH, dtype=torch.int32, device=DEVICE) for _ in range(3)]
    places, counters = torch.tensor([one.data_ptr() for one in flags], device=DEVICE), Counters.on(torch.device(DEVICE))
    missing, other = (rank + 1) % 3, (rank + 2) % 3
    counters.calls[0] = 7
    flags[rank][other * LENGTH] = 8
    flags[rank][missing * LENGTH] = 7  # it came to the last call
    began = time.monotonic()
    meet(places, counters, rank, LENGTH, 0.3)
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    assert 0.3 <= time.monotonic() - began < 10.0
    assert counters.missing() == (missing, 0) and counters.calls.tolist() == [8, 0, 0, 0]
    for at, one in enumerate(flags):
        set_by_it = {rank * LENGTH: 8} if at != rank else {other * LENGTH: 8, missing * LENGTH: 7}
        assert one.tolist() == [set_by_it.get(index, 0) for index in range(3 * LENGTH)], f"flags of rank {at}"
    counters = Counters.on(torch.device(DEVICE))
    counters.calls[0] = 8
    flags[rank][other * LENGTH], flags[rank][missing * LENGTH] = 10, 9  # one is in the next call already
    meet(places, counters, rank, LENGTH, 30.0)
    assert counters.calls.tolist() == [9, 0, 0, 0] and counters.missing() is None

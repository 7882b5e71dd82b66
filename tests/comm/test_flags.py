"""Flags between ranks: what was done before one is told is seen after it was waited for; and who does not come is named."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pymesh3d.comm import flags as module
from pymesh3d.comm.flags import BITS, Flags
from pymesh3d.comm.symmetric import SymmetricBuffer
from pymesh3d.errors import SharingError
from pymesh3d.mesh import init_mesh
from tests.kernels import needs_kernels

Ranks = Callable[..., list[Any]]
NUMBERS, CALLS = 700, 12


def in_turns(first: int) -> bool:
    """Call after call each rank writes, tells, waits and reads what all have written; then, by another flag, that it has been read.

    By turns one is late. `first`: as if there had been so many calls.
    """
    mesh = init_mesh(tp=-1, dp=1, device="cpu")
    axis, late = mesh.tp, random.Random(mesh.rank)
    flags, memory = Flags("turns", axis, mesh.device, 5), SymmetricBuffer(8 * NUMBERS, axis, mesh.device)
    parts = [memory.part(rank, (NUMBERS,), torch.int64) for rank in range(axis.size)]
    for index in (1, 3) if first else ():
        flags.tell(index, first)
    dist.barrier()
    for call in range(first + 1, first + 1 + CALLS):
        for index in (1, 3):
            if late.random() < 0.3:
                time.sleep(0.02 * late.random())
            if index == 1:
                parts[axis.rank].fill_(10 * call + axis.rank)
            flags.tell(index, call)
            flags.wait(index, call)
            if index == 1:
                if late.random() < 0.3:
                    time.sleep(0.02 * late.random())
                found = [part.unique().tolist() for part in parts]
                assert found == [[10 * call + rank] for rank in range(axis.size)], f"call {call}: {found}"
    flags.check()
    mesh.close()
    return True


@needs_kernels
@pytest.mark.parametrize(("world", "first"), [(2, 0), (3, 0), (2, 2**31 - 6), (3, 2**32 - 6), (2, 5 * 2**32 - 1)])
def test_what_was_done_before_is_seen_after(ranks: Ranks, world: int, first: int) -> None:
    """Also where the numbers of calls wrap."""
    assert ranks(world, in_turns, first) == [True] * world


def one_by_one() -> list[float]:
    """Seconds that rank 0 waits for flag 0, which all others tell at once, flag 2, told later, and the earlier call of that again; and
    for what the last rank tells last."""
    mesh = init_mesh(tp=-1, dp=1, device="cpu")
    flags, took = Flags("several", mesh.tp, mesh.device, 3), []
    dist.barrier()
    if mesh.rank == 0:
        for index, call in ((0, 7), (2, 5), (2, 4), (1, 1)):
            began = time.monotonic()
            flags.wait(index, call)
            took.append(time.monotonic() - began)
    else:
        flags.tell(0, 7)
        time.sleep(0.6)
        flags.tell(2, 5)
        time.sleep(0.6 if mesh.rank == 2 else 0.0)
        flags.tell(1, 1)
    flags.check()
    mesh.close()
    return took


@needs_kernels
def test_flags_are_told_one_by_one(ranks: Ranks) -> None:
    """By all other ranks; one that was told with a later call has come."""
    (at_once, later, again, last), *_ = ranks(3, one_by_one)
    assert later > 0.25 and last > 0.25, "it waits for the flag that it was asked for, and for all ranks"
    assert at_once < later + 0.4 and again < 0.3, "others do not keep it"


def without_one() -> tuple[str, str, float]:
    """Rank 2 of 3 tells nothing: what rank 0 is told before, and after it has waited, and how long that took."""
    mesh = init_mesh(tp=3, device="cpu", timeout_s=2.0)
    flags, told = Flags("gradients", mesh.tp, mesh.device, 2), ["", ""]
    dist.barrier()
    began = time.monotonic()
    if mesh.rank < 2:
        flags.tell(1, 1)
    if mesh.rank == 0:
        flags.check()
        flags.wait(1, 1)
        for number in range(2):  # it is said again and again
            with pytest.raises(RuntimeError) as caught:
                flags.check()
            told[number] = str(caught.value)
    took = time.monotonic() - began
    store = dist.group.WORLD.get_group_store() if dist.group.WORLD is not None else None
    assert store is not None
    store.set(f"rank {mesh.rank} has waited", "")
    store.wait(["rank 0 has waited"])
    mesh.close()
    return told[0], told[1], took


@needs_kernels
def test_a_rank_that_does_not_come_is_named(ranks: Ranks) -> None:
    (once, again, took), *_ = ranks(3, without_one)
    assert once == again == "rank 2 did not send its part of gradients within the time limit"
    assert 1.5 < took < 20.0, f"it took {took} s"


def given_up() -> float:
    """Seconds until a wait has ended that another thread gives up."""
    mesh = init_mesh(tp=2, device="cpu", timeout_s=50.0)
    flags, took = Flags("gradients", mesh.tp, mesh.device, 1), 0.0
    dist.barrier()
    if mesh.rank == 0:
        done = list[bool]()
        thread = threading.Timer(0.3, lambda: done.append(flags.abort(1.0)))
        began = time.monotonic()
        thread.start()
        flags.wait(0, 1)
        took = time.monotonic() - began
        thread.join(10)
        assert done == [True], "it was done"
    dist.barrier()
    mesh.close()
    return took


@needs_kernels
def test_waits_end_when_they_are_given_up(ranks: Ranks) -> None:
    took, _ = ranks(2, given_up)
    assert 0.2 < took < 20.0, f"it took {took} s"


def held() -> tuple[list[int], int, bool]:
    """Bytes that are shared: of flags, with more, and when the mesh is closed; how many watch; whether they watch before all others."""
    mesh = init_mesh(tp=2, device="cpu")
    before = len(mesh.tp.watched)
    flags = Flags("gradients", mesh.tp, mesh.device, 9)
    first = mesh.tp.watched[0] is flags
    found = [flags.shared_bytes]
    flags.shared.append(SymmetricBuffer(1000, mesh.tp, mesh.device))
    found.append(flags.shared_bytes)
    watching = len(mesh.tp.watched) - before
    mesh.close()
    return [*found, flags.shared_bytes], watching, first


def test_what_is_shared_is_counted_and_given_back(ranks: Ranks) -> None:
    assert ranks(2, held) == [([4 * 2 * 9, 4 * 2 * 9 + 1000, 0], 1, True)] * 2


def with_recorded_streams() -> list[str]:
    """What the compiled part is asked for on rank 1 of 3 (of rank 0 and 2), and what `check` says of waits under way."""
    mesh = init_mesh(tp=3, device="cpu")
    flags = Flags("gradients", mesh.tp, mesh.device, 4)
    asked: list[Any] = []
    texts = []
    full = torch.full
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "raw_stream", lambda device: 5)
        patch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
        patch.setattr(torch, "full", lambda *given, pin_memory=False, **how: full(*given, **how))
        flags._gpu = SimpleNamespace(  # type: ignore[assignment]
            tell=lambda *given: asked.append(("tell", *given)), wait_until=lambda *given: asked.append(("wait", *given))
        )
        others = [rank for rank in range(3) if rank != mesh.rank]
        parts = [flags._memory.part(rank, (3, 4), torch.int32) for rank in range(3)]
        for index, call in ((0, 1), (3, BITS - 1), (2, BITS + 7)):
            flags.tell(index, call)
            flags.wait(index, call)
            there = [parts[rank][mesh.rank, index].data_ptr() for rank in range(3)]
            here = [parts[mesh.rank][rank, index].data_ptr() for rank in range(3)]
            assert asked == [("tell", 5, there, call % BITS), ("wait", 5, here, call % BITS)], asked
            asked.clear()
        flags.check()  # there is still time
        flags._seconds = -1.0  # no time at all
        flags.watch(2, BITS + 8)

        def said() -> str:
            try:
                flags.check()
            except RuntimeError as error:
                return str(error)
            return ""

        mine = parts[mesh.rank]
        mine[:, 1] = 100  # of another flag
        texts.append(said())
        mine[others[0], 2] = 8  # told with this call
        texts.append(said())
        mine[others[1], 2] = 9  # and with a later one
        texts.append(said())
        assert sorted(flags._under_way) == [0, 3], "what has come is not looked at again"
        flags.watch(2, BITS + 8)
        mine[others[0], 2] = 7  # the call before
        texts.append(said())
        flags._seconds = 100.0
        flags.wait(1, BITS + 30)
        assert flags.abort(1.0)
        assert (mine - 30 >= 2**20).all(), f"all waits end, and those of a million calls to come: {mine}"
        dist.barrier()
        assert all((parts[rank] == mine).all() for rank in range(3)), "each ends its own"
        flags._gpu = None
    dist.barrier()
    mesh.close()
    return texts


def test_what_streams_are_asked_for(ranks: Ranks) -> None:
    """Which flags, modulo 2^32; who is late is found in the flags themselves."""
    text = "rank {} did not send its part of gradients within the time limit"
    for rank, texts in enumerate(ranks(3, with_recorded_streams)):
        first, second = (other for other in range(3) if other != rank)
        assert texts == [text.format(first), text.format(second), "", text.format(first)]


def test_without_the_compiled_part_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    axis: Any = SimpleNamespace(rank=0, size=2, timeout=SimpleNamespace(total_seconds=lambda: 1.0), watched=[])
    monkeypatch.setattr(module.native, "stream_calls", lambda: None)
    monkeypatch.setattr(module.Waits, "__init__", lambda self, op, axis, device: setattr(self, "_axis", axis))
    for reason, words in (("not built", "not built"), ("", "the driver is too old")):
        monkeypatch.setattr(module.native, "reason", reason)
        with pytest.raises(SharingError) as caught:
            Flags("gradients", axis, torch.device("cuda"), 1)
        assert str(caught.value) == f"the compiled part cannot let streams wait here ({words})"
    assert axis.watched == [], "nothing watches"

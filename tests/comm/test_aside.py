"""Copies and flags on a stream of their own: in order and with the call's number, again and again; and what a GPU is asked for."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pymesh3d.comm import aside as module
from pymesh3d.comm.aside import Aside, Steps
from pymesh3d.comm.flags import BITS, Flags
from pymesh3d.comm.symmetric import SymmetricBuffer
from pymesh3d.errors import SharingError
from pymesh3d.launch import launch
from pymesh3d.mesh import init_mesh
from tests.kernels import needs_kernels

Ranks = Callable[..., list[Any]]
NUMBERS, CALLS = 600, 10


def fetched(device: str) -> bool:
    """By steps that were prepared once each rank fetches what all others have written for this call; by turns one is late."""
    mesh = init_mesh(tp=-1, dp=1, device=device)
    axis, late = mesh.tp, random.Random(mesh.rank)
    flags, memory = Flags("fetching", axis, mesh.device, 2), SymmetricBuffer(8 * NUMBERS, axis, mesh.device)
    parts = [memory.part(rank, (NUMBERS,), torch.int64) for rank in range(axis.size)]
    found = torch.zeros(axis.size, NUMBERS, dtype=torch.int64, device=mesh.device)
    aside, steps = Aside(mesh.device), Steps(flags, mesh.device)
    steps.tell(0)
    steps.wait(0)
    for rank, part in enumerate(parts):
        steps.copy(found[rank], part)
    steps.tell(1)
    for call in range(1, CALLS + 1):
        if late.random() < 0.3:
            time.sleep(0.05 * late.random())
        parts[axis.rank].fill_(10 * call + axis.rank)
        aside.start(steps, call)
        aside.join()
        assert found.unique(dim=1).flatten().tolist() == [10 * call + rank for rank in range(axis.size)], f"call {call}: {found}"
        flags.wait(1, call)  # all have read it
    with aside():
        found.zero_()
    aside.join()
    assert not found.any(), "kernels run there too"
    found.fill_(7)
    with aside.following():
        found.mul_(2)
    aside.join()
    assert (found == 14).all(), "after what it was to follow"
    flags.check()
    mesh.close()
    return True


@needs_kernels
def test_steps_are_taken_in_order_call_after_call(ranks: Ranks) -> None:
    assert ranks(3, fetched, "cpu") == [True] * 3


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_steps_on_gpus() -> None:
    script = "from tests.comm.test_aside import fetched; assert fetched('cuda')"
    assert launch(["-c", script], torch.cuda.device_count()) == 0


def with_a_recorded_copier() -> bool:
    """What the compiled part is asked for on each of 3 ranks, and which flags are looked after."""
    mesh = init_mesh(tp=3, device="cpu")
    asked: list[Any] = []
    flags, memory = Flags("fetching", mesh.tp, mesh.device, 4), SymmetricBuffer(64, mesh.tp, mesh.device)
    to, source = torch.zeros(3, dtype=torch.float64), memory.part(1, (3,), torch.float64, 8)
    record = SimpleNamespace(
        copy=lambda *given: asked.append(("copy", *given)),
        tell=lambda flag: asked.append(("tell", flag)),
        wait_until=lambda flag: asked.append(("wait", flag)),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module.native, "steps", lambda: record)
        steps = Steps(flags, torch.device("cuda"))
    steps.tell(1)
    steps.wait(3)
    steps.copy(to, source)
    parts = [flags._memory.part(rank, (3, 4), torch.int32) for rank in range(3)]
    mine = parts[mesh.rank]
    expected: list[Any] = [("tell", part[mesh.rank, 1].data_ptr()) for part in parts]
    expected += [("wait", mine[rank, 3].data_ptr()) for rank in range(3)]
    assert asked == [*expected, ("copy", to.data_ptr(), source.data_ptr(), 24)], asked
    aside = Aside(mesh.device)
    aside._copier = SimpleNamespace(  # type: ignore[assignment]
        start=lambda *given: asked.append(("start", *given)), join=lambda *given: asked.append(("join", *given))
    )
    aside.start(steps, BITS + 5)
    aside.join()
    assert asked[-2:] == [("start", record, 5, 0), ("join", 0)], asked
    assert {index: call for index, (_, call) in flags._under_way.items()} == {3: BITS + 5}
    with pytest.raises(AssertionError, match="float64"):
        steps.copy(torch.zeros(3), source)
    dist.barrier()
    mesh.close()
    return True


def test_what_the_copy_engines_are_asked_for(ranks: Ranks) -> None:
    assert ranks(3, with_a_recorded_copier) == [True] * 3


def test_without_copy_engines_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.native, "copier", lambda: None)
    with pytest.raises(SharingError, match="the compiled part has no copy engines here"):
        Aside(torch.device("cuda"))

"""All-gather by the copy engines: values call by call with late ranks, memory that grows, and a rank that does not come."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pymesh3d.comm import copies as module
from pymesh3d.comm.copies import CopiedGather, as_int32
from pymesh3d.comm.workspace import on_this_stream
from pymesh3d.launch import launch
from pymesh3d.mesh import init_mesh
from pymesh3d.triton_kernels.signals import tell_ranks
from tests.kernels import needs_kernels

Ranks = Callable[..., list[Any]]
SHAPES = [(3, 5), (1,), (7, 2, 3), (3, 5), (40, 30), (2,)]
CALLS = 40


def part(rank: int, call: int, shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """What a rank gives in a call."""
    count = torch.Size(shape).numel()
    return (torch.arange(count, dtype=torch.float64) + 1000.0 * rank + 100_000.0 * call).view(shape).to(device)


def whole(ranks: int, call: int, shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """What all have then."""
    return torch.cat([part(rank, call, shape, device) for rank in range(ranks)])


def gathered(device: str, first: int = 0) -> bool:
    """Call after call, right on every rank though by turns one comes late, or reads late, and what it gave is written over at once.

    `first`: as if there had been so many calls: their numbers wrap then.
    """
    mesh = init_mesh(tp=-1, dp=1, device=device)
    axis, late = mesh.tp, random.Random(mesh.rank)
    share = on_this_stream(CopiedGather, "gather", axis, mesh.device)
    if first:
        assert share.start(part(axis.rank, 0, (4,), mesh.device)).wait().shape == (4 * axis.size,)
        together(mesh.device)
        slots = share.slots(1, 1)
        share._calls = first
        tell_ranks(slots.flags, axis.rank, slots.length, as_int32(first))
        together(mesh.device)
    found, expected = [], []
    for call in range(CALLS):
        shape = SHAPES[call % len(SHAPES)] if first == 0 else (4,)
        given = part(axis.rank, call, shape, mesh.device)
        pause(late, mesh.device)
        pending = share.start(given)
        del given
        others = [torch.full(shape, torch.nan, dtype=torch.float64, device=mesh.device) for _ in range(3)]
        pause(late, mesh.device)
        result = pending.wait()
        others += [torch.full(shape, torch.nan, dtype=torch.float64, device=mesh.device) for _ in range(3)]
        pause(late, mesh.device)
        assert result.shape == (axis.size * shape[0], *shape[1:]) and not pending.superseded
        found.append(result.clone())
        expected.append(whole(axis.size, call, shape, mesh.device))
    assert all(torch.equal(mine, right) for mine, right in zip(found, expected, strict=True))
    share.check()
    share.start(part(axis.rank, 0, (4,), mesh.device))  # which is under way when the mesh is closed
    mesh.close()
    assert share._last is None and share.parts == []
    return True


def together(device: torch.device) -> None:
    """Go on when all ranks are here, and their GPUs."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier()


def pause(late: random.Random, device: torch.device) -> None:
    """Of this rank, now and then: of its GPU, if it has one."""
    if late.random() < 0.3:
        if device.type == "cuda":
            torch.cuda._sleep(late.randrange(2_000_000))
        else:
            time.sleep(0.005 * late.random())


@needs_kernels
@pytest.mark.parametrize("count", [2, 4])
def test_values(ranks: Ranks, count: int) -> None:
    assert ranks(count, gathered, "cpu") == [True] * count


@needs_kernels
@pytest.mark.parametrize("first", [2**31 - 10, 2**32 - 10])
def test_numbers_of_calls_may_wrap(ranks: Ranks, first: int) -> None:
    assert ranks(2, gathered, "cpu", first) == [True] * 2


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("first", [0, 2**31 - 10])
def test_values_between_gpus(first: int) -> None:
    script = f"from tests.comm.test_copies import gathered; assert gathered('cuda', {first})"
    assert launch(["-c", script], torch.cuda.device_count()) == 0


def given_up() -> bool:
    """A gather that nobody has waited for ends before the next begins."""
    mesh = init_mesh(tp=2, device="cpu")
    share = on_this_stream(CopiedGather, "gather", mesh.tp, mesh.device)
    forgotten = share.start(part(mesh.rank, 1, (4,), mesh.device))
    if mesh.rank == 0:
        time.sleep(0.2)
    pending = share.start(part(mesh.rank, 2, (4,), mesh.device))
    assert forgotten._finish is None and forgotten.superseded and pending._finish is not None and not pending.superseded
    assert torch.equal(forgotten.wait(), whole(2, 1, (4,), mesh.device))
    assert torch.equal(pending.wait(), whole(2, 2, (4,), mesh.device))
    mesh.close()
    return True


@needs_kernels
def test_one_that_was_given_up_is_waited_for(ranks: Ranks) -> None:
    assert ranks(2, given_up) == [True] * 2


class RecordedSteps:
    """Stands for those of the compiled part."""

    def __init__(self) -> None:
        self.taken: list[Any] = []

    def copy(self, *given: int) -> None:
        self.taken.append(given)

    def tell(self, flag: int) -> None:
        self.taken.append(flag)


def with_a_recorded_copier() -> bool:
    """What the compiled part is asked for, on rank 1 of 3: where all go, in order, and who is told; again when the memory has grown."""
    mesh = init_mesh(tp=3, device="cpu")
    asked: list[Any] = []
    record = SimpleNamespace(start=lambda *given: asked.append(given), join=lambda *given: asked.append("join"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "wait_for_ranks", lambda *given: asked.append(given))
        patch.setattr(module, "raw_stream", lambda device: 5)
        patch.setattr(module, "steps", RecordedSteps)
        patch.setattr(torch.cuda, "synchronize", lambda *given: None)
        share = CopiedGather("gather", mesh.tp, mesh.device)
        share._copier = record  # type: ignore[assignment]
        for size, calls in ((10, 0), (10, 2**32 - 1), (5000, 0)):
            share._calls = calls or share._calls
            x = torch.arange(size, dtype=torch.float64)
            share.start(x).wait()
            slots = share.slots(1, 1)
            call = {0: 1}.get(calls, 2**32)
            begin = call % 2 * slots.size + mesh.rank * 8 * size
            order = [(mesh.rank + turn) % 3 for turn in (1, 2, 3)]
            flags = [0 if rank == mesh.rank else share.flag_address(rank) for rank in order]
            assert share._flags is not None
            mine = share._flags.addresses[order[0]].item() + 4 * mesh.rank * slots.length
            assert flags[0] == mine and flags[2] == 0
            steps, value, stream = asked[0]
            assert (value, stream) == (call % 2**32, 5)
            expected = []
            for rank, flag in zip(order, flags, strict=True):
                expected.append((share.parts[rank].data_ptr() + begin, x.data_ptr(), 8 * size))
                expected += [flag] if flag else []
            assert steps.taken == expected
            assert asked[1] == "join"
            assert asked[2] == (slots.flags, share.counters, mesh.rank, slots.length, as_int32(call), 300.0)
            asked.clear()
    mesh.close()
    return True


def test_what_the_copy_engines_are_asked_for(ranks: Ranks) -> None:
    assert ranks(3, with_a_recorded_copier) == [True] * 3


def many_flags() -> bool:
    """Each rank's flags lie apart, where there are several."""
    mesh = init_mesh(tp=3, device="cpu")
    share = CopiedGather("gather", mesh.tp, mesh.device)
    share.slots(8, 3)
    for call in range(4):
        found = share.start(part(mesh.rank, call, (2,), mesh.device)).wait()
        assert torch.equal(found, whole(3, call, (2,), mesh.device))
    share.check()
    mesh.close()
    return True


@needs_kernels
def test_flags_of_ranks_lie_apart(ranks: Ranks) -> None:
    assert ranks(3, many_flags) == [True] * 3


def test_a_number_of_32_bits() -> None:
    assert [as_int32(number) for number in (0, 5, 2**31 - 1, 2**31, 2**32 - 1, 2**32 + 7)] == [0, 5, 2**31 - 1, -(2**31), -1, 7]


def what_is_not_contiguous() -> bool:
    mesh = init_mesh(tp=2, device="cpu")
    share = on_this_stream(CopiedGather, "gather", mesh.tp, mesh.device)
    with pytest.raises(AssertionError, match=r"\(3, 2\), \(1, 3\)"):
        share.start(torch.zeros(2, 3).t())
    mesh.close()
    return True


@needs_kernels
def test_rows_that_do_not_lie_in_order_are_refused(ranks: Ranks) -> None:
    assert ranks(2, what_is_not_contiguous) == [True] * 2


def without_the_last() -> str:
    mesh = init_mesh(tp=2, device="cpu", timeout_s=3.0)
    share = on_this_stream(CopiedGather, "gather", mesh.tp, mesh.device)
    share.start(part(mesh.rank, 1, (4,), mesh.device)).wait()
    text = ""
    if mesh.rank == 0:
        share.start(part(mesh.rank, 2, (4,), mesh.device)).wait()
        with pytest.raises(RuntimeError) as caught:
            share.check()
        text = str(caught.value)
    else:
        time.sleep(2.0)  # the barrier waits no longer than the gather
    dist.barrier()
    mesh.close()
    return text


@needs_kernels
def test_a_rank_that_does_not_come_is_named(ranks: Ranks) -> None:
    assert ranks(2, without_the_last) == ["rank 1 did not send its part of gather within the time limit", ""]


def test_without_copy_engines_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    axis: Any = type("Axis", (), {"rank": 0, "size": 2})()
    monkeypatch.setattr(module, "copier", lambda: None)
    monkeypatch.setattr(module.Workspace, "__init__", lambda self, op, axis, device: setattr(self, "_axis", axis))
    assert CopiedGather("gather", axis, torch.device("cuda")).refused == "the compiled part has no copy engines here"

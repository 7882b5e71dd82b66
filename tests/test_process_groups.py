"""Process groups on GPUs, played by stand-ins: what the watchdog of NCCL finds is reported, and to abort waits for nobody."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from pymesh3d.axis import Axis
from pymesh3d.process_groups import ProcessGroups


class Slow(ProcessGroups):
    """Takes its time between looking whether it is aborted and doing it."""

    def _all(self) -> list[dist.ProcessGroup]:
        time.sleep(0.2)
        return super()._all()


def test_process_groups_are_aborted_at_a_time_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As NCCL's are: each comes back only when the others have been told, and one not at all."""
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "destroy_process_group", lambda *_: pytest.fail("what is aborted must not be destroyed, which waits"))
    told, all_told, never = list[int](), threading.Barrier(3), threading.Event()
    alive = weakref.WeakSet[Any]()

    class Group:
        def __init__(self, number: int) -> None:
            self.number = number
            alive.add(self)

        def abort(self) -> None:
            told.append(self.number)
            all_told.wait(20)
            if self.number == 1:
                raise RuntimeError("NCCL error: remote process exited")
            if self.number == 2:
                never.wait(20)

    monkeypatch.setattr(dist, "group", SimpleNamespace(WORLD=Group(0)))
    axes = [Axis("dp", 0, (0, 1), Group(number)) for number in (1, 2)]  # type: ignore[arg-type]
    groups = Slow(axes, everything=False, on_gpu=True)
    others = [threading.Thread(target=groups.abort, args=(0.2,)) for _ in range(4)]  # the watching thread may, when the host does
    for other in others:
        other.start()
    assert not groups.abort(0.2)
    groups.close()
    never.set()
    assert groups.abort(20)
    for other in others:
        other.join()
    assert sorted(told) == [0, 1, 2]
    monkeypatch.undo()
    del groups, axes, others, other
    gc.collect()
    assert len(alive) == 3, "to free one would wait for torch's watchdog"


@pytest.mark.parametrize("broken", [None, 0, 1])
def test_what_the_watchdog_of_nccl_has_found_is_reported(monkeypatch: pytest.MonkeyPatch, broken: int | None) -> None:
    def group(number: int) -> SimpleNamespace:
        error = SimpleNamespace(name="COMM_ERROR" if number == broken else "SUCCESS")
        return SimpleNamespace(_get_backend=lambda _: SimpleNamespace(name=lambda: "nccl", get_error=lambda: error), number=number)

    monkeypatch.setattr(dist, "group", SimpleNamespace(WORLD=group(0)))
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [group.number, 7])
    axes = [
        Axis("dp", 0, (0, 1), group(1)),  # type: ignore[arg-type]
        Axis("pp", 0, (0, 1), SimpleNamespace(_get_backend=lambda _: SimpleNamespace(name=lambda: "gloo"))),  # type: ignore[arg-type]
    ]
    groups = ProcessGroups(axes, everything=False, on_gpu=True)
    expected = nullcontext() if broken is None else pytest.raises(RuntimeError, match=rf"COMM_ERROR in .* \[{broken}, 7\]")
    with expected:
        groups.check()
    ProcessGroups(axes, everything=False, on_gpu=False).check()


def test_process_groups_off_gpus_are_left_alone() -> None:
    assert ProcessGroups([Axis("dp", 0, (0, 1), None)], everything=True, on_gpu=False).abort(0.0)  # type: ignore[arg-type]

"""Waiting for the GPU ends: when it is done, when a peer is lost, when time is up."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from pymesh3d.axis import Axis
from pymesh3d.comm import collectives
from pymesh3d.comm.watch import LOOK, on_host, wait_until
from pymesh3d.errors import DistributedError


class Peer:
    """A transport that reports a fault from the time `fails` on, and writes down that it was told to give up."""

    def __init__(self, fails: float = float("inf")) -> None:
        self.fails = time.monotonic() + fails
        self.looks, self.aborted = 0, 0

    def check(self) -> None:
        self.looks += 1
        if time.monotonic() > self.fails:
            raise RuntimeError("the peer is gone")

    def abort(self, seconds: float) -> bool:
        self.aborted += 1
        return seconds > 0

    def close(self) -> None:
        raise AssertionError("nobody closes what waits")


def after(seconds: float) -> Callable[[], bool]:
    moment = time.monotonic() + seconds
    return lambda: time.monotonic() > moment


def test_it_ends_when_it_is_done() -> None:
    peers = [Peer(), Peer()]
    began = time.monotonic()
    wait_until(after(0.2), peers, 5.0)
    assert 0.2 <= time.monotonic() - began < 1.0
    assert [peer.aborted for peer in peers] == [0, 0]
    assert all(2 <= peer.looks <= 0.2 / LOOK + 1 for peer in peers)


def test_what_is_done_may_have_been_given_up() -> None:
    """A link that gives up lets the GPU go on, and so finish."""
    peers = [Peer(), Peer(fails=-1.0)]
    with pytest.raises(RuntimeError, match="the peer is gone"):
        wait_until(lambda: True, peers, 0.0)
    assert [peer.aborted for peer in peers] == [1, 1]
    wait_until(lambda: True, [Peer()], 0.0)


def test_a_lost_peer_ends_it_and_all_give_up() -> None:
    peers = [Peer(), Peer(fails=0.1), Peer()]
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="the peer is gone"):
        wait_until(lambda: False, peers, 20.0)
    assert 0.1 <= time.monotonic() - began < 2.0
    assert [peer.aborted for peer in peers] == [1, 1, 1]


def test_time_runs_out_and_all_give_up() -> None:
    peers = [Peer(), Peer()]
    began = time.monotonic()
    with pytest.raises(RuntimeError, match=r"the GPU has not finished within 0\.2 s"):
        wait_until(lambda: False, peers, 0.2)
    assert 0.2 <= time.monotonic() - began < 2.0
    assert [peer.aborted for peer in peers] == [1, 1]


def test_a_fault_of_the_gpu_lets_all_give_up() -> None:
    def broken() -> bool:
        raise RuntimeError("an illegal memory access was encountered")

    peer = Peer()
    with pytest.raises(RuntimeError, match="illegal memory access"):
        wait_until(broken, [peer], 5.0)
    assert peer.aborted == 1


class OnGpu(torch.Tensor):
    """Says that it is on a GPU. To come from there it would take the peer that is lost."""

    is_cuda = True

    def to(self, *_: object, **__: object) -> torch.Tensor:  # type: ignore[override]
        raise AssertionError("here the host stands in the driver, without a limit")


class ForGpu(torch.Tensor):
    """Goes to a GPU where it is told to."""

    def to(self, *_: object, **__: object) -> torch.Tensor:  # type: ignore[override]
        return self.as_subclass(OnGpu)


class Busy:
    """The event of a GPU that waits for a lost peer."""

    def record(self) -> None:
        """It is never reached."""

    def query(self) -> bool:
        return False


@pytest.mark.parametrize("fails", [0.05, float("inf")])
@pytest.mark.parametrize("way", ["on_host", "equalize_"])
def test_the_host_waits_for_no_gpu_without_a_limit(monkeypatch: pytest.MonkeyPatch, way: str, fails: float) -> None:
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *sizes, pin_memory=False, **options: empty(*sizes, **options))
    monkeypatch.setattr(torch.cuda, "Event", Busy)
    monkeypatch.setattr(dist, "get_backend", lambda _: "nccl")
    monkeypatch.setattr(collectives, "broadcast_", lambda *_: None)
    peer = Peer(fails)
    axis = Axis("tp", 0, (0, 1), None, [peer], datetime.timedelta(seconds=0.2))  # type: ignore[arg-type]
    with pytest.raises(DistributedError, match=r"rank 0: broadcast over axis tp with ranks \[1\] failed after 0") as caught:
        if way == "on_host":
            on_host(torch.ones(3).as_subclass(OnGpu), "broadcast", axis)
        else:
            collectives.equalize_(torch.ones(3).as_subclass(ForGpu), axis)
    assert ("the peer is gone" if fails < 1 else "the GPU has not finished within 0.2 s") in str(caught.value)
    assert peer.aborted == 1

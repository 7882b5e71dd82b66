"""Waiting for the GPU ends: when it is done, when a peer is lost, when time is up."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from pymesh3d.comm.watch import LOOK, wait_until


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

"""Waiting for the GPU ends: when it is done, when a peer is lost, when time is up."""

from __future__ import annotations

import contextlib
import datetime
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pymesh3d import engine as engine_module
from pymesh3d.axis import Axis, named
from pymesh3d.comm import collectives
from pymesh3d.comm.watch import THREAD_PERIOD, WAIT_PERIOD, looked_after, on_host, wait_until
from pymesh3d.engine import parallelize
from pymesh3d.errors import ConfigError, DistributedError
from pymesh3d.mesh import Mesh, init_mesh
from pymesh3d.models.llama import Llama
from tests.plain import FLOAT64, SMALL, batch_of


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
    assert all(2 <= peer.looks <= 0.2 / WAIT_PERIOD + 1 for peer in peers)


def test_what_is_done_may_have_been_given_up() -> None:
    """A link that gives up lets the GPU go on, and so finish."""
    peers = [Peer(), Peer(fails=-1.0)]
    with pytest.raises(RuntimeError, match="the peer is gone"):
        wait_until(lambda: True, peers, 0.0)
    wait_until(lambda: True, [Peer()], 0.0)


def test_a_lost_peer_ends_it() -> None:
    peers = [Peer(), Peer(fails=0.1), Peer()]
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="the peer is gone"):
        wait_until(lambda: False, peers, 20.0)
    assert 0.1 <= time.monotonic() - began < 2.0


def test_time_runs_out() -> None:
    peers = [Peer(), Peer()]
    began = time.monotonic()
    with pytest.raises(RuntimeError, match=r"the GPU has not finished within 0\.2 s"):
        wait_until(lambda: False, peers, 0.2)
    assert 0.2 <= time.monotonic() - began < 2.0


def axis_of(*peers: Peer) -> Axis:
    return Axis("tp", 0, (0, 1), None, list(peers), datetime.timedelta(seconds=0.2))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("error", "told", "aborted"),
    [
        (RuntimeError("the connection is closed"), r"rank 0: all-reduce over axis tp with ranks \[1\] failed after 0", 1),
        (torch.AcceleratorError("an illegal memory access was encountered"), "^an illegal memory access", 1),
        (torch.OutOfMemoryError("out of memory"), "^out of memory", 0),
        (ConfigError("tp=3", "it must divide 4", "Give tp=2"), "^tp=3", 0),
    ],
)
def test_when_a_collective_fails_all_give_up(error: Exception, told: str, aborted: int) -> None:
    """NCCL may raise in the call itself, when it knows already that a peer is lost. Where memory or arguments fail, peers have not."""
    peers = [Peer(), Peer()]
    with pytest.raises(Exception, match=told), named("all-reduce", axis_of(*peers)):
        raise error
    assert [peer.aborted for peer in peers] == [aborted] * 2


def mesh_of(*peers: Peer, device: str = "cuda") -> Mesh:
    axis = axis_of(*peers)
    stand_in = SimpleNamespace(device=torch.device(device), watched=axis.watched, all=axis)
    return stand_in  # type: ignore[return-value]


def test_a_peer_is_found_lost_while_the_host_stands_in_the_driver() -> None:
    """What comes of it may be an error of its own, which then names its cause, or nothing that anybody would notice."""
    given_up = threading.Event()

    class Link(Peer):
        def abort(self, seconds: float) -> bool:
            given_up.set()
            return super().abort(seconds)

    peers = [Peer(fails=0.2), Link()]
    mesh = mesh_of(*peers)
    cause = r"^rank 0: all-reduce .*: aborted\. .*\. Before that: the peer is gone$"
    with pytest.raises(DistributedError, match=cause), looked_after("a step", mesh):
        assert given_up.wait(10), "the GPU never goes on"
        with named("all-reduce", mesh.all):
            raise RuntimeError("aborted")
    assert [peer.aborted for peer in peers] == [2, 2], "by the thread, and by the host"
    given_up.clear()
    unnoticed = r"^rank 0: a step over axis tp with ranks \[1\] failed: the peer is gone\. One of"
    with pytest.raises(DistributedError, match=unnoticed), looked_after("a step", mesh):
        assert given_up.wait(10)
    with pytest.raises(KeyError), looked_after("a step", mesh_of(Peer())):
        raise KeyError("of the step")
    with pytest.raises(DistributedError, match=r"^the batches differ$"), looked_after("a step", mesh_of(Peer())):
        raise DistributedError("the batches differ")


def test_nobody_looks_after_the_end() -> None:
    peer = Peer()
    began = time.monotonic()
    with looked_after("a step", mesh_of(peer)):
        time.sleep(2.5 * THREAD_PERIOD)
    took = time.monotonic() - began
    looks, peer.fails = peer.looks, 0.0
    time.sleep(2.5 * THREAD_PERIOD)
    assert took < 1.0 and 1 <= looks <= took / THREAD_PERIOD
    assert peer.looks == looks and not peer.aborted


def test_off_gpus_nobody_looks() -> None:
    """There every wait has its own limit, and nothing waits without the host."""
    peer = Peer(fails=0.0)
    with looked_after("a step", mesh_of(peer, device="cpu")):
        time.sleep(2.5 * THREAD_PERIOD)
    assert not peer.looks and not peer.aborted


def what_is_looked_after() -> list[str]:
    """What an engine does in a step and an evaluation, and what of that is looked after."""
    engine = parallelize(Llama(SMALL, device="meta"), init_mesh(device="cpu"), FLOAT64)
    told = list[str]()

    @contextlib.contextmanager
    def noted(operation: str, _: Mesh) -> Iterator[None]:
        told.append(f"{operation}:")
        yield
        told.append(".")

    def telling(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*given: Any, **options: Any) -> Any:
            told.append(name)
            return function(*given, **options)

        return run

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_module, "looked_after", noted)
        patch.setattr(engine, "_prepare", telling("prepare", engine._prepare))
        patch.setattr(engine, "_agree_on_loss", telling("agree", engine._agree_on_loss))
        patch.setattr(engine.zero, "step", telling("update", engine.zero.step))
        batch = batch_of(4, 8)
        engine.train_step(batch)
        engine.eval_step(batch)
    engine.mesh.close()
    return told


def test_all_that_may_wait_for_a_gpu_is_looked_after(ranks: Callable[..., list[Any]]) -> None:
    (told,) = ranks(1, what_is_looked_after)
    assert " ".join(told) == "a step: prepare agree . an update: update . an evaluation: prepare agree ."


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
    axis = axis_of(peer)
    with pytest.raises(DistributedError, match=r"rank 0: broadcast over axis tp with ranks \[1\] failed after 0") as caught:
        if way == "on_host":
            on_host(torch.ones(3).as_subclass(OnGpu), "broadcast", axis)
        else:
            collectives.equalize_(torch.ones(3).as_subclass(ForGpu), axis)
    assert ("the peer is gone" if fails < 1 else "the GPU has not finished within 0.2 s") in str(caught.value)
    assert peer.aborted == 1

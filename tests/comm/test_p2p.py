"""Channels between pipeline stages: a queue that keeps what it sends, and says who is gone."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from pymesh3d.comm.p2p import Channel, Channels
from pymesh3d.errors import DistributedError
from pymesh3d.launch import launch
from pymesh3d.mesh import Mesh, init_mesh

Ranks = Callable[..., list[Any]]
COUNT, NUMBERS = 40, 5000
SENT = [(float(n), float(n), NUMBERS + n) for n in range(COUNT)]


def ends(mesh: Mesh, channels: Channels) -> tuple[Channel, Channel]:
    """Of a pipeline of two: the end that sends, the end that receives."""
    pair = (channels.activations_out, channels.gradients_in) if mesh.pp.rank == 0 else (channels.gradients_out, channels.activations_in)
    out, into = pair
    assert out is not None and into is not None
    return out, into


def many_sends(device: str = "cpu") -> list[tuple[float, float, int]]:
    """Both sides send many tensors, free each at once and overwrite the memory; (smallest, largest value, numbers) of what came."""
    mesh = init_mesh(pp=2, device=device)
    out, into = ends(mesh, Channels(mesh))
    received = []
    for n in range(COUNT):
        tensor = torch.full((NUMBERS + n,), float(n), dtype=torch.float64, device=mesh.device)
        out.send(tensor, n)
        del tensor
        torch.full((NUMBERS + n,), 12345.0, dtype=torch.float64, device=mesh.device)
        if n == 0:
            time.sleep(0.2 * mesh.rank)  # one side receives later
        into.post((NUMBERS + n,), torch.float64, mesh.device, n)
        if n % 2:  # two receives are open at a time
            received += [into.take(), into.take()]
            assert len(out._sent) <= 2, "what was sent before is no longer kept"
    out.flush()
    mesh.close()
    return [(t.min().item(), t.max().item(), t.numel()) for t in received]


def test_order_is_kept_and_sent_tensors_may_be_freed(ranks: Ranks) -> None:
    assert ranks(2, many_sends) == [SENT] * 2


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_order_is_kept_between_gpus() -> None:
    script = "from tests.comm.test_p2p import SENT, many_sends; assert many_sends('cuda') == SENT"
    assert launch(["-c", script], 2) == 0


def not_contiguous() -> list[list[float]] | None:
    mesh = init_mesh(pp=2, device="cpu")
    channels = Channels(mesh)
    if mesh.pp.rank == 0:
        assert channels.activations_out is not None
        channels.activations_out.send(torch.tensor([[1.0, 2.0], [3.0, 4.0]], requires_grad=True).t(), 0)
        channels.flush()
        found = None
    else:
        assert channels.activations_in is not None
        channels.activations_in.post((2, 2), torch.float32, mesh.device, 0)
        found = channels.activations_in.take().tolist()
    mesh.close()
    return found


def test_what_is_not_contiguous_arrives_in_order(ranks: Ranks) -> None:
    assert ranks(2, not_contiguous) == [None, [[1.0, 3.0], [2.0, 4.0]]]


def neighbours() -> tuple[tuple[bool, ...], list[float]]:
    """pp 3 x dp 2: which ends there are, and what comes when every stage sends its rank both ways."""
    mesh = init_mesh(pp=3, dp=2, device="cpu")
    channels = Channels(mesh)
    every = (channels.activations_in, channels.activations_out, channels.gradients_in, channels.gradients_out)
    for sender in (channels.activations_out, channels.gradients_out):
        if sender is not None:
            sender.send(torch.tensor([float(mesh.rank)]), 0)
    received = []
    for receiver in (channels.activations_in, channels.gradients_in):
        if receiver is not None:
            receiver.post((1,), torch.float32, mesh.device, 0)
            received.append(receiver.take().item())
    channels.flush()
    mesh.close()
    return tuple(end is not None for end in every), received


def test_each_stage_is_joined_to_its_neighbours(ranks: Ranks) -> None:
    first, middle, last = (False, True, True, False), (True, True, True, True), (True, False, False, True)
    assert ranks(6, neighbours) == [
        (first, [2.0]),
        (first, [3.0]),
        (middle, [0.0, 4.0]),
        (middle, [1.0, 5.0]),
        (last, [2.0]),
        (last, [3.0]),
    ]


def wrong_end() -> list[str]:
    mesh = init_mesh(pp=2, device="cpu")
    out, into = ends(mesh, Channels(mesh))
    texts = []
    for call in (lambda: out.post((1,), torch.float32, mesh.device, 0), lambda: into.send(torch.ones(1), 0)):
        with pytest.raises(AssertionError) as caught:
            call()
        texts.append(str(caught.value))
    mesh.close()
    return texts


def test_an_end_only_sends_or_only_receives(ranks: Ranks) -> None:
    assert ranks(2, wrong_end) == [["this end of the channel sends", "this end of the channel receives"]] * 2


def lost_peer(dies: int, how: str) -> tuple[str, float] | None:
    """Rank `dies` of two ends ("killed") or says nothing for 5 s ("frozen"), the limit being 2 s; what the other is told."""
    mesh = init_mesh(pp=2, device="cpu", timeout_s=2.0)
    out, into = ends(mesh, Channels(mesh))
    if mesh.rank == dies:
        if how == "killed":
            os._exit(7)
        time.sleep(5.0)
        return None
    began = time.monotonic()
    try:
        if mesh.rank == 0:
            for _ in range(20):  # the system takes some of it without the peer
                out.send(torch.zeros(1_000_000), 5)
            out.flush()
        else:
            into.post((4,), torch.float32, mesh.device, 5)
            into.take()
    except DistributedError as error:
        return str(error), time.monotonic() - began
    return None


@pytest.mark.parametrize("how", ["killed", "frozen"])
@pytest.mark.parametrize("dies", [0, 1])
def test_a_lost_peer_is_an_error_within_seconds(fresh_ranks: Ranks, dies: int, how: str) -> None:
    found = fresh_ranks(2, lost_peer, dies, how, timeout=30.0, expect_dead=[dies] if how == "killed" else [])
    left, operation = 1 - dies, "receive of activations" if dies == 0 else "send of activations"
    text, seconds = found[left]
    assert f"rank {left}: {operation} of microbatch 5 over axis pp with ranks [{dies}] failed after " in text
    assert seconds < 4.0

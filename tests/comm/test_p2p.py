"""Links between pipeline stages: queues that keep what they send, and say who is gone."""

from __future__ import annotations

import os
import re
import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from pymesh3d.comm import native
from pymesh3d.comm.links import Expected, Link, TorchLink
from pymesh3d.comm.p2p import TRANSPORTS, VARIABLE, Links, Wish, agreed_transport
from pymesh3d.errors import ConfigError, DistributedError
from pymesh3d.launch import launch
from pymesh3d.mesh import init_mesh
from tests.processes import two_ranks

Ranks = Callable[..., list[Any]]
COUNT, NUMBERS = 40, 5000
SENT = [(float(n), float(n), NUMBERS + n) for n in range(COUNT)]


def only(links: Links) -> Link:
    """The one link of an end of a pipeline of two."""
    link = links.before or links.after
    assert link is not None
    return link


def many_sends(device: str = "cpu") -> list[tuple[float, float, int]]:
    """Both sides send many tensors, free each at once and overwrite the memory; (smallest, largest value, numbers) of what came."""
    mesh = init_mesh(pp=2, device=device)
    link = only(Links(mesh))
    received = []
    for n in range(COUNT):
        tensor = torch.full((NUMBERS + n,), float(n), dtype=torch.float64, device=mesh.device)
        if n == 0:
            time.sleep(0.2 * mesh.rank)  # one side is later
        expected = Expected((NUMBERS + n,), torch.float64, n)
        if n % 3:
            link.send(tensor, n, expected)
        elif mesh.rank == 0:
            link.send(tensor, n)
            link.post(expected)
        else:
            link.post(expected)
            link.send(tensor, n)
        del tensor
        torch.full((NUMBERS + n,), 12345.0, dtype=torch.float64, device=mesh.device)
        if n % 2:  # two receives are open at a time
            received += [link.take(), link.take()]
            assert device == "cuda" or len(link._sent) <= 2, "what was sent before is no longer kept"  # type: ignore[attr-defined]
    link.flush()
    found = [(t.min().item(), t.max().item(), t.numel()) for t in received]
    mesh.close()
    return found


def test_order_is_kept_and_sent_tensors_may_be_freed(ranks: Ranks) -> None:
    assert ranks(2, many_sends) == [SENT] * 2


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("over", TRANSPORTS)
def test_order_is_kept_between_gpus(monkeypatch: pytest.MonkeyPatch, over: str) -> None:
    monkeypatch.setenv(VARIABLE, over)
    script = "from tests.comm.test_p2p import SENT, many_sends; assert many_sends('cuda') == SENT"
    assert launch(["-c", script], 2) == 0


TRAINS_UNTIL_KILLED = """
import os, sys, time, torch, pymesh3d

mesh = pymesh3d.init_mesh(**{sys.argv[1]: 2}, device="cuda", timeout_s=6)
config = pymesh3d.TrainConfig(seq=128, global_batch=16, micro_batch=2, dtype="bfloat16")
model = pymesh3d.Llama(pymesh3d.ModelConfig(vocab=256, dim=256, layers=4, heads=4, kv_heads=2, ffn=512), device="meta")
engine = pymesh3d.parallelize(model, mesh, config)
tokens = (torch.arange(16 * 128, device="cuda").view(16, 128) % 256).chunk(mesh.dp.size)[mesh.dp.rank]
for step in range(1000):
    began = time.monotonic()
    try:
        engine.train_step((tokens, tokens))
    except pymesh3d.DistributedError as error:
        mesh.close()
        print(f"{time.monotonic() - began:.1f} s", error, flush=True)
        break
    if step == 3 and mesh.rank == 1:
        os._exit(9)
"""


@pytest.mark.gpu
@pytest.mark.timeout(120)
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("axis", ["pp", "dp", "tp"])
def test_a_killed_peer_is_an_error_though_the_host_waits_for_its_gpu(axis: str) -> None:
    """Along pp the host has filled the GPU's queue, and stands in a call of the driver's until the GPU goes on. On one host the peer's
    GPU just falls silent, which this rank's own limit or torch's watchdog finds first; then what the host calls next is told of the abort.
    The program ends soon after.
    """
    with two_ranks(TRAINS_UNTIL_KILLED, axis) as ranks:
        assert ranks[1].wait(60) == 9
        told, _ = ranks[0].communicate(timeout=25)
        assert "with ranks [1] failed" in told
        reason = "has not finished within 6" if axis == "pp" else "TIMEOUT in the process group|communicator was aborted on rank 0"
        assert re.search(reason, told), told
        assert 5.0 < float(told.split()[0]) < 15.0
        assert ranks[0].returncode == 0


def not_contiguous() -> list[list[float]] | None:
    mesh = init_mesh(pp=2, device="cpu")
    links, found = Links(mesh), None
    if mesh.pp.rank == 0:
        only(links).send(torch.tensor([[1.0, 2.0], [3.0, 4.0]], requires_grad=True).t(), 0)
        links.flush()
    else:
        only(links).post(Expected((2, 2), torch.float32, 0))
        found = only(links).take().tolist()
    mesh.close()
    return found


def test_what_is_not_contiguous_arrives_in_order(ranks: Ranks) -> None:
    assert ranks(2, not_contiguous) == [None, [[1.0, 3.0], [2.0, 4.0]]]


def neighbours() -> tuple[tuple[bool, bool], list[float]]:
    """pp 3 x dp 2: which links there are, and what comes when every stage sends its rank both ways."""
    mesh = init_mesh(pp=3, dp=2, device="cpu")
    links = Links(mesh)
    here = [link for link in (links.before, links.after) if link is not None]
    for link in here:
        link.send(torch.tensor([float(mesh.rank)]), 0, Expected((1,), torch.float32, 0))
    received = [link.take().item() for link in here]
    links.flush()
    mesh.close()
    return (links.before is not None, links.after is not None), received


def test_each_stage_is_joined_to_its_neighbours(ranks: Ranks) -> None:
    first, middle, last = (False, True), (True, True), (True, False)
    assert ranks(6, neighbours) == [
        (first, [2.0]),
        (first, [3.0]),
        (middle, [0.0, 4.0]),
        (middle, [1.0, 5.0]),
        (last, [2.0]),
        (last, [3.0]),
    ]


FREE, TORCH, NCCL = Wish("", ""), Wish("torch", ""), Wish("nccl", "")
UNBUILT = Wish("", "not built")


def test_nccl_is_used_where_every_rank_can() -> None:
    assert agreed_transport([FREE, FREE, FREE]) == ("nccl", "")
    assert agreed_transport([FREE, NCCL]) == ("nccl", "")
    assert agreed_transport([UNBUILT, UNBUILT]) == agreed_transport([TORCH, UNBUILT]) == ("torch", "")
    assert agreed_transport([FREE, UNBUILT, TORCH]) == ("torch", "rank 1 cannot: not built")
    assert agreed_transport([FREE, FREE, TORCH]) == ("torch", f"rank 2 cannot: {VARIABLE}=torch")


@pytest.mark.parametrize(
    ("wishes", "text"),
    [
        ([FREE, Wish("mpi", ""), NCCL], f"{VARIABLE}=mpi on rank 1: no such transport. Use nccl or torch, or leave it unset"),
        ([FREE, NCCL, UNBUILT], f"{VARIABLE}=nccl on rank 1: rank 2 cannot: not built. "
         f"Use {VARIABLE}=torch on all ranks, or leave it unset"),
        ([TORCH, NCCL, NCCL], f"{VARIABLE}=nccl on rank 1: rank 0 cannot: {VARIABLE}=torch. "
         f"Use {VARIABLE}=torch on all ranks, or leave it unset"),
        ([Wish("nccl", "not built")], f"{VARIABLE}=nccl on rank 0: rank 0 cannot: not built. "
         f"Use {VARIABLE}=torch on all ranks, or leave it unset"),
    ],
)  # fmt: skip
def test_a_transport_that_a_rank_cannot_use_is_refused(wishes: list[Wish], text: str) -> None:
    with pytest.raises(ConfigError) as refused:
        agreed_transport(wishes)
    assert str(refused.value) == text


def test_what_a_rank_wishes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "no_nccl", lambda: "torch has another NCCL")
    assert Wish.of(torch.device("cuda")) == Wish("", "torch has another NCCL")
    monkeypatch.setenv(VARIABLE, "nccl")
    assert Wish.of(torch.device("cpu")) == Wish("nccl", "it needs GPUs")


def wishing(first: Wish, second: Wish) -> tuple[str, list[str]]:
    """What two ranks are told that wish this: the error, if any, and warnings. Otherwise they are joined over torch.distributed."""
    mesh, told = init_mesh(pp=2, device="cpu", timeout_s=10.0), ""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        patch.setattr(Wish, "of", lambda _: (first, second)[mesh.rank])
        try:
            assert isinstance(only(Links(mesh)), TorchLink)
        except ConfigError as error:
            told = str(error)
    mesh.close()
    return told, [str(warning.message) for warning in caught]


def test_ranks_agree_on_the_transport(ranks: Ranks) -> None:
    """One rank alone cannot use NCCL, or is told not to: the other does not wait for it in vain."""
    because = "stages send over torch.distributed instead of NCCL, because rank 1 cannot: "
    assert ranks(2, wishing, FREE, UNBUILT) == [("", [because + "not built"]), ("", [])]
    assert ranks(2, wishing, FREE, TORCH) == [("", [f"{because}{VARIABLE}=torch"]), ("", [])]
    refused = f"{VARIABLE}=nccl on rank 0: rank 1 cannot: not built. Use {VARIABLE}=torch on all ranks, or leave it unset"
    assert ranks(2, wishing, NCCL, UNBUILT) == [(refused, [])] * 2


def lost_peer(dies: int, how: str) -> tuple[str, float] | None:
    """Rank `dies` of two ends ("killed") or says nothing for 5 s ("frozen"), the limit being 2 s; what the other is told."""
    mesh = init_mesh(pp=2, device="cpu", timeout_s=2.0)
    link = only(Links(mesh))
    if mesh.rank == dies:
        if how == "killed":
            os._exit(7)
        time.sleep(5.0)
        return None
    began = time.monotonic()
    try:
        if mesh.rank == 0:
            for _ in range(20):  # the system takes some of it without the peer
                link.send(torch.zeros(1_000_000), 5)
            link.flush()
        else:
            link.post(Expected((4,), torch.float32, 5))
            link.take()
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

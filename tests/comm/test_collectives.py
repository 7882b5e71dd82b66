"""Collectives along an axis: their values, that one rank alone pays nothing, and that a lost rank is an error and no hang."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pymesh3d.axis import Axis
from pymesh3d.comm.collectives import MAX, all_gather, all_reduce_, all_to_all, broadcast_, gather_rows, named, reduce_scatter
from pymesh3d.errors import ConfigError, DistributedError
from pymesh3d.launch import loopback_store
from pymesh3d.mesh import init_mesh

Ranks = Callable[..., list[Any]]


def values() -> dict[str, Any]:
    """On the dp axis [0, 2] [1, 3] of dp 2 x tp 2, so that an axis' coordinate is not the rank."""
    mesh = init_mesh(tp=2, dp=2, device="cpu")
    axis, me = mesh.dp, float(mesh.rank)
    x = torch.tensor([[me, me + 10], [me + 20, me + 30]])
    found = {
        "sum": all_reduce_(x.clone(), axis).wait().tolist(),
        "max": all_reduce_(x.clone(), axis, MAX).wait().tolist(),
        "gather": all_gather(x.t(), axis).wait().tolist(),
        "scatter": reduce_scatter(x.t(), axis).wait().tolist(),
        "exchange": all_to_all(x.t(), axis).wait().tolist(),
        "broadcast": broadcast_(x.clone(), axis, 1).tolist(),
        "rows": gather_rows(torch.tensor([me, -me]), mesh.all).tolist(),
    }
    mesh.close()
    return found


def test_values(ranks: Ranks) -> None:
    for rank, found in enumerate(ranks(4, values)):
        a, b = float(rank % 2), float(rank % 2 + 2)
        assert found["sum"] == [[a + b, a + b + 20], [a + b + 40, a + b + 60]]
        assert found["max"] == [[b, b + 10], [b + 20, b + 30]]
        assert found["gather"] == [[a, a + 20], [a + 10, a + 30], [b, b + 20], [b + 10, b + 30]]
        assert found["scatter"] == ([[a + b, a + b + 40]] if rank < 2 else [[a + b + 20, a + b + 60]])
        assert found["exchange"] == ([[a, a + 20], [b, b + 20]] if rank < 2 else [[a + 10, a + 30], [b + 10, b + 30]])
        assert found["broadcast"] == [[b, b + 10], [b + 20, b + 30]]
        assert found["rows"] == [[0.0, 0.0], [1.0, -1.0], [2.0, -2.0], [3.0, -3.0]]


def alone() -> list[bool]:
    mesh = init_mesh(tp=2, device="cpu")
    x = torch.ones(2, 2)
    same = [op(x, mesh.dp).wait() is x for op in (all_reduce_, all_gather, reduce_scatter, all_to_all)] + [broadcast_(x, mesh.dp) is x]
    mesh.close()
    return same


def test_on_an_axis_of_one_rank_they_return_their_input(ranks: Ranks) -> None:
    assert ranks(2, alone) == [[True] * 5] * 2


def in_place() -> tuple[bool, list[float]]:
    """Several under way at once; each is finished by its own `wait`."""
    mesh = init_mesh(device="cpu")
    tensors = [torch.full((3,), float(n + mesh.rank)) for n in range(5)]
    pending = [all_reduce_(t, mesh.all) for t in tensors]
    done = [p.wait() for p in reversed(pending)][::-1]
    twice = all(p.wait() is t for p, t in zip(pending, tensors, strict=True))
    mesh.close()
    return twice and all(a is b for a, b in zip(done, tensors, strict=True)), [t[0].item() for t in tensors]


def test_many_under_way(ranks: Ranks) -> None:
    assert ranks(2, in_place) == [(True, [1.0, 3.0, 5.0, 7.0, 9.0])] * 2


def test_errors_of_ours_pass_unchanged() -> None:
    axis = Axis("dp", 0, (4, 6), None)  # type: ignore[arg-type]
    for error in (ConfigError("a", "b", "c"), DistributedError("lost")):
        with pytest.raises(type(error)) as caught, named("all-reduce", axis):
            raise error
        assert caught.value is error
    said = r"rank 4: all-gather over axis dp with ranks \[6\] failed after 0\.\d s: first line\. "
    with pytest.raises(DistributedError, match=said), named("all-gather", axis):
        raise RuntimeError("first line\nsecond line")


def one_rank_dies(operation: str) -> tuple[str, float] | None:
    """Rank 1 ends without a word; what the others are told, and after how long."""
    mesh = init_mesh(device="cpu")
    call = {"all-reduce": all_reduce_, "all-gather": all_gather, "all-to-all": all_to_all}[operation]
    call(torch.ones(3), mesh.all).wait()
    if mesh.rank == 1:
        os._exit(7)
    began = time.monotonic()
    try:
        for _ in range(10):
            call(torch.ones(3), mesh.all).wait()
    except DistributedError as error:
        return str(error), time.monotonic() - began
    return None


@pytest.mark.parametrize("operation", ["all-reduce", "all-gather", "all-to-all"])
def test_a_rank_that_dies_is_an_error_within_seconds(fresh_ranks: Ranks, operation: str) -> None:
    found = fresh_ranks(3, one_rank_dies, operation, expect_dead=[1])
    assert found[1] is None
    for rank in (0, 2):
        text, seconds = found[rank]
        assert f"rank {rank}: {operation} over axis all with ranks {[r for r in range(3) if r != rank]} failed after " in text
        assert seconds < 5.0


def one_rank_freezes(port: int) -> list[tuple[str, float]]:
    """A process group of init_mesh with a limit of 2 s, on which rank 1 is silent for 6 s; what rank 0 is told on two axes."""
    dist.destroy_process_group()
    os.environ.update(MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True")
    mesh = init_mesh(tp=2, device="cpu", timeout_s=2.0)
    told = []
    for axis in (mesh.tp, mesh.all):
        all_reduce_(torch.ones(3), axis).wait()
    if mesh.rank == 1:
        time.sleep(6.0)
        return []
    for axis in (mesh.tp, mesh.all):
        began = time.monotonic()
        with pytest.raises(DistributedError) as caught:
            all_reduce_(torch.ones(3), axis).wait()
        told.append((str(caught.value), time.monotonic() - began))
    return told


def test_a_rank_that_freezes_is_an_error_when_the_time_is_up(fresh_ranks: Ranks) -> None:
    """On an axis' own group and on that of all ranks."""
    store = loopback_store()
    told = fresh_ranks(2, one_rank_freezes, store.port, timeout=30.0)[0]
    for axis, (text, seconds) in zip(("tp", "all"), told, strict=True):
        assert f"rank 0: all-reduce over axis {axis} with ranks [1] failed after " in text
        assert 1.0 < seconds < 4.0

"""Shards put together again are the tensor they were cut from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from pymesh3d.comm.whole import whole, whole_state_dict
from pymesh3d.errors import ConfigError
from pymesh3d.mesh import init_mesh
from pymesh3d.placement import Part, Placement
from pymesh3d.tp.plan import Column, Vocab, parallelize_module

Ranks = Callable[..., list[Any]]


def placements(tp: int) -> dict[str, Placement]:
    kv = Part(size=4, heads=2)
    return {
        "scalar": Placement(shape=(), ranks=tp),
        "replicated": Placement(shape=(5,), ranks=tp),
        "rows": Placement(shape=(8, 3), parts=(Part(size=8),), ranks=tp),
        "columns": Placement(shape=(3, 8), dim=1, parts=(Part(size=8),), ranks=tp),
        "qkv": Placement(shape=(16, 3), parts=(Part(size=8, heads=4), kv, kv), ranks=tp),
        "padded": Placement(shape=(7, 2), parts=(Part(size=7, padded=16),), ranks=tp),
    }


def full(placement: Placement, dtype: torch.dtype) -> torch.Tensor:
    count = max(1, torch.Size(placement.shape).numel())
    return torch.arange(1, count + 1, dtype=dtype).view(placement.shape)


def put_together(tp: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """On the tp axis of dp 2 x tp; the shards of one dp rank are negated, so that nothing may come from the other line."""
    mesh = init_mesh(tp=tp, dp=2, device="cpu")
    sign = -1 if mesh.dp.rank else 1
    found = {}
    for name, placement in placements(tp).items():
        local = torch.full(placement.local_shape(), 12345, dtype=dtype)
        placement.shard(full(placement, dtype), local, mesh.tp.rank)
        found[name] = whole((sign * local).requires_grad_(), placement, mesh.tp)
    mesh.close()
    return found


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_shards_make_the_whole_on_every_rank(ranks: Ranks, tp: int) -> None:
    dtype = torch.float64 if tp < 4 else torch.bfloat16
    for rank, found in enumerate(ranks(2 * tp, put_together, tp, dtype)):
        for name, placement in placements(tp).items():
            expected = full(placement, dtype) * (-1 if rank >= tp else 1)
            assert found[name].dtype == dtype and not found[name].requires_grad
            assert torch.equal(found[name], expected), name


class Tied(nn.Module):
    """A weight under two names, a norm, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm, self.head = nn.Embedding(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 6, bias=False)
        self.head.weight = self.embedding.weight


def whole_module() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], str]:
    mesh = init_mesh(tp=2, dp=1, device="cpu")
    torch.manual_seed(0)
    parts = nn.ModuleDict({"tied": Tied(), "plain": nn.Linear(1, 1, dtype=torch.float64), "other": nn.Sequential(nn.Linear(3, 4))})
    before = {name: tensor.clone() for name, tensor in parts.state_dict().items()}
    parallelize_module(parts["tied"], mesh, {"embedding": Vocab(vocab_multiple=1), "head": Column(vocab_multiple=1)})
    parallelize_module(parts["other"], mesh, {"0": Column(gather_output=True)})
    found = whole_state_dict(parts, mesh["tp"])
    assert found["tied.embedding.weight"] is found["tied.head.weight"], "a tie stays a tie"
    with pytest.raises(ConfigError) as caught:
        whole_state_dict(parts, mesh.dp)
    mesh.close()
    return before, found, str(caught.value)


def test_a_module_gives_the_state_of_the_unsharded_one(ranks: Ranks) -> None:
    """With ties and buffers, by the names in the module that is given, also where only parts of it are parallel."""
    for before, found, refusal in ranks(2, whole_module):
        assert found.keys() == before.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in before.items())
        Tied().load_state_dict({name.removeprefix("tied."): found[name] for name in found if name.startswith("tied.")})
        assert refusal == (
            "tied.embedding.weight, cut over 2 ranks, and axis dp of 1: it is put together along the axis it is cut over. "
            "Use the mesh it was cut with"
        )

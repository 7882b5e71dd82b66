"""Shards put together again are the tensor they were cut from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from pymesh3d.comm.whole import whole, whole_parameters
from pymesh3d.mesh import init_mesh
from pymesh3d.placement import Part, Placement
from pymesh3d.tp.plan import Column, parallelize_module

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


def whole_module() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    mesh = init_mesh(tp=2, device="cpu")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    parallelize_module(model, mesh, {"0": Column(gather_output=True)})
    found = {**dict(whole_parameters(model, mesh.tp)), **dict(whole_parameters(nn.Linear(1, 1, dtype=torch.float64), mesh.tp))}
    mesh.close()
    return before, found


def test_a_module_gives_the_state_of_the_unsharded_one(ranks: Ranks) -> None:
    """And one that nobody parallelized its own parameters."""
    for before, found in ranks(2, whole_module):
        assert found.keys() == {*before, "weight", "bias"}
        assert found["weight"].dtype == torch.float64
        assert all(torch.equal(found[name], tensor) for name, tensor in before.items())

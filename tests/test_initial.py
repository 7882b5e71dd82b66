"""Initial values are those of one process, bit for bit, however a model or a layer is cut, and have the spread they should."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from pymesh3d.comm.whole import whole
from pymesh3d.config import ModelConfig, TrainConfig
from pymesh3d.engine import parallelize
from pymesh3d.initial import fill_, materialize
from pymesh3d.mesh import init_mesh
from pymesh3d.models.llama import Llama, initialize_
from pymesh3d.placement import Part, Placement, place, placement_of
from pymesh3d.random import fill_shard_
from pymesh3d.tp.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding

Ranks = Callable[..., list[Any]]

MODEL = ModelConfig(vocab=67, dim=64, layers=4, heads=4, kv_heads=2, ffn=96)
SEED = 11


def parameters_of(model: ModelConfig, sizes: dict[str, int]) -> dict[str, torch.Tensor]:
    """This stage's whole parameters after construction on a mesh; torch's own generators differ on each rank."""
    mesh = init_mesh(device="cpu", dp=1, **sizes)
    engine = parallelize(Llama(model, device="meta"), mesh, TrainConfig(seed=SEED))
    found = dict(engine.whole_parameters())
    mesh.close()
    return found


@pytest.mark.parametrize(("tp", "pp", "tied"), [(tp, pp, tied) for tp in (1, 2, 4) for pp in (1, 2) for tied in (False, True)])
def test_a_model_starts_alike_in_every_layout(ranks: Ranks, tp: int, pp: int, tied: bool) -> None:
    model = dataclasses.replace(MODEL, tied=tied)
    plain = Llama(model)
    initialize_(plain, SEED)
    expected = dict(plain.named_parameters())
    stages = ranks(tp * pp, parameters_of, model, {"tp": tp, "pp": pp})
    assert set().union(*stages) == set(expected)
    for stage in stages:
        for name, value in stage.items():
            assert torch.equal(value, expected[name]), name


def test_the_spread_of_a_model() -> None:
    model = Llama(ModelConfig(dim=128, layers=8, heads=4, kv_heads=2, ffn=256))
    initialize_(model, SEED)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            assert (parameter == 1).all()
            continue
        expected = 0.02 / math.sqrt(16) if name.endswith(("attention.out.weight", "ffn.down.weight")) else 0.02
        assert parameter.std().item() == pytest.approx(expected, rel=4 / math.sqrt(2 * parameter.numel())), name
        assert abs(parameter.mean().item()) < 4 * expected / math.sqrt(parameter.numel()), name


def standalone(seed: int) -> dict[str, torch.Tensor]:
    """Whole parameters of layers made by themselves; the generator of the first rank decides."""
    mesh = init_mesh(device="cpu", tp=-1, dp=1)
    torch.manual_seed(seed if mesh.rank == 0 else 999 + mesh.rank)
    layers = {
        "up": ColumnParallelLinear(64, 256, mesh=mesh),
        "down": RowParallelLinear(64, 256, mesh=mesh),
        "table": VocabParallelEmbedding(200, 64, padding_idx=-3, mesh=mesh, vocab_multiple=32),
        "again": ColumnParallelLinear(64, 256, mesh=mesh),
    }
    found = {f"{at}.{name}": whole(p, placement_of(p), mesh.tp) for at, layer in layers.items() for name, p in layer.named_parameters()}
    assert layers["table"].padding_idx == 197
    mesh.close()
    return found


def test_a_layer_by_itself_has_the_spread_of_torch_in_every_layout(ranks: Ranks) -> None:
    """nn.Linear(64, .) is uniform within 1 / sqrt(64) = 0.125; 0.1768 would be that of half the features."""
    found = [seen for world in (1, 2, 4) for seen in ranks(world, standalone, 5)]
    for seen in found:
        assert all(torch.equal(seen[name], found[0][name]) for name in found[0])
    values = found[0]
    for name in ("up.weight", "up.bias", "down.weight", "down.bias"):
        assert 0.12 < values[name].abs().max().item() <= 0.125, name
        deviation = 0.125 / math.sqrt(3)
        assert values[name].std().item() == pytest.approx(deviation, rel=4 / math.sqrt(2 * values[name].numel())), name
    table = values["table.weight"]
    assert not table[197].any(), "the padding row, as in nn.Embedding"
    rest = table[torch.arange(200) != 197]
    assert rest.std().item() == pytest.approx(1, rel=4 / math.sqrt(2 * rest.numel()))
    assert not torch.equal(values["up.weight"], values["again.weight"])
    assert not torch.equal(values["up.weight"], values["down.weight"])
    other = ranks(2, standalone, 6)[0]
    assert not torch.equal(values["up.weight"], other["up.weight"])


CUTS = [
    Placement(shape=(12, 5), parts=(Part(size=12),), ranks=4),
    Placement(shape=(12, 5), parts=(Part(size=8, heads=4), Part(size=2, heads=2), Part(size=2, heads=1)), ranks=4),
    Placement(shape=(10, 3, 2), parts=(Part(size=10, padded=16),), ranks=4),
    Placement(shape=(5, 12), dim=1, parts=(Part(size=12),), ranks=4),
    Placement(shape=(5, 13), dim=1, parts=(Part(size=8), Part(size=5, padded=8)), ranks=4),
    Placement(shape=(7,), parts=(Part(size=7, padded=8),), ranks=4),
    Placement(shape=(7, 2), ranks=4),
    Placement(shape=(), ranks=4),
]


@pytest.mark.parametrize("placement", CUTS, ids=lambda placement: f"{placement.shape} dim {placement.dim}")
@pytest.mark.parametrize("kind", ["normal", "uniform"])
def test_a_shard_is_filled_with_its_part_of_the_whole(placement: Placement, kind: str) -> None:
    columns = math.prod(placement.shape[1:])
    full = torch.full((*placement.shape[:1], columns) if placement.shape else (1, columns), math.nan)
    fill_shard_(full, seed=3, name="a.weight", kind=kind, scale=0.1, global_cols=columns)
    full = full.view(placement.shape)
    for rank in range(placement.ranks):
        local, expected = (torch.full(placement.local_shape(), math.nan) for _ in range(2))
        placement.shard(full, expected, rank)
        fill_(local, placement, rank, seed=3, name="a.weight", kind=kind, scale=0.1)
        assert torch.equal(local, expected)


def test_memory_for_parameters_on_meta_keeps_records_ties_and_the_rest() -> None:
    model = nn.ModuleDict({"a": nn.Linear(3, 3, device="meta"), "b": nn.Linear(3, 3, device="meta"), "c": nn.Linear(3, 3)})
    model["b"].weight = model["a"].weight
    model["a"].bias.requires_grad_(False)
    record = Placement(name="a.weight", shape=(6, 3), parts=(Part(size=6),), ranks=2, tied="a.weight")
    place(model["a"].weight, record)
    kept = model["c"].weight
    materialize(model, "cpu")
    assert not any(parameter.is_meta for parameter in model.parameters())
    assert model["b"].weight is model["a"].weight
    assert placement_of(model["b"].weight) is record
    assert model["a"].weight.tensor_model_parallel
    assert not model["a"].bias.requires_grad
    assert model["c"].weight is kept

"""Gradients of which each tp rank holds only a summand: KV heads on several ranks, norms and row biases under sequence parallelism.

After the reduction of data parallelism they are those of one process: summed over the copies, not averaged, and not doubled.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pymesh3d.comm.whole import whole
from pymesh3d.config import Layout, ModelConfig, TrainConfig, validate
from pymesh3d.dp.zero import STAGES, Zero
from pymesh3d.errors import ConfigError
from pymesh3d.mesh import Mesh, init_mesh
from pymesh3d.placement import Part, placement_of
from pymesh3d.tp.plan import Column, Norm, Row, parallelize_module
from tests.plain import assert_near

Ranks = Callable[..., list[Any]]

D, HEAD = 16, 4  # model width, width of a head


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def fill(module: nn.Module) -> nn.Module:
    with torch.no_grad():
        for seed, parameter in enumerate(module.parameters()):
            parameter.copy_(normal(*parameter.shape, seed=100 + seed))
    return module


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """[B, S, heads * HEAD] each -> [B, S, query heads * HEAD]."""
    q, k, v = (x.unflatten(-1, (-1, HEAD)).transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2).flatten(2)


class Separate(nn.Module):
    """Attention with three projections."""

    def __init__(self, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.q = nn.Linear(D, heads * HEAD, dtype=torch.float64)
        self.k = nn.Linear(D, kv_heads * HEAD, dtype=torch.float64)
        self.v = nn.Linear(D, kv_heads * HEAD, dtype=torch.float64)
        self.out = nn.Linear(heads * HEAD, D, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(attend(self.q(x), self.k(x), self.v(x)))


class Fused(nn.Module):
    """Attention with one projection."""

    def __init__(self, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.sizes = [heads * HEAD, kv_heads * HEAD, kv_heads * HEAD]
        self.qkv = nn.Linear(D, sum(self.sizes), dtype=torch.float64)
        self.out = nn.Linear(heads * HEAD, D, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(attend(*self.qkv(x).split(getattr(self.qkv, "parts", self.sizes), dim=-1)))


def plan_of(kind: type, heads: int, kv_heads: int) -> dict[str, Any]:
    if kind is Separate:
        return {"q": Column(heads=heads), "k": Column(heads=kv_heads), "v": Column(heads=kv_heads), "out": Row()}
    key = Part(size=kv_heads * HEAD, heads=kv_heads)
    return {"qkv": Column(parts=(Part(size=heads * HEAD, heads=heads), key, key)), "out": Row()}


def reference(module: nn.Module, x: torch.Tensor, grad_y: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    x = x.clone().requires_grad_()
    y = module(x)
    y.backward(grad_y)
    return y.detach(), {**{name: p.grad for name, p in module.named_parameters()}, "x": x.grad}


def reduced(module: nn.Module, mesh: Mesh, run: Callable[[], None], stage: int) -> dict[str, torch.Tensor]:
    """What the optimizer would use after `run`: this rank's shards of reduced gradients, by name."""
    zero = Zero(module, mesh, stage=stage, optimizer=functools.partial(torch.optim.SGD, lr=0.1), weight_decay=0.0)
    run()
    flat = zero.reduced_grads()
    found = {}
    for name, parameter in module.named_parameters():
        bucket, start = placement_of(parameter).zero
        found[name] = flat[bucket][start : start + parameter.numel()].view_as(parameter)
    return found


def grouped_queries(kind: type, heads: int, kv_heads: int, sizes: dict[str, int], stage: int = 0) -> dict[str, torch.Tensor]:
    """Compares output, input gradient and whole parameter gradients; returns this rank's weights and reduced gradients."""
    mesh = init_mesh(device="cpu", **sizes)
    x, grad_y = normal(4, 6, D, seed=1), normal(4, 6, D, seed=2)
    plain = fill(kind(heads, kv_heads))
    y, expected = reference(plain, x, grad_y)
    module = parallelize_module(fill(kind(heads, kv_heads)), mesh, plan_of(kind, heads, kv_heads))
    mine = slice(mesh.dp.rank * 4 // mesh.dp.size, (mesh.dp.rank + 1) * 4 // mesh.dp.size)
    local = x[mine].clone().requires_grad_()

    def run() -> None:
        out = module(local)
        assert_near({"y": out.detach()}, {"y": y[mine]})
        out.backward(grad_y[mine])

    grads = reduced(module, mesh, run, stage)
    gathered = {name: whole(grads[name], placement_of(p), mesh.tp) for name, p in module.named_parameters()}
    assert_near({**gathered, "x": local.grad}, {**expected, "x": expected["x"][mine]})
    assert gathered.keys() == expected.keys() - {"x"}
    held = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    mesh.close()
    return {"rank": mesh.tp.rank, "held": held, "grads": grads, "plain": dict(plain.named_parameters())}


def test_two_kv_heads_on_four_ranks(ranks: Ranks) -> None:
    """Rank r has query heads 2r, 2r + 1 and KV head r // 2; both holders of a head end with the same gradient."""
    found = ranks(4, grouped_queries, Separate, 8, 2, {"tp": 4, "dp": 1})
    for rank, seen in enumerate(found):
        query, key = slice(2 * rank * HEAD, (2 * rank + 2) * HEAD), slice(rank // 2 * HEAD, (rank // 2 + 1) * HEAD)
        for name, rows in {"q": query, "k": key, "v": key}.items():
            for kind in ("weight", "bias"):
                assert torch.equal(seen["held"][f"{name}.{kind}"], seen["plain"][f"{name}.{kind}"][rows])
        assert torch.equal(seen["grads"]["k.weight"], found[rank // 2 * 2]["grads"]["k.weight"])


def test_two_kv_heads_on_four_ranks_in_one_fused_weight(ranks: Ranks) -> None:
    found = ranks(4, grouped_queries, Fused, 8, 2, {"tp": 4, "dp": 1})
    for rank, seen in enumerate(found):
        key = list(range(32 + rank // 2 * HEAD, 32 + (rank // 2 + 1) * HEAD))
        rows = [*range(2 * rank * HEAD, (2 * rank + 2) * HEAD), *key, *(row + 2 * HEAD for row in key)]
        assert torch.equal(seen["held"]["qkv.weight"], seen["plain"]["qkv.weight"][rows])
        assert torch.equal(seen["grads"]["qkv.weight"][2 * HEAD :], found[rank // 2 * 2]["grads"]["qkv.weight"][2 * HEAD :])


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("kind", [Separate, Fused])
def test_one_kv_head_is_not_doubled_by_data_parallelism(ranks: Ranks, kind: type, stage: int) -> None:
    ranks(4, grouped_queries, kind, 4, 1, {"tp": 2, "dp": 2}, stage)


def test_heads_that_cannot_be_dealt_out_are_refused_with_what_can() -> None:
    model = ModelConfig(dim=160, heads=40, kv_heads=10, ffn=160)
    with pytest.raises(ConfigError) as refused:
        validate(model, Layout(tp=4), TrainConfig())
    assert str(refused.value).startswith("heads=40, kv_heads=10, tp=4: tp must divide heads")
    assert str(refused.value).endswith("tp can be one of [1, 2, 5, 10, 20, 40]")
    with pytest.raises(ConfigError, match=r"out_features=40 of 10 heads, tp=4: .* tp can be one of \[1, 2, 5, 10\]"):
        Part(size=40, heads=10).check(4, "out_features=40")


# Sequence parallelism.


class Normed(nn.Module):
    """A norm on the activations that are cut by tokens, and a column- and a row-parallel layer with biases."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(D, dtype=torch.float64)
        self.up = nn.Linear(D, 2 * D, dtype=torch.float64)
        self.down = nn.Linear(2 * D, D, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def norms(shape: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """Compares all, and returns the reduced gradients of what every rank holds whole."""
    mesh = init_mesh(tp=2, dp=1, device="cpu")
    x, grad_y = normal(*shape, seed=1), normal(*shape, seed=2)
    y, expected = reference(fill(Normed()), x, grad_y)
    plan = {"norm": Norm(), "up": Column(), "down": Row()}
    module = parallelize_module(fill(Normed()), mesh, plan, sequence_parallel=True)
    marked = [name for name, parameter in module.named_parameters() if parameter.sequence_parallel]
    assert marked == ["norm.weight", "norm.bias", "down.bias"]

    def tokens(full: torch.Tensor) -> torch.Tensor:
        return full.detach().chunk(mesh.tp.size, -2)[mesh.tp.rank].clone()

    local = tokens(x).requires_grad_()

    def run() -> None:
        out = module(local)
        assert_near({"y": out.detach()}, {"y": tokens(y)})
        out.backward(tokens(grad_y))
        summand = module.norm.weight.main_grad
        assert not torch.allclose(summand, expected["norm.weight"]), "so the sum is not there for nothing"

    grads = reduced(module, mesh, run, stage=0)
    gathered = {name: whole(grads[name], placement_of(p), mesh.tp) for name, p in module.named_parameters()}
    assert_near({**gathered, "x": local.grad}, {**expected, "x": tokens(expected["x"])})
    mesh.close()
    return {name: grads[name] for name in marked}


@pytest.mark.parametrize("shape", [(6, D), (2, 6, D)])
def test_norms_and_row_biases_under_sequence_parallelism(ranks: Ranks, shape: tuple[int, ...]) -> None:
    first, second = ranks(2, norms, shape)
    assert all(torch.equal(first[name], second[name]) for name in first)


def without_cut_tokens() -> list[list[object]]:
    """Without sequence parallelism every rank has the whole gradient already, and nothing is summed."""
    mesh = init_mesh(tp=2, dp=1, device="cpu")
    x, grad_y = normal(6, D, seed=1), normal(6, D, seed=2)
    _, expected = reference(fill(Normed()), x, grad_y)
    module = parallelize_module(fill(Normed()), mesh, {"norm": Norm(), "up": Column(), "down": Row()})
    grads = reduced(module, mesh, lambda: module(x).backward(grad_y), stage=0)
    assert_near({name: grads[name] for name in ("norm.weight", "norm.bias", "down.bias")}, expected)
    summed = [placement_of(p).summed(mesh.tp.rank) for p in module.parameters()]
    mesh.close()
    return summed


def test_without_sequence_parallelism_nothing_is_summed(ranks: Ranks) -> None:
    assert ranks(2, without_cut_tokens) == [[[]] * 6] * 2

"""The reference model, in one process, against its definition written out token by token."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from pymesh3d.config import ModelConfig
from pymesh3d.models import recompute
from pymesh3d.models.llama import Llama, initialize_, plan
from pymesh3d.ops.rotary import angles, rotary
from tests.plain import SMALL, batch_of

DOUBLE = torch.float64


def model_of(config: ModelConfig = SMALL) -> Llama:
    model = Llama(config, dtype=DOUBLE)
    initialize_(model, 3)
    with torch.no_grad():
        for number, (name, parameter) in enumerate(model.named_parameters()):
            if name.endswith("norm.weight"):  # not 1 everywhere, so that a forgotten one shows
                parameter.copy_(1 + 0.1 * torch.sin(torch.arange(parameter.numel(), dtype=DOUBLE) + number))
            else:
                parameter.mul_(10)
    return model


def rms(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x / (x.square().mean() + eps).sqrt() * weight


def turned(x: torch.Tensor, position: int, theta: float) -> torch.Tensor:
    """Each pair (x[i], x[i + E/2]) as a complex number times exp(1j * position * theta ** (-2 i / E))."""
    half = x.numel() // 2
    rates = torch.tensor([theta ** (-2 * i / x.numel()) for i in range(half)], dtype=DOUBLE)
    z = torch.complex(x[:half], x[half:]) * torch.polar(torch.ones(half, dtype=DOUBLE), position * rates)
    return torch.cat((z.real, z.imag))


def by_definition(config: ModelConfig, w: dict[str, torch.Tensor], ids: list[int]) -> torch.Tensor:
    """Logits [S, V] of one sample, one token and one head at a time."""
    heads, kv_heads, width = config.heads, config.kv_heads, config.head_dim
    hidden = [w["embed.weight"][token] for token in ids]
    for layer in range(config.layers):
        at = {name.removeprefix(f"layers.{layer}."): value for name, value in w.items() if name.startswith(f"layers.{layer}.")}
        queries, keys, values = [], [], []
        for position, h in enumerate(hidden):
            qkv = at["attention.qkv.weight"] @ rms(h, at["attention_norm.weight"], config.norm_eps)
            q, k, v = qkv.split((heads * width, kv_heads * width, kv_heads * width))
            queries.append([turned(x, position, config.rope_theta) for x in q.split(width)])
            keys.append([turned(x, position, config.rope_theta) for x in k.split(width)])
            values.append(v.split(width))
        after = []
        for position, h in enumerate(hidden):
            mixed = []
            for head in range(heads):
                group = head // (heads // kv_heads)
                scores = torch.stack([queries[position][head] @ keys[t][group] for t in range(position + 1)]) / math.sqrt(width)
                mixed.append(sum(p * values[t][group] for t, p in enumerate(scores.softmax(0))))
            h = h + at["attention.out.weight"] @ torch.cat(mixed)
            gate, up = (at["ffn.gate_up.weight"] @ rms(h, at["ffn_norm.weight"], config.norm_eps)).split(config.ffn)
            after.append(h + at["ffn.down.weight"] @ (gate * torch.sigmoid(gate) * up))
        hidden = after
    head = w["embed.weight" if config.tied else "head.weight"]
    return torch.stack([head @ rms(h, w["norm.weight"], config.norm_eps) for h in hidden])


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_logits_follow_the_definition(kv_heads: int, tied: bool) -> None:
    config = dataclasses.replace(SMALL, kv_heads=kv_heads, tied=tied, layers=2, rope_theta=100.0)
    model = model_of(config)
    ids, _ = batch_of(3, 6, seed=4)
    weights = {name: p.detach() for name, p in model.named_parameters()}
    with torch.no_grad():
        logits = model(ids)
    for sample, found in zip(ids, logits, strict=True):
        expected = by_definition(config, weights, sample.tolist())
        assert (found - expected).abs().max() < 1e-12 * expected.abs().max()
    assert logits.abs().max() > 0.1


def test_later_tokens_and_other_samples_change_nothing() -> None:
    model = model_of()
    ids, _ = batch_of(2, 6, seed=5)
    changed = ids.clone()
    changed[0, 4:] = (changed[0, 4:] + 1) % SMALL.vocab
    with torch.no_grad():
        before, after = model(ids), model(changed)
    assert (before[0, :4] - after[0, :4]).abs().max() < 1e-13
    assert (before[1] - after[1]).abs().max() < 1e-13
    assert (before[0, 4:] - after[0, 4:]).abs().max() > 1e-3


def test_rotation_keeps_lengths_and_depends_on_distance_only() -> None:
    one = torch.randn(1, 3, 8, dtype=DOUBLE, generator=torch.Generator().manual_seed(0))  # q, k and v of one head
    q, k, v = (part[:, 0, 0] for part in rotary(one.expand(20, 3, 8).flatten(1), angles(20, 8, 100.0, one), 1, 1))
    assert torch.allclose(q.norm(dim=-1), one[0, 0].norm(), rtol=1e-14)
    scores = (q @ k.t()).diagonal(offset=-3)
    assert torch.allclose(scores, scores[0].expand_as(scores), rtol=0, atol=1e-13)
    assert not torch.allclose(scores[0], (one[0, 0] * one[0, 1]).sum(), atol=1e-3)
    assert torch.equal(v, one[:, 2].expand(20, 8))


def test_angles_are_taken_in_float32_at_least() -> None:
    """bf16 has no integers beyond 256: positions must not be rounded before the cosine, nor the cosine after it."""
    exact = angles(5000, 8, 10_000.0, torch.empty(0, dtype=DOUBLE))
    found = angles(5000, 8, 10_000.0, torch.empty(0, dtype=torch.bfloat16))
    for a, b in zip(found, exact, strict=True):
        assert a.dtype == torch.float32 and (a.double() - b).abs().max() < 5e-4


def gradients(model: Llama) -> dict[str, torch.Tensor]:
    ids, targets = batch_of(2, 6, seed=6)
    model.zero_grad()
    F.cross_entropy(model(ids).flatten(0, 1), targets.flatten()).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def test_recompute_gives_the_same_bits() -> None:
    model = model_of()
    kept = gradients(model)
    model.recompute = "full"
    calls = []
    for layer in model.layers.values():
        layer.register_forward_pre_hook(lambda *_: calls.append(1))
    again = gradients(model)
    assert len(calls) == 2 * SMALL.layers, "each layer runs twice"
    assert kept.keys() == again.keys() == dict(model.named_parameters()).keys()
    assert all(torch.equal(kept[name], again[name]) for name in kept)


def kept_numbers(model: Llama, ids: torch.Tensor) -> int:
    """How many numbers autograd keeps for backward, each piece of memory counted once, parameters not at all."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, torch.Tensor] = {}  # alive, so that no memory is used twice

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype == DOUBLE and tensor.untyped_storage().data_ptr() not in own:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    hooks = recompute.saved_tensors_hooks

    def observed(own_pack: Callable[[torch.Tensor], Any], own_unpack: Callable[[Any], torch.Tensor]) -> Any:
        def both(tensor: torch.Tensor) -> Any:
            packed = own_pack(tensor)
            return pack(packed) if isinstance(packed, torch.Tensor) else packed

        return hooks(both, own_unpack)

    with pytest.MonkeyPatch.context() as patch, hooks(pack, lambda tensor: tensor):
        patch.setattr(recompute, "saved_tensors_hooks", observed)  # of several hooks only the innermost are called
        loss = model(ids).sum()
    loss.backward()
    return sum(tensor.untyped_storage().nbytes() // 8 for tensor in kept.values())


def test_selective_recompute_gives_the_same_bits_and_keeps_what_is_dear() -> None:
    """Not kept, of a layer for a token: the inputs of products behind norms, 2 D, and of that behind the activation, F; a number a norm."""
    model = model_of()
    ids = batch_of(2, 6, seed=6)[0]
    everything, before = kept_numbers(model, ids), gradients(model)
    model.recompute = "selective"
    after = gradients(model)
    assert all(torch.equal(before[name], after[name]) for name in before) and before.keys() == after.keys()
    saved = (everything - kept_numbers(model, ids)) / (ids.numel() * SMALL.layers)
    assert saved == 2 * SMALL.dim + SMALL.ffn + 2


def test_a_part_of_what_is_computed_again_is_the_same_part() -> None:
    """Backward gets it from where it lay: here the last two of four rows."""
    x = torch.randn(4, 3, dtype=DOUBLE, generator=torch.Generator().manual_seed(0))
    w = torch.ones(2, 3, dtype=DOUBLE, requires_grad=True)
    with recompute.computed_again(torch.tanh, x.clone().requires_grad_()) as y:
        summed = (y[2:] * w).sum()
    summed.backward()
    assert w.grad is not None and torch.equal(w.grad, torch.tanh(x)[2:])


def test_a_tied_weight_is_one_parameter_with_both_gradients() -> None:
    tied = model_of(dataclasses.replace(SMALL, tied=True))
    untied = model_of(SMALL)
    untied.load_state_dict(tied.state_dict())
    assert "head.weight" not in dict(tied.named_parameters())
    found, separate = gradients(tied), gradients(untied)
    total = separate["embed.weight"] + separate["head.weight"]
    assert torch.allclose(found["embed.weight"], total, rtol=0, atol=1e-14)


def test_initial_values() -> None:
    """Deviations of the rule, norms 1, values of their own for every tensor and seed, none of them dependent on torch's generator."""
    config = ModelConfig(vocab=512, dim=128, layers=2, heads=4, kv_heads=2, ffn=256)
    first, second, other = (Llama(config) for _ in range(3))
    for model, seed in ((first, 1), (second, 1), (other, 2)):
        initialize_(model, seed)
    for (name, a), b, c in zip(first.named_parameters(), second.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b), name
        if a.ndim == 1:
            assert (a == 1).all()
            continue
        scale = 0.02 / 2 if name.endswith(("out.weight", "down.weight")) else 0.02  # sqrt(2 * 2 layers) = 2
        assert abs(a.mean().item()) < 4 * scale / math.sqrt(a.numel())
        assert a.std().item() == pytest.approx(scale, rel=4 / math.sqrt(2 * a.numel()))
        assert not torch.equal(a, c), name
    assert not torch.equal(first.layers["0"].ffn.down.weight, first.layers["1"].ffn.down.weight)


def test_the_plan_names_every_parameter() -> None:
    """What no pattern names would be taken to be whole and equal on all ranks."""
    owners = {name.rpartition(".")[0] for name, _ in Llama(SMALL, device="meta").named_parameters(remove_duplicate=False)}
    assert all(any(fnmatchcase(owner, pattern) for pattern in plan(1)) for owner in owners)

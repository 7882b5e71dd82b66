"""The model in nothing but torch, against its definition and against the model that is trained."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from pymesh3d.models import plain
from pymesh3d.models.dropout import Masks
from tests.models.test_llama import by_definition, model_of
from tests.plain import SMALL, batch_of


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_logits_follow_the_definition(kv_heads: int, tied: bool) -> None:
    config = dataclasses.replace(SMALL, kv_heads=kv_heads, tied=tied, layers=2, rope_theta=100.0)
    weights = {name: p.detach() for name, p in model_of(config).named_parameters()}
    ids, _ = batch_of(3, 6, seed=4)
    found = plain.logits(weights, config, ids)
    for sample, logits in zip(ids, found, strict=True):
        expected = by_definition(config, weights, sample.tolist())
        assert (logits - expected).abs().max() < 1e-12 * expected.abs().max()
    assert found.abs().max() > 0.1


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("tied", [False, True])
def test_the_model_has_the_same_gradients(tied: bool, dropout: float) -> None:
    """Of the loss with the same masks, whatever kernels the model is made of."""
    config = dataclasses.replace(SMALL, tied=tied, rope_theta=100.0)
    model = model_of(config)
    weights = dict(model.named_parameters())
    ids, targets = batch_of(3, 6, seed=6)
    masks = Masks(dropout, 5, 9, 0, len(ids)) if dropout else None
    losses = [
        F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        for logits in (model(ids, masks=masks), plain.logits(weights, config, ids, masks))
    ]
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-14)
    for ours, theirs in zip(*(torch.autograd.grad(loss, list(weights.values())) for loss in losses), strict=True):
        assert (ours - theirs).abs().max() < 1e-12 * theirs.abs().max()

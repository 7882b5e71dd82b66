"""Stages and layers that have nothing to train, at the beginning, in the middle and at the end, in every stage of ZeRO."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from pymesh3d.engine import parallelize
from pymesh3d.errors import ConfigError
from pymesh3d.mesh import init_mesh
from pymesh3d.models import plain as plain_model
from pymesh3d.models.llama import Llama, initialize_
from pymesh3d.placement import placement_of
from tests.plain import EVERY_STAGE, FLOAT64, IGNORED, SMALL, assert_near, batch_of, share

Ranks = Callable[..., list[Any]]
BATCHES = [batch_of(8, 8, valid=37, seed=1), batch_of(8, 8, valid=20, seed=2)]
TRAIN = dataclasses.replace(FLOAT64, lr=1e-4)
Found = tuple[list[float], dict[str, torch.Tensor]]  # losses and parameters


def freeze(model: Llama, frozen: Sequence[str]) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(tuple(frozen)))


def plainly(frozen: Sequence[str]) -> Found:
    """In one process, with torch alone."""
    model = Llama(SMALL, dtype=torch.float64)
    initialize_(model, TRAIN.seed)
    freeze(model, frozen)
    trained, losses = [p for p in model.parameters() if p.requires_grad], []
    groups = [{"params": [p for p in trained if (p.ndim > 1) == flag], "weight_decay": TRAIN.weight_decay * flag} for flag in (True, False)]
    optimizer = torch.optim.AdamW(groups, lr=TRAIN.lr, betas=TRAIN.betas, eps=TRAIN.eps)
    for ids, targets in BATCHES:
        logits = plain_model.logits(dict(model.named_parameters()), SMALL, ids)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
        loss.backward()
        losses.append(loss.item())
        torch.nn.utils.clip_grad_norm_(trained, TRAIN.max_norm or float("inf"))
        optimizer.step()
        optimizer.zero_grad()
    return losses, {name: p.detach() for name, p in model.named_parameters()}


def partly(frozen: Sequence[str], runs: list[tuple[dict[str, Any], dict[str, int]]]) -> list[Found]:
    """With some choices, on some meshes."""
    found = []
    for changes, sizes in runs:
        model = Llama(SMALL, device="meta")
        freeze(model, frozen)
        engine = parallelize(model, init_mesh(**sizes, device="cpu"), dataclasses.replace(TRAIN, **changes))
        losses = []
        for batch in BATCHES:
            result = engine.train_step(share(batch, engine))
            assert result.taken and result.grad_norm > 0, "something is trained"
            losses.append(result.loss)
        for parameter in engine.model.parameters():
            assert hasattr(parameter, "main_grad") != placement_of(parameter).name.startswith(tuple(frozen)), "only of what is trained"
        found.append((losses, dict(engine.whole_parameters())))
        engine.mesh.close()
    return found


INTERLEAVED = {"schedule": "interleaved", "virtual_pp": 2}  # a stage a layer; the first has the embedding too, the last norm and head
FROZEN: dict[str, tuple[list[str], dict[str, Any], dict[str, int]]] = {
    "the first stage of two on a rank": (["embed", "layers.0"], INTERLEAVED, {"pp": 2, "dp": 2}),
    "the same without dp": (["embed", "layers.0"], INTERLEAVED, {"pp": 2}),
    "both early stages of all ranks": (["embed", "layers.0", "layers.1"], INTERLEAVED, {"pp": 2, "dp": 2}),
    "a stage in the middle": (["layers.1"], INTERLEAVED, {"pp": 2, "dp": 2}),
    "the last stage": (["layers.3", "norm", "head"], INTERLEAVED, {"pp": 2, "dp": 2}),
    "layers of both stages": (["embed", "layers.0", "layers.2", "norm"], {}, {"pp": 2, "dp": 2}),
    "layers of both stages, split": (["embed", "layers.0", "layers.3"], {"schedule": "zb-h1"}, {"pp": 2, "dp": 2}),
    "all layers of a stage": (["layers.0", "layers.1"], {"recompute": "full"}, {"pp": 2, "dp": 2}),
    "early layers": (["embed", "layers.0", "layers.1"], {"micro_batch": 1, "recompute": "full"}, {"dp": 4}),
    "late layers": (["layers.2", "layers.3", "norm", "head"], {"micro_batch": 1}, {"tp": 2, "dp": 2}),
    "all layers": (["layers"], {"micro_batch": 1}, {"tp": 2, "dp": 2}),
}


@pytest.mark.parametrize("name", FROZEN)
def test_what_is_frozen_stays_and_the_rest_is_trained(ranks: Ranks, name: str) -> None:
    """As one process does, in every stage of ZeRO, with sums and parameters once a step or in each pass."""
    frozen, changes, sizes = FROZEN[name]
    expected, parameters = plainly(frozen)
    each = changes.get("schedule", "1f1b") == "1f1b"  # others hold gradients of all that a rank has at once
    choices = [choice for choice in EVERY_STAGE if each or choice.get("zero_once_a_step", True)]
    runs = [({**changes, **choice}, sizes) for choice in choices]
    every = ranks(math.prod(sizes.values()), partly, frozen, runs)
    for rank in every:
        for choice, (losses, values) in zip(choices, rank, strict=True):
            assert losses == pytest.approx(expected, rel=1e-12), choice
            assert_near(values, parameters)
    assert set().union(*(values for rank in every for _, values in rank)) == set(parameters), "all are on some rank"


def refused(zero_stage: int, dp: int) -> str:
    mesh = init_mesh(pp=2, dp=dp, device="cpu")
    model = Llama(SMALL, device="meta")
    freeze(model, ["layers.2", "layers.3", "norm", "head"])
    with pytest.raises(ConfigError) as caught:
        parallelize(model, mesh, dataclasses.replace(TRAIN, zero_stage=zero_stage))
    mesh.close()
    return str(caught.value)


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
@pytest.mark.parametrize("dp", [1, 2])
def test_a_rank_with_nothing_to_train_is_refused(ranks: Ranks, zero_stage: int, dp: int) -> None:
    """On all ranks, also those that have something."""
    text = (
        "pp=2 with all parameters of rank 1 along pp frozen (layer 2, layer 3, norm, head): each rank must have something to train. Leave "
        "requires_grad of one of these on, or use schedule='interleaved' with virtual_pp=2, which gives each rank early and late layers"
    )
    assert ranks(2 * dp, refused, zero_stage, dp) == [text] * (2 * dp)

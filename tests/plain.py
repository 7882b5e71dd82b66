"""Plain PyTorch in one process: the numbers that every layout must give, and how a layout is run to get them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from pymesh3d.config import ModelConfig, TrainConfig
from pymesh3d.engine import DTYPES, Engine, parallelize
from pymesh3d.mesh import init_mesh
from pymesh3d.models import plain as plain_model
from pymesh3d.models.dropout import Masks
from pymesh3d.models.llama import Llama, initialize_
from pymesh3d.ops.dropout import mask_counter

IGNORED = -100
BOUND = 1e-12

SMALL = ModelConfig(vocab=19, dim=16, layers=4, heads=4, kv_heads=2, ffn=24)
# A small learning rate: AdamW magnifies the rounding of gradients near 0 by up to lr / eps.
FLOAT64 = TrainConfig(seq=8, global_batch=8, micro_batch=2, dtype="float64", lr=1e-5, vocab_multiple=1, seed=5)
# Choices of a TrainConfig: the stages of ZeRO, those that can with sums and gathered parameters both once a step and in each pass.
EVERY_STAGE: list[dict[str, Any]] = [{"zero_stage": 0}, {"zero_stage": 1}]
EVERY_STAGE += [{"zero_stage": stage, "zero_once_a_step": once} for stage in (2, 3) for once in (True, False)]

Batch = tuple[torch.Tensor, torch.Tensor]


@dataclasses.dataclass(kw_only=True)
class Run:
    """Of each step the loss, the norm and the gradients (before clipping); the parameters after the last."""

    losses: list[float] = dataclasses.field(default_factory=list)
    norms: list[float] = dataclasses.field(default_factory=list)
    tokens: list[int] = dataclasses.field(default_factory=list)
    gradients: list[dict[str, torch.Tensor]] = dataclasses.field(default_factory=list)
    parameters: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)


def batch_of(samples: int, seq: int, *, vocab: int = SMALL.vocab, valid: int | None = None, seed: int = 0) -> Batch:
    """A global batch of random ids [samples, seq] and targets, of which `valid` in random places count (default: all)."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(vocab, (samples, seq), generator=generator)
    targets = torch.randint(vocab, (samples, seq), generator=generator)
    if valid is not None:
        targets.view(-1)[torch.randperm(targets.numel(), generator=generator)[valid:]] = IGNORED
    return ids, targets


def plain(model: ModelConfig, train: TrainConfig, batches: Sequence[Batch]) -> Run:
    """The model in nothing but torch, with F.cross_entropy, clip_grad_norm_ and AdamW of torch, whole batches at once."""
    module = Llama(model, dtype=DTYPES[train.dtype])
    initialize_(module, train.seed)
    matrices, vectors = ([p for p in module.parameters() if (p.ndim >= 2) == flag] for flag in (True, False))
    groups = [{"params": matrices, "weight_decay": train.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=train.lr, betas=train.betas, eps=train.eps)
    run = Run()
    for step, (ids, targets) in enumerate(batches):
        masks = Masks(train.dropout, train.seed, mask_counter(step), 0, len(ids)) if train.dropout else None
        logits = plain_model.logits(dict(module.named_parameters()), model, ids, masks)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
        loss.backward()
        run.losses.append(loss.item())
        run.tokens.append(ids.numel())
        run.gradients.append({name: p.grad.clone() for name, p in module.named_parameters()})
        run.norms.append(torch.nn.utils.clip_grad_norm_(module.parameters(), train.max_norm or float("inf")).item())
        optimizer.step()
        optimizer.zero_grad()
    run.parameters = {name: p.detach() for name, p in module.named_parameters()}
    return run


def share(batch: Batch, engine: Engine) -> Batch:
    """What this rank gets of a global batch."""
    ids, targets = (part.chunk(engine.mesh.dp.size)[engine.mesh.dp.rank] for part in batch)
    return ids, targets


def on_mesh(model: ModelConfig, train: TrainConfig, batches: Sequence[Batch], sizes: Mapping[str, int]) -> Run:
    """The part of a rank: the same steps with an engine on a mesh of these sizes; gradients and parameters of its stage, unsharded."""
    mesh = init_mesh(device="cpu", **sizes)
    engine = parallelize(Llama(model, device="meta"), mesh, train)
    run = Run()
    for batch in batches:
        loss, tokens = engine.forward_backward(share(batch, engine))
        run.gradients.append(dict(engine.whole_gradients()))
        norm, taken = engine.optimizer_step()
        assert taken, "a step with finite gradients is taken"
        run.losses.append(loss)
        run.tokens.append(tokens)
        run.norms.append(norm)
    run.parameters = dict(engine.whole_parameters())
    mesh.close()
    return run


def assert_equal_runs(runs: Sequence[Run], reference: Run, bound: float = BOUND) -> None:
    """Every rank's run agrees with the reference within `bound`, losses are the same bits on all ranks, and no parameter is missing."""
    for run in runs:
        assert run.losses == runs[0].losses, "ranks report different losses"
        assert run.norms == runs[0].norms, "ranks report different norms"
        assert run.tokens == reference.tokens
        for found, expected in zip(run.losses + run.norms, reference.losses + reference.norms, strict=True):
            assert abs(found - expected) <= bound * abs(expected), f"loss or norm {found} instead of {expected}"
        for found, expected in zip(run.gradients, reference.gradients, strict=True):
            assert_near(found, expected, bound)
        assert_near(run.parameters, reference.parameters, bound)
    assert set().union(*(run.parameters for run in runs)) == set(reference.parameters)
    assert set().union(*(run.gradients[0] for run in runs)) == set(reference.parameters)


def assert_near(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], bound: float = BOUND) -> None:
    """Each tensor of `found` differs by at most `bound` x max(its largest value, a thousandth of the largest of all)."""
    largest = max(t.abs().max().item() for t in expected.values())
    for name, value in found.items():
        scale = max(expected[name].abs().max().item(), largest / 1000)
        worst = ((value - expected[name]).abs().max() / scale).item()
        assert worst <= bound, f"{name} differs by {worst:.1e}"

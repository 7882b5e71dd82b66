"""ZeRO: gradients reach the optimizer as they should, and every stage and bucket size gives the same parameters."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from pymesh3d.dp.zero import BUCKET_ELEMENTS, Zero
from pymesh3d.errors import ConfigError
from pymesh3d.mesh import Mesh, init_mesh
from pymesh3d.tp.layers import ColumnParallelLinear

Ranks = Callable[..., list[Any]]
ADAMW = functools.partial(torch.optim.AdamW, lr=1e-2)
MOMENTUM = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
DECAY = 0.1
SAMPLES, WIDTH = 12, 6


class Toy(nn.Module):
    """A layer called twice, one that accumulates straight into its buffer called twice, and a weight under two names."""

    def __init__(self, mesh: Mesh | None, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.twice = nn.Linear(WIDTH, WIDTH, dtype=dtype)
        fused = nn.Linear(WIDTH, WIDTH, dtype=dtype)
        self.fused = fused if mesh is None else ColumnParallelLinear.from_linear(fused, mesh=mesh.tp)
        self.tied = nn.Linear(WIDTH, WIDTH, bias=False, dtype=dtype)
        self.norm = nn.LayerNorm(WIDTH, dtype=dtype)
        self.frozen = nn.Parameter(torch.ones(WIDTH, dtype=dtype), requires_grad=False)
        self.again = self.tied

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.twice(torch.tanh(self.twice(x)))) + self.frozen
        return self.again(torch.tanh(self.fused(torch.tanh(self.fused(self.tied(x))))))


def data(step: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(step), dtype=torch.float64).to(dtype)


def plain_steps(optimizer: Callable[..., torch.optim.Optimizer], steps: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    model = Toy(None, dtype)
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [{"params": [p for p in trained if (p.ndim > 1) == flag], "weight_decay": DECAY * flag} for flag in (True, False)]
    made = optimizer(groups)
    schedule = torch.optim.lr_scheduler.ExponentialLR(made, 0.5)
    for step in range(steps):
        model(data(step, dtype)).square().sum().backward()
        made.step()
        made.zero_grad()
        schedule.step()
    return {name: p.detach() for name, p in model.named_parameters()}


def zero_steps(
    cases: list[tuple[int, int]], optimizer: Callable[..., torch.optim.Optimizer], steps: int, dtype: torch.dtype, microbatches: int
) -> list[tuple[int, dict[str, torch.Tensor]]]:
    """For each (stage, bucket elements) the number of buckets and the parameters after some steps in microbatches."""
    mesh = init_mesh(device="cpu")
    found = []
    for stage, elements in cases:
        model = Toy(mesh, dtype)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(mesh.rank)  # only the first rank's values may count
        model.frozen.data.fill_(1.0)
        zero = Zero(model, mesh, stage=stage, optimizer=optimizer, weight_decay=DECAY, bucket_elements=elements)
        for bucket in zero.buckets:
            bucket.grads.fill_(12345.0)
        zero.zero_grad()
        schedule = torch.optim.lr_scheduler.ExponentialLR(zero.optimizer, 0.5)
        for step in range(steps):
            mine = data(step, dtype).chunk(mesh.dp.size)[mesh.dp.rank]
            for part in mine.chunk(microbatches):
                model(part).square().sum().backward()
            assert all(p.grad is None for p in model.parameters())
            zero.reduce()
            zero.step()
            zero.zero_grad()
            schedule.step()
        found.append((len(zero.buckets), {name: p.detach().clone() for name, p in model.named_parameters()}))
    mesh.close()
    return found


CASES = [(0, BUCKET_ELEMENTS), (1, BUCKET_ELEMENTS), (0, 1), (1, 1), (1, 50)]


@pytest.mark.parametrize("optimizer", [ADAMW, MOMENTUM])
def test_every_microbatch_counts(ranks: Ranks, optimizer: Callable[..., torch.optim.Optimizer]) -> None:
    """dp 3 with 4 microbatches a rank, under either optimizer with a scheduler of torch, against the whole batch in one process."""
    expected = plain_steps(optimizer, 3, torch.float64)
    for found in ranks(3, zero_steps, CASES, optimizer, 3, torch.float64, 4):
        assert [count for count, _ in found] == [2, 2, 7, 7, 4]
        for _, parameters in found:
            assert parameters.keys() == expected.keys()
            for name, value in parameters.items():
                assert torch.allclose(value, expected[name], rtol=1e-12, atol=1e-12), name


def test_stages_and_buckets_give_the_same_bits(ranks: Ranks) -> None:
    every = [found for rank in ranks(2, zero_steps, CASES, ADAMW, 3, torch.float32, 1) for found in rank]
    for _, parameters in every:
        for name, value in parameters.items():
            assert torch.equal(value, every[0][1][name]), name


def bf16_step(contributions: torch.Tensor, start: torch.Tensor, reduce_dtype: torch.dtype | None, stage: int) -> dict[str, torch.Tensor]:
    """One step of AdamW on a bf16 matrix whose accumulated gradient on rank r is contributions[r]."""
    mesh = init_mesh(device="cpu")
    module = nn.Module()
    module.weight = nn.Parameter(start.clone())
    zero = Zero(module, mesh, stage=stage, optimizer=ADAMW, weight_decay=DECAY, reduce_dtype=reduce_dtype)
    (bucket,), (master,) = zero.buckets, zero.masters
    for step in range(2):
        module.weight.main_grad.add_(contributions[mesh.rank] * (step + 1))
        zero.reduce()
        reduced = bucket.shard(bucket.grads, mesh.rank).clone()
        zero.step(torch.tensor(0.25, dtype=torch.float64))
        zero.zero_grad()
    mesh.close()
    return {"weight": module.weight.detach(), "reduced": reduced, "master": master.detach()}


def by_hand(contributions: torch.Tensor, start: torch.Tensor, wire: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Each contribution rounded once, summed in float32 rank after rank, into AdamW as it is: (the last sum, the masters)."""
    master = nn.Parameter(start.float())
    optimizer = ADAMW([master], weight_decay=DECAY)
    for step in range(2):
        total = torch.zeros_like(master)
        for contribution in contributions:
            total = total + (contribution * (step + 1)).to(wire).float()
        master.grad = total * 0.25
        optimizer.step()
    return total, master.detach()


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("reduce_dtype", [None, torch.float32])
def test_bf16_contributions_are_rounded_once_and_summed_in_float32(ranks: Ranks, stage: int, reduce_dtype: torch.dtype | None) -> None:
    world, generator = 4, torch.Generator().manual_seed(0)
    contributions = torch.randn(world, 16, 24, generator=generator).mul(4).sinh()
    start = torch.randn(16, 24, generator=generator).bfloat16()
    total, master = by_hand(contributions, start, reduce_dtype or torch.bfloat16)
    backwards, _ = by_hand(contributions.flip(0), start, reduce_dtype or torch.bfloat16)
    assert not torch.equal(total, backwards), "the values must tell the order of the sum"
    found = ranks(world, bf16_step, contributions, start, reduce_dtype, stage)
    flat = torch.cat([rank["reduced"] for rank in found])[: total.numel()]
    assert torch.equal(flat.view_as(total), total)
    masters = [found[0]["master"]] if stage == 0 else [rank["master"] for rank in found]
    assert torch.equal(torch.cat(masters)[: total.numel()].view_as(master), master)
    for rank in found:
        assert rank["weight"].dtype == torch.bfloat16
        assert torch.equal(rank["weight"], master.bfloat16())


@pytest.mark.parametrize("stage", [0, 1])
def test_what_is_not_sent_is_not_rounded(ranks: Ranks, stage: int) -> None:
    """One dp rank alone: its float32 gradients go into AdamW as they are."""
    generator = torch.Generator().manual_seed(0)
    contributions = torch.randn(1, 16, 24, generator=generator)
    start = torch.randn(16, 24, generator=generator).bfloat16()
    total, master = by_hand(contributions, start, torch.float32)
    (found,) = ranks(1, bf16_step, contributions, start, None, stage)
    assert torch.equal(found["reduced"][: total.numel()].view_as(total), total)
    assert torch.equal(found["master"][: total.numel()].view_as(master), master)


def decayed() -> dict[str, torch.Tensor]:
    """Parameters after a step with no gradient at all."""
    mesh = init_mesh(device="cpu")
    module = nn.Linear(3, 2)
    nn.init.ones_(module.weight)
    nn.init.ones_(module.bias)
    zero = Zero(module, mesh, stage=1, optimizer=functools.partial(torch.optim.AdamW, lr=0.5), weight_decay=0.5)
    zero.reduce()
    zero.step()
    mesh.close()
    return {name: p.detach() for name, p in module.named_parameters()}


def test_weight_decay_is_for_matrices_only(ranks: Ranks) -> None:
    for found in ranks(2, decayed):
        assert (found["weight"] == 0.75).all() and (found["bias"] == 1.0).all()


REFUSED = [
    ({"stage": 2}, "stage=2: only ZeRO stages 0 and 1 are available. Use stage=1"),
    ({"stage": True}, "stage=True: only ZeRO stages 0 and 1 are available. Use stage=1"),
    ({"optimizer": []}, "optimizer=[]: it must make an optimizer from parameter groups. Use optimizer=torch.optim.AdamW"),
    ({"weight_decay": "0.1"}, "weight_decay='0.1': weight_decay must be a finite number of at least 0. The default is weight_decay=0.1"),
    ({"reduce_dtype": torch.int8}, "reduce_dtype=torch.int8: it must be a floating-point torch dtype. Use reduce_dtype=torch.float32"),
    ({"reduce_dtype": "bf16"}, "reduce_dtype='bf16': it must be a floating-point torch dtype. Use reduce_dtype=torch.float32"),
    ({"bucket_elements": 0}, "bucket_elements=0: bucket_elements must be a positive integer. Try bucket_elements=1 or more"),
]


def refusals() -> list[str]:
    mesh = init_mesh(device="cpu")
    texts = []
    for options, _ in REFUSED:
        with pytest.raises(ConfigError) as caught:
            Zero(nn.Linear(3, 2), mesh, **{"stage": 1, "optimizer": ADAMW, "weight_decay": 0.0, **options})  # type: ignore[arg-type]
        texts.append(str(caught.value))
    mesh.close()
    return texts


def test_what_cannot_be_used_is_refused(ranks: Ranks) -> None:
    assert ranks(1, refusals) == [[text for _, text in REFUSED]]


def reduced_twice(stage: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What a rank accumulated, the same after a look at the reduced gradients, and these."""
    mesh = init_mesh(device="cpu")
    module = nn.Linear(3, 2, bias=False)
    zero = Zero(module, mesh, stage=stage, optimizer=ADAMW, weight_decay=0.0)
    module.weight.main_grad.copy_(torch.arange(6.0).view(2, 3) + 10 * mesh.rank)  # type: ignore[union-attr, operator]
    before = zero.buckets[0].grads.clone()
    (whole,) = zero.reduced_grads()
    after = zero.buckets[0].grads.clone()
    mesh.close()
    return before, after, whole[:6]


@pytest.mark.parametrize("stage", [0, 1])
def test_a_look_at_the_reduced_gradients_changes_nothing(ranks: Ranks, stage: int) -> None:
    for before, after, whole in ranks(2, reduced_twice, stage):
        assert torch.equal(before, after)
        assert whole.tolist() == [10.0, 12.0, 14.0, 16.0, 18.0, 20.0]

"""ZeRO: gradients reach the optimizer as they should, and every stage and bucket size gives the same parameters."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from pymesh3d.dp.zero import BUCKET_ELEMENTS, Zero
from pymesh3d.errors import ConfigError
from pymesh3d.mesh import Mesh, init_mesh
from pymesh3d.tp.layers import ColumnParallelLinear
from tests.kernels import needs_kernels

Ranks = Callable[..., list[Any]]
ADAMW = functools.partial(torch.optim.AdamW, lr=1e-2)
MOMENTUM = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
DECAY = 0.1
KERNELS = [False, pytest.param(True, marks=needs_kernels)]
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


def fill_with_12345(zero: Zero) -> None:
    """All memory for gradients, and in stages 2 and 3 whatever is lent for them, whenever it is."""
    for flat in (*(bucket.grads for bucket in zero.buckets), *zero._gradients._sums.values()):
        flat.fill_(12345.0)
    lend = zero._exchange.lend
    zero._exchange.lend = lambda bucket: lend(bucket).fill_(12345.0)  # type: ignore[method-assign]


def zero_steps(
    cases: list[tuple[int, int]],
    optimizer: Callable[..., torch.optim.Optimizer],
    steps: int,
    dtype: torch.dtype,
    microbatches: int,
    kernels: bool = False,
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
        zero = Zero(
            model,
            mesh,
            stage=stage,
            optimizer=optimizer,
            weight_decay=DECAY,
            bucket_elements=elements,
            units=[model.twice, model.fused],
            kernels=kernels,
        )
        fill_with_12345(zero)
        zero.zero_grad()
        schedule = torch.optim.lr_scheduler.ExponentialLR(zero.optimizer, 0.5)
        for step in range(steps):
            mine = data(step, dtype).chunk(mesh.dp.size)[mesh.dp.rank]
            for number, part in enumerate(mine.chunk(microbatches)):
                with zero.last_pass() if number == microbatches - 1 and step else nullcontext():
                    model(part).square().sum().backward()
            assert all(p.grad is None for p in model.parameters())
            zero.step()
            schedule.step()
        with zero.whole():
            found.append((len(zero.buckets), {name: p.detach().clone() for name, p in model.named_parameters()}))
    mesh.close()
    return found


CASES = [(0, BUCKET_ELEMENTS), (1, BUCKET_ELEMENTS), (0, 1), (1, 1), (1, 50), (2, BUCKET_ELEMENTS), (2, 1), (3, BUCKET_ELEMENTS), (3, 50)]


@pytest.mark.parametrize(("optimizer", "kernels"), [(ADAMW, False), (MOMENTUM, False), (ADAMW, True)])
def test_every_microbatch_counts(ranks: Ranks, optimizer: Callable[..., torch.optim.Optimizer], kernels: bool) -> None:
    """dp 3 with 4 microbatches a rank, under either optimizer with a scheduler of torch, against the whole batch in one process."""
    expected = plain_steps(optimizer, 3, torch.float64)
    for found in ranks(3, zero_steps, CASES, optimizer, 3, torch.float64, 2 if kernels else 4, kernels):
        assert [count for count, _ in found] == [2, 2, 7, 7, 4, 2, 7, 4, 4]
        for _, parameters in found:
            assert parameters.keys() == expected.keys()
            for name, value in parameters.items():
                assert torch.allclose(value, expected[name], rtol=1e-12, atol=1e-12), name


@pytest.mark.parametrize("kernels", [False, True])
def test_stages_and_buckets_give_the_same_bits(ranks: Ranks, kernels: bool) -> None:
    every = [found for rank in ranks(2, zero_steps, CASES, ADAMW, 3, torch.float32, 1, kernels) for found in rank]
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
        zero.update(torch.tensor(0.25, dtype=torch.float64))
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


class Times(nn.Module):
    """A matrix, times numbers that are its gradient."""

    def __init__(self, start: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(start.clone())

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        return (self.weight * numbers).sum()


def passes_in_bf16(contributions: torch.Tensor, stage: int, options: dict[str, Any]) -> torch.Tensor:
    """This rank's sums of a float32 matrix, which are sent in bfloat16, after passes with gradients contributions[pass, rank]."""
    mesh = init_mesh(device="cpu")
    model = nn.ModuleList([Times(torch.zeros(contributions.shape[2:]))])
    zero = Zero(model, mesh, **{"stage": stage, "optimizer": ADAMW, "weight_decay": 0.0, "reduce_dtype": torch.bfloat16, **options})
    for numbers in contributions[:, mesh.rank]:
        model[0](numbers).backward()
    zero.reduce()
    found = zero._gradients.owned[0].clone()
    mesh.close()
    return found


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize(("stage", "once"), [(0, False), (1, False), (2, False), (3, False), (2, True), (3, True)])
def test_contributions_of_each_pass_are_rounded_from_stage_2_on(ranks: Ranks, stage: int, once: bool, kernels: bool) -> None:
    """Once, and the passes are summed in float32; below, and once a step, they are summed first."""
    world, passes = 2, 3
    contributions = torch.randn(passes, world, 16, 24, generator=torch.Generator().manual_seed(1)).mul(4).sinh()
    summed_first = contributions.sum(0).bfloat16().float().sum(0)
    rounded_first = contributions.bfloat16().float().sum((0, 1))
    expected, other = (rounded_first, summed_first) if stage > 1 and not once else (summed_first, rounded_first)
    found = ranks(world, passes_in_bf16, contributions, stage, {"once_a_step": once, "kernels": kernels})
    flat = (found[0] if stage == 0 else torch.cat(found))[: expected.numel()].view_as(expected)
    assert torch.allclose(flat, expected, rtol=1e-6, atol=1e-5)
    assert not torch.allclose(other, expected, rtol=1e-6, atol=1e-5), "the values tell when they are rounded"


class NoOptimizer:
    def __init__(self, groups: Any) -> None:
        pass


class SomeWeights(torch.optim.AdamW):
    """Over the first group alone."""

    def __init__(self, groups: Any) -> None:
        super().__init__([*groups][:1])


ELEMENTWISE = "it must make a torch optimizer that works element by element, from parameter groups. Use optimizer=torch.optim.AdamW"
FLOATING = "it must be a floating-point torch dtype"
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"stage": 4}, "stage=4: the ZeRO stages are 0, 1, 2 and 3. Use stage=1"),
    ({"stage": True}, "stage=True: the ZeRO stages are 0, 1, 2 and 3. Use stage=1"),
    (
        {"optimizer": []},
        f"optimizer=[]: {ELEMENTWISE}",
    ),
    (
        {"optimizer": torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)},
        f"optimizer=SGD(...): {ELEMENTWISE}",
    ),
    (
        {"optimizer": SomeWeights},
        f"optimizer={SomeWeights!r} made a SomeWeights of other weights than those it got: {ELEMENTWISE}",
    ),
    (
        {"optimizer": NoOptimizer},
        f"optimizer={NoOptimizer!r} made a NoOptimizer: {ELEMENTWISE}",
    ),
    (
        {"optimizer": torch.optim.Adafactor},
        f"optimizer={torch.optim.Adafactor!r} made a Adafactor: {ELEMENTWISE}",
    ),
    ({"weight_decay": "0.1"}, "weight_decay='0.1': weight_decay must be a finite number of at least 0. The default is weight_decay=0.1"),
    ({"reduce_dtype": torch.int8}, "reduce_dtype=torch.int8: it must be a floating-point torch dtype. Use reduce_dtype=torch.float32"),
    ({"reduce_dtype": "bf16"}, "reduce_dtype='bf16': it must be a floating-point torch dtype. Use reduce_dtype=torch.float32"),
    ({"accumulate_dtype": "bfloat16"}, f"accumulate_dtype='bfloat16': {FLOATING}. Use accumulate_dtype=torch.bfloat16"),
    ({"accumulate_dtype": 32}, "accumulate_dtype=32: it must be a floating-point torch dtype. Use accumulate_dtype=torch.float32"),
    ({"bucket_elements": 0}, "bucket_elements=0: bucket_elements must be a positive integer. Try bucket_elements=1 or more"),
    ({"mesh": "all"}, "a str as mesh: Zero spans all axes of a mesh. Use the one that init_mesh returns"),
]


def within_whole(stage: int) -> tuple[list[str], bool]:
    """What is said of steps and states within `whole`; whether what was written within it, twice, has stayed."""
    mesh = init_mesh(device="cpu")
    layers = nn.ModuleList(nn.Linear(3, 2) for _ in range(2))
    zero, texts = Zero(layers, mesh, stage=stage, optimizer=ADAMW, weight_decay=0.0), []
    with zero.whole(), zero.whole():
        pass
    with zero.whole(), torch.no_grad():
        with zero.whole():
            layers[0].weight.fill_(3.0)
        layers[1].weight.fill_(4.0)
        for call in (zero.step, lambda: zero.load_state(zero.state())):
            with pytest.raises(ConfigError) as caught:
                call()
            texts.append(str(caught.value))
    with zero.whole():
        stayed = bool((layers[0].weight == 3.0).all() and (layers[1].weight == 4.0).all())
    mesh.close()
    return texts, stayed


@pytest.mark.parametrize("stage", [1, 3])
def test_whole_may_be_entered_twice_and_has_no_steps(ranks: Ranks, stage: int) -> None:
    rule = "within whole(): there parameters are whole to be read and written. Leave it first"
    assert ranks(2, within_whole, stage) == [([f"step() {rule}", f"load_state() {rule}"], True)] * 2


def refusals() -> list[str]:
    mesh = init_mesh(device="cpu")
    texts = []
    for options, _ in REFUSED:
        with pytest.raises(ConfigError) as caught:
            Zero(**{"module": nn.Linear(3, 2), "mesh": mesh, "stage": 1, "optimizer": ADAMW, "weight_decay": 0.0, **options})
        texts.append(str(caught.value))
    mesh.close()
    return texts


def test_what_cannot_be_used_is_refused(ranks: Ranks) -> None:
    assert ranks(1, refusals) == [[text for _, text in REFUSED]]


STEPS = "a step is reduce(), norm() if wanted, update() or zero_grad(). step() calls them in this order"
SUMMED = f"of gradients that are already summed over ranks: {STEPS}"
NOT_SUMMED = f"of gradients that are not yet summed over ranks: {STEPS}"
TOO_LATE = (
    "a gradient of {} after the sum over ranks has begun: between that and the update there can be no further backward pass. "
    "Call step() first, and put only the last backward pass before it within last_pass()"
)
OPTIMIZER = "optimizer.step(): gradients must be summed over ranks before. Use the step() of Zero, or of the engine"


def calls_in_wrong_order(stage: int) -> tuple[list[str], list[list[float]]]:
    """What is said, and the weights of a module that then takes a step each way, and of one that takes the same two by `step`."""
    mesh = init_mesh(device="cpu")
    texts, after = [], []
    for wrong in (True, False):
        module = nn.Linear(2, 1, bias=False)
        nn.init.zeros_(module.weight)
        zero = Zero(module, mesh, stage=stage, optimizer=MOMENTUM, weight_decay=0.0)
        for _ in range(2):
            module(torch.tensor([1.0, 2.0])).backward()
            if wrong:
                for call in (zero.update, zero.norm, zero.optimizer.step):
                    with pytest.raises(ConfigError) as caught:
                        call()
                    texts.append(str(caught.value))
                zero.reduce()
                for call in (zero.reduce, zero.step, zero.optimizer.step, zero.reduced_grads):
                    with pytest.raises(ConfigError) as caught:
                        call()
                    texts.append(str(caught.value))
                zero.update()
            else:
                zero.step()
        after.append(module.weight.tolist()[0])
    mesh.close()
    return texts, after


@pytest.mark.parametrize("stage", [0, 1])
def test_calls_in_a_wrong_order_are_refused_and_change_nothing(ranks: Ranks, stage: int) -> None:
    expected = [f"update() {NOT_SUMMED}", f"norm() {NOT_SUMMED}", OPTIMIZER, f"reduce() {SUMMED}", f"reduce() {SUMMED}", OPTIMIZER]
    expected.append(f"reduced_grads() {SUMMED}")
    for texts, (by_hand_steps, by_step) in ranks(2, calls_in_wrong_order, stage):
        assert texts == expected * 2
        assert by_hand_steps == by_step == pytest.approx([-0.1 * (2 + 2 * 1.9), -0.1 * (4 + 4 * 1.9)], rel=1e-6)


def clipped_steps(max_norm: float | None) -> tuple[list[float], list[bool], float, tuple[int, int]]:
    """Gradients of norm 2, none that is finite, 2: the norms, what was taken, the weight after SGD at 0.1, steps counted."""
    mesh = init_mesh(device="cpu")
    module = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(module.weight)
    zero = Zero(module, mesh, stage=1, optimizer=functools.partial(torch.optim.SGD, lr=0.1), weight_decay=0.0)
    found = []
    for value in (1.0, math.nan if mesh.rank else 1.0, 1.0):
        module(torch.tensor([value])).backward()
        found.append(zero.step(max_norm))
    mesh.close()
    return [norm for norm, _ in found], [taken for _, taken in found], module.weight.item(), (zero.steps_taken, zero.steps_skipped)


@pytest.mark.parametrize(("max_norm", "moved"), [(None, -0.4), (0.5, -0.1), (3.0, -0.4)])
def test_a_step_clips_votes_and_forgets_the_gradients(ranks: Ranks, max_norm: float | None, moved: float) -> None:
    for norms, taken, weight, counts in ranks(2, clipped_steps, max_norm):
        assert norms[0] == norms[2] == 2.0 and math.isnan(norms[1])
        assert taken == [True, False, True] and counts == (2, 1)
        assert weight == pytest.approx(moved, rel=1e-5)


def test_a_limit_that_is_none_is_refused(ranks: Ranks) -> None:
    rule = "max_norm must be a finite number above 0. The default is max_norm=None, which switches clipping off"
    assert ranks(1, refused_limits) == [[f"max_norm=0: {rule}", f"max_norm='1': {rule}"]]


def refused_limits() -> list[str]:
    mesh = init_mesh(device="cpu")
    zero, texts = Zero(nn.Linear(3, 2), mesh, stage=1, optimizer=ADAMW, weight_decay=0.0), []
    for limit in (0, "1"):
        with pytest.raises(ConfigError) as caught:
            zero.step(limit)  # type: ignore[arg-type]
        texts.append(str(caught.value))
    mesh.close()
    return texts


CHANGED = (
    "was replaced, moved, added, removed, frozen or unfrozen after Zero was made: the parameters that are trained must stay the same, "
    "in the flat buffers of one Zero. Make these changes first, then Zero; write new values with copy_() or load_state_dict()"
)


def changed_later() -> list[str]:
    mesh = init_mesh(device="cpu")
    changes: dict[str, Callable[[nn.Module], object]] = {
        "moved": lambda module: module.bfloat16(),
        "taken": lambda module: Zero(module, mesh, stage=1, optimizer=ADAMW, weight_decay=0.0),
        "frozen": lambda module: module.bias.requires_grad_(False),
        "added": lambda module: module.register_parameter("new", nn.Parameter(torch.ones(1))),
        "removed": lambda module: module.register_parameter("bias", None),
        "replaced": lambda module: module.load_state_dict({"weight": torch.ones(2, 3), "bias": torch.ones(2)}, assign=True),
    }
    texts = []
    for change in changes.values():
        module = nn.Linear(3, 2)
        zero = Zero(module, mesh, stage=1, optimizer=ADAMW, weight_decay=0.0)
        other = change(module)
        for _ in range(2):  # the second time says the same
            with pytest.raises(ConfigError) as caught:
                zero.step()
        texts.append(str(caught.value))
        if isinstance(other, Zero):
            other.step()
    mesh.close()
    return texts


def test_other_parameters_than_at_first_are_refused(ranks: Ranks) -> None:
    names = ["weight", "weight", "bias", "new", "bias", "weight"]
    assert ranks(1, changed_later) == [[f"{name} {CHANGED}" for name in names]]


class Failing(torch.optim.SGD):
    failures = 1

    def step(self, closure: Any = None) -> Any:
        if Failing.failures:
            Failing.failures -= 1
            raise MemoryError("once")
        return super().step(closure)


def after_a_failure() -> tuple[list[str], list[float]]:
    mesh = init_mesh(device="cpu")
    module = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(module.weight)
    Failing.failures = 1
    zero, texts = Zero(module, mesh, stage=1, optimizer=functools.partial(Failing, lr=1.0), weight_decay=0.0), []
    module(torch.ones(1)).backward()
    for call in (zero.step, zero.optimizer.step, zero.step, module(torch.ones(1)).backward):
        with pytest.raises((MemoryError, ConfigError)) as caught:
            call()
        texts.append(str(caught.value))
    zero.zero_grad()
    module(torch.ones(1)).backward()
    zero.step()
    mesh.close()
    return texts, module.weight.tolist()[0]


def test_after_an_optimizer_that_failed_training_goes_on(ranks: Ranks) -> None:
    assert ranks(1, after_a_failure) == [(["once", OPTIMIZER, f"reduce() {SUMMED}", TOO_LATE.format((1, 1))], [-1.0])]


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

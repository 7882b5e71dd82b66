"""Steps that kernels take in the place of torch's optimizers: which these are, their numbers, and what is left if one is not taken."""

from __future__ import annotations

import copy
import functools
import logging
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from pymesh3d.dp import zero as module
from pymesh3d.dp.exchange import Collectives
from pymesh3d.dp.rules import Steps, is_known
from pymesh3d.dp.shared import SharedMemory
from pymesh3d.dp.zero import STAGES, Zero
from pymesh3d.errors import SharingError
from pymesh3d.mesh import init_mesh
from pymesh3d.triton_kernels.zero_step import update_ref
from tests.kernels import needs_kernels

Ranks = Callable[..., list[Any]]
ADAMW, ADAM, SGD = torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD
RULES: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": functools.partial(ADAMW, lr=1e-2, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.3),
    "adam": functools.partial(ADAM, lr=1e-2, betas=(0.8, 0.95), weight_decay=0.3),
    "decoupled": functools.partial(ADAM, lr=1e-2, weight_decay=0.3, decoupled_weight_decay=True),
    "numbers": functools.partial(ADAMW, lr=torch.tensor(1e-2), fused=True),
    "sgd": functools.partial(SGD, lr=0.1, weight_decay=0.3),
    "momentum": functools.partial(SGD, lr=0.1, momentum=0.9, dampening=0.2, weight_decay=0.3),
    "nesterov": functools.partial(SGD, lr=0.1, momentum=0.9, nesterov=True),
}


class Own(torch.optim.AdamW):
    """What one has written oneself may do something else."""


def with_hook(kind: str) -> torch.optim.Optimizer:
    optimizer = ADAMW([nn.Parameter(torch.zeros(2))])
    getattr(optimizer, f"register_step_{kind}_hook")(lambda *_: None)
    return optimizer


def made(kind: Callable[..., torch.optim.Optimizer], dtype: torch.dtype = torch.float32, **options: Any) -> torch.optim.Optimizer:
    return kind([{"params": [nn.Parameter(torch.zeros(2))]}, {"params": [nn.Parameter(torch.zeros(2, dtype=dtype))]}], **options)


@pytest.mark.parametrize("kind", [ADAMW, ADAM, SGD])
def test_torchs_own_are_known(kind: Any) -> None:
    assert is_known(made(kind), hooks=0)
    assert is_known(made(kind, foreach=False, fused=False), hooks=0), "how torch would compute does not matter"
    assert not is_known(made(kind), hooks=1), "a hook that must be there"
    assert not is_known(made(kind, maximize=True), hooks=0)
    assert not is_known(made(kind, dtype=torch.float64), hooks=0)
    optimizer = made(kind)
    optimizer.param_groups[1]["maximize"] = True
    assert not is_known(optimizer, hooks=0), "one group is enough"


def test_others_are_not_known() -> None:
    assert not is_known(made(Own), hooks=0)
    for kind in (torch.optim.NAdam, torch.optim.RMSprop, torch.optim.Adamax):
        assert not is_known(made(kind), hooks=0)
    for option in ("amsgrad", "differentiable", "capturable"):
        assert not is_known(made(functools.partial(ADAMW, **{option: True})), hooks=0), option
    assert is_known(with_hook("pre"), hooks=1) and not is_known(with_hook("pre"), hooks=0)
    assert not is_known(with_hook("post"), hooks=0) and not is_known(with_hook("post"), hooks=1)


def twins(rule: str) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
    """Two alike, over two groups, of which one does not decay."""
    found = []
    for _ in range(2):
        generator = torch.Generator().manual_seed(3)
        values = [nn.Parameter(torch.randn(5, generator=generator)) for _ in range(3)]
        found.append(RULES[rule]([{"params": values[:2]}, {"params": values[2:], "weight_decay": 0.0}]))
    return found[0], found[1]


def values_of(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [value for group in optimizer.param_groups for value in group["params"]]


def grad_of(step: int, number: int) -> torch.Tensor:
    return torch.randn(5, generator=torch.Generator().manual_seed(10 * step + number))


@torch.no_grad()
def by_rules(optimizer: torch.optim.Optimizer, steps: Steps, step: int) -> None:
    for number, (value, (rule, remembered)) in enumerate(steps.next().items()):
        update_ref(rule, value, remembered, grad_of(step, number), torch.ones(()))
    steps.confirm(True)


def by_torch(optimizer: torch.optim.Optimizer, step: int) -> None:
    for number, value in enumerate(values_of(optimizer)):
        value.grad = grad_of(step, number)
    optimizer.step()


def assert_alike(one: torch.optim.Optimizer, other: torch.optim.Optimizer) -> None:
    """In values and all that is remembered."""
    for value, expected in zip(values_of(one), values_of(other), strict=True):
        assert torch.allclose(value, expected, rtol=1e-6, atol=1e-7), (value, expected)
        mine, theirs = one.state[value], other.state[expected]
        assert mine.keys() == theirs.keys(), "what is remembered has torch's names"
        for key, kept in theirs.items():
            assert mine[key].dtype == kept.dtype and mine[key].device == kept.device and mine[key].shape == kept.shape, key
            assert torch.allclose(mine[key], kept, rtol=1e-6, atol=1e-7), key


@pytest.mark.parametrize("rule", RULES)
def test_numbers_are_those_of_torch(rule: str) -> None:
    """Under a scheduler, which does not complain; in turns with torch's own steps; after a state was loaded, or was changed in place."""
    mine, theirs = twins(rule)
    steps = Steps(mine)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        schedules = [torch.optim.lr_scheduler.ExponentialLR(one, 0.7) for one in (mine, theirs)]
        for step in range(8):
            if step == 3:
                by_torch(mine, step)
            else:
                by_rules(mine, steps, step)
            by_torch(theirs, step)
            for schedule in schedules:
                schedule.step()
            assert_alike(mine, theirs)
            if step == 4:
                other, _ = twins(rule)
                for earlier in range(2):
                    by_torch(other, earlier)
                for one in (mine, theirs):
                    one.load_state_dict(copy.deepcopy(other.state_dict()))
            if step == 5:
                for one in (mine, theirs):
                    for state in one.state.values():
                        if "step" in state:
                            state["step"].fill_(40.0)
    assert [group["lr"] for group in mine.param_groups] == [group["lr"] for group in theirs.param_groups]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("taken", [0, 2])
def test_a_step_that_was_not_taken_leaves_nothing(rule: str, taken: int) -> None:
    """At first, and after others; the next one has the numbers that it would have had."""
    mine, theirs = twins(rule)
    steps = Steps(mine)
    for step in range(taken):
        by_rules(mine, steps, step)
        by_torch(theirs, step)
    before = {id(value): {key: kept.clone() for key, kept in mine.state[value].items()} for value in values_of(mine)}
    for _ in range(2):
        steps.next()
        steps.confirm(False)
        for value in values_of(mine):
            now = mine.state[value]
            assert now.keys() == before[id(value)].keys(), "what it was the first to need is gone"
            assert all(torch.equal(now[key], kept) for key, kept in before[id(value)].items())
    for step in range(taken, taken + 2):
        by_rules(mine, steps, step)
        by_torch(theirs, step)
    assert_alike(mine, theirs)


WIDTH = 40  # a matrix has numbers in the shards of two ranks


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().sum()


def batch(step: int) -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))


def plainly(rule: str, steps: list[int]) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Parameters after steps of torch's optimizer with clipping in one process, and norms."""
    model = Net()
    groups = [{"params": [p for p in model.parameters() if (p.ndim > 1) == flag], "weight_decay": 0.2 * flag} for flag in (True, False)]
    optimizer, norms = RULES[rule](groups), []
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
    for step in steps:
        model(batch(step)).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return {name: p.detach() for name, p in model.named_parameters()}, norms


def by_kernels(rule: str, stage: int, spoiled: int | None, fallback: bool) -> dict[str, Any]:
    """The same by Zero's kernels on dp ranks. In step `spoiled` one rank's gradient is NaN, in the next there is a veto: what changed."""
    mesh, model, logged = init_mesh(device="cpu"), Net(), []
    log = logging.getLogger("pymesh3d")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(log, "warning", lambda text, *given: logged.append(text % given))
        if fallback:
            patch.setattr(module, "SharedMemory", type("SharedMemory", (), {"__init__": refuse}))
        zero = Zero(model, mesh, stage=stage, optimizer=RULES[rule], weight_decay=0.2, kernels=True)
        alone = mesh.dp.size == 1
        assert isinstance(zero._exchange, Collectives if fallback or alone else SharedMemory), "by kernels"
        assert zero._masters.by_kernels
        schedule = torch.optim.lr_scheduler.ExponentialLR(zero.optimizer, 0.7)
        norms, changed = [], []
        for step in range(4):
            for wrong in ("gradient", "veto") if step == spoiled else ():
                before = everything(zero, model)
                loss = model(batch(step).chunk(mesh.dp.size)[mesh.rank])
                (loss * (math.nan if wrong == "gradient" and mesh.rank == mesh.dp.size - 1 else 1.0)).backward()
                norm, taken = zero.step(0.5, veto=torch.tensor(math.nan if wrong == "veto" else 0.0, dtype=torch.float64))
                after = everything(zero, model)
                changed += [name for name in before.keys() | after.keys() if not alike(before.get(name), after.get(name))]
                assert math.isnan(norm) and not taken, wrong
            with zero.last_pass():
                model(batch(step).chunk(mesh.dp.size)[mesh.rank]).backward()
            norms.append(zero.step(0.5, veto=torch.zeros((), dtype=torch.float64))[0])
            schedule.step()
        with zero.whole():
            parameters = {name: p.detach().clone() for name, p in model.named_parameters()}
    mesh.close()
    counts = zero.steps_taken, zero.steps_skipped
    return {"parameters": parameters, "norms": norms, "changed": changed, "counts": counts, "logged": logged}


def refuse(*_: Any, **__: Any) -> None:
    raise SharingError("they are on different hosts")


def alike(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    return one is not None and other is not None and torch.equal(one, other)


def everything(zero: Zero, model: nn.Module) -> dict[str, torch.Tensor]:
    """All that a step changes."""
    with zero.whole():
        return {name: tensor.detach().clone() for name, tensor in {**zero.state(), **dict(model.named_parameters())}.items()}


@needs_kernels
@pytest.mark.parametrize(
    ("rule", "world", "stages"), [("adamw", 2, STAGES), ("adam", 2, (1, 3)), ("momentum", 2, (0, 2)), ("nesterov", 1, (1,))]
)
def test_kernels_take_the_steps_of_torch(ranks: Ranks, rule: str, world: int, stages: tuple[int, ...]) -> None:
    """With clipping, under a scheduler; and no step where a gradient of one rank is not finite, or at a veto: then nothing changes."""
    expected, norms = plainly(rule, [0, 1, 2, 3])
    for stage in stages:
        for rank, found in enumerate(ranks(world, by_kernels, rule, stage, stage % 3, False)):
            assert found["changed"] == [], f"stage {stage}"
            assert found["counts"] == (4, 2) and len(found["logged"]) == (0 if rank else 2)
            assert found["norms"] == pytest.approx(norms, rel=1e-5)
            for name, value in found["parameters"].items():
                assert torch.allclose(value, expected[name], rtol=1e-6, atol=1e-6), f"stage {stage}: {name}"


@needs_kernels
@pytest.mark.parametrize("stage", [1, 3])
def test_kernels_take_steps_where_ranks_share_no_memory(ranks: Ranks, stage: int) -> None:
    """And that is said."""
    expected, _ = plainly("adamw", [0, 1, 2, 3])
    for found in ranks(2, by_kernels, "adamw", stage, None, True):
        assert found["logged"] == ["gradients are summed by collectives: they are on different hosts"]
        for name, value in found["parameters"].items():
            assert torch.allclose(value, expected[name], rtol=1e-6, atol=1e-6), name


def by_others(kernels: bool, kind: str, stage: int) -> dict[str, torch.Tensor]:
    """Parameters after steps of an optimizer that the kernels do not know."""
    mesh, model = init_mesh(device="cpu"), Net()
    others: dict[str, Any] = {"own": Own, "amsgrad": functools.partial(ADAMW, amsgrad=True), "hook": ADAMW}
    zero = Zero(model, mesh, stage=stage, optimizer=functools.partial(others[kind], lr=1e-2), weight_decay=0.2, kernels=kernels)
    if kind == "hook":
        zero.optimizer.register_step_post_hook(lambda *_: None)
    assert not zero._masters.by_kernels
    for step in range(3):
        model(batch(step).chunk(2)[mesh.rank]).backward()
        zero.step(0.5)
    with zero.whole():
        found = {name: p.detach().clone() for name, p in model.named_parameters()}
    mesh.close()
    return found


@needs_kernels
@pytest.mark.parametrize("kind", ["own", "amsgrad", "hook"])
def test_other_optimizers_take_their_own_steps(ranks: Ranks, kind: str) -> None:
    """Also where kernels sum the gradients: with the same bits."""
    expected = ranks(2, by_others, False, kind, 1)[0]
    for stage in (1, 2):
        for found in ranks(2, by_others, True, kind, stage):
            assert all(torch.equal(value, expected[name]) for name, value in found.items())

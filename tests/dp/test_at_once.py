"""Steps that sum, update and give back in one pass over memory: when they are taken, the same bits as others, and the vote before them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from pymesh3d.dp.zero import Zero
from pymesh3d.errors import ConfigError
from pymesh3d.launch import launch
from pymesh3d.mesh import Mesh, init_mesh
from tests.kernels import needs_kernels

Ranks = Callable[..., list[Any]]
WIDTH = 48
OPTIMIZERS = {
    "adamw": functools.partial(torch.optim.AdamW, lr=1e-2),
    "sgd": functools.partial(torch.optim.SGD, lr=1e-2, momentum=0.9),
}
CLIPPING = 1e30  # of which nothing is felt: the other way to the same numbers
pytestmark = needs_kernels


def trained(mesh: Mesh, **options: Any) -> tuple[nn.Module, Zero, list[int]]:
    """A model of three matrices and their biases in bfloat16, and how many of its steps have been at once."""
    torch.manual_seed(1)
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16, device=mesh.device) for _ in range(3)])
    settings = {"stage": 1, "optimizer": OPTIMIZERS["adamw"], "weight_decay": 0.1, "kernels": True, "bucket_elements": 3000, **options}
    zero, count = Zero(model, mesh, **settings), [0]
    at_once = zero._step_at_once

    def counted(*given: Any) -> tuple[float, bool]:
        count[0] += 1
        return at_once(*given)

    zero._step_at_once = counted  # type: ignore[method-assign]
    return model, zero, count


def backward(model: nn.Module, mesh: Mesh, step: int, passes: int = 2) -> None:
    for number in range(passes):
        seed = torch.Generator().manual_seed(100 * step + 10 * number + mesh.rank)
        model(torch.randn(5, WIDTH, generator=seed).bfloat16().to(mesh.device)).float().square().mean().backward()


def everything(model: nn.Module, zero: Zero) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()] + [tensor.clone() for tensor in zero.state().values()]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def both_ways(options: dict[str, Any], device: str = "cpu", tp: int = 1, mixed: bool = False) -> tuple[bool, bool, list[int]]:
    """Whether steps at once leave the same bits and tell the same norm as others do; how many have been at once.

    With `mixed` the second of the three is as others are."""
    mesh = init_mesh(tp=tp, device=device)
    (one, zero, count), (other, usual, none) = trained(mesh, **options), trained(mesh, **options)
    alike = close = True
    for step in range(3):
        for model in (one, other):
            backward(model, mesh, step)
        (norm, taken), (expected, _) = zero.step(CLIPPING if mixed and step == 1 else None), usual.step(CLIPPING)
        alike = alike and taken and same(everything(one, zero), everything(other, usual))
        close = close and math.isclose(norm, expected, rel_tol=1e-12)
    mesh.close()
    return alike, close, count + none


@pytest.mark.parametrize("options", [{}, {"optimizer": OPTIMIZERS["sgd"]}, {"param_remainders": True}, {"stage": 2, "once_a_step": True}])
@pytest.mark.parametrize("world", [2, 3])
def test_a_step_at_once_leaves_the_same_bits(ranks: Ranks, world: int, options: dict[str, Any]) -> None:
    assert ranks(world, both_ways, options) == [(True, True, [3, 0])] * world


OTHERWISE: list[dict[str, Any]] = [
    {"stage": 0},
    {"stage": 2},
    {"stage": 3},
    {"stage": 3, "once_a_step": True},
    {"reduce_dtype": torch.float32},  # nothing is rounded, so nobody has looked at all numbers
    {"accumulate_dtype": torch.float64},  # in which the kernel would not add up
    {"kernels": False},
    {"offload": True},
    {"optimizer": torch.optim.RMSprop},
]


@pytest.mark.parametrize("options", OTHERWISE)
def test_all_other_steps_are_not(ranks: Ranks, options: dict[str, Any]) -> None:
    for alike, close, count in ranks(2, both_ways, options):
        assert alike and close and count == [0, 0]


def test_both_may_follow_each_other(ranks: Ranks) -> None:
    assert ranks(2, both_ways, {}, "cpu", 1, True) == [(True, True, [2, 0])] * 2


def test_with_other_axes_none_is_at_once(ranks: Ranks) -> None:
    """Where parameters have copies on tp ranks: they count once in the norm."""
    assert ranks(4, both_ways, {}, "cpu", 2) == [(True, True, [0, 0])] * 4


class WithNothing(nn.Linear):
    """A matrix, and a parameter without numbers."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH, bias=False, dtype=torch.bfloat16)
        self.nothing = nn.Parameter(torch.empty(0, dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.nothing.sum()


def of_nothing() -> bool:
    mesh = init_mesh(device="cpu")
    model = WithNothing()
    zero = Zero(model, mesh, stage=1, optimizer=OPTIMIZERS["adamw"], weight_decay=0.1, kernels=True)
    backward(model, mesh, 0)
    taken = zero.step()[1]
    mesh.close()
    return taken


def test_parameters_without_numbers_are_no_matter(ranks: Ranks) -> None:
    assert ranks(2, of_nothing) == [True, True]


def after_a_last_pass() -> int:
    mesh = init_mesh(device="cpu")
    model, zero, count = trained(mesh)
    with zero.last_pass():
        backward(model, mesh, 0, passes=1)
    assert zero.step()[1], "it is taken"
    mesh.close()
    return count[0]


def test_nor_what_has_been_summed_beside_a_pass(ranks: Ranks) -> None:
    assert ranks(2, after_a_last_pass) == [0, 0]


def poisoned(number: float, bias: bool, device: str = "cpu") -> tuple[list[bool], list[float], bool, bool]:
    """A step in which rank 1 has such a number in a matrix or a bias, one that is vetoed, and one that is not: which are taken, what norms
    are told, whether the first two change nothing, and whether the third is as if they had not been."""
    mesh = init_mesh(device=device)
    (model, zero, count), (other, usual, _) = trained(mesh), trained(mesh)
    told, before = [], everything(model, zero)
    backward(model, mesh, 7)
    if mesh.rank == 1:
        grads = [parameter.main_grad for parameter in model.parameters() if (parameter.ndim < 2) == bias]
        grads[-1].view(-1)[5] = number
    told.append(zero.step())
    backward(model, mesh, 8)
    told.append(zero.step(veto=torch.tensor(torch.nan, dtype=torch.float64, device=mesh.device)))
    untouched = same(everything(model, zero), before)
    for each in (model, other):
        backward(each, mesh, 9)
    told.append(zero.step())
    usual.step(CLIPPING)
    assert count == [3] and (zero.steps_taken, zero.steps_skipped) == (1, 2), "all are at once"
    as_new = same(everything(model, zero), everything(other, usual))
    mesh.close()
    return [taken for _, taken in told], [norm for norm, _ in told[:2]], untouched, as_new


@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered")
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("number", [math.nan, -math.inf, 3.3e38])
def test_what_is_not_finite_anywhere_is_known_before(ranks: Ranks, number: float, bias: bool) -> None:
    """So is what might not be once it is added up."""
    for taken, norms, untouched, as_new in ranks(2, poisoned, number, bias):
        assert taken == [False, False, True] and not any(map(math.isfinite, norms)), norms
        assert untouched and as_new


def on_gpus() -> None:
    """All of the above there."""
    for options in ({}, {"optimizer": OPTIMIZERS["sgd"]}, {"param_remainders": True}, {"stage": 2, "once_a_step": True}):
        assert both_ways(options, "cuda") == (True, True, [3, 0]), options
    for number in (math.nan, -math.inf, 3.3e38):
        for bias in (False, True):
            taken, norms, untouched, as_new = poisoned(number, bias, "cuda")
            assert taken == [False, False, True] and not any(map(math.isfinite, norms)), f"{number}: {taken}, {norms}"
            assert untouched and as_new, f"{number}, {bias}"


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_steps_at_once_on_gpus() -> None:
    assert launch(["-c", "from tests.dp.test_at_once import on_gpus; on_gpus()"], torch.cuda.device_count()) == 0


def misused() -> list[str]:
    """What is said of a parameter that was replaced, and of a second step's `reduce` before."""
    mesh, texts = init_mesh(device="cpu"), []
    model, zero, _ = trained(mesh)
    backward(model, mesh, 0)
    zero.reduce()
    with pytest.raises(ConfigError) as caught:
        zero.step()
    texts.append(str(caught.value))
    zero.zero_grad()
    backward(model, mesh, 1)
    model[0].weight = nn.Parameter(torch.zeros(WIDTH, WIDTH, dtype=torch.bfloat16))  # type: ignore[union-attr]
    with pytest.raises(ConfigError) as caught:
        zero.step()
    texts.append(str(caught.value))
    mesh.close()
    return texts


def test_what_other_steps_refuse_is_refused(ranks: Ranks) -> None:
    for texts in ranks(2, misused):
        assert texts[0].startswith("reduce() of gradients that are already summed over ranks"), texts
        assert texts[1].startswith("0.weight was replaced, moved, added, removed, frozen or unfrozen"), texts

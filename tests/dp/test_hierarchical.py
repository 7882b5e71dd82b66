"""ZeRO over several hosts, whose ranks share memory: which exchange there is, and that it trains as one process and as collectives do."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from pymesh3d.dp import hierarchical
from pymesh3d.dp import zero as module
from pymesh3d.dp.exchange import Collectives
from pymesh3d.dp.hierarchical import Hierarchical
from pymesh3d.dp.shared import SharedMemory
from pymesh3d.dp.zero import Zero
from pymesh3d.errors import SharingError
from pymesh3d.mesh import Mesh, init_mesh
from tests.dp.test_units import DECAY, WIDTH, Model, loads, states
from tests.kernels import needs_kernels
from tests.plain import assert_near

Ranks = Callable[..., list[Any]]
SGD = functools.partial(torch.optim.SGD, lr=1e-2, momentum=0.9)
SAMPLES = 12
STEPS, MAX_NORM, TOO_LARGE = 4, 50.0, 2  # in which step a gradient is not finite
pytestmark = needs_kernels


def mesh_on(hosts: str) -> Mesh:
    """One whose ranks say that they are on these hosts."""
    os.environ["GROUP_RANK"] = hosts[dist.get_rank()]
    return init_mesh(device="cpu")


def zero_on(model: torch.nn.Module, mesh: Mesh, **options: Any) -> Zero:
    return Zero(model, mesh, **{"stage": 1, "optimizer": SGD, "weight_decay": DECAY, "kernels": True, **options})


def exchange_on(hosts: str, kernels: bool) -> type:
    mesh = mesh_on(hosts)
    found = type(zero_on(torch.nn.Linear(2, 2), mesh, kernels=kernels)._exchange)
    mesh.close()
    return found


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [("0011", Hierarchical), ("0000", SharedMemory), ("0001", Collectives), ("0101", Collectives), ("0123", Collectives)],
)
def test_which_exchange_there_is(ranks: Ranks, hosts: str, expected: type) -> None:
    """Equally many ranks on each host, one host after the other, share memory there."""
    assert ranks(4, exchange_on, hosts, True) == [expected] * 4
    assert ranks(4, exchange_on, hosts, False) == [Collectives] * 4


def where_one_host_cannot_share(what: str) -> tuple[type, list[str]]:
    mesh, logged = mesh_on("0011"), list[str]()

    def refuse(*_: object, **__: object) -> None:
        raise SharingError("no room")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logging.getLogger("pymesh3d"), "warning", lambda text, *given: logged.append(text % given))
        if mesh.rank < 2:
            patch.setattr(hierarchical, what, refuse)
        found = type(zero_on(torch.nn.Linear(2, 2), mesh)._exchange)
    mesh.close()
    return found, logged


@pytest.mark.parametrize("what", ["SharedMemory", "SymmetricBuffer"])
def test_where_one_host_cannot_share_memory_none_does(ranks: Ranks, what: str) -> None:
    reasons = ["no room"] * 2 + ["ranks of another domain cannot share memory"] * 2
    for (found, logged), reason in zip(ranks(4, where_one_host_cannot_share, what), reasons, strict=True):
        assert found is Collectives and logged == [f"gradients are summed by collectives: {reason}"]


class Case(NamedTuple):
    """How a model is trained."""

    stage: int
    once_a_step: bool = False
    dtype: torch.dtype = torch.float64
    wire: torch.dtype | None = None


class Trained(NamedTuple):
    """What came of it: norms of all steps, the first gradients, and the parameters at the end."""

    norms: list[float]
    gradients: list[torch.Tensor]
    parameters: dict[str, torch.Tensor]


BF16, F32 = torch.bfloat16, torch.float32
CASES = [Case(0), Case(1), Case(2), Case(2, once_a_step=True), Case(3), Case(3, once_a_step=True)]
ROUNDED = [Case(stage, stage == 3, BF16, wire) for stage, wire in ((0, None), (1, F32), (2, None), (3, F32))]


def batch(step: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(step), dtype=torch.float64).to(dtype)


def backward(model: torch.nn.Module, x: torch.Tensor) -> None:
    model(x).square().sum().backward()


def trained(hosts: str, case: Case, kernels: bool) -> Trained:
    """Steps of two microbatches, with and without a last pass, one of which no rank takes, and one that is taken twice from one state."""
    mesh, model = mesh_on(hosts), Model(case.dtype)
    zero = zero_on(model, mesh, stage=case.stage, once_a_step=case.once_a_step, reduce_dtype=case.wire, kernels=kernels)
    assert isinstance(zero._exchange, Hierarchical if kernels else Collectives), "it must be seen"
    norms, gradients = [], list[torch.Tensor]()

    def passes(step: int, with_last: bool) -> None:
        first, second = batch(step, case.dtype)[mesh.rank :: mesh.dp.size].chunk(2)
        backward(model, first * math.inf if step == TOO_LARGE and mesh.rank == 1 else first)
        with zero.last_pass() if with_last else contextlib.nullcontext():
            backward(model, second)

    for step in range(STEPS):
        passes(step, with_last=step % 2 == 1)
        gradients = gradients or zero.reduced_grads()
        norm, taken = zero.step(MAX_NORM)
        assert taken == (step != TOO_LARGE), f"step {step}"
        norms.append(norm)
    kept = {name: value.clone() for name, value in zero.state().items()}
    once = after(zero, model, passes)
    zero.load_state(kept)
    again = after(zero, model, passes)
    assert all(torch.equal(value, once[name]) for name, value in again.items()), "the same state, the same step"
    mesh.close()
    return Trained(norms, gradients, again)


def after(zero: Zero, model: torch.nn.Module, passes: Callable[[int, bool], None]) -> dict[str, torch.Tensor]:
    """Parameters after one more step."""
    passes(STEPS, True)
    zero.step(MAX_NORM)
    with zero.whole():
        return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def plainly() -> Trained:
    """The same in one process."""
    model, norms = Model(), []
    groups = [{"params": [p for p in model.parameters() if (p.ndim > 1) == flag], "weight_decay": DECAY * flag} for flag in (True, False)]
    optimizer = SGD(groups)
    for step in (step for step in range(STEPS + 1) if step != TOO_LARGE):
        for parameter in model.parameters():  # Zero has zeros where torch has nothing
            parameter.grad = torch.zeros_like(parameter)
        backward(model, batch(step, torch.float64))
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
        optimizer.step()
    return Trained(norms[:-1], [], {name: p.detach() for name, p in model.named_parameters()})


def require_alike(found: list[Trained]) -> None:
    """All ranks have the same bits."""
    for one in found:
        assert one.norms[:TOO_LARGE] == found[0].norms[:TOO_LARGE] and one.norms[TOO_LARGE + 1 :] == found[0].norms[TOO_LARGE + 1 :]
        for name, value in one.parameters.items():
            assert torch.equal(value, found[0].parameters[name]), name


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_stage_trains_as_one_process(ranks: Ranks, case: Case) -> None:
    expected = plainly()
    found = ranks(4, trained, "0011", case, True, timeout=120)
    require_alike(found)
    norms = [norm for norm in found[0].norms if math.isfinite(norm)]
    assert norms == pytest.approx(expected.norms, rel=1e-12)
    assert_near(found[0].parameters, expected.parameters)


@pytest.mark.parametrize("case", ROUNDED, ids=str)
def test_what_is_sent_is_rounded_as_by_collectives(ranks: Ranks, case: Case) -> None:
    """Only the order of float32 sums differs; and each time it is the same."""
    expected = ranks(4, trained, "0011", case, False, timeout=120)[0]
    found, again = (ranks(4, trained, "0011", case, True, timeout=120) for _ in range(2))
    require_alike(found + again)
    for ours, theirs in zip(found[0].gradients, expected.gradients, strict=True):
        assert (ours - theirs).abs().max() <= 1e-6 * theirs.abs().max(), "float32 sums of numbers that were rounded alike"
    assert found[0].norms[0] == pytest.approx(expected.norms[0], rel=1e-6)


@pytest.mark.parametrize(("hosts", "stages"), [("000111", (3,)), ("001122", (0, 2))])
def test_three_ranks_a_host_and_three_hosts(ranks: Ranks, hosts: str, stages: tuple[int, ...]) -> None:
    expected = plainly()
    for stage in stages:
        found = ranks(6, trained, hosts, Case(stage), True, timeout=120)
        require_alike(found)
        assert_near(found[0].parameters, expected.parameters)


def on_two_hosts(function: Callable[..., Any], *args: Any) -> Any:
    os.environ["GROUP_RANK"] = str(dist.get_rank() // 2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "Collectives", None)
        return function(*args)


@pytest.mark.parametrize("function", [states, loads])
def test_state_dicts_of_layers_are_whole_and_can_be_loaded(ranks: Ranks, function: Callable[..., Any]) -> None:
    assert ranks(4, on_two_hosts, function, "layer", {"kernels": True}, timeout=120) == [[]] * 4

"""RMSNorm as a model uses it: its gradients, eager and compiled, and what it keeps for them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from pymesh3d.errors import ConfigError
from pymesh3d.ops import rms_norm as rms
from pymesh3d.ops.rms_norm import add_rms_norm, rms_norm
from tests import kernels
from tests.kernels import DEVICE

EPS = 1e-5
WIDTH = 6
DOUBLE = torch.float64


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return kernels.noise(*shape, dtype=DOUBLE, seed=seed).to(DEVICE)


def inputs() -> list[torch.Tensor]:
    """x, what is added to it, and the weight."""
    return [noise(*shape, seed=seed).requires_grad_() for seed, shape in enumerate([(2, 3, WIDTH), (2, 3, WIDTH), (WIDTH,)])]


def normalized(x: torch.Tensor, added: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (rms_norm(x, weight, EPS) + 0 * added,)


def normalized_sum(x: torch.Tensor, added: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return add_rms_norm(x, added, weight, EPS)


def normalized_stream(x: torch.Tensor, added: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    h, y = add_rms_norm(x, None, weight, EPS)
    return h + 0 * added, y


def plain(x: torch.Tensor, added: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (F.rms_norm(x, (WIDTH,), weight, EPS) + 0 * added,)


def plain_sum(x: torch.Tensor, added: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    h = x + added
    return h, F.rms_norm(h, (WIDTH,), weight, EPS)


def plain_stream(x: torch.Tensor, added: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return x + 0 * added, F.rms_norm(x, (WIDTH,), weight, EPS)


PAIRS = [(normalized, plain), (normalized_sum, plain_sum), (normalized_stream, plain_stream)]
OURS = [ours for ours, _ in PAIRS]


@pytest.mark.parametrize("ours", OURS)
def test_gradients_are_those_of_the_function(ours: Any) -> None:
    assert torch.autograd.gradcheck(ours, inputs())


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
def test_as_torch_eager_and_compiled(ours: Any, theirs: Any, compiled: bool) -> None:
    given = inputs()
    run = torch.compile(ours, fullgraph=True, backend="aot_eager") if compiled else ours
    found, expected = run(*given), theirs(*given)
    grads = [noise(2, 3, WIDTH, seed=3 + i) for i in range(len(found))]
    found += torch.autograd.grad(found, given, grads)
    expected += torch.autograd.grad(expected, given, grads)
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert torch.allclose(one, other, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("used", [0, 1])
@pytest.mark.parametrize(("ours", "theirs"), PAIRS[1:])
def test_of_which_one_result_goes_nowhere(ours: Any, theirs: Any, used: int, compiled: bool) -> None:
    given = inputs()
    run = torch.compile(ours, fullgraph=True, backend="aot_eager") if compiled else ours
    grad = noise(2, 3, WIDTH, seed=3)
    found = torch.autograd.grad(run(*given)[used], given, grad, allow_unused=True, materialize_grads=True)
    expected = torch.autograd.grad(theirs(*given)[used], given, grad, allow_unused=True, materialize_grads=True)
    for one, other in zip(found, expected, strict=True):
        assert torch.allclose(one, other, rtol=1e-13, atol=1e-13)


def test_operators_say_what_they_return() -> None:
    x, added, weight = inputs()
    torch.library.opcheck(torch.ops.pymesh3d.rms_norm.default, (x, weight, EPS))
    torch.library.opcheck(torch.ops.pymesh3d.add_rms_norm.default, (x, added, weight, EPS))
    lying = noise(WIDTH, 3, 2).permute(2, 1, 0)
    expanded = noise(1).expand(2, 3, WIDTH)  # the gradient of a sum
    for grad_h in ((), (expanded,)):
        torch.library.opcheck(torch.ops.pymesh3d.rms_norm_backward.default, (expanded, lying, weight.detach(), noise(2, 3), *grad_h))
    for given in (x.detach().bfloat16(), x.detach()[:0]):
        scale = weight.detach().to(given.dtype)
        torch.library.opcheck(torch.ops.pymesh3d.rms_norm.default, (given, scale, EPS))
        torch.library.opcheck(torch.ops.pymesh3d.add_rms_norm.default, (given, given, scale, EPS))


@pytest.mark.parametrize("ours", [normalized, normalized_sum])
def test_a_number_a_row_is_kept_besides_what_is_there(ours: Any) -> None:
    x, added, weight = inputs()
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        results = rms_norm(x, weight, EPS) if ours is normalized else add_rms_norm(x, added, weight, EPS)
    there = {tensor.data_ptr() for tensor in (x, weight, *(results if ours is normalized_sum else ()))}
    assert [(tensor.shape, tensor.dtype) for tensor in kept if tensor.data_ptr() not in there] == [((2, 3), DOUBLE)] and len(kept) == 3


def test_what_is_normalized_may_be_changed_in_place_but_not_what_backward_needs() -> None:
    x, added, weight = inputs()
    y = rms_norm(x, weight, EPS).mul_(2.0)
    y.sum().backward()
    h, y = add_rms_norm(x, added, weight, EPS)
    h.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    stream = x * 2.0
    _, y = add_rms_norm(stream, None, weight, EPS)
    stream.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_gradients_of_a_stream_are_added_by_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by autograd, in a pass of its own."""
    given, calls = [], rms.kernel.rms_norm_backward
    monkeypatch.setattr(rms.kernel, "rms_norm_backward", lambda *inputs: given.append(inputs) or calls(*inputs))
    x, _, weight = inputs()
    h, y = add_rms_norm(x, None, weight, EPS)
    (3.0 * h + y).sum().backward()
    assert len(given) == 1 and torch.equal(given[0][-1], torch.full_like(x, 3.0))


@pytest.mark.parametrize("ours", OURS)
def test_a_second_derivative_is_refused(ours: Any) -> None:
    given = inputs()
    (grad,) = torch.autograd.grad(ours(*given)[-1].square().sum(), given[0], create_graph=True)
    with pytest.raises(ConfigError, match="first derivatives only"):
        grad.square().sum().backward()

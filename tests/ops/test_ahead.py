"""What is gathered ahead in a backward pass: which of it is used, that gradients stay right, and that nothing lives longer for it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from pymesh3d.comm.copies import CopiedGather
from pymesh3d.mesh import Mesh, init_mesh
from pymesh3d.ops import ahead as module
from pymesh3d.ops.ahead import Input, recall, remember
from pymesh3d.ops.choose import VARIABLE
from pymesh3d.ops.linear import column_linear, row_linear
from tests.kernels import needs_kernels, noise

Ranks = Callable[..., list[Any]]
T, B, D, F = 8, 3, 6, 12
Net = Callable[[Mesh | None, torch.Tensor, Sequence[torch.Tensor]], torch.Tensor]


def column(mesh: Mesh | None, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x @ weight.t() if mesh is None else column_linear(x, weight, None, mesh.tp, True)


def row(mesh: Mesh | None, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x @ weight.t() if mesh is None else row_linear(x, weight, None, mesh.tp, True)


def block(mesh: Mesh | None, x: torch.Tensor, weights: Sequence[torch.Tensor]) -> torch.Tensor:
    return x + row(mesh, torch.tanh(column(mesh, x.sin(), weights[0])), weights[1])


def chain(mesh: Mesh | None, x: torch.Tensor, weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """Two blocks, then a column-parallel layer after which none comes."""
    return column(mesh, block(mesh, block(mesh, x, weights[:2]), weights[2:4]).cos(), weights[4])


def recomputed(mesh: Mesh | None, x: torch.Tensor, weights: Sequence[torch.Tensor]) -> torch.Tensor:
    for pair in (weights[:2], weights[2:4]):
        x = checkpoint(block, mesh, x, pair, use_reentrant=False)
    return column(mesh, x.cos(), weights[4])


def three_before_one(mesh: Mesh | None, x: torch.Tensor, weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """As q, k and v are."""
    q, k, v = (column(mesh, (x + shift).sin(), weight) for shift, weight in zip(range(3), weights[:3], strict=True))
    return row(mesh, q * k + v, weights[3])


def frozen_first(mesh: Mesh | None, x: torch.Tensor, weights: Sequence[torch.Tensor]) -> torch.Tensor:
    return block(mesh, x, [weights[0].detach(), weights[1]])


NETS: dict[str, tuple[Net, str, int, int]] = {  # weights: column or row; gathers in the backward pass, and those ahead
    "a chain": (chain, "crcrc", 3, 2),
    "recomputed": (recomputed, "crcrc", 3, 0),
    "three before one": (three_before_one, "cccr", 3, 1),
    "frozen": (frozen_first, "cr", 0, 0),
}


def gradients(name: str) -> tuple[int, int]:
    """Of a net on this rank, against one process. How often it gathered, and how many of those began ahead."""
    net, kinds, _, _ = NETS[name]
    mesh = init_mesh(tp=-1, dp=1, device="cpu")
    ranks, rank = mesh.tp.size, mesh.tp.rank
    whole = [
        noise(*((F, D) if kind == "c" else (D, F)), dtype=torch.float64, seed=seed).requires_grad_() for seed, kind in enumerate(kinds)
    ]
    x = noise(B, T, D, dtype=torch.float64, seed=50).requires_grad_()
    y = net(None, x, whole)
    grad_y = noise(*y.shape, dtype=torch.float64, seed=60)
    y.backward(grad_y)
    cut = [0 if kind == "c" else 1 for kind in kinds]
    parts = [weight.detach().chunk(ranks, dim)[rank].clone().requires_grad_() for weight, dim in zip(whole, cut, strict=True)]
    mine = x.detach().chunk(ranks, 1)[rank].clone().requires_grad_()
    starts: list[Any] = []
    begun: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, "plain")
        start, begin = CopiedGather.start, Input.begin
        patch.setattr(CopiedGather, "start", lambda self, x: starts.append(x) or start(self, x))
        patch.setattr(Input, "begin", lambda self: begun.append(begin(self)) if self._x() is not None else None)
        found = net(mesh, mine, parts)
        out = grad_y.chunk(ranks, 2 if kinds[-1] == "c" else 1)[rank]
        found.backward(out)
    torch.testing.assert_close(found, y.detach().chunk(ranks, 2 if kinds[-1] == "c" else 1)[rank], rtol=0.0, atol=1e-12)
    for part, weight, dim in zip(parts, whole, cut, strict=True):
        assert (weight.grad is None) == (part.grad is None)
        if weight.grad is not None:
            torch.testing.assert_close(part.grad, weight.grad.chunk(ranks, dim)[rank], rtol=0.0, atol=1e-12)
    assert x.grad is not None
    torch.testing.assert_close(mine.grad, x.grad.chunk(ranks, 1)[rank], rtol=0.0, atol=1e-12)
    mesh.close()
    return len(starts), len(begun)


@needs_kernels
@pytest.mark.parametrize("name", NETS)
def test_gradients_agree_with_one_process(ranks: Ranks, name: str) -> None:
    _, _, gathers, ahead = NETS[name]
    assert ranks(2, gradients, name) == [(gathers, ahead)] * 2


def replaced() -> bool:
    """What was gathered ahead is not taken any more when other rows have come since."""
    mesh = init_mesh(tp=-1, dp=1, device="cpu")
    x, other = (noise(T, D, dtype=torch.float64, seed=seed + mesh.rank) for seed in (0, 10))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, "plain")
        one, two = Input(x, mesh.tp), Input(other, mesh.tp)
        one.begin()
        two.begin()
        assert one.take() is None
        pending = two.take()
        assert pending is not None and two.take() is None
        two.begin()
        patch.setattr(module, "raw_stream", lambda device: 7)
        assert two.take() is None, "of another stream"
        two.begin()
        before = two._pending
        other.add_(1)
        two.begin()
        assert before is not None and two._pending is before, "what has changed since is not gathered"
        right = torch.cat([noise(T, D, dtype=torch.float64, seed=10 + rank) for rank in range(mesh.tp.size)])
        assert torch.equal(pending.wait(), right)
    mesh.close()
    return True


@needs_kernels
def test_rows_that_others_have_replaced_are_not_taken(ranks: Ranks) -> None:
    assert ranks(2, replaced) == [True] * 2


def changed_in_place() -> bool:
    """Where hooks keep a copy, x may change after the layer: the gradient is that of the copy."""
    mesh = init_mesh(tp=-1, dp=1, device="cpu")
    x0 = noise(T, D, dtype=torch.float64, seed=1)
    full = [noise(F, D, dtype=torch.float64, seed=2).requires_grad_(), noise(D, F, dtype=torch.float64, seed=3).requires_grad_()]
    row(None, column(None, x0, full[0]).tanh(), full[1]).sum().backward()
    parts = [weight.detach().chunk(2, dim)[mesh.rank].clone().requires_grad_() for dim, weight in enumerate(full)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, "plain")
        with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda kept: kept):
            x = x0.chunk(2)[mesh.rank].clone()
            z = row(mesh, column(mesh, x, parts[0]).tanh(), parts[1])
        x.add_(100)
        z.sum().backward()
    for dim, (mine, weight) in enumerate(zip(parts, full, strict=True)):
        assert weight.grad is not None
        torch.testing.assert_close(mine.grad, weight.grad.chunk(2, dim)[mesh.rank], rtol=0.0, atol=1e-12)
    mesh.close()
    return True


@needs_kernels
def test_what_hooks_keep_is_what_is_gathered(ranks: Ranks) -> None:
    assert ranks(2, changed_in_place) == [True] * 2


def test_an_input_lives_no_longer_than_its_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    axis: Any = type("Axis", (), {"key": "some axis"})()
    monkeypatch.setattr(module, "gathers_aside", lambda x, axis: x is not None)
    x = torch.zeros(3)
    alive = weakref.ref(x)
    assert remember(x, axis, trained=False) is None and recall(x, axis, trained=True) is None
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone):
        assert remember(x, axis, trained=True) is None, "x itself is not kept"
    one = remember(x, axis, trained=True)
    assert one is not None and recall(x, axis, trained=False) is one and recall(x, axis, trained=True) is None, "once"
    del x
    gc.collect()
    assert alive() is None
    one.begin()
    assert one.take() is None
    earlier = remember(torch.zeros(3), axis, trained=True)
    assert earlier is not None and remember(torch.zeros(3), axis, trained=False) is None
    assert recall(torch.zeros(3), axis, trained=True) is None, "the layer before is not trained"
    remember(torch.zeros(3), axis, trained=True)  # which nobody holds
    gc.collect()
    assert recall(torch.zeros(3), axis, trained=True) is None
    monkeypatch.setattr(module, "gathers_aside", lambda x, axis: False)
    assert remember(torch.zeros(3), axis, trained=True) is None

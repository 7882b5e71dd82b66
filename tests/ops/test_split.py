"""A backward pass in two gives the bits of a whole one, computes the gradients of inputs first, and leaves nothing behind."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from pymesh3d.mesh import init_mesh
from pymesh3d.ops.accumulate import attach_buffer
from pymesh3d.ops.split import left_for_later, weights_apart
from pymesh3d.tp.layers import ColumnParallelLinear, RowParallelLinear
from tests.kernels import noise

Ranks = Callable[..., list[Any]]
DOUBLE = torch.float64
TOKENS, WIDTH, HIDDEN = 4, 6, 8


def layers(sequence_parallel: bool, buffers: bool = True, **sizes: int) -> tuple[Any, torch.nn.Sequential]:
    """A column- and a row-parallel layer over all ranks, whose gradients are added to 0.5."""
    mesh = init_mesh(device="cpu", **sizes)
    torch.manual_seed(1)
    options: dict[str, Any] = {"sequence_parallel": sequence_parallel, "mesh": mesh, "dtype": DOUBLE}
    model = torch.nn.Sequential(ColumnParallelLinear(WIDTH, HIDDEN, **options), RowParallelLinear(HIDDEN, WIDTH, **options))
    for parameter in model.parameters() if buffers else ():
        attach_buffer(parameter, torch.full_like(parameter, 0.5))
    return mesh, model


def two_ways(sequence_parallel: bool, ranks: int) -> list[list[torch.Tensor]]:
    """All gradients after a whole and after a split backward of two microbatches, whose weight parts come later, in order."""
    found = []
    for split in (False, True):
        mesh, model = layers(sequence_parallel, tp=ranks)
        inputs = [noise(3, TOKENS, WIDTH, dtype=DOUBLE, seed=seed + 9 * mesh.rank * sequence_parallel).requires_grad_() for seed in (1, 2)]
        outputs = [model(x).square().sum() for x in inputs]
        left = []
        for output in outputs:
            if split:
                with weights_apart() as apart:
                    output.backward()
                left.append(apart)
                assert left_for_later() is None
            else:
                output.backward()
        weights = [layer.weight for layer in model]
        if split:
            assert all(torch.equal(weight.main_grad, torch.full_like(weight, 0.5)) for weight in weights), "none of them is computed yet"
        inputs_only = [x.grad.clone() for x in inputs if x.grad is not None]
        for apart in left:
            apart.compute()
        assert all(x.grad is not None and torch.equal(x.grad, then) for x, then in zip(inputs, inputs_only, strict=True))
        assert all(parameter.grad is None and not parameter.main_grad.requires_grad for parameter in model.parameters())
        found.append([*inputs_only, *(parameter.main_grad for parameter in model.parameters())])
        mesh.close()
    return found


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("count", [1, 2])
def test_two_parts_are_the_whole(ranks: Ranks, count: int, sequence_parallel: bool) -> None:
    for whole, split in ranks(count, two_ways, sequence_parallel, count):
        assert len(whole) == len(split) == 6 and all(map(torch.equal, whole, split))
        assert all(bool((one != 0.5).all()) for one in whole)


def alone() -> bool:
    """What is not added to a buffer is not put off; frozen weights leave nothing; what was left goes when it has been computed."""
    mesh, model = layers(False, buffers=False, tp=1)
    x = noise(TOKENS, WIDTH, dtype=DOUBLE).requires_grad_()
    with weights_apart() as left:
        model(x).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters()) and not left._products

    for parameter in model.parameters():
        attach_buffer(parameter, torch.zeros_like(parameter))
    model[1].weight.requires_grad_(False)
    with weights_apart() as left:
        model(x).sum().backward()
    assert len(left._products) == 1 and not model[1].weight.main_grad.any()

    kept = weakref.ref(x)
    del x
    gc.collect()
    assert kept() is not None, "the product for the first weight needs it"
    left.compute()
    left.compute()  # once only
    gc.collect()
    assert kept() is None and bool(model[0].weight.main_grad.any())
    mesh.close()
    return True


def test_what_is_put_off_and_what_is_not(ranks: Ranks) -> None:
    assert ranks(1, alone) == [True]


def test_a_failed_backward_ends_it() -> None:
    with pytest.raises(ZeroDivisionError), weights_apart():
        assert left_for_later() is not None
        raise ZeroDivisionError
    assert left_for_later() is None

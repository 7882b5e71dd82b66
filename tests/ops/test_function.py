"""What comes out of our autograd functions may be changed in place, and has no second derivative, which is said where it is asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from pymesh3d.errors import ConfigError
from pymesh3d.mesh import init_mesh
from pymesh3d.ops.rotary import angles, rotary
from pymesh3d.ops.swiglu import swiglu
from pymesh3d.tp.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from pymesh3d.tp.loss import vocab_parallel_cross_entropy

Ranks = Callable[..., list[Any]]
DOUBLE = torch.float64
SECOND = "first derivatives only"


def second_derivatives() -> list[str]:
    """What is said by each op whose gradient is differentiated again, as a gradient penalty does."""
    mesh = init_mesh(tp=-1, dp=1, device="cpu")
    torch.manual_seed(0)
    x = torch.randn(4, 8, dtype=DOUBLE, requires_grad=True)
    part = torch.randn(4, 8 // mesh.tp.size, dtype=DOUBLE, requires_grad=True)
    target = torch.arange(4)
    outputs = {
        "column": lambda: ColumnParallelLinear.from_linear(nn.Linear(8, 8, dtype=DOUBLE), mesh=mesh)(x),
        "gathered": lambda: ColumnParallelLinear.from_linear(nn.Linear(8, 8, dtype=DOUBLE), gather_output=True, mesh=mesh)(x),
        "row": lambda: RowParallelLinear.from_linear(nn.Linear(8, 8, dtype=DOUBLE), mesh=mesh)(part),
        "loss": lambda: vocab_parallel_cross_entropy(part, target, mesh=mesh),
        "swiglu": lambda: swiglu(x),
        "rotary": lambda: rotary(x, angles(4, 2, 100.0, x), 2, 1)[0],
    }
    said = []
    for name, output in outputs.items():
        given = part if name in ("row", "loss") else x
        y = output()
        (grad,) = torch.autograd.grad(y if y.ndim == 0 else y.square().sum(), given, create_graph=True)  # the first one is there
        with pytest.raises(ConfigError, match=SECOND):
            grad.square().sum().backward()
        said.append(name)
    mesh.close()
    return said


@pytest.mark.parametrize("world", [1, 2])
def test_a_second_derivative_is_refused(ranks: Ranks, world: int) -> None:
    assert ranks(world, second_derivatives) == [["column", "gathered", "row", "loss", "swiglu", "rotary"]] * world


def in_place(shape: tuple[int, ...], sequence_parallel: bool) -> list[torch.Tensor]:
    """The same with operations in place and without: outputs, and gradients of the parameters."""
    mesh = init_mesh(tp=-1, dp=1, device="cpu")
    found = []
    for inplace in (False, True):
        torch.manual_seed(0)
        embed, first, second = nn.Embedding(16, 8, dtype=DOUBLE), nn.Linear(8, 12, dtype=DOUBLE), nn.Linear(12, 8, dtype=DOUBLE)
        third = nn.Linear(8, 4, dtype=DOUBLE)
        layers = (
            VocabParallelEmbedding.from_embedding(embed, sequence_parallel=sequence_parallel, mesh=mesh),
            ColumnParallelLinear.from_linear(first, sequence_parallel=sequence_parallel, mesh=mesh),
            RowParallelLinear.from_linear(second, sequence_parallel=sequence_parallel, mesh=mesh),
            ColumnParallelLinear.from_linear(third, gather_output=True, sequence_parallel=sequence_parallel, mesh=mesh),
        )
        ids = torch.arange(torch.Size(shape).numel()).view(shape) % 16
        h = layers[0](ids)
        h = h.add_(1.0) if inplace else h + 1.0
        y = nn.functional.relu(layers[1](h), inplace=inplace)
        y = layers[2](y)
        y = y.mul_(2.0) if inplace else y * 2.0
        y = nn.functional.relu(layers[3](y), inplace=inplace)
        loss = vocab_parallel_cross_entropy(y.chunk(mesh.tp.size, dim=-1)[mesh.tp.rank], ids % 4, reduction="none", mesh=mesh)
        loss = loss.mul_(3.0) if inplace else loss * 3.0
        loss.sum().backward()
        found.append([y.detach(), loss.detach(), *(p.grad for layer in layers for p in layer.parameters() if p.grad is not None)])
    mesh.close()
    assert len(found[0]) == 9
    return [one - other for one, other in zip(*found, strict=True)]


@pytest.mark.parametrize("shape", [(4,), (3, 4)])
@pytest.mark.parametrize(("world", "sequence_parallel"), [(1, False), (2, False), (2, True)])
def test_outputs_may_be_changed_in_place(ranks: Ranks, world: int, sequence_parallel: bool, shape: tuple[int, ...]) -> None:
    for differences in ranks(world, in_place, shape, sequence_parallel):
        assert all(not difference.any() for difference in differences)

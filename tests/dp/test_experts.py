"""Layers of which each rank uses other matrices, as experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from pymesh3d.mesh import init_mesh
from tests.dp.test_gradients import KERNELS, LAYERS, WIDTH, samples, zero_over

Ranks = Callable[..., list[Any]]


class Pair(nn.Module):
    """A layer of two matrices, of which the second is used on demand."""

    def __init__(self) -> None:
        super().__init__()
        self.matrices = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.float64) for _ in range(2))

    def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
        return torch.tanh(self.matrices[0](x) + (self.matrices[1](x) if both else 0.0))


def with_other_matrices(kernels: bool, once: bool) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """What a step of SGD takes off matrices, of which each rank uses others of the same layers; and what one process would."""
    mesh, models = init_mesh(device="cpu", timeout_s=30), []
    for _ in range(2):
        torch.manual_seed(3)
        models.append(nn.ModuleList(Pair() for _ in range(LAYERS)))
    alone, model = models

    def go_backward(layers: nn.ModuleList, rank: int) -> None:
        x = samples(rank, 0)
        for number, layer in enumerate(layers):
            x = layer(x, number == LAYERS - 1 - rank)
        x.square().sum().backward()

    for rank in range(2):
        go_backward(alone, rank)
    zero = zero_over(model, mesh, 3, kernels=kernels, once_a_step=once)
    go_backward(model, mesh.rank)
    zero.step()
    with zero.whole():
        taken = [before.detach() - after.detach() for before, after in zip(alone.parameters(), model.parameters(), strict=True)]
    mesh.close()
    return taken, [torch.zeros_like(p) if p.grad is None else p.grad for p in alone.parameters()]


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("once", [False, True])
def test_ranks_may_use_other_matrices_of_a_layer(ranks: Ranks, kernels: bool, once: bool) -> None:
    """As experts: gradients are complete earlier on one rank and later on another, among what is gathered."""
    for taken, expected in ranks(2, with_other_matrices, kernels, once):
        for number, (one, other) in enumerate(zip(taken, expected, strict=True)):
            assert torch.allclose(one, other, rtol=1e-10, atol=1e-12), f"matrix {number}: {(one - other).abs().max()}"

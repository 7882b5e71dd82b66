"""What our autograd functions have in common."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from pymesh3d.errors import ConfigError

Backward = Callable[..., Any]


def owned(y: torch.Tensor) -> torch.Tensor:
    """`y` as no view: autograd lets nobody change in place the views that a function returns, and `nn.ReLU(inplace=True)` does."""
    return y.detach()


def first_order(backward: Backward) -> Backward:
    """A function's backward that cannot be differentiated again, and says so where somebody tries.

    Torch's `once_differentiable` says it only where the incoming gradient depends on something: the second derivative of a loss, whose
    incoming gradient is 1, would be wrong without a word.
    """

    @functools.wraps(backward)
    def run(ctx: Any, *grads: torch.Tensor) -> Any:
        if not torch.is_grad_enabled():  # it is under create_graph=True
            return backward(ctx, *grads)
        with torch.no_grad():
            found = backward(ctx, *grads)
        return _Last.apply(torch.empty(0, requires_grad=True), *(found if isinstance(found, tuple) else (found,)))

    return run


class _Last(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, *grads: torch.Tensor | None) -> Any:
        return tuple(None if grad is None else grad.detach() for grad in grads)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> None:
        given = "the derivative of a gradient that came through a layer or the loss of pymesh3d"
        raise ConfigError(given, "these have first derivatives only", "Use torch's own layers and loss where you need second ones")

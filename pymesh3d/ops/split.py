"""A backward pass in two: first what others wait for, the gradients of inputs, and when there is time those of weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from pymesh3d.comm.registry import known, register, take

_NAME = "weight gradients of the backward pass that is under way"  # the registry: on GPUs autograd calls from threads of its own


class Weights:
    """What is left of a backward pass: the products for weights, with all that they need."""

    def __init__(self) -> None:
        self._products: list[Callable[[], object]] = []

    def add(self, product: Callable[[], object]) -> None:
        """Leave this for `compute`."""
        self._products.append(product)

    @torch.no_grad()
    def compute(self) -> None:
        """Add all of them to the buffers of their weights, in the order of the backward pass, and let go of what they needed."""
        products, self._products = self._products, []
        while products:
            products.pop(0)()


@contextmanager
def weights_apart() -> Iterator[Weights]:
    """Backward passes within it leave the products for those weights out that are added to a buffer, as in `Zero`."""
    left = Weights()
    register(_NAME, left)
    try:
        yield left
    finally:
        take(_NAME)


def left_for_later() -> Weights | None:
    """Where products for weights are to be added, in a backward pass that is split."""
    left: Weights | None = known(_NAME)
    return left

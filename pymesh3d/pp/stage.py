"""One stage of a pipeline: which modules of a model it keeps, and its microbatches in flight."""

from __future__ import annotations

from collections.abc import Callable, Container
from contextlib import nullcontext

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from pymesh3d.ops.split import Weights, weights_apart

Module = Callable[..., torch.Tensor]
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def keep_layers(model: nn.Module, layers: Container[int], *, first: bool, last: bool) -> None:
    """Remove from the model what other stages run: layers outside `layers`, and `embed`, `norm`, `head` unless at that end.

    The model holds `layers` as an nn.ModuleDict keyed by number, so what stays keeps its full name.
    """
    held = model.get_submodule("layers")
    assert isinstance(held, nn.ModuleDict), "a model to be cut holds its layers in an nn.ModuleDict"
    for key in list(held):
        if int(key) not in layers:
            del held[key]
    if not first:
        model.embed = None  # type: ignore[assignment]
    if not last:
        model.norm = model.head = None  # type: ignore[assignment]


class Stage:
    """Runs forward and backward of microbatches through one stage and keeps what backward needs in between.

    `module(ids, h, masks)` computes the stage (h: of the stage before; masks: of dropout); the last one's output goes through
    `loss(output, targets)`, a sum over tokens that is already divided by what the whole global batch is divided by.
    """

    def __init__(self, module: Module, *, first: bool, last: bool, loss: Loss) -> None:
        self.module, self.first, self.last, self._loss = module, first, last, loss
        self._in_flight: dict[int, tuple[torch.Tensor | None, torch.Tensor | GradientEdge | None]] = {}
        self._left: dict[int, Weights] = {}  # of split backwards

    def forward(
        self, microbatch: int, ids: torch.Tensor, targets: torch.Tensor, h: torch.Tensor | None, masks: object = None, *, train: bool
    ) -> torch.Tensor:
        """The hidden states for the next stage, or the loss on the last."""
        if train and h is not None:
            h.requires_grad_()
        with torch.set_grad_enabled(train):
            output = self.module(ids, h, masks)
            if self.last:
                output = self._loss(output, targets)
        if train:  # the graph's end is enough for backward: the output itself may go once it has been sent
            trained = output.requires_grad  # False on a first stage whose parameters are all frozen
            self._in_flight[microbatch] = (h, output if self.last else get_gradient_edge(output) if trained else None)
        return output.detach()

    def backward(self, microbatch: int, grad: torch.Tensor | None, *, split: bool = False) -> torch.Tensor | None:
        """Back-propagate one microbatch; the gradient for the stage before, None on the first. `split`: `weights` does the rest."""
        h, output = self._in_flight.pop(microbatch)
        if output is not None:
            with weights_apart() if split else nullcontext() as left:
                torch.autograd.backward(output, grad)
            if left is not None:
                self._left[microbatch] = left
        return None if h is None else h.grad

    def weights(self, microbatch: int) -> None:
        """The rest of a backward that was split."""
        left = self._left.pop(microbatch, None)
        if left is not None:  # there is something to train here
            left.compute()

    def forget(self) -> None:
        """Drop what a failed step left behind."""
        self._in_flight.clear()
        self._left.clear()

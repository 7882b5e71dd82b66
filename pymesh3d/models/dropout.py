"""Dropout as a part of a model: its mask depends on the element's place in the global batch, so it is the same in every layout."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

from pymesh3d.ops.dropout import dropout, module_key


class Masks(NamedTuple):
    """Which masks to draw: for the microbatch whose samples are those from `first` on of a global batch of `samples`.

    `p`: the share that is dropped. `counter`: another one is another mask, as `mask_counter` gives it for a step. `position`: the first
    token of each sample that this rank holds (not 0 under sequence parallelism).
    """

    p: float
    seed: int
    counter: int
    first: int
    samples: int
    position: int = 0


class Dropout(nn.Module):
    """Zeroes elements of h [T, D], sequence-major, at random and scales the others up."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name  # in the whole model: it makes the masks of each place its own

    @torch.compiler.disable  # what changes with every microbatch is no constant to compile for
    def forward(self, h: torch.Tensor, batch: int, masks: Masks) -> torch.Tensor:
        """h [T, D] -> [T, D], where T is this rank's part of the sequence times the `batch` samples of the microbatch."""
        width = h.shape[-1]
        key = module_key(masks.seed, self.name)
        rows = h.reshape(-1, batch * width)
        start, size = masks.first * width, masks.samples * width
        return dropout(rows, masks.p, key=key, counter=masks.counter, start=start, size=size, row0=masks.position).view_as(h)

    def extra_repr(self) -> str:
        """For print(module)."""
        return self.name

"""Runs of parameters in flat memory: one layout of buckets, padding and shards that every ZeRO stage uses."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.autograd.graph import Node, get_gradient_edge

from pymesh3d.ops.accumulate import attach_buffer, begun
from pymesh3d.placement import place, placement_of
from pymesh3d.triton_kernels.zero_reduce import TILE

ALIGN = 64  # elements; every parameter starts on a 128-byte boundary in bf16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Slot:
    """One parameter's place in a bucket: elements [start, stop). Hooks of autograd's `node` run when a pass has all of the gradient."""

    parameter: nn.Parameter
    shape: torch.Size
    start: int
    stop: int
    node: Node  # kept, or autograd would forget the hooks; and made while the parameter has its shape

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """Its part of a flat buffer, in its shape."""
        return flat[self.start : self.stop].view(self.shape)


class Bucket:
    """A run of parameters that lie in one flat buffer, their gradients in a second one, each cut into equal shards of whole tiles.

    `weights` (the model's dtype) is what the parameters view; `grads` is what every microbatch adds to, the parameters' `main_grad`: of
    `accumulate`, by default float32, or float64 for a float64 model. `decay` is whether the optimizer's weight decay applies,
    `late` whether their gradients are complete only after the last backward pass, `unit` the module for whose passes alone they are whole.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        *,
        shards: int,
        decay: bool,
        late: bool = False,
        unit: int | None = None,
        accumulate: torch.dtype | None = None,
    ) -> None:
        self.decay, self.late, self.unit, self.shards = decay, late, unit, shards
        self.slots: list[Slot] = []
        end = 0
        for parameter in parameters:
            stop, node = end + parameter.numel(), get_gradient_edge(parameter).node
            self.slots.append(Slot(parameter=parameter, shape=parameter.shape, start=end, stop=stop, node=node))
            end = math.ceil((end + parameter.numel()) / ALIGN) * ALIGN
        self.size = math.ceil(end / (shards * TILE)) * shards * TILE
        self.shard_size = self.size // shards
        like = parameters[0]
        self.dtype, self.device = like.dtype, like.device
        self.master_dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
        self.grad_dtype = accumulate or self.master_dtype
        self.weights, self.grads = (torch.empty(0, dtype=dtype, device=like.device) for dtype in (self.dtype, self.grad_dtype))
        for slot in self.slots:
            attach_buffer(slot.parameter, torch.empty(0, dtype=self.grad_dtype, device=like.device))
        self._versions = [slot.parameter._version for slot in self.slots]  # autograd counts what is written in place

    @torch.no_grad()
    def hold_weights(self, flat: torch.Tensor) -> None:
        """Move the parameters, with their values, into this memory [size]; padding becomes 0."""
        flat.zero_()
        for slot in self.slots:
            slot.of(flat).copy_(slot.parameter)
        self.show_weights(flat)

    def parts(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Of each slot what this memory [size] has of it; of none of it [0] all are empty."""
        return [slot.of(flat) if flat.numel() else flat for slot in self.slots]

    def show_weights(self, flat: torch.Tensor, parts: Sequence[torch.Tensor] | None = None) -> None:
        """Let the parameters be what this memory [size] holds, its `parts`; with none of it [0] they are empty."""
        self.weights = flat
        for slot, part in zip(self.slots, parts or self.parts(flat), strict=True):
            slot.parameter.data = part

    def show_grads(self, flat: torch.Tensor) -> None:
        """Let gradients be added to this memory [size]; with none of it [0] they cannot."""
        self.grads = flat
        for slot, part in zip(self.slots, self.parts(flat), strict=True):
            slot.parameter.main_grad.data = part  # type: ignore[attr-defined]

    def freshen(self) -> None:
        """What is in the memory for gradients has no meaning: the first one of each parameter takes its place. Padding becomes 0."""
        edges = [0, *(edge for slot in self.slots for edge in (slot.start, slot.stop)), self.size]
        gaps = [self.grads[start:stop] for start, stop in zip(edges[::2], edges[1::2], strict=True) if start < stop]
        if gaps:
            torch._foreach_zero_(gaps)
        for slot in self.slots:
            slot.parameter.main_grad.fresh = True  # type: ignore[attr-defined]

    def complete(self) -> None:
        """Parameters that have got no gradient get one of 0."""
        for slot in self.slots:
            if not begun(slot.parameter.main_grad):  # type: ignore[attr-defined]
                slot.of(self.grads).zero_()

    def written(self) -> list[Slot]:
        """Slots whose parameter was written to in place since the last call."""
        found = [slot for slot, version in zip(self.slots, self._versions, strict=True) if slot.parameter._version != version]
        self._versions = [slot.parameter._version for slot in self.slots]
        return found

    def left(self) -> list[Slot]:
        """Slots whose parameter lies in other memory now, as after `module.to(...)`."""
        if not self.weights.numel():
            return [slot for slot in self.slots if slot.parameter.numel()]
        first, size = self.weights.data_ptr(), self.weights.element_size()
        return [slot for slot in self.slots if slot.stop > slot.start and slot.parameter.data_ptr() != first + slot.start * size]

    def shard(self, flat: torch.Tensor, rank: int) -> torch.Tensor:
        """The part of a flat buffer that `rank` owns."""
        return flat[rank * self.shard_size : (rank + 1) * self.shard_size]

    def counted(self, tp_rank: int, stage: int, shard: int) -> list[tuple[int, int]]:
        """Ranges of one shard, relative to its start, that this rank contributes to a norm (see Placement.counted)."""
        low, high = shard * self.shard_size, (shard + 1) * self.shard_size
        found: list[tuple[int, int]] = []
        for slot in self.slots:
            for start, stop in placement_of(slot.parameter).counted(tp_rank, stage):
                start, stop = max(slot.start + start, low) - low, min(slot.start + stop, high) - low
                if start >= stop:
                    continue
                if found and start - found[-1][1] < ALIGN and self.only_padding(low + found[-1][1], low + start):
                    found[-1] = (found[-1][0], stop)
                else:
                    found.append((start, stop))
        return found

    def counted_whole(self, tp_rank: int, stage: int) -> bool:
        """Whether this rank contributes all of its shard to a norm, whichever that is."""

        def numbers(slot: Slot) -> int:
            return sum(stop - start for start, stop in placement_of(slot.parameter).counted(tp_rank, stage))

        return all(numbers(slot) == slot.stop - slot.start for slot in self.slots)

    def only_padding(self, start: int, stop: int) -> bool:
        """Whether no parameter has any of these elements."""
        return not any(slot.start < stop and slot.stop > start for slot in self.slots)


def make_buckets(
    parameters: Sequence[nn.Parameter],
    *,
    shards: int,
    elements: int,
    decays: Callable[[nn.Parameter], bool],
    unit: Callable[[nn.Parameter], int | None] = lambda _: None,
    accumulate: torch.dtype | None = None,
) -> list[Bucket]:
    """Sort parameters into buckets of about `elements` elements: alike in weight decay and unit, and replicated ones by themselves.

    Keeping replicated parameters apart makes the ranges that a norm counts long; keeping those apart whose gradients other ranks of the
    stage or the tp axis have to add to lets the others be reduced during backward.
    """
    kinds: dict[tuple[bool, bool, bool, int | None, torch.dtype], list[list[nn.Parameter]]] = {}
    for parameter in parameters:
        placement = placement_of(parameter)
        late = placement.has_summands or parameter.ndim < 2  # norms are small, and stand in all layers
        key = decays(parameter), placement.replicated, late, unit(parameter), parameter.dtype
        runs = kinds.setdefault(key, [[]])
        if runs[-1] and sum(p.numel() for p in runs[-1]) + parameter.numel() > elements:
            runs.append([])
        runs[-1].append(parameter)
    buckets = [
        Bucket(run, shards=shards, decay=decay, late=late, unit=of, accumulate=accumulate)
        for (decay, _, late, of, _), runs in kinds.items()
        for run in runs
    ]
    order = {id(parameter): number for number, parameter in enumerate(parameters)}
    buckets.sort(key=lambda bucket: order[id(bucket.slots[0].parameter)])  # backward passes complete them from the last to the first
    for number, bucket in enumerate(buckets):
        for slot in bucket.slots:
            place(slot.parameter, dataclasses.replace(placement_of(slot.parameter), zero=(number, slot.start)))
    return buckets

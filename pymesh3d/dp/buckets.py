"""Flat buffers behind the parameters: one layout of buckets, padding and shards that every ZeRO stage uses."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn

from pymesh3d.ops.accumulate import attach_buffer
from pymesh3d.placement import place, placement_of

ALIGN = 64  # elements; every parameter starts on a 128-byte boundary in bf16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Slot:
    """One parameter's place in a bucket: elements [start, stop)."""

    parameter: nn.Parameter
    start: int
    stop: int


class Bucket:
    """A run of parameters in one flat buffer, their gradients in a second one, each cut into equal shards.

    `weights` (the model's dtype) is what the parameters view; `grads` (float32, or float64 for a float64 model) is what
    every microbatch adds to; `shard(x)` is one rank's part of either.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], *, shards: int, decay: bool) -> None:
        self.decay = decay
        self.shards = shards
        self.slots: list[Slot] = []
        end = 0
        for parameter in parameters:
            self.slots.append(Slot(parameter=parameter, start=end, stop=end + parameter.numel()))
            end = math.ceil((end + parameter.numel()) / ALIGN) * ALIGN
        size = math.ceil(end / (shards * ALIGN)) * shards * ALIGN
        like = parameters[0]
        self.weights = torch.zeros(size, dtype=like.dtype, device=like.device)
        self.grads = torch.zeros(size, dtype=torch.float64 if like.dtype == torch.float64 else torch.float32, device=like.device)
        with torch.no_grad():
            for slot in self.slots:
                view = self.weights[slot.start : slot.stop].view_as(slot.parameter)
                view.copy_(slot.parameter)
                slot.parameter.data = view
                attach_buffer(slot.parameter, self.grads[slot.start : slot.stop].view_as(slot.parameter))
        self._versions = [slot.parameter._version for slot in self.slots]  # autograd counts what is written in place

    def written(self) -> list[Slot]:
        """Slots whose parameter was written to in place since the last call."""
        found = [slot for slot, version in zip(self.slots, self._versions, strict=True) if slot.parameter._version != version]
        self._versions = [slot.parameter._version for slot in self.slots]
        return found

    def left(self) -> list[Slot]:
        """Slots whose parameter lies in other memory now, as after `module.to(...)`."""
        first, size = self.weights.data_ptr(), self.weights.element_size()
        return [slot for slot in self.slots if slot.stop > slot.start and slot.parameter.data_ptr() != first + slot.start * size]

    def shard(self, flat: torch.Tensor, rank: int) -> torch.Tensor:
        """The part of a flat buffer that `rank` owns."""
        return flat.chunk(self.shards)[rank]

    def counted(self, tp_rank: int, stage: int, shard: int) -> list[tuple[int, int]]:
        """Ranges of one shard, relative to its start, that this rank contributes to a norm (see Placement.counted)."""
        size = self.weights.numel() // self.shards
        low, high = shard * size, (shard + 1) * size
        found: list[tuple[int, int]] = []
        for slot in self.slots:
            for start, stop in placement_of(slot.parameter).counted(tp_rank, stage):
                start, stop = max(slot.start + start, low) - low, min(slot.start + stop, high) - low
                if start >= stop:
                    continue
                if found and start - found[-1][1] < ALIGN and self._only_padding(low + found[-1][1], low + start):
                    found[-1] = (found[-1][0], stop)
                else:
                    found.append((start, stop))
        return found

    def _only_padding(self, start: int, stop: int) -> bool:
        return not any(slot.start < stop and slot.stop > start for slot in self.slots)


def make_buckets(parameters: Iterable[nn.Parameter], *, shards: int, elements: int, decays: Callable[[nn.Parameter], bool]) -> list[Bucket]:
    """Sort parameters into buckets of about `elements` elements: alike in weight decay, and replicated ones by themselves.

    Keeping replicated parameters apart makes the ranges that a norm counts long.
    """
    kinds: dict[tuple[bool, bool, torch.dtype], list[list[nn.Parameter]]] = {}
    for parameter in parameters:
        runs = kinds.setdefault((decays(parameter), placement_of(parameter).replicated, parameter.dtype), [[]])
        if runs[-1] and sum(p.numel() for p in runs[-1]) + parameter.numel() > elements:
            runs.append([])
        runs[-1].append(parameter)
    buckets = [Bucket(run, shards=shards, decay=kind[0]) for kind, runs in kinds.items() for run in runs]
    for number, bucket in enumerate(buckets):
        for slot in bucket.slots:
            place(slot.parameter, dataclasses.replace(placement_of(slot.parameter), zero=(number, slot.start)))
    return buckets

"""Master weights and optimizer state in the CPU's memory, as in ZeRO-Offload (Ren et al. 2021); but the GPU computes the steps.

Pieces come and go in turn through two slots of GPU memory, each with a stream of its own: what is in a slot comes, is updated and goes back
in order, while the other slot's piece goes the other way. Links are full duplex, so a step takes as long as all of it takes in one way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from pymesh3d.axis import Axis
from pymesh3d.comm.watch import wait_for_gpu
from pymesh3d.dp.masters import Masters, Optimizer, Part
from pymesh3d.dp.rules import is_known
from pymesh3d.errors import ConfigError
from pymesh3d.triton_kernels.zero_reduce import TILE
from pymesh3d.triton_kernels.zero_step import SGD, AdamW, update

PIECE = 16 * 2**20  # numbers of a slot, whole tiles: of AdamW both slots take 384 MiB during a step
REMEMBERED = {AdamW: ("exp_avg", "exp_avg_sq"), SGD: ("momentum_buffer",)}  # torch's names, in the order of the rules


class Piece(NamedTuple):
    """What is on the GPU at once: `span` of part number `number`, which begins at `addresses` on the part's ranks."""

    number: int
    span: slice
    addresses: torch.Tensor


class OffloadedMasters(Masters):
    """`values` and the optimizer's state are in pinned memory of the CPU, and hold what they should after `confirm`, or without kernels
    after `update`. The steps give the same bits as on the GPU. On the CPU the same is done in its memory."""

    def __init__(
        self, parts: Sequence[Part], optimizer: Optimizer, weight_decay: float, *, axis: Axis, kernels: bool, remainders: bool = False
    ) -> None:
        """The host waits for copies as long as `axis` lets it. Raises ConfigError."""
        if remainders:
            rule = "remainders are of the parameters, on the GPU"
            raise ConfigError("offload=True, param_remainders=True", rule, "Use param_remainders=False")
        super().__init__(parts, optimizer, weight_decay, kernels=kernels)
        self._require_known()
        self._axis, self._device = axis, parts[0].weights.device
        self._streams = [torch.cuda.Stream(self._device) for _ in range(2)] if self._device.type == "cuda" else []
        self._pieces = [piece for number, part in enumerate(parts) for piece in _pieces(number, part)]

    @staticmethod
    def _made_of(weights: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(weights.shape, dtype=dtype, device="cpu", pin_memory=weights.is_cuda).copy_(weights)

    def confirm(self, taken: bool) -> None:
        """Whether the step was taken; afterwards the host may read masters and state."""
        for stream in self._streams:
            with torch.cuda.stream(stream):
                wait_for_gpu("copying optimizer state to the CPU", self._axis)
        super().confirm(taken)

    @property
    def can_sum(self) -> bool:
        """Not in pieces."""
        return False

    def _update_by_kernels(self, grads: Sequence[Any], scale: torch.Tensor) -> None:
        def work(piece: Piece, rule: AdamW | SGD, master: torch.Tensor, *remembered: torch.Tensor) -> None:
            part = self._parts[piece.number]
            update(
                rule,
                master,
                remembered,
                piece.addresses,
                part.weights.dtype,
                scale,
                shard=0,
                rank=part.rank,
                push=piece.addresses.numel() > 1,
                grads=grads[piece.number][piece.span],
            )

        self._stream(work)

    def _update_by_torch(self, grads: Sequence[torch.Tensor]) -> None:
        kind: Any = type(self.optimizer)
        groups = {value: group for group in self.optimizer.param_groups for value in group["params"]}

        def work(piece: Piece, rule: AdamW | SGD, master: torch.Tensor, *remembered: torch.Tensor) -> None:
            """By an optimizer of the same kind, which rounds as torch does, over this piece alone."""
            value, names = self.values[piece.number], REMEMBERED[type(rule)][: len(remembered)]
            here = nn.Parameter(master)
            here.grad = grads[piece.number][piece.span].to(here.dtype)
            twin = kind([{**groups[value], "params": [here]}])
            if isinstance(rule, AdamW):
                count = self.optimizer.state[value]["step"]
                twin.state[here]["step"] = count.to(here.device if groups[value]["fused"] else "cpu", copy=True)
            if isinstance(rule, AdamW) or not rule.first:  # else torch makes the momentum of the gradient
                twin.state[here].update(zip(names, remembered, strict=True))
            twin.step()
            for name, kept in zip(names, remembered, strict=True):
                kept.copy_(twin.state[here][name])
            self._parts[piece.number].weights[piece.span].copy_(master)

        self._stream(work)
        self.confirm(True)

    def _stream(self, work: Callable[..., None]) -> None:
        """Do `work(piece, rule, master, *remembered)` with each piece, on copies on the GPU, and bring back what has become of them."""
        rules, kept = self._next()
        longest = max(piece.span.stop - piece.span.start for piece in self._pieces)
        slots = torch.empty((2, max(map(len, kept)), longest), device=self._device)
        for stream in self._streams:
            stream.wait_stream(torch.cuda.current_stream(self._device))
        for turn, piece in enumerate(self._pieces):
            there = [tensor[piece.span] for tensor in kept[piece.number]]
            with torch.cuda.stream(self._streams[turn % 2] if self._streams else None):
                here = [slot[: tensor.numel()] for slot, tensor in zip(slots[turn % 2], there, strict=False)]
                for slot, tensor in zip(here, there, strict=True):
                    slot.copy_(tensor, non_blocking=True)
                work(piece, rules[piece.number], *here)
                for slot, tensor in zip(here, there, strict=True):
                    tensor.copy_(slot, non_blocking=True)
        for stream in self._streams:  # before anything takes the place of slots and gradients
            torch.cuda.current_stream(self._device).wait_stream(stream)

    def _next(self) -> tuple[list[AdamW | SGD], list[list[torch.Tensor]]]:
        """Of each part the numbers of its next step, and its master and what is remembered, pinned whoever made it."""
        self._require_known()
        following = self._steps.next()
        kept = []
        for value in self.values:
            rule, remembered = following[value]
            state = self.optimizer.state[value]
            names = REMEMBERED[type(rule)][: len(remembered)]
            if self._device.type == "cuda":
                state.update({name: state[name].pin_memory() for name in names if not state[name].is_pinned()})
            kept.append([value.detach(), *(state[name] for name in names)])
        return [following[value][0] for value in self.values], kept

    def _require_known(self) -> None:
        if not is_known(self.optimizer, 1):
            given = f"offload=True with a {type(self.optimizer).__name__} of {self.values[0].dtype} masters"
            rule = "only steps of torch's own AdamW, Adam and SGD, without amsgrad, hooks and such, on float32, are taken in pieces"
            raise ConfigError(given, rule, "Use offload=False")


def _pieces(number: int, part: Part) -> list[Piece]:
    """Part number `number`, cut."""
    assert PIECE % TILE == 0, f"pieces of {PIECE} numbers"
    size = part.weights.numel()
    spans = [slice(start, min(start + PIECE, size)) for start in range(0, size, PIECE)]
    first, width = part.shard * size, part.weights.itemsize
    return [Piece(number, span, part.addresses + (first + span.start) * width) for span in spans]

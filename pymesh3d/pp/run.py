"""The interpreter of a schedule: the one place where a stage computes, sends and receives."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from pymesh3d.comm.p2p import Channel, Channels
from pymesh3d.pp.stage import Stage
from pymesh3d.schedule.actions import Action


@dataclasses.dataclass(frozen=True, eq=False)
class Microbatch:
    """What every stage knows of one microbatch: token ids [b, S], targets [b, S], and the shape and dtype of its hidden states."""

    ids: torch.Tensor
    targets: torch.Tensor
    hidden: tuple[int, ...]
    dtype: torch.dtype


def run(
    actions: Sequence[Action], stage: Stage, channels: Channels, microbatches: Sequence[Microbatch], *, train: bool = True
) -> torch.Tensor:
    """Carry out one rank's actions. Returns the sum of its losses, float64 [] (0 where this is not the last stage)."""
    device = microbatches[0].ids.device
    loss = torch.zeros((), dtype=torch.float64, device=device)
    ready: dict[str, torch.Tensor | None] = {}  # what F and B made, until it is sent
    try:
        for action in actions:
            number = action.microbatch
            batch = microbatches[number]
            match action.kind:
                case "RF":
                    _open(channels.activations_in).post(batch.hidden, batch.dtype, device, number)
                case "RB":
                    _open(channels.gradients_in).post(batch.hidden, batch.dtype, device, number)
                case "F":
                    h = None if stage.first else _open(channels.activations_in).take()
                    output = stage.forward(number, batch.ids, batch.targets, h, train=train)
                    if stage.last:
                        loss += output
                    else:
                        ready[f"SF{number}"] = output
                case "B":
                    grad = None if stage.last else _open(channels.gradients_in).take()
                    ready[f"SB{number}"] = stage.backward(number, grad)
                case "SF":
                    _open(channels.activations_out).send(_made(ready.pop(f"SF{number}")), number)
                case "SB":
                    _open(channels.gradients_out).send(_made(ready.pop(f"SB{number}")), number)
                case _:
                    raise AssertionError(f"no rule to run {action}")
        channels.flush()
    finally:
        stage.forget()
    return loss


def _open(channel: Channel | None) -> Channel:
    assert channel is not None, "the schedule sends where the pipeline ends"
    return channel


def _made(tensor: torch.Tensor | None) -> torch.Tensor:
    assert tensor is not None, "the schedule sends a gradient that the stage does not have"
    return tensor

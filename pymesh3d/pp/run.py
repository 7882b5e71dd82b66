"""The interpreter of a schedule: the one place where a stage computes, sends and receives."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from pymesh3d.comm.links import Expected, Link
from pymesh3d.comm.p2p import Links
from pymesh3d.pp.stage import Stage
from pymesh3d.schedule.actions import RECEIVES, SENDS, Action


@dataclasses.dataclass(frozen=True, eq=False)
class Microbatch:
    """What every stage knows of one microbatch: token ids [b, S], targets [b, S], its hidden states, which stages exchange, and what
    dropout drops, if anything."""

    ids: torch.Tensor
    targets: torch.Tensor
    hidden: Expected
    masks: object = None


def run(
    steps: Sequence[Sequence[Action]],
    stages: Mapping[int, Stage],
    links: Links,
    microbatches: Sequence[Microbatch],
    *,
    train: bool = True,
    last_pass: Callable[[int], AbstractContextManager[None]] = lambda _: nullcontext(),
) -> torch.Tensor:
    """Carry out one rank's steps on the stages that it holds. Returns the sum of its losses, float64 [] (0 without the last stage).

    `last_pass(stage)` is around what completes the gradients of a stage.

    Raises DistributedError where a run has failed before, whatever the reason: its messages would be taken for this one's.
    """
    links.mesh.require_in_step()
    device = microbatches[0].ids.device
    loss = torch.zeros((), dtype=torch.float64, device=device)
    made: dict[Action, torch.Tensor | None] = {}  # by F and B, until it is sent
    split = {action.stage for action, *_ in steps if action.kind == "W"}  # stages whose backwards are taken in two
    completes = {action.stage: action for action, *_ in steps if action.kind in ("B", "W")}  # the last of each stage
    links_of = {"RF": links.before, "SB": links.before, "SF": links.after, "RB": links.after}
    try:
        for action, *others in steps:
            number, stage = action.microbatch, stages[action.stage]
            batch = microbatches[number]
            match action.kind:
                case "F":
                    h = None if stage.first else _open(links.before).take()
                    output = stage.forward(number, batch.ids, batch.targets, h, batch.masks, train=train)
                    if stage.last:
                        loss += output
                    else:
                        made[Action("SF", number, action.stage)] = output
                case "B":
                    grad = None if stage.last else _open(links.after).take()
                    with last_pass(action.stage) if action == completes[action.stage] else nullcontext():
                        made[Action("SB", number, action.stage)] = stage.backward(number, grad, split=action.stage in split)
                case "W":
                    with last_pass(action.stage) if action == completes[action.stage] else nullcontext():
                        stage.weights(number)
                case "RF" | "RB" | "SF" | "SB":
                    _transfer(_open(links_of[action.kind]), (action, *others), made, microbatches)
                case _:
                    raise AssertionError(f"no rule to run {action}")
        links.flush()
    except BaseException as error:
        links.mesh.fail(error)
        raise
    finally:
        for stage in stages.values():
            stage.forget()
    return loss


def _transfer(link: Link, messages: Sequence[Action], made: dict[Action, torch.Tensor | None], microbatches: Sequence[Microbatch]) -> None:
    """Begin a send, a receive, or both at once."""
    received = [microbatches[message.microbatch].hidden for message in messages if message.kind in RECEIVES]
    sent = [message for message in messages if message.kind in SENDS]
    if not sent:
        link.post(*received)
        return
    (message,) = sent
    tensor = made.pop(message)
    assert tensor is not None, "the schedule sends a gradient that the stage does not have"
    link.send(tensor, message.microbatch, *received)


def _open(link: Link | None) -> Link:
    assert link is not None, "the schedule sends where the pipeline ends"
    return link

"""Puts sends and receives between the forwards and backwards of a schedule."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Literal, cast

from pymesh3d.schedule.actions import SENDS, Action, Kind, Schedule
from pymesh3d.schedule.simulate import MAX_RECEIVES, Timeline, simulate


def with_messages(name: str, orders: Sequence[Sequence[Action]], microbatches: int, virtual: int = 1) -> Schedule:
    """The schedule of these forwards and backwards of each rank, every send right behind what produces it, receives ahead of their need.

    A receive stands as early as the open receives of its link allow, but behind those sends of its own rank that use the link before it:
    in the order in which messages cross on paper, where a backward takes as long as two forwards. With that, both ends of a link name all
    its messages, of both directions, in one and the same order. So they can even share one queue that does nothing out of turn, as the
    traffic of two GPUs in one NCCL communicator does.
    """
    bare = Schedule(name=name, pp=len(orders), microbatches=microbatches, virtual=virtual, ranks=tuple(map(tuple, orders)))
    return _placed(bare, _sends_ahead(simulate(_placed(bare, {}))))


def _sends_ahead(timeline: Timeline) -> dict[Action, Action]:
    """For each receive the last send of its own rank that uses the same link before it; a first one has none."""
    schedule = timeline.schedule
    crossings = [(span.end, span.action.stage, span.action) for spans in timeline.ranks for span in spans if span.action.kind in SENDS]
    ahead: dict[Action, Action] = {}
    last: dict[tuple[int, int], Action] = {}  # (link, rank) -> its latest send
    for _, _, send in sorted(crossings, key=lambda crossing: crossing[:2]):
        link, receive = schedule.link_of(send), send.counterpart
        if earlier := last.get((link, schedule.rank_of(receive.stage))):
            ahead[receive] = earlier
        last[link, schedule.rank_of(send.stage)] = send
    return ahead


def _placed(bare: Schedule, ahead: Mapping[Action, Action]) -> Schedule:
    return dataclasses.replace(bare, ranks=tuple(_rank_with_messages(bare, order, ahead) for order in bare.ranks))


def _rank_with_messages(bare: Schedule, order: Sequence[Action], ahead: Mapping[Action, Action]) -> tuple[Action, ...]:
    """`order` with its sends and receives, each receive behind the send that `ahead` has for it."""
    position = {action: n for n, action in enumerate(order)}
    placed = [(n, 0, n, action) for n, action in enumerate(order)]  # behind which action, in which turn, for which action
    for kind in ("F", "B"):  # the receives of a rank for forwards use one link, those for backwards another
        consumers = [action for action in order if action.kind == kind and _crosses(bare, _message("R", action))]
        for n, consumer in enumerate(consumers):
            receive = _message("R", consumer)
            room = position[consumers[n - MAX_RECEIVES]] if n >= MAX_RECEIVES else -1
            turn = position[_source(ahead[receive])] if receive in ahead else -1
            placed.append((max(room, turn), 2, position[consumer], receive))
    for n, producer in enumerate(order):
        if _crosses(bare, send := _message("S", producer)):
            placed.append((n, 1, n, send))
    return tuple(action for *_, action in sorted(placed, key=lambda entry: entry[:3]))


def _message(end: Literal["S", "R"], action: Action) -> Action:
    """The send of what a forward or backward makes, or the receive of what it takes."""
    return Action(cast(Kind, end + action.kind), action.microbatch, action.stage)


def _source(send: Action) -> Action:
    """The forward or backward that makes what is sent."""
    return Action(cast(Kind, send.kind[1:]), send.microbatch, send.stage)


def _crosses(schedule: Schedule, message: Action) -> bool:
    """Whether there is another rank at the other end."""
    return schedule.pp > 1 and 0 <= message.peer_stage < schedule.stages

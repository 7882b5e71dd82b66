"""Puts sends and receives between the forwards and backwards of a schedule."""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Literal, cast

from pymesh3d.schedule.actions import Action, Kind, Schedule
from pymesh3d.schedule.simulate import MAX_RECEIVES, WORK, Timeline, simulate


def with_messages(name: str, orders: Sequence[Sequence[Action]], microbatches: int, virtual: int = 1) -> Schedule:
    """The schedule of these forwards and backwards of each rank, with their messages.

    A send stands behind what makes it; its receive where the other rank next begins to compute, on paper, where a backward takes as long as
    two forwards. So the schedule passes `check_links`: there whatever waits for another rank waits for something that begins earlier on
    paper, never in a circle. Between two computations messages stand in the order in which they are sent. With that, both ends of a link
    name all its messages, of both directions, in one and the same order.

    Interleaved schedules of 7 ranks and more have messages that are made long before they are needed. More than `MAX_RECEIVES` are not
    received at a time; the rest stay where they were made. That those schedules pass too is not proved, but tried (tests/schedule).
    """
    bare = Schedule(name=name, pp=len(orders), microbatches=microbatches, virtual=virtual, ranks=tuple(map(tuple, orders)))
    return _placed(bare, _in_time(simulate(_placed(bare, _at_need(bare)))))


_Turn = tuple[int, float, int]  # before which computation of its rank a message stands; among those: when it is sent, and by which stage


def _at_need(bare: Schedule) -> dict[Action, _Turn]:
    """Each receive right before what needs it."""
    turns = {}
    for order in bare.ranks:
        for n, action in enumerate(order):
            if action.kind not in WORK:
                continue
            turns[_message("S", action)] = n + 1, 0.0, action.stage
            turns[_message("R", action)] = n, 0.0, action.stage
    return turns


def _in_time(timeline: Timeline) -> dict[Action, _Turn]:
    """Each receive before the first computation that starts when the message is there, or later; but few are open at a time."""
    schedule = timeline.schedule
    computes = [timeline.compute(rank) for rank in range(schedule.pp)]
    starts = [[span.start for span in spans] for spans in computes]
    made = [
        (span.end, span.action.stage, n + 1, _message("S", span.action))
        for spans in computes
        for n, span in enumerate(spans)
        if span.action.kind in WORK
    ]
    turn_of = {span.action: n for spans in computes for n, span in enumerate(spans)}
    turns: dict[Action, _Turn] = {}
    consumed: dict[tuple[Kind, int], list[int]] = defaultdict(list)  # (kind, rank) of receives -> in which turn each message is consumed
    for end, stage, turn, send in sorted(made, key=lambda entry: entry[:2]):
        if _crosses(schedule, send):
            turns[send] = turn, end, stage
            receive, rank = send.counterpart, schedule.rank_of(send.peer_stage)
            earlier = consumed[receive.kind, rank]
            room = earlier[-MAX_RECEIVES] + 1 if len(earlier) >= MAX_RECEIVES else 0
            turns[receive] = max(bisect.bisect_left(starts[rank], end), room), end, stage
            earlier.append(turn_of[Action(cast(Kind, receive.kind[1:]), receive.microbatch, receive.stage)])
    return turns


def _placed(bare: Schedule, turns: Mapping[Action, _Turn]) -> Schedule:
    ranks = []
    for order in bare.ranks:
        entries = [((n, math.inf, 0), action) for n, action in enumerate(order)]
        messages = [_message(end, action) for action in order for end in ("S", "R") if action.kind in WORK]
        entries += [(turns[message], message) for message in messages if _crosses(bare, message)]
        ranks.append(tuple(action for _, action in sorted(entries, key=lambda entry: entry[0])))
    return dataclasses.replace(bare, ranks=tuple(ranks))


def _message(end: Literal["S", "R"], action: Action) -> Action:
    """The send of what a forward or backward makes, or the receive of what it takes."""
    return Action(cast(Kind, end + action.kind), action.microbatch, action.stage)


def _crosses(schedule: Schedule, message: Action) -> bool:
    """Whether there is another rank at the other end."""
    return schedule.pp > 1 and 0 <= message.peer_stage < schedule.stages

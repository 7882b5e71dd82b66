"""The schedules: in which order each stage runs its forwards and backwards, and where sends and receives stand between them.

4 stages (one a line), 4 microbatches, time to the right, a backward as long as two forwards:

    gpipe   F0F1F2F3                  B0==B1==B2==B3==      all forwards, then all backwards: every microbatch in flight
              F0F1F2F3            B0==B1==B2==B3==
                F0F1F2F3      B0==B1==B2==B3==
                  F0F1F2F3B0==B1==B2==B3==

    1f1b    F0F1F2F3            B0==  B1==  B2==  B3==      at most pp - stage microbatches in flight
              F0F1F2        B0==F3B1==  B2==  B3==
                F0F1    B0==F2B1==F3B2==  B3==
                  F0B0==F1B1==F2B2==F3B3==

Both take the same time. In both, backward takes the microbatches in the same order, so gradients are summed in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pymesh3d.config import require_positive
from pymesh3d.errors import ConfigError
from pymesh3d.schedule.actions import Action, Schedule


def gpipe(pp: int, microbatches: int) -> Schedule:
    """All forwards, then all backwards. Every microbatch is in flight on every stage."""
    _require(pp, microbatches)
    orders = [[_forward(m, stage) for m in range(microbatches)] + [_backward(m, stage) for m in range(microbatches)] for stage in range(pp)]
    return _schedule("gpipe", microbatches, orders)


def one_f_one_b(pp: int, microbatches: int) -> Schedule:
    """As few forwards as fill the stages behind, then one forward and one backward in turn, then the backwards that are left.

    At most min(microbatches, pp - stage) microbatches are in flight on a stage.
    """
    _require(pp, microbatches)
    orders = []
    for stage in range(pp):
        ahead = min(microbatches, pp - 1 - stage)
        order = [_forward(m, stage) for m in range(ahead)]
        for m in range(ahead, microbatches):
            order += [_forward(m, stage), _backward(m - ahead, stage)]
        order += [_backward(m, stage) for m in range(microbatches - ahead, microbatches)]
        orders.append(order)
    return _schedule("1f1b", microbatches, orders)


SCHEDULES: dict[str, Callable[[int, int], Schedule]] = {"gpipe": gpipe, "1f1b": one_f_one_b}


def build(name: str, pp: int, microbatches: int) -> Schedule:
    """The schedule called `name`. Raises ConfigError for an unknown name and for sizes below 1."""
    if name not in SCHEDULES:
        raise ConfigError(f"schedule {name!r}", "there is no schedule of that name", f"Use one of {', '.join(SCHEDULES)}")
    return SCHEDULES[name](pp, microbatches)


def _schedule(name: str, microbatches: int, orders: Sequence[Sequence[Action]]) -> Schedule:
    """A schedule of one stage a rank from the order of forwards and backwards of each."""
    ranks = tuple(_with_communication(order, stage, len(orders) - 1, microbatches) for stage, order in enumerate(orders))
    return Schedule(name=name, pp=len(orders), microbatches=microbatches, ranks=ranks)


def _with_communication(order: Sequence[Action], stage: int, last: int, microbatches: int) -> tuple[Action, ...]:
    """`order` with every send right behind what produces it and every receive one microbatch ahead of what consumes it.

    One exception: while forwards and backwards alternate, a gradient's receive stands behind the forward, right before its backward.
    With that, both ends of a link name all its messages, of both directions, in one and the same order (in which the earlier stage
    computes). So they can even share one queue that does nothing out of turn, as the traffic of two GPUs in one NCCL communicator does.
    At most 2 receives from the same rank are open.
    """
    actions: list[Action] = []
    for n, action in enumerate(order):
        m = action.microbatch
        if action.kind == "F" and stage > 0:
            if m == 0:
                actions.append(Action("RF", 0, stage))
            if m + 1 < microbatches:
                actions.append(Action("RF", m + 1, stage))
        if action.kind == "B" and stage < last:
            if order[n - 1].kind == "F":
                actions.append(Action("RB", m, stage))
            if n + 1 < len(order) and order[n + 1].kind == "B":
                actions.append(Action("RB", m + 1, stage))
        actions.append(action)
        if action.kind == "F" and stage < last:
            actions.append(Action("SF", m, stage))
        if action.kind == "B" and stage > 0:
            actions.append(Action("SB", m, stage))
    return tuple(actions)


def _forward(microbatch: int, stage: int) -> Action:
    return Action("F", microbatch, stage)


def _backward(microbatch: int, stage: int) -> Action:
    return Action("B", microbatch, stage)


def _require(pp: int, microbatches: int) -> None:
    require_positive("pp", pp)
    require_positive("microbatches", microbatches)

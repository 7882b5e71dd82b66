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

    interleaved  F0aF1aF2aF3aF0bF1bF2bF3b                  B0b===   B1b===   B2b===   B3b===B0a===B1a===B2a===B3a===
                    F0aF1aF2aF3aF0bF1bF2bF3b         B0b===   B1b===   B2b===   B3b===B0a===B1a===B2a===B3a===
                       F0aF1aF2aF3aF0bF1bF2b   B0b===F3bB1b===   B2b===   B3b===B0a===B1a===B2a===B3a===
                          F0aF1aF2aF3aF0bB0b===F1bB1b===F2bB2b===F3bB3b===B0a===B1a===B2a===B3a===

    zb-h1   F0F1F2F3      B0W0B1W1B2W2B3W3              1f1b with backwards in two: gradients of inputs go on at once,
              F0F1F2    B0F3B1W0B2W1B3W2W3              those of weights (W) come when there is time
                F0F1  B0F2B1F3B2W0B3W1W2W3
                  F0B0F1B1F2B2F3B3W0W1W2W3

gpipe and 1f1b take the same time; interleaved, here with 2 stages a rank (a, b) of half the length, idles half as long. In all of them
the backwards of a stage take the microbatches in the same order, so gradients are summed in the same order.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from pymesh3d.config import require_positive
from pymesh3d.errors import ConfigError
from pymesh3d.schedule.actions import COMPUTE, Action, Schedule
from pymesh3d.schedule.messages import with_messages
from pymesh3d.schedule.simulate import WORK


def gpipe(pp: int, microbatches: int) -> Schedule:
    """All forwards, then all backwards. Every microbatch is in flight on every stage."""
    _require(pp, microbatches)
    orders = [[Action(kind, m, stage) for kind in WORK for m in range(microbatches)] for stage in range(pp)]
    return with_messages("gpipe", orders, microbatches)


def one_f_one_b(pp: int, microbatches: int) -> Schedule:
    """As few forwards as fill the stages behind, then one forward and one backward in turn, then the backwards that are left.

    At most min(microbatches, pp - stage) microbatches are in flight on a stage.
    """
    _require(pp, microbatches)
    orders = []
    for stage in range(pp):
        forwards, backwards = ([Action(kind, m, stage) for m in range(microbatches)] for kind in WORK)
        orders.append(_in_turn(forwards, backwards, pp - 1 - stage))
    return with_messages("1f1b", orders, microbatches)


def interleaved_1f1b(pp: int, microbatches: int, virtual: int) -> Schedule:
    """1F1B with `virtual` stages a rank: pp microbatches go through the first stage of a rank, then through its second, and so on.

    A rank runs (pp - 1 - rank) * 2 + (virtual - 1) * pp forwards ahead and never has more than one more in flight. Where pp does not
    divide `microbatches`, the order is that of the next multiple of pp without those that are not there. With virtual=1 this is 1f1b.
    """
    _require(pp, microbatches)
    require_positive("virtual", virtual)
    groups = [range(first, first + pp) for first in range(0, microbatches, pp)]
    orders = []
    for rank in range(pp):
        stages = range(rank, pp * virtual, pp)
        forwards = [Action("F", m, stage) for group in groups for stage in stages for m in group]
        backwards = [Action("B", m, stage) for group in groups for stage in reversed(stages) for m in group]
        # Twice the distance to the last rank: once for activations to get there, once for gradients to come back, which here overlap.
        ahead = (pp - 1 - rank) * (2 if virtual > 1 else 1) + (virtual - 1) * pp
        orders.append([action for action in _in_turn(forwards, backwards, ahead) if action.microbatch < microbatches])
    return with_messages("interleaved", orders, microbatches, virtual)


def zero_bubble_h1(pp: int, microbatches: int) -> Schedule:
    """1F1B whose backwards are split (Qi, Wan, Huang and Lin 2023, ZB-H1): a stage computes the gradients of weights as many microbatches
    late as there are stages before it. So the gradient of the input goes on sooner, and what was left for later fills the gaps.

    With pp microbatches or more, a rank idles for pp - 1 times F + B - W, where 1F1B idles for F + B + W, and every stage has at most
    pp in flight, from F to W: what 1F1B has on the first stage.
    """
    _require(pp, microbatches)
    orders = []
    for stage in range(pp):
        forwards, backwards, weights = ([Action(kind, m, stage) for m in range(microbatches)] for kind in COMPUTE)
        behind: dict[Action, list[Action]] = {}
        for weight in weights:
            behind.setdefault(backwards[min(weight.microbatch + stage, microbatches - 1)], []).append(weight)
        order = _in_turn(forwards, backwards, pp - 1 - stage)
        orders.append([one for action in order for one in (action, *behind.get(action, ()))])
    return with_messages("zb-h1", orders, microbatches)


SCHEDULES: dict[str, Callable[..., Schedule]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved_1f1b,
    "zb-h1": zero_bubble_h1,
}
VIRTUAL = ("interleaved",)  # those with several stages a rank


def build(name: str, pp: int, microbatches: int, virtual: int = 1) -> Schedule:
    """The schedule called `name`. Raises ConfigError for an unknown name, for sizes below 1, and where a rank has one stage only."""
    if name not in SCHEDULES:
        raise ConfigError(f"schedule={name!r}", "there is no schedule of that name", f"Use one of {', '.join(SCHEDULES)}")
    if name in VIRTUAL:
        return SCHEDULES[name](pp, microbatches, virtual)
    if virtual != 1:
        instead = f"Use schedule={VIRTUAL[0]!r}, or virtual=1"
        raise ConfigError(f"schedule={name!r}, virtual={virtual}", "its ranks have one stage each", instead)
    return SCHEDULES[name](pp, microbatches)


def _in_turn(forwards: Sequence[Action], backwards: Sequence[Action], ahead: int) -> list[Action]:
    """`ahead` forwards, or all where there are fewer, then a backward behind each forward, then the backwards that are left."""
    ahead = min(ahead, len(forwards))
    turns = zip(forwards[ahead:], backwards, strict=False)
    return [*forwards[:ahead], *itertools.chain.from_iterable(turns), *backwards[len(forwards) - ahead :]]


def _require(pp: int, microbatches: int) -> None:
    require_positive("pp", pp)
    require_positive("microbatches", microbatches)

"""A pipeline schedule as data: for each rank the actions it runs, in order. Prints and parses as text.

What the actions mean (`simulate` follows this to the letter, `pymesh3d.pp.run` runs it on real processes):

- `F` runs the forward of a microbatch, `B` its backward, `W` the weight part of a split backward (`B` is then its input part only).
- `RF` and `RB` begin to receive (activations from the previous stage, gradient from the next), `SF` and `SB` to send what `F` or `B` has
  produced (activations to the next stage, gradient to the previous one). All return at once. A message needs both ends: there is no buffer.
- The `F` or `B` that consumes a message waits for it. Taken strictly, as `check_links` does, it waits for all that its rank has begun to
  send and receive. Real transports are kinder, so a schedule that runs under this rule deadlocks on none of them.
- Ranks stand in a ring, joined by links; one carries all messages, both ways, between stages s and s + 1 where s is on its first rank.
- A send and a receive on the same link that stand next to each other are one transfer.
- On a link messages of one direction keep their order: sends on one end and receives on the other name them in the same order.
- Neighbouring stages on the same rank hand over directly, without sends and receives.

Text of an action: kind, microbatch and, where a rank holds several stages, `@` and the stage: `F0`, `SF3`, `RB1`, `F0@2`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Literal, cast, get_args

from pymesh3d.config import require_positive
from pymesh3d.errors import ConfigError

Kind = Literal["F", "B", "W", "SF", "RF", "SB", "RB"]
KINDS: tuple[Kind, ...] = get_args(Kind)
COMPUTE: tuple[Kind, ...] = ("F", "B", "W")
SENDS = ("SF", "SB")
RECEIVES = ("RF", "RB")

_COUNTERPART: dict[Kind, Kind] = {"SF": "RF", "RF": "SF", "SB": "RB", "RB": "SB"}
_TOWARDS: dict[Kind, int] = {"SF": 1, "RF": -1, "SB": -1, "RB": 1}  # the stage at the other end, relative to this one
_ACTION = re.compile(r"([A-Z]+)(\d{1,9})(?:@(\d{1,9}))?", re.ASCII)
_HEADER = re.compile(r"schedule (\S+): pp (\d{1,9}), microbatches (\d{1,9})(?:, virtual (\d{1,9}))?", re.ASCII)
_NAME = re.compile(r"[A-Za-z0-9_.-]+")


@dataclasses.dataclass(frozen=True)
class Action:
    """One thing a rank does for one microbatch of one stage (the index of the stage in the whole pipeline)."""

    kind: Kind
    microbatch: int
    stage: int

    def __post_init__(self) -> None:
        if self.kind not in KINDS or self.microbatch < 0 or self.stage < 0:
            raise ConfigError(f"action {self}", f"a kind is one of {', '.join(KINDS)}, microbatch and stage count from 0", "F0@0 is one")

    @property
    def peer_stage(self) -> int:
        """The stage a send goes to, or a receive comes from; beyond the ends of the pipeline it is no stage at all."""
        return self.stage + _TOWARDS[self.kind]

    @property
    def counterpart(self) -> Action:
        """The receive of a send and the send of a receive, as they stand on the stage at the other end."""
        return Action(_COUNTERPART[self.kind], self.microbatch, self.peer_stage)

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch}@{self.stage}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schedule:
    """What each of `pp` ranks does in one step of `microbatches`; a rank holds `virtual` stages. `forward_only`: it has no backwards."""

    name: str
    pp: int
    microbatches: int
    virtual: int = 1
    ranks: tuple[tuple[Action, ...], ...]
    forward_only: bool = False

    def __post_init__(self) -> None:
        for name in ("pp", "microbatches", "virtual"):
            require_positive(name, getattr(self, name))
        if not _NAME.fullmatch(self.name):
            raise ConfigError(f"schedule name {self.name!r}", "a name has letters, digits, '.', '_' and '-'", "Try 1f1b-early")
        if len(self.ranks) != self.pp:
            raise ConfigError(f"{len(self.ranks)} ranks, pp={self.pp}", "each rank has one list of actions", f"Use pp={len(self.ranks)}")

    @property
    def stages(self) -> int:
        """The number of stages of the whole pipeline."""
        return self.pp * self.virtual

    def rank_of(self, stage: int) -> int:
        """The rank that holds `stage`."""
        return stage % self.pp

    def link_of(self, message: Action) -> int:
        """The link that a send or receive uses: `n` joins rank n and the next one, the last link the last rank and rank 0.

        Two ranks have two links, one for each boundary between their stages.
        """
        return self.rank_of(min(message.stage, message.peer_stage))

    @property
    def split(self) -> frozenset[int]:
        """The stages whose backwards have a weight part of their own."""
        return frozenset(action.stage for actions in self.ranks for action in actions if action.kind == "W")

    def steps(self, rank: int) -> list[tuple[Action, ...]]:
        """What `rank` does one after the other: single forwards and backwards, and transfers, which may be a send and a receive at once."""
        steps: list[tuple[Action, ...]] = []
        for action in self.ranks[rank]:
            if steps and len(steps[-1]) == 1 and self._are_one_transfer(steps[-1][0], action):
                steps[-1] += (action,)
            else:
                steps.append((action,))
        return steps

    def _are_one_transfer(self, first: Action, second: Action) -> bool:
        if first.kind in COMPUTE or second.kind in COMPUTE or self.link_of(first) != self.link_of(second):
            return False
        return (first.kind in SENDS) != (second.kind in SENDS)

    def text_of(self, action: Action, rank: int) -> str:
        """An action as it stands in the line of `rank`: the stage only where it is not plain from the rank."""
        return f"{action.kind}{action.microbatch}" if self.virtual == 1 and action.stage == rank else str(action)

    @property
    def forwards(self) -> Schedule:
        """The same without backwards and what belongs to them."""
        ranks = tuple(tuple(action for action in actions if action.kind in ("F", "SF", "RF")) for actions in self.ranks)
        return dataclasses.replace(self, ranks=ranks, forward_only=True)

    @property
    def heading(self) -> str:
        """Name and sizes in words."""
        virtual = f", virtual {self.virtual}" if self.virtual > 1 else ""
        return f"{self.name}: pp {self.pp}, microbatches {self.microbatches}{virtual}"

    def __str__(self) -> str:
        lines = [f"schedule {self.heading}"]
        for rank, actions in enumerate(self.ranks):
            lines.append(" ".join([f"rank {rank}:", *(self.text_of(action, rank) for action in actions)]))
        return "\n".join(lines)


class ScheduleError(ValueError):
    """A schedule that cannot run. The text shows what each rank concerned does around the action in question, with an arrow at it.

    `at` maps ranks to positions in their lists of actions, `why` to what each waits for. A position behind the last action means: done.
    """

    WINDOW = 6  # actions shown on either side of the arrow

    def __init__(self, schedule: Schedule, problem: str, at: Mapping[int, int], why: Mapping[int, str] | None = None) -> None:
        self.problem = problem
        self.at = dict(at)
        lines = [f"schedule {schedule.name} (pp {schedule.pp}, microbatches {schedule.microbatches}): {problem}"]
        for rank, position in sorted(at.items()):
            texts = [schedule.text_of(action, rank) for action in schedule.ranks[rank]] + ["(end)"]
            texts[position] = f"-->{texts[position]}"
            low, high = max(0, position - self.WINDOW), position + self.WINDOW + 1
            shown = ["..."] * (low > 0) + texts[low:high] + ["..."] * (high < len(texts))
            lines.append(f"  rank {rank}: {' '.join(shown)}" + (f"   [{why[rank]}]" if why and rank in why else ""))
        super().__init__("\n".join(lines))


def parse(text: str) -> Schedule:
    """The schedule that prints as `text`. Raises ConfigError with line, token and an allowed form where `text` is malformed."""
    header, *lines = text.strip().splitlines() or [""]
    found = _HEADER.fullmatch(header.strip())
    if not found:
        raise ConfigError(f"line 1, {header!r}", "not the head of a schedule", "Write 'schedule 1f1b: pp 2, microbatches 4'")
    pp, microbatches, virtual = (int(number or 1) for number in found.groups()[1:])
    if len(lines) != pp:
        raise ConfigError(f"line 1, pp {pp} with {len(lines)} lines below", "one line a rank", f"Write pp {len(lines)}, or {pp} lines")
    ranks = tuple(_parse_rank(line, number, rank, virtual) for rank, (number, line) in enumerate(enumerate(lines, start=2)))
    return Schedule(name=found[1], pp=pp, microbatches=microbatches, virtual=virtual, ranks=ranks)


def _parse_rank(line: str, number: int, rank: int, virtual: int) -> tuple[Action, ...]:
    """The actions of one line; `number` counts lines from 1 for messages."""
    label, colon, rest = line.strip().partition(":")
    if not colon or label != f"rank {rank}":
        raise ConfigError(f"line {number}, {label!r}", "ranks stand in order, each behind its label", f"Begin the line with 'rank {rank}:'")
    actions = []
    for token in rest.split():
        found = _ACTION.fullmatch(token)
        if not found or found[1] not in KINDS:
            allowed = f"an action is one of {', '.join(KINDS)} and a microbatch"
            raise ConfigError(f"line {number}, {token!r}", allowed, "Write F0, SF3 or F0@2")
        if found[3] is None and virtual > 1:
            raise ConfigError(f"line {number}, {token!r}", f"with virtual {virtual} an action names its stage", f"Write {token}@{rank}")
        actions.append(Action(cast(Kind, found[1]), int(found[2]), rank if found[3] is None else int(found[3])))
    return tuple(actions)

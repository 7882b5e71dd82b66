"""Runs a schedule on paper: checks that it is right, finds deadlocks, and says when each action would start and end."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from pymesh3d.errors import ConfigError
from pymesh3d.schedule.actions import COMPUTE, RECEIVES, SENDS, Action, Kind, Schedule, ScheduleError

WORK: tuple[Kind, ...] = ("F", "B")  # what every stage does with every microbatch
MAX_RECEIVES = 2  # receives of one end of a link that may be open (posted, not yet consumed) at a time: each holds a buffer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Times:
    """How long things take, in any one unit: forward, backward, weight part of a split backward, a message. One number, or one a stage.

    A message takes the time of the stage that sends it.
    """

    f: float | Sequence[float] = 1.0
    b: float | Sequence[float] = 2.0
    w: float | Sequence[float] = 0.0
    comm: float | Sequence[float] = 0.0

    def per_stage(self, stages: int) -> dict[str, list[float]]:
        """Durations by kind of action and stage. Raises ConfigError for a wrong number of stages and for impossible durations."""
        table = {}
        for name, kinds in {"f": ("F",), "b": ("B",), "w": ("W",), "comm": SENDS}.items():
            value = getattr(self, name)
            durations = list(value) if isinstance(value, Sequence) else [value] * stages
            if len(durations) != stages:
                raise ConfigError(f"{len(durations)} times {name}", f"there are {stages} stages", f"Give one number, or {stages}")
            if not all(math.isfinite(duration) and duration >= 0 for duration in durations):
                raise ConfigError(f"times {name}={value}", "a duration is finite and not negative", f"Try {name}=1")
            table.update(dict.fromkeys(kinds, durations))
        return table


HALVES = Times(b=1.0, w=1.0)  # of a backward that is split, whose parts each take as long as a forward


class Span(NamedTuple):
    """When an action runs: a forward or backward without the time it waits. Sends and receives are only begun, which takes no time."""

    action: Action
    start: float
    end: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timeline:
    """A simulated step: what every rank does when."""

    schedule: Schedule
    ranks: tuple[tuple[Span, ...], ...]

    def compute(self, rank: int) -> list[Span]:
        """The forwards and backwards of `rank`: everything that is not idle time."""
        return [span for span in self.ranks[rank] if span.action.kind in COMPUTE]

    @property
    def makespan(self) -> float:
        """The time of the whole step."""
        return max(span.end for spans in self.ranks for span in spans)

    @property
    def bubble_of_step(self) -> float:
        """The part of all ranks' time, from the first start to the last end on any rank, in which nothing is computed."""
        return self._idle(self.makespan * self.schedule.pp)

    @property
    def bubble_in_span(self) -> float:
        """The same, but each rank's time counts only from its own first start to its own last end."""
        return self._idle(sum(self.compute(rank)[-1].end - self.compute(rank)[0].start for rank in range(self.schedule.pp)))

    def _idle(self, total: float) -> float:
        busy = sum(span.end - span.start for rank in range(self.schedule.pp) for span in self.compute(rank))
        return 1.0 - busy / total if total > 0 else 0.0

    @property
    def in_flight(self) -> list[int]:
        """Per stage, the largest number of microbatches that are between the start of their forward and the end of their backward, or of
        its weight part."""
        split, now, peak = self.schedule.split, [0] * self.schedule.stages, [0] * self.schedule.stages
        for spans in self.ranks:
            for action, _, _ in spans:
                now[action.stage] += {"F": 1, "W" if action.stage in split else "B": -1}.get(action.kind, 0)
                peak[action.stage] = max(peak[action.stage], now[action.stage])
        return peak


def simulate(schedule: Schedule, times: Times | None = None) -> Timeline:
    """Check `schedule` and say when each rank does what. A forward or backward waits for its own message only (`check_links` is stricter).

    A message starts when both ends have begun it and the one before it, on the same link in the same direction, is across. Without `times`
    a backward takes as long as two forwards, and half of that each part of one that is split.
    Raises ScheduleError with the place of the fault.
    """
    check(schedule)
    durations = (times or (HALVES if schedule.split else Times())).per_stage(schedule.stages)
    run = _Run(schedule, durations)
    while any(run.advance(rank) for rank in range(schedule.pp)):
        pass
    if not run.finished:
        raise ScheduleError(schedule, "deadlock", dict(enumerate(run.position)), run.waits())
    return Timeline(schedule=schedule, ranks=tuple(map(tuple, run.spans)))


class _Run:
    """Where every rank has got to, and which messages are begun and across."""

    def __init__(self, schedule: Schedule, durations: dict[str, list[float]]) -> None:
        self.schedule = schedule
        self.durations = durations
        self.position = [0] * schedule.pp
        self.clock = [0.0] * schedule.pp
        self.spans: list[list[Span]] = [[] for _ in range(schedule.pp)]
        self.begun: dict[Action, float] = {}  # send or receive -> when its rank began it
        self.arrived: dict[Action, float] = {}  # receive -> when its message was across
        self.latest: dict[tuple[int, Kind], float] = {}  # (link, kind of send) -> when the latest message was across

    @property
    def finished(self) -> bool:
        return all(position == len(actions) for position, actions in zip(self.position, self.schedule.ranks, strict=True))

    def advance(self, rank: int) -> bool:
        """Run `rank` until it has to wait. False if it could do nothing."""
        before = self.position[rank]
        actions = self.schedule.ranks[rank]
        while self.position[rank] < len(actions) and not self.missing(actions[self.position[rank]]):
            self.do(actions[self.position[rank]], rank)
        return self.position[rank] > before

    def received(self, action: Action) -> list[Action]:
        """The receives whose message a forward or backward takes."""
        return [need for need in needs(self.schedule, action) if need.kind in RECEIVES] if action.kind in COMPUTE else []

    def missing(self, action: Action) -> list[Action]:
        """The receives that `action` waits for."""
        return [receive for receive in self.received(action) if receive not in self.arrived]

    def do(self, action: Action, rank: int) -> None:
        start = max([self.clock[rank], *(self.arrived[receive] for receive in self.received(action))])
        self.clock[rank] = start + (self.durations[action.kind][action.stage] if action.kind in COMPUTE else 0.0)
        self.spans[rank].append(Span(action, start, self.clock[rank]))
        self.position[rank] += 1
        if action.kind not in COMPUTE:
            self.begun[action] = start
            if action.counterpart in self.begun:
                self.cross(action if action.kind in SENDS else action.counterpart)

    def cross(self, send: Action) -> None:
        way = self.schedule.link_of(send), send.kind
        start = max(self.begun[send], self.begun[send.counterpart], self.latest.get(way, 0.0))
        self.latest[way] = self.arrived[send.counterpart] = start + self.durations[send.kind][send.stage]

    def waits(self) -> dict[int, str]:
        """What each unfinished rank waits for, in words."""
        text = {}
        for rank, (position, actions) in enumerate(zip(self.position, self.schedule.ranks, strict=True)):
            if position < len(actions):
                text[rank] = waits_for(self.schedule, self.missing(actions[position])[0])
        return text


def waits_for(schedule: Schedule, action: Action) -> str:
    """In words, that the other end of a send or receive has to come."""
    wanted = action.counterpart
    peer = schedule.rank_of(wanted.stage)
    return f"waits for {schedule.text_of(wanted, peer)} of rank {peer}"


def needs(schedule: Schedule, action: Action) -> list[Action]:
    """What must stand before `action` on the same rank."""
    m, stage = action.microbatch, action.stage
    here = schedule.rank_of(stage)
    if action.kind == "F" and stage > 0:
        return [Action("F", m, stage - 1) if schedule.rank_of(stage - 1) == here else Action("RF", m, stage)]
    if action.kind == "B" and stage < schedule.stages - 1:
        gradient = Action("B", m, stage + 1) if schedule.rank_of(stage + 1) == here else Action("RB", m, stage)
        return [Action("F", m, stage), gradient]
    if action.kind in ("B", "SF"):
        return [Action("F", m, stage)]
    if action.kind in ("W", "SB"):
        return [Action("B", m, stage)]
    return []


def check(schedule: Schedule) -> None:
    """What can be seen without running: all work is there once and in a possible order, messages match. Raises ScheduleError."""
    for rank in range(schedule.pp):
        _check_rank(schedule, rank)
    _check_complete(schedule)
    _check_messages(schedule)


def _check_rank(schedule: Schedule, rank: int) -> None:
    """Every action of `rank` is one it can do, stands there once, and comes after what it needs; few receives are open at a time, and
    what is received first is used first."""
    done: set[Action] = set()
    opened: dict[int, list[Action]] = defaultdict(list)  # link -> receives begun and not yet consumed
    for position, action in enumerate(schedule.ranks[rank]):
        problem = _impossible(schedule, rank, action, done)
        for need in needs(schedule, action) if not problem else []:
            if need.kind in RECEIVES and need != (oldest := opened[schedule.link_of(need)].pop(0)):
                problem = f"takes what {schedule.text_of(need, rank)} receives before what {schedule.text_of(oldest, rank)} does"
        if action.kind in RECEIVES and not problem:
            link = schedule.link_of(action)
            opened[link].append(action)
            if len(opened[link]) > MAX_RECEIVES:
                source = schedule.rank_of(action.peer_stage)
                problem = f"would be open receive number {len(opened[link])} from rank {source}, more than {MAX_RECEIVES}"
        if problem:
            raise ScheduleError(schedule, f"{schedule.text_of(action, rank)} of rank {rank} {problem}", {rank: position})
        done.add(action)


def _impossible(schedule: Schedule, rank: int, action: Action, done: set[Action]) -> str:
    """Why `rank` cannot do `action` after what it has `done`, in words; empty if it can."""
    if action.stage >= schedule.stages or schedule.rank_of(action.stage) != rank:
        return "is of a stage that the rank does not hold"
    if action.microbatch >= schedule.microbatches:
        return "is of a microbatch that does not exist"
    if action in done:
        return "stands there twice"
    if action.kind not in COMPUTE and not (0 <= action.peer_stage < schedule.stages and schedule.rank_of(action.peer_stage) != rank):
        return "has no other rank at its other end"
    missing = [schedule.text_of(need, rank) for need in needs(schedule, action) if need not in done]
    return f"needs {' and '.join(missing)} before it" if missing else ""


def _check_complete(schedule: Schedule) -> None:
    """Every stage runs every microbatch forward, and backward unless the schedule has no backwards: all of it, if one is split."""
    present = {action for actions in schedule.ranks for action in actions}
    split = schedule.split
    for stage in range(schedule.stages):
        rank = schedule.rank_of(stage)
        work = WORK[:1] if schedule.forward_only else COMPUTE if stage in split else WORK
        for action in (Action(kind, m, stage) for m in range(schedule.microbatches) for kind in work):
            if action not in present:
                problem = f"{schedule.text_of(action, rank)} of rank {rank} is missing"
                raise ScheduleError(schedule, problem, {rank: len(schedule.ranks[rank])})


def _check_messages(schedule: Schedule) -> None:
    """Every send has one receive, every receive one send, and both ends of a link name those of one direction in the same order."""
    position = {action: n for actions in schedule.ranks for n, action in enumerate(actions)}
    sends: dict[tuple[int, int, int], list[Action]] = defaultdict(list)  # (link, source rank, target rank) -> in the order of the source
    receives: dict[tuple[int, int, int], list[Action]] = defaultdict(list)  # the same in the order of the target
    for action in position:
        if action.kind in COMPUTE:
            continue
        link, rank, peer = schedule.link_of(action), schedule.rank_of(action.stage), schedule.rank_of(action.peer_stage)
        if action.counterpart not in position:
            wanted = f"{schedule.text_of(action.counterpart, peer)} on rank {peer}"
            raise ScheduleError(schedule, f"{schedule.text_of(action, rank)} of rank {rank} has no {wanted}", {rank: position[action]})
        if action.kind in SENDS:
            sends[link, rank, peer].append(action)
        else:
            receives[link, peer, rank].append(action)
    for (link, source, target), sent in sends.items():
        for send, receive in zip(sent, receives[link, source, target], strict=True):
            if send.counterpart != receive:
                problem = f"rank {source} sends to rank {target} in another order than rank {target} receives"
                raise ScheduleError(schedule, problem, {source: position[send], target: position[receive]})

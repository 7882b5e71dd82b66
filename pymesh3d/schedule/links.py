"""Checks that a schedule also runs where each link is one queue, for both directions, that does nothing out of turn."""

from __future__ import annotations

import collections

from pymesh3d.schedule.actions import COMPUTE, Action, Schedule, ScheduleError
from pymesh3d.schedule.simulate import check, waits_for


def check_links(schedule: Schedule) -> None:
    """Run `schedule` with links that make their transfers in order, as NCCL does. Raises ScheduleError with the place of the fault.

    A rank enters a transfer at its end of the link and goes on at once; a send and a receive next to each other, on the same link, are one
    transfer. A message crosses while what belongs to it is first in line at both ends. A transfer leaves the line when all of it is across.

    A forward or backward first waits until all that its rank has entered is across. In a steady step it waits for its own message only. But
    the host may at any time have to wait for all that the GPU has to do: when CUDA loads a kernel that is used for the first time, or gives
    memory back. A kernel of NCCL's ends when its peer gets there, so two ranks that wait like that for each other would wait for ever.
    """
    check(schedule)
    run = _Run(schedule)
    while any([*map(run.advance, range(schedule.pp)), *map(run.cross, range(schedule.pp))]):
        pass
    if blocked := run.blocked_link():
        problem = "rank {} and rank {} make the transfers of their link in different orders".format(*sorted(blocked))
        at = {rank: schedule.ranks[rank].index(action) for rank, action in blocked.items()}
        raise ScheduleError(schedule, problem, at, {rank: waits_for(schedule, action) for rank, action in blocked.items()})
    if blocked_ranks := run.blocked_ranks():
        at = {rank: position for rank, (position, _) in blocked_ranks.items()}
        raise ScheduleError(schedule, "deadlock", at, {rank: waits_for(schedule, action) for rank, (_, action) in blocked_ranks.items()})


_Line = collections.deque[list[Action]]  # the transfers that one end of a link has entered: what of each is not across


class _Run:
    """Where every rank has got to, what stands in line at both ends of each link, and which receives have their message."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.steps = [schedule.steps(rank) for rank in range(schedule.pp)]
        self.position = [0] * schedule.pp  # in the steps
        self.lines: dict[tuple[int, int], _Line] = collections.defaultdict(collections.deque)  # by link and rank
        self.across: set[Action] = set()

    def advance(self, rank: int) -> bool:
        """Run `rank` until it has to wait. False if it could do nothing."""
        before, steps = self.position[rank], self.steps[rank]
        while self.position[rank] < len(steps):
            step = steps[self.position[rank]]
            if step[0].kind not in COMPUTE:
                self.lines[self.schedule.link_of(step[0]), rank].append(list(step))
            elif self.waiting(rank):
                break
            self.position[rank] += 1
        return self.position[rank] > before

    def waiting(self, rank: int) -> list[Action]:
        """What `rank` has entered and is not across."""
        return [message for (_, end), line in self.lines.items() if end == rank for transfer in line for message in transfer]

    def ends(self, link: int) -> tuple[_Line, _Line]:
        """What stands in line at the two ends of `link`."""
        return self.lines[link, link], self.lines[link, (link + 1) % self.schedule.pp]

    def cross(self, link: int) -> bool:
        """Let cross what is first in line at both ends. False if nothing is."""
        here, there = self.ends(link)
        crossed = False
        while here and there and (matched := {action for action in here[0] if action.counterpart in there[0]}):
            crossed = True
            self.across |= matched | {action.counterpart for action in matched}
            for line in (here, there):
                line[0][:] = [action for action in line[0] if action not in self.across]
                if not line[0]:
                    line.popleft()
        return crossed

    def blocked_link(self) -> dict[int, Action]:
        """By rank, what is first in line at both ends of a link where that does not match."""
        for link in range(self.schedule.pp):
            here, there = self.ends(link)
            if here and there:
                return {self.schedule.rank_of(action.stage): action for action in (here[0][0], there[0][0])}
        return {}

    def blocked_ranks(self) -> dict[int, tuple[int, Action]]:
        """By rank, where it has not got to its end: at which action it stands, and the first message that it waits for."""
        blocked = {}
        for rank, (steps, position) in enumerate(zip(self.steps, self.position, strict=True)):
            if waiting := self.waiting(rank):
                blocked[rank] = sum(map(len, steps[:position])), waiting[0]
        return blocked

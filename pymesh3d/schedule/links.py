"""Checks that a schedule also runs where each link is one queue, for both directions, that does nothing out of turn."""

from __future__ import annotations

import collections

from pymesh3d.schedule.actions import COMPUTE, RECEIVES, SENDS, Action, Schedule, ScheduleError
from pymesh3d.schedule.simulate import check, needs


def check_links(schedule: Schedule) -> None:
    """Run `schedule` with links that make their transfers in order, as NCCL does. Raises ScheduleError with the place of the fault.

    A rank enters a transfer at its end of the link and goes on at once; a send and a receive right behind it, on the same link, are one
    transfer. A message crosses while what belongs to it is first in line at both ends. A transfer leaves the line when all of it is across.
    """
    check(schedule)
    run = _Run(schedule)
    while any([*map(run.advance, range(schedule.pp)), *map(run.cross, range(schedule.pp))]):
        pass
    if blocked := run.blocked_link():
        problem = "rank {} and rank {} make the transfers of their link in different orders".format(*sorted(blocked))
        at = {rank: schedule.ranks[rank].index(action) for rank, action in blocked.items()}
        raise ScheduleError(schedule, problem, at, {rank: run.waits(action) for rank, action in blocked.items()})
    if missing := run.blocked_ranks():
        at = {rank: run.position[rank] for rank in missing}
        raise ScheduleError(schedule, "deadlock", at, {rank: run.waits(receive) for rank, receive in missing.items()})


_Line = collections.deque[list[Action]]  # the transfers that one end of a link has entered: what of each is not across


class _Run:
    """Where every rank has got to, what stands in line at both ends of each link, and which receives have their message."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.position = [0] * schedule.pp
        self.lines: dict[tuple[int, int], _Line] = collections.defaultdict(collections.deque)  # by link and rank
        self.across: set[Action] = set()

    def advance(self, rank: int) -> bool:
        """Run `rank` until a forward or backward has to wait. False if it could do nothing."""
        before, actions = self.position[rank], self.schedule.ranks[rank]
        while self.position[rank] < len(actions):
            position = self.position[rank]
            action = actions[position]
            if self.missing(action):
                break
            length = 1
            if action.kind not in COMPUTE:
                link, both = self.schedule.link_of(action), actions[position : position + 2]
                if action.kind in SENDS and both[-1].kind in RECEIVES and self.schedule.link_of(both[-1]) == link:
                    length = 2
                self.lines[link, rank].append(list(both[:length]))
            self.position[rank] += length
        return self.position[rank] > before

    def missing(self, action: Action) -> list[Action]:
        """The receives whose message `action` waits for."""
        return [need for need in needs(self.schedule, action) if need.kind in RECEIVES and need not in self.across]

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

    def blocked_ranks(self) -> dict[int, Action]:
        """By rank, the receive that it waits for, where it has not got to its end."""
        lines = enumerate(zip(self.position, self.schedule.ranks, strict=True))
        return {rank: self.missing(actions[position])[0] for rank, (position, actions) in lines if position < len(actions)}

    def waits(self, action: Action) -> str:
        """In words, that the other half of a send or receive has to come."""
        wanted = action.counterpart
        peer = self.schedule.rank_of(wanted.stage)
        return f"waits for {self.schedule.text_of(wanted, peer)} of rank {peer}"

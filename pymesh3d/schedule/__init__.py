"""Pipeline schedules as data: built, checked, simulated, drawn, and layers cut into stages, all without torch."""

from pymesh3d.schedule.actions import Action, Schedule, ScheduleError, parse
from pymesh3d.schedule.links import check_links
from pymesh3d.schedule.partition import Memory, partition
from pymesh3d.schedule.schedules import SCHEDULES, VIRTUAL, build, gpipe, interleaved_1f1b, one_f_one_b, zero_bubble_h1
from pymesh3d.schedule.simulate import Timeline, Times, simulate

__all__ = [
    "SCHEDULES",
    "VIRTUAL",
    "Action",
    "Memory",
    "Schedule",
    "ScheduleError",
    "Timeline",
    "Times",
    "build",
    "check_links",
    "gpipe",
    "interleaved_1f1b",
    "one_f_one_b",
    "parse",
    "partition",
    "simulate",
    "zero_bubble_h1",
]

"""Schedules as text: what prints parses back, and malformed text is refused with its place and an allowed form."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pymesh3d.errors import ConfigError
from pymesh3d.schedule import Action, Schedule, ScheduleError, build, parse
from pymesh3d.schedule.actions import KINDS

HEAD = "schedule mine: pp 2, microbatches 1\n"


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    """Any schedule that can be written down, possible or not."""
    pp, microbatches, virtual = (draw(st.integers(1, 4)) for _ in range(3))
    actions = st.builds(Action, st.sampled_from(KINDS), st.integers(0, 120), st.integers(0, 12))
    ranks = tuple(tuple(draw(st.lists(actions, max_size=8))) for _ in range(pp))
    name = draw(st.sampled_from(["1f1b", "gpipe", "a.b-c_D"]))
    return Schedule(name=name, pp=pp, microbatches=microbatches, virtual=virtual, ranks=ranks)


@settings(max_examples=100, deadline=None)
@given(schedules())
def test_what_prints_parses_back(schedule: Schedule) -> None:
    assert parse(str(schedule)) == schedule


def test_text_is_what_the_docs_say() -> None:
    assert str(build("1f1b", 2, 3)) == (
        "schedule 1f1b: pp 2, microbatches 3\n"
        "rank 0: F0 SF0 F1 SF1 RB0 B0 F2 SF2 RB1 B1 RB2 B2\n"
        "rank 1: RF0 F0 RF1 B0 SB0 F1 B1 RF2 SB1 F2 B2 SB2"
    )


def test_several_stages_a_rank_are_named() -> None:
    actions = (Action("F", 0, 0), Action("SF", 0, 0), Action("RF", 0, 2), Action("F", 0, 2))
    schedule = Schedule(name="loop", pp=2, microbatches=1, virtual=2, ranks=(actions, ()))
    lines = ["schedule loop: pp 2, microbatches 1, virtual 2", "rank 0: F0@0 SF0@0 RF0@2 F0@2", "rank 1:"]
    assert str(schedule).splitlines() == lines
    assert parse(str(schedule)) == schedule
    assert [schedule.rank_of(stage) for stage in range(schedule.stages)] == [0, 1, 0, 1]


@pytest.mark.parametrize(
    ("text", "place", "way_out"),
    [
        ("", "line 1, ''", "schedule 1f1b: pp 2"),
        ("rank 0: F0 B0", "line 1, 'rank 0: F0 B0'", "schedule 1f1b: pp 2"),
        (HEAD + "rank 0: F0 B0", "line 1, pp 2 with 1 lines below", "Write pp 1, or 2 lines"),
        (HEAD + "rank 0: F0 B0\nrank 2: F0 B0", "line 3, 'rank 2'", "'rank 1:'"),
        (HEAD + "rank 0: F0 B0\nF0 B0", "line 3, 'F0 B0'", "'rank 1:'"),
        (HEAD + "rank 0: F0 X0\nrank 1:", "line 2, 'X0'", "Write F0"),
        (HEAD + "rank 0: F0\nrank 1: F0 B", "line 3, 'B'", "Write F0"),
        (HEAD + "rank 0: F0\nrank 1: F-1", "line 3, 'F-1'", "Write F0"),
        (HEAD + "rank 0: F0@\nrank 1:", "line 2, 'F0@'", "F0@2"),
        (HEAD.replace("1\n", "1, virtual 2\n") + "rank 0: F0\nrank 1:", "line 2, 'F0'", "Write F0@0"),
        (HEAD.replace("pp 2", "pp 0"), "pp=0", "pp=1"),
    ],
)
def test_malformed_text_is_refused_with_its_place(text: str, place: str, way_out: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        parse(text)
    assert place in str(refusal.value)
    assert way_out in str(refusal.value)


@pytest.mark.parametrize("fields", [{"kind": "X"}, {"microbatch": -1}, {"stage": -1}], ids=lambda fields: next(iter(fields)))
def test_impossible_actions_are_refused(fields: dict) -> None:
    with pytest.raises(ConfigError, match="F0@0 is one"):
        Action(**{"kind": "F", "microbatch": 0, "stage": 0, **fields})


def test_sends_and_receives_know_each_other() -> None:
    for send, receive in ((Action("SF", 3, 1), Action("RF", 3, 2)), (Action("SB", 3, 2), Action("RB", 3, 1))):
        assert send.counterpart == receive
        assert receive.counterpart == send
        assert (send.peer_stage, receive.peer_stage) == (receive.stage, send.stage)


def test_schedule_refuses_what_cannot_be_printed_or_does_not_fit() -> None:
    with pytest.raises(ConfigError, match="'two words'"):
        Schedule(name="two words", pp=1, microbatches=1, ranks=((),))
    with pytest.raises(ConfigError, match=r"1 ranks, pp=2.*Use pp=1"):
        Schedule(name="short", pp=2, microbatches=1, ranks=((),))


def test_error_shows_only_the_neighbourhood() -> None:
    schedule = build("gpipe", 2, 50)
    lines = str(ScheduleError(schedule, "broken", {0: 60, 1: 0}, {1: "waits"})).splitlines()
    assert lines[0] == "schedule gpipe (pp 2, microbatches 50): broken"
    assert lines[1] == "  rank 0: ... F27 SF27 F28 SF28 F29 SF29 -->F30 SF30 F31 SF31 F32 SF32 F33 ..."
    assert lines[2] == "  rank 1: -->RF0 F0 RF1 F1 RF2 F2 RF3 ...   [waits]"

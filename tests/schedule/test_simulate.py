"""The simulator finds every fault that is put into a schedule by hand, and its times are those computed by hand."""

import pytest

from pymesh3d.errors import ConfigError
from pymesh3d.schedule import Schedule, ScheduleError, Times, build, simulate
from tests.schedules import hand_made


def fault(schedule: Schedule) -> ScheduleError:
    with pytest.raises(ScheduleError) as found:
        simulate(schedule)
    return found.value


def test_a_message_that_is_waited_for_in_a_circle_is_a_deadlock() -> None:
    """Two stages a rank, in an order in which each first wants what the other would make next."""
    ranks = ("RF0@2 F0@2 SF0@2 F0@0 SF0@0 RB0@2 B0@2 SB0@2 RB0@0 B0@0", "RF0@3 F0@3 RF0@1 F0@1 SF0@1 B0@3 SB0@3 RB0@1 B0@1 SB0@1")
    error = fault(hand_made(*ranks, virtual=2))
    assert error.problem == "deadlock"
    assert error.at == {0: 1, 1: 1}
    assert "-->F0@2" in str(error) and "[waits for SF0@1 of rank 1]" in str(error)
    assert "-->F0@3" in str(error) and "[waits for SF0@2 of rank 0]" in str(error)


def test_a_deadlock_shows_what_each_rank_waits_for() -> None:
    """Rank 1 wants a gradient before it sends what another one comes from; rank 2 makes them the other way round."""
    middle = "RF0 RF1 F0 SF0 F1 RB0 B0 SB0 RB1 B1 SB1 SF1"
    error = fault(hand_made("F0 SF0 RB0 F1 SF1 RB1 B0 B1", middle, "RF0 RF1 F0 F1 B0 SB0 B1 SB1", microbatches=2))
    assert error.problem == "deadlock"
    assert str(error).splitlines()[1:] == [
        "  rank 0: F0 SF0 RB0 F1 SF1 RB1 -->B0 B1 (end)   [waits for SB0 of rank 1]",
        "  rank 1: RF0 RF1 F0 SF0 F1 RB0 -->B0 SB0 RB1 B1 SB1 SF1 (end)   [waits for SB0 of rank 2]",
        "  rank 2: RF0 RF1 F0 -->F1 B0 SB0 B1 SB1 (end)   [waits for SF1 of rank 1]",
    ]


GOOD = ("F0 SF0 F1 SF1 RB0 RB1 B0 B1", "RF0 RF1 F0 F1 B0 SB0 B1 SB1")


@pytest.mark.parametrize(
    ("rank", "old", "new", "problem", "arrow"),
    [
        (1, "B0 SB0 B1 SB1", "B1 SB1 B0 SB0", "rank 1 sends to rank 0 in another order than rank 0 receives", "-->SB1"),
        (0, "RB0 RB1", "RB1 RB0", "B0 of rank 0 takes what RB0 receives before what RB1 does", "-->B0"),
        (1, "RF0 RF1 F0 F1", "RF1 RF0 F1 F0", "rank 0 sends to rank 1 in another order than rank 1 receives", "-->RF1"),
        (0, "F0 SF0 F1 SF1", "F0 F1 SF1 SF0", "rank 0 sends to rank 1 in another order than rank 1 receives", "-->SF1"),
        (1, "RF1 ", "", "F1 of rank 1 needs RF1 before it", "-->F1"),
        (0, "RB0 ", "", "B0 of rank 0 needs RB0 before it", "-->B0"),
        (0, "SF1 ", "", "RF1 of rank 1 has no SF1 on rank 0", "-->RF1"),
        (1, " SB1", "", "RB1 of rank 0 has no SB1 on rank 1", "-->RB1"),
        (0, "F1 SF1", "SF1 F1", "SF1 of rank 0 needs F1 before it", "-->SF1"),
        (1, "B0 SB0", "SB0 B0", "SB0 of rank 1 needs B0 before it", "-->SB0"),
        (1, "F1 B0 SB0 B1", "B1 SB0 F1 B0", "B1 of rank 1 needs F1 before it", "-->B1"),
        (0, "F0 SF0 F1 SF1 RB0 RB1 B0", "RB0 B0 F0 SF0 F1 SF1 RB1", "B0 of rank 0 needs F0 before it", "-->B0"),
        (1, "RF0 RF1 F0", "F0 RF0 RF1", "F0 of rank 1 needs RF0 before it", "-->F0"),
        (1, "B1 SB1", "B1 B1 SB1", "B1 of rank 1 stands there twice", "-->B1 SB1"),
        (0, "F1 SF1", "F1 SF1 SF1", "SF1 of rank 0 stands there twice", "-->SF1 RB0"),
        (0, " B1", "", "B1 of rank 0 is missing", "-->(end)"),
        (0, "F0 SF0", "F0 W0 SF0", "W0 of rank 0 needs B0 before it", "-->W0"),
        (1, "SB1", "SB1 SF1", "SF1 of rank 1 has no other rank at its other end", "-->SF1"),
        (0, "F0 SF0", "RF0 F0 SF0", "RF0 of rank 0 has no other rank at its other end", "-->RF0"),
        (0, "F1 SF1", "F2 F1 SF1", "F2 of rank 0 is of a microbatch that does not exist", "-->F2"),
        (1, "F0 F1 B0", "F1 F0 B0", "F1 of rank 1 takes what RF1 receives before what RF0 does", "-->F1"),
        (0, "F1 SF1", "F1@1 SF1", "F1@1 of rank 0 is of a stage that the rank does not hold", "-->F1@1"),
        (0, "F1 SF1", "F1@7 SF1", "F1@7 of rank 0 is of a stage that the rank does not hold", "-->F1@7"),
    ],
)
def test_every_fault_is_found_and_shown(rank: int, old: str, new: str, problem: str, arrow: str) -> None:
    ranks = list(GOOD)
    assert ranks[rank].count(old) == 1
    simulate(hand_made(*ranks, microbatches=2))
    ranks[rank] = ranks[rank].replace(old, new)
    error = fault(hand_made(*ranks, microbatches=2))
    assert error.problem == problem
    assert arrow in str(error)


def test_too_many_open_receives_are_found() -> None:
    """Everything posted at the start cannot deadlock, but holds a buffer for every microbatch."""
    error = fault(hand_made("F0 SF0 F1 SF1 F2 SF2 RB0 B0 RB1 B1 RB2 B2", "RF0 RF1 RF2 F0 F1 F2 B0 SB0 B1 SB1 B2 SB2", microbatches=3))
    assert error.problem == "RF2 of rank 1 would be open receive number 3 from rank 0, more than 2"


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_any_action_taken_away_is_missed(name: str) -> None:
    schedule = build(name, 3, 4)
    for rank, actions in enumerate(schedule.ranks):
        for n in range(len(actions)):
            ranks = list(schedule.ranks)
            ranks[rank] = actions[:n] + actions[n + 1 :]
            fault(Schedule(name=name, pp=3, microbatches=4, ranks=tuple(ranks)))


def spans(schedule: Schedule, times: Times) -> list[dict[str, tuple[float, float]]]:
    timeline = simulate(schedule, times)
    return [{schedule.text_of(action, rank): (start, end) for action, start, end in line} for rank, line in enumerate(timeline.ranks)]


def test_times_of_a_message() -> None:
    """It travels while its sender goes on; what consumes it waits."""
    schedule = hand_made("F0 SF0 F1 SF1 RB0 B0 RB1 B1", "RF0 RF1 F0 B0 SB0 F1 B1 SB1", microbatches=2)
    first, second = spans(schedule, Times(f=1, b=2, comm=0.5))
    assert first == {"F0": (0, 1), "SF0": (1, 1), "F1": (1, 2), "SF1": (2, 2), "RB0": (2, 2), "B0": (5, 7), "RB1": (7, 7), "B1": (8, 10)}
    assert second["F0"] == (1.5, 2.5)
    assert second["B0"] == (2.5, 4.5)
    assert second["F1"] == (4.5, 5.5)


def test_a_message_waits_for_its_receive() -> None:
    """Rank 1 begins to receive F1 only when it has run B0, at time 4: the message is there at 4.5, though it could have been at 2.5."""
    schedule = hand_made("F0 SF0 F1 SF1 RB0 B0 RB1 B1", "RF0 F0 B0 SB0 RF1 F1 B1 SB1", microbatches=2)
    first, second = spans(schedule, Times(f=1, b=2, comm=[0.5, 0.25]))
    assert second["B0"] == (2.5, 4.5)
    assert second["F1"] == (5, 6)
    assert first["B0"] == (4.75, 6.75)


def test_messages_of_one_direction_follow_each_other() -> None:
    """Three messages of 2 each, made at 1, 2 and 3, are there at 3, 5 and 7."""
    schedule = hand_made("F0 SF0 F1 SF1 F2 SF2 RB0 B0 RB1 B1 RB2 B2", "RF0 RF1 F0 RF2 F1 F2 B0 SB0 B1 SB1 B2 SB2", microbatches=3)
    _, second = spans(schedule, Times(f=1, b=2, comm=[2, 0]))
    assert [second[f"F{n}"] for n in range(3)] == [(3, 4), (5, 6), (7, 8)]


def test_times_of_each_stage() -> None:
    timeline = simulate(build("gpipe", 2, 2), Times(f=[1, 3], b=[2, 4]))
    assert [(span.start, span.end) for span in timeline.compute(0)] == [(0, 1), (1, 2), (11, 13), (15, 17)]
    assert [(span.start, span.end) for span in timeline.compute(1)] == [(1, 4), (4, 7), (7, 11), (11, 15)]
    assert timeline.makespan == 17
    assert timeline.bubble_of_step == pytest.approx(1 - (6 + 14) / (2 * 17))
    assert timeline.bubble_in_span == pytest.approx(1 - (6 + 14) / (17 + 14))


def test_a_split_backward_has_its_weight_part_counted() -> None:
    timeline = simulate(hand_made("F0 SF0 RB0 B0 W0", "RF0 F0 B0 SB0 W0"), Times(f=1, b=1, w=1))
    assert timeline.makespan == 5
    assert timeline.bubble_of_step == pytest.approx(0.4)
    assert timeline.bubble_in_span == pytest.approx(1 - 6 / 8)


def test_neighbouring_stages_on_one_rank_hand_over_directly() -> None:
    timeline = simulate(hand_made("F0@0 F0@1 B0@1 B0@0", virtual=2))
    assert timeline.makespan == 6
    assert timeline.in_flight == [1, 1]
    assert fault(hand_made("F0@1 F0@0 B0@1 B0@0", virtual=2)).problem == "F0@1 of rank 0 needs F0@0 before it"


def test_a_step_without_duration_has_no_bubble() -> None:
    timeline = simulate(build("1f1b", 2, 2), Times(f=0, b=0))
    assert (timeline.makespan, timeline.bubble_of_step, timeline.bubble_in_span) == (0, 0, 0)


@pytest.mark.parametrize("times", [Times(f=[1, 2, 3]), Times(b=-1), Times(comm=float("nan")), Times(w=float("inf"))])
def test_impossible_times_are_refused(times: Times) -> None:
    with pytest.raises(ConfigError):
        simulate(build("1f1b", 2, 2), times)

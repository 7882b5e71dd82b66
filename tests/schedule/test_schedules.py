"""GPipe and 1F1B: no deadlock under the strictest transport, and the bubble, order and memory they are known for."""

import pytest

from pymesh3d.config import SCHEDULES as NAMES
from pymesh3d.errors import ConfigError
from pymesh3d.schedule import Action, Schedule, Times, build, simulate
from pymesh3d.schedule import schedules as module
from pymesh3d.schedule.actions import COMPUTE, RECEIVES, SENDS
from pymesh3d.schedule.draw import to_text

PP, MICROBATCHES = range(1, 9), range(1, 17)
everyone = pytest.mark.parametrize("name", NAMES)


def all_sizes(name: str) -> list[Schedule]:
    return [build(name, pp, microbatches) for pp in PP for microbatches in MICROBATCHES]


def test_every_name_of_the_configuration_is_a_schedule() -> None:
    assert tuple(module.SCHEDULES) == NAMES
    assert all(build(name, 2, 2).name == name for name in NAMES)


@everyone
def test_closed_forms_at_all_sizes(name: str) -> None:
    """Also C30 (fewer microbatches than stages) and C37 (all sends blocking and unbuffered)."""
    for schedule in all_sizes(name):
        pp, m = schedule.pp, schedule.microbatches
        timeline = simulate(schedule, Times(f=1, b=2))
        assert timeline.makespan == 3 * (m + pp - 1)
        assert timeline.bubble_of_step == pytest.approx((pp - 1) / (m + pp - 1), abs=1e-12)
        assert timeline.bubble_in_span == pytest.approx((pp - 1) / (2 * m + pp - 1), abs=1e-12)
        expected = [m] * pp if name == "gpipe" else [min(m, pp - stage) for stage in range(pp)]
        assert timeline.in_flight == expected, f"{name} pp {pp} microbatches {m}"


@everyone
@pytest.mark.parametrize(("f", "b"), [(1, 1), (3, 1), (1, 5)])
def test_the_bubble_does_not_depend_on_the_ratio_of_forward_to_backward(name: str, f: float, b: float) -> None:
    for pp, m in ((1, 1), (2, 1), (4, 3), (4, 8), (8, 16)):
        assert simulate(build(name, pp, m), Times(f=f, b=b)).bubble_of_step == pytest.approx((pp - 1) / (m + pp - 1), abs=1e-12)


@everyone
def test_messages_match_and_few_receives_are_open(name: str) -> None:
    """C37, counted here on the lists themselves and not by the simulator."""
    for schedule in all_sizes(name):
        for left, right in zip(schedule.ranks, schedule.ranks[1:], strict=False):
            for send, receive, source, target in (("SF", "RF", left, right), ("SB", "RB", right, left)):
                sent = [action.microbatch for action in source if action.kind == send]
                assert sent == [action.microbatch for action in target if action.kind == receive] == list(range(schedule.microbatches))
        for actions in schedule.ranks:
            for receive, consumer in (("RF", "F"), ("RB", "B")):
                if receive in {action.kind for action in actions}:
                    opened = [
                        [a.kind for a in actions[:n]].count(receive) - [a.kind for a in actions[:n]].count(consumer)
                        for n in range(len(actions))
                    ]
                    assert max(opened) <= 2, f"{name} pp {schedule.pp} microbatches {schedule.microbatches}"


@everyone
def test_both_ends_of_a_link_name_its_messages_in_one_order(name: str) -> None:
    """Both directions together: sends and receives may then share one queue, as they do in one NCCL communicator."""

    def link(schedule: Schedule, rank: int, peer: int) -> list[Action]:
        """What passes between `rank` and `peer`, each message named by its receive."""
        own = [action for action in schedule.ranks[rank] if action.kind not in COMPUTE and action.peer_stage == peer]
        return [action.counterpart if action.kind in SENDS else action for action in own]

    for schedule in all_sizes(name):
        for rank in range(schedule.pp - 1):
            assert link(schedule, rank, rank + 1) == link(schedule, rank + 1, rank)


@everyone
def test_each_microbatch_once_and_backward_in_order(name: str) -> None:
    """Backwards in the same order in all schedules: gradients are summed in the same order, so they are bitwise the same."""
    for schedule in all_sizes(name):
        for actions in schedule.ranks:
            for kind in ("F", "B"):
                assert [action.microbatch for action in actions if action.kind == kind] == list(range(schedule.microbatches))


@everyone
def test_receives_are_posted_before_the_message_can_come(name: str) -> None:
    """With equal stages no send ever waits for its receive, so messages that take time can travel while stages compute."""
    for pp, m in ((2, 1), (2, 8), (4, 3), (4, 8), (8, 16)):
        timeline = simulate(build(name, pp, m))
        posted = {span.action: span.start for spans in timeline.ranks for span in spans if span.action.kind in RECEIVES}
        for spans in timeline.ranks:
            for action, start, end in spans:
                if action.kind in SENDS:
                    assert posted[action.counterpart] <= start == end


@pytest.mark.parametrize(
    ("pp", "microbatches", "text"), [(0, 4, "pp=0"), (-1, 4, "pp=-1"), (4, 0, "microbatches=0"), (True, 4, "pp=True"), (2.0, 4, "pp=2.0")]
)
@everyone
def test_sizes_below_one_are_refused(name: str, pp: int, microbatches: int, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        build(name, pp, microbatches)


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"'zero'.*gpipe, 1f1b"):
        build("zero", 2, 2)


@everyone
def test_the_picture_in_the_docs_is_the_schedule(name: str) -> None:
    *lines, axis = to_text(simulate(build(name, 4, 4))).splitlines()
    assert axis.startswith("time")
    for line in lines:
        assert line.removeprefix(f"rank {line[5]}  ") in (module.__doc__ or "")

"""GPipe, 1F1B, interleaved and ZB-H1: no deadlock under the strictest transport, and the bubble, order and memory they are known for."""

import dataclasses
import functools

import pytest

from pymesh3d.config import SCHEDULES as NAMES
from pymesh3d.errors import ConfigError
from pymesh3d.schedule import Action, Schedule, ScheduleError, Timeline, Times, build, check_links, parse, simulate
from pymesh3d.schedule import schedules as module
from pymesh3d.schedule.actions import COMPUTE, RECEIVES, SENDS
from pymesh3d.schedule.draw import to_text
from pymesh3d.schedule.simulate import Span

PP, MICROBATCHES = range(1, 9), range(1, 17)
unsplit = pytest.mark.parametrize("name", ["gpipe", "1f1b"])
everyone = pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1"])
several = pytest.mark.parametrize("virtual", [2, 3])


@functools.cache
def all_sizes(name: str, virtual: int = 1) -> list[Schedule]:
    return [build(name, pp, microbatches, virtual) for pp in PP for microbatches in MICROBATCHES]


@functools.cache
def interleaved(virtual: int) -> list[Timeline]:
    """All sizes."""
    return [simulate(schedule) for schedule in all_sizes("interleaved", virtual)]


def test_every_name_of_the_configuration_is_a_schedule() -> None:
    assert tuple(module.SCHEDULES) == ("gpipe", "1f1b", "interleaved", "zb-h1")
    assert set(NAMES) <= set(module.SCHEDULES)
    assert all(build(name, 2, 2).name == name for name in module.SCHEDULES)


@unsplit
def test_closed_forms_at_all_sizes(name: str) -> None:
    """Also C30 (fewer microbatches than stages)."""
    for schedule in all_sizes(name):
        pp, m = schedule.pp, schedule.microbatches
        timeline = simulate(schedule, Times(f=1, b=2))
        assert timeline.makespan == 3 * (m + pp - 1)
        assert timeline.bubble_of_step == pytest.approx((pp - 1) / (m + pp - 1), abs=1e-12)
        assert timeline.bubble_in_span == pytest.approx((pp - 1) / (2 * m + pp - 1), abs=1e-12)
        expected = [m] * pp if name == "gpipe" else [min(m, pp - stage) for stage in range(pp)]
        assert timeline.in_flight == expected, f"{name} pp {pp} microbatches {m}"


@unsplit
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
            for kind in ("F", "B", "W") if schedule.split else ("F", "B"):
                assert [action.microbatch for action in actions if action.kind == kind] == list(range(schedule.microbatches))


@pytest.mark.parametrize(("name", "virtual"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3), ("zb-h1", 1)])
def test_a_receive_stands_where_its_rank_next_begins_to_compute(name: str, virtual: int) -> None:
    """No earlier: a host that waits for its GPU would wait for what the other rank has not made. No later: the sender would be held."""
    for pp, m in ((2, 1), (2, 8), (4, 3), (4, 8), (6, 16)):
        timeline = simulate(build(name, pp, m, virtual))
        sent = {span.action.counterpart: span.start for spans in timeline.ranks for span in spans if span.action.kind in SENDS}
        for spans in timeline.ranks:
            computes: list[Span] = []
            for span in spans:
                if span.action.kind in COMPUTE:
                    computes.append(span)
                elif span.action.kind in RECEIVES:
                    following = timeline.compute(timeline.schedule.rank_of(span.action.stage))[len(computes)]
                    assert following.start >= sent[span.action]
                    assert not computes or computes[-1].start < sent[span.action]


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


@pytest.mark.parametrize(("name", "virtual"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zb-h1", 1)])
def test_the_picture_in_the_docs_is_the_schedule(name: str, virtual: int) -> None:
    *lines, axis = to_text(simulate(build(name, 4, 4, virtual))).splitlines()
    assert axis.startswith("time")
    for line in lines:
        assert line.removeprefix(f"rank {line[5]}  ") in (module.__doc__ or "")


# ZB-H1.


def test_a_split_backward_idles_less_and_holds_what_the_first_stage_of_1f1b_does() -> None:
    """The closed forms of the paper, from as many microbatches as stages on; with fewer never slower than 1F1B."""
    for schedule in all_sizes("zb-h1"):
        pp, m = schedule.pp, schedule.microbatches
        for f, b, w in ((1, 1, 1), (10, 13, 8), (10, 10, 7)):
            timeline = simulate(schedule, Times(f=f, b=b, w=w))
            idle = timeline.makespan - m * (f + b + w)
            assert idle == (pp - 1) * (f + b - w) if m >= pp else idle <= (pp - 1) * (f + b + w), f"pp {pp} microbatches {m}"
            assert timeline.in_flight == [min(m, pp)] * pp


def test_without_times_a_split_backward_takes_as_long_as_a_whole_one() -> None:
    assert simulate(build("zb-h1", 4, 8)) == simulate(build("zb-h1", 4, 8), Times(f=1, b=1, w=1))
    assert simulate(build("1f1b", 4, 8)) == simulate(build("1f1b", 4, 8), Times(f=1, b=2))


def test_a_weight_part_that_is_missing_or_too_early_is_found() -> None:
    schedule = build("zb-h1", 2, 2)
    text = str(schedule)
    assert parse(text) == schedule and schedule.split == {0, 1} and not build("1f1b", 2, 2).split
    with pytest.raises(ScheduleError, match="W1 of rank 1 is missing"):
        simulate(parse(text.removesuffix(" W1")))
    with pytest.raises(ScheduleError, match="W0 of rank 0 needs B0 before it"):
        simulate(parse(text.replace("F0", "W0 F0", 1)))


# Interleaved.


def test_interleaved_with_one_stage_a_rank_is_1f1b() -> None:
    assert [schedule.ranks for schedule in all_sizes("interleaved")] == [schedule.ranks for schedule in all_sizes("1f1b")]


@several
def test_interleaved_idles_less(virtual: int) -> None:
    """Idle for pp - 1 forwards and backwards of a stage, which is 1 / virtual as long as in 1f1b; with a remainder for somewhat longer."""
    for timeline in interleaved(virtual):
        pp, m = timeline.schedule.pp, timeline.schedule.microbatches
        absent = -m % pp
        work, idle = 3 * m * virtual, 3 * (pp - 1)
        idle_in_1f1b = 3 * virtual * (pp - 1)
        found = timeline.makespan - work
        if not absent:
            assert found == idle
            assert timeline.bubble_of_step == pytest.approx(idle / (work + idle), abs=1e-12)
        elif m < pp:
            assert found == 3 * (pp - m) * (virtual - 1) + idle  # nothing can be faster: the first microbatch has that many stages to pass
        else:
            assert idle < found <= idle + 3 * (virtual - 1) * absent
        assert found < idle_in_1f1b or pp == 1 or (m == 1 and found == idle_in_1f1b), timeline.schedule.heading


def test_known_bubbles_of_interleaved() -> None:
    """4 ranks, 8 microbatches: 9 of 33 steps in 1f1b; with halves of stages 9 of 57, with thirds 9 of 81."""
    bubbles = [simulate(build("interleaved", 4, 8, virtual)).bubble_of_step for virtual in (1, 2, 3)]
    assert bubbles == pytest.approx([9 / 33, 9 / 57, 9 / 81], abs=1e-12)


@several
def test_few_microbatches_are_in_flight_in_interleaved(virtual: int) -> None:
    """Of all stages of a rank together, never more than the forwards that it runs ahead, and one."""
    for schedule in all_sizes("interleaved", virtual):
        pp, m = schedule.pp, schedule.microbatches
        for rank, actions in enumerate(schedule.ranks):
            steps = [{"F": 1, "B": -1}.get(action.kind, 0) for action in actions]
            peak = max(sum(steps[: n + 1]) for n in range(len(steps)))
            known = min((pp - 1 - rank) * 2 + (virtual - 1) * pp + 1, m * virtual)
            assert peak == known if m % pp == 0 else peak <= known, f"rank {rank} of {schedule.heading}"


@several
def test_interleaved_messages_match_and_few_receives_are_open(virtual: int) -> None:
    """C37, counted here on the lists themselves and not by the simulator: on each link each way, every send has its receive, in order."""
    for schedule in all_sizes("interleaved", virtual):
        pp, m = schedule.pp, schedule.microbatches
        for rank, actions in enumerate(schedule.ranks):
            for kind, peer, shift in (("F", (rank + 1) % pp, 1), ("B", (rank - 1) % pp, -1)):
                crossing = range(max(0, -shift), pp * virtual - max(0, shift)) if pp > 1 else range(0)
                sent = [(action.microbatch, action.stage + shift) for action in actions if action.kind == f"S{kind}"]
                received = [(action.microbatch, action.stage) for action in schedule.ranks[peer] if action.kind == f"R{kind}"]
                assert sent == received, f"{kind} from rank {rank} of {schedule.heading}"
                assert sorted(sent) == [(n, s + shift) for n in range(m) for s in crossing if s % pp == rank]
                open_now = 0
                for action in schedule.ranks[peer]:
                    open_now += (action.kind == f"R{kind}") - (action.kind == kind and (action.microbatch, action.stage) in received)
                    assert 0 <= open_now <= 2, schedule.heading


@several
def test_interleaved_backward_in_the_same_order_on_every_stage(virtual: int) -> None:
    """As in the other schedules, so gradients are summed in the same order and are bitwise the same."""
    for schedule in all_sizes("interleaved", virtual):
        for stage in range(schedule.stages):
            actions = schedule.ranks[stage % schedule.pp]
            for kind in ("F", "B"):
                found = [action.microbatch for action in actions if (action.kind, action.stage) == (kind, stage)]
                assert found == list(range(schedule.microbatches)), schedule.heading


@several
def test_interleaved_passes_links_in_order_and_prints(virtual: int) -> None:
    for schedule in all_sizes("interleaved", virtual):
        check_links(schedule)
        check_links(schedule.forwards)
        assert parse(str(schedule)) == schedule


@everyone
def test_links_in_order(name: str) -> None:
    """C37: nothing is buffered, and a rank goes on when all that it has begun to send and receive is across. So too in evaluation."""
    for schedule in all_sizes(name):
        check_links(schedule)
        check_links(schedule.forwards)


def test_forwards_alone_are_complete_only_where_they_are_meant_to_be() -> None:
    forwards = build("1f1b", 2, 2).forwards
    check_links(forwards)
    with pytest.raises(ScheduleError, match="B0 of rank 0 is missing"):
        check_links(parse(str(forwards)))
    lost = dataclasses.replace(forwards, ranks=(forwards.ranks[0][:-2], forwards.ranks[1]))
    with pytest.raises(ScheduleError, match="F1 of rank 0 is missing"):
        check_links(lost)


@several
def test_sends_stand_behind_what_makes_them(virtual: int) -> None:
    """Between the same two computations; other messages may stand before it."""
    for schedule in all_sizes("interleaved", virtual):
        for actions in schedule.ranks:
            made = None
            for action in actions:
                if action.kind in COMPUTE:
                    made = action
                elif action.kind in SENDS:
                    assert made is not None and action == Action(f"S{made.kind}", made.microbatch, made.stage)  # type: ignore[arg-type]


def test_no_deadlock_in_long_pipelines() -> None:
    """Where messages are made long before they are needed, and few are received at a time."""
    for pp, microbatches, virtual in ((16, 16, 2), (13, 29, 5), (32, 64, 2)):
        check_links(build("interleaved", pp, microbatches, virtual))


def test_several_stages_a_rank_only_where_there_are() -> None:
    with pytest.raises(ConfigError, match=r"schedule='1f1b', virtual=2.*Use schedule='interleaved', or virtual=1"):
        build("1f1b", 2, 2, 2)
    for virtual in (0, -1, True, 2.0):
        with pytest.raises(ConfigError, match=f"virtual={virtual}"):
            build("interleaved", 2, 2, virtual)  # type: ignore[arg-type]

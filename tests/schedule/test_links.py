"""The check of links that do nothing out of turn finds orders that only separate queues forgive, and shows both ends."""

import pytest

from pymesh3d.schedule import Schedule, ScheduleError, build, check_links, parse, simulate

ORDERS = "rank {} and rank {} make the transfers of their link in different orders"


def hand_made(*ranks: str, microbatches: int = 1, virtual: int = 1) -> Schedule:
    lines = [f"rank {rank}: {actions}" for rank, actions in enumerate(ranks)]
    return parse("\n".join([f"schedule mine: pp {len(ranks)}, microbatches {microbatches}, virtual {virtual}", *lines]))


def fault(schedule: Schedule) -> ScheduleError:
    with pytest.raises(ScheduleError) as found:
        check_links(schedule)
    return found.value


def test_two_receives_that_each_stand_before_the_send_of_the_other_are_found() -> None:
    """Rank 0 expects the gradient before it sends F1, rank 1 expects F1 before it sends the gradient. Separate queues forgive it."""
    schedule = hand_made("F0 SF0 RB0 F1 SF1 B0 RB1 B1", "RF0 RF1 F0 B0 SB0 F1 B1 SB1", microbatches=2)
    simulate(schedule)
    error = fault(schedule)
    assert error.problem == ORDERS.format(0, 1)
    assert str(error).splitlines()[1:] == [
        "  rank 0: F0 SF0 -->RB0 F1 SF1 B0 RB1 B1 (end)   [waits for SB0 of rank 1]",
        "  rank 1: RF0 -->RF1 F0 B0 SB0 F1 B1 SB1 ...   [waits for SF1 of rank 0]",
    ]


def test_a_send_and_the_receive_right_behind_it_are_one_transfer() -> None:
    """Both ends send before they receive: right as long as one of them does both at once."""
    first = "F0 SF0 F1 SF1 RB0 F2 SF2 B0 RB1 B1 RB2 B2", "F0 SF0 F1 SF1 F2 RB0 SF2 B0 RB1 B1 RB2 B2"
    second = "RF0 F0 B0 SB0 RF1 F1 RF2 B1 SB1 F2 B2 SB2", "RF0 F0 B0 SB0 W0 RF1 F1 RF2 B1 SB1 F2 B2 SB2"
    for here, there in ((0, 0), (0, 1), (1, 0)):
        check_links(hand_made(first[here], second[there], microbatches=3))
    error = fault(hand_made(first[1], second[1], microbatches=3))
    assert (error.problem, error.at) == (ORDERS.format(0, 1), {0: 3, 1: 3})
    assert "-->SF1 F2 RB0" in str(error) and "-->SB0 W0 RF1" in str(error)


@pytest.mark.parametrize(
    ("pp", "rank", "old", "new", "found"),
    [
        (4, 0, "F6@0 SF6@0 RB0@4", "RB0@4 F6@0 SF6@0", {0: "RB0@4", 1: "RF6@1"}),
        (4, 0, "B1@4 SB1@4 RF4@4", "RF4@4 B1@4 SB1@4", {0: "RF4@4", 3: "RB1@3"}),
        (2, 0, "F2@0 SF2@0 RB0@2", "RB0@2 F2@0 SF2@0", {0: "RB0@2", 1: "RF2@1"}),
        (2, 0, "B0@2 SB0@2 RF2@2", "RF2@2 B0@2 SB0@2", {0: "RF2@2", 1: "RB0@1"}),
    ],
)
def test_a_receive_put_before_a_send_of_its_link_is_found(pp: int, rank: int, old: str, new: str, found: dict[int, str]) -> None:
    schedule = build("interleaved", pp, 8, 2)
    assert str(schedule).count(old) == 1
    wrong = parse(str(schedule).replace(old, new))
    simulate(wrong)
    error = fault(wrong)
    assert {at: str(wrong.ranks[at][position]) for at, position in error.at.items()} == found
    assert error.problem == ORDERS.format(*sorted(found)) and rank in found


def test_two_ranks_have_two_links() -> None:
    """What rank 0 gets for its second stage stands before what it sends from its first: on one link nothing would move."""
    schedule = build("interleaved", 2, 2, 2)
    assert str(schedule).splitlines()[1].startswith("rank 0: RF0@2 RF1@2 F0@0 SF0@0")
    check_links(schedule)


def test_a_circle_of_forwards_is_a_deadlock() -> None:
    ranks = ("RF0@2 F0@2 SF0@2 F0@0 SF0@0 RB0@2 B0@2 SB0@2 RB0@0 B0@0", "RF0@3 RF0@1 F0@1 SF0@1 F0@3 B0@3 SB0@3 RB0@1 B0@1 SB0@1")
    error = fault(hand_made(*ranks, virtual=2))
    assert (error.problem, error.at) == ("deadlock", {0: 1, 1: 2})
    assert "-->F0@2" in str(error) and "[waits for SF0@1 of rank 1]" in str(error)
    assert "-->F0@1" in str(error) and "[waits for SF0@0 of rank 0]" in str(error)


def test_what_is_wrong_without_links_is_found_too() -> None:
    assert fault(hand_made("F0 SF0 RB0 B0", "RF0 F0 B0")).problem == "RB0 of rank 0 has no SB0 on rank 1"

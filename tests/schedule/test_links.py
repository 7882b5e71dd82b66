"""The check of links that do nothing out of turn finds orders that only separate queues forgive, and shows both ends."""

import pytest

from pymesh3d.schedule import Action, Schedule, ScheduleError, build, check_links, parse, simulate
from tests.schedules import hand_made

ORDERS = "rank {} and rank {} make the transfers of their link in different orders"


def fault(schedule: Schedule) -> ScheduleError:
    with pytest.raises(ScheduleError) as found:
        check_links(schedule)
    return found.value


def test_receives_ahead_of_their_need_on_both_sides_are_found() -> None:
    """Each rank waits for what the other makes behind its own wait. A host that never waits for the GPU would not notice."""
    schedule = hand_made("F0 SF0 RB0 F1 SF1 B0 RB1 B1", "RF0 F0 RF1 B0 SB0 F1 B1 SB1", microbatches=2)
    simulate(schedule)
    error = fault(schedule)
    assert error.problem == ORDERS.format(0, 1)
    assert str(error).splitlines()[1:] == [
        "  rank 0: F0 SF0 -->RB0 F1 SF1 B0 RB1 B1 (end)   [waits for SB0 of rank 1]",
        "  rank 1: RF0 F0 -->RF1 B0 SB0 F1 B1 SB1 (end)   [waits for SF1 of rank 0]",
    ]


@pytest.mark.parametrize("first", ["SF1 RB0", "RB0 SF1"])
@pytest.mark.parametrize("second", ["SB0 RF1", "RF1 SB0"])
def test_a_send_and_the_receive_next_to_it_are_one_transfer(first: str, second: str) -> None:
    """Both ends may even send before they receive."""
    check_links(hand_made(f"F0 SF0 F1 {first} B0 RB1 B1", f"RF0 F0 B0 {second} F1 B1 SB1", microbatches=2))


def test_a_send_holds_its_rank_until_it_is_received() -> None:
    """Rank 1 receives F1 only when it has run B0, whose gradient rank 0 would make while it sends F1. Links with room would forgive it."""
    first = "F0@0 SF0@0 RF0@2 F0@2 SF0@2 RB0@2 F1@0 SF1@0 B0@2 SB0@2 RB0@0 RF1@2 F1@2 SF1@2 B0@0 RB1@2 B1@2 SB1@2 RB1@0 B1@0"
    second = "RF0@1 F0@1 SF0@1 RF0@3 F0@3 B0@3 SB0@3 RB0@1 B0@1 SB0@1 RF1@1 F1@1 SF1@1 RF1@3 F1@3 B1@3 SB1@3 RB1@1 B1@1 SB1@1"
    schedule = hand_made(first, second, microbatches=2, virtual=2)
    simulate(schedule)
    error = fault(schedule)
    assert error.problem == "deadlock"
    assert "-->B0@2" in str(error) and "[waits for RF1@1 of rank 1]" in str(error)
    assert "-->B0@1" in str(error) and "[waits for SB0@2 of rank 0]" in str(error)


def test_transfers_in_different_orders_are_found() -> None:
    """Rank 0 is the sender of F1 and F2 before it takes notice of the gradient; rank 1 is rid of that before it takes F1."""
    ranks = "F0 SF0 F1 SF1 F2 SF2 RB0 B0 RB1 B1 RB2 B2", "RF0 F0 B0 SB0 W0 RF1 F1 B1 SB1 W1 RF2 F2 B2 SB2 W2"
    schedule = hand_made(*ranks, microbatches=3)
    simulate(schedule)
    error = fault(schedule)
    assert (error.problem, error.at) == (ORDERS.format(0, 1), {0: 3, 1: 3})
    assert "-->SF1 F2 SF2 RB0" in str(error) and "-->SB0 W0 RF1" in str(error)


@pytest.mark.parametrize(
    ("pp", "rank", "old", "new", "found"),
    [
        (4, 0, "F6@0 SF6@0 RB0@4", "RB0@4 F6@0 SF6@0", {0: "RB0@4", 1: "RF6@1"}),
        (4, 0, "B1@4 SB1@4 RF4@4", "RF4@4 B1@4 SB1@4", {0: "RF4@4", 3: "RB1@3"}),
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
    """Rank 0 receives for its second stage before it sends from its first, rank 1 the other way round: one link would not move."""
    schedule = build("interleaved", 2, 2, 2)
    assert (schedule.link_of(Action("RF", 0, 2)), schedule.link_of(Action("SF", 1, 0))) == (1, 0)
    assert str(schedule).count("F1@0 SF1@0 RF0@2 F0@2") == str(schedule).count("RF1@1 SF0@1") == 1
    check_links(parse(str(schedule).replace("SF1@0 RF0@2", "RF0@2 SF1@0")))


def test_a_circle_of_forwards_is_a_deadlock() -> None:
    ranks = ("RF0@2 F0@2 SF0@2 F0@0 SF0@0 RB0@2 B0@2 SB0@2 RB0@0 B0@0", "RF0@3 F0@3 RF0@1 F0@1 SF0@1 B0@3 SB0@3 RB0@1 B0@1 SB0@1")
    error = fault(hand_made(*ranks, virtual=2))
    assert (error.problem, error.at) == ("deadlock", {0: 1, 1: 1})
    assert "-->F0@2" in str(error) and "[waits for SF0@1 of rank 1]" in str(error)
    assert "-->F0@3" in str(error) and "[waits for SF0@2 of rank 0]" in str(error)


def test_what_is_wrong_without_links_is_found_too() -> None:
    assert fault(hand_made("F0 SF0 RB0 B0", "RF0 F0 B0")).problem == "RB0 of rank 0 has no SB0 on rank 1"

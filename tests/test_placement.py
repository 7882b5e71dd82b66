"""Placement: every number of a parameter has its place on the ranks, each is counted once, and what does not divide is refused."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pymesh3d.errors import ConfigError
from pymesh3d.placement import Part, Placement, place, placement_of

POISON = -7


@st.composite
def parts(draw: st.DrawFn, ranks: int) -> Part:
    """A part that `ranks` ranks can hold: cut anywhere, cut at heads, replicated heads, or padded."""
    kind = draw(st.sampled_from(["rows", "heads", "replicated", "padded"]))
    each = draw(st.integers(1, 3))
    if kind == "rows":
        return Part(size=each * ranks)
    if kind == "heads":
        heads = ranks * draw(st.integers(1, 2))
        return Part(size=heads * each, heads=heads)
    if kind == "replicated":
        heads = draw(st.sampled_from([n for n in range(1, ranks + 1) if ranks % n == 0]))
        return Part(size=heads * each, heads=heads)
    size = draw(st.integers(1, 3 * ranks))
    return Part(size=size, padded=math.ceil(size / ranks) * ranks + ranks * draw(st.integers(0, 2)))


@st.composite
def placements(draw: st.DrawFn) -> Placement:
    ranks = draw(st.sampled_from([1, 2, 3, 4, 6]))
    dim = draw(st.integers(0, 1))
    cut = tuple(draw(st.lists(parts(ranks), min_size=1, max_size=3)))
    if dim == 1:
        cut = tuple(part for part in cut if part.replicas(ranks) in (1, ranks))[:1] or (Part(size=2 * ranks),)
    rows = sum(part.size for part in cut)
    others = draw(st.lists(st.integers(1, 3), min_size=dim, max_size=2))
    shape = (rows, *others) if dim == 0 else (others[0], rows, *others[1:])
    return Placement(shape=shape, dim=dim, parts=cut, ranks=ranks, partial=draw(st.booleans()))


def numbered(shape: tuple[int, ...]) -> torch.Tensor:
    """Distinct numbers from 1 on."""
    return torch.arange(1, math.prod(shape) + 1, dtype=torch.float64).view(shape)


def shards(placement: Placement, full: torch.Tensor) -> list[torch.Tensor]:
    out = [torch.full(placement.local_shape(), POISON, dtype=full.dtype) for _ in range(placement.ranks)]
    for rank, local in enumerate(out):
        placement.shard(full, local, rank)
    return out


@settings(max_examples=150, deadline=None)
@given(placements())
def test_shards_hold_everything_and_put_it_together_again(placement: Placement) -> None:
    full = numbered(placement.shape)
    back = torch.full_like(full, POISON)
    for rank, local in enumerate(shards(placement, full)):
        assert not (local == POISON).any(), "every row of a shard is written, padding with 0"
        placement.unshard(local, back, rank)
    assert torch.equal(back, full)


@settings(max_examples=150, deadline=None)
@given(placements())
def test_every_number_counts_once_over_the_ranks(placement: Placement) -> None:
    full = numbered(placement.shape)
    counted = [
        number
        for rank, local in enumerate(shards(placement, full))
        for start, stop in placement.counted(rank)
        for number in local.flatten()[start:stop].tolist()
        if number != 0  # padding
    ]
    assert sorted(counted) == full.flatten().tolist()


@settings(max_examples=150, deadline=None)
@given(placements())
def test_summed_ranges_are_the_replicated_numbers_and_meet_their_copies(placement: Placement) -> None:
    """Summing each range over its run of neighbours gives, for every number, the sum over exactly its holders."""
    full = numbered(placement.shape)
    held = shards(placement, full)
    ranges = [placement.summed(rank) for rank in range(placement.ranks)]
    if not placement.partial:
        assert not any(ranges)
        return
    for rank, local in enumerate(held):
        summed = torch.ones_like(local.flatten())
        for start, stop, replicas in ranges[rank]:
            assert replicas > 1
            first = rank // replicas * replicas
            for peer in range(first, first + replicas):
                assert ranges[peer] == ranges[rank]
                assert torch.equal(held[peer].flatten()[start:stop], local.flatten()[start:stop])
            summed[start:stop] = replicas
        for number, count in zip(local.flatten().tolist(), summed.tolist(), strict=True):
            holders = sum(bool((other == number).any()) for other in held)
            assert number == 0 or count == holders


@settings(max_examples=50, deadline=None)
@given(placements(), st.sampled_from([1, 2, 3, 4]))
def test_going_through_another_number_of_ranks_keeps_every_bit(placement: Placement, ranks: int) -> None:
    rows = placement.shape[placement.dim]
    padded = math.ceil(rows / ranks) * ranks
    other = Placement(shape=placement.shape, dim=placement.dim, parts=(Part(size=rows, padded=padded),), ranks=ranks)
    full = numbered(placement.shape)
    middle, back = torch.full_like(full, POISON), torch.full_like(full, POISON)
    for rank, local in enumerate(shards(placement, full)):
        placement.unshard(local, middle, rank)
    for rank, local in enumerate(shards(other, middle)):
        other.unshard(local, back, rank)
    assert torch.equal(back, full)


def test_fused_parts_are_cut_one_by_one() -> None:
    """4 query heads of 2 rows, 2 key and 2 value heads: a rank holds [q | k | v] of its own heads."""
    placement = Placement(shape=(16,), parts=(Part(size=8, heads=4), Part(size=4, heads=2), Part(size=4, heads=2)), ranks=2)
    held = [local.tolist() for local in shards(placement, torch.arange(16.0))]
    assert held == [[0, 1, 2, 3, 8, 9, 12, 13], [4, 5, 6, 7, 10, 11, 14, 15]]
    assert placement.local_parts() == (4, 2, 2)
    gate_up = Placement(shape=(8,), parts=(Part(size=4), Part(size=4)), ranks=2)
    assert [local.tolist() for local in shards(gate_up, torch.arange(8.0))] == [[0, 1, 4, 5], [2, 3, 6, 7]]


def test_fewer_heads_than_ranks_are_held_by_neighbours() -> None:
    placement = Placement(shape=(8, 1), parts=(Part(size=8, heads=2),), ranks=4, partial=True)
    held = [local.flatten().tolist() for local in shards(placement, torch.arange(8.0).view(8, 1))]
    assert held == [[0, 1, 2, 3], [0, 1, 2, 3], [4, 5, 6, 7], [4, 5, 6, 7]]
    assert [placement.counted(rank) for rank in range(4)] == [[(0, 4)], [], [(0, 4)], []]
    assert [placement.summed(rank) for rank in range(4)] == [[(0, 4, 2)]] * 4


def test_padding_is_zero_at_the_end_and_left_out_again() -> None:
    placement = Placement(shape=(5,), parts=(Part(size=5, padded=12),), ranks=3)
    assert [local.tolist() for local in shards(placement, torch.arange(1.0, 6))] == [[1, 2, 3, 4], [5, 0, 0, 0], [0, 0, 0, 0]]


def test_a_scalar_is_whole_everywhere() -> None:
    placement = Placement(shape=(), ranks=2)
    local, full = torch.zeros(()), torch.zeros(())
    placement.shard(torch.tensor(3.0), local, 1)
    placement.unshard(local, full, 1)
    assert (local.item(), full.item()) == (3.0, 3.0)
    assert [placement.counted(rank) for rank in range(2)] == [[(0, 1)], []]


@pytest.mark.parametrize(
    ("part", "ranks", "text"),
    [
        (Part(size=5), 2, "w of 5 rows, tp=2: tp must divide the rows. tp can be one of [1, 5]"),
        (
            Part(size=10, heads=10),
            4,
            "w of 10 heads, tp=4: tp must divide the heads, or be a multiple of them. tp can be one of [1, 2, 5, 10]",
        ),
        (Part(size=8, heads=3), 1, "w of 8 rows in 3 heads: the heads must divide the rows. There can be one of [1, 2, 4, 8]"),
        (Part(size=0), 2, "w of 0 rows: there must be something to cut. Use 1 row or more"),
        (Part(size=5040), 11, "w of 5040 rows, tp=11: tp must divide the rows. tp can be one of [1, 2, 3, 4, 5, 6, ..., 1680, 2520, 5040]"),
    ],
)
def test_a_part_that_does_not_divide_is_refused(part: Part, ranks: int, text: str) -> None:
    with pytest.raises(ConfigError) as refused:
        part.check(ranks, "w")
    assert str(refused.value) == text


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"size": -1}, "size=-1: size must be a positive integer. Try size=1 or more"),
        ({"size": 8.0}, "size=8.0: size must be a positive integer. Try size=1 or more"),
        ({"size": 8, "heads": 0}, "heads=0: heads must be a positive integer. Try heads=1 or more"),
        ({"size": 8, "heads": "2"}, "heads='2': heads must be a positive integer. Try heads=1 or more"),
    ],
)
def test_a_part_counts_in_whole_numbers(fields: dict[str, int], text: str) -> None:
    with pytest.raises(ConfigError) as refused:
        Part(**fields)
    assert str(refused.value) == text


def test_an_empty_parameter_is_whole() -> None:
    assert Placement(shape=(0, 4), ranks=2).local_shape() == (0, 4)


def test_marks_of_other_libraries() -> None:
    def marks(placement: Placement) -> list[object]:
        parameter = torch.empty(placement.local_shape())
        place(parameter, placement)
        assert placement_of(parameter) is placement
        return [getattr(parameter, name) for name in ("tensor_model_parallel", "partition_dim", "sequence_parallel", "shared")]

    assert marks(Placement(shape=(4, 4), parts=(Part(size=4),), ranks=2)) == [True, 0, False, False]
    assert marks(Placement(shape=(4, 4), dim=1, parts=(Part(size=4),), ranks=2)) == [True, 1, False, False]
    assert marks(Placement(shape=(4,), ranks=2, partial=True)) == [False, -1, True, False]
    assert marks(Placement(shape=(4,), ranks=2, tied="embed.weight")) == [False, -1, False, True]


def test_a_parameter_without_a_record_is_whole() -> None:
    placement = placement_of(torch.zeros(3, 2))
    assert placement.replicated
    assert placement.counted(0) == [(0, 6)]
    assert placement.summed(0) == []

"""Layers into stages: exact cuts (C35), the best of all cuts by brute force, and the memory limit."""

import itertools
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pymesh3d.errors import ConfigError
from pymesh3d.schedule import Memory, build, partition, simulate


def sizes(cuts: list[range]) -> list[int]:
    return [len(cut) for cut in cuts]


def every_cut(layers: int, stages: int) -> list[list[range]]:
    inner = itertools.combinations(range(1, layers), stages - 1)
    return [[range(a, b) for a, b in itertools.pairwise((0, *ends, layers))] for ends in inner]


def stage_costs(cuts: list[range], costs: list[float], first: float = 0, last: float = 0) -> list[float]:
    totals = [sum(costs[layer] for layer in cut) for cut in cuts]
    totals[0] += first
    totals[-1] += last
    return totals


def peaks(cuts: list[range], memory: Memory) -> list[float]:
    static = stage_costs(cuts, list(memory.static), memory.first, memory.last)
    return [
        base + memory.in_flight[s] * sum(memory.activations[layer] for layer in cut)
        for s, (base, cut) in enumerate(zip(static, cuts, strict=True))
    ]


@pytest.mark.parametrize(
    ("layers", "stages", "ends", "expected"),
    [
        (30, 4, 0, [8, 8, 7, 7]),
        (10, 3, 0, [4, 3, 3]),
        (61, 8, 0, [8, 8, 8, 8, 8, 7, 7, 7]),
        (6, 4, 1, [1, 2, 2, 1]),
        (4, 4, 1, [1, 1, 1, 1]),
        (5, 1, 3, [5]),
    ],
)
@pytest.mark.parametrize("unit", [1, 1.0, 0.1, 1e12 / 3])
def test_known_cuts(layers: int, stages: int, ends: int, expected: list[int], unit: float) -> None:
    assert sizes(partition([unit] * layers, stages, ends * unit, ends * unit)) == expected


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_equal_layers_make_even_stages(data: st.DataObject) -> None:
    """C35: disjoint, ordered, all layers, sizes that differ by at most one, the larger first."""
    layers = data.draw(st.integers(1, 70))
    pp = data.draw(st.integers(1, min(layers, 9)))
    stages = pp * data.draw(st.integers(1, min(3, layers // pp)))
    cuts = partition([0.1] * layers, stages)
    assert list(itertools.chain(*cuts)) == list(range(layers))
    assert sizes(cuts) == sorted(sizes(cuts), reverse=True)
    assert sizes(cuts)[0] - sizes(cuts)[-1] <= 1


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_no_cut_is_better(data: st.DataObject) -> None:
    """Least maximum, then most even, then more layers on earlier stages: against all cuts, with and without a memory limit."""
    layers = data.draw(st.integers(1, 8))
    stages = data.draw(st.integers(1, layers))
    amounts = st.lists(st.integers(0, 6), min_size=layers, max_size=layers)
    costs, (first, last) = data.draw(amounts), data.draw(st.tuples(st.integers(0, 6), st.integers(0, 6)))
    memory = data.draw(
        st.none()
        | st.builds(
            Memory,
            static=amounts,
            activations=amounts,
            in_flight=st.just([min(4, stages - stage) for stage in range(stages)]),
            limit=st.integers(0, 60),
            first=st.integers(0, 6),
            last=st.integers(0, 6),
        )
    )
    possible = [cuts for cuts in every_cut(layers, stages) if memory is None or max(peaks(cuts, memory)) <= memory.limit]
    if not possible:
        with pytest.raises(ConfigError, match="no cut fits"):
            partition(costs, stages, first, last, memory)
        return

    def quality(cuts: list[range]) -> tuple[float, float, list[int]]:
        totals = stage_costs(cuts, costs, first, last)
        return max(totals), sum(total * total for total in totals), [-size for size in sizes(cuts)]

    assert partition(costs, stages, first, last, memory) == min(possible, key=quality)


def test_the_most_costly_stage_counts_before_evenness() -> None:
    """[6, 2, 3] has the smaller sum of squares, but its first stage costs more than any of [1, 5, 5]."""
    assert partition([1, 5, 2, 3], 3) == [range(0, 1), range(1, 2), range(2, 4)]


def test_memory_moves_layers_to_later_stages() -> None:
    """In 1F1B the first stage holds most microbatches: under a tight limit it gets fewer layers than its share."""
    in_flight = simulate(build("1f1b", 4, 8)).in_flight
    memory = Memory(static=[1] * 8, activations=[1] * 8, in_flight=in_flight, limit=9)
    cuts = partition([1] * 8, 4, memory=memory)
    assert sizes(cuts) == [1, 2, 3, 2]
    assert max(peaks(cuts, memory)) <= 9
    assert sizes(partition([1] * 8, 4)) == [2, 2, 2, 2]


def test_the_refusal_names_the_tightest_stage_and_a_limit_that_works() -> None:
    memory = Memory(static=[0.7] * 8, activations=[0.1] * 8, in_flight=[4, 3, 2, 1], limit=1, first=1 / 3, last=30)
    with pytest.raises(ConfigError) as refusal:
        partition([1] * 8, 4, memory=memory)
    assert "at best stage 3 needs 30.8 (layers 7 to 7, 1 microbatches in flight)" in str(refusal.value)
    limit = re.search(r"Use a limit of ([\d.e+]+),", str(refusal.value))
    assert limit, refusal.value
    enough = Memory(static=[0.7] * 8, activations=[0.1] * 8, in_flight=[4, 3, 2, 1], limit=float(limit[1]), first=1 / 3, last=30)
    assert sizes(partition([1] * 8, 4, memory=enough))[-1] == 1


@pytest.mark.parametrize(
    ("costs", "stages", "message"),
    [
        ([1] * 3, 4, r"layers=3, stages=4.*Use 3 stages"),
        ([], 1, "layers=0"),
        ([1] * 3, 0, "stages=0"),
        ([1, -1, 1], 2, "cost -1"),
        ([1, float("nan"), 1], 2, "cost nan"),
    ],
)
def test_impossible_requests_are_refused(costs: list[float], stages: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        partition(costs, stages)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"static": [1]}, "static memory of 1 layers"),
        ({"activations": [1] * 5}, "activation memory of 5 layers"),
        ({"in_flight": [1]}, "1 numbers in_flight.*Give 2"),
        ({"in_flight": [1, -1]}, "activation memory -1"),
        ({"limit": float("inf")}, "activation memory inf"),
        ({"first": -1.0}, "static memory -1"),
    ],
)
def test_impossible_memory_is_refused(fields: dict, message: str) -> None:
    given = {"static": [1] * 4, "activations": [1] * 4, "in_flight": [2, 1], "limit": 99.0}
    with pytest.raises(ConfigError, match=message):
        partition([1] * 4, 2, memory=Memory(**{**given, **fields}))

"""The rows of `check`: all that can run, and a small set in which every pair of choices still meets."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from pymesh3d.commands.layouts import Row, covering_rows, every_row
from pymesh3d.config import validate

OPTIONS = [field.name for field in dataclasses.fields(Row) if field.name not in ("tp", "pp", "dp")]


def pairs(rows: list[Row]) -> set[tuple[tuple[str, object], tuple[str, object]]]:
    """Every two choices that stand together in a row; the stage of ZeRO and when it acts are one."""
    met = set()
    for row in rows:
        choices = [("sizes", (row.tp, row.pp, row.dp)), ("zero", (row.zero_stage, row.zero_once_a_step))]
        choices += [(name, getattr(row, name)) for name in OPTIONS if not name.startswith("zero")]
        met |= set(itertools.combinations(choices, 2))
    return met


@pytest.mark.parametrize("world", [1, 2, 4, 6, 8])
def test_a_small_set_covers_every_pair(world: int) -> None:
    every = every_row(world)
    chosen = covering_rows(every)
    assert pairs(chosen) == pairs(every)
    assert len(chosen) <= 55
    assert len(set(chosen)) == len(chosen) and set(chosen) <= set(every)
    assert [every.index(row) for row in chosen] == sorted(every.index(row) for row in chosen)


def test_no_row_of_the_set_is_idle() -> None:
    """Without any one of them a pair would be missing, or nearly so: greedy choice leaves at most a few too many."""
    every = every_row(8)
    chosen = covering_rows(every)
    spare = [row for row in chosen if pairs([other for other in chosen if other != row]) == pairs(every)]
    assert len(spare) <= len(chosen) // 8


@pytest.mark.parametrize(("stage", "once"), [(2, True), (2, False), (3, True), (3, False)])
def test_zero_meets_all_that_matters_to_it(stage: int, once: bool) -> None:
    """In the small set too: each schedule that it can have, and what other ranks add to gradients of."""
    rows = [row for row in covering_rows(every_row(8)) if (row.zero_stage, row.zero_once_a_step) == (stage, once)]
    assert {row.schedule for row in rows} == {"gpipe", "1f1b", *(("interleaved", "zb-h1") if once else ())}
    assert {(row.tp, row.pp, row.dp) for row in rows} == {(row.tp, row.pp, row.dp) for row in every_row(8) if row.dp > 1}
    if (stage, once) != (2, True):  # that computes what stage 1 does
        assert {row.tied for row in rows} == {row.few_kv for row in rows} == {row.sequence_parallel for row in rows} == {False, True}
        inside = (stage, once) == (3, False)
        assert {row.recompute for row in rows} == {"none", "full"} | ({"selective"} if inside else set())
        assert {row.dropout for row in rows} == ({0.0, 0.1} if inside else {0.0})


@pytest.mark.parametrize("world", [1, 2, 3, 8, 30])
def test_every_row_is_admissible_and_none_is_forgotten(world: int) -> None:
    """Against all combinations of all values, tried one by one."""
    sizes = [(tp, pp, world // tp // pp) for tp in range(1, world + 1) for pp in range(1, world + 1) if world % (tp * pp) == 0]
    flags = [(False, True)] * 3
    values = [(0, 1, 2, 3), (False, True), ("gpipe", "1f1b", "interleaved", "zb-h1"), *flags, ("none", "selective", "full"), (0.0, 0.1)]
    expected = set()
    for (tp, pp, dp), choice in itertools.product(sizes, itertools.product(*values)):
        row = Row(tp=tp, pp=pp, dp=dp, **dict(zip(OPTIONS, choice, strict=True)))
        if (pp == 1 and row.schedule != "1f1b") or (tp == 1 and (row.few_kv or row.sequence_parallel)):
            continue  # changes nothing
        if row.zero_stage != 1 and dp == 1:
            continue  # nobody to share with
        if not row.zero_once_a_step and (row.zero_stage < 2 or row.schedule in ("interleaved", "zb-h1")):
            continue  # once a step in any case
        selective, drops = row.recompute == "selective", row.dropout > 0
        if (selective and drops) or ((selective or drops) and (row.few_kv or row.zero_stage in (0, 2))):
            continue  # what happens inside a layer
        if row.zero_stage == 3 and row.zero_once_a_step and (selective or drops):
            continue
        if row.zero_stage == 2 and row.zero_once_a_step and (row.sequence_parallel or row.tied or row.few_kv or row.recompute == "full"):
            continue  # computes what stage 1 does
        if row.zero_stage >= 2 and row.few_kv != row.sequence_parallel:
            continue
        validate(row.model, row.layout, row.train("float64"))
        expected.add(row)
    every = every_row(world)
    assert set(every) == expected and len(every) == len(expected)


@pytest.mark.parametrize("world", [3, 5, 6, 7, 8, 9, 10, 12, 16])
def test_every_size_is_tried_on_each_axis(world: int) -> None:
    """Also those that divide no power of two; a small model may then be larger, but is otherwise the same."""
    rows = every_row(world)
    sizes = {size for size in range(1, world + 1) if world % size == 0}
    assert {row.tp for row in rows} == {row.pp for row in rows} == {row.dp for row in rows} == sizes
    assert {row.tp for row in rows if row.few_kv} == {row.tp for row in rows if row.sequence_parallel} == sizes - {1}
    for row in rows:
        validate(row.model, row.layout, row.train("float64"))
        assert max(8, row.tp) <= row.model.heads < 8 + row.tp and row.model.dim == 8 * row.model.heads


def test_all_rows_of_8_ranks_are_as_many_as_the_readme_says() -> None:
    assert len(every_row(8)) == 939


@pytest.mark.parametrize("world", [8, 30])
def test_rows_try_what_is_hard(world: int) -> None:
    """Fewer KV heads than ranks where asked, a vocabulary that tp does not divide, microbatches that do not divide the batch."""
    rows = every_row(world)
    assert all((row.model.kv_heads < row.tp) == row.few_kv for row in rows)
    assert all(row.model.vocab % row.tp for row in rows if row.tp > 2)
    assert all(row.train("float64").seq % row.tp == 0 for row in rows)
    uneven = [row for row in rows if row.train("float64").global_batch // row.dp % row.train("float64").micro_batch]
    assert uneven and {row.pp > 1 for row in uneven} == {False, True}

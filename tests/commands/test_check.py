"""`pymesh3d check` passes what is right and finds what is broken, and says where."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pymesh3d import engine
from pymesh3d.commands import check
from pymesh3d.commands.layouts import Row
from pymesh3d.dp.gradients import Gradients
from pymesh3d.dp.units import Units
from pymesh3d.dp.zero import Zero
from pymesh3d.engine import Engine
from pymesh3d.tp import plan
from pymesh3d.tp.layers import RowParallelLinear

Ranks = Callable[..., list[Any]]
TP = Row(tp=2, sequence_parallel=True, few_kv=True)
PP = Row(pp=2)
DP = Row(dp=2)
SHARDED, STAYING = (Row(dp=2, zero_stage=3, zero_once_a_step=once) for once in (False, True))


def compared(row: Row) -> check.Outcome:
    train = row.train("float64")
    plain = dataclasses.replace(train, sequence_parallel=False, zero_stage=1, recompute="none", seed=check.SEED)
    return check.compare(row, check.one_process(row.model, plain, torch.float64, torch.device("cpu")), "float64", "cpu")


def right() -> list[check.Outcome]:
    return [compared(row) for row in (TP, PP, DP, SHARDED, STAYING)]


def test_what_is_right_passes(ranks: Ranks) -> None:
    for outcomes in ranks(2, right):
        assert len(outcomes) == 5
        for outcome in outcomes:
            assert outcome.passed("float64") and outcome.complete and outcome.first == ""
            assert 0 < outcome.gradients < 1e-12 and 0 < outcome.parameters < 1e-12  # NaN would be neither
            assert outcome.loss == pytest.approx(math.log(250), rel=0.01)


# Bugs, each put in by hand for a while, in every rank or in one.


@contextlib.contextmanager
def replaced(owner: Any, name: str, change: Callable[[Any], Any]) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, change(getattr(owner, name)))
        yield


def scaled_row(forward: Any) -> Any:
    return lambda self, x: forward(self, x) * (1 + 1e-9)


def without_norm_sums(placement: Any) -> Any:
    return lambda **fields: placement(**{**fields, "partial": False})


def left_out(_: Any) -> Any:
    return lambda self, *args: None


def other_seed(initialize: Any) -> Any:
    return lambda model, seed, rank: initialize(model, seed + 1, rank)


def loss_by_rank(agree: Any) -> Any:
    def broken(engine: Engine, *args: Any) -> Callable[[], tuple[float, int]]:
        told = agree(engine, *args)

        def wait() -> tuple[float, int]:
            total, counted = told()
            return total * (1 + 1e-13 * engine.mesh.rank), counted

        return wait

    return broken


def nan_in_the_last(gradients: Any) -> Any:
    """On rank 1 alone."""

    def spoiled(self: Engine) -> Iterator[tuple[str, torch.Tensor]]:
        *first, (name, last) = gradients(self)
        yield from first
        yield name, last * math.nan if self.mesh.rank == 1 else last

    return spoiled


def other_in_the_first(parameters: Any) -> Any:
    """On rank 1 alone."""

    def spoiled(self: Engine) -> Iterator[tuple[str, torch.Tensor]]:
        rest = parameters(self)
        name, first = next(rest)
        yield name, first + 1 if self.mesh.rank == 1 else first
        yield from rest

    return spoiled


def one_missing(gradients: Any) -> Any:
    return lambda self: iter(list(gradients(self))[1:])


def no_weight_decay(init: Any) -> Any:
    return lambda self, *args, weight_decay, **options: init(self, *args, weight_decay=0.0, **options)


BROKEN: dict[str, tuple[Row, Any, str, Callable[[Any], Any]]] = {
    "row-parallel output": (TP, RowParallelLinear, "forward", scaled_row),
    "norms under sequence parallelism": (TP, plan, "Placement", without_norm_sums),
    "gradients over dp": (DP, Gradients, "_sum", left_out),
    "gradients of each microbatch over dp": (SHARDED, Gradients, "_reduce_passing", left_out),
    "parameters that are gathered once a step": (STAYING, Units, "let_go", left_out),
    "initial values": (PP, engine, "initialize_", other_seed),
    "initial values on one rank": (TP, Engine, "whole_parameters", other_in_the_first),
    "loss": (PP, Engine, "_agree_on_loss", loss_by_rank),
    "NaN in one tensor": (PP, Engine, "whole_gradients", nan_in_the_last),
    "a tensor left out": (PP, Engine, "whole_gradients", one_missing),
    "weight decay": (DP, Zero, "__init__", no_weight_decay),
}


def broken(name: str) -> check.Outcome:
    row, owner, attribute, change = BROKEN[name]
    with replaced(owner, attribute, change):
        return compared(row)


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_broken_is_found(ranks: Ranks, name: str) -> None:
    first, second = ranks(2, broken, name)
    assert not first.passed("float64")
    assert dataclasses.replace(first, seconds=0.0, loss=0.0) == dataclasses.replace(second, seconds=0.0, loss=0.0)
    assert first.initial_equal == ("initial values" not in name)
    assert first.losses_equal == (name != "loss")
    assert first.complete == (name != "a tensor left out")
    match name:
        case "row-parallel output":
            assert 1e-12 < first.loss_difference < 1e-9
            assert first.first.startswith("gradient of ")
        case "norms under sequence parallelism":
            assert "norm.weight" in first.first and first.gradients > 0.01
        case "gradients over dp" | "gradients of each microbatch over dp":
            assert first.gradients > 0.1
        case "NaN in one tensor":
            assert first.gradients == math.inf and first.first == "gradient of head.weight"
        case "weight decay" | "parameters that are gathered once a step":
            assert first.gradients < 1e-12 < first.parameters and first.first.endswith("weight") and "gradient" not in first.first
        case "loss" | "a tensor left out":
            assert max(first.loss_difference, first.gradients, first.parameters) < 1e-12


def whole_command(name: str | None, file: str) -> tuple[int, str]:
    """Exit status and output over two rows, with a bug or without."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(replaced(check, "covering_rows", lambda _: lambda rows: [PP, TP]))
        if name is not None:
            stack.enter_context(replaced(*BROKEN[name][1:]))
        out = stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        return check.run(2, all_rows=False, device="cpu", json_file=file), out.getvalue()


def test_the_command_says_what_differs(ranks: Ranks, tmp_path: Path) -> None:
    file = tmp_path / "check.json"
    (good, text), (good_too, silent) = ranks(2, whole_command, None, str(file))
    assert (good, good_too, silent) == (0, 0, "")
    assert max(len(line.rstrip()) for line in text.splitlines()[:4]) <= 80
    assert (
        "2 of 2 layouts agree with one process in float64" in text
        and [line.split()[-1] for line in text.splitlines() if line].count("ok") == 2
    )
    assert [(row["row"]["pp"], row["row"]["tp"]) for row in json.loads(file.read_text())] == [(2, 1), (1, 2)]
    (bad, text), (bad_too, _) = ranks(2, whole_command, "norms under sequence parallelism", str(file))
    assert (bad, bad_too) == (1, 1)
    assert "1 of 2 layouts agree" in text and [line.split()[-1] for line in text.splitlines() if line].count("ok") == 1
    assert "DIFFERS: gradient of layers.0.attention_norm.weight" in text
    (bad, _), _ = ranks(2, whole_command, "NaN in one tensor", str(file))
    rows = json.loads(file.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert bad == 1 and [row["gradients"] for row in rows] == [None, None]


def test_the_measure() -> None:
    a, b = torch.tensor([1.0, 2.0, -4.0]), torch.tensor([1.0, 2.5, -4.0])
    assert check.difference(a, b, 1.0) == 0.125
    assert check.difference(a * 1e-6, b * 1e-6, 1.0) == pytest.approx(0.5e-6 / 1e-3)
    assert check.difference(torch.tensor([1.0, math.nan]), torch.tensor([1.0, 2.0]), 1.0) == math.inf

"""A step of the engine is taken by all ranks or by none, whichever of them has a gradient that is not finite, and wherever."""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from pymesh3d.engine import Engine, parallelize
from pymesh3d.mesh import init_mesh
from pymesh3d.models.llama import Llama
from tests.plain import EVERY_STAGE, FLOAT64, SMALL, Batch, assert_near, batch_of, plain, share

Ranks = Callable[..., list[Any]]
BATCHES = [batch_of(8, 8, valid=37, seed=1), batch_of(8, 8, valid=20, seed=2)]


def engine_on(changes: dict[str, Any], sizes: dict[str, int]) -> Engine:
    return parallelize(Llama(SMALL, device="meta"), init_mesh(device="cpu", **sizes), dataclasses.replace(FLOAT64, **changes))


def snapshot(engine: Engine) -> list[torch.Tensor]:
    """Copies of all that a step changes: parameters, masters, optimizer state with its step counts."""
    state = [engine.optimizer.state[master] for master in engine.zero.masters]
    moments = [value for entry in state for value in entry.values()]
    assert len(moments) == 3 * len(state), "AdamW keeps two moments and a step count"
    return [t.detach().clone() for t in [*dict(engine.whole_parameters()).values(), *engine.zero.masters, *moments]]


class Lines(logging.Handler):
    """Collects what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def spoil(engine: Engine, value: float) -> Callable[[], object]:
    """From now on until the result is called, this rank puts `value` into what it sends of a bucket's gradients."""
    exchange = engine.zero._exchange
    reduce = exchange.reduce

    def reducing(bucket: Any, *rest: Any, **options: Any) -> None:
        bucket.grads[3] = value
        reduce(bucket, *rest, **options)

    exchange.reduce = reducing  # type: ignore[method-assign]
    return functools.partial(delattr, exchange, "reduce")


def skipped_steps(changes: dict[str, Any], batches: Sequence[Batch]) -> dict[str, Any]:
    """A step, two that one rank alone spoils (NaN, then infinity), and a good one, with a scheduler that follows `taken`."""
    log, lines = logging.getLogger("pymesh3d"), Lines()
    log.addHandler(lines)
    engine = engine_on(changes, {"pp": 2, "dp": 2})
    schedule = torch.optim.lr_scheduler.StepLR(engine.optimizer, 1, gamma=1.0)
    results = [engine.train_step(share(batches[0], engine))]
    schedule.step()
    before = snapshot(engine)
    for spoiled_on, value in ((3, math.nan), (0, math.inf)):
        each = changes.get("zero_once_a_step") is False  # gradients have gone into a sum when the pass ends
        end = spoil(engine, value) if each and engine.mesh.rank == spoiled_on else lambda: None
        engine.forward_backward(share(batches[1], engine))
        end()
        if engine.mesh.rank == spoiled_on and not each:
            engine.zero.buckets[-1].grads[3] = value
        norm, taken = engine.optimizer_step()
        if taken:
            schedule.step()
        assert not math.isfinite(norm), "the norm says why"
    same = all(torch.equal(a, b) for a, b in zip(before, snapshot(engine), strict=True))
    skipped_at = schedule.last_epoch
    results.append(engine.train_step(share(batches[1], engine)))
    log.removeHandler(lines)
    parameters = dict(engine.whole_parameters())
    engine.mesh.close()
    counts = (engine.zero.steps_taken, engine.zero.steps_skipped, skipped_at)
    return {"results": results, "same": same, "counts": counts, "lines": lines.lines, "parameters": parameters}


@pytest.mark.parametrize("changes", EVERY_STAGE, ids=str)
def test_a_step_that_one_rank_cannot_take_is_taken_by_none(ranks: Ranks, changes: dict[str, Any]) -> None:
    reference = plain(SMALL, FLOAT64, BATCHES)
    for rank, found in enumerate(ranks(4, skipped_steps, changes, BATCHES)):
        assert found["same"]
        assert found["counts"] == (2, 2, 1)
        assert [result.taken for result in found["results"]] == [True, True]
        for result, loss in zip(found["results"], reference.losses, strict=True):
            assert result.loss == pytest.approx(loss, rel=1e-12)
        assert_near(found["parameters"], reference.parameters)
        if rank:
            assert found["lines"] == []
        else:
            nan, inf = found["lines"]
            assert "nan" in nan and "1 skipped" in nan
            assert "inf" in inf and "2 skipped" in inf


def poisoned(sizes: dict[str, int], zero_stage: int, value: float) -> list[str]:
    """Parameters of which `value` in one element of one rank's gradient, on each rank in turn, does not keep all from taking the step."""
    engine = engine_on({"zero_stage": zero_stage, "zero_once_a_step": True}, sizes)
    before, missed = dict(engine.whole_parameters()), []
    for name, parameter in engine.model.named_parameters():
        for rank in range(engine.mesh.layout.world):
            for element in (0, -1, parameter.main_grad.numel() // 2):  # type: ignore[attr-defined]
                if engine.mesh.rank == rank:
                    parameter.main_grad.view(-1)[element] = value  # type: ignore[attr-defined]
                norm, taken = engine.optimizer_step()
                if taken or math.isfinite(norm):
                    missed.append(f"{name}[{element}] of rank {rank}")
    assert all(torch.equal(value, before[name]) for name, value in engine.whole_parameters())
    engine.mesh.close()
    return missed


@pytest.mark.parametrize(
    ("sizes", "zero_stage", "value"),
    [({"tp": 4}, 1, math.inf), *(({"tp": 2, "dp": 2}, stage, math.nan) for stage in (0, 1, 2, 3))],
)
def test_what_is_not_finite_counts_wherever_it_stands(ranks: Ranks, sizes: dict[str, int], zero_stage: int, value: float) -> None:
    """Also in a copy of a replicated parameter (norms, and KV heads where tp is 4) that another rank contributes to the norm."""
    assert ranks(4, poisoned, sizes, zero_stage, value) == [[]] * 4

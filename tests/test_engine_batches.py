"""The engine refuses batches that cannot be trained on, and training where it cannot be: with a reason, and never by a crash."""

from __future__ import annotations

import functools
import math
import os
import re
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from pymesh3d.engine import Engine, parallelize
from pymesh3d.errors import ConfigError, DistributedError
from pymesh3d.mesh import init_mesh
from pymesh3d.models.llama import Llama
from tests.plain import FLOAT64, SMALL, Batch, batch_of, share

Ranks = Callable[..., list[Any]]
SHAPE = "ranks [{}] had another shape of batch than rank {}, and all have dp coordinate {}. "
ADVICE = "Choose a rank's batch by mesh.dp.rank, not by its rank"


def engine_on(**sizes: int) -> Engine:
    return parallelize(Llama(SMALL, device="meta"), init_mesh(device="cpu", **sizes), FLOAT64)


def text_of(error: type[Exception], call: Callable[..., object], *arguments: object) -> str:
    """What is said when it raises."""
    with pytest.raises(error) as caught:
        call(*arguments)
    return str(caught.value)


def another_shape_later(sizes: dict[str, int], samples: int, seq: int) -> list[str]:
    """What is said of a shape that the last rank alone has, after a good step and between others."""
    engine = engine_on(**sizes)
    good = batch_of(4, 8)
    mine = batch_of(samples, seq) if engine.mesh.rank == engine.mesh.layout.world - 1 else good
    texts = []
    for step in (engine.train_step, engine.eval_step):
        assert math.isfinite(engine.train_step(good).loss)
        texts.append(text_of(DistributedError, step, mine))
    assert math.isfinite(engine.eval_step(batch_of(3, 5))), "all ranks may have another shape"
    assert math.isfinite(engine.train_step(good).loss)
    engine.mesh.close()
    return texts


@pytest.mark.parametrize(("samples", "seq"), [(3, 8), (4, 6)])
@pytest.mark.parametrize("sizes", [{"pp": 2}, {"tp": 2}, {"pp": 2, "dp": 2}], ids=str)
def test_shapes_are_compared_in_every_step_off_gpus(ranks: Ranks, sizes: dict[str, int], samples: int, seq: int) -> None:
    world = math.prod(sizes.values())
    text = SHAPE.format(world - 1, world - 1 - sizes.get("dp", 1), sizes.get("dp", 1) - 1) + ADVICE
    assert ranks(world, another_shape_later, sizes, samples, seq) == [[text] * 2] * world


def shapes_of_dp_ranks() -> list[float]:
    """Of batches that grow on one of them."""
    engine = engine_on(dp=2)
    losses = [engine.train_step(batch_of(2 + engine.mesh.rank * more, 8)).loss for more in range(3)]
    engine.mesh.close()
    return losses


def test_dp_ranks_may_have_different_shapes(ranks: Ranks) -> None:
    one, other = ranks(2, shapes_of_dp_ranks)
    assert one == other and all(map(math.isfinite, one))


def refused() -> list[str]:
    """What is said of batches without values of their own and of training in inference mode; then of all after the mesh is closed."""
    engine = engine_on(pp=2)
    good = share(batch_of(4, 8), engine)
    ids, targets = good
    empty, sparse = functools.partial(torch.Tensor.to, device="meta"), torch.Tensor.to_sparse
    texts = [
        text_of(ConfigError, step, batch)
        for step in (engine.train_step, engine.eval_step)
        for batch in ((empty(ids), empty(targets)), (ids, empty(targets)), (sparse(ids), targets))
    ]
    with torch.inference_mode():
        texts += [text_of(ConfigError, engine.train_step, good), text_of(ConfigError, engine.optimizer_step)]
        evaluated = engine.eval_step(good)
    with torch.no_grad():
        assert engine.train_step(good).loss == pytest.approx(evaluated, rel=1e-12), "nothing has changed, and training goes on"
    engine.mesh.close()
    return texts


def test_what_cannot_be_trained_on_is_refused_before_anything_is_sent(ranks: Ranks) -> None:
    rule = "its tensors must be dense and hold values."
    batches = [f"a batch on the meta device: {rule} Give it values"] * 2 + [f"a batch with layout torch.sparse_coo: {rule} Use .to_dense()"]
    mode = "training within torch.inference_mode(): no gradient can go through tensors that are made there, nor can they be changed later. "
    mode += "Train outside of it; eval_step may stay inside, and torch.no_grad() is for both"
    assert ranks(2, refused) == [[*batches * 2, mode, mode]] * 2


def after_the_end(sizes: dict[str, int]) -> list[str]:
    engine = engine_on(**sizes)
    batch = share(batch_of(4, 8), engine)
    engine.train_step(batch)
    engine.mesh.close()
    calls: list[tuple[Any, ...]] = [(engine.train_step, batch), (engine.eval_step, batch), (engine.optimizer_step,)]
    return [text_of(ConfigError, *call) for call in calls]


@pytest.mark.parametrize("sizes", [{}, {"pp": 2}, {"dp": 2}], ids=str)
def test_a_closed_mesh_takes_no_step(ranks: Ranks, sizes: dict[str, int]) -> None:
    """Also in one process, which has nobody to talk to."""
    world = math.prod(sizes.values())
    text = "axis all of a closed mesh: its ranks no longer talk to each other. Call mesh.close() last"
    assert ranks(world, after_the_end, sizes) == [[text] * 3] * world


def dies_in_a_step(batches: Sequence[Batch]) -> tuple[str, float] | None:
    """pp 2 x dp 2; in the second step rank 3 ends in the middle of its second microbatch."""
    engine = engine_on(pp=2, dp=2, timeout_s=5)
    engine.train_step(share(batches[0], engine))
    if engine.mesh.rank == 3:
        forward = engine.stages[engine.mesh.pp.rank].forward
        engine.stages[engine.mesh.pp.rank].forward = lambda number, *rest, **options: (
            os._exit(7) if number else forward(number, *rest, **options)
        )  # type: ignore[method-assign]
    began = time.monotonic()
    try:
        engine.train_step(share(batches[1], engine))
    except DistributedError as error:
        return str(error), time.monotonic() - began
    return None


def test_a_rank_that_dies_in_a_step_is_an_error_on_all_others(fresh_ranks: Ranks) -> None:
    told = fresh_ranks(4, dies_in_a_step, [batch_of(8, 8, seed=1), batch_of(8, 8, seed=2)], timeout=30.0, expect_dead=[3])
    assert told[3] is None
    for rank in range(3):
        text, seconds = told[rank]
        assert text.startswith(f"rank {rank}: ") and " failed after " in text and "with ranks [" in text
        assert seconds < 10.0
    assert re.search(r"(activations|gradients) of microbatch \d over axis pp with ranks \[3\]", told[1][0])

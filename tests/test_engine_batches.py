"""The engine refuses batches that cannot be trained on, and training where it cannot be: with a reason, and never by a crash."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from pymesh3d import engine as engine_module
from pymesh3d.engine import Engine, parallelize
from pymesh3d.errors import ConfigError, DistributedError
from pymesh3d.mesh import init_mesh
from pymesh3d.models.llama import Llama
from tests.plain import FLOAT64, SMALL, batch_of, share
from tests.processes import two_ranks

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
def test_shapes_are_compared_in_every_step(ranks: Ranks, sizes: dict[str, int], samples: int, seq: int) -> None:
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


class Arriving:
    """Stands for what is on the way from a GPU: not there the first `late` times that it is asked for."""

    def __init__(self, numbers: torch.Tensor, late: int) -> None:
        self.numbers, self.left = numbers, late

    def arrived(self) -> bool:
        self.left -= 1
        return self.left < 0


def looked_at_late(when: str) -> list[str]:
    """As on GPUs: the step begins all the same, and shapes that differ are told when they are there: in the step, after it, or when it
    has failed. "before": a step that has failed before they are there.

    Each rank has as many tokens in its one microbatch as the other, so that messages fit, as gloo demands.
    """
    engine = parallelize(Llama(SMALL, device="meta"), init_mesh(device="cpu", pp=2), dataclasses.replace(FLOAT64, micro_batch=8))
    mesh = engine.mesh
    one, other, ran = batch_of(4, 6), batch_of(6, 4), engine_module.run
    engine.train_step(one)

    def compare(shape: torch.Size) -> None:
        numbers = engine_module.exchange_numbers(torch.tensor(shape), mesh, "comparing")
        engine._shapes = Arriving(numbers, 0 if when == "in the step" else 2)  # type: ignore[assignment]

    def run(*arguments: Any, **options: Any) -> torch.Tensor:
        loss = ran(*arguments, **options)
        assert when != "in the step", "it has gone on"
        if when == "after it":
            return loss
        while when == "failed" and not engine._shapes.arrived():  # type: ignore[union-attr]
            pass
        raise DistributedError("a link has timed out")

    engine._compare_shapes = compare  # type: ignore[method-assign]
    assert math.isfinite(engine.train_step(one).loss)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_module, "run", run)
        texts = [text_of(DistributedError, engine.train_step, other if mesh.rank else one)]
    texts.append(mesh._failed)
    mesh.close()
    return texts


@pytest.mark.parametrize("when", ["in the step", "after it", "failed"])
def test_shapes_that_arrive_late_are_told_before_the_loss(ranks: Ranks, when: str) -> None:
    text = SHAPE.format(1, 0, 0) + ADVICE
    for told, after in ranks(2, looked_at_late, when):
        assert told == text
        assert after, "the mesh takes no more steps"


def test_a_failed_step_does_not_wait_for_shapes(ranks: Ranks) -> None:
    assert [told for told, _ in ranks(2, looked_at_late, "before")] == ["a link has timed out"] * 2


ANOTHER_SHAPE = """
import os, sys, time, torch, pymesh3d

mesh = pymesh3d.init_mesh(**{sys.argv[1]: 2}, device="cuda", timeout_s=30)
config = pymesh3d.TrainConfig(seq=128, global_batch=16, micro_batch=2, dtype="bfloat16")
model = pymesh3d.Llama(pymesh3d.ModelConfig(vocab=256, dim=256, layers=4, heads=4, kv_heads=2, ffn=512), device="meta")
engine = pymesh3d.parallelize(model, mesh, config)
tokens = torch.arange(16 * 128, device="cuda").view(16, 128) % 256
for samples in (16, 16, 10):  # all ranks may have another shape
    engine.train_step((tokens[:samples], tokens[:samples]))
mine = tokens[: 13 if mesh.rank else 16]
torch.cuda.synchronize()
began = time.monotonic()
try:
    engine.train_step((mine, mine))
except pymesh3d.DistributedError as error:
    print(f"{time.monotonic() - began:.1f} s", error, flush=True)
    mesh.close()
sys.stdout.flush()
os._exit(0)  # links and groups that were aborted end with the process
"""


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("axis", ["pp", "tp"])
def test_gpus_are_told_of_another_shape_though_the_host_does_not_wait(axis: str) -> None:
    """At once, and not when the time is up that GPUs may wait for each other."""
    with two_ranks(ANOTHER_SHAPE, axis) as ranks:
        for rank in ranks:
            told, _ = rank.communicate(timeout=100)
            assert SHAPE.format(1, 0, 0) + ADVICE in told
            assert float(told.split()[0]) < 10.0


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

"""The interpreter of a schedule: pipelines compute what one process computes, whatever the microbatches."""

from __future__ import annotations

import dataclasses
import datetime
import functools
import gc
import math
import os
import re
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from pymesh3d.comm.links import Expected
from pymesh3d.comm.p2p import Links
from pymesh3d.comm.whole import whole_state_dict
from pymesh3d.config import SCHEDULES, TrainConfig
from pymesh3d.engine import parallelize
from pymesh3d.mesh import init_mesh
from pymesh3d.models.llama import Llama
from pymesh3d.pp.run import Microbatch, run
from pymesh3d.pp.stage import Stage
from pymesh3d.schedule.actions import Action
from pymesh3d.schedule.schedules import build
from tests.plain import EVERY_STAGE, FLOAT64, SMALL, Batch, Run, assert_equal_runs, assert_near, batch_of, on_mesh, plain, share

Ranks = Callable[..., list[Any]]
MASKED = [batch_of(8, 8, valid=37, seed=1), batch_of(8, 8, valid=20, seed=2)]
TIED = dataclasses.replace(SMALL, tied=True)
DEEP = dataclasses.replace(SMALL, layers=8)  # enough for two stages on each of 4 ranks


def scheduled(schedule: str, **changes: Any) -> TrainConfig:
    return dataclasses.replace(FLOAT64, schedule=schedule, virtual_pp=2 if schedule == "interleaved" else 1, **changes)


def trains(configs: Sequence[tuple[TrainConfig, Sequence[Batch]]], sizes: dict[str, int]) -> list[Run]:
    return [on_mesh(DEEP, train, batches, sizes) for train, batches in configs]


def assert_all_equal(found: list[list[Run]], configs: Sequence[tuple[TrainConfig, Sequence[Batch]]]) -> None:
    for number, (train, batches) in enumerate(configs):
        assert_equal_runs([runs[number] for runs in found], plain(DEEP, train, batches))


@pytest.mark.parametrize("pp", [2, 4])
def test_gradients_do_not_depend_on_the_pipeline(ranks: Ranks, pp: int) -> None:
    """4 microbatches, 37 valid tokens unevenly over them: the mean is over all of them, not per microbatch or stage."""
    configs = [(scheduled(schedule), MASKED) for schedule in SCHEDULES]
    assert_all_equal(ranks(pp, trains, configs, {"pp": pp}), configs)


def test_pipelines_with_data_and_tensor_parallelism(ranks: Ranks) -> None:
    configs = [(scheduled(schedule, sequence_parallel=True), MASKED) for schedule in ("1f1b", "interleaved", "zb-h1")]
    for sizes in ({"pp": 2, "dp": 2}, {"pp": 2, "tp": 2}):
        assert_all_equal(ranks(4, trains, configs, sizes), configs)


def test_a_split_backward_changes_no_bit(ranks: Ranks) -> None:
    configs = [(scheduled(schedule, dtype="float32", sequence_parallel=True), MASKED) for schedule in ("1f1b", "zb-h1")]
    for whole, split in ranks(4, trains, configs, {"pp": 2, "tp": 2}):
        assert whole.losses == split.losses
        assert all(torch.equal(split.parameters[name], value) for name, value in whole.parameters.items()), "of this rank's stage"


def test_few_microbatches(ranks: Ranks) -> None:
    """1, 2 and 3 microbatches on 4 stages."""
    configs = [(scheduled(schedule, micro_batch=size), MASKED[:1]) for schedule in SCHEDULES for size in (8, 4, 3)]
    assert_all_equal(ranks(4, trains, configs, {"pp": 4}), configs)


def test_lengths_that_change_between_steps(ranks: Ranks) -> None:
    lengths = [batch_of(8, 8, seed=1), batch_of(8, 12, seed=2), batch_of(3, 6, seed=3), batch_of(8, 8, seed=4)]
    configs = [(scheduled(schedule), lengths) for schedule in SCHEDULES]
    assert_all_equal(ranks(2, trains, configs, {"pp": 2}), configs)


def accumulated(batches: Sequence[Batch], dp: int, changes: dict[str, Any]) -> dict[str, Any]:
    """Gradients of the first batch, of the first batch twice, and of both batches; the norm of the last, what a step leaves behind, and
    what it makes of the parameters. In 4 microbatches."""
    mesh = init_mesh(pp=2, dp=dp, device="cpu")
    engine = parallelize(Llama(SMALL, device="meta"), mesh, dataclasses.replace(FLOAT64, micro_batch=2 // dp, **changes))
    engine.forward_backward(share(batches[0], engine))
    once = dict(engine.whole_gradients())
    engine.forward_backward(share(batches[0], engine))
    twice = dict(engine.whole_gradients())
    engine.zero.zero_grad()
    for number, batch in enumerate(batches):
        engine.forward_backward(share(batch, engine), last=number > 0)
    both = dict(engine.whole_gradients())
    norm, _ = engine.optimizer_step()
    left = max(bucket.grads.abs().max().item() for bucket in engine.zero.buckets if bucket.grads.numel())
    left = max(left, *(gradient.abs().max().item() for _, gradient in engine.whole_gradients()))
    parameters = dict(engine.whole_parameters())
    mesh.close()
    return {"once": once, "twice": twice, "both": both, "norm": norm, "left": left, "parameters": parameters}


@pytest.mark.parametrize("changes", EVERY_STAGE, ids=str)
@pytest.mark.parametrize("dp", [1, 2])
def test_gradients_of_passes_before_a_step_add_up(ranks: Ranks, dp: int, changes: dict[str, Any]) -> None:
    separate = [plain(SMALL, FLOAT64, [batch]).gradients[0] for batch in MASKED]
    summed = {name: separate[0][name] + separate[1][name] for name in separate[0]}
    norm = torch.stack([g.pow(2).sum() for g in summed.values()]).sum().sqrt().item()
    stepped = {name: torch.nn.Parameter(value) for name, value in plain(SMALL, FLOAT64, []).parameters.items()}
    decay = {True: FLOAT64.weight_decay, False: 0.0}
    groups = [{"params": [p for p in stepped.values() if (p.ndim > 1) == flag], "weight_decay": decay[flag]} for flag in (True, False)]
    for name, parameter in stepped.items():
        parameter.grad = summed[name].clone()
    torch.nn.utils.clip_grad_norm_(stepped.values(), FLOAT64.max_norm or math.inf)
    torch.optim.AdamW(groups, lr=FLOAT64.lr, betas=FLOAT64.betas, eps=FLOAT64.eps).step()
    for found in ranks(2 * dp, accumulated, MASKED, dp, changes):
        assert_near(found["once"], separate[0])
        assert_near(found["twice"], {name: 2.0 * g for name, g in separate[0].items()})
        assert_near(found["both"], summed)
        assert abs(found["norm"] - norm) <= 1e-12 * norm
        assert found["left"] == 0.0
        assert_near(found["parameters"], {name: p.detach() for name, p in stepped.items()})


def tied_copies(changes: dict[str, Any], batches: Sequence[Batch]) -> tuple[list[torch.Tensor], list[bool]]:
    """The tied weight as this rank holds it, before any step and after each; whether a step was taken when its copy was spoiled."""
    train = dataclasses.replace(FLOAT64, lr=0.1, eps=1e-4, **changes)
    model = Llama(dataclasses.replace(DEEP, tied=True), device="meta")
    engine = parallelize(model, init_mesh(pp=2, dp=2, device="cpu"), train)
    held = engine.model.embed if engine.model.embed is not None else engine.model.head
    assert held is not None
    (weight,) = held.parameters()
    seen, taken = [weight.detach().clone()], []
    for batch in batches:
        engine.train_step(share(batch, engine))
        seen.append(weight.detach().clone())
    for stage in (0, 1):
        if engine.mesh.pp.rank == stage:
            weight.main_grad[0, 0] = math.nan  # type: ignore[attr-defined]
        taken.append(engine.optimizer_step()[1])
    engine.mesh.close()
    return seen, taken


@pytest.mark.parametrize("changes", EVERY_STAGE, ids=str)
def test_a_weight_tied_over_stages_stays_the_same_on_both(ranks: Ranks, changes: dict[str, Any]) -> None:
    """Bit for bit, after three steps of AdamW at a large learning rate."""
    first, *others = ranks(4, tied_copies, changes, [*MASKED, MASKED[0]])
    assert first[1] == [False, False] and len(first[0]) == 4
    assert not torch.equal(first[0][0], first[0][3]), "it moved"
    for seen, taken in others:
        assert taken == [False, False]
        assert all(torch.equal(found, expected) for found, expected in zip(seen, first[0], strict=True))


@pytest.mark.parametrize("changes", EVERY_STAGE, ids=str)
def test_a_weight_tied_over_stages_gets_the_gradients_of_both(ranks: Ranks, changes: dict[str, Any]) -> None:
    train = dataclasses.replace(FLOAT64, **changes)
    assert_equal_runs(ranks(4, on_mesh, TIED, train, MASKED, {"pp": 2, "dp": 2}), plain(TIED, train, MASKED))


class Unit(torch.nn.Module):
    """w * h, h being 1 where there is none: with the mean loss every microbatch's gradient is 1 in full."""

    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, ids: torch.Tensor, h: torch.Tensor | None, masks: object = None) -> torch.Tensor:
        return self.w * (torch.ones(ids.shape, dtype=torch.float64) if h is None else h)


def unit_gradients(schedule: str, virtual: int) -> tuple[list[float], list[float]]:
    """4 microbatches, twice, before any optimizer: (gradients of this rank's stages, losses)."""
    mesh = init_mesh(pp=2, device="cpu")
    last = 2 * virtual - 1
    modules = {number: Unit() for number in range(mesh.pp.rank, last + 1, 2)}
    stages = {
        number: Stage(module, first=number == 0, last=number == last, loss=lambda output, _: output.mean() / 4)
        for number, module in modules.items()
    }
    links = Links(mesh, ring=virtual > 1)
    microbatches = [Microbatch(torch.zeros(2, 4), torch.zeros(2, 4), Expected((2, 4), torch.float64, n)) for n in range(4)]
    steps = build(schedule, 2, 4, virtual).steps(mesh.pp.rank)
    losses = [run(steps, stages, links, microbatches).item() for _ in range(2)]
    for link in (links.before, links.after):
        assert link is None or not link._sent, "a step ends when all that it sent has left"  # type: ignore[attr-defined]
    mesh.close()
    return [module.w.grad.item() for module in modules.values() if module.w.grad is not None], losses


@pytest.mark.parametrize(
    ("schedule", "virtual"), [("gpipe", 1), ("1f1b", 1), ("zb-h1", 1), ("interleaved", 1), ("interleaved", 2), ("interleaved", 3)]
)
def test_unit_gradients_add_up_to_two(ranks: Ranks, schedule: str, virtual: int) -> None:
    assert ranks(2, unit_gradients, schedule, virtual) == [([2.0] * virtual, [0.0, 0.0]), ([2.0] * virtual, [1.0, 1.0])]


def test_an_action_without_a_rule_is_refused_and_nothing_is_kept() -> None:
    stage = Stage(Unit(), first=True, last=True, loss=lambda output, _: output.sum())
    microbatch = Microbatch(torch.zeros(1, 1), torch.zeros(1, 1), Expected((1, 1), torch.float64, 0))
    links = Links.__new__(Links)
    links.before = links.after = None
    told = list[str]()
    mesh = SimpleNamespace(require_in_step=lambda: told.append("begins"), fail=lambda error: told.append(str(error)))
    links.mesh = mesh  # type: ignore[assignment]
    unknown = Action("F", 0, 0)
    object.__setattr__(unknown, "kind", "X")
    with pytest.raises(AssertionError, match="no rule to run X0"):
        run([(Action("F", 0, 0),), (unknown,)], {0: stage}, links, [microbatch])
    assert told == ["begins", "no rule to run X0@0"]
    with pytest.raises(KeyError):
        stage.backward(0, None)


def goes_on_after_a_failed_step(axis: str, batches: Sequence[Batch]) -> list[str]:
    """2 ranks: rank 1 has no memory for its second microbatch. What each is told of that step, and of all that it could do next."""
    engine = parallelize(Llama(SMALL, device="meta"), init_mesh(**{axis: 2}, device="cpu", timeout_s=2.0), FLOAT64)
    engine.train_step(share(batches[0], engine))
    told = []
    (stage,) = engine.stages.values()
    forward = stage.forward

    def without_room(number: int, *rest: Any, **options: Any) -> torch.Tensor:
        if number:
            raise torch.OutOfMemoryError("no room")
        return forward(number, *rest, **options)

    if engine.mesh.rank == 1:
        stage.forward = without_room  # type: ignore[method-assign]
    batch = share(batches[0], engine)
    train, *others = (functools.partial(step, batch) for step in (engine.train_step, engine.forward_backward, engine.eval_step))
    for step in (train, train, *others, engine.optimizer_step):
        with pytest.raises(RuntimeError) as caught:
            step()
        told.append(str(caught.value))
        stage.forward = forward  # type: ignore[method-assign]
    # Rank 1 stays until rank 0 has been told: had it left before, a send of rank 0 might be what fails.
    assert dist.group.WORLD is not None
    store = dist.group.WORLD.get_group_store()
    store.set(f"rank {engine.mesh.rank} has been told", "")
    store.wait(["rank 0 has been told"], datetime.timedelta(seconds=20))
    engine.mesh.close()
    return told


@pytest.mark.parametrize(
    ("axis", "operation"), [("pp", r"receive of gradients of microbatch \d over axis pp"), ("tp", "all-reduce over axis tp")]
)
def test_nobody_goes_on_after_a_failed_step(ranks: Ranks, axis: str, operation: str) -> None:
    """What is under way would be taken for the next step's."""
    (waited, *first), (spoiled, *second) = ranks(2, goes_on_after_a_failed_step, axis, MASKED)
    assert spoiled == "no room" and re.match(rf"rank 0: {operation} with ranks \[1\] failed", waited)
    for rank, reason, texts in ((0, waited, first), (1, spoiled, second)):
        text = f"rank {rank}: a step has failed before ({reason}), and what is under way between the ranks belongs to it. "
        assert texts == [text + "Close the mesh and start again"] * 4


def goes_on_after_a_failed_update(batches: Sequence[Batch]) -> list[str]:
    """2 ranks of dp: rank 1 has no memory for its optimizer. What each is told of that update, if anything, and of the next step."""
    engine = parallelize(Llama(SMALL, device="meta"), init_mesh(dp=2, device="cpu", timeout_s=2.0), FLOAT64)
    told = []

    def without_room(*_: object) -> None:
        raise torch.OutOfMemoryError("no room")

    if engine.mesh.rank == 1:
        engine.optimizer.step = without_room  # type: ignore[method-assign, assignment]
    for _ in range(2):
        try:
            engine.train_step(share(batches[0], engine))
            told.append("fine")
        except RuntimeError as error:
            told.append(str(error))
    engine.mesh.close()
    return told


def test_nobody_goes_on_after_a_failed_update(ranks: Ranks) -> None:
    """Weights would differ between ranks, and nobody would know."""
    (_, waited), (spoiled, refused) = ranks(2, goes_on_after_a_failed_update, MASKED)
    assert spoiled == "no room" and "rank 1: a step has failed before (no room)" in refused
    assert "with ranks [1] failed" in waited or "a step has failed before" in waited


def stages_together(batches: Sequence[Batch]) -> tuple[float, dict[str, torch.Tensor]]:
    """An evaluation after a step, and the parameters of all stages."""
    engine = parallelize(Llama(TIED, device="meta"), init_mesh(tp=2, pp=2, device="cpu"), FLOAT64)
    engine.train_step(share(batches[0], engine))
    parts: list[dict[str, torch.Tensor]] = [{}] * engine.mesh.layout.world
    dist.all_gather_object(parts, whole_state_dict(engine.model, engine.mesh))
    loss = engine.eval_step(share(batches[1], engine))
    engine.mesh.close()
    return loss, {name: value for part in parts for name, value in part.items()}


def test_the_stages_together_are_the_model(ranks: Ranks) -> None:
    for loss, state in ranks(4, stages_together, MASKED):
        model = Llama(TIED, dtype=torch.float64)
        model.load_state_dict(state)
        ids, targets = MASKED[1]
        assert loss == pytest.approx(F.cross_entropy(model(ids).flatten(0, 1), targets.flatten()).item(), rel=1e-12)


def engines_in_turns(batches: Sequence[Batch]) -> tuple[list[list[float]], int]:
    """Losses of two engines on one mesh, which take turns, and how many files two more have opened."""
    first = parallelize(Llama(SMALL, device="meta"), init_mesh(pp=2, device="cpu"), FLOAT64)
    second = parallelize(Llama(TIED, device="meta"), first.mesh, dataclasses.replace(FLOAT64, micro_batch=1))
    losses: list[list[float]] = [[], []]
    for batch in batches:
        for engine, own in zip((first, second), losses, strict=True):
            own.append(engine.train_step(share(batch, engine)).loss)
    gc.collect()  # what earlier tests have left behind goes now, and not while we count
    opened = len(os.listdir("/proc/self/fd"))
    kept = [parallelize(Llama(SMALL, device="meta"), first.mesh, FLOAT64) for _ in range(2)]
    opened = len(os.listdir("/proc/self/fd")) - opened
    assert all(engine.links.after is first.links.after for engine in kept)
    first.mesh.close()
    return losses, opened


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="this system does not list the open files of a process")
def test_engines_on_one_mesh_share_its_links(ranks: Ranks) -> None:
    expected = [plain(model, FLOAT64, MASKED).losses for model in (SMALL, TIED)]
    for losses, opened in ranks(2, engines_in_turns, MASKED):
        assert losses == [pytest.approx(own, rel=1e-12) for own in expected]
        assert opened <= 0

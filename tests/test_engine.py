"""The engine: one step means the same on every layout, is taken by all ranks or by none, and never waits for ever."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from pymesh3d.config import ModelConfig, TrainConfig
from pymesh3d.engine import Engine, parallelize, stage_layers
from pymesh3d.errors import ConfigError, DistributedError
from pymesh3d.mesh import init_mesh
from pymesh3d.models.llama import Llama
from pymesh3d.placement import placement_of
from tests.plain import EVERY_STAGE, FLOAT64, IGNORED, SMALL, Batch, Run, assert_equal_runs, assert_near, batch_of, on_mesh, plain, share

Ranks = Callable[..., list[Any]]
BATCHES = [batch_of(8, 8, valid=37, seed=1), batch_of(8, 8, valid=20, seed=2)]
TIED = dataclasses.replace(SMALL, tied=True)


def engine_on(model: ModelConfig = SMALL, train: TrainConfig = FLOAT64, **sizes: int) -> Engine:
    return parallelize(Llama(model, device="meta"), init_mesh(device="cpu", **sizes), train)


LAYOUTS: list[tuple[ModelConfig, dict[str, Any], dict[str, int]]] = [
    (SMALL, {"zero_stage": 0, "sequence_parallel": True}, {"tp": 2, "dp": 2}),
    (TIED, {"zero_stage": 1}, {"tp": 2, "dp": 2}),
    (TIED, {"zero_stage": 0, "recompute": "full", "sequence_parallel": True}, {"tp": 4}),  # fewer KV heads than ranks
    (SMALL, {"zero_stage": 1, "recompute": "full"}, {"pp": 2, "dp": 2}),
    (TIED, {"zero_stage": 1}, {"pp": 2, "dp": 2}),  # the weight stands on two stages
    (TIED, {"zero_stage": 0, "schedule": "gpipe"}, {"pp": 4}),
    (TIED, {"zero_stage": 0, "max_norm": 0.01}, {"pp": 2, "tp": 2}),
    (SMALL, {"zero_stage": 1, "max_norm": None, "eps": 1e-4, "weight_decay": 0.5}, {"dp": 4}),
    (SMALL, {"dropout": 0.3, "sequence_parallel": True, "recompute": "full"}, {"tp": 2, "dp": 2}),
    (TIED, {"dropout": 0.1, "micro_batch": 5}, {"pp": 2, "tp": 2}),  # two microbatches of 4
    (SMALL, {"dropout": 0.3, "schedule": "interleaved", "virtual_pp": 2, "recompute": "full"}, {"pp": 2, "dp": 2}),
    (TIED, {"schedule": "zb-h1", "micro_batch": 1, "sequence_parallel": True}, {"pp": 2, "tp": 2}),
    (SMALL, {"zero_stage": 2, "micro_batch": 1}, {"dp": 4}),
    (TIED, {"zero_stage": 2, "zero_once_a_step": False}, {"pp": 2, "dp": 2}),
    (TIED, {"zero_stage": 3, "micro_batch": 1, "recompute": "full", "sequence_parallel": True}, {"tp": 2, "dp": 2}),
    (SMALL, {"zero_stage": 3, "micro_batch": 1, "zero_once_a_step": False, "dropout": 0.1}, {"pp": 2, "dp": 2}),
    (SMALL, {"zero_stage": 3, "schedule": "zb-h1", "micro_batch": 1}, {"pp": 2, "dp": 2}),
    (TIED, {"zero_stage": 3, "schedule": "interleaved", "virtual_pp": 2, "recompute": "selective"}, {"pp": 2, "dp": 2}),
]


def on_poisoned_memory(
    layouts: Sequence[tuple[ModelConfig, dict[str, Any], dict[str, int]]], batches: Sequence[Batch]
) -> list[tuple[Run, Run]]:
    """Before a step and after some, for each layout, while memory that nobody has written yet holds NaN."""
    torch.set_deterministic_debug_mode("error")  # new memory is filled with NaN
    try:
        assert torch.empty(3).isnan().all()
        trains = [(model, dataclasses.replace(FLOAT64, **changes), sizes) for model, changes, sizes in layouts]
        return [(on_mesh(model, train, [], sizes), on_mesh(model, train, batches, sizes)) for model, train, sizes in trains]
    finally:
        torch.set_deterministic_debug_mode("default")


def test_every_layout_computes_what_one_process_does(ranks: Ranks) -> None:
    """Initial values bit by bit; gradients, norms, losses, parameters within 1e-12; no trace of what was in the memory before."""
    found = ranks(4, on_poisoned_memory, LAYOUTS, BATCHES)
    for number, (model, changes, _) in enumerate(LAYOUTS):
        train = dataclasses.replace(FLOAT64, **changes)
        assert_equal_runs([rank[number][1] for rank in found], plain(model, train, BATCHES))
        initial = plain(model, train, []).parameters
        for rank in found:
            assert all(torch.equal(value, initial[name]) for name, value in rank[number][0].parameters.items())


def chosen(changes: dict[str, Any], sizes: dict[str, int]) -> dict[str, Any]:
    """What a step on one-sample microbatches shows of choices that change no number."""
    compiled: list[object] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", lambda forward: compiled.append(forward) or forward)
        engine = engine_on(train=dataclasses.replace(FLOAT64, micro_batch=1, **changes), **sizes)
    forwards: list[object] = []
    next(iter(engine.model.layers.values())).register_forward_pre_hook(lambda *_: forwards.append(1))
    in_flight, backward = [], engine.stages[engine.mesh.pp.rank].backward

    def counted(*arguments: Any, **options: Any) -> torch.Tensor | None:
        in_flight.append(len(engine.stages[engine.mesh.pp.rank]._in_flight))
        return backward(*arguments, **options)

    engine.stages[engine.mesh.pp.rank].backward = counted  # type: ignore[method-assign]
    engine.eval_step(share(BATCHES[1], engine))  # it has a schedule of its own
    forwards.clear()
    engine.train_step(share(BATCHES[0], engine))
    parts = sum(b.weights.numel() for b in engine.zero.buckets) / sum(m.numel() for m in engine.zero.masters)
    engine.mesh.close()
    return {
        "in flight": max(in_flight),
        "forwards": len(forwards) / len(in_flight),
        "compiled": len(compiled),
        "parts": parts,
        "sent": engine.zero.reduce_dtype,
        "rows": placement_of(engine.model.embed.weight).local_shape()[0] if engine.model.embed else None,
    }


def test_choices_that_change_no_number_are_heeded(ranks: Ranks) -> None:
    """Microbatches in flight, runs of a layer, compiled layers, ranks among which masters are cut, what is sent, rows of the embedding."""
    plainly = {"zero_stage": 0, "schedule": "gpipe", "vocab_multiple": 4}
    for found in ranks(2, chosen, plainly, {"dp": 2}):
        assert found == {"in flight": 4, "forwards": 1, "compiled": 0, "parts": 1, "sent": None, "rows": 20}
    thriftily = {"zero_stage": 1, "recompute": "full", "compile": True, "reduce_dtype": "float32"}
    for found in ranks(2, chosen, thriftily, {"dp": 2}):
        assert found == {"in flight": 1, "forwards": 2, "compiled": 4, "parts": 2, "sent": torch.float32, "rows": 19}
    assert [found["in flight"] for found in ranks(2, chosen, {"schedule": "1f1b"}, {"pp": 2})] == [2, 1]
    assert [found["in flight"] for found in ranks(2, chosen, {"schedule": "gpipe"}, {"pp": 2})] == [8, 8]


def descended() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Parameters after a step of an optimizer of one's own, and what they should be: gradients, clipped to 0.5, taken off twice."""
    mesh = init_mesh(device="cpu")
    train = dataclasses.replace(FLOAT64, max_norm=0.5, weight_decay=0.0)
    engine = parallelize(Llama(SMALL, device="meta"), mesh, train, optimizer=functools.partial(torch.optim.SGD, lr=2.0))
    before = {name: value.clone() for name, value in engine.whole_parameters()}
    engine.forward_backward(share(BATCHES[0], engine))
    gradients = dict(engine.whole_gradients())
    norm, _ = engine.optimizer_step()
    assert norm > 0.5, "so that clipping has something to do"
    after = dict(engine.whole_parameters())
    mesh.close()
    return list(after.values()), [before[name] - 2.0 * gradients[name] * (0.5 / (norm + 1e-6)) for name in after]


def test_an_optimizer_of_ones_own_takes_the_step(ranks: Ranks) -> None:
    for after, expected in ranks(2, descended):
        for value, wanted in zip(after, expected, strict=True):
            assert torch.allclose(value, wanted, rtol=1e-13, atol=1e-15)


class GivenLosses(torch.nn.Module):
    """Logits whose cross-entropy with target 0 is the token's id, times a weight of 1."""

    def __init__(self, vocab: int) -> None:
        super().__init__()
        self.vocab = vocab
        self.weight = torch.nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, ids: torch.Tensor, h: torch.Tensor | None = None, masks: object = None) -> torch.Tensor:
        first = -torch.log(torch.expm1(ids.double()) / (self.vocab - 1))  # log(1 + (V - 1) / e^first) is the id
        return self.weight * torch.cat((first.unsqueeze(-1), torch.zeros(*ids.shape, self.vocab - 1, dtype=torch.float64)), -1)


def given_losses(batch: Batch) -> tuple[float, int, float]:
    """(loss, tokens, this rank's gradient) over one-sample microbatches."""
    engine = engine_on(train=dataclasses.replace(FLOAT64, micro_batch=1))
    module = engine.stages[engine.mesh.pp.rank].module = GivenLosses(SMALL.vocab)
    loss, tokens = engine.forward_backward(share(batch, engine))
    engine.mesh.close()
    assert module.weight.grad is not None
    return loss, tokens, module.weight.grad.item()


def tokens_with(losses: list[list[int]], seq: int) -> Batch:
    """A row a list: tokens with these losses, the rest ignored (with losses of 9)."""
    ids = torch.tensor([row + [9] * (seq - len(row)) for row in losses])
    return ids, torch.tensor([[0] * len(row) + [IGNORED] * (seq - len(row)) for row in losses])


@pytest.mark.parametrize(
    "world, losses, expected",
    [(2, [[1, 1, 1], [5]], 2.0), (1, [[1] * 6, [3] * 2], 1.5), (2, [[1] * 6, [3] * 2, [], [7] * 3], (6 + 6 + 21) / 11), (2, [[], []], 0.0)],
    ids=["ranks", "microbatches", "both, and one empty", "none"],
)
def test_every_token_weighs_the_same(ranks: Ranks, world: int, losses: list[list[int]], expected: float) -> None:
    ids, targets = tokens_with(losses, 8)
    module = GivenLosses(SMALL.vocab)
    summed = F.cross_entropy(module(ids).flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")
    (summed / max(1, sum(map(len, losses)))).backward()
    assert module.weight.grad is not None
    found = ranks(world, given_losses, (ids, targets))
    for loss, tokens, _ in found:
        assert loss == pytest.approx(expected, rel=1e-14) and loss == found[0][0]
        assert tokens == 8 * len(losses)  # ignored ones are tokens too
    assert sum(gradient for *_, gradient in found) == pytest.approx(module.weight.grad.item(), rel=1e-14)


@pytest.mark.parametrize("changes", EVERY_STAGE, ids=str)
def test_gradients_weigh_every_token_the_same(ranks: Ranks, changes: dict[str, Any]) -> None:
    """On dp ranks with 7, 2 and 1, 0 tokens in microbatches, which are added up: the means of each would weigh them differently."""
    ids, targets = batch_of(4, 8, seed=8)
    for row, tokens in zip(targets, (7, 2, 1, 0), strict=True):
        row[tokens:] = IGNORED
    train = dataclasses.replace(FLOAT64, micro_batch=1, **changes)
    assert_equal_runs(ranks(2, on_mesh, SMALL, train, [(ids, targets)], {"dp": 2}), plain(SMALL, train, [(ids, targets)]))


def test_tokens_count_once(ranks: Ranks) -> None:
    """A sample of 5 tokens, on tp 2 and on pp 2: 5 tokens, the loss of one process on every rank."""
    sample = [batch_of(1, 5, seed=7)]
    for sizes in ({"tp": 2}, {"pp": 2}):
        assert_equal_runs(ranks(2, on_mesh, SMALL, FLOAT64, sample, sizes), plain(SMALL, FLOAT64, sample))


def held_out_loss(engine: Engine, batch: Batch) -> float:
    """What `eval_step` gives; it must keep nothing for a backward and leave what was accumulated as it is."""
    before = [bucket.grads.clone() for bucket in engine.zero.buckets]
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t), t)[1], lambda t: t):
        loss = engine.eval_step(batch)
    assert not kept, f"{len(kept)} tensors are kept for a backward that never comes"
    assert all(torch.equal(bucket.grads, grads) for bucket, grads in zip(engine.zero.buckets, before, strict=True))
    assert all(parameter.grad is None for parameter in engine.model.parameters())
    return loss


def uneven(batches: Sequence[Batch]) -> dict[str, Any]:
    """Train on 8 samples in microbatches of 3, evaluate 5 in two, train again; also evaluate between a pass and its step."""
    engine = engine_on(train=dataclasses.replace(FLOAT64, micro_batch=3), pp=2)
    sizes, forward = [], engine.stages[engine.mesh.pp.rank].forward

    def counted(number: int, ids: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
        sizes.append(ids.shape[0])
        return forward(number, ids, *rest, **options)

    engine.stages[engine.mesh.pp.rank].forward = counted  # type: ignore[method-assign]
    losses = [engine.train_step(batches[0]).loss, held_out_loss(engine, batches[1])]
    loss, _ = engine.forward_backward(batches[2])
    losses += [loss, held_out_loss(engine, batches[1])]
    engine.optimizer_step()
    parameters = dict(engine.whole_parameters())
    engine.mesh.close()
    return {"sizes": sizes, "losses": losses, "parameters": parameters}


def test_uneven_microbatches_and_evaluation_between_steps(ranks: Ranks) -> None:
    train = [batch_of(8, 8, valid=37, seed=1), batch_of(8, 8, valid=20, seed=2)]
    evaluated = batch_of(5, 6, valid=11, seed=3)
    reference = plain(SMALL, FLOAT64, train)
    model = Llama(SMALL, dtype=torch.float64)
    model.load_state_dict(plain(SMALL, FLOAT64, train[:1]).parameters)
    held_out = F.cross_entropy(model(evaluated[0]).flatten(0, 1), evaluated[1].flatten(), ignore_index=IGNORED).item()
    for found in ranks(2, uneven, [train[0], evaluated, train[1]]):
        assert found["sizes"] == [3, 3, 2, 3, 2, 3, 3, 2, 3, 2]
        assert found["losses"] == pytest.approx([reference.losses[0], held_out, reference.losses[1], held_out], rel=1e-12)
        assert_near(found["parameters"], reference.parameters)


def local_parameters(batches: Sequence[Batch]) -> dict[str, tuple[bool, torch.Tensor]]:
    """Of a float32 model whose ranks began with different values: per parameter whether tp replicates it, and this rank's values."""
    mesh = init_mesh(tp=2, dp=2, device="cpu")
    engine = parallelize(Llama(SMALL), mesh, dataclasses.replace(FLOAT64, dtype="float32", lr=1e-2, sequence_parallel=True))
    for batch in batches:
        engine.train_step(share(batch, engine))
    mesh.close()
    return {placement_of(p).name: (placement_of(p).replicated, p.detach()) for p in engine.model.parameters()}


@pytest.mark.parametrize("steps", [0, 5])
def test_replicas_stay_equal(ranks: Ranks, steps: int) -> None:
    found = ranks(4, local_parameters, [BATCHES[n % 2] for n in range(steps)])
    for name, (replicated, value) in found[0].items():
        assert torch.equal(found[2][name][1], value) and torch.equal(found[3][name][1], found[1][name][1]), name
        assert torch.equal(found[1][name][1], value) == replicated, name


def other_configuration() -> str:
    mesh = init_mesh(device="cpu")
    with pytest.raises(DistributedError) as caught:
        parallelize(Llama(SMALL, device="meta"), mesh, dataclasses.replace(FLOAT64, vocab_multiple=1 + (mesh.rank == 1)))
    mesh.close()
    return str(caught.value)


def test_ranks_with_different_configurations_are_told(ranks: Ranks) -> None:
    """Also where only the last field differs."""
    for text in ranks(4, other_configuration):
        assert "the same configuration" in text and "rank 1 has" in text and "rank 0 has" not in text
        assert "vocab_multiple=1)" in text and "vocab_multiple=2)" in text


def refused() -> list[str]:
    engine = engine_on(train=dataclasses.replace(FLOAT64, sequence_parallel=True), tp=2)
    zeros, outside = functools.partial(torch.zeros, dtype=torch.int64), torch.full((2, 4), SMALL.vocab)
    ids, texts = zeros(2, 4), []
    shapes = [
        (zeros(4), zeros(4)),
        (ids, zeros(2, 5)),
        (zeros(0, 4), zeros(0, 4)),
        (zeros(2, 7), zeros(2, 7)),
        (outside, ids),
        (ids, outside),
    ]
    for batch in (*shapes, None, ids, (ids,), (ids, ids, ids), (ids, [0]), (ids.float(), ids), (ids, ids.to(torch.int16))):
        with pytest.raises(ConfigError) as caught:
            engine.forward_backward(batch)  # type: ignore[arg-type]
        texts.append(str(caught.value))
    assert engine.eval_step((ids.int(), ids.int())) == engine.eval_step((ids, ids))
    loss = engine.train_step((zeros(2, 8), zeros(2, 8))).loss
    engine.mesh.close()
    return [*texts, str(math.isfinite(loss))]


def test_bad_batches_are_refused_and_training_goes_on(ranks: Ranks) -> None:
    pair = "it must be two torch tensors. Give (token ids, targets)"
    words = ["(4,)", "(2, 4), targets (2, 5)", "(0, 4)", "sequence of 7, tp=2", "ids from 19 to 19", "targets from 19 to 19", *[pair] * 5]
    words += ["token ids of torch.float32, targets of torch.int64: both", "token ids of torch.int64, targets of torch.int16: both", "True"]
    for texts in ranks(2, refused):
        for text, part in zip(texts, words, strict=True):
            assert part in text


def test_layers_are_spread_with_the_head_as_a_layer() -> None:
    assert stage_layers(SMALL, 1) == [range(4)]
    assert stage_layers(SMALL, 4) == [range(0, 1), range(1, 2), range(2, 3), range(3, 4)]
    seven = dataclasses.replace(SMALL, layers=7)
    assert all([layer for stage in stage_layers(seven, stages) for layer in stage] == list(range(7)) for stages in range(1, 8))
    large_head = dataclasses.replace(SMALL, vocab=200_000)
    assert stage_layers(large_head, 2) == [range(0, 3), range(3, 4)]


def refused_models() -> list[str]:
    mesh = init_mesh(pp=2, device="cpu")
    frozen = Llama(SMALL, device="meta")
    for name, parameter in frozen.named_parameters():
        parameter.requires_grad_(not name.startswith(("embed", "layers.0", "layers.1")))
    texts = []
    for model, optimizer in ((frozen, None), (Llama(SMALL, device="meta"), [])):
        with pytest.raises(ConfigError) as caught:
            parallelize(model, mesh, FLOAT64, optimizer=optimizer)  # type: ignore[arg-type]
        texts.append(str(caught.value))
    next(frozen.layers["0"].parameters()).requires_grad_()
    parallelize(frozen, mesh, FLOAT64)
    with pytest.raises(ConfigError, match=r"a model that has been parallelized before: .* Make a new one"):
        parallelize(frozen, mesh, FLOAT64)
    ends = Llama(SMALL, device="meta").requires_grad_(False)
    for parameter in (ends.embed.weight, ends.norm.weight):  # type: ignore[union-attr]
        parameter.requires_grad_()  # type: ignore[union-attr]
    parallelize(ends, mesh, FLOAT64)
    mesh.close()
    return texts


def test_what_cannot_be_trained_is_refused_on_all_stages(ranks: Ranks) -> None:
    for texts in ranks(2, refused_models):
        assert texts == [
            "pp=2 with all parameters of rank 0 along pp frozen (embed, layer 0, layer 1): each rank must have something to train. "
            "Leave requires_grad of one of these on, or use schedule='interleaved' with virtual_pp=2, which gives each rank early and late "
            "layers",
            "optimizer=[]: it must make an optimizer from parameter groups. Use torch.optim.AdamW, or None",
        ]


def different_batches(sizes: dict[str, int], batches: Sequence[Batch]) -> list[str]:
    """What is said of batches that the last rank alone has: fewer samples, others, the same in another order; and of one that all have."""
    engine, texts = engine_on(**sizes), []
    for other in (tuple(part[::2] for part in batches[0]), batches[1], tuple(part.flip(0) for part in batches[0]), batches[0]):
        for step in (engine.eval_step, engine.forward_backward):
            try:
                step(other if engine.mesh.rank == engine.mesh.layout.world - 1 else batches[0])  # type: ignore[operator]
                texts.append("fine")
            except DistributedError as error:
                texts.append(str(error))
    engine.mesh.close()
    return texts


@pytest.mark.parametrize("sizes", [{"tp": 2}, {"pp": 2}, {"dp": 2, "tp": 2}], ids=str)
def test_ranks_of_one_dp_coordinate_have_the_same_batch(ranks: Ranks, sizes: dict[str, int]) -> None:
    world = math.prod(sizes.values())
    text = "ranks [{}] had another {} than rank {}, and all have dp coordinate {}. Choose a rank's batch by mesh.dp.rank, not by its rank"
    texts = [text.format(world - 1, what, world - 2, world // 2 - 1) for what in ("shape of batch", "batch", "batch")]
    told = [text for text in texts for _ in range(2)]
    assert ranks(world, different_batches, sizes, BATCHES) == [[*told, "fine", "fine"]] * world
    assert ranks(2, different_batches, {"dp": 2}, BATCHES) == [["fine"] * 8] * 2


def swapped_arguments() -> list[str]:
    mesh = init_mesh(device="cpu")
    model, texts = Llama(SMALL, device="meta"), []
    for arguments in ((torch.nn.Linear(2, 2), mesh), (mesh, model), (model, model), (model, mesh, SMALL)):
        with pytest.raises(ConfigError) as caught:
            parallelize(*arguments)  # type: ignore[arg-type]
        texts.append(str(caught.value))
    mesh.close()
    return texts


def test_other_models_are_told_what_is_for_them(ranks: Ranks) -> None:
    rule = "parallelize(model, mesh, config) is for the reference model"
    own = "For a model of your own use parallelize_module and Zero"
    expected = [
        f"a Linear where a Llama belongs: {rule}. {own}",
        f"a Mesh where a Llama belongs: {rule}. {own}",
        f"a Llama where a Mesh belongs: {rule}. Use the mesh that init_mesh returns",
        f"a ModelConfig where a TrainConfig belongs: {rule}. Use a TrainConfig, or leave it out",
    ]
    assert ranks(1, swapped_arguments) == [expected]

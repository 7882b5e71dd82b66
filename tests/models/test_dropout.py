"""Dropout in the model that trains: C14, and that each step draws anew, evaluation nothing, and a resumed run what it would have drawn.

That every layout has the masks of one process is seen in tests/test_engine.py and by `pymesh3d check`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from pymesh3d.config import RECOMPUTE
from pymesh3d.engine import Engine, parallelize
from pymesh3d.errors import DistributedError
from pymesh3d.mesh import init_mesh
from pymesh3d.models.dropout import Dropout, Masks
from pymesh3d.models.llama import Llama
from tests.plain import FLOAT64, SMALL, batch_of, share

Ranks = Callable[..., list[Any]]
BATCH = batch_of(8, 8, valid=37, seed=1)


def engine_with(sizes: dict[str, int], **changes: Any) -> Engine:
    train = dataclasses.replace(FLOAT64, **{"dropout": 0.3, "sequence_parallel": sizes.get("tp", 1) > 1, **changes})
    return parallelize(Llama(SMALL, device="meta"), init_mesh(device="cpu", **sizes), train)


def gradients_of(recompute: str, dropout: float, sizes: dict[str, int]) -> tuple[dict[str, torch.Tensor], bool]:
    """(gradients of a step, whether torch's generator is as before)."""
    engine = engine_with(sizes, recompute=recompute, dropout=dropout)
    before = torch.get_rng_state()
    engine.forward_backward(share(BATCH, engine))
    found = dict(engine.whole_gradients())
    engine.mesh.close()
    return found, torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("sizes", [{}, {"tp": 2}, {"pp": 2}])
def test_recompute_draws_the_same_masks(ranks: Ranks, sizes: dict[str, int]) -> None:
    """C14: bit by bit, and torch's generators have no part in it."""
    world = max([1, *sizes.values()])
    none, *others = [ranks(world, gradients_of, recompute, 0.3, sizes) for recompute in RECOMPUTE]
    without = ranks(world, gradients_of, "none", 0.0, sizes)
    for rank in range(world):
        gradients, untouched = none[rank]
        assert untouched
        for other, still_untouched in (run[rank] for run in others):
            assert still_untouched and other.keys() == gradients.keys()
            assert all(torch.equal(other[name], gradients[name]) for name in gradients)
        assert not any(torch.equal(without[rank][0][name], gradients[name]) for name in gradients)


def steps_of() -> dict[str, float | list[float]]:
    engine = engine_with({}, lr=0.0, weight_decay=0.0)
    found: dict[str, float | list[float]] = {"evaluation": [engine.eval_step(BATCH)]}
    found["first step"] = [engine.forward_backward(BATCH)[0] for _ in range(2)]
    engine.optimizer_step()
    state = engine.state()
    found["second step"] = [engine.forward_backward(BATCH)[0]]
    found["evaluation"] += [engine.eval_step(BATCH)]  # type: ignore[operator]
    other = engine_with({}, lr=0.0, weight_decay=0.0)
    other.load_state(state)
    found["resumed"] = [other.forward_backward(BATCH)[0]]
    other.load_state(state)  # and again: what the pass in between has added is gone
    found["resumed"] += [other.forward_backward(BATCH)[0]]  # type: ignore[operator]
    found["norms"] = [other.optimizer_step()[0], engine.optimizer_step()[0]]
    other.mesh.close()
    engine.mesh.close()
    plain = engine_with({}, dropout=0.0)
    found["without"] = [plain.forward_backward(BATCH)[0]]
    plain.mesh.close()
    return found


def test_each_step_draws_anew_and_a_resumed_run_goes_on(ranks: Ranks) -> None:
    (found,) = ranks(1, steps_of)
    first, again = found["first step"]
    assert len({first, again, *found["second step"], *found["without"]}) == 4, "the weights are the same, the masks are not"
    assert found["resumed"] == found["second step"] * 2
    assert found["norms"][0] == found["norms"][1] > 0
    assert found["evaluation"] == found["without"] * 2


def uneven() -> str:
    engine = engine_with({"dp": 2})
    ids, targets = BATCH
    mine = slice(0, 6) if engine.mesh.rank == 0 else slice(6, 8)
    with pytest.raises(DistributedError) as caught:
        engine.train_step((ids[mine], targets[mine]))
    engine.mesh.close()
    return str(caught.value)


def test_batches_of_different_sizes_are_refused(ranks: Ranks) -> None:
    """The masks would not be those of one process."""
    assert all("samples of each dp coordinate: [6, 2]. With dropout" in text for text in ranks(2, uneven))


def evaluated_unevenly(dropout: float) -> float:
    """Of 2 samples on rank 0 and 3 on rank 1."""
    engine = engine_with({"dp": 2}, dropout=dropout)
    mine = slice(0, 2) if engine.mesh.rank == 0 else slice(2, 5)
    loss = engine.eval_step((BATCH[0][mine], BATCH[1][mine]))
    engine.mesh.close()
    return loss


def test_evaluation_takes_batches_of_different_sizes(ranks: Ranks) -> None:
    """It draws no masks, whose places could not be told."""
    assert ranks(2, evaluated_unevenly, 0.1) == ranks(2, evaluated_unevenly, 0.0)


def losses_of_a_step(evaluates: bool) -> list[float]:
    """Of three passes of one step, with or without an evaluation before each."""
    engine, losses = engine_with({}, lr=0.0, weight_decay=0.0), []
    for _ in range(3):
        if evaluates:
            engine.eval_step(BATCH)
        losses.append(engine.forward_backward(BATCH)[0])
    engine.mesh.close()
    return losses


def test_an_evaluation_changes_no_masks(ranks: Ranks) -> None:
    (plainly,), (with_evaluation,) = ranks(1, losses_of_a_step, False), ranks(1, losses_of_a_step, True)
    assert with_evaluation == plainly and len(set(plainly)) == 3


def graphs_after_each_step() -> list[int]:
    """How many graphs torch.compile has captured by then. What it would make of them is of no interest."""
    compiled = torch.nn.Module.compile
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.Module, "compile", lambda layer: compiled(layer, backend="eager"))
        engine = engine_with({}, dropout=0.1, compile=True)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    counts = []
    for _ in range(4):
        engine.train_step(BATCH)
        counts.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    engine.mesh.close()
    return counts


def test_layers_are_compiled_once_though_masks_change(ranks: Ranks) -> None:
    (counts,) = ranks(1, graphs_after_each_step)
    assert counts[0] > 0 and counts == counts[:1] * 4


def test_what_is_dropped() -> None:
    """Each place has masks of its own; p of the elements are 0, the others are scaled; samples of a part are those of the whole."""
    h = torch.ones(64 * 6, 32, dtype=torch.float64)  # sequences of 64 tokens, 6 samples
    masks = Masks(0.25, 3, 7, 0, 6)
    whole = Dropout("layers.0.ffn")(h, 6, masks)
    assert set(whole.unique().tolist()) == {0.0, 65536 / (65536 - 16384)}
    assert abs(whole.mean().item() - 1.0) < 0.02
    assert not torch.equal(whole, Dropout("layers.1.ffn")(h, 6, masks))
    assert not torch.equal(whole, Dropout("layers.0.ffn")(h, 6, masks._replace(seed=4)))
    late = Dropout("layers.0.ffn")(h[: 16 * 2], 2, masks._replace(first=3, position=48))  # the last 16 tokens of samples 3 and 4
    assert torch.equal(late.view(16, 2, 32), whole.view(64, 6, 32)[48:, 3:5])

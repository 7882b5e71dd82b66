"""Gradients on their way to their sum over ranks: when it begins, what it takes in, and what comes too late for it."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from pymesh3d.dp import gradients as module
from pymesh3d.dp import shared
from pymesh3d.dp.buckets import Bucket
from pymesh3d.dp.gradients import InOrder
from pymesh3d.dp.zero import STAGES, Zero
from pymesh3d.errors import ConfigError, DistributedError
from pymesh3d.mesh import Mesh, init_mesh
from pymesh3d.placement import placement_of
from tests.kernels import needs_kernels

Ranks = Callable[..., list[Any]]
SGD = functools.partial(torch.optim.SGD, lr=1.0)
WIDTH, LAYERS = 40, 4  # a matrix has numbers in the shards of two ranks
KERNELS = [False, pytest.param(True, marks=needs_kernels)]
TOO_LATE = (
    "a gradient of {} after the sum over ranks has begun: between that and the update there can be no further backward pass. "
    "Call step() first, and put only the last backward pass before it within last_pass()"
)


def buckets_of(sizes: list[int]) -> list[Bucket]:
    """So many parameters in each."""
    return [Bucket([nn.Parameter(torch.zeros(2, 2)) for _ in range(size)], shards=1, decay=True) for size in sizes]


@given(data=st.data(), sizes=st.lists(st.integers(1, 3), max_size=5))
@settings(max_examples=80, deadline=None)
def test_each_is_launched_once_and_in_order(data: st.DataObject, sizes: list[int]) -> None:
    """As soon as it and all before are complete, whatever comes first; some parameters never come. Twice with the same object."""
    buckets = buckets_of(sizes)
    launched: list[tuple[int, bool]] = []
    order = InOrder(buckets, lambda bucket, last: launched.append((buckets.index(bucket), last)))
    everyone = [(number, slot.parameter) for number, bucket in enumerate(buckets) for slot in bucket.slots]
    for _ in range(2):
        coming = data.draw(st.permutations(everyone), label="order")
        coming = coming[: data.draw(st.integers(0, len(coming)), label="how many")]
        assert not any(order.launched(parameter) for _, parameter in everyone), "it begins anew"
        missing, told = list(sizes), []
        for number, parameter in coming:
            order.arrived(parameter)
            order.arrived(nn.Parameter(torch.zeros(1)))  # of another module
            missing[number] -= 1
            complete = next((n for n, left in enumerate(missing) if left), len(sizes))
            told += [(n, not any(missing[n + 1 :])) for n in range(len(told), complete)]
            assert launched == told, "those before the first that misses something, and whether something is missing after them"
            assert [order.launched(parameter) for _, parameter in everyone] == [n < complete for n, _ in everyone]
        order.close()
        assert launched == told + [(n, True) for n in range(len(told), len(sizes))], "all once; nothing comes any more"
        launched.clear()


class Chain(nn.Module):
    """Layers one after the other, of which some can be left out. Each is a bucket of its own; their biases are complete late."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor, skipped: tuple[int, ...] = ()) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            x = x if number in skipped else torch.tanh(layer(x))
        return x.square().sum()


def samples(rank: int, number: int) -> torch.Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(10 * number + rank), dtype=torch.float64)


def zero_over(model: nn.Module, mesh: Mesh, stage: int, **options: Any) -> Zero:
    return Zero(model, mesh, **{"stage": stage, "optimizer": SGD, "weight_decay": 0.0, "bucket_elements": WIDTH * WIDTH, **options})


def sums(passes: list[dict[int, tuple[int, ...] | None]]) -> dict[str, torch.Tensor]:
    """Gradients of one process that does all passes of all ranks; of each, by rank, which layers are skipped (None: no pass)."""
    model = Chain()
    for number, skipped in enumerate(passes):
        for rank, layers in skipped.items():
            if layers is not None:
                model(samples(rank, number), layers).backward()
    return {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}


def named(model: nn.Module, flat: list[torch.Tensor], shapes: dict[str, torch.Size]) -> dict[str, torch.Tensor]:
    """The gradients in whole buckets."""
    found = {}
    for name, parameter in model.named_parameters():
        bucket, start = placement_of(parameter).zero
        found[name] = flat[bucket][start : start + shapes[name].numel()].view(shapes[name])
    return found


def assert_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in found.items():
        assert torch.allclose(value, expected[name], rtol=1e-10, atol=1e-12), f"{name}: {(value - expected[name]).abs().max()}"


ALL: dict[int, tuple[int, ...] | None] = {0: (), 1: ()}
PASSES: dict[str, list[dict[int, tuple[int, ...] | None]]] = {
    "one": [ALL],
    "three": [ALL] * 3,
    "none": [],
    "unused on one rank": [{0: (), 1: (1,)}, {0: (3,), 1: ()}, {0: (0, 2), 1: (1, 3)}],
    "unused": [{0: (2,), 1: (2,)}, {0: (1, 2), 1: (1, 2)}],
}


def over_ranks(stage: int, kernels: bool, names: list[str], last: bool, once: bool) -> list[tuple[dict[str, torch.Tensor], ...]]:
    """Of some series of passes: gradients that a look shows, and those that the step has taken off parameters."""
    mesh = init_mesh(device="cpu")
    model, found = Chain(), []
    shapes = {name: p.shape for name, p in model.named_parameters()}
    zero = zero_over(model, mesh, stage, kernels=kernels, once_a_step=once)
    with zero.whole():
        start = {name: p.detach().clone() for name, p in model.named_parameters()}
    for name in names:
        passes = PASSES[name]
        for number, skipped in enumerate(passes):
            layers = skipped[mesh.rank]
            assert layers is not None
            loss = model(samples(mesh.rank, number), layers)
            with zero.last_pass() if last and number == len(passes) - 1 else nullcontext():
                loss.backward()
            assert all(p.grad is None for p in model.parameters())
        if not last:
            looked = named(model, zero.reduced_grads(), shapes)
        zero.step()
        with zero.whole(), torch.no_grad():
            taken = {name: start[name] - p for name, p in model.named_parameters()}
            dist.barrier()  # nobody writes before all have read
            for name, parameter in model.named_parameters():
                parameter.copy_(start[name])
        dist.barrier()  # nobody goes on before all have written
        found.append((taken if last else looked, taken))
    mesh.close()
    return found


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize(("stage", "once"), [(0, False), (1, False), (2, False), (3, False), (2, True), (3, True)])
def test_all_passes_of_all_ranks_are_summed(ranks: Ranks, stage: int, once: bool, last: bool, kernels: bool) -> None:
    """Also where one rank has no gradient for what the other has, or none has; a look before the step changes nothing."""
    names = [name for name in PASSES if stage < 3 or name != "unused on one rank"]  # layers are gathered by all at once
    for rank in ranks(2, over_ranks, stage, kernels, names, last, once):
        for name, (looked, taken) in zip(names, rank, strict=True):
            expected = sums(PASSES[name])
            assert_close(looked, expected)
            assert_close(taken, expected)


def within_a_graph(stage: int) -> str:
    """What is said of a sum over ranks while a CUDA graph is captured, or would be."""
    mesh = init_mesh(device="cpu")
    model = Chain()
    zero = zero_over(model, mesh, stage, kernels=False)
    loss = model(samples(mesh.rank, 0))
    with pytest.MonkeyPatch.context() as patch, pytest.raises(ConfigError) as caught, zero.last_pass():
        patch.setattr(module, "capturing", lambda device: True)
        loss.backward()
    return str(caught.value)


@pytest.mark.parametrize("stage", STAGES)
def test_no_graph_repeats_a_sum(ranks: Ranks, stage: int) -> None:
    for text in ranks(2, within_a_graph, stage):
        assert text.startswith("a sum of gradients over ranks while a CUDA graph is captured: ranks count the calls"), text


def launches(stage: int) -> list[list[str]]:
    """What happens in passes and steps: a layer's input gets its gradient (B), a bucket of the layer is reduced (R, or L when no
    gradient is awaited any more)."""
    mesh = init_mesh(device="cpu")
    model, said = Chain(), list[str]()
    zero = zero_over(model, mesh, stage, units=[])
    layer_of = {id(layer.weight): number for number, layer in enumerate(model.layers)}
    reduce = zero._exchange.reduce

    def reducing(bucket: Bucket, out: torch.Tensor, **how: Any) -> None:
        letter = "L" if how.get("last") else "R"
        numbers = [layer_of.get(id(slot.parameter), "late") for slot in bucket.slots]
        said.append(f"{letter}{numbers[0]}{'+' if how.get('add') else ''}{'' if how.get('beside') else '!'}")
        reduce(bucket, out, **how)

    zero._exchange.reduce = reducing  # type: ignore[method-assign]
    for number, layer in enumerate(model.layers):
        layer.register_forward_hook(lambda _, given, __, n=number: listen(given[0], n))

    def listen(x: torch.Tensor, number: int) -> None:
        if x.requires_grad:
            x.register_hook(lambda _: said.append(f"B{number}"))

    def both(with_last: bool, layers: tuple[int, ...] = (), parameters: Any = None) -> None:
        for number in range(2):
            loss = model(samples(mesh.rank, number), layers)
            with zero.last_pass(parameters) if number and with_last else nullcontext():
                loss.backward()
            said.append("|")
        zero.step()
        said.append(".")

    both(False)
    both(True)
    both(True, (2,))
    both(True, (2,), [p for layer in model.layers[1:] for p in layer.parameters()])
    mesh.close()
    return [text.split() for text in " ".join(said).split(".")[:-1]]


@pytest.mark.parametrize("stage", [0, 1])
def test_buckets_are_launched_while_the_last_pass_computes(ranks: Ranks, stage: int) -> None:
    """As their layers are done, from the last to the first; else when `step` begins, and then not beside a pass."""
    at_end, late = "L3! L2! L1! L0!", "Rlate!"
    for plain, last, unused, told in ranks(2, launches, stage):
        assert " ".join(plain) == f"B3 B2 B1 | B3 B2 B1 | {at_end} {late}"
        places = {text: last.index(text) for text in ("R3", "R2", "R1", "L0")}
        assert list(places.values()) == sorted(places.values()), "in order"
        again = len(last) - 1 - last[::-1].index("B1")
        assert places["R3"] < again and places["R2"] < again and last[places["L0"] + 1] == "|", "while the pass computes, all by its end"
        assert " ".join(text for text in unused if text[0] != "B") == f"| R3 | L2 L1 L0 {late}", "nothing before what has no gradient"
        assert " ".join(text for text in told if text[0] != "B") == f"| R3 L2 L1 L0 | {late}", "complete at its end, however"


def test_every_pass_is_summed_in_stage_2(ranks: Ranks) -> None:
    """While it computes; sums of further passes are added. Vectors come at the end."""
    for found in ranks(2, launches, 2):
        # In the last pass of a step, if that is told, none is awaited any more in the end; in two steps they wait for layer 2 until then.
        for step, last in zip(found, ("R2+ R1+ R0+", "R2+ R1+ L0+", "L2+ L1+ L0+", "L2+ L1+ L0+"), strict=True):
            texts = [text for text in step if text[0] != "B"]
            assert " ".join(texts) == f"R3 R2 R1 R0 | R3+ {last} | Rlate!", texts
        first = found[0]
        assert first.index("R3") < first.index("B1") and first.index("R2") < first.index("|")


def too_late(stage: int) -> tuple[list[str], list[float]]:
    """What is said of a second backward pass within `last_pass`, after it, and after `reduce`; the weights after a step nevertheless."""
    mesh = init_mesh(device="cpu")
    layer = nn.Linear(2, 1, bias=False)
    nn.init.zeros_(layer.weight)
    zero, texts = Zero(layer, mesh, stage=stage, optimizer=SGD, weight_decay=0.0, units=[]), []

    def again() -> None:
        try:
            layer(torch.ones(2)).sum().backward()
            texts.append("fine")
        except ConfigError as error:
            texts.append(str(error))
        assert layer.weight.grad is None, "nothing is left for the next step"

    for _ in range(2):
        with zero.last_pass():
            again()
            again()
        again()
        zero.reduce()
        again()
        zero.update()
    mesh.close()
    return texts, layer.weight.tolist()[0]


@pytest.mark.parametrize("stage", STAGES)
def test_a_pass_after_the_last_is_refused(ranks: Ranks, stage: int) -> None:
    """From stage 2 on each sums its own gradients, so that more may come until `reduce`."""
    late = TOO_LATE.format((1, 2))
    said = ["fine", "fine", "fine", late] if stage > 1 else ["fine", late, late, late]
    for texts, weight in ranks(2, too_late, stage):
        assert texts == said * 2
        assert weight == [-2.0 * 2 * (3 if stage > 1 else 1)] * 2


def last_passes_of_parts(stage: int, kernels: bool) -> dict[str, torch.Tensor]:
    """Two halves of a model, each with passes of its own, the last of each within `last_pass`; what a step has taken off."""
    mesh = init_mesh(device="cpu")
    model = Chain()
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    zero = zero_over(model, mesh, stage, kernels=kernels, units=[])
    halves = {(0, 1): model.layers[2:], (2, 3): model.layers[:2]}  # what is skipped, what is trained
    for number in range(2):
        for skipped, layers in halves.items():
            loss = model(samples(mesh.rank, number), skipped)
            with zero.last_pass([p for layer in layers for p in layer.parameters()]) if number else nullcontext():
                loss.backward()
    norm, taken = zero.step()
    assert taken and norm > 0
    mesh.close()
    return {name: start[name] - p.detach() for name, p in model.named_parameters()}


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_parts_may_have_last_passes_of_their_own(ranks: Ranks, stage: int, kernels: bool) -> None:
    model = Chain()
    for number in range(2):
        for rank in range(2):
            for skipped in ((0, 1), (2, 3)):
                model(samples(rank, number), skipped).backward()
    for taken in ranks(2, last_passes_of_parts, stage, kernels):
        assert_close(taken, {name: p.grad for name, p in model.named_parameters() if p.grad is not None})


def looks_after_a_last_pass(stage: int, kernels: bool, skipped: tuple[int, ...]) -> tuple[list[dict[str, torch.Tensor]], str]:
    """Two looks at the gradients after a last pass, and what the step takes off; what is said of a pass after a look."""
    mesh = init_mesh(device="cpu", timeout_s=5.0)
    model, said = Chain(), "fine"
    shapes = {name: p.shape for name, p in model.named_parameters()}
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    zero = zero_over(model, mesh, stage, kernels=kernels, units=[])
    loss, more = (model(samples(mesh.rank, number), skipped if mesh.rank else ()) for number in (0, 1))
    with zero.last_pass():
        loss.backward()
    found = [named(model, zero.reduced_grads(), shapes) for _ in range(2)]
    if stage < 2 and not skipped:
        with pytest.raises(ConfigError) as caught:
            more.backward()
        said = str(caught.value)
    zero.step()
    found.append({name: start[name] - p.detach() for name, p in model.named_parameters()})
    mesh.close()
    return found, said


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize(("stage", "skipped"), [(0, ()), (1, ()), (1, (LAYERS - 1,)), (2, ())])
def test_looks_after_a_last_pass(ranks: Ranks, stage: int, skipped: tuple[int, ...], kernels: bool) -> None:
    """They change nothing, and allow nothing that was refused before; also where a rank has not begun to sum, for want of a gradient."""
    expected = sums([{0: (), 1: skipped}])
    for found, said in ranks(2, looks_after_a_last_pass, stage, kernels, skipped):
        for one in found:
            assert_close(one, expected)
        assert said == ("fine" if stage > 1 or skipped else TOO_LATE.format((WIDTH,)))


def norms(stage: int, kernels: bool) -> list[float]:
    """For p of 1, 2, 3 and infinity, after two passes, with a limit of one bucket each or all in one; and what `step` says."""
    mesh, found = init_mesh(device="cpu"), []
    for elements in (WIDTH * WIDTH, 10**6):
        zero = zero_over(model := Chain(), mesh, stage, kernels=kernels, bucket_elements=elements)
        for number in range(2):
            model(samples(mesh.rank, number), (2,)).backward()
        zero.reduce()
        found += [zero.norm(p).item() for p in (1.0, 2.0, 3.0, math.inf)]
        zero.zero_grad()
        model(samples(mesh.rank, 0)).backward()
        found += [zero.step()[0], zero.step()[0]]  # the second without gradients
    mesh.close()
    return found


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("stage", STAGES)
def test_norms_are_those_of_one_process(ranks: Ranks, stage: int, kernels: bool) -> None:
    flat = torch.cat([g.flatten() for g in sums([{0: (2,), 1: (2,)}] * 2).values()])
    expected = [torch.linalg.vector_norm(flat, p).item() for p in (1.0, 2.0, 3.0, math.inf)]
    expected += [torch.cat([g.flatten() for g in sums([ALL]).values()]).norm().item(), 0.0]
    for found in ranks(2, norms, stage, kernels):
        assert found == pytest.approx(expected * 2, rel=1e-12)


def after_failure(stage: int, options: dict[str, Any]) -> dict[str, torch.Tensor]:
    """What a step takes off after a pass that failed in its middle, on all ranks, and was forgotten."""
    mesh = init_mesh(device="cpu")
    model = Chain()
    zero = zero_over(model, mesh, stage, **options)
    with zero.whole():
        start = {name: p.detach().clone() for name, p in model.named_parameters()}

    def fail(_: torch.Tensor) -> None:
        raise ValueError("on purpose")

    hook = model.layers[1].register_forward_hook(lambda _, __, out: out.register_hook(fail) and None)
    with pytest.raises(ValueError, match="on purpose"):
        model(samples(mesh.rank, 7)).backward()
    hook.remove()
    zero.zero_grad()
    model(samples(mesh.rank, 0)).backward()
    zero.step()
    with zero.whole():
        taken = {name: start[name] - p.detach() for name, p in model.named_parameters()}
    mesh.close()
    return taken


@pytest.mark.parametrize(("stage", "elements"), [(0, 1600), (1, 1600), (2, 1600), (2, 10**6), (3, 1600), (3, 10**6)])
def test_after_a_pass_that_failed_nothing_is_left_of_it(ranks: Ranks, stage: int, elements: int) -> None:
    for taken in ranks(2, after_failure, stage, {"bucket_elements": elements}):
        assert_close(taken, sums([ALL]))


def forgotten_late(stage: int) -> dict[str, torch.Tensor]:
    """What a step takes off after a last pass that was forgotten, whose sum one rank is late with."""
    mesh = init_mesh(device="cpu")
    model = Chain()
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    zero = zero_over(model, mesh, stage, kernels=True, units=[])
    summing = shared.reduce_shard

    def late(*given: Any, **how: Any) -> None:
        time.sleep(0.2)
        summing(*given, **how)

    with pytest.MonkeyPatch.context() as patch:
        if mesh.rank == 0:
            patch.setattr(shared, "reduce_shard", late)
        with zero.last_pass():
            model(samples(mesh.rank, 7)).backward()
        zero.zero_grad()
    model(samples(mesh.rank, 0)).backward()
    zero.step()
    mesh.close()
    return {name: start[name] - p.detach() for name, p in model.named_parameters()}


@needs_kernels
@pytest.mark.parametrize("stage", [0, 1])
def test_what_was_forgotten_does_not_come_back(ranks: Ranks, stage: int) -> None:
    for taken in ranks(2, forgotten_late, stage):
        assert_close(taken, sums([ALL]))


def more_passes_on_one(stage: int) -> tuple[str, bool, float]:
    """Rank 0 goes backward twice, rank 1 once: what is said of the step, whether the masters have changed, and how long it took."""
    mesh = init_mesh(device="cpu", timeout_s=2.0)
    model = Chain()
    zero = zero_over(model, mesh, stage, kernels=True)
    before = [master.detach().clone() for master in zero.masters]
    began = time.monotonic()
    with pytest.raises(DistributedError) as caught:
        for number in range(2 - mesh.rank):
            model(samples(mesh.rank, number)).backward()
        zero.step()
    took = time.monotonic() - began
    moved = zero.steps_taken > 0 or not all(map(torch.equal, zero.masters, before))
    mesh.close()
    return str(caught.value), moved, took


@needs_kernels
@pytest.mark.parametrize("stage", [2, 3])
def test_passes_of_one_rank_alone_end_in_an_error_and_no_step(fresh_ranks: Ranks, stage: int) -> None:
    """At the end of the time limit; on all ranks."""
    found = fresh_ranks(2, more_passes_on_one, stage)
    assert any("did not send its part of gradients within the time limit" in text for text, *_ in found), found
    for text, moved, took in found:
        assert text.startswith("rank ") and " failed after " in text, text
        assert not moved, text
        assert 1.5 < took < 40.0, f"it took {took} s"

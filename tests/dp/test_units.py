"""Layers that are whole only while they compute: which are when, and every way through them trains as one process does."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from pymesh3d.dp.zero import Zero
from pymesh3d.mesh import Mesh, init_mesh
from tests.kernels import needs_kernels

Ranks = Callable[..., list[Any]]
Way = Callable[[Any, torch.Tensor], torch.Tensor]
ADAMW = functools.partial(torch.optim.AdamW, lr=1e-2)
DECAY, WIDTH, SAMPLES, LAYERS = 0.1, 36, 8, 3  # matrices of a layer have numbers in the shards of two ranks
KERNELS = [False, pytest.param(True, marks=needs_kernels)]


class Layer(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, dtype=dtype)
        self.up, self.down = (nn.Linear(WIDTH, WIDTH, dtype=dtype) for _ in range(2))
        self.spare = nn.Linear(WIDTH, WIDTH, bias=False, dtype=dtype)
        self.use_spare = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.up(self.norm(x)))
        return x + self.down(self.spare(h) if self.use_spare else h)


class Model(nn.Module):
    """Three layers between two matrices that are always whole."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first, self.last = (nn.Linear(WIDTH, WIDTH, dtype=dtype) for _ in range(2))
        self.layers = nn.ModuleList(Layer(dtype) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


def data(step: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(step), dtype=torch.float64).to(dtype)


def zero_of(model: nn.Module, mesh: Mesh, kernels: bool = False, **options: Any) -> Zero:
    return Zero(model, mesh, **{"stage": 3, "optimizer": ADAMW, "weight_decay": DECAY, "kernels": kernels, **options})


def straight(model: Any, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().sum()


def twice(model: Any, x: torch.Tensor) -> torch.Tensor:
    first, second, third = model.layers
    return model.last(first(third(second(first(second(second(model.first(x)))))))).square().sum()


def backwards(model: Any, x: torch.Tensor) -> torch.Tensor:
    for layer in reversed(model.layers):
        x = layer(x)
    return x.square().sum()


def recomputed(model: Any, x: torch.Tensor) -> torch.Tensor:
    x = model.first(x)
    for layer in model.layers:
        x = checkpoint(layer, x, use_reentrant=False)
    return model.last(x).square().sum()


def recomputed_together(model: Any, x: torch.Tensor) -> torch.Tensor:
    """Two layers in one piece, with more behind them, and all again in a larger one."""
    first, second, third = model.layers

    def inner(h: torch.Tensor) -> torch.Tensor:
        return torch.tanh(second(first(h))).square()

    def outer(h: torch.Tensor) -> torch.Tensor:
        return third(checkpoint(inner, h, use_reentrant=False)).sin()

    return model.last(checkpoint(outer, model.first(x), use_reentrant=False)).square().sum()


def without_gradient(model: Any, x: torch.Tensor) -> torch.Tensor:
    """The first layer's output needs none, and that of the second is not used."""
    with torch.no_grad():
        x = model.layers[0](x)
    model.layers[1](x)
    return model.last(model.layers[2](x)).square().sum()


def changed_in_place(model: Any, x: torch.Tensor) -> torch.Tensor:
    for layer in model.layers:
        x = layer(x)
        x *= 0.5
        x += 1.0
    return x.square().sum()


def one_part_unused(model: Any, x: torch.Tensor) -> torch.Tensor:
    model.layers[1].use_spare = not model.layers[1].use_spare
    return model.layers[2](model.layers[1](x)).square().sum()


def with_wrapped_outputs(model: Any, x: torch.Tensor) -> torch.Tensor:
    """Layers that return more than a tensor, of which only some is used."""
    hooks = [model.layers[0].register_forward_hook(lambda _, given, out: {"out": (out, None), "more": [given[0] * 2, 3]}, prepend=True)]
    hooks += [model.layers[1].register_forward_hook(lambda _, given, out: (out, out + 1, "text"), prepend=True)]
    found = model.layers[0](model.first(x))
    _, h, _ = model.layers[1](found["out"][0] + found["more"][0])
    for hook in hooks:
        hook.remove()
    return model.last(h).square().sum()


def evaluated_between(model: Any, x: torch.Tensor) -> torch.Tensor:
    """A pass without gradients before, between a pass and its backward, and in another order."""
    loss = model(x).square().sum()
    with torch.no_grad():
        model(x)
        backwards(model, x)
    return loss


def after_a_failure(model: Any, x: torch.Tensor) -> torch.Tensor:
    """In the middle of a layer, on all ranks alike; and one within a pass that computes again."""

    def fail(*_: object) -> None:
        raise ValueError("on purpose")

    for through in (straight, recomputed):
        hook = model.layers[1].down.register_forward_pre_hook(fail)
        with pytest.raises(ValueError, match="on purpose"):
            through(model, x)
        hook.remove()
    return straight(model, x)


WAYS: list[Way] = [straight, twice, backwards, recomputed, recomputed_together, without_gradient, changed_in_place, one_part_unused]
WAYS += [with_wrapped_outputs, evaluated_between, after_a_failure]


def plainly(build: Callable[[], Any], ways: list[Way], microbatches: int) -> dict[str, torch.Tensor]:
    """Parameters after a step each way, in one process."""
    model = build()
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [{"params": [p for p in trained if (p.ndim > 1) == flag], "weight_decay": DECAY * flag} for flag in (True, False)]
    optimizer = ADAMW(groups)
    for step, way in enumerate(ways):
        for rank in data(step).chunk(2):
            for part in rank.chunk(microbatches):
                spare = model.layers[1].use_spare
                way(model, part).backward()
                model.layers[1].use_spare = spare
        model.layers[1].use_spare ^= way is one_part_unused
        for parameter in trained:  # Zero has zeros where torch has nothing
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach() for name, p in model.named_parameters()}


def in_units(build: Callable[[], Any], ways: list[Way], microbatches: int, options: dict[str, Any]) -> dict[str, torch.Tensor]:
    mesh = init_mesh(device="cpu")
    model = build()
    zero = zero_of(model, mesh, **options)
    for step, way in enumerate(ways):
        for number, part in enumerate(data(step).chunk(2)[mesh.rank].chunk(microbatches)):
            spare = model.layers[1].use_spare
            way(model, part).backward()
            model.layers[1].use_spare = spare if number < microbatches - 1 else model.layers[1].use_spare
        assert all(p.grad is None for p in model.parameters())
        zero.step()
        assert not any(held_bytes(zero)), f"{way.__name__} leaves {held_bytes(zero)}"
    with zero.whole():
        found = {name: p.detach().clone() for name, p in model.named_parameters()}
    mesh.close()
    return found


def held_bytes(zero: Zero) -> list[int]:
    """Of each unit: how much memory its whole matrices have."""
    return [sum(flat.untyped_storage().nbytes() for flat in unit._whole) for unit in zero._units._units]


def shown(zero: Zero) -> list[bool]:
    """Of each unit: whether all of its matrices are whole; none of them otherwise."""
    found = [{slot.parameter.shape == slot.shape for bucket in unit.buckets for slot in bucket.slots} for unit in zero._units._units]
    assert all(len(alike) == 1 for alike in found), "a unit is whole or not"
    return [alike.pop() for alike in found]


def assert_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in found.items():
        assert torch.allclose(value, expected[name], rtol=1e-11, atol=1e-12), f"{name}: {(value - expected[name]).abs().max()}"


@pytest.mark.parametrize("options", [{}, {"once_a_step": True}, {"bucket_elements": 1500}], ids=str)
def test_every_way_trains_as_one_process(ranks: Ranks, options: dict[str, Any]) -> None:
    """Two steps each way, in two microbatches."""
    ways = [way for way in WAYS for _ in range(2)]
    expected = plainly(Model, ways, 2)
    for found in ranks(2, in_units, Model, ways, 2, options):
        assert_close(found, expected)


@needs_kernels
@pytest.mark.parametrize("once_a_step", [False, True])
def test_every_way_trains_so_over_shared_memory(ranks: Ranks, once_a_step: bool) -> None:
    ways: list[Way] = [straight, twice, recomputed, recomputed_together, one_part_unused, one_part_unused, evaluated_between]
    expected = plainly(Model, ways, 1)
    for found in ranks(2, in_units, Model, ways, 1, {"kernels": True, "once_a_step": once_a_step}):
        assert_close(found, expected)


def tied() -> nn.Module:
    """A matrix of a layer is used outside too; another by two layers; one within a layer twice."""
    model: Any = Model()
    model.last.weight = model.layers[0].up.weight
    model.layers[2].down.weight = model.layers[1].down.weight
    model.layers[2].up.weight = model.layers[2].spare.weight
    return model


def frozen() -> Model:
    """Some of a layer is not trained, and nothing of another."""
    model: Any = Model()
    model.layers[0].up.requires_grad_(False)
    model.layers[1].requires_grad_(False)
    return model


def frozen_early() -> Model:
    """Nothing before the last layer is trained, and only vectors of that."""
    model: Any = Model()
    for module in (model.first, *model.layers[:2], *(model.layers[2].get_submodule(name) for name in ("up", "down", "spare"))):
        module.requires_grad_(False)
    return model


def frozen_but_layers() -> Model:
    """Only matrices of the first layer are trained."""
    model: Any = Model().requires_grad_(False)
    model.layers[0].up.weight.requires_grad_()
    model.layers[0].spare.weight.requires_grad_()  # not used
    return model


@pytest.mark.parametrize("options", [{"stage": 0}, {"stage": 1}, {"stage": 2}, {"stage": 3}, {"stage": 3, "once_a_step": True}], ids=str)
@pytest.mark.parametrize("build", [tied, frozen, frozen_early, frozen_but_layers])
def test_layers_that_share_or_are_frozen(ranks: Ranks, build: Callable[[], Any], options: dict[str, Any]) -> None:
    ways: list[Way] = [straight, recomputed, twice, straight]
    expected = plainly(build, ways, 2)
    for found in ranks(2, in_units, build, ways, 2, options):
        assert_close(found, expected)


def gone() -> dict[str, list[str]]:
    """Names of parameters that are empty outside of all passes."""
    mesh, found = init_mesh(device="cpu"), {}
    for build in (Model, tied, frozen):
        model = build()
        shapes = {name: p.shape for name, p in model.named_parameters()}
        zero_of(model, mesh)
        found[build.__name__] = [name for name, p in model.named_parameters() if p.shape != shapes[name]]
        assert all(p.numel() == 0 for name, p in model.named_parameters() if name in found[build.__name__]), "whole or empty"
    mesh.close()
    return found


def test_what_is_whole_only_for_its_layer(ranks: Ranks) -> None:
    """Not vectors, what is outside of layers or used there, what two layers use, or what is not trained."""
    every = [f"layers.{n}.{name}.weight" for n in range(LAYERS) for name in ("up", "down", "spare")]
    shared = {"layers.0.up.weight", "layers.1.down.weight", "layers.2.down.weight", "layers.2.spare.weight"}  # the last has another name
    still = {"layers.0.up.weight", *every[3:6]}
    for found in ranks(2, gone):
        assert found["Model"] == every
        assert found["tied"] == [name for name in every if name not in shared]
        assert found["frozen"] == [name for name in every if name not in still]


def events(way: Way, passes: int, options: dict[str, Any]) -> tuple[list[str], list[int], list[int]]:
    """In some steps what is gathered (g), and what goes forward (F) and backward (B), with the layers that are whole then; the bytes of
    each layer while it is whole, and at the end of each pass."""
    mesh = init_mesh(device="cpu")
    model = Model()
    for layer in model.layers:
        layer.use_spare = True  # type: ignore[assignment]
    zero = zero_of(model, mesh, **options)
    units, said, most = zero._units._units, list[str](), [0] * LAYERS
    for number, unit in enumerate(units):
        start = functools.partial(lambda number, start: (said.append(f"g{number}"), start()), number, unit._gathering.start)
        unit._gathering.start = start  # type: ignore[method-assign]

    def say(what: str) -> None:
        said.append(f"{what}:{''.join(str(n) for n, whole in enumerate(shown(zero)) if whole)}")
        most[:] = map(max, most, held_bytes(zero))

    for number, layer in enumerate(model.layers):
        layer.register_forward_pre_hook(lambda *_, n=number: say(f"F{n}"))
        layer.register_forward_hook(lambda _, __, out, n=number: out.register_hook(lambda _: say(f"B{n}")) and None)
    ends = []
    for step in range(passes):
        loss = way(model, data(step).chunk(2)[mesh.rank])
        say("|")
        loss.backward()
        say("end")
        ends += held_bytes(zero)
        zero.step()
    mesh.close()
    return said, most, ends


def test_one_layer_is_whole_and_the_next_is_gathered(ranks: Ranks) -> None:
    """In the order of the step before, also where backward computes it again. What is on its way is not shown before it is needed."""
    first = "g0 F0:0 g1 F1:1 g2 F2:2 |: g2 B2:2{} g1 B1:1{} g0 B0:0{} end:"
    later = "g0 g1 F0:0 g2 F1:1 F2:2 |:2 g1 B2:2{} g0 B1:1{} B0:0{} end:"
    for way, again in ((straight, ["", "", ""]), (recomputed, [" F2:2", " F1:1", " F0:0"])):
        for said, most, ends in ranks(2, events, way, 3, {}):
            assert " ".join(said) == " ".join(text.format(*again) for text in (first, later, later))
            assert min(most) > 0 and ends == [0] * 3 * LAYERS, "memory goes back"


def test_what_is_gathered_once_a_step_stays_until_then(ranks: Ranks) -> None:
    first = "g0 F0:0 g1 F1:01 g2 F2:012 |:012 B2:012 B1:012 B0:012 end:012"
    later = "g0 g1 F0:0 g2 F1:01 F2:012 |:012 B2:012 B1:012 B0:012 end:012"
    for said, _, ends in ranks(2, events, straight, 2, {"once_a_step": True}):
        assert " ".join(said) == " ".join((first, later))
        assert min(ends) > 0, "each layer"


def after_passes_without_gradients() -> list[list[int]]:
    mesh = init_mesh(device="cpu")
    model, found = Model(), []
    zero = zero_of(model, mesh)
    for step in range(3):
        with torch.no_grad():
            model(data(9))
        found.append(held_bytes(zero))
        straight(model, data(step)).backward()
        zero.step()
    mesh.close()
    return found


def test_nothing_stays_whole_after_a_pass_without_gradients(ranks: Ranks) -> None:
    for found in ranks(2, after_passes_without_gradients):
        assert found == [[0] * LAYERS] * 3


def without_units(stage: int, kernels: bool) -> tuple[torch.Tensor, bool]:
    mesh = init_mesh(device="cpu")
    torch.manual_seed(0)
    layer = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
    zero = zero_of(layer, mesh, stage=stage, kernels=kernels)
    for step in range(2):
        layer(data(step).chunk(2)[mesh.rank]).square().sum().backward()
        zero.step()
    mesh.close()
    return layer.weight.detach(), bool(layer.weight.numel()) and held_bytes(zero) == []


@pytest.mark.parametrize("kernels", KERNELS)
def test_a_module_without_layers_stays_whole(ranks: Ranks, kernels: bool) -> None:
    (expected, _), _ = ranks(2, without_units, 1, False)
    for weight, whole in ranks(2, without_units, 3, kernels):
        assert whole and torch.equal(weight, expected)


def values_within_whole(kernels: bool) -> list[bool]:
    """Of a bf16 model, of which one rank is late by turns: whether what was written within `whole` is there at once, and after a step."""
    mesh = init_mesh(device="cpu")
    model, right = Model(torch.bfloat16), []
    zero = zero_of(model, mesh, kernels=kernels, optimizer=functools.partial(torch.optim.SGD, lr=0.0), weight_decay=0.0)
    for turn in range(4):
        with zero.whole(), torch.no_grad():
            assert all(shown(zero)), "all is whole"
            for parameter in model.parameters():
                parameter.mul_(2.0)
            expected = {name: p.clone() for name, p in model.named_parameters()}
            if mesh.rank == turn % 2:
                time.sleep(0.3)
        for _ in range(2):
            with zero.whole():
                right.append(all(torch.equal(p, expected[name]) for name, p in model.named_parameters()))
            zero.step()
    assert not any(held_bytes(zero)), "it was let go"
    mesh.close()
    return right


@pytest.mark.parametrize("kernels", KERNELS)
def test_what_is_written_while_all_is_whole_counts(ranks: Ranks, kernels: bool) -> None:
    """On every rank, however late the others are."""
    assert ranks(2, values_within_whole, kernels) == [[True] * 8] * 2


class Bare(nn.Module):
    """A matrix of its own beside two modules, as in torch's attention."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.eye(WIDTH))
        self.first, self.second = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))


def layered(kind: str) -> nn.Module:
    torch.manual_seed(1)
    linear = functools.partial(nn.Linear, WIDTH, WIDTH)
    torchs = functools.partial(nn.TransformerEncoderLayer, WIDTH, 2, 8)
    made: dict[str, Any] = {"linear": linear, "layer": functools.partial(Layer, torch.float32), "bare": Bare, "torch": torchs}
    return nn.ModuleDict({"body": nn.ModuleList(made[kind]() for _ in range(2)), "head": linear()})


def parts_of(model: nn.Module) -> dict[str, nn.Module]:
    """All modules with parameters, by name: the whole, units, and what is within them."""
    return {name: part for name, part in model.named_modules() if next(part.parameters(), None) is not None}


def states(kind: str, options: dict[str, Any]) -> list[str]:
    """Modules whose `state_dict` is not right, at once or after a step."""
    mesh = init_mesh(device="cpu")
    model, wrong = layered(kind), []
    before = {name: value.clone() for name, value in model.state_dict().items()}
    zero, kept = zero_of(model, mesh, optimizer=functools.partial(torch.optim.SGD, lr=1.0), **options), []
    for name, part in parts_of(model).items():
        kept.append((name, part.state_dict()))
        if not options.get("once_a_step") and any(held_bytes(zero)):
            wrong.append(f"{name} keeps {held_bytes(zero)}")
    with zero.whole():
        kept.append(("", model.state_dict()))
    for parameter in (p for p in model.parameters() if p.main_grad.numel()):  # type: ignore[attr-defined]
        parameter.main_grad.fill_(1.0)  # type: ignore[attr-defined]
    zero.step()
    for name, state in kept:
        prefix = f"{name}." if name else ""
        expected = {key.removeprefix(prefix): value for key, value in before.items() if key.startswith(prefix)}
        if state.keys() != expected.keys() or not all(torch.equal(state[key], expected[key]) for key in expected):
            wrong.append(name)
    mesh.close()
    return wrong


CHOICES = [("linear", {}), ("layer", {"once_a_step": True}), ("layer", {}), ("bare", {}), ("torch", {}), ("layer", {"kernels": True})]


@pytest.mark.parametrize(("kind", "options"), CHOICES, ids=str)
def test_states_of_all_modules_are_whole(ranks: Ranks, kind: str, options: dict[str, Any]) -> None:
    """Of the whole model, of units, and of what is within them; they stay as they are."""
    assert ranks(2, states, kind, options) == [[]] * 2


def loads(kind: str, options: dict[str, Any]) -> list[str]:
    """Modules of which `load_state_dict` has not the right effect: at once, on the masters, or after a step that changes nothing."""
    mesh = init_mesh(device="cpu")
    model, wrong = layered(kind), []
    zero = zero_of(model, mesh, optimizer=functools.partial(torch.optim.SGD, lr=0.0), weight_decay=0.0, **options)
    with zero.whole():
        expected = {name: p.detach().clone() for name, p in model.named_parameters()}
    for name, part in parts_of(model).items():
        prefix = f"{name}." if name else ""
        given = {key: value + 1 for key, value in expected.items() if key.startswith(prefix)}
        part.load_state_dict({key.removeprefix(prefix): value for key, value in given.items()})
        expected |= given
        for _ in range(2):
            with zero.whole():
                wrong += [f"{name}: {key}" for key, p in model.named_parameters() if not torch.equal(p, expected[key])]
            zero.step()
    mesh.close()
    return wrong


@pytest.mark.parametrize(("kind", "options"), CHOICES, ids=str)
def test_all_modules_can_be_loaded(ranks: Ranks, kind: str, options: dict[str, Any]) -> None:
    assert ranks(2, loads, kind, options) == [[]] * 2

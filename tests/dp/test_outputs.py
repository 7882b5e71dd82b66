"""What layers return: whatever holds their tensors, these are found, and stage 3 trains as one process does."""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import re
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import nn

from pymesh3d.dp.outputs import tensors_in
from pymesh3d.dp.zero import Zero
from pymesh3d.errors import ConfigError
from pymesh3d.mesh import init_mesh

Ranks = Callable[..., list[Any]]
SGD = functools.partial(torch.optim.SGD, lr=0.1)
WIDTH, LAYERS, STEPS = 20, 3, 3


@dataclasses.dataclass
class Plain:
    hidden: Any
    more: Any = None


@dataclasses.dataclass(frozen=True)
class Slots:
    __slots__ = ("hidden", "more")
    hidden: Any
    more: Any


class Private:
    """Its attributes have other names outside."""

    __slots__ = ("__hidden", "unset")

    def __init__(self, hidden: Any) -> None:
        self.__hidden = hidden

    @property
    def hidden(self) -> Any:
        return self.__hidden


class Named(collections.namedtuple("Named", ("hidden", "more"))):
    pass


class Ordered(collections.OrderedDict[str, Any]):
    """A dict, and an attribute too, as Hugging Face's outputs are."""

    @property
    def hidden(self) -> Any:
        return self["hidden"]


class View(Mapping[str, Any]):
    def __init__(self, hidden: Any) -> None:
        self.held = types.MappingProxyType({"hidden": hidden})

    def __getitem__(self, key: str) -> Any:
        return self.held[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.held)

    def __len__(self) -> int:
        return len(self.held)

    @property
    def hidden(self) -> Any:
        return self["hidden"]


class Kind(enum.Enum):
    ONE = 1


def around(hidden: torch.Tensor) -> Plain:
    """Objects that hold each other, and a module, whose parameters are none of what is returned."""
    inner = types.SimpleNamespace(hidden=hidden, of=nn.Linear(1, 1), kind=Kind.ONE, dtype=torch.float32, call=torch.tanh)
    inner.self = inner
    return Plain(inner, [None, 1, "text", {2.0}, torch.ones(1), range(3)])


WRAPS: dict[str, Callable[[torch.Tensor], Any]] = {
    "tensor": lambda h: h,
    "dataclass": Plain,
    "slots": lambda h: Slots(h, [h * 2]),
    "private": Private,
    "namedtuple": lambda h: Named(h, None),
    "dict": lambda h: Ordered(hidden=h, ids=torch.ones(2, dtype=torch.int64)),
    "mapping": View,
    "deep": lambda h: Plain(Plain([{"a": (types.SimpleNamespace(hidden=h),)}])),
    "loop": around,
}


def unwrapped(output: Any) -> torch.Tensor:
    """The hidden states, wherever they are."""
    while not isinstance(output, torch.Tensor):
        output = output.hidden if hasattr(output, "hidden") else output[0]["a"][0]
    return output


@pytest.mark.parametrize("kind", WRAPS)
def test_tensors_are_found_once(kind: str) -> None:
    hidden = torch.ones(3)
    found = list(tensors_in((WRAPS[kind](hidden), [hidden])))
    assert sum(tensor is hidden for tensor in found) == 1, "once, though it is there twice"
    assert not any(isinstance(tensor, nn.Parameter) for tensor in found), "nothing of a module"
    assert len(found) == {"slots": 2, "dict": 2, "loop": 2}.get(kind, 1), found


def test_nothing_is_found_where_there_is_no_tensor() -> None:
    values = (None, 1, 2.5, "text", b"bytes", range(3), Kind.ONE, torch.float32, torch.Size([2]), nn.Linear(1, 1), nn.Linear, torch, len)
    assert list(tensors_in([*values, {}, set(), Plain(None), Private(1), iter([torch.ones(1)])])) == []


class Layer(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.up, self.down = (nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(2))
        self.kind = kind

    def forward(self, x: torch.Tensor) -> Any:
        return WRAPS[self.kind](x + self.down(torch.tanh(self.up(x))))


class Model(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(Layer(kind) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = unwrapped(layer(x))
        return x.square().sum()


def data(step: int) -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step), dtype=torch.float64) / 10


def trained(kinds: list[str]) -> list[dict[str, torch.Tensor]]:
    """Parameters after some steps in stage 3, of a model of each kind of output."""
    mesh, found = init_mesh(device="cpu"), []
    for kind in kinds:
        model = Model(kind)
        zero = Zero(model, mesh, stage=3, optimizer=SGD, weight_decay=0.0)
        for step in range(STEPS):
            model(data(step).chunk(2)[mesh.rank]).backward()
            zero.step()
            assert not any(unit.held for unit in zero._units._units), f"{kind}: layers are let go"
        with zero.whole():
            found.append({name: p.detach().clone() for name, p in model.named_parameters()})
    mesh.close()
    return found


def test_stage_3_trains_layers_whatever_they_return(ranks: Ranks) -> None:
    model = Model("tensor")
    optimizer = SGD(model.parameters())
    for step in range(STEPS):
        model(data(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    for rank in ranks(2, trained, list(WRAPS)):
        for kind, parameters in zip(WRAPS, rank, strict=True):
            for name, expected in model.named_parameters():
                assert torch.allclose(parameters[name], expected, rtol=1e-12, atol=1e-13), f"{name}, from a {kind}"


def trained_outputs_of_transformers() -> bool:
    """Whether a layer that returns one of Hugging Face's outputs gets the gradients of one that returns a tensor."""
    outputs = pytest.importorskip("transformers.modeling_outputs")
    mesh, after = init_mesh(device="cpu"), []
    for wrap in (lambda h: h, outputs.BaseModelOutput):
        torch.manual_seed(0)
        model = nn.ModuleList([nn.Linear(WIDTH, WIDTH)])
        model[0].register_forward_hook(lambda _, __, out, wrap=wrap: wrap(out), prepend=True)
        zero = Zero(model, mesh, stage=3, optimizer=SGD, weight_decay=0.0)
        for _ in range(2):
            found = model[0](torch.ones(2, WIDTH, requires_grad=True))
            getattr(found, "last_hidden_state", found).square().sum().backward()
            zero.step()
        with zero.whole():
            after.append(model[0].weight.detach().clone())
    mesh.close()
    return torch.equal(*after)


def test_stage_3_trains_layers_that_return_outputs_of_transformers(ranks: Ranks) -> None:
    pytest.importorskip("transformers")
    assert ranks(2, trained_outputs_of_transformers) == [True, True]


class Silent(nn.Module):
    """Puts its result where nobody can look for it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, results: list[torch.Tensor]) -> None:
        results.append(self.linear(results[-1]))


def silent(options: dict[str, Any]) -> tuple[list[str], bool, float]:
    """What is said of two passes through such a layer (nothing, if nothing is); whether it is whole then; the norm of its gradients."""
    mesh, texts = init_mesh(device="cpu"), []
    torch.manual_seed(0)
    model = nn.ModuleDict({"body": nn.ModuleList([Silent()])})
    zero = Zero(model, mesh, **{"stage": 3, "optimizer": SGD, "weight_decay": 0.0, **options})
    for _ in range(2):
        results = [torch.ones(2, WIDTH, requires_grad=True)]
        try:
            model["body"][0](results)  # type: ignore[index]
            results[-1].square().sum().backward()
        except ConfigError as error:
            texts.append(str(error))
        with torch.no_grad():
            model["body"][0](results)  # type: ignore[index]
    held = any(unit.held for unit in zero._units._units)
    norm, _ = zero.step()
    mesh.close()
    return texts, held, norm


def test_a_layer_that_returns_no_tensor_is_refused(ranks: Ranks) -> None:
    """Where that matters: not without gradients, and not where it stays whole until the step."""
    said = (
        r"body\.0 \(Silent\) has returned a NoneType without tensors: backward finds what stage 3 has to gather for it by the tensors that "
        r"each of `units` returns, in containers, dataclasses or attributes of objects\. Return what it computes, choose other units, use "
        r"once_a_step=True, or switch gradients off with torch\.no_grad\(\)"
    )
    for texts, held, _ in ranks(2, silent, {}):
        assert len(texts) == 2 and all(re.fullmatch(said, text) for text in texts), texts
        assert not held, "it was let go"
    ((_, _, expected), _) = ranks(2, silent, {"stage": 1})
    assert expected > 0, "it is trained"
    for way in ({"stage": 2}, {"once_a_step": True}, {"units": []}):
        for texts, _, norm in ranks(2, silent, way):
            assert texts == [] and norm == pytest.approx(expected, rel=1e-6), way

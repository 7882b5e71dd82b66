"""Putting parallel layers into an existing model by a plan: module-name patterns to styles."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from pymesh3d.comm.collectives import broadcast_
from pymesh3d.errors import ConfigError
from pymesh3d.mesh import Axis, Mesh
from pymesh3d.placement import Part, Placement, place, placement_of
from pymesh3d.tp.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding, tp_axis


@dataclasses.dataclass(frozen=True, kw_only=True)
class Column:
    """An nn.Linear whose output features are cut (see ColumnParallelLinear)."""

    parts: Sequence[int | Part] | None = None
    heads: int | None = None
    gather_output: bool = False
    vocab_multiple: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """An nn.Linear whose input features are cut (see RowParallelLinear)."""

    input_is_parallel: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class Vocab:
    """An nn.Embedding whose rows are cut (see VocabParallelEmbedding)."""

    vocab_multiple: int = 128


@dataclasses.dataclass(frozen=True, kw_only=True)
class Norm:
    """A module kept whole that works on the sequence-parallel activations: its gradients are summed over tp."""


Style = Column | Row | Vocab | Norm


def parallelize_module(
    module: nn.Module, mesh: Mesh | DeviceMesh | Axis, plan: Mapping[str, Style], *, sequence_parallel: bool = False
) -> nn.Module:
    """Replace submodules in place by their parallel forms and return the module.

    `plan` maps patterns of module names (`layers.*.attention.qkv`) to styles; the first that matches counts. What no pattern
    names stays whole, takes the first tp rank's values, and is expected to compute the same on every rank. Weights that
    several modules share stay shared. Afterwards each parameter carries its `placement`, with its full name.
    Raises ConfigError for a pattern that matches nothing and for a style that does not fit its module.
    """
    axis = tp_axis(mesh)
    _require_matches(module, plan)
    replaced: dict[int, nn.Parameter] = {}  # parameters by the identity of the one they replace: ties survive
    for name, child in list(module.named_modules()):
        style = next((style for pattern, style in plan.items() if fnmatchcase(name, pattern)), None)
        if style is None:
            continue
        if isinstance(style, Norm):
            for parameter in child.parameters():
                place(parameter, Placement(shape=tuple(parameter.shape), ranks=axis.size, partial=sequence_parallel))
            continue
        new = _parallel(name, child, style, mesh, sequence_parallel)
        for own, old in child.named_parameters(recurse=False):
            shared = replaced.setdefault(id(old), getattr(new, own))
            if shared.shape != getattr(new, own).shape:
                raise ConfigError(
                    f"{name}.{own}", "shares its weight with a module that is cut otherwise", "Give both the same style and padding"
                )
            setattr(new, own, shared)
        new.train(child.training)
        parent, _, leaf = name.rpartition(".")
        setattr(module.get_submodule(parent), leaf, new)
    for parameter in module.parameters():
        if getattr(parameter, "placement", None) is None:
            place(parameter, Placement(shape=tuple(parameter.shape), ranks=axis.size))
    name_parameters(module)
    _equalize(module, axis)
    if isinstance(mesh, Mesh):  # while every rank still sees every parameter: making groups takes all ranks
        for replicas in sorted({count for p in module.parameters() for _, _, count in placement_of(p).summed(axis.rank)}):
            mesh.subgroup(axis, replicas)
    return module


def name_parameters(module: nn.Module) -> None:
    """Write each parameter's full name, and the name it is tied to, into its placement."""
    first: dict[int, str] = {}
    tied = set()
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if id(parameter) in first:
            tied.add(id(parameter))
        first.setdefault(id(parameter), name)
    for parameter in module.parameters():
        name = first[id(parameter)]
        place(parameter, dataclasses.replace(placement_of(parameter), name=name, tied=name if id(parameter) in tied else None))


def _require_matches(module: nn.Module, plan: Mapping[str, Style]) -> None:
    names = [name for name, _ in module.named_modules() if name]
    for pattern in plan:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ConfigError(
                f"pattern {pattern!r} in the plan",
                "matches no module",
                f"Modules are {', '.join(names[:20])}{', ...' if len(names) > 20 else ''}",
            )


def _parallel(name: str, child: nn.Module, style: Style, mesh: Mesh | DeviceMesh | Axis, sequence_parallel: bool) -> nn.Module:
    if isinstance(style, Column) and isinstance(child, nn.Linear):
        return ColumnParallelLinear.from_linear(child, sequence_parallel=sequence_parallel, mesh=mesh, **_fields(style))
    if isinstance(style, Row) and isinstance(child, nn.Linear):
        return RowParallelLinear.from_linear(child, sequence_parallel=sequence_parallel, mesh=mesh, **_fields(style))
    if isinstance(style, Vocab) and isinstance(child, nn.Embedding):
        return VocabParallelEmbedding.from_embedding(child, sequence_parallel, mesh=mesh, vocab_multiple=style.vocab_multiple)
    raise ConfigError(
        f"{type(style).__name__} for {name}",
        f"it is a {type(child).__name__}",
        "Column and Row fit nn.Linear, Vocab fits nn.Embedding, Norm anything",
    )


def _fields(style: Column | Row) -> dict[str, Any]:
    return {field.name: getattr(style, field.name) for field in dataclasses.fields(style)}


@torch.no_grad()
def _equalize(module: nn.Module, axis: Axis) -> None:
    """Give every rank the first rank's values of what is kept whole, parameters and buffers."""
    whole = [p for p in module.parameters() if placement_of(p).replicated]
    for tensor in [*whole, *module.buffers()]:
        if not tensor.is_meta:
            broadcast_(tensor.data, axis)

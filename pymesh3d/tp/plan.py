"""Putting parallel layers into an existing model by a plan: module-name patterns to styles."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from pymesh3d.comm.collectives import equalize_
from pymesh3d.config import require_flag
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
    names stays whole and is expected to compute the same on every rank. All values are those of the first tp rank, and with a
    Mesh those of its first rank. Weights that are used in several places stay shared. Afterwards each parameter
    carries its `placement`, with its full name.
    Raises ConfigError for a pattern that matches nothing, a style that does not fit its module, and a weight that is cut in one
    of its places and not, or otherwise, in another.
    """
    axis = tp_axis(mesh)
    require_flag("sequence_parallel", sequence_parallel)
    _require_matches(module, plan)
    replaced: dict[int, nn.Parameter] = {}  # parameters by the identity of the one they replace: ties survive
    modules = list(module.named_modules(remove_duplicate=False))  # keeps all alive, so that no identity is used twice
    for name, child in modules:
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
            if _cut(shared) != _cut(getattr(new, own)):
                raise _untied(f"{name}.{own}")
            setattr(new, own, shared)
        new.train(child.training)
        parent, _, leaf = name.rpartition(".")
        setattr(module.get_submodule(parent), leaf, new)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if id(parameter) in replaced:
            raise _untied(name)
        if getattr(parameter, "placement", None) is None:
            place(parameter, Placement(shape=tuple(parameter.shape), ranks=axis.size))
    name_parameters(module)
    for tensor in [*(p for p in module.parameters() if placement_of(p).replicated), *module.buffers()]:
        equalize_(tensor, axis)
    if isinstance(mesh, Mesh):
        for line in (mesh.pp, mesh.dp, mesh.cp):
            for tensor in [*module.parameters(), *module.buffers()]:
                equalize_(tensor, line)
        # While every rank still sees every parameter: making groups takes all ranks.
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
    names = [name for name, _ in module.named_modules(remove_duplicate=False) if name]
    for pattern, style in plan.items():
        if not isinstance(style, Style):
            raise ConfigError(f"{pattern!r}: {style!r} in the plan", "it is no style", "Use Column(), Row(), Vocab() or Norm()")
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


def _cut(parameter: nn.Parameter) -> tuple[int, tuple[Part, ...]]:
    return placement_of(parameter).dim, placement_of(parameter).parts


def _untied(name: str) -> ConfigError:
    return ConfigError(name, "shares its weight with a module that is cut otherwise", "Give both the same style and padding")

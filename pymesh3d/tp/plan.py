"""Putting parallel layers into an existing model by a plan: module-name patterns to styles."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, TypeGuard, TypeVar

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.utils.parametrize import is_parametrized

from pymesh3d.axis import Axis
from pymesh3d.comm.collectives import equalize_
from pymesh3d.config import require_flag
from pymesh3d.errors import ConfigError
from pymesh3d.mesh import Mesh, tp_axis
from pymesh3d.placement import Part, Placement, place, placement_of
from pymesh3d.tp.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding


@dataclasses.dataclass(frozen=True, kw_only=True)
class Column:
    """An nn.Linear whose output features are cut: the first of a pair, or a head (see ColumnParallelLinear).

    `parts`: sizes, or `Part`s with heads, of a fused weight. `heads`: units that stay whole. `gather_output`: the output is whole
    again on every rank. `vocab_multiple`: pad the output features to a multiple of tp times this.
    """

    parts: Sequence[int | Part] | None = None
    heads: int | None = None
    gather_output: bool = False
    vocab_multiple: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """An nn.Linear whose input features are cut: the second of a pair, which takes what a `Column` gives (see RowParallelLinear).

    `input_is_parallel=False`: the input is whole on every rank.
    """

    input_is_parallel: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class Vocab:
    """An nn.Embedding whose rows are cut, padded to a multiple of tp times `vocab_multiple` (see VocabParallelEmbedding)."""

    vocab_multiple: int = 128


@dataclasses.dataclass(frozen=True, kw_only=True)
class Norm:
    """A module that stays whole and, with sequence_parallel, sees a rank's tokens only: then its gradients are summed over tp.

    Without sequence_parallel it changes nothing.
    """


log = logging.getLogger("pymesh3d")

M = TypeVar("M", bound=nn.Module)
Style = Column | Row | Vocab | Norm
READERS = (nn.MultiheadAttention, nn.TransformerEncoderLayer)  # they compute with `.weight` of their parts (one only in eval mode)
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def parallelize_module(
    module: nn.Module, mesh: Mesh | DeviceMesh | Axis, plan: Mapping[str, Style], *, sequence_parallel: bool = False
) -> nn.Module:
    """Replace submodules in place by their parallel forms and return the module.

    `plan` maps patterns of module names (`layers.*.attention.qkv`) to styles (`Column`, `Row`, `Vocab`, `Norm`, all of
    `pymesh3d.tp.plan`); the first that matches counts, and `*` matches the module itself too, whose name is empty. What no pattern
    names stays whole and is expected to compute the same on every rank. A fused weight needs `Column(parts=(q, k, v))` with the rows of
    each, and a model must take the number of its heads from the width that it gets. All values are those of the first tp rank, and with a
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
        pattern = next((pattern for pattern in plan if fnmatchcase(name, pattern)), None)
        if pattern is None:
            continue
        style = plan[pattern]
        if isinstance(style, Norm):
            for parameter in child.parameters():
                place(parameter, Placement(shape=tuple(parameter.shape), ranks=axis.size, partial=sequence_parallel))
            continue
        new = _parallel(child, style, mesh, sequence_parallel) if name else None
        if new is None:
            raise _unfit(pattern, style, name, modules)
        parent, _, leaf = name.rpartition(".")
        if isinstance(module.get_submodule(parent), READERS):
            what = f"{name} in a {type(module.get_submodule(parent)).__name__}"
            raise ConfigError(what, "that reads the weights inside it itself", "Keep it whole, or write it with layers that are called")
        if any(getattr(child, hooks) for hooks in HOOKS):
            raise ConfigError(f"{name} with hooks", "they would be lost with the module", "Add them after parallelize_module")
        for own, old in child.named_parameters(recurse=False):
            shared = replaced.setdefault(id(old), getattr(new, own))
            if _cut(shared) != _cut(getattr(new, own)):
                raise _untied(f"{name}.{own}")
            setattr(new, own, shared)
        new.train(child.training)
        setattr(module.get_submodule(parent), leaf, new)
    left = []
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if id(parameter) in replaced:
            raise _untied(name)
        if getattr(parameter, "placement", None) is None:
            place(parameter, Placement(shape=tuple(parameter.shape), ranks=axis.size))
            left += [name] * parameter.requires_grad
    if sequence_parallel and axis.size > 1 and left:
        log.warning(
            "sequence_parallel=True, and the plan does not name %s: between a row- and a column-parallel layer these get the gradients of "
            "this rank's tokens only. Use Norm() for their modules there",
            ", ".join(left),
        )
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
    if not isinstance(module, nn.Module):
        raise ConfigError(f"a {type(module).__name__} as module", "a plan is for the modules inside a torch module", "Give the nn.Module")
    names = [name for name, _ in module.named_modules(remove_duplicate=False)]
    if not isinstance(plan, Mapping):
        rule = "a plan maps patterns of module names to styles"
        raise ConfigError(f"plan={plan!r}", rule, f"Use a dict, {{{names[-1]!r}: Norm()}}, or with Column(), Row(), Vocab() where they fit")
    for pattern, style in plan.items():
        if not isinstance(pattern, str):
            raise ConfigError(f"pattern {pattern!r} in the plan", "names of modules are text", f"Modules are {_listed(names) or 'none'}")
        if not isinstance(style, Style):
            raise ConfigError(f"{pattern!r}: {style!r} in the plan", "it is no style", "Use Column(), Row(), Vocab() or Norm()")
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ConfigError(f"pattern {pattern!r} in the plan", "matches no module", f"Modules are {_listed(names) or 'none'}")


def _parallel(child: nn.Module, style: Style, mesh: Mesh | DeviceMesh | Axis, sequence_parallel: bool) -> nn.Module | None:
    """The parallel form of a module; None where the style does not fit it."""
    if isinstance(style, Column) and _is(child, nn.Linear):
        return ColumnParallelLinear.from_linear(child, sequence_parallel=sequence_parallel, mesh=mesh, **_fields(style))
    if isinstance(style, Row) and _is(child, nn.Linear):
        return RowParallelLinear.from_linear(child, sequence_parallel=sequence_parallel, mesh=mesh, **_fields(style))
    if isinstance(style, Vocab) and _is(child, nn.Embedding):
        return VocabParallelEmbedding.from_embedding(child, sequence_parallel, mesh=mesh, vocab_multiple=style.vocab_multiple)
    return None


def _is(child: nn.Module, kind: type[M]) -> TypeGuard[M]:
    """Whether a module computes what `kind` does: a subclass or a parametrization may do something else."""
    return isinstance(child, kind) and type(child).forward is kind.forward and not is_parametrized(child)


def _unfit(pattern: str, style: Style, name: str, modules: Sequence[tuple[str, nn.Module]]) -> ConfigError:
    kind = nn.Embedding if isinstance(style, Vocab) else nn.Linear
    which = f"{name!r} ({type(dict(modules)[name]).__name__})" if name else "the module itself, which cannot be replaced in place"
    fitting = _listed([inner for inner, child in modules if _is(child, kind)])
    return ConfigError(
        f"{pattern!r}: {type(style).__name__} in the plan",
        f"it matches {which}, and {type(style).__name__} is for nn.{kind.__name__} inside the module",
        f"Those are {fitting}" if fitting else "There is none; Norm fits any module",
    )


def _listed(names: Sequence[str]) -> str:
    inside = [name for name in names if name]
    return f"{', '.join(inside[:20])}{', ...' if len(inside) > 20 else ''}"


def _fields(style: Column | Row) -> dict[str, Any]:
    return {field.name: getattr(style, field.name) for field in dataclasses.fields(style)}


def _cut(parameter: nn.Parameter) -> tuple[int, tuple[Part, ...]]:
    return placement_of(parameter).dim, placement_of(parameter).parts


def _untied(name: str) -> ConfigError:
    return ConfigError(name, "shares its weight with a module that is cut otherwise", "Give both the same style and padding")

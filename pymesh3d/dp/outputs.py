"""Tensors in what a module returns, whatever holds them."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

SCALARS = (type(None), bool, int, float, complex, str, bytes)
CLOSED = (*SCALARS, nn.Module, type, types.ModuleType)  # they are not looked into


def tensors_in(output: object) -> Iterator[torch.Tensor]:
    """Each once, also within dataclasses and attributes of other objects, however deep; not within modules, classes and functions."""
    seen: dict[int, object] = {}  # which keeps them, so that no number is given twice
    todo: list[object] = [output]
    while todo:
        value = todo.pop()
        if isinstance(value, CLOSED) or id(value) in seen:
            continue
        seen[id(value)] = value
        if isinstance(value, torch.Tensor):
            yield value
        else:
            todo += reversed(list(_parts(value)))


def _parts(value: Any) -> Iterable[object]:
    """What is directly within."""
    parts = tree_leaves(value, is_leaf=lambda part: part is not value)
    if not (len(parts) == 1 and parts[0] is value):
        return parts  # of a container that torch knows
    if isinstance(value, Mapping):
        inside = list(value.values())
    elif isinstance(value, list | tuple | set | frozenset):
        inside = list(value)
    else:
        inside = []
    for kind in type(value).__mro__:
        if "__slots__" in vars(kind):
            for slot in vars(kind).values():
                if isinstance(slot, types.MemberDescriptorType):
                    with contextlib.suppress(AttributeError):  # nothing has been put there
                        inside.append(slot.__get__(value))
    return inside + list(getattr(value, "__dict__", {}).values())

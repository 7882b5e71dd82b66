"""Which modules of a model stage 3 takes for its layers."""

from __future__ import annotations

import functools

from torch import nn

from pymesh3d.dp.units import find_units


def names_of(module: nn.Module) -> list[str]:
    names = {part: name for name, part in module.named_modules()}
    return [names[unit] for unit in find_units(module)]


def test_layers_are_found_in_lists_dicts_and_sequences() -> None:
    linear = functools.partial(nn.Linear, 2, 2)
    assert names_of(linear()) == []
    assert names_of(nn.ModuleList([linear(), linear()])) == ["0", "1"]
    assert names_of(nn.Sequential(linear(), nn.Tanh())) == ["0", "1"], "a model may be a sequence itself"
    assert names_of(nn.ModuleDict({"a": linear(), "b": nn.Sequential(linear())})) == ["a", "b"]
    nested = nn.ModuleList([nn.ModuleList([linear()]), nn.ModuleDict({"x": nn.ModuleList([linear(), linear()])}), linear()])
    assert names_of(nested) == ["0.0", "1.x.0", "1.x.1", "2"], "lists in lists have no passes of their own"
    model = nn.Module()
    model.head, model.inside = linear(), nn.Module()
    model.inside.stack = nn.ModuleList([nn.TransformerEncoderLayer(4, 1, 4), nn.Sequential(linear(), linear())])
    model.norm = nn.LayerNorm(2)
    model.tail = nn.Sequential(linear())
    assert names_of(model) == ["inside.stack.0", "inside.stack.1", "tail.0"], "of nested ones the outermost"
    assert names_of(nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 1, 4), 2, enable_nested_tensor=False)) == ["layers.0", "layers.1"]

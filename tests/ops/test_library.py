"""The operators of compiled graphs do what the layers do outside of them, and a compiled layer is one graph."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from pymesh3d.axis import Axis
from pymesh3d.comm.registry import register
from pymesh3d.engine import parallelize
from pymesh3d.errors import ConfigError
from pymesh3d.mesh import init_mesh
from pymesh3d.models.llama import Llama
from pymesh3d.ops import library
from pymesh3d.ops.accumulate import attach_buffer
from pymesh3d.tp.layers import ColumnParallelLinear, RowParallelLinear
from tests.plain import FLOAT64, SMALL, batch_of, share

Ranks = Callable[..., list[Any]]
DOUBLE = torch.float64
ALONE = Axis("tp", 0, (0,), None)  # type: ignore[arg-type]
FULLGRAPH = {"fullgraph": True, "backend": "aot_eager"}  # a graph break is an error


def agree(eager: list[torch.Tensor], compiled: list[torch.Tensor]) -> None:
    """All numbers are the same."""
    for one, other in zip(eager, compiled, strict=True):
        assert torch.allclose(one, other, rtol=1e-13, atol=1e-13)


class Pair(nn.Module):
    """A column-parallel layer and the row-parallel one behind it."""

    def __init__(self, mesh: Any, sequence_parallel: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        first, second = nn.Linear(6, 8, dtype=DOUBLE), nn.Linear(8, 6, dtype=DOUBLE)
        self.first = ColumnParallelLinear.from_linear(first, sequence_parallel=sequence_parallel, mesh=mesh)
        self.second = RowParallelLinear.from_linear(second, sequence_parallel=sequence_parallel, mesh=mesh)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + self.second(torch.tanh(self.first(x)))
        return y


def both_ways(sequence_parallel: bool, buffers: bool, shape: tuple[int, ...], first: bool = False) -> list[list[torch.Tensor]]:
    """Eager and compiled: outputs, gradients of the input and of the parameters, of three microbatches in flight at a time.

    `first`: the input needs no gradient, as that of a model's first layer.
    """
    mesh = init_mesh(tp=-1, dp=1, device="cpu")
    found = []
    for compiled in (False, True):
        pair = Pair(mesh, sequence_parallel)
        if buffers:
            for parameter in pair.parameters():
                attach_buffer(parameter, torch.full_like(parameter, 0.5))
        run = torch.compile(pair, **FULLGRAPH) if compiled else pair
        generator = torch.Generator().manual_seed(1 + (mesh.rank if sequence_parallel else 0))
        inputs = [torch.randn(shape, dtype=DOUBLE, generator=generator).requires_grad_(not first) for _ in range(3)]
        outputs = [run(x) for x in inputs]
        for output in outputs:
            (output * torch.arange(output.numel(), dtype=DOUBLE).view(shape)).sum().backward()
        parameters = [p.main_grad if buffers else p.grad for p in pair.parameters()]  # type: ignore[attr-defined]
        assert not buffers or all(p.grad is None for p in pair.parameters())
        found.append([t.detach().clone() for t in (*outputs, *(x.grad for x in inputs if x.grad is not None), *parameters)])
    mesh.close()
    return found


@pytest.mark.parametrize("buffers", [False, True])
@pytest.mark.parametrize(("world", "sequence_parallel"), [(1, False), (2, False), (2, True)])
def test_compiled_layers_compute_what_eager_ones_do(ranks: Ranks, world: int, sequence_parallel: bool, buffers: bool) -> None:
    for eager, compiled in ranks(world, both_ways, sequence_parallel, buffers, (3, 4, 6)):  # 3 sequences of 4 tokens, or of a share of 8
        assert len(eager) == 10
        agree(eager, compiled)


@pytest.mark.parametrize("buffers", [False, True])
def test_a_compiled_first_layer_has_gradients_too(ranks: Ranks, buffers: bool) -> None:
    """Its backward returns nothing where all goes into buffers, and a compiler leaves out what returns nothing."""
    for eager, compiled in ranks(2, both_ways, False, buffers, (3, 4, 6), True):
        assert len(eager) == 7
        agree(eager, compiled)


class Twice(nn.Module):
    """A layer that two branches use on the same input, with equal gradients."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layer(x) + self.layer(x)
        return y


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear])
def test_what_a_compiled_layer_adds_twice_is_added_twice(kind: Any, first: bool) -> None:
    """A compiler takes two equal calls for one, unless it is told that they are not."""
    torch.manual_seed(0)
    linear = nn.Linear(6, 8, dtype=DOUBLE)
    x = torch.randn(5, 6, dtype=DOUBLE)
    found = []
    for compiled in (False, True):
        layer = kind.from_linear(linear, mesh=ALONE)
        for parameter in layer.parameters():
            attach_buffer(parameter, torch.zeros_like(parameter))
        run = torch.compile(Twice(layer), fullgraph=True, backend="aot_eager_decomp_partition") if compiled else Twice(layer)
        own = x.clone().requires_grad_(not first)
        (run(own) * torch.arange(40.0, dtype=DOUBLE).view(5, 8)).sum().backward()
        found.append([*(p.main_grad for p in layer.parameters()), *([] if first else [own.grad])])
    assert found[0][0].abs().min() > 0
    agree(*found)


@pytest.mark.parametrize("operator", [library.column_linear, library.row_linear])
@pytest.mark.parametrize("shape", [(6,), (4, 6), (2, 4, 6)])
def test_operators_are_what_they_say(operator: Any, shape: tuple[int, ...]) -> None:
    """Shapes, gradients and what is changed, as torch checks them."""
    x = torch.randn(shape, dtype=DOUBLE, requires_grad=True)
    register(ALONE.key, ALONE)
    weight, bias = nn.Parameter(torch.randn(8, 6, dtype=DOUBLE)), nn.Parameter(torch.randn(8, dtype=DOUBLE))
    torch.library.opcheck(operator, (x, weight, bias, None, None, ALONE.key, False))
    torch.library.opcheck(operator, (x, weight, None, None, None, ALONE.key, False))


def block_by_block(sizes: dict[str, int], dropout: float = 0.0, recompute: str = "none") -> tuple[list[float], list[float]]:
    """Losses of two steps, eager and with each layer compiled, as one graph where there is no dropout."""
    losses = []
    for compiled in (False, True):
        mesh = init_mesh(device="cpu", **sizes)
        engine = parallelize(
            Llama(SMALL, device="meta"),
            mesh,
            dataclasses.replace(FLOAT64, micro_batch=1, sequence_parallel=mesh.tp.size > 1, dropout=dropout, recompute=recompute),
        )
        if compiled:
            for layer in engine.model.layers.values():
                layer.compile(fullgraph=not dropout, backend="aot_eager")
        losses.append([engine.train_step(share(batch_of(8, 8, seed=seed), engine)).loss for seed in range(2)])
        mesh.close()
    return losses[0], losses[1]


@pytest.mark.parametrize("sizes", [{"tp": 1, "dp": 1}, {"tp": 2}, {"pp": 2}])
def test_a_compiled_layer_of_the_model_is_one_graph(ranks: Ranks, sizes: dict[str, int]) -> None:
    for eager, compiled in ranks(max(sizes.values()), block_by_block, sizes):
        assert compiled == pytest.approx(eager, rel=1e-13)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_compiled_layers_drop_what_eager_ones_do(ranks: Ranks, recompute: str) -> None:
    for eager, compiled in ranks(2, block_by_block, {"tp": 2}, 0.3, recompute):
        assert compiled == pytest.approx(eager, rel=1e-13)


def after_closing() -> list[str]:
    """What a compiled layer says whose mesh is closed, and a graph of one that is gone altogether."""
    mesh = init_mesh(tp=2, device="cpu")
    pair = Pair(mesh, sequence_parallel=False)
    torch.compiler.reset()  # a process compiles a function for so many cases only
    compiled, x = torch.compile(pair, **FULLGRAPH), torch.ones(4, 6, dtype=DOUBLE)
    compiled(x)
    mesh.close()
    told = []
    for call in (lambda: compiled(x), lambda: library.row_linear(x, x, None, None, None, "axis tp (-1)", False)):
        with pytest.raises(ConfigError) as caught:
            call()
        told.append(str(caught.value))
    return told


def test_a_layer_of_a_closed_mesh_names_its_axis(ranks: Ranks) -> None:
    for closed, gone in ranks(2, after_closing):
        assert closed == "axis tp of a closed mesh: its ranks no longer talk to each other. Call mesh.close() last"
        assert gone == (
            "axis tp (-1) in a compiled layer: it is gone with its mesh or its optimizer, or was of another process. "
            "Make the layer again, on a mesh that is open, and compile that"
        )

"""Products that talk, as layers use them on GPUs: out of step, on two streams, in a graph, with delays; forward and backward."""

from __future__ import annotations

import os
import random
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pymesh3d.launch import launch
from pymesh3d.mesh import Mesh, init_mesh
from pymesh3d.ops.choose import TILES, VARIABLE
from pymesh3d.ops.fused import gathered_product, reduced_product, scattered_product
from pymesh3d.tp.layers import ColumnParallelLinear, RowParallelLinear
from tests.hopper import needs_hopper

ROWS, COLS, DEPTH = 256, 512, 256  # of one rank
CALLS = 10_000
SHORT = 200_000  # cycles: about a tenth of a millisecond


def _operands(mesh: Mesh, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """This rank's rows to gather, rows to multiply, and weights."""
    torch.manual_seed(100 * seed + mesh.rank)
    sizes = ((ROWS, DEPTH), (ROWS * mesh.tp.size, DEPTH), (COLS, DEPTH))
    mine, rows, weight = (torch.randn(size, device=mesh.device).to(torch.bfloat16) for size in sizes)
    return mine, rows, weight


def _gathered(mine: torch.Tensor, weight: torch.Tensor, mesh: Mesh) -> torch.Tensor:
    done = gathered_product(mine, weight, mesh.tp)
    assert done is not None, "torch was chosen"
    return done[0]


def _scattered(rows: torch.Tensor, weight: torch.Tensor, mesh: Mesh) -> torch.Tensor:
    y = scattered_product(rows, weight, mesh.tp)
    assert y is not None, "torch was chosen"
    return y


def _reduced(rows: torch.Tensor, weight: torch.Tensor, mesh: Mesh) -> torch.Tensor:
    y = reduced_product(rows, weight, mesh.tp)
    assert y is not None, "torch was chosen"
    return y


def _close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return bool(((found.double() - expected).abs() <= 2**-6 * expected.abs().max()).all())


def _exact(mesh: Mesh, mine: torch.Tensor, rows: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The three products in float64."""
    all_rows = torch.empty(ROWS * mesh.tp.size, DEPTH, dtype=torch.float64, device=mesh.device)
    dist.all_gather_into_tensor(all_rows, mine.double())
    total = rows.double() @ weight.double().t()
    dist.all_reduce(total)
    return all_rows @ weight.double().t(), total.chunk(mesh.tp.size)[mesh.tp.rank], total


def _all(mesh: Mesh, mine: torch.Tensor, rows: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The three products."""
    return _gathered(mine, weight, mesh), _scattered(rows, weight, mesh), _reduced(rows, weight, mesh)


def delays(word: str) -> bool:
    """Ranks are late at random; the ops by turns; every result has the bits of the first."""
    os.environ[VARIABLE] = word
    mesh = init_mesh(tp=-1, dp=1)
    mine, rows, weight = _operands(mesh, 1)
    firsts = _all(mesh, mine, rows, weight)
    assert all(map(_close, firsts, _exact(mesh, mine, rows, weight)))
    ops = ((_gathered, mine), (_scattered, rows), (_reduced, rows))
    wrong = torch.zeros((), dtype=torch.int64, device=mesh.device)
    chance = random.Random(mesh.rank)
    for call in range(CALLS):
        if chance.random() < 0.1:
            torch.cuda._sleep(chance.randrange(SHORT))
        op, given = ops[call % 3]
        wrong += (op(given, weight, mesh) != firsts[call % 3]).any()
        if call % 500 == 499:
            torch.cuda.synchronize()
    assert int(wrong) == 0, f"{int(wrong)} of {CALLS} calls"
    for one in mesh.watched:
        one.check()
    mesh.close()
    return True


def streams(word: str) -> bool:
    """One op on each of two streams, of which another comes first on each rank: without turns each would wait for a rank without room."""
    os.environ[VARIABLE] = word
    mesh = init_mesh(tp=-1, dp=1)
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    mine, rows, weight = _operands(mesh, 2)
    expected = _exact(mesh, mine, rows, weight)
    large = torch.randn(8192, 8192, device=mesh.device).to(torch.bfloat16)
    for _ in range(20):
        torch.cuda.synchronize()
        dist.barrier()
        with torch.cuda.stream(first):
            if mesh.rank:
                torch.cuda._sleep(10 * SHORT)
            gathered, filling = _gathered(mine, weight, mesh), _gathered(large, large, mesh)
        with torch.cuda.stream(second):
            scattered, also_filling = _scattered(rows, weight, mesh), _scattered(large, large, mesh)
        torch.cuda.synchronize()
        assert _close(gathered, expected[0]) and _close(scattered, expected[1])
        assert filling.shape[0] == mesh.tp.size * 8192 == mesh.tp.size**2 * also_filling.shape[0]
    mesh.close()
    return True


def replays(word: str) -> bool:
    """A graph of all ops, with other numbers each time."""
    os.environ[VARIABLE] = word
    mesh = init_mesh(tp=-1, dp=1)
    mine, rows, weight = _operands(mesh, 3)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        _all(mesh, mine, rows, weight)  # makes what ranks share, for this stream
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            found = [_all(mesh, mine, rows, weight) for _ in range(3)]
    for seed in range(4, 9):
        for tensor, new in zip((mine, rows, weight), _operands(mesh, seed), strict=True):
            tensor.copy_(new)
        expected = _exact(mesh, mine, rows, weight)
        graph.replay()
        torch.cuda.synchronize()
        assert all(_close(y, exact) for one in found for y, exact in zip(one, expected, strict=True)), seed
    mesh.close()
    return True


def layers(word: str) -> bool:
    """A column- and a row-parallel layer with and without sequence parallelism, forward and backward: as with torch's products."""
    mesh = init_mesh(tp=-1, dp=1)
    _layers(word, mesh, True)
    _layers(word, mesh, False)
    mesh.close()
    return True


def _layers(word: str, mesh: Mesh, sequence_parallel: bool) -> None:
    torch.manual_seed(7)
    options: dict[str, Any] = {"bias": True, "mesh": mesh, "device": mesh.device, "dtype": torch.bfloat16}
    up = ColumnParallelLinear(DEPTH, COLS * mesh.tp.size, sequence_parallel=sequence_parallel, **options)
    down = RowParallelLinear(COLS * mesh.tp.size, DEPTH, sequence_parallel=sequence_parallel, **options)
    torch.manual_seed(mesh.rank if sequence_parallel else 8)
    x = torch.randn(2, ROWS, DEPTH, device=mesh.device).to(torch.bfloat16)
    grad = torch.randn_like(x)
    results: dict[str, list[torch.Tensor]] = {}
    for name in ("torch", word):
        os.environ[VARIABLE] = name
        given = x.clone().requires_grad_()
        y = down(torch.relu(up(given)))
        y.backward(grad)
        assert given.grad is not None
        parameters = [*up.parameters(), *down.parameters()]
        results[name] = [y.detach(), given.grad, *(parameter.grad.clone() for parameter in parameters if parameter.grad is not None)]
        assert len(results[name]) == 6
        for parameter in parameters:
            parameter.grad = None
    assert all(_close(found, expected.double()) for found, expected in zip(results[word], results["torch"], strict=True))
    assert any(not torch.equal(found, expected) for found, expected in zip(results[word], results["torch"], strict=True)), (
        "nothing else ran"
    )


def _run(what: str, word: str) -> int:
    script = f"from tests.ops.test_fused_gpu import {what}; assert {what}({word!r})"
    return launch(["-c", script], torch.cuda.device_count())


@pytest.mark.gpu
@needs_hopper(2)
@pytest.mark.parametrize("word", TILES)
@pytest.mark.parametrize("what", ["streams", "replays", "layers"])
def test_between_gpus(what: str, word: str) -> None:
    assert _run(what, word) == 0


@pytest.mark.gpu
@pytest.mark.long
@needs_hopper(2)
@pytest.mark.timeout(300)
@pytest.mark.parametrize("word", TILES)
def test_ten_thousand_calls_with_random_delays(word: str) -> None:
    assert _run("delays", word) == 0

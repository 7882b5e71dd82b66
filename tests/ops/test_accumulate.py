"""Weight gradients go straight into the buffer of data parallelism: added, in its precision, and nowhere else."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from torch import nn

from pymesh3d.axis import Axis
from pymesh3d.ops.accumulate import add_weight_grad
from pymesh3d.tp.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding

ALONE = Axis("tp", 0, (0,), None)
BEFORE = 12345.0  # what the buffers hold: must stay in the sum

LAYERS: dict[str, Callable[[torch.dtype], nn.Module]] = {
    "column": lambda dtype: ColumnParallelLinear.from_linear(nn.Linear(16, 24, dtype=dtype), mesh=ALONE),
    "row": lambda dtype: RowParallelLinear.from_linear(nn.Linear(16, 24, dtype=dtype), mesh=ALONE),
    "table": lambda dtype: VocabParallelEmbedding.from_embedding(nn.Embedding(30, 24, dtype=dtype), mesh=ALONE, vocab_multiple=1),
}


# Integers so small that their products and sums are exact in the buffer, in whatever order a library adds them; but not in a narrower type.
SMALL = {torch.bfloat16: 2**7, torch.float32: 2**7, torch.float64: 2**22}


def integers(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randint(-SMALL[dtype], SMALL[dtype], shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize(
    ("dtype", "buffer"), [(torch.float32, torch.float32), (torch.float64, torch.float64), (torch.bfloat16, torch.float32)]
)
def test_microbatches_add_up_in_the_buffer(name: str, dtype: torch.dtype, buffer: torch.dtype) -> None:
    layer = LAYERS[name](dtype)
    exact = {n: torch.full_like(p, BEFORE, dtype=torch.float64) for n, p in layer.named_parameters()}
    for parameter in layer.parameters():
        parameter.main_grad = torch.full_like(parameter, BEFORE, dtype=buffer)
    for seed in range(4):
        table = name == "table"
        x = torch.randint(30, (64,), generator=torch.Generator().manual_seed(seed)) if table else integers(64, 16, dtype=dtype, seed=seed)
        grad_y = integers(64, 24, dtype=dtype, seed=100 + seed)
        layer(x).backward(grad_y)
        wide = grad_y.double()
        if table:
            exact["weight"].index_add_(0, x, wide)
        else:
            exact["weight"] += wide.T @ x.double()
            exact["bias"] += wide.sum(0)
    for n, parameter in layer.named_parameters():
        assert parameter.grad is None
        assert parameter.main_grad.dtype == buffer
        torch.testing.assert_close(parameter.main_grad.double(), exact[n], rtol=0, atol=0)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize(
    ("dtype", "buffer"), [(torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16)]
)
def test_the_first_gradient_takes_the_place_of_what_has_no_meaning(name: str, dtype: torch.dtype, buffer: torch.dtype) -> None:
    """And the second one is added to it: in memory that comes late, and is not a number before."""
    layer, opened = LAYERS[name](dtype), []

    def open_(parameter: nn.Parameter) -> None:
        opened.append(parameter)
        parameter.main_grad.data = torch.full_like(parameter, torch.nan, dtype=buffer)
        parameter.main_grad.fresh = True

    for parameter in layer.parameters():
        parameter.main_grad = torch.empty(0, dtype=buffer)
        parameter.main_grad.open = functools.partial(open_, parameter)
    x = torch.arange(30) if name == "table" else torch.eye(16, dtype=dtype)
    grad_y = torch.full((len(x), 24), 3.0, dtype=dtype)
    for times in (1, 2):
        layer(x).backward(grad_y)
        for n, parameter in layer.named_parameters():
            exact = 3.0 * times * (16 if n == "bias" else 1)
            assert (parameter.main_grad == exact).all(), (n, times)
    assert len(opened) == len(list(layer.parameters())), "each is given memory once"


def test_a_layer_used_twice_adds_both() -> None:
    layer = ColumnParallelLinear.from_linear(nn.Linear(8, 8, dtype=torch.float64), mesh=ALONE)
    x = torch.randn(5, 8, dtype=torch.float64, requires_grad=True)
    layer(layer(x)).sum().backward()
    expected = {name: parameter.grad.clone() for name, parameter in layer.named_parameters()}
    for parameter in layer.parameters():
        parameter.grad = None
        parameter.main_grad = torch.zeros_like(parameter)
    layer(layer(x)).sum().backward()
    for name, parameter in layer.named_parameters():
        torch.testing.assert_close(parameter.main_grad, expected[name], rtol=1e-12, atol=1e-12)


def test_a_frequent_token_keeps_its_small_summands_in_bf16() -> None:
    """2048 times 1: in bf16 a sum of ones stops at 256."""
    table = VocabParallelEmbedding.from_embedding(nn.Embedding(4, 2, dtype=torch.bfloat16), mesh=ALONE, vocab_multiple=1)
    table(torch.zeros(2048, dtype=torch.int64)).backward(torch.ones(2048, 2, dtype=torch.bfloat16))
    assert table.weight.grad.tolist() == [[2048, 2048], [0, 0], [0, 0], [0, 0]]
    bias = ColumnParallelLinear.from_linear(nn.Linear(2, 2, dtype=torch.bfloat16), mesh=ALONE)
    bias(torch.zeros(2048, 2, dtype=torch.bfloat16)).backward(torch.ones(2048, 2, dtype=torch.bfloat16))
    assert bias.bias.grad.tolist() == [2048, 2048]


@pytest.mark.gpu
def test_on_a_gpu_bf16_operands_reach_the_fp32_buffer_unrounded() -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    grad_y, x = (torch.randn(512, n, generator=generator, device="cuda").bfloat16() for n in (192, 320))
    weight = nn.Parameter(torch.zeros(192, 320, device="cuda", dtype=torch.bfloat16))
    weight.main_grad = torch.full((192, 320), 3.0, device="cuda")
    assert add_weight_grad(weight.main_grad, grad_y, x) is None
    exact = 3.0 + grad_y.double().t() @ x.double()
    assert (weight.main_grad - exact).abs().max() / exact.abs().max() < 1e-6  # bf16 anywhere on the way would leave 2e-3

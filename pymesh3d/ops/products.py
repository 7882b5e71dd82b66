"""The arithmetic of column- and row-parallel matrix products and of their gradients, without autograd.

Legend: T tokens of all ranks, K in features, N out features. Tokens are the dim before the features; with sequence_parallel each rank of
the axis holds T / ranks of them, otherwise all. `buffers`: where gradients of weight and bias are added; one that has none is returned.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from pymesh3d.axis import Axis
from pymesh3d.comm.collectives import Pending, all_gather, all_reduce_, reduce_scatter
from pymesh3d.ops.accumulate import add_grad, add_weight_grad
from pymesh3d.ops.ahead import Input, recall, remember
from pymesh3d.ops.fused import gathered_aside, gathered_product, reduced_product, scattered_product

Buffers = tuple[torch.Tensor | None, torch.Tensor | None]
Gradients = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]  # of x, weight, bias


def gather_tokens(x: torch.Tensor, axis: Axis) -> Pending:
    """Start gathering the token dim, moved to the front."""
    return all_gather(x.movedim(-2, 0), axis)


def scatter_tokens(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """This rank's part of the token dim of the sum over ranks."""
    return reduce_scatter(x.movedim(-2, 0), axis).wait().movedim(0, -2)


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1, x.shape[-1])


def _sum_rows(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return _rows(x).sum(0, dtype=torch.float32 if dtype == torch.bfloat16 else dtype)


def column_forward(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, axis: Axis, sequence_parallel: bool) -> torch.Tensor:
    """y[..., T, N/ranks] = x[..., T, K] weight[N/ranks, K]^T + bias."""
    if sequence_parallel and (done := gathered_product(x, weight, axis)) is not None:
        y = done[0].movedim(0, -2)
        return y if bias is None else y + bias
    if sequence_parallel:
        x = gather_tokens(x, axis).wait().movedim(0, -2)
    return F.linear(x, weight, bias)


def column_backward(
    grad_y: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    buffers: Buffers,
    axis: Axis,
    sequence_parallel: bool,
    needs: Sequence[bool],
    ahead: Input | None,
) -> Gradients:
    """The gather of x, if it has not been done `ahead`, runs under the product for grad_x, whose reduction runs under the product for the
    weight, if not in one kernel.
    """
    gathered: Pending | None = None
    if sequence_parallel and needs[1]:
        gathered = (ahead.take() if ahead else None) or gathered_aside(x, axis) or gather_tokens(x, axis)
    grad_x = pending = None
    if needs[0]:
        grad_x = (scattered_product if sequence_parallel else reduced_product)(grad_y, weight.t(), axis)
    if needs[0] and grad_x is None:
        grad_x = grad_y.matmul(weight)
        pending = reduce_scatter(grad_x.movedim(-2, 0), axis) if sequence_parallel else all_reduce_(grad_x, axis)
    grad_weight = grad_bias = None
    if needs[1]:
        if gathered is not None:
            grad_weight = add_weight_grad(buffers[0], _rows(grad_y.movedim(-2, 0)), _rows(gathered.wait()))
        else:
            grad_weight = add_weight_grad(buffers[0], _rows(grad_y), _rows(x))
    if bias is not None and needs[2]:
        grad_bias = add_grad(buffers[1], _sum_rows(grad_y, bias.dtype), bias.dtype)
    if pending is not None:
        grad_x = pending.wait().movedim(0, -2) if sequence_parallel else pending.wait()
    return grad_x, grad_weight, grad_bias


def row_forward(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, axis: Axis, sequence_parallel: bool) -> torch.Tensor:
    """y[..., T, N] = sum over ranks of x[..., T, K/ranks] weight[N, K/ranks]^T, plus bias."""
    y = (scattered_product if sequence_parallel else reduced_product)(x, weight, axis)
    if y is None:
        y = F.linear(x, weight)
        y = scatter_tokens(y, axis) if sequence_parallel else all_reduce_(y, axis).wait()
    return y if bias is None else y + bias


def row_backward(
    grad_y: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    buffers: Buffers,
    axis: Axis,
    sequence_parallel: bool,
    needs: Sequence[bool],
    ahead: Input | None,
) -> Gradients:
    """The gathered gradient serves both products. What the column-parallel layer before will need is gathered `ahead` under the rest."""
    done = gathered_product(grad_y, weight.t(), axis, keep=needs[1]) if sequence_parallel and needs[0] else None
    gathered = gather_tokens(grad_y, axis) if sequence_parallel and done is None else None
    if ahead is not None:
        ahead.begin()
    grad_x = grad_bias = gathered_y = None
    if bias is not None and needs[2]:
        grad_bias = add_grad(buffers[1], _sum_rows(grad_y, bias.dtype), bias.dtype)
    if done is not None:
        grad_x, gathered_y = done[0].movedim(0, -2), done[1]
    elif gathered is not None:
        gathered_y = gathered.wait()
    if gathered_y is not None:
        grad_y = gathered_y.movedim(0, -2)
    if needs[0] and done is None:
        grad_x = grad_y.matmul(weight)
    grad_weight = add_weight_grad(buffers[0], _rows(grad_y), _rows(x)) if needs[1] else None
    return grad_x, grad_weight, grad_bias


class Product(NamedTuple):
    """A product and its gradients; `prepare` says, in the forward pass, what its backward pass finds gathered ahead, or gathers for a layer
    before, of x, and whether the weight is trained.
    """

    forward: Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None, Axis, bool], torch.Tensor]
    backward: Callable[
        [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, Buffers, Axis, bool, Sequence[bool], Input | None], Gradients
    ]
    prepare: Callable[[torch.Tensor, Axis, bool], Input | None]


COLUMN = Product(column_forward, column_backward, remember)
ROW = Product(row_forward, row_backward, recall)

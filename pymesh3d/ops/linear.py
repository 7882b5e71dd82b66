"""Column- and row-parallel matrix products and the vocabulary-parallel lookup, with their gradients.

Legend: T tokens of all ranks, K in features, N out features. Tokens are the dim before the features; with
sequence_parallel each rank of the axis holds T / ranks of them, otherwise all.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F

from pymesh3d.axis import Axis
from pymesh3d.comm.collectives import all_reduce_
from pymesh3d.ops import library
from pymesh3d.ops.accumulate import add_grad
from pymesh3d.ops.function import first_order, owned
from pymesh3d.ops.products import COLUMN, ROW, Buffers, Product, gather_tokens, scatter_tokens
from pymesh3d.ops.split import left_for_later


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        product: Product,
        buffers: Buffers,
        axis: Axis,
        sequence_parallel: bool,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight, bias)
        ctx.backward_of, ctx.options = product.backward, (buffers, axis, sequence_parallel)
        ctx.ahead = product.prepare(x, axis, ctx.needs_input_grad[1]) if sequence_parallel else None
        return owned(product.forward(x, weight, bias, axis, sequence_parallel))

    @staticmethod
    @first_order
    def backward(ctx: Any, grad_y: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gradients = functools.partial(ctx.backward_of, grad_y, *ctx.saved_tensors, *ctx.options)
        of_x, of_weight, of_bias = ctx.needs_input_grad[:3]
        ahead, (weight_buffer, _) = ctx.ahead, ctx.options[0]
        if of_weight and weight_buffer is not None and (left := left_for_later()) is not None:
            left.add(functools.partial(gradients, (False, True, False), None))  # what tokens it needs it gathers then
            of_weight, ahead = False, None
        return *gradients((of_x, of_weight, of_bias), ahead), None, None, None, None


class _VocabLookup(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, ids: torch.Tensor, weight: torch.Tensor, axis: Axis, sequence_parallel: bool, vocab: int, padding_idx: int | None
    ) -> torch.Tensor:
        local = ids - axis.rank * weight.shape[0]
        elsewhere = (local < 0) | (local >= weight.shape[0])
        local = local.masked_fill(elsewhere, 0)
        no_grad = elsewhere if padding_idx is None else elsewhere | (ids == padding_idx)
        ctx.save_for_backward(local, no_grad, weight)
        ctx.axis, ctx.sequence_parallel = axis, sequence_parallel
        # On CUDA nobody looked at the ids, which would wait for the device: one outside makes numbers that no step is taken with.
        instead = torch.zeros_like(ids, dtype=weight.dtype).masked_fill_((ids < 0) | (ids >= vocab), torch.nan)
        y = torch.where(elsewhere.unsqueeze(-1), instead.unsqueeze(-1), F.embedding(local, weight))
        return owned(scatter_tokens(y, axis) if sequence_parallel else all_reduce_(y, axis).wait())

    @staticmethod
    @first_order
    def backward(ctx: Any, grad_y: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        local, no_grad, weight = ctx.saved_tensors
        if ctx.sequence_parallel:
            grad_y = gather_tokens(grad_y, ctx.axis).wait().movedim(0, -2)
        grad_y = grad_y.masked_fill(no_grad.unsqueeze(-1), 0).contiguous()
        if grad_y.dtype == torch.bfloat16:  # a token that occurs often would lose its small summands
            grad_y = grad_y.float()
        grad = torch.ops.aten.embedding_dense_backward(grad_y, local, weight.shape[0], -1, False)
        return None, add_grad(getattr(weight, "main_grad", None), grad, weight.dtype), None, None, None, None


def column_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, axis: Axis, sequence_parallel: bool) -> torch.Tensor:
    """y[..., T, N/ranks] = x[..., T, K] weight[N/ranks, K]^T + bias. With sequence_parallel x is [..., T/ranks, K] and is gathered."""
    return _apply(COLUMN, library.column_linear, x, weight, bias, axis, sequence_parallel)


def row_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, axis: Axis, sequence_parallel: bool) -> torch.Tensor:
    """y[..., T, N] = sum over ranks of x[..., T, K/ranks] weight[N, K/ranks]^T, plus bias; [..., T/ranks, N] with sequence_parallel."""
    return _apply(ROW, library.row_linear, x, weight, bias, axis, sequence_parallel)


def _apply(
    product: Product,
    operator: Any,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    axis: Axis,
    sequence_parallel: bool,
) -> torch.Tensor:
    """By the autograd function, or within a compiled graph by the operator. Under torch.autocast all is in its dtype, as F.linear has it;
    autograd brings the gradients back to the parameters'."""
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    y: torch.Tensor
    if torch.compiler.is_compiling():
        handles = getattr(weight, "main_grad_handle", None), getattr(bias, "main_grad_handle", None)
        y = operator(x, weight, bias, *handles, axis.key, sequence_parallel)
    else:
        buffers = getattr(weight, "main_grad", None), getattr(bias, "main_grad", None)
        y = _Linear.apply(x, weight, bias, product, buffers, axis, sequence_parallel)
    return y


@torch.compiler.disable
def vocab_lookup(
    ids: torch.Tensor, weight: torch.Tensor, axis: Axis, sequence_parallel: bool, *, vocab: int, padding_idx: int | None
) -> torch.Tensor:
    """Rows of an embedding [V, D] cut over the ranks: ids [..., T] -> [..., T, D], or [..., T/ranks, D] with sequence_parallel.

    NaN for an id outside the vocabulary.
    """
    y: torch.Tensor = _VocabLookup.apply(ids, weight, axis, sequence_parallel, vocab, padding_idx)
    return y

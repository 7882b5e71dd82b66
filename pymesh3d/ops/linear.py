"""Column- and row-parallel matrix products and the vocabulary-parallel lookup, with their gradients.

Legend: T tokens of all ranks, K in features, N out features. Tokens are the dim before the features; with
sequence_parallel each rank of the axis holds T / ranks of them, otherwise all.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from pymesh3d.comm.collectives import Pending, all_gather, all_reduce_, reduce_scatter
from pymesh3d.mesh import Axis
from pymesh3d.ops.accumulate import add_grad, add_weight_grad


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1, x.shape[-1])


def _sum_rows(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return _rows(x).sum(0, dtype=torch.float32 if dtype == torch.bfloat16 else dtype)


def _gather_tokens(x: torch.Tensor, axis: Axis) -> Pending:
    """Start gathering the token dim, moved to the front."""
    return all_gather(x.movedim(-2, 0), axis)


def _scatter_tokens(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    return reduce_scatter(x.movedim(-2, 0), axis).wait().movedim(0, -2)


def _autocast(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Under torch.autocast, all in its dtype, as F.linear would have them. Autograd brings the gradients back to the parameters'."""
    if not torch.is_autocast_enabled(x.device.type):
        return x, weight, bias
    dtype = torch.get_autocast_dtype(x.device.type)
    return x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)


class _ColumnLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, axis: Axis, sequence_parallel: bool
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight, bias)
        ctx.axis, ctx.sequence_parallel = axis, sequence_parallel
        if sequence_parallel:
            x = _gather_tokens(x, axis).wait().movedim(0, -2)
        return F.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, bias = ctx.saved_tensors
        axis, sequence_parallel = ctx.axis, ctx.sequence_parallel
        # The gather of x runs under the product for grad_x, whose reduction runs under the product for the weight.
        gathered = _gather_tokens(x, axis) if sequence_parallel and ctx.needs_input_grad[1] else None
        grad_x = pending = None
        if ctx.needs_input_grad[0]:
            grad_x = grad_y.matmul(weight)
            pending = reduce_scatter(grad_x.movedim(-2, 0), axis) if sequence_parallel else all_reduce_(grad_x, axis)
        grad_weight = grad_bias = None
        if ctx.needs_input_grad[1]:
            if gathered is not None:
                grad_weight = add_weight_grad(weight, _rows(grad_y.movedim(-2, 0)), _rows(gathered.wait()))
            else:
                grad_weight = add_weight_grad(weight, _rows(grad_y), _rows(x))
        if bias is not None and ctx.needs_input_grad[2]:
            grad_bias = add_grad(bias, _sum_rows(grad_y, bias.dtype))
        if pending is not None:
            grad_x = pending.wait().movedim(0, -2) if sequence_parallel else pending.wait()
        return grad_x, grad_weight, grad_bias, None, None


class _RowLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, axis: Axis, sequence_parallel: bool
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight, bias)
        ctx.axis, ctx.sequence_parallel = axis, sequence_parallel
        y = F.linear(x, weight)
        y = _scatter_tokens(y, axis) if sequence_parallel else all_reduce_(y, axis).wait()
        return y if bias is None else y + bias

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, bias = ctx.saved_tensors
        gathered = _gather_tokens(grad_y, ctx.axis) if ctx.sequence_parallel else None
        grad_bias = None
        if bias is not None and ctx.needs_input_grad[2]:
            grad_bias = add_grad(bias, _sum_rows(grad_y, bias.dtype))
        if gathered is not None:
            grad_y = gathered.wait().movedim(0, -2)
        grad_x = grad_y.matmul(weight) if ctx.needs_input_grad[0] else None
        grad_weight = add_weight_grad(weight, _rows(grad_y), _rows(x)) if ctx.needs_input_grad[1] else None
        return grad_x, grad_weight, grad_bias, None, None


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
        return _scatter_tokens(y, axis) if sequence_parallel else all_reduce_(y, axis).wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        local, no_grad, weight = ctx.saved_tensors
        if ctx.sequence_parallel:
            grad_y = _gather_tokens(grad_y, ctx.axis).wait().movedim(0, -2)
        grad_y = grad_y.masked_fill(no_grad.unsqueeze(-1), 0).contiguous()
        if grad_y.dtype == torch.bfloat16:  # a token that occurs often would lose its small summands
            grad_y = grad_y.float()
        grad = torch.ops.aten.embedding_dense_backward(grad_y, local, weight.shape[0], -1, False)
        return None, add_grad(weight, grad), None, None, None, None


@torch.compiler.disable
def column_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, axis: Axis, sequence_parallel: bool) -> torch.Tensor:
    """y[..., T, N/ranks] = x[..., T, K] weight[N/ranks, K]^T + bias. With sequence_parallel x is [..., T/ranks, K] and is gathered."""
    y: torch.Tensor = _ColumnLinear.apply(*_autocast(x, weight, bias), axis, sequence_parallel)
    return y


@torch.compiler.disable
def row_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, axis: Axis, sequence_parallel: bool) -> torch.Tensor:
    """y[..., T, N] = sum over ranks of x[..., T, K/ranks] weight[N, K/ranks]^T, plus bias; [..., T/ranks, N] with sequence_parallel."""
    y: torch.Tensor = _RowLinear.apply(*_autocast(x, weight, bias), axis, sequence_parallel)
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

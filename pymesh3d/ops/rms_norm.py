"""RMSNorm, alone or of a sum, with its gradient: one pass over memory each."""

from __future__ import annotations

from typing import Any

import torch

from pymesh3d.ops.function import first_order, owned
from pymesh3d.triton_kernels import rms_norm as kernel
from pymesh3d.triton_kernels.precision import compute_dtype


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        y, inverse_rms = kernel.rms_norm(x, weight, eps)
        ctx.save_for_backward(x, weight, inverse_rms)
        return y

    @staticmethod
    @first_order
    def backward(ctx: Any, grad_y: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return *kernel.rms_norm_backward(grad_y, *ctx.saved_tensors), None


class _AddRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, added: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if added is None:
            h, (y, inverse_rms) = owned(x), kernel.rms_norm(x, weight, eps)
        else:
            h, y, inverse_rms = kernel.add_rms_norm(x, added, weight, eps)
        ctx.save_for_backward(h, weight, inverse_rms)
        ctx.summed = added is not None
        ctx.set_materialize_grads(False)  # the last h of a model goes nowhere else
        return h, y

    @staticmethod
    @first_order
    def backward(ctx: Any, grad_h: torch.Tensor | None, grad_y: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        grad, grad_weight = grad_h, None
        if grad_y is not None:
            h, weight, inverse_rms = ctx.saved_tensors
            grad, grad_weight = kernel.rms_norm_backward(grad_y, h, weight, inverse_rms, grad_h)
        return grad, grad if ctx.summed else None, grad_weight, None


# The same as operators, for compiled graphs only: see `library`.
_rms_norm = torch.library.custom_op("pymesh3d::rms_norm", kernel.rms_norm, mutates_args=())
_add_rms_norm = torch.library.custom_op("pymesh3d::add_rms_norm", kernel.add_rms_norm, mutates_args=())
_rms_norm_backward = torch.library.custom_op("pymesh3d::rms_norm_backward", kernel.rms_norm_backward, mutates_args=())


@_rms_norm.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape[:-1], dtype=compute_dtype(x.dtype))


@_add_rms_norm.register_fake
def _(x: torch.Tensor, added: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape), x.new_empty(x.shape[:-1], dtype=compute_dtype(x.dtype))


@_rms_norm_backward.register_fake
def _(
    grad_y: torch.Tensor, h: torch.Tensor, weight: torch.Tensor, inverse_rms: torch.Tensor, grad_h: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    return h.new_empty(h.shape), h.new_empty(weight.shape)


def _add_backward(ctx: Any, grad_h: torch.Tensor, grad_y: torch.Tensor, _: object) -> tuple[torch.Tensor | None, ...]:
    grad, grad_weight = _rms_norm_backward(grad_y, *ctx.saved_tensors, grad_h)
    return grad, grad, grad_weight, None


_rms_norm.register_autograd(
    lambda ctx, grad_y, _: (*_rms_norm_backward(grad_y, *ctx.saved_tensors), None),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs[:2], output[1]),
)
_add_rms_norm.register_autograd(
    _add_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output[0], inputs[2], output[2])
)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dim of x [..., D], in the one dtype of x and of weight [D].

    Computed in float32 for numbers of 16 bits, and rounded once.
    """
    if torch.compiler.is_compiling():
        y: torch.Tensor = _rms_norm(x, weight, eps)[0]
    else:
        y = _RMSNorm.apply(x, weight, eps)
    return y


def add_rms_norm(x: torch.Tensor, added: torch.Tensor | None, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """h = x + added [..., D], in their dtype, and `rms_norm` of h. Without `added`, h is x: backward then adds up the gradients of both on
    its way, if what comes after reads this h in place of x. h is kept for backward, so it must not be changed in place before it.
    """
    if not torch.compiler.is_compiling():
        h, y = _AddRMSNorm.apply(x, added, weight, eps)
    elif added is None:
        h, y = x, _rms_norm(x, weight, eps)[0]
    else:
        h, y, _ = _add_rms_norm(x, added, weight, eps)
    return h, y

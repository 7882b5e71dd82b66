"""SwiGLU with its gradient, one kernel each."""

from __future__ import annotations

from typing import Any

import torch

from pymesh3d.ops.function import first_order
from pymesh3d.triton_kernels import swiglu as kernel


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return kernel.swiglu(x)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad_y: torch.Tensor) -> torch.Tensor:
        return kernel.swiglu_backward(grad_y, *ctx.saved_tensors)


# The same as operators, for compiled graphs only: see `library`.
_swiglu = torch.library.custom_op("pymesh3d::swiglu", kernel.swiglu, mutates_args=())
_swiglu.register_fake(lambda x: x.new_empty(*x.shape[:-1], x.shape[-1] // 2))
_swiglu_backward = torch.library.custom_op("pymesh3d::swiglu_backward", kernel.swiglu_backward, mutates_args=())
_swiglu_backward.register_fake(lambda grad_y, x: torch.empty_like(x, memory_format=torch.contiguous_format))
_swiglu.register_autograd(
    lambda ctx, grad_y: _swiglu_backward(grad_y, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


def swiglu(x: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of x [..., 2F], gate and up side by side -> [..., F]. Computed in float32 for bfloat16, and rounded once."""
    y: torch.Tensor = _swiglu(x) if torch.compiler.is_compiling() else _SwiGLU.apply(x)
    return y

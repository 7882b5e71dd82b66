"""Rotary position embedding of a fused q|k|v projection, with its gradient, one kernel each.

Legend: S sequence, B batch, H query heads, G key heads, E head width; rows of a projection are tokens s B + b.
"""

from __future__ import annotations

from typing import Any

import torch

from pymesh3d.ops.function import first_order
from pymesh3d.triton_kernels import rotary as kernel
from pymesh3d.triton_kernels.precision import compute_dtype

Angles = tuple[torch.Tensor, torch.Tensor]


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, heads: int, kv_heads: int) -> kernel.QKV:
        ctx.save_for_backward(cos, sin)
        return kernel.rotary(x, cos, sin, heads, kv_heads)

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return kernel.rotary_backward(*grads, *ctx.saved_tensors), None, None, None, None


# The same as operators, for compiled graphs only: see `library`.
_rotary = torch.library.custom_op("pymesh3d::rotary", kernel.rotary, mutates_args=())
_rotary_backward = torch.library.custom_op("pymesh3d::rotary_backward", kernel.rotary_backward, mutates_args=())


@_rotary.register_fake
def _(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, heads: int, kv_heads: int) -> kernel.QKV:
    seq, half = cos.shape
    q, k, v = (x.new_empty(seq, x.shape[0] // seq, count, 2 * half) for count in (heads, kv_heads, kv_heads))
    return q, k, v


@_rotary_backward.register_fake
def _(grad_q: torch.Tensor, grad_k: torch.Tensor, grad_v: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    seq, batch, heads, head_dim = grad_q.shape
    return grad_q.new_empty(seq * batch, (heads + 2 * grad_k.shape[2]) * head_dim)


_rotary.register_autograd(
    lambda ctx, *grads: (_rotary_backward(*grads, *ctx.saved_tensors), None, None, None, None),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs[1:3]),
)


def angles(seq: int, head_dim: int, theta: float, like: torch.Tensor) -> Angles:
    """Cosine and sine [S, E / 2] of the position angles (Su et al. 2021, eq. 34), on the device of `like`; float64 if that is, else
    float32."""
    exact = compute_dtype(like.dtype)
    rates = theta ** (-torch.arange(0, head_dim, 2, device=like.device, dtype=exact) / head_dim)
    turns = torch.outer(torch.arange(seq, device=like.device, dtype=exact), rates)
    return turns.cos(), turns.sin()


def rotary(x: torch.Tensor, rope: Angles, heads: int, kv_heads: int) -> kernel.QKV:
    """q [S, B, H, E], k and v [S, B, G, E] of x [S B, (H + 2G) E], the halves of q's and k's heads turned by their position's angles:
    (a, b) -> (a cos - b sin, b cos + a sin). Computed in float32 (float64 for float64), the dtype of the angles, and rounded once."""
    q, k, v = (_rotary if torch.compiler.is_compiling() else _Rotary.apply)(x, *rope, heads, kv_heads)
    return q, k, v

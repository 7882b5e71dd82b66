"""Where gradients of parameters go: straight into the flat fp32 buffer of data parallelism where there is one."""

from __future__ import annotations

import torch


def add_weight_grad(weight: torch.Tensor, grad_out: torch.Tensor, x: torch.Tensor) -> torch.Tensor | None:
    """Add grad_out^T x ([T, N]^T [T, K] -> [N, K]) to `weight.main_grad` and return None; return it where there is no buffer."""
    buffer: torch.Tensor | None = getattr(weight, "main_grad", None)
    if buffer is None:
        return grad_out.t().mm(x)
    if buffer.dtype == x.dtype:
        buffer.addmm_(grad_out.t(), x)
    elif x.is_cuda:  # bf16 operands, fp32 result: nothing is rounded on the way into the buffer
        torch.addmm(buffer, grad_out.t(), x, out_dtype=buffer.dtype, out=buffer)
    else:
        buffer.addmm_(grad_out.t().to(buffer.dtype), x.to(buffer.dtype))
    return None


def add_grad(parameter: torch.Tensor, grad: torch.Tensor) -> torch.Tensor | None:
    """Add `grad` to `parameter.main_grad` and return None; return it where there is no buffer."""
    buffer: torch.Tensor | None = getattr(parameter, "main_grad", None)
    if buffer is None:
        return grad.to(parameter.dtype)
    buffer.add_(grad)
    return None

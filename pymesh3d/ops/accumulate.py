"""Where gradients of parameters go: straight into the flat fp32 buffer of data parallelism where there is one."""

from __future__ import annotations

import itertools

import torch

from pymesh3d.comm.registry import find, register

_numbers = itertools.count()  # so that no name is given twice


def attach_buffer(parameter: torch.nn.Parameter, buffer: torch.Tensor) -> None:
    """Let gradients of `parameter` be added to `buffer`, its `main_grad` from now on.

    `main_grad_handle` stands for the buffer in compiled graphs: autograd refuses to go on where a tensor that a graph has kept has
    changed, and the buffer does with every microbatch. It has a gradient (of zero) for as long as the buffer is added to, because a
    compiler leaves out an operator of which nothing is used.
    """
    handle = next(_numbers)
    register(_name(handle), buffer)
    parameter.main_grad = buffer  # type: ignore[attr-defined]
    parameter.main_grad_handle = torch.tensor(float(handle), dtype=torch.float64, requires_grad=True)  # type: ignore[attr-defined]


def buffer_of(handle: torch.Tensor | None) -> torch.Tensor | None:
    """The buffer for which a handle stands."""
    if handle is None:
        return None
    buffer: torch.Tensor = find(_name(int(handle)))
    return buffer


def _name(handle: int) -> str:
    return f"gradient buffer {handle}"


def begun(buffer: torch.Tensor) -> bool:
    """Whether something is in `buffer`, to which the caller must add; if it is `fresh`, the caller must write over it.

    It gets its memory now if it has none (its `open` does that).
    """
    if not buffer.numel() and (give_memory := getattr(buffer, "open", None)) is not None:
        give_memory()
    fresh = getattr(buffer, "fresh", False)
    buffer.fresh = False  # type: ignore[attr-defined]
    return not fresh


def add_to(buffer: torch.Tensor, grad: torch.Tensor) -> None:
    """Add `grad` to what is in `buffer`, if there is something."""
    if begun(buffer):
        buffer.add_(grad)
    else:
        buffer.copy_(grad)


def add_weight_grad(buffer: torch.Tensor | None, grad_out: torch.Tensor, x: torch.Tensor) -> torch.Tensor | None:
    """Add grad_out^T x ([T, N]^T [T, K] -> [N, K]) to `buffer` and return None; return it where there is no buffer."""
    if buffer is None:
        return grad_out.t().mm(x)
    beta = int(begun(buffer))
    if buffer.dtype == x.dtype:
        buffer.addmm_(grad_out.t(), x, beta=beta)
    elif x.is_cuda:  # bf16 operands, fp32 result: nothing is rounded on the way into the buffer
        torch.addmm(buffer, grad_out.t(), x, out_dtype=buffer.dtype, beta=beta, out=buffer)
    else:
        buffer.addmm_(grad_out.t().to(buffer.dtype), x.to(buffer.dtype), beta=beta)
    return None


def add_grad(buffer: torch.Tensor | None, grad: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
    """Add `grad` to `buffer` and return None; return it, in `dtype`, where there is no buffer."""
    if buffer is None:
        return grad.to(dtype)
    add_to(buffer, grad)
    return None

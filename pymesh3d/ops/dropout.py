"""Dropout with the same mask in every layout: nothing is saved for backward, which draws the mask again, as recomputation does.

Torch's generators have no part in it.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from pymesh3d.errors import ConfigError
from pymesh3d.random import stream_key
from pymesh3d.triton_kernels import dropout as kernel


def module_key(seed: int, name: str) -> int:
    """The 64-bit key of the masks of module `name`; `seed` is an integer of 0 .. 2^64 - 1, anything else is a ConfigError."""
    return stream_key(seed, name, purpose=b"pymesh3d dropout")


def mask_counter(step: int, microbatch: int = 0) -> int:
    """The 64-bit counter of a microbatch of a step, each below 2^32: another one is another mask. Raises ConfigError."""
    for name, value in (("step", step), ("microbatch", microbatch)):
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**32:
            raise ConfigError(f"{name}={value!r}", f"{name} must be an integer from 0 to 2**32 - 1", f"Use {name}=0")
    return step << 32 | microbatch


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, mask: dict[str, Any]) -> torch.Tensor:
        ctx.mask = mask
        return kernel.dropout(x, **mask)

    @staticmethod
    def backward(ctx: Any, grad_y: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _Dropout.apply(grad_y, ctx.mask), None


def dropout(
    x: torch.Tensor, p: float, *, key: int, counter: int, dim: int = -1, start: int = 0, size: int | None = None, row0: int = 0
) -> torch.Tensor:
    """x / (1 - p) where kept and 0 elsewhere: every element as its place in the unsharded activation has it. p = 0 returns x.

    `x` holds start : start + x.shape[dim] of the `size` (default: all that x has) that the activation has in dim `dim`; what precedes
    `dim` is flattened to rows, of which x holds those from the global `row0` on. Examples, with S of B sequences of a batch:
    - an activation [B, S, D] that a rank has whole, its B sequences being those from `b` on in the batch: row0 = b * S;
    - features cut over tp: start = rank * D / tp, size = D, row0 = b * S;
    - tokens cut over tp: dim = 1, start = rank * S / tp, size = S, row0 = b.

    The rate is p in 16 bits, and the dtype float32, float64 or bfloat16: see the kernel. Raises ConfigError for another dtype or p, for a
    dim that x has not, and for a part that does not lie within `size`.
    """
    if not -x.ndim <= dim < x.ndim:
        raise ConfigError(
            f"dim={dim} of {x.ndim} dims", "the tensor must have the dim that is cut", "Use dim=-1, and x.view(1) of a scalar"
        )
    dim %= x.ndim
    length, size = x.shape[dim], x.shape[dim] if size is None else size
    if start < 0 or start + length > size:
        raise ConfigError(f"start={start}, {length} of size={size}", "the part must lie within the size", f"Use start=0, size={length}")
    if kernel.dropped_of(p) == 0:
        return x
    inner = math.prod(x.shape[dim + 1 :])
    rows = x.reshape(math.prod(x.shape[:dim]), length * inner)
    mask = {"p": p, "key": key, "counter": counter, "row0": row0, "col0": start * inner, "global_cols": size * inner}
    return _Dropout.apply(rows, mask).view(x.shape)

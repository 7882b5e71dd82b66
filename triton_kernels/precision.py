"""What kernels compute in: float32 for numbers of 16 bits, else their own dtype."""

from __future__ import annotations

from typing import Any

import torch

from .backend import interpreted, jit, tl


@jit
def wide(x):  # type: ignore[no-untyped-def]
    """A block in the dtype that is computed in."""
    return x if x.dtype == tl.float64 else x.to(tl.float32)


@jit
def _cast(x, DTYPE: tl.constexpr):  # type: ignore[no-untyped-def]
    return x.to(tl.float32).to(DTYPE) if DTYPE.primitive_bitwidth == 16 else x.to(DTYPE)  # torch has no other way from float64


@jit
def _cast_of_the_interpreter(x, DTYPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The interpreter itself cuts the last bits off."""
    if tl.bfloat16 == DTYPE and x.dtype != tl.bfloat16:
        bits = x.to(tl.float32).to(tl.int32, bitcast=True)
        bits = tl.where(x == x, bits + 0x7FFF + ((bits >> 16) & 1), 0x7FC00000)
        return (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return _cast(x, DTYPE)


nearest = _cast_of_the_interpreter if interpreted else _cast  # a block rounded to the nearest numbers of another dtype, as torch does


def triton_dtype(dtype: torch.dtype) -> Any:
    """The same in triton."""
    return getattr(tl, str(dtype).removeprefix("torch."))


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """What numbers of `dtype` are computed in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def wide_ref(x: torch.Tensor) -> torch.Tensor:
    """A tensor in the dtype that is computed in."""
    return x.to(compute_dtype(x.dtype))

"""What kernels compute in: float32 for numbers of 16 bits, else their own dtype."""

from __future__ import annotations

import torch

from .backend import jit, tl


@jit
def wide(x):  # type: ignore[no-untyped-def]
    """A block in the dtype that is computed in."""
    return x if x.dtype == tl.float64 else x.to(tl.float32)


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """What numbers of `dtype` are computed in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def wide_ref(x: torch.Tensor) -> torch.Tensor:
    """A tensor in the dtype that is computed in."""
    return x.to(compute_dtype(x.dtype))

"""What kernels compute in: float32 for numbers of 16 bits, else their own dtype."""

from __future__ import annotations

import torch

from .backend import jit, tl


@jit
def wide(x):  # type: ignore[no-untyped-def]
    """A block in the dtype that is computed in."""
    return x if x.dtype == tl.float64 else x.to(tl.float32)


def wide_ref(x: torch.Tensor) -> torch.Tensor:
    """A tensor in the dtype that is computed in."""
    return x if x.dtype == torch.float64 else x.float()

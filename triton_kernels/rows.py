"""How kernels see a tensor of any number of dims: as a matrix."""

from __future__ import annotations

import torch


def as_rows(x: torch.Tensor) -> torch.Tensor:
    """x [..., n] as [rows, n] with neighbouring columns; a copy only where the strides need one."""
    rows = x.reshape(-1, x.shape[-1])
    # not `contiguous`, which leaves the strides of a tensor without elements as they are
    return rows if rows.stride(1) == 1 else rows.clone(memory_format=torch.contiguous_format)

"""What tests of kernels share."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pymesh3d.triton_kernels import backend

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
needs_kernels = pytest.mark.skipif(not backend.available, reason=backend.reason)
BFLOAT16_UNIT = 2**-7 if backend.interpreted else 2**-8  # the error of one rounding: the interpreter's is towards zero


def both(kernel: Any, reference: Any) -> list[Any]:
    """Values of a parameter: the kernel, where there is one, and the reference."""
    return [pytest.param(kernel, marks=needs_kernels, id="kernel"), pytest.param(reference, id="reference")]


def noise(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Normal numbers, the same in every dtype, on the CPU."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """As integers, so that -0.0 and NaN compare as what they are."""
    return tensor.cpu().contiguous().view({8: torch.int64, 4: torch.int32, 2: torch.int16}[tensor.element_size()])

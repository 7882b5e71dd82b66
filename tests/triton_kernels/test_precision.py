"""What kernels compute in: 1 + 2^-20 is lost in 16 bits, and kept in what those are widened to."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pymesh3d.triton_kernels.backend import jit, tl
from pymesh3d.triton_kernels.precision import wide, wide_ref
from tests.kernels import DEVICE, needs_kernels

DTYPES = {torch.bfloat16: torch.float32, torch.float16: torch.float32, torch.float32: torch.float32, torch.float64: torch.float64}


@jit
def grown_kernel(x, y):  # type: ignore[no-untyped-def]
    tl.store(y, (wide(tl.load(x)) + 9.5367431640625e-07).to(tl.float64))  # 2^-20


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
def test_blocks_are_widened_to_float32_at_least(dtype: Any) -> None:
    y = torch.empty(1, dtype=torch.float64, device=DEVICE)
    grown_kernel[(1,)](torch.ones(1, dtype=dtype, device=DEVICE), y)
    assert y.item() == 1 + 2**-20


@pytest.mark.parametrize(("dtype", "computed_in"), DTYPES.items())
def test_references_too(dtype: torch.dtype, computed_in: torch.dtype) -> None:
    x = torch.tensor([1.5, -2.0], dtype=dtype)
    assert wide_ref(x).dtype == computed_in and torch.equal(wide_ref(x).to(dtype), x)

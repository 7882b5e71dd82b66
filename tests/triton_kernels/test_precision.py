"""What kernels compute in: 1 + 2^-20 is lost in 16 bits, and kept in what those are widened to. And how they round: as torch does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pymesh3d.triton_kernels.backend import jit, tl
from pymesh3d.triton_kernels.precision import nearest, triton_dtype, wide, wide_ref
from tests.kernels import DEVICE, bits, needs_kernels, noise

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


@needs_kernels
def test_dtypes_in_triton() -> None:
    expected = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32, torch.float64: tl.float64}
    assert {dtype: triton_dtype(dtype) for dtype in DTYPES} == expected


@jit
def nearest_kernel(x, y, NUMBERS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Numbers rounded to the dtype of `y`."""
    number = tl.arange(0, NUMBERS)
    tl.store(y + number, nearest(tl.load(x + number), y.dtype.element_ty))


def as_torch_rounds(x: torch.Tensor, dtype: torch.dtype) -> bool:
    """Bit for bit, but for what a NaN consists of besides."""
    y = torch.full((1 << (x.numel() - 1).bit_length(),), 12345.0, dtype=dtype, device=DEVICE)
    padded = torch.zeros(y.numel(), dtype=x.dtype, device=DEVICE)
    padded[: x.numel()] = x
    nearest_kernel[(1,)](padded, y, NUMBERS=y.numel())
    found, expected = y.cpu()[: x.numel()], x.cpu().to(dtype)
    none = expected.isnan()
    return torch.equal(found.isnan(), none) and torch.equal(bits(found)[~none], bits(expected)[~none])


def from_patterns(patterns: list[int]) -> torch.Tensor:
    """The float32 of these bits."""
    return torch.tensor(patterns, dtype=torch.int64).to(torch.int32).view(torch.float32)


SIGNS = (0, 1 << 31)
FIRST = [0, 1, 0x7F, 0x80, 0x3F7F, 0x3F80, 0x3F81, 0x7F7E, 0x7F7F, 0x7F80, 0x7FBF, 0x7FFF]  # 0, denormal, 1, largest, inf, NaN
LAST = [0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF]  # in the middle of two bfloat16 is 0x8000


@needs_kernels
def test_float32_is_rounded_to_the_nearest_bfloat16() -> None:
    """Ties to even, denormals too; what is beyond the largest becomes infinite, and NaN stays NaN."""
    assert as_torch_rounds(from_patterns([sign | first << 16 | last for sign in SIGNS for first in FIRST for last in LAST]), torch.bfloat16)
    assert as_torch_rounds(from_patterns([0x3F80_0000 | last for last in range(1 << 16)]), torch.bfloat16)


@needs_kernels
@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=64))
@settings(max_examples=100, deadline=None)
def test_any_float32_is_rounded_to_the_nearest_bfloat16(patterns: list[int]) -> None:
    assert as_torch_rounds(from_patterns(patterns), torch.bfloat16)


@needs_kernels
@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered")
@pytest.mark.parametrize("source", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_any_dtype_is_rounded_to_any_other(source: torch.dtype, dtype: torch.dtype) -> None:
    denormal = 0.0 if source == torch.bfloat16 else 1e-40  # of which the interpreter makes another number when it widens it
    special = [0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e39, -1e39, 3.4e38, 65519.0, 65520.0, 1e-7, denormal, -denormal]
    ties = 1 + torch.tensor([2**-8, 3 * 2**-8, 2**-11, 3 * 2**-11, 2**-24, 3 * 2**-24, 2**-24 + 2**-40], dtype=torch.float64)
    assert as_torch_rounds(
        torch.cat((torch.tensor(special, dtype=torch.float64), ties, -ties, noise(200, dtype=torch.float64))).to(source), dtype
    )


@needs_kernels
@pytest.mark.filterwarnings("ignore:overflow encountered")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_float64_becomes_16_bits_by_way_of_float32(dtype: torch.dtype) -> None:
    """What float32 makes a tie of goes to the even neighbour, though it was beyond the middle; and what it makes infinite stays so."""
    unit = torch.finfo(dtype).eps
    beyond, before = (torch.tensor([1 + unit / 2 + by, 1 + 1.5 * unit + by], dtype=torch.float64) for by in (2**-40, -(2**-40)))
    largest = torch.tensor([torch.finfo(dtype).max * (1 + unit / 4) * (1 - 2**-40), 1e300, 2.0**-1000], dtype=torch.float64)
    values = torch.cat((beyond, before, largest))
    once = torch.tensor([1 + unit, 1 + 2 * unit, 1.0, 1 + unit], dtype=torch.float64)
    assert values[:4].to(dtype).double().tolist() == [1.0, 1 + 2 * unit, 1.0, 1 + 2 * unit] != once.tolist()
    assert as_torch_rounds(torch.cat((values, -values)), dtype)

"""The plain product: kernel and reference against float64, whatever the shape, strides and dtype."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pymesh3d.triton_kernels.matmul import Tiles, launch, matmul, matmul_ref
from tests.kernels import BFLOAT16_UNIT, DEVICE, both, needs_kernels, noise

# the error of the one rounding at the end, and of each product and sum before
DTYPES = {torch.float64: (0.0, 2.0**-52), torch.float32: (0.0, 2.0**-23), torch.bfloat16: (BFLOAT16_UNIT, 2.0**-23)}


def agrees(form: Any, a: torch.Tensor, b: torch.Tensor, **options: Any) -> bool:
    found = form(a, b, **options)
    wide, weights = a.double(), b.double()
    expected, size = wide @ weights.t(), wide.abs() @ weights.abs().t()
    assert (found.dtype, found.shape, found.is_contiguous()) == (a.dtype, expected.shape, True)
    last, each = DTYPES[a.dtype]
    return bool(((found.double() - expected).abs() <= last * expected.abs() + each * (a.shape[-1] + 2) * size).all())


def operands(rows: int, cols: int, depth: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    return noise(rows, depth, dtype=dtype).to(DEVICE), noise(cols, depth, dtype=dtype, seed=1).to(DEVICE)


@pytest.mark.parametrize("form", both(launch, matmul_ref))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1, 1), (64, 96, 64), (33, 65, 31), (7, 300, 40), (300, 7, 5), (0, 4, 4), (4, 0, 4), (5, 3, 0)])
def test_values(form: Any, dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    assert agrees(form, *operands(*shape, dtype))


@needs_kernels
@given(st.integers(0, 90), st.integers(0, 90), st.integers(0, 70), st.integers(0, 9), st.sampled_from(list(DTYPES)))
@settings(max_examples=20, deadline=None)
def test_any_size_with_rows_apart(rows: int, cols: int, depth: int, apart: int, dtype: torch.dtype) -> None:
    a, b = operands(rows, cols, depth + apart, dtype)
    assert agrees(launch, a[:, :depth], b[:, :depth])


@needs_kernels
def test_every_tile_is_done_whatever_their_order() -> None:
    """More rows of tiles than a group has, the last group not full."""
    a, b = operands(16 * 11, 16 * 5, 16, torch.float64)
    assert agrees(launch, a, b, tiles=Tiles(16, 16, 16, 4, 2))


@pytest.mark.parametrize("form", both(launch, matmul_ref))
def test_any_strides_are_read_and_any_number_of_dims(form: Any) -> None:
    a, b = noise(6, 4, 5).to(DEVICE), noise(6, 7).to(DEVICE)
    before = a.clone(), b.clone()
    assert agrees(form, a.permute(2, 1, 0), b.t())
    assert agrees(form, a[:1, :1, :1].expand(3, 2, 6), b.t())
    assert torch.equal(a, before[0]) and torch.equal(b, before[1])


@pytest.mark.parametrize("form", both(launch, matmul_ref))
def test_what_does_not_fit_is_refused(form: Any) -> None:
    with pytest.raises(AssertionError, match="times"):
        form(noise(2, 3).to(DEVICE), noise(4, 5).to(DEVICE))
    with pytest.raises(AssertionError, match="times"):
        form(noise(2, 3).to(DEVICE), noise(4, 3).double().to(DEVICE))


def test_on_the_cpu_plain_torch_computes() -> None:
    assert agrees(matmul, noise(3, 4), noise(5, 4))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(2048, 4096, 4096), (4097, 1000, 129), (3, 300001, 24), (300001, 24, 8)])
def test_large_on_a_gpu(dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    assert agrees(launch, *operands(*shape, dtype))

"""SwiGLU and its gradient: kernel and reference against float64, whatever the shape, strides and dtype."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from pymesh3d.ops.swiglu import swiglu as differentiable
from pymesh3d.triton_kernels.swiglu import TILE, launch, launch_backward, swiglu, swiglu_backward, swiglu_backward_ref, swiglu_ref
from tests.kernels import BFLOAT16_UNIT, DEVICE, both, needs_kernels

# and the error of the one rounding at the end
DTYPES = {torch.float64: 0.0, torch.float32: 0.0, torch.bfloat16: BFLOAT16_UNIT}
BOTH = both((launch, launch_backward), (swiglu_ref, swiglu_backward_ref))
Forms = tuple[Any, Any]


def noise(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return (3 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)).to(dtype).to(DEVICE)


def exact(x: torch.Tensor, grad_y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Value and gradient in float64, by torch's own functions and autograd."""
    x = x.double().requires_grad_()
    gate, up = x.chunk(2, dim=-1)
    y = F.silu(gate) * up
    y.backward(grad_y.double())
    assert x.grad is not None
    return y.detach(), x.grad


def close(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype, size: torch.Tensor) -> bool:
    """`size`: of the numbers that were added up."""
    assert (found.dtype, found.shape, found.is_contiguous()) == (dtype, expected.shape, True)
    eps = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
    return bool(((found.double() - expected).abs() <= DTYPES[dtype] * expected.abs() + 8 * eps * size).all())


def agrees(forms: Forms, x: torch.Tensor, grad_y: torch.Tensor) -> bool:
    y, grad_x = exact(x, grad_y)
    gate, up = x.double().abs().chunk(2, dim=-1)
    size = (1 + gate) * (1 + up)
    return close(forms[0](x), y, x.dtype, size) and close(
        forms[1](grad_y, x), grad_x, x.dtype, torch.cat((size, size), -1) * torch.cat((grad_y, grad_y), -1).double().abs()
    )


@pytest.mark.parametrize("forms", BOTH)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("shape", "width"), [((), 5), ((1,), 1), ((7,), 13), ((3, 5), 64), ((9,), TILE), ((2,), TILE + 3), ((2 * TILE + 1,), 2)]
)
def test_values_and_gradients(forms: Forms, dtype: torch.dtype, shape: tuple[int, ...], width: int) -> None:
    assert agrees(forms, noise(*shape, 2 * width, dtype=dtype), noise(*shape, width, dtype=dtype, seed=1))


@needs_kernels
@given(st.integers(0, 40), st.integers(0, 300), st.integers(0, 9), st.sampled_from(list(DTYPES)))
@settings(max_examples=25, deadline=None)
def test_any_size_with_rows_apart(rows: int, width: int, apart: int, dtype: torch.dtype) -> None:
    x = noise(rows, 2 * width + apart, dtype=dtype)[:, : 2 * width]
    grad_y = noise(rows, width + apart, dtype=dtype, seed=1)[:, :width]
    assert agrees((launch, launch_backward), x, grad_y)


@pytest.mark.parametrize("forms", BOTH)
def test_any_strides_are_read_and_nothing_is_changed(forms: Forms) -> None:
    x, grad_y = noise(10, 6, 2), noise(5, 6, 2, seed=1)
    before = x.clone(), grad_y.clone()
    assert agrees(forms, x.permute(2, 1, 0), grad_y.permute(2, 1, 0))
    assert agrees(forms, x.permute(2, 1, 0), grad_y[:1, :1, :1].expand(5, 6, 2).permute(2, 1, 0))  # the gradient of a sum
    assert torch.equal(x, before[0]) and torch.equal(grad_y, before[1])


@pytest.mark.filterwarnings("ignore:overflow encountered")
@pytest.mark.parametrize("forms", BOTH)
@pytest.mark.parametrize("dtype", DTYPES)
def test_far_from_zero_and_no_numbers(forms: Forms, dtype: torch.dtype) -> None:
    gate = torch.tensor([1000.0, -1000.0, 0.0, -0.0, 50.0, -50.0], dtype=dtype, device=DEVICE)
    x, ones = torch.cat((gate, torch.full_like(gate, 2.0)))[None], torch.ones(1, 6, dtype=dtype, device=DEVICE)
    assert agrees(forms, x, ones)
    for place in (0, 6):  # a gate, and what it lets through
        spoilt = x.clone()
        spoilt[0, place] = torch.nan
        assert forms[0](spoilt).isnan().tolist() == [[True] + [False] * 5]
        assert forms[1](ones, spoilt).isnan().tolist() == [[True] + [False] * 5 + [place == 0] + [False] * 5]


@pytest.mark.parametrize("forms", BOTH)
def test_what_has_no_two_halves_is_refused(forms: Forms) -> None:
    for x, grad_y in (
        (noise(2, 5), noise(2, 2)),
        (noise(2, 6), noise(2, 2)),
        (noise(2, 6), noise(1, 3)),
        (noise(2, 6), noise(3, 2)),
        (noise(2, 6), noise(6)),
        (torch.ones(2, 6).long(), noise(2, 3)),
    ):
        with pytest.raises(AssertionError, match=r"gate and up|a gradient"):
            forms[1](grad_y, x)
    with pytest.raises(AssertionError, match="gate and up"):
        forms[0](noise(2, 5))


@needs_kernels
def test_the_operation_runs_the_reference_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    x, grad_y = noise(3, 8).cpu(), noise(3, 4).cpu()
    monkeypatch.setattr("pymesh3d.triton_kernels.swiglu.launch", None)
    monkeypatch.setattr("pymesh3d.triton_kernels.swiglu.launch_backward", None)
    assert torch.equal(swiglu(x), swiglu_ref(x)) and torch.equal(swiglu_backward(grad_y, x), swiglu_backward_ref(grad_y, x))


def test_autograd_eager_and_compiled() -> None:
    x = noise(2, 3, 10, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(differentiable, x)
    torch.library.opcheck(torch.ops.pymesh3d.swiglu.default, (x,))
    expanded = noise(1, dtype=torch.float64).expand(2, 3, 5)  # the gradient of a sum
    torch.library.opcheck(torch.ops.pymesh3d.swiglu_backward.default, (expanded, x.detach()))
    lying = noise(10, 3, dtype=torch.float64).t()
    torch.library.opcheck(torch.ops.pymesh3d.swiglu_backward.default, (noise(3, 5, dtype=torch.float64), lying))
    for run in (differentiable, torch.compile(differentiable, fullgraph=True, backend="aot_eager")):
        y, grad_y = run(x), noise(2, 3, 5, dtype=torch.float64, seed=1)
        found = y.detach(), *torch.autograd.grad(y, x, grad_y)
        for one, other in zip(found, exact(x.detach(), grad_y), strict=True):
            assert torch.allclose(one, other, rtol=1e-14, atol=1e-14)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(8192, 8192), (4097, 14336), (300_001, 24), (3, 1_000_003)])
def test_large_on_a_gpu(dtype: torch.dtype, rows: int, width: int) -> None:
    assert agrees((launch, launch_backward), noise(rows, 2 * width, dtype=dtype), noise(rows, width, dtype=dtype, seed=1))

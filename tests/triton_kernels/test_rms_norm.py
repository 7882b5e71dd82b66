"""RMSNorm, alone and of a sum, and its gradients: kernel and reference against float64, whatever the shape, strides and dtype."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from pymesh3d.triton_kernels import rms_norm as op
from pymesh3d.triton_kernels.precision import compute_dtype
from pymesh3d.triton_kernels.rms_norm import TILE, WIDEST, launch, launch_backward, rms_norm_backward_ref, rms_norm_ref
from tests import kernels
from tests.kernels import BFLOAT16_UNIT, DEVICE, bits, both, needs_kernels

EPS = 1e-5
# and the error of the one rounding at the end
DTYPES = {torch.float64: 0.0, torch.float32: 0.0, torch.bfloat16: BFLOAT16_UNIT, torch.float16: 2**-11}
KERNELS = launch, launch_backward
BOTH = both(KERNELS, (rms_norm_ref, rms_norm_backward_ref))
Forms = tuple[Any, Any]


def noise(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return kernels.noise(*shape, dtype=dtype, seed=seed).to(DEVICE)


def close(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype, size: torch.Tensor) -> bool:
    """`size`: of the numbers that were added up."""
    assert (found.dtype, found.shape, found.is_contiguous()) == (dtype, expected.shape, True)
    eps = torch.finfo(compute_dtype(dtype)).eps
    smallest = torch.finfo(dtype).smallest_normal * DTYPES[dtype]
    return bool(((found.double() - expected).abs() <= DTYPES[dtype] * expected.abs() + 16 * eps * size + smallest).all())


def forward_agrees(forms: Forms, x: torch.Tensor, weight: torch.Tensor, added: torch.Tensor | None, eps: float) -> bool:
    h, y, inverse_rms = forms[0](x, weight, eps, added)
    if added is None:
        assert h is x
    else:
        assert close(h, x.double() + added.double(), x.dtype, x.double().abs() + added.double().abs())
    expected = F.rms_norm(h.double(), weight.shape, weight.double(), eps)
    factors = (h.double().square().mean(-1) + eps).rsqrt()
    return close(y, expected, x.dtype, expected.abs()) and close(inverse_rms, factors, compute_dtype(x.dtype), factors)


def backward_agrees(
    forms: Forms, h: torch.Tensor, weight: torch.Tensor, grad_y: torch.Tensor, grad_h: torch.Tensor | None, eps: float
) -> bool:
    """Against torch's autograd."""
    x, scale = h.double().detach().requires_grad_(), weight.double().detach().requires_grad_()
    of_x, of_weight = torch.autograd.grad(F.rms_norm(x, weight.shape, scale, eps), (x, scale), grad_y.double())
    _, _, inverse_rms = rms_norm_ref(h, weight, eps)
    grad_x, grad_weight = forms[1](grad_y, h, weight, inverse_rms, grad_h)
    normal, inverse = (h.double() * inverse_rms.double()[..., None]).abs(), inverse_rms.double()[..., None]
    grad = grad_y.double().abs()
    size = (grad * weight.double().abs() + normal * (grad * normal * weight.double().abs()).mean(-1, keepdim=True)) * inverse
    more = 0 if grad_h is None else grad_h.double()
    return close(grad_x, of_x + more, h.dtype, size + abs(more)) and close(
        grad_weight, of_weight, h.dtype, (grad * normal).reshape(-1, h.shape[-1]).sum(0)
    )


def agrees(forms: Forms, shape: tuple[int, ...], dtype: torch.dtype, *, scale: float = 1.0, eps: float = EPS) -> bool:
    x, added, grad_y, grad_h = (noise(*shape, dtype=dtype, seed=seed) for seed in range(4))
    x, added, weight = x * scale, added * scale, noise(shape[-1], dtype=dtype, seed=4)
    return all(
        forward_agrees(forms, x, weight, more, eps) and backward_agrees(forms, x, weight, grad_y, elsewhere, eps)
        for more, elsewhere in ((None, None), (added, grad_h))
    )


@pytest.mark.parametrize("forms", BOTH)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5,), (1, 1), (7, 13), (2, 3, 64), (9, TILE), (5, TILE + 3), (3 * TILE // 2, 1), (0, 3), (2, 0, 3)])
def test_values_and_gradients(forms: Forms, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    assert agrees(forms, shape, dtype)


@needs_kernels
@pytest.mark.parametrize("width", [5120, 12288 + 1, WIDEST])
def test_wide_rows(width: int) -> None:
    assert agrees(KERNELS, (5, width), torch.bfloat16)


@pytest.mark.filterwarnings("ignore:(divide by zero|invalid value) encountered")
@pytest.mark.parametrize("forms", BOTH)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("scale", "eps"), [(1e-3, 1e-5), (1e-3, 1e-6), (1e-9, 1e-5), (1e6, 1e-5), (1.0, 0.3), (1.0, 2), (1e-3, 0.0)])
def test_eps_is_added_to_the_mean(forms: Forms, dtype: torch.dtype, scale: float, eps: float) -> None:
    """As it is given: in float64 a float32 of it would be another number."""
    assert agrees(forms, (5, 12), dtype, scale=scale, eps=eps)


@needs_kernels
@given(st.integers(0, 40), st.integers(1, 300), st.integers(0, 9), st.sampled_from(list(DTYPES)))
@settings(max_examples=25, deadline=None)
def test_any_size_with_rows_apart(rows: int, width: int, apart: int, dtype: torch.dtype) -> None:
    """What lies between the rows is no number."""

    def spread(seed: int) -> torch.Tensor:
        whole = noise(rows, width + apart * seed, dtype=dtype, seed=seed)  # each its own way apart
        whole[:, width:] = torch.nan
        return whole[:, :width]

    x, added, grad_y, grad_h = map(spread, range(4))
    weight = noise(width, dtype=dtype, seed=4)
    assert forward_agrees(KERNELS, x, weight, None, EPS) and forward_agrees(KERNELS, x, weight, added, EPS)
    assert backward_agrees(KERNELS, x, weight, grad_y, None, EPS) and backward_agrees(KERNELS, x, weight, grad_y, grad_h, EPS)


@needs_kernels
def test_rows_apart_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    x, added, grad_y, grad_h = (noise(4, 12, seed=seed)[:, 1:8] for seed in range(4))
    weight, inverse_rms = noise(7), noise(4)
    for copy in ("clone", "contiguous", "copy_"):
        unchanged = getattr(torch.Tensor, copy)
        monkeypatch.setattr(
            torch.Tensor, copy, lambda t, *a, f=unchanged, **k: f(t, *a, **k) if t.is_contiguous() else pytest.fail("copied")
        )
    launch(x, weight, EPS, added)
    launch_backward(grad_y, x, weight, inverse_rms, grad_h)


@pytest.mark.parametrize("forms", BOTH)
def test_any_strides_are_read_and_nothing_is_changed(forms: Forms) -> None:
    given = [noise(6, 5, 4, seed=seed) for seed in range(4)]
    before = [tensor.clone() for tensor in given]
    x, added, grad_y, grad_h = (tensor.permute(2, 1, 0) for tensor in given)
    one = noise(1).expand(4, 5, 6)  # the gradient of a sum
    weight = torch.stack((noise(6), noise(6, seed=1)), -1)[:, 0]
    assert forward_agrees(forms, x, weight, added, EPS) and forward_agrees(forms, one, weight, None, EPS)
    assert backward_agrees(forms, x, weight, grad_y, grad_h, EPS) and backward_agrees(forms, x, weight, one, one, EPS)
    assert all(map(torch.equal, given, before))
    _, _, inverse_rms = forms[0](x, weight, EPS)
    apart = torch.stack((inverse_rms, inverse_rms + 1), -1)[..., 0]
    expected = forms[1](grad_y, x, weight, inverse_rms)
    assert all(map(torch.equal, forms[1](grad_y, x, weight, apart), expected))


@needs_kernels
@pytest.mark.parametrize("shape", [(5, 1), (3, 13), (2, TILE + 3)])
def test_nothing_is_written_beyond_the_results(monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int]) -> None:
    margins = []

    def empty(size: int | tuple[int, ...], **options: Any) -> torch.Tensor:
        sizes = (size,) if isinstance(size, int) else size
        whole = torch.full((math.prod(sizes) + 2 * TILE,), torch.inf, **options)
        margins.append(whole[-2 * TILE :])
        return whole[: -2 * TILE].view(sizes)

    monkeypatch.setattr(torch, "empty", empty)
    assert agrees(KERNELS, shape, torch.float32)
    assert len(margins) == 5 + 6 and all(margin.isposinf().all() for margin in margins)


@needs_kernels
@pytest.mark.parametrize("programs", [1, 3, 64, 70, 150])
def test_the_gradient_of_the_weight_from_any_number_of_programs(monkeypatch: pytest.MonkeyPatch, programs: int) -> None:
    monkeypatch.setattr(op, "_programs", lambda *_: programs)
    assert agrees(KERNELS, (140, 2 * TILE // 3), torch.float32)


@pytest.mark.parametrize("forms", BOTH)
def test_the_same_bits_each_time(forms: Forms) -> None:
    x, added, grad_y, grad_h = (noise(67, 96, dtype=torch.bfloat16, seed=seed) for seed in range(4))
    weight = noise(96, dtype=torch.bfloat16, seed=4)

    def run() -> list[torch.Tensor]:
        h, y, inverse_rms = forms[0](x, weight, EPS, added)
        return [bits(found) for found in (h, y, inverse_rms, *forms[1](grad_y, h, weight, inverse_rms, grad_h))]

    first = run()
    assert all(all(map(torch.equal, first, run())) for _ in range(3))


@pytest.mark.parametrize("forms", BOTH)
def test_a_sum_is_rounded_before_it_is_normalized(forms: Forms) -> None:
    """So that both forms give the same bits, and backward sees what forward saw."""
    x, added = (noise(9, 40, dtype=torch.bfloat16, seed=seed) for seed in range(2))
    weight = noise(40, dtype=torch.bfloat16, seed=2)
    h, *of_sum = forms[0](x, weight, EPS, added)
    assert all(map(torch.equal, of_sum, forms[0](h, weight, EPS)[1:]))


@pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero) encountered")
@pytest.mark.parametrize("forms", BOTH)
@pytest.mark.parametrize("width", [6, TILE])  # many rows a program, and one
def test_no_number_stays_in_its_row(forms: Forms, width: int) -> None:
    x, weight, grad_y = noise(5, width), noise(width, seed=1), noise(5, width, seed=2)
    _, clean, inverse_rms = forms[0](x, weight, EPS)
    grad_x, _ = forms[1](grad_y, x, weight, inverse_rms)
    x[3, 1] = torch.nan
    _, y, inverse_rms = forms[0](x, weight, EPS)
    found, grad_weight = forms[1](grad_y, x, weight, inverse_rms)
    rest = [0, 1, 2, 4]
    assert y[3].isnan().all() and found[3].isnan().all() and grad_weight.isnan().all()
    assert torch.equal(y[rest], clean[rest]) and torch.equal(found[rest], grad_x[rest])


@pytest.mark.parametrize("forms", BOTH)
def test_what_does_not_belong_together_is_refused(forms: Forms) -> None:
    x, weight = noise(4, 6), noise(6)
    for wrong, scale, eps, added in (
        (x.long(), weight, EPS, None),
        (noise(4, 0), noise(0), EPS, None),
        (x, noise(5), EPS, None),
        (x, noise(1, 6), EPS, None),
        (x, weight.double(), EPS, None),
        (x, weight, -1e-5, None),
        (x, weight, math.nan, None),
        (x, weight, EPS, noise(6)),
        (x, weight, EPS, x.double()),
    ):
        with pytest.raises(AssertionError, match=r"rows of numbers|a weight|eps=|added is not as"):
            forms[0](wrong, scale, eps, added)
    for grad_y, inverse_rms, grad_h in (
        (noise(4, 5), noise(4), None),
        (noise(3, 6), noise(4), None),
        (x.double(), noise(4), None),
        (x, noise(3), None),
        (x, noise(4, 1), None),
        (x, noise(4).double(), None),
        (x, noise(4), noise(4)),
        (x, noise(4), x.bfloat16()),
    ):
        with pytest.raises(AssertionError, match=r"grad_[yh] is not as|inverse_rms is not that"):
            forms[1](grad_y, x, weight, inverse_rms, grad_h)
    with pytest.raises(AssertionError, match="a weight"):
        forms[1](x, x, noise(5), noise(4))


def chosen(x: torch.Tensor, weight: torch.Tensor, eps: float, added: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
    """What a caller gets."""
    return (x, *op.rms_norm(x, weight, eps)) if added is None else op.add_rms_norm(x, added, weight, eps)


@needs_kernels
def test_the_operation_runs_the_reference_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op, "launch", None)
    monkeypatch.setattr(op, "launch_backward", None)
    monkeypatch.setattr(f"{__name__}.DEVICE", "cpu")
    assert agrees((chosen, op.rms_norm_backward), (3, 8), torch.float32)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape", [(8192, 4096), (4097, 8192), (1000, 5120), (513, WIDEST), (300_001, 24), (70_001, 1), (3, 12_289), (0, 64), (2, WIDEST + 1)]
)
def test_large_on_a_gpu(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    """And the same bits each time; rows too wide for the kernels are torch's."""
    assert agrees((chosen, op.rms_norm_backward), shape, dtype)
    x, added, grad_y, grad_h = (noise(*shape, dtype=dtype, seed=seed) for seed in range(4))
    weight = noise(shape[1], dtype=dtype, seed=4)
    h, *_, inverse_rms = first = chosen(x, weight, EPS, added)
    grads = op.rms_norm_backward(grad_y, h, weight, inverse_rms, grad_h)
    for _ in range(3):
        assert all(map(torch.equal, chosen(x, weight, EPS, added), first))
        assert all(map(torch.equal, op.rms_norm_backward(grad_y, h, weight, inverse_rms, grad_h), grads))

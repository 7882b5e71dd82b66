"""Rotary embedding of a fused projection and its gradient: kernel and reference against complex multiplication in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pymesh3d.ops.rotary import angles
from pymesh3d.ops.rotary import rotary as differentiable
from pymesh3d.triton_kernels.rotary import QKV, launch, launch_backward, rotary, rotary_backward, rotary_backward_ref, rotary_ref
from tests import kernels
from tests.kernels import BFLOAT16_UNIT, DEVICE, both, needs_kernels

# and the largest relative error: bfloat16 is rounded once
DTYPES = {torch.float64: 1e-15, torch.float32: 5e-7, torch.bfloat16: BFLOAT16_UNIT}
BOTH = both((launch, launch_backward), (rotary_ref, rotary_backward_ref))
Forms = tuple[Any, Any]
Sizes = tuple[int, int, int, int, int]  # S sequence, B batch, H query heads, G key heads, E head width
SIZES: list[Sizes] = [(1, 1, 1, 1, 2), (5, 2, 4, 2, 8), (7, 3, 3, 1, 10), (70, 2, 2, 2, 6), (3, 1, 2, 1, 128), (40, 5, 2, 1, 64)]


def noise(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return kernels.noise(*shape, dtype=dtype, seed=seed).to(DEVICE)


def rope_of(sizes: Sizes, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    return angles(sizes[0], sizes[4], 100.0, torch.empty(0, dtype=dtype, device=DEVICE))


def turned(x: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor], backwards: bool = False) -> torch.Tensor:
    """x [S, B, heads, E] in float64, each pair (x[i], x[i + E/2]) as a complex number that is multiplied by that of its angle."""
    half = x.shape[-1] // 2
    cos, sin = (part.double()[:, None, None, :] for part in rope)
    z = torch.complex(x[..., :half].double(), x[..., half:].double()) * torch.complex(cos, -sin if backwards else sin)
    return torch.cat((z.real, z.imag), -1)


def close(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> bool:
    """Of a sum of two products the error is relative to the larger, about 1 here."""
    assert (found.dtype, found.shape, found.is_contiguous()) == (dtype, expected.shape, True)
    return bool(((found.double() - expected).abs() <= DTYPES[dtype] * (expected.abs() + (dtype != torch.bfloat16) + 1e-4)).all())


def agrees(forms: Forms, sizes: Sizes, dtype: torch.dtype, grads: QKV | None = None) -> bool:
    seq, batch, heads, kv_heads, width = sizes
    rope = rope_of(sizes, dtype)
    x = noise(seq * batch, (heads + 2 * kv_heads) * width, dtype=dtype)
    parts = x.view(seq, batch, -1, width).split((heads, kv_heads, kv_heads), 2)
    found = forms[0](x, *rope, heads, kv_heads)
    expected = turned(parts[0], rope), turned(parts[1], rope), parts[2].double()
    assert all(close(one, other, dtype) for one, other in zip(found, expected, strict=True))
    assert len({part.untyped_storage().data_ptr() for part in (x, *found)}) == 4, "all are new"
    grads = grads or tuple(noise(*part.shape, dtype=dtype, seed=1 + i) for i, part in enumerate(parts))  # type: ignore[assignment]
    assert grads is not None
    grad_x = forms[1](*grads, *rope)
    back = torch.cat((turned(grads[0], rope, True), turned(grads[1], rope, True), grads[2].double()), 2)
    return close(grad_x, back.view(x.shape), dtype)


@pytest.mark.parametrize("forms", BOTH)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", SIZES)
def test_values_and_gradients(forms: Forms, dtype: torch.dtype, sizes: Sizes) -> None:
    assert agrees(forms, sizes, dtype)


@needs_kernels
@given(st.tuples(*(st.integers(1, top) for top in (20, 4, 5, 3, 20))), st.sampled_from(list(DTYPES)))
@settings(max_examples=25, deadline=None)
def test_any_size(sizes: Sizes, dtype: torch.dtype) -> None:
    assert agrees((launch, launch_backward), (*sizes[:4], 2 * sizes[4]), dtype)


@pytest.mark.parametrize("forms", BOTH)
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (1, 2, 0, 3), (2, 0, 1, 3), (3, 2, 1, 0)])  # of the dims in memory
def test_gradients_of_any_strides_are_read(forms: Forms, order: tuple[int, ...]) -> None:
    sizes: Sizes = (6, 3, 4, 2, 8)
    back = [order.index(dim) for dim in range(4)]
    shapes = ((6, 3, 4, 8), (6, 3, 2, 8), (6, 3, 2, 8))
    grads = tuple(noise(*(shape[dim] for dim in order), seed=i).permute(back) for i, shape in enumerate(shapes))
    before = [grad.clone() for grad in grads]
    assert agrees(forms, sizes, torch.float32, grads)  # type: ignore[arg-type]
    assert agrees(forms, sizes, torch.float32, (grads[0], grads[1], grads[2][:1, :1, :1, :1].expand(shapes[2])))
    assert all(map(torch.equal, grads, before))


def apart(x: torch.Tensor) -> torch.Tensor:
    """The same, with other numbers between its elements."""
    return torch.stack((x, x + 1), -1)[..., 0]


@pytest.mark.parametrize("forms", BOTH)
def test_projections_and_angles_of_any_strides_are_read(forms: Forms) -> None:
    x, rope = noise(10, 64), rope_of((5, 2, 4, 2, 8), torch.float32)
    expected = forms[0](x, *rope, 4, 2)
    for strided in (apart(x), x.t().contiguous().t()):
        assert all(map(torch.equal, forms[0](strided, *rope, 4, 2), expected))
    grad_x = forms[1](*expected, *rope)
    for cos, sin in ((apart(rope[0]), rope[1]), (rope[0], apart(rope[1]))):
        assert all(map(torch.equal, forms[0](x, cos, sin, 4, 2), expected))
        assert torch.equal(forms[1](*expected, cos, sin), grad_x)


@pytest.mark.parametrize("forms", BOTH)
def test_gradients_of_samples_side_by_side_give_a_contiguous_one(forms: Forms) -> None:
    sizes: Sizes = (1, 3, 4, 2, 8)
    grads = tuple(noise(1, heads, 8, 3, seed=heads).permute(0, 3, 1, 2) for heads in (4, 2, 2))
    assert agrees(forms, sizes, torch.float32, grads)  # type: ignore[arg-type]


@pytest.mark.parametrize("forms", BOTH)
def test_without_positions_there_is_nothing(forms: Forms) -> None:
    cos, sin = rope_of((0, 2, 4, 2, 8), torch.float32)
    parts = forms[0](noise(0, 64), cos, sin, 4, 2)
    assert [part.shape for part in parts] == [(0, 0, 4, 8), (0, 0, 2, 8), (0, 0, 2, 8)]
    assert forms[1](*parts, cos, sin).shape == (0, 64)


@pytest.mark.parametrize("forms", BOTH)
def test_sizes_that_do_not_belong_together_are_refused(forms: Forms) -> None:
    cos, sin = rope = rope_of((4, 2, 4, 2, 8), torch.float32)
    misfits = [(cos[:3], sin[:3]), (cos[:0], sin[:0]), (cos, sin[:1]), (cos.double(), sin.double()), (cos, sin.double())]
    x = noise(8, 64)
    for wrong, heads, turns in (
        (noise(6, 64), 4, rope),
        (x, 5, rope),
        (x.double(), 4, rope),
        *((x, 4, misfit) for misfit in misfits),
    ):
        with pytest.raises(AssertionError, match=r"angles|positions"):
            forms[0](wrong, *turns, heads, 2)
    q, k, v = noise(4, 2, 4, 8), noise(4, 2, 2, 8), noise(4, 2, 2, 8)
    for grads, turns in (
        ((q[:3], k, v), rope),
        ((q, k, v[:, :1]), rope),
        ((q[..., :6], k, v), rope),
        ((q, k, v[:, :, :1]), rope),
        ((q, k[:, :, :1], v), rope),
        ((q, k.bfloat16(), v), rope),
        ((q, k, v.double()), rope),
        ((q.bfloat16(), k, v), rope),
        *(((q, k, v), misfit) for misfit in [*misfits, (cos[:1], sin[:1])]),
        ((q.bfloat16(), k.bfloat16(), v.bfloat16()), (cos.double(), sin.double())),
    ):
        with pytest.raises(AssertionError, match=r"angles|positions|gradients of"):
            forms[1](*grads, *turns)


@needs_kernels
def test_the_operation_runs_the_reference_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pymesh3d.triton_kernels.rotary.launch", None)
    monkeypatch.setattr("pymesh3d.triton_kernels.rotary.launch_backward", None)
    monkeypatch.setattr(f"{__name__}.DEVICE", "cpu")
    assert agrees((rotary, rotary_backward), SIZES[1], torch.float32)


def test_autograd_eager_and_compiled() -> None:
    sizes: Sizes = (4, 2, 4, 2, 6)
    rope = rope_of(sizes, torch.float64)
    x = noise(8, 48, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: differentiable(x, rope, 4, 2), x)
    torch.library.opcheck(torch.ops.pymesh3d.rotary.default, (x, *rope, 4, 2))
    one = rope_of((1, 1, 2, 1, 6), torch.float64)
    torch.library.opcheck(torch.ops.pymesh3d.rotary.default, (noise(1, 24, dtype=torch.float64).requires_grad_(), *one, 2, 1))
    grads = [noise(4, 2, heads, 6, dtype=torch.float64, seed=heads + 1).transpose(0, 1).contiguous().transpose(0, 1) for heads in (4, 2, 2)]
    back = torch.cat((turned(grads[0], rope, True), turned(grads[1], rope, True), grads[2]), 2)
    for run in (differentiable, torch.compile(differentiable, fullgraph=True, backend="aot_eager")):
        (grad_x,) = torch.autograd.grad(run(x, rope, 4, 2), x, grads)
        assert close(grad_x, back.view(x.shape), torch.float64)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [(4096, 2, 32, 8, 64), (1000, 3, 5, 1, 128), (4097, 1, 16, 4, 80), (131, 2, 2, 2, 256)])
def test_large_on_a_gpu(dtype: torch.dtype, sizes: Sizes) -> None:
    assert agrees((launch, launch_backward), sizes, dtype)

"""Sums of squares by the kernel and by plain torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pymesh3d.triton_kernels.squares import PROGRAMS, TILE, launch, squares, squares_ref
from tests.kernels import DEVICE, both, needs_kernels, noise

Squares = Callable[[Sequence[torch.Tensor]], torch.Tensor]
FORMS = both(launch, squares_ref)


def exact(pieces: Sequence[torch.Tensor]) -> float:
    return sum(float(piece.cpu().double().square().sum()) for piece in pieces)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("sizes", [[1], [TILE], [TILE - 1, TILE + 1], [3, 0, 2 * TILE + 5]], ids=str)
def test_all_numbers_count_once(form: Squares, dtype: torch.dtype, sizes: list[int]) -> None:
    pieces = [noise(size, dtype=dtype, seed=seed).to(DEVICE) for seed, size in enumerate(sizes)]
    found = form(pieces)
    assert found.dtype == torch.float64 and found.ndim == 1, found
    assert abs(float(found.sum()) / exact(pieces) - 1) < 1e-14, f"{found.sum()}, not {exact(pieces)}"


@needs_kernels
@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 3 * TILE), min_size=1, max_size=3), st.integers(0, 5))
def test_any_sizes_anywhere(sizes: list[int], offset: int) -> None:
    """Whatever lies before and behind a piece does not count."""
    memory = torch.full((sum(sizes) + 8 * len(sizes),), torch.nan, device=DEVICE)
    pieces, at = [], offset
    for size in sizes:
        pieces.append(memory[at : at + size])
        pieces[-1].copy_(noise(size, seed=size))
        at += size + 1
    assert abs(float(launch(pieces).sum()) - exact(pieces)) <= 1e-14 * exact(pieces)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("number", [1e30, 1e-30, 3e38])
def test_none_is_too_large_or_too_small(form: Squares, number: float) -> None:
    piece = torch.tensor([number, -number], device=DEVICE)
    assert abs(float(form([piece]).sum()) / (2 * float(piece[0]) ** 2) - 1) < 1e-14


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("at", [0, TILE, 2 * TILE])
def test_what_is_not_finite_tells(form: Squares, number: float, at: int) -> None:
    piece = torch.zeros(2 * TILE + 1, device=DEVICE)
    piece[at] = number
    assert not form([torch.ones(5, device=DEVICE), piece]).sum().isfinite()


def test_on_the_cpu_it_is_the_reference() -> None:
    pieces = [noise(100), noise(7, seed=1)]
    assert torch.equal(squares(pieces), squares_ref(pieces))


@pytest.mark.gpu
def test_large_on_a_gpu() -> None:
    """More tiles than programs, and more numbers than 32 bits count; the same bits each time."""
    pieces = [torch.randn(size, device="cuda") for size in (3 * PROGRAMS * TILE + 17, 1000)]
    found = squares(pieces)
    assert abs(float(found.sum()) / exact(pieces) - 1) < 1e-12, f"{found.sum()}, not {exact(pieces)}"
    assert torch.equal(found, squares(pieces)), "not the same bits"
    many = torch.zeros(2**31 + 5, dtype=torch.bfloat16, device="cuda")
    many[-1] = many[2**31 - 1] = 3.0
    assert float(squares([many]).sum()) == 18.0

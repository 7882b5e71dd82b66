"""Sums of squares in float64 of numbers that are kept with fewer bits: one pass over them, where torch would first write all as float64.

Squares of float32 are exact in float64, and none of them is too large or too small for it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .backend import available, jit, tl

TILE = 4096  # numbers that a program adds up at a time, by 8 warps; 1024 to 8192 numbers and 4 warps are up to 5 % slower on an H200
PROGRAMS = 1056  # at most, of one tensor: 8 on each multiprocessor of an H200; half or twice as many make no difference


@jit(do_not_specialize=["numbers"])
def squares_kernel(values, out, numbers: tl.int64, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The programs take turns at tiles of `values` [numbers]; each stores its sum in `out`, float64 [programs]."""
    col = tl.arange(0, TILE)
    total = tl.zeros((TILE,), tl.float64)
    for tile in range(tl.program_id(0), tl.cdiv(numbers, TILE), tl.num_programs(0)):
        at = tl.cast(tile, tl.int64) * TILE + col
        value = tl.load(values + at, mask=at < numbers, other=0.0).to(tl.float64)
        total += value * value
    tl.store(out + tl.program_id(0), tl.sum(total))


def squares(pieces: Sequence[torch.Tensor]) -> torch.Tensor:
    """Numbers, float64 [n], that add up to the sum of squares of all `pieces`: floating-point, contiguous, on one device, at least one.

    On CUDA the kernel runs, elsewhere (and where there is no triton) the reference. The same bits each time, whichever runs.
    """
    return launch(pieces) if pieces[0].is_cuda and available else squares_ref(pieces)


def launch(pieces: Sequence[torch.Tensor]) -> torch.Tensor:
    """`squares` by the kernel, whatever the device (on the CPU by the interpreter)."""
    assert all(piece.is_contiguous() for piece in pieces), "what has gaps"
    programs = [min(-(-piece.numel() // TILE), PROGRAMS) for piece in pieces]
    out = torch.empty(sum(programs), dtype=torch.float64, device=pieces[0].device)
    with torch.cuda.device_of(out):
        for piece, part in zip(pieces, out.split(programs), strict=True):
            if piece.numel():
                squares_kernel[(part.numel(),)](piece, part, piece.numel(), TILE=TILE, num_warps=8)
    return out


def squares_ref(pieces: Sequence[torch.Tensor]) -> torch.Tensor:
    """`squares` in plain torch, on any device: a number for each piece."""
    return torch.stack([torch.linalg.vector_norm(piece, dtype=torch.float64).square() for piece in pieces])

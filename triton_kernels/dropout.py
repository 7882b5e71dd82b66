"""Dropout whose mask depends only on a key, a counter and where an element stands in the whole tensor, so it is never stored.

Eight elements share a Philox call, 16 bits each: with n the global index of an element, in row-major order, the call has the counter
(n >> 3, counter), 64 bits each, and the element takes half n & 7 of its 128 bits, lowest first. So a mask costs an eighth of a call an
element, which hides behind the memory traffic, and a shard may begin and end inside a group of eight.

An element is kept where its half is at least t = round(65536 p): p is rounded to the nearest multiple of 2^-16 (0.1 becomes 0.1000061),
and what is kept is multiplied by 65536 / (65536 - t), the inverse of the rounded share, so the mean of y is exactly x. p = 0 keeps every
bit of x. A p that rounds to all or, without being 0, to nothing is refused.

Values are bit-equal on every device. A dropped element is +0, whatever x is; a NaN that is kept keeps its bits.
- float64: x * scale. float32: x * float32(scale). Each is rounded once.
- bfloat16: x * float32(scale) in float32, rounded to nearest even.
"""

from __future__ import annotations

import struct

import torch

from ..config import is_dropout_rate
from ..errors import ConfigError
from .backend import available, jit, tl
from .philox import DTYPES, REF_CHUNK, philox4x32, philox4x32_ref, rounded_to_bfloat16
from .precision import compute_dtype

TILE = 1024  # elements of a program, at most: eight a thread


@jit
def widened_from_bfloat16(x):  # type: ignore[no-untyped-def]
    """bfloat16 -> float32, exactly. The interpreter's own conversion makes subnormal numbers 0, so the bits are set here."""
    return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)


@jit(do_not_specialize=("rows", "global_cols", "base", "key_low", "key_high", "counter_low", "counter_high", "dropped", "scale_bits"))
def dropout_kernel(  # type: ignore[no-untyped-def]
    x,
    y,  # contiguous
    stride_row,
    stride_col,
    rows: tl.int64,
    cols: tl.int64,
    global_cols: tl.int64,
    base: tl.int64,  # global index of x[0, 0]
    key_low: tl.int32,
    key_high: tl.int32,
    counter_low: tl.int32,
    counter_high: tl.int32,
    dropped: tl.int32,  # of 65536
    scale_bits: tl.int64,  # of a float64: triton would pass a float argument as float32
    ALIGNED: tl.constexpr,  # every row of x begins with a group of eight
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    """y = x * scale where kept, else 0; a program does one tile of BLOCK_ROWS x BLOCK_COLS that begins with a group in every row."""
    tile = tl.program_id(0).to(tl.int64)
    tiles_across = (cols + (0 if ALIGNED else 7) + BLOCK_COLS - 1) // BLOCK_COLS
    row = (tile // tiles_across * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS))[:, None]
    left = tile % tiles_across * BLOCK_COLS
    first = base + row * global_cols

    group = (first >> 3) + (left >> 3) + tl.arange(0, BLOCK_COLS // 8)[None, :]
    low, high = group.to(tl.uint32), (group >> 32).to(tl.uint32)
    zero = tl.zeros_like(low)
    w0, w1, w2, w3 = philox4x32(
        low, high, zero + counter_low.to(tl.uint32), zero + counter_high.to(tl.uint32), key_low.to(tl.uint32), key_high.to(tl.uint32)
    )
    words = tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))
    kept = tl.interleave(words & 0xFFFF, words >> 16).to(tl.int32) >= dropped

    col = left + tl.arange(0, BLOCK_COLS)[None, :]
    if not ALIGNED:
        col -= first & 7
    inside = (row < rows) & (col >= 0) & (col < cols)
    value = tl.load(x + row * stride_row + col * stride_col, mask=inside)
    scale = scale_bits.to(tl.int64).to(tl.float64, bitcast=True)
    if value.dtype == tl.bfloat16:
        wide = widened_from_bfloat16(value)
        scaled = tl.where(wide == wide, rounded_to_bfloat16(wide * scale.to(tl.float32)), value)
    else:
        scaled = tl.where(value == value, value * scale.to(value.dtype), value)
    tl.store(y + row * cols + col, tl.where(kept, scaled, tl.zeros_like(scaled)), mask=inside)


@torch.no_grad()
def dropout(x: torch.Tensor, *, p: float, key: int, counter: int, global_cols: int, row0: int = 0, col0: int = 0) -> torch.Tensor:
    """x / (1 - p) where kept and 0 elsewhere, new and contiguous; the mask is that of the elements' places in the unsharded tensor.

    `x` is the shard [rows, cols] that begins at (row0, col0) of a tensor with `global_cols` columns, of any strides; a 1-D `x` is one row.
    `key` and `counter` have 64 bits; each pair of them is another mask. The gradient is the same function of the gradient. On CUDA the
    kernel runs, elsewhere (and where there is no triton) the reference: same bits. Raises ConfigError for another dtype, number of dims,
    or a p that is not 0 or 2^-16 .. 1 - 2^-16.
    """
    if x.is_cuda and available:
        return launch(x, p=p, key=key, counter=counter, global_cols=global_cols, row0=row0, col0=col0)
    return dropout_ref(x, p=p, key=key, counter=counter, global_cols=global_cols, row0=row0, col0=col0)


@torch.no_grad()
def launch(x: torch.Tensor, *, p: float, key: int, counter: int, global_cols: int, row0: int = 0, col0: int = 0) -> torch.Tensor:
    """`dropout` by the kernel, whatever the device (on CPU by the interpreter)."""
    shard, base, dropped = _checked(x, p, key, counter, global_cols, row0, col0)
    rows, cols = shard.shape
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel() == 0:
        return y
    aligned = base % 8 == 0 and (rows == 1 or global_cols % 8 == 0)
    across = cols if aligned else cols + 7
    block_cols = max(8, min(TILE, 1 << (across - 1).bit_length()))
    block_rows = TILE // block_cols
    grid = (-(-rows // block_rows) * -(-across // block_cols),)
    integers = struct.unpack("<iiiiq", struct.pack("<QQd", key, counter, _scale(dropped)))
    with torch.cuda.device_of(x):
        dropout_kernel[grid](
            shard, y, *shard.stride(), rows, cols, global_cols, base, *integers[:4], dropped, integers[4],
            ALIGNED=aligned, BLOCK_ROWS=block_rows, BLOCK_COLS=block_cols,
        )  # fmt: skip
    return y


@torch.no_grad()
def dropout_ref(x: torch.Tensor, *, p: float, key: int, counter: int, global_cols: int, row0: int = 0, col0: int = 0) -> torch.Tensor:
    """`dropout` in plain torch, on any device."""
    shard, base, dropped = _checked(x, p, key, counter, global_cols, row0, col0)
    rows, cols = shard.shape
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    compute = compute_dtype(x.dtype)
    chunk_cols = min(cols, 8 * REF_CHUNK)
    chunk_rows = max(1, REF_CHUNK // (chunk_cols // 8 + 2))
    for row in range(0, rows, chunk_rows):
        for col in range(0, cols, max(chunk_cols, 1)):
            piece = shard[row : row + chunk_rows, col : col + chunk_cols]
            first = base + col + global_cols * torch.arange(row, row + piece.shape[0], device=x.device)
            kept = _halves(first, piece.shape[1], key, counter) >= dropped
            wide = piece.to(compute)
            scaled = torch.where(wide == wide, (wide * _scale(dropped)).to(x.dtype), piece)
            y.view(rows, cols)[row : row + chunk_rows, col : col + chunk_cols] = torch.where(kept, scaled, 0.0)
    return y


def _halves(first: torch.Tensor, length: int, key: int, counter: int) -> torch.Tensor:
    """The 16 random bits (int64) of `length` elements from each of the global indices `first` on: [len(first), length]."""
    group = (first >> 3)[:, None] + torch.arange((length + 14) // 8, device=first.device)
    second = torch.full_like(group, counter & 0xFFFFFFFF), torch.full_like(group, counter >> 32)
    words = torch.stack(philox4x32_ref((group & 0xFFFFFFFF, group >> 32, *second), (key & 0xFFFFFFFF, key >> 32)), -1)
    halves = torch.stack((words & 0xFFFF, words >> 16), -1).flatten(1)
    return halves.gather(1, (first & 7)[:, None] + torch.arange(length, device=first.device))


def _scale(dropped: int) -> float:
    return 65536 / (65536 - dropped)


def _checked(x: torch.Tensor, p: float, key: int, counter: int, global_cols: int, row0: int, col0: int) -> tuple[torch.Tensor, int, int]:
    """(`x` as 2-D, as one row where it is contiguous in the unsharded tensor too; the global index of its first element; t)."""
    if x.dtype not in DTYPES:
        raise ConfigError(f"dtype {x.dtype}", "the dtype must be float32, float64 or bfloat16", "Use x.to(torch.bfloat16)")
    if x.ndim not in (1, 2):
        raise ConfigError(f"shape {tuple(x.shape)}", "the shard must have 1 or 2 dims", "Use x.flatten(0, -2), or x.view(1) of a scalar")
    dropped = dropped_of(p)
    shard = x if x.ndim == 2 else x[None, :]
    rows, cols = shard.shape
    assert 0 <= key < 2**64, f"a key has 64 bits, got {key}"
    assert 0 <= counter < 2**64, f"a counter has 64 bits, got {counter}"
    assert row0 >= 0 and 0 <= col0 <= col0 + cols <= global_cols, f"columns {col0}:{col0 + cols} of {global_cols}, from row {row0}"
    assert (row0 + rows) * global_cols < 2**63, f"row {row0 + rows} of {global_cols} columns has a global index beyond 63 bits"
    if cols == global_cols and x.is_contiguous():
        shard = x.view(1, -1)
    return shard, row0 * global_cols + col0, dropped


def dropped_of(p: float) -> int:
    """Of 65536 elements how many are dropped on average: p rounded to 16 bits. Raises ConfigError for a p that has no such rate."""
    if not is_dropout_rate(p):
        raise ConfigError(f"p={p!r}", "p must be 0 (nothing is dropped) or a number from 2**-16 to 1 - 2**-16", "Use p=0.1 or p=0")
    return round(p * 65536)

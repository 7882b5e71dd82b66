"""Cross-entropy over a part of the vocabulary: the logits are read once forward, read and written once backward.

Legend: T tokens, W columns of this part, V vocabulary. Column c is entry `start + c`; the first `valid` columns are entries of the
vocabulary, the others are padding, whose values are never used. Sums of exponentials and of logits are relative to the largest logit,
so that neither their size nor a constant added to all of them costs precision. Computed in float32, or in float64 for float64 logits.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

import torch

from .backend import available, jit, tl
from .philox import rounded_to_bfloat16
from .precision import compute_dtype

RUN = 8  # columns side by side that a thread owns: 16 bytes of bfloat16
RUNS = 512  # of them in a block of columns, at most
WARPS = 8
REF_CHUNK = 2**18  # elements the reference works on at once: few enough for the cache


@jit
def finite(most):  # type: ignore[no-untyped-def]
    """What is subtracted from logits of which `most` is the largest: -inf - -inf would be no number."""
    return tl.where(most == float("-inf"), 0.0, most)


@jit(do_not_specialize=("rows", "valid", "start", "vocab"))
def statistics_kernel(  # type: ignore[no-untyped-def]
    logits,
    target,
    maximum,
    sums,  # [2 or 3, rows]
    stride_row,
    rows: tl.int64,
    cols: tl.int32,
    valid: tl.int32,
    start: tl.int64,
    vocab: tl.int64,
    SMOOTHED: tl.constexpr,
    RUNS: tl.constexpr,
    RUN: tl.constexpr,
):
    """Maximum and sums of one row. Every run keeps its own as it goes through the blocks, so threads meet only at the end."""
    row = tl.program_id(0).to(tl.int64)
    compute: tl.constexpr = maximum.dtype.element_ty
    first = logits + row * stride_row
    most = tl.full((RUNS,), float("-inf"), compute)
    exps = tl.zeros((RUNS,), compute)
    summed = tl.zeros((RUNS,), compute)
    seen = tl.zeros((RUNS,), tl.int32)
    for left in range(0, valid, RUNS * RUN):
        col = left + tl.arange(0, RUNS)[:, None] * RUN + tl.arange(0, RUN)[None, :]
        real = col < valid
        z = tl.load(first + col, mask=col < cols).to(compute)  # padding is read too: cols is a multiple of 16 more often than valid
        z = tl.where(real, z, float("-inf"))
        above = tl.maximum(most, tl.max(z, 1))
        zero = finite(above)
        exps = exps * tl.exp(most - zero) + tl.sum(tl.exp(z - zero[:, None]), 1)
        if SMOOTHED:
            summed += tl.where(seen > 0, seen * (most - zero), 0.0) + tl.sum(tl.where(real, z - zero[:, None], 0.0), 1)
            seen += tl.sum(real.to(tl.int32), 1)
        most = above

    largest = tl.max(most, 0)
    zero = finite(largest)
    tl.store(maximum + row, largest)
    tl.store(sums + row, tl.sum(exps * tl.exp(most - zero), 0))
    entry = tl.load(target + row).to(tl.int64)
    here = (entry >= start) & (entry < start + valid)
    chosen = tl.where(here, tl.load(first + (entry - start), mask=here).to(compute), 0.0)
    tl.store(sums + rows + row, tl.where((entry >= 0) & (entry < vocab), chosen, float("nan")))
    if SMOOTHED:
        tl.store(sums + 2 * rows + row, tl.sum(summed + tl.where(seen > 0, seen * (most - zero), 0.0), 0))


@jit(do_not_specialize=("valid", "start", "ignore_index", "target_bits", "spread_bits"))
def gradient_kernel(  # type: ignore[no-untyped-def]
    logits,
    target,
    maximum,
    total,
    grad_loss,
    grad,  # contiguous
    stride_row,
    cols: tl.int32,
    valid: tl.int32,
    start: tl.int64,
    ignore_index: tl.int64,
    target_bits: tl.int64,  # of a float64: triton would pass a float argument as float32
    spread_bits: tl.int64,
    BLOCK: tl.constexpr,
):
    """The gradient of one block of a row; target_bits and spread_bits are 1 - smoothing and smoothing / vocab."""
    tile = tl.program_id(0).to(tl.int64)
    blocks = (cols + BLOCK - 1) // BLOCK
    row = tile // blocks
    col = (tile % blocks).to(tl.int32) * BLOCK + tl.arange(0, BLOCK)
    compute: tl.constexpr = maximum.dtype.element_ty
    target_weight = target_bits.to(tl.int64).to(tl.float64, bitcast=True).to(compute)
    spread = spread_bits.to(tl.int64).to(tl.float64, bitcast=True).to(compute)

    entry = tl.load(target + row).to(tl.int64)
    z = tl.load(logits + row * stride_row + col, mask=col < cols).to(compute)
    scale = tl.load(grad_loss + row)
    value = tl.exp(z - tl.load(maximum + row)) * (scale / tl.load(total + row))
    value -= tl.where(col == entry - start, (target_weight + spread) * scale, spread * scale)
    value = tl.where((col < valid) & (entry != ignore_index), value, 0.0)
    if grad.dtype.element_ty == tl.bfloat16:
        bits = rounded_to_bfloat16(value).to(tl.uint16, bitcast=True)
        value = tl.where(value == value, bits, 0x7FC0).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    tl.store(grad + row * cols + col, value.to(grad.dtype.element_ty), mask=col < cols)


@torch.no_grad()
def statistics(
    logits: torch.Tensor, target: torch.Tensor, *, start: int, valid: int, vocab: int, smoothed: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each row of `logits` [T, W], with contiguous columns: the maximum [T], -inf where nothing is valid, and sums [2, T].

    The sums are that of exp(z - maximum), and the logit of `target` [T]: 0 where it is another part's, NaN where it is outside
    0..vocab - 1. With `smoothed` there is a third, of z - maximum. On CUDA the kernel runs, elsewhere (and where there is no triton) the
    reference. Sums are in one fixed order.
    """
    run = launch_statistics if logits.is_cuda and available else statistics_ref
    return run(logits, target, start=start, valid=valid, vocab=vocab, smoothed=smoothed)


@torch.no_grad()
def gradient(
    logits: torch.Tensor,
    target: torch.Tensor,
    maximum: torch.Tensor,
    total: torch.Tensor,
    grad_loss: torch.Tensor,
    *,
    start: int,
    valid: int,
    vocab: int,
    ignore_index: int,
    smoothing: float,
) -> torch.Tensor:
    """The gradient of `logits` [T, W], new and in their dtype, from that of each row's loss.

    `maximum` and `total`, the sum of exp(z - maximum), are those over the whole vocabulary. With p = exp(z - maximum) / total it is
    (p - (1 - smoothing) at the target - smoothing / vocab) * grad_loss; 0 in padding and where the target is `ignore_index`. On CUDA the
    kernel runs, elsewhere (and where there is no triton) the reference.
    """
    run = launch_gradient if logits.is_cuda and available else gradient_ref
    return run(
        logits, target, maximum, total, grad_loss, start=start, valid=valid, vocab=vocab, ignore_index=ignore_index, smoothing=smoothing
    )


@torch.no_grad()
def launch_statistics(
    logits: torch.Tensor, target: torch.Tensor, *, start: int, valid: int, vocab: int, smoothed: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """`statistics` by the kernel, whatever the device (on CPU by the interpreter)."""
    maximum, sums = _results(logits, target, valid, smoothed)
    rows, cols = logits.shape
    if rows == 0:
        return maximum, sums
    run, runs = _block(cols)
    with torch.cuda.device_of(logits):
        statistics_kernel[(rows,)](
            logits, target.contiguous(), maximum, sums, logits.stride(0), rows, cols, valid, start, vocab,
            SMOOTHED=smoothed, RUNS=runs, RUN=run, num_warps=WARPS,
        )  # fmt: skip
    return maximum, sums


@torch.no_grad()
def launch_gradient(
    logits: torch.Tensor,
    target: torch.Tensor,
    maximum: torch.Tensor,
    total: torch.Tensor,
    grad_loss: torch.Tensor,
    *,
    start: int,
    valid: int,
    vocab: int,
    ignore_index: int,
    smoothing: float,
) -> torch.Tensor:
    """`gradient` by the kernel, whatever the device (on CPU by the interpreter)."""
    rows, cols = _checked(logits, valid, target, maximum, total, grad_loss)
    grad = torch.empty((rows, cols), dtype=logits.dtype, device=logits.device)
    if grad.numel() == 0:
        return grad
    run, runs = _block(cols)
    weights = struct.unpack("<qq", struct.pack("<dd", 1 - smoothing, smoothing / vocab))
    with torch.cuda.device_of(logits):
        gradient_kernel[(rows * -(-cols // (run * runs)),)](
            logits, target.contiguous(), maximum.contiguous(), total.contiguous(), grad_loss.contiguous(), grad, logits.stride(0),
            cols, valid, start, ignore_index, *weights, BLOCK=run * runs, num_warps=WARPS,
        )  # fmt: skip
    return grad


@torch.no_grad()
def statistics_ref(
    logits: torch.Tensor, target: torch.Tensor, *, start: int, valid: int, vocab: int, smoothed: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """`statistics` in plain torch, on any device."""
    maximum, sums = _results(logits, target, valid, smoothed)
    sums[1] = torch.where((target >= 0) & (target < vocab), 0.0, torch.nan)
    if valid == 0:
        maximum.fill_(-torch.inf)
        sums[0::2] = 0
        return maximum, sums
    column, here = _place(target, start, valid)
    sums[1] += logits.gather(1, column[:, None])[:, 0].masked_fill(~here, 0)
    for chunk in _chunks(logits):
        z = logits[chunk, :valid].to(maximum.dtype)
        maximum[chunk] = z.amax(1)
        z = z - maximum[chunk].masked_fill(maximum[chunk] == -torch.inf, 0)[:, None]
        if smoothed:
            sums[2, chunk] = z.sum(1)
        sums[0, chunk] = z.exp_().sum(1)
    return maximum, sums


@torch.no_grad()
def gradient_ref(
    logits: torch.Tensor,
    target: torch.Tensor,
    maximum: torch.Tensor,
    total: torch.Tensor,
    grad_loss: torch.Tensor,
    *,
    start: int,
    valid: int,
    vocab: int,
    ignore_index: int,
    smoothing: float,
) -> torch.Tensor:
    """`gradient` in plain torch, on any device."""
    grad = torch.empty(_checked(logits, valid, target, maximum, total, grad_loss), dtype=logits.dtype, device=logits.device)
    grad[:, valid:] = 0
    if valid == 0:
        return grad
    column, here = _place(target, start, valid)
    at_target = torch.where(here, (smoothing - 1) * grad_loss, 0.0)
    spread = smoothing / vocab * grad_loss
    scale = grad_loss / total
    ignored = target == ignore_index
    for chunk in _chunks(logits):
        out = grad[chunk, :valid] if grad.dtype == maximum.dtype else None
        piece = torch.sub(logits[chunk, :valid], maximum[chunk, None], out=out).exp_().mul_(scale[chunk, None])
        piece.scatter_add_(1, column[chunk, None], at_target[chunk, None])
        if smoothing:
            piece -= spread[chunk, None]
        piece.masked_fill_(ignored[chunk, None], 0)
        if out is None:
            grad[chunk, :valid] = piece
    return grad


def _checked(logits: torch.Tensor, valid: int, target: torch.Tensor, *numbers: torch.Tensor) -> tuple[int, int]:
    """(rows, columns), where all of `target` and `numbers` have one entry a row."""
    rows, cols = logits.shape
    compute = compute_dtype(logits.dtype)
    assert cols <= 1 or logits.stride(1) == 1, f"columns must be contiguous, these have strides {logits.stride()}"
    assert 0 <= valid <= cols < 2**31 - RUNS * RUN, f"{valid} valid columns of {cols}"
    assert target.shape == (rows,) and target.dtype == torch.int64, f"target {tuple(target.shape)} of {target.dtype} for {rows} rows"
    for x in numbers:
        assert x.shape == (rows,) and x.dtype == compute, f"numbers {tuple(x.shape)} of {x.dtype} for {rows} rows computed in {compute}"
    return rows, cols


def _results(logits: torch.Tensor, target: torch.Tensor, valid: int, smoothed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Room for the maximum and the sums of each row."""
    rows, _ = _checked(logits, valid, target)
    compute = compute_dtype(logits.dtype)
    maximum = torch.empty(rows, dtype=compute, device=logits.device)
    return maximum, torch.empty(3 if smoothed else 2, rows, dtype=compute, device=logits.device)


def _block(cols: int) -> tuple[int, int]:
    """(columns of a run, runs of a block) that suit a row of so many columns."""
    block = 1 << max(cols - 1, 0).bit_length()
    run = min(block, RUN)
    return run, min(block // run, RUNS)


def _place(target: torch.Tensor, start: int, valid: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The column of each target, 0 where it is another part's, and whether it is this one's."""
    column = target - start
    here = (column >= 0) & (column < valid)
    return column.masked_fill_(~here, 0), here


def _chunks(logits: torch.Tensor) -> Iterator[slice]:
    """Slices of rows."""
    rows, cols = logits.shape
    step = max(1, REF_CHUNK // cols)
    return (slice(row, row + step) for row in range(0, rows, step))

"""RMSNorm (Zhang and Sennrich 2019), x / sqrt(mean(x^2) + eps) * weight over the last dim, alone or of a sum, and its gradient.

Legend: D width of a row. One pass over memory each, a whole row in registers. Before it normalizes, a transformer adds what its last layer
made to the residual stream, h = x + added: the kernel does that on its way, and backward adds the gradient that h has from elsewhere. All
is computed in float32 (float64 for float64) and rounded once, but for h, which is rounded before it is normalized.

The weight's gradient is a sum over all rows: of its rows by each program, then of all programs by a second kernel, each in a fixed order.
"""

from __future__ import annotations

import torch

from .backend import available, interpreted, jit, tl
from .precision import compute_dtype, wide, wide_ref
from .rows import as_rows

WIDEST = 16384  # numbers of a row that fit into registers
TILE = 2048  # numbers of a program, at least: several rows where one has fewer
PER_THREAD = 16  # of them: 80 to 112 registers in backward, without spills up to a width of 8192
WARPS = 16  # that a multiprocessor then runs at once in backward
AHEAD = 2**15  # bytes of a row, at most, for backward to load the next one meanwhile: three such rows are in shared memory
TOTAL = {"BLOCK_PROGRAMS": 64, "BLOCK_COLS": 32}  # what a program of the second kernel reads at once


@jit
def rms_norm_kernel(  # type: ignore[no-untyped-def]
    x,  # [rows, width], its rows x_stride apart
    added,  # the same, added_stride apart, or None
    weight,  # [width], contiguous
    h,  # [rows, width], contiguous: x + added, or None without
    y,  # [rows, width], contiguous
    inverse_rms,  # [rows]
    x_stride: tl.int64,
    added_stride: tl.int64,
    rows: tl.int64,
    width: tl.int32,
    EPS: tl.constexpr,  # triton would pass a float argument as float32
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    """A program does BLOCK_ROWS rows."""
    row = (tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS))[:, None]
    col = tl.arange(0, BLOCK_COLS)[None, :]
    inside = (row < rows) & (col < width)
    value = tl.load(x + row * x_stride + col, mask=inside, other=0.0)
    if added is not None:
        value = (wide(value) + wide(tl.load(added + row * added_stride + col, mask=inside, other=0.0))).to(value.dtype)
        tl.store(h + row * width + col, value, mask=inside)
    value = wide(value)
    inverse = tl.rsqrt(tl.sum(value * value, 1, keep_dims=True) / width + EPS)
    tl.store(inverse_rms + row, inverse, mask=row < rows)
    result = value * inverse * wide(tl.load(weight + col, mask=col < width))
    tl.store(y + row * width + col, result.to(y.dtype.element_ty), mask=inside)


@jit
def rms_norm_backward_kernel(  # type: ignore[no-untyped-def]
    grad_y,  # [rows, width], its rows grad_y_stride apart
    h,  # the same, h_stride apart: what was normalized
    weight,  # [width], contiguous
    inverse_rms,  # [rows], contiguous
    grad_h,  # [rows, width], grad_h_stride apart: what h has from elsewhere; or None
    grad_x,  # [rows, width], contiguous
    grad_weight,  # [programs, width], contiguous: of each program's rows
    grad_y_stride: tl.int64,
    h_stride: tl.int64,
    grad_h_stride: tl.int64,
    rows: tl.int64,
    width: tl.int32,
    STAGES: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    """The programs take turns at blocks of BLOCK_ROWS rows."""
    program = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK_COLS)[None, :]
    scale = wide(tl.load(weight + col, mask=col < width))
    summed = tl.zeros((BLOCK_ROWS, BLOCK_COLS), grad_weight.dtype.element_ty)
    for block in tl.range(program, tl.cdiv(rows, BLOCK_ROWS), tl.num_programs(0), num_stages=STAGES):
        row = (block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS))[:, None]
        inside = (row < rows) & (col < width)
        inverse = tl.load(inverse_rms + row, mask=row < rows, other=0.0)
        normal = wide(tl.load(h + row * h_stride + col, mask=inside, other=0.0)) * inverse
        grad = wide(tl.load(grad_y + row * grad_y_stride + col, mask=inside, other=0.0))
        summed += grad * normal
        grad *= scale
        grad = (grad - normal * (tl.sum(grad * normal, 1, keep_dims=True) / width)) * inverse
        if grad_h is not None:
            grad += wide(tl.load(grad_h + row * grad_h_stride + col, mask=inside, other=0.0))
        tl.store(grad_x + row * width + col, grad.to(grad_x.dtype.element_ty), mask=inside)
    tl.store(grad_weight + program * width + col, tl.sum(summed, 0, keep_dims=True), mask=col < width)


@jit
def total_kernel(parts, total, programs, width, BLOCK_PROGRAMS: tl.constexpr, BLOCK_COLS: tl.constexpr):  # type: ignore[no-untyped-def]
    """total [width] of parts [programs, width]; a program does BLOCK_COLS columns."""
    col = (tl.program_id(0) * BLOCK_COLS + tl.arange(0, BLOCK_COLS))[None, :]
    summed = tl.zeros((BLOCK_PROGRAMS, BLOCK_COLS), parts.dtype.element_ty)
    for first in range(0, programs, BLOCK_PROGRAMS):
        program = (first + tl.arange(0, BLOCK_PROGRAMS))[:, None]
        summed += tl.load(parts + program * width + col, mask=(program < programs) & (col < width), other=0.0)
    tl.store(total + col, tl.sum(summed, 0, keep_dims=True).to(total.dtype.element_ty), mask=col < width)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """x / sqrt(mean(x^2) + eps) * weight of x [..., D], and what x was multiplied by, 1 / sqrt(mean(x^2) + eps) [...]; new and contiguous.

    `weight` [D] and x have one dtype: float32, float64, bfloat16 or float16. The factor is float32, or float64 for float64.
    """
    _, y, inverse_rms = (launch if _fits(x) else rms_norm_ref)(x, weight, eps)
    return y, inverse_rms


def add_rms_norm(x: torch.Tensor, added: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """h = x + added, and `rms_norm` of h; x and `added` [..., D] have one dtype."""
    return (launch if _fits(x) else rms_norm_ref)(x, weight, eps, added)


def rms_norm_backward(
    grad_y: torch.Tensor, h: torch.Tensor, weight: torch.Tensor, inverse_rms: torch.Tensor, grad_h: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of x (and of `added`) [..., D] and of the weight [D], new and contiguous, from that of y.

    `h`: what was normalized, x itself where nothing was added. `grad_h` [..., D]: the gradient that h has from elsewhere.
    """
    return (launch_backward if _fits(h) else rms_norm_backward_ref)(grad_y, h, weight, inverse_rms, grad_h)


def launch(
    x: torch.Tensor, weight: torch.Tensor, eps: float, added: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`add_rms_norm` by the kernel, whatever the device (on CPU by the interpreter); without `added`, h is x."""
    _check(x, weight, eps=eps, added=added)
    h = None if added is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    inverse_rms = torch.empty(x.shape[:-1], dtype=compute_dtype(x.dtype), device=x.device)
    if y.numel():
        rows, more = as_rows(x), None if added is None else as_rows(added)
        blocks = _blocks(x.shape[-1])
        with torch.cuda.device_of(x):
            rms_norm_kernel[(-(-rows.shape[0] // blocks["BLOCK_ROWS"]),)](
                rows, more, weight.contiguous(), h, y, inverse_rms, rows.stride(0), 0 if more is None else more.stride(0), *rows.shape,
                EPS=eps, **blocks,
            )  # fmt: skip
    return x if h is None else h, y, inverse_rms


def launch_backward(
    grad_y: torch.Tensor, h: torch.Tensor, weight: torch.Tensor, inverse_rms: torch.Tensor, grad_h: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`rms_norm_backward` by the kernels, whatever the device."""
    _check(h, weight, inverse_rms=inverse_rms, grad_y=grad_y, grad_h=grad_h)
    width = h.shape[-1]
    grad_x = torch.empty(h.shape, dtype=h.dtype, device=h.device)
    grad_weight = torch.empty(width, dtype=h.dtype, device=h.device)
    rows, grad_rows, more = as_rows(h), as_rows(grad_y), None if grad_h is None else as_rows(grad_h)
    blocks = _blocks(width)
    programs = min(-(-rows.shape[0] // blocks["BLOCK_ROWS"]), _programs(h.device, blocks["num_warps"]))
    parts = torch.empty((programs, width), dtype=inverse_rms.dtype, device=h.device)
    with torch.cuda.device_of(h):
        if programs:
            rms_norm_backward_kernel[(programs,)](
                grad_rows, rows, weight.contiguous(), inverse_rms.contiguous(), more, grad_x, parts,
                grad_rows.stride(0), rows.stride(0), 0 if more is None else more.stride(0), *rows.shape,
                STAGES=2 if blocks["BLOCK_COLS"] * h.itemsize <= AHEAD else 1, **blocks,
            )  # fmt: skip
        total_kernel[(-(-width // TOTAL["BLOCK_COLS"]),)](parts, grad_weight, programs, width, **TOTAL)
    return grad_x, grad_weight


def rms_norm_ref(
    x: torch.Tensor, weight: torch.Tensor, eps: float, added: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`launch` in plain torch."""
    _check(x, weight, eps=eps, added=added)
    h = x if added is None else (x + added).contiguous()
    exact = wide_ref(h)
    inverse_rms = (exact.square().mean(-1) + eps).rsqrt().contiguous()
    return h, (exact * inverse_rms[..., None] * wide_ref(weight)).to(x.dtype).contiguous(), inverse_rms


def rms_norm_backward_ref(
    grad_y: torch.Tensor, h: torch.Tensor, weight: torch.Tensor, inverse_rms: torch.Tensor, grad_h: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`rms_norm_backward` in plain torch."""
    _check(h, weight, inverse_rms=inverse_rms, grad_y=grad_y, grad_h=grad_h)
    inverse = inverse_rms[..., None]
    normal, grad = wide_ref(h) * inverse, wide_ref(grad_y)
    grad_weight = (grad * normal).reshape(-1, h.shape[-1]).sum(0)
    grad = grad * wide_ref(weight)
    grad = (grad - normal * (grad * normal).mean(-1, keepdim=True)) * inverse
    grad = grad if grad_h is None else grad + wide_ref(grad_h)
    return grad.to(h.dtype).contiguous(), grad_weight.to(h.dtype)


def _fits(x: torch.Tensor) -> bool:
    """Whether the kernels are for this tensor."""
    return x.is_cuda and available and x.shape[-1] <= WIDEST


def _check(
    x: torch.Tensor, weight: torch.Tensor, *, eps: float = 0.0, inverse_rms: torch.Tensor | None = None, **others: torch.Tensor | None
) -> None:
    """`others` are as x."""
    given = f"{tuple(x.shape)} {x.dtype}"
    assert x.is_floating_point() and x.shape[-1], f"rows of numbers are normalized, not {given}"
    assert weight.shape == x.shape[-1:] and weight.dtype == x.dtype, f"a weight {tuple(weight.shape)} {weight.dtype} for {given}"
    assert eps >= 0, f"eps={eps} must be 0 or more"
    factors = inverse_rms is None or (inverse_rms.shape == x.shape[:-1] and inverse_rms.dtype == compute_dtype(x.dtype))
    assert factors, f"inverse_rms is not that of the rows, {given}"
    for name, other in others.items():
        assert other is None or (other.shape == x.shape and other.dtype == x.dtype), f"{name} is not as the rows, {given}"


def _blocks(width: int) -> dict[str, int]:
    """The sizes of a program."""
    cols = 1 << (width - 1).bit_length()
    rows = -(-TILE // cols)
    return {"BLOCK_ROWS": rows, "BLOCK_COLS": cols, "num_warps": min(32, rows * cols // PER_THREAD // 32)}


def _programs(device: torch.device, warps: int) -> int:
    """How many run at once in backward, each with so many warps."""
    return 4 if interpreted else max(1, WARPS // warps) * torch.cuda.get_device_properties(device).multi_processor_count

"""SwiGLU (Shazeer 2020): silu(gate) * up of a fused projection's output, gate and up side by side, and its gradient.

One pass over memory each. Torch rounds silu(gate) to the dtype before it multiplies; here all is computed in float32 (float64 for
float64) and rounded once. What torch.compile makes of the same formula takes 264 us for a gradient of [8192, 2 x 8192] in bfloat16 on an
H200, where a copy of as many bytes takes 156: its program computes both halves of the fused gradient for each element of either.
"""

from __future__ import annotations

import torch

from .backend import available, jit, tl
from .precision import wide, wide_ref
from .rows import as_rows

TILE = 2048  # elements of a program: 97 and 159 us forward and backward for [8192, 2 x 8192] on an H200, as copies take (96 and 156)


@jit
def gate_and_up(x, stride_row, rows, width, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr):  # type: ignore[no-untyped-def]
    """This program's tile: its rows, its columns, which of them there are, and both halves."""
    tile = tl.program_id(0).to(tl.int64)
    across = tl.cdiv(width, BLOCK_COLS)
    row = (tile // across * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS))[:, None]
    col = (tile % across * BLOCK_COLS + tl.arange(0, BLOCK_COLS))[None, :]
    inside = (row < rows) & (col < width)
    gate = wide(tl.load(x + row * stride_row + col, mask=inside))
    up = wide(tl.load(x + row * stride_row + width + col, mask=inside))
    return row, col, inside, gate, up


@jit
def swiglu_kernel(  # type: ignore[no-untyped-def]
    x,  # [rows, 2 width], its rows stride_row apart
    y,  # [rows, width], contiguous
    stride_row: tl.int64,
    rows: tl.int64,
    width: tl.int64,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    """y = silu(gate) * up; a program does one tile."""
    row, col, inside, gate, up = gate_and_up(x, stride_row, rows, width, BLOCK_ROWS, BLOCK_COLS)
    result = gate / (1 + tl.exp(-gate)) * up
    tl.store(y + row * width + col, result.to(y.dtype.element_ty), mask=inside)


@jit
def swiglu_backward_kernel(  # type: ignore[no-untyped-def]
    grad_y,  # [rows, width], its rows grad_stride_row apart
    x,  # [rows, 2 width], its rows stride_row apart
    grad_x,  # [rows, 2 width], contiguous
    grad_stride_row: tl.int64,
    stride_row: tl.int64,
    rows: tl.int64,
    width: tl.int64,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    """The gradients of gate and up; a program does the same tile of both."""
    row, col, inside, gate, up = gate_and_up(x, stride_row, rows, width, BLOCK_ROWS, BLOCK_COLS)
    grad = wide(tl.load(grad_y + row * grad_stride_row + col, mask=inside))
    sigmoid = 1 / (1 + tl.exp(-gate))
    silu = gate * sigmoid
    grad_gate = grad * up * (sigmoid + silu * (1 - sigmoid))
    tl.store(grad_x + row * 2 * width + col, grad_gate.to(grad_x.dtype.element_ty), mask=inside)
    tl.store(grad_x + row * 2 * width + width + col, (grad * silu).to(grad_x.dtype.element_ty), mask=inside)


def swiglu(x: torch.Tensor) -> torch.Tensor:
    """silu(x[..., :F]) * x[..., F:] of x [..., 2F], new and contiguous, in its dtype: float32, float64 or bfloat16."""
    return launch(x) if x.is_cuda and available else swiglu_ref(x)


def swiglu_backward(grad_y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The gradient [..., 2F] for x [..., 2F] from that for y [..., F], new and contiguous."""
    return launch_backward(grad_y, x) if x.is_cuda and available else swiglu_backward_ref(grad_y, x)


def launch(x: torch.Tensor) -> torch.Tensor:
    """`swiglu` by the kernel, whatever the device (on CPU by the interpreter)."""
    width = _width(x)
    y = torch.empty(*x.shape[:-1], width, dtype=x.dtype, device=x.device)
    if y.numel():
        x = as_rows(x)
        grid, blocks = _tiles(x.shape[0], width)
        with torch.cuda.device_of(x):
            swiglu_kernel[grid](x, y, x.stride(0), x.shape[0], width, **blocks)
    return y


def launch_backward(grad_y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """`swiglu_backward` by the kernel, whatever the device."""
    width = _width(x, grad_y)
    grad_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if grad_x.numel():
        x, grad_y = as_rows(x), as_rows(grad_y)
        grid, blocks = _tiles(x.shape[0], width)
        with torch.cuda.device_of(x):
            swiglu_backward_kernel[grid](grad_y, x, grad_x, grad_y.stride(0), x.stride(0), x.shape[0], width, **blocks)
    return grad_x


def swiglu_ref(x: torch.Tensor) -> torch.Tensor:
    """`swiglu` in plain torch."""
    _width(x)
    gate, up = wide_ref(x).chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).to(x.dtype).contiguous()


def swiglu_backward_ref(grad_y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """`swiglu_backward` in plain torch."""
    _width(x, grad_y)
    gate, up = wide_ref(x).chunk(2, dim=-1)
    grad = wide_ref(grad_y)
    sigmoid = gate.sigmoid()
    silu = gate * sigmoid
    return torch.cat((grad * up * (sigmoid + silu * (1 - sigmoid)), grad * silu), dim=-1).to(x.dtype).contiguous()


def _width(x: torch.Tensor, grad_y: torch.Tensor | None = None) -> int:
    """F."""
    width, odd = divmod(x.shape[-1], 2)
    assert not odd and x.is_floating_point(), f"gate and up have one width: {tuple(x.shape)} of {x.dtype}"
    assert grad_y is None or grad_y.shape == (*x.shape[:-1], width), f"a gradient {tuple(grad_y.shape)} for y of x {tuple(x.shape)}"
    return width


def _tiles(rows: int, width: int) -> tuple[tuple[int], dict[str, int]]:
    """The grid, and the sizes of a tile."""
    cols = min(TILE, 1 << (width - 1).bit_length())
    return (-(-rows // (TILE // cols)) * -(-width // cols),), {"BLOCK_ROWS": TILE // cols, "BLOCK_COLS": cols}

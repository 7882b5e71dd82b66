"""Random numbers that depend only on a key and on where an element stands in the whole tensor: Philox 4x32-10, counter = global index.

An element is one integer k, drawn from the element's own 128 random bits, times a step that depends on the wanted scale:
- normal: k = (sum of the eight 16-bit halves) - 8 * 65535 / 2. Each half is uniform on 0..65535 with variance (65536^2 - 1) / 12, so k
  has mean 0 and variance exactly 2/3 (65536^2 - 1); step = std / sqrt(that). Against a true normal: the skewness is 0 as there, the
  excess kurtosis is -0.15 (-1.2 / 8, of a sum of eight uniforms), and no value lies beyond +-4.9 std.
- uniform: k = 2 x + 1 - 2^24 with x the top 24 bits of word 0: the odd integers of (-2^24, 2^24), symmetric and never 0;
  step = bound / 2^24.

|k| < 2^24 is exact in every dtype used, so a value is rounded once, by a multiplication, and is bit-equal on every device:
- float64: k * step.
- float32: k * float32(step). Because step is rounded first, this need not be the float64 value rounded; they differ by at most 2 units
  in the last place.
- bfloat16: the float32 value rounded to nearest even. A uniform value, elsewhere strictly inside (-bound, bound), may become +-bound.
"""

from __future__ import annotations

import math
import struct
from typing import Literal

import torch

from ..errors import ConfigError
from .backend import available, jit, tl
from .precision import compute_dtype

Kind = Literal["normal", "uniform"]
DTYPES = (torch.float32, torch.float64, torch.bfloat16)
NORMAL_STD = math.sqrt(8 * (65536**2 - 1) / 12)  # of the integer k
REF_CHUNK = 2**14  # elements the reference works on at once: few enough for the cache, and for torch to stay on one thread


@jit
def philox4x32(c0, c1, c2, c3, k0, k1):  # type: ignore[no-untyped-def]
    """Ten rounds on a 128-bit counter c0..c3 (low word first) under a 64-bit key: four random words. All uint32."""
    for _ in tl.static_range(10):
        a = c0.to(tl.uint64) * 0xD2511F53
        b = c2.to(tl.uint64) * 0xCD9E8D57
        c0 = (b >> 32).to(tl.uint32) ^ c1 ^ k0
        c1 = b.to(tl.uint32)
        c2 = (a >> 32).to(tl.uint32) ^ c3 ^ k1
        c3 = a.to(tl.uint32)
        k0 += 0x9E3779B9
        k1 += 0xBB67AE85
    return c0, c1, c2, c3


@jit
def rounded_to_bfloat16(x):  # type: ignore[no-untyped-def]
    """float32 -> bfloat16, to nearest even as the hardware does. The interpreter's own conversion truncates, so the bits are set here."""
    bits = x.to(tl.uint32, bitcast=True)
    bits += 0x7FFF + ((bits >> 16) & 1)
    return (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)


@jit(do_not_specialize=("rows", "cols", "global_cols", "base", "key_low", "key_high", "step_bits"))
def philox_fill_kernel(  # type: ignore[no-untyped-def]
    out,
    stride_row,
    stride_col,
    rows: tl.int64,
    cols: tl.int64,
    global_cols: tl.int64,
    base: tl.int64,  # global index of out[0, 0]
    key_low: tl.int32,
    key_high: tl.int32,
    step_bits: tl.int64,  # of a float64: triton would pass a float argument as float32
    NORMAL: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    """out[r, c] = k(base + r * global_cols + c) * step; a program fills one tile of BLOCK_ROWS x BLOCK_COLS."""
    tile = tl.program_id(0).to(tl.int64)
    tiles_across = (cols + BLOCK_COLS - 1) // BLOCK_COLS
    row = (tile // tiles_across * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS))[:, None]
    col = (tile % tiles_across * BLOCK_COLS + tl.arange(0, BLOCK_COLS))[None, :]
    index = base + row * global_cols + col

    low, high = index.to(tl.uint32), (index >> 32).to(tl.uint32)
    zero = tl.zeros_like(low)
    w0, w1, w2, w3 = philox4x32(low, high, zero, zero, key_low.to(tl.uint32), key_high.to(tl.uint32))
    if NORMAL:
        halves = (w0 & 0xFFFF) + (w1 & 0xFFFF) + (w2 & 0xFFFF) + (w3 & 0xFFFF) + (w0 >> 16) + (w1 >> 16) + (w2 >> 16) + (w3 >> 16)
        k = halves.to(tl.int32) - 262140
    else:
        k = (w0 >> 8).to(tl.int32) * 2 - 16777215

    step = step_bits.to(tl.int64).to(tl.float64, bitcast=True)
    compute: tl.constexpr = tl.float64 if out.dtype.element_ty == tl.float64 else tl.float32
    value = k.to(compute) * step.to(compute)
    if out.dtype.element_ty == tl.bfloat16:
        value = rounded_to_bfloat16(value)
    tl.store(out + row * stride_row + col * stride_col, value, mask=(row < rows) & (col < cols))


@torch.no_grad()
def philox_fill_(out: torch.Tensor, *, key: int, kind: Kind, scale: float, global_cols: int, row0: int = 0, col0: int = 0) -> torch.Tensor:
    """Fills `out` in place and returns it: element (r, c) takes the random value of global index (row0 + r) * global_cols + col0 + c.

    `out` is a shard [rows, cols] of a tensor with `global_cols` columns, of any strides; a 1-D `out` is one row. `key` has 64 bits.
    `scale` is the standard deviation of "normal" and the bound of "uniform". On CUDA the kernel runs, elsewhere (and where there is no
    triton) the reference: same bits. Raises ConfigError for another dtype, kind, number of dims, or a scale that is no number >= 0.
    """
    if out.is_cuda and available:
        return launch(out, key=key, kind=kind, scale=scale, global_cols=global_cols, row0=row0, col0=col0)
    return philox_fill_ref(out, key=key, kind=kind, scale=scale, global_cols=global_cols, row0=row0, col0=col0)


def launch(out: torch.Tensor, *, key: int, kind: Kind, scale: float, global_cols: int, row0: int = 0, col0: int = 0) -> torch.Tensor:
    """`philox_fill_` by the kernel, whatever the device (on CPU by the interpreter)."""
    shard, base, step = _checked(out, key, kind, scale, global_cols, row0, col0)
    rows, cols = shard.shape
    if shard.numel() == 0:
        return out
    block_cols = min(1024, 1 << (cols - 1).bit_length())
    block_rows = 1024 // block_cols
    grid = (-(-rows // block_rows) * -(-cols // block_cols),)
    with torch.cuda.device_of(shard):
        philox_fill_kernel[grid](
            shard, *shard.stride(), rows, cols, global_cols, base, *_as_integers(key, step),
            NORMAL=kind == "normal", BLOCK_ROWS=block_rows, BLOCK_COLS=block_cols,
        )  # fmt: skip
    return out


@torch.no_grad()
def philox_fill_ref(
    out: torch.Tensor, *, key: int, kind: Kind, scale: float, global_cols: int, row0: int = 0, col0: int = 0
) -> torch.Tensor:
    """`philox_fill_` in plain torch, on any device."""
    shard, base, step = _checked(out, key, kind, scale, global_cols, row0, col0)
    rows, cols = shard.shape
    chunk_cols = min(max(cols, 1), REF_CHUNK)
    chunk_rows = REF_CHUNK // chunk_cols
    compute = compute_dtype(out.dtype)
    for row in range(0, rows, chunk_rows):
        for col in range(0, cols, chunk_cols):
            piece = shard[row : row + chunk_rows, col : col + chunk_cols]
            r = torch.arange(row, row + piece.shape[0], device=out.device)[:, None]
            c = torch.arange(col, col + piece.shape[1], device=out.device)
            piece.copy_(_integers(base + r * global_cols + c, key, kind).to(compute) * step)
    return out


def philox4x32_ref(counter: tuple[torch.Tensor, ...], key: tuple[int, int]) -> tuple[torch.Tensor, ...]:
    """The four words for counter words c0..c3 (low first) under key words k0, k1: int64 tensors and integers that hold 32-bit values."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        a = c0 * 0xD2511F53  # modulo 2^64, so the sign may be set and >> smears it: the mask keeps the low 32 bits only
        b = c2 * 0xCD9E8D57
        c0 = (b >> 32).bitwise_xor_(c1).bitwise_xor_(k0).bitwise_and_(0xFFFFFFFF)
        c2 = (a >> 32).bitwise_xor_(c3).bitwise_xor_(k1).bitwise_and_(0xFFFFFFFF)
        c1, c3 = b, a  # their upper halves fall to the masks of the next round, or below
        k0 = (k0 + 0x9E3779B9) & 0xFFFFFFFF
        k1 = (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c0, c1.bitwise_and_(0xFFFFFFFF), c2, c3.bitwise_and_(0xFFFFFFFF)


def _integers(index: torch.Tensor, key: int, kind: Kind) -> torch.Tensor:
    """The integers k (int64) of the module's docstring for global indices `index` (int64)."""
    zero = torch.zeros_like(index)
    words = philox4x32_ref((index & 0xFFFFFFFF, index >> 32, zero, zero), (key & 0xFFFFFFFF, key >> 32))
    if kind == "uniform":
        return (words[0] >> 8) * 2 - 16777215
    total = zero
    for word in words:
        total += word & 0xFFFF
        total += word >> 16
    return total - 262140


def _checked(
    out: torch.Tensor, key: int, kind: Kind, scale: float, global_cols: int, row0: int, col0: int
) -> tuple[torch.Tensor, int, float]:
    """(`out` as 2-D, the global index of its first element, step)."""
    if out.dtype not in DTYPES:
        raise ConfigError(f"dtype {out.dtype}", "the dtype must be float32, float64 or bfloat16", "Fill a float32 tensor and convert")
    if out.ndim not in (1, 2):
        raise ConfigError(f"shape {tuple(out.shape)}", "the tensor to fill must have 1 or 2 dims", "Fill a view with flatten(1) or view(1)")
    if kind not in ("normal", "uniform"):
        raise ConfigError(f"kind={kind!r}", 'kind must be "normal" or "uniform"', 'Use kind="normal"')
    if not 0 <= scale < math.inf:
        raise ConfigError(f"scale={scale!r}", "the scale must be a finite number, 0 or more", "Use scale=0.02")
    shard = out if out.ndim == 2 else out[None, :]
    rows, cols = shard.shape
    assert 0 <= key < 2**64, f"a key has 64 bits, got {key}"
    assert row0 >= 0 and 0 <= col0 <= col0 + cols <= global_cols, f"columns {col0}:{col0 + cols} of {global_cols}, from row {row0}"
    assert (row0 + rows) * global_cols < 2**63, f"row {row0 + rows} of {global_cols} columns has a global index beyond 63 bits"
    return shard, row0 * global_cols + col0, scale / NORMAL_STD if kind == "normal" else scale * 2.0**-24


def _as_integers(key: int, step: float) -> tuple[int, int, int]:
    """The low and the high word of the key as int32 and the bits of `step` as int64: what the kernel takes."""
    low, high, step_bits = struct.unpack("<iiq", struct.pack("<Qd", key, step))
    return low, high, step_bits

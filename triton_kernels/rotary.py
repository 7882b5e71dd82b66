"""Rotary position embedding (Su et al. 2021, eq. 34) of a fused q|k|v projection's output, and its gradient, one pass over memory each.

Legend: S sequence, B batch, tokens t = s B + b in sequence-major order, H query heads, G key heads, E head width. Angles have a cosine
and a sine [S, E / 2] in float32 (float64 for float64), which all is computed in and rounded once. Queries, keys and values leave as
tensors of their own, so that attention's gradients for them, whatever their strides, go straight into one gradient of the projection.
"""

from __future__ import annotations

import torch

from .backend import available, jit, tl
from .precision import compute_dtype, wide, wide_ref

TILE = 4096  # numbers of a program, at most: tokens of one head. With 8 warps as fast as a copy on an H200, for widths of 64 and 128

QKV = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@jit
def rotary_kernel(  # type: ignore[no-untyped-def]
    x,  # [tokens, (heads + 2 kv_heads) head_dim], contiguous: the projection, or its gradient
    q,  # [seq, batch, heads, head_dim], its last dim contiguous
    k,  # [seq, batch, kv_heads, head_dim], the same
    v,
    cos,  # [seq, head_dim / 2], contiguous
    sin,
    q_seq: tl.int64,  # strides
    q_batch: tl.int64,
    q_head: tl.int64,
    k_seq: tl.int64,
    k_batch: tl.int64,
    k_head: tl.int64,
    v_seq: tl.int64,
    v_batch: tl.int64,
    v_head: tl.int64,
    tokens: tl.int64,
    batch,
    heads,
    kv_heads,
    half,  # head_dim / 2
    BACKWARD: tl.constexpr,  # x from q, k and v, turned the other way
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    """A program turns one head of BLOCK_TOKENS tokens."""
    program = tl.program_id(0).to(tl.int64)
    all_heads = heads + 2 * kv_heads
    head = program % all_heads
    token = (program // all_heads * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS))[:, None]
    i = tl.arange(0, BLOCK_HALF)[None, :]
    inside = (token < tokens) & (i < half)
    seq = token // batch
    fused = x + (token * all_heads + head) * 2 * half + i
    if head < heads:
        single = q + seq * q_seq + token % batch * q_batch + head * q_head + i
    elif head < heads + kv_heads:
        single = k + seq * k_seq + token % batch * k_batch + (head - heads) * k_head + i
    else:
        single = v + seq * v_seq + token % batch * v_batch + (head - heads - kv_heads) * v_head + i
    if BACKWARD:
        first, second = tl.load(single, mask=inside), tl.load(single + half, mask=inside)
    else:
        first, second = tl.load(fused, mask=inside), tl.load(fused + half, mask=inside)
    if head < heads + kv_heads:
        c, s = tl.load(cos + seq * half + i, mask=inside), tl.load(sin + seq * half + i, mask=inside)
        if BACKWARD:
            s = -s
        a, b = wide(first), wide(second)
        first, second = (a * c - b * s).to(first.dtype), (b * c + a * s).to(second.dtype)
    if BACKWARD:
        tl.store(fused, first, mask=inside)
        tl.store(fused + half, second, mask=inside)
    else:
        tl.store(single, first, mask=inside)
        tl.store(single + half, second, mask=inside)


def rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, heads: int, kv_heads: int) -> QKV:
    """q [S, B, H, E] and k [S, B, G, E], turned, and v [S, B, G, E] as it is, new and contiguous, of x [S B, (H + 2G) E].

    With a head's halves a and b: a cos - b sin | b cos + a sin. `cos` and `sin` [S, E / 2]: float32, or float64 for a float64 x.
    """
    return (launch if x.is_cuda and available else rotary_ref)(x, cos, sin, heads, kv_heads)


def rotary_backward(grad_q: torch.Tensor, grad_k: torch.Tensor, grad_v: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """The gradient [S B, (H + 2G) E] for `rotary`'s x, new and contiguous, from those for q, k and v."""
    return (launch_backward if grad_q.is_cuda and available else rotary_backward_ref)(grad_q, grad_k, grad_v, cos, sin)


def launch(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, heads: int, kv_heads: int) -> QKV:
    """`rotary` by the kernel, whatever the device (on CPU by the interpreter)."""
    shapes = _shapes(x.shape, x.dtype, cos, sin, heads, kv_heads)
    q, k, v = (torch.empty(shape, dtype=x.dtype, device=x.device) for shape in shapes)
    _launch(x.contiguous(), q, k, v, cos, sin, backward=False)
    return q, k, v


def launch_backward(grad_q: torch.Tensor, grad_k: torch.Tensor, grad_v: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """`rotary_backward` by the kernel, whatever the device."""
    grad_x = torch.empty(_size(grad_q, grad_k, grad_v, cos, sin), dtype=grad_q.dtype, device=grad_q.device)
    grad_q, grad_k, grad_v = (grad if grad.stride(-1) == 1 else grad.contiguous() for grad in (grad_q, grad_k, grad_v))
    _launch(grad_x, grad_q, grad_k, grad_v, cos, sin, backward=True)
    return grad_x


def _launch(
    x: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, backward: bool
) -> None:
    if not x.numel():
        return
    heads, kv_heads, half = q.shape[2], k.shape[2], cos.shape[1]
    block_half = 1 << (half - 1).bit_length()
    block_tokens = max(1, min(64, TILE // 2 // block_half))
    grid = (-(-x.shape[0] // block_tokens) * (heads + 2 * kv_heads),)
    with torch.cuda.device_of(x):
        rotary_kernel[grid](
            x, q, k, v, cos.contiguous(), sin.contiguous(), *q.stride()[:3], *k.stride()[:3], *v.stride()[:3],
            x.shape[0], q.shape[1], heads, kv_heads, half,
            BACKWARD=backward, BLOCK_TOKENS=block_tokens, BLOCK_HALF=block_half, num_warps=8,
        )  # fmt: skip


def rotary_ref(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, heads: int, kv_heads: int) -> QKV:
    """`rotary` in plain torch."""
    (seq, batch, _, head_dim), *_ = _shapes(x.shape, x.dtype, cos, sin, heads, kv_heads)
    q, k, v = x.view(seq, batch, heads + 2 * kv_heads, head_dim).split((heads, kv_heads, kv_heads), dim=2)
    return _turned(q, cos, sin), _turned(k, cos, sin), v.clone(memory_format=torch.contiguous_format)


def rotary_backward_ref(
    grad_q: torch.Tensor, grad_k: torch.Tensor, grad_v: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> torch.Tensor:
    """`rotary_backward` in plain torch."""
    _size(grad_q, grad_k, grad_v, cos, sin)
    return torch.cat((_turned(grad_q, cos, -sin), _turned(grad_k, cos, -sin), grad_v), dim=2).flatten(2).flatten(0, 1).contiguous()


def _shapes(
    size: tuple[int, ...], dtype: torch.dtype, cos: torch.Tensor, sin: torch.Tensor, heads: int, kv_heads: int
) -> list[tuple[int, ...]]:
    """Those of q, k and v, parts of a projection of this size."""
    rows, width = size
    seq, half = cos.shape
    batch = rows // max(seq, 1)
    assert sin.shape == cos.shape and cos.dtype == sin.dtype == compute_dtype(dtype), f"angles {cos.shape} {cos.dtype} for {dtype}"
    assert rows == seq * batch and width == (heads + 2 * kv_heads) * 2 * half, f"{rows} x {width} for {seq} positions, {heads} heads"
    return [(seq, batch, count, 2 * half) for count in (heads, kv_heads, kv_heads)]


def _size(grad_q: torch.Tensor, grad_k: torch.Tensor, grad_v: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[int, int]:
    """That of the projection whose parts have these gradients."""
    seq, batch, heads, head_dim = grad_q.shape
    kv_heads = grad_k.shape[2]
    size = seq * batch, (heads + 2 * kv_heads) * head_dim
    shapes = _shapes(size, grad_q.dtype, cos, sin, heads, kv_heads)
    given = [tuple(grad.shape) for grad in (grad_q, grad_k, grad_v)]
    assert given == shapes, f"gradients {given} where {shapes} belong to the angles"
    assert grad_q.dtype == grad_k.dtype == grad_v.dtype, f"gradients of {grad_q.dtype}, {grad_k.dtype} and {grad_v.dtype}"
    return size


def _turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    cos, sin = cos[:, None, None, :], sin[:, None, None, :]
    a, b = wide_ref(x).chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)

"""AdamW (Loshchilov and Hutter 2019) and SGD on a rank's shard, and the new parameters to all ranks, in one pass over memory.

Legend: as in `zero_reduce`. A bucket's parameters are kept in the model's dtype on every rank; masters and what the optimizer remembers are
float32, of the own shard. Gradients come summed, or are summed on the way: then reduction, update and push are one pass, which the links
decide. The masters of bfloat16 parameters can be kept as the 16 bits that these lack.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .backend import constant, jit, tl
from .precision import nearest, triton_dtype, wide
from .zero_reduce import TILE, aligned, summed, width

HALF = constant(0x8000)  # of the last bit of a bfloat16 in units of the last bit of a float32


class AdamW(NamedTuple):
    """Its numbers in step `step`, which counts from 1. `decoupled` False: decay is added to the gradient, as in Adam."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int
    decoupled: bool = True


class SGD(NamedTuple):
    """Its numbers; with `first` the gradient is the first that goes into the momentum."""

    lr: float
    momentum: float
    dampening: float
    weight_decay: float
    nesterov: bool = False
    first: bool = False


@jit
def joined(high, low):  # type: ignore[no-untyped-def]
    """The float32 whose nearest bfloat16 is `high`, and whose last 16 bits are `low`, int16."""
    low = low.to(tl.int32) & 0xFFFF
    high = high.to(tl.int16, bitcast=True).to(tl.int32) - (low >= HALF).to(tl.int32)  # it was rounded up then
    return ((high << 16) | low).to(tl.float32, bitcast=True)


@jit
def remainder_of(value, high):  # type: ignore[no-untyped-def]
    """What `joined` makes the float32 `value` of, besides `high`, its nearest bfloat16.

    A value in the middle of two that was rounded down cannot be told from one that was rounded up: it gives its last bit.
    """
    bits = value.to(tl.int32, bitcast=True)
    low = bits & 0xFFFF
    down = ((bits >> 16) & 0xFFFF) == (high.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF)
    return tl.where((low == HALF) & down, HALF - 1, low).to(tl.int16)


@jit(do_not_specialize=["first"])
def update_kernel(  # type: ignore[no-untyped-def]
    grads,  # [tiles * TILE]: summed, or None
    contributions,  # int64 [RANKS]: where the bucket's gradients begin on each rank, to be summed; or None
    masters,  # [tiles * TILE] float32; or int16, what bfloat16 parameters lack
    average,  # [tiles * TILE] float32: of gradients, or SGD's momentum, or None
    average_square,  # the same, of their squares, or None
    weights,  # int64 [RANKS]: where the bucket's parameters begin on each rank
    scale,  # float64 [1]: what gradients are multiplied by; if it is NaN nothing changes
    squares,  # float64 [tiles]: the sum of squares of a tile's gradients, before that; or None
    first: tl.int32,  # the tile with which the shard begins
    lr,
    rate,  # AdamW: lr / (1 - beta1^step). SGD: 1 - dampening
    share1,  # AdamW: 1 - beta1, of the gradient in its average. SGD: momentum
    beta2,  # SGD: momentum, but 0 in the first step
    share2,  # AdamW: 1 - beta2
    root,  # AdamW: sqrt(1 - beta2^step)
    eps,
    decay,
    ADAMW: tl.constexpr,
    DECOUPLED: tl.constexpr,  # or Nesterov's momentum
    WIRE: tl.constexpr,
    WEIGHT: tl.constexpr,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    PUSHED: tl.constexpr,  # to so many others
    TILE: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """A program updates a tile."""
    factor = tl.load(scale)
    if factor == factor:
        col = tl.arange(0, TILE)
        tile = tl.program_id(0).to(tl.int64)
        number, place = tile * TILE + col, (first + tile) * TILE + col
        if contributions is not None:
            grad = summed(contributions, (first + tile) * (TILE * WIDTH) + col, WIRE, WIRE, tl.float32, RANKS)
        else:
            grad = wide(tl.load(grads + number))
        if squares is not None:
            tl.store(squares + tile, tl.sum(grad.to(tl.float64) * grad.to(tl.float64)))
        grad *= factor.to(tl.float32)
        here = aligned(weights + RANK, WEIGHT) + place
        kept = tl.load(masters + number)
        master = joined(tl.load(here), kept) if masters.dtype.element_ty == tl.int16 else kept
        if ADAMW:
            if DECOUPLED:
                master -= lr * decay * master
            else:
                grad += decay * master
            mean = tl.load(average + number)
            mean += share1 * (grad - mean)
            square = beta2 * tl.load(average_square + number) + share2 * grad * grad
            tl.store(average + number, mean)
            tl.store(average_square + number, square)
            master -= rate * (mean / (tl.sqrt(square) / root + eps))
        else:
            grad += decay * master
            if average is not None:
                mean = rate * grad + tl.where(beta2 == 0.0, 0.0, beta2 * tl.load(average + number))
                tl.store(average + number, mean)
                grad = grad + share1 * mean if DECOUPLED else mean
            master -= lr * grad
        new = nearest(master, WEIGHT)
        if masters.dtype.element_ty == tl.int16:
            tl.store(masters + number, remainder_of(master, new))
        else:
            tl.store(masters + number, master)
        for following in tl.static_range(1, PUSHED + 1):
            tl.store(aligned(weights + (RANK + following) % RANKS, WEIGHT) + place, new)
        tl.store(here, new)


def update(
    rule: AdamW | SGD,
    masters: torch.Tensor,
    remembered: tuple[torch.Tensor, ...],
    weights: torch.Tensor,
    dtype: torch.dtype,
    scale: torch.Tensor,
    *,
    shard: int,
    rank: int,
    push: bool,
    grads: torch.Tensor | None = None,
    contributions: torch.Tensor | None = None,
    wire: torch.dtype = torch.float32,
    accumulated: torch.dtype = torch.float32,
    squares: torch.Tensor | None = None,
) -> None:
    """One step of `rule` on shard number `shard` of a bucket; with `push` all ranks get the new parameters, else this `rank`.

    `masters` [tiles * TILE] are float32, or int16: then the last 16 bits of what the parameters, bfloat16, are the first bits of.
    `remembered`: AdamW's averages of gradients and of their squares; SGD's momentum, if it has any. `weights`, int64 [ranks], says where
    the bucket's parameters of `dtype` begin on each rank. The gradients, times `scale`, float64 [1], are `grads` [tiles * TILE], or the sum
    of the ranks' `contributions`, int64 [ranks], as `reduce_shard` takes them, rounded to `wire` where they were `accumulated`. `squares`,
    float64 [tiles], become the sums of squares of gradients, before they are multiplied. Where `scale` is NaN nothing changes.
    """
    assert masters.numel() % TILE == 0 and (grads is None) != (contributions is None), f"{masters.numel()} masters"
    assert contributions is None or contributions.numel() == weights.numel(), f"{contributions}, {weights}"
    tiles = masters.numel() // TILE
    if isinstance(rule, AdamW):
        rate, root = rule.lr / (1 - rule.beta1**rule.step), (1 - rule.beta2**rule.step) ** 0.5
        numbers = rule.lr, rate, 1 - rule.beta1, rule.beta2, 1 - rule.beta2, root, rule.eps, rule.weight_decay
        adamw, other = True, rule.decoupled
    else:
        rate, kept = (1.0, 0.0) if rule.first else (1.0 - rule.dampening, rule.momentum)
        numbers = rule.lr, rate, rule.momentum, kept, 0.0, 1.0, 0.0, rule.weight_decay
        adamw, other = False, rule.nesterov
    average, average_square = (*remembered, None, None)[:2]
    update_kernel[(tiles,)](
        grads,
        contributions,
        masters,
        average,
        average_square,
        weights,
        scale,
        squares,
        shard * tiles,
        *map(float, numbers),
        ADAMW=adamw,
        DECOUPLED=other,
        WIRE=triton_dtype(wire),
        WEIGHT=triton_dtype(dtype),
        RANK=rank,
        RANKS=weights.numel(),
        PUSHED=weights.numel() - 1 if push else 0,
        TILE=TILE,
        WIDTH=width(accumulated, wire),
        num_warps=4,
    )


def update_ref(
    rule: AdamW | SGD, masters: torch.Tensor, remembered: tuple[torch.Tensor, ...], grads: torch.Tensor, scale: torch.Tensor
) -> None:
    """The same of masters in any one dtype, in plain torch, on summed gradients: masters and what is remembered change in place."""
    if torch.isnan(scale).any():
        return
    grad = grads * scale.to(grads.dtype)
    if isinstance(rule, AdamW):
        average, average_square = remembered
        if rule.decoupled:
            masters.mul_(1 - rule.lr * rule.weight_decay)
        else:
            grad = grad + rule.weight_decay * masters
        average.lerp_(grad, 1 - rule.beta1)
        average_square.mul_(rule.beta2).addcmul_(grad, grad, value=1 - rule.beta2)
        root = (average_square / (1 - rule.beta2**rule.step)).sqrt()
        masters.sub_(rule.lr / (1 - rule.beta1**rule.step) * average / (root + rule.eps))
        return
    grad = grad + rule.weight_decay * masters
    if remembered:
        (average,) = remembered
        average.copy_(grad if rule.first else rule.momentum * average + (1 - rule.dampening) * grad)
        grad = grad + rule.momentum * average if rule.nesterov else average
    masters.sub_(rule.lr * grad)


def joined_ref(high: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """`joined` in plain torch."""
    last = low.to(torch.int32) & 0xFFFF
    first = high.view(torch.int16).to(torch.int32) - (last >= 0x8000).to(torch.int32)
    return ((first << 16) | last).view(torch.float32)


def remainder_ref(value: torch.Tensor) -> torch.Tensor:
    """`remainder_of` in plain torch, of a float32 tensor and its nearest bfloat16."""
    bits, high = value.view(torch.int32), value.bfloat16().view(torch.int16)
    low = bits & 0xFFFF
    down = (bits >> 16).to(torch.int16) == high
    return torch.where((low == 0x8000) & down, 0x7FFF, low).to(torch.int16)

"""Products that talk to the other ranks of an axis in one kernel, for tensors whose tokens are the dim before the features.

`choose` says which kernel; where it says torch's, these functions give None, and torch's product and a collective do. What a kernel shares
with other ranks is the workspace of its op.
"""

from __future__ import annotations

import torch

from pymesh3d.axis import Axis
from pymesh3d.comm.workspace import workspace
from pymesh3d.ops.choose import choose
from pymesh3d.triton_kernels import (
    all_gather_matmul,
    all_gather_matmul_hopper,
    matmul_all_reduce,
    matmul_reduce_scatter,
    matmul_reduce_scatter_hopper,
)


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1, x.shape[-1])


def gathered_product(x: torch.Tensor, weight: torch.Tensor, axis: Axis) -> tuple[torch.Tensor, torch.Tensor] | None:
    """x [..., T / ranks, K] of all ranks times weight [N, K]^T: [T, ..., N], tokens first. With it the gathered x [T, ..., K], which the
    next call writes over.
    """
    mine = x.movedim(-2, 0)
    rows, weight = _rows(mine), weight.detach()
    kernel = choose("all_gather_matmul", rows, weight, axis)
    if kernel == "torch":
        return None
    share = workspace("all_gather_matmul", axis, x.device)
    sizes, patience = (axis.size, rows.shape[0], rows.shape[1]), axis.timeout.total_seconds()
    if kernel == "hopper":
        slots = share.slots(*all_gather_matmul_hopper.needed(*sizes, weight.shape[0]))
        y = all_gather_matmul_hopper.launch(rows, weight, axis.rank, slots, share.parts, share.counters, patience=patience)
    else:
        slots = share.slots(*all_gather_matmul.needed(*sizes, x.dtype))
        y = all_gather_matmul.launch(rows, weight, axis.rank, slots, share.counters, patience=patience)
    tokens = axis.size * mine.shape[0], *mine.shape[1:-1]
    return y.view(*tokens, weight.shape[0]), share.part((*tokens, mine.shape[-1]), x.dtype)


def scattered_product(x: torch.Tensor, weight: torch.Tensor, axis: Axis) -> torch.Tensor | None:
    """This rank's tokens of the ranks' sum of x [..., T, K] times weight [N, K]^T: [..., T / ranks, N]."""
    tokens = x.movedim(-2, 0)
    rows, weight = _rows(tokens), weight.detach()
    kernel = choose("matmul_reduce_scatter", rows, weight, axis)
    if kernel == "torch":
        return None
    share = workspace("matmul_reduce_scatter", axis, x.device)
    sizes, patience = (axis.size, rows.shape[0] // axis.size, weight.shape[0]), axis.timeout.total_seconds()
    if kernel == "hopper":
        slots = share.slots(*matmul_reduce_scatter_hopper.needed(*sizes))
        y = matmul_reduce_scatter_hopper.launch(rows, weight, axis.rank, slots, share.parts, share.counters, patience=patience)
    else:
        slots = share.slots(*matmul_reduce_scatter.needed(*sizes, x.dtype))
        y = matmul_reduce_scatter.launch(rows, weight, axis.rank, slots, share.counters, patience=patience)
    return y.view(-1, *tokens.shape[1:-1], weight.shape[0]).movedim(0, -2)


def reduced_product(x: torch.Tensor, weight: torch.Tensor, axis: Axis) -> torch.Tensor | None:
    """The ranks' sum of x [..., K] times weight [N, K]^T: [..., N], the same bits on each."""
    rows, weight = _rows(x), weight.detach()
    if choose("matmul_all_reduce", rows, weight, axis) == "torch":
        return None
    share = workspace("matmul_all_reduce", axis, x.device)
    slots = share.slots(*matmul_all_reduce.needed(axis.size, rows.shape[0], weight.shape[0], x.dtype))
    y = matmul_all_reduce.launch(rows, weight, axis.rank, slots, share.counters, patience=axis.timeout.total_seconds())
    return y.view(*x.shape[:-1], weight.shape[0])

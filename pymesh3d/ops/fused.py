"""Products that talk to the other ranks of an axis in one kernel, for tensors whose tokens are the dim before the features.

`choose` says which kernel; where it says torch's, these functions give None, and torch's product and a collective do. What a kernel shares
with other ranks is the workspace of its op.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from pymesh3d.axis import Axis
from pymesh3d.comm.workspace import Workspace, workspace
from pymesh3d.ops.choose import TILES, choose
from pymesh3d.triton_kernels import (
    all_gather_matmul,
    all_gather_matmul_hopper,
    matmul_all_reduce,
    matmul_reduce_scatter,
    matmul_reduce_scatter_hopper,
)


def _gather(kernel: str, share: Workspace, axis: Axis, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    sizes, patience = (axis.size, rows.shape[0], rows.shape[1]), axis.timeout.total_seconds()
    if kernel == "plain":
        slots = share.slots(*all_gather_matmul.needed(*sizes, rows.dtype))
        return all_gather_matmul.launch(rows, weight, axis.rank, slots, share.counters, patience=patience)
    slots = share.slots(*all_gather_matmul_hopper.needed(*sizes, weight.shape[0], TILES[kernel]))
    return all_gather_matmul_hopper.launch(
        rows, weight, axis.rank, slots, share.parts, share.counters, tiles=TILES[kernel], patience=patience
    )


def _scatter(kernel: str, share: Workspace, axis: Axis, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    sizes, patience = (axis.size, rows.shape[0] // axis.size, weight.shape[0]), axis.timeout.total_seconds()
    if kernel == "plain":
        slots = share.slots(*matmul_reduce_scatter.needed(*sizes, rows.dtype))
        return matmul_reduce_scatter.launch(rows, weight, axis.rank, slots, share.counters, patience=patience)
    slots = share.slots(*matmul_reduce_scatter_hopper.needed(*sizes, TILES[kernel]))
    return matmul_reduce_scatter_hopper.launch(
        rows, weight, axis.rank, slots, share.parts, share.counters, tiles=TILES[kernel], patience=patience
    )


def _reduce(kernel: str, share: Workspace, axis: Axis, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    slots = share.slots(*matmul_all_reduce.needed(axis.size, rows.shape[0], weight.shape[0], rows.dtype))
    return matmul_all_reduce.launch(rows, weight, axis.rank, slots, share.counters, patience=axis.timeout.total_seconds())


# op -> what computes rows [M, K] times weight [N, K]^T by a kernel that is not torch's
FUSED: dict[str, Callable[[str, Workspace, Axis, torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "all_gather_matmul": _gather,
    "matmul_reduce_scatter": _scatter,
    "matmul_all_reduce": _reduce,
}


def _computed(op: str, tokens: torch.Tensor, weight: torch.Tensor, axis: Axis) -> tuple[torch.Tensor, Workspace] | None:
    """The product of tokens [T, ..., K], with their dims but the first as they were, and where its op keeps what it shares."""
    count = tokens.shape[:-1].numel()
    kernel = choose(op, (count, *weight.shape), weight.stride(-1) != 1, tokens, axis)
    if kernel == "torch":  # before rows are copied one after the other
        return None
    share = workspace(op, axis, tokens.device)
    y = FUSED[op](kernel, share, axis, tokens.reshape(count, tokens.shape[-1]), weight.detach())
    return y.view(-1, *tokens.shape[1:-1], weight.shape[0]), share


def gathered_product(x: torch.Tensor, weight: torch.Tensor, axis: Axis) -> tuple[torch.Tensor, torch.Tensor] | None:
    """x [..., T / ranks, K] of all ranks times weight [N, K]^T: [T, ..., N], tokens first. With it the gathered x [T, ..., K], which the
    next call writes over.
    """
    done = _computed("all_gather_matmul", x.movedim(-2, 0), weight, axis)
    if done is None:
        return None
    y, share = done
    return y, share.part((*y.shape[:-1], x.shape[-1]), x.dtype)


def scattered_product(x: torch.Tensor, weight: torch.Tensor, axis: Axis) -> torch.Tensor | None:
    """This rank's tokens of the ranks' sum of x [..., T, K] times weight [N, K]^T: [..., T / ranks, N]."""
    done = _computed("matmul_reduce_scatter", x.movedim(-2, 0), weight, axis)
    return None if done is None else done[0].movedim(0, -2)


def reduced_product(x: torch.Tensor, weight: torch.Tensor, axis: Axis) -> torch.Tensor | None:
    """The ranks' sum of x [..., K] times weight [N, K]^T: [..., N], the same bits on each."""
    done = _computed("matmul_all_reduce", x, weight, axis)
    return None if done is None else done[0].view(*x.shape[:-1], weight.shape[0])

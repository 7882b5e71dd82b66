"""Products that talk to the other ranks of an axis in one kernel, for tensors whose tokens are the dim before the features.

`choose` says which kernel; where it says torch's, these functions give None, and torch's product and a collective do. What a kernel shares
with other ranks is the workspace of its op.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch

from pymesh3d.axis import Axis
from pymesh3d.comm.copies import Copied, CopiedGather
from pymesh3d.comm.native import starter
from pymesh3d.comm.workspace import Workspace, on_this_stream, workspace
from pymesh3d.errors import SharingError
from pymesh3d.ops.choose import TILES, choose, forced, on_one_host
from pymesh3d.triton_kernels import (
    all_gather_matmul,
    all_gather_matmul_hopper,
    backend,
    matmul_all_reduce,
    matmul_all_reduce_hopper,
    matmul_reduce_scatter,
    matmul_reduce_scatter_hopper,
)
from pymesh3d.triton_kernels.launch_hopper import Prepared, alike

log = logging.getLogger("pymesh3d")

LEAST = 8 << 20  # bytes of a rank, on GPUs, from which copies are faster than NCCL's kernel (2 x H200, alone: 4 MiB 48 us, NCCL 41; 16 MiB
# 71 and 92; 32 MiB 124 and 157)


def _on_hopper(
    module: Any, kernel: str, share: Workspace, axis: Axis, rows: torch.Tensor, weight: torch.Tensor, sizes: Sequence[int], **more: bool
) -> torch.Tensor:
    """By the kernel of a module of `triton_kernels`, which needs slots for these sizes. Prepared once for operands of a kind."""

    def prepare() -> Prepared:
        slots = share.slots(*module.needed(axis.size, *sizes, TILES[kernel]))
        given = rows, weight, axis.rank, slots, share.parts, share.counters
        patience = axis.timeout.total_seconds()
        prepared: Prepared = module.prepare(*given, tiles=TILES[kernel], patience=patience, starter=starter, **more)
        return prepared

    return share.prepared((kernel, *more.values(), *alike(rows, weight)), prepare)(rows, weight)


def _gather(kernel: str, share: Workspace, axis: Axis, rows: torch.Tensor, weight: torch.Tensor, *, keep: bool = False) -> torch.Tensor:
    """With `keep`, the gathered rows begin this rank's slots then."""
    if kernel != "plain":
        sizes = (*rows.shape, weight.shape[0])
        return _on_hopper(all_gather_matmul_hopper, kernel, share, axis, rows, weight, sizes, keep=keep)
    slots = share.slots(*all_gather_matmul.needed(axis.size, rows.shape[0], rows.shape[1], rows.dtype))
    return all_gather_matmul.launch(rows, weight, axis.rank, slots, share.counters, patience=axis.timeout.total_seconds())


def _scatter(kernel: str, share: Workspace, axis: Axis, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    sizes = rows.shape[0] // axis.size, weight.shape[0]
    if kernel != "plain":
        return _on_hopper(matmul_reduce_scatter_hopper, kernel, share, axis, rows, weight, sizes)
    slots = share.slots(*matmul_reduce_scatter.needed(axis.size, *sizes, rows.dtype))
    return matmul_reduce_scatter.launch(rows, weight, axis.rank, slots, share.counters, patience=axis.timeout.total_seconds())


def _reduce(kernel: str, share: Workspace, axis: Axis, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    if kernel != "plain":
        sizes = rows.shape[0] // axis.size, weight.shape[0]
        return _on_hopper(matmul_all_reduce_hopper, kernel, share, axis, rows, weight, sizes)
    slots = share.slots(*matmul_all_reduce.needed(axis.size, rows.shape[0], weight.shape[0], rows.dtype))
    return matmul_all_reduce.launch(rows, weight, axis.rank, slots, share.counters, patience=axis.timeout.total_seconds())


# op -> what computes rows [M, K] times weight [N, K]^T by a kernel that is not torch's
FUSED: dict[str, Callable[..., torch.Tensor]] = {
    "all_gather_matmul": _gather,
    "matmul_reduce_scatter": _scatter,
    "matmul_all_reduce": _reduce,
}


def _tokens_first(x: torch.Tensor) -> torch.Tensor:
    return x if x.dim() == 2 else x.movedim(-2, 0)


def _computed(op: str, tokens: torch.Tensor, weight: torch.Tensor, axis: Axis, **more: bool) -> tuple[torch.Tensor, Workspace] | None:
    """The product of tokens [T, ..., K], with their dims but the first as they were, and where its op keeps what it shares."""
    flat = tokens.dim() == 2
    count = tokens.shape[0] if flat else tokens.shape[:-1].numel()
    if count == 0 or weight.dtype != tokens.dtype:  # of which torch has something to say
        return None
    kernel = choose(op, (count, *weight.shape), weight.stride(1) != 1, tokens, axis)
    if kernel == "torch":  # before rows are copied one after the other
        return None
    share = workspace(op, axis, tokens.device)
    if share.refused:
        return None
    try:
        y = FUSED[op](kernel, share, axis, tokens if flat else tokens.reshape(count, tokens.shape[-1]), weight, **more)
    except SharingError as error:  # on all ranks
        if forced() is not None:
            raise
        log.warning("%s; torch computes %s there, and NCCL communicates", error, op)
        return None
    return y if flat else y.view(-1, *tokens.shape[1:-1], weight.shape[0]), share


def gathered_product(
    x: torch.Tensor, weight: torch.Tensor, axis: Axis, *, keep: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None] | None:
    """x [..., T / ranks, K] of all ranks times weight [N, K]^T: [T, ..., N], tokens first. With it, where one asks to `keep` that, the
    gathered x [T, ..., K], which the next call writes over.
    """
    done = _computed("all_gather_matmul", _tokens_first(x), weight, axis, keep=keep)
    if done is None:
        return None
    y, share = done
    return y, share.part((*y.shape[:-1], x.shape[-1]), x.dtype) if keep else None


def scattered_product(x: torch.Tensor, weight: torch.Tensor, axis: Axis) -> torch.Tensor | None:
    """This rank's tokens of the ranks' sum of x [..., T, K] times weight [N, K]^T: [..., T / ranks, N]."""
    done = _computed("matmul_reduce_scatter", _tokens_first(x), weight, axis)
    return None if done is None else done[0].movedim(0, -2)


def reduced_product(x: torch.Tensor, weight: torch.Tensor, axis: Axis) -> torch.Tensor | None:
    """The ranks' sum of x [..., K] times weight [N, K]^T: [..., N], the same bits on each."""
    done = _computed("matmul_all_reduce", x, weight, axis)
    return None if done is None else done[0].view(*x.shape[:-1], weight.shape[0])


def gathers_aside(x: torch.Tensor, axis: Axis) -> bool:
    """Whether copy engines may gather x along this axis, alike on all ranks. On the CPU plain copies do, where `plain` is forced."""
    gpu = x.device.type == "cuda"
    wanted = forced() != "torch" if gpu else forced() == "plain"
    if not wanted or not backend.available or axis.size == 1 or x.numel() == 0 or not on_one_host(axis.ranks):
        return False
    return not gpu or (x.numel() * x.element_size() >= LEAST and not torch.cuda.is_current_stream_capturing())


def gathered_aside(x: torch.Tensor, axis: Axis) -> Copied | None:
    """All ranks' x [..., T / ranks, K], tokens first, by the copy engines while the GPU computes something else. What reads them must be
    enqueued before the next call. None where a collective must do it: between hosts, in a CUDA graph, where the environment asks for torch,
    of little, without the compiled part, and where ranks cannot share memory.
    """
    if not gathers_aside(x, axis):
        return None
    share = on_this_stream(CopiedGather, "all-gather", axis, x.device)
    if share.refused:
        return None
    try:
        return share.start(_tokens_first(x).contiguous())
    except SharingError as error:  # on all ranks
        log.warning("%s; a collective gathers there", error)
        return None

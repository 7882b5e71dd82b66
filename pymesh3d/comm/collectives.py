"""Collectives on tensors along one mesh axis. On an axis of size 1 they cost nothing and return their input.

Every failure becomes a DistributedError that names the operation, this rank, its peers and how long it waited.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from pymesh3d.mesh import Axis, named

# torch 2.13 renamed these two; 2.11 knows only the old names
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Pending:
    """A collective under way. `wait()` returns its tensor; on CUDA the current stream waits, not the host."""

    def __init__(self, tensor: torch.Tensor, work: dist.Work | None = None, operation: str = "", axis: Axis | None = None) -> None:
        self._tensor, self._work, self._operation, self._axis = tensor, work, operation, axis

    def wait(self) -> torch.Tensor:
        """The finished tensor."""
        if self._work is not None:
            assert self._axis is not None, "work without an axis"
            with named(self._operation, self._axis):
                self._work.wait()
            self._work = None
        return self._tensor


def _reduce_op(name: str) -> dist.ReduceOp.RedOpType:
    return {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}[name]


def all_reduce_(x: torch.Tensor, axis: Axis, op: str = "sum") -> Pending:
    """Replace `x` by its sum (or max) over the ranks of `axis`, the same bits on each."""
    if axis.size == 1:
        return Pending(x)
    with named("all-reduce", axis):
        return Pending(x, dist.all_reduce(x, op=_reduce_op(op), group=axis.group, async_op=True), "all-reduce", axis)


def all_gather(x: torch.Tensor, axis: Axis, out: torch.Tensor | None = None) -> Pending:
    """The ranks' tensors, concatenated along dim 0 in rank order. `x` may be this rank's part of `out` itself."""
    if axis.size == 1:
        return Pending(x)
    x = x.contiguous()
    if out is None:
        out = x.new_empty((axis.size * x.shape[0], *x.shape[1:]))
    with named("all-gather", axis):
        return Pending(out, _all_gather_single(out, x, group=axis.group, async_op=True), "all-gather", axis)


def reduce_scatter(x: torch.Tensor, axis: Axis) -> Pending:
    """This rank's part, along dim 0, of the sum over the ranks of `axis`."""
    if axis.size == 1:
        return Pending(x)
    x = x.contiguous()
    out = x.new_empty((x.shape[0] // axis.size, *x.shape[1:]))
    with named("reduce-scatter", axis):
        return Pending(out, _reduce_scatter_single(out, x, group=axis.group, async_op=True), "reduce-scatter", axis)


def all_to_all(x: torch.Tensor, axis: Axis) -> Pending:
    """Part i of `x` along dim 0 goes to rank i; part i of the result came from rank i."""
    if axis.size == 1:
        return Pending(x)
    x = x.contiguous()
    out = torch.empty_like(x)
    with named("all-to-all", axis):
        return Pending(out, dist.all_to_all_single(out, x, group=axis.group, async_op=True), "all-to-all", axis)


def broadcast_(x: torch.Tensor, axis: Axis, source: int = 0) -> torch.Tensor:
    """Overwrite `x` with the tensor of the rank at coordinate `source`."""
    if axis.size > 1:
        with named("broadcast", axis):
            dist.broadcast(x, src=axis.ranks[source], group=axis.group)
    return x


def gather_rows(values: torch.Tensor, axis: Axis) -> torch.Tensor:
    """The ranks' small vectors as the rows of a matrix [ranks, n], the same bits on each rank."""
    return all_gather(values.reshape(1, -1), axis).wait()

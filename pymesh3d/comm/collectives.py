"""Collectives on tensors along one mesh axis. On an axis of size 1 they cost nothing and return their input.

Every failure becomes a DistributedError that names the operation, this rank, its peers and how long it waited.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from pymesh3d.axis import Axis, named
from pymesh3d.comm.watch import wait_for_gpu

SUM, MAX = dist.ReduceOp.SUM, dist.ReduceOp.MAX
# torch 2.13 renamed these two; 2.11 knows only the old names
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Pending:
    """A collective under way. `wait()` returns its tensor; on CUDA the current stream waits, not the host."""

    def __init__(self, tensor: torch.Tensor, finish: Callable[[], object] | None = None, done: Callable[[], bool] = lambda: True) -> None:
        self._tensor, self._finish, self.done = tensor, finish, done  # the last: whether it has ended, as far as the host knows

    @property
    def device(self) -> torch.device:
        """Where the tensor is."""
        return self._tensor.device

    def wait(self) -> torch.Tensor:
        """The finished tensor."""
        if self._finish is not None:
            self._finish()
            self._finish = None
        return self._tensor


def _start(
    operation: str, axis: Axis, out: torch.Tensor, call: Callable[..., dist.Work], *tensors: torch.Tensor, **options: Any
) -> Pending:
    """What `call` does to `tensors`, its result in `out`; failures are named, now and while it is waited for."""
    with named(operation, axis):
        work = call(*tensors, group=axis.group, async_op=True, **options)

    def finish() -> None:
        with named(operation, axis):
            work.wait()

    return Pending(out, finish, work.is_completed)


def all_reduce_(x: torch.Tensor, axis: Axis, op: dist.ReduceOp.RedOpType = SUM) -> Pending:
    """Replace `x` by its sum (or what `op` says) over the ranks of `axis`, the same bits on each."""
    return Pending(x) if axis.size == 1 else _start("all-reduce", axis, x, dist.all_reduce, x, op=op)


def all_gather(x: torch.Tensor, axis: Axis, out: torch.Tensor | None = None, operation: str = "all-gather") -> Pending:
    """The ranks' tensors, concatenated along dim 0 in rank order. `x` may be this rank's part of `out` itself."""
    if axis.size == 1:
        return Pending(x)
    x = x.contiguous()
    if out is None:
        out = x.new_empty((axis.size * x.shape[0], *x.shape[1:]))
    return _start(operation, axis, out, _all_gather_single, out, x)


def reduce_scatter(x: torch.Tensor, axis: Axis) -> Pending:
    """This rank's part, along dim 0, of the sum over the ranks of `axis`."""
    if axis.size == 1:
        return Pending(x)
    x = x.contiguous()
    out = x.new_empty((x.shape[0] // axis.size, *x.shape[1:]))
    return _start("reduce-scatter", axis, out, _reduce_scatter_single, out, x)


def all_to_all(x: torch.Tensor, axis: Axis) -> Pending:
    """Part i of `x` along dim 0 goes to rank i; part i of the result came from rank i."""
    if axis.size == 1:
        return Pending(x)
    x = x.contiguous()
    out = torch.empty_like(x)
    return _start("all-to-all", axis, out, dist.all_to_all_single, out, x)


def broadcast_(x: torch.Tensor, axis: Axis, source: int = 0) -> torch.Tensor:
    """Overwrite `x` with the tensor of the rank at coordinate `source`."""
    if axis.size > 1:
        with named("broadcast", axis):
            dist.broadcast(x, src=axis.ranks[source], group=axis.group)
    return x


def equalize_(x: torch.Tensor, axis: Axis) -> None:
    """Give `x`, of any dtype and device, the values that it has on the axis' first rank. Does nothing on the meta device."""
    if axis.size > 1 and not x.is_meta:
        device = torch.device("cuda") if dist.get_backend(axis.group) == "nccl" else x.device
        sent = x.detach().to(device).contiguous()
        broadcast_(sent.view(-1).view(torch.uint8), axis)
        if sent.is_cuda and not x.is_cuda:
            wait_for_gpu("broadcast", axis)
        x.data = sent.to(x.device)


def gather_rows(values: torch.Tensor, axis: Axis, operation: str = "all-gather") -> torch.Tensor:
    """The ranks' small vectors as the rows of a matrix [ranks, n], the same bits on each rank."""
    return all_gather(values.reshape(1, -1), axis, operation=operation).wait()

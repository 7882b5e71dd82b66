"""Gathering and splitting the feature dim across the ranks of an axis, each the other's gradient."""

from __future__ import annotations

from typing import Any

import torch

from pymesh3d.axis import Axis
from pymesh3d.comm.collectives import all_gather
from pymesh3d.ops.function import first_order, owned


def _gather(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    return all_gather(x.movedim(-1, 0), axis).wait().movedim(0, -1).contiguous()


def _split(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    return x.chunk(axis.size, dim=-1)[axis.rank].clone(memory_format=torch.contiguous_format)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: Axis) -> torch.Tensor:
        ctx.axis = axis
        return owned(_gather(x, axis))

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _split(grad, ctx.axis), None


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: Axis) -> torch.Tensor:
        ctx.axis = axis
        return _split(x, axis)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _gather(grad, ctx.axis), None


@torch.compiler.disable
def gather_features(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """[..., N/ranks] -> [..., N]. Every rank goes on with the same tensor, so its gradient is that rank's part of theirs."""
    y: torch.Tensor = _Gather.apply(x, axis) if axis.size > 1 else x
    return y


@torch.compiler.disable
def split_features(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """[..., N] -> this rank's [..., N/ranks] of a tensor that every rank holds."""
    y: torch.Tensor = _Split.apply(x, axis) if axis.size > 1 else x
    return y

"""What a column-parallel layer gathers once more in its backward pass, begun before that pass gets there: while the row-parallel layer that
came after it computes, and what stands between them. Under its own product the link carries the gradient. (1B model, tp 2 on 2 x H200: 492
ms a step, 495 where it begins there.)
"""

from __future__ import annotations

import torch
from torch.utils.weak import TensorWeakRef

from pymesh3d.axis import Axis
from pymesh3d.comm.collectives import Pending
from pymesh3d.comm.copies import Copied
from pymesh3d.comm.registry import register, take
from pymesh3d.comm.workspace import raw_stream
from pymesh3d.ops.fused import gathered_aside, gathers_aside


class Input:
    """What a column-parallel layer gathered in its forward pass. It lives no longer for this."""

    def __init__(self, x: torch.Tensor, axis: Axis) -> None:
        self._x, self._version, self._axis = TensorWeakRef(x), x._version, axis
        self._pending: Copied | None = None

    def begin(self) -> None:
        """Gather it, if it is there still, as it was: the layer's backward pass says what is wrong otherwise."""
        x = self._x()
        if x is not None and x._version == self._version:
            self._pending = gathered_aside(x, self._axis)

    def take(self) -> Pending | None:
        """What has been begun, if it stands still, and belongs to the current stream."""
        pending, self._pending = self._pending, None
        if pending is None or pending.superseded or pending.stream != raw_stream(pending.device):
            return None
        return pending


def remember(x: torch.Tensor, axis: Axis, trained: bool) -> Input | None:
    """For the next row-parallel layer along this axis, which shall not find an earlier one. Not where hooks keep something else in place of
    x (to compute it again, or on the host): whether it is here then is not the same on all ranks.
    """
    take(_name(axis))
    if not trained or not gathers_aside(x, axis) or torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        return None
    one = Input(x, axis)
    register(_name(axis), one)
    return one


def recall(x: torch.Tensor, axis: Axis, trained: bool) -> Input | None:
    """What a layer before has remembered, once."""
    one: Input | None = take(_name(axis))
    return one


def _name(axis: Axis) -> str:
    return f"input of a layer over {axis.key}"

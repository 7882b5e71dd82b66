"""What a column-parallel layer gathers once more in its backward pass, begun before that pass gets there: while the row-parallel layer that
came after it computes, and what stands between them. Under its own product the link is busy.
"""

from __future__ import annotations

import weakref

import torch
from torch.utils.weak import TensorWeakRef

from pymesh3d.axis import Axis
from pymesh3d.comm.collectives import Pending
from pymesh3d.comm.copies import Copied
from pymesh3d.ops.fused import gathered_aside


class Input:
    """What a column-parallel layer gathered in its forward pass. Only what was kept can be gathered ahead, not what is computed again."""

    def __init__(self, x: torch.Tensor, axis: Axis) -> None:
        self._x, self._axis = TensorWeakRef(x), axis
        self._pending: Copied | None = None

    def begin(self) -> None:
        """Gather it, if it is still there."""
        x = self._x()
        if x is not None:
            self._pending = gathered_aside(x, self._axis)

    def take(self) -> Pending | None:
        """What has been begun, unless other rows stand in its place by now."""
        pending, self._pending = self._pending, None
        return pending if pending is not None and not pending.overwritten else None


_latest: weakref.WeakValueDictionary[str, Input] = weakref.WeakValueDictionary()  # of each axis, since its last row-parallel layer


def remember(x: torch.Tensor, axis: Axis) -> Input:
    """For the next row-parallel layer along this axis."""
    one = _latest[axis.key] = Input(x, axis)
    return one


def recall(axis: Axis) -> Input | None:
    """What the layer before has remembered, once."""
    return _latest.pop(axis.key, None)

"""Point-to-point channels between neighbouring pipeline stages.

One channel a neighbour and direction, each with a process group of its own, so that what waits on one never blocks the
other; all are made and used once at start, in one global order. A channel is a queue: what is sent first is received first.
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from pymesh3d.mesh import Axis, Mesh, named

ON_THE_WAY = 2  # tensors that a channel keeps while they are sent; a receiver gets ready for one while it works on another


class Channel:
    """One direction between two ranks. The sender calls `send`, the receiver `post` (early) and `take` (when it needs the tensor)."""

    def __init__(self, axis: Axis, *, sender: bool, operation: str) -> None:
        self._axis = axis
        self._sender = sender
        self._operation = operation
        self._sent: collections.deque[tuple[dist.Work, torch.Tensor, int]] = collections.deque()
        self._posted: collections.deque[tuple[dist.Work, torch.Tensor, int]] = collections.deque()

    def send(self, tensor: torch.Tensor, microbatch: int) -> None:
        """Start sending. The tensor itself is kept, not a copy, until it has left: drop it freely, but do not write into it.

        With `ON_THE_WAY` tensors under way it first waits for the oldest. Schedules are checked with sends that wait every time.
        """
        assert self._sender, "this end of the channel receives"
        while len(self._sent) >= ON_THE_WAY:
            self._finish_oldest()
        tensor = tensor.detach().contiguous()
        with self._named(microbatch):
            self._sent.append((self._start(dist.isend, tensor, self._axis.ranks[1]), tensor, microbatch))

    def post(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device, microbatch: int) -> None:
        """Get ready to receive the next tensor."""
        assert not self._sender, "this end of the channel sends"
        tensor = torch.empty(tuple(shape), dtype=dtype, device=device)
        with self._named(microbatch):
            self._posted.append((self._start(dist.irecv, tensor, self._axis.ranks[0]), tensor, microbatch))

    def take(self) -> torch.Tensor:
        """The oldest posted tensor, once it has arrived."""
        work, tensor, microbatch = self._posted.popleft()
        with self._named(microbatch):
            work.wait()
        return tensor

    def flush(self) -> None:
        """Wait until all that was sent has left."""
        while self._sent:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        work, _, microbatch = self._sent.popleft()
        with self._named(microbatch):
            work.wait()

    def _named(self, microbatch: int) -> contextlib.AbstractContextManager[None]:
        return named(f"{'send' if self._sender else 'receive'} of {self._operation} of microbatch {microbatch}", self._axis)

    def _start(self, operation: Callable[..., Any], tensor: torch.Tensor, peer: int) -> dist.Work:
        # As a batch of one: with NCCL a bare isend would make a second communicator for the pair.
        (work,) = dist.batch_isend_irecv([dist.P2POp(operation, tensor, peer, group=self._axis.group)])
        return work


class Channels:
    """The channels of one rank of a pipeline, None at its ends: activations go from stage to stage, gradients the other way."""

    activations_in: Channel | None
    activations_out: Channel | None
    gradients_in: Channel | None
    gradients_out: Channel | None

    def __init__(self, mesh: Mesh) -> None:
        self.activations_in = self.activations_out = self.gradients_in = self.gradients_out = None
        for stage in range(mesh.pp.size - 1):  # one global order: stage by stage, activations first
            pairs = mesh.along("pp")[:, stage : stage + 2]
            for line in mesh.new_lines("pp", pairs.tolist()):
                if line.rank == 0:
                    self.activations_out = _connect(line, "activations", mesh.device)
                else:
                    self.activations_in = _connect(line, "activations", mesh.device)
            for line in mesh.new_lines("pp", pairs[:, ::-1].tolist()):
                if line.rank == 0:
                    self.gradients_out = _connect(line, "gradients", mesh.device)
                else:
                    self.gradients_in = _connect(line, "gradients", mesh.device)

    def flush(self) -> None:
        """Wait until all that was sent has left."""
        for channel in (self.activations_out, self.gradients_out):
            if channel is not None:
                channel.flush()


def _connect(line: Axis, operation: str, device: torch.device) -> Channel:
    """The channel from the first to the second rank of `line`, used once so that its connection stands."""
    channel = Channel(line, sender=line.rank == 0, operation=operation)
    if line.rank == 0:
        channel.send(torch.zeros(1, dtype=torch.float32, device=device), 0)
        channel.flush()
    else:
        channel.post((1,), torch.float32, device, 0)
        channel.take()
    return channel

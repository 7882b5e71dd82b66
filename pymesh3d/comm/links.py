"""Two transports that join neighbouring stages: NCCL through our own bindings, and torch.distributed.

A link goes both ways. In each direction it is a queue: what is sent first is received first.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import torch
import torch.distributed as dist

from pymesh3d.axis import Axis, named, raise_named
from pymesh3d.comm import native

if TYPE_CHECKING:
    from pymesh3d._C import Link as NativeLink

ON_THE_WAY = 2  # tensors that torch.distributed keeps while they are sent; a receiver gets ready for one while it works on another


@dataclasses.dataclass(frozen=True)
class Expected:
    """A tensor that is going to come."""

    shape: Sequence[int]
    dtype: torch.dtype
    microbatch: int

    @functools.cached_property
    def _strides(self) -> tuple[int, ...]:
        return tuple(itertools.accumulate(self.shape[:0:-1], operator.mul, initial=1))[::-1] if self.shape else ()

    def memory(self, device: torch.device) -> torch.Tensor:
        """Where it may be put."""
        return torch.empty_strided(self.shape, self._strides, dtype=self.dtype, device=device)  # 1.4 us less than torch.empty


class Link(Protocol):
    """What joins a rank with the one before or after it in the pipeline."""

    def send(self, tensor: torch.Tensor, microbatch: int, then: Expected | None = None) -> None:
        """Start sending and, in the same transfer, get ready to receive `then`.

        The tensor itself is kept, not a copy, until it has left: drop it freely, but do not write into it.
        """

    def post(self, expected: Expected) -> None:
        """Get ready to receive."""

    def take(self) -> torch.Tensor:
        """The oldest tensor that was expected, once it has arrived; on CUDA the current stream waits for it, not the host."""

    def flush(self) -> None:
        """Wait until all that was sent has left; on CUDA the current stream waits, not the host."""


class TorchLink:
    """A link over process groups of torch.distributed, one a direction, so that what waits in one never blocks the other.

    With `ON_THE_WAY` tensors under way a send first waits for the oldest. Schedules are checked with ranks that, before they compute
    again, wait for all that they have sent.
    """

    def __init__(self, out: Axis, into: Axis, *, sends: str, receives: str, device: torch.device) -> None:
        self._out, self._into, self._sends, self._receives, self._device = out, into, sends, receives, device
        self._sent: collections.deque[tuple[dist.Work, torch.Tensor, int]] = collections.deque()
        self._posted: collections.deque[tuple[dist.Work, torch.Tensor, int]] = collections.deque()

    def send(self, tensor: torch.Tensor, microbatch: int, then: Expected | None = None) -> None:
        while len(self._sent) >= ON_THE_WAY:
            self._finish_oldest()
        tensor = tensor.detach().contiguous()
        with self._sending(microbatch):
            self._sent.append((_start(dist.isend, tensor, self._out), tensor, microbatch))
        if then is not None:
            self.post(then)

    def post(self, expected: Expected) -> None:
        tensor = expected.memory(self._device)
        with self._receiving(expected.microbatch):
            self._posted.append((_start(dist.irecv, tensor, self._into), tensor, expected.microbatch))

    def take(self) -> torch.Tensor:
        work, tensor, microbatch = self._posted.popleft()
        with self._receiving(microbatch):
            work.wait()
        return tensor

    def flush(self) -> None:
        while self._sent:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        work, _, microbatch = self._sent.popleft()
        with self._sending(microbatch):
            work.wait()

    def _sending(self, microbatch: int) -> named:
        return named(f"send of {self._sends} of microbatch {microbatch}", self._out)

    def _receiving(self, microbatch: int) -> named:
        return named(f"receive of {self._receives} of microbatch {microbatch}", self._into)


def _start(operation: Callable[..., Any], tensor: torch.Tensor, line: Axis) -> dist.Work:
    # As a batch of one: with NCCL a bare isend would make a second communicator for the pair.
    (work,) = dist.batch_isend_irecv([dist.P2POp(operation, tensor, line.ranks[1 - line.rank], group=line.group)])
    return work


class NcclLink:
    """A link over a communicator of our own, on streams of its own: one C++ call and one kernel a transfer, and the host never waits.

    What one end sends, the other must receive in the same order, as the schedules see to. `stream` gives the stream that computes. A sent
    tensor is kept until its transfer has finished.
    """

    def __init__(
        self, native: NativeLink, line: Axis, *, sends: str, receives: str, device: torch.device, stream: Callable[[], int]
    ) -> None:
        self._native, self._line, self._sends, self._receives, self._device, self._stream = native, line, sends, receives, device, stream
        self._sent: collections.deque[tuple[int, torch.Tensor, int]] = collections.deque()
        self._posted: collections.deque[tuple[int, torch.Tensor, int]] = collections.deque()
        self._failed: list[torch.Tensor | None] = []  # of transfers that raised: NCCL may have them nevertheless, and write into them later

    # All that is done here costs the host time on every message: no context managers, and texts are made when they are needed.

    def send(self, tensor: torch.Tensor, microbatch: int, then: Expected | None = None) -> None:
        tensor, memory = tensor.contiguous(), None
        try:
            if then is None:
                number, finished = self._native.transfer(tensor.data_ptr(), tensor.nbytes, 0, 0, self._stream())
            else:
                memory = then.memory(self._device)
                number, finished = self._native.transfer(tensor.data_ptr(), tensor.nbytes, memory.data_ptr(), memory.nbytes, self._stream())
                self._posted.append((number, memory, then.microbatch))
        except native.TransferError as error:
            self._fail(error, f"send of {self._sends} of microbatch {microbatch}", tensor, memory)
        sent = self._sent
        sent.append((number, tensor, microbatch))
        while sent[0][0] <= finished:  # this one is not among them yet
            sent.popleft()

    def post(self, expected: Expected) -> None:
        memory = expected.memory(self._device)
        try:
            number, _ = self._native.transfer(0, 0, memory.data_ptr(), memory.nbytes, self._stream())
        except native.TransferError as error:
            self._fail(error, f"receive of {self._receives} of microbatch {expected.microbatch}", memory)
        self._posted.append((number, memory, expected.microbatch))

    def _fail(self, error: Exception, operation: str, *memory: torch.Tensor | None) -> NoReturn:
        """Raise what a transfer raised, named where its peer may be the cause, and keep the memory that it has."""
        self._failed += memory
        if isinstance(error, native.LinkError):
            raise_named(error, operation, self._line)
        raise error

    def take(self) -> torch.Tensor:
        number, tensor, microbatch = self._posted[0]  # and stays there if it fails: NCCL may write into it later
        try:
            self._native.join(number, self._stream())
        except native.LinkError as error:
            raise_named(error, f"receive of {self._receives} of microbatch {microbatch}", self._line)
        self._posted.popleft()
        return tensor

    def flush(self) -> None:
        if self._sent:
            number, _, microbatch = self._sent[-1]
            try:
                self._native.join(number, self._stream())
            except native.LinkError as error:
                raise_named(error, f"send of {self._sends} of microbatch {microbatch}", self._line)
            self._sent.clear()  # memory that is freed from here on is used again only behind the join

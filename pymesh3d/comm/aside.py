"""A stream beside the one that computes, on which copies are made and flags told and waited for; on the CPU all is done at once."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import torch

from pymesh3d.comm import native
from pymesh3d.comm.flags import BITS, Flags
from pymesh3d.comm.workspace import raw_stream
from pymesh3d.errors import SharingError

if TYPE_CHECKING:
    from pymesh3d._C import Copier


@contextlib.contextmanager
def following(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Within it `stream` is the current one, and what it does there comes after all that the one before has by now. None: as it is."""
    if stream is None:
        yield
        return
    stream.wait_stream(torch.cuda.current_stream(stream.device))
    with torch.cuda.stream(stream):
        yield


class Steps:
    """What is done there, in order, with the number of a call: prepared once, it costs the host one call each time."""

    def __init__(self, flags: Flags, device: torch.device) -> None:
        self._flags = flags
        self._awaited: list[int] = []
        self.there = native.steps() if device.type == "cuda" else None
        self._here: list[Callable[[int], object]] = []  # on the CPU

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        """Of contiguous tensors of one dtype, which whoever prepares this keeps alive."""
        assert to.dtype == source.dtype and to.shape == source.shape, f"{source.dtype} {source.shape} to {to.dtype} {to.shape}"
        if self.there is not None:
            self.there.copy(to.data_ptr(), source.data_ptr(), source.nbytes)
        else:
            self._here.append(lambda _: to.copy_(source))

    def tell(self, index: int) -> None:
        """See `Flags`."""
        if self.there is not None:
            for flag in self._flags.told[index]:
                self.there.tell(flag)
        else:
            self._here.append(lambda call: self._flags.tell(index, call))

    def tell_here(self, index: int) -> None:
        """For `Flags.wait_here`."""
        if self.there is not None:
            self.there.tell(self._flags.told[index][self._flags.rank])

    def wait(self, index: int) -> None:
        """See `Flags`."""
        if self.there is not None:
            for flag in self._flags.awaited[index]:
                self.there.wait_until(flag)
            self._awaited.append(index)
        else:
            self._here.append(lambda call: self._flags.wait(index, call))

    def take(self, call: int) -> None:
        """On the CPU."""
        for step in self._here:
            step(call)

    def watch(self, call: int) -> None:
        """Look after the flags that are waited for with this call."""
        for index in self._awaited:
            self._flags.watch(index, call)


class Aside:
    """Such a stream. Raises SharingError where the GPU's driver has no such calls: alike on all ranks of a host."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copier: Copier | None = None
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._copier = native.copier()
            if self._copier is None:
                raise SharingError("the compiled part has no copy engines here")
            self._stream = torch.cuda.ExternalStream(self._copier.stream, device)

    def start(self, steps: Steps, call: int = 0) -> None:
        """Take the steps after all that the current stream has by now."""
        if self._copier is None:
            steps.take(call)
            return
        assert steps.there is not None, "they were made for a GPU"
        self._copier.start(steps.there, call % BITS, raw_stream(self._device))
        steps.watch(call)

    def join(self) -> None:
        """What the current stream does next finds all that was started."""
        if self._copier is not None:
            self._copier.join(raw_stream(self._device))

    def following(self) -> AbstractContextManager[None]:
        """Within it kernels are started there, after all that the current stream has by now."""
        return following(self._stream)

    def __call__(self) -> AbstractContextManager[object]:
        """Within it kernels are started there, after what was started there."""
        return contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

"""Flags that ranks set in each other's memory and wait for, in the order of a stream: on GPUs no processor waits, and the host neither."""

from __future__ import annotations

import threading
import time

import torch

from pymesh3d.axis import Axis
from pymesh3d.comm import native
from pymesh3d.comm.symmetric import SymmetricBuffer
from pymesh3d.comm.workspace import Waits, as_int32, raw_stream
from pymesh3d.errors import SharingError
from pymesh3d.triton_kernels.signals import tell_ranks, wait_for_ranks

BITS = 1 << 32  # a flag is a number of so many values, which counts on from 0
ENDED = 1 << 30  # calls that are taken for told once waiting has ended, also those that are yet to come


class Flags(Waits):
    """`length` flags that each rank of an axis has on every other. They count calls, so nobody needs to take them back.

    They are watched: a rank for which was waited in vain is an error that names it. All ranks must make them. Raises SharingError, on all,
    where they cannot share memory, or a GPU's streams cannot wait.
    """

    def __init__(self, op: str, axis: Axis, device: torch.device, length: int) -> None:
        super().__init__(op, axis, device)
        self.rank, self._length, self._seconds = axis.rank, length, axis.timeout.total_seconds()
        self._gpu = native.stream_calls() if device.type == "cuda" else None
        if device.type == "cuda" and self._gpu is None:  # nor on any other rank of this host
            raise SharingError(f"the compiled part cannot let streams wait here ({native.reason or 'the driver is too old'})")
        self._memory = SymmetricBuffer(4 * axis.size * length, axis, device)
        self._others = [rank for rank in range(axis.size) if rank != axis.rank]
        self._mine = self._memory.part(axis.rank, (axis.size, length), torch.int32)
        there = [self._memory.part(rank, (axis.size, length), torch.int32).data_ptr() for rank in range(axis.size)]
        here = there[axis.rank]
        self.told = [[memory + 4 * (axis.rank * length + index) for memory in there] for index in range(length)]
        self.awaited = [[here + 4 * (rank * length + index) for rank in range(axis.size)] for index in range(length)]
        self._under_way: dict[int, tuple[float, int]] = {}  # by index: until when the latest call must come
        self._lock = threading.Lock()  # of that: the thread that looks after a step checks too
        # Streams of torch's are shared: behind one that waits neither a look nor the end of all waits would come through.
        self._copier = native.copier() if device.type == "cuda" else None
        self._beside = None if self._copier is None else torch.cuda.ExternalStream(self._copier.stream, device)
        self.shared = [self._memory]  # and what else the flags are about
        axis.watched.insert(0, self)

    def tell(self, index: int, call: int) -> None:
        """All ranks see then what the current stream has done before."""
        if self._gpu is not None:
            self._gpu.tell(raw_stream(self._device), self.told[index], call % BITS)
        else:
            tell_ranks(self._table(index), self._axis.rank, self._length, as_int32(call))

    def wait(self, index: int, call: int) -> None:
        """What the current stream does next finds what all ranks have told with this call, or a later one; on the CPU all others."""
        if self._gpu is not None:
            self._gpu.wait_until(raw_stream(self._device), self.awaited[index], call % BITS)
            self.watch(index, call)
        else:
            wait_for_ranks(self._table(index), self.counters, self._axis.rank, self._length, as_int32(call), self._seconds)

    def wait_here(self, index: int, call: int) -> None:
        """What the current stream does next finds what another stream of this GPU has told with this call, or a later one."""
        if self._gpu is not None:
            self._gpu.wait_until(raw_stream(self._device), [self.awaited[index][self._axis.rank]], call % BITS)

    def watch(self, index: int, call: int) -> None:
        """A stream waits for this call, or will: whoever has not told within the time limit is an error. For the latest of each flag."""
        with self._lock:
            self._under_way[index] = time.monotonic() + self._seconds, call

    def _table(self, index: int) -> torch.Tensor:
        return self._memory.addresses + 4 * index

    def check(self) -> None:
        """Raise RuntimeError that names a rank for which was waited in vain."""
        super().check()
        now = time.monotonic()
        with self._lock:
            late = {index: call for index, (until, call) in self._under_way.items() if now > until}
        if not late:
            return
        found = self._read()
        for index, call in late.items():
            for rank in self._others:
                if as_int32(int(found[rank, index]) - call) < 0:
                    raise RuntimeError(f"rank {self._axis.ranks[rank]} did not send its part of {self._op} within the time limit")
        with self._lock:
            self._under_way = {index: wait for index, wait in self._under_way.items() if late.get(index) != wait[1]}

    def _read(self) -> torch.Tensor:
        """What the others have told, beside whatever stream waits for it."""
        with torch.cuda.stream(self._beside):
            return self._mine.cpu()

    def abort(self, seconds: float) -> bool:
        """End all waits, also of what a host that stands in the middle of a step has yet to start."""
        if self._gpu is None:
            return super().abort(seconds)
        with self._lock:
            last = max((call for _, call in self._under_way.values()), default=0)
        with torch.cuda.stream(self._beside):
            self._mine.copy_(torch.full(self._mine.shape, as_int32(last + ENDED), dtype=torch.int32, pin_memory=True), non_blocking=True)
        return True

    @property
    def shared_bytes(self) -> int:
        """How much memory of this rank it shares with others."""
        return sum(buffer.size for buffer in self.shared)

    def close(self) -> None:
        """Give the memory back."""
        self.shared.clear()

    def _named(self, tile: int) -> str:
        return "its part"

"""What products that talk to other ranks share with them: made when it is first needed, and larger when it is too small."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from pymesh3d.axis import Axis
from pymesh3d.comm.registry import found_or_made
from pymesh3d.comm.symmetric import SymmetricBuffer
from pymesh3d.errors import ConfigError, SharingError
from pymesh3d.triton_kernels.matmul_reduce_scatter import Slots
from pymesh3d.triton_kernels.signals import Counters

T = TypeVar("T")
Kind = TypeVar("Kind", bound="Workspace")
ALIGNED = 512  # bytes: of each half of the slots
MOST = 1024  # products that are prepared


class Waits:
    """What the kernels of one op, which wait for other ranks of an axis, count in. It is watched: a rank that did not come is an error."""

    def __init__(self, op: str, axis: Axis, device: torch.device) -> None:
        self._op, self._axis, self._device = op, axis, device
        self.counters = Counters.on(device)
        self._trouble = torch.full((1,), -1, dtype=torch.int64, pin_memory=device.type == "cuda")

    def check(self) -> None:
        """Raise RuntimeError that names the rank for which a call has waited in vain."""
        for counters in self._all_counters():
            missing = counters.missing()
            if missing is not None:
                rank, tile = missing
                raise RuntimeError(f"rank {self._axis.ranks[rank]} did not send {self._named(tile)} of {self._op} within the time limit")

    def _named(self, tile: int) -> str:
        """What a kernel that waits calls a tile, in words."""
        return f"tile {tile}"

    def abort(self, seconds: float) -> bool:
        """End all waits, of which each looks at this number. A copy needs no room on a GPU that is full of those that wait."""
        aside = torch.cuda.stream(torch.cuda.Stream(self._device)) if self._device.type == "cuda" else contextlib.nullcontext()
        with aside:
            for counters in self._all_counters():
                counters.trouble.copy_(self._trouble, non_blocking=self._device.type == "cuda")
        return True

    def _all_counters(self) -> list[Counters]:
        return [self.counters]

    @property
    def shared_bytes(self) -> int:
        """How much memory of this rank it shares with others: torch does not count that."""
        return 0

    def close(self) -> None:
        """Give up what memory there is."""


class Workspace(Waits):
    """The slots and counters of one op along one axis, on one stream.

    No call may return or keep its memory, which the next call of the same op writes into.
    """

    def __init__(self, op: str, axis: Axis, device: torch.device) -> None:
        super().__init__(op, axis, device)
        self._memory: SymmetricBuffer | None = None
        self._flags: SymmetricBuffer | None = None
        self._slots: Slots | None = None
        self.parts: list[torch.Tensor] = []  # every rank's slots, bytes
        self.refused = ""  # why ranks could not share what was asked for
        self._prepared: dict[Any, Any] = {}
        self.captured = False  # whether a CUDA graph may use what there is
        self._kept: list[tuple[Counters, SymmetricBuffer | None, SymmetricBuffer | None]] = []  # what such graphs use, since it grew

    def slots(self, size: int, length: int) -> Slots:
        """At least so many bytes and flags. All ranks must ask for the same. Raises ConfigError while a CUDA graph is captured, and
        SharingError where ranks cannot share so much.
        """
        slots = self._slots
        if slots is not None and size <= slots.size and length <= slots.length:
            return slots
        if capturing(self._device):
            raise ConfigError(
                f"{size:,} bytes for {self._op} while a CUDA graph is captured",
                "what ranks share is made by all of them at once, which a graph cannot",
                "Run the step once with these shapes before it is captured",
            )
        size, length = (max(size, slots.size), max(length, slots.length)) if slots else (size, length)
        size = -(-max(size, 1) // ALIGNED) * ALIGNED
        self._prepared.clear()
        self._slots, self.parts = None, []  # the new memory is made by all ranks together, when none of them uses the old any more
        if self.captured:
            self._kept.append((self.counters, self._memory, self._flags))
            self.counters, self.captured = Counters.on(self._device), False
        try:
            self._memory = SymmetricBuffer(2 * size, self._axis, self._device)
            self._flags = SymmetricBuffer(4 * self._axis.size * length, self._axis, self._device)
        except SharingError as error:
            self._memory = self._flags = None
            self.refused = str(error)
            raise
        self.counters.calls.zero_()
        self._slots = Slots(self._memory.addresses, self._flags.addresses, size, length)
        self.parts = [self._memory.part(rank, (2 * size,), torch.uint8) for rank in range(self._axis.size)]
        return self._slots

    def prepared(self, key: Any, prepare: Callable[[], T]) -> T:
        """What `prepare` has returned for this key, as long as the slots are the same."""
        found: T | None = self._prepared.get(key)
        if found is None:
            if len(self._prepared) >= MOST:
                self._prepared.clear()
            found = prepare()  # which may need larger slots
            self._prepared[key] = found
        return found

    def part(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """What begins this rank's slots."""
        assert self._memory is not None, "there are no slots yet"
        return self._memory.part(self._axis.rank, shape, dtype)

    def flag_address(self, rank: int) -> int:
        """Where on another rank the first of the flags lies that this one sets there."""
        assert self._flags is not None and self._slots is not None, "there are no flags yet"
        return self._flags.part(rank, (1,), torch.int32, 4 * self._axis.rank * self._slots.length).data_ptr()

    def _all_counters(self) -> list[Counters]:
        return [self.counters, *(counters for counters, *_ in self._kept)]

    @property
    def shared_bytes(self) -> int:
        """How much memory of this rank it shares with others, what graphs keep included."""
        buffers = [self._memory, self._flags, *(buffer for _, *kept in self._kept for buffer in kept)]
        return sum(buffer.size for buffer in buffers if buffer is not None)

    def close(self) -> None:
        """Give the memory back."""
        self._prepared.clear()
        self._kept.clear()
        self._slots = self._memory = self._flags = None
        self.parts = []


_last: dict[torch.device, torch.cuda.Stream] = {}  # on which each GPU has last run what waits for other ranks


def take_turns(device: torch.device) -> None:
    """Let what is started next wait for all such kernels that were started before, on whatever stream.

    Each fills the GPU. If two of them began in one order here and in another on the next rank, each would wait for the rank that has no
    room for it. In a CUDA graph that is captured the order is the graph's.
    """
    if device.type != "cuda":
        return
    stream, last = torch.cuda.current_stream(device), _last.get(device)
    if stream == last or torch.cuda.is_current_stream_capturing():
        return
    if last is not None:
        stream.wait_stream(last)
    _last[device] = stream


def workspace(op: str, axis: Axis, device: torch.device) -> Workspace:
    """That of an op along an axis, on the current stream, whose turn it is then. It goes with the mesh."""
    take_turns(device)
    one = on_this_stream(Workspace, op, axis, device)
    if capturing(device):
        one.captured = True
    return one


def on_this_stream(kind: type[Kind], op: str, axis: Axis, device: torch.device) -> Kind:
    """The workspace of a kind that belongs to an op along an axis, on the current stream. It goes with the mesh."""

    def make() -> Kind:
        made = kind(op, axis, device)
        axis.watched.insert(0, made)  # which keeps it
        return made

    one: Kind = found_or_made(f"{op} over {axis.key} on stream {raw_stream(device)}", make)
    return one


def capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is captured on the current stream."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def raw_stream(device: torch.device) -> int:
    """The current one of a GPU, 0 on the CPU."""
    return torch._C._cuda_getCurrentRawStream(device.index) if device.type == "cuda" else 0


def as_int32(number: int) -> int:
    """Its last 32 bits, as flags have it."""
    return (number + (1 << 31)) % (1 << 32) - (1 << 31)

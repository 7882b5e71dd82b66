"""How dp ranks exchange what they have of a bucket where they share memory: kernels read it where it lies, and copies fetch parameters."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Iterator, Sequence

import torch

from pymesh3d.axis import Axis
from pymesh3d.comm.collectives import Pending
from pymesh3d.comm.symmetric import SymmetricBuffer
from pymesh3d.comm.workspace import Waits
from pymesh3d.dp.buckets import Bucket
from pymesh3d.dp.exchange import wire_of
from pymesh3d.triton_kernels.signals import meet, tell_ranks, wait_for_ranks
from pymesh3d.triton_kernels.zero_reduce import reduce_shard, round_in_place

PROGRAMS = {"cuda": (16, 528), "cpu": (1, 2)}  # that sum a shard, beside a backward pass, to leave it room, and alone
ALIGNED = 512  # bytes


class SharedMemory(Waits):
    """The same as `Collectives`, the same bits too, but that nothing is copied to be sent: each rank reads its shard of a bucket out of the
    memory of all others, once these have told that it is there.

    Whoever changes memory that was read must know that all have done so: from an exchange that all took part in after their reads, as of
    the norm, or from `meet`. Only with memory that was lent this sees to it itself.
    """

    def __init__(self, axis: Axis, device: torch.device, buckets: Sequence[Bucket], *, wire: torch.dtype | None, everywhere: bool) -> None:
        """Raises SharingError, on all ranks, where they cannot share memory."""
        super().__init__("gradients", axis, device)
        self._wire, self._everywhere, self._seconds = wire, everywhere, axis.timeout.total_seconds()
        self._number = {bucket: number for number, bucket in enumerate(buckets)}
        self._length = 2 * len(buckets) + 1  # flags that a rank sets on another: a bucket is there, it has been read, and of `meet`
        self._flags = SymmetricBuffer(4 * axis.size * self._length, axis, device)
        indices = torch.arange(self._length, dtype=torch.int64, device=device)
        self._tables = list((self._flags.addresses + 4 * indices[:, None]).unbind())
        self._calls = [0] * len(buckets)
        self._beside, self._alone = PROGRAMS[device.type]
        self._squares = torch.zeros(len(buckets), self._alone, dtype=torch.float64, device=device)
        self._buffers: list[SymmetricBuffer] = []
        self._places: dict[int, tuple[SymmetricBuffer, int]] = {}  # by the address of what lies there: in which buffer, at which byte
        self._lent: dict[Bucket, torch.Tensor] = {}
        self._events: dict[Bucket, torch.cuda.Event] = {}
        on_gpu = device.type == "cuda"
        self._stream, self._copying = (torch.cuda.Stream(device) if on_gpu else None for _ in range(2))
        axis.watched.insert(0, self)

    def memory(self, wanted: Sequence[tuple[int, torch.dtype]]) -> list[torch.Tensor]:
        """See `Exchange`."""
        places, end = [], 0
        for size, dtype in wanted:
            places.append(end)
            end += -(-size * dtype.itemsize // ALIGNED) * ALIGNED
        return self._parts(SymmetricBuffer(max(end, ALIGNED), self._axis, self._device), wanted, places)

    def _parts(self, buffer: SymmetricBuffer, wanted: Sequence[tuple[int, torch.dtype]], places: Sequence[int]) -> list[torch.Tensor]:
        self._buffers.append(buffer)
        parts = [buffer.part(self._axis.rank, (size,), dtype, place) for (size, dtype), place in zip(wanted, places, strict=True)]
        self._places |= {part.data_ptr(): (buffer, place) for part, place in zip(parts, places, strict=True)}
        return parts

    def addresses(self, flat: torch.Tensor) -> torch.Tensor:
        """Where on each rank lies what `flat` is here, int64 [ranks]."""
        buffer, place = self._places[flat.data_ptr()]
        return buffer.addresses + place

    def reserve(self, buckets: Sequence[Bucket]) -> None:
        """See `Exchange`."""
        if not buckets:
            return
        sizes = [-(-bucket.size * bucket.grad_dtype.itemsize // ALIGNED) * ALIGNED for bucket in buckets]
        room = max(*sizes, 2 * int(statistics.median_low(sizes)))
        places, end = [], 0
        for size in sizes:
            begin = end if end + size <= room else 0
            places.append(begin)
            end = begin + size
        parts = self._parts(
            SymmetricBuffer(room, self._axis, self._device), [(bucket.size, bucket.grad_dtype) for bucket in buckets], places
        )
        self._lent = dict(zip(buckets, parts, strict=True))

    def lend(self, bucket: Bucket) -> torch.Tensor:
        """See `Exchange`."""
        if any(other.grads.numel() for other in self._in_the_way(bucket)):
            return torch.zeros(bucket.size, dtype=bucket.grad_dtype, device=bucket.device)  # gradients come in an unusual order
        self._until_read(bucket)
        return self._lent[bucket].zero_()

    def _in_the_way(self, bucket: Bucket) -> list[Bucket]:
        """Others whose memory overlaps."""

        def span(one: Bucket) -> tuple[int, int]:
            begin = self._lent[one].data_ptr()
            return begin, begin + self._lent[one].nbytes

        begin, end = span(bucket)
        return [one for one in self._lent if one is not bucket and span(one)[0] < end and span(one)[1] > begin]

    def _until_read(self, bucket: Bucket) -> None:
        """What is enqueued from now on finds that nobody needs any more what has been where this bucket is going to be."""
        for other in (bucket, *self._in_the_way(bucket)):
            call = self._calls[self._number[other]]
            if call:
                if other in self._events:
                    torch.cuda.current_stream().wait_event(self._events[other])
                self._wait(len(self._number) + self._number[other], call)

    def _move_in(self, bucket: Bucket) -> None:
        """Put gradients that were lent other memory where the ranks look for them."""
        memory = self._lent.get(bucket)
        if memory is None or bucket.grads.data_ptr() == memory.data_ptr():
            return
        for other in self._in_the_way(bucket):
            if other.grads.numel():
                other.show_grads(other.grads.clone())
        self._until_read(bucket)
        memory.copy_(bucket.grads)
        bucket.show_grads(memory)

    def reduce(self, bucket: Bucket, out: torch.Tensor, *, add: bool = False, beside: bool = False, last: bool = False) -> None:
        """See `Exchange`."""
        number = self._number[bucket]
        self._move_in(bucket)
        self._calls[number] += 1
        call, wire, rank = self._calls[number], wire_of(bucket, self._wire), self._axis.rank
        with self._aside(self._stream):
            addresses = self.addresses(bucket.grads)
            if not beside:  # then the links are what takes time; beside a pass it is memory
                round_in_place(bucket.grads, wire)
            self._tell(number, call)
            self._wait(number, call)
            reduce_shard(
                addresses,
                out,
                self._squares[number],
                shard=rank,
                rank=rank,
                wire=wire,
                rounded=not beside,
                programs=self._beside if beside and not last else self._alone,
                add=add,
                copies=addresses if self._everywhere else None,
            )
            if bucket in self._lent:
                self._tell(len(self._number) + number, call)
                if self._stream is not None:
                    self._events[bucket] = self._stream.record_event()

    def finish(self) -> None:
        """See `Exchange`."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)

    def squares(self, buckets: Sequence[Bucket]) -> torch.Tensor | None:
        """See `Exchange`."""
        numbers = [self._number[bucket] for bucket in buckets]
        return self._squares if numbers == [*range(len(self._squares))] else self._squares[numbers]

    def meet(self) -> None:
        """See `Exchange`."""
        meet(self._tables[-1], self.counters, self._axis.rank, self._length, self._seconds)

    def gather(self, shard: torch.Tensor, out: torch.Tensor) -> Pending:
        """See `Exchange`."""
        with self._aside(self._copying):
            rank, ranks = self._axis.rank, self._axis.size
            others = [(rank + following) % ranks for following in range(1, ranks)]
            if out.data_ptr() in self._places:
                buffer, place = self._places[out.data_ptr()]
                for other in others:
                    buffer.part(other, tuple(out.shape), out.dtype, place).chunk(ranks)[rank].copy_(shard, non_blocking=True)
            else:
                buffer, place = self._places[shard.data_ptr()]
                for other in (*others, rank):
                    out.chunk(ranks)[other].copy_(buffer.part(other, tuple(shard.shape), shard.dtype, place), non_blocking=True)
            done = None if self._copying is None else self._copying.record_event()
        return Pending(out, lambda: None if done is None else torch.cuda.current_stream().wait_event(done))

    @property
    def shared_bytes(self) -> int:
        """How much memory of this rank it shares with others."""
        return sum(buffer.size for buffer in (self._flags, *self._buffers))

    def _tell(self, index: int, call: int) -> None:
        tell_ranks(self._tables[index], self._axis.rank, self._length, call)

    def _wait(self, index: int, call: int) -> None:
        wait_for_ranks(self._tables[index], self.counters, self._axis.rank, self._length, call, self._seconds)

    def _named(self, tile: int) -> str:
        return "its part"

    @contextlib.contextmanager
    def _aside(self, stream: torch.cuda.Stream | None) -> Iterator[None]:
        """On a stream of its own, after all that has been enqueued by now."""
        if stream is None:
            yield
            return
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            yield

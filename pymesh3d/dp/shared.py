"""How dp ranks exchange what they have of a bucket where they share memory: kernels read it where it lies, and copies fetch parameters."""

from __future__ import annotations

import collections
import functools
import itertools
import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from pymesh3d.axis import Axis
from pymesh3d.comm.aside import Aside, Steps
from pymesh3d.comm.flags import Flags
from pymesh3d.comm.symmetric import SymmetricBuffer
from pymesh3d.dp.buckets import Bucket
from pymesh3d.dp.exchange import wire_of
from pymesh3d.triton_kernels.zero_reduce import TILE, reduce_shard, round_in_place

PROGRAMS = {"cuda": 528, "cpu": 2}  # that sum a shard: 4 run on a multiprocessor at once
FETCHED = 32 * 2**20  # numbers of a bucket, of which each rank fetches its shard at once
SLOTS = 2  # so many pieces can be here, or under way: while one is awaited of a rank that is late, products go on
ALIGNED = 512  # bytes


class Span(NamedTuple):
    """Some numbers of one shard: where they begin in the bucket, and in all that this rank sums of it, and how many they are."""

    begin: int
    at: int
    length: int


class Fetched(NamedTuple):
    """What copies fetch of one piece of a bucket: `sum_up` starts the kernels for it."""

    bucket: Bucket
    flag: int  # that says that it is here, with the number of the call
    call: int
    sum_up: Callable[[], None]


class SharedMemory:
    """The same as `Collectives`, the same bits too, but that nothing is copied to be sent: each rank reads its shard of a bucket out of the
    memory of all others, once these have told that it is there.

    Beside a backward pass copy engines fetch it, and a kernel sums it up in between: one that waits, or reads over a link, would keep a
    multiprocessor from products that want them all. (1B model on 2 x H200: 16 programs that did slowed a step by 8.5 of 441 ms.)

    Where a bucket has more shards than ranks share memory, as in `Hierarchical`, a rank sums every so manieth, into one after the other.

    Whoever changes memory that was read must know that all have done so: from an exchange that all took part in after their reads, as of
    the norm, or from `meet`. Only with memory that was lent this sees to it itself.
    """

    def __init__(self, axis: Axis, device: torch.device, buckets: Sequence[Bucket], *, wire: torch.dtype | None, everywhere: bool) -> None:
        """Raises SharingError, on all ranks, where they cannot share memory."""
        self._axis, self._device, self._wire, self._everywhere = axis, device, wire, everywhere
        self._programs = PROGRAMS[device.type]
        self._number = {bucket: number for number, bucket in enumerate(buckets)}
        self._calls = [0] * len(buckets)
        self._awaited = [0] * len(buckets)  # of these calls: until which one others have read
        self._meetings = 0
        self._piece = FETCHED // axis.size // TILE * TILE
        cut = [self._cut(bucket) for bucket in buckets]
        self._pieces = [piece for pieces in cut for piece in pieces]
        self._squares = torch.zeros(len(self._pieces), self._programs, dtype=torch.float64, device=device)
        ends = list(itertools.accumulate(map(len, cut)))
        self._chosen: dict[tuple[int, ...], torch.Tensor] = {}  # rows of these
        self._rows = [range(end - len(pieces), end) for end, pieces in zip(ends, cut, strict=True)]  # of these, by bucket
        # Flags: by bucket, that it is there, and from `_read` on, that it has been read; `_met`; then by row, that it has been fetched.
        self._read, self._met = len(buckets), 2 * len(buckets)
        self._flags = Flags("gradients", axis, device, self._met + 1 + len(self._pieces))
        self._places: dict[int, tuple[SymmetricBuffer, int]] = {}  # by the address of what lies there: in which buffer, at which byte
        self._on_all: dict[int, torch.Tensor] = {}  # and where on each rank
        self._lent: dict[Bucket, torch.Tensor] = {}
        self._in_the_way: dict[Bucket, list[Bucket]] = {}  # of each of these: others whose memory overlaps
        self._tables: dict[tuple[int, int], list[torch.Tensor]] = {}
        self._fetches: dict[tuple[int, int], Steps] = {}
        self._summing_aside, self._gathering_aside = Aside(device), Aside(device)
        self._slots: list[torch.Tensor] = []  # for contributions of the others, where copies put them
        self._turn = 0  # which of these is next
        self._fetched: collections.deque[Fetched] = collections.deque()  # and not summed up yet, or under way

    def _cut(self, bucket: Bucket) -> list[list[Span]]:
        """What this rank sums of a bucket, in pieces that are fetched at once."""
        size, shards = bucket.shard_size, range(self._axis.rank, bucket.shards, self._axis.size)
        pieces, end = [], size * len(shards)
        for first in range(0, end, self._piece):
            last = min(first + self._piece, end)
            edges = [first, *range((first // size + 1) * size, last, size), last]
            pieces.append([Span(shards[at // size] * size + at % size, at, stop - at) for at, stop in itertools.pairwise(edges)])
        return pieces

    def memory(self, wanted: Sequence[tuple[int, torch.dtype]]) -> list[torch.Tensor]:
        """See `Exchange`."""
        places, end = [], 0
        for size, dtype in wanted:
            places.append(end)
            end += -(-size * dtype.itemsize // ALIGNED) * ALIGNED
        return self._parts(max(end, ALIGNED), wanted, places)

    def _parts(self, size: int, wanted: Sequence[tuple[int, torch.dtype]], places: Sequence[int]) -> list[torch.Tensor]:
        buffer = SymmetricBuffer(size, self._axis, self._device)
        self._flags.shared.append(buffer)
        parts = [buffer.part(self._axis.rank, (size,), dtype, place) for (size, dtype), place in zip(wanted, places, strict=True)]
        for part, place in zip(parts, places, strict=True):
            self._places[part.data_ptr()] = buffer, place
            self._on_all[part.data_ptr()] = buffer.addresses + place
        return parts

    def addresses(self, flat: torch.Tensor) -> torch.Tensor:
        """Where on each rank lies what `flat` is here, int64 [ranks]."""
        return self._on_all[flat.data_ptr()]

    def reserve(self, buckets: Sequence[Bucket]) -> None:
        """See `Exchange`. There is room for the largest one and one of the usual size: whichever comes next need not wait for the last."""
        if not buckets:
            return
        dtypes = [self.wire(bucket) for bucket in buckets]
        sizes = [-(-bucket.size * dtype.itemsize // ALIGNED) * ALIGNED for bucket, dtype in zip(buckets, dtypes, strict=True)]
        room = max(sizes) + int(statistics.median_low(sizes))
        places, end = [], 0
        for size in sizes:
            begin = end if end + size <= room else 0
            places.append(begin)
            end = begin + size
        parts = self._parts(room, [(bucket.size, dtype) for bucket, dtype in zip(buckets, dtypes, strict=True)], places)
        self._lent = dict(zip(buckets, parts, strict=True))
        spans = {bucket: (place, place + part.nbytes) for bucket, part, place in zip(buckets, parts, places, strict=True)}
        for bucket, (begin, end) in spans.items():
            others = [one for one, (first, last) in spans.items() if one is not bucket and first < end and last > begin]
            self._in_the_way[bucket] = others

    def lend(self, bucket: Bucket) -> torch.Tensor:
        """See `Exchange`."""
        if any(other.grads.numel() for other in self._in_the_way[bucket]):
            return torch.empty_like(self._lent[bucket])  # gradients come in an unusual order
        self._until_read(bucket)
        return self._lent[bucket]

    def _until_read(self, bucket: Bucket) -> None:
        """What is enqueued from now on finds that nobody needs any more what has been where this bucket is going to be."""
        inside = (bucket, *self._in_the_way[bucket])
        while any(fetched.bucket in inside for fetched in self._fetched):
            self._sum_oldest()
        for other in inside:
            number = self._number[other]
            if self._awaited[number] < self._calls[number]:
                self._awaited[number] = self._calls[number]
                self._flags.wait(self._read + number, self._calls[number])

    def _move_in(self, bucket: Bucket) -> None:
        """Put gradients that were lent other memory where the ranks look for them."""
        memory = self._lent.get(bucket)
        if memory is None or bucket.grads.data_ptr() == memory.data_ptr():
            return
        for other in self._in_the_way[bucket]:
            if other.grads.numel():
                other.show_grads(other.grads.clone())
        self._until_read(bucket)
        memory.copy_(bucket.grads)
        bucket.show_grads(memory)

    def reduce(self, bucket: Bucket, out: torch.Tensor, *, add: bool = False, beside: bool = False, last: bool = False) -> None:
        """See `Exchange`."""
        number, wire = self._number[bucket], self.wire(bucket)
        self._move_in(bucket)
        self._calls[number] += 1
        if beside and not last:
            self._fetch(bucket, out, wire, add)
            return
        with self._summing_aside.following():
            if not beside:  # then the links are what takes time; beside a pass it is memory
                round_in_place(bucket.grads, wire)
            self._flags.tell(number, self._calls[number])
            self._flags.wait(number, self._calls[number])
            for row in self._rows[number]:
                sources = [self.addresses(bucket.grads)] * len(self._pieces[row])
                self._summing(bucket, row, sources, out, wire=wire, rounded=not beside, add=add)()
            if bucket in self._lent:
                self._flags.tell(self._read + number, self._calls[number])

    def wire(self, bucket: Bucket) -> torch.dtype:
        """What contributions to its gradients are rounded to."""
        return wire_of(bucket, self._wire)

    def offer(self, buckets: Sequence[Bucket]) -> torch.Tensor:
        """In place of `reduce`, where nothing is summed during passes: what this rank contributes lies rounded at `addresses`, for whoever
        sums it up himself after a `meet`. The largest absolute value of it, float32 [], infinite if a number is not finite."""
        found = []
        for bucket in buckets:
            found.append(torch.empty(bucket.size // TILE, device=self._device))
            round_in_place(bucket.grads, self.wire(bucket), found[-1])
        return torch.cat(found).amax()

    def _fetch(self, bucket: Bucket, out: torch.Tensor, wire: torch.dtype, add: bool) -> None:
        """By copy engines, in pieces if it has many. It is summed up later, by the stream that computes: beside a product a kernel would
        take three times as long, and the product would wait."""
        number = self._number[bucket]
        for row in self._rows[number]:
            if len(self._fetched) == SLOTS:
                if self._fetched[0].bucket is bucket:
                    with self._summing_aside():
                        self._fetched.popleft().sum_up()
                else:
                    self._sum_oldest()
            self._turn = (self._turn + 1) % SLOTS
            if (row, self._turn) not in self._fetches:
                self._fetches[row, self._turn] = self._fetching(bucket, row)
            self._summing_aside.start(self._fetches[row, self._turn], self._calls[number])
            sum_up = self._summing(bucket, row, self._beginnings(bucket, row), out, wire=wire, rounded=False, add=add)
            self._fetched.append(Fetched(bucket, self._met + 1 + row, self._calls[number], sum_up))

    def _fetching(self, bucket: Bucket, row: int) -> Steps:
        """Those that fetch the others' contributions to a piece."""
        number, (buffer, place) = self._number[bucket], self._places[bucket.grads.data_ptr()]
        steps = Steps(self._flags, self._device)
        if row == self._rows[number][0]:
            steps.tell(number)
            steps.wait(number)
        for other, there in self._places_of_others(bucket.grads.dtype).items():
            lengths = [span.length for span in self._pieces[row]]
            for span, part in zip(self._pieces[row], there[: sum(lengths)].split(lengths), strict=True):
                steps.copy(part, buffer.part(other, (span.length,), there.dtype, place + span.begin * there.element_size()))
        steps.tell_here(self._met + 1 + row)
        if bucket in self._lent and row == self._rows[number][-1]:
            steps.tell(self._read + number)
        return steps

    def _places_of_others(self, dtype: torch.dtype) -> dict[int, torch.Tensor]:
        """By rank, the nearest following one first: where copies put a piece of its contribution, in this turn."""
        if not self._slots:
            longest = max(
                min(bucket.size // self._axis.size, self._piece) * self._lent.get(bucket, bucket.grads).element_size()
                for bucket in self._number
            )
            slots = torch.empty(SLOTS, self._axis.size - 1, longest, dtype=torch.uint8, device=self._device)
            self._slots = list(slots)
        others = (*range(self._axis.rank + 1, self._axis.size), *range(self._axis.rank))
        return dict(zip(others, self._slots[self._turn].view(dtype), strict=True))

    def _sum_oldest(self) -> None:
        fetched = self._fetched.popleft()
        self._flags.wait_here(fetched.flag, fetched.call)
        fetched.sum_up()

    def _beginnings(self, bucket: Bucket, row: int) -> list[torch.Tensor]:
        """For each span of a piece: where a bucket would begin whose numbers there are what was fetched of each other rank; of this rank
        where it does."""
        key = row, self._turn
        if key not in self._tables:
            dtype, first = bucket.grads.dtype, self._pieces[row][0].at
            places = self._places_of_others(dtype)
            tables = []
            for span in self._pieces[row]:
                table = {rank: there.data_ptr() + (span.at - first - span.begin) * dtype.itemsize for rank, there in places.items()}
                table[self._axis.rank] = bucket.grads.data_ptr()
                tables.append([table[rank] for rank in range(self._axis.size)])
            self._tables[key] = list(torch.tensor(tables, dtype=torch.int64, device=self._device))
        return self._tables[key]

    def _summing(
        self,
        bucket: Bucket,
        row: int,
        sources: Sequence[torch.Tensor],
        out: torch.Tensor,
        *,
        wire: torch.dtype,
        rounded: bool,
        add: bool,
    ) -> Callable[[], None]:
        """What starts the kernels for a piece, also when the bucket has given its memory back. `sources`: for each of its spans, where the
        bucket begins on each rank."""
        kernel = functools.partial(
            reduce_shard,
            squares=self._squares[row],  # of the last span: whoever has several does not ask
            rank=self._axis.rank,
            wire=wire,
            rounded=rounded,
            accumulated=bucket.grads.dtype,
            programs=self._programs,
            add=add,
            copies=self.addresses(bucket.grads) if self._everywhere else None,
        )

        def start() -> None:
            for span, contributions in zip(self._pieces[row], sources, strict=True):
                kernel(contributions, out[span.at : span.at + span.length], first=span.begin // TILE)

        return start

    def summed(self, bucket: Bucket) -> bool:
        """Whether what is enqueued from now on finds the sums of a bucket that was fetched beside a pass."""
        return all(fetched.bucket is not bucket for fetched in self._fetched)

    def finish(self) -> None:
        """See `Exchange`."""
        while self._fetched:
            self._sum_oldest()
        self._summing_aside.join()

    def squares(self, buckets: Sequence[Bucket]) -> torch.Tensor | None:
        """See `Exchange`."""
        rows = tuple(row for bucket in buckets for row in self._rows[self._number[bucket]])
        if rows not in self._chosen:  # made once: the host would wait for the GPU each time
            self._chosen[rows] = torch.tensor(rows, dtype=torch.int64, device=self._device)
        return self._squares if len(rows) == len(self._squares) else self._squares[self._chosen[rows]]

    def meet(self) -> None:
        """See `Exchange`."""
        self._meetings += 1
        self._flags.tell(self._met, self._meetings)
        self._flags.wait(self._met, self._meetings)

    def gathering(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Copies:
        """See `Exchange`."""
        rank, ranks = self._axis.rank, self._axis.size
        others = (*range(rank + 1, ranks), *range(rank))
        copies = []  # to, from
        for shard, out in pairs:
            if out.data_ptr() in self._places:
                buffer, place = self._places[out.data_ptr()]
                copies += [(buffer.part(other, tuple(out.shape), out.dtype, place).chunk(ranks)[rank], shard) for other in others]
            else:
                buffer, place = self._places[shard.data_ptr()]
                rows = out.chunk(ranks)
                copies += [(rows[one], buffer.part(one, tuple(shard.shape), shard.dtype, place)) for one in (*others, rank)]
        return Copies(self._gathering_aside, lambda: Steps(self._flags, self._device), copies)


class Copies:
    """See `Gathering`."""

    def __init__(self, aside: Aside, steps: Callable[[], Steps], copies: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._aside, self._steps, self._copies = aside, steps, copies

    def start(self) -> None:
        """See `Gathering`."""
        steps = self._steps()
        for to, source in self._copies:
            steps.copy(to, source)
        self._aside.start(steps)

    def finish(self) -> None:
        """See `Gathering`."""
        self._aside.join()

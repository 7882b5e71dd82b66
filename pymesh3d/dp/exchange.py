"""How dp ranks exchange what they have of a bucket, by collectives: contributions to the gradients, and new parameters."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch

from pymesh3d.axis import Axis
from pymesh3d.comm.aside import following
from pymesh3d.comm.collectives import Pending, all_gather, all_to_all
from pymesh3d.dp.buckets import Bucket
from pymesh3d.triton_kernels.precision import compute_dtype


class Gathering(Protocol):
    """What collects the ranks' shards of some flat tensors in these, as often as it is started."""

    def start(self) -> None:
        """Begin. All ranks must call."""

    def finish(self) -> None:
        """What is enqueued from now on finds this rank's tensors whole."""


class Exchange(Protocol):
    """What each rank contributes to a gradient is rounded once, to the wire's dtype; the sum is float32 at least, in rank order.

    All ranks must call in one order. On GPUs sums run on a stream of their own, beside a backward pass.
    """

    def memory(self, wanted: Sequence[tuple[int, torch.dtype]]) -> list[torch.Tensor]:
        """Memory of so many numbers each, all 0, in which buckets can stay."""

    def reserve(self, buckets: Sequence[Bucket]) -> None:
        """These are going to be lent memory, mostly in this order."""

    def lend(self, bucket: Bucket) -> torch.Tensor:
        """Memory for the gradients of a bucket, in the dtype that is sent, until `reduce` has been called. What is in it has no meaning."""

    def reduce(self, bucket: Bucket, out: torch.Tensor, *, add: bool = False, beside: bool = False, last: bool = False) -> None:
        """Begin to sum a bucket's gradients over the ranks: this rank's shard into `out`, or with `add` to what that has.

        `out` may be this rank's shard of the gradients themselves, which are lost. `beside`, alike on all ranks: there is a backward pass
        meanwhile, which has gradients still to come unless this is among the `last`.
        """

    def finish(self) -> None:
        """What is enqueued from now on finds this rank's sums."""

    def squares(self, buckets: Sequence[Bucket]) -> torch.Tensor | None:
        """Float64 numbers that add up to the sum of squares of this rank's shards, if the sums of these buckets have told by the way."""

    def meet(self) -> None:
        """What is enqueued from now on finds what all ranks have enqueued before they met."""

    def gathering(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Gathering:
        """What collects the ranks' shards of each pair in its second tensor. If that is `memory` with this rank's shard in it, the shards
        of others are there after a `meet`. Tensors may be without memory meanwhile."""


def wire_of(bucket: Bucket, reduce_dtype: torch.dtype | None) -> torch.dtype:
    """What a contribution to a bucket's gradients is rounded to; not to anything wider than it is."""
    wire = reduce_dtype or bucket.dtype
    return wire if wire.itemsize < bucket.grad_dtype.itemsize else bucket.grad_dtype


class _Sent(NamedTuple):
    """Numbers under way to those who add them up."""

    rows: Pending
    out: torch.Tensor
    add: bool
    whole: torch.Tensor


class Sums:
    """Each rank's part of what all ranks of an axis have, by all-to-all and added up in their order, on a stream of its own.

    All ranks of `everywhere`, if that is one, get all sums then.
    """

    def __init__(self, axis: Axis, device: torch.device, *, everywhere: Axis | None) -> None:
        self._axis, self._everywhere = axis, everywhere
        self._sent: collections.deque[_Sent] = collections.deque()
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" and axis.size > 1 else None

    def start(self, parts: torch.Tensor, wire: torch.dtype, out: torch.Tensor, *, add: bool, whole: torch.Tensor) -> None:
        """Begin to sum `parts`, one for each rank, rounded to `wire`: this rank's into `out`, or with `add` to what that has. `whole` gets
        those of all ranks, where these are wanted."""
        with following(self._stream):
            if self._stream is not None:
                parts.record_stream(self._stream)
            self._sent.append(_Sent(all_to_all(parts.to(wire), self._axis), out, add, whole))
            if self._stream is None and self._everywhere is None:
                # The host adds up, and must not wait for a rank that waits for what this one has yet to gather.
                while self._sent and self._sent[0].rows.done():
                    self._add_up()
            elif len(self._sent) == 2:  # one travels while the other is added up; more would only take memory
                self._add_up()

    def finish(self) -> None:
        """What is enqueued from now on finds the sums."""
        with following(self._stream):
            while self._sent:
                self._add_up()
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)

    def _add_up(self) -> None:
        rows, out, add, whole = self._sent.popleft()
        first, *others = rows.wait().view(self._axis.size, -1)
        total = first.to(compute_dtype(out.dtype), copy=True)
        for other in others:  # torch's sum keeps no order on GPUs
            total += other
        if add:
            out.add_(total)
        else:
            out.copy_(total)
        if self._everywhere is not None:
            all_gather(out, self._everywhere, out=whole).wait()


class Collectives:
    """By collectives, wherever torch.distributed goes.

    `wire`: what contributions are rounded to (None: the parameters' dtype). With `everywhere` all ranks get all sums. `gathering`: over
    what shards are gathered, where that does not come in one order with sums on all ranks.
    """

    def __init__(
        self, axis: Axis, device: torch.device, *, wire: torch.dtype | None, everywhere: bool, gathering: Axis | None = None
    ) -> None:
        self._gathering_axis, self._device, self._wire = gathering or axis, device, wire
        self._sums = Sums(axis, device, everywhere=axis if everywhere else None)

    def memory(self, wanted: Sequence[tuple[int, torch.dtype]]) -> list[torch.Tensor]:
        """See `Exchange`."""
        return [torch.zeros(size, dtype=dtype, device=self._device) for size, dtype in wanted]

    def reserve(self, buckets: Sequence[Bucket]) -> None:
        """See `Exchange`."""

    def lend(self, bucket: Bucket) -> torch.Tensor:
        """See `Exchange`."""
        return torch.empty(bucket.size, dtype=wire_of(bucket, self._wire), device=bucket.device)

    def reduce(self, bucket: Bucket, out: torch.Tensor, *, add: bool = False, beside: bool = False, last: bool = False) -> None:
        """See `Exchange`."""
        self._sums.start(bucket.grads, wire_of(bucket, self._wire), out, add=add, whole=bucket.grads)

    def finish(self) -> None:
        """See `Exchange`."""
        self._sums.finish()

    def squares(self, buckets: Sequence[Bucket]) -> torch.Tensor | None:
        """See `Exchange`."""
        return None

    def meet(self) -> None:
        """See `Exchange`. Here no rank touches another's memory."""

    def gathering(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> AllGathers:
        """See `Exchange`."""
        return AllGathers(self._gathering_axis, pairs)


class AllGathers:
    """See `Gathering`."""

    def __init__(self, axis: Axis, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._axis, self._pairs = axis, pairs
        self._pending: list[Pending] = []

    def start(self) -> None:
        """See `Gathering`."""
        self._pending = [all_gather(shard, self._axis, out=out) for shard, out in self._pairs]

    def finish(self) -> None:
        """See `Gathering`."""
        for pending in self._pending:
            pending.wait()
        self._pending = []

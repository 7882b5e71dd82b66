"""How dp ranks exchange what they have of a bucket where only some of them share memory: over it there, and by collectives between."""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from pymesh3d.axis import Axis
from pymesh3d.comm.aside import Aside, Steps, following
from pymesh3d.comm.collectives import all_gather, all_to_all, gather_rows
from pymesh3d.comm.flags import Flags
from pymesh3d.comm.symmetric import SHARING, SymmetricBuffer
from pymesh3d.comm.watch import on_host
from pymesh3d.dp.buckets import Bucket
from pymesh3d.dp.exchange import Sums
from pymesh3d.dp.shared import ALIGNED, SharedMemory
from pymesh3d.errors import SharingError
from pymesh3d.triton_kernels.precision import compute_dtype


class Hierarchical:
    """By `SharedMemory` within a domain, by collectives between ranks that have the same place in theirs.

    Of gradients a rank sums, over its domain, the shards of all these; each owner then adds up what the domains have of its own, in their
    order. That is not rounded again, and yet no more crosses the network: one float32 sum of a domain, in place of 16 bits of each of its
    ranks, two at least. New parameters come back the same way, a shard to one rank of each other domain, from which the others fetch it.
    """

    def __init__(
        self,
        axis: Axis,
        inner: Axis,
        outer: Axis,
        device: torch.device,
        buckets: Sequence[Bucket],
        *,
        wire: torch.dtype | None,
        everywhere: bool,
        gathering: Axis | None = None,
    ) -> None:
        """`axis`: domain after domain, `inner` within one, `outer` between, and `gathering` too, as in `Collectives`. Raises SharingError,
        on all ranks, where some cannot share."""
        self._outer = outer
        longest = max(outer.size * bucket.shard_size * bucket.dtype.itemsize for bucket in buckets)
        failure: SharingError | None = None
        try:
            self._inner = SharedMemory(inner, device, buckets, wire=wire, everywhere=False)
            self._relay = _Relay(inner, gathering or outer, device, longest)
        except SharingError as error:
            failure = error
        failed = torch.tensor([int(failure is not None)], device=device)
        if on_host(gather_rows(failed, axis, SHARING), SHARING, axis).any():
            raise failure or SharingError("ranks of another domain cannot share memory")
        self._sums = Sums(outer, device, everywhere=axis if everywhere else None)
        self._unsent: collections.deque[tuple[Bucket, Callable[[], None]]] = collections.deque()  # what sends on what the domain sums up
        all_to_all(torch.zeros(outer.size, device=device), outer).wait()  # NCCL connects ranks now, and not while streams wait for others

    def memory(self, wanted: Sequence[tuple[int, torch.dtype]]) -> list[torch.Tensor]:
        """See `Exchange`."""
        return self._inner.memory(wanted)

    def reserve(self, buckets: Sequence[Bucket]) -> None:
        """See `Exchange`."""
        self._inner.reserve(buckets)

    def lend(self, bucket: Bucket) -> torch.Tensor:
        """See `Exchange`."""
        return self._inner.lend(bucket)

    def reduce(self, bucket: Bucket, out: torch.Tensor, *, add: bool = False, beside: bool = False, last: bool = False) -> None:
        """See `Exchange`."""
        dtype = compute_dtype(bucket.grad_dtype)
        sums = torch.empty(self._outer.size * bucket.shard_size, dtype=dtype, device=bucket.device)
        self._inner.reduce(bucket, sums, beside=beside, last=last)
        self._unsent.append((bucket, functools.partial(self._sums.start, sums, dtype, out, add=add, whole=bucket.grads)))
        if last or not beside:
            self._inner.finish()  # nothing is computed meanwhile that would have to wait
        self._send()

    def _send(self) -> None:
        """Send on what the domain has summed up, in the order of calls, which is that of all ranks."""
        while self._unsent and self._inner.summed(self._unsent[0][0]):
            self._unsent.popleft()[1]()

    def finish(self) -> None:
        """See `Exchange`."""
        self._inner.finish()
        self._send()
        self._sums.finish()

    def squares(self, buckets: Sequence[Bucket]) -> torch.Tensor | None:
        """See `Exchange`. The kernels see sums over one domain only."""
        return None

    def meet(self) -> None:
        """See `Exchange`. No rank touches memory of another domain."""
        self._inner.meet()

    def gathering(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Relayed:
        """See `Exchange`."""
        return Relayed(self._relay, pairs)


class Relayed:
    """See `Gathering`."""

    def __init__(self, relay: _Relay, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._relay = relay
        self._ways = [(shard, [relay.way(slot, shard, out) for slot in range(2)]) for shard, out in pairs]

    def start(self) -> None:
        """See `Gathering`."""
        for shard, ways in self._ways:
            self._relay.gather(shard, ways)

    def finish(self) -> None:
        """See `Gathering`."""
        self._relay.join()


class _Way(NamedTuple):
    """Of shards: where they come, and what is copied from there and from where other ranks have theirs: to, source."""

    held: torch.Tensor
    copies: list[tuple[torch.Tensor, torch.Tensor]]


class _Relay:
    """Shards come from ranks in the same place of other domains into one of two slots, by turns, from where the own domain fetches them."""

    def __init__(self, inner: Axis, outer: Axis, device: torch.device, size: int) -> None:
        """Slots of so many bytes. Raises SharingError, on all ranks of the domain, where they cannot share memory."""
        self._inner, self._outer, self._device, self._turns = inner, outer, device, 0
        self._flags = Flags("parameters", inner, device, 1)
        self._aside = Aside(device)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._size = -(-size // ALIGNED) * ALIGNED
        self._slots = SymmetricBuffer(2 * self._size, inner, device)
        self._flags.shared.append(self._slots)
        self._meeting = Steps(self._flags, device)
        self._meeting.tell(0)
        self._meeting.wait(0)

    def way(self, slot: int, shard: torch.Tensor, out: torch.Tensor) -> _Way:
        """That of all ranks' shards through this slot into `out`."""
        rank, ranks, domains = self._inner.rank, self._inner.size, self._outer.size
        held = [self._slots.part(one, (domains, shard.numel()), shard.dtype, slot * self._size) for one in range(ranks)]
        rows = out.view(domains, ranks, -1)
        order = (*range(rank + 1, ranks), *range(rank + 1))
        return _Way(held[rank].view(-1), [(rows[domain, one], held[one][domain]) for one in order for domain in range(domains)])

    def gather(self, shard: torch.Tensor, ways: Sequence[_Way]) -> None:
        """Begin to collect all ranks' shards, by the way through the slot whose turn it is."""
        held, pairs = ways[self._turns % 2]
        self._turns += 1
        copies = Steps(self._flags, self._device)
        for to, source in pairs:
            copies.copy(to, source)
        with following(self._stream):
            all_gather(shard, self._outer, out=held).wait()
            self._aside.start(self._meeting, self._turns)
            self._aside.join()  # whoever is here has read the other slot, so the next turn may fill it meanwhile
            self._aside.start(copies)

    def join(self) -> None:
        """What is enqueued from now on finds all that was collected."""
        self._aside.join()

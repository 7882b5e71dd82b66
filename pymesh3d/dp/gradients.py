"""Gradients on their way: added up over microbatches, and summed over ranks in the order in which backward passes complete them."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import nn

from pymesh3d.axis import Axis
from pymesh3d.comm.collectives import all_gather, all_reduce_
from pymesh3d.comm.watch import require_come
from pymesh3d.comm.workspace import capturing
from pymesh3d.dp.buckets import Bucket, Slot
from pymesh3d.dp.exchange import Exchange
from pymesh3d.dp.masters import Offered
from pymesh3d.dp.norm import gradient_norm
from pymesh3d.dp.shared import SharedMemory
from pymesh3d.errors import ConfigError
from pymesh3d.mesh import Mesh
from pymesh3d.ops.accumulate import add_to
from pymesh3d.placement import placement_of
from pymesh3d.triton_kernels.zero_reduce import TILE


class InOrder:
    """Launches each of some buckets once, when its gradients have arrived, in one order on all ranks whichever is complete first."""

    def __init__(self, buckets: Sequence[Bucket], launch: Callable[[Bucket, bool], None]) -> None:
        """`launch` gets a bucket, and whether no gradient is awaited any more."""
        self._buckets, self._launch = buckets, launch
        self._number = {id(slot.parameter): number for number, bucket in enumerate(buckets) for slot in bucket.slots}
        self.reset()

    def reset(self) -> None:
        """Nothing has arrived, and nothing has been launched."""
        self._missing = [{id(slot.parameter) for slot in bucket.slots} for bucket in self._buckets]
        self._launched = 0

    def launched(self, parameter: nn.Parameter) -> bool:
        """Whether its bucket has been."""
        return self._number[id(parameter)] < self._launched

    def arrived(self, parameter: nn.Parameter) -> None:
        """Its gradient is complete, if it is one of theirs."""
        if (number := self._number.get(id(parameter))) is not None:
            self._missing[number].discard(id(parameter))
        while self._launched < len(self._buckets) and not self._missing[self._launched]:
            self._launch_next()

    def close(self) -> None:
        """Launch all that have not been, complete or not, and begin again."""
        self._missing = [set() for _ in self._buckets]
        while self._launched < len(self._buckets):
            self._launch_next()
        self.reset()

    def _launch_next(self) -> None:
        bucket = self._buckets[self._launched]
        self._launched += 1
        self._launch(bucket, not any(self._missing[self._launched :]))


class Gradients:
    """The accumulators of all buckets. After `reduce`, `owned` has the sums over ranks of what this rank updates: whole buckets with
    `everywhere`, as stage 0 needs them, else its shards.

    With `each`, as in stages 2 and 3, every backward pass sums its own gradients over the ranks, and what stays is the shards; a bucket has
    memory for all of its gradients only meanwhile. Not so those whose summands are spread over tp ranks or stages, which are late. All
    others are summed at the end too, or, within `last_pass`, as soon as they are complete.
    """

    def __init__(self, buckets: Sequence[Bucket], mesh: Mesh, exchange: Exchange, *, everywhere: bool, each: bool) -> None:
        self._buckets, self._mesh, self._exchange = buckets, mesh, exchange
        self._everywhere = everywhere
        self.reduced = False
        self.agreed = False
        self._summed_up = False  # ahead of `reduce`
        self.offered: dict[Bucket, Offered] = {}  # in place of `reduce`
        passing = [bucket for bucket in reversed(buckets) if each and mesh.dp.size > 1 and not bucket.late]
        kept = [bucket for bucket in reversed(buckets) if bucket not in passing]
        exchange.reserve(passing)
        for bucket, flat in zip(kept, exchange.memory([(bucket.size, bucket.grad_dtype) for bucket in kept]), strict=True):
            bucket.show_grads(flat)
        self._sums = {bucket: torch.zeros(bucket.shard_size, dtype=bucket.grad_dtype, device=mesh.device) for bucket in passing}
        self._nothing = {bucket: bucket.grads for bucket in passing}  # without memory
        self._begun: set[Bucket] = set()  # of `_sums`: those that have something of this step
        self._kept, self._late = kept, [bucket for bucket in kept if bucket.late]
        self.owned = [bucket.grads if everywhere else self._shard(bucket) for bucket in buckets]
        self._last = InOrder([bucket for bucket in kept if not bucket.late], self._reduce_kept)
        self._each = InOrder(passing, self._reduce_passing)
        self._in_last = self._in_pass = self._had_last = False  # a pass, now or in this step
        for bucket in buckets:
            for slot in bucket.slots:
                self._listen(slot, bucket)
        # Views into the flat gradients, made once. `_counted`: what this rank contributes to the norm, every number of the model once
        # over all ranks; `_copies`: the rest of what it owns. `_summed`: ranges to be summed over so many tp neighbours; `_ties`:
        # gradients to be summed over the stages that hold the parameter.
        self._counted: dict[Bucket, list[torch.Tensor]] = {}
        self._counted_whole = {bucket for bucket in buckets if bucket.counted_whole(mesh.tp.rank, mesh.pp.rank)}
        self._copies: list[torch.Tensor] = []
        self._ties: list[tuple[Axis, torch.Tensor]] = []
        self._summed: dict[int, list[torch.Tensor]] = {}
        for bucket in buckets:
            self._count(bucket)
        for bucket in reversed(self._late):  # in the order of parameters
            self._share(bucket)

    def _shard(self, bucket: Bucket) -> torch.Tensor:
        return self._sums[bucket] if bucket in self._sums else bucket.shard(bucket.grads, self._mesh.dp.rank)

    def _count(self, bucket: Bucket) -> None:
        mesh, shard = self._mesh, self._shard(bucket)
        counted = bucket.counted(mesh.tp.rank, mesh.pp.rank, mesh.dp.rank)
        edges = [0, *(edge for limits in counted for edge in limits), shard.numel()]
        self._counted[bucket] = [shard[start:stop] for start, stop in counted]
        low = mesh.dp.rank * bucket.shard_size
        others = [(start, stop) for start, stop in zip(edges[::2], edges[1::2], strict=True) if start < stop]
        self._copies += [shard[start:stop] for start, stop in others if not bucket.only_padding(low + start, low + stop)]

    def _share(self, bucket: Bucket) -> None:
        for slot in bucket.slots:
            placement = placement_of(slot.parameter)
            if placement.stages:
                self._ties.append((self._mesh.select(self._mesh.pp, placement.stages), bucket.grads[slot.start : slot.stop]))
            for start, stop, replicas in placement.summed(self._mesh.tp.rank):
                self._summed.setdefault(replicas, []).append(bucket.grads[slot.start + start : slot.start + stop])

    def _listen(self, slot: Slot, bucket: Bucket) -> None:
        """Autograd tells when a pass has all of a gradient, also where layers have added it to the buffer themselves."""
        parameter, this = slot.parameter, weakref.ref(self)  # which keeps the node, which keeps the hook

        def arrived(*_: object) -> None:
            if (gradients := this()) is not None:
                gradients._arrived(parameter, bucket)

        slot.node.register_hook(arrived)
        if bucket in self._sums:
            exchange = self._exchange
            parameter.main_grad.open = lambda: _lend(exchange, bucket)  # type: ignore[attr-defined]

    @torch.no_grad()
    def _arrived(self, parameter: nn.Parameter, bucket: Bucket) -> None:
        """Add what autograd left in `.grad` to the flat buffer; layers that write there themselves leave nothing."""
        grad, parameter.grad = parameter.grad, None
        if self.reduced or self._summed_up or (bucket not in self._sums and not bucket.late and self._last.launched(parameter)):
            raise ConfigError(
                f"a gradient of {placement_of(parameter).name or tuple(parameter.shape)} after the sum over ranks has begun",
                "between that and the update there can be no further backward pass",
                "Call step() first, and put only the last backward pass before it within last_pass()",
            )
        if grad is not None:
            add_to(parameter.main_grad, grad)  # type: ignore[attr-defined]
        if bucket in self._sums:
            if not self._in_pass:
                self._in_pass = True
                torch.autograd.Variable._execution_engine.queue_callback(self._end_pass)
            self._each.arrived(parameter)
        elif self._in_last and not bucket.late:
            self._last.arrived(parameter)

    @torch.no_grad()
    def _end_pass(self) -> None:
        self._in_pass = False
        self._each.close()

    @contextlib.contextmanager
    def last_pass(self, parameters: Iterable[nn.Parameter] | None = None) -> Iterator[None]:
        """Within it the last backward pass before `reduce` goes through these parameters; by default through all that it will go through.

        It need not reach all of them. At its end the gradients of `parameters` are complete, however they have been computed.
        """
        self._in_last = self._had_last = self._mesh.dp.size > 1
        try:
            yield
        finally:
            in_last, self._in_last = self._in_last, False
        if in_last:
            for parameter in parameters or ():
                self._last.arrived(parameter)

    @torch.no_grad()
    def reduce(self) -> None:
        """Sum all that has not been: over stages and over tp where ranks hold summands of one parameter, then over dp."""
        self.reduced = True
        if not self._summed_up:
            self._sum()

    @torch.no_grad()
    def offer(self) -> torch.Tensor | None:
        """In place of `reduce`, on all ranks or on none: what is large is `offered` to whoever sums it up himself, after a `meet`, and the
        rest is summed. The largest absolute value of what this rank offers or owns, float32 [], infinite if a number is not finite. None,
        and nothing is done, where sums have begun, are needed everywhere, or not over dp alone, or where parameters are in shards."""
        mesh, exchange = self._mesh, self._exchange
        if not isinstance(exchange, SharedMemory) or self.reduced or self._had_last or self._summed_up or self._sums:
            return None
        large = [bucket for bucket in self._kept if not bucket.late]
        fit = (bucket.unit is None and exchange.wire(bucket) != bucket.grad_dtype != torch.float64 for bucket in large)
        if not large or not all(fit) or self._everywhere or mesh.all.size > mesh.dp.size:
            return None
        self.reduced = True
        largest = exchange.offer(large)
        for bucket in large:
            squares = torch.empty(bucket.shard_size // TILE, dtype=torch.float64, device=mesh.device)
            self.offered[bucket] = Offered(exchange.addresses(bucket.grads), exchange.wire(bucket), bucket.grad_dtype, squares)
        self._sum_late()
        self._finish()
        for bucket in (bucket for bucket in self._late if bucket.size):
            largest = torch.maximum(largest, self._shard(bucket).float().abs().nan_to_num(torch.inf, torch.inf).amax())
        return largest

    def _sum(self) -> None:
        self._last.close()
        self._sum_late()
        for bucket, sums in self._sums.items():
            if bucket not in self._begun:
                sums.zero_()
        self._finish()

    def _finish(self) -> None:
        self._exchange.finish()
        if self._mesh.device.type != "cuda":
            require_come("sum of gradients", self._mesh.all)  # or the norm would tell others that all is well

    def _sum_late(self) -> None:
        for line, grad in self._ties:
            all_reduce_(grad, line).wait()
        for replicas, ranges in sorted(self._summed.items()):
            summed = all_reduce_(torch.cat(ranges), self._mesh.subgroup(self._mesh.tp, replicas)).wait()
            for target, source in zip(ranges, summed.split([r.numel() for r in ranges]), strict=True):
                target.copy_(source)
        for bucket in self._late:
            if self._mesh.dp.size > 1:
                self._exchange.reduce(bucket, self._shard(bucket))

    def _reduce_kept(self, bucket: Bucket, last: bool) -> None:
        if self._mesh.dp.size > 1:  # else nothing is sent, so nothing is rounded
            _require_no_graph(self._mesh.device)
            self._exchange.reduce(bucket, self._shard(bucket), beside=self._had_last, last=last)

    def _reduce_passing(self, bucket: Bucket, last: bool) -> None:
        _require_no_graph(self._mesh.device)
        _lend(self._exchange, bucket)  # if nothing of this pass is here there may be on other ranks
        bucket.complete()
        self._exchange.reduce(bucket, self._sums[bucket], add=bucket in self._begun, beside=True, last=last and self._in_last)
        self._begun.add(bucket)
        bucket.show_grads(self._nothing[bucket])

    def agree(self) -> None:
        """What is enqueued from now on may change what other ranks have read: parameters and gradients."""
        if not self.agreed:
            self.agreed = True
            self._exchange.meet()

    def norm(self, p: float) -> torch.Tensor:
        """The p-norm of the summed gradients, float64 [], the same on every rank and not finite if one of them is not."""
        told, squares = list(self.offered), None
        if told:
            assert p == 2, f"squares for p = {p}"
            squares = torch.cat([offered.squares for offered in self.offered.values()])
        elif p == 2 and self._mesh.dp.size > 1:
            told = [bucket for bucket in self._summed_now() if bucket in self._counted_whole]
            squares = self._exchange.squares(told) if told else None
        others = [bucket for bucket in self._buckets if squares is None or bucket not in told]
        pieces = [piece for bucket in others for piece in self._counted[bucket]]
        self.agreed = True  # when all ranks have this number none reads another's memory any more
        return gradient_norm(pieces, self._mesh, p, copies=self._copies, squares=squares)

    def _summed_now(self) -> list[Bucket]:
        """Buckets that have been summed over ranks for this step."""
        return [bucket for bucket in self._buckets if bucket not in self._sums or bucket in self._begun]

    @torch.no_grad()
    def reduced_copy(self) -> list[torch.Tensor]:
        """The flat gradients of each bucket as `reduce` makes them, whole on every rank; what was accumulated stays untouched.

        After a last pass, which has begun to sum, they stay summed.
        """
        kept = [] if self._had_last else [(bucket, bucket.grads.clone()) for bucket in self._kept]
        if not self._summed_up:
            self._sum()
            self._summed_up = self._had_last
        found = [all_gather(self._shard(bucket).clone(), self._mesh.dp).wait() for bucket in self._buckets]
        for bucket, grads in kept:
            bucket.grads.copy_(grads)
        return found

    @torch.no_grad()
    def forget(self) -> None:
        """Begin anew, with zeros. All ranks must, where they have begun to sum."""
        if self._had_last and not (self.reduced or self._summed_up):
            self._last.close()  # it has begun, perhaps further on another rank
        if not self.reduced:
            self._exchange.finish()
        if self.reduced or self._had_last:
            self.agree()
        self.reduced = self.agreed = self._summed_up = self._in_pass = self._had_last = False
        self._last.reset()
        self._each.reset()
        self._begun.clear()
        self.offered.clear()
        for bucket in self._sums:
            bucket.show_grads(self._nothing[bucket])  # a pass that failed has left some
        for bucket in self._kept:
            bucket.grads.zero_()


def _require_no_graph(device: torch.device) -> None:
    if capturing(device):
        raise ConfigError(
            "a sum of gradients over ranks while a CUDA graph is captured",
            "ranks count the calls in which they wait for each other, which a graph would repeat",
            "Capture passes without it (stages 0 and 1, outside of last_pass()), or none",
        )


def _lend(exchange: Exchange, bucket: Bucket) -> None:
    """Memory for its gradients, unless it has some."""
    if not bucket.grads.numel():
        bucket.show_grads(exchange.lend(bucket))
        bucket.freshen()

"""ZeRO stages 0 and 1: gradients summed over dp, an optimizer over the whole buckets or over one shard of each.

Stage 0 keeps everything on every rank. Stage 1 keeps fp32 master weights and optimizer state for one shard; the sum of
gradients goes to the shard's owner and the new parameters come back. Both add up the same numbers in the same order.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from pymesh3d.comm.collectives import Pending, all_gather, all_reduce_, all_to_all, broadcast_
from pymesh3d.config import require_number, require_positive
from pymesh3d.dp.buckets import Bucket, make_buckets
from pymesh3d.errors import ConfigError
from pymesh3d.mesh import Mesh
from pymesh3d.placement import Placement, place, placement_of

BUCKET_ELEMENTS = 32 * 2**20


def decays(parameter: nn.Parameter) -> bool:
    """Whether weight decay applies: to matrices, not to norms and biases."""
    return parameter.ndim >= 2


class Zero:
    """Owns the flat buffers of a stage's parameters and the optimizer over them. Reading order: reduce, clip, step.

    `optimizer` makes a torch optimizer from parameter groups of flat master weights; `reduce_dtype` is what a rank's
    contribution is rounded to, once, before it is sent (default: the parameters' dtype). Raises ConfigError for what it cannot use.
    """

    def __init__(
        self,
        module: nn.Module,
        mesh: Mesh,
        *,
        stage: int,
        optimizer: Callable[[Iterable[dict[str, Any]]], torch.optim.Optimizer],
        weight_decay: float,
        reduce_dtype: torch.dtype | None = None,
        bucket_elements: int = BUCKET_ELEMENTS,
    ) -> None:
        if stage not in (0, 1) or isinstance(stage, bool):
            raise ConfigError(f"stage={stage!r}", "only ZeRO stages 0 and 1 are available", "Use stage=1")
        if not callable(optimizer):
            raise ConfigError(
                f"optimizer={optimizer!r}", "it must make an optimizer from parameter groups", "Use optimizer=torch.optim.AdamW"
            )
        if reduce_dtype is not None and not (isinstance(reduce_dtype, torch.dtype) and reduce_dtype.is_floating_point):
            raise ConfigError(f"reduce_dtype={reduce_dtype!r}", "it must be a floating-point torch dtype", "Use reduce_dtype=torch.float32")
        require_number("weight_decay", weight_decay, default=0.1)
        require_positive("bucket_elements", bucket_elements)
        self.mesh, self.stage, self.reduce_dtype = mesh, stage, reduce_dtype
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        for parameter in trained:
            if getattr(parameter, "placement", None) is None:  # nobody sharded it, so every tp rank holds it: count it once
                place(parameter, Placement(shape=tuple(parameter.shape), ranks=mesh.tp.size))
        self.buckets = make_buckets(trained, shards=mesh.dp.size, elements=bucket_elements, decays=decays)
        for parameter in trained:
            parameter.register_post_accumulate_grad_hook(_move_grad)
        for bucket in self.buckets:
            broadcast_(bucket.weights, mesh.dp)
        # Views into the flat gradients, made once. `shard_grads`: what this rank contributes to the norm, every number of the
        # model once over all ranks. `_summed`: ranges to be summed over so many tp neighbours (see Placement.summed).
        self.shard_grads: list[torch.Tensor] = []
        self._summed: dict[int, list[torch.Tensor]] = {}
        for bucket in self.buckets:
            shard = bucket.shard(bucket.grads, mesh.dp.rank)
            self.shard_grads += [shard[start:stop] for start, stop in bucket.counted(mesh.tp.rank, mesh.dp.rank)]
            for slot in bucket.slots:
                for start, stop, replicas in placement_of(slot.parameter).summed(mesh.tp.rank):
                    self._summed.setdefault(replicas, []).append(bucket.grads[slot.start + start : slot.start + stop])
        self.masters = [nn.Parameter(self._owned(b, b.weights).to(b.grads.dtype), requires_grad=True) for b in self.buckets]
        groups = []
        for decay in (True, False):
            flat = [master for master, bucket in zip(self.masters, self.buckets, strict=True) if bucket.decay == decay]
            if flat:
                groups.append({"params": flat, "weight_decay": weight_decay if decay else 0.0})
        self.optimizer = optimizer(groups)

    def _owned(self, bucket: Bucket, flat: torch.Tensor) -> torch.Tensor:
        return flat if self.stage == 0 else bucket.shard(flat, self.mesh.dp.rank)

    @torch.no_grad()
    def reduce(self) -> None:
        """Sum gradients: over tp where ranks hold summands of one parameter, then over dp into the owner's shard."""
        self._sum_replicas()
        if self.mesh.dp.size == 1:
            return  # nothing is sent, so nothing is rounded
        sent: collections.deque[tuple[Bucket, Pending]] = collections.deque()
        for bucket in self.buckets:
            sent.append((bucket, all_to_all(bucket.grads.to(self.reduce_dtype or bucket.weights.dtype), self.mesh.dp)))
            if len(sent) == 2:  # one travels while the other is added up; more would only take memory
                self._add_up(*sent.popleft())
        while sent:
            self._add_up(*sent.popleft())

    def _add_up(self, bucket: Bucket, pending: Pending) -> None:
        rows = pending.wait().view(self.mesh.dp.size, -1)
        shard = bucket.shard(bucket.grads, self.mesh.dp.rank)
        torch.sum(rows, 0, dtype=shard.dtype, out=shard)
        if self.stage == 0:
            all_gather(shard, self.mesh.dp, out=bucket.grads).wait()

    @torch.no_grad()
    def reduced_grads(self) -> list[torch.Tensor]:
        """The flat gradients of each bucket as `reduce` makes them, whole on every rank; what was accumulated stays untouched."""
        kept = [bucket.grads.clone() for bucket in self.buckets]
        self.reduce()
        reduced = [all_gather(bucket.shard(bucket.grads, self.mesh.dp.rank).clone(), self.mesh.dp).wait() for bucket in self.buckets]
        for bucket, grads in zip(self.buckets, kept, strict=True):
            bucket.grads.copy_(grads)
        return reduced

    def _sum_replicas(self) -> None:
        for replicas, ranges in sorted(self._summed.items()):
            summed = all_reduce_(torch.cat(ranges), self.mesh.subgroup(self.mesh.tp, replicas)).wait()
            for target, source in zip(ranges, summed.split([r.numel() for r in ranges]), strict=True):
                target.copy_(source)

    @torch.no_grad()
    def step(self, scale: torch.Tensor | None = None) -> None:
        """Multiply the gradients by `scale` (clipping), update the master weights, and give every rank the new parameters."""
        for bucket, master in zip(self.buckets, self.masters, strict=True):
            master.grad = self._owned(bucket, bucket.grads)
            if scale is not None:
                master.grad.mul_(scale)
        self.optimizer.step()
        for master in self.masters:
            master.grad = None
        self.publish()

    @torch.no_grad()
    def publish(self) -> None:
        """Give every rank the parameters that the masters stand for."""
        sent = []
        for bucket, master in zip(self.buckets, self.masters, strict=True):
            owned = self._owned(bucket, bucket.weights)
            owned.copy_(master)  # rounds to bf16; for float32 both are the same memory
            if self.stage == 1:
                sent.append(all_gather(owned, self.mesh.dp, out=bucket.weights))
        for pending in sent:
            pending.wait()

    def state(self) -> dict[str, torch.Tensor]:
        """Masters and optimizer state of this rank, by kind and bucket number. State that an optimizer has not made yet is absent."""
        tensors: dict[str, torch.Tensor] = {}
        for number, master in enumerate(self.masters):
            tensors[f"master.{number}"] = master.detach()
            for key, value in self.optimizer.state[master].items():
                if isinstance(value, torch.Tensor):
                    tensors[f"{key}.{number}"] = value
        return tensors

    @torch.no_grad()
    def load_state(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy what `state` gave back into place, and publish the parameters. All ranks must call."""
        for name, value in tensors.items():
            key, _, number = name.rpartition(".")
            master = self.masters[int(number)]
            if key == "master":
                master.copy_(value)
            else:
                on_device = value.ndim > 0 or self.optimizer.defaults.get("fused")  # torch keeps step counts on the CPU otherwise
                self.optimizer.state[master][key] = value.to(master.device if on_device else "cpu", copy=True)
        self.publish()

    def zero_grad(self) -> None:
        """Forget all accumulated gradients."""
        for bucket in self.buckets:
            bucket.grads.zero_()


def _move_grad(parameter: torch.Tensor) -> None:
    """Add what autograd left in `.grad` to the flat buffer; layers that write there themselves leave nothing."""
    if parameter.grad is not None:
        parameter.main_grad.add_(parameter.grad)  # type: ignore[attr-defined]
        parameter.grad = None

"""ZeRO stages 0 and 1: gradients summed over dp, an optimizer over the whole buckets or over one shard of each.

Stage 0 keeps everything on every rank. Stage 1 keeps fp32 master weights and optimizer state for one shard; the sum of
gradients goes to the shard's owner and the new parameters come back. Both add up the same numbers in the same order.
"""

from __future__ import annotations

import collections
import logging
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from pymesh3d.axis import Axis
from pymesh3d.comm.collectives import Pending, all_gather, all_reduce_, all_to_all
from pymesh3d.comm.watch import on_host
from pymesh3d.config import require_number, require_positive
from pymesh3d.dp.buckets import Bucket, make_buckets
from pymesh3d.dp.norm import clip_factor, gradient_norm
from pymesh3d.dp.trained import agree_on, trained_parameters
from pymesh3d.errors import ConfigError
from pymesh3d.mesh import Mesh
from pymesh3d.placement import placement_of

log = logging.getLogger("pymesh3d")

BUCKET_ELEMENTS = 32 * 2**20
NOT_ELEMENTWISE = ("Adafactor", "LBFGS", "Muon")  # they look at whole matrices, or at all parameters at once


def decays(parameter: nn.Parameter) -> bool:
    """Whether weight decay applies: to matrices, not to norms and biases."""
    return parameter.ndim >= 2


class Zero:
    """Owns the flat buffers of a module's trained parameters and the optimizer over them; `step` is all that a training loop calls.

    `stage` 0 keeps masters and optimizer state whole on every rank, 1 keeps a dp rank's share. Gradients are summed over dp, so divide
    the loss by what the whole global batch is divided by (`mesh.dp.size` more than on one rank, for a mean). `state` and `load_state`
    are for a rank's own file, to go on in the same layout; `whole_state_dict` is for the weights alone.

    Gradients add up in `parameter.main_grad` over backward passes until `step`, and `parameter.grad` stays None (parallel layers add
    theirs whatever `torch.autograd.grad` was asked for). Values written into a parameter afterwards, as by `load_state_dict`, are
    taken over, but not through `.data`; which parameters are trained, and where they lie, must not change.

    `optimizer` makes a torch optimizer, one that works element by element, from groups of flat master weights. `weight_decay` takes the
    place of the optimizer's own, for matrices only. `reduce_dtype` is what a rank's contribution is rounded to, once, before it is sent
    (default: the parameters' dtype). All values become those of the first dp rank.
    Raises ConfigError for what it cannot use, DistributedError where ranks have different modules.
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
            raise _no_optimizer(f"optimizer={optimizer!r}")
        if reduce_dtype is not None and not (isinstance(reduce_dtype, torch.dtype) and reduce_dtype.is_floating_point):
            raise ConfigError(f"reduce_dtype={reduce_dtype!r}", "it must be a floating-point torch dtype", "Use reduce_dtype=torch.float32")
        require_number("weight_decay", weight_decay, default=0.1)
        require_positive("bucket_elements", bucket_elements)
        if not isinstance(mesh, Mesh):
            raise ConfigError(f"a {type(mesh).__name__} as mesh", "Zero spans all axes of a mesh", "Use the one that init_mesh returns")
        self._module, self._trained = module, trained_parameters(module, mesh)
        self.mesh, self.stage, self.reduce_dtype = mesh, stage, reduce_dtype
        self.steps_taken = self.steps_skipped = 0
        self._reduced = False
        agree_on(module, mesh)
        self.buckets = make_buckets(self._trained.values(), shards=mesh.dp.size, elements=bucket_elements, decays=decays)
        for parameter in self._trained.values():
            parameter.register_post_accumulate_grad_hook(_move_grad)
        # Views into the flat gradients, made once. `_counted`: what this rank contributes to the norm, every number of the model
        # once over all ranks; `_copies`: the rest of what it owns. `_summed`: ranges to be summed over so many tp neighbours; `_ties`:
        # gradients to be summed over the stages that hold the parameter.
        self._counted: list[torch.Tensor] = []
        self._copies: list[torch.Tensor] = []
        self._ties: list[tuple[Axis, torch.Tensor]] = []
        self._summed: dict[int, list[torch.Tensor]] = {}
        for bucket in self.buckets:
            shard = bucket.shard(bucket.grads, mesh.dp.rank)
            counted = bucket.counted(mesh.tp.rank, mesh.pp.rank, mesh.dp.rank)
            edges = [0, *(edge for limits in counted for edge in limits), shard.numel()]
            self._counted += [shard[start:stop] for start, stop in counted]
            self._copies += [shard[start:stop] for start, stop in zip(edges[::2], edges[1::2], strict=True) if start < stop]
            for slot in bucket.slots:
                placement = placement_of(slot.parameter)
                if placement.stages:
                    self._ties.append((mesh.select(mesh.pp, placement.stages), bucket.grads[slot.start : slot.stop]))
                for start, stop, replicas in placement.summed(mesh.tp.rank):
                    self._summed.setdefault(replicas, []).append(bucket.grads[slot.start + start : slot.start + stop])
        self.masters = [nn.Parameter(self._owned(b, b.weights).to(b.grads.dtype), requires_grad=True) for b in self.buckets]
        groups = []
        for decay in (True, False):
            flat = [master for master, bucket in zip(self.masters, self.buckets, strict=True) if bucket.decay == decay]
            if flat:
                groups.append({"params": flat, "weight_decay": weight_decay if decay else 0.0})
        try:
            self.optimizer = optimizer(groups)
        except ValueError as error:  # LBFGS takes no groups
            raise _no_optimizer(f"optimizer={optimizer!r} raised {error}") from error
        if not isinstance(self.optimizer, torch.optim.Optimizer) or type(self.optimizer).__name__ in NOT_ELEMENTWISE:
            raise _no_optimizer(f"optimizer={optimizer!r} made a {type(self.optimizer).__name__}")
        self.optimizer.register_step_pre_hook(self._require_updating)

    def _owned(self, bucket: Bucket, flat: torch.Tensor) -> torch.Tensor:
        return flat if self.stage == 0 else bucket.shard(flat, self.mesh.dp.rank)

    def step(self, max_norm: float | None = None) -> tuple[float, bool]:
        """Sum the gradients, clip them to `max_norm`, update the parameters, and forget the gradients. All ranks must call.

        Returns the gradients' norm before clipping, and whether the step was taken: where the norm is not finite no rank takes it.
        """
        if max_norm is not None:
            require_number("max_norm", max_norm, default="None, which switches clipping off", above_zero=True)
        self.reduce()
        total = self.norm()
        norm = on_host(total, "gradient norm", self.mesh.all).item()
        taken = math.isfinite(norm)  # every rank has the same bits, so all take the step or none
        if taken:
            self.update(None if max_norm is None else clip_factor(total, max_norm))
        else:
            self.steps_skipped += 1
            if self.mesh.rank == 0:
                log.warning("gradient norm is %s: step skipped on all ranks (%d skipped so far)", norm, self.steps_skipped)
            self.zero_grad()
        return norm, taken

    def reduce(self) -> None:
        """The first part of `step`: sum the gradients over ranks. Do not go backward again before `update` or `zero_grad`."""
        self._require_reduced(False, "reduce")
        self._require_unchanged()
        self._reduced = True
        self._sum()

    def norm(self, p: float = 2.0) -> torch.Tensor:
        """The second part: the p-norm of the summed gradients, float64 [], the same on every rank and not finite if one of them is not."""
        self._require_reduced(True, "norm")
        return gradient_norm(self._counted, self.mesh, p, copies=self._copies)

    @torch.no_grad()
    def update(self, scale: torch.Tensor | None = None) -> None:
        """The last part: multiply the gradients by `scale`, give every rank the new parameters, and forget the gradients."""
        self._require_reduced(True, "update")
        self._take_over_written()
        grads = [self._owned(bucket, bucket.grads) for bucket in self.buckets]
        if scale is not None and grads:
            torch._foreach_mul_(grads, scale.to(max((grad.dtype for grad in grads), key=lambda dtype: dtype.itemsize)))
        for master, grad in zip(self.masters, grads, strict=True):
            master.grad = grad
        try:
            self.optimizer.step()
        finally:
            for master in self.masters:
                master.grad = None
        self.publish()
        self.steps_taken += 1
        self.zero_grad()

    def zero_grad(self) -> None:
        """Forget all accumulated gradients."""
        self._reduced = False
        for bucket in self.buckets:
            bucket.grads.zero_()

    @torch.no_grad()
    def _sum(self) -> None:
        """Sum gradients: over stages and over tp where ranks hold summands of one parameter, then over dp into the owner's shard."""
        for line, grad in self._ties:
            all_reduce_(grad, line).wait()
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
        self._require_reduced(False, "reduced_grads")
        kept = [bucket.grads.clone() for bucket in self.buckets]
        self._sum()
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

    @torch.no_grad()
    def _take_over_written(self) -> None:
        """Give the masters what was written into parameters since the last step; all others keep digits that bf16 has not."""
        for bucket, master in zip(self.buckets, self.masters, strict=True):
            owned = self._owned(bucket, bucket.weights)
            low = owned.storage_offset()
            for slot in bucket.written():
                start, stop = max(slot.start - low, 0), min(slot.stop - low, owned.numel())
                if start < stop:
                    master[start:stop].copy_(owned[start:stop])

    def _require_reduced(self, reduced: bool, call: str) -> None:
        if self._reduced != reduced:
            raise ConfigError(
                f"{call}() of gradients that are {'already' if self._reduced else 'not yet'} summed over ranks",
                "a step is reduce(), norm() if wanted, update() or zero_grad()",
                "step() calls them in this order",
            )

    def _require_unchanged(self) -> None:
        now = {name: parameter for name, parameter in self._module.named_parameters() if parameter.requires_grad}
        moved = {id(slot.parameter) for bucket in self.buckets for slot in bucket.left()}
        for name in {**self._trained, **now}:
            if now.get(name) is not self._trained.get(name) or id(now[name]) in moved:
                raise ConfigError(
                    f"{name} was replaced, moved, added, removed, frozen or unfrozen after Zero was made",
                    "the parameters that are trained must stay the same, in the flat buffers of one Zero",
                    "Make these changes first, then Zero; write new values with copy_() or load_state_dict()",
                )

    def _require_updating(self, *_: object) -> None:
        if self.masters[0].grad is None:
            raise ConfigError("optimizer.step()", "gradients must be summed over ranks before", "Use the step() of Zero, or of the engine")

    def state(self) -> dict[str, torch.Tensor]:
        """What this rank must keep to go on exactly: masters and optimizer state, by kind and bucket number, and the steps taken.

        The tensors are those in use, not copies; state that an optimizer has not made yet is absent.
        """
        self._take_over_written()
        tensors = {"steps_taken": torch.tensor(self.steps_taken)}
        for number, master in enumerate(self.masters):
            tensors[f"master.{number}"] = master.detach()
            for key, value in self.optimizer.state[master].items():
                if isinstance(value, torch.Tensor):
                    tensors[f"{key}.{number}"] = value
        return tensors

    @torch.no_grad()
    def load_state(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy what `state` gave back into place, and publish the parameters. All ranks must call. Raises ConfigError."""
        self._require_fitting(tensors)
        self._take_over_written()  # so that it is not done later, to what is loaded here
        self.optimizer.state.clear()
        self.steps_taken = int(tensors["steps_taken"])
        for name, value in tensors.items():
            key, _, number = name.rpartition(".")
            if not key:
                continue
            master = self.masters[int(number)]
            if key == "master":
                master.copy_(value)
            else:
                on_device = value.ndim > 0 or self.optimizer.defaults.get("fused")  # torch keeps step counts on the CPU otherwise
                self.optimizer.state[master][key] = value.to(master.device if on_device else "cpu", copy=True)
        self.publish()

    def _require_fitting(self, tensors: Mapping[str, torch.Tensor]) -> None:
        shapes = {str(number): master.shape for number, master in enumerate(self.masters)}
        needed = {"steps_taken": torch.Size(), **{f"master.{number}": shape for number, shape in shapes.items()}}

        def fits(name: str, tensor: torch.Tensor) -> bool:
            if name in needed:
                return tensor.shape == needed[name]
            shape = shapes.get(name.rpartition(".")[2])
            return shape is not None and (tensor.shape == shape or tensor.numel() == 1)

        wrong = [f"without {name}" for name in needed if name not in tensors]
        wrong += [f"with {name} {list(tensor.shape)}" for name, tensor in tensors.items() if not fits(name, tensor)]
        if not wrong and not float(tensors["steps_taken"]).is_integer():
            wrong = [f"with steps_taken {tensors['steps_taken'].item()}"]
        if wrong:
            raise ConfigError(
                f"a state {', '.join(wrong)}",
                f"it must hold {', '.join(f'{name} {list(shape)}' for name, shape in needed.items())}, and besides only what the optimizer "
                f"keeps for one of them, as exp_avg.0 {list(shapes['0'])} or step.0 []",
                "Load what state() gave on the same rank of the same mesh, with the same ZeRO stage, bucket_elements and frozen parameters",
            )


def _no_optimizer(given: str) -> ConfigError:
    rule = "it must make a torch optimizer that works element by element, from parameter groups"
    return ConfigError(given, rule, "Use optimizer=torch.optim.AdamW")


def _move_grad(parameter: torch.Tensor) -> None:
    """Add what autograd left in `.grad` to the flat buffer; layers that write there themselves leave nothing."""
    if parameter.grad is not None:
        parameter.main_grad.add_(parameter.grad)  # type: ignore[attr-defined]
        parameter.grad = None

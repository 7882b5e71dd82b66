"""ZeRO (Rajbhandari et al. 2020): what dp ranks hold alike is kept in shards, one a rank.

Stage 0 keeps everything on every rank. Stage 1 keeps fp32 master weights and optimizer state for one shard: the sum of gradients goes to
the shard's owner, and the new parameters come back. Stage 2 keeps the gradients so too, stage 3 the parameters of layers. All add up the
same numbers in the same order.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager

import torch
from torch import nn

from pymesh3d.comm.watch import on_host
from pymesh3d.config import require_number, require_positive
from pymesh3d.dp.buckets import Bucket, make_buckets
from pymesh3d.dp.exchange import Collectives
from pymesh3d.dp.gradients import Gradients
from pymesh3d.dp.masters import Masters, Optimizer
from pymesh3d.dp.norm import clip_factor
from pymesh3d.dp.trained import agree_on, trained_parameters
from pymesh3d.dp.units import Unit, Units, find_units
from pymesh3d.errors import ConfigError
from pymesh3d.mesh import Mesh
from pymesh3d.placement import placement_of

log = logging.getLogger("pymesh3d")

BUCKET_ELEMENTS = 32 * 2**20
STAGES = (0, 1, 2, 3)


def decays(parameter: nn.Parameter) -> bool:
    """Whether weight decay applies: to matrices, not to norms and biases."""
    return parameter.ndim >= 2


class Zero:
    """Owns the flat buffers of a module's trained parameters and the optimizer over them; `step` is all that a training loop calls.

    `stage` 0 keeps masters and optimizer state whole on every rank, 1 keeps a dp rank's share, 2 of the gradients too, 3 of the parameters
    too. Gradients are summed over dp, so divide the loss by what the whole global batch is divided by (`mesh.dp.size` more than on one
    rank, for a mean). `state` and `load_state` are for a rank's own file, to go on in the same layout; `whole_state_dict` is for the
    weights alone.

    Gradients add up in `parameter.main_grad` over backward passes until `step`, and `parameter.grad` stays None (parallel layers add
    theirs whatever `torch.autograd.grad` was asked for). Put the last backward pass before `step` within `last_pass()`: then ranks exchange
    gradients meanwhile. Values written into a parameter afterwards, as by `load_state_dict`, are taken over, but not through `.data`; which
    parameters are trained, and where they lie, must not change.

    In stages 2 and 3 each backward pass sums its own gradients over the ranks, and in stage 3 the matrices of each of `units` are whole
    only during passes through it (by default the modules in lists and sequences of modules, as layers are; call them as modules). With
    `once_a_step`, better for pipelines, gradients are summed and parameters gathered once a step, which takes the memory for them
    meanwhile.

    `optimizer` makes a torch optimizer, one that works element by element, from groups of flat master weights. `weight_decay` takes the
    place of the optimizer's own, for matrices only. Gradients are added up in `accumulate_dtype` (default: float32, float64 for float64).
    `reduce_dtype` is what a rank's contribution is rounded to, once, before it is sent (default: the parameters' dtype). All values become
    those of the first dp rank. Raises ConfigError for what it cannot use, DistributedError where ranks have different modules.
    """

    def __init__(
        self,
        module: nn.Module,
        mesh: Mesh,
        *,
        stage: int,
        optimizer: Optimizer,
        weight_decay: float,
        reduce_dtype: torch.dtype | None = None,
        accumulate_dtype: torch.dtype | None = None,
        bucket_elements: int = BUCKET_ELEMENTS,
        units: Iterable[nn.Module] | None = None,
        once_a_step: bool = False,
    ) -> None:
        if stage not in STAGES or isinstance(stage, bool):
            raise ConfigError(f"stage={stage!r}", "the ZeRO stages are 0, 1, 2 and 3", "Use stage=1")
        for name, dtype in (("reduce_dtype", reduce_dtype), ("accumulate_dtype", accumulate_dtype)):
            if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
                raise ConfigError(f"{name}={dtype!r}", "it must be a floating-point torch dtype", f"Use {name}=torch.float32")
        require_number("weight_decay", weight_decay, default=0.1)
        require_positive("bucket_elements", bucket_elements)
        if not isinstance(mesh, Mesh):
            raise ConfigError(f"a {type(mesh).__name__} as mesh", "Zero spans all axes of a mesh", "Use the one that init_mesh returns")
        self._module, self._trained = module, trained_parameters(module, mesh)
        self.mesh, self.stage, self.reduce_dtype, self.accumulate_dtype = mesh, stage, reduce_dtype, accumulate_dtype
        self.steps_taken = self.steps_skipped = 0
        agree_on(module, mesh)
        sharded = stage == 3 and mesh.dp.size > 1
        modules = (find_units(module) if units is None else list(units)) if sharded else []
        unit_of = _units_of(module, modules)
        self.buckets = make_buckets(
            self._trained.values(),
            shards=mesh.dp.size,
            elements=bucket_elements,
            decays=decays,
            unit=lambda parameter: unit_of.get(id(parameter)),
            accumulate=accumulate_dtype,
        )
        self._exchange = Collectives(mesh.dp, mesh.device, wire=reduce_dtype, everywhere=stage == 0)
        whole = [bucket for bucket in self.buckets if bucket.unit is None]
        for bucket, flat in zip(whole, self._exchange.memory([(bucket.size, bucket.dtype) for bucket in whole]), strict=True):
            bucket.hold_weights(flat)
        members = [[bucket for bucket in self.buckets if bucket.unit == number] for number in range(len(modules))]
        units_made = [Unit(unit, own, mesh.dp.rank) for unit, own in zip(modules, members, strict=True) if own]
        self._units = Units(units_made, self._exchange, mesh.dp.rank, once=once_a_step)
        self._gradients = Gradients(self.buckets, mesh, self._exchange, everywhere=stage == 0, each=stage >= 2 and not once_a_step)
        shards = {bucket: shard for unit in units_made for bucket, shard in zip(unit.buckets, unit.shards, strict=True)}
        owned = [shards[bucket] if bucket in shards else self._owned(bucket) for bucket in self.buckets]
        starts = [0 if stage == 0 else mesh.dp.rank * bucket.shard_size for bucket in self.buckets]
        self._masters = Masters(self.buckets, owned, starts, optimizer, weight_decay)

    def _owned(self, bucket: Bucket) -> torch.Tensor:
        return bucket.weights if self.stage == 0 else bucket.shard(bucket.weights, self.mesh.dp.rank)

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """Torch's, over this rank's flat master weights; learning-rate schedulers of torch work on it."""
        return self._masters.optimizer

    @property
    def masters(self) -> list[nn.Parameter]:
        """This rank's flat master weights, one tensor a bucket."""
        return self._masters.values

    def last_pass(self, parameters: Iterable[nn.Parameter] | None = None) -> AbstractContextManager[None]:
        """`with zero.last_pass(): loss.backward()` sums gradients over dp while it computes. For the last backward pass before `step`.

        `parameters`: those through which it goes, where there are several such passes, as of several stages.
        """
        return self._gradients.last_pass(parameters)

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
        self._gradients.reduce()

    def norm(self, p: float = 2.0) -> torch.Tensor:
        """The second part: the p-norm of the summed gradients, float64 [], the same on every rank and not finite if one of them is not."""
        self._require_reduced(True, "norm")
        return self._gradients.norm(p)

    def update(self, scale: torch.Tensor | None = None) -> None:
        """The last part: multiply the gradients by `scale`, give every rank the new parameters, and forget the gradients."""
        self._require_reduced(True, "update")
        self._units.let_go()
        self._masters.update(self._gradients.owned, scale)
        self._give_back()
        self.steps_taken += 1
        self.zero_grad()

    def zero_grad(self) -> None:
        """Forget all accumulated gradients."""
        self._gradients.forget()

    def reduced_grads(self) -> list[torch.Tensor]:
        """The flat gradients of each bucket as `reduce` makes them, whole on every rank. What was accumulated stays untouched, but that
        what was summed within `last_pass` stays so."""
        self._require_reduced(False, "reduced_grads")
        return self._gradients.reduced_copy()

    def whole(self) -> AbstractContextManager[None]:
        """Within it all parameters are whole, also those of stage 3, and what is written into them counts. All ranks must enter."""
        return self._units.whole()

    @torch.no_grad()
    def _give_back(self) -> None:
        """Give every rank the new parameters, but for those that are gathered when they are needed."""
        if self.stage > 0:
            sent = [self._exchange.gather(self._owned(bucket), bucket.weights) for bucket in self.buckets if bucket.unit is None]
            for pending in sent:
                pending.wait()

    def _require_reduced(self, reduced: bool, call: str) -> None:
        if self._gradients.reduced != reduced:
            raise ConfigError(
                f"{call}() of gradients that are {'already' if self._gradients.reduced else 'not yet'} summed over ranks",
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

    def state(self) -> dict[str, torch.Tensor]:
        """What this rank must keep to go on exactly: masters and optimizer state, by kind and bucket number, and the steps taken.

        The tensors are those in use, not copies; state that an optimizer has not made yet is absent.
        """
        self._masters.take_over_written()
        return {"steps_taken": torch.tensor(self.steps_taken), **self._masters.state()}

    @torch.no_grad()
    def load_state(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy what `state` gave back into place, and publish the parameters. All ranks must call. Raises ConfigError."""
        self._masters.require_fitting(tensors)
        self._masters.take_over_written()  # so that it is not done later, to what is loaded here
        self._units.let_go()
        self._masters.load_state(tensors)
        self.steps_taken = int(tensors["steps_taken"])
        self._masters.publish()
        self._give_back()


def _units_of(module: nn.Module, units: list[nn.Module]) -> dict[int, int]:
    """Of each parameter that is a matrix of one unit alone, and no rank of another axis adds to whose gradient, the number of the unit."""
    users: dict[int, set[int]] = {}
    within: dict[int, nn.Parameter] = {}
    inner = {id(part): number for number, unit in enumerate(units) for part in unit.modules()}
    for part in module.modules():
        for parameter in part.parameters(recurse=False):
            users.setdefault(id(parameter), set()).add(inner.get(id(part), -1))
            within[id(parameter)] = parameter
    return {
        key: number
        for key, numbers in users.items()
        for number in numbers
        if len(numbers) == 1 and number >= 0 and within[key].ndim >= 2 and not placement_of(within[key]).has_summands
    }

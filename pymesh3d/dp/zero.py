"""ZeRO (Rajbhandari et al. 2020): what dp ranks hold alike is kept in shards, one a rank.

Stage 0 keeps everything on every rank. Stage 1 keeps fp32 master weights and optimizer state for one shard: the sum of gradients goes to
the shard's owner, and the new parameters come back. Stage 2 keeps the gradients so too, stage 3 the parameters of layers. All add up the
same numbers in the same order.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager

import torch
from torch import nn

from pymesh3d.axis import Axis
from pymesh3d.comm.collectives import gather_rows
from pymesh3d.comm.watch import fetched
from pymesh3d.config import require_number, require_positive
from pymesh3d.dp.buckets import Bucket, make_buckets
from pymesh3d.dp.exchange import Collectives, Exchange
from pymesh3d.dp.gradients import Gradients
from pymesh3d.dp.hierarchical import Hierarchical
from pymesh3d.dp.masters import Masters, Optimizer, Part
from pymesh3d.dp.norm import clip_factor
from pymesh3d.dp.offload import OffloadedMasters
from pymesh3d.dp.shared import SharedMemory
from pymesh3d.dp.trained import agree_on, trained_parameters
from pymesh3d.dp.units import Unit, Units, find_units
from pymesh3d.errors import ConfigError, SharingError
from pymesh3d.mesh import Mesh
from pymesh3d.placement import placement_of
from pymesh3d.triton_kernels import backend

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
    parameters are trained, and where they lie, must not change. Go backward on the stream on which this was made. What ranks share stays
    until the mesh is closed.

    In stages 2 and 3 each backward pass sums its own gradients over the ranks, and in stage 3 the matrices of each of `units` are whole
    only during passes through it (by default the modules in lists and sequences of modules, as layers are; call them as modules, and let
    them return tensors, in whatever holds them). All ranks must go backward equally often, each time through a trained matrix, and in
    stage 3 through the same units in the same order: a pass of one rank alone ends in an error when the time limit is over. With
    `once_a_step`, better for pipelines, gradients are summed and parameters gathered once a step, which takes the memory for them
    meanwhile.

    `optimizer` makes a torch optimizer, one that works element by element, from groups of flat master weights. `weight_decay` takes the
    place of the optimizer's own, for matrices only, not norms and biases. Gradients are added up in `accumulate_dtype` (default: float32,
    float64 for float64). `reduce_dtype` is what a rank's contribution is rounded to, once, before it is sent (default: the parameters'
    dtype): that of a step, or where each pass sums that of a pass, and these add up in `accumulate_dtype` on the shards. With
    `param_remainders` only what bfloat16 parameters lack of their masters is kept, 2 bytes in place of 4, under torch's AdamW, Adam and
    SGD. With `offload` masters and the state of these three are in the CPU's memory, and pass through the GPU in each step, with the same
    bits; what holds them on the GPU during a step does not grow with the model. `kernels`: whether ranks of one NVLink domain read each
    other's memory by kernels, which also take the steps of these three (default: on GPUs); others talk by collectives, as all do where
    domains have unlike numbers of dp ranks. All values become those of the first dp rank. Raises ConfigError for what it cannot use,
    DistributedError where ranks have different modules.
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
        param_remainders: bool = False,
        offload: bool = False,
        kernels: bool | None = None,
    ) -> None:
        if stage not in STAGES or isinstance(stage, bool):
            raise ConfigError(f"stage={stage!r}", "the ZeRO stages are 0, 1, 2 and 3", "Use stage=1")
        for name, dtype in (("reduce_dtype", reduce_dtype), ("accumulate_dtype", accumulate_dtype)):
            if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
                meant = dtype if isinstance(dtype, str) and isinstance(getattr(torch, dtype, None), torch.dtype) else "float32"
                raise ConfigError(f"{name}={dtype!r}", "it must be a floating-point torch dtype", f"Use {name}=torch.{meant}")
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
            list(self._trained.values()),
            shards=mesh.dp.size,
            elements=bucket_elements,
            decays=decays,
            unit=lambda parameter: unit_of.get(id(parameter)),
            accumulate=accumulate_dtype,
        )
        if kernels is None:
            kernels = mesh.device.type == "cuda" and backend.available
        self._exchange = _exchange(self.buckets, mesh, wire=reduce_dtype, everywhere=stage == 0, kernels=kernels, sharded=sharded)
        self._place_weights(modules, once_a_step)
        self._gradients = Gradients(self.buckets, mesh, self._exchange, everywhere=stage == 0, each=stage >= 2 and not once_a_step)
        parts = [self._part(bucket) for bucket in self.buckets]
        make: Callable[..., Masters] = functools.partial(OffloadedMasters, axis=mesh.all) if offload else Masters
        self._masters = make(parts, optimizer, weight_decay, kernels=kernels, remainders=param_remainders)

    def _place_weights(self, modules: list[nn.Module], once_a_step: bool) -> None:
        """Move the parameters into flat memory: whole, or in shards those of `modules`."""
        rank = self.mesh.dp.rank
        whole = [bucket for bucket in self.buckets if bucket.unit is None]
        cut = [bucket for bucket in self.buckets if bucket.unit is not None]
        wanted = [(bucket.size, bucket.dtype) for bucket in whole] + [(bucket.shard_size, bucket.dtype) for bucket in cut]
        memory = self._exchange.memory(wanted)
        for bucket, flat in zip(whole, memory, strict=False):
            bucket.hold_weights(flat)
        self._returning = self._exchange.gathering([(bucket.shard(bucket.weights, rank), bucket.weights) for bucket in whole])
        self._shards = dict(zip(cut, memory[len(whole) :], strict=True))
        names = {part: name for name, part in self._module.named_modules()}
        units = []
        for number, module in enumerate(modules):
            own = [bucket for bucket in cut if bucket.unit == number]
            if own:
                shards = [self._shards[bucket] for bucket in own]
                units.append(Unit(module, own, shards, self._exchange, rank, name=names.get(module, "")))
        self._units = Units(units, self._exchange, rank, once=once_a_step)
        self._exchange.meet()  # before any rank fetches another's shard

    def _part(self, bucket: Bucket) -> Part:
        """What of a bucket this rank updates."""
        rank = self.mesh.dp.rank
        alone = self.stage == 0 or self.mesh.dp.size == 1
        weights, start = bucket.weights, 0 if alone else rank * bucket.shard_size
        if bucket in self._shards:
            weights = self._shards[bucket]
        elif not alone:
            if isinstance(self._exchange, SharedMemory):
                return Part(bucket, bucket.shard(weights, rank), start, self._exchange.addresses(weights), rank, rank)
            weights = bucket.shard(weights, rank)
        return Part(bucket, weights, start, torch.tensor([weights.data_ptr()], device=weights.device), 0, 0)

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

    def step(self, max_norm: float | None = None, *, veto: torch.Tensor | None = None) -> tuple[float, bool]:
        """Sum the gradients, clip them to `max_norm`, update the parameters, and forget the gradients. All ranks must call.

        Returns the gradients' norm before clipping, and whether the step was taken: where the norm is not finite no rank takes it. `veto`,
        float64 [], the same on all ranks, is added to the norm: NaN for a step that must not be taken.
        """
        if max_norm is not None:
            require_number("max_norm", max_norm, default="None, which switches clipping off", above_zero=True)
        if max_norm is None and self._masters.can_sum:
            self._require_unchanged()
            if (largest := self._gradients.offer()) is not None:
                return self._step_at_once(largest, veto)
        self.reduce()
        total = self.norm() if veto is None else self.norm() + veto
        factor = torch.ones_like(total) if max_norm is None else clip_factor(total, max_norm)
        told = fetched(total, "gradient norm", self.mesh.all)
        ahead = self._masters.by_rules  # which look at the norm themselves, while the host waits for it
        if ahead:
            self._update(torch.where(total.isfinite(), factor, torch.nan))
        norm = told().item()
        taken = math.isfinite(norm)  # every rank has the same bits, so all take the step or none
        if taken and not ahead:
            self._update(None if max_norm is None else factor)
        self._end_step(taken, norm)
        return norm, taken

    def _step_at_once(self, largest: torch.Tensor, veto: torch.Tensor | None) -> tuple[float, bool]:
        """Sum, update and give back in one pass over memory, which the links decide. Whether all numbers are finite is known before; a sum
        that might not be, as contributions of 1e38 are that large, counts as one that is not."""
        every = self.mesh.all
        most = gather_rows(largest, every, "gradients' size").amax()
        vote = torch.where(most < torch.finfo(most.dtype).max / self.mesh.dp.size, 0.0, torch.inf).double()
        if veto is not None:
            vote = vote + veto
        self._exchange.meet()
        self._update(torch.where(vote == 0.0, 1.0, torch.nan))
        total = torch.where(vote == 0.0, self.norm(), vote)
        norm: float = fetched(total, "gradient norm", every)().item()
        taken = math.isfinite(norm)
        self._end_step(taken, norm)
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
        self._require_closed("update()")
        self._gradients.agree()
        self._update(scale)
        self._end_step(True)

    def _update(self, scale: torch.Tensor | None) -> None:
        """New masters, and new parameters on every rank, but for those that are gathered when they are needed."""
        self._units.let_go()
        gradients = self._gradients
        offered = [gradients.offered.get(bucket, owned) for bucket, owned in zip(self.buckets, gradients.owned, strict=True)]
        self._masters.update(offered, scale)
        self._give_back(pushed=self._masters.by_kernels and isinstance(self._exchange, SharedMemory))

    def _end_step(self, taken: bool, norm: float = math.nan) -> None:
        if not taken:
            self.steps_skipped += 1
            if self.mesh.rank == 0:
                log.warning("gradient norm is %s: step skipped on all ranks (%d skipped so far)", norm, self.steps_skipped)
        if self._masters.by_rules:
            self._masters.confirm(taken)
        self.steps_taken += taken
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
    def _give_back(self, *, pushed: bool = False) -> None:
        """Give every rank the new parameters, unless the kernels have, but for those that are gathered when they are needed."""
        if self.stage == 0 or self.mesh.dp.size == 1:
            return
        if not pushed:
            self._returning.start()
            self._returning.finish()
        self._exchange.meet()

    def _require_closed(self, call: str) -> None:
        if self._units.open:
            raise ConfigError(f"{call} within whole()", "there parameters are whole to be read and written", "Leave it first")

    def _require_reduced(self, reduced: bool, call: str) -> None:
        if self._gradients.reduced != reduced:
            raise ConfigError(
                f"{call}() of gradients that are {'already' if self._gradients.reduced else 'not yet'} summed over ranks",
                "a step is reduce(), norm() if wanted, update() or zero_grad()",
                "step() calls them in this order",
            )

    def _require_unchanged(self) -> None:
        self._require_closed("step()")
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
        self._require_closed("load_state()")
        self._masters.require_fitting(tensors)
        self._masters.take_over_written()  # so that it is not done later, to what is loaded here
        self._exchange.meet()  # no rank computes any more
        self._units.let_go()
        self._masters.load_state(tensors)
        self.steps_taken = int(tensors["steps_taken"])
        self._masters.publish()
        self._give_back()


def _exchange(
    buckets: Sequence[Bucket], mesh: Mesh, *, wire: torch.dtype | None, everywhere: bool, kernels: bool, sharded: bool
) -> Exchange:
    """By kernels, where dp ranks are in one domain and can share memory, or so many in each of several; else by collectives.

    What is `sharded` is gathered over process groups of its own: where ranks use different parameters of a layer, they sum its gradients
    earlier or later among what they gather.
    """

    def gathering(domain: int) -> Axis | None:
        return mesh.across(mesh.dp, domain, "parameters") if sharded else None

    domain = mesh.topology.domain_size(mesh.along("dp").tolist()) if kernels else 1
    if domain > 1:
        try:
            if domain == mesh.dp.size:
                return SharedMemory(mesh.dp, mesh.device, buckets, wire=wire, everywhere=everywhere)
            inner, outer = mesh.subgroup(mesh.dp, domain), mesh.across(mesh.dp, domain)
            apart = gathering(domain)
            return Hierarchical(mesh.dp, inner, outer, mesh.device, buckets, wire=wire, everywhere=everywhere, gathering=apart)
        except SharingError as error:  # on all ranks
            log.warning("gradients are summed by collectives: %s", error)
    return Collectives(mesh.dp, mesh.device, wire=wire, everywhere=everywhere, gathering=gathering(1))


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

"""Master weights, the optimizer over them, and the way of new values back into the parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from pymesh3d.dp.buckets import Bucket
from pymesh3d.dp.rules import Steps, is_known
from pymesh3d.errors import ConfigError
from pymesh3d.triton_kernels.zero_step import joined_ref, remainder_ref, update, update_ref

Optimizer = Callable[[Iterable[dict[str, Any]]], torch.optim.Optimizer]
KEPT_WHOLE = ("exp_avg", "exp_avg_sq", "momentum_buffer")  # by optimizers that the kernels know, a number for each of a parameter
KEPT = ("step", *KEPT_WHOLE)
NOT_ELEMENTWISE = ("Adafactor", "LBFGS", "Muon")  # they look at whole matrices, or at all parameters at once


class Part(NamedTuple):
    """What of a bucket this rank updates: `weights`, in the model's memory, which begin with the bucket's number `start`.

    A kernel finds them as shard number `shard` of what begins at `addresses`, int64 [ranks], on the ranks of which this one is number
    `rank`: one alone, or several, and then it gives all of them the new parameters.
    """

    bucket: Bucket
    weights: torch.Tensor
    start: int
    addresses: torch.Tensor
    rank: int
    shard: int


class Offered(NamedTuple):
    """Gradients that the kernel which updates sums over ranks itself, and the sums of their squares that it gives; see its `update`."""

    contributions: torch.Tensor
    wire: torch.dtype
    accumulated: torch.dtype
    squares: torch.Tensor


class Masters:
    """`values`, the master weights, one tensor for each part of a bucket that this rank updates, and torch's `optimizer` over them, whose
    groups are alike in weight decay. With `kernels` these take the steps of the optimizers that they know.

    With `remainders` `values` are the parameters themselves, bfloat16, and what is kept besides is the 16 bits that these lack of float32.
    """

    def __init__(
        self, parts: Sequence[Part], optimizer: Optimizer, weight_decay: float, *, kernels: bool, remainders: bool = False
    ) -> None:
        """Raises ConfigError."""
        if not callable(optimizer):
            made = isinstance(optimizer, torch.optim.Optimizer)  # whose text is long
            raise _no_optimizer(f"optimizer={type(optimizer).__name__}(...)" if made else f"optimizer={optimizer!r}")
        self._parts, self._kernels = parts, kernels
        if remainders and (others := {part.weights.dtype for part in parts} - {torch.bfloat16}):
            rule = "only bfloat16 parameters lack the 16 bits that are kept for them"
            raise ConfigError(f"param_remainders=True, parameters of {', '.join(map(str, others))}", rule, "Use param_remainders=False")
        self._remainders = [torch.zeros_like(part.weights, dtype=torch.int16) for part in parts] if remainders else []
        dtypes = [part.weights.dtype if remainders else part.bucket.master_dtype for part in parts]
        self.values = [nn.Parameter(self._made_of(part.weights, dtype)) for part, dtype in zip(parts, dtypes, strict=True)]
        groups: dict[bool, list[nn.Parameter]] = {}
        for value, part in zip(self.values, parts, strict=True):
            groups.setdefault(part.bucket.decay, []).append(value)
        try:
            self.optimizer = optimizer(
                [{"params": group, "weight_decay": weight_decay if decay else 0.0} for decay, group in groups.items()]
            )
        except ValueError as error:  # LBFGS takes no groups
            raise _no_optimizer(f"optimizer={optimizer!r} raised {error}") from error
        if not isinstance(self.optimizer, torch.optim.Optimizer) or type(self.optimizer).__name__ in NOT_ELEMENTWISE:
            raise _no_optimizer(f"optimizer={optimizer!r} made a {type(self.optimizer).__name__}")
        if {id(value) for group in self.optimizer.param_groups for value in group["params"]} != {id(value) for value in self.values}:
            raise _no_optimizer(f"optimizer={optimizer!r} made a {type(self.optimizer).__name__} of other weights than those it got")
        self.optimizer.register_step_pre_hook(self._require_updating)
        self._steps = Steps(self.optimizer)
        if remainders and not is_known(self.optimizer, 1, torch.bfloat16):
            rule = "only steps of torch's own AdamW, Adam and SGD, without amsgrad and such, are taken on remainders"
            raise ConfigError(f"param_remainders=True with a {type(self.optimizer).__name__}", rule, "Use param_remainders=False")

    @staticmethod
    def _made_of(weights: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Masters with the values of weights."""
        return weights.to(dtype)

    @property
    def by_rules(self) -> bool:
        """Whether `update` is ours, and not torch's: then a `scale` of NaN changes nothing, and `confirm` must say whether it was one."""
        return bool(self._remainders) or self.by_kernels

    @property
    def by_kernels(self) -> bool:
        """Whether kernels update, which give other ranks the new parameters too where a part says so."""
        return self._kernels and is_known(self.optimizer, 1, torch.bfloat16 if self._remainders else torch.float32)

    @property
    def can_sum(self) -> bool:
        """Whether gradients may be `Offered`."""
        return self.by_kernels

    @torch.no_grad()
    def update(self, grads: Sequence[torch.Tensor | Offered], scale: torch.Tensor | None) -> None:
        """One step on gradients, which are multiplied by `scale`, float64 []: new masters, and what is updated here of the parameters."""
        self.take_over_written()
        if self.by_rules:
            if scale is None:
                scale = torch.ones((), dtype=torch.float64, device=self._parts[0].weights.device)
            if self.by_kernels:
                self._update_by_kernels(grads, scale)
            else:
                self._update_remainders(_summed(grads), scale)
            return
        summed = _summed(grads)
        if scale is not None and summed:
            torch._foreach_mul_(summed, scale.to(max((grad.dtype for grad in summed), key=lambda dtype: dtype.itemsize)))
        self._update_by_torch(summed)

    def _update_by_torch(self, grads: Sequence[torch.Tensor]) -> None:
        for value, grad in zip(self.values, grads, strict=True):
            value.grad = grad.to(value.dtype)
        try:
            self.optimizer.step()
        finally:
            for value in self.values:
                value.grad = None
        self.publish()

    def _update_by_kernels(self, grads: Sequence[torch.Tensor | Offered], scale: torch.Tensor) -> None:
        following = self._steps.next()
        masters = self._remainders or [value.detach() for value in self.values]
        for part, value, master, grad in zip(self._parts, self.values, masters, grads, strict=True):
            rule, remembered = following[value]
            update(
                rule,
                master,
                remembered,
                part.addresses,
                part.weights.dtype,
                scale,
                shard=part.shard,
                rank=part.rank,
                push=part.addresses.numel() > 1,
                **({"grads": grad} if isinstance(grad, torch.Tensor) else grad._asdict()),
            )

    def _update_remainders(self, grads: Sequence[torch.Tensor], scale: torch.Tensor) -> None:
        following = self._steps.next()
        for part, value, remainder, grad in zip(self._parts, self.values, self._remainders, grads, strict=True):
            rule, remembered = following[value]
            master = joined_ref(part.weights, remainder)
            update_ref(rule, master, remembered, grad.float(), scale)
            part.weights.copy_(master)
            remainder.copy_(remainder_ref(master))

    def confirm(self, taken: bool) -> None:
        """Whether the step of `by_rules` was taken."""
        self._steps.confirm(taken)

    @torch.no_grad()
    def publish(self) -> None:
        """Give the model's numbers the masters' values."""
        for part, value in zip(self._parts, self.values, strict=True):
            part.weights.copy_(value)  # rounds to bf16; for float32 and with remainders both are the same memory

    @torch.no_grad()
    def take_over_written(self) -> None:
        """Give the masters what was written into parameters since the last step; all others keep digits that bf16 has not."""
        for number, (part, value) in enumerate(zip(self._parts, self.values, strict=True)):
            for slot in part.bucket.written():
                start, stop = max(slot.start - part.start, 0), min(slot.stop - part.start, value.numel())
                if start < stop and self._remainders:
                    self._remainders[number][start:stop] = 0
                elif start < stop:
                    value[start:stop].copy_(part.weights[start:stop])

    def _require_updating(self, *_: object) -> None:
        if self.values[0].grad is None:
            raise ConfigError("optimizer.step()", "gradients must be summed over ranks before", "Use the step() of Zero, or of the engine")

    def state(self) -> dict[str, torch.Tensor]:
        """Masters, whole whatever is kept of them, and optimizer state, by kind and bucket number: those in use, not copies, where that can
        be. What is not made yet is absent."""
        tensors: dict[str, torch.Tensor] = {}
        for number, value in enumerate(self.values):
            master = joined_ref(value.detach(), self._remainders[number]) if self._remainders else value.detach()
            tensors[f"master.{number}"] = master
            for key, kept in self.optimizer.state[value].items():
                if isinstance(kept, torch.Tensor):
                    tensors[f"{key}.{number}"] = kept
        return tensors

    @torch.no_grad()
    def load_state(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy what `state` gave back into place."""
        self.optimizer.state.clear()
        for name, given in tensors.items():
            key, _, number = name.rpartition(".")
            if not key:
                continue
            value = self.values[int(number)]
            if key == "master":
                value.copy_(given)
                if self._remainders:
                    self._remainders[int(number)].copy_(remainder_ref(given.to(value.device, torch.float32)))
            else:
                on_device = given.ndim > 0 or self.optimizer.defaults.get("fused")  # torch keeps step counts on the CPU otherwise
                self.optimizer.state[value][key] = given.to(value.device if on_device else "cpu", copy=True)

    def require_fitting(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Raise ConfigError where this is no state of the same layout."""
        shapes = {str(number): value.shape for number, value in enumerate(self.values)}
        needed = {"steps_taken": torch.Size(), **{f"master.{number}": shape for number, shape in shapes.items()}}

        def fits(name: str, tensor: torch.Tensor) -> bool:
            if name in needed:
                return tensor.shape == needed[name]
            kind, _, number = name.rpartition(".")
            if number not in shapes or (known and kind not in KEPT):
                return False
            return tensor.shape == shapes[number] or (tensor.numel() == 1 and kind not in KEPT_WHOLE)

        known = is_known(self.optimizer, 1, self.values[0].dtype)
        wrong = [f"without {name}" for name in needed if name not in tensors]
        wrong += [f"with {name} {list(tensor.shape)}" for name, tensor in tensors.items() if not fits(name, tensor)]
        if known and not wrong and not isinstance(self.optimizer, torch.optim.SGD):
            for number in shapes:
                kept = [f"{kind}.{number}" for kind in ("step", "exp_avg", "exp_avg_sq")]
                wrong += [f"without {name}" for name in kept if name not in tensors and any(other in tensors for other in kept)]
        if not wrong and not float(tensors["steps_taken"]).is_integer():
            wrong = [f"with steps_taken {tensors['steps_taken'].item()}"]
        if wrong:
            raise ConfigError(
                f"a state {', '.join(wrong)}",
                f"it must hold {', '.join(f'{name} {list(shape)}' for name, shape in needed.items())}, and besides only what the optimizer "
                f"keeps for one of them, as exp_avg.0 {list(shapes['0'])} or step.0 []",
                "Load what state() gave on the same rank of the same mesh, with the same ZeRO stage, bucket_elements and frozen parameters",
            )


def _summed(grads: Sequence[torch.Tensor | Offered]) -> list[torch.Tensor]:
    """All of them, of which none is offered: that is for kernels."""
    summed = [grad for grad in grads if isinstance(grad, torch.Tensor)]
    assert len(summed) == len(grads), "without kernels nothing is offered"
    return summed


def _no_optimizer(given: str) -> ConfigError:
    rule = "it must make a torch optimizer that works element by element, from parameter groups"
    return ConfigError(given, rule, "Use optimizer=torch.optim.AdamW")

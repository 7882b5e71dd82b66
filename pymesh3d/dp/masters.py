"""Master weights, the optimizer over them, and the way of new values back into the parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from pymesh3d.dp.buckets import Bucket
from pymesh3d.dp.rules import Steps, is_known
from pymesh3d.errors import ConfigError
from pymesh3d.triton_kernels.zero_step import update

Optimizer = Callable[[Iterable[dict[str, Any]]], torch.optim.Optimizer]
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


class Masters:
    """`values`, the master weights, one tensor for each part of a bucket that this rank updates, and torch's `optimizer` over them, whose
    groups are alike in weight decay. With `kernels` these take the steps of the optimizers that they know.
    """

    def __init__(self, parts: Sequence[Part], optimizer: Optimizer, weight_decay: float, *, kernels: bool) -> None:
        """Raises ConfigError."""
        if not callable(optimizer):
            raise _no_optimizer(f"optimizer={optimizer!r}")
        self._parts, self._kernels = parts, kernels
        self.values = [nn.Parameter(part.weights.to(part.bucket.master_dtype), requires_grad=True) for part in parts]
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
        self.optimizer.register_step_pre_hook(self._require_updating)
        self._steps = Steps(self.optimizer)

    @property
    def by_kernels(self) -> bool:
        """Whether `update` is theirs: then a `scale` of NaN changes nothing, and `confirm` must say whether it was one."""
        return self._kernels and is_known(self.optimizer, hooks=1)

    @torch.no_grad()
    def update(self, grads: Sequence[torch.Tensor], scale: torch.Tensor | None) -> None:
        """One step on gradients, which are multiplied by `scale`, float64 []: new masters, and what is updated here of the parameters."""
        self.take_over_written()
        if self.by_kernels:
            self._update_by_kernels(grads, scale)
            return
        if scale is not None and grads:
            torch._foreach_mul_(list(grads), scale.to(max((grad.dtype for grad in grads), key=lambda dtype: dtype.itemsize)))
        for value, grad in zip(self.values, grads, strict=True):
            value.grad = grad.to(value.dtype)
        try:
            self.optimizer.step()
        finally:
            for value in self.values:
                value.grad = None
        self.publish()

    def _update_by_kernels(self, grads: Sequence[torch.Tensor], scale: torch.Tensor | None) -> None:
        scale = torch.ones((), dtype=torch.float64, device=self.values[0].device) if scale is None else scale
        following = self._steps.next()
        for part, value, grad in zip(self._parts, self.values, grads, strict=True):
            rule, remembered = following[value]
            update(
                rule,
                value.detach(),
                remembered,
                part.addresses,
                part.weights.dtype,
                scale,
                shard=part.shard,
                rank=part.rank,
                push=part.addresses.numel() > 1,
                grads=grad,
            )

    def confirm(self, taken: bool) -> None:
        """Whether the kernels' step was taken."""
        self._steps.confirm(taken)

    @torch.no_grad()
    def publish(self) -> None:
        """Give the model's numbers the masters' values."""
        for part, value in zip(self._parts, self.values, strict=True):
            part.weights.copy_(value)  # rounds to bf16; for float32 both are the same memory

    @torch.no_grad()
    def take_over_written(self) -> None:
        """Give the masters what was written into parameters since the last step; all others keep digits that bf16 has not."""
        for part, value in zip(self._parts, self.values, strict=True):
            for slot in part.bucket.written():
                start, stop = max(slot.start - part.start, 0), min(slot.stop - part.start, value.numel())
                if start < stop:
                    value[start:stop].copy_(part.weights[start:stop])

    def _require_updating(self, *_: object) -> None:
        if self.values[0].grad is None:
            raise ConfigError("optimizer.step()", "gradients must be summed over ranks before", "Use the step() of Zero, or of the engine")

    def state(self) -> dict[str, torch.Tensor]:
        """Masters and optimizer state, by kind and bucket number: those in use, not copies. What is not made yet is absent."""
        tensors: dict[str, torch.Tensor] = {}
        for number, value in enumerate(self.values):
            tensors[f"master.{number}"] = value.detach()
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

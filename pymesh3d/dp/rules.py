"""Which of torch's optimizers the kernels carry out themselves, with the numbers and the state that torch's object has."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from pymesh3d.triton_kernels.zero_step import SGD, AdamW

KNOWN = (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD)
OTHERWISE = ("amsgrad", "maximize", "differentiable", "capturable")  # options that the kernels do not know


def is_known(optimizer: torch.optim.Optimizer, hooks: int, dtype: torch.dtype = torch.float32) -> bool:
    """Whether the kernels can take its step: it is torch's own, with none but `hooks` hooks before it, on parameters of `dtype`."""
    return (
        type(optimizer) in KNOWN
        and len(optimizer._optimizer_step_pre_hooks) == hooks
        and not optimizer._optimizer_step_post_hooks
        and not any(group.get(option) for group in optimizer.param_groups for option in OTHERWISE)
        and all(value.dtype == dtype for group in optimizer.param_groups for value in group["params"])
    )


class Steps:
    """The steps of a known optimizer: the numbers of the next one, and what is remembered of the others, as torch's object has them.

    `confirm` says whether the step has been taken whose numbers were asked for.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._made: list[dict[str, Any]] = []  # state that this step is the first to need
        self._counted: dict[int, tuple[torch.Tensor, int, int]] = {}  # by master: torch's count of steps, its version, its value

    def next(self) -> dict[nn.Parameter, tuple[AdamW | SGD, tuple[torch.Tensor, ...]]]:
        """For each of the masters the numbers of its next step, and what is remembered."""
        self._made = []
        of = self._of_sgd if isinstance(self._optimizer, torch.optim.SGD) else self._of_adam
        return {value: of(group, value) for group in self._optimizer.param_groups for value in group["params"]}

    def _of_sgd(self, group: dict[str, Any], value: nn.Parameter) -> tuple[SGD, tuple[torch.Tensor, ...]]:
        state, momentum = self._optimizer.state[value], group["momentum"]
        first = state.get("momentum_buffer") is None
        if first and momentum:
            state["momentum_buffer"] = torch.zeros_like(value, dtype=torch.float32)
            self._made.append(state)
        rule = SGD(float(group["lr"]), momentum, group["dampening"], group["weight_decay"], group["nesterov"], first)
        return rule, (state["momentum_buffer"],) if momentum else ()

    def _of_adam(self, group: dict[str, Any], value: nn.Parameter) -> tuple[AdamW, tuple[torch.Tensor, ...]]:
        state = self._optimizer.state[value]
        if "step" not in state:  # as torch makes it: on the CPU unless torch would use a kernel of its own
            state["step"] = torch.zeros((), device=value.device if group.get("fused") else "cpu")
            state["exp_avg"], state["exp_avg_sq"] = (torch.zeros_like(value, dtype=torch.float32) for _ in range(2))
            self._made.append(state)
        count = state["step"]
        known = self._counted.get(id(value))
        if known is None or known[0] is not count or known[1] != count._version:  # somebody loaded another state
            known = self._counted[id(value)] = (count, count._version, int(count))
        decoupled = type(self._optimizer) is torch.optim.AdamW or bool(group.get("decoupled_weight_decay"))
        beta1, beta2 = map(float, group["betas"])
        rule = AdamW(float(group["lr"]), beta1, beta2, group["eps"], group["weight_decay"], known[2] + 1, decoupled)
        return rule, (state["exp_avg"], state["exp_avg_sq"])

    def confirm(self, taken: bool) -> None:
        """The step of these numbers was taken, or was not: then all is as it was."""
        if not taken:
            for state in self._made:
                state.clear()
            self._counted.clear()
            return
        if self._counted:
            torch._foreach_add_([count for count, _, _ in self._counted.values()], 1)
            self._counted = {key: (count, count._version, number + 1) for key, (count, _, number) in self._counted.items()}
        self._optimizer._opt_called = True  # type: ignore[attr-defined]  # which torch's schedulers ask for

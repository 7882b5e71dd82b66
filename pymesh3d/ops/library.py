"""The parallel products as torch.library operators, in which torch.compile sees no graph break.

Outside of a compiled graph they are not used: their way through the dispatcher costs the host three times what a plain autograd function
does (45 us against 14, a forward on a busy CPU core), and without a graph it is the host that decides how fast small layers are.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch

from pymesh3d.comm.registry import find
from pymesh3d.ops.accumulate import buffer_of
from pymesh3d.ops.products import COLUMN, ROW, Product

_FORWARD = "(Tensor x, Tensor weight, Tensor? bias, Tensor? weight_handle, Tensor? bias_handle, str axis, bool sequence_parallel) -> Tensor"
_BACKWARD = (
    "(Tensor grad_y, Tensor x, Tensor weight, Tensor? bias, Tensor? weight_handle, Tensor? bias_handle, str axis, "
    "bool sequence_parallel, bool[] needs, int call) -> (Tensor, Tensor, Tensor)"
)
_calls = itertools.count()  # for compilers, which else take two calls on the same tensors for one: each adds to the buffers


def _define(name: str, product: Product, tokens: Callable[[int, int], int]) -> Any:
    """The operator `name`; `tokens(own, ranks)` of its output under sequence parallelism, from those of its input."""

    def run(x: Any, weight: Any, bias: Any, weight_handle: Any, bias_handle: Any, axis: str, sequence_parallel: bool) -> torch.Tensor:
        return product.forward(x, weight, bias, find(axis), sequence_parallel).contiguous()  # as `shape` says

    def shape(x: Any, weight: Any, bias: Any, weight_handle: Any, bias_handle: Any, axis: str, sequence_parallel: bool) -> torch.Tensor:
        sizes = list(x.shape[:-1])
        if sequence_parallel:
            sizes[-1] = tokens(sizes[-1], find(axis).size)
        return x.new_empty((*sizes, weight.shape[0]))

    def run_backward(
        grad_y: Any,
        x: Any,
        weight: Any,
        bias: Any,
        weight_handle: Any,
        bias_handle: Any,
        axis: str,
        sequence_parallel: bool,
        needs: Any,
        call: Any,
    ) -> tuple[torch.Tensor, ...]:
        buffers = buffer_of(weight_handle), buffer_of(bias_handle)
        gradients = product.backward(grad_y, x, weight, bias, buffers, find(axis), sequence_parallel, needs, None)
        return tuple(
            torch.zeros_like(handle) if handle is not None else x.new_empty(0) if gradient is None else gradient.contiguous()
            for gradient, handle in zip(gradients, (None, weight_handle, bias_handle), strict=True)
        )

    def shape_backward(
        grad_y: Any,
        x: Any,
        weight: Any,
        bias: Any,
        weight_handle: Any,
        bias_handle: Any,
        axis: str,
        sequence_parallel: bool,
        needs: Any,
        call: Any,
    ) -> tuple[torch.Tensor, ...]:
        wanted = (x, needs[0], None), (weight, needs[1], weight_handle), (bias, needs[2] and bias is not None, bias_handle)
        return tuple(
            torch.empty_like(handle) if handle is not None else x.new_empty(like.shape if needed else 0) for like, needed, handle in wanted
        )

    operator = torch.library.custom_op(f"pymesh3d::{name}", run, mutates_args=(), schema=_FORWARD)
    operator.register_fake(shape)
    gradient = torch.library.custom_op(f"pymesh3d::{name}_backward", run_backward, mutates_args=(), schema=_BACKWARD)
    gradient.register_fake(shape_backward)

    def keep(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        *tensors, ctx.axis, ctx.sequence_parallel = inputs
        ctx.save_for_backward(*tensors)

    def differentiate(ctx: Any, grad_y: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        _, _, _, weight_handle, bias_handle = tensors = ctx.saved_tensors
        needs = list(ctx.needs_input_grad[:3])
        of_x, of_weight, of_bias = gradient(grad_y, *tensors, ctx.axis, ctx.sequence_parallel, needs, next(_calls))
        weights = _placed(of_weight, needs[1], weight_handle)
        biases = _placed(of_bias, needs[2], bias_handle)
        return of_x if needs[0] else None, weights[0], biases[0], weights[1], biases[1], None, None

    operator.register_autograd(differentiate, setup_context=keep)
    return operator


def _placed(grad: torch.Tensor, needed: bool, handle: object) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The gradients of a parameter and of its handle."""
    return (grad if needed else None, None) if handle is None else (None, grad)


column_linear = _define("column_linear", COLUMN, lambda own, ranks: own * ranks)
row_linear = _define("row_linear", ROW, lambda own, ranks: own // ranks)

"""Products that talk to the other ranks of an axis in one kernel, for tensors whose tokens are the dim before the features.

They run where PYMESH3D_PRODUCTS=plain asks for them, on all ranks alike; otherwise torch's product and a collective do. What a kernel
shares with other ranks is the workspace of its op.
"""

from __future__ import annotations

import os

import torch

from pymesh3d.axis import Axis
from pymesh3d.comm.workspace import workspace
from pymesh3d.errors import ConfigError
from pymesh3d.triton_kernels import all_gather_matmul, backend, matmul_all_reduce, matmul_reduce_scatter

VARIABLE = "PYMESH3D_PRODUCTS"  # of the environment; it forces one of `IMPLEMENTATIONS`
IMPLEMENTATIONS = ("torch", "plain")
DTYPES = (torch.bfloat16, torch.float32, torch.float64)


def fused(x: torch.Tensor, axis: Axis) -> bool:
    """Whether products of x with other ranks run in one kernel. Raises ConfigError where what is asked for cannot be."""
    word = os.environ.get(VARIABLE, "torch")
    if word not in IMPLEMENTATIONS:
        raise ConfigError(f"{VARIABLE}={word}", "no such implementation", f"Use {' or '.join(IMPLEMENTATIONS)}, or leave it unset")
    if word == "plain" and not backend.available:
        raise ConfigError(f"{VARIABLE}=plain", backend.reason, f"Use {VARIABLE}=torch, or leave it unset")
    return word == "plain" and axis.size > 1 and x.dtype in DTYPES


def gathered_product(x: torch.Tensor, weight: torch.Tensor, axis: Axis) -> tuple[torch.Tensor, torch.Tensor]:
    """x [..., T / ranks, K] of all ranks times weight [N, K]^T: [T, ..., N], tokens first. With it the gathered x [T, ..., K], which the
    next call writes over.
    """
    mine = x.movedim(-2, 0)
    rows = mine.reshape(-1, mine.shape[-1])
    share = workspace("all_gather_matmul", axis, x.device)
    slots = share.slots(*all_gather_matmul.needed(axis.size, rows.shape[0], rows.shape[1], x.dtype))
    y = all_gather_matmul.launch(rows, weight.detach(), axis.rank, slots, share.counters, patience=axis.timeout.total_seconds())
    sizes = axis.size * mine.shape[0], *mine.shape[1:-1]
    return y.view(*sizes, weight.shape[0]), share.part((*sizes, mine.shape[-1]), x.dtype)


def scattered_product(x: torch.Tensor, weight: torch.Tensor, axis: Axis) -> torch.Tensor:
    """This rank's tokens of the ranks' sum of x [..., T, K] times weight [N, K]^T: [..., T / ranks, N]."""
    tokens = x.movedim(-2, 0)
    rows = tokens.reshape(-1, tokens.shape[-1])
    share = workspace("matmul_reduce_scatter", axis, x.device)
    slots = share.slots(*matmul_reduce_scatter.needed(axis.size, rows.shape[0] // axis.size, weight.shape[0], x.dtype))
    patience = axis.timeout.total_seconds()
    y = matmul_reduce_scatter.launch(rows, weight.detach(), axis.rank, slots, share.counters, patience=patience)
    return y.view(-1, *tokens.shape[1:-1], weight.shape[0]).movedim(0, -2)


def reduced_product(x: torch.Tensor, weight: torch.Tensor, axis: Axis) -> torch.Tensor:
    """The ranks' sum of x [..., K] times weight [N, K]^T: [..., N], the same bits on each."""
    rows = x.reshape(-1, x.shape[-1])
    share = workspace("matmul_all_reduce", axis, x.device)
    slots = share.slots(*matmul_all_reduce.needed(axis.size, rows.shape[0], weight.shape[0], x.dtype))
    y = matmul_all_reduce.launch(rows, weight.detach(), axis.rank, slots, share.counters, patience=axis.timeout.total_seconds())
    return y.view(*x.shape[:-1], weight.shape[0])

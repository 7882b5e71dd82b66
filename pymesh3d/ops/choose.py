"""Which implementation computes a product that talks to other ranks: `torch` (its product, then a collective), `plain` or `hopper`.

All ranks must choose alike, so it depends on nothing but shapes, the kind of GPU, and the environment, which they share.
"""

from __future__ import annotations

import functools
import os

import torch

from pymesh3d.axis import Axis
from pymesh3d.errors import ConfigError
from pymesh3d.triton_kernels import backend, matmul_hopper

VARIABLE = "PYMESH3D_PRODUCTS"  # of the environment; it forces one of `IMPLEMENTATIONS` wherever it can compute at all
IMPLEMENTATIONS = ("torch", "plain", "hopper")
DTYPES = (torch.bfloat16, torch.float32, torch.float64)
LEAST_ROWS = {"all_gather_matmul": 128, "matmul_reduce_scatter": 1}  # of one rank, for the kernels for Hopper that there are


def choose(op: str, rows: torch.Tensor, weight: torch.Tensor, axis: Axis) -> str:
    """For rows [M, K] times weight [N, K]^T along an axis. Raises ConfigError where what the environment asks for cannot be."""
    word = os.environ.get(VARIABLE, "torch")
    if word not in IMPLEMENTATIONS:
        raise ConfigError(f"{VARIABLE}={word}", "no such implementation", f"Use one of {', '.join(IMPLEMENTATIONS)}, or leave it unset")
    if word != "torch" and not backend.available:
        raise ConfigError(f"{VARIABLE}={word}", backend.reason, f"Use {VARIABLE}=torch, or leave it unset")
    if axis.size == 1 or word == "torch":
        return "torch"
    if word == "hopper":
        return word if _on_hopper(op, rows, weight) else "torch"
    return word if rows.dtype in DTYPES else "torch"


def _on_hopper(op: str, rows: torch.Tensor, weight: torch.Tensor) -> bool:
    return (
        op in LEAST_ROWS
        and rows.device.type == "cuda"
        and _is_hopper(rows.device)
        and rows.shape[0] >= LEAST_ROWS[op]
        and matmul_hopper.fits(rows, weight)
    )


@functools.cache
def _is_hopper(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) == (9, 0)

"""Which implementation computes a product that talks to other ranks.

`torch`: its product, then a collective; `plain`: a kernel for any GPU; `hopper-256` and `hopper-128`: one for Hopper, with tiles so wide.
The choice is what was the fastest of a CUDA graph for the most similar product that was measured (measured.json, and what
`pymesh3d bench OP --tune` measured on this machine). All ranks must choose alike, so nothing else counts but what they share: shapes, the
kind of GPU, and the environment.
"""

from __future__ import annotations

import functools
import json
import logging
import math
import os
from pathlib import Path
from typing import Any

import torch

from pymesh3d.axis import Axis
from pymesh3d.errors import ConfigError
from pymesh3d.triton_kernels import backend, matmul_hopper

log = logging.getLogger("pymesh3d")

VARIABLE = "PYMESH3D_PRODUCTS"  # of the environment; it forces one of `IMPLEMENTATIONS` wherever it can compute at all
TILES = {"hopper-256": matmul_hopper.Tiles(64, 256, 64, 3), "hopper-128": matmul_hopper.Tiles(64, 128, 64, 6)}
IMPLEMENTATIONS = ("torch", "plain", *TILES)
DTYPES = (torch.bfloat16, torch.float32, torch.float64)
LEAST_ROWS = {"all_gather_matmul": 128, "matmul_reduce_scatter": 1}  # of a rank, for the ops that have a kernel for Hopper
SHIPPED = Path(__file__).with_name("measured.json")
PAIR = ("rows", "depth", "cols", "depth")
SIMILAR = 3.0  # doublings of sizes, in all, within which one product says something about another


def choose(op: str, rows: torch.Tensor, weight: torch.Tensor, axis: Axis) -> str:
    """The implementation of `op` for rows [M, K], of this rank, times weight [N, K]^T. Raises ConfigError where what the environment asks
    for cannot be.
    """
    word = os.environ.get(VARIABLE)
    if word is not None and word not in IMPLEMENTATIONS:
        raise ConfigError(f"{VARIABLE}={word}", "no such implementation", f"Use one of {', '.join(IMPLEMENTATIONS)}, or leave it unset")
    if word not in (None, "torch") and not backend.available:
        raise ConfigError(f"{VARIABLE}={word}", backend.reason, f"Use {VARIABLE}=torch, or leave it unset")
    if axis.size == 1 or word == "torch":
        return "torch"
    if word is None:
        if rows.device.type != "cuda" or not on_one_host(axis.ranks):
            return "torch"
        turned = weight.stride(-1) != 1
        word = fastest(op, _card(rows.device), axis.size, rows.shape[0], weight.shape[0], rows.shape[1], turned)
    return word if can(word, op, rows, weight) else "torch"


def can(name: str, op: str, rows: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether an implementation that is not torch's can compute this."""
    if not backend.available or name == "torch":
        return False
    if name == "plain":
        return rows.dtype in DTYPES
    return (
        op in LEAST_ROWS
        and rows.device.type == "cuda"
        and torch.cuda.get_device_capability(rows.device) == (9, 0)
        and rows.shape[0] >= LEAST_ROWS[op]
        and matmul_hopper.fits(rows, weight)
    )


def on_one_host(ranks: tuple[int, ...]) -> bool:
    """Whether all run on one machine, as torchrun counts its ranks; only those share memory."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
    return local > 0 and len({rank // local for rank in ranks}) == 1


@functools.lru_cache(maxsize=4096)
def fastest(op: str, card: str, ranks: int, rows: int, cols: int, depth: int, turned: bool) -> str:
    """Of this rank's sizes. `torch` where nothing similar was measured. The log has a line for each choice."""

    def distance(row: dict[str, Any]) -> float:
        sizes = zip((rows, cols, depth), (row["rows"], row["cols"], row["depth"]), strict=True)
        return sum(abs(math.log2(max(here, 1) / there)) for here, there in sizes) + 0.5 * (turned != row["turned"])

    alike = [row for row in measured() if (row["op"], row["card"], row["ranks"]) == (op, card, ranks)]
    nearest = min(alike, key=distance, default=None)
    what = f"{op} of [{rows}, {depth}] and [{cols}, {depth}] over {ranks} ranks"
    if nearest is None or distance(nearest) > SIMILAR:
        log.info("%s: torch, since nothing similar was measured on %s; pymesh3d bench %s --tune does it", what, card, op)
        return "torch"
    best: str = nearest["best"]
    log.info("%s: %s, the fastest on %s of [%d, %d] and [%d, %d]", what, best, card, *(nearest[key] for key in PAIR))
    return best


@functools.cache
def measured() -> list[dict[str, Any]]:
    """What was shipped, and before it what this machine has found out. Raises ConfigError where a file cannot be read."""
    rows: list[dict[str, Any]] = []
    for file in (tuned(), SHIPPED):
        if file.exists():
            try:
                rows += json.loads(file.read_text(encoding="utf-8"))
            except ValueError as error:
                raise ConfigError(str(file), f"not what `bench --tune` writes: {error}", "Delete it, or tune again") from error
    return rows


def tuned() -> Path:
    """Where `pymesh3d bench OP --tune` leaves what it found."""
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(cache) / "pymesh3d" / "products.json"


def state() -> str:
    """What decides here, for `pymesh3d env`. Raises ConfigError where a file cannot be read."""
    if word := os.environ.get(VARIABLE):
        return f"{word}, wherever it can compute: {VARIABLE} forces it"
    if not torch.cuda.is_available():
        return "torch (others are chosen on GPUs only)"
    card = torch.cuda.get_device_name()
    if not (rows := [row for row in measured() if row["card"] == card]):
        return f"torch: nothing else was measured on {card}; pymesh3d bench all_gather_matmul --tune does it"
    ranks = " and ".join(str(count) for count in sorted({row["ranks"] for row in rows}))
    return f"the fastest of {len(rows)} that were measured on {card} with {ranks} ranks ({tuned()})"


@functools.cache
def _card(device: torch.device) -> str:
    return torch.cuda.get_device_name(device)

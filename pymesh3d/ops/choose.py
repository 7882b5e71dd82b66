"""Which implementation computes a product that talks to other ranks.

`torch`: its product, then a collective; `plain`: a kernel for any GPU; `hopper-256` and `hopper-128`: one for Hopper, with tiles so wide.
The choice is what was the fastest, in a CUDA graph, for the most similar product that `pymesh3d bench OP --tune` measured: on this machine,
or on one of ours, whose measurements come with pymesh3d. All ranks must choose alike, so nothing else counts but what they share: shapes,
dtype, the kind of GPU, and the environment.
"""

from __future__ import annotations

import functools
import json
import logging
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from pymesh3d.axis import Axis
from pymesh3d.errors import ConfigError
from pymesh3d.triton_kernels import backend
from pymesh3d.triton_kernels.launch_hopper import LARGE, SMALL, fits

log = logging.getLogger("pymesh3d")

VARIABLE = "PYMESH3D_PRODUCTS"  # of the environment; it forces one of `IMPLEMENTATIONS` wherever it can compute at all
TILES = {"hopper-256": LARGE, "hopper-128": SMALL}
IMPLEMENTATIONS = ("torch", "plain", *TILES)
DTYPES = (torch.bfloat16, torch.float32, torch.float64)
LEAST = 128  # rows of a rank, which a kernel for Hopper gathers, or sums up for the others
PRODUCT = ("op", "card", "ranks", "rows", "cols", "depth", "turned")  # what is known of one that was measured, beside the "best"
PAIR = ("rows", "depth", "cols", "depth")
SHIPPED = Path(__file__).with_name("products.json")  # 2 x H200: `pymesh3d bench OP --tune` of each op
SAME = {"NVIDIA H100 80GB HBM3": "NVIDIA H200"}  # as many processors and as fast links: until one is measured, what the other found counts
SIMILAR = 3.0  # doublings of sizes, in all, within which one product says something about another


def choose(op: str, sizes: tuple[int, int, int], turned: bool, like: torch.Tensor, axis: Axis) -> str:
    """The implementation of `op` for rows [M, K] of this rank times a weight [N, K]^T. `sizes`: M, N, K; `turned`: the transpose of the
    weight is what is kept; `like`: has their dtype and device. Raises ConfigError where what the environment asks for cannot be.
    """
    word = forced()
    if axis.size == 1 or word == "torch":
        return "torch"
    if word is None:
        if like.device.type != "cuda" or not on_one_host(axis.ranks):
            return "torch"
        word = fastest(op, _card(like.device), axis.size, *sizes, turned)
    return word if can(word, op, sizes, like, axis.size) else "torch"


def forced() -> str | None:
    """What the environment asks for. Raises ConfigError where that cannot be."""
    word = os.environ.get(VARIABLE) or None
    if word is not None and word not in IMPLEMENTATIONS:
        raise ConfigError(f"{VARIABLE}={word}", "no such implementation", f"Use one of {', '.join(IMPLEMENTATIONS)}, or leave it unset")
    if word not in (None, "torch") and not backend.available:
        raise ConfigError(f"{VARIABLE}={word}", backend.reason, f"Use {VARIABLE}=torch, or leave it unset")
    return word


def can(name: str, op: str, sizes: tuple[int, int, int], like: torch.Tensor, ranks: int) -> bool:
    """Whether an implementation that is not torch's can compute this."""
    if not backend.available or name == "torch":
        return False
    if name == "plain":
        return like.dtype in DTYPES
    if not (_is_hopper(like.device) and fits(*sizes, like.dtype)):
        return False
    if op == "matmul_all_reduce":
        return sizes[0] % ranks == 0 and sizes[0] >= LEAST * ranks
    return op != "all_gather_matmul" or sizes[0] >= LEAST


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

    of_op = [row for row in measured() if (row["op"], row["ranks"]) == (op, ranks)]
    alike = [row for row in of_op if row["card"] == card] or [row for row in of_op if row["card"] == SAME.get(card)]
    nearest = min(alike, key=distance, default=None)
    what = f"{op} of [{rows}, {depth}] and [{cols}, {depth}] over {ranks} ranks"
    if nearest is None or distance(nearest) > SIMILAR:
        log.info("%s: torch, since nothing similar was measured on %s; pymesh3d bench %s --tune does it", what, card, op)
        return "torch"
    best: str = nearest["best"]
    log.info("%s: %s, the fastest on %s of [%d, %d] and [%d, %d]", what, best, nearest["card"], *(nearest[key] for key in PAIR))
    return best


@functools.cache
def measured() -> list[dict[str, Any]]:
    """What this machine has found out, and for other products what comes with pymesh3d. Raises ConfigError as `_read` does."""
    own = _own()
    known = {_product(row) for row in own}
    shipped = json.loads(SHIPPED.read_text(encoding="utf-8"))
    return [row for row in [*own, *(row for row in shipped if _product(row) not in known)] if row["best"] in IMPLEMENTATIONS]


def _own() -> list[dict[str, Any]]:
    """What this machine has found out; nothing where its file may not be read. Raises ConfigError as `_read` does."""
    try:
        return _read()
    except OSError as error:
        what = "what was measured elsewhere decides which kernels compute"
        log.warning("%s cannot be read (%s): %s", tuned(), error.strerror, what)
        return []


def _read() -> list[dict[str, Any]]:
    """What stands in this machine's file, nothing if there is none. Raises OSError, and ConfigError where it holds something else."""
    try:
        data = tuned().read_bytes()
    except FileNotFoundError:
        return []
    try:
        rows = json.loads(data)
    except (ValueError, RecursionError):
        rows = None
    if not isinstance(rows, list) or not all(map(_is_measurement, rows)):
        raise ConfigError(str(tuned()), "not what `bench --tune` writes", "Delete it, and tune again")
    return rows


def _is_measurement(row: Any) -> bool:
    if not isinstance(row, dict) or {*row} != {*PRODUCT, "best"} or type(row["turned"]) is not bool:
        return False
    words, sizes = (row[key] for key in ("op", "card", "best")), (row[key] for key in ("ranks", "rows", "cols", "depth"))
    return all(type(word) is str for word in words) and all(type(size) is int and 0 < size < 1 << 62 for size in sizes)


def _product(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[key] for key in PRODUCT)


def keep(rows: Sequence[dict[str, Any]]) -> None:
    """Put what was measured into the file, in place of the same products, at once: jobs may read it. Raises OSError where that cannot be
    read or written, and ConfigError where it holds something else.
    """
    new = {_product(row): row for row in rows}
    old = [row for row in _read() if _product(row) not in new]
    file = tuned()
    file.parent.mkdir(parents=True, exist_ok=True)
    beside = file.with_suffix(f".{os.getpid()}")
    beside.write_text("[\n" + ",\n".join(json.dumps(row) for row in [*old, *new.values()]) + "\n]\n", encoding="utf-8")
    beside.replace(file)
    measured.cache_clear()
    fastest.cache_clear()


def tuned() -> Path:
    """Where `pymesh3d bench OP --tune` leaves what it found."""
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "pymesh3d" / "products.json"


def state() -> str:
    """What decides here, for `pymesh3d env`. Raises ConfigError as `forced` and `measured` do."""
    if word := forced():
        return f"{word}, wherever it can compute: {VARIABLE} forces it"
    if not torch.cuda.is_available():
        return "torch (others are chosen on GPUs only)"
    card = torch.cuda.get_device_name()
    if not (rows := [row for row in measured() if row["card"] in (card, SAME.get(card))]):
        return f"torch: nothing else was measured on {card}; pymesh3d bench all_gather_matmul --tune does it"
    ranks = " and ".join(str(count) for count in sorted({row["ranks"] for row in rows}))
    cards = " and ".join(sorted({row["card"] for row in rows}))
    own = sum(row in rows for row in _own())
    return (
        f"the fastest for the most similar of {len(rows)} products on {cards} with {ranks} ranks, {own} of them measured here ({tuned()})"
    )


@functools.cache
def _card(device: torch.device) -> str:
    return torch.cuda.get_device_name(device)


@functools.cache
def _is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)

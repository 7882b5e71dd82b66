"""Initial values that depend on the seed, the full name of a parameter and the place of an element in it, never on the layout."""

from __future__ import annotations

import hashlib

import torch

from pymesh3d.config import require_seed
from pymesh3d.triton_kernels.philox import Kind, philox_fill_


def parameter_key(seed: int, name: str) -> int:
    """The 64-bit key of the stream that fills parameter `name`; `seed` is an integer of 0 .. 2^64 - 1, anything else is a ConfigError."""
    return stream_key(seed, name, purpose=b"pymesh3d init")


def stream_key(seed: int, name: str, *, purpose: bytes) -> int:
    """The 64-bit key of the stream that belongs to `name` and a purpose of at most 16 bytes; a bad seed is a ConfigError."""
    require_seed(seed)
    digest = hashlib.blake2b(seed.to_bytes(8, "little") + name.encode(), digest_size=8, person=purpose, usedforsecurity=False)
    return int.from_bytes(digest.digest(), "little")


def fill_shard_(
    out: torch.Tensor, *, seed: int, name: str, kind: Kind, scale: float, global_cols: int, row0: int = 0, col0: int = 0
) -> torch.Tensor:
    """Fills `out`, the piece of parameter `name` that begins at (row0, col0) and has `global_cols` columns when whole, and returns it.

    `out` is 2-D, or 1-D for one row (a bias of n elements has global_cols = n and its piece begins at col0). `scale` is the standard
    deviation of "normal" and the bound of "uniform"; dtypes and errors are those of `philox_fill_`.
    """
    return philox_fill_(out, key=parameter_key(seed, name), kind=kind, scale=scale, global_cols=global_cols, row0=row0, col0=col0)

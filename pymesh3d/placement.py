"""Placement: one frozen record per parameter of where its numbers live.

Whoever shards a parameter writes the record; initialisation, gradient sums, the norm, checkpoints and `check` read it.
One tensor dim is cut over one mesh axis. A fused tensor (q|k|v, gate|up) is cut part by part, so that every rank holds a
piece of each part. A part with fewer indivisible heads than ranks is replicated on neighbouring ranks (KV heads); a part
with one head is replicated everywhere (norms). Rows that only pad the dim to a divisible size are zero and are never saved.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

from pymesh3d.config import divisors, require_positive
from pymesh3d.errors import ConfigError

if TYPE_CHECKING:
    import torch


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """A run of `size` rows along the cut dim that is divided among the ranks by itself, such as q, k or v of a fused q|k|v.

    `heads`: the number of units that must stay whole (None: every row may be cut apart). `padded`: rows after padding.
    """

    size: int
    heads: int | None = None
    padded: int | None = None

    def __post_init__(self) -> None:
        for name in ("size", "heads", "padded"):
            value = getattr(self, name)
            if value is not None and (name, value) != ("size", 0):  # a tensor may be empty, if nobody cuts it
                require_positive(name, value)

    @property
    def rows(self) -> int:
        """Rows including padding."""
        return self.size if self.padded is None else self.padded

    def count(self, ranks: int) -> int:
        """The number of distinct pieces among `ranks` ranks."""
        return ranks if self.heads is None else min(self.heads, ranks)

    def replicas(self, ranks: int) -> int:
        """How many neighbouring ranks hold the same piece."""
        return ranks // self.count(ranks)

    def check(self, ranks: int, what: str) -> None:
        """Raise ConfigError when this part cannot be divided among `ranks` ranks."""
        if self.heads is None:
            if self.rows < 1:
                raise ConfigError(f"{what} of {self.rows} rows", "there must be something to cut", "Use 1 row or more")
            if self.rows % ranks:
                raise ConfigError(
                    f"{what} of {self.rows} rows, tp={ranks}", "tp must divide the rows", f"tp can be one of {_short(divisors(self.rows))}"
                )
        elif self.rows % self.heads:
            raise ConfigError(
                f"{what} of {self.rows} rows in {self.heads} heads",
                "the heads must divide the rows",
                f"There can be one of {_short(divisors(self.rows))}",
            )
        elif self.heads % ranks and ranks % self.heads:
            raise ConfigError(
                f"{what} of {self.heads} heads, tp={ranks}",
                "tp must divide the heads, or be a multiple of them",
                f"tp can be one of {_short(divisors(self.heads))}",
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Piece:
    """What one rank holds of one part: local rows [local, local + rows) are global rows [start, start + length), then padding."""

    start: int
    length: int
    local: int
    rows: int
    replica: int
    replicas: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Placement:
    """Where one parameter lives. The same record on every rank of an axis; methods take the rank on that axis.

    `name` and `shape` are those of the unsharded model (no padding). `partial`: the gradient of a replicated piece is only a
    summand, because each holder saw other activations; otherwise holders compute equal gradients. `tied`: the name of the
    parameter whose storage this one shares. `stages`: those that each hold this tied parameter, where there are several. `zero`:
    (bucket, offset in elements) in the flat buffers of data parallelism.
    """

    name: str = ""
    shape: tuple[int, ...]
    dim: int = 0
    parts: tuple[Part, ...] = ()
    axis: str = "tp"
    ranks: int = 1
    partial: bool = False
    tied: str | None = None
    stages: tuple[int, ...] = ()
    zero: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        parts = self.parts or (Part(size=self.shape[self.dim] if self.shape else 1, heads=1),)
        object.__setattr__(self, "parts", parts)
        for part in parts:
            part.check(self.ranks, f"{self.name or 'dim'} {self.dim} of a tensor {self.shape}")
            assert part.rows >= part.size, f"{self.name}: {part.size} rows do not fit into {part.rows}"
        total = sum(part.size for part in parts)
        assert not self.shape or total == self.shape[self.dim], f"{self.name}: parts hold {total} rows, the tensor {self.shape[self.dim]}"
        assert self.dim == 0 or all(p.replicas(self.ranks) in (1, self.ranks) for p in parts), f"{self.name}: replicated heads need dim 0"

    @property
    def replicated(self) -> bool:
        """Whether every rank of the axis holds the whole parameter, and all its padding: on an axis of one rank that is always so."""
        return all(part.count(self.ranks) == 1 for part in self.parts)

    @property
    def has_summands(self) -> bool:
        """Whether other ranks of its axis, or other stages, hold summands of its gradient."""
        return bool(self.stages) or (self.partial and any(part.replicas(self.ranks) > 1 for part in self.parts))

    def local_parts(self) -> tuple[int, ...]:
        """Rows of each part on one rank, padding included (equal on all ranks)."""
        return tuple(part.rows // part.count(self.ranks) for part in self.parts)

    def local_shape(self) -> tuple[int, ...]:
        """Shape of one rank's shard."""
        if not self.shape:
            return ()
        return (*self.shape[: self.dim], sum(self.local_parts()), *self.shape[self.dim + 1 :])

    def pieces(self, rank: int) -> tuple[Piece, ...]:
        """What `rank` holds, one piece a part, in order."""
        out, part_start, local = [], 0, 0
        for part, rows in zip(self.parts, self.local_parts(), strict=True):
            replicas = part.replicas(self.ranks)
            index, replica = divmod(rank, replicas)
            start = min(index * rows, part.size)
            length = min(rows, part.size - start)
            out.append(Piece(start=part_start + start, length=length, local=local, rows=rows, replica=replica, replicas=replicas))
            part_start += part.size
            local += rows
        return tuple(out)

    def shard(self, full: torch.Tensor, local: torch.Tensor, rank: int) -> None:
        """Copy `rank`'s rows of the unsharded tensor `full` into `local`; padding becomes 0."""
        if not self.shape:
            local.copy_(full)
            return
        for piece in self.pieces(rank):
            rows = local.narrow(self.dim, piece.local, piece.rows)
            rows.narrow(self.dim, 0, piece.length).copy_(full.narrow(self.dim, piece.start, piece.length))
            rows.narrow(self.dim, piece.length, piece.rows - piece.length).zero_()

    def unshard(self, local: torch.Tensor, full: torch.Tensor, rank: int) -> None:
        """Copy `rank`'s shard into its rows of the unsharded tensor `full`, leaving padding out."""
        if not self.shape:
            full.copy_(local)
            return
        for piece in self.pieces(rank):
            full.narrow(self.dim, piece.start, piece.length).copy_(local.narrow(self.dim, piece.local, piece.length))

    def counted(self, rank: int, stage: int = 0) -> list[tuple[int, int]]:
        """Ranges [start, stop) of the flat shard that `rank` of `stage` contributes to a norm: each number of the model once."""
        if self.stages and stage != self.stages[0]:
            return []
        return [(start, stop) for start, stop, piece in self._flat(rank) if piece.replica == 0]

    def summed(self, rank: int) -> list[tuple[int, int, int]]:
        """Ranges (start, stop, replicas) of the flat shard whose gradient must be summed over that many neighbouring ranks."""
        return [(start, stop, piece.replicas) for start, stop, piece in self._flat(rank) if self.partial and piece.replicas > 1]

    def _flat(self, rank: int) -> list[tuple[int, int, Piece]]:
        pieces = self.pieces(rank)
        total = math.prod(self.local_shape())
        if self.dim != 0 or not self.shape:  # all pieces alike (see __post_init__), so the whole shard is one range
            return [(0, total, pieces[0])]
        row = math.prod(self.shape[1:])
        return [(piece.local * row, (piece.local + piece.rows) * row, piece) for piece in pieces]

    def marks(self) -> dict[str, bool | int]:
        """The parameter attributes that other libraries look for."""
        return {
            "tensor_model_parallel": not self.replicated and self.ranks > 1,
            "partition_dim": -1 if self.replicated else self.dim,
            "sequence_parallel": self.partial and self.replicated,
            "shared": self.tied is not None,
        }


def _short(values: list[int]) -> str:
    text = [str(value) for value in values]
    return f"[{', '.join(text if len(text) <= 12 else [*text[:6], '...', *text[-3:]])}]"


def place(parameter: torch.Tensor, placement: Placement) -> None:
    """Attach the record to its parameter, with the marks that other libraries look for."""
    parameter.placement = placement  # type: ignore[attr-defined]
    for name, value in placement.marks().items():
        setattr(parameter, name, value)


def placement_of(parameter: torch.Tensor) -> Placement:
    """The record of a parameter; one that nobody sharded is whole on every rank."""
    found: Placement | None = getattr(parameter, "placement", None)
    return found if found is not None else Placement(shape=tuple(parameter.shape))

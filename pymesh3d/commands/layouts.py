"""The rows that `pymesh3d check` runs: every admissible combination, or a small set that covers each pair of choices."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

from pymesh3d.config import SCHEDULES, Layout, ModelConfig, TrainConfig, divisors


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One layout to compare with one process. `few_kv`: fewer KV heads than tp ranks."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    zero_stage: int = 1
    schedule: str = "1f1b"
    sequence_parallel: bool = False
    tied: bool = False
    few_kv: bool = False
    recompute: str = "none"
    dropout: float = 0.0

    @property
    def model(self) -> ModelConfig:
        """A small model whose vocabulary no tp > 2 divides, whose layers no pp > 1 divides, with at least 8 heads."""
        vocab = 250 if self.tp % 5 else 251
        heads = _round_up(8, self.tp)
        layers = self.pp * self.virtual_pp + 1
        kv_heads = max(divisors(self.tp)[:-1], default=1) if self.few_kv else heads  # each held by equally many ranks
        return ModelConfig(vocab=vocab, dim=8 * heads, layers=layers, heads=heads, kv_heads=kv_heads, ffn=12 * heads, tied=self.tied)

    @property
    def layout(self) -> Layout:
        """The mesh."""
        return Layout(tp=self.tp, pp=self.pp, dp=self.dp)

    @property
    def virtual_pp(self) -> int:
        """Stages a rank."""
        return 2 if self.schedule == "interleaved" else 1

    def train(self, dtype: str) -> TrainConfig:
        """At least two sequences a dp rank, in microbatches that need not divide them: 3 a step, or about 2 more than stages.

        The learning rate is small because AdamW divides by |gradient| + 1e-8: where a gradient is nearly 0, its rounding error
        is magnified by up to 1e8 x lr (parameters of one layout differ by 1e-12 at lr 1e-4, though its gradients agree to 2e-15).
        """
        batch = _round_up(max(16, 2 * self.dp), self.dp)
        return TrainConfig(
            seq=_round_up(16, self.tp),
            global_batch=batch,
            micro_batch=math.ceil(batch / self.dp / (3 if self.pp == 1 else self.pp + 2)),
            schedule=self.schedule,
            virtual_pp=self.virtual_pp,
            zero_stage=self.zero_stage,
            sequence_parallel=self.sequence_parallel,
            recompute=self.recompute,
            dropout=self.dropout,
            vocab_multiple=1,
            dtype=dtype,
            lr=1e-5,
            max_norm=1.0,
        )


_CHOICES: dict[str, tuple[Any, ...]] = {
    "zero_stage": (1, 0),
    "schedule": tuple(reversed(SCHEDULES)),
    "sequence_parallel": (True, False),
    "tied": (False, True),
    "few_kv": (False, True),
    "recompute": ("none", "full", "selective"),
    "dropout": (0.0, 0.1),
}


def every_row(world: int) -> list[Row]:
    """All combinations that can run on `world` ranks, leaving out choices that change nothing on their layout.

    Selective recompute and dropout, which happen inside a layer, are not combined with each other, ZeRO 0, or few KV heads.
    """
    rows = []
    for tp, pp in itertools.product(divisors(world), repeat=2):
        if world % (tp * pp):
            continue
        for choice in itertools.product(*_CHOICES.values()):
            row = Row(tp=tp, pp=pp, dp=world // tp // pp, **dict(zip(_CHOICES, choice, strict=True)))
            idle = (pp == 1 and row.schedule != "1f1b") or (tp == 1 and (row.sequence_parallel or row.few_kv))
            inside = [row.recompute == "selective", row.dropout > 0]
            apart = all(inside) or (any(inside) and (row.few_kv or row.zero_stage == 0))
            if not idle and not apart:
                rows.append(row)
    return rows


def _round_up(number: int, step: int) -> int:
    """The smallest multiple of `step` that is at least `number`."""
    return math.ceil(number / step) * step


def covering_rows(rows: list[Row]) -> list[Row]:
    """A subset, chosen greedily, in which every pair of choices that occurs together in `rows` still does."""

    def pairs(row: Row) -> set[tuple[object, ...]]:
        choices = {"layout": (row.tp, row.pp, row.dp), **{name: getattr(row, name) for name in _CHOICES}}
        return set(itertools.combinations(choices.items(), 2))

    missing = set().union(*(pairs(row) for row in rows))
    chosen = []
    while missing:
        best = max(rows, key=lambda row: len(pairs(row) & missing))
        chosen.append(best)
        missing -= pairs(best)
    return sorted(chosen, key=rows.index)

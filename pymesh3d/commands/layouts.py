"""The rows that `pymesh3d check` runs: every admissible combination, or a small set that covers each pair of choices."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

from pymesh3d.config import SCHEDULES, Layout, ModelConfig, TrainConfig, divisors


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One layout to compare with one process. `few_kv`: fewer KV heads than tp ranks. The stages of ZeRO below 2 act once a step anyway."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    zero_stage: int = 1
    zero_once_a_step: bool = True
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
            zero_once_a_step=self.zero_once_a_step,
            sequence_parallel=self.sequence_parallel,
            recompute=self.recompute,
            dropout=self.dropout,
            vocab_multiple=1,
            dtype=dtype,
            lr=1e-5,
            max_norm=1.0,
        )


_CHOICES: dict[str, tuple[Any, ...]] = {
    "zero_stage": (1, 0, 2, 3),
    "zero_once_a_step": (True, False),
    "schedule": tuple(reversed(SCHEDULES)),
    "sequence_parallel": (True, False),
    "tied": (False, True),
    "few_kv": (False, True),
    "recompute": ("none", "full", "selective"),
    "dropout": (0.0, 0.1),
}


def every_row(world: int) -> list[Row]:
    """All combinations that can run on `world` ranks, leaving out choices that change nothing on their layout.

    Selective recompute and dropout, which happen inside a layer, are combined only with ZeRO 1, or 3 with every microbatch, and not with
    each other or few KV heads. ZeRO 2 once a step, which computes what 1 does, is combined with schedules only; else ZeRO 2 and 3 have few
    KV heads and sequence parallelism together or neither.
    """
    rows = []
    for tp, pp in itertools.product(divisors(world), repeat=2):
        if world % (tp * pp):
            continue
        for choice in itertools.product(*_CHOICES.values()):
            row = Row(tp=tp, pp=pp, dp=world // tp // pp, **dict(zip(_CHOICES, choice, strict=True)))
            if not _is_idle(row) and not _is_left_out(row):
                rows.append(row)
    return rows


def _is_idle(row: Row) -> bool:
    """Whether a choice changes nothing on this layout, or cannot be made there."""
    zero = (row.dp == 1 and row.zero_stage != 1) or (row.zero_stage < 2 and not row.zero_once_a_step)
    passes = not row.zero_once_a_step and row.schedule in ("interleaved", "zb-h1")
    return zero or passes or (row.pp == 1 and row.schedule != "1f1b") or (row.tp == 1 and (row.sequence_parallel or row.few_kv))


def _is_left_out(row: Row) -> bool:
    """Whether a combination is not worth its time."""
    inside = [row.recompute == "selective", row.dropout > 0]
    if any(inside) and (all(inside) or row.few_kv or (row.zero_stage, row.zero_once_a_step) not in ((1, True), (3, False))):
        return True
    if row.zero_stage == 2 and row.zero_once_a_step:
        return row.sequence_parallel or row.tied or row.few_kv or row.recompute != "none"
    return row.zero_stage >= 2 and row.few_kv != row.sequence_parallel


def _round_up(number: int, step: int) -> int:
    """The smallest multiple of `step` that is at least `number`."""
    return math.ceil(number / step) * step


def covering_rows(rows: list[Row]) -> list[Row]:
    """A subset, chosen greedily, in which every pair of choices that occurs together in `rows` still does.

    The three sizes are one choice, and so are the stage of ZeRO and when it acts.
    """

    def pairs(row: Row) -> set[tuple[object, ...]]:
        choices = {name: getattr(row, name) for name in _CHOICES}
        choices |= {"layout": (row.tp, row.pp, row.dp), "zero_stage": (row.zero_stage, row.zero_once_a_step)}
        return set(itertools.combinations(choices.items(), 2))

    missing = set().union(*(pairs(row) for row in rows))
    chosen = []
    while missing:
        best = max(rows, key=lambda row: len(pairs(row) & missing))
        chosen.append(best)
        missing -= pairs(best)
    return sorted(chosen, key=rows.index)

"""What tests of the kernels for Hopper share."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from pymesh3d.triton_kernels.launch_hopper import LARGE, SMALL, Prepared
from tests.products import Bench

TILES = [LARGE, SMALL]
TURNS = 12
HERE = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


def needs_hopper(gpus: int = 1) -> pytest.MarkDecorator:
    """Skips a test where there are not so many GPUs of that kind."""
    return pytest.mark.skipif(not HERE or torch.cuda.device_count() < gpus, reason=f"needs {gpus} GPU(s) of compute capability 9.0")


def by_turns(
    bench: Bench, a: list[torch.Tensor], b: list[torch.Tensor], prepared: Callable[[torch.Tensor, torch.Tensor, int], Prepared]
) -> list[torch.Tensor]:
    """What this rank's rows times its weights are, often, of rows at two places and weights turned and not, while ranks are late by turns.
    `prepared`: for these rows and weights, in this turn.
    """
    found, rows = [], a[bench.rank]
    for turn in range(TURNS):
        if turn % bench.ranks == bench.rank:
            torch.cuda._sleep(1_000_000 * (turn % 3))
        weights = b[bench.rank] if turn % 2 else b[bench.rank].t().contiguous().t()
        one = prepared(rows, weights, turn)
        found += [one(rows, weights), one(rows.clone(), weights)]
    torch.cuda.synchronize()
    assert bench.counters.missing() is None, bench.counters.missing()
    return found

"""What tests of kernels share."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """What nobody writes is NaN."""
    empty = torch.empty

    def poison(*args: Any, **options: Any) -> torch.Tensor:
        made = empty(*args, **options)
        return made.fill_(math.nan) if made.is_floating_point() else made

    monkeypatch.setattr(torch, "empty", poison)

"""Which products run in one kernel; what they compute is tested with the layers (tests/tp/test_layers.py)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pymesh3d.errors import ConfigError
from pymesh3d.ops import fused
from pymesh3d.triton_kernels import backend
from tests.kernels import needs_kernels

PAIR: Any = SimpleNamespace(size=2)
X = torch.zeros(2, 2)


def test_torch_computes_unless_something_else_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(fused.VARIABLE, raising=False)
    assert not fused.fused(X, PAIR)
    monkeypatch.setenv(fused.VARIABLE, "torch")
    assert not fused.fused(X, PAIR)


@needs_kernels
def test_only_what_the_kernels_take_goes_to_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(fused.VARIABLE, "plain")
    assert all(fused.fused(X.to(dtype), PAIR) for dtype in (torch.bfloat16, torch.float32, torch.float64))
    assert not fused.fused(X.half(), PAIR) and not fused.fused(X, SimpleNamespace(size=1))  # type: ignore[arg-type]


def test_what_cannot_be_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(fused.VARIABLE, "fast")
    with pytest.raises(ConfigError, match=r"PYMESH3D_PRODUCTS=fast: no such implementation\. Use torch or plain, or leave it unset"):
        fused.fused(X, PAIR)
    monkeypatch.setenv(fused.VARIABLE, "plain")
    monkeypatch.setattr(backend, "available", False)
    monkeypatch.setattr(backend, "reason", "there is no triton")
    with pytest.raises(ConfigError, match=r"PYMESH3D_PRODUCTS=plain: there is no triton\. Use PYMESH3D_PRODUCTS=torch"):
        fused.fused(X, PAIR)

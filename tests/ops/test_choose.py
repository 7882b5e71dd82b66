"""Which implementation computes a product; what they compute is tested with the layers (tests/tp/test_layers.py)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pymesh3d.errors import ConfigError
from pymesh3d.ops.choose import VARIABLE, choose
from pymesh3d.triton_kernels import backend
from tests.kernels import needs_kernels

PAIR: Any = SimpleNamespace(size=2)
ALONE: Any = SimpleNamespace(size=1)
OPS = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")
X = torch.zeros(2, 8)


def chosen(x: torch.Tensor, axis: Any = PAIR) -> set[str]:
    return {choose(op, x, x, axis) for op in OPS}


def test_torch_computes_unless_something_else_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert chosen(X) == {"torch"}
    monkeypatch.setenv(VARIABLE, "torch")
    assert chosen(X) == {"torch"}


@needs_kernels
def test_only_what_the_kernels_take_goes_to_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "plain")
    assert all(chosen(X.to(dtype)) == {"plain"} for dtype in (torch.bfloat16, torch.float32, torch.float64))
    assert chosen(X.half()) == chosen(X, ALONE) == {"torch"}
    monkeypatch.setenv(VARIABLE, "hopper")
    assert chosen(X.bfloat16()) == {"torch"}, "on the CPU"


def test_what_cannot_be_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "fast")
    with pytest.raises(ConfigError, match=r"PYMESH3D_PRODUCTS=fast: no such implementation\. Use one of torch, plain, hopper, or leave it"):
        chosen(X)
    monkeypatch.setattr(backend, "available", False)
    monkeypatch.setattr(backend, "reason", "there is no triton")
    for word in ("plain", "hopper"):
        monkeypatch.setenv(VARIABLE, word)
        with pytest.raises(ConfigError, match=rf"PYMESH3D_PRODUCTS={word}: there is no triton\. Use PYMESH3D_PRODUCTS=torch"):
            chosen(X)

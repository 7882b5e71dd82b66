"""The norms of a model: RMSNorm alone, and of the residual stream."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import nn

from pymesh3d.models.recompute import computed_again
from pymesh3d.ops.rms_norm import add_rms_norm, rms_norm


class RMSNorm(nn.RMSNorm):
    """`nn.RMSNorm` over the last dim, by one kernel forward and two backward."""

    eps: float
    weight: nn.Parameter

    def __init__(self, width: int, *, eps: float, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> None:
        super().__init__(width, eps=eps, device=device, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., D] -> [..., D]."""
        return rms_norm(x, self.weight, self.eps)


class ResidualNorm(RMSNorm):
    """The norm of a residual stream, to which it first adds what the last layer made."""

    def forward(self, h: torch.Tensor, added: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        """h + added, or h, [..., D], and the norm of it."""
        return add_rms_norm(h, added, self.weight, self.eps)

    def within(
        self, h: torch.Tensor, added: torch.Tensor | None = None, *, thrifty: bool = False
    ) -> AbstractContextManager[tuple[torch.Tensor, torch.Tensor]]:
        """The same for use within a context. `thrifty`: for backward, the norm is computed again, as `computed_again` says."""
        return self._again(h if added is None else h + added) if thrifty else nullcontext(self(h, added))

    @contextmanager
    def _again(self, h: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        with computed_again(lambda h: self(h)[1], h) as x:
            yield h, x

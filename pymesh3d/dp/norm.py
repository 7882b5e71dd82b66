"""The gradient norm, the same number on every rank; it is also the vote: a non-finite norm means nobody takes the step."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from pymesh3d.comm.collectives import gather_rows
from pymesh3d.errors import ConfigError
from pymesh3d.mesh import Mesh


@torch.no_grad()
def gradient_norm(shards: Iterable[torch.Tensor], mesh: Mesh, p: float = 2.0, *, copies: Iterable[torch.Tensor] = ()) -> torch.Tensor:
    """The p-norm (p >= 1 or infinity) of all gradients, float64 [], from the disjoint pieces that the ranks hold.

    `copies` are gradients that another rank counts: of them only what is not finite tells, and makes the norm NaN. Summed in
    float64 over each piece, then over ranks in rank order, so every rank computes the same bits. Raises ConfigError for p < 1.
    """
    if not p >= 1:
        raise ConfigError(f"p={p}", "a norm needs p of at least 1", "Use p=2.0, or p=float('inf') for the largest value")
    maximum = p == float("inf")
    norms = _norms(shards, p, mesh.device)
    total = norms.max() if maximum else norms.pow(p).sum()
    total = total + 0.0 * _norms(copies, float("inf"), mesh.device).max()  # 0, or NaN
    rows = gather_rows(total, mesh.all)[:, 0]
    return rows.amax() if maximum else rows.sum() ** (1 / p)


def _norms(pieces: Iterable[torch.Tensor], p: float, device: torch.device) -> torch.Tensor:
    """0 and those of the pieces, float64: on GPUs in one pass, which `vector_norm` does not do, since it converts each piece before."""
    filled = [piece for piece in pieces if piece.numel()]
    found = torch._foreach_norm(filled, p, dtype=torch.float64) if filled else []
    return torch.stack([torch.zeros((), dtype=torch.float64, device=device), *found])


def clip_factor(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """What gradients are multiplied by so that their norm is at most `max_norm`: torch's rule, max_norm / (norm + 1e-6), at most 1."""
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)

"""The gradient norm, the same number on every rank; it is also the vote: a non-finite norm means nobody takes the step."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from pymesh3d.comm.collectives import gather_rows
from pymesh3d.errors import ConfigError
from pymesh3d.mesh import Mesh
from pymesh3d.triton_kernels.squares import squares as sums_of_squares


@torch.no_grad()
def gradient_norm(
    shards: Iterable[torch.Tensor],
    mesh: Mesh,
    p: float = 2.0,
    *,
    copies: Iterable[torch.Tensor] = (),
    squares: torch.Tensor | None = None,
) -> torch.Tensor:
    """The p-norm (p >= 1 or infinity) of all gradients, float64 [], from the disjoint pieces that the ranks hold.

    `copies` are gradients that another rank counts: of them only what is not finite tells, and makes the norm NaN. `squares`, float64 and
    for p = 2 only, are numbers that add up to the sum of squares of further pieces. Summed in float64 over each piece, then over ranks in
    rank order, so every rank computes the same bits. Raises ConfigError for p < 1.
    """
    if not p >= 1:
        raise ConfigError(f"p={p}", "a norm needs p of at least 1", "Use p=2.0, or p=float('inf') for the largest value")
    maximum = p == float("inf")
    total = torch.zeros((), dtype=torch.float64, device=mesh.device)
    shards, copies = ([piece for piece in pieces if piece.numel()] for pieces in (shards, copies))  # on GPUs torch refuses empty ones
    if p == 2 and shards:  # torch's _foreach_norm would be one pass over all too, but its squares are float32's: 1e30 has none
        total = total + sums_of_squares(shards).sum()
    else:
        for piece in shards:
            value = torch.linalg.vector_norm(piece, p, dtype=torch.float64)
            total = torch.maximum(total, value) if maximum else total + value**p
    if squares is not None:
        assert p == 2, f"squares for p = {p}"
        total = total + squares.sum()
    for piece in copies:
        total = total + 0.0 * torch.linalg.vector_norm(piece, float("inf")).double()  # 0, or NaN
    rows = gather_rows(total, mesh.all)[:, 0]
    return rows.amax() if maximum else rows.sum() ** (1 / p)


def clip_factor(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """What gradients are multiplied by so that their norm is at most `max_norm`: torch's rule, max_norm / (norm + 1e-6), at most 1."""
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)

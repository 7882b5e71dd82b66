"""Initial values of parameters: a function of the seed, the full name and the position in the unsharded tensor, nothing else."""

from __future__ import annotations

import math

import torch
from torch import nn

from pymesh3d.placement import Placement, place, placement_of
from pymesh3d.random import Kind, fill_shard_


@torch.no_grad()
def fill_(local: torch.Tensor, placement: Placement, rank: int, *, seed: int, name: str, kind: Kind, scale: float) -> None:
    """Fill `rank`'s shard of a parameter with its rows of the random unsharded tensor; padding becomes 0.

    `kind` "normal" (standard deviation `scale`) or "uniform" (in -scale..scale).
    """
    dim, columns = placement.dim, math.prod(placement.shape[1:])
    assert dim == 0 or (dim == 1 and local.ndim == 2), f"{name}: no rule to fill a tensor of {local.ndim} dims cut along dim {dim}"
    flat = local.view(-1, columns) if dim == 0 else local
    for piece in placement.pieces(rank):
        row0, col0 = (piece.start, 0) if dim == 0 else (0, piece.start)
        rows = flat.narrow(dim, piece.local, piece.length)
        fill_shard_(rows, seed=seed, name=name, kind=kind, scale=scale, global_cols=columns, row0=row0, col0=col0)
        flat.narrow(dim, piece.local + piece.length, piece.rows - piece.length).zero_()


def materialize(module: nn.Module, device: torch.device | str) -> None:
    """Give parameters on the meta device memory (unfilled), keeping placements and ties."""
    made: dict[int, nn.Parameter] = {}
    for owner in module.modules():
        for name, old in list(owner.named_parameters(recurse=False)):
            if not old.is_meta:
                continue
            if id(old) not in made:
                made[id(old)] = nn.Parameter(torch.empty_like(old, device=device), requires_grad=old.requires_grad)
                place(made[id(old)], placement_of(old))
            setattr(owner, name, made[id(old)])

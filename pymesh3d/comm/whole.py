"""Putting the shards of a parameter, or of anything shaped like it, together again."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from pymesh3d.comm.collectives import all_gather
from pymesh3d.mesh import Axis
from pymesh3d.placement import Placement, placement_of


@torch.no_grad()
def whole(local: torch.Tensor, placement: Placement, axis: Axis) -> torch.Tensor:
    """The unsharded tensor, without padding, from every rank's shard along `axis`. All ranks of the axis must call."""
    shards = all_gather(local.detach().unsqueeze(0), axis).wait()
    full = local.new_empty(placement.shape)
    for rank in range(axis.size):
        placement.unshard(shards[rank], full, rank)
    return full


def whole_parameters(module: nn.Module, axis: Axis) -> Iterator[tuple[str, torch.Tensor]]:
    """Every parameter of a module cut along `axis`, unsharded, by its full name. All ranks of the axis must iterate to the end."""
    for name, parameter in module.named_parameters():
        placement = placement_of(parameter)
        yield placement.name or name, whole(parameter, placement, axis)

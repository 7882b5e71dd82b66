"""Putting the shards of a parameter, or of anything shaped like it, together again."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from pymesh3d.axis import Axis
from pymesh3d.comm.collectives import all_gather
from pymesh3d.errors import ConfigError
from pymesh3d.mesh import Mesh, tp_axis
from pymesh3d.placement import Placement, placement_of


@torch.no_grad()
def whole(local: torch.Tensor, placement: Placement, axis: Axis) -> torch.Tensor:
    """The unsharded tensor, without padding, from every rank's shard along `axis`. All ranks of the axis must call."""
    shards = all_gather(local.detach().unsqueeze(0), axis).wait()
    full = local.new_empty(placement.shape)
    for rank in range(axis.size):
        placement.unshard(shards[rank], full, rank)
    return full


def whole_state_dict(module: nn.Module, mesh: Mesh | DeviceMesh | Axis) -> dict[str, Any]:
    """The state dict that the module would have if it were not cut over tp, on every rank. All ranks of the tp axis must call.

    Raises ConfigError for another axis than the one the module is cut over.
    """
    axis = tp_axis(mesh)
    made: dict[int, torch.Tensor] = {}  # by identity, so that ties stay ties
    state = module.state_dict(keep_vars=True)
    for name, value in state.items():
        if isinstance(value, nn.Parameter):
            if id(value) not in made:
                placement = placement_of(value)
                if not placement.replicated and placement.ranks != axis.size:
                    given = f"{name}, cut over {placement.ranks} ranks, and axis {axis.name} of {axis.size}"
                    raise ConfigError(given, "it is put together along the axis it is cut over", "Use the mesh it was cut with")
                made[id(value)] = whole(value, placement, axis)
            state[name] = made[id(value)]
    return state

"""Which parameters of a module are trained, and that all ranks start from the same ones."""

from __future__ import annotations

import hashlib

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from pymesh3d.comm.agree import exchange_numbers
from pymesh3d.comm.collectives import equalize_
from pymesh3d.errors import ConfigError, DistributedError
from pymesh3d.mesh import Mesh
from pymesh3d.placement import Placement, place

DTYPES = (torch.float32, torch.bfloat16, torch.float64)


def trained_parameters(module: nn.Module, mesh: Mesh) -> dict[str, nn.Parameter]:
    """The trained parameters by name, each once. Raises ConfigError where there is none, or one that cannot be trained."""
    if not isinstance(module, nn.Module):
        raise ConfigError(f"a {type(module).__name__} as module", "it must be a torch module", "Give the nn.Module itself")
    trained = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
    if not trained:
        raise ConfigError(f"a {type(module).__name__} without trained parameters", "there must be one", "Leave one with requires_grad")
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if isinstance(getattr(tensor, "device_mesh", None), DeviceMesh):  # importing its class takes a while
            rule = "what is cut over ranks must be so by layers of pymesh3d, whose gradients Zero can sum and count"
            raise ConfigError(f"{name}, a DTensor", rule, "Use parallelize_module, or torch's own optimizer and clip_grad_norm_")
    for name, parameter in trained.items():
        if parameter.dtype not in DTYPES:
            raise ConfigError(f"{name} of {parameter.dtype}", f"it must be one of {', '.join(map(str, DTYPES))}", "Use module.bfloat16()")
        if parameter.device != mesh.device:
            way = "module.to_empty(device=mesh.device) and initialize it" if parameter.is_meta else "module.to(mesh.device)"
            raise ConfigError(f"{name} on {parameter.device}", f"it must be on the device of the mesh, {mesh.device}", f"Use {way}")
    return trained


def agree_on(module: nn.Module, mesh: Mesh) -> None:
    """Give all tensors of the module the values of the first dp rank, and of the first tp rank what nobody sharded.

    Raises DistributedError where ranks hold different ones.
    """
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    described = [(name, tuple(tensor.shape), str(tensor.dtype), tensor.requires_grad) for name, tensor in tensors.items()]
    digest = hashlib.blake2b(repr(described).encode(), digest_size=7).digest()
    for axis in (mesh.tp, mesh.dp):
        mine = torch.tensor([int.from_bytes(digest, "little")])
        rows = exchange_numbers(mine, mesh, "comparing modules", axis)[:, 0].tolist()
        others = [rank for rank, row in zip(axis.ranks, rows, strict=True) if row != rows[0]]
        if others:
            raise DistributedError(
                f"ranks {others} have other parameters or buffers than rank {axis.ranks[0]}: names, shapes, dtypes, what is trained, "
                f"or their order. Build the same module on every rank of axis {axis.name}"
            )
    for tensor in tensors.values():
        if getattr(tensor, "placement", None) is None:  # nobody sharded it, so every tp rank holds it: count it once
            equalize_(tensor, mesh.tp)
            if isinstance(tensor, nn.Parameter):
                place(tensor, Placement(shape=tuple(tensor.shape), ranks=mesh.tp.size))
        equalize_(tensor, mesh.dp)

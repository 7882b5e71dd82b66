"""What is trained: parameters that can be, the same on every rank."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from pymesh3d.dp.zero import STAGES, Zero
from pymesh3d.errors import ConfigError, DistributedError
from pymesh3d.mesh import init_mesh

Ranks = Callable[..., list[Any]]
ADAMW = functools.partial(torch.optim.AdamW, lr=1e-2)


def frozen() -> nn.Module:
    return nn.Linear(3, 2).requires_grad_(False)


REFUSED: list[tuple[Any, str]] = [
    ([torch.ones(1)], "a list as module: it must be a torch module. Give the nn.Module itself"),
    (nn.ModuleList([frozen()]), "a ModuleList without trained parameters: there must be one. Leave one with requires_grad"),
    (frozen(), "a Linear without trained parameters: there must be one. Leave one with requires_grad"),
    (
        nn.Linear(3, 2, dtype=torch.float16),
        "weight of torch.float16: it must be one of torch.float32, torch.bfloat16, torch.float64. Use module.bfloat16()",
    ),
    (
        nn.Linear(3, 2, device="meta"),
        "weight on meta: it must be on the device of the mesh, cpu. Use module.to_empty(device=mesh.device) and initialize it",
    ),
]


def refusals(stage: int) -> list[str]:
    mesh = init_mesh(device="cpu")
    texts = []
    for module, _ in REFUSED:
        with pytest.raises(ConfigError) as caught:
            Zero(module, mesh, stage=stage, optimizer=ADAMW, weight_decay=0.0)
        texts.append(str(caught.value))
    mesh.close()
    return texts


@pytest.mark.parametrize("stage", STAGES)
def test_what_cannot_be_trained_is_refused(ranks: Ranks, stage: int) -> None:
    for world in (1, 2):
        assert ranks(world, refusals, stage) == [[text for _, text in REFUSED]] * world


def refused_tensors() -> list[str]:
    """What is said of modules of which torch has cut a trained matrix, a frozen one, a buffer."""
    mesh, texts = init_mesh(tp=2, device="cpu"), []
    devices = init_device_mesh("cpu", (2,))
    for kind in ("trained", "frozen", "buffer"):
        module = nn.Linear(4, 4)
        cut = distribute_tensor(torch.ones(4, 4), devices, [Shard(0)])
        if kind == "buffer":
            module.register_buffer("table", cut)
        else:
            module.weight = nn.Parameter(cut, requires_grad=kind == "trained")
        with pytest.raises(ConfigError) as caught:
            Zero(module, mesh, stage=1, optimizer=ADAMW, weight_decay=0.0)
        texts.append(str(caught.value))
    mesh.close()
    return texts


def test_tensors_that_torch_has_cut_are_refused(ranks: Ranks) -> None:
    """Not by whoever talks first."""
    rule = (
        "what is cut over ranks must be so by layers of pymesh3d, whose gradients Zero can sum and count. "
        "Use parallelize_module, or torch's own optimizer and clip_grad_norm_"
    )
    assert ranks(2, refused_tensors) == [[f"{name}, a DTensor: {rule}" for name in ("weight", "weight", "table")]] * 2


def different_modules() -> tuple[list[str], list[bool]]:
    """What rank 1 is told of three modules that are not those of rank 0, and whether all of a fourth became rank 0's."""
    mesh = init_mesh(device="cpu")
    first = mesh.rank == 0
    texts = []
    for module in (
        nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False).requires_grad_(first)),
        nn.ModuleDict({name: nn.Linear(8, 8) for name in ("ab" if first else "ba")}),
        nn.Linear(8, 8, dtype=torch.float32 if first else torch.float64),
    ):
        with pytest.raises(DistributedError) as caught:
            Zero(module, mesh, stage=1, optimizer=ADAMW, weight_decay=0.0)
        texts.append(str(caught.value))
    module = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Linear(2, 2).requires_grad_(False))
    for tensor in module.state_dict().values():
        tensor.fill_(mesh.rank + 1)
    Zero(module, mesh, stage=1, optimizer=ADAMW, weight_decay=0.0)
    equal = [bool((tensor == 1).all()) for tensor in module.state_dict().values()]
    mesh.close()
    return texts, equal


def test_ranks_train_the_same_module(ranks: Ranks) -> None:
    """The trained parameters, the frozen ones and the buffers."""
    text = (
        "ranks [1] have other parameters or buffers than rank 0: names, shapes, dtypes, what is trained, or their order. "
        "Build the same module on every rank of axis dp"
    )
    for texts, equal in ranks(2, different_modules):
        assert texts == [text] * 3 and len(equal) == 9 and all(equal)


def unsharded_over_tp() -> list[float]:
    mesh = init_mesh(tp=2, device="cpu")
    module = nn.Linear(2, 1)
    for parameter in module.parameters():
        nn.init.constant_(parameter, mesh.rank + 1)
    Zero(module, mesh, stage=1, optimizer=ADAMW, weight_decay=0.0)
    mesh.close()
    return [value for parameter in module.parameters() for value in parameter.flatten().tolist()]


def test_what_nobody_sharded_is_the_same_on_all_tp_ranks(ranks: Ranks) -> None:
    assert ranks(2, unsharded_over_tp) == [[1.0] * 3] * 2

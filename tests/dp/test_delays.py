"""Many steps of every ZeRO stage while ranks and GPUs are late at random: nothing hangs, and replicas stay equal bit by bit."""

from __future__ import annotations

import functools
import os
import random
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from pymesh3d.comm.collectives import all_gather
from pymesh3d.dp.zero import Zero
from pymesh3d.launch import launch
from pymesh3d.mesh import Mesh, init_mesh
from pymesh3d.triton_kernels import backend

Ranks = Callable[..., list[Any]]
LATE = 0.002  # seconds, at most
WIDTH, LAYERS, SAMPLES = 24, 4, 3
CYCLES = 2_000_000_000  # of a GPU in a second, about


class Late(nn.Linear):
    """Is late now and then: the host, or what the GPU computes from here on."""

    def __init__(self, mesh: Mesh, chance: random.Random | None) -> None:
        super().__init__(WIDTH, WIDTH, device=mesh.device)
        self.mesh, self.chance = mesh, chance

    def late(self, *_: object) -> None:
        if self.chance is not None and self.chance.random() < 0.1:
            time.sleep(self.chance.uniform(0.0, LATE))
        if self.chance is not None and self.mesh.device.type == "cuda" and self.chance.random() < 0.3:
            torch.cuda._sleep(int(self.chance.uniform(0.0, LATE) * CYCLES))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.late()
        y = torch.tanh(super().forward(x))
        if y.requires_grad:
            y.register_hook(self.late)
        return y


def late_steps(device: str, stage: int, kernels: bool, steps: int, hosts: int, late: bool) -> list[torch.Tensor]:
    """The parameters after some steps of ranks that say that they are on so many hosts."""
    mesh = mesh_on(device, hosts)
    found = steps_on(mesh, stage, kernels, steps, late)
    mesh.close()
    return [found]


def mesh_on(device: str, hosts: int) -> Mesh:
    os.environ["GROUP_RANK"] = str(int(os.environ["RANK"]) * hosts // int(os.environ["WORLD_SIZE"]))
    return init_mesh(device=device, timeout_s=60)


def steps_on(mesh: Mesh, stage: int, kernels: bool, steps: int, late: bool) -> torch.Tensor:
    """The parameters after some steps of two microbatches, of which every third does not exchange gradients meanwhile."""
    chance = random.Random(100 + mesh.rank) if late else None
    torch.manual_seed(0)
    model = nn.Sequential(*[Late(mesh, chance) for _ in range(LAYERS)])
    adamw = functools.partial(torch.optim.AdamW, lr=1e-3)
    zero = Zero(model, mesh, stage=stage, optimizer=adamw, weight_decay=0.1, bucket_elements=2 * WIDTH**2, kernels=kernels)
    generator = torch.Generator().manual_seed(mesh.dp.rank)
    for step in range(steps):
        for last in (False, True):
            x = torch.randn(SAMPLES, WIDTH, generator=generator).to(mesh.device)
            with zero.last_pass() if last and step % 3 else nullcontext():
                model(x).square().sum().backward()
        norm, taken = zero.step(1.0 if step % 2 else None)
        assert taken, f"step {step} of stage {stage} was not taken: norm {norm}"
        if step % 50 == 0 or step == steps - 1:
            with zero.whole():
                mine = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
            everyone = all_gather(mine[None], mesh.dp).wait()
            assert torch.equal(everyone, mine.expand_as(everyone)), f"replicas differ after step {step} of stage {stage}"
    return mine.cpu()


def run(ranks: Ranks, device: str, world: int, stage: int, kernels: bool, steps: int, hosts: int = 1) -> None:
    """Late ranks must end with the very numbers of those that are not."""
    expected = ranks(world, late_steps, device, stage, kernels, steps, hosts, False, timeout=60.0 + steps * 0.2)
    found = ranks(world, late_steps, device, stage, kernels, steps, hosts, True, timeout=60.0 + steps * 0.2)
    for rank, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert torch.equal(one[0], other[0]), f"rank {rank} has other parameters when ranks are late"


KINDS = [
    pytest.param(False, id="collectives"),
    pytest.param(True, id="kernels", marks=pytest.mark.skipif(not backend.available, reason=backend.reason)),
]


@pytest.mark.parametrize("kernels", KINDS)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_late_ranks_change_nothing(ranks: Ranks, stage: int, kernels: bool) -> None:
    run(ranks, "cpu", 3, stage, kernels, 4 if kernels else 30)


@pytest.mark.skipif(not backend.available, reason=backend.reason)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_late_ranks_of_two_hosts_change_nothing(ranks: Ranks, stage: int) -> None:
    run(ranks, "cpu", 4, stage, True, 4, hosts=2)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_late_ranks_change_nothing_in_5000_steps(ranks: Ranks, stage: int) -> None:
    run(ranks, "cpu", 3, stage, False, 5_000)


@pytest.mark.gpu
@pytest.mark.timeout(600)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_late_gpus_change_nothing(fresh_ranks: Ranks, stage: int) -> None:
    """1,250 steps of each stage."""
    if torch.cuda.device_count() < 2:
        pytest.skip("dp needs two GPUs")
    run(fresh_ranks, "cuda", 2, stage, True, 1_250)


def on_gpus_of_two_hosts(stage: int, device: str = "cuda", steps: int = 500) -> None:
    mesh = mesh_on(device, 2)
    by_collectives, few, expected, found = (
        steps_on(mesh, stage, *given) for given in ((False, 2, False), (True, 2, False), (True, steps, False), (True, steps, True))
    )
    assert torch.allclose(few, by_collectives, rtol=1e-4, atol=1e-5), (few - by_collectives).abs().max()
    assert torch.equal(found, expected), "late ranks have other parameters"
    mesh.close()


@pytest.mark.gpu
@pytest.mark.timeout(600)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_late_gpus_of_two_hosts_change_nothing(stage: int) -> None:
    """The GPUs may be of one host: NCCL goes between those that say they are not."""
    if torch.cuda.device_count() < 4:
        pytest.skip("two hosts need four GPUs")
    assert launch(["-c", f"from tests.dp.test_delays import on_gpus_of_two_hosts; on_gpus_of_two_hosts({stage})"], 4) == 0

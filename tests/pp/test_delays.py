"""Many steps over our own links while ranks, GPUs and connections are late at random: nothing hangs, and every value is right."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from pymesh3d.comm.links import Expected, Link, NcclLink
from pymesh3d.comm.p2p import Links
from pymesh3d.mesh import init_mesh
from pymesh3d.pp.run import Microbatch, run
from pymesh3d.pp.stage import Stage
from pymesh3d.schedule import build
from tests import stub
from tests.test_native import needs_compiler, needs_core

pytestmark = [needs_core, needs_compiler]

Ranks = Callable[..., list[Any]]
SCHEDULES = [("gpipe", 1, 3), ("1f1b", 1, 3), ("zb-h1", 1, 3), ("interleaved", 2, 2), ("interleaved", 3, 3)]
MICROBATCHES, WIDTH = 4, 5
LATE = 0.002  # seconds, at most


class OnHost:
    """A link whose `take` and `flush` wait, because what computes, and gives memory away at once, is the host."""

    def __init__(self, link: NcclLink, synchronize: Callable[[int], int]) -> None:
        self.link, self.synchronize = link, synchronize
        self.send, self.post = link.send, link.post

    def take(self) -> torch.Tensor:
        tensor = self.link.take()
        self.synchronize(0)
        return tensor

    def flush(self) -> None:
        while not self.all_across():
            time.sleep(1e-5)
        self.link.flush()

    def all_across(self) -> bool:
        """Whether everything that was begun has ended."""
        under_way = [number for number, *_ in (*self.link._sent, *self.link._posted)]
        return self.link._native.finished() >= max(under_way, default=0)


class Late(torch.nn.Module):
    """Multiplies by its weight, after a while; now and then as a host does that has to wait for all that its GPU has to do."""

    def __init__(self, number: int, chance: random.Random, links: list[OnHost]) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.tensor(1.0 + number, dtype=torch.float64))
        self.chance, self.links = chance, links

    def forward(self, ids: torch.Tensor, h: torch.Tensor | None, masks: object = None) -> torch.Tensor:
        if self.chance.random() < 0.1:
            time.sleep(self.chance.uniform(0.0, LATE))
        if self.chance.random() < 0.3:
            while not all(link.all_across() for link in self.links):
                time.sleep(1e-5)
        return (ids.double() if h is None else h) * self.w


def late_steps(library: str, name: str, virtual: int, steps: int) -> tuple[int, list[str]]:
    """(steps, what was wrong in them)."""
    mesh = init_mesh(pp=-1, dp=1, device="cpu", timeout_s=60)
    pp, rank = mesh.pp.size, mesh.pp.rank
    chance = random.Random(100 + rank)
    with stub.under_links(library) as machine:
        links = Links(mesh, ring=virtual > 1)
        machine.delay(int(LATE * 1e6) // 4, 7 + rank)
        ends: dict[str, OnHost] = {}
        for side in ("before", "after"):
            link: Link | None = getattr(links, side)
            if link is not None:
                assert isinstance(link, NcclLink)
                ends[side] = OnHost(link, machine.synchronize)
                setattr(links, side, ends[side])
        last = pp * virtual - 1
        modules = {number: Late(number, chance, list(ends.values())) for number in range(rank, last + 1, pp)}
        stages = {
            number: Stage(module, first=number == 0, last=number == last, loss=lambda output, _: output.mean())
            for number, module in modules.items()
        }
        product = torch.prod(1.0 + torch.arange(last + 1, dtype=torch.float64)).item()
        plan, wrong = build(name, pp, MICROBATCHES, virtual).steps(rank), []
        for step in range(steps):
            ids = torch.randint(1000, (MICROBATCHES, 1, WIDTH), generator=torch.Generator().manual_seed(step))
            microbatches = [Microbatch(part, part, Expected((1, WIDTH), torch.float64, n)) for n, part in enumerate(ids)]
            loss = run(plan, stages, links, microbatches).item()
            expected = ids.double().mean((1, 2)).sum().item() * product
            if last in modules and abs(loss - expected) > 1e-12 * expected:
                wrong.append(f"step {step}: loss {loss} instead of {expected}")
            for number, module in modules.items():
                assert module.w.grad is not None
                grad, wanted = module.w.grad.item(), expected / (1.0 + number)
                if abs(grad - wanted) > 1e-12 * wanted:
                    wrong.append(f"step {step}: gradient {grad} of stage {number} instead of {wanted}")
                module.w.grad = None
        machine.synchronize(0)
        mesh.close()
    return steps, wrong


@pytest.mark.parametrize(("name", "virtual", "pp"), SCHEDULES)
def test_late_ranks_change_no_value(ranks: Ranks, library: str, name: str, virtual: int, pp: int) -> None:
    assert ranks(pp, late_steps, library, name, virtual, 20, timeout=100.0) == [(20, [])] * pp


@pytest.mark.long
@pytest.mark.timeout(3000)
@pytest.mark.parametrize(("name", "virtual", "pp"), SCHEDULES)
def test_10_000_steps_with_late_ranks(ranks: Ranks, library: str, name: str, virtual: int, pp: int) -> None:
    assert ranks(pp, late_steps, library, name, virtual, 10_000, timeout=2900.0) == [(10_000, [])] * pp

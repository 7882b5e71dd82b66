"""What each rank has reaches all of them, and one that does something else is named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from pymesh3d.comm.agree import exchange_numbers, exchange_text, together
from pymesh3d.comm.collectives import gather_rows
from pymesh3d.errors import DistributedError
from pymesh3d.mesh import init_mesh

Ranks = Callable[..., list[Any]]


def exchanged() -> tuple[list[str], list[list[int]], list[list[int]], tuple[list[str], list[str]]]:
    """Texts, numbers of all and of the own tp group, and how something went that rank 1 cannot do."""
    mesh = init_mesh(tp=2, device="cpu")
    texts = exchange_text("é" * (1000 * mesh.rank) + str(mesh.rank), mesh)
    mine = torch.tensor([mesh.rank, 10 * mesh.rank])
    numbers = [exchange_numbers(mine, mesh, "counting", axis).tolist() for axis in (None, mesh.tp)]

    def act() -> str:
        if mesh.rank == 1:
            raise OSError("no room")
        return f"done by {mesh.rank}"

    outcome = together(act, mesh, "saving")
    mesh.close()
    return texts, *numbers, outcome


def test_everything_of_everyone_in_rank_order(ranks: Ranks) -> None:
    everyone = [[0, 0], [1, 10], [2, 20], [3, 30]]
    for rank, (texts, numbers, of_line, (outcomes, failures)) in enumerate(ranks(4, exchanged)):
        assert texts == ["é" * (1000 * rank) + str(rank) for rank in range(4)]
        assert numbers == everyone and of_line == everyone[rank // 2 * 2 :][:2]
        assert [outcomes[other] for other in (0, 2, 3)] == ["done by 0", "done by 2", "done by 3"]
        assert failures == ["rank 1: no room"]


def elsewhere() -> str:
    mesh, told = init_mesh(dp=2, device="cpu"), ""
    if mesh.rank == 1:
        gather_rows(torch.ones(1, dtype=torch.float64), mesh.all)
    else:
        with pytest.raises(DistributedError) as caught:
            exchange_text("x", mesh)
        told = str(caught.value)
    mesh.close()
    return told


def test_who_does_something_else_is_named(ranks: Ranks) -> None:
    assert ranks(2, elsewhere)[0] == "rank 0: ranks [1] are doing something else. All ranks must take part"

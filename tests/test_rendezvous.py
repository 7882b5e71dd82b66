"""Where ranks meet: who has not come is named, and a meeting can be tried again."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore

from pymesh3d import rendezvous
from pymesh3d.errors import DistributedError
from pymesh3d.mesh import init_mesh

Ranks = Callable[..., list[Any]]
SOON = datetime.timedelta(seconds=0.2)


def test_a_meeting_can_be_tried_again() -> None:
    store = HashStore()
    with pytest.raises(RuntimeError, match=r"ranks \[1\] have not come"):
        rendezvous._meet(store, 0, 2, SOON)
    PrefixStore("meeting 1", store).set("rank 1 is here", "")
    rendezvous._meet(store, 0, 2, SOON)


def makes_no_mesh() -> str:
    """Rank 1 comes to none the first time, and both to the second."""
    told = ""
    if dist.get_rank() == 0:
        with pytest.raises(DistributedError) as caught:
            init_mesh(device="cpu", timeout_s=0.5)
        told = str(caught.value)
    dist.barrier()
    init_mesh(device="cpu", timeout_s=20.0).close()
    return told


def test_a_rank_that_makes_no_mesh_is_named(ranks: Ranks) -> None:
    assert ranks(2, makes_no_mesh)[0] == (
        "rank 0 of 2 could not make a mesh with the others within 0.5 s: ranks [1] have not come. "
        "All ranks must make the same meshes; if some are missing, look at their own output"
    )

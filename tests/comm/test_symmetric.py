"""Memory that ranks share: each sees what others write, nothing stays behind, and what cannot be shared is an error on all ranks."""

from __future__ import annotations

import ctypes
import os
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pymesh3d.axis import Axis
from pymesh3d.comm import symmetric
from pymesh3d.comm.symmetric import SymmetricBuffer
from pymesh3d.errors import DistributedError, SharingError
from pymesh3d.launch import launch
from pymesh3d.mesh import init_mesh

Ranks = Callable[..., list[Any]]
NUMBERS = 1500  # of 4 bytes: more than a page


def written_by_all(device: str = "cpu") -> list[list[float]]:
    """On the tp axes [0, 1] and [2, 3]: each writes a quarter of a number to every part of its axis; what this rank's part then has."""
    mesh = init_mesh(tp=2, dp=-1, device=device)
    axis = mesh.tp
    buffer = SymmetricBuffer(4 * NUMBERS + 8, axis, mesh.device)
    parts = [buffer.part(rank, (NUMBERS,), torch.float32, offset=8) for rank in range(axis.size)]
    assert all((part == 0).all() for part in parts)
    assert [part.data_ptr() - 8 for part in parts] == buffer.addresses.tolist()
    if device == "cuda":
        torch.cuda.synchronize()
    dist.barrier()
    for part in parts:
        part[axis.rank :: axis.size] = mesh.rank + 0.25
    if device == "cuda":
        torch.cuda.synchronize()
    dist.barrier()
    found = parts[axis.rank]
    assert all(torch.equal(part, found) for part in parts)
    values = [sorted(set(found[rank :: axis.size].tolist())) for rank in range(axis.size)]
    assert buffer.part(axis.rank, (2,), torch.int32).tolist() == [0, 0]
    del parts, found, buffer
    mesh.close()
    return values


def files() -> set[Path]:
    return set(symmetric.MEMORY.glob("pymesh3d-*"))


def none_is_left(before: set[Path]) -> bool:
    """Whether what is new is gone soon: other tests, which may run beside this one, have files for a moment."""
    new, late = files() - before, time.monotonic() + 10.0
    while new & files() and time.monotonic() < late:
        time.sleep(0.05)
    return not new & files()


def test_each_rank_sees_what_the_others_write(ranks: Ranks) -> None:
    before = files()
    assert ranks(4, written_by_all) == [[[0.25], [1.25]]] * 2 + [[[2.25], [3.25]]] * 2
    assert none_is_left(before)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_each_gpu_sees_what_the_others_write() -> None:
    script = "from tests.comm.test_symmetric import written_by_all; assert written_by_all('cuda') == [[0.25], [1.25]]"
    assert launch(["-c", script], 2) == 0


def modes() -> list[tuple[int, int]]:
    """Mode and links of the file when this rank maps it, and after."""
    mesh = init_mesh(tp=2, device="cpu")
    found: list[tuple[int, int]] = []
    plain = symmetric._map
    handles: list[int] = []

    def mapped(path: str, size: int) -> torch.Tensor:
        handles.append(os.open(path, os.O_RDONLY))
        return plain(path, size)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(symmetric, "_map", mapped)
        buffer = SymmetricBuffer(100, mesh.tp, mesh.device)
    dist.barrier()
    found = [(stat.S_IMODE(os.fstat(handle).st_mode), os.fstat(handle).st_nlink) for handle in handles]
    del buffer
    mesh.close()
    return found


def test_nobody_else_may_open_the_file_and_it_loses_its_name(ranks: Ranks) -> None:
    assert ranks(2, modes) == [[(0o600, 0)]] * 2


def test_one_rank_shares_with_itself() -> None:
    buffer = SymmetricBuffer(16, Axis("tp", 0, (0,), None), torch.device("cpu"))  # type: ignore[arg-type]
    buffer.part(0, (2, 2), torch.int32)[1] = 7
    assert buffer.part(0, (2,), torch.int32, offset=8).tolist() == [7, 7]
    assert ctypes.c_int32.from_address(int(buffer.addresses[0]) + 12).value == 7
    with pytest.raises(AssertionError, match="at 12 of 16 bytes"):
        buffer.part(0, (2,), torch.int32, offset=12)
    with pytest.raises(AssertionError, match="a buffer of 0 bytes"):
        SymmetricBuffer(0, Axis("tp", 0, (0,), None), torch.device("cpu"))  # type: ignore[arg-type]


def attempts(what: str) -> str:
    """What a rank is told where rank 1 fails so."""
    mesh = init_mesh(tp=2, dp=1, device="cpu", timeout_s=10.0)

    def attempt() -> int:
        if mesh.rank == 1:
            raise (
                RuntimeError("CUDA driver error: no peers" + 1000 * "." + "\nmore")
                if what == "driver"
                else dist.DistStoreError("the store is gone")
            )
        return 5

    text = ""
    if what == "driver" or mesh.rank == 1:  # of the store's error nobody is told
        try:
            symmetric._together(attempt, mesh.tp)
        except (SharingError, dist.DistStoreError) as error:
            text = f"{type(error).__name__}: {error}"
    mesh.close()
    return text


def test_what_fails_on_one_rank_is_told_to_all_but_for_what_they_all_see(ranks: Ranks) -> None:
    text = "SharingError: rank 1: sharing memory over axis tp with ranks [0, 1] failed: CUDA driver error: no peers....."
    assert all(told.startswith(text) for told in ranks(2, attempts, "driver"))
    assert ranks(2, attempts, "store") == ["", "DistStoreError: the store is gone"]


def told(what: str) -> str:
    """The error of a buffer that cannot be shared."""
    mesh = init_mesh(tp=2, dp=1, device="cpu", timeout_s=10.0)
    size = 4096
    with pytest.MonkeyPatch.context() as patch:
        if what == "sizes":
            size += 8192 * mesh.rank
        elif what == "memory":
            size = 1 << 60
        elif what == "host" and mesh.rank == 1:
            patch.setattr(symmetric, "_map", lambda path, _: os.open(path + "-elsewhere", os.O_RDWR))
        try:
            SymmetricBuffer(size, mesh.tp, mesh.device)
        except DistributedError as error:
            mesh.close()
            return str(error)
    return "nothing"


@pytest.mark.parametrize(
    ("what", "rank", "texts"),
    [
        ("sizes", 1, ["it has 8,192 bytes, not 24,576: all ranks must ask for the same"]),
        ("memory", 0, ["2,305,843,009,213,693,952 bytes: "]),
        ("host", 1, ["-elsewhere: No such file or directory. Ranks that share memory run on one host, as one user"]),
    ],
)
def test_what_cannot_be_shared_is_an_error_on_all_ranks(ranks: Ranks, what: str, rank: int, texts: list[str]) -> None:
    before = files()
    first, second = ranks(2, told, what)
    assert first == second
    assert first.startswith(f"rank {rank}: sharing memory over axis tp with ranks [0, 1] failed: ")
    assert all(text in first for text in texts), first
    assert none_is_left(before)


def without_a_peer() -> str:
    mesh = init_mesh(tp=2, device="cpu", timeout_s=2.0)
    if mesh.rank == 1:
        os._exit(7)
    try:
        SymmetricBuffer(100, mesh.tp, mesh.device)
    except DistributedError as error:
        return str(error)
    return "nothing"


def test_a_lost_peer_is_an_error_and_leaves_no_file(fresh_ranks: Ranks) -> None:
    before = files()
    text = fresh_ranks(2, without_a_peer, timeout=30.0, expect_dead=[1])[0]
    assert text.startswith("rank 0: sharing memory over axis tp with ranks [1] failed after ")
    assert none_is_left(before)

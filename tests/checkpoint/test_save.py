"""A checkpoint exists whole or not at all, whatever happens while it is written."""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pymesh3d.checkpoint import save as saving
from pymesh3d.checkpoint.load import load
from pymesh3d.checkpoint.manifest import newest
from pymesh3d.comm.collectives import gather_rows
from pymesh3d.errors import CheckpointError, DistributedError
from pymesh3d.mesh import Mesh, init_mesh

Ranks = Callable[..., list[Any]]
ABOUT = {"layers": 4, "dp": 2}


def state(step: int, rank: int) -> dict[str, torch.Tensor]:
    return {"master.0": torch.arange(100.0) + 1000 * step + rank, "half": torch.tensor([rank], dtype=torch.bfloat16)}


def write(directory: str, step: int) -> None:
    mesh = init_mesh(device="cpu")
    saving.save(Path(directory), step, state(step, mesh.rank), ABOUT, mesh)
    mesh.close()


def read(directory: str) -> int:
    """The step that loads, after comparing every value."""
    mesh = init_mesh(device="cpu")
    step, tensors = load(Path(directory), state(0, 0), ABOUT, mesh)
    expected = state(step, mesh.rank)
    assert set(tensors) == set(expected) and all(torch.equal(tensors[name], expected[name]) for name in expected)
    mesh.close()
    return step


def read_then_write(directory: str, step: int) -> list[int]:
    found = [read(directory)]
    write(directory, step)
    return [*found, read(directory)]


# Where a save can be killed: (function that is replaced, its owner, the rank that dies).
STAGES: dict[str, tuple[Any, str, int]] = {
    "before anything": (saving, "_prepare", 0),
    "before the files": (saving, "save_file", 0),
    "while another rank writes": (saving, "save_file", 1),
    "before files are on the disk": (saving, "_sync", 1),
    "before the manifest": (saving.json, "dumps", 0),
    "before the rename": (Path, "rename", 0),
}


def killed(directory: str, step: int, stage: str) -> str | None:
    """The rank of the stage dies by SIGKILL there; what the other one says."""
    owner, name, rank = STAGES[stage]
    mesh = init_mesh(device="cpu")
    with pytest.MonkeyPatch.context() as patch:
        if mesh.rank == rank:
            patch.setattr(owner, name, lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
        try:
            saving.save(Path(directory), step, state(step, mesh.rank), ABOUT, mesh)
        except DistributedError as error:
            return str(error)
    return None


@pytest.mark.parametrize("stage", STAGES)
def test_a_killed_save_leaves_the_older_checkpoint(ranks: Ranks, fresh_ranks: Ranks, tmp_path: Path, stage: str) -> None:
    ranks(2, write, str(tmp_path), 1)
    dead = STAGES[stage][2]
    told = fresh_ranks(2, killed, str(tmp_path), 2, stage, expect_dead=[dead])
    assert "saving a checkpoint" in told[1 - dead] and f"with ranks [{dead}]" in told[1 - dead]
    assert newest(tmp_path) == 1
    assert ranks(2, read_then_write, str(tmp_path), 2) == [[1, 2], [1, 2]]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000002"]


def test_the_next_save_of_any_step_clears_away_what_killed_ones_left(ranks: Ranks, tmp_path: Path) -> None:
    """And nothing else."""
    kept = ["step-00000001", "notes.tmp", "step-by-step.tmp"]
    for name in (*kept, "step-00000003.tmp", "step-00000005.tmp", "step-100000000.tmp"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "rank-00002.safetensors").write_text("half of it")
    (tmp_path / "step-00000007.tmp.log").write_text("")
    ranks(2, write, str(tmp_path), 3)
    assert {path.name for path in tmp_path.iterdir()} == {*kept, "step-00000003", "step-00000007.tmp.log"}
    files = {path.name for path in (tmp_path / "step-00000003").iterdir()}
    assert files == {"manifest.json", "rank-00000.safetensors", "rank-00001.safetensors"}
    assert ranks(2, read, str(tmp_path)) == [3, 3]


def failing(directory: str, owner: str, name: str, rank: int, error: Exception) -> str:
    mesh = init_mesh(device="cpu")

    def fail(*_: Any, **__: Any) -> None:
        raise error

    with pytest.MonkeyPatch.context() as patch, pytest.raises(CheckpointError) as caught:
        if mesh.rank == rank:
            patch.setattr({"saving": saving, "Path": Path}[owner], name, fail)
        saving.save(Path(directory), 2, state(2, mesh.rank), ABOUT, mesh)
    mesh.close()
    return str(caught.value)


@pytest.mark.parametrize(
    ("owner", "name", "rank", "error", "words"),
    [
        ("saving", "save_file", 1, OSError(errno.ENOSPC, "No space left on device"), "No space left on device"),
        ("saving", "digest", 1, RuntimeError("CUDA error: out of memory"), "CUDA error: out of memory"),
        ("saving", "digest", 0, MemoryError(), "MemoryError"),
        ("Path", "rename", 0, PermissionError(errno.EACCES, "Permission denied"), "Permission denied"),
    ],
)
def test_what_fails_on_one_rank_fails_on_all(
    ranks: Ranks, tmp_path: Path, owner: str, name: str, rank: int, error: Exception, words: str
) -> None:
    ranks(2, write, str(tmp_path), 1)
    first, second = ranks(2, failing, str(tmp_path), owner, name, rank, error)
    assert first == second
    assert "step-00000002': not saved" in first and f"(rank {rank}: " in first and words in first and first.count("rank ") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    assert ranks(2, read, str(tmp_path)) == [1, 1]


def refused(directory: str, step: int) -> str:
    with pytest.raises(CheckpointError) as caught:
        write(directory, step)
    return str(caught.value)


def test_a_step_is_never_written_over(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2, write, str(tmp_path), 1)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.*")}
    for text in ranks(2, refused, str(tmp_path), 1):
        assert "step-00000001': exists already" in text and "(rank 0: " in text and "rank 1" not in text
    assert {path: path.read_bytes() for path in tmp_path.rglob("*.*")} == before and len(before) == 3


def test_a_place_that_cannot_hold_a_folder_is_refused(ranks: Ranks, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for text in ranks(2, refused, str(tmp_path / "file"), 1):
        assert "(rank 0: " in text and "Not a directory" in text


def alone(directory: str, busy: bool) -> tuple[str, float] | None:
    """Rank 0 saves, rank 1 does not: it waits, or is busy with other things that all ranks do together."""
    dist.destroy_process_group()  # the pool's, whose limit is long
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # the parent serves the store
    mesh = init_mesh(device="cpu", timeout_s=2.0)
    if mesh.rank == 1:
        if busy:
            with pytest.raises(DistributedError):
                for _ in range(100):
                    gather_rows(torch.ones(1, dtype=torch.float64), mesh.all)
        else:
            time.sleep(4.0)
        return None
    began = time.monotonic()
    with pytest.raises(DistributedError) as caught:
        saving.save(Path(directory), 1, state(1, 0), ABOUT, mesh)
    if busy:
        dist.destroy_process_group()  # as the end of the program does
    return str(caught.value), time.monotonic() - began


@pytest.mark.parametrize("busy", [False, True])
def test_a_save_on_one_rank_only_ends_with_an_error(fresh_ranks: Ranks, tmp_path: Path, busy: bool) -> None:
    (text, seconds), _ = fresh_ranks(2, alone, str(tmp_path), busy)
    assert seconds < 3.5
    if busy:
        assert "rank 0: ranks [1] are doing something else. All ranks must take part" in text
    else:
        assert "rank 0: saving a checkpoint, which all ranks must do, over axis all with ranks [1] failed after 2." in text
    assert newest(tmp_path) is None


def test_one_rank_alone_saves_and_loads(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(1, nested, str(tmp_path / "a" / "b")) == [3]


def nested(directory: str) -> int:
    write(directory, 3)
    mesh: Mesh = init_mesh(device="cpu")
    step, _ = load(Path(directory), {}, ABOUT, mesh)
    mesh.close()
    return step

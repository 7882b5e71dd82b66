"""Where the ranks of a run meet: what torchrun's variables say, the store they share, who has not come, and who is another."""

from __future__ import annotations

import contextlib
import datetime
import functools
import os
from collections.abc import Sequence

import torch
import torch.distributed as dist

from pymesh3d.errors import ConfigError, DistributedError


def number_from_environment(name: str, *, default: int, lowest: int, highest: int = 2**31 - 1) -> int:
    """What torchrun set the variable `name` to. Raises ConfigError for what is no whole number from `lowest` to `highest`."""
    text = os.environ.get(name, str(default))
    if not text.isdecimal() or not lowest <= int(text) <= highest:
        rule = f"the environment variable must be a whole number, {lowest} or more"
        raise ConfigError(f"{name}={text!r}", rule, "Start the program with torchrun")
    return int(text)


def world_size() -> int:
    """The number of ranks that torchrun started; 1 without it. Raises ConfigError."""
    return number_from_environment("WORLD_SIZE", default=1, lowest=1)


def join(device: torch.device, timeout_s: float) -> None:
    """Start torch.distributed with all ranks of this run, within the time limit, which also bounds every later wait.

    Raises ConfigError for variables that cannot be, DistributedError naming the ranks that have not come.
    """
    backend = "nccl" if device.type == "cuda" else "gloo"
    timeout = datetime.timedelta(seconds=timeout_s)
    world = world_size()
    rank = number_from_environment("RANK", default=0, lowest=0)
    host, port = os.environ.get("MASTER_ADDR", ""), number_from_environment("MASTER_PORT", default=0, lowest=0, highest=2**16 - 1)
    if rank >= world:
        raise ConfigError(
            f"RANK={rank}, WORLD_SIZE={world}", "ranks count from 0 to below the world size", "Start the program with torchrun"
        )
    if world > 1 and not (host and port):
        given = f"MASTER_ADDR={host!r}, MASTER_PORT={port}, WORLD_SIZE={world}"
        raise ConfigError(given, "ranks must know where they meet", "Start the program with torchrun")
    try:
        if world == 1:
            store: dist.Store = dist.HashStore()
        else:
            store = _meet(_store(host, port, timeout, serve=rank == 0 and not _agent_serves()), rank, world, timeout)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)
    except (RuntimeError, ValueError) as error:
        raise DistributedError(
            f"rank {rank} of {world} could not meet the others at {host}:{port} within {timeout_s:g} s: {str(error).rstrip('.')}. "
            "If the port is in use, give another MASTER_PORT; if ranks are missing, look at their own output"
        ) from error


def introduce(text: str, timeout_s: float) -> list[str]:
    """What every rank says of itself, in rank order. All ranks must call, and meet in the store: nobody waits for a GPU.

    Raises DistributedError naming the ranks that have not come within the time limit.
    """
    assert dist.group.WORLD is not None, "ranks join before they introduce themselves"
    rank, world = dist.get_rank(), dist.get_world_size()
    try:
        meeting = _meet(dist.group.WORLD.get_group_store(), rank, world, datetime.timedelta(seconds=timeout_s), text)
        keys = [_here(other) for other in range(world)]
        at_once = meeting.has_extended_api()  # type: ignore[attr-defined]
        values = meeting.multi_get(keys) if at_once else [meeting.get(key) for key in keys]
    except RuntimeError as error:
        raise DistributedError(
            f"rank {rank} of {world} could not make a mesh with the others within {timeout_s:g} s: {error}. "
            "All ranks must make the same meshes; if some are missing, look at their own output"
        ) from error
    return [value.decode() for value in values]


def require_equal(texts: Sequence[str], what: str) -> None:
    """Raise DistributedError naming the ranks whose text differs from the most common one."""
    common = max(dict.fromkeys(texts), key=texts.count)  # of a tie the first, so that all ranks say the same
    others = [f"rank {rank} has {text!r}" for rank, text in enumerate(texts) if text != common]
    if others:
        raise DistributedError(
            f"all ranks must have the same {what}, {common!r}, but {'; '.join(others[:8])}. Install and start the same everywhere"
        )


def agent_store(timeout: datetime.timedelta) -> dist.Store | None:
    """The store that `launch` or torchrun's agent serves, which outlives any rank; None where there is none that answers in time."""
    if not _agent_serves():
        return None
    with contextlib.suppress(RuntimeError, LookupError, ValueError):
        return _store(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timeout, serve=False)
    return None


def _agent_serves() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _store(host: str, port: int, timeout: datetime.timedelta, *, serve: bool) -> dist.Store:
    """The store of this start of the run. Who serves it does not wait in here, unseen by the others, as torch's own rendezvous does."""
    store = _served(host, port) if serve else dist.TCPStore(host, port, is_master=False, timeout=timeout)
    store.set_timeout(timeout)
    return dist.PrefixStore(f"start {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)


@functools.cache  # for as long as this process lives: others may come back to it before this rank has closed its mesh
def _served(host: str, port: int) -> dist.TCPStore:
    return dist.TCPStore(host, port, is_master=True, wait_for_workers=False)


def _meet(store: dist.Store, rank: int, world: int, timeout: datetime.timedelta, text: str = "") -> dist.Store:
    """Wait until all ranks are here, and each has left its text. Returns the part of the store that belongs to this meeting of theirs, the
    first or a later one.

    Raises RuntimeError naming the ranks that have not come within the time limit.
    """
    count = f"meetings of rank {rank}"
    meeting = dist.PrefixStore(f"meeting {store.add(count, 1)}", store)
    here = [_here(other) for other in range(world)]
    meeting.set(here[rank], text)
    try:
        meeting.wait(here, timeout)
    except RuntimeError as error:
        with contextlib.suppress(RuntimeError):  # rank 0, which may serve the store, may have given up first
            absent = [other for other, key in enumerate(here) if not meeting.check([key])]
            error.args = (f"ranks {absent} have not come",)
            store.add(count, -1)  # whoever tries again comes to the same meeting
        raise
    return meeting


def _here(rank: int) -> str:
    return f"rank {rank} is here"

"""Where the ranks of a run meet: what torchrun's variables say, the store they share, and who has not come."""

from __future__ import annotations

import contextlib
import datetime
import functools
import os

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
        store = dist.HashStore() if world == 1 else _meet(_store(host, port, timeout, serve=rank == 0 and not _agent_serves()), rank, world)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)
    except (RuntimeError, ValueError) as error:
        raise DistributedError(
            f"rank {rank} of {world} could not meet the others at {host}:{port} within {timeout_s:g} s: {error}. "
            "If the port is in use, give another MASTER_PORT; if ranks are missing, look at their own output"
        ) from error


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


def _meet(store: dist.Store, rank: int, world: int) -> dist.Store:
    """Wait until all ranks are here. Returns the part of the store that belongs to this meeting of theirs, the first or a later one.

    Raises RuntimeError naming the ranks that have not come within the store's time limit.
    """
    count = f"meetings of rank {rank}"
    meeting = dist.PrefixStore(f"meeting {store.add(count, 1)}", store)
    here = [f"rank {other} is here" for other in range(world)]
    meeting.set(here[rank], "")
    try:
        meeting.wait(here)
    except RuntimeError as error:
        with contextlib.suppress(RuntimeError):  # rank 0, which may serve the store, may have given up first
            absent = [other for other, key in enumerate(here) if not meeting.check([key])]
            error.args = (f"ranks {absent} have not come",)
            store.add(count, -1)  # whoever tries again comes to the same meeting
        raise
    return meeting

"""What tests need that start processes of their own: waiting for them, a port, and seeing whether other threads run meanwhile."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path


def until(condition: Callable[[], bool], seconds: float) -> bool:
    """Whether `condition` became true within `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def free_port() -> str:
    """A port of this machine that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return str(listener.getsockname()[1])


@contextlib.contextmanager
def two_ranks(script: str, *arguments: str, **environment: str) -> Iterator[list[subprocess.Popen[str]]]:
    """Ranks 0 and 1 of a script's source, that nobody supervises; "RANK" in a value of their environment stands for their number.

    They are killed at the end.
    """
    port, ranks = free_port(), []
    for rank in ("0", "1"):
        own = {name: value.replace("RANK", rank) for name, value in environment.items()}
        meeting = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        command = [sys.executable, "-c", script, *arguments]
        ranks.append(subprocess.Popen(command, env={**os.environ, **meeting, **own}, stdout=subprocess.PIPE, text=True))
    try:
        yield ranks
    finally:
        for process in ranks:
            process.kill()


def gone(pid: int) -> bool:
    """Whether the process has ended; one that only waits to be reaped has."""
    try:
        os.kill(pid, 0)
        return Path("/proc/self").exists() and Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (ProcessLookupError, FileNotFoundError):
        return True


def ticks_while(call: Callable[[], object], *, seconds: float) -> int:
    """How often another thread of this process runs while `call` does, which must take at least so long."""
    done, ticks = threading.Event(), []

    def tick() -> None:
        while not done.wait(0.01):
            ticks.append(time.monotonic())

    thread = threading.Thread(target=tick)
    thread.start()
    began = time.monotonic()
    call()
    ended = time.monotonic()
    done.set()
    thread.join(10)
    assert ended - began > seconds, "the call did not take its time"
    return sum(began + 0.1 < moment < ended - 0.1 for moment in ticks)

"""Waiting for processes of other tests' making to do something, or to end."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path


def until(condition: Callable[[], bool], seconds: float) -> bool:
    """Whether `condition` became true within `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def gone(pid: int) -> bool:
    """Whether the process has ended; one that only waits to be reaped has."""
    try:
        os.kill(pid, 0)
        return Path("/proc/self").exists() and Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (ProcessLookupError, FileNotFoundError):
        return True

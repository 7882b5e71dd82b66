"""Local processes on one host, nothing more; many hosts belong to torchrun and the cluster's scheduler."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from torch.distributed import TCPStore

from pymesh3d.config import require_positive
from pymesh3d.errors import ConfigError

STOPPED = (128 + signal.SIGINT, 128 + signal.SIGTERM)  # what `launch` returns where it was told to end
LOOPBACK = "127.0.0.1"
PARENT_FD = "PYMESH3D_PARENT_FD"  # environment variable: a pipe that reports its end when the parent is gone

POLL = 0.02  # seconds between two looks at the children
OWN_WORDS = 1.0  # seconds the other ranks have, after one failed, to print their own error
GRACE = 1.5  # seconds from SIGTERM to SIGKILL
REAP = 1.5  # seconds for the system to clear away a killed process


def loopback_store() -> TCPStore:
    """A store served by this process on a free port of the loopback interface only.

    `TCPStore(host, port, is_master=True)` by itself listens on every interface, so the socket is bound here and handed over.
    """
    listener = socket.create_server((LOOPBACK, 0))
    port = listener.getsockname()[1]
    return TCPStore(LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def gloo_on_loopback() -> dict[str, str]:
    """The environment that makes gloo listen on the loopback interface only, where there is one of a known name."""
    names = {name for _, name in socket.if_nameindex()}
    name = next((name for name in ("lo", "lo0") if name in names), None)
    return {"GLOO_SOCKET_IFNAME": name} if name else {}


def is_child() -> bool:
    """Whether `launch` or torchrun started this process as a rank."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def watch_parent() -> None:
    """In a rank, early: makes this process exit when the one that launched it is gone, however it ended. Without effect elsewhere."""
    fd = os.environ.pop(PARENT_FD, None)  # a process started from here does not inherit the pipe
    if fd is not None:
        threading.Thread(target=_exit_at_end_of, args=(int(fd),), name="watch parent", daemon=True).start()


def _exit_at_end_of(fd: int) -> None:
    if os.read(fd, 1) == b"":  # nothing is ever written: a read returns when the last writer is gone
        os._exit(1)


def launch(argv: Sequence[str], world: int, *, threads_per_rank: int | None = None) -> int:
    """Runs `python *argv` as `world` ranks on this host, with torchrun's variables, until all have ended.

    Returns 0, or the first failed rank's exit code (128 + number for a signal), or 130 / 143 after SIGINT / SIGTERM; then all other
    ranks are ended within 5 s. Each rank gets `threads_per_rank` CPU threads; by default OMP_NUM_THREADS, else an equal share of the cores.
    Raises ConfigError.
    """
    if not argv:
        raise ConfigError("argv=[]", "there is no program to run", 'Give a script, or ["-m", "module"], and its arguments')
    require_positive("world", world)
    if threads_per_rank is not None:
        require_positive("threads_per_rank", threads_per_rank)
    store = loopback_store()  # lives here, so that it outlives any rank
    environ = _environment(world, store.port, threads_per_rank)
    stopped_by: list[int] = []
    children: list[subprocess.Popen[bytes]] = []
    parent_gone, held_by_parent = os.pipe()
    try:
        with _handled((signal.SIGINT, signal.SIGTERM), stopped_by.append):
            for rank in range(world):
                children.append(
                    subprocess.Popen(
                        [sys.executable, *argv],
                        env={**environ, PARENT_FD: str(parent_gone), "RANK": str(rank), "LOCAL_RANK": str(rank)},
                        stdin=subprocess.DEVNULL,
                        pass_fds=(parent_gone,),
                        start_new_session=True,  # Ctrl-C reaches this process alone; a rank is ended with all that it started
                    )
                )
            return _supervise(children, stopped_by)
    finally:
        _send(_groups(children), signal.SIGKILL)
        os.close(parent_gone)
        os.close(held_by_parent)


def _environment(world: int, port: int, threads_per_rank: int | None) -> dict[str, str]:
    """What every rank sees: torchrun's variables with this process as the agent whose store the ranks join."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    defaults = {
        "OMP_NUM_THREADS": str(max(1, cores // world)),
        "CUDA_DEVICE_MAX_CONNECTIONS": "32",  # of the driver's 8 hardware queues two streams may share one, and wait for each other
        **gloo_on_loopback(),
    }
    environ = {**defaults, **os.environ}
    if threads_per_rank is not None:
        environ["OMP_NUM_THREADS"] = str(threads_per_rank)
    return environ | {
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }


@contextlib.contextmanager
def _handled(signals: Sequence[int], handler: Callable[[int], None]) -> Iterator[None]:
    """`handler(signal number)` instead of the usual handlers; only the main thread may set them, elsewhere they stay."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, lambda number, _: handler(number)) for number in signals}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def _supervise(children: list[subprocess.Popen[bytes]], stopped_by: list[int]) -> int:
    """Waits until all ranks have ended, one has failed, or a signal has come; ends the rest; returns the exit code."""
    while True:
        codes = [child.poll() for child in children]
        failed = [(code, rank) for rank, code in enumerate(codes) if code]
        if stopped_by:
            _end(children)
            return 128 + stopped_by[0]
        if failed:
            code, rank = min(failed)  # if several ended between two looks, a signal (negative) is the likelier cause
            for other in _frozen(children):
                _say(f"rank {other} is frozen (SIGSTOP or the like); the others wait for it")
            _say(f"rank {rank} {_how(code)}" + ("; stopping the others" if None in codes else ""))
            _wait(children, OWN_WORDS, stopped_by)
            _end(children)
            return code if code > 0 else 128 - code
        if None not in codes:
            return 0
        time.sleep(POLL)


def _frozen(children: list[subprocess.Popen[bytes]]) -> list[int]:
    """The ranks that a signal has stopped, as far as the system tells."""
    frozen = []
    for rank, child in enumerate(children):
        with contextlib.suppress(ChildProcessError):
            if child.poll() is None and hasattr(os, "waitid") and os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT):
                frozen.append(rank)
    return frozen


def _how(code: int) -> str:
    if code > 0:
        return f"ended with exit code {code}"
    hint = ", perhaps because the machine ran out of memory" if code == -signal.SIGKILL else ""
    return f"was ended by {signal.Signals(-code).name}{hint}"


def _say(text: str) -> None:
    print(f"pymesh3d: {text}", file=sys.stderr, flush=True)


def _wait(children: list[subprocess.Popen[bytes]], seconds: float, stopped_by: Sequence[int] = ()) -> None:
    deadline = time.monotonic() + seconds
    while any(child.poll() is None for child in children) and time.monotonic() < deadline and not stopped_by:
        time.sleep(POLL)


def _groups(children: list[subprocess.Popen[bytes]]) -> list[int]:
    """The process groups of the ranks that have not ended well: each rank's own, so its id is that of the rank."""
    return [child.pid for child in children if child.poll() != 0]


def _send(groups: list[int], number: int) -> None:
    """To ranks and all that they started, which may outlive them. Whoever is gone was here a moment ago: its id is not yet another's."""
    for group in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS: the latter where only the dead are left
            os.killpg(group, number)


def _end(children: list[subprocess.Popen[bytes]]) -> None:
    """SIGTERM, then SIGKILL to what is left, which a stopped or hung process cannot refuse."""
    groups = _groups(children)
    for number in (signal.SIGSTOP, signal.SIGTERM, signal.SIGCONT):  # stopped first, so that none complains of the end of another
        _send(groups, number)
    _wait(children, GRACE)
    _send(groups, signal.SIGKILL)
    _wait(children, REAP)
    left = [str(rank) for rank, child in enumerate(children) if child.poll() is None]
    if left:
        _say(f"rank {', '.join(left)} did not end after SIGKILL, which happens while a device driver is busy")

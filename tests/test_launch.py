"""Launching local ranks: their environment, and that all of them are gone soon after any kind of end."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from pymesh3d.errors import ConfigError
from pymesh3d.launch import is_child, launch, watch_parent
from tests.processes import gone, until

ROOT = Path(__file__).parent.parent
needs_proc = pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="reads /proc")


@pytest.fixture(autouse=True)
def at_root(monkeypatch):
    """Children and parents import pymesh3d of this checkout; nothing of an outer launch is seen."""
    monkeypatch.chdir(ROOT)
    for name in ("RANK", "WORLD_SIZE", "OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)


# Children announce themselves by a file that holds their process id, written whole.
ANNOUNCE = """
import os, signal, subprocess, sys, time
from pathlib import Path
def announce(name, pid):
    temporary = Path(sys.argv[1], f".{name}")
    temporary.write_text(str(pid))
    temporary.rename(Path(sys.argv[1], f"{name}"))
def wait_for(count):
    while len(list(Path(sys.argv[1]).glob("[!.]*"))) < count:
        time.sleep(0.02)
rank = int(os.environ["RANK"])
"""


def pids(folder: Path, count: int) -> list[int]:
    """Process ids that `count` children have announced."""
    assert until(lambda: len(list(folder.glob("[!.]*"))) == count, 30), f"only {list(folder.iterdir())} came up"
    return [int(file.read_text()) for file in sorted(folder.glob("[!.]*"))]


class Launcher:
    """`launch` in a process of its own, to be sent signals."""

    def __init__(self, script: str, folder: Path, world: int) -> None:
        code = f"import sys; from pymesh3d.launch import launch; sys.exit(launch(['-c', {script!r}, {str(folder)!r}], {world}))"
        self.process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)

    def __enter__(self) -> subprocess.Popen[str]:
        return self.process

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate(timeout=10)


def cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def test_ranks_see_the_variables_of_torchrun(tmp_path):
    script = "import json, os, sys; json.dump(dict(os.environ), open(f'{sys.argv[1]}/{os.environ[\"RANK\"]}', 'w'))"
    assert launch(["-c", script, str(tmp_path)], 3) == 0
    for rank in range(3):
        seen = json.loads((tmp_path / str(rank)).read_text())
        expected = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 3, "LOCAL_WORLD_SIZE": 3, "GROUP_RANK": 0}
        assert {name: int(seen[name]) for name in expected} == expected
        assert seen["MASTER_ADDR"] == "127.0.0.1" and seen["TORCHELASTIC_USE_AGENT_STORE"] == "True"
        assert int(seen["OMP_NUM_THREADS"]) == max(1, cores() // 3)
        assert seen["GLOO_SOCKET_IFNAME"] in {"lo", "lo0"}


@pytest.mark.parametrize(("variable", "argument", "threads"), [("5", None, "5"), ("5", 2, "2"), (None, 2, "2")])
def test_threads(variable, argument, threads, monkeypatch):
    if variable:
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
    script = f"import os, sys; sys.exit(os.environ['OMP_NUM_THREADS'] != '{threads}')"
    assert launch(["-c", script], 1, threads_per_rank=argument) == 0


def test_a_network_interface_that_the_user_chose_is_kept(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "mine")
    assert launch(["-c", "import os, sys; sys.exit(os.environ['GLOO_SOCKET_IFNAME'] != 'mine')"], 1) == 0


# Addresses that this rank and its parent listen on, as hex from /proc/net/tcp (state 0A), after the ranks have met.
LISTEN = """
import os, sys
from pathlib import Path
import torch, torch.distributed as dist
dist.init_process_group("gloo")
t = torch.tensor([1 << dist.get_rank()])
dist.all_reduce(t)
assert t.item() == 3, t
inodes = {os.readlink(fd) for pid in ("self", os.getppid()) for fd in Path(f"/proc/{pid}/fd").iterdir() if fd.is_symlink()}
rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
found = {row[1].split(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in inodes}
Path(sys.argv[1], os.environ["RANK"]).write_text(" ".join(sorted(found)))
dist.barrier()
dist.destroy_process_group()
"""


@needs_proc
def test_ranks_meet_and_everything_listens_on_loopback_only(tmp_path):
    assert launch(["-c", LISTEN, str(tmp_path)], 2) == 0
    assert [(tmp_path / str(rank)).read_text() for rank in range(2)] == ["0100007F"] * 2


def test_failed_rank_is_named_and_ends_the_others(tmp_path, capfd):
    script = ANNOUNCE + "announce(rank, os.getpid())\nwait_for(3)\nif rank == 1: sys.exit(3)\ntime.sleep(60)"
    start = time.monotonic()
    assert launch(["-c", script, str(tmp_path)], 3) == 3
    assert time.monotonic() - start < 5
    assert all(gone(pid) for pid in pids(tmp_path, 3))
    assert capfd.readouterr().err.splitlines() == ["pymesh3d: rank 1 ended with exit code 3; stopping the others"]


def test_signal_that_ended_a_rank_is_named(capfd):
    assert launch(["-c", "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"], 1) == 128 + signal.SIGSEGV
    assert capfd.readouterr().err.splitlines()[-1] == "pymesh3d: rank 0 was ended by SIGSEGV"


def test_other_ranks_can_still_print_their_own_error(capfd):
    script = "import os, sys, time; rank = os.environ['RANK']\nif rank == '0': sys.exit('the cause')\n"
    script += "time.sleep(0.5); sys.exit('consequence')"
    assert launch(["-c", script], 2) == 1
    own = "pymesh3d: rank 0 ended with exit code 1; stopping the others"
    assert capfd.readouterr().err.splitlines() == ["the cause", own, "consequence"]


# Rank 0 is frozen, rank 1 refuses SIGTERM, rank 2 has started a process that refuses it and outlives the rank.
STUBBORN = (
    ANNOUNCE
    + """
if rank == 1:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if rank == 2:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    announce("grandchild", subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]).pid)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
announce(rank, os.getpid())
if rank == 0:
    os.kill(os.getpid(), signal.SIGSTOP)
"""
)


def test_signals_end_even_stubborn_ranks(tmp_path):
    """Each signal its own parent, both at once: they have to wait for their ranks."""
    ends = {signal.SIGINT: 130, signal.SIGTERM: 143}
    with contextlib.ExitStack() as stack:
        parents = {}
        for number in ends:
            (tmp_path / number.name).mkdir()
            parents[number] = stack.enter_context(Launcher(STUBBORN + "time.sleep(60)", tmp_path / number.name, 3))
        children = [pid for number in ends for pid in pids(tmp_path / number.name, 4)]
        time.sleep(0.1)  # for both ranks 0 to freeze
        start = time.monotonic()
        for number, parent in parents.items():
            parent.send_signal(number)
        for number, parent in parents.items():
            _, told = parent.communicate(timeout=start + 5 - time.monotonic())  # whoever is left would keep it open
            assert parent.returncode == ends[number], number
            assert "Traceback" not in told
        assert until(lambda: all(gone(pid) for pid in children), start + 5 - time.monotonic())


def test_failure_ends_even_stubborn_ranks(tmp_path):
    fails = """
if rank == 3:
    announce("left alone", subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]).pid)
wait_for(6)
if rank == 3:
    time.sleep(0.3)
    sys.exit(9)
time.sleep(60)
"""
    with Launcher(STUBBORN + fails, tmp_path, 4) as parent:
        children = pids(tmp_path, 6)
        start = time.monotonic()
        _, told = parent.communicate(timeout=5)
        assert parent.returncode == 9
        assert told.splitlines() == [
            "pymesh3d: rank 0 is frozen (SIGSTOP or the like); the others wait for it",
            "pymesh3d: rank 3 ended with exit code 9; stopping the others",
        ]
        assert until(lambda: all(gone(pid) for pid in children), start + 5 - time.monotonic())


def test_ranks_exit_by_themselves_when_the_parent_is_killed(tmp_path):
    script = ANNOUNCE + "from pymesh3d.launch import watch_parent\nwatch_parent(); announce(rank, os.getpid()); time.sleep(60)"
    with Launcher(script, tmp_path, 2) as parent:
        children = pids(tmp_path, 2)
        time.sleep(0.3)
        assert not any(gone(pid) for pid in children), "the ranks must live as long as the parent"
        parent.kill()
        parent.wait(timeout=5)
        ended = until(lambda: all(gone(pid) for pid in children), 5)
        for pid in children:
            if not gone(pid):
                os.kill(pid, signal.SIGKILL)
        assert ended


def test_signal_handlers_are_put_back():
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    assert launch(["-c", ""], 1) == 0
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_is_child_knows_the_ranks_of_torchrun_too(monkeypatch):
    assert not is_child()
    monkeypatch.setenv("RANK", "0")
    assert not is_child()
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert is_child()


def test_watching_without_a_launcher_does_nothing():
    watch_parent()
    assert "watch parent" not in {thread.name for thread in threading.enumerate()}


@pytest.mark.parametrize(
    ("argv", "world", "threads", "text"),
    [
        ([], 1, None, "argv="),
        (["x"], 0, None, "world=0"),
        (["x"], 2.5, None, "world=2.5"),
        (["x"], 2, 0, "threads_per_rank=0"),
        (["x"], 2, "4", "threads_per_rank='4'"),
    ],
)
def test_refusals(argv, world, threads, text):
    with pytest.raises(ConfigError, match=text):
        launch(argv, world, threads_per_rank=threads)

"""The mesh: which rank stands where, who shares a group, and what is refused, with which words."""

from __future__ import annotations

import os
import socket
import time
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore

from pymesh3d import mesh as mesh_module
from pymesh3d.axis import Axis
from pymesh3d.comm.collectives import all_reduce_
from pymesh3d.config import AXES, Layout, ModelConfig
from pymesh3d.engine import parallelize
from pymesh3d.errors import ConfigError, DistributedError
from pymesh3d.launch import LOOPBACK, launch
from pymesh3d.mesh import init_mesh
from pymesh3d.models.llama import Llama

Ranks = Callable[..., list[Any]]

WORDS_OF_TORCHRUN = (
    "WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK", "TORCHELASTIC_USE_AGENT_STORE"
)  # fmt: skip


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """No launcher around this process; nobody may leave a process group behind."""
    for name in WORDS_OF_TORCHRUN:
        monkeypatch.delenv(name, raising=False)
    yield monkeypatch
    assert not dist.is_initialized()


def who_is_where(sizes: dict[str, int]) -> dict[str, Any]:
    """What one rank sees of the mesh, and what really goes through its groups."""
    mesh = init_mesh(device="cpu", **sizes)
    seen: dict[str, Any] = {"text": str(mesh), "coordinates": mesh.coordinates(mesh.rank), "sizes": mesh.layout.sizes}
    for name in AXES:
        axis = mesh.axis(name)
        line = mesh[name]
        total = torch.tensor([10.0**mesh.rank], dtype=torch.float64)
        dist.all_reduce(total, group=line.get_group())
        seen[name] = (axis.rank, axis.ranks, line.size(), line.get_local_rank(), total.item())
        assert axis.group is line.get_group()
        assert axis.size == line.size()
    seen["along"] = {name: mesh.along(name).tolist() for name in AXES}
    seen["two axes"] = mesh["dp", "tp"].mesh.tolist()
    mesh.close()
    mesh.close()
    return seen


def check_axes(seen: list[dict[str, Any]], groups: dict[str, list[list[int]]]) -> None:
    for rank, mine in enumerate(seen):
        for name, lines in groups.items():
            (line,) = [line for line in lines if rank in line]
            place = line.index(rank)
            assert mine[name] == (place, tuple(line), len(line), place, float(sum(10**r for r in line))), f"rank {rank}, axis {name}"
            assert mine["along"][name] == lines
        assert mine["coordinates"] == tuple(mine[name][0] for name in AXES)


def test_order_of_8_ranks(ranks: Ranks) -> None:
    seen = ranks(8, who_is_where, {"pp": 2, "dp": 2, "tp": 2})
    check_axes(
        seen,
        {
            "tp": [[0, 1], [2, 3], [4, 5], [6, 7]],
            "dp": [[0, 2], [1, 3], [4, 6], [5, 7]],
            "pp": [[0, 4], [1, 5], [2, 6], [3, 7]],
            "cp": [[rank] for rank in range(8)],
        },
    )
    assert [mine["two axes"] for mine in seen] == [[[0, 1], [2, 3]]] * 4 + [[[4, 5], [6, 7]]] * 4
    assert seen[5]["text"] == (
        "pp 2 x dp 2 x tp 2 = 8 rank(s) on 1 host(s), cpu\n"
        "ranks[pp, dp, tp] =\n"
        "[[[0 1]\n"
        "  [2 3]]\n"
        "\n"
        " [[4 5]\n"
        "  [6 7]]]\n"
        "  pp    2  slowest link: shared memory\n"
        "  dp    2  slowest link: shared memory\n"
        "  tp    2  slowest link: shared memory"
    )


@pytest.mark.parametrize("axis", ["pp", "dp", "tp"])
def test_axes_of_size_one_are_like_any_other(ranks: Ranks, axis: str) -> None:
    """All four ranks on one axis, given as -1."""
    sizes = {"pp": 1, "dp": 1, "tp": 1, axis: -1}
    seen = ranks(4, who_is_where, sizes)
    assert [mine["sizes"] for mine in seen] == [tuple(4 if name == axis else 1 for name in AXES)] * 4
    check_axes(seen, {name: [[0, 1, 2, 3]] if name == axis else [[0], [1], [2], [3]] for name in AXES})


def test_one_process_without_a_launcher(alone: pytest.MonkeyPatch) -> None:
    mesh = init_mesh(device="cpu")
    assert [(mesh.axis(name).rank, mesh[name].size()) for name in AXES] == [(0, 1)] * 4
    assert str(mesh).splitlines() == [
        "pp 1 x dp 1 x tp 1 = 1 rank(s) on 1 host(s), cpu",
        "ranks[pp, dp, tp] =",
        "[[[0]]]",
        "  pp    1  slowest link: none",
        "  dp    1  slowest link: none",
        "  tp    1  slowest link: none",
    ]
    with pytest.raises(ConfigError, match=r"axis 'ep': no such mesh axis\. Axes are pp, dp, cp, tp"):
        mesh.axis("ep")
    mesh.close()
    mesh.close()


REFUSED = [
    (6, {"tp": 4}, "world size 6 with pp 1 x dp -1 x tp 4: the axes multiply to 4, which must divide the world size. "
     "With 6 ranks pp 1 x dp 2 x tp 3 fits"),
    (8, {"tp": 2, "pp": 2, "dp": 1}, "world size 8 with pp 2 x dp 1 x tp 2: the axes multiply to 4, which must equal the world size. "
     "With 8 ranks pp 2 x dp 2 x tp 2 fits"),
    (8, {"tp": -1}, "dp=-1 and tp=-1: at most one axis can be left open. Give all but one a size"),
    (8, {"tp": 0}, "tp=0: tp must be a positive integer. Try tp=1 or more"),
    (8, {"pp": -2}, "pp=-2: pp must be a positive integer. Try pp=1 or more"),
    (8, {"tp": 2.0}, "tp=2.0: tp must be a positive integer. Try tp=1 or more"),
    (8, {"tp": True}, "tp=True: tp must be a positive integer. Try tp=1 or more"),
    (8, {"cp": 2}, "cp=2: context parallelism is not available yet. Use cp=1 and a larger tp or dp"),
    (8, {"device": "tpu"}, "device='tpu': the device must be cpu or cuda. Leave it out to take what this machine has"),
    ("eight", {}, "WORLD_SIZE='eight': the environment variable must be a whole number, 1 or more. Start the program with torchrun"),
    ("-8", {}, "WORLD_SIZE='-8': the environment variable must be a whole number, 1 or more. Start the program with torchrun"),
    (2, {}, "MASTER_ADDR='', MASTER_PORT=0, WORLD_SIZE=2: ranks must know where they meet. Start the program with torchrun"),
    (8, {"timeout_s": 0}, "timeout_s=0: it must be above 0 s and at most a day, 86400 s. The default is timeout_s=300"),
    (8, {"timeout_s": float("nan")}, "timeout_s=nan: it must be above 0 s and at most a day, 86400 s. The default is timeout_s=300"),
    (8, {"timeout_s": 1e300}, "timeout_s=1e+300: it must be above 0 s and at most a day, 86400 s. The default is timeout_s=300"),
    (8, {"timeout_s": None}, "timeout_s=None: it must be above 0 s and at most a day, 86400 s. The default is timeout_s=300"),
    ("0", {"dp": 1}, "WORLD_SIZE='0': the environment variable must be a whole number, 1 or more. Start the program with torchrun"),
]  # fmt: skip


@pytest.mark.parametrize(("world", "options", "text"), REFUSED)
def test_what_cannot_be_is_refused_before_anybody_is_asked(
    alone: pytest.MonkeyPatch, world: int | str, options: dict[str, Any], text: str
) -> None:
    alone.setenv("WORLD_SIZE", str(world))
    with pytest.raises(ConfigError) as refused:
        init_mesh(**options)
    assert str(refused.value) == text
    assert isinstance(refused.value, ValueError)


@pytest.mark.parametrize(
    ("gpus", "text"),
    [
        (2, "local rank 3 with 2 GPU(s) here: each rank needs a GPU of its own. Start 2 rank(s) here, or use device='cpu'"),
        (0, "local rank 3 with 0 GPU(s) here: each rank needs a GPU of its own. Start no rank(s) here, or use device='cpu'"),
    ],
)
def test_more_ranks_than_gpus_are_refused(alone: pytest.MonkeyPatch, gpus: int, text: str) -> None:
    alone.setattr(torch.cuda, "device_count", lambda: gpus)
    alone.setenv("WORLD_SIZE", "8")
    alone.setenv("LOCAL_RANK", "3")
    with pytest.raises(ConfigError) as refused:
        init_mesh(device="cuda")
    assert str(refused.value) == text


def test_a_layout_takes_only_the_world_it_fits() -> None:
    assert Layout(pp=2, dp=-1, tp=2).resolve(16) == Layout(pp=2, dp=4, tp=2)
    assert Layout(pp=2, dp=4, tp=2).resolve(16).world == 16
    with pytest.raises(ConfigError, match="With 7 ranks pp 1 x dp 7 x tp 1 fits"):
        Layout(pp=2, dp=-1, tp=2).resolve(7)


def launched(alone: pytest.MonkeyPatch, port: int, **words: str) -> None:
    for name, value in {"WORLD_SIZE": "2", "MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(port), **words}.items():
        alone.setenv(name, value)


def test_missing_ranks_are_an_error_in_time(alone: pytest.MonkeyPatch) -> None:
    with socket.create_server((LOOPBACK, 0)) as server:
        free = server.getsockname()[1]
    launched(alone, free, RANK="1")
    began = time.monotonic()
    with pytest.raises(DistributedError, match=rf"rank 1 of 2 could not meet .* at {LOOPBACK}:{free} within 1 s: .* timed out .* connect "):
        init_mesh(device="cpu", timeout_s=1.0)
    assert time.monotonic() - began < 20


def test_a_port_in_use_is_an_error(alone: pytest.MonkeyPatch) -> None:
    with socket.create_server((LOOPBACK, 0)) as server:
        port = server.getsockname()[1]
        launched(alone, port, RANK="0")
        with pytest.raises(DistributedError, match=rf"rank 0 of 2 could not meet .*:{port} .*(EADDRINUSE|address already in use)"):
            init_mesh(device="cpu", timeout_s=1.0)


def test_ranks_that_have_not_come_are_named(alone: pytest.MonkeyPatch) -> None:
    with socket.create_server((LOOPBACK, 0)) as server:
        free = server.getsockname()[1]
    launched(alone, free, RANK="0", WORLD_SIZE="4")
    late = TCPStore(LOOPBACK, free, is_master=True, wait_for_workers=False)
    alone.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    meeting = PrefixStore("start 0", late)
    meeting.set("meeting 1/rank 2 is here", "")
    with pytest.raises(DistributedError, match=r"rank 0 of 4 could not meet .* within 0.5 s: ranks \[1, 3\] have not come\. If"):
        init_mesh(device="cpu", timeout_s=0.5)


def test_a_rank_beyond_the_world_is_refused(alone: pytest.MonkeyPatch) -> None:
    launched(alone, 29500, RANK="9", WORLD_SIZE="4")
    with pytest.raises(ConfigError) as refused:
        init_mesh(device="cpu")
    assert str(refused.value) == "RANK=9, WORLD_SIZE=4: ranks count from 0 to below the world size. Start the program with torchrun"


def meet_twice() -> tuple[float, float]:
    totals = []
    for factor in (1.0, 10.0):
        mesh = init_mesh(device="cpu", tp=2)
        total = torch.tensor([factor * (mesh.rank + 1)])
        dist.all_reduce(total, group=mesh.all.group)
        totals.append(total.item())
        mesh.close()
    return totals[0], totals[1]


@pytest.mark.parametrize("served", ["by the launcher", "by rank 0"])
def test_ranks_can_meet_again(served: str) -> None:
    script = "import os; from tests.test_mesh import meet_twice; "
    if served == "by rank 0":
        with socket.create_server((LOOPBACK, 0)) as server:
            script += f"os.environ.update(TORCHELASTIC_USE_AGENT_STORE='False', MASTER_PORT='{server.getsockname()[1]}'); "
    assert launch(["-c", script + "assert meet_twice() == (3.0, 30.0)"], 2) == 0


def threads_left() -> tuple[int, int]:
    """Threads of this process before a mesh is made, and after it has been used and closed."""
    before = len(os.listdir("/proc/self/task"))
    mesh = init_mesh(device="cpu", tp=2)
    engine = parallelize(Llama(ModelConfig(vocab=16, dim=8, layers=1, heads=2, kv_heads=1, ffn=8), device="meta"), mesh)
    ids = torch.zeros(2, 4, dtype=torch.int64)
    engine.train_step((ids, ids))
    assert len(os.listdir("/proc/self/task")) > before
    mesh.close()
    return before, len(os.listdir("/proc/self/task"))


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="this system does not list the threads of a process")
def test_a_closed_mesh_leaves_no_threads_that_could_outlive_the_interpreter() -> None:
    """Whatever still refers to the mesh: here the engine does."""
    script = (
        "import torch; torch.set_num_threads(1); from tests.test_mesh import threads_left; a, b = threads_left(); assert a == b, (a, b)"
    )
    assert launch(["-c", script], 2) == 0


def with_another_version(odd: int) -> tuple[str, bool]:
    """The error of every rank when one runs another version, and whether torch.distributed is left as it was."""
    kept = mesh_module.__version__
    mesh_module.__version__ = "9.9" if dist.get_rank() == odd else kept
    try:
        init_mesh(device="cpu")
    except DistributedError as error:
        return str(error), dist.is_initialized()
    finally:
        mesh_module.__version__ = kept
    return "no error", dist.is_initialized()


@pytest.mark.parametrize("world", [2, 3])
def test_another_version_is_named_on_every_rank(ranks: Ranks, world: int) -> None:
    torch_version = torch.__version__.split("+")[0]
    text = (
        f"all ranks must have the same version, 'pymesh3d {mesh_module.__version__}, torch {torch_version}', but "
        f"rank 1 has 'pymesh3d 9.9, torch {torch_version}'. Install and start the same everywhere"
    )
    assert ranks(world, with_another_version, 1) == [(text, True)] * world


def limits() -> list[float]:
    mesh = init_mesh(device="cpu", tp=2, timeout_s=17.0)
    replicas = mesh.subgroup(mesh.dp, 1)
    groups = [mesh[name].get_group() for name in AXES] + [replicas.group]
    found = [group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in groups]
    mesh.close()
    return found


def test_the_time_limit_holds_for_every_group(ranks: Ranks) -> None:
    assert ranks(4, limits) == [[17.0] * 5] * 4


def lines_across() -> tuple[list[int], float, bool]:
    mesh = init_mesh(device="cpu", dp=-1, tp=2)
    line = mesh.across(mesh.dp, 2)
    total = torch.tensor([10.0**mesh.rank])
    dist.all_reduce(total, group=line.group)
    again = mesh.across(mesh.dp, 2) is line
    mesh.close()
    return [line.rank, *line.ranks], total.item(), again


def test_lines_across_runs_of_neighbours_are_made_once(ranks: Ranks) -> None:
    """Of a group with ranks 0, 2, 4, 6: in runs of two, the first and the second of each."""
    for rank, (line, total, again) in enumerate(ranks(8, lines_across)):
        assert line == [rank // 4, rank % 4, rank % 4 + 4] and again, rank
        assert total == 10.0 ** (rank % 4) + 10.0 ** (rank % 4 + 4), rank


def subgroups() -> tuple[tuple[int, ...], float, bool, bool]:
    mesh = init_mesh(device="cpu", dp=1, tp=-1)
    pair = mesh.subgroup(mesh.tp, 2)
    total = torch.tensor([10.0**mesh.rank])
    dist.all_reduce(total, group=pair.group)
    same = mesh.subgroup(mesh.tp, 2) is pair and mesh.subgroup(mesh.tp, 4) is mesh.tp
    kept = dist.get_world_size()
    mesh.close()
    return pair.ranks, total.item(), same, dist.is_initialized() and dist.get_world_size() == kept


def test_subgroups_are_runs_of_neighbours_made_once(ranks: Ranks) -> None:
    assert ranks(4, subgroups) == [((0, 1), 11.0, True, True)] * 2 + [((2, 3), 1100.0, True, True)] * 2


def on_two_hosts(split: int) -> list[str]:
    """Warnings of a mesh with tp=2 when ranks from `split` on say they are on another host."""
    os.environ["GROUP_RANK"] = str(int(dist.get_rank() >= split))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        mesh = init_mesh(device="cpu", tp=2)
    text = str(mesh)
    mesh.close()
    return (
        [str(warning.message) for warning in caught if "tp group" in str(warning.message)] + text.splitlines()[:1] + text.splitlines()[-2:]
    )


def test_tp_across_hosts_warns_once_with_the_ranks(ranks: Ranks) -> None:
    head = "pp 1 x dp 2 x tp 2 = 4 rank(s) on 2 host(s), cpu"
    network, memory = "  {}    2  slowest link: network", "  {}    2  slowest link: shared memory"
    assert ranks(4, on_two_hosts, 2) == [[head, network.format("dp"), memory.format("tp")]] * 4
    across = ranks(4, on_two_hosts, 3)
    assert across[0][0] == "tp group [2, 3] leaves the NVLink domain: its slowest link is network"
    assert [lines[-3:] for lines in across] == [[head, network.format("dp"), network.format("tp")]] * 4
    assert [len(lines) for lines in across] == [4, 3, 3, 3], "one rank speaks for all"


def after_closing() -> str:
    mesh = init_mesh(tp=2, dp=1, device="cpu")
    mesh.close()
    with pytest.raises(ConfigError) as caught:
        all_reduce_(torch.ones(1), mesh.tp)
    assert not hasattr(mesh.tp, "groups")
    return str(caught.value)


def test_a_closed_mesh_says_that_it_is_closed(ranks: Ranks) -> None:
    assert ranks(2, after_closing) == ["axis tp of a closed mesh: its ranks no longer talk to each other. Call mesh.close() last"] * 2


class Transport:
    """Writes down what it is told, and is broken where it is said to be."""

    def __init__(self, told: list[str], name: str, broken: bool) -> None:
        self.told, self.name, self.broken = told, name, broken

    def check(self) -> None:
        if self.broken:
            raise RuntimeError("the peer is gone")

    def abort(self, seconds: float) -> bool:
        self.told.append(f"abort {self.name} within {seconds:g} s")
        return True

    def close(self) -> None:
        self.told.append(f"close {self.name}")


def closing(broken: bool, failed: str) -> list[str]:
    mesh, told = init_mesh(device="cpu"), list[str]()
    mesh._failed = failed
    groups = mesh.watched.pop()
    mesh.watched += [Transport(told, "link", broken), Transport(told, "groups", False)]
    mesh.close()
    groups.close()
    return told


@pytest.mark.parametrize(("broken", "failed"), [(True, ""), (False, "no room")])
def test_a_mesh_that_lost_a_peer_or_a_step_aborts_all_before_it_closes_any(ranks: Ranks, broken: bool, failed: str) -> None:
    assert ranks(1, closing, False, "") == [["close link", "close groups"]]
    assert ranks(1, closing, broken, failed) == [["abort link within 2 s", "abort groups within 2 s", "close link", "close groups"]]


def connected() -> list[tuple[int, ...]]:
    """The groups of this rank, in order, that a mesh of GPUs uses when it is made, and for a subgroup."""
    used = []
    with pytest.MonkeyPatch.context() as patch:
        for name, stand_in in {
            "_device": lambda _: torch.device("cuda", 0),
            "nvidia_links": dict,
            "physical_device": lambda _: dist.get_rank(),
            "DeviceMesh": SimpleNamespace(from_group=lambda *_, **__: None),
        }.items():
            patch.setattr(mesh_module, name, stand_in)
        patch.setattr(mesh_module.Mesh, "_warn_of_slow_tp", lambda _: None)
        patch.setattr(torch, "zeros", lambda *_, **__: torch.ones(1))
        patch.setattr(dist, "all_reduce", lambda _, group: used.append(tuple(dist.get_process_group_ranks(group))))
        mesh = init_mesh(tp=2, dp=2)
        mesh.select(mesh.dp, (1, 0))
    mesh.close()
    return used


def test_every_group_of_gpus_is_used_before_a_step(ranks: Ranks) -> None:
    """NCCL connects it then. In a step, where kernels wait for peers, that could wait for ever."""
    assert ranks(4, connected) == [
        [(0, 1, 2, 3), (row, row + 2), (line, line + 1), (row, row + 2)] for line, row in ((0, 0), (0, 1), (2, 0), (2, 1))
    ]


class Aborted(SimpleNamespace):
    """A process group that writes down that it was aborted."""

    def abort(self) -> None:
        self.told.append(self.name)


def test_a_mesh_that_cannot_be_made_on_gpus_aborts_what_it_has_begun(alone: pytest.MonkeyPatch) -> None:
    """A peer is lost while groups are connected: to destroy them would wait for it."""
    told = list[str]()

    def lost(*_: object, groups: Any, **__: object) -> None:
        groups.axes.append(Axis("dp", 0, (0, 1), Aborted(told=told, name="dp")))  # type: ignore[arg-type]
        raise DistributedError("connecting the tp groups failed")

    for name, stand_in in {
        "_device": lambda _: torch.device("cuda", 0),
        "join": lambda *_: None,
        "introduce": lambda text, *_: [text],
        "nvidia_links": dict,
        "physical_device": lambda _: 0,
        "Mesh": lost,
    }.items():
        alone.setattr(mesh_module, name, stand_in)
    alone.setattr(dist, "group", SimpleNamespace(WORLD=Aborted(told=told, name="world")))
    alone.setattr(dist, "destroy_process_group", lambda *_: pytest.fail("this waits for a lost peer"))
    with pytest.raises(DistributedError, match="connecting the tp groups failed"):
        init_mesh()
    assert sorted(told) == ["dp", "world"]

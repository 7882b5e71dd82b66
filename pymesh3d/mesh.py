"""The mesh: ranks <-> coordinates on the axes pp, dp, cp, tp, and a process group for each axis.

Ranks are numbered with tp innermost, so tp groups are neighbours and stay inside one host when they fit.
"""

from __future__ import annotations

import datetime
import warnings
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from pymesh3d import __version__
from pymesh3d.axis import ABORT, Axis, Watched, check_all, give_up, named
from pymesh3d.config import AXES, Layout, require_timeout
from pymesh3d.errors import ConfigError, DistributedError
from pymesh3d.process_groups import ProcessGroups
from pymesh3d.rendezvous import introduce, join, number_from_environment, require_equal, world_size
from pymesh3d.topology import Topology, host_name, nvidia_links, physical_device

Kept = TypeVar("Kept")


class Mesh:
    """A grid of ranks. Make it with `init_mesh`; `print(mesh)` shows it.

    `mesh.tp`, `mesh.pp`, `mesh.dp`, `mesh.cp` and `mesh.all` are `Axis` records; `mesh["tp"]` is a slice of the DeviceMesh, whose
    dims have the names of the axes; `mesh.ranks[i, j, k, l]` is the rank at coordinates (pp, dp, cp, tp).
    """

    def __init__(
        self, layout: Layout, device: torch.device, topology: Topology, *, timeout: datetime.timedelta, groups: ProcessGroups
    ) -> None:
        self.layout = layout
        self.device = device
        self.topology = topology
        self.ranks = np.arange(layout.world).reshape(layout.sizes)
        self.timeout = timeout
        self._lines = groups.axes
        self.watched: list[Watched] = [groups]
        self._kept: dict[Hashable, Any] = {}
        self._failed = ""  # what ended a step, if something has
        assert dist.group.WORLD is not None, "ranks meet before they talk"
        self.rank = dist.get_rank()
        self.all = self.line("all", range(layout.world), dist.group.WORLD)
        self._connect(self.all)
        # Our own groups under the DeviceMesh: those that it makes itself wait 30 minutes, whatever the limit of the process group.
        axes = [self.new_lines(name, self.along(name).tolist())[0] for name in AXES]
        self.pp, self.dp, self.cp, self.tp = axes
        of_axes = [axis.group for axis in axes]
        self.device_mesh: DeviceMesh = DeviceMesh.from_group(of_axes, device.type, torch.from_numpy(self.ranks), mesh_dim_names=AXES)
        self._warn_of_slow_tp()

    def coordinates(self, rank: int) -> tuple[int, ...]:
        """The coordinates of a rank on the axes pp, dp, cp, tp."""
        return tuple(int(c) for c in np.unravel_index(rank, self.ranks.shape))

    def axis(self, name: str) -> Axis:
        """The axis of that name."""
        if name not in AXES:
            raise ConfigError(f"axis {name!r}", "no such mesh axis", f"Axes are {', '.join(AXES)}")
        found: Axis = getattr(self, name)
        return found

    def __getitem__(self, name: str | tuple[str, ...]) -> DeviceMesh:
        return self.device_mesh[name]

    def subgroup(self, axis: Axis, size: int) -> Axis:
        """The run of `size` neighbours on `axis` with this rank in it. The first call for a size is collective over the mesh."""
        if size == axis.size:
            return axis
        assert axis.size % size == 0, f"{axis.size} ranks on {axis.name} do not divide into runs of {size}"
        runs = self.along(axis.name).reshape(-1, size).tolist()
        return self.keep((axis.name, size), lambda: self.new_lines(f"{axis.name} neighbours", runs)[0])

    def across(self, axis: Axis, size: int, purpose: str = "") -> Axis:
        """The ranks on `axis` that are in the same place as this one of their run of `size` neighbours. The first call for a size is
        collective over the mesh, and for each `purpose`: what is asked for two of them need not come in one order on all ranks."""
        assert axis.size % size == 0, f"{axis.size} ranks on {axis.name} do not divide into runs of {size}"
        lines = [group[place::size] for group in self.along(axis.name).tolist() for place in range(size)]
        name = f"{axis.name} across runs of {size}{purpose and ' for '}{purpose}"
        return self.keep((axis.name, "across", size, purpose), lambda: self.new_lines(name, lines)[0])

    def select(self, axis: Axis, coordinates: Sequence[int]) -> Axis:
        """The part of this rank's `axis` at these coordinates, of which it is one. The first call for them is collective over the mesh,
        also for ranks that are none (they get `axis`)."""
        if [*coordinates] == [*range(axis.size)]:
            return axis
        ranks = self.along(axis.name)[:, list(coordinates)].tolist()
        return self.keep((axis.name, tuple(coordinates)), lambda: [*self.new_lines(f"{axis.name} ties", ranks), axis][0])

    def keep(self, key: Hashable, make: Callable[[], Kept]) -> Kept:
        """What `make` returned when it was first asked for under this `key`; kept until the mesh is closed."""
        if key not in self._kept:
            self._kept[key] = make()
        kept: Kept = self._kept[key]
        return kept

    def along(self, name: str) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
        """All groups of ranks along an axis, one a row."""
        where = AXES.index(name)
        return np.moveaxis(self.ranks, where, -1).reshape(-1, self.ranks.shape[where])

    def new_lines(self, name: str, lines: Sequence[Sequence[int]]) -> list[Axis]:
        """A process group for each line of ranks; every rank of the mesh must call with the same. Returns those with this rank.

        On GPUs each is used once: NCCL connects its ranks then, and not in the middle of a step, where kernels already wait for peers.
        """
        mine = []
        for ranks in lines:
            with named(f"connecting the {name} groups", self.all):
                group = dist.new_group(list(ranks), timeout=self.timeout)
            if self.rank in ranks:
                mine.append(self.line(name, ranks, group))
        self._lines += mine
        for axis in mine:
            self._connect(axis)
        return mine

    def line(self, name: str, ranks: Sequence[int], group: dist.ProcessGroup) -> Axis:
        """This rank's view of these ranks, of which it is one, and of the process group that they talk over."""
        return Axis(name, ranks.index(self.rank), tuple(ranks), group, self.watched, self.timeout)

    def _connect(self, axis: Axis) -> None:
        if self.device.type == "cuda" and axis.size > 1:
            with named(f"connecting the {axis.name} group", axis):
                dist.all_reduce(torch.zeros(1, device=self.device), group=axis.group)

    def links(self) -> dict[str, str]:
        """The slowest link that each axis crosses, over all its groups."""
        return {name: self.topology.slowest_of(self.along(name).tolist()) for name in AXES}

    def _warn_of_slow_tp(self) -> None:
        slow = self.topology.outside_nvlink(self.along("tp").tolist())
        if slow is not None and self.rank == 0:
            warnings.warn(f"tp group {slow} leaves the NVLink domain: its slowest link is {self.topology.slowest(slow)}", stacklevel=4)

    def fail(self, error: BaseException) -> None:
        """Let nobody go on with this mesh: a step ended in the middle on this rank, and the others are elsewhere."""
        if self.layout.world > 1:
            self._failed = self._failed or (str(error).strip() or type(error).__name__).splitlines()[0]

    def require_in_step(self) -> None:
        """Raise DistributedError if a step has failed before, as `fail` was told."""
        if self._failed:
            raise DistributedError(
                f"rank {self.rank}: a step has failed before ({self._failed}), and what is under way between the ranks belongs to it. "
                "Close the mesh and start again"
            )

    @property
    def shared_bytes(self) -> int:
        """How much memory of this rank it shares with others, which torch does not count."""
        return sum(getattr(watched, "shared_bytes", 0) for watched in self.watched)

    def _lost(self) -> bool:
        """Whether one of those watched reports a fault."""
        try:
            check_all(self.watched)
        except RuntimeError:
            return True
        return False

    def close(self) -> None:
        """Destroy the process groups that this mesh made (all of them, if `init_mesh` started torch.distributed).

        If a step has failed or a peer has been lost, links and groups on GPUs are aborted, each within `ABORT` seconds; then this process
        has to end.
        """
        if self._failed or self._lost():
            give_up(self.watched)
        for watched in self.watched:
            watched.close()
        self.watched.clear()
        # The last reference to a group ends its threads, which must not outlive the interpreter: they may still hold Python objects.
        for axis in (self.all, *self._lines):
            axis.__dict__.pop("group", None)
        self._lines.clear()
        self._kept.clear()
        self.__dict__.pop("device_mesh", None)

    def __str__(self) -> str:
        shown = [name for name in AXES if name != "cp" or self.cp.size > 1]
        array = np.array2string(self.ranks.reshape([s for n, s in zip(AXES, self.ranks.shape, strict=True) if n in shown]), separator=" ")
        lines = [f"{self.layout} = {self.layout.world} rank(s) on {len(set(self.topology.hosts))} host(s), {self.device.type}"]
        lines += [f"ranks[{', '.join(shown)}] =", array]
        lines += [f"  {name} {self.axis(name).size:>4}  slowest link: {link}" for name, link in self.links().items() if name in shown]
        return "\n".join(lines)


def init_mesh(*, tp: int = 1, pp: int = 1, dp: int = -1, cp: int = 1, device: str | None = None, timeout_s: float = 300.0) -> Mesh:
    """Join the processes that torchrun or `pymesh3d.launch` started (or be the only one) and arrange them as a mesh.

    One axis may be -1: whatever is left. `device`: "cuda" or "cpu", by default whichever this machine has. `timeout_s` bounds
    every wait for another rank. Raises ConfigError before any communication when the sizes do not fit the number of ranks,
    DistributedError when ranks cannot meet or do not run the same version; on GPUs this process has to end then.
    """
    require_timeout("timeout_s", timeout_s)
    world = dist.get_world_size() if dist.is_initialized() else world_size()
    layout = Layout(pp=pp, dp=dp, cp=cp, tp=tp).resolve(world)
    where = _device(device)
    owns = not dist.is_initialized()
    if owns:
        join(where, timeout_s)
    groups = ProcessGroups([], everything=owns, on_gpu=where.type == "cuda")
    try:
        version = f"pymesh3d {__version__}, torch {torch.__version__.split('+')[0]}"
        texts = introduce(f"{version}|{host_name()}|{physical_device(where.index or 0)}", timeout_s)
        versions, hosts, devices = zip(*(text.split("|") for text in texts), strict=True)
        require_equal(versions, "version")
        links = nvidia_links() if where.type == "cuda" and world > 1 else {}
        topology = Topology(hosts=hosts, devices=tuple(map(int, devices)), links=links, on_gpu=where.type == "cuda")
        return Mesh(layout, where, topology, timeout=datetime.timedelta(seconds=timeout_s), groups=groups)
    except BaseException:
        if owns:
            groups.abort(ABORT)
            groups.close()
        raise


def tp_axis(mesh: Mesh | DeviceMesh | Axis) -> Axis:
    """The tensor-parallel axis of a Mesh, or of a torch DeviceMesh that is one-dimensional or has a dim called "tp"."""
    if isinstance(mesh, Axis):
        return mesh
    if isinstance(mesh, Mesh):
        return mesh.tp
    if not isinstance(mesh, DeviceMesh):
        raise ConfigError(f"mesh={mesh!r}", "it must be a pymesh3d Mesh or a torch DeviceMesh", "Make one with pymesh3d.init_mesh(tp=2)")
    names = mesh.mesh_dim_names or ()
    if mesh.ndim != 1 and "tp" not in names:
        raise ConfigError(
            f"DeviceMesh with dims {names or mesh.ndim}", "no dim called 'tp'", "Name it 'tp', or hand over a one-dimensional slice"
        )
    return Axis.of("tp", mesh if mesh.ndim == 1 else mesh["tp"])


def _device(kind: str | None) -> torch.device:
    if kind is None:
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind not in ("cpu", "cuda"):
        raise ConfigError(f"device={kind!r}", "the device must be cpu or cuda", "Leave it out to take what this machine has")
    if kind == "cpu":
        return torch.device("cpu")
    local, count = number_from_environment("LOCAL_RANK", default=0, lowest=0), torch.cuda.device_count()
    if local >= count:
        raise ConfigError(
            f"local rank {local} with {count} GPU(s) here",
            "each rank needs a GPU of its own",
            f"Start {count or 'no'} rank(s) here, or use device='cpu'",
        )
    torch.cuda.set_device(local)
    return torch.device("cuda", local)

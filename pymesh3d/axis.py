"""One rank's view of a mesh axis, and errors that say who waited for whom along it."""

from __future__ import annotations

import dataclasses
import datetime
import itertools
import time
import weakref
from collections.abc import Iterable
from typing import Any, NoReturn, Protocol

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from pymesh3d.errors import ConfigError, DistributedError

ABORT = 2.0  # seconds that a transport has to give up
TIMEOUT = datetime.timedelta(seconds=300)  # of a wait for other ranks, where no mesh says another

_numbers = itertools.count()  # so that no name is given twice


class Watched(Protocol):
    """A transport under the mesh: it can be asked how it is, told to give up, and is closed with the mesh."""

    def check(self) -> None:
        """Raise RuntimeError with what has gone wrong."""

    def abort(self, seconds: float) -> bool:
        """End every wait. Whether that was done within so many seconds."""

    def close(self) -> None:
        """End it, once all that was started has ended."""


def check_all(watched: Iterable[Watched]) -> None:
    """Raise RuntimeError with what has gone wrong with one of them."""
    for one in watched:
        one.check()


def give_up(watched: Iterable[Watched]) -> None:
    """Let all of them end every wait, one after the other, in `ABORT` seconds each."""
    for one in watched:
        one.abort(ABORT)


@dataclasses.dataclass(frozen=True, eq=False)
class Axis:
    """One rank's view of one mesh axis: its coordinate, the axis' size, and the ranks it talks to along it.

    `key`: a text that stands for it where only texts may stand, as in operators. While the host waits for the GPU, it has an eye on those
    `watched`, and waits no longer than `timeout`.
    """

    name: str
    rank: int
    ranks: tuple[int, ...]
    group: dist.ProcessGroup
    watched: list[Watched] = dataclasses.field(default_factory=list, repr=False)
    timeout: datetime.timedelta = dataclasses.field(default=TIMEOUT, repr=False)
    key: str = dataclasses.field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", f"axis {self.name} ({next(_numbers)})")

    @property
    def size(self) -> int:
        """Number of ranks along the axis."""
        return len(self.ranks)

    def __getattr__(self, name: str) -> Any:
        if name == "group":  # `Mesh.close` takes it away
            raise ConfigError(f"axis {self.name} of a closed mesh", "its ranks no longer talk to each other", "Call mesh.close() last")
        raise AttributeError(name)

    def __deepcopy__(self, memo: object) -> Axis:
        """Itself: what is copied talks to the same ranks, and a process group cannot be copied."""
        return self

    @staticmethod
    def of(name: str, line: DeviceMesh) -> Axis:
        """The axis that a one-dimensional DeviceMesh stands for: one for all layers over its group, which share memory by their axis."""
        group = line.get_group()
        one = _of_groups.get(group)
        if one is None or one.name != name:
            one = _of_groups[group] = Axis(name, line.get_local_rank(), tuple(dist.get_process_group_ranks(group)), group)
        return one


_of_groups: weakref.WeakValueDictionary[dist.ProcessGroup, Axis] = weakref.WeakValueDictionary()  # each goes with its layers


class named:
    """`with named(operation, axis)`: what torch.distributed raises inside becomes a DistributedError that says who waited for whom, and
    how long."""

    def __init__(self, operation: str, axis: Axis) -> None:
        self._operation, self._axis = operation, axis

    def __enter__(self) -> None:
        self._began = time.monotonic()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if isinstance(error, RuntimeError):
            raise_named(error, self._operation, self._axis, time.monotonic() - self._began)


def raise_named(error: Exception, operation: str, axis: Axis, seconds: float | None = None) -> NoReturn:
    """Raise a DistributedError that says who waited for whom, and how long, or `error` itself where no peer is to blame.

    All those watched give up first: what is under way between the ranks may never end by itself, and nothing more must begin.
    """
    if isinstance(error, DistributedError | torch.OutOfMemoryError):
        raise error
    give_up(axis.watched)
    if isinstance(error, torch.AcceleratorError):
        raise error
    peers = [rank for rank in axis.ranks if rank != axis.ranks[axis.rank]]
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    after = "" if seconds is None else f" after {seconds:.1f} s"
    raise DistributedError(
        f"rank {axis.ranks[axis.rank]}: {operation} over axis {axis.name} with ranks {peers} failed{after}: "
        f"{reason}. One of these ranks has probably stopped; its own output says why"
    ) from error

"""Where the host waits for the GPU: with a time limit, and with an eye on the peers."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator

import torch

from pymesh3d.axis import Axis, Watched, check_all, give_up, named, raise_named
from pymesh3d.errors import DistributedError
from pymesh3d.mesh import Mesh

WAIT_PERIOD = 0.01  # seconds between two looks at the peers while the host waits
THREAD_PERIOD = 0.1  # the same for the thread that looks meanwhile; torch's watchdog looks as often


def on_host(tensor: torch.Tensor, operation: str, axis: Axis) -> torch.Tensor:
    """A small tensor on the host, once it has been computed. Raises DistributedError as `wait_for_gpu` does."""
    return fetched(tensor, operation, axis)()


def fetched(tensor: torch.Tensor, operation: str, axis: Axis) -> Callable[[], torch.Tensor]:
    """What waits for a small tensor and returns it on the host; not for what is enqueued from now on. Raises as `wait_for_gpu` does.

    Where there is no GPU nothing is waited for, but a wait may have been in vain before.
    """
    if not tensor.is_cuda:

        def sound() -> torch.Tensor:
            require_come(operation, axis)
            return tensor

        return sound
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    copy.copy_(tensor, non_blocking=True)
    done = torch.cuda.Event()
    done.record()

    def wait() -> torch.Tensor:
        _wait_for(done, operation, axis)
        return copy

    return wait


def require_come(operation: str, axis: Axis) -> None:
    """Raise DistributedError if a kernel has waited for a peer in vain, and gone on with whatever its memory holds.

    For where there is no GPU. Where there is one nobody knows before the host has waited for it, as `fetched` does.
    """
    with named(operation, axis):
        check_all(axis.watched)


def wait_for_gpu(operation: str, axis: Axis) -> None:
    """Let the host wait for what the current stream has to do. Raises DistributedError if a peer is lost or the axis' time runs out."""
    done = torch.cuda.Event()
    done.record()
    _wait_for(done, operation, axis)


def _wait_for(event: torch.cuda.Event, operation: str, axis: Axis) -> None:
    with named(operation, axis):
        wait_until(event.query, axis.watched, axis.timeout.total_seconds())


def wait_until(done: Callable[[], bool], watched: Iterable[Watched], seconds: float) -> None:
    """Ask until it is done. Raises RuntimeError if one of those watched reports a fault, or time runs out.

    They are asked at the end too: a transfer that has been given up lets the GPU go on, with whatever its memory holds.
    """
    deadline = time.monotonic() + seconds
    look = time.monotonic() + WAIT_PERIOD
    while not done():
        if (now := time.monotonic()) < look:
            continue
        look = now + WAIT_PERIOD
        check_all(watched)
        if now > deadline:
            raise RuntimeError(f"the GPU has not finished within {seconds:g} s, the timeout of the mesh")
    check_all(watched)


@contextlib.contextmanager
def looked_after(operation: str, mesh: Mesh) -> Iterator[None]:
    """Meanwhile, on GPUs, a thread looks at what the mesh talks over, and lets all of it give up at a fault. Raises DistributedError then.

    The host may not get as far as to wait for the GPU itself, with a limit: the driver takes about 1,024 kernels, and then stands until the
    GPU goes on. Elsewhere every wait has a limit of its own.
    """
    if mesh.device.type != "cuda":
        yield
        return
    done = threading.Event()
    found: list[RuntimeError] = []

    def look() -> None:
        try:
            while not done.wait(THREAD_PERIOD):
                check_all(mesh.watched)
        except RuntimeError as error:
            found.append(error)
            give_up(mesh.watched)

    thread = threading.Thread(target=look, name="look after peers", daemon=True)
    thread.start()
    try:
        try:
            yield
        finally:
            done.set()
            thread.join()
    except DistributedError as error:  # what came of it
        if found and str(found[0]) not in str(error):
            raise DistributedError(f"{error}. Before that: {found[0]}") from error
        raise
    if found:  # the GPU went on, with whatever its memory holds
        raise_named(found[0], operation, mesh.all)

"""Where the host waits for the GPU: with a time limit, and with an eye on the peers."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator

import torch

from pymesh3d.axis import Axis, Watched, give_up, named
from pymesh3d.errors import DistributedError

LOOK = 0.01  # seconds between two looks at the peers
GLANCE = 0.1  # the same, aside of the host, and how often torch's watchdog looks


def on_host(tensor: torch.Tensor, operation: str, axis: Axis) -> torch.Tensor:
    """A small tensor on the host, once it has been computed. Raises DistributedError as `wait_for_gpu` does."""
    if not tensor.is_cuda:
        return tensor
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    copy.copy_(tensor, non_blocking=True)
    wait_for_gpu(operation, axis)
    return copy


def wait_for_gpu(operation: str, axis: Axis) -> None:
    """Let the host wait for what the current stream has to do. Raises DistributedError if a peer is lost or the axis' time runs out."""
    done = torch.cuda.Event()
    done.record()
    with named(operation, axis):
        wait_until(done.query, axis.watched, axis.timeout.total_seconds())


def wait_until(done: Callable[[], bool], watched: Iterable[Watched], seconds: float) -> None:
    """Ask until it is done. Raises RuntimeError if one of those watched reports a fault, or time runs out.

    They are asked at the end too: a transfer that has been given up lets the GPU go on, with whatever its memory holds.
    """
    deadline = time.monotonic() + seconds
    look = time.monotonic() + LOOK
    while not done():
        if (now := time.monotonic()) < look:
            continue
        look = now + LOOK
        for one in watched:
            one.check()
        if now > deadline:
            raise RuntimeError(f"the GPU has not finished within {seconds:g} s, the timeout of the mesh")
    for one in watched:
        one.check()


@contextlib.contextmanager
def looked_after(axis: Axis) -> Iterator[None]:
    """Meanwhile a thread has an eye on those watched, and lets all of them give up at a fault of one, which the host's own error then names.

    The host may not get as far as to wait for the GPU: the driver takes about 1,024 kernels, and then stands until the GPU goes on.
    """
    done = threading.Event()
    found: list[RuntimeError] = []

    def look() -> None:
        try:
            while not done.wait(GLANCE):
                for one in axis.watched:
                    one.check()
        except RuntimeError as error:  # the host meets what comes of it, as soon as it gets on
            found.append(error)
            give_up(axis.watched)

    thread = threading.Thread(target=look, name="look after peers", daemon=True)
    thread.start()
    try:
        yield
    except DistributedError as error:
        if found and str(found[0]) not in str(error):
            raise DistributedError(f"{error}. Before that: {found[0]}") from error
        raise
    finally:
        done.set()
        thread.join()

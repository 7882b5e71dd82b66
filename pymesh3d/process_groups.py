"""The process groups of torch.distributed under a mesh: what has gone wrong with them, and how they end."""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time

import torch
import torch.distributed as dist

from pymesh3d.axis import Axis


class ProcessGroups:
    """Those of torch's that a mesh has made: destroying them on GPUs would wait for a peer that is lost."""

    def __init__(self, axes: list[Axis], *, everything: bool, on_gpu: bool) -> None:
        self.axes, self._everything, self._on_gpu = axes, everything, on_gpu
        self._aborting: list[threading.Thread] = []
        self._lock = threading.Lock()

    def _all(self) -> list[dist.ProcessGroup]:
        return [axis.group for axis in self.axes] + ([dist.group.WORLD] if dist.group.WORLD is not None else [])

    def check(self) -> None:
        """Raise RuntimeError with what torch's watchdog has found, which looks ten times a second."""
        if not self._on_gpu:
            return
        for group in self._all():
            backend = group._get_backend(torch.device("cuda"))
            if backend.name() == "nccl" and (error := backend.get_error().name) != "SUCCESS":
                raise RuntimeError(f"{error} in the process group of ranks {dist.get_process_group_ranks(group)}")

    def abort(self, seconds: float) -> bool:
        """End every wait on GPUs; elsewhere each wait has its own limit."""
        if not self._on_gpu:
            return True
        with self._lock:
            if not self._aborting:
                # All at a time, each on a thread: NCCL waits for what the others have on the GPU, and may never come back.
                for group in self._all():
                    # Never freed: the destructor joins torch's watchdog, which sleeps a minute after it has found an error.
                    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
                    self._aborting.append(threading.Thread(target=_abort, args=(group,), name="abort process group", daemon=True))
                for thread in self._aborting:
                    thread.start()
        deadline = time.monotonic() + seconds
        for thread in self._aborting:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._aborting)

    def close(self) -> None:
        """Destroy them, all of torch.distributed's if `everything`; those that are aborted end with the process."""
        if self._aborting or not dist.is_initialized():
            return
        if self._everything:
            dist.destroy_process_group()
        else:
            for axis in self.axes:
                dist.destroy_process_group(axis.group)


def _abort(group: dist.ProcessGroup) -> None:
    with contextlib.suppress(RuntimeError):  # NCCL tells once more of the error that it is aborted for
        group.abort()

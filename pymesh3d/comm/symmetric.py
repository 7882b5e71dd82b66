"""Memory of which every rank of an axis has a part that all the others read and write: with plain loads and stores, and no collective.

On GPUs it is torch's symmetric memory, whose interface may still change and is used nowhere else; on the CPU a file in memory that all
ranks map. Only ranks of one host, or of one NVLink domain, can share it.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed import _symmetric_memory as torch_symmetric

from pymesh3d.axis import Axis, named
from pymesh3d.comm.collectives import all_reduce_, gather_rows
from pymesh3d.comm.watch import wait_for_gpu
from pymesh3d.errors import SharingError

MEMORY = Path("/dev/shm")  # where files are memory; elsewhere they are in the folder for temporary ones
LONGEST_TEXT = 400  # bytes of a path or an error that ranks tell each other
SHARING = "sharing memory"
CPU = torch.device("cpu")

Made = TypeVar("Made")


class SymmetricBuffer:
    """`size` bytes on every rank of an axis, zero at first. All ranks must make it, with the same size. Raises SharingError where they
    cannot share any, and DistributedError where a rank does not come.

    What is written there becomes visible to others in the order that signals (`triton_kernels/signals.py`) give it. `addresses`, int64
    [ranks] on `device`, are for kernels: where each rank's part lies in this process.
    """

    def __init__(self, size: int, axis: Axis, device: torch.device) -> None:
        assert size > 0, f"a buffer of {size} bytes"
        self.size = size
        if axis.size == 1:
            self._parts = [torch.zeros(size, dtype=torch.uint8, device=device)]
        elif device.type == "cuda":
            self._parts = _parts_on_gpus(size, axis, device)
        else:
            self._parts = _parts_of_a_file(size, axis)
        self.addresses = torch.tensor([part.data_ptr() for part in self._parts], dtype=torch.int64, device=device)

    def part(self, rank: int, shape: tuple[int, ...], dtype: torch.dtype, offset: int = 0) -> torch.Tensor:
        """A tensor over what the axis' rank `rank` has from byte `offset` on."""
        length = torch.Size(shape).numel() * dtype.itemsize
        memory = self._parts[rank]
        assert offset % dtype.itemsize == 0 and offset + length <= memory.numel(), (
            f"{shape} of {dtype} at {offset} of {memory.numel()} bytes"
        )
        return memory[offset : offset + length].view(dtype).view(shape)


def _parts_on_gpus(size: int, axis: Axis, device: torch.device) -> list[torch.Tensor]:
    mine = _together(lambda: torch_symmetric.empty(size, dtype=torch.uint8, device=device), axis, device)
    with named(SHARING, axis):
        handle = _together(lambda: torch_symmetric.rendezvous(mine, axis.group), axis, device)
    mine.zero_()
    all_reduce_(torch.zeros(1, device=device), axis).wait()  # nobody writes before all are zero
    wait_for_gpu(SHARING, axis)
    return [mine if rank == axis.rank else handle.get_buffer(rank, (size,), torch.uint8) for rank in range(axis.size)]


def _parts_of_a_file(size: int, axis: Axis) -> list[torch.Tensor]:
    """One file for all ranks, which loses its name as soon as all have it, and goes with the last of them."""
    stride = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    with contextlib.ExitStack() as until_all_have_it:
        path = _together(lambda: until_all_have_it.enter_context(_file(stride * axis.size)) if axis.rank == 0 else "", axis)
        shared = _exchange(path, axis)[0]
        memory = _together(lambda: _map(shared, stride * axis.size), axis)
    return [memory[rank * stride : rank * stride + size] for rank in range(axis.size)]


@contextlib.contextmanager
def _file(size: int) -> Iterator[str]:
    """The path of a file that only this user may open, its memory set aside. Raises OSError."""
    with tempfile.NamedTemporaryFile(prefix="pymesh3d-", dir=MEMORY if MEMORY.is_dir() else None) as file:
        try:
            os.ftruncate(file.fileno(), size)
            if hasattr(os, "posix_fallocate"):  # or the first write into memory that is not there would kill the process
                os.posix_fallocate(file.fileno(), 0, size)
        except OSError as error:
            raise OSError(error.errno, f"{size:,} bytes: {error.strerror}", file.name) from error
        yield file.name


def _map(path: str, size: int) -> torch.Tensor:
    """The bytes of a file that another rank has made. Raises OSError."""
    handle = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    try:
        if (found := os.fstat(handle).st_size) != size:
            raise OSError(errno.EINVAL, f"it has {found:,} bytes, not {size:,}: all ranks must ask for the same", path)
        return torch.frombuffer(mmap.mmap(handle, size), dtype=torch.uint8)
    finally:
        os.close(handle)


def _together(attempt: Callable[[], Made], axis: Axis, device: torch.device = CPU) -> Made:
    """What `attempt` returns here. Where that fails on one rank, all raise SharingError, but for what torch.distributed raises."""
    try:
        made, failure = attempt(), ""
    except dist.DistError:
        raise
    except OSError as error:
        failure = f"{error.filename}: {error.strerror}"
    except RuntimeError as error:  # of torch or the driver
        failure = (str(error).strip() or type(error).__name__).splitlines()[0]
    for rank, text in zip(axis.ranks, _exchange(failure, axis, device), strict=True):
        if text:
            raise SharingError(
                f"rank {rank}: {SHARING} over axis {axis.name} with ranks {list(axis.ranks)} failed: {text}. "
                "Ranks that share memory run on one host, as one user"
            )
    return made


def _exchange(text: str, axis: Axis, device: torch.device = CPU) -> list[str]:
    """The short texts of all ranks of the axis."""
    data = text.encode()[:LONGEST_TEXT].ljust(LONGEST_TEXT, b"\0")
    rows = gather_rows(torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device), axis, SHARING)
    if device.type == "cuda":
        wait_for_gpu(SHARING, axis)
    return [row.numpy().tobytes().rstrip(b"\0").decode(errors="replace") for row in rows.cpu()]

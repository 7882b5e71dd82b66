"""The only importer of `pymesh3d._C`, the compiled part: whether it is here, why not, and what it can do."""

from __future__ import annotations

import functools
import hashlib
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from pymesh3d import __version__

if TYPE_CHECKING:
    from pymesh3d._C import Copier, Gpu, Link, Nccl, Probe, Steps

log = logging.getLogger("pymesh3d")

CSRC = Path(__file__).parents[2] / "csrc"


def _is_stale(sources: str, digest: str) -> bool:
    """Whether this is a checkout, and the files that were compiled are others by now."""
    if not (CSRC.is_dir() and CSRC.with_name("setup.py").is_file()):
        return False
    files = [CSRC / name for name in sources.split()]
    return not all(file.is_file() for file in files) or digest != hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


reason = ""
"""Why the compiled part is not available; empty if it is."""

try:
    import pymesh3d._C as _C
except ModuleNotFoundError:
    reason = "not built; `pip install -v` builds it where there is a C++17 compiler and Python.h (`apt-get install g++ python3-dev`)"
except ImportError as error:
    reason = f"it does not load: {error}"
else:
    if _C.version != __version__:
        reason = f"it was built for pymesh3d {_C.version}, this is {__version__}: install again"
    elif _is_stale(getattr(_C, "sources", ""), getattr(_C, "digest", "")):
        reason = f"compiled from other sources than those in {CSRC}: install again, pip install -e {CSRC.parent}"

# What a transfer raises when its peer may be the cause; what the GPU itself does wrong is GpuError.
LinkError: tuple[type[Exception], ...] = () if reason else (_C.NcclError,)
TransferError: tuple[type[Exception], ...] = () if reason else (_C.NcclError, _C.GpuError)

available = not reason
"""Whether the compiled part is here, of this version and of the sources beside it."""


def probe(name: str, path: str = "") -> Probe | None:
    """What the shared library `name` ("nccl" or "cuda"), or the file `path` in its place, says of itself; None without the compiled part.

    Import torch first: a copy that the process already holds is the one that is asked. Raises ValueError for an unknown name.
    """
    return _C.probe(name, path) if available else None


def no_nccl() -> str:
    """Why our bindings to NCCL cannot be used beside torch's; empty if they can."""
    if not available:
        return f"the compiled part is {reason}"
    if os.environ.get("NCCL_COMM_BLOCKING") == "0":
        return "NCCL_COMM_BLOCKING=0 is set, and they need blocking communicators"
    found, wanted = _C.probe("nccl"), torch.cuda.nccl.version() if torch.cuda.is_available() else ()
    if found.error:
        return f"NCCL cannot be opened: {found.error}"
    return "" if found.version == wanted else f"the NCCL found is {found.version} in {found.path}, torch has {wanted}"


@functools.cache
def driver(cuda: str = "libcuda.so.1") -> Gpu:
    """The CUDA driver, the copy that torch has loaded. Raises RuntimeError where it cannot be opened."""
    return _C.Gpu(cuda)


@functools.cache
def libraries(cuda: str = "libcuda.so.1", nccl: str = "libnccl.so.2") -> tuple[Gpu, Nccl]:
    """The CUDA driver and NCCL, the copies that torch has loaded. Raises RuntimeError where one cannot be opened."""
    return driver(cuda), _C.Nccl(nccl)


@functools.cache
def _say_once(text: str) -> None:
    log.info(text)


def starter(
    function: int, programs: int, threads: int, shared_bytes: int, arguments: Sequence[Any]
) -> Callable[[int, Sequence[int]], None] | None:
    """What starts a kernel that triton has compiled, as `Starter` of `launch_hopper` says. None without the compiled part, and where the
    kernel takes its arguments otherwise than those of triton 3.6 do: then triton starts it.
    """
    if not available:
        return None
    try:
        return _C.Kernel(driver(), function, programs, threads, shared_bytes, arguments).start
    except (_C.GpuError, _C.LibraryError) as error:
        _say_once(f"triton starts its kernels itself: {error}")
        return None


def stream_calls() -> Gpu | None:
    """What streams can do without a processor: set numbers in any memory, and wait for them. None without the compiled part, and where the
    driver has no such functions: alike on all ranks of a host.
    """
    if not available:
        return None
    try:
        return driver()
    except _C.LibraryError as error:
        _say_once(f"streams cannot wait for numbers: {error}")
        return None


def copier() -> Copier | None:
    """A stream of the copy engines of the current GPU; None without the compiled part, and where the driver has no such functions: alike on
    all ranks of a host. Raises GpuError, a RuntimeError, where this GPU refuses.
    """
    if not available:
        return None
    try:
        return _C.Copier(driver())
    except _C.LibraryError as error:
        _say_once(f"the copy engines cannot be used: {error}")
        return None


def steps() -> Steps:
    """None yet, for a copier to take."""
    return _C.Steps()


def link(gpu: Gpu, nccl: Nccl, unique: bytes, ranks: Sequence[int], end: int, device: torch.device, *, timeout: float) -> Link:
    """End 0 or 1 of a link between two ranks of the world. Waits for the other end. Raises RuntimeError that names both."""
    scratch = torch.zeros(2, dtype=torch.uint8, device=device)
    return _C.Link(gpu, nccl, unique, ranks, end, scratch.data_ptr(), timeout=timeout)

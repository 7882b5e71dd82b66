"""The library that stands for libcuda and libnccl where there is no GPU."""

from __future__ import annotations

import contextlib
import ctypes
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from pymesh3d.comm import native, p2p

COMPILER = shutil.which("g++") or shutil.which("c++")
TLS = "-ftls-model=initial-exec"  # else ThreadSanitizer does not see that a thread's own data end with it


def build(folder: Path, *flags: str) -> str:
    """Its path in `folder`. It stays loaded to the end, because its streams are threads."""
    library = folder / "libstub.so"
    shared = ["-std=c++17", "-g", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-pthread", "-Wl,-z,nodelete", TLS]
    sources = [Path(__file__).with_name(f"{half}.cpp") for half in ("cuda", "nccl")]
    assert COMPILER is not None, "no C++ compiler: mark the test so"
    subprocess.run([COMPILER, *shared, *flags, *sources, "-o", library], check=True, timeout=100)
    return str(library)


class Machine:
    """What the library can do besides, for a process that has loaded it."""

    def __init__(self, library: str) -> None:
        self._stub = ctypes.CDLL(library)
        self.synchronize: Callable[[int], int] = self._driver_function("cuStreamSynchronize")

    def use_context(self) -> None:
        """Give this thread a context, which calls of the driver need."""
        self._driver_function("cuCtxSetCurrent")(1)

    def hang(self, function: str, milliseconds: int) -> None:
        """Let the next call of a function take so long."""
        self._stub.stub_hang(function.encode(), milliseconds)

    def fail(self, function: str, times: int = 1) -> None:
        """Let the next calls of a function fail."""
        self._stub.stub_fail(function.encode(), times)

    def delay(self, longest: int, seed: int) -> None:
        """Let every transfer wait up to so many microseconds."""
        self._stub.stub_delay(longest, seed)

    def rendezvous(self) -> None:
        """Let each send of this process end when it has been received, and not before: larger ones than NCCL's buffers do so."""
        self._stub.stub_rendezvous(1)

    def _driver_function(self, name: str) -> Callable[[int], int]:
        address = ctypes.c_void_p()
        assert self._stub.cuGetProcAddress(name.encode(), ctypes.byref(address), 12000, ctypes.c_uint64(0)) == 0
        return ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(address.value)


@contextlib.contextmanager
def under_links(library: str) -> Iterator[Machine]:
    """Let the links of a mesh on the CPU run over the library, as they do over CUDA and NCCL."""
    machine = Machine(library)
    machine.use_context()
    machine.rendezvous()
    libraries = native.libraries(cuda=library, nccl=library)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "libraries", lambda: libraries)
        patch.setattr(p2p, "_transport", lambda mesh: "nccl")
        patch.setattr(p2p, "on_host", lambda tensor, *_: machine.synchronize(0))
        patch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)
        yield machine

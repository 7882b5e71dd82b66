"""The library that stands for libcuda and libnccl where there is no GPU."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

COMPILER = shutil.which("g++") or shutil.which("c++")
TLS = "-ftls-model=initial-exec"  # else ThreadSanitizer does not see that a thread's own data end with it


def build(folder: Path, *flags: str) -> str:
    """Its path in `folder`. It stays loaded to the end, because its streams are threads."""
    library = folder / "libstub.so"
    shared = ["-std=c++17", "-g", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-pthread", "-Wl,-z,nodelete", TLS]
    source = Path(__file__).with_name("nccl.cpp")
    assert COMPILER is not None, "no C++ compiler: mark the test so"
    subprocess.run([COMPILER, *shared, *flags, source, "-o", library], check=True, timeout=100)
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

    def _driver_function(self, name: str) -> Callable[[int], int]:
        address = ctypes.c_void_p()
        assert self._stub.cuGetProcAddress(name.encode(), ctypes.byref(address), 12000, ctypes.c_uint64(0)) == 0
        return ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(address.value)

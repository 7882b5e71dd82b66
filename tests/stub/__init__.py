"""The library that stands for libcuda and libnccl where there is no GPU."""

from __future__ import annotations

import subprocess
from pathlib import Path

TLS = "-ftls-model=initial-exec"  # else ThreadSanitizer does not see that a thread's own data end with it


def build(compiler: str | None, folder: Path, *flags: str) -> str:
    """Its path in `folder`. It stays loaded to the end, because its streams are threads."""
    library = folder / "libstub.so"
    shared = ["-std=c++17", "-g", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-pthread", "-Wl,-z,nodelete", TLS]
    source = Path(__file__).with_name("nccl.cpp")
    assert compiler is not None, "no C++ compiler: mark the test so"
    subprocess.run([compiler, *shared, *flags, source, "-o", library], check=True, timeout=100)
    return str(library)

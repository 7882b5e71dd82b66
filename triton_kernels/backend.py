"""Whether the kernels here are compiled, interpreted or absent: decided once, in this file, before triton is first imported.

Kernel files take `jit` and `tl` from here, so that they can be imported where triton cannot be installed; their `*_ref` serve there.
"""

from __future__ import annotations

import os
import shutil
import sysconfig
from pathlib import Path
from typing import Any

import torch

_has_gpu = torch.cuda.is_available()
if not _has_gpu:
    os.environ.setdefault("TRITON_INTERPRET", "1")  # every @triton.jit reads it as it decorates, those of triton's own library too

try:
    import triton
    import triton.language as tl
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia import hopper
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
except ImportError as error:
    triton = tl = gluon = gl = hopper = TensorDescriptor = None
    _missing = str(error)


def no_compiler(device: str) -> str:
    """What is missing to compile for a device ("cpu" or "cuda") at run time, in words; empty if nothing is."""
    if device == "cpu":  # torch.compile writes C++
        return "" if shutil.which(os.environ.get("CXX", "g++")) else "there is no C++ compiler (g++, or what CXX names)"
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        return "there is no C compiler (gcc, clang, or what CC names)"
    return "" if Path(sysconfig.get_path("include"), "Python.h").is_file() else "Python's headers (Python.h) are not installed"


def _decide() -> tuple[bool, bool, str]:
    """(kernels can run, by the interpreter, why): from what triton's own library was decorated with, since both must be alike."""
    if triton is None:
        return False, False, f"triton cannot be imported ({_missing}); plain torch runs instead of the kernels"
    interpreted = not isinstance(tl.sum, triton.JITFunction)
    asked = triton.knobs.runtime.interpret
    if interpreted != asked:
        cure = "import pymesh3d before triton, or set TRITON_INTERPRET before starting Python"
        return False, False, f"triton was imported with TRITON_INTERPRET={int(interpreted)}, now it is {int(asked)}: {cure}"
    if interpreted:
        return True, True, f"triton {triton.__version__} interprets the kernels, which is for tests; on CPU plain torch computes"
    if _has_gpu and (missing := no_compiler("cuda")):
        return False, False, f"{missing}, with which triton {triton.__version__} builds what starts a kernel; plain torch runs instead"
    if _has_gpu:
        return True, False, f"triton {triton.__version__} compiles the kernels"
    return False, False, f"triton {triton.__version__} has no GPU to compile for and TRITON_INTERPRET=0 forbids to interpret"


def _undecorated(fn: Any = None, **_: Any) -> Any:
    """Stands for `triton.jit` where there is no triton: the kernel keeps its name and is never run."""
    return _undecorated if fn is None else fn


def constant(value: Any) -> Any:
    """A number of a kernel file that its kernels may read."""
    return value if tl is None else tl.constexpr(value)


jit: Any = _undecorated if triton is None else triton.jit
gluon_jit: Any = _undecorated if triton is None else gluon.jit
# what copies a tile between memory and shared memory: triton has renamed both after 3.6
load_tile: Any = None if triton is None else getattr(hopper.tma, "async_load", None) or hopper.tma.async_copy_global_to_shared
store_tile: Any = None if triton is None else getattr(hopper.tma, "async_store", None) or hopper.tma.async_copy_shared_to_global
available, interpreted, reason = _decide()

"""The only importer of `pymesh3d._C`, the compiled part: whether it is here, why not, and what it can do."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pymesh3d import __version__

if TYPE_CHECKING:
    from pymesh3d._C import Probe

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

available = not reason
"""Whether the compiled part is here and of this version."""


def probe(name: str, path: str = "") -> Probe | None:
    """What the shared library `name` ("nccl" or "cuda"), or the file `path` in its place, says of itself; None without the compiled part.

    Import torch first: a copy that the process already holds is the one that is asked. Raises ValueError for an unknown name.
    """
    return _C.probe(name, path) if available else None

"""Kernels, a file an op: kernel, launcher, and the same in plain torch (`*_ref`). Tensors in, tensors out: no autograd, no processes.

`backend` says whether they are compiled, interpreted or replaced by their references on this machine.
"""

from . import backend
from .philox import philox_fill_, philox_fill_ref

__all__ = ["backend", "philox_fill_", "philox_fill_ref"]

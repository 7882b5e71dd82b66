"""Keeps out of memory what is cheap to compute again: what lies between the matrix products."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint


class _View(NamedTuple):
    """Stands for a tensor that shares the memory of what is computed again."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@contextlib.contextmanager
def computed_again(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> Iterator[torch.Tensor]:
    """y = function(x) for use within the context; what is computed there from y keeps x for backward, and not y, which it needs.

    Backward calls `function` twice more, for what was computed from y and for its own gradient: it must be cheap, give the same values,
    and communicate with nobody.
    """
    y = checkpoint(function, x, use_reentrant=False, preserve_rng_state=False)
    source, memory = x.detach(), y.untyped_storage().data_ptr()

    def pack(tensor: torch.Tensor) -> torch.Tensor | _View:
        if tensor.untyped_storage().data_ptr() != memory:
            return tensor
        return _View(tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))

    def unpack(kept: torch.Tensor | _View) -> torch.Tensor:
        if isinstance(kept, torch.Tensor):
            return kept
        with torch.no_grad():
            return function(source).as_strided(*kept)

    with saved_tensors_hooks(pack, unpack):
        yield y

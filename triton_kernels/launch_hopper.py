"""What products on Hopper are started with: tiles, descriptors of matrices, and kernels with all of their arguments but the matrices."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from .backend import TensorDescriptor, gl
from .matmul import GROUP

# Of a CUfunction, programs, threads, bytes of shared memory and arguments: what starts it on a stream, with addresses for those matrices
# that have none; or None. An argument is a number, or a matrix: address, rows, cols, stride, and the rows and cols of its blocks.
Starter = Callable[[int, int, int, int, Sequence[Any]], Callable[[int, Sequence[int]], None] | None]


class Tiles(NamedTuple):
    """The size of a tile of the result [M, N], whose halves have `half` rows each, the step along K, and the stages of the ring."""

    half: int
    n: int
    k: int
    stages: int

    def of(self, rows: int, cols: int) -> int:
        """How many tiles a result has."""
        return -(-rows // (2 * self.half)) * -(-cols // self.n)

    def options(self) -> dict[str, Any]:
        """As a kernel takes them."""
        return {"HALF": self.half, "BLOCK_N": self.n, "BLOCK_K": self.k, "STAGES": self.stages, "GROUP": GROUP}


WIDTH = 64  # columns of shared memory's swizzle: 128 bytes
LARGE, SMALL = Tiles(64, 256, 64, 3), Tiles(64, 128, 64, 6)
LINK, SPEED = 320e9, 6e12  # of an H200: bytes in a second that leave it over its links, operations in a second of one program


def fits(rows: int, cols: int, depth: int, dtype: torch.dtype) -> bool:
    """Whether there is a kernel for [rows, depth] times [cols, depth]^T: the accelerator moves 16 bytes at a time."""
    return dtype == torch.bfloat16 and min(rows, cols, depth) > 0 and depth % 8 == cols % 8 == 0


def turned(b: torch.Tensor) -> bool:
    """Whether b [N, K] is the transpose of what is kept row by row."""
    return b.stride(1) != 1 and b.stride(0) == 1


def readable(x: torch.Tensor, *, turned_too: bool = False) -> torch.Tensor:
    """x [rows, cols] as the accelerator can read it, row by row, or with `turned_too` column by column: itself, or a copy."""
    for one in (x, x.t()) if turned_too else (x,):
        if one.stride(1) == 1 and one.stride(0) % 8 == 0 and one.stride(0) >= one.shape[1] and one.data_ptr() % 16 == 0:
            return x
    return x.clone(memory_format=torch.contiguous_format)


def alike(a: torch.Tensor, b: torch.Tensor) -> tuple[Any, ...]:
    """The same for all matrices that one `Prepared` serves: what is worked out from them."""
    of_a = a.shape, a.stride(), a.dtype, a.data_ptr() % 16 == 0
    return *of_a, b.shape, b.stride(), b.dtype, b.data_ptr() % 16 == 0, b.device


def descriptor(x: torch.Tensor, rows: int, cols: int) -> Any:
    """What the accelerator needs to know of x to copy its blocks [rows, cols]. Made without triton's checks: x is `readable`."""
    made = object.__new__(TensorDescriptor)
    made.base, made.shape, made.strides, made.block_shape, made.layout = x, x.shape, x.stride(), [rows, cols], _layout(rows, cols)
    return made


@functools.cache
def _layout(rows: int, cols: int) -> Any:
    return gl.NVMMASharedLayout.get_default_for([rows, cols], gl.bfloat16)


@functools.cache
def programs(device: torch.device) -> int:
    """How many run at once."""
    return torch.cuda.get_device_properties(device).multi_processor_count


class Prepared:
    """y [M, N] = a [M', K] b^T for b [N, K], in bfloat16, for all matrices that are `alike` those that it was prepared with.

    All but their addresses is worked out once: with triton's own start a call of the kernel takes longer than a small product.
    """

    def __init__(
        self,
        kernel: Any,
        running: int,
        a: torch.Tensor,
        b: torch.Tensor,
        shape: tuple[int, int],
        tiles: Tiles,
        rest: Sequence[Any],
        constants: dict[str, Any],
        starter: Starter | None = None,
    ) -> None:
        """`running`: programs; `shape`: of y; `rest`: what the kernel takes besides a, b and y, in order. Raises AssertionError where a and
        b have no product.
        """
        (rows, depth), cols = a.shape, b.shape[0]
        match = a.dtype == b.dtype and a.device == b.device and b.shape[1] == depth
        assert match and fits(rows, cols, depth, a.dtype), f"{list(a.shape)} of {a.dtype}, {list(b.shape)} of {b.dtype} on {b.device}"
        self._kernel, self._running, self._shape, self._tiles, self._rest = kernel, running, shape, tiles, rest
        self._copied = readable(a) is not a, readable(b, turned_too=True) is not b
        self._turned = turned(b) and not self._copied[1]
        self._constants = {"TURNED": self._turned, **constants, **tiles.options()}
        self._starter = starter if tiles.n % WIDTH == tiles.k % WIDTH == 0 else None  # which copies by that swizzle
        self._start: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], object] | None = None

    def __call__(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """New and contiguous."""
        current = torch.cuda.current_device()
        assert current == a.device.index, f"tensors of {a.device}, the current device is {current}"
        if self._copied[0]:
            a = a.clone(memory_format=torch.contiguous_format)
        if self._copied[1]:
            b = b.clone(memory_format=torch.contiguous_format)
        y = torch.empty(self._shape, dtype=a.dtype, device=a.device)
        if self._start is None:
            self._start = self._first_start(a, b, y)
        else:
            self._start(a, b, y)
        return y

    def _first_start(
        self, a: torch.Tensor, b: torch.Tensor, y: torch.Tensor
    ) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], object]:
        """By triton, which compiles, and looks at all arguments. What does the next: it holds what they need, and not this object."""
        tiles, turned, rest, grid = self._tiles, self._turned, self._rest, (self._running, 1, 1)
        matrices = _descriptors(a, b, y, tiles, turned)
        compiled = self._kernel[grid](*matrices, *rest, **self._constants, num_warps=4)
        if self._starter is not None:
            arguments = [(0, *_as_argument(matrix)[1:]) for matrix in matrices] + [_as_argument(one) for one in rest if one is not None]
            threads, shared_bytes = 32 * compiled.metadata.num_warps, compiled.metadata.shared
            start = self._starter(compiled.function, self._running, threads, shared_bytes, arguments)
            if start is not None:
                stream, gpu = torch._C._cuda_getCurrentRawStream, a.device.index
                return lambda a, b, y: start(stream(gpu), (a.data_ptr(), b.data_ptr(), y.data_ptr()))
        again = compiled[grid]
        values = [self._constants[name] for name in self._kernel.arg_names[3 + len(rest) :]]
        return lambda a, b, y: again(*_descriptors(a, b, y, tiles, turned), *rest, *values)


def _descriptors(a: torch.Tensor, b: torch.Tensor, y: torch.Tensor, tiles: Tiles, turned: bool) -> tuple[Any, Any, Any]:
    weights = descriptor(b.t(), tiles.k, tiles.n) if turned else descriptor(b, tiles.n, tiles.k)
    return descriptor(a, tiles.half, tiles.k), weights, descriptor(y, tiles.half, tiles.n)


def _as_argument(argument: Any) -> Any:
    """An argument of a kernel as a `Starter` takes it. A copy is as wide as shared memory's swizzle, and a wider block several of them."""
    if isinstance(argument, torch.Tensor):
        return argument.data_ptr()
    if isinstance(argument, int):
        return argument
    rows, cols = argument.block_shape
    return argument.base.data_ptr(), *argument.shape, argument.strides[0], rows, min(cols, WIDTH)

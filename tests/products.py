"""What tests of products that talk to other ranks share."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from pymesh3d.comm.symmetric import SymmetricBuffer
from pymesh3d.mesh import init_mesh
from pymesh3d.triton_kernels.matmul import Tiles
from pymesh3d.triton_kernels.matmul_reduce_scatter import Slots
from pymesh3d.triton_kernels.signals import Counters
from tests.kernels import noise

Shape = tuple[int, int, int]  # rows, columns, depth
SMALL = Tiles(16, 16, 16, 4, 2)
# the error of one rounding of a part and of the sum (the interpreter's rounds towards zero), and of a float32 product
BOUNDS = {torch.float64: 1e-14, torch.float32: 1e-5, torch.bfloat16: 2**-6}
POISON = 0x7F  # bytes of a NaN in every dtype
PATIENCE = 30.0


class Bench:
    """One rank's slots, counters and operands. `needed`: the slots for a shape, as the op tells."""

    def __init__(
        self, shapes: Sequence[Shape], dtype: torch.dtype, device: str, needed: Callable[[int, Shape, torch.dtype], tuple[int, int]]
    ) -> None:
        self.mesh = init_mesh(tp=-1, dp=1, device=device)
        self.ranks, self.rank, self.dtype = self.mesh.tp.size, self.mesh.rank, dtype
        wanted = [needed(self.ranks, shape, dtype) for shape in shapes]
        size, length = -(-max(1, *(size for size, _ in wanted)) // 64) * 64, max(1, *(length for _, length in wanted))
        self.memory = SymmetricBuffer(2 * size, self.mesh.tp, self.mesh.device)
        self.flags = SymmetricBuffer(4 * self.ranks * length, self.mesh.tp, self.mesh.device)
        self.slots = Slots(self.memory.addresses, self.flags.addresses, size, length)
        self.counters = Counters.on(self.mesh.device)
        self.memory.part(self.rank, (2 * size,), torch.uint8).fill_(POISON)
        if device == "cuda":
            torch.cuda.synchronize()
        dist.barrier()

    def operands(self, rows: int, cols: int, depth: int, seed: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Those of all ranks: a [rows, depth], b [cols, depth]."""
        a = [noise(rows, depth, dtype=self.dtype, seed=9 * seed + rank) for rank in range(self.ranks)]
        b = [noise(cols, depth, dtype=self.dtype, seed=-rank - 1) for rank in range(self.ranks)]
        return [x.to(self.mesh.device) for x in a], [x.to(self.mesh.device) for x in b]

    def parts(self) -> list[torch.Tensor]:
        """Every rank's slots, bytes."""
        return [self.memory.part(rank, (2 * self.slots.size,), torch.uint8) for rank in range(self.ranks)]

    def agrees(self, found: torch.Tensor, a: list[torch.Tensor], b: list[torch.Tensor], rows: slice) -> bool:
        """Whether this is `rows` of the ranks' sum of a b^T."""
        parts = [(x[rows], y) for x, y in zip(a, b, strict=True)]
        return close(found, *(list(operands) for operands in zip(*parts, strict=True)))


def close(found: torch.Tensor, a: Sequence[torch.Tensor], b: Sequence[torch.Tensor]) -> bool:
    """Whether this is the sum of all a b^T."""
    exact = sum((x.double() @ y.double().t() for x, y in zip(a, b, strict=True)), torch.tensor(0.0))
    size = sum((x.double().abs() @ y.double().abs().t() for x, y in zip(a, b, strict=True)), torch.tensor(0.0))
    assert found.shape == exact.shape and found.dtype == b[0].dtype and found.is_contiguous()
    return bool(((found.double() - exact).abs() <= BOUNDS[found.dtype] * size).all())

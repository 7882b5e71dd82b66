"""Times GEMM + reduce-scatter in one kernel against torch's product followed by NCCL's collective."""

from __future__ import annotations

import torch

from ..comm.collectives import reduce_scatter
from ..triton_kernels import matmul_reduce_scatter, matmul_reduce_scatter_hopper
from . import products


def plain_slots(ranks: int, tokens: int, cols: int, depth: int) -> tuple[int, int]:
    """Those of the plain kernel."""
    return matmul_reduce_scatter.needed(ranks, tokens // ranks, cols, torch.bfloat16)


def hopper_slots(ranks: int, tokens: int, cols: int, depth: int) -> tuple[int, int]:
    """Those of the kernel in Gluon."""
    return matmul_reduce_scatter_hopper.needed(ranks, tokens // ranks, cols)


FORMS = {
    "plain": products.plain(matmul_reduce_scatter.launch, plain_slots),
    "hopper": products.hopper(matmul_reduce_scatter_hopper.launch, hopper_slots),
}
OP = products.Op("matmul_reduce_scatter", False, products.DOWN, reduce_scatter, FORMS)


def main(json_file: str | None = None) -> int:
    """Measures over all GPUs of this machine, or 2 processes on the CPU; prints the table and writes `json_file`."""
    return products.main(OP, json_file)


if __name__ == "__main__":
    products.run_ranks(OP, __doc__)

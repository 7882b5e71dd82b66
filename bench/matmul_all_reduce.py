"""Times GEMM + all-reduce in one kernel against torch's product followed by NCCL's collective."""

from __future__ import annotations

import torch

from ..comm.collectives import all_reduce_
from ..triton_kernels import matmul_all_reduce
from . import products


def plain_slots(ranks: int, tokens: int, cols: int, depth: int) -> tuple[int, int]:
    """Those of the plain kernel."""
    return matmul_all_reduce.needed(ranks, tokens, cols, torch.bfloat16)


FORMS = {"plain": products.plain(matmul_all_reduce.launch, plain_slots)}
OP = products.Op("matmul_all_reduce", False, products.DOWN, all_reduce_, FORMS)


def main(json_file: str | None = None) -> int:
    """Measures over all GPUs of this machine, or 2 processes on the CPU; prints the table and writes `json_file`."""
    return products.main(OP, json_file)


if __name__ == "__main__":
    products.run_ranks(OP, __doc__)

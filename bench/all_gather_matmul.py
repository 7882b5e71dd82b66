"""Times all-gather + GEMM in one kernel against NCCL's collective followed by torch's product."""

from __future__ import annotations

import torch

from ..comm.collectives import all_gather
from ..triton_kernels import all_gather_matmul, all_gather_matmul_hopper
from . import products


def plain_slots(ranks: int, tokens: int, cols: int, depth: int) -> tuple[int, int]:
    """Those of the plain kernel."""
    return all_gather_matmul.needed(ranks, tokens // ranks, depth, torch.bfloat16)


def hopper_slots(ranks: int, tokens: int, cols: int, depth: int) -> tuple[int, int]:
    """Those of the kernel in Gluon."""
    return all_gather_matmul_hopper.needed(ranks, tokens // ranks, depth, cols // ranks)


FORMS = {
    "plain": products.plain(all_gather_matmul.launch, plain_slots),
    "hopper": products.hopper(all_gather_matmul_hopper.launch, hopper_slots, least=128),
}
OP = products.Op("all_gather_matmul", True, products.UP, all_gather, FORMS)


def main(json_file: str | None = None) -> int:
    """Measures over all GPUs of this machine, or 2 processes on the CPU; prints the table and writes `json_file`."""
    return products.main(OP, json_file)


if __name__ == "__main__":
    products.run_ranks(OP, __doc__)

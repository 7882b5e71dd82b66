"""Times all-gather + GEMM in one kernel against NCCL's collective followed by torch's product, and against torch's fused one."""

from __future__ import annotations

from typing import Any

import torch

from ..comm.collectives import all_gather
from . import products


def torch_fused(a: torch.Tensor, b: torch.Tensor, group: str) -> torch.Tensor:
    """Of torch's symmetric memory; it copies what is not there yet."""
    y: torch.Tensor = torch.ops.symm_mem.fused_all_gather_matmul(a, [b], 0, group)[1][0]
    return y


OP = products.Op("all_gather_matmul", True, lambda ranks: (ranks - 1) / ranks, all_gather, torch_fused)


def main(json_file: str | None = None, **options: Any) -> int:
    """As `products.main`."""
    return products.main(OP, json_file, **options)


if __name__ == "__main__":
    products.run_ranks(OP, __doc__)

"""Times GEMM + reduce-scatter in one kernel against torch's product followed by NCCL's collective, and against torch's fused one."""

from __future__ import annotations

from typing import Any

import torch

from ..comm.collectives import reduce_scatter
from . import products


def torch_fused(a: torch.Tensor, b: torch.Tensor, group: str) -> torch.Tensor:
    """Of torch's symmetric memory."""
    y: torch.Tensor = torch.ops.symm_mem.fused_matmul_reduce_scatter(a, b, "sum", 0, group)
    return y


OP = products.Op("matmul_reduce_scatter", False, lambda ranks: (ranks - 1) / ranks, reduce_scatter, torch_fused)


def main(json_file: str | None = None, **options: Any) -> int:
    """As `products.main`."""
    return products.main(OP, json_file, **options)


if __name__ == "__main__":
    products.run_ranks(OP, __doc__)

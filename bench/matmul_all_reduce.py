"""Times GEMM + all-reduce in one kernel against torch's product followed by NCCL's collective."""

from __future__ import annotations

from typing import Any

from ..comm.collectives import all_reduce_
from . import products

OP = products.Op("matmul_all_reduce", False, lambda ranks: 2 * (ranks - 1) / ranks, all_reduce_)


def main(json_file: str | None = None, **options: Any) -> int:
    """As `products.main`."""
    return products.main(OP, json_file, **options)


if __name__ == "__main__":
    products.run_ranks(OP, __doc__)

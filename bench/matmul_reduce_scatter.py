"""Times GEMM + reduce-scatter in one kernel against torch's product followed by NCCL's collective."""

from __future__ import annotations

from ..comm.collectives import reduce_scatter
from ..triton_kernels.matmul_reduce_scatter import launch, needed
from . import products

OP = products.Op("matmul_reduce_scatter", lambda ranks, rows, *rest: needed(ranks, rows // ranks, *rest), launch, reduce_scatter)


def main(json_file: str | None = None) -> int:
    """Measures over all GPUs of this machine, or 2 processes on the CPU; prints the table and writes `json_file`."""
    return products.main(OP, json_file)


if __name__ == "__main__":
    products.run_ranks(OP, __doc__)

"""Times GEMM + all-reduce in one kernel against torch's product followed by NCCL's collective."""

from __future__ import annotations

from ..comm.collectives import all_reduce_
from ..triton_kernels.matmul_all_reduce import launch, needed
from . import products

OP = products.Op("matmul_all_reduce", needed, launch, all_reduce_)


def main(json_file: str | None = None) -> int:
    """Measures over all GPUs of this machine, or 2 processes on the CPU; prints the table and writes `json_file`."""
    return products.main(OP, json_file)


if __name__ == "__main__":
    products.run_ranks(OP, __doc__)

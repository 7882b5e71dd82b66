"""Times the plain product against torch's (cuBLAS on GPUs): what a shape costs that nothing better is made for."""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch

from ..triton_kernels import backend
from ..triton_kernels.matmul import launch
from . import report
from .timing import medians_in_turns

COLUMNS = {
    "tokens": ("M", ","),
    "cols": ("N", ","),
    "depth": ("K", ","),
    "matmul_ms": ("matmul,\nms", ".3f"),
    "torch_ms": ("torch,\nms", ".3f"),
    "tflops": ("matmul,\nTFLOP/s", ",.1f"),
    "of_torch": ("speed,\ntorch = 1", ".2f"),
}
# M; N, K: the projections down and up of the 8B model over 2 ranks, and sizes that no tile divides
SIZES = {
    "cuda": ((512, 4096, 7168), (2048, 4096, 7168), (8192, 4096, 7168), (8192, 14336, 4096), (4099, 1001, 4096)),
    "cpu": ((64, 48, 40),),
}


def measure(device: str, tokens: int, cols: int, depth: int) -> report.Row:
    """Medians in ms of [tokens, depth] times [depth, cols], in bfloat16."""
    a, b = (torch.randn(size, depth, device=device, dtype=torch.bfloat16) for size in (tokens, cols))
    candidates: dict[str, Callable[[], object]] = {"torch_ms": lambda: a @ b.t()}
    if backend.available:
        candidates["matmul_ms"] = lambda: launch(a, b)
    medians = medians_in_turns(candidates, device)
    row: dict[str, str | int | float | bool | None] = {"device": device, "tokens": tokens, "cols": cols, "depth": depth, **medians}
    if backend.available:
        row["tflops"] = 2 * tokens * cols * depth / medians["matmul_ms"] / 1e9
        row["of_torch"] = medians["torch_ms"] / medians["matmul_ms"]
    return row


def main(json_file: str | None = None) -> int:
    """Measures on the GPU where there is one, else on the CPU with a small size; prints the table and writes `json_file`."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows = [measure(device, *size) for size in SIZES[device]]
    report.publish("matmul", rows, COLUMNS, f"a b^T in bfloat16 on {device}", json_file)
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m pymesh3d.bench.matmul", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", metavar="FILE", help="also write the measurements here")
    main(parser.parse_args().json)

"""Times the sum of squares of float32 gradients in float64 against torch's, in float64 and in float32, and against only reading them."""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch

from ..triton_kernels.squares import squares
from . import report
from .timing import medians_in_turns

MI = 2**20
BUCKETS = {"cuda": ((1, 2**20), (1, 32 * MI), (32, 32 * MI)), "cpu": ((2, 2**14),)}  # so many, of so many numbers
COLUMNS = {
    "buckets": ("buckets", ","),
    "numbers": ("float32\nnumbers in each", ","),
    "squares_ms": ("squares,\nms", ".3f"),
    "torch_float64_ms": ("torch in\nfloat64, ms", ".3f"),
    "torch_float32_ms": ("torch in\nfloat32, ms", ".3f"),
    "floor_ms": ("only\nadding, ms", ".3f"),
    "squares_gb_s": ("squares,\nGB/s", ",.0f"),
    "of_float64": ("speed,\nfloat64 = 1", ".2f"),
    "of_float32": ("speed,\nfloat32 = 1", ".2f"),
}


def measure(device: str, buckets: int, numbers: int) -> report.Row:
    """Medians in ms over so many buckets."""
    flat = torch.randn(buckets, numbers, device=device)
    pieces = list(flat)
    candidates: dict[str, Callable[[], object]] = {
        "squares_ms": lambda: squares(pieces).sum().sqrt(),
        "torch_float64_ms": lambda: torch.stack([torch.linalg.vector_norm(one, dtype=torch.float64) for one in pieces]).norm(),
        "torch_float32_ms": lambda: torch.nn.utils.get_total_norm(pieces),
        "floor_ms": flat.sum,
    }
    medians = medians_in_turns(candidates, device)
    return {
        "device": device,
        "buckets": buckets,
        "numbers": numbers,
        **medians,
        "squares_gb_s": flat.nbytes / medians["squares_ms"] / 1e6,
        "of_float64": medians["torch_float64_ms"] / medians["squares_ms"],
        "of_float32": medians["torch_float32_ms"] / medians["squares_ms"],
    }


def main(json_file: str | None = None) -> int:
    """Measures on the GPU where there is one, else on the CPU with small sizes; prints the table and writes `json_file`."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows = [measure(device, *size) for size in BUCKETS[device]]
    report.publish("squares", rows, COLUMNS, f"The norm of float32 gradients on {device}", json_file)
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m pymesh3d.bench.squares", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", metavar="FILE", help="also write the measurements here")
    main(parser.parse_args().json)

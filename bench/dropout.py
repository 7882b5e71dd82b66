"""Times dropout with a layout-independent mask against torch's, and against merely copying the tensor.

`clone` is the floor: dropout reads a tensor and writes one. Torch's writes its mask too, a byte an element, and keeps it for backward;
ours draws it again there, so backward is the same kernel and takes the same time.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
import torch.nn.functional as F

from ..triton_kernels.dropout import dropout
from . import report
from .timing import medians_in_turns

P = 0.1
WIDTH = 4096
COLUMNS = {
    "dtype": ("dtype", ""),
    "elements": ("elements", ","),
    "dropout_ms": ("dropout,\nms", ".3f"),
    "torch_dropout_ms": ("torch's\ndropout, ms", ".3f"),
    "floor_ms": ("only\ncopying, ms", ".3f"),
    "dropout_gb_s": ("dropout,\nGB/s", ".2f"),
    "floor_gb_s": ("only\ncopying, GB/s", ".2f"),
    "of_torch": ("speed,\ntorch = 1", ".2f"),
}
SIZES = {"cuda": (2**20, 2**24, 2**28), "cpu": (2**14, 2**18)}  # elements, in rows of WIDTH


def measure(device: str, elements: int, dtype: torch.dtype) -> report.Row:
    """Medians in ms for x [elements / WIDTH, WIDTH]."""
    x = torch.ones(elements // WIDTH, WIDTH, device=device, dtype=dtype)
    candidates: dict[str, Callable[[], object]] = {
        "dropout_ms": lambda: dropout(x, p=P, key=1, counter=1, global_cols=WIDTH),
        "torch_dropout_ms": lambda: F.dropout(x, P),
        "floor_ms": lambda: x.clone(),
    }
    medians = medians_in_turns(candidates, device)
    moved = 2 * elements * x.element_size()
    return {
        "device": device,
        "dtype": str(dtype).removeprefix("torch."),
        "elements": elements,
        **medians,
        "dropout_gb_s": moved / medians["dropout_ms"] / 1e6,
        "floor_gb_s": moved / medians["floor_ms"] / 1e6,
        "of_torch": medians["torch_dropout_ms"] / medians["dropout_ms"],
    }


def main(json_file: str | None = None) -> int:
    """Measures on the GPU where there is one, else on the CPU with small sizes; prints the table and writes `json_file`."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows = [measure(device, elements, dtype) for dtype in (torch.bfloat16, torch.float32) for elements in SIZES[device]]
    report.publish("dropout", rows, COLUMNS, f"Dropout of {P} on {device}", json_file)
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m pymesh3d.bench.dropout", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", metavar="FILE", help="also write the measurements here")
    main(parser.parse_args().json)

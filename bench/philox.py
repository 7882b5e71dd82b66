"""Times filling a tensor with layout-independent normal numbers against torch's generator and against merely writing the memory.

`fill_` on the same device is the floor: no way to fill a tensor is faster than writing it. The kernel is not near it by design: every
element takes ten Philox rounds for its own 128 random bits, about a hundred integer instructions, where torch shares one Philox call
among four elements. Initialisation runs once; being independent of the layout is worth that.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch

from ..triton_kernels import philox_fill_
from . import report
from .timing import medians_in_turns

COLUMNS = {
    "elements": ("float32\nelements", ","),
    "philox_ms": ("philox,\nms", ".3f"),
    "torch_normal_ms": ("torch's\nnormal_, ms", ".3f"),
    "floor_ms": ("only\nwriting, ms", ".3f"),
    "philox_gb_s": ("philox,\nGB/s", ".2f"),
    "floor_gb_s": ("only\nwriting, GB/s", ".2f"),
    "of_torch": ("speed of philox,\ntorch = 1", ".2f"),
}
SIZES = {"cuda": (2**20, 2**24, 2**28), "cpu": (2**14, 2**18)}  # elements


def measure(device: str, elements: int) -> report.Row:
    """Medians in ms of float32 fills of a tensor [elements]."""
    out = torch.empty(elements, device=device)
    candidates: dict[str, Callable[[], object]] = {
        "philox_ms": lambda: philox_fill_(out, key=1, kind="normal", scale=0.02, global_cols=elements),
        "torch_normal_ms": lambda: torch.nn.init.normal_(out, std=0.02),
        "floor_ms": lambda: out.fill_(0.0),
    }
    medians = medians_in_turns(candidates, device)
    return {
        "device": device,
        "elements": elements,
        **medians,
        "philox_gb_s": elements * out.element_size() / medians["philox_ms"] / 1e6,
        "floor_gb_s": elements * out.element_size() / medians["floor_ms"] / 1e6,
        "of_torch": medians["torch_normal_ms"] / medians["philox_ms"],
    }


def main(json_file: str | None = None) -> int:
    """Measures on the GPU where there is one, else on the CPU with small sizes; prints the table and writes `json_file`."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows = [measure(device, elements) for elements in SIZES[device]]
    report.publish("philox", rows, COLUMNS, f"Filling a tensor with normal numbers on {device}", json_file)
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m pymesh3d.bench.philox", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", metavar="FILE", help="also write the measurements here")
    main(parser.parse_args().json)

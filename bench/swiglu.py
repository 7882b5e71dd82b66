"""Times SwiGLU and its gradient against torch, as it is and compiled, and against merely moving as many bytes."""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F

from ..triton_kernels.swiglu import swiglu, swiglu_backward
from . import report
from .timing import compiled, rows_of_passes

COLUMNS = {
    "pass": ("", ""),
    "tokens": ("tokens", ","),
    "ffn": ("F", ","),
    "swiglu_ms": ("swiglu,\nms", ".3f"),
    "torch_ms": ("torch,\nms", ".3f"),
    "compiled_ms": ("compiled,\nms", ".3f"),
    "floor_ms": ("only\ncopying, ms", ".3f"),
    "of_compiled": ("speed,\ncompiled = 1", ".2f"),
}
SIZES = {"cuda": ((512, 8192), (8192, 8192), (8192, 14336)), "cpu": ((64, 256),)}  # tokens, ffn: the reference 1B and 8B models


def plain(x: torch.Tensor) -> torch.Tensor:
    """What people write."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def measure(device: str, tokens: int, ffn: int) -> list[report.Row]:
    """Medians in ms, forward and backward, of x [tokens, 2 ffn] in bfloat16."""
    x = torch.randn(tokens, 2 * ffn, device=device, dtype=torch.bfloat16, requires_grad=True)
    grad_y = torch.randn(tokens, ffn, device=device, dtype=torch.bfloat16)
    fused = compiled(plain, device)
    outputs = plain(x), fused(x)
    given = x.detach()
    less, more = given[:, : ffn + ffn // 2].clone(), torch.cat((given, given[:, : ffn // 2]), 1)  # each is read and written by a copy
    passes = {
        "forward": {
            "swiglu_ms": lambda: swiglu(given),
            "torch_ms": lambda: plain(given),
            "compiled_ms": lambda: fused(x),
            "floor_ms": less.clone,
        },
        "backward": {
            "swiglu_ms": lambda: swiglu_backward(grad_y, given),
            "torch_ms": lambda: torch.autograd.grad(outputs[0], x, grad_y, retain_graph=True),
            "compiled_ms": lambda: torch.autograd.grad(outputs[1], x, grad_y, retain_graph=True),
            "floor_ms": more.clone,
        },
    }
    return rows_of_passes("swiglu_ms", passes, device, tokens=tokens, ffn=ffn)


def main(json_file: str | None = None) -> int:
    """Measures on the GPU where there is one, else on the CPU with small sizes; prints the table and writes `json_file`."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows = [row for size in SIZES[device] for row in measure(device, *size)]
    report.publish("swiglu", rows, COLUMNS, f"SwiGLU in bfloat16 on {device}", json_file)
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m pymesh3d.bench.swiglu", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", metavar="FILE", help="also write the measurements here")
    main(parser.parse_args().json)

"""Times the rotary embedding of a fused q|k|v projection and its gradient against torch, as it is and compiled, and against copying."""

from __future__ import annotations

import argparse

import torch

from ..ops.rotary import angles
from ..triton_kernels.rotary import rotary, rotary_backward
from . import report
from .timing import compiled, rows_of_passes

COLUMNS = {
    "pass": ("", ""),
    "tokens": ("tokens", ","),
    "heads": ("heads", ""),
    "kv_heads": ("KV\nheads", ""),
    "head_dim": ("head\nwidth", ""),
    "rotary_ms": ("rotary,\nms", ".3f"),
    "torch_ms": ("torch,\nms", ".3f"),
    "compiled_ms": ("compiled,\nms", ".3f"),
    "floor_ms": ("only\ncopying, ms", ".3f"),
    "of_compiled": ("speed,\ncompiled = 1", ".2f"),
}
# sequence, batch, heads, KV heads, head width: the reference 1B and 8B models
SIZES = {"cuda": ((4096, 2, 32, 8, 64), (4096, 2, 32, 8, 128)), "cpu": ((32, 2, 4, 2, 16),)}


def plain(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, heads: int, kv_heads: int) -> tuple[torch.Tensor, ...]:
    """What people write; `cos` and `sin` [S, 1, 1, E/2] in the dtype of `x`."""
    parts = x.view(cos.shape[0], -1, heads + 2 * kv_heads, 2 * cos.shape[-1]).split((heads, kv_heads, kv_heads), 2)
    turned = []
    for part in parts[:2]:
        first, second = part.chunk(2, dim=-1)
        turned.append(torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1))
    return *turned, parts[2]


def measure(device: str, seq: int, batch: int, heads: int, kv_heads: int, head_dim: int) -> list[report.Row]:
    """Medians in ms, forward and backward, in bfloat16."""
    x = torch.randn(seq * batch, (heads + 2 * kv_heads) * head_dim, device=device, dtype=torch.bfloat16, requires_grad=True)
    given = x.detach()
    rope = angles(seq, head_dim, 10_000.0, given)
    cos, sin = (part.to(x.dtype)[:, None, None, :] for part in rope)
    # As attention's gradients come: sample by sample.
    grads = [
        torch.randn(batch, count, seq, head_dim, device=device, dtype=x.dtype).permute(2, 0, 1, 3) for count in (heads, kv_heads, kv_heads)
    ]
    fused = compiled(plain, device)
    outputs = plain(x, cos, sin, heads, kv_heads), fused(x, cos, sin, heads, kv_heads)
    passes = {
        "forward": {
            "rotary_ms": lambda: rotary(given, *rope, heads, kv_heads),
            "torch_ms": lambda: plain(given, cos, sin, heads, kv_heads),
            "compiled_ms": lambda: fused(x, cos, sin, heads, kv_heads),
            "floor_ms": given.clone,
        },
        "backward": {
            "rotary_ms": lambda: rotary_backward(grads[0], grads[1], grads[2], *rope),
            "torch_ms": lambda: torch.autograd.grad(outputs[0], x, grads, retain_graph=True),
            "compiled_ms": lambda: torch.autograd.grad(outputs[1], x, grads, retain_graph=True),
            "floor_ms": given.clone,
        },
    }
    return rows_of_passes("rotary_ms", passes, device, tokens=seq * batch, heads=heads, kv_heads=kv_heads, head_dim=head_dim)


def main(json_file: str | None = None) -> int:
    """Measures on the GPU where there is one, else on the CPU with small sizes; prints the table and writes `json_file`."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows = [row for size in SIZES[device] for row in measure(device, *size)]
    report.publish("rotary", rows, COLUMNS, f"Rotary embedding in bfloat16 on {device}", json_file)
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m pymesh3d.bench.rotary", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", metavar="FILE", help="also write the measurements here")
    main(parser.parse_args().json)

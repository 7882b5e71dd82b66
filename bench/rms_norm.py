"""Times RMSNorm and its gradient, alone and of a sum, against torch, as it is and compiled, and against merely moving as many bytes."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch._functorch import config

from ..triton_kernels.rms_norm import add_rms_norm, rms_norm, rms_norm_backward
from . import report
from .timing import compiled, medians_in_turns

EPS = 1e-5
COLUMNS = {
    "pass": ("", ""),
    "sum": ("of a\nsum", ""),
    "tokens": ("tokens", ","),
    "dim": ("D", ","),
    "rms_norm_ms": ("norm,\nms", ".3f"),
    "torch_ms": ("torch,\nms", ".3f"),
    "compiled_ms": ("compiled,\nms", ".3f"),
    "rms_norm_gb_s": ("norm,\nGB/s", ",.0f"),
    "of_floor": ("bandwidth,\ncopy = 1", ".2f"),
    "of_compiled": ("speed,\ncompiled = 1", ".2f"),
}
SIZES = {"cuda": ((4096, 16384), (2048, 4096, 8192)), "cpu": ((64,), (256,))}  # tokens, dims


def plain(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """What people write."""
    return (F.rms_norm(x, weight.shape, weight, EPS),)


def plain_of_sum(x: torch.Tensor, added: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """What people write in a residual stream."""
    h = x + added
    return h, F.rms_norm(h, weight.shape, weight, EPS)


@config.patch(donated_buffer=False)  # else what torch.compile makes could go backward once only
def measure(device: str, tokens: int, dim: int, of_sum: bool) -> list[report.Row]:
    """Medians in ms, forward and backward, of x [tokens, dim] in bfloat16."""

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, dtype=torch.bfloat16)

    ours: Callable[..., tuple[torch.Tensor, ...]] = add_rms_norm if of_sum else rms_norm
    theirs: Callable[..., tuple[torch.Tensor, ...]] = plain_of_sum if of_sum else plain
    given = [noise(tokens, dim), *([noise(tokens, dim)] if of_sum else []), noise(dim)]
    inputs = [tensor.clone().requires_grad_() for tensor in given]
    fused = compiled(theirs, device)
    outputs = theirs(*inputs), fused(*inputs)
    grads = [noise(tokens, dim) for _ in outputs[0]]
    h, *_, inverse_rms = ours(*given, EPS) if of_sum else (given[0], *ours(*given, EPS))
    moved = {"forward": 4 if of_sum else 2, "backward": 4 if of_sum else 3}  # tensors as large as x, read or written
    copied = {name: noise(tokens * count // 2, dim) for name, count in moved.items()}  # each is read and written
    passes: dict[str, dict[str, Callable[[], object]]] = {
        "forward": {
            "rms_norm_ms": lambda: ours(*given, EPS),
            "torch_ms": lambda: theirs(*given),
            "compiled_ms": lambda: fused(*inputs),
            "floor_ms": copied["forward"].clone,
        },
        "backward": {
            "rms_norm_ms": lambda: rms_norm_backward(grads[-1], h, given[-1], inverse_rms, grads[0] if of_sum else None),
            "torch_ms": lambda: torch.autograd.grad(outputs[0], inputs, grads, retain_graph=True),
            "compiled_ms": lambda: torch.autograd.grad(outputs[1], inputs, grads, retain_graph=True),
            "floor_ms": copied["backward"].clone,
        },
    }
    rows: list[report.Row] = []
    for name, candidates in passes.items():
        medians = medians_in_turns(candidates, device)
        rows.append(
            {
                "device": device,
                "pass": name,
                "sum": of_sum,
                "tokens": tokens,
                "dim": dim,
                **medians,
                "rms_norm_gb_s": moved[name] * given[0].nbytes / medians["rms_norm_ms"] / 1e6,
                "of_floor": medians["floor_ms"] / medians["rms_norm_ms"],
                "of_compiled": medians["compiled_ms"] / medians["rms_norm_ms"],
            }
        )
    return rows


def main(json_file: str | None = None) -> int:
    """Measures on the GPU where there is one, else on the CPU with small sizes; prints the table and writes `json_file`."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    cases = itertools.product(*SIZES[device], (False, True))
    rows = [row for tokens, dim, of_sum in cases for row in measure(device, tokens, dim, of_sum)]
    report.publish("rms_norm", rows, COLUMNS, f"RMSNorm in bfloat16 on {device}", json_file)
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m pymesh3d.bench.rms_norm", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", metavar="FILE", help="also write the measurements here")
    main(parser.parse_args().json)

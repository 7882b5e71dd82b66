"""Times the loss of a whole vocabulary, forward and backward, against F.cross_entropy on logits in float32, plain and compiled.

The floor is copying: forward has to read the logits once, backward to read them again and to write their gradient, which is one and a
half times what a copy of them does.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
import torch.nn.functional as F

from ..axis import Axis
from ..tp.loss import vocab_parallel_cross_entropy
from . import report
from .timing import compiled, medians_in_turns

COLUMNS = {
    "tokens": ("tokens", ","),
    "vocabulary": ("vocabulary", ","),
    "cross_entropy_ms": ("loss,\nms", ".3f"),
    "torch_ms": ("torch's,\nms", ".3f"),
    "compiled_ms": ("torch's\ncompiled, ms", ".3f"),
    "floor_ms": ("only\ncopying, ms", ".3f"),
    "of_torch": ("speed,\ntorch = 1", ".2f"),
    "of_compiled": ("speed,\ncompiled = 1", ".2f"),
}
SIZES = {"cuda": ((8192, 32768), (8192, 128256)), "cpu": ((256, 4096), (64, 32768))}  # tokens, vocabulary


def measure(device: str, tokens: int, vocabulary: int) -> report.Row:
    """Medians in ms for bfloat16 logits [tokens, vocabulary], of the loss and its gradient together."""
    logits = torch.randn(tokens, vocabulary, device=device, dtype=torch.bfloat16, requires_grad=True)
    target = torch.randint(vocabulary, (tokens,), device=device)
    alone = Axis("tp", 0, (0,), None)  # type: ignore[arg-type]  # one rank needs no group

    def of_torch() -> torch.Tensor:
        return F.cross_entropy(logits.float(), target)

    losses: dict[str, Callable[[], torch.Tensor]] = {
        "cross_entropy_ms": lambda: vocab_parallel_cross_entropy(logits, target, mesh=alone),
        "torch_ms": of_torch,
    }
    if device == "cuda":
        losses["compiled_ms"] = compiled(of_torch, device)
    candidates: dict[str, Callable[[], object]] = {name: _with_gradient(loss, logits) for name, loss in losses.items()}
    medians = medians_in_turns(candidates | {"clone_ms": lambda: logits.detach().clone()}, device)
    by_compiler = medians.get("compiled_ms")
    return {
        "device": device,
        "dtype": "bfloat16",
        "tokens": tokens,
        "vocabulary": vocabulary,
        **medians,
        "floor_ms": 1.5 * medians["clone_ms"],
        "of_torch": medians["torch_ms"] / medians["cross_entropy_ms"],
        "of_compiled": by_compiler and by_compiler / medians["cross_entropy_ms"],
    }


def _with_gradient(loss: Callable[[], torch.Tensor], logits: torch.Tensor) -> Callable[[], object]:
    return lambda: torch.autograd.grad(loss(), logits)


def main(json_file: str | None = None) -> int:
    """Measures on the GPU where there is one, else on the CPU with small sizes; prints the table and writes `json_file`."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows = [measure(device, tokens, vocabulary) for tokens, vocabulary in SIZES[device]]
    report.publish("cross_entropy", rows, COLUMNS, f"Cross-entropy of bfloat16 logits, forward and backward, on {device}", json_file)
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m pymesh3d.bench.cross_entropy", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", metavar="FILE", help="also write the measurements here")
    main(parser.parse_args().json)

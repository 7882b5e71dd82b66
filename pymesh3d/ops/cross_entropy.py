"""Cross-entropy over logits whose vocabulary is cut across an axis: the logits are never gathered.

Legend: T tokens, V vocabulary. Three numbers a token cross the axis: the maximum, then the sum of exponentials and the
target's logit (and the sum of logits under label smoothing) together. Backward needs the logits again, and two numbers a token.
"""

from __future__ import annotations

from typing import Any

import torch

from pymesh3d.axis import Axis
from pymesh3d.comm.collectives import MAX, all_reduce_
from pymesh3d.ops.function import first_order, owned
from pymesh3d.triton_kernels.cross_entropy import gradient, statistics
from pymesh3d.triton_kernels.rows import as_rows


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, target: torch.Tensor, axis: Axis, vocab: int, ignore_index: int, smoothing: float
    ) -> torch.Tensor:
        width = logits.shape[-1]
        start = axis.rank * width
        valid = min(max(vocab - start, 0), width)  # columns beyond are padding of the vocabulary
        part = {"start": start, "valid": valid, "vocab": vocab}
        entries = target.reshape(-1)
        local, sums = statistics(as_rows(logits), entries, **part, smoothed=smoothing > 0)
        maximum = all_reduce_(local.clone(), axis, MAX).wait()
        above = local.sub_(maximum)
        if smoothing and valid:
            sums[2].add_(above, alpha=valid)
        sums[0].mul_(above.exp_())
        total, target_z, *summed_z = all_reduce_(sums, axis).wait()

        loss = torch.sub(total.log(), target_z - maximum, alpha=1 - smoothing)
        if smoothing:
            loss.sub_(summed_z[0], alpha=smoothing / vocab)
        ctx.save_for_backward(logits, entries, maximum, total.clone())  # not the other sums
        ctx.options = {**part, "ignore_index": ignore_index, "smoothing": smoothing}
        # On CUDA nobody looked at the targets, which would wait for the device: one outside has made a NaN, with which no step is taken.
        return owned(loss.masked_fill_(entries == ignore_index, 0).view(target.shape))

    @staticmethod
    @first_order
    def backward(ctx: Any, grad_loss: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        logits, entries, maximum, total = ctx.saved_tensors
        grad = gradient(as_rows(logits), entries, maximum, total, grad_loss.reshape(-1), **ctx.options)
        return grad.view(logits.shape), None, None, None, None, None


@torch.compiler.disable
def cross_entropy(
    logits: torch.Tensor, target: torch.Tensor, axis: Axis, *, vocab: int, ignore_index: int = -100, label_smoothing: float = 0.0
) -> torch.Tensor:
    """Per-token loss [...] of local logits [..., V/ranks] and targets [...], the same bits on every rank.

    Computed in float32, for float64 logits in float64. 0 where the target is `ignore_index`, NaN where it is
    outside the vocabulary. Smoothing puts mass label_smoothing / V on each of the V entries, as torch does. The logits are kept for
    backward, so they must not be changed in place before it.
    """
    loss: torch.Tensor = _CrossEntropy.apply(logits, target, axis, vocab, ignore_index, label_smoothing)
    return loss

"""Cross-entropy over logits whose vocabulary is cut across an axis: the logits are never gathered.

Legend: T tokens, V vocabulary. Three numbers a token cross the axis: the maximum, then the sum of exponentials and the
target's logit (and the sum of logits under label smoothing) together.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from pymesh3d.comm.collectives import MAX, all_reduce_
from pymesh3d.mesh import Axis


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, target: torch.Tensor, axis: Axis, vocab: int, ignore_index: int, smoothing: float
    ) -> torch.Tensor:
        width = logits.shape[-1]
        start = axis.rank * width
        valid = min(max(vocab - start, 0), width)  # columns beyond are padding of the vocabulary
        z = logits.to(torch.float32, copy=True) if logits.dtype in (torch.bfloat16, torch.float16) else logits.clone()
        z[..., valid:] = -torch.inf
        z -= all_reduce_(z.amax(-1).contiguous(), axis, MAX).wait().unsqueeze(-1)

        ignored = target == ignore_index
        local = target - start
        here = (local >= 0) & (local < valid)
        local = local.masked_fill(~here, 0).unsqueeze(-1)
        target_z = z.gather(-1, local).squeeze(-1).masked_fill(~here, 0)
        summed_z = z[..., :valid].sum(-1) if smoothing else torch.zeros_like(target_z)
        exp = z.exp_()
        total, target_z, summed_z = all_reduce_(torch.stack((exp.sum(-1), target_z, summed_z)), axis).wait()

        log_total = total.log()
        loss = log_total - (1 - smoothing) * target_z - smoothing * (summed_z / vocab)
        ctx.save_for_backward(exp.div_(total.unsqueeze(-1)), local, here, ignored)
        ctx.vocab, ctx.valid, ctx.smoothing, ctx.dtype = vocab, valid, smoothing, logits.dtype
        # On CUDA nobody looked at the targets, which would wait for the device: one outside makes a loss that no step is taken with.
        loss.masked_fill_((target < 0) | (target >= vocab), torch.nan)
        return loss.masked_fill_(ignored, 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        softmax, local, here, ignored = ctx.saved_tensors
        grad = softmax.clone()
        grad.scatter_add_(-1, local, -(1 - ctx.smoothing) * here.to(grad.dtype).unsqueeze(-1))
        if ctx.smoothing:
            grad[..., : ctx.valid] -= ctx.smoothing / ctx.vocab
        grad *= grad_loss.unsqueeze(-1)
        grad.masked_fill_(ignored.unsqueeze(-1), 0)
        return grad.to(ctx.dtype), None, None, None, None, None


@torch.compiler.disable
def cross_entropy(
    logits: torch.Tensor, target: torch.Tensor, axis: Axis, *, vocab: int, ignore_index: int = -100, label_smoothing: float = 0.0
) -> torch.Tensor:
    """Per-token loss [T] of local logits [T, V/ranks] and targets [T], the same bits on every rank.

    Computed in float32 for bf16 logits, otherwise in the logits' dtype. 0 where the target is `ignore_index`, NaN where it is
    outside the vocabulary. Smoothing puts
    mass label_smoothing / V on each of the V entries, as torch does.
    """
    loss: torch.Tensor = _CrossEntropy.apply(logits, target, axis, vocab, ignore_index, label_smoothing)
    return loss

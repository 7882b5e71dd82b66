"""The language-model loss over logits whose vocabulary is cut across tp."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh

from pymesh3d.axis import Axis
from pymesh3d.errors import ConfigError
from pymesh3d.mesh import Mesh, tp_axis
from pymesh3d.ops.cross_entropy import cross_entropy


def vocab_parallel_cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    *,
    mesh: Mesh | DeviceMesh | Axis,
    vocab: int | None = None,
) -> torch.Tensor:
    """F.cross_entropy(all_gather(logits)[..., :vocab], target, ...) without gathering: logits [..., V/tp], target [...].

    The vocabulary is the last dim (torch has the classes in dim 1), targets are ids and no probabilities, and there are no weights
    of classes. `vocab` is the number of real entries when the logits are padded. Smoothing follows torch (mass over all V entries). The
    result is the same on every rank. One difference: with every target ignored, "mean" is 0 instead of NaN.
    Raises ConfigError on an unknown reduction, on shapes that do not match, and (on CPU) on a target outside the vocabulary.
    """
    axis = tp_axis(mesh)
    if not isinstance(target, torch.Tensor):
        raise ConfigError(f"a {type(target).__name__} as target", "targets are a tensor of ids", "Use torch.tensor(target)")
    if not logits.is_floating_point() or not logits.ndim or not logits.shape[-1] or target.dtype not in (torch.int32, torch.int64):
        raise ConfigError(
            f"logits {tuple(logits.shape)} of {logits.dtype}, target of {target.dtype}",
            "logits are [..., V/tp] in floating point, targets whole numbers, int32 or int64",
            "Use logits.float() and target.long()",
        )
    columns = logits.shape[-1] * axis.size
    vocab = columns if vocab is None else vocab
    if not isinstance(vocab, int) or not 0 < vocab <= columns:
        raise ConfigError(f"vocab={vocab} with logits of {columns} columns", "no more entries than columns", f"Use vocab={columns} or less")
    if reduction not in ("none", "mean", "sum"):
        raise ConfigError(f"reduction={reduction!r}", "not a reduction", "Use 'none', 'mean' or 'sum'")
    if not isinstance(ignore_index, int):
        raise ConfigError(f"ignore_index={ignore_index!r}", "it must be an integer", "The default is -100")
    if not isinstance(label_smoothing, int | float) or not 0.0 <= label_smoothing <= 1.0:
        raise ConfigError(f"label_smoothing={label_smoothing}", "must lie between 0 and 1", "Use 0.0 to switch it off")
    if logits.shape[:-1] != target.shape:
        raise ConfigError(
            f"logits {tuple(logits.shape)}, target {tuple(target.shape)}",
            "logits have the dims of the target and the vocabulary after them",
            f"This target needs logits {(*target.shape, logits.shape[-1])}",
        )
    if target.device.type == "cpu":
        wrong = target[((target < 0) | (target >= vocab)) & (target != ignore_index)]
        if wrong.numel():
            raise ConfigError(
                f"target {int(wrong[0])} with a vocabulary of {vocab}",
                "targets must lie in it or be ignore_index",
                f"Use 0..{vocab - 1} or {ignore_index}",
            )
    loss = cross_entropy(logits, target.long(), axis, vocab=vocab, ignore_index=ignore_index, label_smoothing=label_smoothing)
    if reduction == "none":
        return loss
    return loss.sum() if reduction == "sum" else loss.sum() / (target != ignore_index).sum().clamp(min=1)

"""Layers whose weights are cut across the tensor-parallel axis. Each is a drop-in for its torch.nn namesake and returns a tensor.

Legend: T tokens (the dim before the features), K in features, N out features, V vocabulary, D embedding width. `mesh` is a
pymesh3d Mesh, or a torch DeviceMesh that has one dim or one called "tp". `Part` (of pymesh3d) is a run of rows that is cut by itself.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from pymesh3d.axis import Axis
from pymesh3d.comm.collectives import equalize_
from pymesh3d.comm.registry import register
from pymesh3d.config import require_flag, require_positive
from pymesh3d.errors import ConfigError
from pymesh3d.initial import fill_, materialize
from pymesh3d.mesh import Mesh, tp_axis
from pymesh3d.ops.features import gather_features, split_features
from pymesh3d.ops.linear import column_linear, row_linear, vocab_lookup
from pymesh3d.placement import Part, Placement, place, placement_of


def _common_seed(axis: Axis) -> int:
    """A seed drawn from torch's default generator of the axis' first rank, the same on all its ranks."""
    seed = torch.randint(2**62, (1,))
    equalize_(seed, axis)
    return int(seed.item())


class _Sharded(nn.Module):
    """What the layers share: making a parameter from its placement, filling it, taking it from a whole one."""

    def __init__(self, mesh: Mesh | DeviceMesh | Axis, sequence_parallel: bool, **sizes: int) -> None:
        super().__init__()
        for name, size in sizes.items():
            require_positive(name, size)
        require_flag("sequence_parallel", sequence_parallel)
        self._sizes = tuple(sizes.values())
        self.axis = tp_axis(mesh)
        register(self.axis.key, self.axis)
        self.sequence_parallel = sequence_parallel
        self._default_device = mesh.device if isinstance(mesh, Mesh) else None

    def __deepcopy__(self, memo: dict[int, Any]) -> _Sharded:
        """A copy on the same axis, of which each parameter has its placement too (torch copies no attributes). Raises ConfigError."""
        if self.sequence_parallel and self.axis.size > 1:  # a copied norm would not know that its gradients are summed over tp
            raise ConfigError(
                f"copy.deepcopy of a {type(self).__name__}({self.extra_repr()})",
                "a model with sequence_parallel=True cannot be copied so",
                "Make another in the same way, and use its load_state_dict(model.state_dict())",
            )
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__setstate__(copy.deepcopy(self.__dict__, memo))
        for own, parameter in zip(copied.parameters(recurse=False), self.parameters(recurse=False), strict=True):
            place(own, dataclasses.replace(placement_of(parameter), zero=None))
        return copied

    def _parameter(self, placement: Placement, device: torch.device | str | None, dtype: torch.dtype | None) -> nn.Parameter:
        parameter = nn.Parameter(torch.empty(placement.local_shape(), device=device or self._default_device, dtype=dtype))
        place(parameter, placement)
        return parameter

    def _take(self, parameter: nn.Parameter, whole: torch.Tensor) -> None:
        """Copy this rank's shard from the first rank's whole tensor, so that shards fit together whatever each rank had."""
        parameter.requires_grad_(whole.requires_grad)
        if whole.is_meta:
            return
        whole = whole.detach().clone()
        equalize_(whole, self.axis)
        with torch.no_grad():
            placement_of(parameter).shard(whole, parameter, self.axis.rank)

    def _take_over(self, module: nn.Module) -> None:
        """Take device and values, by name, of the whole layer that this one (made on the meta device) stands for."""
        for name, whole in module.named_parameters(recurse=False):
            materialize(self, whole.device)
            self._take(self.get_parameter(name), whole)

    def extra_repr(self) -> str:
        """Sizes of the whole layer and how it is cut."""
        return f"{self._sizes[0]}, {self._sizes[1]}, tp={self.axis.size}, sequence_parallel={self.sequence_parallel}"

    def _check_features(self, x: torch.Tensor, features: int) -> None:
        if not x.ndim or x.shape[-1] != features:
            raise ConfigError(
                f"input {tuple(x.shape)} of a {type(self).__name__}({self.extra_repr()})",
                f"its last dim must be {features}",
                "A column-parallel layer takes whole features, a row-parallel one this rank's part (whole with input_is_parallel=False)",
            )

    def _check_tokens(self, x: torch.Tensor, tokens: int) -> None:
        if self.sequence_parallel and tokens % self.axis.size:
            raise ConfigError(
                f"input {tuple(x.shape)} with sequence_parallel=True, tp={self.axis.size}",
                f"tp must divide the {tokens} tokens",
                f"Pad to {math.ceil(tokens / self.axis.size) * self.axis.size} tokens, or use sequence_parallel=False",
            )


def _linear_reset(layer: _Sharded, weight: nn.Parameter, bias: nn.Parameter | None, in_features: int) -> None:
    """nn.Linear's distribution for the whole layer: uniform within 1 / sqrt(in_features), whatever a rank holds of it."""
    if weight.is_meta:
        return
    seed, bound = _common_seed(layer.axis), 1 / math.sqrt(in_features)
    for name, parameter in (("weight", weight), ("bias", bias)):
        if parameter is not None:
            fill_(parameter, placement_of(parameter), layer.axis.rank, seed=seed, name=name, kind="uniform", scale=bound)


class ColumnParallelLinear(_Sharded):
    """y = x W^T + b with the N rows of W and b cut across tp: in [..., T, K], out [..., T, N/tp] (or N with gather_output).

    With sequence_parallel the input is [..., T/tp, K] and is gathered. `parts` cuts a fused weight part by part (sizes, or
    `Part`s with heads for q|k|v); the output then holds this rank's [q|k|v], of the sizes in the attribute `parts`. `heads`
    is the number of units that stay whole; fewer heads than tp are replicated on neighbouring ranks. `vocab_multiple` pads
    N to a multiple of tp times it (the head of a language model).
    Raises ConfigError when tp does not divide what is cut.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        gather_output: bool = False,
        sequence_parallel: bool = False,
        *,
        mesh: Mesh | DeviceMesh | Axis,
        parts: Sequence[int | Part] | None = None,
        heads: int | None = None,
        vocab_multiple: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(mesh, sequence_parallel, in_features=in_features, out_features=out_features)
        self.in_features, self.out_features, self.gather_output = in_features, out_features, gather_output
        cut = _parts(out_features, parts, heads, vocab_multiple, self.axis.size)
        placement = Placement(shape=(out_features, in_features), parts=cut, ranks=self.axis.size, partial=True)
        if gather_output and (len(cut) > 1 or cut[0].replicas(self.axis.size) > 1):
            raise ConfigError(
                "gather_output=True with several parts or replicated heads",
                "the gathered order would not be the layer's",
                "Gather each part",
            )
        self.parts = placement.local_parts()
        self.weight = self._parameter(placement, device, dtype)
        bias_placement = Placement(shape=(out_features,), parts=cut, ranks=self.axis.size, partial=True)
        self.bias = self._parameter(bias_placement, device, dtype) if bias else None
        _linear_reset(self, self.weight, self.bias, in_features)

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        gather_output: bool = False,
        sequence_parallel: bool = False,
        *,
        mesh: Mesh | DeviceMesh | Axis,
        parts: Sequence[int | Part] | None = None,
        heads: int | None = None,
        vocab_multiple: int | None = None,
    ) -> ColumnParallelLinear:
        """This rank's part of an existing nn.Linear (the first tp rank's values count). A `cut` attribute of it stands for `parts`."""
        layer = cls(
            linear.in_features,
            linear.out_features,
            linear.bias is not None,
            gather_output,
            sequence_parallel,
            mesh=mesh,
            parts=parts if parts is not None else getattr(linear, "cut", None),
            heads=heads,
            vocab_multiple=vocab_multiple,
            device="meta",
            dtype=linear.weight.dtype,
        )
        layer._take_over(linear)
        return layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., T, K] (or [..., T/tp, K]) -> [..., T, N/tp] (or N)."""
        self._check_features(x, self.in_features)
        if self.sequence_parallel and x.ndim < 2:
            raise ConfigError(f"input {tuple(x.shape)} with sequence_parallel=True", "there is no dim of tokens", "Use x.unsqueeze(0)")
        y = column_linear(x, self.weight, self.bias, self.axis, self.sequence_parallel)
        return gather_features(y, self.axis)[..., : self.out_features] if self.gather_output else y


class RowParallelLinear(_Sharded):
    """y = x W^T + b with the K columns of W cut across tp: in [..., T, K/tp], out [..., T, N], b added once.

    With sequence_parallel the output is [..., T/tp, N]. With input_is_parallel=False the whole [..., T, K] comes in.
    Raises ConfigError when tp does not divide K, or T under sequence_parallel.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        input_is_parallel: bool = True,
        sequence_parallel: bool = False,
        *,
        mesh: Mesh | DeviceMesh | Axis,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(mesh, sequence_parallel, in_features=in_features, out_features=out_features)
        self.in_features, self.out_features, self.input_is_parallel = in_features, out_features, input_is_parallel
        cut = Part(size=in_features)
        cut.check(self.axis.size, f"in_features={in_features}")
        self.weight = self._parameter(
            Placement(shape=(out_features, in_features), dim=1, parts=(cut,), ranks=self.axis.size), device, dtype
        )
        bias_placement = Placement(shape=(out_features,), ranks=self.axis.size, partial=sequence_parallel)
        self.bias = self._parameter(bias_placement, device, dtype) if bias else None
        _linear_reset(self, self.weight, self.bias, in_features)

    @classmethod
    def from_linear(
        cls, linear: nn.Linear, input_is_parallel: bool = True, sequence_parallel: bool = False, *, mesh: Mesh | DeviceMesh | Axis
    ) -> RowParallelLinear:
        """This rank's part of an existing nn.Linear (the first tp rank's values count)."""
        layer = cls(
            linear.in_features,
            linear.out_features,
            linear.bias is not None,
            input_is_parallel,
            sequence_parallel,
            mesh=mesh,
            device="meta",
            dtype=linear.weight.dtype,
        )
        layer._take_over(linear)
        return layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., T, K/tp] -> [..., T, N] (or [..., T/tp, N])."""
        self._check_features(x, self.in_features // self.axis.size if self.input_is_parallel else self.in_features)
        if not self.input_is_parallel:
            x = split_features(x, self.axis)
        self._check_tokens(x, x.shape[-2] if x.ndim > 1 else 1)
        return row_linear(x, self.weight, self.bias, self.axis, self.sequence_parallel)


class VocabParallelEmbedding(_Sharded):
    """An embedding [V, D] of which each tp rank holds V/tp rows: ids [..., T] -> [..., T, D], or [..., T/tp, D] with sequence_parallel.

    V is padded to a multiple of tp times `vocab_multiple`; padding rows are zero, get no gradient, and are never saved.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        sequence_parallel: bool = False,
        *,
        mesh: Mesh | DeviceMesh | Axis,
        vocab_multiple: int = 128,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(mesh, sequence_parallel, num_embeddings=num_embeddings, embedding_dim=embedding_dim)
        if padding_idx is not None and not (isinstance(padding_idx, int) and -num_embeddings <= padding_idx < num_embeddings):
            raise ConfigError(
                f"padding_idx={padding_idx}, num_embeddings={num_embeddings}", "padding_idx must be one of the rows", "Use padding_idx=None"
            )
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.padding_idx = None if padding_idx is None else padding_idx % num_embeddings
        cut = _parts(num_embeddings, None, None, vocab_multiple, self.axis.size)
        self.weight = self._parameter(Placement(shape=(num_embeddings, embedding_dim), parts=cut, ranks=self.axis.size), device, dtype)
        if not self.weight.is_meta:
            seed = _common_seed(self.axis)
            fill_(self.weight, placement_of(self.weight), self.axis.rank, seed=seed, name="weight", kind="normal", scale=1.0)
            self._zero_padding_row()

    @torch.no_grad()
    def _zero_padding_row(self) -> None:
        rows = self.weight.shape[0]
        if self.padding_idx is not None and self.padding_idx // rows == self.axis.rank:
            self.weight[self.padding_idx % rows] = 0

    @classmethod
    def from_embedding(
        cls, embedding: nn.Embedding, sequence_parallel: bool = False, *, mesh: Mesh | DeviceMesh | Axis, vocab_multiple: int = 128
    ) -> VocabParallelEmbedding:
        """This rank's rows of an existing nn.Embedding (the first tp rank's values count)."""
        for option in ("max_norm", "scale_grad_by_freq", "sparse"):
            if getattr(embedding, option):
                raise ConfigError(
                    f"nn.Embedding({option}={getattr(embedding, option)})", "not supported by a cut embedding", f"Switch {option} off"
                )
        layer = cls(
            embedding.num_embeddings,
            embedding.embedding_dim,
            embedding.padding_idx,
            sequence_parallel,
            mesh=mesh,
            vocab_multiple=vocab_multiple,
            device="meta",
            dtype=embedding.weight.dtype,
        )
        layer._take_over(embedding)
        return layer

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """ids [..., T] of all the ranks' tokens, the same on each -> [..., T, D] (or [..., T/tp, D]). On CPU an id outside is refused."""
        if ids.dtype not in (torch.int32, torch.int64):
            raise ConfigError(f"ids of {ids.dtype}", "they must be whole numbers, int32 or int64", "Use ids.long()")
        if ids.device.type == "cpu" and ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < self.num_embeddings:
            raise ConfigError(
                f"ids from {int(ids.min())} to {int(ids.max())} of an embedding of {self.num_embeddings} rows",
                "an id must be one of the rows",
                f"Use 0..{self.num_embeddings - 1}",
            )
        self._check_tokens(ids, ids.shape[-1] if ids.ndim else 1)
        return vocab_lookup(ids, self.weight, self.axis, self.sequence_parallel, vocab=self.num_embeddings, padding_idx=self.padding_idx)


def _parts(rows: int, parts: Sequence[int | Part] | None, heads: int | None, multiple: int | None, ranks: int) -> tuple[Part, ...]:
    """The parts of a dim of `rows` rows, checked one by one so that the error names the faulty one."""
    if parts is not None and (heads is not None or multiple is not None):
        raise ConfigError(
            "parts together with heads or vocab_multiple", "heads belong into the parts", "Use parts=(Part(size=..., heads=...), ...)"
        )
    if parts is not None and (isinstance(parts, str) or not isinstance(parts, Sequence) or not parts):
        rule = "parts are a sequence of numbers of rows, or of Parts"
        raise ConfigError(f"parts={parts!r}", rule, f"Use parts=({rows},), or as many that add up to {rows}")
    if multiple is not None:
        require_positive("vocab_multiple", multiple)
    if parts is None:
        padded = None if multiple is None else math.ceil(rows / (ranks * multiple)) * ranks * multiple
        parts = (Part(size=rows, heads=heads, padded=padded),)
    cut = tuple(part if isinstance(part, Part) else Part(size=part) for part in parts)
    total = sum(part.size for part in cut)
    if total != rows:
        raise ConfigError(
            f"parts {[part.size for part in cut]} of out_features={rows}",
            "the parts must add up to out_features",
            f"Use out_features={total}",
        )
    for number, part in enumerate(cut):
        part.check(ranks, f"out_features={rows}" if len(cut) == 1 else f"part {number} (of {part.size} rows) of out_features={rows}")
    return cut

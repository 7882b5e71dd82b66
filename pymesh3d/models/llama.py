"""A Llama-like language model. It runs alone as it is; `plan` says how tensor parallelism cuts it.

Legend: B batch, S sequence, T = S * B tokens in sequence-major order (token s of every sample, then s + 1), D model width,
H heads, G KV heads, E head width, F ffn width, V vocabulary. Sequence-major order keeps a slice of the sequence contiguous.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from pymesh3d.config import ModelConfig
from pymesh3d.initial import fill_
from pymesh3d.models.dropout import Dropout, Masks
from pymesh3d.models.norm import ResidualNorm, RMSNorm
from pymesh3d.models.recompute import computed_again
from pymesh3d.ops.rotary import Angles, angles, rotary
from pymesh3d.ops.swiglu import swiglu
from pymesh3d.placement import Part, placement_of
from pymesh3d.tp.plan import Column, Norm, Row, Style, Vocab


class FusedLinear(nn.Linear):
    """Several projections of one input with one weight, their rows one after another. `parts` are the output sizes."""

    def __init__(self, in_features: int, cut: tuple[Part, ...], **options: Any) -> None:
        super().__init__(in_features, sum(part.size for part in cut), bias=False, **options)
        self.cut = cut
        self.parts = tuple(part.size for part in cut)


class Attention(nn.Module):
    """Causal self-attention with grouped queries."""

    def __init__(self, config: ModelConfig, **options: Any) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        query = Part(size=config.heads * config.head_dim, heads=config.heads)
        key = Part(size=config.kv_heads * config.head_dim, heads=config.kv_heads)
        self.qkv = FusedLinear(config.dim, (query, key, key), **options)
        self.out = nn.Linear(config.dim, config.dim, bias=False, **options)

    def forward(self, x: torch.Tensor, rope: Angles) -> torch.Tensor:
        """x [T, D] -> [T, D]. How many heads there are is read off the projection, so a cut layer works unchanged."""
        heads, kv_heads, _ = (size // self.head_dim for size in self.qkv.parts)
        q, k, v = (part.permute(1, 2, 0, 3) for part in rotary(self.qkv(x), rope, heads, kv_heads))  # [B, heads, S, E]
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        y = self.out(y.permute(2, 0, 1, 3).flatten(2).flatten(0, 1))
        return y


class FeedForward(nn.Module):
    """SwiGLU (Shazeer 2020): down(silu(gate x) * up x)."""

    def __init__(self, config: ModelConfig, **options: Any) -> None:
        super().__init__()
        self.gate_up = FusedLinear(config.dim, (Part(size=config.ffn), Part(size=config.ffn)), **options)
        self.down = nn.Linear(config.ffn, config.dim, bias=False, **options)

    def forward(self, x: torch.Tensor, thrifty: bool = False) -> torch.Tensor:
        """x [T, D] -> [T, D]. `thrifty`: for backward, the input of `down` is computed again."""
        y: torch.Tensor
        if thrifty:
            with computed_again(swiglu, self.gate_up(x)) as z:
                y = self.down(z)
        else:
            y = self.down(swiglu(self.gate_up(x)))
        return y


class Block(nn.Module):
    """One pre-norm transformer layer."""

    def __init__(self, config: ModelConfig, name: str, **options: Any) -> None:
        super().__init__()
        self.attention_norm = ResidualNorm(config.dim, eps=config.norm_eps, **options)
        self.attention = Attention(config, **options)
        self.ffn_norm = ResidualNorm(config.dim, eps=config.norm_eps, **options)
        self.ffn = FeedForward(config, **options)
        self.attention_dropout = Dropout(f"{name}.attention")
        self.ffn_dropout = Dropout(f"{name}.ffn")

    def forward(self, h: torch.Tensor, batch: int, rope: Angles, masks: Masks | None = None, thrifty: bool = False) -> torch.Tensor:
        """h [T, D] -> [T, D]. `thrifty`: for backward, norms and activations are computed again."""
        with self.attention_norm.within(h, thrifty=thrifty) as (h, x):
            y: torch.Tensor = self.attention(x, rope)
        y = y if masks is None else self.attention_dropout(y, batch, masks)
        with self.ffn_norm.within(h, y, thrifty=thrifty) as (h, x):
            y = self.ffn(x, thrifty)
        return h + (y if masks is None else self.ffn_dropout(y, batch, masks))


class Llama(nn.Module):
    """The whole model, or, once a pipeline has cut it, the modules of one stage (the others are None or gone; names stay).

    `recompute` "full" keeps only the input of each layer and computes the rest again in backward; "selective" keeps what comes out of
    matrix products and attention, and computes the rest again.
    """

    def __init__(self, config: ModelConfig, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.config = config
        self.recompute = "none"
        options = {"device": device, "dtype": dtype}
        self.embed: nn.Module | None = nn.Embedding(config.vocab, config.dim, device=device, dtype=dtype)
        self.embed_dropout = Dropout("embed")
        self.layers = nn.ModuleDict({str(i): Block(config, f"layers.{i}", **options) for i in range(config.layers)})
        self.norm: nn.Module | None = RMSNorm(config.dim, eps=config.norm_eps, device=device, dtype=dtype)
        self.head: nn.Module | None = nn.Linear(config.dim, config.vocab, bias=False, device=device, dtype=dtype)
        if config.tied:
            self.head.weight = self.embed.weight

    def forward(
        self, ids: torch.Tensor, h: torch.Tensor | None = None, masks: Masks | None = None, *, layers: range | None = None
    ) -> torch.Tensor:
        """Token ids [B, S] -> logits [B, S, V]. A later stage also gets h [T, D]; one before the last layer returns h.

        `masks`: what dropout drops, of the embeddings and of what attention and feed-forward add; None: nothing. `layers`: those of one
        stage where several stand here; by default all that are here.
        """
        batch, seq = ids.shape
        if h is None:
            assert self.embed is not None, "a stage without the embedding needs the hidden states of the one before"
            h = self.embed(ids.t().reshape(-1))
            h = h if masks is None else self.embed_dropout(h, batch, masks)
        rope = angles(seq, self.config.head_dim, self.config.rope_theta, h)
        for layer in self.layers.values() if layers is None else [self.layers[str(number)] for number in layers]:
            if self.recompute == "full" and torch.is_grad_enabled():
                h = checkpoint(layer, h, batch, rope, masks, use_reentrant=False, preserve_rng_state=False)
            else:
                h = layer(h, batch, rope, masks, self.recompute == "selective" and torch.is_grad_enabled())
        if self.norm is None or self.head is None or (layers is not None and layers.stop < self.config.layers):
            return h
        logits: torch.Tensor = self.head(self.norm(h))
        return logits.view(seq, batch, -1).transpose(0, 1)


def plan(vocab_multiple: int) -> Mapping[str, Style]:
    """How tensor parallelism cuts the model."""
    return {
        "embed": Vocab(vocab_multiple=vocab_multiple),
        "layers.*.attention.qkv": Column(),
        "layers.*.attention.out": Row(),
        "layers.*.ffn.gate_up": Column(),
        "layers.*.ffn.down": Row(),
        "layers.*_norm": Norm(),
        "norm": Norm(),
        "head": Column(vocab_multiple=vocab_multiple),
    }


@torch.no_grad()
def initialize_(model: Llama, seed: int, tp_rank: int = 0) -> None:
    """Fill every parameter from the seed and its full name: matrices normal with deviation 0.02, those that write into the
    residual stream 0.02 / sqrt(2 layers) (GPT-2's rule), norms 1."""
    residual = 0.02 / (2 * model.config.layers) ** 0.5
    for name, parameter in model.named_parameters():
        placement = placement_of(parameter)
        if parameter.ndim == 1:
            parameter.fill_(1.0)
        else:
            scale = residual if name.endswith(("attention.out.weight", "ffn.down.weight")) else 0.02
            fill_(parameter, placement, tp_rank, seed=seed, name=placement.name or name, kind="normal", scale=scale)

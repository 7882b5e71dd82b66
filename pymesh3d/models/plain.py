"""The model once more, in nothing but torch: what `check` and the tests hold every layout against, our kernels with it.

Legend: B batch, S sequence, D model width, H heads, G KV heads, E head width, F ffn width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F

from pymesh3d.config import ModelConfig
from pymesh3d.models.dropout import Masks
from pymesh3d.ops.dropout import module_key
from pymesh3d.triton_kernels.dropout import dropout_ref


def logits(weights: Mapping[str, torch.Tensor], config: ModelConfig, ids: torch.Tensor, masks: Masks | None = None) -> torch.Tensor:
    """Token ids [B, S] of a whole batch -> logits [B, S, V], with the parameters of `Llama` by name."""

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return F.rms_norm(x, (config.dim,), weights[f"{name}.weight"], config.norm_eps)

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        return F.linear(x, weights[f"{name}.weight"])

    h = _dropped(F.embedding(ids, weights["embed.weight"]), "embed", masks)
    for layer in (f"layers.{i}" for i in range(config.layers)):
        q, k, v = _heads(linear(norm(h, f"{layer}.attention_norm"), f"{layer}.attention.qkv"), config)
        y = F.scaled_dot_product_attention(
            _turned(q, config.rope_theta), _turned(k, config.rope_theta), v, is_causal=True, enable_gqa=config.kv_heads != config.heads
        )
        h = h + _dropped(linear(y.transpose(1, 2).flatten(2), f"{layer}.attention.out"), f"{layer}.attention", masks)
        gate, up = linear(norm(h, f"{layer}.ffn_norm"), f"{layer}.ffn.gate_up").chunk(2, dim=-1)
        h = h + _dropped(linear(F.silu(gate) * up, f"{layer}.ffn.down"), f"{layer}.ffn", masks)
    return linear(norm(h, "norm"), "embed" if config.tied else "head")


def _heads(x: torch.Tensor, config: ModelConfig) -> tuple[torch.Tensor, ...]:
    """A projection [B, S, (H + 2 G) E] -> q [B, H, S, E], k and v [B, G, S, E]."""
    parts = x.unflatten(-1, (-1, config.head_dim)).transpose(1, 2)
    return parts.split((config.heads, config.kv_heads, config.kv_heads), dim=1)


def _turned(x: torch.Tensor, theta: float) -> torch.Tensor:
    """Rotary embedding of x [B, H, S, E]: x[i] + 1j x[i + E/2] times exp(1j position theta^(-2 i / E)) (Su et al. 2021, eq. 34)."""
    seq, width = x.shape[-2:]
    rates = theta ** (-torch.arange(0, width, 2, dtype=x.dtype, device=x.device) / width)
    turns = torch.outer(torch.arange(seq, dtype=x.dtype, device=x.device), rates)
    turned = torch.complex(*x.chunk(2, dim=-1)) * torch.polar(torch.ones_like(turns), turns)
    return torch.cat((turned.real, turned.imag), dim=-1)


def _dropped(y: torch.Tensor, name: str, masks: Masks | None) -> torch.Tensor:
    """y [B, S, D] times the mask of that place in the model."""
    if masks is None:
        return y
    assert (masks.first, masks.samples, masks.position) == (0, len(y), 0), "one process has the whole batch"
    columns = len(y) * y.shape[-1]  # masks are drawn sequence-major
    ones = torch.ones(y.shape[1], columns, dtype=y.dtype, device=y.device)
    mask = dropout_ref(ones, p=masks.p, key=module_key(masks.seed, name), counter=masks.counter, global_cols=columns)
    return y * mask.view(y.shape[1], len(y), -1).transpose(0, 1)

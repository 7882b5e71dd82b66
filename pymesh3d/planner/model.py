"""Parameters and floating-point operations of the reference model, counted from its configuration alone."""

from __future__ import annotations

from pymesh3d.config import ModelConfig


def layer_parameters(model: ModelConfig) -> int:
    """Of one layer: fused q|k|v, attention output, fused gate|up, down, and two norms; there are no biases."""
    qkv = model.dim * (model.heads + 2 * model.kv_heads) * model.head_dim
    out = model.heads * model.head_dim * model.dim
    gate_up, down = 2 * model.dim * model.ffn, model.ffn * model.dim
    return qkv + out + gate_up + down + 2 * model.dim


def parameters(model: ModelConfig) -> int:
    """All parameters, without vocabulary padding; a tied head is the embedding and counts once."""
    matrix = model.vocab * model.dim
    return matrix + model.layers * layer_parameters(model) + model.dim + (0 if model.tied else matrix)


def flops_per_token(model: ModelConfig, seq: int) -> float:
    """FLOPs of forward and backward for one token of a sequence of `seq`, recomputation not counted.

    6 for each parameter that a token is multiplied with, and 6 * layers * dim * seq for causal attention. Looking up the embedding
    costs none; the head's matrix costs the same tied or not.
    """
    multiplied = model.layers * layer_parameters(model) + model.dim + model.vocab * model.dim
    return 6.0 * multiplied + 6.0 * model.layers * model.dim * seq

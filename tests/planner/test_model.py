"""Counts against published and independently written ones; peaks by real device names."""

from __future__ import annotations

import dataclasses

import pytest

from pymesh3d.config import MODELS, ModelConfig
from pymesh3d.planner.hardware import peak_flops
from pymesh3d.planner.model import flops_per_token, parameters

# Llama 3 8B and Llama 3.2 1B (tied) as published by their authors: a real check on the formula from outside.
LLAMA3_8B = ModelConfig(vocab=128256, dim=4096, layers=32, heads=32, kv_heads=8, ffn=14336)
LLAMA32_1B = ModelConfig(vocab=128256, dim=2048, layers=16, heads=32, kv_heads=8, ffn=8192, tied=True)


@pytest.mark.parametrize(
    ("model", "count"),
    [
        (MODELS["1b"], 1_107_363_840),
        (MODELS["8b"], 7_248_023_552),
        (LLAMA3_8B, 8_030_261_248),
        (LLAMA32_1B, 1_235_814_400),
        # By hand: embedding 5*4, layer q 4*4 + k, v 2*(4*2) + out 4*4 + gate, up, down 3*(4*3) + norms 8, final norm 4, head 5*4.
        (ModelConfig(vocab=5, dim=4, layers=1, heads=2, kv_heads=1, ffn=3), 20 + 92 + 4 + 20),
    ],
)
def test_parameters(model, count):
    assert parameters(model) == count


def test_flops_of_the_benchmark_model():
    assert flops_per_token(MODELS["1b"], 4096) == pytest.approx(7.047e9, rel=1e-4)
    model = MODELS["1b"]
    exact = 6 * (1_107_363_840 - 32768 * 2048) + 6 * 16 * 2048 * 4096
    assert flops_per_token(model, 4096) == exact


def test_tied_head_costs_the_same_flops():
    model = MODELS["1b"]
    tied = dataclasses.replace(model, tied=True)
    assert parameters(model) - parameters(tied) == model.vocab * model.dim
    assert flops_per_token(tied, 4096) == flops_per_token(model, 4096)


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA B200", 2250e12),
        ("NVIDIA GB200", 2450e12),
        ("NVIDIA B300 SXM6 AC", 2250e12),
        ("NVIDIA GB300", 2450e12),
        ("cpu", None),
        ("NVIDIA GeForce RTX 4090", None),
    ],
)
def test_bf16_peak(name, peak):
    assert peak_flops(name, "bfloat16") == peak


def test_no_peak_is_made_up_for_other_dtypes():
    assert peak_flops("NVIDIA H100 80GB HBM3", "float32") is None
    assert peak_flops("NVIDIA H100 80GB HBM3", "float64") is None

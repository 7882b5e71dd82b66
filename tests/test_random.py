"""Initial values belong to (seed, name, place): fixed for ever, different between names, and indifferent to how a parameter is cut."""

from __future__ import annotations

import math

import pytest
import torch

from pymesh3d.errors import ConfigError
from pymesh3d.random import fill_shard_, parameter_key

# A change of any of these would silently change the initial weights of everybody's runs.
GOLDEN_KEYS = {
    (0, "layers.0.attention.wq.weight"): 0xF94060C469E4618F,
    (1234, "embedding.weight"): 0xB0287ACA0356352D,
    (2**64 - 1, ""): 0x142659E3EC422608,
}
GOLDEN_VALUES = {  # rows 5:7 and columns 7:10 of a parameter with 4096 columns, scale 0.02
    ("normal", torch.float32): "0x1.6ad184p-6 0x1.de7a2ap-6 -0x1.672b2ep-8 -0x1.7cd72ep-6 -0x1.0da3ccp-12 0x1.66e634p-10",
    ("uniform", torch.float32): "0x1.4cd68cp-7 -0x1.4a0a5ap-7 -0x1.5b4c9cp-7 0x1.e87738p-8 0x1.7a6a5cp-9 0x1.36dcbep-6",
    ("normal", torch.float64): (
        "0x1.6ad1840596c39p-6 0x1.de7a29f48c8eep-6 -0x1.672b2eae02995p-8 -0x1.7cd72dbac54aap-6 -0x1.0da3cbf57f52dp-12 0x1.66e63467f960ep-10"
    ),
    ("uniform", torch.float64): (
        "0x1.4cd68cccccccdp-7 -0x1.4a0a59999999ap-7 -0x1.5b4c9c28f5c29p-7 0x1.e8773851eb852p-8 0x1.7a6a5c28f5c29p-9 0x1.36dcbeb851eb8p-6"
    ),
}


def whole(seed: int = 0, name: str = "a.weight", rows: int = 12, cols: int = 16) -> torch.Tensor:
    out = torch.full((rows, cols), math.nan)
    return fill_shard_(out, seed=seed, name=name, kind="normal", scale=0.02, global_cols=cols)


@pytest.mark.parametrize(("seed", "name"), GOLDEN_KEYS)
def test_keys_never_change(seed: int, name: str) -> None:
    assert parameter_key(seed, name) == GOLDEN_KEYS[seed, name]


@pytest.mark.parametrize(("kind", "dtype"), GOLDEN_VALUES)
def test_values_never_change(kind: str, dtype: torch.dtype) -> None:
    out = torch.full((2, 3), math.nan, dtype=dtype)
    fill_shard_(out, seed=1234, name="layers.3.mlp.down.weight", kind=kind, scale=0.02, global_cols=4096, row0=5, col0=7)
    assert out.flatten().tolist() == [float.fromhex(value) for value in GOLDEN_VALUES[kind, dtype].split()]


def test_names_and_seeds_make_streams_of_their_own() -> None:
    streams = [whole(), whole(name="b.weight"), whole(seed=1), whole(seed=2**63), whole(name="a.weight ")]
    for i, one in enumerate(streams):
        for other in streams[:i]:
            assert not (one == other).any()


def test_keys_are_spread_over_64_bits() -> None:
    keys = [parameter_key(seed, f"layers.{layer}.weight") for seed in range(16) for layer in range(64)]
    assert len(set(keys)) == len(keys)
    ones = [sum(key >> bit & 1 for key in keys) for bit in range(64)]
    assert all(abs(count - 512) < 5 * 16 for count in ones), "each bit is a fair coin over 1024 keys: mean 512, deviation 16"


@pytest.mark.parametrize("pp_and_tp", [(1, 1), (2, 1), (1, 2), (2, 4), (4, 4)])
@pytest.mark.parametrize("dim", [0, 1])
def test_every_layout_has_the_same_values(pp_and_tp: tuple[int, int], dim: int) -> None:
    stages, tp = pp_and_tp
    gathered = []
    for stage in range(stages):
        torch.manual_seed(stage)  # torch's own generators have no say
        shards = []
        for rank in range(tp):
            rows, cols = (12 // tp, 16) if dim == 0 else (12, 16 // tp)
            place = {"row0": rank * rows} if dim == 0 else {"col0": rank * cols}
            out = torch.full((rows, cols), math.nan)
            shards.append(fill_shard_(out, seed=7, name=f"layers.{stage}.weight", kind="normal", scale=0.02, global_cols=16, **place))
        gathered.append(torch.cat(shards, dim))
    for stage, tensor in enumerate(gathered):
        assert torch.equal(tensor, whole(7, f"layers.{stage}.weight"))


def test_a_bias_is_one_row() -> None:
    bias = {"seed": 0, "name": "a.bias", "kind": "uniform", "scale": 0.125, "global_cols": 10}
    full = fill_shard_(torch.full((10,), math.nan), **bias)
    halves = [fill_shard_(torch.full((5,), math.nan), col0=col0, **bias) for col0 in (0, 5)]
    assert torch.equal(torch.cat(halves), full)
    assert full.unique().numel() == 10


@pytest.mark.parametrize("seed", [-1, 2**64, 1.0, True, None, "0"])
def test_a_bad_seed_is_refused(seed: object) -> None:
    with pytest.raises(ConfigError, match="seed must be an integer") as refused:
        parameter_key(seed, "a.weight")
    assert refused.value.given == f"seed={seed!r}"

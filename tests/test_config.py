"""Configurations that cannot run are refused at once, in words that name the values, the rule, and something that works."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from pymesh3d.config import AXES, MODELS, Layout, ModelConfig, TrainConfig, divisors, runs, validate
from pymesh3d.errors import ConfigError
from pymesh3d.mesh import init_mesh

TEN_HEADS = ModelConfig(dim=80, heads=10, kv_heads=10, ffn=120)
TWELVE_HEADS = ModelConfig(dim=96, heads=12, kv_heads=2, ffn=96)
TRAIN = TrainConfig(global_batch=24)

# What is given -> words of the error, and the way out that the error names, which must be one.
BAD: dict[str, tuple[Callable[[], object], list[str], Callable[[], object]]] = {
    "world": (
        lambda: Layout(tp=4).resolve(6),
        ["world size 6", "tp 4", "multiply to 4", "must equal", "pp 1 x dp 2 x tp 3"],
        lambda: Layout(pp=1, dp=2, tp=3).resolve(6),
    ),
    "world with a free axis": (
        lambda: Layout(tp=4, dp=-1).resolve(6),
        ["world size 6", "multiply to 4", "must divide", "pp 1 x dp 2 x tp 3"],
        lambda: Layout(pp=1, dp=2, tp=3).resolve(6),
    ),
    "world with no such layout": (
        lambda: Layout(tp=2, dp=-1).resolve(7, lambda layout: runs(ModelConfig(), layout, TrainConfig())),
        ["world size 7", "Start 2 ranks"],
        lambda: validate(ModelConfig(), Layout(tp=2, dp=-1).resolve(2), TrainConfig()),
    ),
    "two free axes": (lambda: Layout(tp=-1, dp=-1), ["dp=-1 and tp=-1", "at most one"], lambda: Layout(tp=-1, dp=1).resolve(6)),
    "axis size": (lambda: Layout(pp=0), ["pp=0", "positive", "pp=1"], lambda: Layout(pp=1)),
    "cp": (lambda: Layout(cp=2), ["cp=2", "not available", "cp=1"], lambda: Layout(cp=1)),
    "heads": (
        lambda: validate(TEN_HEADS, Layout(tp=4), TRAIN),
        ["heads=10", "tp=4", "tp must divide heads", "[1, 2, 5, 10]"],
        lambda: [validate(TEN_HEADS, Layout(tp=tp), TRAIN) for tp in (1, 2, 5, 10)],
    ),
    "kv heads": (
        lambda: validate(TWELVE_HEADS, Layout(tp=3), TRAIN),
        ["kv_heads=2", "tp=3", "divide the other", "[1, 2, 4, 6, 12]"],
        lambda: [validate(TWELVE_HEADS, Layout(tp=tp), TRAIN) for tp in (1, 2, 4, 6, 12)],
    ),
    "heads, where ffn counts too": (
        lambda: validate(dataclasses.replace(TEN_HEADS, ffn=12), Layout(tp=4), TRAIN),
        ["heads=10", "tp=4", "one of [1, 2]"],
        lambda: [validate(dataclasses.replace(TEN_HEADS, ffn=12), Layout(tp=tp), TRAIN) for tp in (1, 2)],
    ),
    "ffn": (
        lambda: validate(dataclasses.replace(TEN_HEADS, ffn=12), Layout(tp=5), TRAIN),
        ["ffn=12", "tp=5", "tp must divide ffn", "one of [1, 2]"],
        lambda: [validate(dataclasses.replace(TEN_HEADS, ffn=12), Layout(tp=tp), TRAIN) for tp in (1, 2)],
    ),
    "sequence": (
        lambda: validate(ModelConfig(), Layout(tp=2), TrainConfig(seq=7, sequence_parallel=True)),
        ["seq=7", "tp=2", "tp must divide seq", "seq=8", "sequence_parallel=False"],
        lambda: [
            validate(ModelConfig(), Layout(tp=2), TrainConfig(seq=8, sequence_parallel=True)),
            validate(ModelConfig(), Layout(tp=2), TrainConfig(seq=7, sequence_parallel=False)),
        ],
    ),
    "global batch": (
        lambda: validate(ModelConfig(), Layout(dp=4), TrainConfig(global_batch=10)),
        ["global_batch=10", "dp=4", "dp must divide global_batch", "global_batch=12"],
        lambda: validate(ModelConfig(), Layout(dp=4), TrainConfig(global_batch=12)),
    ),
    "layers": (
        lambda: validate(ModelConfig(layers=3), Layout(pp=4), TRAIN),
        ["layers=3", "pp=4", "at least one layer", "pp=3 or less"],
        lambda: [validate(ModelConfig(layers=3), Layout(pp=pp), TRAIN) for pp in (1, 2, 3)],
    ),
    "layers of stages": (
        lambda: validate(ModelConfig(layers=5), Layout(pp=3), TrainConfig(schedule="interleaved", virtual_pp=2)),
        ["layers=5", "pp=3", "virtual_pp=2", "at least one layer", "pp=2 or less"],
        lambda: validate(ModelConfig(layers=5), Layout(pp=2), TrainConfig(schedule="interleaved", virtual_pp=2)),
    ),
    "stages without ranks": (
        lambda: validate(ModelConfig(), Layout(), TrainConfig(schedule="interleaved", virtual_pp=2)),
        ["virtual_pp=2", "pp=1", "need several ranks", "Use pp=2, or schedule='1f1b' with virtual_pp=1"],
        lambda: [
            validate(ModelConfig(), Layout(pp=2), TrainConfig(schedule="interleaved", virtual_pp=2)),
            validate(ModelConfig(), Layout(), TrainConfig(schedule="1f1b", virtual_pp=1)),
        ],
    ),
    "one stage interleaved": (
        lambda: TrainConfig(schedule="interleaved"),
        ["schedule='interleaved', virtual_pp=1", "several stages a rank", "virtual_pp=2"],
        lambda: TrainConfig(schedule="interleaved", virtual_pp=2),
    ),
    "several stages in turn": (
        lambda: TrainConfig(schedule="1f1b", virtual_pp=2),
        ["schedule='1f1b', virtual_pp=2", "the others one", "virtual_pp=1"],
        lambda: TrainConfig(schedule="1f1b", virtual_pp=1),
    ),
    "zero stage": (
        lambda: TrainConfig(zero_stage=4),
        ["zero_stage=4", "one of 0, 1, 2, 3", "default is 1"],
        lambda: TrainConfig(zero_stage=1),
    ),
    "stage 2 with stages in turn": (
        lambda: TrainConfig(zero_stage=2, zero_once_a_step=False, schedule="interleaved", virtual_pp=2),
        ["zero_stage=2, zero_once_a_step=False, schedule='interleaved'", "all that a rank holds at once", "zero_once_a_step=True"],
        lambda: TrainConfig(zero_stage=2, zero_once_a_step=True, schedule="interleaved", virtual_pp=2),
    ),
    "offloaded remainders": (
        lambda: TrainConfig(dtype="bfloat16", optimizer_offload=True, param_remainders=True),
        ["optimizer_offload=True, param_remainders=True", "remainders are of the parameters", "param_remainders=False"],
        lambda: TrainConfig(dtype="bfloat16", optimizer_offload=True),
    ),
    "offloaded float64": (
        lambda: TrainConfig(dtype="float64", optimizer_offload=True),
        ["optimizer_offload=True, dtype='float64'", "only float32 masters", "dtype='float32', or optimizer_offload=False"],
        lambda: TrainConfig(dtype="float32", optimizer_offload=True),
    ),
    "wide wire": (
        lambda: TrainConfig(dtype="bfloat16", accumulate_dtype="bfloat16", reduce_dtype="float32"),
        ["reduce_dtype='float32', accumulate_dtype='bfloat16'", "cannot be wider", "reduce_dtype='bfloat16'"],
        lambda: TrainConfig(dtype="bfloat16", accumulate_dtype="bfloat16", reduce_dtype="bfloat16"),
    ),
    "wide accumulators": (
        lambda: TrainConfig(dtype="bfloat16", accumulate_dtype="float64"),
        ["accumulate_dtype='float64', master weights='float32'", "cannot be wider", "accumulate_dtype='float32'"],
        lambda: TrainConfig(dtype="float64", accumulate_dtype="float64"),
    ),
    "schedule": (
        lambda: TrainConfig(schedule="zigzag"),
        ["schedule='zigzag'", "one of gpipe, 1f1b"],
        lambda: [TrainConfig(schedule="gpipe"), TrainConfig(schedule="1f1b")],
    ),
    "float16": (lambda: TrainConfig(dtype="float16"), ["float16", "loss scaling", "bfloat16"], lambda: TrainConfig(dtype="bfloat16")),
    "dtype in short": (lambda: TrainConfig(dtype="bf16"), ["dtype='bf16'", "Use dtype='bfloat16'"], lambda: TrainConfig(dtype="bfloat16")),
    "dtype of torch": (
        lambda: TrainConfig(dtype=torch.float64),  # type: ignore[arg-type]
        ["dtype=torch.float64", "Use dtype='float64'"],
        lambda: TrainConfig(dtype="float64"),
    ),
    "float16 in short": (lambda: TrainConfig(dtype="fp16"), ["fp16", "loss scaling"], lambda: TrainConfig(dtype="bfloat16")),
    "dtype": (lambda: TrainConfig(dtype="int8"), ["dtype='int8'", "bfloat16", "default is float32"], lambda: TrainConfig(dtype="float32")),
    "reduce dtype": (
        lambda: TrainConfig(reduce_dtype="float16"),
        ["reduce_dtype='float16'", "float32, bfloat16", "default is float32"],
        lambda: TrainConfig(reduce_dtype="bfloat16"),
    ),
    "recompute": (
        lambda: TrainConfig(recompute="some"),
        ["recompute='some'", "none, selective, full"],
        lambda: TrainConfig(recompute="full"),
    ),
    "micro batch": (lambda: TrainConfig(micro_batch=0), ["micro_batch=0", "positive", "micro_batch=1"], lambda: TrainConfig(micro_batch=1)),
    "not whole": (lambda: TrainConfig(seq=1.5), ["seq=1.5", "integer"], lambda: TrainConfig(seq=1)),  # type: ignore[arg-type]
    "lr": (lambda: TrainConfig(lr=math.nan), ["lr=nan", "finite", "lr=0.001"], lambda: TrainConfig(lr=0.001)),
    "weight decay": (lambda: TrainConfig(weight_decay=-1.0), ["weight_decay=-1.0", "at least 0"], lambda: TrainConfig(weight_decay=0.1)),
    "betas": (
        lambda: TrainConfig(betas=(0.9, 1.0)),
        ["betas=(0.9, 1.0)", "below 1", "(0.9, 0.95)"],
        lambda: TrainConfig(betas=(0.9, 0.95)),
    ),
    "max norm": (lambda: TrainConfig(max_norm=0.0), ["max_norm=0.0", "above 0", "max_norm=None"], lambda: TrainConfig(max_norm=None)),
    "head size": (
        lambda: ModelConfig(dim=12, heads=4),
        ["dim=12, heads=4", "even head size", "[1, 2, 3, 6]"],
        lambda: [ModelConfig(dim=12, heads=heads, kv_heads=1) for heads in (1, 2, 3, 6)],
    ),
    "kv heads of the model": (
        lambda: ModelConfig(dim=48, heads=6, kv_heads=4),
        ["heads=6, kv_heads=4", "divide", "[1, 2, 3, 6]"],
        lambda: [ModelConfig(dim=48, heads=6, kv_heads=kv) for kv in (1, 2, 3, 6)],
    ),
    "model name": (lambda: ModelConfig.load("tinny"), ["'tinny'", "tiny, small, 1b, 8b"], lambda: [ModelConfig.load(m) for m in MODELS]),
}


@pytest.mark.parametrize("name", BAD)
def test_refused_with_values_rule_and_a_way_out(name: str) -> None:
    bad, words, way_out = BAD[name]
    with pytest.raises(ConfigError) as caught:
        bad()
    error = caught.value
    assert isinstance(error, ValueError)
    assert str(error) == f"{error.given}: {error.rule}. {error.instead}"
    for word in words:
        assert word in str(error)
    assert not dist.is_initialized()
    way_out()


def test_a_mesh_that_does_not_fit_is_refused_before_any_process_is_met(monkeypatch: pytest.MonkeyPatch) -> None:
    """With an address that nobody listens on: meeting would fail otherwise than this."""
    for name, value in {"WORLD_SIZE": "6", "RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=r"world size 6 with pp 1 x dp -1 x tp 4: .* fits"):
        init_mesh(tp=4, device="cpu")
    assert not dist.is_initialized()


SIZES = st.integers(1, 12)


@given(world=st.integers(1, 64), pp=SIZES, dp=st.sampled_from([-1, 1, 2, 3, 4]), tp=SIZES)
@settings(max_examples=200, deadline=None)
def test_a_layout_multiplies_to_the_world_or_names_one_that_does(world: int, pp: int, dp: int, tp: int) -> None:
    try:
        layout = Layout(pp=pp, dp=dp, tp=tp).resolve(world)
    except ConfigError as error:
        assert pp * tp * abs(dp) != world
        words = error.instead.removesuffix(" fits").split()
        named = {axis: int(words[words.index(axis) + 1]) for axis in AXES if axis in words}
        assert Layout(**named).resolve(world).world == world
        assert named["tp"] == max(d for d in divisors(world) if d <= tp)
    else:
        assert layout.world == world and (layout.pp, layout.tp) == (pp, tp) and dp in (-1, layout.dp)


@given(
    heads=st.integers(1, 12),
    kv=st.integers(1, 12),
    ffn=st.integers(1, 24),
    layers=st.integers(1, 6),
    tp=SIZES,
    pp=st.integers(1, 8),
    dp=st.integers(1, 6),
    seq=st.integers(1, 12),
    batch=st.integers(1, 12),
    sequence_parallel=st.booleans(),
)
@settings(max_examples=200, deadline=None)
def test_what_is_not_refused_can_be_cut(
    heads: int, kv: int, ffn: int, layers: int, tp: int, pp: int, dp: int, seq: int, batch: int, sequence_parallel: bool
) -> None:
    if heads % kv:
        kv = heads
    model = ModelConfig(dim=2 * heads, heads=heads, kv_heads=kv, ffn=ffn, layers=layers)
    fits = (heads % tp, ffn % tp, min(kv % tp, tp % kv), batch % dp) == (0,) * 4 and layers >= pp and not (sequence_parallel and seq % tp)
    train = TrainConfig(seq=seq, global_batch=batch, sequence_parallel=sequence_parallel)
    if fits:
        validate(model, Layout(tp=tp, pp=pp, dp=dp), train)
    else:
        with pytest.raises(ConfigError):
            validate(model, Layout(tp=tp, pp=pp, dp=dp), train)


def test_models_come_from_files(tmp_path: Path) -> None:
    file = tmp_path / "model.json"
    file.write_text(json.dumps({"dim": 64, "heads": 2, "kv_heads": 1}))
    assert ModelConfig.load(str(file)) == ModelConfig(dim=64, heads=2, kv_heads=1)
    for text, words in (
        ("{", "not readable as JSON"),
        ("[1]", "with [1]: it must be an object. It may hold"),
        ('{"dims": 64}', "['dims']: unknown fields. It may hold"),
    ):
        file.write_text(text)
        with pytest.raises(ConfigError) as caught:
            ModelConfig.load(str(file))
        assert words in str(caught.value) and str(file) in str(caught.value)
        file.write_text(caught.value.instead.removeprefix("It may hold "))
        assert ModelConfig.load(str(file)) == ModelConfig()
    file.write_text('{"dim": "big"}')
    with pytest.raises(
        ConfigError, match=re.escape(f"model file {str(file)!r} with dim='big': dim must be a positive integer. Try dim=1 or more")
    ):
        ModelConfig.load(str(file))


@pytest.mark.parametrize("world", [None, 0, -1, 2.0])
def test_a_world_is_a_positive_number(world: object) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"world={world!r}: world must be a positive integer. Try world=1 or more")):
        Layout(dp=-1).resolve(world)  # type: ignore[arg-type]


def test_a_model_is_a_name() -> None:
    with pytest.raises(ConfigError, match=r"model=None: it must be a name or a file\. Use one of tiny, small"):
        ModelConfig.load(None)  # type: ignore[arg-type]


def test_divisors() -> None:
    assert [divisors(n) for n in (1, 7, 12)] == [[1], [1, 7], [1, 2, 3, 4, 6, 12]]


@pytest.mark.parametrize(
    ("record", "fields", "text"),
    [
        (ModelConfig, {"tied": "no"}, "tied='no': tied must be true or false"),
        (ModelConfig, {"norm_eps": -1.0}, "norm_eps=-1.0: norm_eps must be a finite number above 0. The default is norm_eps=1e-05"),
        (ModelConfig, {"rope_theta": math.inf}, "rope_theta=inf: rope_theta must be a finite number above 0"),
        (TrainConfig, {"seed": -1}, "seed=-1: a seed must be an integer from 0 to 2**64 - 1. Use seed=0"),
        (TrainConfig, {"seed": 2**64}, "seed=18446744073709551616: a seed must be"),
        (TrainConfig, {"seed": True}, "seed=True: a seed must be"),
        (TrainConfig, {"lr": "1e-3"}, "lr='1e-3': lr must be a finite number of at least 0. The default is lr=0.001"),
        (TrainConfig, {"weight_decay": None}, "weight_decay=None: weight_decay must be a finite number of at least 0"),
        (TrainConfig, {"dropout": 1.0}, "dropout=1.0: it must be 0, or a number from 2**-16 to 1 - 2**-16. Use dropout=0.1"),
        (TrainConfig, {"dropout": float("nan")}, "dropout=nan: it must be 0, or"),
        (TrainConfig, {"dropout": -0.1}, "dropout=-0.1: it must be 0, or"),
        (TrainConfig, {"dropout": True}, "dropout=True: it must be 0, or"),
        (TrainConfig, {"schedule": "zb-h1", "compile": True}, "schedule='zb-h1', compile=True: a compiled layer computes"),
        (TrainConfig, {"recompute": "selective", "compile": True}, "recompute='selective', compile=True: the compiler decides itself"),
        (TrainConfig, {"eps": True}, "eps=True: eps must be a finite number of at least 0"),
        (TrainConfig, {"betas": None}, "betas=None: betas must be two numbers"),
        (TrainConfig, {"betas": (0.9, "x")}, "betas=(0.9, 'x'): betas must be two numbers"),
        (TrainConfig, {"max_norm": math.inf}, "max_norm=inf: max_norm must be a finite number above 0"),
        (TrainConfig, {"max_norm": "1"}, "max_norm='1': max_norm must be a finite number above 0"),
        (TrainConfig, {"sequence_parallel": 1}, "sequence_parallel=1: sequence_parallel must be true or false"),
        (TrainConfig, {"compile": None}, "compile=None: compile must be true or false"),
        (ModelConfig, {"dim": 10**30}, "dim=1000000000000000000000000000000: dim must be below 2**48"),
        (TrainConfig, {"steps": 10**320}, "steps=1000"),
        (TrainConfig, {"zero_stage": 1.0}, "zero_stage=1.0: zero_stage must be one of 0, 1, 2, 3"),
        (TrainConfig, {"zero_stage": True}, "zero_stage=True: zero_stage must be one of 0, 1, 2, 3"),
    ],
)
def test_single_values(record: type, fields: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError, match="^" + re.escape(text)):
        record(**fields)


@given(st.integers(1, 9), st.integers(2, 6), st.integers(1, 5))
def test_what_is_said_of_too_few_layers_works(layers: int, pp: int, virtual: int) -> None:
    model, train = ModelConfig(layers=layers), TrainConfig(schedule="interleaved" if virtual > 1 else "1f1b", virtual_pp=virtual)
    try:
        validate(model, Layout(pp=pp), train)
    except ConfigError as error:
        told = dict(re.findall(r"(\w+)='?(\w+)'?", error.instead))
        train = TrainConfig(schedule=told.get("schedule", train.schedule), virtual_pp=int(told.get("virtual_pp", virtual)))
        validate(model, Layout(pp=int(told.get("pp", pp))), train)
    else:
        assert layers >= pp * virtual

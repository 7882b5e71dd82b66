"""What a run consists of: frozen, keyword-only records, checked once when they are made and never changed afterwards."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pymesh3d.errors import ConfigError

AXES = ("pp", "dp", "cp", "tp")  # outer to inner: neighbouring ranks share a tp group


def divisors(n: int) -> list[int]:
    """All positive divisors of `n`, ascending."""
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return small + [n // d for d in reversed(small) if d * d != n]


def require_positive(name: str, value: object) -> None:
    """Refuse anything but an integer of at least 1 (and below 2^48: more is a slip of the pen). Raises ConfigError."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{name}={value!r}", f"{name} must be a positive integer", f"Try {name}=1 or more")
    if value >= 2**48:
        raise ConfigError(f"{name}={value}", f"{name} must be below 2**48, more than any machine holds", f"Try {name}=1 or more")


def require_number(name: str, value: object, *, default: object, above_zero: bool = False) -> None:
    """Refuse anything but a finite number of at least 0, or above 0. Raises ConfigError."""
    number = value if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    if not 0 <= number < math.inf or (above_zero and number == 0):
        rule = f"{name} must be a finite number {'above' if above_zero else 'of at least'} 0"
        raise ConfigError(f"{name}={value!r}", rule, f"The default is {name}={default}")


def require_timeout(name: str, value: object) -> None:
    """Refuse anything but a number of seconds above 0 and of at most a day. Raises ConfigError."""
    if not isinstance(value, int | float) or not 0 < value <= 86_400:
        raise ConfigError(f"{name}={value!r}", "it must be above 0 s and at most a day, 86400 s", f"The default is {name}=300")


def require_flag(name: str, value: object) -> None:
    """Refuse anything but True and False. Raises ConfigError."""
    if not isinstance(value, bool):
        raise ConfigError(f"{name}={value!r}", f"{name} must be true or false", f"Use {name}=False")


def require_virtual(schedule: str, virtual_pp: int, pp: int | None = None) -> None:
    """Refuse numbers of stages a rank that `schedule` is not for, or that `pp` ranks, if that is known, cannot have. Raises ConfigError."""
    if (virtual_pp > 1) != (schedule == "interleaved"):
        raise ConfigError(
            f"schedule={schedule!r}, virtual_pp={virtual_pp}",
            "the interleaved schedule has several stages a rank, the others one",
            "Use schedule='interleaved' with virtual_pp=2, or schedule='1f1b' with virtual_pp=1",
        )
    if virtual_pp > 1 and pp == 1:
        instead = "Use pp=2, or schedule='1f1b' with virtual_pp=1"  # not virtual_pp=1 alone, which is refused above
        raise ConfigError(f"virtual_pp={virtual_pp}, pp=1", "several stages a rank need several ranks", instead)


def require_seed(value: object) -> None:
    """Refuse anything but an integer of 64 bits without sign. Raises ConfigError."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**64:
        raise ConfigError(f"seed={value!r}", "a seed must be an integer from 0 to 2**64 - 1", "Use seed=0")


def _default(record: Any, name: str) -> object:
    return getattr(type(record), name)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """Sizes of the mesh axes; their product is the world size. One of them may be -1 until `resolve` is called."""

    pp: int = 1
    dp: int = 1
    cp: int = 1
    tp: int = 1

    def __post_init__(self) -> None:
        free = [axis for axis in AXES if getattr(self, axis) == -1]
        if len(free) > 1:
            raise ConfigError(f"{'=-1 and '.join(free)}=-1", "at most one axis can be left open", "Give all but one a size")
        for axis in AXES:
            if axis not in free:
                require_positive(axis, getattr(self, axis))
        if self.cp != 1:
            raise ConfigError(f"cp={self.cp}", "context parallelism is not available yet", "Use cp=1 and a larger tp or dp")

    @property
    def sizes(self) -> tuple[int, ...]:
        """Axis sizes in the order of `AXES`."""
        return tuple(getattr(self, axis) for axis in AXES)

    @property
    def world(self) -> int:
        """The number of ranks."""
        return math.prod(self.sizes)

    def resolve(self, world: int, fits: Callable[[Layout], bool] = lambda _: True) -> Layout:
        """The same layout with -1 replaced, checked against `world` ranks. `fits`: what the error may suggest. Raises ConfigError."""
        require_positive("world", world)
        fixed = math.prod(size for size in self.sizes if size != -1)
        free = [axis for axis in AXES if getattr(self, axis) == -1]
        if world % fixed or (not free and fixed != world):
            raise ConfigError(
                f"world size {world} with {self}",
                f"the axes multiply to {fixed}, which must {'divide' if free else 'equal'} the world size",
                f"With {world} ranks {other} fits" if (other := self._alternative(world, fits)) else f"Start {fixed} ranks",
            )
        return dataclasses.replace(self, **{free[0]: world // fixed}) if free else self

    def _alternative(self, world: int, fits: Callable[[Layout], bool]) -> Layout | None:
        """The nearest layout of `world` ranks that fits: tp like the one asked for, rather less than more, then pp, the rest dp."""
        tp, pp = max(self.tp, 1), max(self.pp, 1)
        layouts = [Layout(tp=t, pp=p, dp=world // t // p) for t in divisors(world) for p in divisors(world // t)]
        layouts.sort(key=lambda one: (one.tp > tp, abs(one.tp - tp), one.pp > pp, abs(one.pp - pp)))
        return next(filter(fits, layouts), None)

    def __str__(self) -> str:
        return " x ".join(f"{axis} {getattr(self, axis)}" for axis in AXES if axis != "cp" or self.cp != 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A Llama-like model: RMSNorm, rotary embedding, grouped-query attention, SwiGLU."""

    vocab: int = 256
    dim: int = 128
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    ffn: int = 384
    tied: bool = False
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        for name in ("vocab", "dim", "layers", "heads", "kv_heads", "ffn"):
            require_positive(name, getattr(self, name))
        for name in ("rope_theta", "norm_eps"):
            require_number(name, getattr(self, name), default=_default(self, name), above_zero=True)
        require_flag("tied", self.tied)
        if self.dim % self.heads or (self.dim // self.heads) % 2:
            valid = [h for h in divisors(self.dim) if (self.dim // h) % 2 == 0]
            raise ConfigError(
                f"dim={self.dim}, heads={self.heads}",
                "dim must be heads times an even head size (rotary embedding turns pairs)",
                f"For dim={self.dim} heads can be one of {valid}",
            )
        if self.heads % self.kv_heads:
            raise ConfigError(
                f"heads={self.heads}, kv_heads={self.kv_heads}",
                "kv_heads must divide heads",
                f"For heads={self.heads} kv_heads can be one of {divisors(self.heads)}",
            )

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.dim // self.heads

    @staticmethod
    def load(name_or_file: str) -> ModelConfig:
        """A model by its name in `MODELS`, or from a JSON file that holds fields of this record."""
        if name_or_file in MODELS:
            return MODELS[name_or_file]
        if not isinstance(name_or_file, str):
            raise ConfigError(f"model={name_or_file!r}", "it must be a name or a file", f"Use one of {', '.join(MODELS)}")
        path = Path(name_or_file)
        try:
            fields: Any = json.loads(path.read_text())
        except FileNotFoundError as error:
            instead = f"Use one of {', '.join(MODELS)}, or a JSON file such as {EXAMPLE}"
            raise ConfigError(f"model={name_or_file!r}", "neither a known name nor a file that exists", instead) from error
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigError(f"model file {str(path)!r}", f"not readable as JSON ({error})", f"It may hold {EXAMPLE}") from error
        known = {field.name for field in dataclasses.fields(ModelConfig)}
        if not isinstance(fields, dict):
            raise ConfigError(f"model file {str(path)!r} with {fields!r}", "it must be an object", f"It may hold {EXAMPLE}")
        if extra := sorted(set(fields) - known):
            raise ConfigError(f"model file {str(path)!r} with {extra!r}", "unknown fields", f"It may hold {EXAMPLE}")
        try:
            return ModelConfig(**fields)
        except ConfigError as error:
            raise ConfigError(f"model file {str(path)!r} with {error.given}", error.rule, error.instead) from error


EXAMPLE = json.dumps({field.name: field.default for field in dataclasses.fields(ModelConfig)})


MODELS = {
    "tiny": ModelConfig(),
    "small": ModelConfig(dim=256, layers=8, heads=8, kv_heads=4, ffn=768),
    # The two models of the benchmarks (1,107,363,840 and 7,248,023,552 parameters).
    "1b": ModelConfig(vocab=32768, dim=2048, layers=16, heads=32, kv_heads=8, ffn=8192, rope_theta=500_000.0),
    "8b": ModelConfig(vocab=32768, dim=4096, layers=32, heads=32, kv_heads=8, ffn=14336, rope_theta=500_000.0),
}

DTYPES = ("float32", "bfloat16", "float64")
SHORT_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp64": "float64", "fp16": "float16"}
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1")
RECOMPUTE = ("none", "selective", "full")


def is_dropout_rate(p: object) -> bool:
    """Whether `p` is a share of elements that can be dropped: 0, or a number from 2^-16 to 1 - 2^-16, as masks have 16 bits an element."""
    return isinstance(p, int | float) and not isinstance(p, bool) and (p == 0 or 2.0**-16 <= p <= 1 - 2.0**-16)


def full_dtype(dtype: object) -> str:
    """The name of a dtype that is given as torch's own, in short, or in other letters: `bfloat16` for "bf16"."""
    name = str(dtype).removeprefix("torch.").lower()
    return SHORT_DTYPES.get(name, name)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How a model is trained on a layout: everything but the model, the mesh and the data. Raises ConfigError.

    `seq`: tokens in a sequence. `global_batch`: sequences of a step, over all ranks; `micro_batch`: those that a rank computes at once.
    `steps`: how many `pymesh3d train` takes. `schedule`, one of `SCHEDULES`: the order of the pipeline's forwards and backwards.
    `virtual_pp`: stages of a pipeline rank ("interleaved" needs two or more). `zero_stage` 0: each dp rank holds all of the optimizer's
    state, 1: each a share, 2: of the summed gradients too, 3: of the parameters of layers too. `zero_once_a_step`: whether stages 2 and 3
    sum gradients and gather parameters once a step, which takes the memory for them meanwhile, and not with every microbatch (None: where
    there is a pipeline).
    `sequence_parallel`: between the matrix products each tp rank holds the activations of a part of the sequence.
    `recompute` "full": keep only the input of each layer, and compute it again in backward; "selective": keep what comes out of matrix
    products and attention, and compute the rest again. `compile`: compile each layer. `dropout`: the share of the embeddings, and of what
    attention and feed-forward add, that is zeroed at random. `lr`, `weight_decay` (of matrices only), `betas`, `eps`: AdamW's. `max_norm`:
    what the gradient norm is clipped to (None: never). `dtype`, one of `DTYPES`: of parameters and activations; master weights are float32
    at least. `accumulate_dtype`: of the gradients that microbatches add up (None: as master weights).
    `param_remainders`: keep of the masters of bfloat16 parameters only the 16 bits that these lack. `optimizer_offload`: keep masters and
    optimizer state in the CPU's memory, from where each step takes them through the GPU. `reduce_dtype`: what gradients are rounded to when
    dp ranks exchange them (None: `dtype`). `seed`: of initial weights, order of the data, and dropout. `vocab_multiple`: the vocabulary is
    padded to a multiple of tp times this.
    """

    seq: int = 128
    global_batch: int = 16
    micro_batch: int = 2
    steps: int = 200
    schedule: str = "1f1b"
    virtual_pp: int = 1
    zero_stage: int = 1
    zero_once_a_step: bool | None = None
    sequence_parallel: bool = False
    recompute: str = "none"
    compile: bool = False
    dropout: float = 0.0
    lr: float = 1e-3
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    max_norm: float | None = 1.0
    dtype: str = "float32"
    accumulate_dtype: str | None = None
    param_remainders: bool = False
    optimizer_offload: bool = False
    reduce_dtype: str | None = None
    seed: int = 0
    vocab_multiple: int = 128

    def __post_init__(self) -> None:
        for name in ("seq", "global_batch", "micro_batch", "steps", "vocab_multiple", "virtual_pp"):
            require_positive(name, getattr(self, name))
        self._one_of("schedule", SCHEDULES)
        require_virtual(self.schedule, self.virtual_pp)
        self._one_of("zero_stage", (0, 1, 2, 3))
        self._one_of("recompute", RECOMPUTE)
        if full_dtype(self.dtype) == "float16":
            rule = "fp16 needs loss scaling, which this package leaves out"
            raise ConfigError(f"dtype={self.dtype!r}", rule, "Use dtype='bfloat16': same size, no scaling")
        self._one_of("dtype", DTYPES)
        self._check_gradient_dtypes()
        for name in ("sequence_parallel", "compile", "param_remainders", "optimizer_offload"):
            require_flag(name, getattr(self, name))
        if self.zero_once_a_step is not None:
            require_flag("zero_once_a_step", self.zero_once_a_step)
        self._check_masters()
        self._check_passes()
        if self.compile and self.recompute == "selective":
            rule = "the compiler decides itself what a layer keeps"
            raise ConfigError("recompute='selective', compile=True", rule, "Use recompute='full', or compile=False")
        if self.compile and self.schedule == "zb-h1":
            rule = "a compiled layer computes the gradients of inputs and weights together, which this schedule takes apart"
            raise ConfigError("schedule='zb-h1', compile=True", rule, "Use schedule='1f1b', or compile=False")
        for name in ("lr", "weight_decay", "eps"):
            require_number(name, getattr(self, name), default=_default(self, name))
        if not is_dropout_rate(self.dropout):
            raise ConfigError(f"dropout={self.dropout!r}", "it must be 0, or a number from 2**-16 to 1 - 2**-16", "Use dropout=0.1")
        pair = isinstance(self.betas, tuple | list) and len(self.betas) == 2
        if not pair or not all(isinstance(beta, int | float) and 0.0 <= beta < 1.0 for beta in self.betas):
            raise ConfigError(f"betas={self.betas!r}", "betas must be two numbers from 0 to below 1", "The default is betas=(0.9, 0.95)")
        require_seed(self.seed)
        if self.max_norm is not None:
            require_number("max_norm", self.max_norm, default="1.0, and max_norm=None switches clipping off", above_zero=True)

    def _check_gradient_dtypes(self) -> None:
        masters = "float64" if self.dtype == "float64" else "float32"
        for name in ("accumulate_dtype", "reduce_dtype"):
            if getattr(self, name) is not None:
                self._one_of(name, DTYPES, default=self.dtype)
        widths = {"bfloat16": 2, "float32": 4, "float64": 8}
        for name, given, limit_name, limit in (
            ("accumulate_dtype", self.accumulate_dtype, "master weights", masters),
            ("reduce_dtype", self.reduce_dtype or self.dtype, "accumulate_dtype", self.accumulate_dtype or masters),
        ):
            if given is not None and widths[given] > widths[limit]:
                raise ConfigError(
                    f"{name}={given!r}, {limit_name}={limit!r}",
                    f"{name} cannot be wider than {limit_name}",
                    f"Use {name}={limit!r}",
                )

    def _check_masters(self) -> None:
        if self.param_remainders and self.dtype != "bfloat16":
            rule = "only bfloat16 parameters lack the 16 bits that are kept for them"
            raise ConfigError(f"param_remainders=True, dtype={self.dtype!r}", rule, "Use dtype='bfloat16', or param_remainders=False")
        if self.optimizer_offload and self.param_remainders:
            rule = "remainders are of the parameters, on the GPU"
            raise ConfigError("optimizer_offload=True, param_remainders=True", rule, "Use param_remainders=False")
        if self.optimizer_offload and self.dtype == "float64":
            rule = "only float32 masters are taken through the GPU in pieces"
            raise ConfigError("optimizer_offload=True, dtype='float64'", rule, "Use dtype='float32', or optimizer_offload=False")

    def _check_passes(self) -> None:
        """Refuse to sum gradients with every microbatch where a backward pass does not go through the whole rank."""
        if self.zero_stage >= 2 and self.zero_once_a_step is False and (self.virtual_pp > 1 or self.schedule == "zb-h1"):
            raise ConfigError(
                f"zero_stage={self.zero_stage}, zero_once_a_step=False, schedule={self.schedule!r}",
                "gradients can be summed with every microbatch only where its backward pass goes through all that a rank holds at once",
                "Use zero_once_a_step=True, or schedule='1f1b'",
            )

    def _one_of(self, name: str, allowed: tuple[Any, ...], default: Any = None) -> None:
        value = getattr(self, name)
        if (type(value), value) not in [(type(one), one) for one in allowed]:
            meant = full_dtype(value)
            raise ConfigError(
                f"{name}={value!r}",
                f"{name} must be one of {', '.join(map(str, allowed))}",
                f"Use {name}={meant!r}" if meant in allowed else f"The default is {default or _default(self, name)}",
            )


def validate(model: ModelConfig, layout: Layout, train: TrainConfig) -> None:
    """Refuse a combination that cannot run, before any process starts or talks to another.

    Raises ConfigError.
    """
    tp, pp, dp = layout.tp, layout.pp, layout.dp
    heads_ok = [t for t in divisors(model.heads) if t % model.kv_heads == 0 or model.kv_heads % t == 0]
    fits = f"For this model tp can be one of {[t for t in heads_ok if model.ffn % t == 0]}"
    if tp not in heads_ok:
        raise ConfigError(
            f"heads={model.heads}, kv_heads={model.kv_heads}, tp={tp}",
            "tp must divide heads, and one of tp and kv_heads must divide the other",
            fits,
        )
    if model.ffn % tp:
        raise ConfigError(f"ffn={model.ffn}, tp={tp}", "tp must divide ffn", fits)
    if train.sequence_parallel and train.seq % tp:
        raise ConfigError(
            f"seq={train.seq}, tp={tp}, sequence_parallel=True",
            "tp must divide seq, because each tp rank holds an equal part of the sequence",
            f"Use seq={math.ceil(train.seq / tp) * tp}, or sequence_parallel=False",
        )
    require_virtual(train.schedule, train.virtual_pp, pp)
    if model.layers < pp * train.virtual_pp:
        given = f"layers={model.layers}, pp={pp}" + (f", virtual_pp={train.virtual_pp}" if train.virtual_pp > 1 else "")
        raise ConfigError(given, "each stage needs at least one layer", _fewer_stages(model.layers, pp, train.virtual_pp))
    if train.global_batch % dp:
        rounded = math.ceil(train.global_batch / dp) * dp
        raise ConfigError(
            f"global_batch={train.global_batch}, dp={dp}",
            "dp must divide global_batch, so that no dp rank has more to do",
            f"Use global_batch={rounded}",
        )


def _fewer_stages(layers: int, pp: int, virtual_pp: int) -> str:
    """What to do about too few layers; several stages a rank need two ranks."""
    if virtual_pp == 1 or layers // virtual_pp > 1:
        return f"Use pp={layers // virtual_pp} or less"
    if layers // pp > 1:
        return f"Use virtual_pp={layers // pp} or less"
    return f"Use schedule='1f1b' with virtual_pp=1 and pp={min(pp, layers)}"


def runs(model: ModelConfig, layout: Layout, train: TrainConfig) -> bool:
    """Whether a combination can run."""
    try:
        validate(model, layout, train)
    except ConfigError:
        return False
    return True

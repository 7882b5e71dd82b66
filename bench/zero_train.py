"""Trains a model by ZeRO's stages and by torch's FSDP2, by turns in one process a rank: how fast each is, and what it keeps in memory.

All begin with the same weights and take the same batches; they compute in bfloat16 (float32 on the CPU), clip gradients to one norm, and
update float32 weights by AdamW. A stage is compared with the fastest of those settings of FSDP2 that keep no more whole than it and add up
microbatches as precisely, in float32.

Memory is what is in use after a step, above what there was before a case was built, so without activations; `table` is what it must be by
the README's table, with the bucket that is lent to backward passes. What stage 3 gathers is gone by then and stands apart.

How much of the sum over ranks stage 1 hides under backward: of the time from the end of backward to that of the sum where this begins
then, the share that is gone where the sum goes on beside backward. It is not free there: it takes memory, and power. By how much a step is
longer than one without any sum stands beside it.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from rich.progress import track
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from ..comm.agree import exchange_numbers
from ..comm.collectives import all_reduce_
from ..comm.watch import on_host
from ..config import ModelConfig, TrainConfig
from ..dp.norm import clip_factor
from ..dp.zero import BUCKET_ELEMENTS, decays
from ..engine import DTYPES, IGNORE_INDEX, parallelize
from ..errors import ConfigError
from ..initial import materialize
from ..launch import launch
from ..mesh import Mesh, init_mesh
from ..models.llama import Llama, initialize_
from ..planner.model import layer_parameters, parameters
from ..tp.loss import vocab_parallel_cross_entropy
from . import report
from .timing import barrier, wall_seconds

WARM = 2  # steps of each case before the first turn
ROUNDS, STEPS = {"cuda": 4, "cpu": 1}, {"cuda": 4, "cpu": 1}  # turns of each case, and timed steps of a turn, after one that is not
SEQUENCES, MICRO_BATCH = 8, 2  # of a rank in a step, and at once
LENGTH = {"cuda": 4096, "cpu": 32}
COMPILATIONS = 64  # of the same layer, at most: each case needs some of its own
GIB = 2**30
COLUMNS = {
    "case": ("", ""),
    "tokens_per_s": ("tokens/s\na GPU", ",.0f"),
    "step_ms": ("ms\na step", ",.1f"),
    "against": ("compared with", ""),
    "speed": ("speed,\nthat = 1", ".3f"),
    "state_gib": ("GiB\nkept", ".2f"),
    "table_gib": ("GiB by\nthe table", ".2f"),
    "of_table": ("kept,\ntable = 1", ".3f"),
    "gathered_gib": ("GiB gathered\nin passes", ".2f"),
    "peak_gib": ("GiB\nat most", ".2f"),
    "beside_ms": ("ms, summed\nin backward", ",.1f"),
    "after_ms": ("ms, summed\nafter it", ",.1f"),
    "sum_ms": ("ms of sum\nafter it", ",.2f"),
    "left_ms": ("ms left\nafter it", ",.2f"),
    "hidden": ("hidden", ".0%"),
    "longer_ms": ("ms longer\nby the sum", ",.2f"),
}


class Fsdp(NamedTuple):
    """A setting of FSDP2: parameters are given back after forward, or kept until the step; gradients are summed over ranks with `each`
    microbatch, and added up in float32, or with the last one, and added up and sent in `reduce`."""

    reshard: bool
    each: bool
    reduce: torch.dtype = torch.bfloat16


STAGES = {f"stage{stage}": stage for stage in range(4)}
SETTINGS = {
    "fsdp-resharded": Fsdp(reshard=True, each=True),
    "fsdp-each": Fsdp(reshard=False, each=True),
    "fsdp-last-float32": Fsdp(reshard=False, each=False, reduce=torch.float32),
    "fsdp-last-bfloat16": Fsdp(reshard=False, each=False),
}
CASES = {  # what `--cases` calls them, and tables
    **{name: f"ZeRO {stage}" for name, stage in STAGES.items()},
    "fsdp-resharded": "FSDP2, resharded",
    "fsdp-each": "FSDP2, summed each microbatch",
    "fsdp-last-float32": "FSDP2, summed once in float32",
    "fsdp-last-bfloat16": "FSDP2, summed once in bfloat16",
}
COMPARABLE = {
    "stage0": ("fsdp-last-float32", "fsdp-each", "fsdp-resharded"),
    "stage1": ("fsdp-last-float32", "fsdp-each", "fsdp-resharded"),
    "stage2": ("fsdp-each", "fsdp-resharded"),
    "stage3": ("fsdp-resharded",),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """What is trained, and this rank's share of each batch: token ids and targets [B, S]."""

    mesh: Mesh
    model: ModelConfig
    train: TrainConfig
    batch: tuple[torch.Tensor, torch.Tensor]

    @classmethod
    def of(cls, mesh: Mesh, model: ModelConfig, *, compiled: bool) -> Job:
        """With random tokens."""
        kind, ranks = mesh.device.type, mesh.dp.size
        generator = torch.Generator().manual_seed(mesh.dp.rank)
        ids = torch.randint(model.vocab, (SEQUENCES, LENGTH[kind] + 1), generator=generator).to(mesh.device)
        train = TrainConfig(
            seq=LENGTH[kind],
            global_batch=SEQUENCES * ranks,
            micro_batch=MICRO_BATCH,
            dtype="bfloat16" if kind == "cuda" else "float32",
            compile=compiled,
        )
        return cls(mesh=mesh, model=model, train=train, batch=(ids[:, :-1].contiguous(), ids[:, 1:].contiguous()))

    def passes(self, model: Llama, divisor: int, around: Callable[[bool], AbstractContextManager[object]]) -> torch.Tensor:
        """Forward and backward of all microbatches. What `around` gives goes round each backward; it is told whether that is the last.

        The sum of all losses, divided by `divisor`.
        """
        parts = [part.split(self.train.micro_batch) for part in self.batch]
        total = torch.zeros((), device=self.mesh.device)
        for number, (ids, targets) in enumerate(zip(*parts, strict=True), 1):
            rows, labels = model(ids).transpose(0, 1).flatten(0, 1), targets.t().reshape(-1)
            summed = vocab_parallel_cross_entropy(rows, labels, IGNORE_INDEX, reduction="sum", mesh=self.mesh, vocab=self.model.vocab)
            loss = summed / divisor
            with around(number == len(parts[0])):
                loss.backward()
            total += loss.detach()
        return total


class Ours:
    """A stage of ZeRO."""

    def __init__(self, job: Job, stage: int) -> None:
        self.job = job
        self.engine = parallelize(Llama(job.model, device="meta"), job.mesh, dataclasses.replace(job.train, zero_stage=stage))

    def step(self) -> float:
        """Its loss."""
        return self.engine.train_step(self.job.batch).loss

    def step_in_parts(self, *, beside: bool) -> float:
        """One in which ranks sum gradients `beside` the last backward pass, or after it; ms from backward's end to that of the sums."""
        zero, mesh, train = self.engine.zero, self.job.mesh, self.job.train
        assert train.max_norm is not None, "all cases clip"
        own = list(self.engine.model.parameters())
        divisor = self.job.batch[0].numel() * mesh.dp.size
        loss = self.job.passes(self.engine.model, divisor, lambda last: zero.last_pass(own) if last and beside else nullcontext())
        began = _stamp(mesh)
        zero.reduce()
        ended = _stamp(mesh)
        norm = zero.norm()
        zero.update(clip_factor(norm, train.max_norm))
        on_host(norm, "gradient norm", mesh.all)
        on_host(all_reduce_(loss, mesh.dp).wait(), "loss", mesh.all)
        return (ended - began) * 1e3 if isinstance(began, float) else began.elapsed_time(ended)


class Theirs:
    """A setting of FSDP2."""

    def __init__(self, job: Job, setting: Fsdp) -> None:
        self.job, self.setting = job, setting
        train, on_gpu = job.train, job.mesh.device.type == "cuda"
        self.model = Llama(job.model, device="meta")
        materialize(self.model, job.mesh.device)
        initialize_(self.model, train.seed)
        dtypes = {"param_dtype": DTYPES[train.dtype], "reduce_dtype": setting.reduce} if on_gpu else {}
        options: dict[str, Any] = {"mesh": job.mesh["dp"], "mp_policy": MixedPrecisionPolicy(**dtypes, cast_forward_inputs=False)}
        for layer in self.model.layers.values():
            if train.compile:
                layer.forward = torch.compile(layer.forward)
            fully_shard(layer, **options, reshard_after_forward=setting.reshard)
        fully_shard(self.model, **options, reshard_after_forward=False)  # backward begins with what it holds
        groups = [
            {"params": [p for p in self.model.parameters() if decays(p) == decayed], "weight_decay": train.weight_decay * decayed}
            for decayed in (True, False)
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=train.lr, betas=train.betas, eps=train.eps, fused=on_gpu)

    def step(self) -> float:
        """Its loss."""
        mesh, train = self.job.mesh, self.job.train
        assert train.max_norm is not None, "all cases clip"
        # FSDP2 takes the mean over ranks, so each divides by its own tokens.
        loss = self.job.passes(self.model, self.job.batch[0].numel(), self._before_backward)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), train.max_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float(on_host(all_reduce_(loss, mesh.dp).wait(), "loss", mesh.all)) / mesh.dp.size

    def _before_backward(self, last: bool) -> AbstractContextManager[None]:
        model: Any = self.model  # which `fully_shard` has given these
        model.set_is_last_backward(last)
        if not self.setting.each:
            model.set_requires_gradient_sync(last)
        if not self.setting.reshard:
            model.set_reshard_after_backward(last)
        return nullcontext()


def _stamp(mesh: Mesh) -> Any:
    """The moment at which the device comes here: an event, or seconds."""
    if mesh.device.type == "cpu":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def table_bytes(stage: int, model: ModelConfig, ranks: int) -> float:
    """What a rank keeps of a model in bfloat16 by the README's table, with the largest bucket of what stages 2 and 3 lend to backward
    passes, in bfloat16: one of `BUCKET_ELEMENTS`, or of a larger matrix."""
    every = parameters(model)
    in_layers = model.layers * layer_parameters(model) if stage == 3 else 0
    outside = every - in_layers
    bucket = 2 * max(min(BUCKET_ELEMENTS, every), model.vocab * model.dim)
    if stage == 0:
        return 18 * every
    if stage == 1:
        return 6 * every + 12 * every / ranks
    return 18 * in_layers / ranks + 2 * outside + 16 * outside / ranks + bucket


def gathered_bytes(stage: int, model: ModelConfig) -> int:
    """What stage 3 holds besides during passes: one layer in bfloat16, and the next."""
    return 2 * 2 * layer_parameters(model) if stage == 3 else 0


def in_use(mesh: Mesh) -> int:
    """Bytes of this rank's GPU that hold something."""
    gc.collect()
    return torch.cuda.memory_allocated(mesh.device) + mesh.shared_bytes


class Built(NamedTuple):
    """A case, ready to be timed."""

    case: Ours | Theirs
    losses: list[float]  # of its first steps
    memory: dict[str, float]


def build(job: Job, name: str) -> Built:
    """Make a case and take its first steps."""
    on_gpu = job.mesh.device.type == "cuda"
    before = in_use(job.mesh) if on_gpu else 0
    case = Ours(job, STAGES[name]) if name in STAGES else Theirs(job, SETTINGS[name])
    losses = [case.step() for _ in range(WARM - 1)]
    if not on_gpu:
        return Built(case, [*losses, case.step()], {})
    torch.cuda.reset_peak_memory_stats(job.mesh.device)
    losses.append(case.step())
    most = torch.cuda.max_memory_allocated(job.mesh.device) + job.mesh.shared_bytes - before
    memory = {"state_gib": (in_use(job.mesh) - before) / GIB, "peak_gib": most / GIB}
    if name in STAGES:
        memory["table_gib"] = table_bytes(STAGES[name], job.model, job.mesh.dp.size) / GIB
        memory["of_table"] = memory["state_gib"] / memory["table_gib"]
        memory["gathered_gib"] = gathered_bytes(STAGES[name], job.model) / GIB
    return Built(case, losses, memory)


def in_turns(runs: dict[str, Callable[[], object]], mesh: Mesh) -> dict[str, list[float]]:
    """Milliseconds of the steps of each, on the slowest rank."""
    kind = mesh.device.type
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in track(range(ROUNDS[kind]), "rounds", disable=mesh.rank != 0 or not sys.stderr.isatty()):
        for name, run in runs.items():
            run()
            for _ in range(STEPS[kind]):
                barrier(mesh)
                times[name].append(wall_seconds(run, kind) * 1e3)
    return {name: _over_ranks(taken, mesh).amax(0).tolist() for name, taken in times.items()}


def _over_ranks(numbers: Sequence[float], mesh: Mesh) -> torch.Tensor:
    return exchange_numbers(torch.tensor(numbers, dtype=torch.float64), mesh, "comparing times")


def measure(job: Job, names: Sequence[str]) -> list[report.Row]:
    """A row for each case, and one for what stage 1 hides, if it is among them."""
    mesh = job.mesh
    if mesh.device.type == "cuda":
        _warm(mesh.device)
    built: dict[str, Built] = {}
    for name in names:
        built[name] = build(job, name)
        if mesh.rank == 0:
            print(f"{CASES[name]}: loss {built[name].losses[-1]:.4f}", flush=True)
    runs: dict[str, Callable[[], object]] = {name: one.case.step for name, one in built.items()}
    behind: dict[bool, list[float]] = {True: [], False: []}  # ms of sums after backward, by whether they had gone on beside it
    if "stage1" in built:
        stage1 = built["stage1"].case
        assert isinstance(stage1, Ours), "stages are ours"
        runs["beside"] = lambda: behind[True].append(stage1.step_in_parts(beside=True))
        runs["after"] = lambda: behind[False].append(stage1.step_in_parts(beside=False))
    times = in_turns(runs, mesh)
    medians = {name: statistics.median(taken) for name, taken in times.items()}
    rows = [_row(job, name, one, times[name], medians) for name, one in built.items()]
    if "stage1" in built:
        # The rank that ends backward last waits for nobody: what it needs is the sum's own time.
        left, whole = (statistics.median(_over_ranks(behind[beside], mesh).amin(0).tolist()) for beside in (True, False))
        rows.append({"case": "ZeRO 1, its sum over ranks", "name": "hidden", **shares(medians["beside"], medians["after"], left, whole)})
    return rows


def shares(beside: float, after: float, left: float, whole: float) -> dict[str, float]:
    """Of steps of `beside` and `after` ms, in which a sum over ranks goes on beside backward or after it, and of what of it comes after
    backward, `left` and `whole` ms: a step without any takes after - whole."""
    longer = beside - (after - whole)
    return {"beside_ms": beside, "after_ms": after, "sum_ms": whole, "left_ms": left, "hidden": 1 - left / whole, "longer_ms": longer}


def _row(job: Job, name: str, built: Built, times: Sequence[float], medians: dict[str, float]) -> report.Row:
    row: dict[str, Any] = {"case": CASES[name], "name": name, "ranks": job.mesh.dp.size}
    row |= {"tokens_per_s": job.batch[0].numel() / medians[name] * 1e3, "step_ms": medians[name], "fastest_ms": min(times)}
    if others := [other for other in COMPARABLE.get(name, ()) if other in medians]:
        against = min(others, key=medians.__getitem__)
        row |= {"against": CASES[against], "speed": medians[against] / medians[name]}
    losses = {"loss_first": built.losses[0], "loss_warm": built.losses[-1], "loss_last": built.case.step()}  # stage 1 takes more steps
    return {**row, **built.memory, **losses}


def _warm(device: torch.device) -> None:
    """Products of forward and backward take memory of their own once, which belongs to no case."""
    matrix = torch.ones(256, 256, device=device, dtype=torch.bfloat16, requires_grad=True)
    (matrix @ matrix).sum().backward()


def main(json_file: str | None = None, *, cases: str | None = None, compile: bool = False, model: str = "") -> int:
    """Measures over the GPUs of this machine, or 2 processes on the CPU with a tiny model; prints the table and writes `json_file`.

    `cases`: those of CASES, with commas between them (default: all). `compile`: the layers of all. Raises ConfigError.
    """
    on_gpu = torch.cuda.is_available()
    world = torch.cuda.device_count() if on_gpu else 2
    if world < 2:
        raise ConfigError(
            "1 GPU", "ranks share out what they keep", "Run it where there are more, or on the CPU with CUDA_VISIBLE_DEVICES="
        )
    names = report.chosen("cases", cases, CASES, ",".join(CASES))
    arguments = ["--model", model or ("1b" if on_gpu else "tiny"), "--cases", ",".join(names)]
    arguments += [*(["--json", json_file] if json_file else []), *(["--compile"] if compile else [])]
    return launch(["-m", "pymesh3d.bench.zero_train", *arguments], world)


def run_rank(arguments: Sequence[str] | None = None) -> None:
    """What each rank does."""
    parser = argparse.ArgumentParser(prog="python -m pymesh3d.bench.zero_train", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", metavar="FILE", help="also write the measurements here")
    parser.add_argument("--model", required=True, help="a name or a file, as for `pymesh3d train`")
    parser.add_argument("--cases", required=True, help=f"of {', '.join(CASES)}, with commas between them")
    parser.add_argument("--compile", action="store_true", help="compile each layer with torch.compile")
    given = parser.parse_args(arguments)
    if given.compile:
        torch._dynamo.config.recompile_limit = COMPILATIONS
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")  # nothing is written into it
    mesh = init_mesh(dp=-1)
    job = Job.of(mesh, ModelConfig.load(given.model), compiled=given.compile)
    rows = measure(job, given.cases.split(","))
    if mesh.rank == 0:
        title = f"Training {given.model} data-parallel over {mesh.dp.size} ranks on {mesh.device.type}, {job.train.dtype}"
        title += ", compiled" * given.compile
        sizes = {"model": given.model, **{name: getattr(job.train, name) for name in ("global_batch", "micro_batch", "seq", "compile")}}
        timed = ROUNDS[mesh.device.type] * STEPS[mesh.device.type]
        report.publish("zero_train", rows, COLUMNS, title, given.json, **sizes, timed_steps=timed)
    mesh.close()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may still let go of Python objects


if __name__ == "__main__":
    run_rank()

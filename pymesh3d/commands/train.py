"""`pymesh3d train`: the main job. `prepare` refuses what cannot run; `run` is what each rank does."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from pymesh3d.checkpoint.load import load
from pymesh3d.checkpoint.manifest import CORPUS_DIGEST, folder_of, newest, require_same
from pymesh3d.checkpoint.save import save
from pymesh3d.comm.agree import exchange_text
from pymesh3d.commands.files import as_json, require_folder, require_picture, require_writable, write, writing
from pymesh3d.commands.progress import Progress, draw_loss
from pymesh3d.config import Layout, ModelConfig, TrainConfig, require_timeout, validate
from pymesh3d.data import Batches, Corpus, load_corpus
from pymesh3d.engine import Engine, StepResult, parallelize
from pymesh3d.errors import CheckpointError, ConfigError
from pymesh3d.mesh import init_mesh
from pymesh3d.models.llama import Llama
from pymesh3d.planner.hardware import peak_flops
from pymesh3d.planner.model import flops_per_token
from pymesh3d.rendezvous import require_equal
from pymesh3d.triton_kernels.backend import no_compiler


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """Everything one training run is asked to do. `timeout` bounds, in seconds, every wait for another rank. Raises ConfigError."""

    model: ModelConfig
    layout: Layout
    train: TrainConfig
    device: str
    warmup_steps: int = 20
    data: str | None = None
    log_json: str | None = None
    out: str | None = None
    save: str | None = None
    save_every: int | None = None
    resume: str | None = None
    timeout: float = 300.0

    def __post_init__(self) -> None:
        if self.warmup_steps < 0:
            raise ConfigError(f"--warmup-steps {self.warmup_steps}", "it must be 0 or more", "Use 0 for the full rate at once")
        if self.save_every is not None and self.save_every < 1:
            raise ConfigError(f"--save-every {self.save_every}", "it must be 1 or more", "Leave it out to save at the end only")
        if self.save_every is not None and self.save is None:
            raise ConfigError(f"--save-every {self.save_every}", "there is no folder to save to", "Add --save DIR")
        require_timeout("timeout", self.timeout)

    def learning_rate(self, taken: int) -> float:
        """Of the step after `taken` steps: it rises over the first `warmup_steps`, then stays."""
        return self.train.lr * (min(1.0, (taken + 1) / self.warmup_steps) if self.warmup_steps else 1.0)

    def about(self, corpus: Corpus) -> dict[str, Any]:
        """What must be the same for a checkpoint to be resumed, the data among it."""
        optimizer = ("lr", "weight_decay", "betas", "eps", "max_norm")
        choices = (
            "compile",
            "recompute",
            "schedule",
            "micro_batch",
            "dropout",
            "zero_once_a_step",
            "param_remainders",
            "optimizer_offload",
        )
        free = ("steps", *optimizer, *choices)
        train = {key: value for key, value in dataclasses.asdict(self.train).items() if key not in free}
        data = f"{corpus.description} ({corpus.tokens.size} tokens)"
        return {
            **dataclasses.asdict(self.model),
            **dataclasses.asdict(self.layout),
            **train,
            "corpus": data,
            CORPUS_DIGEST: corpus.digest,
        }


def prepare(job: Job) -> Batches:
    """Check all that can be checked without other ranks, and open the data. Raises ConfigError."""
    validate(job.model, job.layout, job.train)
    if job.train.compile and (missing := no_compiler(job.device)):
        raise ConfigError("--compile", f"torch.compile cannot work here: {missing}", "Install it, or leave --compile out")
    require_picture("--out", job.out)
    require_writable("--log-json", job.log_json)
    corpus = load_corpus(job.data, job.model.vocab, job.train.seq)
    if job.resume:
        require_same(Path(job.resume), job.about(corpus))
    batches = Batches(corpus, job.train.seq, job.train.global_batch, job.train.seed)
    if job.save:
        require_folder("--save", job.save)  # late, because it makes the folder
        goes_on = job.resume and Path(job.save).resolve() == Path(job.resume).resolve()
        step = newest(Path(job.save))
        if step is not None and not goes_on:
            rule = f"holds checkpoints up to step {step}"
            raise CheckpointError(f"--save {job.save}", rule, f"Add --resume {job.save}, or choose another")
    return batches


def run(job: Job) -> int:
    """Train on the ranks that are here. Raises ConfigError, DistributedError, and OSError where a file could not be written."""
    batches = prepare(job)
    mesh = init_mesh(**dataclasses.asdict(job.layout), device=job.device, timeout_s=job.timeout)
    data = f"{batches.corpus.description}, digest {batches.corpus.digest}"
    require_equal(exchange_text(data, mesh, "comparing the data"), "data")
    progress = Progress(quiet=mesh.rank != 0)
    progress.header(mesh, job.model, job.train, batches.corpus.description)
    engine = parallelize(Llama(job.model, device="meta"), mesh, job.train)
    progress.stages(engine)
    about = job.about(batches.corpus)
    first = 0
    if job.resume:
        first = resume(job.resume, engine, about)
        progress.say(f"resumed from {folder_of(Path(job.resume), first)}")
    if first >= job.train.steps:
        progress.say(f"the checkpoint has taken {first} steps of {job.train.steps}: nothing is left to do. Give more with --steps")
        mesh.close()
        return 0
    log, out = (job.log_json, job.out) if mesh.rank == 0 else (None, None)
    write("--log-json", log, "", more=first > 0)  # begun anew, or gone on with
    peak = peak_flops(torch.cuda.get_device_name(mesh.device), job.train.dtype) if mesh.device.type == "cuda" else None
    losses: list[float] = []
    tokens_seen = 0
    saved = None
    with progress.steps(first, job.train.steps, mfu=peak is not None):
        for step in range(first, job.train.steps):
            began = time.perf_counter()
            tokens, targets = (torch.from_numpy(part) for part in batches.batch(step, mesh.dp.rank, mesh.dp.size))
            for group in engine.optimizer.param_groups:
                group["lr"] = job.learning_rate(engine.zero.steps_taken)
            result = engine.train_step((tokens, targets))
            line = measure(step + 1, result, time.perf_counter() - began, job, engine, peak)
            progress.step(line)
            losses.append(result.loss)
            tokens_seen += result.tokens
            write("--log-json", log, as_json(line) + "\n", more=True)
            if job.save and (step + 1 == job.train.steps or (job.save_every and (step + 1) % job.save_every == 0)):
                saved = keep(job.save, step + 1, engine, about)
                progress.say(f"saved {saved}")
    progress.curve(losses)
    if out:
        with writing("--out", out):
            draw_loss(losses, first + 1, out, f"{mesh.layout}, {job.model.layers} layers, {batches.corpus.description}")
    progress.reached(losses, tokens_seen, {"log": job.log_json, "picture": job.out, "checkpoint": saved})
    mesh.close()
    return 0


def resume(directory: str, engine: Engine, about: Mapping[str, Any]) -> int:
    """Continue from the newest checkpoint of the directory; the number of steps it had taken."""
    step, tensors = load(Path(directory), engine.state(), about, engine.mesh)
    engine.load_state(tensors)
    return step


def keep(directory: str, step: int, engine: Engine, about: Mapping[str, Any]) -> Path:
    """Write a checkpoint; its folder. Raises OSError when it could not be written: a failure of the run, no longer a refusal."""
    try:
        return save(Path(directory), step, engine.state(), about, engine.mesh)
    except CheckpointError as error:
        raise OSError(str(error)) from error


def measure(step: int, result: StepResult, seconds: float, job: Job, engine: Engine, peak: float | None) -> dict[str, float | int | None]:
    """The line of one step: tokens are those of the whole global batch, counted once; memory is the fullest rank's peak
    up to the end of backward.

    `peak` is what one device can do at best, in FLOP/s, where that is known.
    """
    tflops = result.tokens / seconds * flops_per_token(job.model, job.train.seq) / engine.mesh.layout.world / 1e12
    return {
        "step": step,
        "loss": result.loss,
        "grad_norm": result.grad_norm,
        "tokens": result.tokens,
        "tps": result.tokens / seconds,
        "tflops": tflops,
        "mfu": tflops * 1e12 / peak if peak else None,
        "memory_gib": engine.memory_gib,
        "time_s": seconds,
    }

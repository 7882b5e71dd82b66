"""`pymesh3d train`: the main job. `prepare` refuses what cannot run; `run` is what each rank does."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import math
import os
import resource
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

import torch

from pymesh3d.checkpoint.load import load
from pymesh3d.checkpoint.manifest import newest
from pymesh3d.checkpoint.save import save
from pymesh3d.comm.collectives import gather_rows
from pymesh3d.commands.progress import Progress, draw_loss
from pymesh3d.config import Layout, ModelConfig, TrainConfig, validate
from pymesh3d.data import Batches, load_corpus
from pymesh3d.engine import Engine, StepResult, parallelize
from pymesh3d.errors import CheckpointError, ConfigError
from pymesh3d.mesh import Mesh, init_mesh
from pymesh3d.models.llama import Llama
from pymesh3d.planner.hardware import peak_flops
from pymesh3d.planner.model import flops_per_token


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
        if not 0 < self.timeout <= 86_400:
            raise ConfigError(f"--timeout {self.timeout:g}", "it must be above 0 s and at most a day, 86400 s", "Use --timeout 300")

    def learning_rate(self, taken: int) -> float:
        """Of the step after `taken` steps: it rises over the first `warmup_steps`, then stays."""
        return self.train.lr * (min(1.0, (taken + 1) / self.warmup_steps) if self.warmup_steps else 1.0)

    def about(self) -> dict[str, Any]:
        """What must be the same for a checkpoint to be resumed."""
        free = ("steps", "lr", "weight_decay", "betas", "eps", "max_norm", "compile", "recompute", "schedule", "micro_batch")
        train = {key: value for key, value in dataclasses.asdict(self.train).items() if key not in free}
        return {**dataclasses.asdict(self.model), **dataclasses.asdict(self.layout), **train}


def prepare(job: Job) -> Batches:
    """Check all that can be checked without other ranks, and open the data. Raises ConfigError."""
    validate(job.model, job.layout, job.train)
    if job.out and importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(f"--out {job.out}", "drawing needs matplotlib", "pip install matplotlib, or leave --out away")
    if job.out and Path(job.out).suffix not in (".png", ".svg", ".pdf"):
        raise ConfigError(f"--out {job.out}", "the picture's file must end in .png, .svg or .pdf", "Use --out loss.png")
    for option, file in (("--out", job.out), ("--log-json", job.log_json)):
        require_writable(option, file)
    if job.save and Path(job.save).exists() and not Path(job.save).is_dir():
        raise CheckpointError(f"--save {job.save}", "it is a file, and checkpoints go into a folder", "Choose another name")
    if job.save:
        require_writable_folder("--save", Path(job.save))
    goes_on = job.save and job.resume and Path(job.save).resolve() == Path(job.resume).resolve()
    if job.save and not goes_on and newest(Path(job.save)) is not None:
        raise CheckpointError(
            f"--save {job.save}", f"holds checkpoints up to step {newest(Path(job.save))}", f"Add --resume {job.save}, or choose another"
        )
    if job.resume and newest(Path(job.resume)) is None:
        raise CheckpointError(f"--resume {job.resume}", "holds no complete checkpoint", "Give the directory that --save wrote to")
    corpus = load_corpus(job.data, job.model.vocab, job.train.seq)
    return Batches(corpus, job.train.seq, job.train.global_batch, job.train.seed)


def require_writable_folder(option: str, folder: Path) -> None:
    """Refuse, before hours of training, a folder that cannot be made or written to. Raises ConfigError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(f"{option} {folder}", f"cannot be written to ({error.strerror})", "Choose another folder") from error


def require_writable(option: str, file: str | None) -> None:
    """Refuse a file that cannot be written, before the work that it is to hold. Raises ConfigError."""
    if file is None:
        return
    folder = Path(file).resolve().parent
    if not folder.is_dir():
        raise ConfigError(f"{option} {file}", "there is no such folder", f"mkdir -p {Path(file).parent}")
    if Path(file).is_dir() or not os.access(file if Path(file).exists() else folder, os.W_OK):
        rule = "it is a folder" if Path(file).is_dir() else "it cannot be written"
        raise ConfigError(f"{option} {file}", rule, "Give the name of a file in a folder of your own")


def run(job: Job) -> int:
    """Train on the ranks that are here. Raises ConfigError and DistributedError."""
    batches = prepare(job)
    sizes = {axis: getattr(job.layout, axis) for axis in ("tp", "pp", "dp", "cp")}
    mesh = init_mesh(**sizes, device=job.device, timeout_s=job.timeout)
    progress = Progress(quiet=mesh.rank != 0)
    progress.header(mesh, job.model, job.train, batches.corpus.description)
    engine = parallelize(Llama(job.model, device="meta"), mesh, job.train)
    progress.stages(engine)
    first = resume(job, engine) if job.resume else 0
    if first >= job.train.steps:
        progress.say(f"the checkpoint has taken {first} steps of {job.train.steps}: nothing is left to do. Give more with --steps")
    losses: list[float] = []
    with _lines(job.log_json if mesh.rank == 0 else None, more=first > 0) as log, progress.steps(first, job.train.steps):
        for step in range(first, job.train.steps):
            began = time.perf_counter()
            tokens, targets = (torch.from_numpy(part) for part in batches.batch(step, mesh.dp.rank, mesh.dp.size))
            for group in engine.optimizer.param_groups:
                group["lr"] = job.learning_rate(engine.steps_taken)
            result = engine.train_step((tokens, targets))
            line = measure(step + 1, result, time.perf_counter() - began, job, mesh)
            progress.step(line)
            losses.append(result.loss)
            if log:
                print(json_of(line), file=log, flush=True)
            if job.save and (step + 1 == job.train.steps or (job.save_every and (step + 1) % job.save_every == 0)):
                folder = save(Path(job.save), step + 1, engine.state(), job.about(), mesh)
                progress.say(f"saved {folder}")
    progress.curve(losses)
    if job.out and losses and mesh.rank == 0:
        draw_loss(losses, first + 1, job.out, f"{mesh.layout}, {job.model.layers} layers, {batches.corpus.description}")
        progress.say(f"loss curve: {job.out}")
    mesh.close()
    return 0


def resume(job: Job, engine: Engine) -> int:
    """Continue from the newest checkpoint of the directory; the number of steps it had taken."""
    assert job.resume is not None, "resume needs a directory"
    step, tensors = load(Path(job.resume), engine.state(), job.about(), engine.mesh)
    engine.load_state(tensors)
    return step


def measure(step: int, result: StepResult, seconds: float, job: Job, mesh: Mesh) -> dict[str, float | int | None]:
    """The line of one step: tokens are those of the whole global batch, counted once; memory is the fullest rank's peak."""
    tflops = result.tokens / seconds * flops_per_token(job.model, job.train.seq) / mesh.layout.world / 1e12
    peak = peak_flops(torch.cuda.get_device_name(mesh.device), job.train.dtype) if mesh.device.type == "cuda" else None
    memory = torch.tensor(_memory_gib(mesh.device), dtype=torch.float64, device=mesh.device)
    return {
        "step": step,
        "loss": result.loss,
        "grad_norm": result.grad_norm,
        "tokens": result.tokens,
        "tps": result.tokens / seconds,
        "tflops": tflops,
        "mfu": tflops * 1e12 / peak if peak else None,
        "memory_gib": float(gather_rows(memory, mesh.all).max()),
        "time_s": seconds,
    }


def json_of(line: Mapping[str, float | int | None]) -> str:
    """As JSON, which has no word for numbers that are not finite: they become null."""
    return json.dumps({key: value if value is None or math.isfinite(value) else None for key, value in line.items()})


def _memory_gib(device: torch.device) -> float:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**30 if sys.platform == "darwin" else 2**20)


@contextlib.contextmanager
def _lines(path: str | None, *, more: bool) -> Iterator[TextIO | None]:
    """The log, begun anew, or with `more` lines after those it has."""
    if path is None:
        yield None
    else:
        with open(path, "a" if more else "w") as file:
            yield file

"""The command `pymesh3d`: reads its arguments and hands over to `pymesh3d.commands`."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import NoReturn

import torch
from rich.console import Console

from pymesh3d.commands import check, draw, env, train
from pymesh3d.config import DTYPES, MODELS, RECOMPUTE, SCHEDULES, Layout, ModelConfig, TrainConfig
from pymesh3d.errors import ConfigError, DistributedError
from pymesh3d.launch import is_child, launch, watch_parent

BENCHMARKS = ("philox", "train")
SHORT_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp64": "float64"}
WAIT_FOR_THE_END = 2.0  # seconds in which `launch` ends all ranks, so that the others need not complain of the one that cannot print


class _Parser(argparse.ArgumentParser):
    """Refuses in one line, like everything else here."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"pymesh3d: {message}. See {self.prog} --help\n")


class _Help(argparse.ArgumentDefaultsHelpFormatter):
    """Shows defaults where there is one that the text does not name."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        said = action.default is None or action.default is False or "default" in (action.help or "")
        return action.help if said else super()._get_help_string(action)


def parser() -> argparse.ArgumentParser:
    """The whole command line."""
    top = _Parser(prog="pymesh3d", description="Train a PyTorch model on a 3D grid of GPUs (or, to try it, of CPU processes).")
    commands = top.add_subparsers(dest="command", required=True, metavar="command")
    _train(commands.add_parser("train", help="train a Llama-like model", formatter_class=_Help))
    one = commands.add_parser("check", help="compare many layouts with one process", formatter_class=_Help)
    one.add_argument("--world", type=int, metavar="N", default=8, help="number of ranks")
    one.add_argument("--all", action="store_true", help="every combination, not only a set that covers each pair of choices")
    one.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="cpu: float64, exact to rounding; cuda: bf16, within stated bounds"
    )
    one.add_argument("--json", metavar="FILE", help="write the table as JSON")
    picture = commands.add_parser("draw", help="draw a pipeline schedule", formatter_class=_Help)
    picture.add_argument("--schedule", choices=SCHEDULES, default="1f1b", type=str.lower, help="schedule")
    picture.add_argument("--pp", type=int, metavar="N", default=4, help="stages")
    picture.add_argument("--microbatches", type=int, metavar="N", default=8, help="microbatches")
    picture.add_argument("--out", metavar="FILE", help="write a picture")
    picture.add_argument("--json", metavar="FILE", help="write the timeline as JSON")
    bench = commands.add_parser("bench", help="run a micro-benchmark")
    bench.add_argument("name", choices=BENCHMARKS)
    bench.add_argument("--json", metavar="FILE", help="write the results as JSON")
    here = commands.add_parser("env", help="what this machine has, what is missing, and what runs instead")
    here.add_argument("--json", metavar="FILE", help="write it as JSON")
    return top


def _train(one: argparse.ArgumentParser) -> None:
    defaults = TrainConfig()
    mesh = one.add_argument_group("mesh")
    for axis, text in (("tp", "tensor parallel"), ("pp", "pipeline stages")):
        mesh.add_argument(f"--{axis}", type=int, metavar="N", default=1, help=text)
    mesh.add_argument("--dp", type=int, metavar="N", help="data parallel; -1: whatever the ranks leave (default: 1, or -1 under torchrun)")
    mesh.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is a GPU")
    mesh.add_argument("--timeout", type=float, default=300.0, metavar="SECONDS", help="the longest that a rank waits for another")
    what = one.add_argument_group("model and data")
    what.add_argument(
        "--model", default="tiny", metavar="NAME|FILE", help=f"{', '.join(MODELS)}, or a JSON file with the fields of ModelConfig"
    )
    what.add_argument(
        "--data",
        metavar="PATH",
        help="a text file or folder (bytes are tokens), or token ids in .npy or .bin; default: Python's own library",
    )
    what.add_argument("--seq", type=int, metavar="N", default=defaults.seq, help="tokens of a sequence")
    what.add_argument("--global-batch-size", type=int, metavar="N", default=defaults.global_batch, help="sequences a step, over all ranks")
    what.add_argument(
        "--micro-batch-size", type=int, metavar="N", default=defaults.micro_batch, help="sequences that go through the pipeline at once"
    )
    how = one.add_argument_group("training")
    how.add_argument("--steps", type=int, metavar="N", default=defaults.steps, help="steps in all, those of a resumed run included")
    how.add_argument("--lr", type=float, metavar="X", default=defaults.lr, help="learning rate of AdamW")
    how.add_argument("--warmup-steps", type=int, metavar="N", default=20, help="over which the learning rate rises to --lr; then it stays")
    how.add_argument("--weight-decay", type=float, metavar="X", default=defaults.weight_decay, help="of matrices")
    how.add_argument(
        "--max-norm", type=float, metavar="X", default=defaults.max_norm, help="clip the gradient norm to this; 0 switches clipping off"
    )
    names = ", ".join((*DTYPES, *SHORT_DTYPES))
    how.add_argument("--dtype", type=_dtype, default=defaults.dtype, help=f"of parameters and activations: {names}")
    how.add_argument("--reduce-dtype", type=_dtype, metavar="DTYPE", help="what gradients are rounded to when sent (default: dtype)")
    how.add_argument("--seed", type=int, metavar="N", default=defaults.seed, help="of initial weights and of the order of the data")
    how.add_argument("--schedule", choices=SCHEDULES, default=defaults.schedule, type=str.lower, help="order of the pipeline")
    how.add_argument(
        "--zero-stage", type=int, metavar="N", default=defaults.zero_stage, help="0: optimizer state on every dp rank; 1: a share on each"
    )
    how.add_argument("--sequence-parallel", action="store_true", help="share activations between tp ranks outside the matrix products")
    how.add_argument("--recompute", choices=RECOMPUTE, default=defaults.recompute, help="full: keep only each layer's input for backward")
    how.add_argument("--compile", action="store_true", help="torch.compile each layer")
    files = one.add_argument_group("files")
    fields = "step, loss, grad_norm, tokens, tps, tflops, mfu, memory_gib, time_s"
    files.add_argument("--log-json", metavar="FILE", help=f"a line a step ({fields}); a resumed run adds to it")
    files.add_argument("--out", metavar="FILE.png", help="the loss curve as a picture")
    files.add_argument("--save", metavar="DIR", help="write a checkpoint at the end")
    files.add_argument("--save-every", type=int, metavar="N", help="write one every N steps too")
    files.add_argument("--resume", metavar="DIR", help="go on from the newest checkpoint in DIR, on the same layout")


def _world() -> int:
    """The number of ranks that torchrun or `launch` started. Raises ConfigError."""
    text = os.environ["WORLD_SIZE"]
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"WORLD_SIZE={text}", "the environment variable must be a whole number, 1 or more", "Start with torchrun")
    return int(text)


def _dtype(name: str) -> str:
    return SHORT_DTYPES.get(name, name)


def job_of(args: argparse.Namespace) -> train.Job:
    """The job that the arguments of `train` ask for, with its layout resolved. Raises ConfigError."""
    for axis in ("tp", "pp"):
        if getattr(args, axis) == -1:
            raise ConfigError(f"--{axis} -1", "only --dp can be left open", f"Give --{axis} a size of 1 or more")
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda", "torch sees no GPU here", "Use --device cpu")
    layout = Layout(tp=args.tp, pp=args.pp, dp=(-1 if is_child() else 1) if args.dp is None else args.dp)
    if is_child():
        layout = layout.resolve(_world())
    elif layout.dp == -1:
        layout = layout.resolve(torch.cuda.device_count() if device == "cuda" else layout.tp * layout.pp)
    if device == "cuda" and not is_child() and layout.world > torch.cuda.device_count():
        count = torch.cuda.device_count()
        raise ConfigError(
            f"{layout} on {count} GPU(s)",
            "each rank needs a GPU of its own",
            f"Use at most {count} ranks, or start more hosts with torchrun",
        )
    return train.Job(
        model=ModelConfig.load(args.model),
        layout=layout,
        train=TrainConfig(
            seq=args.seq,
            global_batch=args.global_batch_size,
            micro_batch=args.micro_batch_size,
            steps=args.steps,
            schedule=args.schedule,
            zero_stage=args.zero_stage,
            sequence_parallel=args.sequence_parallel,
            recompute=args.recompute,
            compile=args.compile,
            lr=args.lr,
            weight_decay=args.weight_decay,
            max_norm=args.max_norm or None,
            dtype=args.dtype,
            reduce_dtype=args.reduce_dtype,
            seed=args.seed,
        ),
        device=device,
        **{name: getattr(args, name) for name in ("timeout", "warmup_steps", "data", "log_json", "out", "save", "save_every", "resume")},
    )


def _run(args: argparse.Namespace, argv: Sequence[str]) -> int:
    if args.command != "train":
        train.require_writable("--json", args.json)
    if args.command == "env":
        return env.run(args.json)
    if args.command == "draw":
        return draw.run(args.schedule, args.pp, args.microbatches, args.out, args.json)
    if args.command == "bench":
        module: SimpleNamespace = importlib.import_module(f"pymesh3d.bench.{args.name}")  # type: ignore[assignment]
        module.main(args.json)
        return 0
    if args.command == "check":
        if args.world < 1:
            raise ConfigError(f"--world {args.world}", "needs at least one rank", "Use --world 8")
        if args.world > 1 and not is_child():
            return _launch(argv, args.world)
        return check.run(args.world, all_rows=args.all, device=args.device, json_file=args.json)
    job = job_of(args)
    if job.layout.world > 1 and not is_child():
        train.prepare(job)  # what cannot run is said once, here, before any process is started
        print(f"starting {job.layout.world} ranks on this host", flush=True)
        return _launch(argv, job.layout.world)
    return train.run(job)


def _launch(argv: Sequence[str], world: int) -> int:
    """This command as `world` ranks on this host."""
    threading.Thread(target=_interrupt_when_nobody_reads, daemon=True).start()
    try:
        return launch(["-m", "pymesh3d", *argv], world)
    finally:
        Console().show_cursor()  # which the progress bar hides, and a rank that is ended from outside does not bring back


def _interrupt_when_nobody_reads() -> None:
    """Ends the ranks as Ctrl-C does, and as quietly, when the reader of our output is gone (`pymesh3d train | head`)."""
    output = select.poll()
    output.register(1, 0)  # errors and hang-ups are reported whatever one asks for
    if any(event & (select.POLLERR | select.POLLHUP) for _, event in output.poll()):
        os.kill(os.getpid(), signal.SIGINT)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns its exit status: 0, 1 for a failure, 2 for a request that cannot run, 130 after Ctrl-C."""
    argv = sys.argv[1:] if argv is None else argv
    watch_parent()
    try:
        status = _run(parser().parse_args(argv), argv)
    except (ConfigError, DistributedError) as error:
        where = f"[rank {os.environ['RANK']}] " if is_child() else ""
        print(f"{where}pymesh3d: {error}", file=sys.stderr)
        status = 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        status = 128 + signal.SIGINT
    except BrokenPipeError:
        if is_child():
            time.sleep(WAIT_FOR_THE_END)
        status = 128 + signal.SIGPIPE
    if is_child() or status > 128:
        # gloo's threads may still let go of Python objects, which aborts an interpreter that is closing down, or wait for a lost peer
        with contextlib.suppress(BrokenPipeError):
            sys.stdout.flush()
        os._exit(status)
    return status

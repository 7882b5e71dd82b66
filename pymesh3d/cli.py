"""The command `pymesh3d`: reads its arguments and hands over to `pymesh3d.commands`."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import difflib
import importlib
import io
import os
import select
import shlex
import signal
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
from rich.console import Console

from pymesh3d import __version__
from pymesh3d.commands import check, draw, env, train
from pymesh3d.commands.files import require_picture, require_writable
from pymesh3d.commands.spelling import as_typed, fields_of, option_of
from pymesh3d.config import MODELS, RECOMPUTE, SCHEDULES, Layout, ModelConfig, TrainConfig, full_dtype, runs
from pymesh3d.errors import ConfigError, DistributedError
from pymesh3d.launch import STOPPED, is_child, launch, watch_parent
from pymesh3d.rendezvous import agent_store, world_size
from pymesh3d.schedule import SCHEDULES as DRAWN

BENCHMARKS = (
    "all_gather_matmul",
    "cross_entropy",
    "dropout",
    "matmul",
    "matmul_all_reduce",
    "matmul_reduce_scatter",
    "model",
    "p2p",
    "philox",
    "rms_norm",
    "rotary",
    "squares",
    "swiglu",
    "train",
    "zero_step",
    "zero_train",
)
PRODUCTS = ("all_gather_matmul", "matmul_all_reduce", "matmul_reduce_scatter")  # that talk to other ranks
OPTIONS = {  # of `bench`: what has them
    **dict.fromkeys(("tp", "shapes", "out", "tune"), PRODUCTS),
    **dict.fromkeys(("cases", "compile"), ("zero_train",)),
}
RANKS_OF_A_CORE = 32  # at most: more than that is a slip of the pen
NOT_YET = {  # option: what it can be, what it cannot be yet, and what to do instead
    "schedule": (
        SCHEDULES,
        "gpipe, 1f1b, interleaved and zb-h1 are here; other zero-bubble schedules are not available yet",
        "Use --schedule zb-h1",
    ),
    "cp": ((1,), "context parallelism is not available yet", "Use --sequence-parallel with a larger --tp for long sequences"),
    "ep": ((1,), "expert parallelism is not available yet", "Use --tp, --pp and --dp"),
}
WAIT_FOR_THE_END = 2.0  # seconds in which `launch` ends all ranks, so that the others need not complain of the one that cannot print
WAIT_FOR_THE_STORE = datetime.timedelta(seconds=5)


class _Parser(argparse.ArgumentParser):
    """Refuses in one line, like everything else here, with a hint at the help of the command in question."""

    def error(self, message: str) -> NoReturn:
        _say_once(f"{message}. See {self.prog} --help")
        self.exit(2)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Refuses what is unknown to a command here, where the command is known, rather than in the parser above it."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            close = difflib.get_close_matches(unknown[0].partition("=")[0], self._option_string_actions, n=1, cutoff=0.8)
            self.error(f"unrecognized arguments: {' '.join(unknown)}" + (f" (did you mean {close[0]}?)" if close else ""))
        return found, unknown


class _Help(argparse.ArgumentDefaultsHelpFormatter):
    """Shows defaults where there is one that the text does not name."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        said = action.default is None or action.default is False or "default" in (action.help or "")
        return action.help if said else super()._get_help_string(action)


def parser() -> argparse.ArgumentParser:
    """The whole command line."""
    top = _Parser(
        prog="pymesh3d",
        description="Train a PyTorch model on a 3D grid of GPUs (or, to try it, of CPU processes).",
        epilog="To begin with: pymesh3d train --tp 2 --pp 2 --dp 2. Each command has its own help: pymesh3d train --help",
    )
    top.add_argument("--version", action="version", version=f"pymesh3d {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="command")
    _train(commands.add_parser("train", help="train a Llama-like model", formatter_class=_Help))
    one = commands.add_parser("check", help="compare many layouts with one process", formatter_class=_Help)
    one.add_argument("--world", type=int, metavar="N", default=8, help="number of ranks")
    one.add_argument("--all", action="store_true", help="every combination, not only a set that covers each pair of choices")
    one.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="cpu: float64, exact to rounding; cuda: bf16, within stated bounds"
    )
    one.add_argument("--json", type=_name, metavar="FILE", help="write the table as JSON")
    picture = commands.add_parser("draw", help="draw a pipeline schedule", formatter_class=_Help)
    _schedule(picture, DRAWN, "the schedule")
    picture.add_argument("--pp", type=int, metavar="N", default=4, help="ranks of the pipeline")
    picture.add_argument("--virtual-pp", type=int, metavar="N", help="stages of each rank, with --schedule interleaved (default: 2)")
    picture.add_argument("--microbatches", type=int, metavar="N", default=8, help="microbatches of a step")
    picture.add_argument("--out", type=_name, metavar="FILE.png", help="draw it as a picture too (.png, .svg or .pdf)")
    picture.add_argument("--json", type=_name, metavar="FILE", help="write the timeline as JSON")
    bench = commands.add_parser("bench", help="run a benchmark on this machine")
    bench.add_argument(
        "names",
        nargs="+",
        metavar="name",
        choices=BENCHMARKS,
        help="one or several; all_gather_matmul: a product of rows from all ranks; matmul_all_reduce, matmul_reduce_scatter: one summed "
        "over ranks, all in one kernel; cross_entropy: the loss, forward and backward; dropout: the kernel that zeroes at random; matmul: "
        "the plain matrix product; model: steps of a 1B model (without GPUs: of a tiny one) on the layouts of the GPUs here, and where "
        "their time goes; p2p: sends and receives between stages; philox: the kernel that makes random numbers; rms_norm, rotary, swiglu: "
        "what a layer does between its matrix products; squares: what the norm of gradients is made of; train: the loss curves and speed "
        "of every layout of the GPUs here; zero_step: the sum of gradients, AdamW, and the new parameters to all ranks; zero_train: steps "
        "of that model by ZeRO's stages and by FSDP2",
    )
    bench.add_argument("--json", type=_name, metavar="FILE", help="write the results as JSON; of several, each as FILE-NAME.json")
    products = bench.add_argument_group("of products that talk to other ranks")
    products.add_argument("--tp", type=int, metavar="N", help="over so many ranks (default: all GPUs here, or 2 processes)")
    products.add_argument("--shapes", metavar="NAMES", help="models, with commas between them (default: 1b,llama-8b,llama-70b)")
    products.add_argument("--out", type=_name, metavar="FILE", help="draw the times (.png, .svg or .pdf)")
    products.add_argument("--tune", action="store_true", help="let the layers choose on this machine what was the fastest")
    zero = bench.add_argument_group("of zero_train")
    zero.add_argument("--cases", metavar="NAMES", help="as stage1,fsdp-each, with commas between them (default: all)")
    zero.add_argument("--compile", action="store_true", help="compile each layer with torch.compile")
    here = commands.add_parser("env", help="what this machine has, what is missing, and what runs instead")
    here.add_argument("--json", type=_name, metavar="FILE", help="write it as JSON")
    return top


def _train(one: argparse.ArgumentParser) -> None:
    defaults = TrainConfig()
    mesh = one.add_argument_group("mesh", "tp x pp x dp ranks: processes, each with a GPU (or a part of the CPU) of its own")
    mesh.add_argument("--tp", type=int, metavar="N", default=1, help="tensor parallel: ranks that share the matrices of a layer")
    mesh.add_argument("--pp", type=int, metavar="N", default=1, help="pipeline parallel: stages that the layers are cut into")
    mesh.add_argument(
        "--dp",
        type=int,
        metavar="N",
        help="data parallel: copies of the model, each for a part of the batch; -1: as many as ranks are left "
        "(default: 1, or -1 under torchrun)",
    )
    for axis in ("cp", "ep"):
        mesh.add_argument(f"--{axis}", type=int, default=1, help=argparse.SUPPRESS)  # NOT_YET
    mesh.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is a GPU")
    mesh.add_argument(
        "--timeout", type=float, default=300.0, metavar="SECONDS", help="how long a rank waits for another before all end with an error"
    )
    what = one.add_argument_group("model and data")
    what.add_argument(
        "--model",
        type=_name,
        default="tiny",
        metavar="NAME|FILE",
        help=f'{", ".join(MODELS)}, or a JSON file such as {{"vocab": 256, "dim": 128, "layers": 4}}; what it leaves out is that of tiny',
    )
    what.add_argument(
        "--data",
        type=_name,
        metavar="PATH",
        help="a text file or a folder of them (each byte is a token), or token ids in a .npy file of integers or a .bin file of uint16 "
        "(uint32 if the vocabulary is above 65536), little-endian (default: the sources of Python's standard library)",
    )
    what.add_argument("--seq", type=int, metavar="N", default=defaults.seq, help="tokens in a sequence")
    what.add_argument("--global-batch-size", type=int, metavar="N", default=defaults.global_batch, help="sequences a step, over all ranks")
    what.add_argument(
        "--micro-batch-size",
        type=int,
        metavar="N",
        default=defaults.micro_batch,
        help="sequences a rank computes at once; the more microbatches a step has, the shorter its pipeline stages idle",
    )
    how = one.add_argument_group("training")
    how.add_argument("--steps", type=int, metavar="N", default=defaults.steps, help="steps in all, those of a resumed run included")
    how.add_argument("--lr", type=float, metavar="X", default=defaults.lr, help="learning rate of AdamW")
    how.add_argument(
        "--warmup-steps", type=int, metavar="N", default=20, help="steps over which the learning rate rises to --lr; then it stays there"
    )
    how.add_argument("--weight-decay", type=float, metavar="X", default=defaults.weight_decay, help="weight decay of the matrices")
    how.add_argument("--max-norm", type=float, metavar="X", default=defaults.max_norm, help="clip the gradient norm to this; 0: never clip")
    how.add_argument(
        "--dtype",
        type=full_dtype,
        default=defaults.dtype,
        help="type of parameters and activations: float32 (fp32), bfloat16 (bf16) or float64 (fp64)",
    )
    how.add_argument(
        "--param-remainders",
        action="store_true",
        help="keep of the master weights only the 16 bits that bfloat16 parameters lack",
    )
    how.add_argument(
        "--optimizer-offload",
        action="store_true",
        help="keep master weights and optimizer state in the CPU's memory, from where each step takes them through the GPU",
    )
    how.add_argument(
        "--accumulate-dtype",
        type=full_dtype,
        metavar="DTYPE",
        help="type in which the gradients of microbatches are added up (default: float32; float64 with --dtype float64)",
    )
    how.add_argument(
        "--reduce-dtype",
        type=full_dtype,
        metavar="DTYPE",
        help="what gradients are rounded to when dp ranks exchange them (default: --dtype)",
    )
    how.add_argument(
        "--seed", type=int, metavar="N", default=defaults.seed, help="seed of the initial weights and of the order of the data"
    )
    _schedule(how, SCHEDULES, "order of the pipeline's forwards and backwards; pymesh3d draw shows it")
    how.add_argument("--virtual-pp", type=int, metavar="N", help="stages of each rank (default: 2 with --schedule interleaved, else 1)")
    how.add_argument(
        "--zero-stage",
        type=int,
        metavar="N",
        default=defaults.zero_stage,
        help="0: each dp rank holds all of the optimizer's state; 1: each holds a share; 2: of the summed gradients too; 3: of the "
        "parameters of layers too",
    )
    how.add_argument(
        "--zero-once-a-step",
        action=argparse.BooleanOptionalAction,
        help="whether --zero-stage 2 and 3 sum gradients and gather parameters once a step, which takes the memory for them meanwhile, "
        "and not with every microbatch (default: where there is a pipeline)",
    )
    how.add_argument(
        "--sequence-parallel",
        action="store_true",
        help="between the matrix products, each tp rank holds the activations of a part of the sequence only",
    )
    how.add_argument(
        "--recompute",
        choices=RECOMPUTE,
        default=defaults.recompute,
        help="what to compute again in backward, which saves memory: full: all but the input of each layer; selective: what is cheap",
    )
    how.add_argument(
        "--dropout",
        type=float,
        metavar="P",
        default=defaults.dropout,
        help="zero this share of the embeddings, and of what attention and feed-forward add, at random",
    )
    how.add_argument("--compile", action="store_true", help="compile each layer with torch.compile")
    files = one.add_argument_group("files")
    fields = "step, loss, grad_norm, tokens, tps, tflops, mfu, memory_gib, time_s"
    files.add_argument(
        "--log-json", type=_name, metavar="FILE", help=f"write a line of JSON a step ({fields}); a resumed run adds its lines to it"
    )
    files.add_argument("--out", type=_name, metavar="FILE.png", help="draw the loss curve (.png, .svg or .pdf)")
    files.add_argument("--save", type=_name, metavar="DIR", help="write a checkpoint at the end")
    files.add_argument("--save-every", type=int, metavar="N", help="with --save: write one every N steps too")
    files.add_argument(
        "--resume",
        type=_name,
        metavar="DIR",
        help="go on from the newest checkpoint in DIR, the folder given to --save. What must be as it was: --model, --data, --tp, --pp, "
        "--dp, --virtual-pp, --seq, --global-batch-size, --zero-stage, --sequence-parallel, --dtype, --accumulate-dtype, "
        "--reduce-dtype, --seed; the rest may change",
    )


def _schedule(where: argparse._ActionsContainer, names: Iterable[str], text: str) -> None:
    shown = f"{{{','.join(names)}}}"
    where.add_argument("--schedule", type=str.lower, metavar=shown, default=TrainConfig().schedule, help=text)


def _name(text: str) -> str:
    """The name of a file or a folder, which is never empty: that would be taken for no name at all, or for the folder one is in."""
    if not text:
        raise argparse.ArgumentTypeError("the name is empty; give one, or leave the option out")
    return text


def _require_gpu(device: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda", "torch sees no GPU here", "Use --device cpu")


def _require_room(given: str, world: int, device: str) -> None:
    """Refuse to start more ranks than this host has room for. Raises ConfigError."""
    cores = os.cpu_count() or 1
    most = torch.cuda.device_count() if device == "cuda" else RANKS_OF_A_CORE * cores
    if world > most:
        here = f"{most} GPU(s), one for each" if device == "cuda" else f"{cores} CPU core(s), with room for {most}"
        raise ConfigError(given, f"that is {world} ranks, and this host has {here}", "Use fewer, or more hosts with torchrun")


def job_of(args: argparse.Namespace) -> train.Job:
    """The job that the arguments of `train` ask for, with its layout resolved. Raises ConfigError."""
    for axis in ("tp", "pp"):
        if getattr(args, axis) == -1:
            raise ConfigError(f"--{axis} -1", "only --dp can be left open", f"Give --{axis} a size of 1 or more")
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    _require_gpu(device)
    virtual = (2 if args.schedule == "interleaved" else 1) if args.virtual_pp is None else args.virtual_pp
    given = vars(args) | {"virtual_pp": virtual}
    model = ModelConfig.load(args.model)
    training = TrainConfig(**{**fields_of(TrainConfig, given), "max_norm": args.max_norm or None})
    layout = Layout(**{**fields_of(Layout, given), "dp": (-1 if is_child() else 1) if args.dp is None else args.dp})
    if is_child():
        layout = layout.resolve(world_size(), lambda other: runs(model, other, training))
    elif layout.dp == -1:
        layout = layout.resolve(torch.cuda.device_count() if device == "cuda" else layout.tp * layout.pp)
    if not is_child():
        _require_room(str(layout), layout.world, device)
    return train.Job(
        **{
            **fields_of(train.Job, given),
            "model": model,
            "layout": layout,
            "train": training,
            "device": device,
        }
    )


def _run(args: argparse.Namespace, argv: Sequence[str]) -> int:
    for name, (values, rule, instead) in NOT_YET.items():
        if args.command != "draw" and getattr(args, name, values[0]) not in values:  # on paper more is possible
            raise ConfigError(f"{option_of(name)} {shlex.quote(str(getattr(args, name)))}", rule, instead)
    if args.command == "train":
        job = job_of(args)
        if job.layout.world == 1 or is_child():
            return train.run(job)
        train.prepare(job)  # what cannot run is said once, here, before any process is started
        print(f"starting {job.layout.world} ranks on this host", flush=True)
        return _launch(argv, job.layout.world)
    require_writable("--json", args.json)
    if args.command == "env":
        return env.run(args.json)
    if args.command == "draw":
        return draw.run(args.schedule, args.pp, args.microbatches, args.virtual_pp, args.out, args.json)
    if args.command == "bench":
        return _bench(args)
    if args.world < 1:
        raise ConfigError(f"--world {args.world}", "needs at least one rank", "Use --world 8")
    _require_gpu(args.device)
    if args.world == 1 or is_child():
        return check.run(args.world, all_rows=args.all, device=args.device, json_file=args.json)
    _require_room(f"--world {args.world}", args.world, args.device)
    return _launch(argv, args.world)


def _bench(args: argparse.Namespace) -> int:
    """Run what is asked for, one after the other; the first status that is not 0, if any. Files of several have their names added."""
    given = {name: value for name in OPTIONS if (value := getattr(args, name)) is not None and value is not False}
    for option in given:
        if others := [name for name in args.names if name not in OPTIONS[option]]:
            have = f"only {', '.join(OPTIONS[option])} {'has' if len(OPTIONS[option]) == 1 else 'have'} that"
            raise ConfigError(f"bench {others[0]} --{option}", have, "Leave it out")
    if given.pop("tune", False):
        given["tuning"] = True
    require_picture("--out", args.out)
    failed = 0
    for name in dict.fromkeys(args.names):
        files = {key: _of_one(file, name, len(args.names)) for key, file in (("json", args.json), ("out", args.out)) if file}
        more = given | ({"out": files["out"]} if "out" in files else {})
        status: int = importlib.import_module(f"pymesh3d.bench.{name}").main(files.get("json"), **more)
        if status in STOPPED:
            return status
        failed = failed or status
    return failed


def _of_one(file: str, name: str, count: int) -> str:
    """The file for one of `count` benchmarks."""
    path = Path(file)
    return file if count == 1 else str(path.with_name(f"{path.stem}-{name}{path.suffix}"))


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


def _say(text: str) -> None:
    print(f"[rank {os.environ['RANK']}] pymesh3d: {text}" if is_child() else f"pymesh3d: {text}", file=sys.stderr)


def _say_once(text: str) -> None:
    """Say what other ranks may have to say in the same words: then only the first of them does."""
    if not _another_said(text):
        _say(text)


def _another_said(text: str) -> bool:
    """Whether another rank said the same before, as the store of `launch` or of torchrun's agents knows, which outlives any rank."""
    store = agent_store(WAIT_FOR_THE_STORE) if is_child() else None
    with contextlib.suppress(RuntimeError):  # rather twice than never
        return store is not None and store.add(text, 1) > 1
    return False


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns its exit status: 0, 1 for a failure, 2 for a request that cannot run, 130 after Ctrl-C."""
    argv = sys.argv[1:] if argv is None else argv
    args = argparse.Namespace()
    try:
        watch_parent()
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")  # what a terminal cannot show, such as a name that is no text
        if not argv:
            parser().print_help()
            return 2
        parser().parse_args(argv, args)
        status = _run(args, argv)
    except ConfigError as error:
        _say_once(as_typed(error, vars(args)))
        status = 2
    except KeyboardInterrupt:
        status = 128 + signal.SIGINT
    except BrokenPipeError:
        if is_child():
            time.sleep(WAIT_FOR_THE_END)
        status = 128 + signal.SIGPIPE
    except DistributedError as error:
        _say(str(error))
        status = 1
    except OSError as error:
        _say_once(str(error))
        status = 1
    except RuntimeError as error:
        of_the_cpu = ("can't allocate memory", "Storage size calculation overflowed")  # its ways to say it
        if not isinstance(error, torch.OutOfMemoryError) and not any(words in str(error) for words in of_the_cpu):
            raise
        _say(f"out of memory ({str(error).splitlines()[0]}). Use more ranks, or a smaller model, batch or sequence")
        status = 1
    if is_child() or status > 128:
        # gloo's threads may still let go of Python objects, which aborts an interpreter that is closing down, or wait for a lost peer
        with contextlib.suppress(BrokenPipeError):
            sys.stdout.flush()
        os._exit(status)
    return status

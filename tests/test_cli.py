"""The command line as a person or a cluster uses it: refusals in one line, and an end in time for whatever goes wrong."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from pymesh3d import __version__, cli
from pymesh3d.errors import CheckpointError, ConfigError, DistributedError
from pymesh3d.launch import LOOPBACK, loopback_store
from tests.processes import free_port, gone, until

ROOT = Path(__file__).parent.parent
SMALL = ["--steps", "2", "--seq", "32", "--global-batch-size", "4", "--device", "cpu"]
needs_proc = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds the ranks in /proc")
STEP = re.compile(r"(?:^|\x1b\[2K) +\d+ +\d+\.\d{4} ", re.MULTILINE)


@pytest.fixture(autouse=True)
def at_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes import pymesh3d of this checkout; nothing of an outer launch is seen."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # threads wait for each other where cores are few
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.delenv(name, raising=False)


def test_help_says_what_every_option_is_and_what_it_is_by_default(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    for name in ("train", "check", "draw", "bench", "env"):
        with pytest.raises(SystemExit) as end:
            cli.main([name, "--help"])
        text = capsys.readouterr().out
        assert end.value.code == 0 and "None" not in text and "False" not in text
        assert all(re.match(r"  --?\S+(,? \S+)*\s\s+\S", entry) for entry in re.findall(r"^  -.*\n?.*", text, re.MULTILINE)), text
        assert ("--seed N              seed of the initial weights and of the order of the data (default: 0)" in text) == (name == "train")


def test_both_ways_to_start_it_are_the_same() -> None:
    (script,) = re.findall(r'^pymesh3d = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    module, name = script.split(":")
    assert module == "pymesh3d.__main__" and getattr(importlib.import_module(module), name) is cli.main
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler, "once it is imported, Ctrl-C is what it was"


def test_it_says_its_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["--version"])
    assert (end.value.code, capsys.readouterr().out) == (0, f"pymesh3d {__version__}\n")


def test_what_a_terminal_cannot_show_is_shown_otherwise(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    assert cli.main(["draw", "--pp", "1", "--microbatches", "1", "--out", str(tmp_path / "zeit\u00e9.svg")]) == 0
    sys.stdout.seek(0)
    assert sys.stdout.read().endswith("zeit\\xe9.svg\n") and (tmp_path / "zeit\u00e9.svg").is_file()


# Refusals: in this process, where nothing may start.


@pytest.fixture
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object, **__: object) -> int:
        raise AssertionError("something was started")

    monkeypatch.setattr(cli, "launch", never)
    monkeypatch.setattr(cli.train, "init_mesh", never)
    monkeypatch.setattr(cli.check, "init_mesh", never)
    monkeypatch.setattr(cli.torch.cuda, "is_available", lambda: False)


REFUSALS = {
    "train --tp 3": '"heads": 4, "kv_heads": 2, --tp 3: tp must divide heads, .* tp can be one of [1, 2, 4]',
    "train --tp 0": "--tp 0: tp must be a positive integer. Try --tp 1 or more",
    "train --tp 1000 --model {tmp}/wide.json": "pp 1 x dp 1 x tp 1000: that is 1000 ranks, and this host has .* Use fewer, or more hosts",
    "train --cp 2": "--cp 2: context parallelism is not available yet. Use --sequence-parallel with a larger --tp",
    "train --ep 2": "--ep 2: expert parallelism is not available yet. Use --tp, --pp and --dp",
    "train --pp 5": '"layers": 4, --pp 5: each stage needs at least one layer. Use --pp 4 or less',
    "train --pp -1 --dp -1": "--pp -1: only --dp can be left open. Give --pp a size of 1 or more",
    "train --dp 3": "--global-batch-size 16, --dp 3: dp must divide --global-batch-size, so .* Use --global-batch-size 18",
    "train --micro-batch-size 0": "--micro-batch-size 0: --micro-batch-size must be .* Try --micro-batch-size 1 or more",
    "train --tp 2 --sequence-parallel --seq 7": "--seq 7, --tp 2, --sequence-parallel: .* Use --seq 8, or no --sequence-parallel",
    "train --model nope": ".*nope.* neither a known name nor a file that exists. Use one of tiny,",
    "train --dtype fp16": "--dtype float16: fp16 needs loss scaling, .* Use --dtype bfloat16: same",
    "train --schedule zb": "--schedule zb: gpipe, 1f1b, interleaved and zb-h1 are here; other .* not available yet. Use --schedule zb-h1",
    "train --pp 2 --virtual-pp 2": "--schedule 1f1b, --virtual-pp 2: .* Use --schedule interleaved with --virtual-pp 2, or ",
    "train --pp 2 --schedule interleaved --virtual-pp 1": "--schedule interleaved, --virtual-pp 1: .* Use --schedule interleaved with --v",
    "train --pp 4 --schedule interleaved --virtual-pp 2": '"layers": 4, --pp 4, --virtual-pp 2: .* at least one layer. Use --pp 2 or less',
    "train --zero-stage 4": "--zero-stage 4: --zero-stage must be one of 0, 1, 2, 3. The default is 1",
    "train --zero-stage 2 --no-zero-once-a-step --schedule zb-h1": "--zero-stage 2, --no-zero-once-a-step, .* Use --zero-once-a-step, or ",
    "train --accumulate-dtype fp64": "--accumulate-dtype float64, .* than master weights. Use --accumulate-dtype float32",
    "train --device cuda": "--device cuda: torch sees no GPU here. Use --device cpu",
    "train --steps -1": "--steps -1: steps must be a positive integer. Try --steps 1 or more",
    "train --steps many": "argument --steps: invalid int value: 'many'. See pymesh3d train --help",
    "train --lr nan": "--lr nan: lr must be .* --lr 0.001",
    "train --lr -1": "--lr -1.0: lr must be .* --lr 0.001",
    "train --max-norm -1": "--max-norm -1.0: --max-norm must be .* --max-norm 0 ",
    "train --warmup-steps -1": "--warmup-steps -1: it must be 0 or more. Use 0 ",
    "train --save-every -1 --save {tmp}/new": "--save-every -1: it must be 1 or more. Leave it out ",
    "train --save-every 5": "--save-every 5: there is no folder to save to. Add --save DIR",
    "train --timeout 0": "--timeout 0.0: it must be above 0 s .* The default is --timeout 300",
    "train --timeout inf": "--timeout inf: it must be above 0 s .* The default is --timeout 300",
    "train --tp -1": "--tp -1: only --dp can be left open. Give --tp a size of 1 or more",
    "train --save /proc/x": "--save /proc/x: cannot be written to (No such file or directory). Choose another folder",
    "train --seed -1": "--seed -1: a seed must be an integer from 0 to 2**64 - 1. Use --seed 0",
    "train --data {tmp}/missing": "--data {tmp}/missing: it does not exist. Give a text file",
    "train --data {tmp}/empty.txt": "--data {tmp}/empty.txt: it is empty. Give a text file",
    "train --data /dev/null": "--data /dev/null: it is neither a file nor a folder, .* Give a text file",
    "train --data=": "argument --data: the name is empty; give one, or leave the option out. See pymesh3d train --help",
    "train --data {tmp}/short.txt": "--data {tmp}/short.txt, --seq 128: its 60 tokens are fewer .* Use more text, or --seq 59 or less",
    "train --data {tmp}/short.txt --seq 32": "--global-batch-size 16, --seq 32: .* 1 window .* --global-batch-size 1 or less, --seq 3 or",
    "train --data {tmp}/seq=8.txt --seq 8": "--global-batch-size 16, --seq 8: the corpus '60 bytes of seq=8.txt' has only 7 windows of ",
    "train --data {tmp}/ids.npy": '--data {tmp}/ids.npy, "vocab": 256: .* the id 999, .* Use "vocab": 1000 or more (names in quotes ',
    "train --out {tmp}/no/loss.png": "--out {tmp}/no/loss.png: there is no such folder. mkdir -p {tmp}/no",
    "train --out {tmp}/x.jpg": "--out {tmp}/x.jpg: the end of its name picks the format, one of .png, .svg, .pdf. Use --out picture.png",
    "train --log-json {tmp}": "--log-json {tmp}: it is a folder. Give the name of a file",
    "train --save {tmp}/used": "--save {tmp}/used: holds checkpoints up to step 7. Add --resume {tmp}/used, or choose another",
    "train --resume {tmp}/new": "--resume {tmp}/new: there is no such folder. Give the directory that --save wrote to",
    "train --nonsense": "unrecognized arguments: --nonsense. See pymesh3d train --help",
    "train --micro-batchsize 2": "unrecognized arguments: --micro-batchsize 2 (did you mean --micro-batch-size?). See pymesh3d train --h",
    "check --world 0": "--world 0: needs at least one rank. Use --world 8",
    "check --world 1000000": "--world 1000000: that is 1000000 ranks, and this host has .* Use fewer, or more hosts with torchrun",
    "check --device cuda": "--device cuda: torch sees no GPU here. Use --device cpu",
    "check --json {tmp}/no/check.json": "--json {tmp}/no/check.json: there is no such folder. mkdir -p {tmp}/no",
    "draw --pp 0": "--pp 0: pp must be a positive integer. Try --pp 1 or more",
    "draw --pp 1000": "--pp 1000 --microbatches 8: a drawing has at most 256 stages, .* Use --pp 16 --microbatches 64",
    "draw --schedule zb": "--schedule zb: there is no schedule of that name. Use one of gpipe, 1f1b, interleaved",
    "draw --virtual-pp 2": "--schedule 1f1b, --virtual-pp 2: .* Use --schedule interleaved with --virtual-pp 2, or ",
    "draw --schedule interleaved --virtual-pp 1": "--schedule interleaved, --virtual-pp 1: .* several stages a rank, .* --virtual-pp 2, ",
    "draw --schedule interleaved --virtual-pp 0": "--schedule interleaved, --virtual-pp 0: .* Use --schedule interleaved with",
    "draw --schedule interleaved --pp 1": "--virtual-pp 2, --pp 1: .* need several ranks. Use --pp 2, or --schedule 1f1b with --virtual-p",
    "draw --out {tmp}/no/x.png": "--out {tmp}/no/x.png: there is no such folder. mkdir -p {tmp}/no",
    "draw --out {tmp}/x.jpg": "--out {tmp}/x.jpg: the end of its name picks the format, one of .png, .svg, .pdf. Use --out picture.png",
    "draw --json {tmp}/empty.txt/x": "--json {tmp}/empty.txt/x: {tmp}/empty.txt is a file. Give the name of a file in a folder",
    "env --json {tmp}": "--json {tmp}: it is a folder. Give the name of a file",
    "bench philox --json=": "argument --json: the name is empty; ",
    "bench nothing": "argument name: invalid choice: 'nothing' .* See pymesh3d bench --help",
    "nothing": "argument command: invalid choice: 'nothing'",
    "bench all_gather_matmul philox --tp 2": "bench philox --tp: only all_gather_matmul, .* have that",
    "bench": "the following arguments are required: name. See pymesh3d bench --help",
}


@pytest.mark.parametrize("line", REFUSALS)
def test_what_cannot_run_is_refused_in_one_line(
    nothing_starts: None, tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str
) -> None:
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "short.txt").write_text("x" * 60)
    (tmp_path / "seq=8.txt").write_text("x" * 60)
    (tmp_path / "wide.json").write_text('{"dim": 2000, "heads": 1000, "kv_heads": 1000, "ffn": 1000}')
    np.save(tmp_path / "ids.npy", np.array([999] + [1] * 10_000))
    (tmp_path / "used" / "step-00000007").mkdir(parents=True)
    (tmp_path / "used" / "step-00000007" / "manifest.json").write_text("{}")
    try:
        status = cli.main(line.format(tmp=tmp_path).split())
    except SystemExit as end:
        status = end.code  # type: ignore[assignment]
    out, err = capsys.readouterr()
    assert status == 2 and out == "" and err.count("\n") == 1, err
    pattern = "pymesh3d: " + re.escape(REFUSALS[line]).replace(r"\{tmp\}", re.escape(str(tmp_path))).replace(r"\.\*", ".*")
    assert re.match(pattern, err), err
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("given", [None, "ACTIVE"])
def test_threads_that_wait_do_not_spin_unless_told_to(given: str | None) -> None:
    env = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"} | ({"OMP_WAIT_POLICY": given} if given else {})
    script = "import os, pymesh3d.__main__; print(os.environ['OMP_WAIT_POLICY'])"
    done = subprocess.run([sys.executable, "-c", script], env=env, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == (given or "PASSIVE"), done.stderr


def test_compiled_layers_need_a_compiler(nothing_starts: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PATH", "")
    assert cli.main(["train", "--tp", "2", "--compile", "--device", "cpu"]) == 2
    expected = "pymesh3d: --compile: torch.compile cannot work here: there is no C++ compiler (g++, or what CXX names). "
    assert capsys.readouterr().err == f"{expected}Install it, or leave --compile out\n"


def test_the_command_alone_shows_what_there_is(nothing_starts: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    out, err = capsys.readouterr()
    assert err == "" and all(f"\n    {command} " in out for command in ("train", "check", "draw", "bench", "env"))


@pytest.mark.parametrize(
    ("content", "words"),
    [("{", "not readable as JSON"), ('{"seq": 8}', "with ['seq']: unknown fields"), ('{"dim": 0}', 'with "dim": 0: dim must be')],
)
def test_a_name_that_looks_like_a_field_stays_as_it_is(
    nothing_starts: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], content: str, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("seq=8.json").write_text(content)
    assert cli.main(["train", "--model", "seq=8.json"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("pymesh3d: model file 'seq=8.json'") and words in err


def test_benchmarks_run_by_their_names(nothing_starts: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    names = {path.stem for path in (ROOT / "bench").glob("*.py")} - {"__init__", "picture", "products", "report", "tables", "timing"}
    assert names == set(cli.BENCHMARKS)
    ran: list[tuple[str, str]] = []
    for name in cli.BENCHMARKS:
        monkeypatch.setattr(f"pymesh3d.bench.{name}.main", lambda file, name=name: ran.append((name, file)) or len(ran) - 1)
        assert cli.main(["bench", name, "--json", str(tmp_path / name)]) == len(ran) - 1, "its own exit status"
    assert ran == [(name, str(tmp_path / name)) for name in cli.BENCHMARKS]
    assert cli.main(["bench", "philox", "swiglu", "philox", "--json", str(tmp_path / "all.json")]) == len(ran) - 2, "the first but 0"
    assert ran[-2:] == [(name, str(tmp_path / f"all-{name}.json")) for name in ("philox", "swiglu")]


@pytest.mark.parametrize(
    ("error", "status", "words"),
    [
        (ConfigError("seq=7", "too long", "Use global_batch=3"), 2, "--seq 7: too long. Use --global-batch-size 3"),
        (CheckpointError("resume='a'", "is not whole", "Use another"), 2, "--resume a: is not whole. Use another"),
        (OSError("--save a: the disk is full"), 1, "--save a: the disk is full"),
        (DistributedError("rank 0: all is lost"), 1, "rank 0: all is lost"),
        (torch.OutOfMemoryError("CUDA out of memory.\nMany words"), 1, "out of memory (CUDA out of memory.). Use more ranks, or a smaller"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: 9 bytes"), 1, "out of memory (DefaultCPUAllocator: can't"),
    ],
)
def test_a_refusal_is_2_and_a_failure_is_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception, status: int, words: str
) -> None:
    def fail(_: object) -> int:
        raise error

    monkeypatch.setattr(cli.train, "run", fail)
    assert cli.main(["train", "--device", "cpu"]) == status
    err = capsys.readouterr().err
    assert err.startswith(f"pymesh3d: {words}") and err.count("\n") == 1


def test_a_fault_of_ours_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli.train, "run", lambda job: torch.zeros(2) @ torch.zeros(3))
    with pytest.raises(RuntimeError, match="inconsistent tensor size"):
        cli.main(["train", "--device", "cpu"])


def test_of_ranks_with_the_same_words_the_first_speaks(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """And those with other words too, also after a restart; without the store of an agent, everyone does."""
    store = loopback_store()
    environment = {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(store.port), "WORLD_SIZE": "3"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)

    def said(rank: int, text: str, restart: int = 0) -> str:
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(restart))
        cli._say_once(text)
        return capsys.readouterr().err

    assert said(1, "no data") == "[rank 1] pymesh3d: no data\n"
    assert said(0, "no data") == "" == said(1, "no data")
    assert said(2, "no GPU") == "[rank 2] pymesh3d: no GPU\n"
    assert said(0, "no data", restart=1) == "[rank 0] pymesh3d: no data\n"
    monkeypatch.setenv("MASTER_PORT", "none")
    assert said(0, "no data") == "[rank 0] pymesh3d: no data\n"
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE")
    assert said(0, "no data") == "[rank 0] pymesh3d: no data\n"


def command(*arguments: str, stdout: int = subprocess.PIPE, **environ: str) -> subprocess.Popen[str]:
    """`python -m pymesh3d` with its output in pipes, or wherever it is to go."""
    return subprocess.Popen(
        [sys.executable, "-m", "pymesh3d", *arguments],
        env={**os.environ, **environ},
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(process: subprocess.Popen[str], seconds: float) -> tuple[int, str, str]:
    """Exit status, output and errors of a process that ends in time."""
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        raise AssertionError(f"{process.args} had not ended after {seconds} s:\n{out}\n{err}") from None
    return process.returncode, out, err


def test_under_torchrun_what_cannot_run_or_meet_ends_with_a_word() -> None:
    """Worlds that do not fit, nonsense in torchrun's variables, a port in use, and a rank that never comes; all at once."""
    agent = loopback_store()
    with socket.create_server((LOOPBACK, 0)) as taken:
        meeting = {"LOCAL_RANK": "0", "RANK": "0", "MASTER_ADDR": LOOPBACK}
        busy = command("train", "--tp", "2", "--timeout", "5", *SMALL, WORLD_SIZE="2", **meeting, MASTER_PORT=str(taken.getsockname()[1]))
        lonely = command("train", "--tp", "2", "--timeout", "2", *SMALL, WORLD_SIZE="2", **meeting, MASTER_PORT=free_port())
        joined = {"WORLD_SIZE": "6", "TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(agent.port)}
        odd = command("train", "--tp", "2", *SMALL, RANK="0", WORLD_SIZE="3")
        misfits = [command("train", "--tp", "4", *SMALL, RANK=rank, **joined) for rank in ("0", "1")]
        nonsense = command("train", *SMALL, RANK="0", WORLD_SIZE="six")
        silent, (status, out, err) = sorted(ended(misfit, 60) for misfit in misfits)
        assert silent == (2, "", "") and (status, out) == (2, ""), "one speaks for both"
        assert re.fullmatch(r"\[rank [01]\] pymesh3d: world size 6 with pp 1 x dp -1 x tp 4: the axes multiply to 4, which .*\n", err)
        status, out, err = ended(odd, 60)
        assert (status, out) == (2, "") and err.endswith("must divide the world size. With 3 ranks pp 3 x dp 1 x tp 1 fits\n"), err
        status, out, err = ended(nonsense, 60)
        assert (status, out) == (2, "") and err.startswith("[rank 0] pymesh3d: WORLD_SIZE='six': the environment variable must be")
        status, _, err = ended(lonely, 60)
        assert status == 1 and "rank 0 of 2 could not meet the others at 127.0.0.1:" in err and "within 2 s" in err
        assert "ranks [1] have not come" in err and "Traceback" not in err
        status, _, err = ended(busy, 60)
        assert status == 1 and f"rank 0 of 2 could not meet the others at 127.0.0.1:{taken.getsockname()[1]}" in err
        assert re.search("EADDRINUSE|address already in use", err) and "Traceback" not in err


# Training: in processes of its own, to be disturbed.


class Training:
    """`pymesh3d train` on 2 ranks for very many steps, its output on a terminal."""

    def __init__(self, *options: str) -> None:
        self.output = ""
        self._terminal, theirs = os.openpty()
        self.process = command("train", *SMALL, "--steps", "100000", *options, stdout=theirs, TERM="xterm")
        os.close(theirs)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        with contextlib.suppress(OSError), open(self._terminal, newline="") as lines:  # an error is how a terminal reports its end
            while piece := lines.read(1):
                self.output += piece

    def until_it_trains(self) -> None:
        assert until(lambda: len(STEP.findall(self.output)) >= 3 or self.process.poll() is not None, 90), self.output
        assert self.process.poll() is None, self.process.communicate()

    def ranks(self) -> list[int]:
        """The process ids of its ranks, in order."""
        found = {}
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError, ValueError, IndexError):
                if int((entry / "stat").read_text().rpartition(")")[2].split()[1]) == self.process.pid:
                    environ = dict(item.split("=", 1) for item in (entry / "environ").read_text().split("\0") if "=" in item)
                    found[int(environ["RANK"])] = int(entry.name)
        return [found[rank] for rank in range(len(found))]

    def errors(self, seconds: float) -> str:
        """What it printed to standard error, once it has ended by itself."""
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"had not ended after {seconds} s:\n{self.output}") from None
        self._reader.join(10)
        assert self.process.stderr is not None, "errors go into a pipe"
        return self.process.stderr.read()


@contextlib.contextmanager
def training(*options: str) -> Iterator[Training]:
    one = Training(*options)
    try:
        yield one
    finally:
        one.process.kill()
        one.process.wait(10)


@needs_proc
def test_a_killed_rank_ends_the_others_and_is_named() -> None:
    with training("--pp", "2") as one:
        one.until_it_trains()
        pids = one.ranks()
        os.kill(pids[1], signal.SIGKILL)
        errors = one.errors(10)
        assert until(lambda: all(map(gone, pids)), 1)
    assert one.process.returncode == 128 + signal.SIGKILL
    assert "pymesh3d: rank 1 was ended by SIGKILL, perhaps because the machine ran out of memory" in errors
    assert re.search(r"\[rank 0\] pymesh3d: rank 0: .* over axis \w+ with ranks \[1\] failed after [\d.]+ s: ", errors)
    assert "Traceback" not in errors


@needs_proc
def test_a_frozen_rank_is_waited_for_no_longer_than_the_timeout() -> None:
    with training("--tp", "2", "--timeout", "3") as one:
        one.until_it_trains()
        pids = one.ranks()
        os.kill(pids[1], signal.SIGSTOP)
        began = time.monotonic()
        errors = one.errors(20)
        assert 2 < time.monotonic() - began < 15
        assert until(lambda: all(map(gone, pids)), 1)
    assert one.process.returncode == 1
    assert re.search(r"\[rank 0\] pymesh3d: rank 0: [\w -]+ over axis \w+ with ranks \[1\] failed after 3\.\d s: ", errors)
    assert "pymesh3d: rank 0 ended with exit code 1; stopping the others" in errors and "Traceback" not in errors


@needs_proc
def test_ctrl_c_in_the_first_second_is_quiet_too() -> None:
    process = command("env")
    assert until(lambda: "libtorch" in Path(f"/proc/{process.pid}/maps").read_text(), 30), "it imports torch"
    process.send_signal(signal.SIGINT)
    assert ended(process, 20) == (130, "", "")


@needs_proc
def test_ctrl_c_ends_all_processes_quietly() -> None:
    with training("--dp", "2") as one:
        one.until_it_trains()
        pids = one.ranks()
        assert len(pids) == 2
        one.process.send_signal(signal.SIGINT)
        began = time.monotonic()
        errors = one.errors(8)
        assert until(lambda: all(map(gone, pids)), 1) and time.monotonic() - began < 5
    assert one.process.returncode == 130 and errors == ""
    assert "training " in one.output and "steps, left" in one.output, "the progress bar"
    assert one.output.rindex("\x1b[?25h") > one.output.rindex("\x1b[?25l"), "the cursor shows again"


def test_a_closed_pipe_ends_training_quietly() -> None:
    """`pymesh3d train | head -5`, in one process and in two."""
    both = [command("train", *SMALL, "--steps", "100000", "--dp", ranks) for ranks in ("1", "2")]
    try:
        for process in both:
            assert process.stdout is not None, "output goes into a pipe"
            assert [process.stdout.readline() for _ in range(5)][-1] != ""
            process.stdout.close()
        for process in both:
            process.wait(20)
            assert process.stderr is not None and process.stderr.read() == ""
            assert process.returncode in (130, 141)
    finally:
        for process in both:
            process.kill()


def test_what_a_newcomer_sees(tmp_path: Path) -> None:
    """The first command of all, made small: exit status 0, nothing on standard error, and all that was asked for."""
    log, picture, saved = tmp_path / "log.jsonl", tmp_path / "loss.png", tmp_path / "saved"
    files = ["--log-json", str(log), "--out", str(picture), "--save", str(saved)]
    status, out, err = ended(command("train", "--tp", "2", "--dp", "1", *SMALL, *files), 90)
    assert (status, err) == (0, "")
    assert out.startswith("starting 2 ranks on this host\nmesh pp 1 x dp 1 x tp 2 = 2 rank(s) on 1 host(s), cpu\n")
    assert [len(re.findall(what, out)) for what in (STEP, r"data  .* bytes of the Python standard library", "embed, layers 0-3")] == [
        2,
        1,
        1,
    ]
    assert f"saved {saved}/step-00000002\n" in out and "MFU" not in out
    reached, kept = r"2 steps in 0:\d\d \([\d,]+ tokens/s\), loss from 5\.\d{4} to 5\.\d{4}", f"log: {log}; picture: {picture}"
    assert re.search(rf"\n{reached}; {re.escape(kept)}; checkpoint: {re.escape(str(saved))}/step-00000002\n$", out)
    assert [json.loads(line)["tokens"] for line in log.read_text().splitlines()] == [128, 128]
    assert picture.read_bytes().startswith(b"\x89PNG") and (saved / "step-00000002" / "manifest.json").is_file()


# A rank of `check` on two small rows: as it is, then with the row-parallel layer broken.
DRIVER = """
import sys
from pymesh3d import cli
from pymesh3d.commands import check
from pymesh3d.commands.layouts import Row
from pymesh3d.mesh import init_mesh
from pymesh3d.tp.layers import RowParallelLinear
mesh = init_mesh(tp=2, dp=1, device="cpu")  # so that its process group serves both runs
check.covering_rows = lambda rows: [Row(tp=2, sequence_parallel=True), Row(pp=2)]
assert check.run(2, all_rows=False, device="cpu", json_file=None) == 0
forward = RowParallelLinear.forward
RowParallelLinear.forward = lambda self, x: forward(self, x) * (1 + 1e-9)
sys.exit(cli.main(["check", "--world", "2", "--json", sys.argv[1]]))
"""


def test_check_passes_what_is_right_and_fails_what_is_broken(tmp_path: Path) -> None:
    call = f"import sys; from pymesh3d.launch import launch; sys.exit(launch(['-c', {DRIVER!r}, sys.argv[1]], 2))"
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen([sys.executable, "-c", call, str(tmp_path / "bad.json")], text=True, **pipes)  # type: ignore[call-overload]
    status, out, err = ended(process, 90)
    assert status == 1 and "Traceback" not in err
    assert [out.count(f"{good} of 2 layouts agree with one process in float64") for good in (2, 0)] == [1, 1]
    differences = [row["gradients"] for row in json.loads((tmp_path / "bad.json").read_text())]
    assert all(1e-12 < difference < 1e-7 for difference in differences) and out.count("DIFFERS: gradient of embed.weight") == 2

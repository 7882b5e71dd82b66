"""The main job: what it logs, draws and saves, that it goes on where it stopped, and what it refuses before it starts."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import io
import json
import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from pymesh3d import engine as engine_module
from pymesh3d.checkpoint.manifest import file_of, folder_of
from pymesh3d.cli import parser
from pymesh3d.commands import train
from pymesh3d.commands.spelling import MODEL_FIELDS, option_of
from pymesh3d.commands.train import Job
from pymesh3d.config import Layout, ModelConfig, TrainConfig
from pymesh3d.data import load_corpus
from pymesh3d.engine import Engine, StepResult, parallelize
from pymesh3d.errors import CheckpointError, ConfigError, DataError, DistributedError
from pymesh3d.mesh import init_mesh
from pymesh3d.models.llama import Llama
from pymesh3d.planner.model import flops_per_token

Ranks = Callable[..., list[Any]]
KEYS = ["step", "loss", "grad_norm", "tokens", "tps", "tflops", "mfu", "memory_gib", "time_s"]
MODEL = ModelConfig(vocab=256, dim=32, layers=4, heads=4, kv_heads=2, ffn=48)
TRAIN = TrainConfig(seq=16, global_batch=4, micro_batch=1, steps=4, lr=1e-2)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("data") / "corpus.txt"
    file.write_bytes(np.random.default_rng(0).integers(60, 80, 2000, dtype=np.uint8).tobytes())
    return str(file)


def job(data: str, changes: dict[str, Any] | None = None, **options: Any) -> Job:
    return Job(
        **{
            "model": MODEL,
            "layout": Layout(),
            "train": dataclasses.replace(TRAIN, **(changes or {})),
            "device": "cpu",
            "data": data,
            "warmup_steps": 3,
            **options,
        }
    )


def run(*jobs: Job) -> str:
    """The part of a rank: one job after the other; what they print."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        for one in jobs:
            assert train.run(one) == 0
    return printed.getvalue()


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_the_log_says_the_same_in_every_layout_and_counts_tokens_once(ranks: Ranks, text: str, tmp_path: Path) -> None:
    logs = {}
    layouts = {"one": Layout(), "tp": Layout(tp=2), "pp": Layout(pp=2), "dp": Layout(dp=2)}
    for name, layout in layouts.items():
        first, *others = ranks(layout.world, run, job(text, layout=layout, log_json=str(tmp_path / name)))
        assert first and not any(others), "rank 0 speaks, and it alone"
        logs[name] = lines(tmp_path / name)
    for name, log in logs.items():
        assert [line["step"] for line in log] == [1, 2, 3, 4]
        for line, expected in zip(log, logs["one"], strict=True):
            assert list(line) == KEYS
            assert line["tokens"] == 4 * 16
            assert line["loss"] == pytest.approx(expected["loss"], rel=1e-5) and 3 < line["loss"] < 7
            assert line["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)
            assert line["tps"] == pytest.approx(64 / line["time_s"]) and 0 < line["time_s"] < 60
            assert line["tflops"] == pytest.approx(line["tps"] * flops_per_token(MODEL, 16) / layouts[name].world / 1e12)
            assert line["mfu"] is None, "nobody knows the peak of a CPU"
            assert 0.05 < line["memory_gib"] < 8
    assert logs["one"][-1]["loss"] < logs["one"][0]["loss"]


def test_the_learning_rate_rises_then_stays(text: str) -> None:
    assert [job(text).learning_rate(taken) for taken in range(5)] == pytest.approx([0.01 / 3, 0.02 / 3, 0.01, 0.01, 0.01], rel=1e-15)
    assert job(text, warmup_steps=0).learning_rate(0) == job(text, warmup_steps=1).learning_rate(0) == 0.01


def rates(one: Job, bad: int) -> list[float]:
    """The learning rate that each step sees; step `bad` finds a gradient that is not finite."""
    seen: list[float] = []
    step = Engine.train_step

    def spoiled(self: Engine, batch: Any) -> Any:
        seen.extend(group["lr"] for group in self.optimizer.param_groups[:1])
        if len(seen) == bad:
            self.zero.buckets[0].grads[0] = math.nan
        return step(self, batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "train_step", spoiled)
        run(one)
    return seen


def test_a_skipped_step_does_not_advance_the_learning_rate(ranks: Ranks, text: str, tmp_path: Path) -> None:
    """And its norm is null in the log, because JSON has no NaN."""
    log = tmp_path / "log"
    assert ranks(1, rates, job(text, log_json=str(log)), 2)[0] == pytest.approx([0.01 / 3, 0.02 / 3, 0.02 / 3, 0.01], rel=1e-15)
    assert [line["grad_norm"] is None for line in lines(log)] == [False, True, False, False]


@pytest.mark.parametrize(("layout", "stage"), [(Layout(), 1), (Layout(dp=2), 1), (Layout(dp=2), 3)])
def test_a_resumed_run_is_the_same_run(ranks: Ranks, text: str, tmp_path: Path, layout: Layout, stage: int) -> None:
    """Losses, norms, all that is saved, and the log, over a seam in the middle of the warm-up."""
    whole, parts = str(tmp_path / "whole"), str(tmp_path / "parts")
    straight = job(text, {"zero_stage": stage}, layout=layout, save=whole, log_json=f"{whole}.jsonl")
    begun = job(text, {"zero_stage": stage, "steps": 2}, layout=layout, save=parts, log_json=f"{parts}.jsonl")
    gone_on = dataclasses.replace(begun, train=straight.train, resume=parts)
    ranks(layout.world, run, straight, begun, gone_on)
    expected, found = lines(Path(f"{whole}.jsonl")), lines(Path(f"{parts}.jsonl"))
    assert [(line["step"], line["loss"], line["grad_norm"]) for line in found] == [
        (line["step"], line["loss"], line["grad_norm"]) for line in expected
    ]
    assert sorted(path.name for path in Path(parts).iterdir()) == ["step-00000002", "step-00000004"]
    for rank in range(layout.world):
        one, two = (load_file(file_of(folder_of(Path(directory), 4), rank)) for directory in (whole, parts))
        assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def eaten(*jobs: Job) -> list[list[list[int]]]:
    """The part of a rank: one job after the other; of each step the rows that it is given, targets behind their tokens."""
    seen: list[list[list[int]]] = []
    step = Engine.train_step

    def watched(self: Engine, batch: Any) -> Any:
        seen.append(torch.cat(batch, dim=1).tolist())
        return step(self, batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "train_step", watched)
        run(*jobs)
    return seen


@pytest.mark.parametrize(
    ("layout", "partners"),
    [(Layout(tp=2, dp=2), ((0, 1), (2, 3))), (Layout(pp=2, dp=2), ((0, 2), (1, 3)))],
    ids=["tp", "pp"],
)
def test_batches_follow_the_dp_coordinate_alone(
    ranks: Ranks, text: str, tmp_path: Path, layout: Layout, partners: tuple[tuple[int, int], ...]
) -> None:
    """Partners on other axes get the same rows, dp ranks in order those of one process, also after a seam in the middle of an epoch."""
    whole = job(text)
    begun = job(text, {"steps": 2}, layout=layout, save=str(tmp_path))
    found = ranks(4, eaten, begun, dataclasses.replace(begun, train=whole.train, resume=str(tmp_path)))
    batches = train.prepare(whole)
    expected = [np.concatenate(batches.batch(step, 0, 1), axis=1).tolist() for step in range(4)]
    for one, other in partners:
        assert found[one] == found[other]
    assert [one + other for one, other in zip(*(found[first] for first, _ in partners), strict=True)] == expected
    assert len({tuple(row) for step in expected for row in step}) == 16, "rows that differ, or any share would do"


def test_saves_every_so_often_and_at_the_end(ranks: Ranks, text: str, tmp_path: Path) -> None:
    (printed,) = ranks(1, run, job(text, {"steps": 5}, save=str(tmp_path), save_every=2))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000002", "step-00000004", "step-00000005"]
    assert printed.count("saved ") == 3
    assert printed.endswith(f"; checkpoint: {tmp_path}/step-00000005\n")
    log = tmp_path / "log.jsonl"
    log.write_text("what was logged\n")
    (printed,) = ranks(1, run, job(text, {"steps": 5}, resume=str(tmp_path), log_json=str(log), out=str(tmp_path / "loss.png")))
    assert printed.splitlines()[-2:] == [
        f"resumed from {tmp_path}/step-00000005",
        "the checkpoint has taken 5 steps of 5: nothing is left to do. Give more with --steps",
    ]
    assert "tokens/s" not in printed and log.read_text() == "what was logged\n"


def reached(one: Job) -> tuple[Any, ...]:
    """What the last line is made from."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train.Progress, "reached", lambda self, *values: seen.append(values))
        seen: list[tuple[Any, ...]] = []
        run(one)
    return seen[0]


def test_what_was_reached_is_told_of_all_steps_and_all_tokens(ranks: Ranks, text: str, tmp_path: Path) -> None:
    log = str(tmp_path / "log")
    one, two = ranks(2, reached, job(text, layout=Layout(dp=2), log_json=log))
    assert one == two == ([line["loss"] for line in lines(Path(log))], 4 * 64, {"log": log, "picture": None, "checkpoint": None})


def failed_save(one: Job) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pymesh3d.checkpoint.save.save_file", full_disk)
        with pytest.raises(OSError, match="No space left on device") as caught:
            run(one)
    assert not isinstance(caught.value, ConfigError), "it is a failure, no refusal"
    return str(caught.value)


def full_disk(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_save_that_fails_is_a_failure_of_the_run(ranks: Ranks, text: str, tmp_path: Path) -> None:
    (said,) = ranks(1, failed_save, job(text, {"steps": 1}, save=str(tmp_path)))
    assert said.startswith(f"checkpoint '{tmp_path}/step-00000001': not saved") and not list(tmp_path.iterdir())


def test_another_run_is_refused_by_what_differs(ranks: Ranks, text: str, tmp_path: Path) -> None:
    """Before any process is started."""
    ranks(1, run, job(text, {"steps": 1}, save=str(tmp_path)))
    for changes, options, now, before in [
        ({"seed": 7}, {}, "seed=7", "seed=0"),
        ({"zero_stage": 0, "seed": 8}, {}, "seed=8, zero_stage=0", "seed=0, zero_stage=1"),
        ({"dtype": "bfloat16"}, {}, "dtype='bfloat16'", "dtype='float32'"),
        (
            {"reduce_dtype": "bfloat16", "accumulate_dtype": "bfloat16", "zero_once_a_step": True},
            {},
            "accumulate_dtype='bfloat16', reduce_dtype='bfloat16'",
            "accumulate_dtype=None, reduce_dtype=None",
        ),
        ({}, {"model": dataclasses.replace(MODEL, layers=5)}, "layers=5", "layers=4"),
    ]:
        with pytest.raises(CheckpointError) as caught:
            train.prepare(job(text, changes, resume=str(tmp_path), **options))
        said = f"resume={str(tmp_path)!r} with {now}: it was written by another run, with {before}. Use {before}"
        assert str(caught.value) == said
    with pytest.raises(CheckpointError) as caught:
        train.prepare(job(text, layout=Layout(tp=2), resume=str(tmp_path)))
    said = "with tp=2: it was written with tp=1, and to resume on another layout is not available yet. Use tp=1"
    assert str(caught.value) == f"resume={str(tmp_path)!r} {said}"
    other, more = tmp_path / "other.txt", tmp_path / "corpus.txt"
    other.write_bytes(Path(text).read_bytes())
    more.write_bytes(Path(text).read_bytes() + b"<")
    before, digest = "corpus='2.0 k bytes of corpus.txt (2000 tokens)'", f"corpus_digest={digest_of(Path(text))!r}"
    with pytest.raises(CheckpointError) as caught:
        train.prepare(job(str(other), resume=str(tmp_path)))
    said = f"corpus='2.0 k bytes of other.txt (2000 tokens)': it was written by another run, with {before}. Use {before}"
    assert str(caught.value) == f"resume={str(tmp_path)!r} with {said}"
    with pytest.raises(CheckpointError) as caught:
        train.prepare(job(str(more), resume=str(tmp_path)))
    said = f"corpus='2.0 k bytes of corpus.txt (2001 tokens)', corpus_digest={digest_of(more)!r}: it was written by another run, with "
    assert str(caught.value) == f"resume={str(tmp_path)!r} with {said}{before}, {digest}. Use {before}, {digest}"
    more.write_bytes(Path(text).read_bytes()[::-1])
    with pytest.raises(CheckpointError) as caught:
        train.prepare(job(str(more), resume=str(tmp_path)))
    said = f"corpus_digest={digest_of(more)!r}: it was written by a run on other data of the same name and size, {digest}. Give the data as"
    assert str(caught.value) == f"resume={str(tmp_path)!r} with {said} they were, or begin anew in another folder"
    free = {"steps": 2, "lr": 0.5, "schedule": "gpipe", "micro_batch": 2, "recompute": "full", "max_norm": None, "weight_decay": 0.0}
    free |= {"zero_once_a_step": True, "optimizer_offload": True}
    ranks(1, run, job(text, free, resume=str(tmp_path)))  # what may change does


def digest_of(file: Path) -> str:
    return load_corpus(str(file), 256, 8).digest


def test_a_checkpoint_that_knows_no_digest_is_resumed(ranks: Ranks, text: str, tmp_path: Path) -> None:
    """As versions before wrote it; what is saved then knows it."""
    ranks(1, run, job(text, {"steps": 1}, save=str(tmp_path)))
    first, second = (folder_of(tmp_path, step) / "manifest.json" for step in (1, 2))
    manifest = json.loads(first.read_text())
    assert manifest["about"].pop("corpus_digest") == digest_of(Path(text))
    first.write_text(json.dumps(manifest))
    (printed,) = ranks(1, run, job(text, {"steps": 2}, resume=str(tmp_path), save=str(tmp_path)))
    assert f"resumed from {tmp_path}/step-00000001" in printed
    assert json.loads(second.read_text())["about"]["corpus_digest"] == digest_of(Path(text))


def run_on_different_data(one: Job, files: list[str]) -> str:
    """Rank r trains on file r; what it is told, before any step."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(DistributedError) as caught:
        patch.setattr(Engine, "train_step", lambda *_: pytest.fail("a step was begun"))
        train.run(dataclasses.replace(one, data=files[dist.get_rank()]))
    return str(caught.value)


def test_ranks_that_see_different_data_train_no_step(ranks: Ranks, text: str, tmp_path: Path) -> None:
    """Of one name and size, as where a host has an older copy."""
    other = tmp_path / Path(text).name
    other.write_bytes(Path(text).read_bytes()[::-1])
    told = ranks(2, run_on_different_data, job(text, layout=Layout(dp=2)), [text, str(other)])
    names = [f"'2.0 k bytes of corpus.txt, digest {digest_of(Path(file))}'" for file in (text, other)]
    said = f"all ranks must have the same data, {names[0]}, but rank 1 has {names[1]}. Install and start the same everywhere"
    assert told == [said, said]


def test_the_help_of_resume_names_what_must_be_the_same(
    text: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    with pytest.raises(SystemExit):
        parser().parse_args(["train", "--help"])
    said = capsys.readouterr().out
    about = job(text).about(train.prepare(job(text)).corpus)
    options = {"--data" if name.startswith("corpus") else "--model" if name in MODEL_FIELDS else option_of(name) for name in about}
    kept = re.search(r"What must be as it was: (.*); the rest may change", said)
    assert kept and set(kept[1].split(", ")) == {option for option in options if f"  {option}" in said}


@pytest.mark.parametrize(("suffix", "magic"), [("png", b"\x89PNG\r\n\x1a\n"), ("svg", b"<?xml"), ("pdf", b"%PDF-")])
def test_the_loss_curve_is_a_picture(ranks: Ranks, text: str, tmp_path: Path, suffix: str, magic: bytes) -> None:
    file = tmp_path / f"loss.{suffix}"
    (printed,) = ranks(1, run, job(text, {"steps": 2}, out=str(file)))
    assert file.read_bytes().startswith(magic) and file.stat().st_size > 5000
    assert printed.endswith(f"; picture: {file}\n")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"warmup_steps": -1}, "--warmup-steps -1: "),
        ({"save": "x", "save_every": 0}, "--save-every 0: "),
        ({"save_every": 2}, "--save-every 2: there is no folder to save to. Add --save DIR"),
        ({"timeout": 0.0}, "timeout=0.0: "),
        ({"timeout": math.nan}, "timeout=nan: "),
        ({"timeout": 1e9}, "timeout=1000000000.0: "),
    ],
)
def test_a_job_that_means_nothing_is_refused(text: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        job(text, **options)
    assert str(caught.value).startswith(words)


def test_files_are_checked_before_anything_runs(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    step = tmp_path / "used" / "step-00000003"
    step.mkdir(parents=True)
    (step / "manifest.json").write_text("{}")
    (tmp_path / "ids.npy").write_bytes(b"")
    np.save(tmp_path / "ids.npy", np.arange(250, 400))
    cases: list[tuple[dict[str, Any], type[ConfigError], str]] = [
        ({"data": "nope"}, DataError, "data='nope': it does not exist. Give a text file"),
        ({"data": "file"}, DataError, "data='file': it is empty. Give a text file"),
        ({"data": "ids.npy"}, DataError, "it holds the id 399, and ids must be below vocab. Use vocab=400 or more"),
        ({"out": "no/loss.png"}, ConfigError, "--out no/loss.png: there is no such folder. mkdir -p no"),
        ({"out": "loss.unknown"}, ConfigError, "--out loss.unknown: the end of its name picks the format, one of "),
        ({"log_json": "no/log"}, ConfigError, "--log-json no/log: there is no such folder. mkdir -p no"),
        ({"log_json": "empty"}, ConfigError, "--log-json empty: it is a folder. Give the name of a file"),
        ({"save": "file"}, ConfigError, "--save file: it is a file"),
        ({"save": "used"}, CheckpointError, "--save used: holds checkpoints up to step 3. Add --resume used, or choose another"),
        ({"save": "used", "resume": "fine"}, CheckpointError, "--save used: holds checkpoints up to step 3"),
        ({"resume": "nope"}, CheckpointError, "resume='nope': there is no such folder. Give the directory that --save wrote to"),
        ({"resume": "empty"}, CheckpointError, "resume='empty': holds no complete checkpoint. Give the directory that --save wrote to"),
        ({"resume": "used"}, CheckpointError, "resume='used': 'used/step-00000003' cannot be read (format None, this "),
        ({"save": "new", "data": "nope"}, DataError, "data='nope': it does not exist"),
        ({"layout": Layout(tp=3)}, ConfigError, "tp=3: tp must divide heads, and one of tp and kv_heads must divide the other. For this"),
    ]
    about = job(text).about(train.prepare(job(text)).corpus)
    (tmp_path / "fine" / "step-00000004").mkdir(parents=True)
    (tmp_path / "fine" / "step-00000004" / "manifest.json").write_text(json.dumps({"format": 1, "about": about, "sha256": []}))
    for options, kind, words in cases:
        with pytest.raises(kind) as caught:
            train.prepare(job(options.pop("data", text), **options))
        assert words in str(caught.value)
    assert not (tmp_path / "new").exists(), "what is refused leaves no folder behind"
    with pytest.raises(DataError, match=r"its 2000 tokens are fewer than seq \+ 1 = 3001\. Use more text, or seq=1999 or less"):
        train.prepare(job(text, {"seq": 3000}))
    train.prepare(job(text, save="fine/", resume="./fine", log_json="file", out="new.png"))  # the same folder by other names


def fullest() -> list[float]:
    """What the engine says of memory before the first step, after it, and after an evaluation."""
    engine = parallelize(Llama(MODEL, device="meta"), init_mesh(dp=2, device="cpu"), TRAIN)
    batch = torch.ones(2, 16, dtype=torch.int64), torch.ones(2, 16, dtype=torch.int64)
    said = [engine.memory_gib]
    for step, gib in ((engine.train_step, 1.5), (engine.eval_step, 2.5)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(engine_module, "_peak_memory_gib", lambda _, gib=gib: gib + engine.mesh.rank)
            step(batch)
        said.append(engine.memory_gib)
    engine.mesh.close()
    return said


def test_memory_is_that_of_the_fullest_rank(ranks: Ranks) -> None:
    assert ranks(2, fullest) == [[0.0, 2.5, 3.5]] * 2


def test_to_measure_a_step_takes_no_word_with_other_ranks(text: str) -> None:
    """All that is logged is known already: there is no process group here."""
    engine: Any = SimpleNamespace(memory_gib=1.5, mesh=SimpleNamespace(layout=Layout(dp=4), device=torch.device("cpu")))
    line = train.measure(3, StepResult(loss=2.0, grad_norm=0.5, tokens=64, taken=True), 0.25, job(text), engine, None)
    flops = 256.0 * flops_per_token(MODEL, TRAIN.seq) / 4 / 1e12
    assert list(line) == KEYS
    assert list(line.values()) == [3, 2.0, 0.5, 64, 256.0, pytest.approx(flops, rel=1e-12), None, 1.5, 0.25]

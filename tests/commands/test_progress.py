"""What a person sees of a training run."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import math
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pymesh3d.commands.progress import Progress, draw_loss
from pymesh3d.config import ModelConfig, TrainConfig
from pymesh3d.engine import parallelize
from pymesh3d.mesh import init_mesh
from pymesh3d.models.llama import Llama
from tests.plain import SMALL

Ranks = Callable[..., list[Any]]
LINE = {"step": 2, "loss": 2.5, "grad_norm": 0.75, "tokens": 64, "tps": 12345.6, "tflops": 412.25, "mfu": None, "memory_gib": 1.5}


def columns(text: str, names: str) -> list[list[str]]:
    """What stands under each of these names, a list a line; lines are as long as the names."""
    head, *lines = text.splitlines()
    assert {len(line) for line in lines} == {len(head)}
    ends = [match.end() for match in re.finditer(names, head)]
    return [[line[:end].split()[-1] for end in ends] for line in lines]


def test_columns_stand_under_their_names(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress(quiet=False)
    with progress.steps(0, 4, mfu=True):
        progress.step(LINE)
        progress.step({**LINE, "step": 3, "mfu": 0.4125, "loss": math.nan})
    assert columns(capsys.readouterr().out, "step|loss|grad norm|tokens/s|TFLOP/s|MFU|GiB|time left") == [
        ["2", "2.5000", "0.7500", "12,300", "412", "-", "1.50", "0:00"],
        ["3", "nan", "0.7500", "12,300", "412", "41.2%", "1.50", "0:00"],
    ]


def test_without_a_known_peak_there_is_no_column_for_it(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress(quiet=False)
    with progress.steps(0, 4, mfu=False):
        progress.step(LINE)
    out = capsys.readouterr().out
    assert "MFU" not in out
    assert columns(out, "TFLOP/s|GiB|time left") == [["412", "1.50", "0:00"]]


def test_digits_stand_still(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress(quiet=False)
    with progress.steps(0, 100, mfu=False):
        for step, (tps, tflops) in enumerate([(354.9, 0.0101), (12_345.6, 0.01), (9_876_543.2, 3.04), (99_960.0, 99.9), (0.0, 650.4)], 1):
            progress.step({**LINE, "step": step, "tps": tps, "tflops": tflops})
    found = columns(capsys.readouterr().out, "tokens/s|TFLOP/s")
    assert found == [["355", "0.0101"], ["12,300", "0.0100"], ["9,880,000", "3.0"], ["100,000", "99.9"], ["0", "650"]]


def test_the_last_line_says_what_was_reached(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr("pymesh3d.commands.progress.time.monotonic", lambda: now)
    progress = Progress(quiet=False)
    with progress.steps(10, 13, mfu=False):
        now += 83.0
    progress.reached([5.5, 9.0, 2.25], 123_456, {"log": "a.jsonl", "picture": None, "checkpoint": Path("b/[c]")})
    progress.reached([5.5], 83, {"picture": None})
    assert capsys.readouterr().out.splitlines()[1:] == [
        "3 steps in 1:23 (1,490 tokens/s), loss from 5.5000 to 2.2500; log: a.jsonl; checkpoint: b/[c]",
        "1 step in 1:23 (1 tokens/s), loss 5.5000",
    ]


def test_time_left_is_that_of_the_steps_still_to_do(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr("pymesh3d.commands.progress.time.monotonic", lambda: now)
    progress = Progress(quiet=False)
    with progress.steps(10, 40, mfu=False):  # resumed after 10 steps
        now += 30.0
        progress.step({**LINE, "step": 20})
        now += 9000.0
        progress.step({**LINE, "step": 30})
    lefts = [line.split()[-1] for line in capsys.readouterr().out.splitlines()[1:]]
    assert lefts == ["1:00", "1:15:15"]


def test_a_curve_of_blocks(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress(quiet=False)
    progress.curve([8.0, 7.0, math.nan, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0])
    progress.curve([3.0])
    progress.curve([2.0, 2.0])
    assert capsys.readouterr().out.splitlines() == ["loss 8.0000 █▇▆▅▄▃▂▁ 1.0000", "loss 2.0000 ▁▁ 2.0000"]
    progress.curve([100.0 - n for n in range(600)])
    blocks = capsys.readouterr().out.split()[2]
    assert len(blocks) == 60 and sorted(blocks, reverse=True) == list(blocks) and set(blocks) == set("▁▂▃▄▅▆▇█")


def test_other_ranks_are_silent(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress(quiet=True)
    with progress.steps(0, 4, mfu=True):
        progress.step(LINE)
    progress.say("x")
    progress.curve([2.0, 1.0])
    progress.reached([2.0, 1.0], 7, {"log": "x"})
    assert capsys.readouterr().out == ""


def shown(sizes: dict[str, int], model: ModelConfig, options: dict[str, Any]) -> str:
    mesh = init_mesh(device="cpu", **sizes)
    train = TrainConfig(seq=8, global_batch=8, vocab_multiple=1, **options)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        progress = Progress(quiet=mesh.rank != 0)
        progress.header(mesh, model, train, "5 M tokens of [a] file")
        progress.stages(parallelize(Llama(model, device="meta"), mesh, train))
    mesh.close()
    return printed.getvalue()


def test_mesh_and_stages(ranks: Ranks) -> None:
    text, *others = ranks(4, shown, {"pp": 2, "tp": 2}, SMALL, {"sequence_parallel": True})
    assert others == ["", "", ""]
    assert "mesh pp 2 x dp 1 x tp 2 = 4 rank(s) on 1 host(s), cpu" in text
    total = sum(p.numel() for p in Llama(SMALL, device="meta").parameters())
    assert f"model of {total:,} parameters: 4 layers, dim 16, heads 4/2, ffn 24, vocabulary 19" in text
    assert (
        "data  5 M tokens of [a] file; 8 sequences of 8 tokens a step, microbatches of 2, 1f1b; ZeRO 1, float32, sequence parallel" in text
    )
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in text.splitlines() if line.startswith("│")]
    assert [row[:3] for row in rows] == [["0", "0-1", "embed, layers 0-1"], ["1", "2-3", "layers 2-3, norm, head"]]
    layer = 16 * (16 + 16) + 2 * 16 * 8 + 3 * 16 * 24
    norms, padded = 2 * 2 * 16, 20 * 16  # of two layers; 19 rows padded to 20
    assert text.count("(a rank counts the rows of zeros that pad the vocabulary of 19 to 20)\n") == 1
    assert [int(row[3].replace(",", "")) for row in rows] == [layer + norms + padded // 2, layer + norms + padded // 2 + 16]


def test_one_layer_a_stage(ranks: Ranks) -> None:
    text = ranks(2, shown, {"pp": 2}, dataclasses.replace(SMALL, layers=2), {})[0]
    assert "embed, layer 0 " in text and "layer 1, norm, head" in text and "pad" not in text


@pytest.mark.parametrize(("once", "words"), [(None, ""), (True, " once a step"), (False, " with every microbatch")])
def test_parameters_are_counted_where_a_rank_keeps_a_share(ranks: Ranks, once: bool | None, words: str) -> None:
    text = ranks(2, shown, {"dp": 2}, SMALL, {"zero_stage": 3, "zero_once_a_step": once})[0]
    total = sum(p.numel() for p in Llama(SMALL, device="meta").parameters())
    assert f"; ZeRO 3{words}, float32\n" in text and re.search(rf"embed, layers 0-3, norm, head │ +{total:,} │", text)


@pytest.mark.parametrize("losses", [[3.0], [3.0, 2.0], [5.5 - 0.01 * n for n in range(300)], [math.nan, 2.0, math.inf, 1.0]])
@pytest.mark.filterwarnings("error")
def test_any_run_can_be_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, losses: list[float]) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)  # whose state is the whole process'
    draw_loss(losses, 7, str(tmp_path / "loss.png"), "pp 1 x dp 1 x tp 1, 4 layers, 3.2 M bytes of a long name " * 3)
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")

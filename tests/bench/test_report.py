"""What a benchmark leaves behind."""

from __future__ import annotations

import io
import json
import os
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
import torch
from rich.console import Console

from pymesh3d.bench import cross_entropy, dropout, philox, products, report, rms_norm, rotary, squares, swiglu, train

ROWS = [{"device": "cpu", "elements": 1024, "time_ms": 0.123456, "fast": True}, {"device": "cuda", "elements": 2, "gb_s": None}]


@pytest.fixture
def fake_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program nvidia-smi that knows two cards and writes down what it was asked."""
    program = tmp_path / "nvidia-smi"
    program.write_text(
        f'#!/bin/sh\necho "$@" > {tmp_path}/asked\n'
        'echo "NVIDIA H100 80GB HBM3, 1980, 1980, 2619, 2619, 700.00, 550.1"\n'
        'echo "NVIDIA A100, 1410, 1410, 1593, 1593, 400.00, 550.1"\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    return program


def test_cards_are_those_of_nvidia_smi(fake_smi: Path, tmp_path: Path) -> None:
    first, second = report.cards()
    assert first == {
        "name": "NVIDIA H100 80GB HBM3",
        "sm_clock_mhz": "1980",
        "sm_clock_max_mhz": "1980",
        "memory_clock_mhz": "2619",
        "memory_clock_max_mhz": "2619",
        "power_limit_w": "700.00",
        "driver": "550.1",
    }
    assert (second["name"], second["power_limit_w"]) == ("NVIDIA A100", "400.00")
    fields = "name,clocks.sm,clocks.max.sm,clocks.mem,clocks.max.mem,power.limit,driver_version"
    assert (tmp_path / "asked").read_text() == f"--query-gpu={fields} --format=csv,noheader,nounits\n"


def test_no_cards_where_there_is_no_answer(fake_smi: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_smi.write_text("#!/bin/sh\nexit 9\n")
    assert report.cards() == []
    monkeypatch.setenv("PATH", "")
    assert report.cards() == []


def test_a_record_says_where_and_when(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "cards", lambda: [{"name": "card"}])
    file = tmp_path / "new" / "folder" / "philox.json"
    report.write("philox", ROWS, file, bound=0.5)
    record = json.loads(file.read_text())
    assert list(record) == ["name", "date", "cards", "cpu", "kernels", "versions", "bound", "rows"]
    assert (record["name"], record["cards"], record["bound"], record["rows"]) == ("philox", [{"name": "card"}], 0.5, ROWS)
    assert abs(datetime.fromisoformat(record["date"]) - datetime.now(timezone.utc)) < timedelta(minutes=1)
    assert record["versions"]["torch"] == torch.__version__ and set(record["versions"]) == {"pymesh3d", "torch", "triton", "cuda", "python"}
    assert record["cpu"]["torch_threads"] == torch.get_num_threads()


def test_a_table_has_the_columns_that_are_asked_for_and_known() -> None:
    columns = {"fast": ("is fast", ""), "time_ms": ("time, ms", ".3f"), "elements": ("n", ","), "gb_s": ("GB/s", ".1f")}
    drawn = report.table(ROWS, columns, "fills")
    assert drawn.title == "fills"
    assert {str(column.header): list(column.cells) for column in drawn.columns} == {
        "is fast": ["yes", "-"], "time, ms": ["0.123", "-"], "n": ["1,024", "2"],
    }  # fmt: skip


def test_a_table_in_a_pipe_keeps_its_numbers(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them, though there they would have 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")
    row = dict.fromkeys(products.COLUMNS, 123456.5)
    report.publish("x", [row], products.COLUMNS, "x", None)
    printed = capsys.readouterr().out
    assert "\N{HORIZONTAL ELLIPSIS}" not in printed and printed.count("123,456.5") == 8, "M, N, K and five times"


@pytest.mark.parametrize("columns", [bench.COLUMNS for bench in (cross_entropy, dropout, philox, rms_norm, rotary, squares, swiglu, train)])
def test_a_table_fits_into_a_narrow_terminal(columns: dict[str, tuple[str, str]]) -> None:
    console = Console(file=io.StringIO(), width=80)
    row = dict.fromkeys(columns, 1.0) | {"elements": 2**28, "tp": 8, "pp": 8, "dp": 8, "tokens_per_s": 1e7, "within_bounds": True}
    console.print(report.table([row], columns, "x"))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "\N{HORIZONTAL ELLIPSIS}" not in text and all(word in text for head, _ in columns.values() for word in head.split())

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

from pymesh3d.bench import report

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


def test_a_table_has_every_column_once() -> None:
    console = Console(file=io.StringIO(), width=100)
    console.print(report.table(ROWS, title="fills"))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    cells = [[cell.strip() for cell in line.strip("│┃ ").replace("┃", "│").split("│")] for line in text.splitlines() if line[0] in "│┃"]
    assert cells == [
        ["device", "elements", "time ms", "fast", "gb s"],
        ["cpu", "1024", "0.1235", "True", "-"],
        ["cuda", "2", "-", "-", "-"],
    ]
    assert "fills" in text

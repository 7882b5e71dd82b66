"""What a benchmark leaves behind: its rows with the card, clocks and versions they were measured on, as JSON and as a table."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import rich
import torch
from rich.console import Console
from rich.table import Table

from ..errors import ConfigError
from ..triton_kernels import backend

Row = Mapping[str, str | int | float | bool | None]
WIDEST = 10_000  # columns of what is printed
CARD_FIELDS = {  # ours -> nvidia-smi's
    "name": "name",
    "sm_clock_mhz": "clocks.sm",
    "sm_clock_max_mhz": "clocks.max.sm",
    "memory_clock_mhz": "clocks.mem",
    "memory_clock_max_mhz": "clocks.max.mem",
    "power_limit_w": "power.limit",
    "driver": "driver_version",
}


def chosen(option: str, given: str | None, known: Collection[str], default: str) -> list[str]:
    """The names that an option gives, with commas between them, each once. Raises ConfigError where one is empty or not known."""
    names = list(dict.fromkeys((default if given is None else given).split(",")))
    if unknown := [name for name in names if name and name not in known]:
        raise ConfigError(f"--{option} {','.join(unknown)}", f"no such {option}", f"Use {' or '.join(known)}, with commas between them")
    if "" in names:
        rule = "commas stand between names, and there must be one"
        raise ConfigError(f"--{option} '{given}'", rule, f"Use --{option} {','.join(filter(None, names)) or default}")
    return names


def cards() -> list[dict[str, str]]:
    """One record a GPU of this machine, as nvidia-smi reports it now; empty where there is none or it does not answer in 10 s."""
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", f"--query-gpu={','.join(CARD_FIELDS.values())}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return [dict(zip(CARD_FIELDS, (value.strip() for value in line.split(",")), strict=True)) for line in answer.splitlines()]


def versions() -> dict[str, str | None]:
    """Of everything that decides a time; None is what this machine has not."""

    def installed(package: str) -> str | None:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return None

    return {
        "pymesh3d": installed("pymesh3d"),
        "torch": torch.__version__,
        "triton": installed("triton"),
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
    }


def record(name: str, rows: Sequence[Row], **details: Any) -> dict[str, Any]:
    """The whole record of benchmark `name`; clocks are those of the moment, so call it right after measuring."""
    return {
        "name": name,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "cards": cards(),
        "cpu": {"machine": platform.machine(), "cores": os.cpu_count(), "torch_threads": torch.get_num_threads()},
        "kernels": backend.reason,
        "versions": versions(),
        **details,
        "rows": [dict(row) for row in rows],
    }


def write(name: str, rows: Sequence[Row], path: Path, **details: Any) -> None:
    """Writes the record of benchmark `name`, and `details` that belong to it, as JSON; missing folders are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record(name, rows, **details), indent=2) + "\n", encoding="utf-8")


def publish(
    name: str, rows: Sequence[Row], columns: Mapping[str, tuple[str, str]], title: str, json_file: str | None, **details: Any
) -> None:
    """Print the rows of benchmark `name` as a table, and write its record, with `details`, where a file is named."""
    drawn = table(rows, columns, title)
    whole = Console(width=WIDEST).measure(drawn).maximum
    Console(width=max(whole, Console().width)).print(drawn)  # in a pipe of 80 columns too: numbers cut short say nothing
    if not torch.cuda.is_available():
        rich.print("Measured on a CPU: this shows that the benchmark runs, and nothing of a GPU's speed.")
    if json_file is not None:
        write(name, rows, Path(json_file), **details)


def table(rows: Sequence[Row], columns: Mapping[str, tuple[str, str]], title: str) -> Table:
    """The rows as a table to print. `columns`: the head of each key that is shown, in lines, and the format of its values (`.3f`).

    A column in which no row has a value is left out.
    """
    shown = {key: column for key, column in columns.items() if any(row.get(key) is not None for row in rows)}
    drawn = Table(title=title, title_justify="left", box=None, padding=(0, 1, 0, 0))
    for head, _ in shown.values():
        drawn.add_column(head, justify="right")
    for row in rows:
        drawn.add_row(*(_cell(row.get(key), form) for key, (_, form) in shown.items()))
    return drawn


def _cell(value: str | int | float | bool | None, form: str) -> str:
    if value is None:
        return "-"
    return ("yes" if value else "no") if isinstance(value, bool) else format(value, form)

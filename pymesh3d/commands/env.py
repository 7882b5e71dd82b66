"""`pymesh3d env`: what is here, and for each thing that is not: why, and what runs instead."""

from __future__ import annotations

import dataclasses
import os
import platform
from typing import Any

import torch
import torch.distributed
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from pymesh3d import __version__
from pymesh3d.comm import native
from pymesh3d.commands.files import write_json
from pymesh3d.errors import ConfigError
from pymesh3d.ops import choose
from pymesh3d.triton_kernels import backend

CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """One line of the report. `why` says what is missing or wrong and `instead` what runs in its place; both are empty if all is well."""

    name: str
    here: str = ""
    why: str = ""
    instead: str = ""
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _torch() -> Finding:
    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU only"
    facts = {"version": str(torch.__version__), "cuda": torch.version.cuda}
    return Finding(name="torch", here=f"{torch.__version__} ({built})", facts=facts)


def _kernels() -> Finding:
    facts = {"available": backend.available, "interpreted": backend.interpreted}
    if backend.available:
        return Finding(name="triton", here=backend.reason, facts=facts)
    return Finding(name="triton", why=backend.reason, instead="the same operations in plain torch", facts=facts)


def _native() -> Finding:
    if native.available:
        return Finding(name="pymesh3d._C", here=__version__, facts={"version": __version__})
    return Finding(name="pymesh3d._C", why=native.reason, instead="torch.distributed moves the data; everything works")


def _library(title: str, name: str, instead: str) -> Finding:
    found = native.probe(name)
    if found is None:
        return Finding(name=title, why="cannot be looked for without pymesh3d._C", instead=instead)
    if found.error:
        return Finding(name=title, why=found.error, instead=instead)
    by = ", already loaded" if found.was_loaded else ""
    facts = {"version": _dotted(found.version), "path": found.path, "was_loaded": found.was_loaded}
    return Finding(name=title, here=f"{_dotted(found.version)} ({found.path}{by})", facts=facts)


def _nccl() -> Finding:
    """NCCL as our own transport would open it, held against the version that torch was built with."""
    found = _library("NCCL", "nccl", "gloo moves the data on CPUs; on GPUs torch.distributed with the NCCL inside torch, if it has one")
    if not torch.cuda.is_available() or not torch.distributed.is_nccl_available():
        return found
    torchs = _dotted(torch.cuda.nccl.version())
    facts = {**found.facts, "torch": torchs}
    if found.here and found.facts["version"] != torchs:
        why = f"torch was built for {torchs}, another version was found"
        return dataclasses.replace(found, facts=facts, why=why, instead="torch.distributed with the NCCL inside torch")
    return dataclasses.replace(found, facts=facts)


def _gpus() -> Finding:
    if not torch.cuda.is_available():
        why = "torch sees no CUDA device" if torch.version.cuda else "this torch is built without CUDA"
        return Finding(name="GPUs", why=why, instead="the CPU, with gloo between processes")
    cards = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    facts = [{"name": card.name, "memory_gib": round(card.total_memory / 2**30, 1), "sm": f"{card.major}{card.minor}"} for card in cards]
    return Finding(
        name="GPUs",
        here="\n".join(f"{index}: {card['name']}, {card['memory_gib']} GiB, sm_{card['sm']}" for index, card in enumerate(facts)),
        facts={"devices": facts},
    )


def _connections() -> Finding:
    value = os.environ.get(CONNECTIONS)
    facts = {"value": value}
    if value is not None or not torch.cuda.is_available():
        return Finding(name=CONNECTIONS, here=value or "not set (matters on GPUs only)", facts=facts)
    why = "not set: 8 hardware queues, so with more streams a waiting one can hold up the one it waits for"
    return Finding(name=CONNECTIONS, why=why, instead=f"8; raise it before the program starts: export {CONNECTIONS}=32", facts=facts)


def _products() -> Finding:
    try:
        return Finding(name="tensor-parallel products", here=choose.state())
    except ConfigError as error:
        return Finding(name="tensor-parallel products", why=str(error), instead="nothing: each rank refuses it in the first product")


def findings() -> list[Finding]:
    """Everything that decides what runs here, in the order in which it is shown."""
    python = platform.python_version()
    return [
        Finding(name="pymesh3d", here=__version__, facts={"version": __version__}),
        Finding(name="python", here=python, facts={"version": python, "platform": platform.platform()}),
        _torch(),
        _kernels(),
        _native(),
        _library("CUDA driver", "cuda", "the CPU, unless torch itself sees a GPU"),
        _nccl(),
        _gpus(),
        _connections(),
        _products(),
    ]


def collect() -> dict[str, Any]:
    """The report for machines: for each name what is `here`, `why` it is missing, what runs `instead`, and its facts."""
    return {found.name: {"here": found.here, "why": found.why, "instead": found.instead, **found.facts} for found in findings()}


def run(json_file: str | None = None) -> int:
    """Print the report, and write it to `json_file` if one is given. Returns the exit status.

    Raises OSError if the file cannot be written.
    """
    report = collect()
    table = Table("part", "here", box=None, pad_edge=False, header_style="bold")
    for name, found in report.items():
        table.add_row(name, escape(found["here"]) or "[yellow]not available[/]")
    console = Console()
    console.print(table)
    for name, found in report.items():
        if found["why"]:
            why, instead = escape(found["why"]), escape(found["instead"])
            console.print(f"\n[yellow]{name}[/]: {why}.\n  Instead: {instead}.", highlight=False, soft_wrap=True)
    write_json(json_file, report)
    return 0

"""Times training steps of a reference model on the layouts of the GPUs here, and says where the time of a step goes.

Each case runs in processes of its own: some steps to warm up, then timed ones (the median counts), then one under torch's profiler. The
times of its kernels on rank 0 are summed by kind, as shares of that step; kernels that run side by side count each. `idle` is the share of
the step in which no kernel runs. Tokens are random.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from ..config import Layout, ModelConfig, TrainConfig, runs
from ..engine import Engine, parallelize
from ..launch import STOPPED, launch
from ..mesh import init_mesh
from ..models.llama import Llama
from ..planner.hardware import peak_flops
from ..planner.model import flops_per_token
from . import report
from .timing import wall_seconds

WARM, TIMED = 4, 8
SEQUENCES = 8  # in a step, for each rank of the mesh
LENGTH = {"cuda": 4096, "cpu": 32}
KINDS = {  # of kernels, by what their names contain; the first that fits counts
    "compiled": ("triton_",),  # their names hold those of all operators that were fused
    "products that communicate": ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"),
    "communication": ("nccl", "wait_for_ranks", "memcpy ptop"),
    "attention": ("flash", "fmha", "sdpa", "attention"),
    "matrix products": ("gemm", "nvjet", "cutlass", "cublas", "splitk"),
    "optimizer": ("adam", "multi_tensor"),
    "copies": ("memcpy", "memset"),
}
COLUMNS = {
    "case": ("", ""),
    "tokens_per_s": ("tokens/s\na GPU", ",.0f"),
    "mfu": ("MFU", ".1%"),
    "memory_gib": ("GiB,\nfullest rank", ".1f"),
    "step_ms": ("ms\na step", ",.1f"),
    **{kind: (f"{kind.replace(' ', chr(10))}", ".1%") for kind in (*KINDS, "other", "idle")},
}


def cases(world: int, model: ModelConfig, length: int) -> list[dict[str, Any]]:
    """The layouts of so many ranks, each as it is and with compiled layers; pipelines with 1F1B, interleaved, and uncompiled with ZB-H1."""
    found: list[dict[str, Any]] = []
    for tp in (1, 2, 4, 8):
        for pp in (1, 2, 4, 8):
            if world % (tp * pp):
                continue
            layout = {"tp": tp, "pp": pp, "dp": world // tp // pp}
            schedules: list[dict[str, Any]] = [{"schedule": "1f1b"}]
            if pp > 1:
                schedules += [{"schedule": "interleaved", "virtual_pp": 2}, {"schedule": "zb-h1"}]
            for schedule in schedules:
                for compiled in (False,) if schedule["schedule"] == "zb-h1" else (False, True):
                    micro_batch = max(1, SEQUENCES * world // layout["dp"] // (4 * pp))
                    train: dict[str, Any] = {
                        **schedule,
                        "compile": compiled,
                        "sequence_parallel": tp > 1,
                        "micro_batch": micro_batch,
                        "seq": length,
                    }
                    train["global_batch"] = SEQUENCES * world
                    if runs(model, Layout(**layout), TrainConfig(**train)):
                        found.append({"layout": layout, "train": train})
    return found


def name(case: dict[str, Any]) -> str:
    """A case in words."""
    sizes = " x ".join(f"{axis} {size}" for axis, size in case["layout"].items() if size > 1) or "one rank"
    train = case["train"]
    words = [sizes, *([train["schedule"]] if train["schedule"] != "1f1b" else []), *(["compiled"] if train["compile"] else [])]
    return ", ".join(words)


def measure(model: ModelConfig, case: dict[str, Any]) -> report.Row:
    """What each rank does for one case; the row is complete on rank 0."""
    mesh = init_mesh(**case["layout"])
    on_gpu = mesh.device.type == "cuda"
    train = TrainConfig(**case["train"], dtype="bfloat16" if on_gpu else "float32")
    engine = parallelize(Llama(model, device="meta"), mesh, train)
    generator = torch.Generator().manual_seed(mesh.dp.rank)
    ids = torch.randint(model.vocab, (train.global_batch // mesh.dp.size, train.seq + 1), generator=generator).to(mesh.device)
    batch = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    for _ in range(WARM):
        engine.train_step(batch)
    times = [step_time(engine, batch) for _ in range(TIMED)]
    seconds = statistics.median(times)
    tokens = train.global_batch * train.seq / mesh.layout.world / seconds
    peak = peak_flops(torch.cuda.get_device_name(mesh.device), train.dtype) if on_gpu else None
    row: dict[str, Any] = {
        "case": name(case),
        **case["layout"],
        **case["train"],
        "tokens_per_s": tokens,
        "mfu": tokens * flops_per_token(model, train.seq) / peak if peak else None,
        "memory_gib": engine.memory_gib if on_gpu else None,
        "step_ms": seconds * 1e3,
        "slowest_step_ms": max(times) * 1e3,
        **(shares(engine, batch) if on_gpu else {}),
    }
    mesh.close()
    return row


def step_time(engine: Engine, batch: tuple[torch.Tensor, torch.Tensor]) -> float:
    """Seconds of a step, from device to device."""
    return wall_seconds(lambda: engine.train_step(batch), engine.mesh.device.type)


def shares(engine: Engine, batch: tuple[torch.Tensor, torch.Tensor]) -> dict[str, float]:
    """By kind of kernel, the share of a step's time on this rank."""
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        seconds = step_time(engine, batch)
    kernels = [event for event in profiler.events() if event.device_type == DeviceType.CUDA and not event.is_user_annotation]
    found = dict.fromkeys((*KINDS, "other"), 0.0)
    for kernel in kernels:
        found[kind_of(kernel.name)] += kernel.time_range.elapsed_us()
    busy = union((kernel.time_range.start, kernel.time_range.end) for kernel in kernels)
    return {**{kind: us / seconds / 1e6 for kind, us in found.items()}, "idle": max(0.0, 1.0 - busy / seconds / 1e6)}


def kind_of(kernel: str) -> str:
    """Which of KINDS a kernel is of, "other" if none."""
    lower = kernel.lower()
    return next((kind for kind, words in KINDS.items() if any(word in lower for word in words)), "other")


def union(intervals: Iterable[tuple[float, float]]) -> float:
    """The length of what at least one interval covers."""
    covered, until = 0.0, float("-inf")
    for start, end in sorted(intervals):
        covered += max(0.0, end - max(start, until))
        until = max(until, end)
    return covered


def main(json_file: str | None = None, *, model: str = "", only: str = "") -> int:
    """Measures the layouts of all GPUs here (or of 2 processes on the CPU, with a tiny model); prints the table and writes `json_file`.

    `only`: the cases whose names contain it. A case that fails is named, and the others go on; then the status is 1. Ctrl-C ends it, with
    status 130, and what was measured until then is shown and written.
    """
    on_gpu = torch.cuda.is_available()
    model = model or ("1b" if on_gpu else "tiny")
    world = torch.cuda.device_count() if on_gpu else 2
    rows: list[report.Row] = []
    failed: list[str] = []
    status = 0
    for case in cases(world, ModelConfig.load(model), LENGTH["cuda" if on_gpu else "cpu"]):
        if only not in name(case):
            continue
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "row.json"
            status = launch(["-m", "pymesh3d.bench.model", "--model", model, "--case", json.dumps(case), "--json", str(file)], world)
            if status in STOPPED:
                break
            if status:
                failed.append(name(case))
                continue
            rows.append(json.loads(file.read_text()))
            print(f"{name(case)}: {rows[-1]['step_ms']:,.1f} ms a step", flush=True)
            if json_file:  # each time, so that whatever ends this leaves what it measured
                report.write("model", rows, Path(json_file))
    title = f"Training {model} on {world} {'GPUs' if on_gpu else 'processes'}; shares of a step on rank 0"
    report.publish("model", rows, COLUMNS, title, json_file)
    if failed:
        print(f"failed: {'; '.join(failed)}", file=sys.stderr)
    if status in STOPPED:
        return status
    return 1 if failed else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m pymesh3d.bench.model", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", metavar="FILE", help="also write the measurements here")
    parser.add_argument("--model", default="", help="a name or a file, as for `pymesh3d train` (default: 1b on GPUs)")
    parser.add_argument("--only", default="", help="measure only cases whose names contain this")
    parser.add_argument("--case", help=argparse.SUPPRESS)  # what a rank is started with
    given = parser.parse_args()
    if given.case is None:
        sys.exit(main(given.json, model=given.model, only=given.only))
    row = measure(ModelConfig.load(given.model), json.loads(given.case))
    if int(os.environ["RANK"]) == 0:
        Path(given.json).write_text(json.dumps(row))
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may still let go of Python objects

"""Writes the README's tables from what stands in bench/results, between the marks `<!-- table NAME -->` and `<!-- end -->`.

`python -m pymesh3d.bench.tables` rewrites README.md in the current folder; with `--check` it only says whether that would change it.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .train import BOUNDS

RESULTS = Path("bench/results")


def _source(record: Mapping[str, Any]) -> str:
    """The line under a table: card, versions and day, and the commit where somebody has noted it."""
    names = [card["name"] for card in record["cards"]]
    cards = f"{len(names)} x {names[0]}" if names else "CPU"
    versions = record["versions"]
    commit = f", commit {record['commit']}" if "commit" in record else ""
    return f"{cards}, torch {versions['torch']}, triton {versions['triton']}, {record['date'][:10]}{commit}"


def _markdown(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ["---", *["---:"] * (len(head) - 1)], *rows))


def train(record: Mapping[str, Any]) -> str:
    """Loss curves of all layouts against one GPU (bench/train.py)."""
    rows = [
        [
            f"{row['tp']} x {row['pp']} x {row['dp']}",
            f"{row['loss_first']:.4f}",
            f"{row['loss_last']:.4f}",
            f"{row['largest_difference']:.1e}",
            f"{row['mean_difference']:.1e}",
        ]
        for row in record["rows"]
    ]
    table = _markdown(["tp x pp x dp", "first loss", "loss after 100 steps", "largest difference of a step", "mean difference"], rows)
    largest, mean = BOUNDS["bfloat16" if record["cards"] else "float32"]
    return f"{table}\n\nBounds: {largest:g} for a step, {mean:g} on average. {_source(record)}; `pymesh3d bench train`."


def check(rows: Sequence[Mapping[str, Any]]) -> str:
    """The worst differences of `pymesh3d check --world 8 --all` on CPU."""
    worst = [f"{max(row[key] for row in rows):.1e}" for key in ("loss_difference", "gradients", "parameters")]
    return _markdown(["layouts", "loss", "gradients", "parameters after 3 AdamW steps"], [[str(len(rows)), *worst]])


def philox(record: Mapping[str, Any]) -> str:
    """Filling a tensor with layout-independent random numbers (bench/philox.py)."""
    rows = [
        [f"{row['elements']:,}", *(f"{row[key]:.3f}" for key in ("philox_ms", "torch_normal_ms", "floor_ms"))] for row in record["rows"]
    ]
    table = _markdown(["float32 elements", "philox ms", "torch normal_ ms", "only writing, ms"], rows)
    return f"{table}\n\n{_source(record)}; `pymesh3d bench philox`."


def p2p(record: Mapping[str, Any]) -> str:
    """Sends and receives over our bindings against torch's (bench/p2p.py)."""
    columns = ("nccl_us", "torch_us", "nccl_host_us", "torch_host_us")
    rows = [[f"{row['pattern']}, {row['bytes'] / 2**20:g} MiB", *(f"{row[key]:.0f}" for key in columns)] for row in record["rows"]]
    head = ["", "ours, us", "`batch_isend_irecv`, us", "ours, us of the host", "`batch_isend_irecv`, us of the host"]
    return f"{_markdown(head, rows)}\n\n{_source(record)}; `pymesh3d bench p2p`."


def model(record: Mapping[str, Any]) -> str:
    """Training steps of the 1B model (bench/model.py)."""
    shares = ("matrix products", "attention", "communication", "idle")
    others = ("compiled", "products that communicate", "optimizer", "copies", "other")
    rows = [
        [
            row["case"],
            f"{row['tokens_per_s']:,.0f}",
            f"{row['mfu']:.1%}",
            f"{row['memory_gib']:.1f}",
            *(f"{row[kind]:.0%}" for kind in shares),
            f"{sum(row.get(kind, 0.0) for kind in others):.0%}",
        ]
        for row in record["rows"]
    ]
    head = ["", "tokens/s a GPU", "MFU", "GiB, fullest rank", "products", "attention", "communication", "idle", "all other kernels"]
    first = record["rows"][0]
    micro = " or ".join(sorted({str(row["micro_batch"]) for row in record["rows"]}))
    sizes = f"{first['global_batch']} sequences of {first['seq']:,} tokens a step, {micro} a microbatch"
    return f"{_markdown(head, rows)}\n\n{sizes}, bfloat16. {_source(record)}; `pymesh3d bench model`."


def products(record: Mapping[str, Any]) -> str:
    """Products that talk to other ranks, captured in a graph (bench/products.py): those of the 8B model, and a line about all."""
    columns = {
        "product_us": "product alone, us",
        "floor_us": "floor, us",
        "unfused_us": "product and NCCL, us",
        "torch_us": "torch's fused, us",
        "ours_us": "ours, us",
    }
    graph = [row for row in record["rows"] if row["mode"] == "graph"]
    columns = {key: head for key, head in columns.items() if key in graph[0]}
    rows = [
        [row["layer"].removeprefix("llama-8b "), f"{row['tokens']:,}", *(f"{row[key]:,.0f}" for key in columns), f"{row['speed']:.2f}"]
        for row in graph
        if row["layer"].startswith("llama-8b")
    ]
    about = []
    for mode, where in (("graph", "in a graph"), ("eager", "in eager calls")):
        speeds = [row["speed"] for row in record["rows"] if row["mode"] == mode]
        faster = sum(speed >= 0.98 for speed in speeds)
        about.append(f"{where} {statistics.geometric_mean(speeds):.2f}, at least 0.98 in {faster}")
    head = ["", "tokens", *columns.values(), "speed, best other = 1"]
    models = " and ".join(dict.fromkeys(row["layer"].split()[0] for row in graph))
    means = f"Of {models} together, {len(graph)} products: geometric mean of the speed {'; '.join(about)}"
    source = f"Medians of {record['rounds']} rounds by turns. {_source(record)}; `pymesh3d bench {record['name']}`."
    return f"{_markdown(head, rows)}\n\n{means}. {source}"


def zero_step(record: Mapping[str, Any]) -> str:
    """The part of a step after backward: sums, AdamW and new parameters (bench/zero_step.py)."""
    columns = {
        "floor_us": "floor, us",
        "serial_us": "NCCL, us",
        "overlapped_us": "NCCL by buckets, us",
        "one_pass_us": "ours, us",
        "clipped_us": "ours, clipped, us",
    }
    rows = [
        [
            f"{row['parameters_mi']:,.0f} Mi" + (", in a graph" if row["mode"] == "graph" else ""),
            *(f"{row[key]:,.0f}" for key in columns),
            f"{row['of_overlapped']:.2f}",
        ]
        for row in record["rows"]
    ]
    table = _markdown(["parameters", *columns.values(), "speed, NCCL by buckets = 1"], rows)
    return f"{table}\n\nOver {record['rows'][0]['ranks']} ranks. {_source(record)}; `pymesh3d bench zero_step`."


def zero_train(record: Mapping[str, Any]) -> str:
    """Steps by ZeRO's stages and by FSDP2, and a line about what stage 1 hides (bench/zero_train.py)."""
    rows = [
        [
            row["case"],
            f"{row['tokens_per_s']:,.0f}",
            f"{row['step_ms']:,.1f}",
            *((f"{row['speed']:.3f}", row["against"].removeprefix("FSDP2, ")) if "speed" in row else ("", "")),
            f"{row['state_gib']:.2f}",
            *((f"{row['table_gib']:.2f}", f"{row['of_table']:.3f}") if "table_gib" in row else ("", "")),
        ]
        for row in record["rows"]
        if row["name"] != "hidden"
    ]
    head = ["", "tokens/s a GPU", "ms a step", "speed, FSDP2 = 1", "which FSDP2", "GiB kept", "GiB by the table", "kept, table = 1"]
    hidden = [
        f"Stage 1 hides {row['hidden']:.0%} of its sum over ranks: {row['left_ms']:.1f} ms of it come after backward, {row['sum_ms']:.1f} "
        f"where all of it does; beside backward it makes a step {row['longer_ms']:.1f} ms longer than one without any sum. "
        for row in record["rows"]
        if row["name"] == "hidden"
    ]
    sizes = f"{record['global_batch']} sequences of {record['seq']:,} tokens a step, {record['micro_batch']} a microbatch"
    how = f"Medians of {record['timed_steps']} steps; model {record['model']}, {sizes}, bfloat16{', compiled' * record['compile']}."
    return f"{_markdown(head, rows)}\n\n{''.join(hidden)}{how} {_source(record)}; `pymesh3d bench zero_train`."


TABLES: dict[str, tuple[str, Callable[[Any], str]]] = {  # the file in RESULTS, and what makes a table of it
    "train": ("train.json", train),
    "check": ("check-cpu-world8-all.json", check),
    "philox": ("philox.json", philox),
    "p2p": ("p2p-2xH200.json", p2p),
    "all_gather_matmul": ("all_gather_matmul-2xH200.json", products),
    "matmul_reduce_scatter": ("matmul_reduce_scatter-2xH200.json", products),
    "matmul_all_reduce": ("matmul_all_reduce-2xH200.json", products),
    "model": ("model-2xH200.json", model),
    "zero_step": ("zero_step-2xH200.json", zero_step),
    "zero_train": ("zero_train-2xH200.json", zero_train),
}


def fill(text: str) -> str:
    """The README with every marked table written anew; a table whose results are not here stays as it is."""

    def table(found: re.Match[str]) -> str:
        file, make = TABLES[found[1]]
        if not (RESULTS / file).exists():
            return found[0]
        return f"<!-- table {found[1]} -->\n{make(json.loads((RESULTS / file).read_text()))}\n<!-- end -->"

    return re.sub(r"<!-- table (\w+) -->\n.*?<!-- end -->", table, text, flags=re.DOTALL)


def main(*, check_only: bool) -> int:
    """Rewrite README.md, or with `check_only` report whether its tables are those of the results (exit status 1 if not)."""
    readme = Path("README.md")
    old = readme.read_text()
    new = fill(old)
    if check_only:
        return int(new != old)
    readme.write_text(new)
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true")
    sys.exit(main(check_only=parser.parse_args().check))

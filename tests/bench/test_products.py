"""The benchmarks of products run where there is no GPU, and say what they have measured."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pymesh3d import cli
from pymesh3d.bench import all_gather_matmul, matmul, matmul_reduce_scatter, products
from pymesh3d.errors import ConfigError
from pymesh3d.ops.choose import PRODUCT
from pymesh3d.triton_kernels import backend

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(100)
@pytest.mark.parametrize("name", ["all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"])
def test_it_runs_between_two_processes(tmp_path: Path, name: str) -> None:
    file, out = tmp_path / "times.json", tmp_path / "times.svg"
    done = subprocess.run(
        [sys.executable, "-m", "pymesh3d", "bench", name, "--tp", "2", "--shapes", "tiny", "--json", str(file), "--out", str(out)],
        capture_output=True, text=True, timeout=90, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0 and "over 2 ranks on cpu" in done.stdout, done
    drawn = out.read_text()
    assert drawn.count('<g id="axes_') == 2 and "<!-- tiny up" in drawn and "<!-- tokens over all ranks -->" in drawn
    record = json.loads(file.read_text())
    assert record["rounds"] == 1
    forward, backward = sorted(record["rows"], key=lambda row: row["turned"])
    gathers = name == "all_gather_matmul"
    assert (forward["tokens"], forward["cols"], forward["depth"]) == (32, 24, 16)
    assert (backward["tokens"], backward["cols"], backward["depth"]) == (32, 16, 24)
    assert [forward[size] for size in ("rows", "rank_cols", "rank_depth")] == ([16, 12, 16] if gathers else [32, 24, 8])
    assert [backward[size] for size in ("rows", "rank_cols", "rank_depth")] == ([16, 8, 24] if gathers else [32, 16, 12])
    for row in (forward, backward):
        assert (row["ranks"], row["mode"]) == (2, "eager")
        assert all(row[f"{run}_us"] > 0 for run in ("unfused", "product", "collective"))
        in_layer = {"unfused_layer_us", *(["plain_layer_us"] if backend.available else [])} if row["turned"] and not gathers else set()
        assert {key for key in row if key.endswith("_layer_us")} == in_layer
        assert ("plain_us" in row) == backend.available and "hopper-256_us" not in row
        if backend.available:
            assert row["ours"] == "plain" and row["speed"] == pytest.approx(row["unfused_us"] / row["plain_us"])
            assert row["of_floor"] == pytest.approx(row["plain_us"] / row["product_us"])


def test_shapes_of_large_models_are_refused_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"--shapes llama-8b: on a CPU the interpreter would take hours\. Use --shapes tiny"):
        all_gather_matmul.main(shapes="llama-8b")


def test_cells_are_the_products_of_forward_and_backward() -> None:
    """Of the 8B model, for 512 tokens: a product that gathers, and one that scatters, for each of the four layers."""
    found = {op.name: list(products.cells(op, ["llama-8b"], [512])) for op in (all_gather_matmul.OP, matmul_reduce_scatter.OP)}
    assert [(cell.layer, cell.cols, cell.depth, cell.turned) for cell in found["all_gather_matmul"]] == [
        ("llama-8b qkv", 6144, 4096, False),
        ("llama-8b out, backward", 4096, 4096, True),
        ("llama-8b up", 28672, 4096, False),
        ("llama-8b down, backward", 14336, 4096, True),
    ]
    assert [(cell.layer, cell.cols, cell.depth, cell.turned) for cell in found["matmul_reduce_scatter"]] == [
        ("llama-8b qkv, backward", 4096, 6144, True),
        ("llama-8b out", 4096, 4096, False),
        ("llama-8b up, backward", 4096, 28672, True),
        ("llama-8b down", 4096, 14336, False),
    ]


def test_what_is_shown_is_what_so_many_ranks_measure() -> None:
    """Sizes of which each rank has a part are multiples of their number."""
    (up, down) = products.cells(all_gather_matmul.OP, ["tiny"], [32])
    assert (up.over(3, True), down.over(3, True)) == (up._replace(tokens=30), down._replace(tokens=30, cols=15))
    (up, down) = products.cells(matmul_reduce_scatter.OP, ["tiny"], [32])
    assert (up.over(3, False), down.over(3, False)) == (up._replace(tokens=30), down._replace(tokens=30, depth=15))
    for cell in products.cells(all_gather_matmul.OP, ["1b", "llama-70b"], [512]):
        assert cell.over(8, True) == cell.over(8, False) == cell, "as it is asked for where that can be cut"


def test_the_fastest_of_a_graph_is_chosen_of_what_layers_can_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a card")
    row = {"op": "matmul_reduce_scatter", "ranks": 2, "turned": False, "rows": 8, "rank_cols": 16, "rank_depth": 4, "mode": "graph"}
    times = {"unfused_us": 9.0, "torch_us": 1.0, "hopper-256_us": 7.0, "hopper-128_us": 8.0}
    rows = [{**row, **times}, {**row, **times, "mode": "eager", "hopper-128_us": 1.0}, {**row, **times, "rows": 99, "unfused_us": 2.0}]
    in_layers = {"unfused_layer_us": 10.0, "hopper-256_layer_us": 12.0, "hopper-128_layer_us": 11.0}
    rows += [{**row, **times, **in_layers, "turned": True}, {**row, **times, **in_layers, "turned": True, "unfused_layer_us": 11.5}]
    kept = {"op": "matmul_reduce_scatter", "ranks": 2, "turned": False, "card": "a card", "rows": 8, "cols": 16, "depth": 4}
    found = products.choices(rows)
    assert found[:2] == [{**kept, "best": "hopper-256"}, {**kept, "rows": 99, "best": "torch"}]
    assert found[2:] == [{**kept, "turned": True, "best": best} for best in ("torch", "hopper-128")]
    assert all({*one} == {*PRODUCT, "best"} for one in found)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["all_gather_matmul", "--shapes", "llama-8b,huge"], "--shapes huge: no such shapes. Use tiny or 1b or llama-8b or llama-70b"),
        (["all_gather_matmul", "--tp", "1"], "a product over 1 ranks: 2 to 8 can talk to each other here. Use --tp 2"),
        (["all_gather_matmul", "--tp", "0"], "a product over 0 ranks: 2 to 8 can talk to each other here. Use --tp 2"),
        (
            ["all_gather_matmul", "--shapes", "tiny,"],
            "--shapes 'tiny,': commas stand between names, and there must be one. Use --shapes tiny",
        ),
        (["matmul_all_reduce", "--shapes="], "--shapes '': commas stand between names, and there must be one. Use --shapes tiny"),
        (
            ["zero_train", "--cases", ",stage1,"],
            "--cases ',stage1,': commas stand between names, and there must be one. Use --cases stage1",
        ),
        (["matmul_reduce_scatter", "--tune"], "--tune: there is no GPU whose kernels could be chosen. Leave it out"),
        (["matmul_all_reduce", "--out", "picture.bmp"], "--out picture.bmp: the end of its name picks the format"),
        (["philox", "--tp", "2"], "bench philox --tp: only all_gather_matmul, matmul_all_reduce, matmul_reduce_scatter have that"),
    ],
)
def test_what_cannot_be_measured_is_refused(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("on CPU")
    assert cli.main(["bench", *arguments]) == 2
    assert text in capsys.readouterr().err


def test_the_plain_product_is_timed_against_torch(tmp_path: Path) -> None:
    assert matmul.main(str(tmp_path / "times.json")) == 0
    for row in json.loads((tmp_path / "times.json").read_text())["rows"]:
        assert row["torch_ms"] > 0 and ("matmul_ms" in row) == backend.available
        if backend.available:
            assert row["of_torch"] == pytest.approx(row["torch_ms"] / row["matmul_ms"])
            assert row["tflops"] == pytest.approx(2 * row["tokens"] * row["cols"] * row["depth"] / row["matmul_ms"] / 1e9)

"""Which implementation computes a product; what they compute is tested with the layers (tests/tp/test_layers.py)."""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pymesh3d.comm import workspace
from pymesh3d.errors import ConfigError, SharingError
from pymesh3d.ops import choose as choices
from pymesh3d.ops import fused
from pymesh3d.ops.choose import VARIABLE, choose, fastest, forced
from pymesh3d.triton_kernels import backend
from tests.kernels import needs_kernels

PAIR: Any = SimpleNamespace(size=2)
ALONE: Any = SimpleNamespace(size=1)
OPS = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")
X = torch.zeros(2, 8)


def chosen(x: torch.Tensor, axis: Any = PAIR) -> set[str]:
    return {choose(op, (2, 8, 8), False, x, axis) for op in OPS}


def test_torch_computes_unless_something_else_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert chosen(X) == {"torch"}
    monkeypatch.setenv(VARIABLE, "torch")
    assert chosen(X) == {"torch"}


@needs_kernels
def test_only_what_the_kernels_take_goes_to_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "plain")
    assert all(chosen(X.to(dtype)) == {"plain"} for dtype in (torch.bfloat16, torch.float32, torch.float64))
    assert chosen(X.half()) == chosen(X, ALONE) == {"torch"}
    monkeypatch.setenv(VARIABLE, "hopper-256")
    assert chosen(X.bfloat16()) == {"torch"}, "on the CPU"


def test_what_cannot_be_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "")
    assert forced() is None, "as if it were not there"
    monkeypatch.setenv(VARIABLE, "fast")
    with pytest.raises(ConfigError, match=r"PYMESH3D_PRODUCTS=fast: no such implementation\. Use one of torch, plain, hopper-256,"):
        chosen(X)
    monkeypatch.setattr(backend, "available", False)
    monkeypatch.setattr(backend, "reason", "there is no triton")
    for word in ("plain", "hopper-128"):
        monkeypatch.setenv(VARIABLE, word)
        with pytest.raises(ConfigError, match=rf"PYMESH3D_PRODUCTS={word}: there is no triton\. Use PYMESH3D_PRODUCTS=torch"):
            chosen(X)


@pytest.fixture
def tuned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The file of what this machine has found out, which is not there yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "pymesh3d").mkdir()
    _forget()
    yield tmp_path / "pymesh3d" / "products.json"
    _forget()


def _forget() -> None:
    choices.measured.cache_clear()
    fastest.cache_clear()


def row(best: str, rows: int = 1024, cols: int = 4096, depth: int = 2048, turned: bool = False, ranks: int = 2) -> dict[str, Any]:
    sizes = {"rows": rows, "cols": cols, "depth": depth}
    return {"op": OPS[0], "card": "a card", "ranks": ranks, "turned": turned, **sizes, "best": best}


def test_the_most_similar_product_that_was_measured_decides(tuned: Path) -> None:
    rows = [row("hopper-128"), row("hopper-256", rows=8192), row("plain", turned=True), row("plain", ranks=4)]
    tuned.write_text(json.dumps(rows))

    def best(rows: int, cols: int = 4096, depth: int = 2048, turned: bool = False, op: str = OPS[0], card: str = "a card") -> str:
        return fastest(op, card, 2, rows, cols, depth, turned)

    assert best(1024) == best(2000) == "hopper-128" and best(8192) == best(4000) == "hopper-256"
    assert best(1024, turned=True) == "plain" and best(8192, turned=True) == "hopper-256"
    assert best(1024 * 4, 4096 * 8, 2048 * 4) == "torch", "nothing similar"
    assert best(1024, op=OPS[1]) == best(1024, card="another") == fastest(OPS[0], "a card", 8, 1024, 4096, 2048, False) == "torch"
    assert best(0) == "torch"


def test_what_is_measured_again_takes_the_place_of_the_old(tuned: Path) -> None:
    choices.keep([row("hopper-128"), row("torch", rows=64)])
    assert fastest(OPS[0], "a card", 2, 1024, 4096, 2048, False) == "hopper-128"
    choices.keep([row("hopper-256"), row("plain", rows=9)])
    assert fastest(OPS[0], "a card", 2, 1024, 4096, 2048, False) == "hopper-256", "at once"
    assert json.loads(tuned.read_text()) == [row("torch", rows=64), row("hopper-256"), row("plain", rows=9)]
    assert [path.name for path in tuned.parent.iterdir()] == ["products.json"]


GOOD = row("torch")
WRONG = [{**GOOD, size: value} for size in ("rows", "ranks") for value in ("1024", None, 0, -1, 10**400, 1.0, True, [1], float("nan"))]
WRONG += [{**GOOD, "turned": value} for value in ("no", 0)] + [{**GOOD, key: [1]} for key in ("op", "card", "best")]


@pytest.mark.parametrize("text", ["", "[", "null", '{"a": 1}', '[{"op": "all_gather_matmul"}]', "[3]", "[" * 100_000, b"\xff\xfe"])
def test_a_file_of_something_else_is_named(tuned: Path, text: str | bytes) -> None:
    tuned.write_bytes(text.encode() if isinstance(text, str) else text)
    for use in (lambda: fastest(OPS[0], "a card", 2, 1, 1, 1, False), lambda: choices.keep([GOOD])):
        with pytest.raises(ConfigError, match=r"products\.json: not what `bench --tune` writes\. Delete it, and tune again"):
            use()


@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_measurements_of_other_types_are_refused(tuned: Path, wrong: dict[str, Any]) -> None:
    tuned.write_text(json.dumps([GOOD, wrong]))
    with pytest.raises(ConfigError, match=r"not what `bench --tune` writes"):
        fastest(OPS[0], "a card", 2, 1, 1, 1, False)


def test_what_cannot_be_read_is_not_written_over(tuned: Path) -> None:
    tuned.mkdir()
    with pytest.raises(IsADirectoryError):
        choices.keep([GOOD])
    assert tuned.is_dir() and [path.name for path in tuned.parent.iterdir()] == ["products.json"]


def test_a_measurement_that_cannot_be_kept_leaves_the_old_ones(tuned: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    choices.keep([GOOD])

    def fail(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device", str(target))

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="No space left"):
        choices.keep([row("hopper-128", rows=9)])
    assert json.loads(tuned.read_text()) == [GOOD]


def test_the_folder_of_the_file_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    _forget()
    choices.keep([GOOD])
    _forget()
    assert (tmp_path / ".cache" / "pymesh3d" / "products.json").is_file()


def test_nothing_is_said_of_products_that_are_too_different(tuned: Path) -> None:
    choices.keep([row("hopper-128", rows=1024)])
    assert fastest(OPS[0], "a card", 2, 8 * 1024, 4096, 2048, False) == "hopper-128", "3 doublings"
    assert fastest(OPS[0], "a card", 2, 9 * 1024, 4096, 2048, False) == "torch"


def test_a_file_that_may_not_be_read_is_none(tuned: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def refuse(self: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "read_bytes", refuse)
    assert fastest(OPS[0], "a card", 2, 1024, 4096, 2048, False) == "torch"
    assert caplog.messages == [f"{tuned} cannot be read (Permission denied): what was measured elsewhere decides which kernels compute"]


def test_an_implementation_of_another_version_is_left_out(tuned: Path) -> None:
    tuned.write_text(json.dumps([row("gone"), row("hopper-256", rows=2048)]))
    assert fastest(OPS[0], "a card", 2, 1024, 4096, 2048, False) == "hopper-256"


def test_nothing_is_copied_where_torch_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens first, rows of a batch do not lie one after the other."""
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(torch.Tensor, "reshape", None)
    x, weight = torch.zeros(3, 4, 8), torch.zeros(16, 8)
    for product in (fused.gathered_product, fused.scattered_product, fused.reduced_product):
        assert product(x, weight, PAIR) is None  # type: ignore[operator]


def test_ranks_of_several_hosts_use_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert choices.on_one_host((0, 1, 2, 3)) and choices.on_one_host((5, 7)) and not choices.on_one_host((3, 4))
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert not choices.on_one_host((0, 1))


def test_the_log_says_what_was_chosen_and_why(tuned: Path, caplog: pytest.LogCaptureFixture) -> None:
    tuned.write_text(json.dumps([row("hopper-128")]))
    with caplog.at_level("INFO", logger="pymesh3d"):
        for _ in range(2):
            fastest(OPS[0], "a card", 2, 1000, 4096, 2048, False)
            fastest(OPS[1], "a card", 2, 1000, 4096, 2048, False)
    what = "of [1000, 2048] and [4096, 2048] over 2 ranks"
    assert caplog.messages == [
        f"all_gather_matmul {what}: hopper-128, the fastest on a card of [1024, 2048] and [4096, 2048]",
        f"matmul_reduce_scatter {what}: torch, since nothing similar was measured on a card; pymesh3d bench matmul_reduce_scatter --tune "
        "does it",
    ]


@needs_kernels
def test_state_is_what_decides(tuned: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "plain")
    assert choices.state() == "plain, wherever it can compute: PYMESH3D_PRODUCTS forces it"
    monkeypatch.setenv(VARIABLE, "fast")
    with pytest.raises(ConfigError, match="no such implementation"):
        choices.state()
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choices.state() == "torch (others are chosen on GPUs only)"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a card")
    assert choices.state() == "torch: nothing else was measured on a card; pymesh3d bench all_gather_matmul --tune does it"
    tuned.write_text(json.dumps([row("hopper-128"), row("torch", ranks=4)]))
    _forget()
    what = "the fastest for the most similar of"
    assert choices.state() == f"{what} 2 products on a card with 2 and 4 ranks, 2 of them measured here ({tuned})"
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    shipped = len(json.loads(choices.SHIPPED.read_text()))
    assert choices.state() == f"{what} {shipped} products on NVIDIA H200 with 2 ranks, 0 of them measured here ({tuned})"


def test_what_comes_with_pymesh3d_is_of_known_products_once(tuned: Path) -> None:
    rows = json.loads(choices.SHIPPED.read_text())
    assert all({*row} == {*choices.PRODUCT, "best"} and row["best"] in choices.IMPLEMENTATIONS and row["op"] in OPS for row in rows)
    assert len({tuple(row[key] for key in choices.PRODUCT) for row in rows}) == len(rows) > 0
    for row in rows:
        assert fastest(*(row[key] for key in choices.PRODUCT)) == row["best"]
    op, card, ranks, *product = (rows[0][key] for key in choices.PRODUCT)
    assert fastest(op, card, 2 * ranks, *product) == "torch", "of as many ranks only"


def test_a_card_that_was_not_measured_goes_by_the_one_that_is_the_same(tuned: Path, caplog: pytest.LogCaptureFixture) -> None:
    first, *_ = json.loads(choices.SHIPPED.read_text())
    op, _, *product = (first[key] for key in choices.PRODUCT)
    with caplog.at_level("INFO", logger="pymesh3d"):
        assert fastest(op, "NVIDIA H100 80GB HBM3", *product) == first["best"] != "torch"
    assert "the fastest on NVIDIA H200 of" in caplog.text
    assert fastest(op, "NVIDIA H100 PCIe", *product) == "torch", "which has fewer processors and slower links"
    choices.keep([{**first, "card": "NVIDIA H100 80GB HBM3", "best": "torch", "rows": 10_000_000}])
    assert fastest(op, "NVIDIA H100 80GB HBM3", *product) == "torch", "what was measured on it counts alone"
    other = next(row for row in json.loads(choices.SHIPPED.read_text()) if row["op"] != op and row["best"] != "torch")
    assert fastest(other["op"], "NVIDIA H100 80GB HBM3", *(other[key] for key in choices.PRODUCT[2:])) == other["best"], "of that op"


def test_what_this_machine_measured_goes_before_what_comes_with_pymesh3d(tuned: Path) -> None:
    first, *others = json.loads(choices.SHIPPED.read_text())
    assert first["best"] != "torch"
    here = {**first, "best": "torch"}
    choices.keep([here])
    assert fastest(*(here[key] for key in choices.PRODUCT)) == "torch"
    assert all(fastest(*(row[key] for key in choices.PRODUCT)) == row["best"] for row in others), "of others the shipped ones stay"
    assert json.loads(tuned.read_text()) == [here] and len(choices.measured()) == 1 + len(others)


def test_ranks_that_cannot_share_memory_use_torch(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Said once for each op; where a kernel is asked for, it is an error."""
    asked: list[int] = []

    def refuse(size: int, *_: Any) -> Any:
        asked.append(size)
        raise SharingError("rank 1: no NVLink")

    axis: Any = SimpleNamespace(size=2, rank=0, key="an axis", watched=[], timeout=datetime.timedelta(seconds=1))
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(workspace, "SymmetricBuffer", refuse)
    monkeypatch.setattr(fused, "choose", lambda *_: "plain")
    x, weight = torch.zeros(4, 8), torch.zeros(16, 8)
    for product in (fused.scattered_product, fused.reduced_product):
        assert product(x, weight, axis) is product(x, weight, axis) is None
    what = "rank 1: no NVLink; torch computes {} there, and NCCL communicates"
    assert caplog.messages == [what.format("matmul_reduce_scatter"), what.format("matmul_all_reduce")] and len(asked) == 2
    monkeypatch.setattr(fused, "forced", lambda: "plain")
    with pytest.raises(SharingError):
        fused.gathered_product(x, weight, axis)


def test_what_kernels_for_hopper_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "available", True)
    monkeypatch.setattr(choices, "_is_hopper", lambda device: True)
    x = torch.zeros(1, dtype=torch.bfloat16)

    def taken(op: str, rows: int, cols: int = 64, depth: int = 64, ranks: int = 2) -> bool:
        return choices.can("hopper-128", op, (rows, cols, depth), x, ranks)

    assert taken(OPS[0], 128) and not taken(OPS[0], 127)
    assert taken(OPS[2], 256) and not taken(OPS[2], 255) and not taken(OPS[2], 257)
    assert not taken(OPS[2], 256, ranks=4) and taken(OPS[1], 2)
    assert not taken(OPS[1], 256, cols=60) and not choices.can("hopper-128", OPS[1], (256, 64, 64), x.float(), 2)


@pytest.mark.parametrize(("capability", "is_one"), [((8, 9), False), ((9, 0), True), ((10, 0), False), ((12, 0), False)])
def test_what_is_hopper(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], is_one: bool) -> None:
    choices._is_hopper.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert choices._is_hopper(torch.device("cuda", 0)) is is_one and not choices._is_hopper(torch.device("cpu"))
    choices._is_hopper.cache_clear()


def test_what_was_the_fastest_is_asked_with_the_sizes_of_the_product(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    axis: Any = SimpleNamespace(size=2, ranks=(0, 1))
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(choices, "_card", lambda device: "a card")
    monkeypatch.setattr(choices, "fastest", lambda *given: asked.append(given) or "hopper-128")
    monkeypatch.setattr(choices, "can", lambda *given: asked.append(given) or False)
    like: Any = SimpleNamespace(device=torch.device("cuda", 0), dtype=torch.bfloat16)
    assert choose("op", (5, 6, 7), True, like, axis) == "torch", "it cannot compute this"
    assert asked == [("op", "a card", 2, 5, 6, 7, True), ("hopper-128", "op", (5, 6, 7), like, 2)]
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    asked.clear()
    assert choose("op", (5, 6, 7), True, like, axis) == "torch" and not asked, "ranks of two hosts"

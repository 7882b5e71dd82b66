"""Products that communicate: what the kernels are asked for. What they compute is tested with the layers and with the kernels."""

from __future__ import annotations

import datetime
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pymesh3d.comm.native import starter
from pymesh3d.comm.workspace import Workspace
from pymesh3d.errors import SharingError
from pymesh3d.ops import fused, products
from pymesh3d.ops.choose import TILES

AXIS: Any = SimpleNamespace(size=2, rank=1, ranks=(0, 1), key="tp", timeout=datetime.timedelta(seconds=7))
OPS = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")


@pytest.mark.parametrize("name", TILES)
@pytest.mark.parametrize(
    ("op", "sizes", "more"),
    [(OPS[0], (6, 16, 24), {"keep": True}), (OPS[0], (6, 16, 24), {"keep": False}), (OPS[1], (3, 24), {}), (OPS[2], (3, 24), {})],
    ids=str,
)
def test_a_kernel_for_hopper_is_prepared_once(
    monkeypatch: pytest.MonkeyPatch, op: str, sizes: tuple[int, ...], more: dict[str, bool], name: str
) -> None:
    asked: list[Any] = []

    def prepare(*given: Any, **options: Any) -> Any:
        asked.append((given[2:], options))
        return lambda a, b: torch.zeros(1)

    monkeypatch.setattr(fused, f"{op}_hopper", SimpleNamespace(needed=lambda *given: asked.append(given) or (1, 2), prepare=prepare))
    share: Any = Workspace.__new__(Workspace)
    share._prepared, share.parts, share.counters, share.slots = {}, ["parts"], "counters", lambda *given: given
    a, b = torch.zeros(6, 16, dtype=torch.bfloat16), torch.zeros(24, 16, dtype=torch.bfloat16)
    for _ in range(2):
        fused.FUSED[op](name, share, AXIS, a.clone(), b.clone(), **more)
    options = {"tiles": TILES[name], "patience": 7.0, "starter": starter, **more}
    assert asked == [(2, *sizes, TILES[name]), ((1, (1, 2), ["parts"], "counters"), options)]
    fused.FUSED[op](next(other for other in TILES if other != name), share, AXIS, a, b, **more)
    assert len(asked) == 4, "tiles tell them apart"
    if more:
        fused.FUSED[op](name, share, AXIS, a, b, keep=not more["keep"])
        assert len(asked) == 6 and asked[-1][1]["keep"] is not more["keep"]


def test_the_choice_is_asked_whether_the_transpose_of_the_weight_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(fused, "choose", lambda *given: asked.append(given[:3]) or "torch")
    x, weight = torch.zeros(3, 4, 8), torch.zeros(16, 8)
    for product in (fused.gathered_product, fused.scattered_product, fused.reduced_product):
        assert product(x, weight, AXIS) is product(x, weight.t().contiguous().t(), AXIS) is None  # type: ignore[operator]
    assert asked == [(op, (12, 16, 8), turned) for op in OPS for turned in (False, True)]


def test_what_torch_has_to_say_is_left_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of nothing, and of two dtypes."""
    monkeypatch.setattr(fused, "choose", None)
    for x in (torch.zeros(0, 8), torch.zeros(2, 0, 8), torch.zeros(4, 8, dtype=torch.float64)):
        for product in (fused.gathered_product, fused.scattered_product, fused.reduced_product):
            assert product(x, torch.zeros(16, 8), AXIS) is None  # type: ignore[operator]


@pytest.mark.parametrize("trained", [True, False])
def test_the_gathered_gradient_is_kept_for_the_weight_only(monkeypatch: pytest.MonkeyPatch, trained: bool) -> None:
    asked: list[bool] = []
    y, kept = torch.zeros(4, 3), torch.ones(4, 5)

    def gathered(x: Any, weight: Any, axis: Any, *, keep: bool = False) -> Any:
        asked.append(keep)
        return y, kept if keep else None

    monkeypatch.setattr(products, "gathered_product", gathered)
    monkeypatch.setattr(products, "gather_tokens", None)  # nothing is gathered twice
    weight: Any = SimpleNamespace(t=lambda: None)  # nor multiplied
    needs = (True, trained, False)
    found = products.row_backward(torch.ones(2, 5), torch.ones(4, 3), weight, None, (None, None), AXIS, True, needs, None)
    assert asked == [trained] and (found[1] is not None) is trained


def test_a_gradient_that_nobody_needs_is_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    needs = (False, True, False)
    monkeypatch.setattr(products, "gathered_product", None)
    monkeypatch.setattr(products, "gather_tokens", lambda x, axis: SimpleNamespace(wait=lambda: torch.ones(4, 5)))
    found = products.row_backward(torch.ones(2, 5), torch.ones(4, 3), torch.ones(5, 3), None, (None, None), AXIS, True, needs, None)
    assert found[0] is None and found[1] is not None and torch.equal(found[1], torch.full((5, 3), 4.0))


def test_where_copy_engines_gather(monkeypatch: pytest.MonkeyPatch) -> None:
    """On one host, more than one rank, something, eager, with kernels, and not where torch is asked for; on the CPU where `plain` is."""
    cpu, gpu = torch.zeros(2, 3), SimpleNamespace(device=SimpleNamespace(type="cuda"), numel=lambda: count[0], element_size=lambda: 2)
    count = [4 << 20]
    word: list[str | None] = [None]
    monkeypatch.setattr(fused, "forced", lambda: word[0])
    monkeypatch.setattr(fused, "on_one_host", lambda ranks: ranks == (0, 1))
    monkeypatch.setattr(fused, "backend", SimpleNamespace(available=True))
    capturing = [False]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])

    def found(x: Any, axis: Any = AXIS) -> bool:
        return fused.gathers_aside(x, axis)

    for word[0], on_gpu, on_cpu in ((None, True, False), ("hopper-128", True, False), ("plain", True, True), ("torch", False, False)):
        assert (found(gpu), found(cpu)) == (on_gpu, on_cpu), word[0]
    word[0] = "plain"
    assert (
        not found(cpu[:0])
        and not found(cpu, SimpleNamespace(size=1, ranks=(0, 1)))
        and not found(cpu, SimpleNamespace(size=2, ranks=(0, 8)))
    )
    capturing[0] = True
    assert not found(gpu) and found(cpu)
    capturing[0] = False
    count[0] -= 1
    assert not found(gpu), "less than 8 MiB"
    count[0] += 1
    assert found(gpu)
    monkeypatch.setattr(fused, "backend", SimpleNamespace(available=False))
    assert not found(gpu)


def test_an_input_is_gathered_for_a_weight_that_is_trained_only(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("gathered_aside", "gather_tokens"):
        monkeypatch.setattr(products, name, None)
    monkeypatch.setattr(products, "scattered_product", lambda grad_y, weight, axis: grad_y @ weight.t())
    y, x, weight = torch.ones(4, 3), torch.ones(2, 5), torch.ones(3, 5)
    found = products.column_backward(y, x, weight, None, (None, None), AXIS, True, (True, False, False), None)
    assert found[0] is not None and found[0].shape == (4, 5) and found[1] is None


def test_a_gather_that_cannot_be_shared_is_left_to_a_collective(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def start(x: torch.Tensor) -> Any:
        raise SharingError("no room")

    share = SimpleNamespace(refused="", start=start)
    monkeypatch.setattr(fused, "gathers_aside", lambda x, axis: True)
    monkeypatch.setattr(fused, "on_this_stream", lambda *given: share)
    assert fused.gathered_aside(torch.zeros(2, 3), AXIS) is None
    assert "no room; a collective gathers there" in caplog.text
    share.refused, share.start = "no room", None
    assert fused.gathered_aside(torch.zeros(2, 3), AXIS) is None, "it is not asked again"

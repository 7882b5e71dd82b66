"""What ops share with other ranks: one for each op, axis and stream; it grows, names who is missing, and ends with the mesh."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pymesh3d.comm import workspace as module
from pymesh3d.comm.watch import wait_until
from pymesh3d.comm.workspace import Workspace, workspace
from pymesh3d.errors import ConfigError, SharingError
from pymesh3d.mesh import Mesh, init_mesh
from pymesh3d.triton_kernels.matmul_reduce_scatter import launch, needed
from tests.kernels import needs_kernels, noise
from tests.products import SMALL

Ranks = Callable[..., list[Any]]


def summed(mesh: Mesh, rows: int, cols: int, patience: float = 30.0) -> tuple[torch.Tensor, torch.Tensor]:
    """The product of all ranks, this rank's rows: by the kernel in its workspace, and by torch."""
    axis = mesh.tp
    share = workspace("op", axis, mesh.device)
    a = [noise(rows * axis.size, 8, dtype=torch.float64, seed=rank) for rank in range(axis.size)]
    b = [noise(cols, 8, dtype=torch.float64, seed=9 + rank) for rank in range(axis.size)]
    slots = share.slots(*needed(axis.size, rows, cols, torch.float64, SMALL))
    found = launch(a[axis.rank], b[axis.rank], axis.rank, slots, share.counters, tiles=SMALL, patience=patience)
    expected = torch.stack([x @ y.t() for x, y in zip(a, b, strict=True)]).sum(0).chunk(axis.size)[axis.rank]
    return found, expected


def grows() -> bool:
    mesh = init_mesh(tp=2, dp=-1, device="cpu")
    share, other = workspace("op", mesh.tp, mesh.device), workspace("another op", mesh.tp, mesh.device)
    assert share is workspace("op", mesh.tp, mesh.device) is not other and mesh.watched[:2] == [other, share]
    sizes = []
    for rows, cols in ((4, 4), (4, 4), (40, 30), (8, 8)):
        found, expected = summed(mesh, rows, cols)
        torch.testing.assert_close(found, expected, rtol=0.0, atol=1e-12)
        slots = share.slots(1, 1)
        sizes.append((slots.size, slots.length))
    share.check()
    assert share.part((2,), torch.float64).shape == (2,)
    mesh.close()
    with pytest.raises(ConfigError, match="of a closed mesh"):
        workspace("op", mesh.tp, mesh.device).slots(8, 1)
    return sizes[0] == sizes[1] < sizes[2] == sizes[3] and sizes[0][0] % 512 == 0


@needs_kernels
def test_it_grows_and_is_shared(ranks: Ranks) -> None:
    assert ranks(4, grows) == [True] * 4


def without_the_last() -> str:
    """What the first of two ranks is told where the other makes one call less."""
    mesh = init_mesh(tp=2, device="cpu")
    summed(mesh, 4, 4)
    text = ""
    if mesh.rank == 0:
        summed(mesh, 4, 4, patience=0.3)
        with pytest.raises(RuntimeError) as caught:
            wait_until(lambda: True, mesh.watched, 1.0)
        text = str(caught.value)
    dist.barrier()
    mesh.close()
    return text


@needs_kernels
def test_a_rank_that_does_not_come_is_named(ranks: Ranks) -> None:
    assert ranks(2, without_the_last) == ["rank 1 did not send tile 0 of op within the time limit", ""]


def given_up() -> float:
    """Seconds that a call of rank 0 alone takes whose workspace is told to give up."""
    mesh = init_mesh(tp=2, device="cpu")
    summed(mesh, 4, 4)
    began = time.monotonic()
    if mesh.rank == 0:
        threading.Timer(0.3, lambda: workspace("op", mesh.tp, mesh.device).abort(1.0)).start()
        summed(mesh, 4, 4, patience=60.0)
    seconds = time.monotonic() - began
    dist.barrier()
    mesh.close()
    return seconds


@needs_kernels
def test_giving_up_ends_a_wait(ranks: Ranks) -> None:
    first, _ = ranks(2, given_up)
    assert 0.3 <= first < 20.0


def prepares() -> list[int]:
    """What is prepared is kept until the slots grow, or there is too much."""
    mesh = init_mesh(tp=2, device="cpu")
    share = workspace("op", mesh.tp, mesh.device)
    made = iter(range(100, 5000))
    share.slots(8, 1)
    found = [share.prepared(key, lambda: next(made)) for key in ("a", "b", "a")]

    def grow() -> int:
        share.slots(4096, 1)
        return next(made)

    found += [share.prepared("c", grow), share.prepared("c", grow), share.prepared("a", lambda: next(made))]
    for key in range(module.MOST):
        share.prepared(key, lambda: 0)
    found.append(share.prepared("a", lambda: next(made)))
    mesh.close()
    return found


def test_what_is_prepared_is_kept_as_long_as_the_slots(ranks: Ranks) -> None:
    assert ranks(2, prepares) == [[100, 101, 100, 102, 102, 103, 104]] * 2


def test_prepared_products_go_with_the_slots() -> None:
    one: Any = SimpleNamespace(size=1, rank=0, ranks=(0,), key="tp", name="tp")
    share = Workspace("op", one, torch.device("cpu"))
    share.slots(1000, 3)
    share.counters.calls[0] = 9
    assert share.prepared("a", lambda: "first") == share.prepared("a", lambda: "second") == "first"
    assert share.parts[0].numel() == 2 * 1024 and share.slots(1000, 2) is share.slots(1, 3)
    assert share.parts[0].data_ptr() == int(share.slots(1, 1).memory[0]) == share.part((1,), torch.uint8).data_ptr()
    slots = share.slots(8, 4)
    assert (slots.size, slots.length) == (1024, 4), "flags alone may be too few; what is there does not shrink"
    assert share.prepared("a", lambda: "third") == "third" and share.counters.calls.tolist() == [0] * 4
    share.close()
    assert not share._prepared and not share.parts and share._memory is share._flags is None


def refused() -> tuple[str, bool]:
    """What stays of slots that cannot grow: why."""
    mesh = init_mesh(tp=2, device="cpu")
    share = workspace("op", mesh.tp, mesh.device)
    share.slots(8, 1)
    with pytest.raises(SharingError):
        share.slots(1 << 60, 1)
    told, left = share.refused, share._memory is None and share._flags is None and share._slots is None and not share.parts
    mesh.close()
    return told, left


def test_slots_that_cannot_grow_say_why_and_give_their_memory_back(ranks: Ranks) -> None:
    (told, left), other = ranks(2, refused)
    assert left and other == (told, left) and "rank 0: sharing memory over axis tp" in told


def grows_after_a_graph() -> list[str]:
    """What was there when a graph was captured stays, and is watched and told to give up as well."""
    mesh = init_mesh(tp=2, device="cpu")
    summed(mesh, 4, 4)
    share = workspace("op", mesh.tp, mesh.device)
    before, memory, calls = share.counters, share.part((1,), torch.uint8).data_ptr(), int(share.counters.calls[0])
    share.captured = True
    found, expected = summed(mesh, 40, 30)
    torch.testing.assert_close(found, expected, rtol=0.0, atol=1e-12)
    assert share.counters is not before and int(before.calls[0]) == calls and share.part((1,), torch.uint8).data_ptr() != memory
    assert share._kept[0][1].part(mesh.rank, (1,), torch.uint8).data_ptr() == memory  # type: ignore[union-attr]
    again = share.counters
    summed(mesh, 80, 30)
    assert share.counters is again and len(share._kept) == 1, "no graph since then"
    texts = []
    for counters in (before, again):
        counters.told.fill_((1 << 32) + 8)
        with pytest.raises(RuntimeError) as caught:
            share.check()
        texts.append(str(caught.value))
        counters.told.zero_()
    share.abort(1.0)
    assert int(before.trouble) == int(again.trouble) == -1
    mesh.close()
    return texts


@needs_kernels
def test_what_a_graph_uses_stays_when_it_grows(ranks: Ranks) -> None:
    assert ranks(2, grows_after_a_graph) == [["rank 1 did not send tile 7 of op within the time limit"] * 2] * 2


def test_each_stream_has_one_whose_turn_it_is_and_that_knows_of_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    share, gpu = Workspace.__new__(Workspace), torch.device("cuda", 3)
    names, turns, streams = [], [], {3: 7}
    share.captured = False
    monkeypatch.setattr(module, "take_turns", turns.append)
    monkeypatch.setattr(module, "found_or_made", lambda name, make: names.append(name) or share)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", streams.__getitem__, raising=False)
    for capturing, stream in ((False, 7), (True, 7), (False, 8)):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda capturing=capturing: capturing)
        streams[3], before = stream, share.captured
        assert workspace("op", SimpleNamespace(key="tp"), gpu) is share  # type: ignore[arg-type]
        assert share.captured == (before or capturing)
    assert turns == [gpu] * 3 and names[0] == names[1] != names[2]


def test_nothing_grows_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    share = Workspace.__new__(Workspace)
    share._op, share._device, share._slots = "op", torch.device("cuda"), None
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(ConfigError, match=r"1,024 bytes for op while a CUDA graph is captured: .* Run the step once"):
        share.slots(1024, 1)


class Stream:
    """Remembers whom it has waited for."""

    def __init__(self) -> None:
        self.waited: list[Stream] = []

    def wait_stream(self, other: Stream) -> None:
        self.waited.append(other)


def test_what_waits_for_other_ranks_takes_turns_on_all_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, first, second = torch.device("cuda", 0), Stream(), Stream()
    capturing = False
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    monkeypatch.setattr(module, "_last", {})

    def on(stream: Stream) -> None:
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
        module.take_turns(gpu)

    on(first)
    on(first)
    assert first.waited == []
    on(second)
    assert second.waited == [first]
    on(first)
    on(first)
    assert first.waited == [second]
    capturing = True
    on(second)
    assert second.waited == [first], "in a graph the order is the graph's"
    capturing = False
    on(first)
    assert first.waited == [second], "and is nobody's turn outside"
    monkeypatch.setattr(torch.cuda, "current_stream", None)
    module.take_turns(torch.device("cpu"))

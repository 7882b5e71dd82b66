"""Links over our own bindings, where a library that stands for CUDA and NCCL moves the bytes between processes."""

from __future__ import annotations

import gc
import os
import signal
import time
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pymesh3d.axis import ABORT, Axis
from pymesh3d.comm import native
from pymesh3d.comm.links import Expected, NcclLink
from pymesh3d.comm.p2p import Links
from pymesh3d.errors import DistributedError
from pymesh3d.mesh import init_mesh
from tests import stub
from tests.processes import ticks_while, until
from tests.test_native import needs_compiler, needs_core

pytestmark = [needs_core, needs_compiler]

Ranks = Callable[..., list[Any]]
CPU = torch.device("cpu")
COUNT, NUMBERS = 38, 5000
LARGE = 1_000_000  # numbers
HANGS = 0.5  # seconds
RANKS = (4, 5)  # what the two ends are called


class End:
    """End 0 or 1 of a link between ranks 4 and 5, and what the library can do besides."""

    def __init__(self, library: str) -> None:
        self.machine = stub.Machine(library)
        self.machine.use_context()
        self.machine.rendezvous()
        self.libraries = native.libraries(cuda=library, nccl=library)
        self.rank = dist.get_rank()
        self._scratch = torch.zeros(1, dtype=torch.uint8)
        self.native = self.connect()
        assert dist.group.WORLD is not None
        line = Axis("pp", self.rank, RANKS, dist.group.WORLD)
        sends, receives = ("activations", "gradients") if self.rank == 0 else ("gradients", "activations")
        self.link = NcclLink(self.native, line, sends=sends, receives=receives, device=CPU, stream=lambda: 0)

    def connect(self) -> Any:
        unique = torch.frombuffer(bytearray(self.libraries[1].unique_id()), dtype=torch.uint8)
        dist.broadcast(unique, 0)
        return native._C.Link(*self.libraries, unique.numpy().tobytes(), RANKS, self.rank, self._scratch.data_ptr(), timeout=20.0)

    def synchronize(self) -> None:
        """Wait for the stream that computes: only then are tensors on the CPU what they are for that stream."""
        self.machine.synchronize(0)

    def close(self) -> None:
        self.synchronize()
        self.native.close()


def many_sends(library: str) -> tuple[list[tuple[float, float, int]], int]:
    """Both sides send many tensors, free each at once and overwrite the memory; (smallest, largest value, numbers) of what came."""
    end = End(library)
    end.machine.delay(3000, 5 + end.rank)
    received = []
    for n in range(COUNT):
        tensor = torch.full((NUMBERS + n,), 1000.0 * end.rank + n, dtype=torch.float64)
        expected = Expected((NUMBERS + n,), torch.float64, n)
        if n % 3:
            end.link.send(tensor, n, expected)
        elif end.rank == 0:
            end.link.send(tensor, n)
            end.link.post(expected)
        else:
            end.link.post(expected)
            end.link.send(tensor, n)
        del tensor
        torch.full((NUMBERS + n,), 12345.0, dtype=torch.float64)
        if n % 2:  # two receives are open at a time
            received += [end.link.take(), end.link.take()]
            end.synchronize()
            assert len(end.link._sent) <= 4, "what was sent before is no longer kept"
    end.link.flush()
    found = [(t.min().item(), t.max().item(), t.numel()) for t in received]
    end.close()
    return found, end.native.finished()


def test_order_is_kept_and_sent_tensors_may_be_freed(ranks: Ranks, library: str) -> None:
    transfers = COUNT + (COUNT + 2) // 3
    values = [[1000.0 * sender + n for n in range(COUNT)] for sender in (1, 0)]
    assert ranks(2, many_sends, library) == [([(v, v, NUMBERS + n) for n, v in enumerate(own)], transfers) for own in values]


def flush_then_receive(library: str) -> tuple[int, int, int] | list[float]:
    """Of the sender: what has finished after the flush, and once the stream has come to it; and how many tensors it still keeps."""
    end = End(library)
    if end.rank == 1:
        dist.barrier()
        end.link.post(Expected((NUMBERS,), torch.float32, 0))
        received = end.link.take()
        end.close()
        return [received[0].item(), received[-1].item()]
    tensor = torch.arange(NUMBERS, dtype=torch.float32)  # the CPU's memory is given away at once, so it must stay
    end.link.send(tensor, 0)
    end.link.flush()
    time.sleep(0.1)  # enough for what does not wait for the receiver
    before = end.native.finished()
    dist.barrier()
    end.synchronize()
    assert until(lambda: end.native.finished() > before, 10.0), "the host is told after those who wait for the transfer"
    after = end.native.finished()
    end.close()
    return before, after, len(end.link._sent)


def test_flush_makes_the_stream_wait_and_not_the_host(ranks: Ranks, library: str) -> None:
    assert ranks(2, flush_then_receive, library) == [(0, 1, 0), [0.0, NUMBERS - 1.0]]


def flush_after_sends(library: str) -> list[int]:
    """The numbers of the transfers that rank 0 makes its stream wait for when it flushes three sends."""
    end, joined = End(library), []

    def join(number: int, stream: int) -> None:
        joined.append(number)
        end.native.join(number, stream)

    if end.rank == 0:
        end.link._native = SimpleNamespace(transfer=end.native.transfer, join=join)  # type: ignore[assignment]
        for microbatch in range(3):
            end.link.send(torch.ones(1), microbatch)
        end.link.flush()
    else:
        received = []  # kept until the stream has come to them
        for microbatch in range(3):
            end.link.post(Expected((1,), torch.float32, microbatch))
            received.append(end.link.take())
    end.close()
    return joined


def test_flush_waits_for_the_newest_send(ranks: Ranks, library: str) -> None:
    """All before it have left by then; the memory of what was sent is given away behind it."""
    assert ranks(2, flush_after_sends, library) == [[3], []]


def not_contiguous(library: str) -> list[list[float]] | None:
    end, found = End(library), None
    if end.rank == 0:
        end.link.send(torch.tensor([[1.0, 2.0], [3.0, 4.0]], requires_grad=True).t(), 0)
    else:
        end.link.post(Expected((2, 2), torch.float32, 0))
        received = end.link.take()
        end.synchronize()
        found = received.tolist()
    end.close()
    return found


def test_what_is_not_contiguous_arrives_in_order(ranks: Ranks, library: str) -> None:
    assert ranks(2, not_contiguous, library) == [None, [[1.0, 3.0], [2.0, 4.0]]]


def text_of(action: Callable[[], object]) -> str:
    with pytest.raises(DistributedError) as caught:
        action()
    return str(caught.value)


def killed_peer(library: str, dies: int) -> list[str] | None:
    """What the other end is told when it looks, and after it has given up."""
    end = End(library)
    if end.rank == dies:
        os.kill(os.getpid(), signal.SIGKILL)
    end.link.post(Expected((4,), torch.float32, 5))
    found: list[str] = []

    def told() -> bool:
        try:
            end.native.check()
        except RuntimeError as error:
            found.append(str(error))
        return bool(found)

    assert until(told, 20.0)
    assert end.native.abort(10.0)
    found.append(text_of(lambda: end.link.send(torch.zeros(4), 6)))
    found.append(text_of(lambda: end.link.post(Expected((4,), torch.float32, 7))))
    return found


@pytest.mark.parametrize("dies", [0, 1])
def test_a_killed_peer_is_an_error_that_names_it(fresh_ranks: Ranks, library: str, dies: int) -> None:
    left = 1 - dies
    looked, send, receive = fresh_ranks(2, killed_peer, library, dies, timeout=60.0, expect_dead=[dies])[left]
    own, lost = RANKS[left], RANKS[dies]
    ends = f"between rank {own} and rank {lost} failed:"
    reason = "remote process exited (6): the peer has closed the connection"
    assert looked.endswith(f"what was under way {ends} {reason}")  # the link's own watch may have been quicker
    sends, receives = ("activations", "gradients") if left == 0 else ("gradients", "activations")
    for text, operation in ((send, f"send of {sends} of microbatch 6"), (receive, f"receive of {receives} of microbatch 7")):
        assert text.startswith(f"rank {own}: {operation} over axis pp with ranks [{lost}] failed: a transfer {ends} ")
        assert "One of these ranks" in text
        assert "the communicator has been aborted" in text or reason in text


def aborted_link(library: str) -> tuple[str, list[float]] | None:
    """What the last stage of three is told of its link after it has been aborted, and whether all else under the mesh gives up then."""
    mesh, told, given_up = init_mesh(pp=3, device="cpu"), None, list[float]()
    with stub.under_links(library):
        links = Links(mesh)
        dist.barrier()
        if (link := links.before) and links.after is None:
            mesh.watched[0].abort(10.0)
            mesh.watched.append(SimpleNamespace(check=lambda: None, abort=given_up.append, close=lambda: None))  # type: ignore[arg-type]
            told = text_of(lambda: link.send(torch.zeros(1), 7)), list(given_up)
        dist.barrier()
        mesh.close()
    return told


def test_both_layers_name_the_same_ranks(ranks: Ranks, library: str) -> None:
    *_, (told, given_up) = ranks(3, aborted_link, library)
    reason = "a transfer between rank 2 and rank 1 failed: the communicator has been aborted"
    assert told.startswith(f"rank 2: send of gradients of microbatch 7 over axis pp with ranks [1] failed: {reason}.")
    assert given_up == [ABORT]


def opened(library: str) -> dict[str, Any]:
    """Of two stages' links on a mesh with a limit of 7 s: the limits that their ends get, how many transfers of theirs end within 5 s
    before anybody uses them, and, beside the first, which links a ring has."""
    limits: list[float] = []
    link = native.link

    def recorded(*arguments: Any, timeout: float) -> Any:
        limits.append(timeout)
        return link(*arguments, timeout=timeout)

    mesh = init_mesh(pp=2, device="cpu", timeout_s=7)
    with stub.under_links(library), pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "link", recorded)
        links = Links(mesh)
        (end,) = mesh.watched[:1]
        used = until(lambda: end.finished() == 2, 5.0)  # type: ignore[attr-defined]
        ring = Links(mesh, ring=True)
        found = {
            "limits": limits,
            "used": used,
            "ends": [link is not None for link in (links.before, links.after)],
            "ring": [link is not None for link in (ring.before, ring.after)],
            "shared": (Links(mesh).before or Links(mesh).after) is (links.before or links.after),
        }
        dist.barrier()
        mesh.close()
    return found


def test_links_have_the_limit_of_the_mesh_are_used_at_once_and_kept_by_their_form(ranks: Ranks, library: str) -> None:
    """The first and second of a ring of two are joined twice."""
    every = {"limits": [7.0] * 3, "used": True, "ring": [True, True], "shared": True}
    assert ranks(2, opened, library) == [every | {"ends": [False, True]}, every | {"ends": [True, False]}]


def opened_over_each(library: str) -> list[str]:
    """What links of one mesh are, made over torch.distributed, over our bindings, and over torch.distributed again."""
    mesh = init_mesh(pp=2, device="cpu")
    links = [Links(mesh)]
    with stub.under_links(library):
        links.append(Links(mesh))
        dist.barrier()
    links.append(Links(mesh))
    names = [type(link.before or link.after).__name__ for link in links]
    with stub.under_links(library):
        mesh.close()
    return names


def test_links_are_kept_by_their_transport(ranks: Ranks, library: str) -> None:
    assert ranks(2, opened_over_each, library) == [["TorchLink", "NcclLink", "TorchLink"]] * 2


def failing_calls(library: str) -> list[str] | list[float]:
    """Rank 0: the texts of calls that fail. Rank 1: what comes of the send after them."""
    end = End(library)
    expected = Expected((1,), torch.float32, 3)
    if end.rank == 1:
        end.link.send(torch.ones(1), 3, expected)
        received = end.link.take()
        end.close()
        return received.tolist()
    end.machine.fail("ncclSend")
    texts = [text_of(lambda: end.link.send(torch.tensor([8.0]), 2, expected))]
    end.link.send(torch.tensor([9.0]), 3, expected)
    kept = end.link._posted[0]
    for call in (end.link.take, end.link.flush):
        end.machine.fail("cuStreamWaitEvent")
        with pytest.raises(native._C.GpuError) as caught:  # no peer is to blame
            call()
        texts.append(str(caught.value))
    end.native.join(1, 0)
    end.close()
    del kept  # what comes is written there
    return texts


def test_errors_keep_the_words_of_the_libraries(ranks: Ranks, library: str) -> None:
    texts, received = ranks(2, failing_calls, library)
    over = "over axis pp with ranks [5] failed"
    nccl = "a transfer between rank 4 and rank 5 failed: unhandled system error (2): ncclSend was told to fail."
    driver = "cuStreamWaitEvent failed: unspecified launch failure (719)"
    assert f"rank 4: send of activations of microbatch 2 {over}" in texts[0] and nccl in texts[0]
    assert texts[1:] == [driver, driver]
    assert received == [9.0]


class Watched(Expected):
    """Expected, and where its memory is can be asked later."""

    def memory(self, device: torch.device) -> torch.Tensor:
        memory = super().memory(device)
        made.append(("memory", weakref.ref(memory)))
        return memory


made: list[tuple[str, weakref.ref[torch.Tensor]]] = []


def transfers_that_raise(library: str) -> list[tuple[str, bool]]:
    """What rank 0 put into transfers that raised, and whether it is still there."""
    end, expected = End(library), Watched((4,), torch.float32, 1)

    def send(then: Expected | None, raises: type[Exception]) -> None:
        tensor = torch.ones(4)
        made.append((f"sent until {raises.__name__}", weakref.ref(tensor)))
        with pytest.raises(raises):
            end.link.send(tensor, 0, then)

    if end.rank == 0:
        end.machine.fail("ncclSend")
        send(None, DistributedError)
        end.machine.fail("cuStreamWriteValue64")  # the transfer has been started by then, and the link has to end
        send(expected, native._C.GpuError)
        text_of(lambda: end.link.post(expected))
        gc.collect()
    dist.barrier()
    found, made[:] = [(name, tensor() is not None) for name, tensor in made], []
    return found


def test_tensors_of_transfers_that_raised_are_kept(ranks: Ranks, library: str) -> None:
    """NCCL may have them already, and write into the memory when it is something else by then."""
    kept, _ = ranks(2, transfers_that_raise, library)
    assert kept == [("sent until DistributedError", True), ("sent until GpuError", True), ("memory", True), ("memory", True)]


def calls_that_hang(library: str) -> dict[str, int]:
    """How often another thread of rank 0 ran while calls of it hung, by their names."""
    end = End(library)
    ticks: dict[str, int] = {}
    numbers = torch.ones(LARGE)

    def hang(function: str, name: str, call: Callable[[], object]) -> None:
        if end.rank == 0:
            end.machine.hang(function, int(1000 * HANGS))
            ticks[name] = ticks_while(call, seconds=0.9 * HANGS)
        else:
            call()

    if end.rank == 0:
        hang("ncclSend", "transfer", lambda: end.native.transfer(numbers.data_ptr(), numbers.nbytes, 0, 0, 0))
        hang("cuStreamWaitEvent", "join", lambda: end.native.join(1, 0))
        hang("ncclCommGetAsyncError", "check", end.native.check)
    dist.barrier()
    if end.rank == 1:
        end.link.post(Expected((LARGE,), torch.float32, 0))
        numbers = end.link.take()
    end.synchronize()
    hang("ncclCommFinalize", "close", end.native.close)
    other: list[Any] = []
    hang("ncclCommInitRankConfig", "Link", lambda: other.append(end.connect()))
    hang("ncclCommAbort", "abort", lambda: other[0].abort(10.0))
    return ticks


def test_other_threads_run_while_a_call_hangs(ranks: Ranks, library: str) -> None:
    ticks, _ = ranks(2, calls_that_hang, library)
    assert list(ticks) == ["transfer", "join", "check", "close", "Link", "abort"]
    assert all(count >= 5 for count in ticks.values()), ticks


def test_wrong_end_or_unique_id_is_refused(library: str) -> None:
    gpu, nccl = native.libraries(cuda=library, nccl=library)
    unique = nccl.unique_id()
    assert (len(unique), nccl.version) == (128, 22809)
    for end in (-1, 2):
        with pytest.raises(ValueError, match=f"a link has ends 0 and 1, got {end}"):
            native.link(gpu, nccl, unique, RANKS, end, CPU, timeout=1.0)
    for wrong in (b"", unique[:-1], unique + b"\0"):
        with pytest.raises(ValueError, match=f"a unique id has 128 bytes, got {len(wrong)}"):
            native.link(gpu, nccl, wrong, RANKS, 0, CPU, timeout=1.0)

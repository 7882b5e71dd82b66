"""Worker processes for distributed tests: started once, reused by every test, replaced when one hangs or dies.

A test writes the part of a rank as a module-level function and gets back what each rank returned:

    def total(x):
        t = torch.tensor([x + dist.get_rank()])
        dist.all_reduce(t)
        return t

    def test_total(ranks):
        assert [t.item() for t in ranks(2, total, 10)] == [21, 21]

Workers are forked from one clean process that has imported torch, so that a fresh one costs milliseconds.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import io
import multiprocessing
import os
import pickle
import queue
import random
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from types import ModuleType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from pymesh3d.launch import LOOPBACK, gloo_on_loopback, loopback_store

START_LIMIT = 60.0  # seconds for a worker to come up
GRACE = 3.0  # seconds the other ranks have to return after one has failed
GROUP_LIMIT = timedelta(seconds=30)  # of one collective

READY, RUN, WHERE, RETURNED, RAISED = "ready", "run", "where", "returned", "raised"


# Messages: pickled bytes on a socket pair that only the two ends hold.


class _Pickler(pickle.Pickler):
    """Sends tensors of any device and dtype (also bfloat16) as plain bytes, without their storage, hooks or graph."""

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return NotImplemented
        plain = value.detach().cpu().contiguous()
        return _tensor, (plain.reshape(-1).view(torch.uint8).numpy(), plain.dtype, tuple(plain.shape))


def _tensor(data: np.ndarray, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.from_numpy(data).view(dtype).reshape(shape)


def _pack(value: Any) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer).dump(value)
    return buffer.getvalue()


def _unpack(packed: bytes) -> Any:
    return pickle.loads(packed)  # noqa: S301 - it comes from our own process


# The worker's side.


def _load(name: str, file: str) -> ModuleType:
    """The test module `name` from its file, whichever way pytest imported it in the parent."""
    module = sys.modules.get(name)
    if module is not None and getattr(module, "__file__", None) == file:
        return module
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None, f"{file} is not a Python file"
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _reset_state(environ: dict[str, str], rank: int) -> None:
    """Nothing that one test sets may reach the next; ranks are seeded differently so that a forgotten broadcast shows."""
    os.environ.clear()
    os.environ.update(environ)
    random.seed(1234 + rank)
    np.random.seed(1234 + rank)
    torch.manual_seed(1234 + rank)
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    torch.set_num_threads(1)


@contextlib.contextmanager
def _process_group(prefix: str, rank: int, world: int) -> Iterator[None]:
    client = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=GROUP_LIMIT)
    store = dist.PrefixStore(prefix, client)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=GROUP_LIMIT)
    try:
        dist.barrier()  # a rank that has nothing to say would end the group while others still connect
        yield
    finally:
        if dist.is_initialized():  # the function may have destroyed it itself
            dist.destroy_process_group()


def _serve(connection: Connection) -> None:
    """The life of a worker: run what the parent sends, end when the parent closes its end or dies."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal; the parent decides
    main_thread = threading.get_ident()
    calls: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
    sending = threading.Lock()

    def send(*message: Any) -> None:
        packed = _pack(message)
        with sending:
            connection.send_bytes(packed)

    def listen() -> None:
        """In a thread of its own, so that the parent's end is noticed, and its question answered, during a hung collective."""
        try:
            while True:
                message = _unpack(connection.recv_bytes())
                if message[0] == WHERE:
                    send(WHERE, "".join(traceback.format_stack(sys._current_frames()[main_thread])[-6:]))
                else:
                    calls.put(message[1:])
        except (EOFError, OSError):
            os._exit(1)

    threading.Thread(target=listen, daemon=True).start()
    send(READY)
    while True:
        prefix, rank, world, environ, module, file, qualname, packed_args = calls.get()
        failed_at = None
        try:
            _reset_state(environ, rank)
            function: Any = _load(module, file)
            for name in qualname.split("."):
                function = getattr(function, name)
            args = _unpack(packed_args)
            with _process_group(prefix, rank, world):
                try:
                    value = function(*args)
                except BaseException:
                    failed_at = time.monotonic()  # before the group ends, which makes the other ranks fail too
                    raise
            send(RETURNED, value)
        except BaseException:  # also SystemExit: the worker must answer whatever the test did
            send(RAISED, failed_at or time.monotonic(), traceback.format_exc())


# The parent's side.


class _Worker:
    def __init__(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "torch.distributed.fsdp", "torch.fx.experimental.symbolic_shapes", "numpy"])
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()

    def send(self, *message: Any) -> None:
        with contextlib.suppress(OSError):  # its death shows when its answer is read
            self.connection.send_bytes(_pack(message))

    def receive(self) -> tuple[Any, ...]:
        """The next message. Raises EOFError when the process has ended."""
        try:
            return tuple(_unpack(self.connection.recv_bytes()))
        except OSError as error:
            raise EOFError from error

    def where(self) -> str:
        """The Python stack it is in, if it can still say."""
        self.send(WHERE)
        with contextlib.suppress(EOFError):
            while self.connection.poll(1.0):
                message = self.receive()
                if message[0] == WHERE:
                    return str(message[1])
        return "  (no answer)\n"

    def end(self) -> None:
        self.process.kill()
        self.process.join(5.0)
        self.connection.close()


class Pool:
    """Up to as many workers as the largest world asked for, kept until `close`, or until one of them hangs or dies."""

    def __init__(self) -> None:
        self._store = loopback_store()
        self._workers: list[_Worker] = []
        self._calls = 0

    def run(
        self, world: int, function: Callable[..., Any], *args: Any, timeout: float = 60.0, expect_dead: Collection[int] = ()
    ) -> list[Any]:
        """What `function(*args)` returned on each of `world` ranks of a fresh gloo process group.

        `function` stands at module level; arguments and results are picklable, tensors come back on the CPU.
        Ranks in `expect_dead` must die, and have None as their result. Raises AssertionError with rank and traceback, the first
        failure first, when a rank raises, dies, or has not returned after `timeout` seconds.
        """
        assert "<" not in function.__qualname__, f"{function.__qualname__} must be a module-level function: workers import it by name"
        self._start(world)
        workers = self._workers[:world]
        try:
            self._send_call(workers, function, args)
            values, failures, silent = _collect(workers, time.monotonic() + timeout, frozenset(expect_dead))
            stacks = {rank: workers[rank].where() for rank in silent}
        except BaseException:  # Ctrl-C too: a worker in the middle of something cannot be used again
            self.close()
            raise
        if silent or any(not worker.process.is_alive() for worker in workers):
            self.close()
        if failures or silent:
            texts = [f"rank {rank} of {world} {text}" for _, rank, text in sorted(failures)]
            after = f"within {GRACE:g} s of the first failure" if failures else f"within {timeout:g} s"
            texts += [f"rank {rank} of {world} had not returned {after}; it was at\n{stack}" for rank, stack in stacks.items()]
            raise AssertionError(f"{function.__qualname__} failed\n" + "\n".join(texts))
        return values

    def close(self) -> None:
        """Ends every worker; the next `run` starts new ones."""
        workers, self._workers = self._workers, []
        for worker in workers:
            worker.end()

    def _start(self, world: int) -> None:
        new = [_Worker() for _ in range(len(self._workers), world)]
        self._workers += new
        for worker in new:
            ready = worker.connection.poll(START_LIMIT) and worker.receive()[0] == READY
            assert ready, f"a worker did not start within {START_LIMIT:g} s"

    def _send_call(self, workers: list[_Worker], function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self._calls += 1
        world = str(len(workers))
        environ = dict(os.environ, WORLD_SIZE=world, LOCAL_WORLD_SIZE=world, MASTER_ADDR=LOOPBACK, MASTER_PORT=str(self._store.port))
        environ.update(gloo_on_loopback())
        target = (function.__module__, inspect.getfile(function), function.__qualname__, _pack(args))
        for rank, worker in enumerate(workers):
            worker.send(RUN, f"call {self._calls}", rank, len(workers), dict(environ, RANK=str(rank), LOCAL_RANK=str(rank)), *target)


def _collect(
    workers: list[_Worker], deadline: float, expect_dead: frozenset[int]
) -> tuple[list[Any], list[tuple[float, int, str]], list[int]]:
    """Values by rank, failures as (time, rank, text), and the ranks that have not answered when time is up."""
    values: list[Any] = [None] * len(workers)
    failures: list[tuple[float, int, str]] = []
    waiting = {worker.connection: rank for rank, worker in enumerate(workers)}
    while waiting and (left := deadline - time.monotonic()) > 0:
        for connection in wait(list(waiting), left):
            assert isinstance(connection, Connection), f"a wait for workers returned {connection}"
            rank = waiting.pop(connection)
            try:
                kind, *rest = workers[rank].receive()
            except EOFError:
                workers[rank].process.join(5.0)
                if rank not in expect_dead:
                    failures.append((time.monotonic(), rank, f"died with exit code {workers[rank].process.exitcode}"))
                continue
            if kind == RAISED:
                failures.append((rest[0], rank, f"raised\n{rest[1]}"))
            elif rank in expect_dead:
                failures.append((time.monotonic(), rank, "returned, but was expected to die"))
            else:
                values[rank] = rest[0]
        if failures:
            deadline = min(deadline, min(failures)[0] + GRACE)
    return values, failures, sorted(waiting.values())

"""Fixtures of every test: ranks of a process group as plain functions, and the library that stands for CUDA and NCCL."""

from __future__ import annotations

import signal
from collections.abc import Callable, Collection, Iterator
from typing import Any

import pytest
import torch

from tests import stub
from tests.pool import Pool


def pytest_configure() -> None:
    """A shell's background job ignores Ctrl-C, and so would the programs that are tested."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked `gpu` are skipped where there is none."""
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="session")
def _pool() -> Iterator[Pool]:
    pool = Pool()
    yield pool
    pool.close()


@pytest.fixture
def ranks(_pool: Pool) -> Callable[..., list[Any]]:
    """`ranks(world, function, *args, timeout=60)`: what each rank's `function(*args)` returned. See tests/pool.py."""
    return _pool.run


@pytest.fixture
def fresh_ranks() -> Iterator[Callable[..., list[Any]]]:
    """Like `ranks` in processes of its own; ranks in `expect_dead` must die and have None as their result."""
    pool = Pool()

    def run(world: int, function: Callable[..., Any], *args: Any, timeout: float = 60.0, expect_dead: Collection[int] = ()) -> list[Any]:
        try:
            return pool.run(world, function, *args, timeout=timeout, expect_dead=expect_dead)
        finally:
            pool.close()

    yield run
    pool.close()


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The path of the library that stands for libcuda and libnccl."""
    return stub.build(tmp_path_factory.mktemp("stub"))

"""The worker pool itself: what it returns, how it fails, and that it never hangs or outlives the tests."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests import pool as pool_module
from tests.pool import Pool


@dataclasses.dataclass(frozen=True)
class Pair:
    left: torch.Tensor
    right: int


def total(x: int) -> torch.Tensor:
    t = torch.tensor([x + dist.get_rank()])
    dist.all_reduce(t)
    return t


def environment() -> tuple[int, int, list[str]]:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    return dist.get_rank(), dist.get_world_size(), [os.environ[name] for name in names]


def tensors(sent: Pair) -> dict[str, object]:
    weight = torch.nn.Parameter(sent.left[:, 1:])
    return {"bf16": weight.bfloat16(), "nested": [(weight, Pair(weight.T, sent.right))], "scalar": torch.tensor(3.5, dtype=torch.float64)}


def process_id() -> int:
    return os.getpid()


def leave_state_behind() -> None:
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    os.environ["LEFT_BEHIND"] = "1"


def state() -> tuple[torch.dtype, bool, str | None, float]:
    return torch.get_default_dtype(), torch.is_grad_enabled(), os.environ.get("LEFT_BEHIND"), torch.rand(1).item()


def rank_one_raises() -> None:
    if dist.get_rank() == 1:
        raise ValueError("the root cause")
    dist.barrier()


def rank_one_raises_others_sleep() -> None:
    if dist.get_rank() == 1:
        raise ValueError("the root cause")
    time.sleep(90)


def rank_zero_sleeps() -> int:
    if dist.get_rank() == 0:
        time.sleep(90)
    return 7


def unpicklable() -> object:
    return lambda: None


def exit_python() -> None:
    sys.exit(3)


def rank_one_dies() -> str:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        dist.barrier()
    except RuntimeError:
        return "noticed"
    return "did not notice"


def test_values_of_all_ranks(ranks):
    assert [t.item() for t in ranks(4, total, 10)] == [46, 46, 46, 46]


def test_each_call_is_a_process_group_of_its_own(ranks):
    for world in (3, 1, 2):
        assert ranks(world, environment) == [(r, world, [str(r), str(r), str(world), str(world)]) for r in range(world)]


def test_workers_are_reused(ranks):
    assert ranks(2, process_id) == ranks(2, process_id)


def test_tensors_go_both_ways(ranks):
    left = torch.arange(6, dtype=torch.float32).reshape(2, 3) / 3
    (got,) = ranks(1, tensors, Pair(left, 5))
    weight, pair = got["nested"][0]
    assert torch.equal(weight, left[:, 1:]) and not weight.requires_grad
    assert torch.equal(pair.left, left[:, 1:].T) and pair.right == 5
    assert got["bf16"].dtype == torch.bfloat16 and torch.equal(got["bf16"], left[:, 1:].bfloat16())
    assert got["scalar"].dtype == torch.float64 and got["scalar"].shape == () and got["scalar"].item() == 3.5


def test_no_state_goes_from_one_call_to_the_next(ranks):
    before = ranks(2, state)
    ranks(2, leave_state_behind)
    assert ranks(2, state) == before
    assert [s[:3] for s in before] == [(torch.float32, True, None)] * 2
    assert before[0][3] != before[1][3], "ranks must be seeded differently"


def test_environment_of_the_test_reaches_the_ranks(ranks, monkeypatch):
    monkeypatch.setenv("LEFT_BEHIND", "from the test")
    assert ranks(1, state)[0][2] == "from the test"


def test_exception_shows_the_root_cause_first(ranks):
    with pytest.raises(AssertionError) as failure:
        ranks(3, rank_one_raises)
    text = str(failure.value)
    assert text.splitlines()[1] == "rank 1 of 3 raised"
    assert "ValueError: the root cause" in text and "in rank_one_raises" in text


def test_exception_ends_ranks_that_wait_for_the_failed_one(ranks, monkeypatch):
    monkeypatch.setattr(pool_module, "GRACE", 0.5)
    start = time.monotonic()
    with pytest.raises(AssertionError, match="the root cause") as failure:
        ranks(3, rank_one_raises_others_sleep)
    assert time.monotonic() - start < 30
    assert "rank 0 of 3 had not returned within 0.5 s of" in str(failure.value) and "rank 2 of 3 had not returned" in str(failure.value)
    assert [t.item() for t in ranks(3, total, 0)] == [3, 3, 3], "the pool must work again"


def test_time_limit_names_the_ranks_that_hang_and_where(ranks):
    ranks(2, process_id)  # so that they are up
    start = time.monotonic()
    with pytest.raises(AssertionError) as failure:
        ranks(2, rank_zero_sleeps, timeout=2.0)
    assert time.monotonic() - start < 30
    text = str(failure.value)
    assert "rank 0 of 2 had not returned within 2 s" in text and "rank 1" not in text
    assert "in rank_zero_sleeps" in text
    assert [t.item() for t in ranks(2, total, 0)] == [1, 1], "the pool must work again"


@pytest.mark.parametrize(("function", "text"), [(unpicklable, "pickle"), (exit_python, "SystemExit: 3")])
def test_odd_ends_are_failures(ranks, function, text):
    with pytest.raises(AssertionError, match=text):
        ranks(1, function)


def test_local_function_is_refused(ranks):
    with pytest.raises(AssertionError, match="module-level"):
        ranks(1, lambda: None)


def test_death_of_a_rank_is_a_failure(ranks):
    with pytest.raises(AssertionError, match="rank 1 of 2 died with exit code -9"):
        ranks(2, rank_one_dies)
    assert [t.item() for t in ranks(2, total, 0)] == [1, 1], "the pool must work again"


def test_expected_death(fresh_ranks):
    assert fresh_ranks(2, rank_one_dies, expect_dead=[1]) == ["noticed", None]


def test_expected_death_that_does_not_come(fresh_ranks):
    with pytest.raises(AssertionError, match="rank 0 of 1 returned, but was expected to die"):
        fresh_ranks(1, total, 1, expect_dead=[0])


def session_members(session: int) -> list[int]:
    """Processes of a session, from the sixth field of /proc/PID/stat (the second, in brackets, may hold anything)."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # ended meanwhile
            continue
        if int(fields[3]) == session and fields[0] != "Z":
            found.append(int(stat.parent.name))
    return found


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")
def test_no_worker_outlives_its_parent():
    code = "from tests import test_pool as t; p = t.Pool(); p.run(2, t.process_id); print('up', flush=True); p.run(2, t.rank_zero_sleeps)"
    root = Path(__file__).parent.parent
    with subprocess.Popen([sys.executable, "-c", code], cwd=root, start_new_session=True, stdout=subprocess.PIPE, text=True) as parent:
        try:
            assert parent.stdout is not None and parent.stdout.readline() == "up\n"
            time.sleep(0.3)  # inside the second call
            assert len(session_members(parent.pid)) >= 3
        finally:
            parent.kill()
    deadline = time.monotonic() + 10
    while (left := session_members(parent.pid)) and time.monotonic() < deadline:
        time.sleep(0.05)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left, "processes outlived their parent"


def test_closed_pool_starts_again():
    pool = Pool()
    try:
        first = pool.run(1, process_id)
        pool.close()
        assert pool.run(1, process_id) != first
    finally:
        pool.close()

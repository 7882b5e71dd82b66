"""The benchmark of sends and receives runs where there is no GPU, and times what it says."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pymesh3d.bench import p2p
from pymesh3d.comm.links import Expected
from pymesh3d.errors import ConfigError
from pymesh3d.mesh import init_mesh

Ranks = Callable[..., list[Any]]
ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(100)
def test_it_runs_between_two_processes(tmp_path: Path) -> None:
    code = f"import sys; from pymesh3d.bench import p2p; sys.exit(p2p.main({str(tmp_path / 'p2p.json')!r}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=90, cwd=ROOT)
    assert done.returncode == 0 and "between 2 ranks on cpu" in done.stdout, done
    rows = json.loads((tmp_path / "p2p.json").read_text())["rows"]
    assert [(row["pattern"], row["bytes"]) for row in rows] == [
        (pattern, size) for pattern in ("ring", "one way") for size in p2p.SIZES["cpu"]
    ]
    for row in rows:
        assert row["torch_us"] > 0 and row["torch_gb_s"] == pytest.approx(row["bytes"] / row["torch_us"] / 1e3)
        assert "nccl_us" not in row, "there is no NCCL on the CPU"


def test_one_gpu_has_nobody_to_send_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ConfigError, match=r"1 GPU: messages go between two\. Run it where there are more, or on the CPU"):
        p2p.main()


PAUSE = 0.01  # seconds


def times_of_a_pause() -> tuple[float, float]:
    """Of rank 1 it is twice as long."""
    mesh = init_mesh(pp=2, device="cpu")
    times = p2p.timed(lambda: time.sleep(PAUSE * (1 + mesh.rank)), mesh, 10)
    mesh.close()
    return times


def test_times_are_of_one_run_and_of_the_slowest_rank(ranks: Ranks) -> None:
    """In microseconds. A busy machine makes them longer, but not as long as all ten together."""
    one, other = ranks(2, times_of_a_pause)
    assert one == other and all(2e6 * PAUSE <= time < 15e6 * PAUSE for time in one)


class Recorded:
    """A link that writes down what is asked of it."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def send(self, tensor: torch.Tensor, microbatch: int, then: Expected | None = None) -> None:
        self.calls.append("exchange" if then else "send")

    def post(self, expected: Expected) -> None:
        self.calls.append("post")

    def take(self) -> torch.Tensor:
        self.calls.append("take")
        return torch.empty(0)

    def flush(self) -> None:
        pass


def test_each_pattern_asks_for_its_transfers() -> None:
    """Between two ranks a ring is one transfer both ways; with more, one to the rank after and one from the rank before."""
    data, one, other = torch.ones(4), Recorded(), Recorded()
    p2p.exchange_over(one, one, data, receives=True)()
    assert one.calls == ["exchange", "take"]
    one.calls.clear()
    p2p.exchange_over(one, other, data, receives=True)()
    assert (one.calls, other.calls) == (["send"], ["post", "take"])
    one.calls.clear(), other.calls.clear()
    p2p.exchange_over(one, one, data, receives=False)()
    p2p.exchange_over(None, other, data, receives=True)()
    assert (one.calls, other.calls) == (["send"], ["post", "take"])

"""`pymesh3d env`: names what is here, and for each missing thing says once why and what runs instead."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from pymesh3d import __version__
from pymesh3d.comm import native
from pymesh3d.commands import env
from pymesh3d.ops import choose

NAMES = ["pymesh3d", "python", "torch", "triton", "pymesh3d._C", "CUDA driver", "NCCL", "GPUs", env.CONNECTIONS, "tensor-parallel products"]


def found(**facts: object) -> SimpleNamespace:
    """What `_C.probe` answers for a library that is there."""
    return SimpleNamespace(**{"path": "/lib/libnccl.so.2", "version": (2, 28, 9), "was_loaded": True, "error": "", **facts})


def pretend_gpu(monkeypatch: pytest.MonkeyPatch, nccl: tuple[int, ...] = (2, 28, 9)) -> None:
    """torch as it looks on a machine with one H100."""
    card = SimpleNamespace(name="NVIDIA H100", total_memory=80 * 2**30, major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: card)
    monkeypatch.setattr(torch.cuda, "nccl", SimpleNamespace(version=lambda: nccl))
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.delenv(env.CONNECTIONS, raising=False)


def test_report_names_every_part_with_its_version() -> None:
    report = env.collect()
    assert list(report) == NAMES
    assert report["pymesh3d"]["version"] == __version__
    assert report["python"]["version"] == sys.version.split()[0]
    assert report["torch"]["version"] == torch.__version__
    for name, part in report.items():
        assert part["here"] or part["why"], f"{name} is neither here nor explained"
        assert bool(part["why"]) == bool(part["instead"]), f"{name}: a reason and a replacement come together"


def test_without_core_everything_that_needs_it_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "available", False)
    monkeypatch.setattr(native, "reason", "not built: no compiler")
    report = env.collect()
    assert report["pymesh3d._C"]["here"] == ""
    assert report["pymesh3d._C"]["why"] == "not built: no compiler"
    for name in ("NCCL", "CUDA driver"):
        assert report[name]["why"] == "cannot be looked for without pymesh3d._C"


@pytest.mark.parametrize(("torchs", "agrees"), [((2, 28, 9), True), ((2, 27, 3), False)])
def test_nccl_of_another_version_than_torchs_is_refused(monkeypatch: pytest.MonkeyPatch, torchs: tuple[int, ...], agrees: bool) -> None:
    pretend_gpu(monkeypatch, torchs)
    monkeypatch.setattr(native, "probe", lambda name, path="": found())
    nccl = env.collect()["NCCL"]
    assert nccl["version"] == "2.28.9"
    assert nccl["path"] == "/lib/libnccl.so.2"
    assert nccl["torch"] == ".".join(map(str, torchs))
    assert (nccl["why"] == "") == agrees
    assert agrees or "2.27.3" in nccl["why"]


def test_gpus_are_listed_and_the_hardware_queues_mentioned(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpu(monkeypatch)
    report = env.collect()
    assert report["GPUs"]["devices"] == [{"name": "NVIDIA H100", "memory_gib": 80.0, "sm": "90"}]
    assert "export CUDA_DEVICE_MAX_CONNECTIONS=" in report[env.CONNECTIONS]["instead"]
    monkeypatch.setenv(env.CONNECTIONS, "32")
    assert env.collect()[env.CONNECTIONS] == {"here": "32", "why": "", "instead": "", "value": "32"}


def test_prints_each_reason_once_and_writes_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(native, "probe", lambda name, path="": found(version=(), error=f"[no {name} here]"))
    file = tmp_path / "env.json"
    assert env.run(str(file)) == 0
    printed = capsys.readouterr().out
    for name in ("nccl", "cuda"):
        assert printed.count(f"[no {name} here]") == 1, printed
    assert json.loads(file.read_text()) == env.collect()


def test_json_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"--json .*no/such/env\.json: it could not be written \(No such file"):
        env.run(str(tmp_path / "no" / "such" / "env.json"))


BLOCKED = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name in ("triton", "pymesh3d._C"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Block())
from pymesh3d.commands.env import run
sys.exit(run())
"""


def test_runs_without_triton_and_without_core() -> None:
    command, root = [sys.executable, "-c", BLOCKED], Path(__file__).parents[1]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=root, env={**os.environ, "COLUMNS": "200"})
    assert done.returncode == 0, done.stderr
    assert "triton: triton cannot be imported (No module named 'triton')" in done.stdout
    assert done.stdout.count("pymesh3d._C: not built; `pip install -v` builds it") == 1


def test_choices_that_cannot_be_read_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpu(monkeypatch)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("PYMESH3D_PRODUCTS", raising=False)
    (tmp_path / "pymesh3d").mkdir()
    (tmp_path / "pymesh3d" / "products.json").write_text("[")
    choose.measured.cache_clear()
    found = env.collect()["tensor-parallel products"]
    choose.measured.cache_clear()
    assert "products.json: not what `bench --tune` writes" in found["why"] and not found["here"]

"""How the kernels run is decided once for a process, is told in a sentence, and never decides the numbers."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from pymesh3d.triton_kernels import backend, philox_fill_ref

STATES = {  # name -> (what happens before the import, environment, a part of the reason, available)
    "triton absent": ("import sys; sys.modules['triton'] = None", {}, "triton cannot be imported", False),
    "nothing set": ("", {}, "interprets the kernels", True),
    "interpreter forbidden": ("", {"TRITON_INTERPRET": "0"}, "forbids to interpret", False),
    "no compiler on a GPU": (
        "import torch; torch.cuda.is_available = lambda: True",
        {"TRITON_INTERPRET": "0", "PATH": ""},
        "no C compiler",
        False,
    ),
    "no headers on a GPU": (
        "import sysconfig, torch; torch.cuda.is_available = lambda: True; sysconfig.get_path = lambda *_, **__: '/nowhere'",
        {"TRITON_INTERPRET": "0", "CC": "cc"},
        "Python.h",
        False,
    ),
    "triton imported first": ("import triton", {}, "import pymesh3d before triton", False),
}


@pytest.mark.parametrize("state", STATES)
def test_without_a_gpu_the_backend_says_what_runs_and_the_values_stay(state: str) -> None:
    before, setting, reason, available = STATES[state]
    program = f"""{before}
import torch
from pymesh3d.triton_kernels import backend, philox_fill_
print(backend.available, backend.reason)
print(philox_fill_(torch.empty(3, dtype=torch.float64), key=5, kind="normal", scale=1.0, global_cols=3).tolist())
"""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))} | setting
    if "triton" not in before and not backend.available:
        pytest.skip(backend.reason)
    child = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=120)
    assert child.returncode == 0, child.stderr
    said, values = child.stdout.splitlines()
    assert said.startswith(f"{available} ")
    assert reason in said
    assert values == str(philox_fill_ref(torch.empty(3, dtype=torch.float64), key=5, kind="normal", scale=1.0, global_cols=3).tolist())


def test_an_available_backend_compiles_where_there_is_a_gpu() -> None:
    if not backend.available:
        pytest.skip(backend.reason)
    assert backend.interpreted == (os.environ.get("TRITON_INTERPRET", "0") == "1")
    assert backend.interpreted or torch.cuda.is_available()

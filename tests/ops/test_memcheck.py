"""No kernel that talks to other ranks reads or writes where it may not: compute-sanitizer watches small calls of all of them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pymesh3d.comm.copies import CopiedGather
from pymesh3d.comm.workspace import Workspace
from pymesh3d.mesh import init_mesh
from pymesh3d.ops.choose import IMPLEMENTATIONS, can
from pymesh3d.ops.fused import FUSED
from tests.hopper import HERE
from tests.kernels import noise
from tests.products import close

SANITIZER = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
SHAPES = [(256, 512, 256), (400, 264, 136)]  # rows of one rank, columns, depth: whole tiles, and not
CALLS = 3  # the halves of the slots by turns


def every_kernel() -> None:
    """On each rank: the products of all implementations that can compute them here, and the gather by copies."""
    mesh = init_mesh(tp=-1, dp=1)
    axis, ran = mesh.tp, set[str]()
    for op in FUSED:
        for kernel in IMPLEMENTATIONS:
            share = Workspace(f"{op} ({kernel})", axis, mesh.device)
            for rows, cols, depth in SHAPES:
                count = rows if op == "all_gather_matmul" else rows * axis.size
                a = [noise(count, depth, dtype=torch.bfloat16, seed=rank).to(mesh.device) for rank in range(axis.size)]
                b = [noise(cols, depth, dtype=torch.bfloat16, seed=9 + rank).to(mesh.device) for rank in range(axis.size)]
                if not can(kernel, op, (count, cols, depth), a[0], axis.size):
                    continue
                ran.add(f"{op}:{kernel}")
                for call in range(CALLS):
                    turned = call % 2 == 1
                    weight = b[axis.rank].t().contiguous().t() if turned else b[axis.rank]
                    more = {"keep": turned} if op == "all_gather_matmul" else {}
                    y = FUSED[op](kernel, share, axis, a[axis.rank], weight, **more)
                    if op == "all_gather_matmul":
                        assert close(y, [torch.cat(a)], [b[axis.rank]])
                    else:
                        mine = slice(axis.rank * rows, (axis.rank + 1) * rows) if op == "matmul_reduce_scatter" else slice(None)
                        assert close(y, [x[mine] for x in a], b)
                share.check()
    gather = CopiedGather("gather", axis, mesh.device)
    for call in range(CALLS):
        parts = [noise(100 + call, 7, dtype=torch.bfloat16, seed=rank).to(mesh.device) for rank in range(axis.size)]
        assert torch.equal(gather.start(parts[axis.rank]).wait(), torch.cat(parts))
    gather.check()
    print("ran", *sorted(ran), flush=True)
    mesh.close()


@pytest.mark.gpu
@pytest.mark.timeout(240)
@pytest.mark.skipif(torch.cuda.device_count() < 2 or SANITIZER is None, reason="needs two GPUs and compute-sanitizer")
def test_no_kernel_leaves_its_memory() -> None:
    assert SANITIZER is not None
    watched = [SANITIZER, "--tool", "memcheck", "--report-api-errors", "no", "--target-processes", "all", "--error-exitcode", "9"]
    ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python"]
    script = [sys.executable, "-c", "from tests.ops.test_memcheck import every_kernel; every_kernel()"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([*watched, sys.executable, *ranks, *script], capture_output=True, text=True, timeout=220, env=environment)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "ERROR SUMMARY: 0 errors" in done.stdout, done.stdout[-3000:]
    able = [name for name in IMPLEMENTATIONS if name == "plain" or (name != "torch" and HERE)]
    assert done.stdout.count("ran " + " ".join(sorted(f"{op}:{name}" for op in FUSED for name in able))) == 2, "on both ranks"

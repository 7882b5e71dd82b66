"""Where the host waits for the GPU: with a time limit, and with an eye on the peers."""

from __future__ import annotations

import time

import torch

from pymesh3d.mesh import Axis, Mesh, named

LOOK = 0.01  # seconds between two looks at the peers
ABORT = 10.0  # seconds that NCCL has to give up


def on_host(tensor: torch.Tensor, operation: str, mesh: Mesh, axis: Axis | None = None) -> torch.Tensor:
    """A copy of a small tensor on the host, once it has been computed. Raises DistributedError if a peer is lost or time runs out.

    Then everything that the mesh has under way on its own transports is aborted.
    """
    with named(operation, axis or mesh.all):
        if not tensor.is_cuda:
            return tensor
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        copy.copy_(tensor, non_blocking=True)
        done = torch.cuda.Event()
        done.record()
        deadline = time.monotonic() + mesh.timeout.total_seconds()
        look = time.monotonic() + LOOK
        try:
            while not done.query():
                if (now := time.monotonic()) < look:
                    continue
                look = now + LOOK
                for watched in mesh.watched:
                    watched.check()
                if now > deadline:
                    raise RuntimeError(f"the GPU has not finished within {mesh.timeout.total_seconds():g} s")
        except RuntimeError:
            for watched in mesh.watched:
                watched.abort(ABORT)
            raise
        return copy

"""Reading a checkpoint on the layout that wrote it: verified whole before anything is handed over."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from pymesh3d.checkpoint.manifest import digest, file_of, folder_of, newest, read
from pymesh3d.checkpoint.together import together
from pymesh3d.errors import CheckpointError
from pymesh3d.mesh import Mesh


def load(
    directory: Path, expected: Mapping[str, torch.Tensor], about: Mapping[str, Any], mesh: Mesh
) -> tuple[int, dict[str, torch.Tensor]]:
    """This rank's tensors (on the CPU) of the newest complete checkpoint, and its step. All ranks must call; all return or all raise.

    What `expected` holds must be there with its shape and dtype, fingerprints must be the manifest's, and `about` must be the same.
    Raises CheckpointError that says which rank found what, before any tensor of the caller is touched; DistributedError when a rank
    does not call within the time limit.
    """
    found: dict[str, torch.Tensor] = {}

    def read_mine() -> str:
        step, tensors = _read(directory, expected, about, mesh.rank)
        found.update(tensors)
        return str(step)

    steps, failures = together(read_mine, mesh, "loading a checkpoint")
    if failures:
        raise CheckpointError(f"checkpoint in {directory}", f"{len(failures)} of {len(steps)} ranks cannot resume from it", failures[0])
    if len(set(steps)) > 1:
        raise CheckpointError(
            f"checkpoint in {directory}",
            f"ranks see different newest steps {sorted(set(map(int, steps)))}",
            "Use a directory that all hosts share",
        )
    return int(steps[mesh.rank]), found


def _read(
    directory: Path, expected: Mapping[str, torch.Tensor], about: Mapping[str, Any], rank: int
) -> tuple[int, dict[str, torch.Tensor]]:
    step = newest(directory)
    if step is None:
        raise CheckpointError(f"{directory}", "holds no complete checkpoint", "Give the directory that --save wrote to")
    folder = folder_of(directory, step)
    try:
        manifest = read(folder)
        saved = manifest["about"]
        changed = [
            f"{key} was {saved.get(key)!r}, is {about.get(key)!r}" for key in sorted({*saved, *about}) if saved.get(key) != about.get(key)
        ]
        if changed:
            raise CheckpointError(f"{folder}", f"written by another run: {'; '.join(changed)}", "Resume with what it was written with")
        tensors = load_file(file_of(folder, rank))
        fingerprint = manifest["sha256"][rank]
    except (OSError, ValueError, LookupError, TypeError, AttributeError, SafetensorError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{folder}", f"cannot be read ({error})", "Remove that folder to resume from the one before") from error
    same = all(name in tensors and (tensors[name].shape, tensors[name].dtype) == (t.shape, t.dtype) for name, t in expected.items())
    if not same or digest(tensors) != fingerprint:
        raise CheckpointError(
            f"{file_of(folder, rank)}", "its content is not what was saved", "Remove that folder to resume from the one before"
        )
    return step, tensors

"""Reading a checkpoint on the layout that wrote it: verified whole before anything is handed over."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from pymesh3d.checkpoint.manifest import REMEDY, digest, file_of, folder_of, require_same
from pymesh3d.comm.agree import together
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

    given = f"checkpoint in {str(directory)!r}"
    steps, failures = together(read_mine, mesh, "loading a checkpoint")
    if failures:
        raise CheckpointError(given, f"{len(failures)} of {len(steps)} ranks cannot resume from it", failures[0])
    if len(set(steps)) > 1:
        raise CheckpointError(
            given,
            f"ranks see different newest steps {sorted(set(map(int, steps)))}",
            "Use a directory that all hosts share",
        )
    return int(steps[mesh.rank]), found


def _read(
    directory: Path, expected: Mapping[str, torch.Tensor], about: Mapping[str, Any], rank: int
) -> tuple[int, dict[str, torch.Tensor]]:
    step, manifest = require_same(directory, about)
    file = file_of(folder_of(directory, step), rank)
    try:
        with file.open("rb"):  # fails as load_file does, but with the name in quotes, which keep a path from being taken for words
            tensors = load_file(file)
        fingerprint = manifest["sha256"][rank]
    except (OSError, ValueError, LookupError, SafetensorError) as error:
        raise CheckpointError(f"{str(file.parent)!r}", f"cannot be read ({error})", REMEDY) from error
    same = all(name in tensors and (tensors[name].shape, tensors[name].dtype) == (t.shape, t.dtype) for name, t in expected.items())
    if not same or digest(tensors) != fingerprint:
        raise CheckpointError(f"{str(file)!r}", "its content is not what was saved", REMEDY)
    return step, tensors

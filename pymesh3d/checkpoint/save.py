"""Writing a checkpoint: every rank its file into a temporary folder, then the manifest, then one rename."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from pymesh3d.checkpoint.manifest import FORMAT, MANIFEST, digest, file_of, folder_of
from pymesh3d.comm.agree import together
from pymesh3d.errors import CheckpointError
from pymesh3d.mesh import Mesh


def save(directory: Path, step: int, tensors: Mapping[str, torch.Tensor], about: Mapping[str, Any], mesh: Mesh) -> Path:
    """Write this rank's `tensors` as part of the checkpoint of `step`. All ranks must call; all return or all raise.

    `about` (JSON) says what model and layout they belong to; `load` compares it. The folder appears under its name only
    when every rank's file is on the disk, so a failed save leaves older checkpoints as they are.
    Raises CheckpointError naming each rank that failed, DistributedError when a rank does not call within the time limit.
    """
    final = folder_of(directory, step)
    temporary = final.with_name(final.name + ".tmp")
    _all_or_none(mesh, temporary, lambda: _prepare(temporary, final) if mesh.rank == 0 else "")
    digests = _all_or_none(mesh, temporary, lambda: _write(file_of(temporary, mesh.rank), tensors))
    _all_or_none(mesh, temporary, lambda: _finish(temporary, final, step, digests, about) if mesh.rank == 0 else "")
    return final


def _all_or_none(mesh: Mesh, temporary: Path, action: Callable[[], str]) -> list[str]:
    """Run `action` on every rank; raise on all of them, and leave nothing half done, if it failed on any."""
    outcomes, failures = together(action, mesh, "saving a checkpoint")
    if failures:
        if mesh.rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        raise CheckpointError(
            f"checkpoint {str(temporary.with_suffix(''))!r}",
            f"not saved ({'; '.join(failures[:4])})",
            "Make room, or save to another directory; older checkpoints are as they were",
        )
    return outcomes


def _prepare(temporary: Path, final: Path) -> str:
    if final.exists():
        raise CheckpointError(f"{str(final)!r}", "exists already", "Choose another directory")
    for left in final.parent.glob("step-[0-9]*.tmp"):  # by saves that were killed
        shutil.rmtree(left, ignore_errors=True)
    temporary.mkdir(parents=True)
    return ""


def _write(path: Path, tensors: Mapping[str, torch.Tensor]) -> str:
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    fingerprint = digest(plain)
    save_file(plain, path)
    _sync(path)
    return fingerprint


def _finish(temporary: Path, final: Path, step: int, digests: list[str], about: Mapping[str, Any]) -> str:
    manifest = {"format": FORMAT, "step": step, "about": about, "sha256": digests}
    (temporary / MANIFEST).write_text(json.dumps(manifest, indent=1, allow_nan=False))
    _sync(temporary / MANIFEST)
    _sync(temporary)
    temporary.rename(final)
    _sync(final.parent)
    return ""


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

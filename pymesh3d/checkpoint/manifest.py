"""What a checkpoint folder holds: where it lies, how its content is fingerprinted, and which one is the newest."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from pymesh3d.config import AXES
from pymesh3d.errors import CheckpointError

MANIFEST = "manifest.json"
FORMAT = 1
CORPUS_DIGEST = "corpus_digest"  # versions that did not know it wrote checkpoints without; those are resumed all the same
REMEDY = "Remove that folder to resume from the one before"


def folder_of(directory: Path, step: int) -> Path:
    """The folder of a step."""
    return directory / f"step-{step:08d}"


def file_of(folder: Path, rank: int) -> Path:
    """The file of a rank."""
    return folder / f"rank-{rank:05d}.safetensors"


def newest(directory: Path) -> int | None:
    """The last step with a complete checkpoint, or None. A folder is complete once it has its final name and a manifest."""
    steps = [int(found[1]) for path in directory.glob("step-*/" + MANIFEST) if (found := re.fullmatch(r"step-(\d{8,})", path.parent.name))]
    return max(steps, default=None)


def read(folder: Path) -> dict[str, Any]:
    """The manifest of a folder. Raises OSError or ValueError when it cannot be read."""
    content: Any = json.loads((folder / MANIFEST).read_text())
    manifest: dict[str, Any] = content if isinstance(content, dict) else {}
    if manifest.get("format") != FORMAT:
        raise ValueError(f"format {manifest.get('format')}, this version reads {FORMAT}")
    missing = [name for name, kind in (("about", dict), ("sha256", list)) if not isinstance(manifest.get(name), kind)]
    if missing:
        raise ValueError(f"its {MANIFEST} lacks {' and '.join(missing)}")
    return manifest


def require_same(directory: Path, about: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
    """The step of the newest checkpoint and its manifest, which must be `about` the same run. Raises CheckpointError."""
    given = f"resume={str(directory)!r}"
    step = newest(directory)
    if step is None and (directory / MANIFEST).is_file():
        rule = "it holds one step, and what is resumed is the newest step in a directory"
        raise CheckpointError(given, rule, f"Use resume={str(directory.resolve().parent)!r}")
    if step is None:
        rule = "holds no complete checkpoint" if directory.is_dir() else "there is no such folder"
        raise CheckpointError(given, rule, "Give the directory that --save wrote to")
    folder = folder_of(directory, step)
    try:
        manifest = read(folder)
    except (OSError, ValueError) as error:
        raise CheckpointError(given, f"{str(folder)!r} cannot be read ({error})", REMEDY) from error
    saved = manifest["about"]
    known = {*saved, *about} - ({CORPUS_DIGEST} - saved.keys())
    changed = [name for name in sorted(known) if saved.get(name) != about.get(name)]
    before, now = (", ".join(f"{name}={values.get(name)!r}" for name in changed) for values in (saved, about))
    if any(name in AXES for name in changed):
        rule = f"it was written with {before}, and to resume on another layout is not available yet"
        raise CheckpointError(f"{given} with {now}", rule, f"Use {before}")
    if changed == [CORPUS_DIGEST]:
        rule = f"it was written by a run on other data of the same name and size, {before}"
        raise CheckpointError(f"{given} with {now}", rule, "Give the data as they were, or begin anew in another folder")
    if changed:
        several = "virtual_pp" in changed and saved["virtual_pp"] > 1
        instead = f"Use {before}{', with schedule=' + repr('interleaved') if several else ''}"
        raise CheckpointError(f"{given} with {now}", f"it was written by another run, with {before}", instead)
    return step, manifest


def digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """SHA-256 over names, dtypes, shapes and bytes, taken from memory, so that it also covers the way to the disk and back."""
    total = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        total.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
        total.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()

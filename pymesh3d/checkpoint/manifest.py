"""What a checkpoint folder holds: where it lies, how its content is fingerprinted, and which one is the newest."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

MANIFEST = "manifest.json"
FORMAT = 1


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
    manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_text())
    if manifest["format"] != FORMAT:
        raise ValueError(f"format {manifest['format']}, this version reads {FORMAT}")
    return manifest


def digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """SHA-256 over names, dtypes, shapes and bytes, taken from memory, so that it also covers the way to the disk and back."""
    total = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        total.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
        total.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()

"""What counts as a checkpoint, which one is the newest, and what a fingerprint covers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pymesh3d.checkpoint.manifest import MANIFEST, digest, file_of, folder_of, newest, read


def test_names_sort_by_step_and_rank(tmp_path: Path) -> None:
    assert folder_of(tmp_path, 12) == tmp_path / "step-00000012"
    assert file_of(tmp_path, 7) == tmp_path / "rank-00007.safetensors"


def test_the_newest_is_the_last_complete_one(tmp_path: Path) -> None:
    assert newest(tmp_path) is None and newest(tmp_path / "absent") is None
    for name in ("step-00000002", "step-00000010", "step-00000011.tmp", "step-00000012.tmp", "other-00000013", "step-14", "step-000000xx"):
        (tmp_path / name).mkdir()
        (tmp_path / name / MANIFEST).write_text("{}")
    (tmp_path / "step-00000015").mkdir()  # no manifest
    assert newest(tmp_path) == 10
    (tmp_path / "step-100000000").mkdir()  # more digits, but later than all others
    (tmp_path / "step-100000000" / MANIFEST).write_text("{}")
    assert newest(tmp_path) == 10**8


def test_another_format_is_not_read(tmp_path: Path) -> None:
    (tmp_path / MANIFEST).write_text('{"format": 2}')
    with pytest.raises(ValueError, match="format 2, this version reads 1"):
        read(tmp_path)
    (tmp_path / MANIFEST).write_text('{"format": 1, "step": 3}')
    assert read(tmp_path) == {"format": 1, "step": 3}


def test_a_fingerprint_covers_names_types_shapes_and_every_bit() -> None:
    tensors = {"a": torch.arange(6.0).view(2, 3), "b": torch.tensor(1.0, dtype=torch.bfloat16), "c": torch.zeros(0, dtype=torch.int64)}
    same = {"c": torch.zeros(0, dtype=torch.int64), "b": tensors["b"].clone(), "a": torch.arange(6.0).view(2, 3).t().contiguous().t()}
    assert digest(same) == digest(tensors)  # neither order nor memory format matters
    flipped = tensors["a"].clone()
    flipped.view(torch.int32)[1, 2] ^= 1
    others = [
        {**tensors, "a": flipped},
        {**tensors, "a": tensors["a"].view(3, 2)},
        {**tensors, "a": tensors["a"].view(torch.int32)},
        {**tensors, "b": torch.tensor(-1.0, dtype=torch.bfloat16)},
        {"a": tensors["a"], "b": tensors["b"]},
        {"a": tensors["a"], "bb": tensors["b"], "c": tensors["c"]},
        {**tensors, "a": -0.0 * tensors["a"]},
    ]
    assert len({digest(tensors), *map(digest, others)}) == len(others) + 1

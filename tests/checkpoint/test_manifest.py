"""What counts as a checkpoint, which one is the newest, and what a fingerprint covers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from pymesh3d.checkpoint.manifest import MANIFEST, digest, file_of, folder_of, newest, read, require_same
from pymesh3d.config import AXES
from pymesh3d.errors import CheckpointError


def test_names_sort_by_step_and_rank(tmp_path: Path) -> None:
    assert folder_of(tmp_path, 12) == tmp_path / "step-00000012"
    assert file_of(tmp_path, 7) == tmp_path / "rank-00007.safetensors"


def test_the_newest_is_the_last_complete_one(tmp_path: Path) -> None:
    assert newest(tmp_path) is None and newest(tmp_path / "absent") is None
    for name in ("step-00000002", "step-00000010", "step-00000011.tmp", "step-00000012.tmp", "other-00000013", "step-14", "step-000000xx"):
        (tmp_path / name).mkdir()
        (tmp_path / name / MANIFEST).write_text("{}")
    (tmp_path / "step-00000015").mkdir()  # no manifest
    (tmp_path / "step-00000015" / "rank-0.safetensors").touch()
    assert newest(tmp_path) == 10
    (tmp_path / "step-100000000").mkdir()  # more digits, but later than all others
    (tmp_path / "step-100000000" / MANIFEST).write_text("{}")
    assert newest(tmp_path) == 10**8


def test_another_format_is_not_read(tmp_path: Path) -> None:
    (tmp_path / MANIFEST).write_text('{"format": 2}')
    with pytest.raises(ValueError, match="format 2, this version reads 1"):
        read(tmp_path)
    whole = {"format": 1, "about": {}, "sha256": []}
    (tmp_path / MANIFEST).write_text(json.dumps(whole))
    assert read(tmp_path) == whole


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "Expecting property name"),
        ("[]", "format None, this version reads 1"),
        ('{"format": 1}', "its manifest.json lacks about and sha256"),
        ('{"format": 1, "about": [], "sha256": []}', "its manifest.json lacks about"),
    ],
)
def test_what_is_no_manifest_is_not_read(tmp_path: Path, content: str, words: str) -> None:
    (tmp_path / MANIFEST).write_text(content)
    with pytest.raises(ValueError, match=words):
        read(tmp_path)


ABOUT: dict[str, Any] = {"dim": 16, "corpus": "9 bytes of a.txt", "corpus_digest": "a1", **dict.fromkeys(AXES, 1)}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A directory with checkpoints of steps 1 and 2; that of step 1 is of another run."""
    for step, about in ((1, {}), (2, ABOUT)):
        folder_of(tmp_path, step).mkdir()
        (folder_of(tmp_path, step) / MANIFEST).write_text(json.dumps({"format": 1, "about": about, "sha256": ["x"]}))
    return tmp_path


def test_the_newest_of_the_same_run_is_found(saved: Path) -> None:
    assert require_same(saved, dict(reversed(ABOUT.items()))) == (2, {"format": 1, "about": ABOUT, "sha256": ["x"]})


def test_several_stages_a_rank_need_their_schedule(tmp_path: Path) -> None:
    folder_of(tmp_path, 1).mkdir()
    (folder_of(tmp_path, 1) / MANIFEST).write_text(json.dumps({"format": 1, "about": ABOUT | {"virtual_pp": 2}, "sha256": ["x"]}))
    with pytest.raises(CheckpointError, match=r"with virtual_pp=2. Use virtual_pp=2, with schedule='interleaved'$"):
        require_same(tmp_path, ABOUT | {"virtual_pp": 1})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dim": 8}, "with dim=8: it was written by another run, with dim=16. Use dim=16"),
        ({"corpus": "x"}, "with corpus='x': it was written by another run, with corpus='9 bytes of a.txt'. Use corpus='9 bytes of"),
        ({"corpus": "x", "dim": 8}, "with corpus='x', dim=8: it was "),
        (
            {"corpus_digest": "b2"},
            "corpus_digest='b2': it was written by a run on other data of the same name and size, corpus_digest='a1'. Give",
        ),
        (
            {"corpus_digest": "b2", "dim": 8},
            "corpus_digest='b2', dim=8: it was written by another run, with corpus_digest='a1', dim=16. Use ",
        ),
        ({"corpus_digest": None}, "with corpus_digest=None: it was written by a run on other data"),
        ({"new": 1}, "with new=1: it was written by another run, with new=None. Use new=None"),
        ({"dim": None}, "with dim=None: it was written by another run, with dim=16. Use dim=16"),
        *(
            ({axis: 2, "dim": 8}, f"{axis}=1, and to resume on another layout is not available yet. Use dim=16, {axis}=1")
            for axis in ("dp", "pp", "tp")
        ),
        ({"cp": 2}, "with cp=2: it was written with cp=1, and to resume on another layout is not available yet. Use cp=1"),
    ],
)
def test_another_run_is_refused_by_what_differs(saved: Path, change: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        require_same(saved, {**ABOUT, **change})
    assert str(caught.value).startswith(f"resume={str(saved)!r} with ") and words in str(caught.value)


def test_a_checkpoint_without_a_digest_is_of_the_same_run(saved: Path) -> None:
    """Earlier versions wrote none."""
    before = {name: value for name, value in ABOUT.items() if name != "corpus_digest"}
    manifest = folder_of(saved, 2) / MANIFEST
    manifest.write_text(json.dumps({"format": 1, "about": before, "sha256": ["x"]}))
    assert require_same(saved, ABOUT)[0] == require_same(saved, before)[0] == 2
    with pytest.raises(CheckpointError, match="with dim=8: it was written by another run, with dim=16"):
        require_same(saved, {**ABOUT, "dim": 8})


def test_what_only_the_checkpoint_names_must_be_the_same_too(saved: Path) -> None:
    with pytest.raises(CheckpointError, match="with dim=None: it was written by another run, with dim=16"):
        require_same(saved, {name: value for name, value in ABOUT.items() if name != "dim"})


def test_where_nothing_is_or_can_be_read_is_refused(saved: Path) -> None:
    (saved / "empty").mkdir()
    for name, rule in (("absent", "there is no such folder"), ("empty", "holds no complete checkpoint")):
        with pytest.raises(CheckpointError) as caught:
            require_same(saved / name, ABOUT)
        assert str(caught.value) == f"resume={str(saved / name)!r}: {rule}. Give the directory that --save wrote to"
    folder = folder_of(saved, 2)
    with pytest.raises(CheckpointError) as caught:
        require_same(folder, ABOUT)
    rule = "it holds one step, and what is resumed is the newest step in a directory"
    assert str(caught.value) == f"resume={str(folder)!r}: {rule}. Use resume={str(saved)!r}"
    (folder / MANIFEST).write_text("[]")
    with pytest.raises(CheckpointError) as caught:
        require_same(saved, ABOUT)
    reason, remedy = "format None, this version reads 1", "Remove that folder to resume from the one before"
    assert str(caught.value) == f"resume={str(saved)!r}: {str(folder)!r} cannot be read ({reason}). {remedy}"


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

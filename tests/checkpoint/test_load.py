"""Resuming continues bit by bit, and whatever is not exactly what was saved is refused before anything is touched."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pymesh3d.checkpoint.load import load
from pymesh3d.checkpoint.manifest import MANIFEST, digest, file_of, folder_of
from pymesh3d.checkpoint.save import save
from pymesh3d.config import TrainConfig
from pymesh3d.engine import Engine, parallelize
from pymesh3d.errors import CheckpointError, DistributedError
from pymesh3d.mesh import Mesh, init_mesh
from pymesh3d.models.llama import Llama
from tests.plain import SMALL, batch_of, share

Ranks = Callable[..., list[Any]]
TRAIN = TrainConfig(seq=8, global_batch=8, micro_batch=2, lr=1e-2, vocab_multiple=1)
BATCHES = [batch_of(8, 8, valid=40 - n, seed=n) for n in range(4)]
ABOUT = {"dim": 16, "tp": 1, "dp": 2, "seed": 0, "zero_stage": 1, "dtype": "float32"}


def engine_on(mesh: Mesh, train: TrainConfig) -> Engine:
    return parallelize(Llama(SMALL, device="meta"), mesh, train)


def losses(engine: Engine, first: int, last: int) -> list[tuple[float, float]]:
    results = [engine.train_step(share(batch, engine)) for batch in BATCHES[first:last]]
    return [(result.loss, result.grad_norm) for result in results]


def resumed(directory: str, sizes: dict[str, int], train: TrainConfig) -> None:
    """Four steps; and two, a save, a load over NaN, two more: on this rank all numbers are the same bits."""
    mesh = init_mesh(device="cpu", **sizes)
    straight, first = engine_on(mesh, train), engine_on(mesh, train)
    expected = losses(straight, 0, 4)
    found = losses(first, 0, 2)
    save(Path(directory), 2, first.state(), ABOUT, mesh)
    second = engine_on(mesh, train)
    for bucket, master in zip(second.zero.buckets, second.zero.masters, strict=True):
        bucket.weights.fill_(torch.nan)
        master.detach().fill_(torch.nan)
    step, tensors = load(Path(directory), second.state(), ABOUT, mesh)
    second.load_state(tensors)
    assert step == second.zero.steps_taken == 2
    found += losses(second, 2, 4)
    assert found == expected
    state, other = second.state(), straight.state()
    assert set(state) == set(other) and {name.split(".")[0] for name in state} == {"master", "exp_avg", "exp_avg_sq", "step", "steps_taken"}
    assert all(torch.equal(state[name], other[name]) and state[name].dtype == other[name].dtype for name in other)
    parameters = dict(second.whole_parameters())
    assert parameters and all(torch.equal(parameters[name], value) for name, value in straight.whole_parameters())
    mesh.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("world", "sizes", "zero_stage"),
    [(1, {"dp": 1}, 1), (2, {"tp": 2}, 1), (2, {"pp": 2}, 1), *((2, {"dp": 2}, stage) for stage in (0, 1, 2, 3))],
)
def test_a_resumed_run_is_the_same_run(
    ranks: Ranks, tmp_path: Path, world: int, sizes: dict[str, int], zero_stage: int, dtype: str
) -> None:
    ranks(world, resumed, str(tmp_path), sizes, dataclasses.replace(TRAIN, zero_stage=zero_stage, dtype=dtype))
    tensors = load_file(file_of(folder_of(tmp_path, 2), 0))
    assert all(tensor.dtype == torch.float32 for name, tensor in tensors.items() if name != "steps_taken")  # masters stay exact


def write(directory: str) -> None:
    mesh = init_mesh(device="cpu")
    engine = engine_on(mesh, TRAIN)
    for step in (1, 2):
        losses(engine, step - 1, step)
        save(Path(directory), step, engine.state(), ABOUT, mesh)
    mesh.close()


def refused(directory: str, about: dict[str, Any]) -> str:
    """The error of a load, after which the engine is as it was."""
    mesh = init_mesh(device="cpu")
    engine = engine_on(mesh, TRAIN)
    before = digest(engine.state()), digest(dict(engine.model.named_parameters()))
    with pytest.raises(CheckpointError) as caught:
        _, tensors = load(Path(directory), engine.state(), about, mesh)
        engine.load_state(tensors)
    assert (digest(engine.state()), digest(dict(engine.model.named_parameters()))) == before
    mesh.close()
    return str(caught.value)


def flip(folder: Path) -> None:
    data = bytearray(file_of(folder, 1).read_bytes())
    data[-1] ^= 4
    file_of(folder, 1).write_bytes(data)


def truncate(folder: Path) -> None:
    file_of(folder, 1).write_bytes(file_of(folder, 1).read_bytes()[:-1])


def swap(folder: Path) -> None:
    one, two = (file_of(folder, rank) for rank in (0, 1))
    first, second = one.read_bytes(), two.read_bytes()
    one.write_bytes(second)
    two.write_bytes(first)


def older(folder: Path) -> None:
    """A file that is whole, but of another step."""
    file_of(folder, 1).write_bytes(file_of(folder.with_name("step-00000001"), 1).read_bytes())


def lose_a_tensor(folder: Path) -> None:
    """Even if someone writes the fingerprint anew."""
    tensors = {name: tensor for name, tensor in load_file(file_of(folder, 1)).items() if name != "master.0"}
    save_file(tensors, file_of(folder, 1))
    edit(folder, lambda manifest: manifest["sha256"].__setitem__(1, digest(tensors)))


def edit(folder: Path, change: Callable[[Any], Any]) -> None:
    manifest = json.loads((folder / MANIFEST).read_text())
    change(manifest)
    (folder / MANIFEST).write_text(json.dumps(manifest))


DAMAGE: dict[str, tuple[Callable[[Path], Any], list[int], str]] = {  # what is done, the ranks that see it, what they say
    "a flipped bit": (flip, [1], "rank-00001.safetensors': its content is not what was saved"),
    "a truncated file": (truncate, [1], "cannot be read"),
    "a missing file": (lambda folder: file_of(folder, 1).unlink(), [1], "cannot be read ([Errno 2] No such file"),
    "swapped files": (swap, [0, 1], "rank-00000.safetensors': its content is not what was saved"),
    "a file of another step": (older, [1], "its content is not what was saved"),
    "a missing tensor": (lose_a_tensor, [1], "its content is not what was saved"),
    "a changed fingerprint": (lambda f: edit(f, lambda m: m["sha256"].__setitem__(0, "0" * 64)), [0], "is not what was saved"),
    "too few fingerprints": (lambda f: edit(f, lambda m: m["sha256"].pop()), [1], "cannot be read"),
    "no fingerprints": (lambda f: edit(f, lambda m: m.pop("sha256")), [0, 1], "cannot be read (its manifest.json lacks sha256)"),
    "no description": (lambda f: edit(f, lambda m: m.update(about=[])), [0, 1], "cannot be read (its manifest.json lacks about)"),
    "another format": (lambda f: edit(f, lambda m: m.update(format=2)), [0, 1], "format 2, this version reads 1"),
    "a list": (lambda folder: (folder / MANIFEST).write_text("[]"), [0, 1], "format None, this version reads 1"),
    "no JSON": (lambda folder: (folder / MANIFEST).write_text("{"), [0, 1], "cannot be read"),
}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """Checkpoints of steps 1 and 2 of two ranks."""
    directory = tmp_path_factory.mktemp("written")
    request.getfixturevalue("_pool").run(2, write, str(directory))
    return directory


@pytest.fixture
def copied(written: Path, tmp_path: Path) -> Path:
    for file in written.rglob("*.*"):
        target = tmp_path / file.relative_to(written)
        target.parent.mkdir(exist_ok=True)
        target.write_bytes(file.read_bytes())
    return tmp_path


@pytest.mark.parametrize("damage", DAMAGE)
def test_what_is_damaged_is_refused_by_all_and_touches_nothing(ranks: Ranks, copied: Path, damage: str) -> None:
    do, seen_by, words = DAMAGE[damage]
    do(folder_of(copied, 2))
    first, second = ranks(2, refused, str(copied), ABOUT)
    assert first == second
    assert f"{len(seen_by)} of 2 ranks cannot resume from it. rank {seen_by[0]}: " in first and words in first
    assert "Remove that folder to resume from the one before" in first


def refused_by_its_relative_name(directory: str) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(Path(directory).parent)
        return refused(Path(directory).name, ABOUT)


@pytest.mark.parametrize("damage", ["a flipped bit", "a missing file", "too few fingerprints", "no JSON"])
def test_names_are_quoted_so_that_they_are_not_taken_for_words(ranks: Ranks, copied: Path, damage: str) -> None:
    directory = copied / "lr=0.01"
    directory.mkdir()
    for step in (1, 2):
        folder_of(copied, step).rename(folder_of(directory, step))
    DAMAGE[damage][0](folder_of(directory, 2))
    for text in ranks(2, refused_by_its_relative_name, str(directory)):
        assert text.count("lr=0.01") == text.count("'lr=0.01") >= 2, text


def older_loads(directory: str) -> int:
    mesh = init_mesh(device="cpu")
    step, _ = load(Path(directory), engine_on(mesh, TRAIN).state(), ABOUT, mesh)
    mesh.close()
    return step


def test_without_the_damaged_folder_the_one_before_loads(ranks: Ranks, copied: Path) -> None:
    """As the refusal says; and a folder without its manifest is not taken for a checkpoint."""
    (folder_of(copied, 2) / MANIFEST).unlink()
    assert ranks(2, older_loads, str(copied)) == [1, 1]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dim": 32}, "with dim=32: it was written by another run, with dim=16. Use dim=16"),
        ({"tp": 2, "dp": 1}, "with dp=1, tp=2: it was written with dp=2, tp=1, and to resume on another layout is not available yet."),
    ],
)
def test_another_run_is_refused_by_what_differs(ranks: Ranks, written: Path, change: dict[str, Any], words: str) -> None:
    for text in ranks(2, refused, str(written), {**ABOUT, **change}):
        assert f"resume={str(written)!r} {words}" in text and "2 of 2 ranks cannot resume from it. rank 0: " in text


def test_an_empty_directory_is_refused(ranks: Ranks, tmp_path: Path) -> None:
    for text in ranks(2, refused, str(tmp_path), ABOUT):
        assert "holds no complete checkpoint" in text and "--save" in text


def different_disks(directories: list[str]) -> str:
    mesh = init_mesh(device="cpu")
    with pytest.raises(CheckpointError) as caught:
        load(Path(directories[mesh.rank]), {}, ABOUT, mesh)
    mesh.close()
    return str(caught.value)


def test_ranks_that_see_different_steps_are_told(ranks: Ranks, written: Path, copied: Path) -> None:
    (folder_of(copied, 2) / MANIFEST).unlink()
    for text in ranks(2, different_disks, [str(written), str(copied)]):
        assert "different newest steps [1, 2]" in text and "all hosts share" in text


def alone(directory: str) -> str | None:
    mesh = init_mesh(device="cpu")
    if mesh.rank == 1:
        return None
    with pytest.raises(DistributedError) as caught:
        load(Path(directory), {}, ABOUT, mesh)
    return str(caught.value)


def test_a_load_on_one_rank_only_ends_with_an_error(fresh_ranks: Ranks, written: Path) -> None:
    text, _ = fresh_ranks(2, alone, str(written))
    assert "rank 0: loading a checkpoint, which all ranks must do, over axis all with ranks [1] failed" in text

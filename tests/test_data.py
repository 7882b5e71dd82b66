"""Corpora of every form and every refusal; batches that depend on the step and the dp coordinate only."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pymesh3d.data import Batches, Corpus, load_corpus
from pymesh3d.errors import ConfigError, DataError


def counting(windows: int, seq: int, rest: int = 0) -> Corpus:
    """A corpus whose ids are their own places, with exactly `windows` windows."""
    return Corpus(tokens=np.arange(windows * seq + 1 + rest, dtype=np.int32), description="numbers")


def windows_of(tokens: np.ndarray, seq: int) -> list[int]:
    """Which windows of `counting` the rows are."""
    return (tokens[:, 0] // seq).tolist()


def test_standard_library_is_a_fast_and_stable_default():
    start = time.process_time()
    corpus = load_corpus(None, 256, 128)
    assert time.process_time() - start < 0.3
    assert 2_000_000 < corpus.tokens.size <= 3_200_000
    assert corpus.description == f"{corpus.tokens.size / 1e6:.1f} M bytes of the Python standard library"
    text = corpus.tokens.tobytes()
    assert Path(os.__file__).read_bytes() in text, "top-level modules belong to it"
    assert text == load_corpus(None, 256, 128).tokens.tobytes()


def test_text_file_is_its_bytes(tmp_path):
    path = tmp_path / "some.txt"
    path.write_bytes("grün\n".encode() * 300)
    corpus = load_corpus(str(path), 256, 8)
    assert corpus.tokens.tobytes() == path.read_bytes()
    assert corpus.description == "1.8 k bytes of some.txt"


def test_folder_is_its_text_files_by_name(tmp_path):
    (tmp_path / "b.md").write_bytes(b"alone")
    assert load_corpus(str(tmp_path), 256, 4).description == f"5 bytes of 1 file in {tmp_path.name}"
    files = {"b.md": b"two", "a.txt": b"one", "z.png": b"\x89PNG\0", ".git/x": b"no", ".hidden": b"no"}
    files |= {f"sub{number}/c": bytes([48 + number]) for number in (3, 1, 4, 2, 5)}
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    corpus = load_corpus(str(tmp_path), 256, 4)
    assert corpus.tokens.tobytes() == b"onetwo12345"
    assert corpus.description == f"11 bytes of 7 files in {tmp_path.name}"


@pytest.mark.parametrize("dtype", ["uint16", "int32", "int64", ">u4"])
def test_npy_is_mapped(tmp_path, dtype):
    np.save(tmp_path / "ids.npy", np.arange(100, dtype=dtype))
    corpus = load_corpus(str(tmp_path / "ids.npy"), 100, 8)
    assert isinstance(corpus.tokens, np.memmap) and corpus.tokens.tolist() == list(range(100))


@pytest.mark.parametrize(("vocab", "dtype"), [(65536, "<u2"), (65537, "<u4")])
def test_bin_is_two_or_four_bytes_an_id(tmp_path, vocab, dtype):
    np.array([1, 2, 60000, 3], dtype).tofile(tmp_path / "ids.bin")
    corpus = load_corpus(str(tmp_path / "ids.bin"), vocab, 3)
    assert corpus.tokens.tolist() == [1, 2, 60000, 3]
    assert corpus.description == "4 tokens of ids.bin"


@settings(deadline=None)
@given(st.integers(1, 200), st.sampled_from(["uint8", "uint16", "int32", ">u4", "int64"]), st.data())
def test_a_digest_tells_any_id_that_differs(size, dtype, data):
    """And nothing else: dtype and byte order are the file's business."""
    ids = np.random.default_rng(size).integers(0, 200, size)
    digest = Corpus(tokens=ids, description="").digest
    assert Corpus(tokens=ids.astype(dtype), description="another name").digest == digest
    assert Corpus(tokens=np.append(ids, 0), description="").digest != digest
    assert Corpus(tokens=ids[:-1], description="").digest != digest
    ids[data.draw(st.integers(0, size - 1))] += 1
    assert Corpus(tokens=ids, description="").digest != digest


class Endless:
    """An array of so many ids, each its own place or what was written over it; notes which are read."""

    def __init__(self, size, written=()):
        self.size, self.written, self.read = size, written, []

    def __getitem__(self, part):
        self.read.append((part.start, min(part.stop, self.size)))
        ids = np.arange(*self.read[-1])
        ids[np.isin(ids, self.written)] = 10**13
        return ids


@pytest.mark.parametrize("size", [128, 129, 1000, 10**12])
def test_the_digest_of_a_large_corpus_is_of_even_blocks(monkeypatch, size):
    """Here 16 of 8 ids: whole up to 128, then of as many, from the first to the last."""
    monkeypatch.setattr("pymesh3d.data.BLOCK", 8)
    monkeypatch.setattr("pymesh3d.data.BLOCKS", 16)
    ids = Endless(size)
    digest = Corpus(tokens=ids, description="").digest
    assert len(ids.read) == 16 and {stop - start for start, stop in ids.read} == {8}
    assert (ids.read[0][0], ids.read[-1][1]) == (0, size)
    steps = np.diff([start for start, _ in ids.read])
    assert steps.min() >= 8 and steps.max() - steps.min() <= 1
    for place in (0, ids.read[5][0], ids.read[5][1] - 1, size - 1):
        assert Corpus(tokens=Endless(size, [place]), description="").digest != digest


def write(path: Path, content: object) -> str:
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        np.save(path, np.asarray(content), allow_pickle=True)
    return str(path)


@pytest.mark.parametrize(
    ("name", "content", "vocab", "texts"),
    [
        ("empty.txt", b"", 256, ["is empty", "Give a text file"]),
        ("empty.npy", b"", 256, ["is empty"]),
        ("none.npy", np.zeros(0, int), 256, ["is empty"]),
        ("empty.bin", b"", 256, ["is empty"]),
        ("short.txt", b"12345678", 256, ["seq=8", "8 tokens", "seq + 1 = 9", "seq=7 or less"]),
        ("one.txt", b"1", 256, ["its 1 tokens are fewer than seq + 1 = 9. Use more text"]),
        ("high.txt", b"\xff" * 20, 255, ["vocab=255", "the id 255", "Use vocab=256 or more"]),
        ("high.npy", np.arange(20), 19, ["vocab=19", "the id 19", "Use vocab=20 or more"]),
        ("high.bin", np.full(20, 500, "<u2").tobytes(), 256, ["the id 500", "Use vocab=501 or more"]),
        ("negative.npy", np.arange(-3, 20), 256, ["the id -3", "ids start at 0"]),
        ("float.npy", np.zeros(20), 256, ["float64", "integers"]),
        ("bool.npy", np.zeros(20, bool), 256, ["bool", "integers"]),
        ("table.npy", np.zeros((4, 5), int), 256, ["shape [4, 5]", "one dimension"]),
        ("pickle.npy", np.array([{}], object), 256, ["not a .npy file of numbers"]),
        ("text.npy", b"no array at all", 256, ["not a .npy file of numbers", "numpy.save()"]),
        ("odd.bin", b"123456789012345678901", 256, ["21 bytes", "multiple of 2", "uint16"]),
        ("odd.bin", b"1234567890123456789012", 70000, ["22 bytes", "multiple of 4", "uint32"]),
        ("binary", b"\x7fELF\0" * 10, 256, ["not text"]),
    ],
)
def test_refused_files(tmp_path, name, content, vocab, texts):
    path = write(tmp_path / name, content)
    with pytest.raises(DataError) as refusal:
        load_corpus(path, vocab, 8)
    for text in [path, *texts]:
        assert text in str(refusal.value)


def test_exactly_one_window_is_enough(tmp_path):
    assert load_corpus(write(tmp_path / "a.txt", b"123456789"), 256, 8).tokens.size == 9


def test_missing_file(tmp_path):
    with pytest.raises(DataError, match=r"absent\.txt': it does not exist. Give a text file"):
        load_corpus(str(tmp_path / "absent.txt"), 256, 8)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no named pipes here")
def test_pipes_and_devices_are_no_corpora(tmp_path):
    """They would keep the first rank that reads waiting, or give the others nothing."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "gone").symlink_to(tmp_path / "nothing")
    (tmp_path / "text").write_text("123456789")
    for path in (str(tmp_path / "pipe"), os.devnull):
        with pytest.raises(DataError, match=r"it is neither a file nor a folder, .* Give a text file"):
            load_corpus(path, 256, 8)
    assert load_corpus(str(tmp_path), 256, 8).tokens.tobytes() == b"123456789"


def test_folder_without_text(tmp_path):
    (tmp_path / "picture").write_bytes(b"\0\1")
    with pytest.raises(DataError, match="holds no text files"):
        load_corpus(str(tmp_path), 256, 8)


@pytest.mark.parametrize("name", ["a.txt", "a.npy", "a.bin", "folder/b.txt"])
def test_unreadable(tmp_path, name):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"1234567890" * 5)
    path.chmod(0)
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)  # root may read everything
    try:
        with pytest.raises(DataError, match=r"cannot be read.*Permission denied.*permissions"):
            load_corpus(str(tmp_path / name.split("/")[0]), 256, 8)
    finally:
        os.seteuid(user)


def test_targets_are_the_next_tokens():
    tokens, targets = Batches(counting(10, 7, rest=3), 7, 10, seed=0).batch(0, 0, 1)
    assert tokens.shape == targets.shape == (10, 7) and tokens.dtype == targets.dtype == np.int64
    assert (targets == tokens + 1).all()
    assert sorted(tokens[:, 0].tolist()) == [7 * i for i in range(10)]
    assert (tokens == tokens[:, :1] + np.arange(7)).all()


@settings(max_examples=40, deadline=None)
@given(
    windows=st.integers(1, 40),
    seq=st.integers(1, 5),
    rest=st.integers(0, 4),
    local=st.integers(1, 5),
    dp=st.integers(1, 4),
    seed=st.integers(0, 2**64 - 1),
)
def test_dp_ranks_share_each_epoch_without_overlap(windows, seq, rest, local, dp, seed):
    windows = max(windows, local * dp)
    batches = Batches(counting(windows, seq, rest % seq), seq, local * dp, seed)
    seen: list[int] = []
    for step in range(3 * windows // (local * dp) + 1):
        parts = [batches.batch(step, rank, dp)[0] for rank in range(dp)]
        assert all(part.shape == (local, seq) for part in parts)
        whole = np.concatenate(parts)
        assert (whole == batches.batch(step, 0, 1)[0]).all(), "the union in rank order is the global batch"
        seen += windows_of(whole, seq)
    for epoch in range(len(seen) // windows):
        assert sorted(seen[epoch * windows : (epoch + 1) * windows]) == list(range(windows)), "every epoch takes every window once"


def test_five_samples_micro_batch_two_dp_two():
    """Nobody gets an empty or an extra batch, and the fifth sample is not lost: it comes first in the second step."""
    batches = Batches(counting(5, 3), 3, 4, seed=1)
    seen = []
    for step in range(5):
        shapes = {batches.batch(step, rank, 2)[0].shape for rank in range(2)}
        assert shapes == {(2, 3)}
        seen += [window for rank in range(2) for window in windows_of(batches.batch(step, rank, 2)[0], 3)]
    assert [sorted(seen[i : i + 5]) for i in range(0, 20, 5)] == [[0, 1, 2, 3, 4]] * 4


def test_resume_in_the_middle_of_an_epoch_and_any_order_of_asking():
    def all_of(batches: Batches, steps: list[int]) -> dict[int, list]:
        return {step: [batches.batch(step, rank, 2)[0].tolist() for rank in range(2)] for step in steps}

    corpus = counting(23, 4)
    straight = all_of(Batches(corpus, 4, 6, seed=7), list(range(20)))
    assert all_of(Batches(corpus, 4, 6, seed=7), list(range(5, 20))) == {step: straight[step] for step in range(5, 20)}
    assert all_of(Batches(corpus, 4, 6, seed=7), list(reversed(range(20)))) == straight


def test_order_depends_on_seed_and_epoch():
    def order(seed: int, epoch: int) -> list[int]:
        return windows_of(Batches(counting(50, 2), 2, 50, seed).batch(epoch, 0, 1)[0], 2)

    orders = [order(seed, epoch) for seed in (0, 1) for epoch in (0, 1)] + [list(range(50))]
    assert len({tuple(o) for o in orders}) == 5


def test_order_is_the_same_in_every_numpy():
    assert windows_of(Batches(counting(8, 2), 2, 8, seed=0).batch(0, 0, 1)[0], 2) == [3, 2, 1, 6, 0, 7, 4, 5]


def test_fewer_windows_than_a_global_batch():
    with pytest.raises(DataError, match=r"global_batch=6, seq=4: .* only 5 windows .* Use global_batch=5 or less"):
        Batches(counting(5, 4, rest=3), 4, 6, seed=0)
    Batches(counting(5, 4), 4, 5, seed=0)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((0, 0, 3), "global_batch=4, dp=3: dp must divide global_batch. Use global_batch=6"),
        ((0, 0, 0), "dp_size=0: dp_size must be a positive integer"),
        ((0, 2, 2), "step=0, dp_rank=2: both count from 0, and dp_rank to below 2. Use mesh.dp.rank"),
        ((-1, 0, 2), "step=-1, dp_rank=0: both count from 0"),
    ],
)
def test_a_share_that_is_none_is_refused(arguments, text):
    with pytest.raises(ConfigError, match=re.escape(text)):
        Batches(counting(5, 4), 4, 4, seed=0).batch(*arguments)


@pytest.mark.parametrize(
    ("fields", "text"),
    [({"seq": 0}, "seq=0"), ({"global_batch": "4"}, "global_batch='4'"), ({"seed": -1}, "seed=-1"), ({"seed": None}, "seed=None")],
)
def test_sizes_and_seeds_that_are_none_are_refused(fields, text):
    with pytest.raises(ConfigError, match=f"^{text}: "):
        Batches(counting(5, 4), **{"seq": 4, "global_batch": 4, "seed": 0, **fields})


def test_a_corpus_is_for_a_vocabulary_and_a_length():
    for fields in ({"vocab": 0, "seq": 4}, {"vocab": 256, "seq": None}):
        with pytest.raises(ConfigError, match="must be a positive integer"):
            load_corpus(None, **fields)


def test_needs_no_torch():
    code = "import sys; import pymesh3d.data; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent.parent, timeout=60, check=False).returncode == 0


def test_batches_are_made_from_a_corpus():
    with pytest.raises(ConfigError, match=r"^corpus='text': it must be a Corpus\. Make one with load_corpus\(None, vocab=256, seq=128\)"):
        Batches("text", 8, 2, 0)
    Batches(load_corpus(None, vocab=256, seq=128), 8, 2, 0)

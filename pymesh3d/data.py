"""Token ids to train on, and which of them each data-parallel rank sees at which step."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pymesh3d.config import require_positive, require_seed
from pymesh3d.errors import ConfigError, DataError

Array = npt.NDArray[Any]
Ids = npt.NDArray[np.int64]

LIBRARY_LIMIT = 3_200_000  # bytes: enough for minutes of training on a laptop, read in a tenth of a second
LIBRARY_SKIPPED = {"__pycache__", "dist-packages", "ensurepip", "idlelib", "lib2to3", "site-packages", "test", "tests", "turtledemo"}
BLOCK, BLOCKS = 2**15, 256  # ids in each of so many blocks: what a digest covers of a corpus that is larger
SNIFFED = 8192  # leading bytes in which a NUL tells a binary file from text
FORMS = "Give a text file, a folder of text files, or a .npy or .bin file of token ids"


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Corpus:
    """Token ids, one after another: an integer array [N], possibly mapped from a file. `description` says in words what they are."""

    tokens: Array
    description: str

    @functools.cached_property
    def digest(self) -> str:
        """A fingerprint of the ids, whatever their dtype: of all, or of blocks spread evenly over a large corpus, which stays unread."""
        size = self.tokens.size
        even = (place * (size - BLOCK) // (BLOCKS - 1) for place in range(BLOCKS))
        total = hashlib.sha256(str(size).encode())
        for start in range(0, size, BLOCK) if size <= BLOCKS * BLOCK else even:
            total.update(self.tokens[start : start + BLOCK].astype("<i8").tobytes())
        return total.hexdigest()[:16]


def load_corpus(path: str | None, vocab: int, seq: int) -> Corpus:
    """The corpus at `path`, checked against the vocabulary and the sequence length.

    A text file or a folder of them (bytes are ids), a `.npy` of integers, or a `.bin` of little-endian uint16 (uint32 if `vocab` > 65536).
    None stands for the sources of the Python standard library, the same on every machine with the same Python.
    Raises DataError, ConfigError.
    """
    require_positive("vocab", vocab)
    require_positive("seq", seq)
    given = f"data={path!r}" if path is not None else "the sources of the Python standard library"
    try:
        tokens, what = _library() if path is None else _read(Path(path), given, vocab)
    except FileNotFoundError as error:
        missing = "it" if error.filename in (None, path) else repr(error.filename)
        raise DataError(given, f"{missing} does not exist", FORMS) from error
    except OSError as error:
        raise DataError(given, f"it cannot be read ({error})", "Check its permissions, or copy it to a place you can read") from error
    if tokens.size == 0:
        raise DataError(given, "it is empty", FORMS)
    if tokens.size < seq + 1:
        shorter = f", or seq={tokens.size - 1} or less" if tokens.size > 1 else ""
        raise DataError(f"{given}, seq={seq}", f"its {tokens.size} tokens are fewer than seq + 1 = {seq + 1}", f"Use more text{shorter}")
    _check_ids(tokens, vocab, given)
    return Corpus(tokens=tokens, description=f"{_short(tokens.size)} {what}")


def _library() -> tuple[Array, str]:
    """Whole files in the order of their names, up to the limit."""
    root = Path(sysconfig.get_path("stdlib"))
    parts: list[bytes] = []
    size = 0
    for file in _files(root, LIBRARY_SKIPPED):
        if file.suffix == ".py":
            parts.append(file.read_bytes())
            size += len(parts[-1])
            if size > LIBRARY_LIMIT:
                size -= len(parts.pop())
                break
    if not parts:
        raise DataError(
            "the sources of the Python standard library", f"there are none in {str(root)!r}", "Give a text of your own with --data"
        )
    return np.frombuffer(b"".join(parts), np.uint8), "bytes of the Python standard library"


def _files(root: Path, skipped: set[str]) -> Iterator[Path]:
    """Files below `root` but for hidden ones and those that are none (pipes, devices), in an order that depends on names only."""

    def refuse(error: OSError) -> None:
        raise error

    for folder, names, files in os.walk(root, onerror=refuse):
        names[:] = sorted(name for name in names if name not in skipped and not name.startswith("."))
        paths = (Path(folder, name) for name in sorted(files) if not name.startswith("."))
        yield from (path for path in paths if path.is_file())


def _read(path: Path, given: str, vocab: int) -> tuple[Array, str]:
    size = path.stat().st_size
    if path.is_dir():
        parts = [content for file in _files(path, set()) if b"\0" not in (content := file.read_bytes())[:SNIFFED]]
        if not any(parts):
            raise DataError(given, "the folder holds no text files", FORMS)
        count = sum(map(bool, parts))
        return np.frombuffer(b"".join(parts), np.uint8), f"bytes of {count} file{'s' * (count != 1)} in {path.name or path}"
    if not path.is_file():
        raise DataError(given, "it is neither a file nor a folder, and what comes through a pipe or a device comes once only", FORMS)
    if size == 0:
        return np.empty(0, np.uint8), "tokens"
    if path.suffix == ".npy":
        return _read_npy(path, given), f"tokens of {path.name}"
    if path.suffix == ".bin":
        dtype = np.dtype("<u2" if vocab <= 65536 else "<u4")
        if size % dtype.itemsize:
            raise DataError(
                given,
                f"its {size} bytes are not a multiple of {dtype.itemsize}, the size of an id ({dtype.name} for vocab={vocab})",
                "Write it with numpy's tofile() in that dtype, or save a .npy",
            )
        return np.memmap(path, dtype, mode="r"), f"tokens of {path.name}"
    text = np.memmap(path, np.uint8, mode="r")
    if (text[:SNIFFED] == 0).any():
        raise DataError(given, "it is not text (it holds NUL bytes)", "Give UTF-8 text, or token ids as .npy or .bin")
    return text, f"bytes of {path.name}"


def _read_npy(path: Path, given: str) -> Array:
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise DataError(given, f"it is not a .npy file of numbers ({error})", "Save it with numpy.save() from an integer array") from error
    if not isinstance(array, np.ndarray) or array.dtype.kind not in "iu" or array.ndim != 1:
        kind = f"an array of {array.dtype.name}, shape {list(array.shape)}" if isinstance(array, np.ndarray) else "an archive"
        raise DataError(given, f"it holds {kind}; token ids are integers in one dimension", "Save array.astype('uint16').ravel()")
    return array


def _check_ids(tokens: Array, vocab: int, given: str) -> None:
    if tokens.dtype.kind == "u" and np.iinfo(tokens.dtype).max < vocab:
        return  # no id can be outside; a look at a large file would take long
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0:
        raise DataError(given, f"it holds the id {low}, and ids start at 0", "Take out the padding or marks that negative ids stand for")
    if high >= vocab:
        raise DataError(f"{given}, vocab={vocab}", f"it holds the id {high}, and ids must be below vocab", f"Use vocab={high + 1} or more")


def _short(number: int) -> str:
    """3.1 M for 3 143 000."""
    for size, unit in ((10**9, " G"), (10**6, " M"), (10**3, " k")):
        if number >= size:
            return f"{number / size:.1f}{unit}"
    return str(number)


class Batches:
    """The global batches of a run, the same in every layout, as a pure function of the step: so a resumed run goes on exactly.

    Window i is `seq` tokens and their successors. Each epoch takes every window once, in an order that depends on (seed, epoch) only;
    a step that crosses the end of an epoch goes on with the next one. Raises DataError, ConfigError.
    """

    def __init__(self, corpus: Corpus, seq: int, global_batch: int, seed: int) -> None:
        if not isinstance(corpus, Corpus):
            raise ConfigError(
                f"corpus={corpus!r:.60}",
                "it must be a Corpus",
                "Make one with load_corpus(None, vocab=256, seq=128), or with a path for None",
            )
        require_positive("seq", seq)
        require_positive("global_batch", global_batch)
        require_seed(seed)
        self.windows = max(0, (corpus.tokens.size - 1) // seq)
        if self.windows < global_batch:
            fitting = {"global_batch": self.windows, "seq": (corpus.tokens.size - 1) // global_batch}
            smaller = "".join(f"{name}={most} or less, " for name, most in fitting.items() if most)
            windows = f"{self.windows} window{'s' * (self.windows != 1)}"
            raise DataError(
                f"global_batch={global_batch}, seq={seq}",
                f"the corpus {corpus.description!r} has only {windows} of {seq} + 1 tokens, fewer than one global batch",
                f"Use {smaller}or more text",
            )
        self.corpus = corpus
        self._tokens = np.asarray(corpus.tokens)
        self._seq = seq
        self._global_batch = global_batch
        self._seed = seed
        self._orders: dict[int, Ids] = {}

    def batch(self, step: int, dp_rank: int, dp_size: int) -> tuple[Ids, Ids]:
        """Tokens and targets, each [B, S] int64 with B = global_batch / dp_size: the dp rank's consecutive part of the step's batch.

        Raises ConfigError.
        """
        require_positive("dp_size", dp_size)
        if self._global_batch % dp_size:
            enough = math.ceil(self._global_batch / dp_size) * dp_size
            raise ConfigError(
                f"global_batch={self._global_batch}, dp={dp_size}", "dp must divide global_batch", f"Use global_batch={enough}"
            )
        if not (step >= 0 and 0 <= dp_rank < dp_size):
            raise ConfigError(f"step={step}, dp_rank={dp_rank}", f"both count from 0, and dp_rank to below {dp_size}", "Use mesh.dp.rank")
        local = self._global_batch // dp_size
        first = step * self._global_batch + dp_rank * local
        windows = [self._order(epoch)[place] for epoch, place in (divmod(first + i, self.windows) for i in range(local))]
        starts = np.array(windows, np.int64) * self._seq
        block = self._tokens[starts[:, None] + np.arange(self._seq + 1)].astype(np.int64)
        return np.ascontiguousarray(block[:, :-1]), np.ascontiguousarray(block[:, 1:])

    def _order(self, epoch: int) -> Ids:
        """The windows in this epoch's order. Sorted raw bits, because numpy keeps those the same in all its versions."""
        if epoch not in self._orders:
            if len(self._orders) > 1:  # a step meets at most two epochs
                self._orders.clear()
            bits = np.random.PCG64(np.random.SeedSequence((self._seed, epoch))).random_raw(self.windows)
            self._orders[epoch] = np.argsort(bits, kind="stable")
        return self._orders[epoch]

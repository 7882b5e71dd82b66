"""Files that a command writes: one that cannot be written is refused before the work, one that fails after all is named."""

from __future__ import annotations

import contextlib
import json
import math
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pymesh3d.errors import ConfigError

PICTURES = (".png", ".svg", ".pdf")  # those that the help names: matplotlib writes more, which nobody has looked at


def require_writable(option: str, file: str | None) -> None:
    """Refuse a file that cannot be written, before the work that it is to hold. Raises ConfigError."""
    if file is None or not _first_rank():
        return
    folder = os.path.dirname(os.path.realpath(file))
    instead = "Give the name of a file in a folder of your own"
    there = folder
    while not os.path.exists(there):
        there = os.path.dirname(there)
    if not os.path.isdir(there):
        rule = f"{there} is a file"
    elif os.path.isdir(file):
        rule = "it is a folder"
    elif not os.access(file if os.path.exists(file) else there, os.W_OK):
        rule = "it cannot be written (Permission denied)"
    elif there != folder:
        rule, instead = "there is no such folder", f"mkdir -p {os.path.dirname(file)}"
    else:
        return
    raise ConfigError(f"{option} {file}", rule, instead)


def require_picture(option: str, file: str | None) -> None:
    """Refuse a picture that cannot be drawn or written, before what it is to show. Raises ConfigError."""
    if file is None or not _first_rank():
        return
    if Path(file).suffix.lower() not in PICTURES:
        rule = f"the end of its name picks the format, one of {', '.join(PICTURES)}"
        raise ConfigError(f"{option} {file}", rule, f"Use {option} picture.png")
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"{option} {file}", "drawing needs matplotlib", f"pip install matplotlib, or leave {option} away") from error
    require_writable(option, file)


def _first_rank() -> bool:
    """Whether this process writes files: on the hosts of other ranks, their folders need not even exist."""
    return os.environ.get("RANK", "0") == "0"


def require_folder(option: str, folder: str) -> None:
    """Make a folder that is to hold files; refuse one that cannot be made or written to. Raises ConfigError."""
    if os.path.isfile(folder):
        raise ConfigError(f"{option} {folder}", "it is a file, and a folder is needed", "Choose another name")
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(f"{option} {folder}", f"cannot be written to ({error.strerror})", "Choose another folder") from error


@contextlib.contextmanager
def writing(option: str, file: str) -> Iterator[None]:
    """Say which file it was, and of which option, when writing it fails inside. Raises OSError: a failure, not a refusal."""
    try:
        yield
    except OSError as error:
        raise OSError(f"{option} {file}: it could not be written ({error.strerror or error})") from error


def write(option: str, file: str | None, text: str, *, more: bool = False) -> None:
    """Write the file that an option asks for, if it does; with `more`, after what it holds. Raises OSError."""
    if file is not None:
        with writing(option, file), open(file, "a" if more else "w", encoding="utf-8") as output:
            output.write(text)


def write_json(file: str | None, content: Any) -> None:
    """Write what `--json FILE` asks for, if it is given. Raises OSError."""
    write("--json", file, as_json(content, indent=1) + "\n")


def as_json(content: Any, indent: int | None = None) -> str:
    """As JSON, which has no word for numbers that are not finite: they become null."""
    return json.dumps(_finite(content), indent=indent, allow_nan=False)


def _finite(content: Any) -> Any:
    if isinstance(content, Mapping):
        return {key: _finite(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [_finite(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content

"""Files that commands write: refused before the work, named when they fail after all."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest

from pymesh3d.commands.files import as_json, require_folder, require_picture, require_writable, write, write_json, writing
from pymesh3d.errors import ConfigError


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("no/a.json", "there is no such folder. mkdir -p {tmp}/no"),
        ("no/where/a.json", "there is no such folder. mkdir -p {tmp}/no/where"),
        ("folder", "it is a folder. Give the name of a file in a folder of your own"),
        ("file/a.json", "{tmp}/file is a file. Give the name of a file in a folder of your own"),
        ("file/b/a.json", "{tmp}/file is a file. Give the name of a file in a folder of your own"),
    ],
)
def test_what_cannot_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, words: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError) as caught:
        require_writable("--json", str(tmp_path / name))
    assert str(caught.value) == f"--json {tmp_path / name}: {words.format(tmp=tmp_path)}"
    monkeypatch.setenv("RANK", "1")  # perhaps on another host, and it writes nothing
    require_writable("--json", str(tmp_path / name))


def test_what_can_be_written_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "old").write_text("old")
    for file in (None, str(tmp_path / "old"), str(tmp_path / "new")):
        require_writable("--json", file)
    require_picture("--out", None)
    assert [path.name for path in tmp_path.iterdir()] == ["old"] and (tmp_path / "old").read_text() == "old"


def test_a_file_without_permission_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pymesh3d.commands.files.os.access", lambda path, mode: False)  # as nobody but root sees it
    with pytest.raises(ConfigError, match=r"it cannot be written \(Permission denied\)\. Give the name of a file in a folder of your own"):
        require_writable("--json", str(tmp_path / "new"))


@pytest.mark.parametrize("name", ["a.png", "a.SVG", "a.pdf"])
def test_pictures_that_can_be_drawn(tmp_path: Path, name: str) -> None:
    pytest.importorskip("matplotlib", reason="pictures need matplotlib (pip install matplotlib)")
    require_picture("--out", str(tmp_path / name))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        *((name, rf"{name}: .* picks the format, one of \.png, \.svg, \.pdf\. Use --out picture\.png") for name in ("a.jpg", "a.ps", "a")),
        ("no/a.png", "no such folder"),
    ],
)
def test_pictures_that_cannot(tmp_path: Path, name: str, words: str) -> None:
    pytest.importorskip("matplotlib", reason="pictures need matplotlib (pip install matplotlib)")
    with pytest.raises(ConfigError, match=words):
        require_picture("--out", str(tmp_path / name))


def test_a_picture_needs_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"--out a\.png: drawing needs matplotlib\. pip install matplotlib, or leave --out away"):
        require_picture("--out", "a.png")


def test_folders(tmp_path: Path) -> None:
    require_folder("--save", str(tmp_path / "a" / "b"))
    assert (tmp_path / "a" / "b").is_dir() and not list((tmp_path / "a" / "b").iterdir())
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"file: it is a file, and a folder is needed\. Choose another name"):
        require_folder("--save", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match=r"cannot be written to \(Not a directory\). Choose another folder"):
        require_folder("--save", str(tmp_path / "file" / "a"))


def test_writing_and_writing_more(tmp_path: Path) -> None:
    file = tmp_path / "log"
    write("--log-json", None, "nowhere")
    write("--log-json", str(file), "old\n")
    write("--log-json", str(file), "new\n")
    write("--log-json", str(file), "möre\n", more=True)
    assert file.read_text(encoding="utf-8") == "new\nmöre\n"
    write_json(str(file), {"a": [1, 2.5, None]})
    assert json.loads(file.read_text()) == {"a": [1, 2.5, None]} and file.read_text().endswith("}\n")


def test_what_is_not_finite_is_null(tmp_path: Path) -> None:
    rows = [{"loss": math.nan, "worst": (math.inf, 2.5, -math.inf), "step": 1, "ok": True, "name": "inf", "mfu": None}]
    finite = [{"loss": None, "worst": [None, 2.5, None], "step": 1, "ok": True, "name": "inf", "mfu": None}]
    assert as_json(rows[0]) == '{"loss": null, "worst": [null, 2.5, null], "step": 1, "ok": true, "name": "inf", "mfu": null}'
    write_json(str(tmp_path / "rows"), rows)
    assert (tmp_path / "rows").read_text() == json.dumps(finite, indent=1) + "\n"


def test_a_file_that_fails_is_named(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"--json .*/no/a: it could not be written \(No such file or directory\)") as caught:
        write_json(str(tmp_path / "no" / "a"), 1)
    assert not isinstance(caught.value, ConfigError)
    with pytest.raises(OSError, match=r"--out a: it could not be written \(no reason\)"), writing("--out", "a"):
        raise OSError("no reason")

"""Grids and pictures of schedules, and the command that shows them."""

import json
import re
import sys
from pathlib import Path

import pytest
from rich.text import Text

from pymesh3d.commands.draw import run
from pymesh3d.errors import ConfigError
from pymesh3d.schedule import Times, build, draw, parse, simulate
from pymesh3d.schedule.draw import caption, to_png, to_text

GRID = """\
rank 0  F0F1    B0==F2B1==  B2==
rank 1    F0B0==F1B1==F2B2=="""


def test_grid() -> None:
    assert to_text(simulate(build("1f1b", 2, 3))) == GRID


def test_grid_in_colour_is_the_same_grid() -> None:
    marked = to_text(simulate(build("1f1b", 2, 3)), markup=True)
    assert Text.from_markup(marked).plain == GRID
    assert "[black on steel_blue1]F0[/]" in marked


def test_boxes_have_room_for_their_labels() -> None:
    first = to_text(simulate(build("gpipe", 1, 11), Times(f=1, b=1)), width=200).splitlines()[0]
    assert first == "rank 0  F0-F1-F2-F3-F4-F5-F6-F7-F8-F9-F10B0=B1=B2=B3=B4=B5=B6=B7=B8=B9=B10"


@pytest.mark.parametrize("width", [24, 25, 26, 40])
def test_a_wide_grid_continues_below_and_loses_nothing(width: int) -> None:
    timeline = simulate(build("1f1b", 2, 11))
    whole, blocks = to_text(timeline, width=1000).splitlines(), to_text(timeline, width=width).split("\n\n")
    assert len(blocks) > 1
    assert all(len(line) <= width for block in blocks for line in block.splitlines())
    for rank in range(2):
        pieces = [block.splitlines()[rank][8:].ljust(width - 8) for block in blocks]
        joined = "".join(pieces).rstrip()
        assert len(joined) == len(whole[rank][8:])
        assert [c == " " for c in joined] == [c == " " for c in whole[rank][8:]]
        for span in timeline.compute(rank):
            label = f"{span.action.kind}{span.action.microbatch}"
            assert sum(len(re.findall(rf"{label}(?!\d)", piece)) for piece in pieces) == 1, label


def test_labels_are_never_cut_into_other_numbers() -> None:
    """A forward a thousand times shorter than a backward: its box shows nothing rather than a part of its number."""
    text = to_text(simulate(build("gpipe", 1, 12), Times(f=0.001, b=1)), width=1000)
    assert "F" not in text
    assert text.count("B") == 12


def test_caption_states_both_bubbles() -> None:
    assert caption(simulate(build("1f1b", 4, 8))) == "Bubble: 27.3% of the step, 15.8% inside the ranks' own spans"


def test_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pictures need matplotlib (pip install matplotlib)")
    timeline = simulate(build("1f1b", 2, 3))
    to_png(timeline, tmp_path / "a.png")
    to_png(timeline, tmp_path / "a.svg", title="A title")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert "A title" in (tmp_path / "a.svg").read_text()


def test_every_box_of_the_picture_stands_where_it_was_simulated() -> None:
    pytest.importorskip("matplotlib", reason="pictures need matplotlib (pip install matplotlib)")
    timeline = simulate(build("1f1b", 2, 3))
    axes = draw._figure(timeline, None).axes[0]
    numbers = [(text.get_position(), text.get_text()) for text in axes.texts if "flight" not in text.get_text()]
    spans = [(rank, span) for rank in range(2) for span in timeline.compute(rank)]
    assert numbers == [(((span.start + span.end) / 2, rank), str(span.action.microbatch)) for rank, span in spans]
    assert [text.get_text().strip() for text in axes.texts if "flight" in text.get_text()] == ["2 in flight", "1 in flight"]


def test_a_picture_without_matplotlib_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match="pip install matplotlib"):
        to_png(simulate(build("1f1b", 2, 3)), tmp_path / "a.png")


@pytest.mark.parametrize(
    ("name", "message"), [("a.txt", r"Use one of \.png"), ("a", r"Use one of \.png"), ("no/folder/a.png", "existing folder")]
)
def test_a_picture_that_cannot_be_written_is_refused(tmp_path: Path, name: str, message: str) -> None:
    pytest.importorskip("matplotlib", reason="pictures need matplotlib (pip install matplotlib)")
    with pytest.raises(ConfigError, match=message):
        to_png(simulate(build("1f1b", 2, 3)), tmp_path / name)


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("1F1B", 2, 3, json_file=str(tmp_path / "a.json")) == 0
    printed = capsys.readouterr().out
    assert str(build("1f1b", 2, 3)) in printed
    assert GRID in printed
    assert "Bubble: 25.0% of the step, 14.3% inside" in printed
    assert "In flight at most, by stage: 2 1" in printed
    numbers = json.loads((tmp_path / "a.json").read_text())
    assert (numbers["pp"], numbers["makespan"], numbers["bubble_of_step"], numbers["in_flight"]) == (2, 12, 0.25, [2, 1])
    assert [entry["action"] for entry in numbers["ranks"][1]] == str(build("1f1b", 2, 3)).splitlines()[2].split()[2:]
    assert parse(printed.split("\n\n")[0]) == build("1f1b", 2, 3)


def test_command_writes_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pictures need matplotlib (pip install matplotlib)")
    assert run("gpipe", 2, 3, out=str(tmp_path / "a.png")) == 0
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_command_refuses_a_file_it_cannot_write(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="existing folder"):
        run("gpipe", 2, 3, json_file=str(tmp_path / "no" / "a.json"))

"""Grids and pictures of schedules, and the command that shows them."""

import itertools
import json
import re
from pathlib import Path

import pytest
from rich.text import Text

from pymesh3d import commands
from pymesh3d.commands.draw import run
from pymesh3d.errors import ConfigError
from pymesh3d.schedule import Times, build, draw, simulate
from pymesh3d.schedule.draw import caption, legend, save_picture, to_text

GRID = """\
rank 0  F0F1    B0==F2B1==  B2==
rank 1    F0B0==F1B1==F2B2==
time    0         5         10"""


def test_grid() -> None:
    assert to_text(simulate(build("1f1b", 2, 3))) == GRID


INTERLEAVED = """\
rank 0  F0aF1aF0bF1b      B0b===   B1b===B0a===B1a===
rank 1     F0aF1aF0bB0b===F1bB1b===B0a===B1a===
time    0     2     4     6     8     10    12    14"""


def test_several_stages_of_a_rank_have_letters() -> None:
    timeline = simulate(build("interleaved", 2, 2, 2))
    assert to_text(timeline) == INTERLEAVED
    assert "F0a forward, B0a== backward of microbatch 0, a, b: stages of a rank in order, blank" in legend(timeline)
    assert "of microbatch 0, a-c: stages of a rank in order, blank" in legend(simulate(build("interleaved", 2, 2, 3)))


def test_the_legend_says_what_is_in_the_grid() -> None:
    timeline = simulate(build("1f1b", 2, 3))
    assert legend(timeline) == "F0 forward, B0== backward of microbatch 0, blank: idle; time (1 = a forward) to the right"
    assert Text.from_markup(legend(timeline, markup=True)).plain == legend(timeline)
    assert "blank: idle, no label: too short for it; time" in legend(simulate(build("1f1b", 2, 3), Times(f=0.001, b=1)))
    assert "[black on light_goldenrod2]B0==[/] backward" in legend(timeline, markup=True)
    assert legend(simulate(build("1f1b", 2, 3), Times(f=2, b=3))).endswith("blank: idle; time to the right")


def test_grid_in_colour_is_the_same_grid() -> None:
    marked = to_text(simulate(build("1f1b", 2, 3)), markup=True)
    assert Text.from_markup(marked).plain == GRID
    assert "[black on steel_blue1]F0[/]" in marked


def test_boxes_have_room_for_their_labels() -> None:
    first = to_text(simulate(build("gpipe", 1, 11), Times(f=1, b=1)), width=200).splitlines()[0]
    assert first == "rank 0  F0-F1-F2-F3-F4-F5-F6-F7-F8-F9-F10B0=B1=B2=B3=B4=B5=B6=B7=B8=B9=B10"


@pytest.mark.parametrize(("f", "b"), [(1.0, 2.0), (0.003, 0.004), (250.0, 1000.0)])
def test_numbers_of_the_axis_stand_where_their_time_is(f: float, b: float) -> None:
    """In every piece of a grid; here the grid has 3, 3 / 0.003 and 3 / 250 columns a unit of time."""
    timeline = simulate(build("gpipe", 3, 12), Times(f=f, b=b))
    whole = to_text(timeline, width=100_000).splitlines()
    columns = max(map(len, whole[:-1])) - 8
    ticks = [(found.start(), float(found[0])) for found in re.finditer(r"\S+", whole[-1][8:])]
    assert whole[-1].startswith("time    0 ") and len(ticks) >= 4 and ticks[-1][1] <= timeline.makespan
    for start, time in ticks:
        assert start == pytest.approx(time / timeline.makespan * columns, abs=1)
    apart = [later - earlier for (_, earlier), (_, later) in itertools.pairwise(ticks)]
    assert apart == pytest.approx([apart[0]] * len(apart)) and f"{apart[0]:e}"[0] in "125"
    pieces = [block.splitlines()[-1][8:] for block in to_text(timeline, width=48).split("\n\n")]
    assert all(len(piece) <= 39 for piece in pieces)  # 40 columns, of which 13 boxes with labels of 3 take 39
    assert {float(number) for piece in pieces for number in piece.split()} >= {time for start, time in ticks if start % 39 < 34}


@pytest.mark.parametrize("width", [24, 25, 26, 40])
def test_a_wide_grid_continues_below_and_loses_nothing(width: int) -> None:
    timeline = simulate(build("1f1b", 2, 11))
    whole, blocks = to_text(timeline, width=1000).splitlines(), to_text(timeline, width=width).split("\n\n")
    assert len(blocks) > 1
    assert all(len(line) <= width for block in blocks for line in block.splitlines())
    for rank in range(2):
        pieces = [block.splitlines()[rank][8:].ljust((width - 8) // 3 * 3) for block in blocks]
        joined = "".join(pieces).rstrip()
        assert len(joined) == len(whole[rank][8:])
        assert [c == " " for c in joined] == [c == " " for c in whole[rank][8:]]
        for span in timeline.compute(rank):
            label = f"{span.action.kind}{span.action.microbatch}"
            assert sum(len(re.findall(rf"{label}(?!\d)", piece)) for piece in pieces) == 1, label


IDLE = """\
rank 0  F0a         F0b                           B0b===                  B0a===
rank 1     F0a         F0b                  B0b===                  B0a===
rank 2        F0a         F0b         B0b===                  B0a===
rank 3           F0a         F0bB0b===                  B0a===
time    0     2     4     6     8     10    12    14    16    18    20    22"""


def test_a_grid_that_is_idle_for_long_has_all_labels_and_equal_boxes() -> None:
    assert to_text(simulate(build("interleaved", 4, 1, 2))) == IDLE


@pytest.mark.parametrize("width", [30, 79, 80, 100, 120])
@pytest.mark.parametrize("size", [("1f1b", 2, 11, 1), ("interleaved", 4, 4, 3), ("interleaved", 8, 12, 2)])
def test_no_label_is_lost_where_a_grid_continues(size: tuple[str, int, int, int], width: int) -> None:
    """Also of boxes that have just the room for it."""
    _, pp, _, virtual = size
    timeline = simulate(build(*size))
    blocks = [block.splitlines() for block in to_text(timeline, width=width).split("\n\n")]
    assert all(len(line) <= width for block in blocks for line in block)
    for rank in range(pp):
        spans = timeline.compute(rank)
        names = [f"{span.action.kind}{span.action.microbatch}{'abc'[span.action.stage // pp] * (virtual > 1)}" for span in spans]
        assert [found for block in blocks for found in re.findall(r"[FB]\d+[abc]?", block[rank])] == names


def test_labels_are_never_cut_into_other_numbers() -> None:
    """A forward a thousand times shorter than a backward: its box shows nothing rather than a part of its number."""
    text = to_text(simulate(build("gpipe", 1, 12), Times(f=0.001, b=1)), width=1000)
    assert "F" not in text
    assert text.count("B") == 12


def test_caption_states_both_bubbles() -> None:
    words = "Bubble: 27.3% of the step, 15.8% inside the ranks' own spans (first forward to last backward)"
    assert caption(simulate(build("1f1b", 4, 8))) == words


def test_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pictures need matplotlib (pip install matplotlib)")
    timeline = simulate(build("1f1b", 2, 3))
    save_picture(timeline, tmp_path / "a.png")
    save_picture(timeline, tmp_path / "a.pdf")
    save_picture(timeline, tmp_path / "a.svg", title="A title")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "a.pdf").read_bytes().startswith(b"%PDF-")
    assert "A title" in (tmp_path / "a.svg").read_text()


def test_the_picture_explains_itself() -> None:
    """A legend and a name for the axis, none of them upon another or outside."""
    pytest.importorskip("matplotlib", reason="pictures need matplotlib (pip install matplotlib)")
    one = ["forward", "backward", "idle", "numbers: microbatch"]
    two = ["forward a", "b", "backward a", "b", "idle", "0b: microbatch 0, stage b of its rank"]
    three = ["forward a", "b", "c", "backward a", "b", "c", "idle", two[-1]]
    crowded = ["forward a", "b", "c", "d", "backward a", "b", "c", "d", "idle", "a-d: stages of a rank in order"]
    for size, legend_texts in (
        (("1f1b", 4, 8), one), (("gpipe", 2, 3), one), (("1f1b", 1, 1), one), (("1f1b", 8, 256), one[:-1]),
        (("interleaved", 2, 1, 2), two), (("interleaved", 4, 4, 3), three), (("interleaved", 8, 32, 4), crowded),
    ):  # fmt: skip
        figure = draw._figure(simulate(build(*size)), None)
        figure.draw_without_rendering()
        axes = figure.axes[0]
        assert [text.get_text() for text in figure.legends[0].get_texts()] == legend_texts
        assert axes.get_xlabel() == "time (1 = a forward)"
        ticks = [label for label in axes.get_xticklabels() if label.get_position()[0] <= axes.get_xlim()[1]]  # others are not drawn
        parts = [figure.legends[0], axes.xaxis.label, *figure.texts, *ticks, *axes.get_yticklabels(), *axes.texts]
        boxes = [part.get_window_extent() for part in parts]
        assert not [(a, b) for a, b in itertools.combinations(boxes, 2) if a.overlaps(b)]
        assert all(figure.bbox.contains(*corner) for box in boxes for corner in (box.min, box.max))


def test_every_box_of_the_picture_stands_where_it_was_simulated() -> None:
    pytest.importorskip("matplotlib", reason="pictures need matplotlib (pip install matplotlib)")
    timeline = simulate(build("1f1b", 2, 3))
    axes = draw._figure(timeline, None).axes[0]
    numbers = [(text.get_position(), text.get_text()) for text in axes.texts if "flight" not in text.get_text()]
    spans = [(rank, span) for rank in range(2) for span in timeline.compute(rank)]
    assert numbers == [(((span.start + span.end) / 2, rank), str(span.action.microbatch)) for rank, span in spans]
    assert [text.get_text().strip() for text in axes.texts if "flight" in text.get_text()] == ["2 in flight", "1 in flight"]


def test_the_picture_tells_the_stages_of_a_rank_apart() -> None:
    """By letter and by shade, and the legend says so."""
    pytest.importorskip("matplotlib", reason="pictures need matplotlib (pip install matplotlib)")
    timeline = simulate(build("interleaved", 2, 2, 3))
    figure = draw._figure(timeline, None)
    axes = figure.axes[0]
    spans = [(rank, span) for rank in range(2) for span in timeline.compute(rank)]
    names = [f"{span.action.microbatch}{'abc'[span.action.stage // 2]}" for _, span in spans]
    assert [text.get_text() for text in axes.texts if "flight" not in text.get_text()] == names
    colours = [tuple(colour) for boxes in axes.collections[1::2] for colour in boxes.get_facecolor()]
    shades = {(span.action.kind, span.action.stage // 2): colour for (_, span), colour in zip(spans, colours, strict=True)}
    assert len(set(shades.values())) == 6
    assert all(sum(shades[kind, 0]) < sum(shades[kind, 1]) < sum(shades[kind, 2]) for kind in "FB")
    legend_shades = [patch.get_facecolor() for patch in figure.legends[0].get_patches()[:6]]  # forward a, b, c, backward a, b, c
    assert legend_shades == [shades[kind, turn] for kind in "FB" for turn in range(3)]


@pytest.mark.parametrize(
    ("size", "numbered"),
    [
        (("1f1b", 8, 64), True),
        (("interleaved", 4, 12, 2), True),
        (("interleaved", 8, 32, 4), False),
        (("interleaved", 2, 2, 26), False),
        (("1f1b", 8, 256), False),
    ],
)
def test_all_boxes_of_a_picture_have_their_numbers_inside_or_none(size: tuple[str, int, int, int], numbered: bool) -> None:
    pytest.importorskip("matplotlib", reason="pictures need matplotlib (pip install matplotlib)")
    timeline = simulate(build(*size))
    figure = draw._figure(timeline, None)
    figure.draw_without_rendering()
    axes = figure.axes[0]
    numbers = [text for text in axes.texts if "flight" not in text.get_text()]
    spans = [(rank, span) for rank in range(timeline.schedule.pp) for span in timeline.compute(rank)] if numbered else []
    for (rank, span), text in zip(spans, numbers, strict=True):
        (low, _), (high, _) = axes.transData.transform([(span.start, rank), (span.end, rank)])
        assert low < text.get_window_extent().x0 < text.get_window_extent().x1 < high
    assert len({text.get_fontsize() for text in numbers}) == numbered, "one size"
    assert ("microbatch" in figure.legends[0].get_texts()[-1].get_text()) == numbered


def test_command_draws_several_stages_a_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two where nothing is said."""
    for given in (None, 2):
        assert run("interleaved", 2, 2, given, json_file=str(tmp_path / "a.json")) == 0
        printed = capsys.readouterr().out
        assert printed.startswith(f"{build('interleaved', 2, 2, 2)}\n") and f"{INTERLEAVED}\nF0a forward" in printed
        assert "RF0@2 F0@2 " in printed and "; @2: of stage 2 of the pipeline, which is b of rank 0\n" in printed
        assert json.loads((tmp_path / "a.json").read_text())["virtual_pp"] == 2
    for pp, virtual, message in (
        (2, 27, "--virtual-pp 27: .* at most 26 stages of a rank"),
        (86, 3, "--virtual-pp 3: a drawing has at most"),
    ):
        with pytest.raises(ConfigError, match=message):
            run("interleaved", pp, 1, virtual)
    with pytest.raises(ConfigError, match="forwards and backwards in all"):
        run("interleaved", 50, 101, 2)


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("1f1b", 2, 3, json_file=str(tmp_path / "a.json")) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"{build('1f1b', 2, 3)}\n")
    assert f"{GRID}\nF0 forward, B0== backward" in printed
    assert "Bubble: 25.0% of the step, 14.3% inside" in printed
    assert "Microbatches in flight at most, by stage: 2 1" in printed
    kinds = {entry.rstrip("0123456789") for line in str(build("1f1b", 2, 3)).splitlines()[1:] for entry in line.split()[2:]}
    assert kinds == set(re.findall(r"\b([A-Z]+)0\b", commands.draw.ACTIONS)), "every letter is explained"
    assert f"{commands.draw.ACTIONS}\n" in printed and "@" not in printed, "the stage is plain where a rank has one"
    numbers = json.loads((tmp_path / "a.json").read_text())
    assert (numbers["pp"], numbers["makespan"], numbers["bubble_of_step"], numbers["in_flight"]) == (2, 12, 0.25, [2, 1])
    assert [entry["action"] for entry in numbers["ranks"][1]] == str(build("1f1b", 2, 3)).splitlines()[2].split()[2:]


def test_command_writes_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pictures need matplotlib (pip install matplotlib)")
    assert run("gpipe", 2, 3, out=str(tmp_path / "a.png")) == 0
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_command_refuses_before_it_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "folder.png").mkdir()
    for out, message in (("no/a.png", "there is no such folder"), ("a.jpg", "picks the format"), ("folder.png", "it is a folder")):
        with pytest.raises(ConfigError, match=message):
            run("gpipe", 2, 3, out=str(tmp_path / out))
    for pp, microbatches in ((257, 1), (1, 10_001), (101, 100)):
        with pytest.raises(ConfigError, match=f"--pp {pp} --microbatches {microbatches}: a drawing has at most 256 stages, and 20000"):
            run("gpipe", pp, microbatches)
    assert capsys.readouterr().out == ""

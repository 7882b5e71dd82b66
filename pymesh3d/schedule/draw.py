"""Draws a simulated schedule: a grid for the terminal, a picture for a page."""

from __future__ import annotations

import itertools
import string
from pathlib import Path
from typing import TYPE_CHECKING

from pymesh3d.schedule.actions import Action, Schedule
from pymesh3d.schedule.simulate import Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FILL = {"F": "-", "B": "=", "W": "~"}  # pads a box of the grid to its length
MARKUP = {"F": "black on steel_blue1", "B": "black on light_goldenrod2", "W": "black on dark_sea_green2"}
COLOUR = {"F": "#a3bfdd", "B": "#f0cd96", "W": "#b3d0ac"}
MEANING = {"F": "forward", "B": "backward", "W": "backward, weights"}
INK, QUIET, LANE = "#26323e", "#6f7b88", "#edf0f3"
LETTERS = string.ascii_lowercase  # the first stage of a rank, its second, and so on
PALEST = 0.6  # how much white is in the colour of a rank's last stage, where it has several

SLIM, WIDE = 7.0, 30.0  # inches: the least and largest width of a picture
BOX = 0.3  # inches: the width of the shortest box, where that makes no picture wider than WIDE
LANE_HEIGHT = 0.46  # inches
LETTERING, LEAST = 8.5, 5.5  # points: the size of what is written, and the least that can still be read in narrow boxes
EDGE = 1.2  # points: the white around a box, less where boxes are narrow


def caption(timeline: Timeline) -> str:
    """Both bubbles in words."""
    bubbles = f"{timeline.bubble_of_step:.1%} of the step, {timeline.bubble_in_span:.1%} inside the ranks' own spans"
    return f"Bubble: {bubbles} (first forward to last backward)"


def unit(timeline: Timeline) -> str:
    """What the numbers at the time axis count, where that is plain: "time (1 = a forward)"."""
    forwards = {span.end - span.start for rank in range(timeline.schedule.pp) for span in timeline.compute(rank) if span.action.kind == "F"}
    return "time (1 = a forward)" if forwards == {1.0} else "time"


def legend(timeline: Timeline, markup: bool = False) -> str:
    """What the boxes of `to_text` mean, in their own colours with `markup`."""
    several = timeline.schedule.virtual > 1
    label = "0a" if several else "0"
    boxes = {kind: f"{kind}{label}" if kind == "F" else f"{kind}{label}{FILL[kind] * 2}" for kind in _kinds(timeline)}
    shown = [f"{_coloured(box, kind, markup)} {MEANING[kind]}" for kind, box in boxes.items()]
    stages = f"{_stages(timeline.schedule)}, " if several else ""
    short = min(_lengths(timeline)) * _columns_per_time(timeline) < _longest_label(timeline)
    without = ", no label: too short for it" if short else ""
    return f"{', '.join(shown)} of microbatch 0, {stages}blank: idle{without}; {unit(timeline)} to the right"


def to_text(timeline: Timeline, width: int = 120, markup: bool = False) -> str:
    """One line a rank, time to the right: `F3` is the forward of microbatch 3, `B3==` its backward, blank is idle; below, the axis.
    Where a rank has several stages (26 at most), their letters follow: `F3a`, `F3b`.

    A grid wider than `width` columns continues below. With `markup`, boxes carry rich's colour tags.
    Every box of the shortest length is as wide as the longest label, unless that makes boxes much longer than it too wide.
    """
    names = [f"rank {rank}" for rank in range(timeline.schedule.pp)]
    margin = len(names[-1]) + 2
    scale, longest = _columns_per_time(timeline), _longest_label(timeline)
    columns = round(timeline.makespan * scale)
    step = max(width - margin, 16) // longest * longest  # the shortest boxes, which have no room to spare, begin at such columns
    blocks = []
    for low in range(0, columns, step):
        high = min(low + step, columns)
        lines = [_line(timeline, rank, scale, low, high, markup) for rank in range(timeline.schedule.pp)]
        lines.append(_axis(timeline.makespan, scale, low, high))
        blocks.append("\n".join(f"{name:{margin}}{line}" for name, line in zip([*names, "time"], lines, strict=True)))
    return "\n\n".join(blocks)


def _kinds(timeline: Timeline) -> list[str]:
    """The kinds of boxes that occur."""
    present = {span.action.kind for rank in range(timeline.schedule.pp) for span in timeline.compute(rank)}
    return [kind for kind in MEANING if kind in present]


def _coloured(box: str, kind: str, markup: bool) -> str:
    return f"[{MARKUP[kind]}]{box}[/]" if markup else box


def _name(schedule: Schedule, action: Action) -> str:
    """The microbatch, and the letter of the stage where a rank has several."""
    return f"{action.microbatch}{LETTERS[action.stage // schedule.pp] if schedule.virtual > 1 else ''}"


def _label(schedule: Schedule, action: Action) -> str:
    return f"{action.kind}{_name(schedule, action)}"


def _stages(schedule: Schedule) -> str:
    """What the letters mean."""
    return f"a{'-' if schedule.virtual > 2 else ', '}{LETTERS[schedule.virtual - 1]}: stages of a rank in order"


def _lengths(timeline: Timeline) -> list[float]:
    """How long each box is, without those that take no time; at least one."""
    spans = [span for rank in range(timeline.schedule.pp) for span in timeline.compute(rank)]
    return [span.end - span.start for span in spans if span.end > span.start] or [1.0]


def _longest_label(timeline: Timeline) -> int:
    """Its number of characters."""
    return max(len(_label(timeline.schedule, span.action)) for rank in range(timeline.schedule.pp) for span in timeline.compute(rank))


def _columns_per_time(timeline: Timeline) -> float:
    """The scale at which the shortest box just holds the longest label, and so equal boxes have equal whole columns.

    No more than 16 columns a box, on average: a box far shorter than the others would make a grid without end. Idle time does not count.
    """
    lengths = _lengths(timeline)
    return min(_longest_label(timeline) / min(lengths), 16 * len(lengths) / sum(lengths))


def _line(timeline: Timeline, rank: int, scale: float, low: int, high: int, markup: bool) -> str:
    """The columns from `low` to `high` (exclusive) of `rank`. A box that is cut has its label in the first piece with room for it."""
    line, at = "", low
    for span in timeline.compute(rank):
        left, right = round(span.start * scale), round(span.end * scale)
        start, stop = max(left, low), min(right, high)
        if start >= stop:
            continue
        label = _label(timeline.schedule, span.action)
        wanted = start == left or low - left < len(label)
        box = (label if wanted and len(label) <= stop - start else "").ljust(stop - start, FILL[span.action.kind])
        line += " " * (start - at) + _coloured(box, span.action.kind, markup)
        at = stop
    return line


def _axis(makespan: float, scale: float, low: int, high: int) -> str:
    """The columns from `low` to `high` of the time axis: round numbers, each beginning in the column of its time."""
    room = (len(f"{makespan:.3g}") + 4) / scale
    apart = next(step for power in itertools.count(-9) for step in (10.0**power, 2 * 10.0**power, 5 * 10.0**power) if step >= room)
    line = ""
    for tick in range(int(makespan / apart) + 1):
        label, column = f"{tick * apart:g}", round(tick * apart * scale) - low
        if 0 <= column <= high - low - len(label):
            line = line.ljust(column) + label
    return line


def save_picture(timeline: Timeline, path: str | Path, title: str | None = None) -> None:
    """Write a picture of the step to `path` with matplotlib, in the format that the suffix picks (.png, .svg, .pdf).

    Raises OSError where the file cannot be written, and what matplotlib raises for a format that it does not know.
    """
    _figure(timeline, title).savefig(path, facecolor="white")


def _figure(timeline: Timeline, title: str | None) -> Figure:
    """One lane a rank, as wide as the shortest box needs, with room for the notes at the right."""
    from matplotlib.figure import Figure

    schedule = timeline.schedule
    shortest, time = min(_lengths(timeline)), timeline.makespan or 1.0
    notes = _notes(timeline)
    left, right, top, bottom = 0.75, 0.15 + max(map(_em, notes)) * LETTERING / 72, 0.82, 0.85  # inches around the lanes
    lanes_width = min(max(BOX * time / shortest, SLIM - left - right), WIDE - left - right)
    room = 72 * lanes_width * shortest / time  # points, in the shortest box
    edge = min(EDGE, room / 6)  # of narrow boxes it must not hide much
    letters = LETTERS[: schedule.virtual] if schedule.virtual > 1 else [""]
    size = min((0.9 * room - edge) / max(_em(f"{schedule.microbatches - 1}{letter}") for letter in letters), LETTERING)
    numbered = size >= LEAST  # all boxes or none: some with and some without look as if that meant something
    width, height = left + lanes_width + right, top + LANE_HEIGHT * schedule.pp + bottom

    figure = Figure(figsize=(width, height), dpi=160)
    axes = figure.add_axes((left / width, bottom / height, lanes_width / width, LANE_HEIGHT * schedule.pp / height))
    axes.set(xlim=(0, time), ylim=(schedule.pp - 0.5, -0.5))
    axes.set_yticks(range(schedule.pp), [f"rank {rank}" for rank in range(schedule.pp)])
    axes.tick_params(axis="y", length=0, labelsize=9, labelcolor=INK, pad=5)
    axes.tick_params(axis="x", length=0, labelsize=8, labelcolor=QUIET)
    axes.set_xlabel(unit(timeline), fontsize=8.5, color=QUIET, loc="left")
    axes.spines[:].set_visible(False)
    for rank, note in enumerate(notes):
        _draw_rank(axes, timeline, rank, edge, size if numbered else None)
        axes.text(1, rank, note, transform=axes.get_yaxis_transform(), va="center_baseline", fontsize=LETTERING, color=QUIET)
    figure.text(
        left / width, 1 - 0.3 / height, title or timeline.schedule.heading, fontsize=12.5, fontweight="bold", color=INK, va="center"
    )
    figure.text(left / width, 1 - 0.58 / height, caption(timeline), fontsize=9, color=QUIET, va="center")
    _draw_legend(figure, timeline, (left / width, 0.12 / height), numbered)
    return figure


def _em(text: str) -> float:
    """The width of a text as a multiple of its size."""
    from matplotlib.textpath import TextPath

    return float(TextPath((0, 0), text, size=1).get_extents().x1)


def _notes(timeline: Timeline) -> list[str]:
    """For each rank, how many microbatches are in flight at most on each of its stages."""
    most, pp = timeline.in_flight, timeline.schedule.pp
    return [f"   {' + '.join(map(str, most[rank::pp]))} in flight" for rank in range(pp)]


def _draw_rank(axes: Axes, timeline: Timeline, rank: int, edge: float, size: float | None) -> None:
    """One lane: a box for each forward and backward, with the number of its microbatch where that has a size."""
    height = (rank - 0.42, 0.84)
    spans = timeline.compute(rank)
    boxes = [(span.start, span.end - span.start) for span in spans]
    axes.broken_barh([axes.get_xlim()], height, facecolors=LANE)
    colours = [_colour(timeline.schedule, span.action.kind, span.action.stage // timeline.schedule.pp) for span in spans]
    axes.broken_barh(boxes, height, facecolors=colours, edgecolors="white", linewidth=edge)
    if size:
        for span, (start, length) in zip(spans, boxes, strict=True):
            number = _name(timeline.schedule, span.action)
            axes.text(start + length / 2, rank, number, ha="center", va="center_baseline", fontsize=size, color=INK)


def _colour(schedule: Schedule, kind: str, turn: int) -> tuple[float, float, float]:
    """The colour of the kind, paler for later stages of a rank (`turn` 0, 1, ...)."""
    from matplotlib.colors import to_rgb

    white = PALEST * turn / max(schedule.virtual - 1, 1)
    red, green, blue = (part + (1 - part) * white for part in to_rgb(COLOUR[kind]))
    return red, green, blue


def _draw_legend(figure: Figure, timeline: Timeline, corner: tuple[float, float], numbered: bool) -> None:
    """The colours that occur, below the lanes; where a rank has several stages, the shade of each."""
    from matplotlib.patches import Patch

    schedule = timeline.schedule
    handles = []
    for kind in _kinds(timeline):
        labels = [MEANING[kind]] if schedule.virtual == 1 else [f"{MEANING[kind]} a", *LETTERS[1 : schedule.virtual]]
        handles += [Patch(color=_colour(schedule, kind, turn), label=label) for turn, label in enumerate(labels)]
    handles.append(Patch(color=LANE, label="idle"))
    if schedule.virtual > 1:
        handles.append(Patch(alpha=0, label="0b: microbatch 0, stage b of its rank" if numbered else _stages(schedule)))
    elif numbered:
        handles.append(Patch(alpha=0, label="numbers: microbatch"))
    figure.legend(handles=handles, loc="lower left", bbox_to_anchor=corner, ncols=len(handles), borderpad=0, borderaxespad=0,
                  frameon=False, fontsize=LETTERING, labelcolor=INK, handlelength=1.2, handletextpad=0.5, columnspacing=1.2)  # fmt: skip

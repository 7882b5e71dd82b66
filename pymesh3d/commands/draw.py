"""`pymesh3d draw`: a schedule as text, as a grid and as a picture, with its bubbles."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.console import Console

from pymesh3d.errors import ConfigError
from pymesh3d.schedule import Timeline, build, simulate
from pymesh3d.schedule.draw import caption, to_png, to_text


def run(schedule: str, pp: int, microbatches: int, out: str | None = None, json_file: str | None = None) -> int:
    """Print the schedule, its grid, both bubbles and the microbatches in flight, a backward taken as long as two forwards.

    `out` names a picture to write, `json_file` a file for the same in numbers. Returns the exit status. Raises ConfigError.
    """
    timeline = simulate(build(schedule, pp, microbatches))
    console = Console(highlight=False, soft_wrap=True)
    console.print(str(timeline.schedule), markup=False)
    console.print(f"\n{to_text(timeline, width=console.width, markup=True)}\n")
    console.print(caption(timeline), markup=False)
    console.print(f"In flight at most, by stage: {' '.join(map(str, timeline.in_flight))}", markup=False)
    if out:
        to_png(timeline, out)
        console.print(f"Picture: {out}", markup=False)
    if json_file:
        _write(json_file, timeline)
    return 0


def _write(path: str, timeline: Timeline) -> None:
    try:
        Path(path).write_text(json.dumps(_numbers(timeline), indent=1) + "\n")
    except OSError as error:
        raise ConfigError(f"--json {path}", f"cannot be written ({error.strerror})", "Name a file in an existing folder") from error


def _numbers(timeline: Timeline) -> dict[str, Any]:
    schedule = timeline.schedule
    return {
        "schedule": schedule.name,
        "pp": schedule.pp,
        "microbatches": schedule.microbatches,
        "makespan": timeline.makespan,
        "bubble_of_step": timeline.bubble_of_step,
        "bubble_in_span": timeline.bubble_in_span,
        "in_flight": timeline.in_flight,
        "ranks": [
            [{"action": schedule.text_of(action, rank), "start": start, "end": end} for action, start, end in spans]
            for rank, spans in enumerate(timeline.ranks)
        ],
    }

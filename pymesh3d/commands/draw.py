"""`pymesh3d draw`: a schedule as text, as a grid and as a picture, with its bubbles."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from pymesh3d.commands.files import require_picture, write_json, writing
from pymesh3d.config import require_virtual
from pymesh3d.errors import ConfigError
from pymesh3d.schedule import VIRTUAL, Timeline, build, simulate
from pymesh3d.schedule.draw import LETTERS, caption, legend, save_picture, to_text

MOST_STAGES, MOST_BOXES = 256, 20_000  # beyond, nobody can see anything, and a picture has no room
ACTIONS = "F0, B0: forward and backward of microbatch 0; SF0, RF0: its activations are sent, received; SB0, RB0: its gradients"


def run(
    schedule: str, pp: int, microbatches: int, virtual_pp: int | None = None, out: str | None = None, json_file: str | None = None
) -> int:
    """Print the schedule, its grid, both bubbles and the microbatches in flight, a backward taken as long as two forwards.

    Without `virtual_pp` a rank has one stage, or two where the schedule is for several.
    `out` names a picture to write, `json_file` a file for the same in numbers. Returns the exit status. Raises ConfigError and OSError.
    """
    require_picture("--out", out)
    virtual = (2 if schedule in VIRTUAL else 1) if virtual_pp is None else virtual_pp
    require_virtual(schedule, virtual, pp)
    if virtual > len(LETTERS):
        raise ConfigError(f"--virtual-pp {virtual}", f"a drawing has at most {len(LETTERS)} stages of a rank", "Use --virtual-pp 4")
    if pp * virtual > MOST_STAGES or 2 * pp * virtual * microbatches > MOST_BOXES:
        given = f"--pp {pp} --microbatches {microbatches}" + (f" --virtual-pp {virtual}" if virtual > 1 else "")
        rule = f"a drawing has at most {MOST_STAGES} stages, and {MOST_BOXES} forwards and backwards in all"
        raise ConfigError(given, rule, "Use --pp 16 --microbatches 64")
    timeline = simulate(build(schedule, pp, microbatches, virtual))
    console = Console(highlight=False, soft_wrap=True)
    console.print(str(timeline.schedule), markup=False)
    stage = f"; @{pp}: of stage {pp} of the pipeline, which is b of rank 0" if virtual > 1 else ""
    console.print(f"{ACTIONS}{stage}", markup=False)
    console.print(f"\n{to_text(timeline, width=console.width, markup=True)}")
    console.print(f"{legend(timeline, markup=True)}\n")
    console.print(caption(timeline), markup=False)
    console.print(f"Microbatches in flight at most, by stage: {' '.join(map(str, timeline.in_flight))}", markup=False)
    if out:
        with writing("--out", out):
            save_picture(timeline, out)
        console.print(f"Picture: {out}", markup=False)
    write_json(json_file, _numbers(timeline))
    return 0


def _numbers(timeline: Timeline) -> dict[str, Any]:
    schedule = timeline.schedule
    return {
        "schedule": schedule.name,
        "pp": schedule.pp,
        "microbatches": schedule.microbatches,
        "virtual_pp": schedule.virtual,
        "makespan": timeline.makespan,
        "bubble_of_step": timeline.bubble_of_step,
        "bubble_in_span": timeline.bubble_in_span,
        "in_flight": timeline.in_flight,
        "ranks": [
            [{"action": schedule.text_of(action, rank), "start": start, "end": end} for action, start, end in spans]
            for rank, spans in enumerate(timeline.ranks)
        ],
    }

"""A picture of products that talk to other ranks: how many times the floor each implementation takes, layer by layer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from .report import Row

LINES = (
    ("unfused_us", "product and NCCL", "#9a9a94", "o"),
    ("torch_us", "torch's fused", "#3f78b5", "s"),
    ("ours_us", "ours", "#c8452f", "D"),
)
INK, QUIET = "#222222", "#777777"


def save(rows: Sequence[Row], path: str | Path, title: str) -> None:
    """Write it with matplotlib, in the format that the suffix picks: what ran in a graph, where there is one. Raises OSError."""
    from matplotlib.figure import Figure

    mode = "graph" if any(row["mode"] == "graph" for row in rows) else "eager"
    layers: dict[str, list[Row]] = {}
    for row in rows:
        if row["mode"] == mode:
            layers.setdefault(str(row["layer"]), []).append(row)
    across = min(4, len(layers))
    down = -(-len(layers) // across)
    figure = Figure(figsize=(2.9 * across + 0.6, 2.5 * down + 1.2), dpi=150, layout="constrained")
    panels = figure.subplots(down, across, sharey="row", squeeze=False)
    for number, (layer, cells) in enumerate(layers.items()):
        axes = panels[number // across][number % across]
        places = range(len(cells))
        axes.axhline(1.0, color=INK, linewidth=1.0, zorder=1)
        for key, label, color, marker in LINES:
            if all(cell.get(key) is not None for cell in cells):
                times = [float(cell[key] or 0.0) / float(cell["floor_us"] or 1.0) for cell in cells]
                axes.plot(places, times, color=color, marker=marker, markersize=4.5, linewidth=1.6, label=label, zorder=2)
        axes.set_title(layer, fontsize=9.5, color=INK, loc="left")
        axes.set_xticks(places, [f"{cell['tokens']:,}" for cell in cells])
        axes.set_xlim(-0.3, len(cells) - 0.7)
        axes.tick_params(labelsize=8, labelcolor=QUIET, length=0)
        axes.grid(axis="y", color="#e4e4e0", linewidth=0.7)
        axes.spines[:].set_visible(False)
    for unused in range(len(layers), down * across):
        panels[unused // across][unused % across].set_visible(False)
    for row in panels:
        row[0].set_ylim(bottom=0.9)
    figure.supxlabel("tokens over all ranks", fontsize=9, color=QUIET)
    figure.supylabel("time, floor = 1", fontsize=9, color=QUIET)
    figure.suptitle(title, fontsize=11, fontweight="bold", color=INK, x=0.01, ha="left")
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper right", ncols=3, fontsize=9, frameon=False)
    figure.savefig(path, facecolor="white")

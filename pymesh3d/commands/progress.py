"""What `pymesh3d train` shows a person: the mesh, the stages, a line a step, the loss curve."""

from __future__ import annotations

import contextlib
import math
import sys
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.table import Table

from pymesh3d.comm.agree import exchange_numbers
from pymesh3d.config import ModelConfig, TrainConfig
from pymesh3d.engine import Engine, held_layers
from pymesh3d.mesh import Mesh
from pymesh3d.placement import placement_of
from pymesh3d.planner.model import parameters


class _Output(Console):
    """A console that leaves a broken pipe (`pymesh3d train | head`) to the command, which ends all ranks quietly."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


class Progress:
    """Prints on one rank; on the others (`quiet`) only takes part in the counting."""

    def __init__(self, *, quiet: bool) -> None:
        self.quiet = quiet
        self.console = _Output(file=sys.stdout, quiet=quiet, highlight=False)
        self._bar: Bar | None = None
        self._began = time.monotonic()

    def say(self, text: str) -> None:
        """One line."""
        self.console.print(text, markup=False, soft_wrap=True)

    def header(self, mesh: Mesh, model: ModelConfig, train: TrainConfig, corpus: str) -> None:
        """The mesh and what is trained on it."""
        self.say(f"mesh {mesh}")
        sizes = f"{model.layers} layers, dim {model.dim}, heads {model.heads}/{model.kv_heads}, ffn {model.ffn}, vocabulary {model.vocab}"
        self.say(f"model of {parameters(model):,} parameters: {sizes}{', tied' if model.tied else ''}")
        batch = f"{train.global_batch} sequences of {train.seq} tokens a step, microbatches of {train.micro_batch}, {train.schedule}"
        zero = f"ZeRO {train.zero_stage}"
        if train.zero_stage >= 2 and train.zero_once_a_step is not None:
            zero += " once a step" if train.zero_once_a_step else " with every microbatch"
        options = f"{zero}, {train.dtype}" + (", sequence parallel" if train.sequence_parallel else "")
        self.say(f"data  {corpus}; {batch}; {options}")

    def stages(self, engine: Engine) -> None:
        """Which modules stand on which stage, with the parameters of the stage (unsharded) and of one rank (its tp shard)."""
        mesh, model = engine.mesh, engine.model
        sizes = [math.prod(placement_of(p).local_shape()) for p in model.parameters()]  # in stage 3 of ZeRO parameters may be empty
        own = torch.tensor([sum(sizes)], dtype=torch.float64)
        held = exchange_numbers(own, mesh, "counting parameters")[:, 0].tolist()
        table = Table(title="stages", title_justify="left")
        for name in ("stage", "ranks", "modules", "parameters of a rank"):
            table.add_column(name, justify="right" if name.startswith("param") else "left")
        for stage, parts in enumerate(held_layers(model.config, mesh.pp.size, engine.config.virtual_pp)):
            ranks = mesh.ranks[stage].reshape(-1).tolist()
            names = [f"layers {layers.start}-{layers.stop - 1}" if len(layers) > 1 else f"layer {layers.start}" for layers in parts]
            names = ["embed"] * (stage == 0) + names + ["norm", "head"] * (stage == mesh.pp.size - 1)
            shown = f"{ranks[0]}-{ranks[-1]}" if len(ranks) > 1 else str(ranks[0])
            table.add_row(str(stage), shown, ", ".join(names), f"{int(held[ranks[0]]):,}")
        self.console.print(table)
        padded = {part.rows for p in model.parameters() for part in placement_of(p).parts if part.rows > part.size}
        if padded:
            self.say(f"(a rank counts the rows of zeros that pad the vocabulary of {model.config.vocab} to {max(padded)})")

    @contextlib.contextmanager
    def steps(self, first: int, last: int, *, mfu: bool) -> Iterator[None]:
        """While training: a bar with the time left under the lines of the steps, where the output is a terminal; `mfu` adds its column."""
        names = f"{'step':>6} {'loss':>9} {'grad norm':>10} {'tokens/s':>10} {'TFLOP/s':>8}"
        self.say(f"{names}{'    MFU' if mfu else ''} {'GiB':>6} {'time left':>9}")
        self._began, self._first, self._last, self._mfu = time.monotonic(), first, last, mfu
        if self.quiet or not self.console.is_terminal:
            yield
            return
        columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TextColumn("steps, left"), TimeRemainingColumn())
        with Bar(*columns, console=self.console, transient=True) as self._bar:
            self._task = self._bar.add_task("training", total=last, completed=first)
            yield
        self._bar = None

    def step(self, line: Mapping[str, float | int | None]) -> None:
        """One step's line."""
        done = int(line["step"] or 0)
        left = (time.monotonic() - self._began) / (done - self._first) * (self._last - done)
        speed = f"{_rounded(float(line['tps'] or 0)):>10} {_steady(float(line['tflops'] or 0)):>8}"
        if self._mfu:
            speed += f" {'-' if line['mfu'] is None else format(line['mfu'], '.1%'):>6}"
        self.say(f"{done:>6} {line['loss']:>9.4f} {line['grad_norm']:>10.4f} {speed} {line['memory_gib']:>6.2f} {_clock(left):>9}")
        if self._bar is not None:
            self._bar.update(self._task, completed=done)

    def curve(self, losses: Sequence[float]) -> None:
        """The loss over the steps in one line of blocks, with its first and last value."""
        finite = [loss for loss in losses if math.isfinite(loss)]
        if len(finite) < 2:
            return
        low, high, width = min(finite), max(finite), min(60, len(finite))
        groups = [finite[i * len(finite) // width : (i + 1) * len(finite) // width] for i in range(width)]
        means = [sum(group) / len(group) for group in groups]
        blocks = "".join("▁▂▃▄▅▆▇█"[min(7, int(8 * (mean - low) / max(high - low, 1e-12)))] for mean in means)
        self.say(f"loss {finite[0]:.4f} {blocks} {finite[-1]:.4f}")

    def reached(self, losses: Sequence[float], tokens: int, places: Mapping[str, str | Path | None]) -> None:
        """The last line: what these steps came to, and under which name each thing was kept."""
        seconds = time.monotonic() - self._began
        steps = "1 step" if len(losses) == 1 else f"{len(losses)} steps"
        loss = f"{losses[0]:.4f}" if len(losses) == 1 else f"from {losses[0]:.4f} to {losses[-1]:.4f}"
        kept = "".join(f"; {name}: {place}" for name, place in places.items() if place)
        self.say(f"{steps} in {_clock(seconds)} ({_rounded(tokens / seconds)} tokens/s), loss {loss}{kept}")


def _rounded(number: float) -> str:
    """To three digits, because the others change from step to step: 12,300."""
    return f"{float(f'{number:.3g}'):,.0f}"


def _steady(tflops: float) -> str:
    """With as many decimals as its size deserves, zeros included, so that the point stands still from step to step."""
    return f"{tflops:.{4 if tflops < 1 else 1 if tflops < 100 else 0}f}"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes}:{rest:02}" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


def draw_loss(losses: Sequence[float], first: int, path: str, title: str) -> None:
    """The loss curve as a picture: each step pale, the mean of about a fortieth of the run strong."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    pale, strong = "#9dbcd4", "#1f5a85"
    window = max(1, len(losses) // 40)
    smooth = [sum(losses[max(0, i - window + 1) : i + 1]) / min(i + 1, window) for i in range(len(losses))]
    steps = range(first, first + len(losses))
    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    axes = figure.subplots()
    axes.plot(steps, smooth, color=strong, linewidth=2, zorder=3, label=f"mean of the last {window} steps")
    if window > 1:
        axes.plot(steps, losses, color=pale, linewidth=0.8, label="each step")
    for place, offset in ((0, (8, 0)), (-1, (6, -4))):
        axes.annotate(
            f"{smooth[place]:.2f}", (steps[place], smooth[place]), xytext=offset, textcoords="offset points", color=strong, weight="bold"
        )
    axes.set(xlabel="step", ylabel="loss (nats per token)", xlim=(first - 1, first + len(losses) * 1.07))
    axes.set_title(textwrap.shorten(title, 110, placeholder=" ..."), loc="left", fontsize=10)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(color="#e6e6e6", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    if window > 1:
        axes.legend(frameon=False)
    figure.savefig(path)

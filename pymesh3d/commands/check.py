"""`pymesh3d check`: the same seed and data in one process of plain PyTorch and in many layouts; do the numbers agree?"""

from __future__ import annotations

import dataclasses
import functools
import gc
import sys
import time

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table

from pymesh3d.comm.agree import exchange_numbers, exchange_text
from pymesh3d.commands.files import write_json
from pymesh3d.commands.layouts import Row, covering_rows, every_row
from pymesh3d.config import ModelConfig, TrainConfig
from pymesh3d.engine import DTYPES, IGNORE_INDEX, parallelize
from pymesh3d.mesh import Mesh, init_mesh
from pymesh3d.models import plain
from pymesh3d.models.dropout import Masks
from pymesh3d.models.llama import Llama, initialize_
from pymesh3d.ops.dropout import mask_counter

STEPS = 3
SEED = 20
TELL = 30.0  # seconds between two lines that say how far it is, where no terminal shows it
# The largest difference from float64 that passes, by the measure of `difference`. In float64 it is rounding alone. In bf16 on GPUs
# (8 bits) it is what one GPU has too: see bench/results for how far single GPUs and layouts are.
BOUNDS = {
    "float64": {"loss": 1e-12, "gradients": 1e-12, "parameters": 1e-12},
    "bfloat16": {"loss": 2e-3, "gradients": 6e-2, "parameters": 6e-2},
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reference:
    """What one process computes: initial values, losses of the steps, gradients of the first, parameters after the last."""

    initial: dict[str, torch.Tensor]
    losses: list[float]
    gradients: dict[str, torch.Tensor]
    parameters: dict[str, torch.Tensor]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """How one row, or what one rank holds of it, differs from the reference; `first` names the first tensor beyond the bound.

    What only all ranks together know: whether the stages hold every tensor (`complete`), and whether all have the same losses.
    """

    row: Row
    seconds: float
    loss: float
    losses_equal: bool = True
    initial_equal: bool
    complete: bool = True
    loss_difference: float
    gradients: float
    parameters: float
    first: str

    def passed(self, dtype: str) -> bool:
        """Whether every difference is within the bounds of this dtype."""
        bound = BOUNDS[dtype]
        near = self.loss_difference <= bound["loss"] and self.gradients <= bound["gradients"] and self.parameters <= bound["parameters"]
        return near and self.losses_equal and self.initial_equal and self.complete


def difference(a: torch.Tensor, b: torch.Tensor, largest: float) -> float:
    """max|a - b| / max(max|b|, largest / 1000), `largest` being the largest value among all tensors of b's kind; infinite for NaN."""
    apart = (a.double() - b.double()).abs().max().nan_to_num(nan=torch.inf, posinf=torch.inf)
    return float(apart) / max(float(b.double().abs().max()), largest / 1000)


def sample(model: ModelConfig, train: TrainConfig, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A global batch of random tokens; some targets are left out, unevenly, and the first sample has none at all."""
    generator = torch.Generator().manual_seed(1000 + step)
    ids = torch.randint(model.vocab, (train.global_batch, train.seq + 1), generator=generator)
    targets = ids[:, 1:].clone()
    targets[torch.rand(targets.shape, generator=generator) < 0.3] = IGNORE_INDEX
    targets[0] = IGNORE_INDEX
    return ids[:, :-1].contiguous(), targets


def groups_of(model: torch.nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """AdamW groups as anyone writes them: weight decay for matrices only."""
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]


def one_process(config: ModelConfig, train: TrainConfig, dtype: torch.dtype, device: torch.device) -> Reference:
    """Plain PyTorch in float64 on one device: the model in nothing but torch, F.cross_entropy, clip_grad_norm_, torch.optim.AdamW.

    `dtype` is what the initial values are rounded to, so that a layout in bf16 starts from the same ones.
    """
    model = Llama(config, dtype=dtype, device=device)
    initialize_(model, train.seed)
    model.double()
    initial = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.AdamW(groups_of(model, train.weight_decay), lr=train.lr, betas=train.betas, eps=train.eps)
    losses, gradients = [], {}
    for step in range(STEPS):
        ids, targets = (part.to(device) for part in sample(config, train, step))
        masks = Masks(train.dropout, train.seed, mask_counter(step), 0, len(ids)) if train.dropout else None
        logits = plain.logits(dict(model.named_parameters()), config, ids, masks)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE_INDEX)
        loss.backward()
        if step == 0:
            gradients = {name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None}
        torch.nn.utils.clip_grad_norm_(model.parameters(), train.max_norm or float("inf"))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return Reference(
        initial=initial, losses=losses, gradients=gradients, parameters={name: p.detach() for name, p in model.named_parameters()}
    )


def compare(row: Row, reference: Reference, dtype: str, device: str) -> Outcome:
    """Run one row on all ranks and compare; every rank returns the same outcome."""
    began = time.monotonic()
    train = dataclasses.replace(row.train(dtype), seed=SEED)
    mesh = init_mesh(tp=row.tp, pp=row.pp, dp=row.dp, device=device)
    try:
        engine = parallelize(Llama(row.model, device="meta"), mesh, train)
        initial = dict(engine.whole_parameters())  # to the end, whatever is found: all ranks take part in each of them
        initial_equal = all(torch.equal(value, reference.initial[name].to(value.dtype)) for name, value in initial.items())
        losses, found = [], {}
        for step in range(STEPS):
            batch = tuple(part.chunk(mesh.dp.size)[mesh.dp.rank] for part in sample(row.model, train, step))
            loss, _ = engine.forward_backward(batch, last=step > 0)  # type: ignore[arg-type]  # gradients of the first are read first
            if step == 0:
                found = dict(engine.whole_gradients())
            engine.optimizer_step()
            losses.append(loss)
        gradients, wrong_gradient = worst(found, reference.gradients, BOUNDS[dtype]["gradients"])
        parameters, wrong_parameter = worst(dict(engine.whole_parameters()), reference.parameters, BOUNDS[dtype]["parameters"])
        expected = torch.tensor(reference.losses, dtype=torch.float64)
        mine = Outcome(
            row=row,
            seconds=time.monotonic() - began,
            loss=losses[-1],
            initial_equal=initial_equal,
            loss_difference=difference(torch.tensor(losses, dtype=torch.float64), expected, float(expected.max())),
            gradients=gradients,
            parameters=parameters,
            first=f"gradient of {wrong_gradient}" if wrong_gradient else wrong_parameter,
        )
        tensors = len(found) if mesh.tp.rank == mesh.dp.rank == 0 else 0  # one rank speaks for a stage
        return agree(mesh, mine, losses, tensors, len(reference.gradients))
    finally:
        mesh.close()


def worst(values: dict[str, torch.Tensor], reference: dict[str, torch.Tensor], bound: float) -> tuple[float, str]:
    """The largest difference over this rank's tensors, and the name of the first beyond the bound."""
    largest = max(float(t.double().abs().max()) for t in reference.values())
    differences = {name: difference(value, reference[name], largest) for name, value in values.items()}
    return max(differences.values(), default=0.0), next((name for name, value in differences.items() if value > bound), "")


def agree(mesh: Mesh, mine: Outcome, losses: list[float], tensors: int, expected: int) -> Outcome:
    """The outcome of all ranks together, from each rank's own, its losses and the number of gradients that it speaks for."""
    numbers = [mine.loss_difference, mine.gradients, mine.parameters, float(not mine.initial_equal), float(tensors), *losses]
    rows = exchange_numbers(torch.tensor(numbers, dtype=torch.float64), mesh, "comparing outcomes")
    loss_difference, gradients, parameters, unequal = rows[:, :4].amax(0).tolist()
    return dataclasses.replace(
        mine,
        losses_equal=bool((rows[:, 5:] == rows[0, 5:]).all()),
        initial_equal=not unequal,
        complete=int(rows[:, 4].sum()) == expected,
        loss_difference=loss_difference,
        gradients=gradients,
        parameters=parameters,
        first=next(filter(None, exchange_text(mine.first, mesh)), ""),
    )


def run(world: int, *, all_rows: bool, device: str, json_file: str | None) -> int:
    """Compare every row on the ranks that are here. Returns 0 when all agree, 1 otherwise."""
    dtype = "bfloat16" if device == "cuda" else "float64"
    rows = every_row(world) if all_rows else covering_rows(every_row(world))
    if device == "cpu":
        torch.set_num_threads(1)
    mesh = init_mesh(dp=world, device=device)
    console = Console(file=sys.stdout, quiet=mesh.rank != 0, width=None if sys.stdout.isatty() else 140)

    @functools.cache
    def reference(model: ModelConfig, train: TrainConfig) -> Reference:
        return one_process(model, train, DTYPES[dtype], mesh.device)

    outcomes = []
    began = told = time.monotonic()
    begins = f"{len(rows)} layouts of {world} ranks, {dtype} on {device}"
    if mesh.rank == 0 and not console.is_terminal:
        print(begins, file=sys.stderr, flush=True)
    with console.status(begins) as status:
        for number, row in enumerate(rows, 1):
            train = row.train(dtype)
            alone = TrainConfig(
                seq=train.seq, global_batch=train.global_batch, lr=train.lr, dropout=train.dropout, seed=SEED
            )  # all that one process has
            outcomes.append(compare(row, reference(row.model, alone), dtype, device))
            gc.collect()  # an engine refers to itself; until it goes, so do its groups, each with threads and sockets
            done = f"{number} of {len(rows)} layouts of {world} ranks done"
            status.update(done)
            if mesh.rank == 0 and not console.is_terminal and time.monotonic() - told >= TELL:
                print(done, file=sys.stderr, flush=True)
                told = time.monotonic()
    failed = [outcome for outcome in outcomes if not outcome.passed(dtype)]
    console.print(table(outcomes, dtype))
    seconds = time.monotonic() - began
    console.print(
        f"{len(outcomes) - len(failed)} of {len(outcomes)} layouts agree with one process in {dtype} ({seconds:.0f} s); "
        f"largest difference allowed: {', '.join(f'{what} {bound:g}' for what, bound in BOUNDS[dtype].items())}"
    )
    if json_file and mesh.rank == 0:
        write_json(json_file, [dataclasses.asdict(outcome) for outcome in outcomes])
    mesh.close()
    return 1 if failed else 0


def table(outcomes: list[Outcome], dtype: str) -> Table:
    """One line a row; a row that differs names a tensor."""
    legend = (
        "zero: stage of ZeRO, m: with every microbatch; sched: pipeline schedule; sp: sequence parallel; tied: head and embedding; "
        "kv: fewer KV heads than tp ranks; rec.: recompute; drop: dropout; d: largest difference; s: seconds"
    )
    shown = Table(title="Each layout against one process", caption=legend, caption_justify="left", box=None, padding=(0, 1, 0, 0))
    for name in ("tp", "pp", "dp", "zero", "sched", "sp", "tied", "kv", "rec.", "drop", "loss", "d loss", "d grads", "d param", "s", ""):
        shown.add_column(name, justify="left" if name in ("sched", "") else "right", no_wrap=bool(name), overflow="fold")
    for outcome in outcomes:
        row, good = outcome.row, outcome.passed(dtype)
        reasons = [outcome.first] if outcome.first else []
        reasons += [] if outcome.initial_equal else ["initial weights differ"]
        reasons += [] if outcome.complete else ["not every tensor is there"]
        reasons += [] if outcome.losses_equal else ["loss differs between ranks"]
        flags = [
            f"{row.zero_stage}{'' if row.zero_once_a_step else 'm'}",
            _short(row.schedule, 7),
            *("yes" if flag else "no" for flag in (row.sequence_parallel, row.tied, row.few_kv)),
            _short(row.recompute, 4),
            f"{row.dropout:g}",
        ]
        numbers = [
            f"{outcome.loss:.4f}",
            *(f"{value:.1e}" for value in (outcome.loss_difference, outcome.gradients, outcome.parameters)),
            f"{outcome.seconds:.1f}",
        ]
        verdict = "ok" if good else f"DIFFERS: {', '.join(reasons) or 'loss'}"
        shown.add_row(str(row.tp), str(row.pp), str(row.dp), *flags, *numbers, verdict, style=None if good else "bold red")
    return shown


def _short(word: str, width: int) -> str:
    """The word, or its beginning and a dot: the table fits into 80 columns."""
    return word if len(word) <= width else f"{word[: width - 1]}."

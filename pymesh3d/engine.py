"""`parallelize` and `Engine.train_step`: the whole recipe in the order it is carried out. Reading starts here."""

from __future__ import annotations

import dataclasses
import functools
import math
import resource
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch

from pymesh3d.comm.agree import exchange_numbers, exchange_text
from pymesh3d.comm.collectives import all_reduce_, gather_rows
from pymesh3d.comm.links import Expected
from pymesh3d.comm.p2p import Links
from pymesh3d.comm.watch import fetched, looked_after
from pymesh3d.comm.whole import whole
from pymesh3d.config import ModelConfig, TrainConfig, validate
from pymesh3d.dp.zero import Zero
from pymesh3d.errors import ConfigError, DistributedError
from pymesh3d.initial import materialize
from pymesh3d.mesh import Mesh
from pymesh3d.models.dropout import Masks
from pymesh3d.models.llama import Llama, initialize_, plan
from pymesh3d.ops.dropout import mask_counter
from pymesh3d.placement import Placement, place, placement_of
from pymesh3d.planner.model import layer_parameters
from pymesh3d.pp.run import Microbatch, run
from pymesh3d.pp.stage import Stage, keep_layers
from pymesh3d.rendezvous import require_equal
from pymesh3d.schedule.actions import Action
from pymesh3d.schedule.partition import partition
from pymesh3d.schedule.schedules import build
from pymesh3d.tp.loss import vocab_parallel_cross_entropy
from pymesh3d.tp.plan import parallelize_module

IGNORE_INDEX = -100
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}

Optimizer = Callable[[Iterable[dict[str, Any]]], torch.optim.Optimizer]


def parallelize(model: Llama, mesh: Mesh, config: TrainConfig | None = None, *, optimizer: Optimizer | None = None) -> Engine:
    """Spread a model over the mesh, in place, and return what trains it.

    A model on the meta device gets its initial values from `config.seed`; one with values keeps those of the mesh's first rank.
    `optimizer` makes a torch optimizer from parameter groups (default: AdamW with the values of `config`), as `Zero` says.
    Raises ConfigError, before any communication, when model, layout and training do not fit together.
    """
    config = TrainConfig() if config is None else config
    for given, kind, instead in (
        (model, Llama, "For a model of your own use parallelize_module and Zero"),
        (mesh, Mesh, "Use the mesh that init_mesh returns"),
        (config, TrainConfig, "Use a TrainConfig, or leave it out"),
    ):
        if not isinstance(given, kind):
            what = f"a {type(given).__name__} where a {kind.__name__} belongs"
            raise ConfigError(what, "parallelize(model, mesh, config) is for the reference model", instead)
    if any(hasattr(parameter, "main_grad") for parameter in model.parameters()):
        raise ConfigError(
            "a model that has been parallelized before", "its parameters lie in the buffers of another Engine", "Make a new one"
        )
    validate(model.config, mesh.layout, config)
    if optimizer is not None and not callable(optimizer):
        raise ConfigError(f"optimizer={optimizer!r}", "it must make an optimizer from parameter groups", "Use torch.optim.AdamW, or None")
    held = held_layers(model.config, mesh.pp.size, config.virtual_pp)
    _require_trained(model, held)
    require_equal(exchange_text(f"{model.config} {config}", mesh), "configuration")
    adamw = functools.partial(torch.optim.AdamW, lr=config.lr, betas=config.betas, eps=config.eps, fused=mesh.device.type == "cuda")
    on_meta = any(parameter.is_meta for parameter in model.parameters())

    # Tensor parallelism first, on the whole model: names and ties are those of the unsharded one, and nothing is allocated yet.
    parallelize_module(model, mesh, plan(config.vocab_multiple), sequence_parallel=config.sequence_parallel)
    if model.config.tied and mesh.pp.size > 1 and model.embed is not None:
        ends = (0, mesh.pp.size - 1)  # the embedding stands on the first stage, the head on the last; both get the sum of the gradients
        (weight,) = model.embed.parameters()
        place(weight, dataclasses.replace(placement_of(weight), stages=ends))
        mesh.select(mesh.pp, ends)
    # Then this stage's layers; what other ranks run is dropped before memory is taken for it.
    own = [layer for layers in held[mesh.pp.rank] for layer in layers]
    keep_layers(model, own, first=mesh.pp.rank == 0, last=mesh.pp.rank == mesh.pp.size - 1)
    model.to(dtype=DTYPES[config.dtype])
    if on_meta:
        materialize(model, mesh.device)
        initialize_(model, config.seed, mesh.tp.rank)
    else:
        model.to(device=mesh.device)
    # Recompute and compilation wrap each layer's forward, so they come once the layers are what they will be.
    model.recompute = config.recompute
    if config.compile:
        for layer in model.layers.values():
            layer.forward = torch.compile(layer.forward)  # and not layer.compile(): what stage 3 hooks on stays outside
    # Data parallelism last: it moves the parameters into its flat buffers.
    zero = Zero(
        model,
        mesh,
        stage=config.zero_stage,
        optimizer=adamw if optimizer is None else optimizer,
        weight_decay=config.weight_decay,
        reduce_dtype=DTYPES[config.reduce_dtype] if config.reduce_dtype else None,
        accumulate_dtype=DTYPES[config.accumulate_dtype] if config.accumulate_dtype else None,
        param_remainders=config.param_remainders,
        offload=config.optimizer_offload,
        once_a_step=mesh.pp.size > 1 if config.zero_once_a_step is None else config.zero_once_a_step,
    )
    return Engine(model, mesh, config, zero)


def stage_layers(model: ModelConfig, stages: int) -> list[range]:
    """Which layers each stage runs, balanced by cost: the head weighs as many layers as its matrix has of a layer's numbers."""
    return partition([1.0] * model.layers, stages, last=model.vocab * model.dim / layer_parameters(model))


def held_layers(model: ModelConfig, pp: int, virtual_pp: int) -> list[list[range]]:
    """The layers of each rank's stages: of `pp * virtual_pp` stages, every `pp`th."""
    stages = stage_layers(model, pp * virtual_pp)
    return [stages[rank::pp] for rank in range(pp)]


def _parameters(model: Llama, layers: Iterable[int], *, first: bool, last: bool) -> list[torch.nn.Parameter]:
    """Of these layers, and of what stands before them on the first stage, and after them on the last."""
    modules: list[torch.nn.Module | None] = [model.embed] * first + [model.layers[str(number)] for number in layers]
    modules += [model.norm, model.head] * last
    return [parameter for module in modules if module is not None for parameter in module.parameters()]


def _require_trained(model: Llama, held: Sequence[Sequence[range]]) -> None:
    """Refuse a rank with nothing to train: its optimizer would be empty while the others wait for it. Raises ConfigError."""
    for rank, stages in enumerate(held):
        own = [number for layers in stages for number in layers]
        if not any(parameter.requires_grad for parameter in _parameters(model, own, first=rank == 0, last=rank == len(held) - 1)):
            parts = ["embed"] * (rank == 0) + [f"layer {number}" for layers in stages for number in layers]
            parts += ["norm", "head"] * (rank == len(held) - 1)
            instead = "Leave requires_grad of one of these on"
            if len(held) > 1 and len(stages) == 1:
                instead += ", or use schedule='interleaved' with virtual_pp=2, which gives each rank early and late layers"
            raise ConfigError(
                f"pp={len(held)} with all parameters of rank {rank} along pp frozen ({', '.join(parts)})",
                "each rank must have something to train",
                instead,
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepResult:
    """What a step did, the same on every rank: mean loss over valid tokens of the global batch, gradient norm, tokens, taken or not.

    A batch without any valid target has loss and norm 0; its step is taken, and weight decay acts.
    """

    loss: float
    grad_norm: float
    tokens: int
    taken: bool


class Engine:
    """A model on a mesh. `train_step` takes one optimizer step; `forward_backward` and `optimizer_step` are its two halves.

    `memory_gib` is what the fullest rank had in use at most, up to the end of the last backward.
    """

    def __init__(self, model: Llama, mesh: Mesh, config: TrainConfig, zero: Zero) -> None:
        self.model, self.mesh, self.config, self.zero = model, mesh, config, zero
        self.links = Links(mesh, ring=config.virtual_pp > 1)
        self._schedules: dict[tuple[str, int, bool], list[tuple[Action, ...]]] = {}
        self._divisor = torch.ones((), dtype=torch.int64, device=mesh.device)
        self._veto = torch.zeros((), dtype=torch.float64, device=mesh.device)  # NaN from what no step may be taken of
        leaders = np.broadcast_to(mesh.ranks[:1, :, :1, :1], mesh.ranks.shape)  # the first rank of each one's dp coordinate
        self._leaders = torch.from_numpy(leaders.flatten()).to(mesh.device)
        self.memory_gib = 0.0
        self._calls = 0  # of forward_backward since the last optimizer step
        self._compared = False  # the shapes of the ranks' batches, for good
        held = held_layers(model.config, mesh.pp.size, config.virtual_pp)[mesh.pp.rank]
        last = mesh.pp.size * config.virtual_pp - 1
        self.stages: dict[int, Stage] = {}  # of this rank, by their number in the pipeline
        self._trained: dict[int, list[torch.nn.Parameter]] = {}  # by each
        for number, layers in zip(range(mesh.pp.rank, last + 1, mesh.pp.size), held, strict=True):
            part = functools.partial(model, layers=layers)
            self.stages[number] = Stage(part, first=number == 0, last=number == last, loss=self._loss)
            self._trained[number] = _parameters(model, layers, first=number == 0, last=number == last)

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The torch optimizer over this rank's flat master weights; learning-rate schedulers of torch work on it."""
        return self.zero.optimizer

    def train_step(self, batch: tuple[torch.Tensor, torch.Tensor]) -> StepResult:
        """One step on this dp rank's share of the global batch: (token ids [B, S], targets [B, S], -100 where there is none)."""
        told = self._forward_backward(batch, last=True)  # so the host need not wait twice
        grad_norm, taken = self.optimizer_step()
        loss, tokens = told()
        return StepResult(loss=loss, grad_norm=grad_norm, tokens=tokens, taken=taken)

    def forward_backward(self, batch: tuple[torch.Tensor, torch.Tensor], *, last: bool = False) -> tuple[float, int]:
        """Add the gradients of one global batch's mean loss. Returns that loss and the number of tokens, the same on every rank.

        Called several times before `optimizer_step`, the gradients add up. With `last`, for the last time before that, dp ranks exchange
        them meanwhile.
        """
        return self._forward_backward(batch, last=last)()

    def _forward_backward(self, batch: tuple[torch.Tensor, torch.Tensor], *, last: bool) -> Callable[[], tuple[float, int]]:
        self._require_ready(train=True)
        with looked_after("a step", self.mesh):
            microbatches = self._prepare(batch, train=True)
            self._calls += 1
            return self._run(self._steps(self.config.schedule, len(microbatches)), microbatches, train=True, last=last)

    def optimizer_step(self) -> tuple[float, bool]:
        """Sum the gradients, agree on their norm, and update unless it is not finite. Returns the norm and whether a step was taken."""
        self._require_ready(train=True)
        self._calls, veto = 0, self._veto
        self._veto = torch.zeros_like(veto)
        with looked_after("an update", self.mesh):
            try:
                return self.zero.step(self.config.max_norm, veto=veto)
            except ConfigError:  # before anything was sent
                raise
            except BaseException as error:
                self.mesh.fail(error)
                raise

    def eval_step(self, batch: tuple[torch.Tensor, torch.Tensor]) -> float:
        """The mean loss over the valid tokens of a global batch, without gradients and dropout; the same on every rank."""
        self._require_ready(train=False)
        schedule = "gpipe" if self.config.virtual_pp == 1 else self.config.schedule
        with looked_after("an evaluation", self.mesh):
            microbatches = self._prepare(batch, train=False)
            return self._run(self._steps(schedule, len(microbatches), forward_only=True), microbatches, train=False)()[0]

    def whole_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every parameter of this stage, unsharded, by its full name. All ranks of the stage must iterate to the end.

        A weight that is tied over stages is the first one's.
        """
        with self.zero.whole():
            for parameter, placement in self._own():
                yield placement.name, whole(parameter, placement, self.mesh.tp)

    def whole_gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        """What `optimizer_step` is going to use: every gradient of this stage, reduced and unsharded, by its parameter's full name."""
        grads = self.zero.reduced_grads()
        for _, placement in self._own():
            if placement.zero is not None:
                bucket, start = placement.zero
                shape = torch.Size(placement.local_shape())
                local = grads[bucket][start : start + shape.numel()].view(shape)
                yield placement.name, whole(local, placement, self.mesh.tp)

    def _own(self) -> Iterator[tuple[torch.nn.Parameter, Placement]]:
        """Parameters of this stage, without copies of what stands on an earlier one."""
        for parameter in self.model.parameters():
            placement = placement_of(parameter)
            if not placement.stages or placement.stages[0] == self.mesh.pp.rank:
                yield parameter, placement

    def state(self) -> dict[str, torch.Tensor]:
        """What this rank must keep to go on exactly: its master weights, the optimizer's state, and the number of steps taken."""
        return self.zero.state()

    def load_state(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Go on from what `state` gave, without gradients. All ranks must call."""
        self.zero.load_state(tensors)
        self.zero.zero_grad()
        self._veto = torch.zeros_like(self._veto)
        self._calls = 0

    def _steps(self, schedule: str, microbatches: int, *, forward_only: bool = False) -> list[tuple[Action, ...]]:
        """What this rank does in a step of so many microbatches."""
        key = (schedule, microbatches, forward_only)
        if key not in self._schedules:
            built = build(schedule, self.mesh.pp.size, microbatches, self.config.virtual_pp)
            self._schedules[key] = (built.forwards if forward_only else built).steps(self.mesh.pp.rank)
        return self._schedules[key]

    def _require_ready(self, *, train: bool) -> None:
        """Refuse, before ranks wait for each other, what cannot end well. Raises ConfigError, DistributedError after a failed step."""
        self.mesh.require_in_step()
        _ = self.mesh.all.group  # a closed mesh has none, and says so; one process would not notice
        if train and torch.is_inference_mode_enabled():
            raise ConfigError(
                "training within torch.inference_mode()",
                "no gradient can go through tensors that are made there, nor can they be changed later",
                "Train outside of it; eval_step may stay inside, and torch.no_grad() is for both",
            )

    def _prepare(self, batch: tuple[torch.Tensor, torch.Tensor], *, train: bool) -> list[Microbatch]:
        batch = self._checked(batch)
        self._compare_shapes(batch[0].shape)
        ids, targets = (part.to(self.mesh.device, torch.int64, non_blocking=True) for part in batch)
        self._divisor = all_reduce_((targets != IGNORE_INDEX).sum(), self.mesh.dp).wait().clamp(min=1)
        number = math.ceil(ids.shape[0] / self.config.micro_batch)
        held = ids.shape[1] // (self.mesh.tp.size if self.config.sequence_parallel else 1)
        dtype = DTYPES[self.config.dtype]
        first, dim = self.mesh.dp.rank * ids.shape[0], self.model.config.dim
        microbatches = []
        for part, (i, t) in enumerate(zip(ids.tensor_split(number), targets.tensor_split(number), strict=True)):
            masks = self._masks(first, self.mesh.dp.size * ids.shape[0], held) if train and self.config.dropout else None
            microbatches.append(Microbatch(i, t, Expected((held * i.shape[0], dim), dtype, part), masks))
            first += i.shape[0]
        return microbatches

    def _compare_shapes(self, shape: torch.Size) -> None:
        """Raise DistributedError where ranks of one dp coordinate have batches of different shapes: what they exchange does not fit.

        All ranks take part, since none can know that another's shape has changed. Off GPUs in every step: gloo ends the process when a
        message has another size than expected. On GPUs once, since the host waits for it; there the time limit ends a later step.
        """
        if self._compared or self.mesh.layout.world == self.mesh.dp.size:  # then nobody shares a batch
            return
        shapes = exchange_numbers(torch.tensor(shape), self.mesh, "comparing batches")
        self._require_one_batch([tuple(one) for one in shapes.tolist()], "shape of batch")
        self._compared = self.mesh.device.type == "cuda"

    def _masks(self, first: int, samples: int, held: int) -> Masks:
        """What dropout drops of the samples from `first` on, of which this rank holds `held` tokens each."""
        position = self.mesh.tp.rank * held if self.config.sequence_parallel else 0
        counter = mask_counter(self.zero.steps_taken, self._calls)
        return Masks(self.config.dropout, self.config.seed, counter, first, samples, position)

    def _checked(self, batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        if not (isinstance(batch, tuple | list) and len(batch) == 2 and all(isinstance(part, torch.Tensor) for part in batch)):
            raise ConfigError(f"a batch of type {type(batch).__name__}", "it must be two torch tensors", "Give (token ids, targets)")
        ids, targets = batch
        for part in batch:
            if part.is_meta or part.layout != torch.strided:
                kind = "on the meta device" if part.is_meta else f"with layout {part.layout}"
                instead = "Give it values" if part.is_meta else "Use .to_dense()"
                raise ConfigError(f"a batch {kind}", "its tensors must be dense and hold values", instead)
        if not {ids.dtype, targets.dtype} <= {torch.int32, torch.int64}:
            raise ConfigError(
                f"token ids of {ids.dtype}, targets of {targets.dtype}", "both must be whole numbers, int32 or int64", "Use .long()"
            )
        if ids.ndim != 2 or ids.shape != targets.shape or not ids.numel():
            raise ConfigError(
                f"token ids {tuple(ids.shape)}, targets {tuple(targets.shape)}",
                "both must be [batch, sequence], alike and not empty",
                "Use .view(batch, sequence)",
            )
        if self.config.sequence_parallel and ids.shape[1] % self.mesh.tp.size:
            longer = math.ceil(ids.shape[1] / self.mesh.tp.size) * self.mesh.tp.size
            raise ConfigError(
                f"sequence of {ids.shape[1]}, tp={self.mesh.tp.size}, sequence_parallel=True",
                "tp must divide the sequence",
                f"Pad it to {longer}, with targets -100",
            )
        vocab = self.model.config.vocab
        if ids.device.type == "cpu" and targets.device.type == "cpu":  # elsewhere a look would have to wait for the device
            for what, values in (("token ids", ids), ("targets", targets[targets != IGNORE_INDEX])):
                if values.numel() and not 0 <= int(values.min()) <= int(values.max()) < vocab:
                    raise ConfigError(
                        f"{what} from {int(values.min())} to {int(values.max())}",
                        f"the model's vocabulary has {vocab} entries",
                        f"Use 0..{vocab - 1}, and {IGNORE_INDEX} where there is no target",
                    )
        return ids, targets

    def _loss(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Sum over this microbatch's valid tokens, divided by their number in the whole global batch."""
        rows, labels = logits.transpose(0, 1).flatten(0, 1), targets.t().reshape(-1)
        summed = vocab_parallel_cross_entropy(rows, labels, IGNORE_INDEX, reduction="sum", mesh=self.mesh, vocab=self.model.config.vocab)
        return summed / self._divisor

    def _run(
        self, steps: Sequence[Sequence[Action]], microbatches: Sequence[Microbatch], *, train: bool, last: bool = False
    ) -> Callable[[], tuple[float, int]]:
        """What waits for the loss and the number of tokens of all ranks. Its errors are those of `_agree_on_loss`."""
        last_pass = (lambda stage: self.zero.last_pass(self._trained[stage])) if last else lambda _: nullcontext()
        loss = run(steps, self.stages, self.links, microbatches, train=train, last_pass=last_pass)
        return self._agree_on_loss(loss, microbatches)

    def _agree_on_loss(self, loss: torch.Tensor, microbatches: Sequence[Microbatch]) -> Callable[[], tuple[float, int]]:
        """What waits for the sums of what the ranks report of a step: losses and tokens.

        It raises DistributedError where ranks of one dp coordinate had different batches, and with dropout where one had more samples. No
        step is taken then, though the host may have asked for it before.
        """
        mesh = self.mesh
        first = mesh.tp.rank == 0  # tp ranks hold the same losses and tokens, and stages the same tokens: one speaks for all
        mine = _Report(
            loss=loss if first else 0,
            tokens=sum(microbatch.ids.numel() for microbatch in microbatches) if first and mesh.pp.rank == 0 else 0,
            batch=_fingerprint(microbatches),
            samples=sum(len(microbatch.ids) for microbatch in microbatches),
            memory_gib=_peak_memory_gib(mesh),
        )
        row = torch.stack([value if isinstance(value, torch.Tensor) else torch.full_like(loss, value) for value in mine])
        rows = gather_rows(row, mesh.all)
        told, drops = fetched(rows, "loss", mesh.all), microbatches[0].masks is not None  # evaluation draws none
        batches, samples = (rows[:, _Report._fields.index(name)] for name in ("batch", "samples"))
        differ = (batches != batches[self._leaders]).any()
        if drops:
            differ = differ | (samples != samples[0]).any()
        self._veto = self._veto.masked_fill(differ, math.nan)

        def wait() -> tuple[float, int]:
            reports = [_Report(*numbers) for numbers in told().tolist()]
            self._require_one_batch([report.batch for report in reports], "batch")
            if drops:
                self._require_equal_sizes(reports)
            self.memory_gib = max(report.memory_gib for report in reports)
            return sum(report.loss for report in reports), int(sum(report.tokens for report in reports))

        return wait

    def _require_one_batch(self, of_ranks: Sequence[object], what: str) -> None:
        """Raise DistributedError where ranks of one dp coordinate do not have the same."""
        for coordinate in range(self.mesh.dp.size):
            ranks = self.mesh.ranks[:, coordinate].flatten().tolist()
            others = [rank for rank in ranks if of_ranks[rank] != of_ranks[ranks[0]]]
            if others:
                raise DistributedError(
                    f"ranks {others} had another {what} than rank {ranks[0]}, and all have dp coordinate {coordinate}. "
                    "Choose a rank's batch by mesh.dp.rank, not by its rank"
                )

    def _require_equal_sizes(self, reports: Sequence[_Report]) -> None:
        sizes = [int(reports[rank].samples) for rank in self.mesh.ranks[0, :, 0, 0]]
        if len(set(sizes)) > 1:
            raise DistributedError(
                f"samples of each dp coordinate: {sizes}. With dropout, whose masks belong to places in the global batch, they must be "
                "equal. Give every dp rank as many samples"
            )


class _Report(NamedTuple):
    """What each rank tells all others after a step."""

    loss: Any  # a number, or before it is told a float64 tensor [] on the device
    tokens: Any
    batch: Any  # a number that tells batches apart
    samples: Any
    memory_gib: Any


def _peak_memory_gib(mesh: Mesh) -> float:
    """The most that this process has had in use: of the GPU, or of the host where there is none."""
    if mesh.device.type == "cuda":  # torch.cuda.max_memory_allocated takes longer: it first sorts a hundred other statistics
        allocated = float(torch.cuda.memory_stats_as_nested_dict(mesh.device)["allocated_bytes"]["all"]["peak"])
        return (allocated + mesh.shared_bytes) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**30 if sys.platform == "darwin" else 2**20)


def _fingerprint(microbatches: Sequence[Microbatch]) -> torch.Tensor:
    """A number that tells batches apart, float64 []: the sum of token ids and targets, each times its place."""
    values = torch.cat([part.flatten() for microbatch in microbatches for part in (microbatch.ids, microbatch.targets)])
    return (values * torch.arange(1, values.numel() + 1, device=values.device)).sum().double()

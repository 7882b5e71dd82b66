"""A plan puts parallel layers into a user's own model: same numbers, ties kept, replicas equal, mistakes named."""

from __future__ import annotations

import copy
import functools
import hashlib
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from pymesh3d.comm.whole import whole
from pymesh3d.dp.zero import Zero
from pymesh3d.errors import ConfigError
from pymesh3d.mesh import Mesh, init_mesh
from pymesh3d.placement import placement_of
from pymesh3d.tp.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from pymesh3d.tp.loss import vocab_parallel_cross_entropy
from pymesh3d.tp.plan import Column, Norm, Row, Style, Vocab, parallelize_module
from tests.plain import assert_near

Ranks = Callable[..., list[Any]]

V, D, PAD = 19, 8, 3


class Mine(nn.Module):
    """A user's model that knows nothing of ranks: padding row, biases, a tied head with a bias, buffers of odd dtypes, a frozen scale."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(V, D, padding_idx=PAD, dtype=torch.float64)
        self.norm = nn.LayerNorm(D, dtype=torch.float64)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(D, 4 * D), nn.GELU(), nn.Linear(4 * D, D)) for _ in range(2)).double()
        self.scale = nn.Parameter(torch.rand(D, dtype=torch.float64), requires_grad=False)
        self.head = nn.Linear(D, V, dtype=torch.float64)
        self.head.weight = self.table.weight
        self.register_buffer("mask", torch.rand(5, 5) > 0.5)
        self.register_buffer("angles", torch.randn(3, 2, dtype=torch.complex64))
        self.register_buffer("count", torch.randint(1000, ()))
        self.register_buffer("strided", torch.randn(4, 6).T)
        self.register_buffer("repeated", torch.randn(1, 3).expand(2, 3))
        self.register_buffer("low", torch.randn(3).bfloat16(), persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        h = self.norm(self.table(ids)) * self.scale
        for block in self.blocks:
            h = h + block(h)
        return self.head(h)


def plan() -> dict[str, Style]:
    return {
        "table": Vocab(vocab_multiple=2),
        "norm": Norm(),
        "blocks.*.0": Column(),
        "blocks.*.2": Row(),
        "head": Column(vocab_multiple=2),
    }


def seeded(seed: int) -> Mine:
    torch.manual_seed(seed)
    return Mine()


def batch(step: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    ids, target = torch.randint(V, (2, 4, 6), generator=generator)
    ids[0, 0], target[0, 0] = PAD, -100
    return ids, target


def agrees_with_plain(kind: str, sequence_parallel: bool) -> None:
    """Loss, gradients and, after one step of SGD, parameters."""
    mesh = init_mesh(tp=2, dp=-1, device="cpu")
    other = init_device_mesh("cpu", (mesh.dp.size, 2), mesh_dim_names=("dp", "tp"))
    accepted = {"Mesh": mesh, "slice": other["tp"], "DeviceMesh": other}[kind]
    ids, target = batch()
    plain = seeded(7)
    expected = F.cross_entropy(plain(ids).flatten(0, 1), target.flatten())
    expected.backward()
    first = mesh.rank == 0 if kind == "Mesh" else mesh.tp.rank == 0
    module = seeded(7 if first else 70 + mesh.rank)  # those of the first rank count
    module = parallelize_module(module, accepted, plan(), sequence_parallel=sequence_parallel)
    assert module.head.weight is module.table.weight
    logits = module(ids)
    loss = vocab_parallel_cross_entropy(logits.flatten(0, 1), target.flatten(), mesh=accepted, vocab=V)
    loss.backward()
    assert_near({"loss": loss.detach()}, {"loss": expected.detach()})
    grads = {}
    for name, parameter in module.named_parameters():
        placement = placement_of(parameter)
        assert torch.equal(whole(parameter, placement, mesh.tp), dict(plain.named_parameters())[name])
        assert placement.name == name
        if parameter.grad is not None:
            grad = parameter.grad
            if placement.partial and placement.replicated:
                grad = grad.clone()
                torch.distributed.all_reduce(grad, group=mesh.tp.group)
            grads[name] = whole(grad, placement, mesh.tp)
    assert_near(grads, {name: p.grad for name, p in plain.named_parameters() if p.grad is not None})
    assert grads.keys() == {name for name, p in plain.named_parameters() if p.grad is not None}
    assert placement_of(module.head.weight).tied == "table.weight"
    assert placement_of(module.norm.weight).tied is None
    mesh.close()


@pytest.mark.parametrize("kind", ["Mesh", "slice", "DeviceMesh"])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_users_model_computes_the_same(ranks: Ranks, kind: str, sequence_parallel: bool) -> None:
    ranks(4 if kind == "DeviceMesh" else 2, agrees_with_plain, kind, sequence_parallel)


def warnings_of(plans: list[dict[str, Any]], sequence_parallel: bool) -> list[list[str]]:
    """What is said of a model with a norm and a frozen one."""
    mesh, said = init_mesh(tp=2, dp=1, device="cpu"), []
    for styles in plans:
        handler = Kept()
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.LayerNorm(4), nn.LayerNorm(4).requires_grad_(False))
        logging.getLogger("pymesh3d").addHandler(handler)
        parallelize_module(model, mesh, styles, sequence_parallel=sequence_parallel)
        logging.getLogger("pymesh3d").removeHandler(handler)
        said.append(handler.said)
    mesh.close()
    return said


class Kept(logging.Handler):
    """Warnings."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


def test_what_sequence_parallelism_leaves_partial_is_said(ranks: Ranks) -> None:
    layers: dict[str, Any] = {"0": Column(), "1": Row()}
    for said in ranks(2, warnings_of, [layers, {**layers, "2": Norm()}], True):
        assert len(said[0]) == 1 and "the plan does not name 2.weight, 2.bias: " in said[0][0] and "Use Norm()" in said[0][0]
        assert said[1] == []
    assert ranks(2, warnings_of, [layers], False) == [[[]], [[]]]


def hashes(module: nn.Module) -> dict[str, str]:
    """By name, of every parameter and buffer that this rank holds."""
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return {
        name: hashlib.sha256(t.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, t in tensors.items()
    }


def trained(steps: int, sequence_parallel: bool) -> list[tuple[set[str], dict[str, str]]]:
    """What is replicated over tp, and hashes, after wrapping and after some steps; this rank's construction is its own."""
    mesh = init_mesh(tp=2, dp=2, device="cpu")
    torch.manual_seed(1000 + mesh.rank)
    module = parallelize_module(Mine(), mesh, plan(), sequence_parallel=sequence_parallel)
    same = {name for name, p in module.named_parameters() if placement_of(p).replicated} | {name for name, _ in module.named_buffers()}
    seen = [(same, hashes(module))]
    zero = Zero(module, mesh, stage=1, optimizer=functools.partial(torch.optim.AdamW, lr=1e-2), weight_decay=0.1)
    for step in range(steps):
        ids, target = (part.chunk(2)[mesh.dp.rank] for part in batch(step))
        vocab_parallel_cross_entropy(module(ids).flatten(0, 1), target.flatten(), mesh=mesh, vocab=V).backward()
        zero.step()
    seen.append((same, hashes(module)))
    mesh.close()
    return seen


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_replicas_stay_equal_whatever_each_rank_was_seeded_with(ranks: Ranks, sequence_parallel: bool) -> None:
    """Over dp all is the same; over tp what is whole."""
    found = ranks(4, trained, 5, sequence_parallel)
    for after in (0, 1):
        hashes_of = [seen[after][1] for seen in found]
        same = found[0][after][0]
        assert {"norm.weight", "norm.bias", "blocks.0.2.bias", "scale", "mask", "angles", "count", "strided", "repeated", "low"} <= same
        for left, right in ((0, 2), (1, 3)):
            assert hashes_of[left] == hashes_of[right]
        for name in same:
            assert hashes_of[0][name] == hashes_of[1][name], name
    assert found[0][0][1]["norm.bias"] != found[0][1][1]["norm.bias"], "it was trained"
    assert found[0][0][1]["scale"] == found[0][1][1]["scale"], "it was frozen"


def first_of_all(sizes: dict[str, int]) -> bool:
    """Whether every rank, also of another stage, ends with what rank 0 constructed."""
    mesh = init_mesh(device="cpu", **sizes)
    torch.manual_seed(1000 + mesh.rank)
    module = parallelize_module(Mine(), mesh, plan())
    expected = seeded(1000)
    same = [torch.equal(whole(p, placement_of(p), mesh.tp), q) for p, q in zip(module.parameters(), expected.parameters(), strict=True)]
    same += [torch.equal(a, b) for a, b in zip(module.buffers(), expected.buffers(), strict=True)]
    mesh.close()
    return all(same)


def test_all_values_are_those_of_rank_0(ranks: Ranks) -> None:
    assert ranks(8, first_of_all, {"pp": 2, "dp": 2, "tp": 2}) == [True] * 8


class Ties(nn.Module):
    """One module under two names, and two modules that share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = self.again = nn.Linear(D, D, dtype=torch.float64)
        self.up = nn.Linear(D, D, dtype=torch.float64)
        self.twin = nn.Linear(D, D, dtype=torch.float64)
        self.twin.weight = self.up.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.twin(self.up(self.again(self.first(x))))


ALL = {name: Column(gather_output=True) for name in ("first", "again", "up", "twin")}


def tied() -> list[str]:
    mesh = init_mesh(tp=2, dp=1, device="cpu")
    torch.manual_seed(3)
    plain, x = Ties(), torch.randn(5, D, dtype=torch.float64)
    plain(x).square().sum().backward()
    torch.manual_seed(3)
    module = parallelize_module(Ties(), mesh, ALL)
    assert module.first.weight is module.again.weight
    assert module.first.bias is module.again.bias
    assert module.up.weight is module.twin.weight
    assert module.up.bias is not module.twin.bias
    module(x).square().sum().backward()
    grads = {name: whole(p.grad, placement_of(p), mesh.tp) for name, p in module.named_parameters()}
    assert_near(grads, {name: p.grad for name, p in plain.named_parameters()})
    assert {name: p.shared for name, p in module.named_parameters()} == {
        "first.weight": True, "first.bias": True, "up.weight": True, "up.bias": False, "twin.bias": False,
    }  # fmt: skip
    texts = []
    for wrong in (
        {"first": Column()},
        {"up": Row()},
        {**ALL, "twin": Row()},
        {**ALL, "twin": Column(parts=(2, 6))},
        {"up": Column(), "twin": Norm()},
    ):
        with pytest.raises(ConfigError) as refused:
            parallelize_module(Ties(), mesh, wrong)
        texts.append(str(refused.value))
    mesh.close()
    return texts


def test_shared_weights_stay_shared_or_are_refused(ranks: Ranks) -> None:
    why = ".weight: shares its weight with a module that is cut otherwise. Give both the same style and padding"
    assert ranks(2, tied) == [[f"{name}{why}" for name in ("again", "twin", "twin", "twin", "twin")]] * 2


class Doubled(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


def mistakes() -> list[str]:
    mesh = init_mesh(tp=2, dp=1, device="cpu")
    texts = []
    for wrong in (
        {"blocks.*.1.up": Column()},
        {"table": Column()},
        {"head": Vocab()},
        {"norm": Row()},
        {"blocks": Column()},
        {"blocks.0.0": Column(heads=3)},
        {"blocks.0.0": None},
        {"*": Column()},
        {0: Column()},
        [Column(), Row()],
        None,
    ):
        with pytest.raises(ConfigError) as refused:
            parallelize_module(Mine(), mesh, wrong)  # type: ignore[arg-type]
        texts.append(str(refused.value))
    hooked, twice = nn.Linear(4, 4), nn.Sequential(Doubled(4, 4))
    hooked.register_forward_hook(lambda *_: None)
    encoder = nn.TransformerEncoderLayer(8, 2, 16)
    for module, wrong in (
        (nn.Sequential(hooked), {"0": Column()}),
        (twice, {"0": Row()}),
        ([hooked], {"0": Row()}),
        (encoder, {"linear1": Column()}),
    ):
        with pytest.raises(ConfigError) as refused:
            parallelize_module(module, mesh, wrong)  # type: ignore[arg-type]
        texts.append(str(refused.value))
    for wrong in ({"": Column()}, {"x": Column()}):
        with pytest.raises(ConfigError) as refused:
            parallelize_module(nn.Linear(2, 2), mesh, wrong)
        texts.append(str(refused.value))
    mesh.close()
    return texts


def test_mistakes_in_a_plan_are_named(ranks: Ranks) -> None:
    names = "table, norm, blocks, blocks.0, blocks.0.0, blocks.0.1, blocks.0.2, blocks.1, blocks.1.0, blocks.1.1, blocks.1.2, head"
    linear = "nn.Linear inside the module. Those are blocks.0.0, blocks.0.2, blocks.1.0, blocks.1.2, head"
    own = "it matches the module itself, which cannot be replaced in place, and Column is for nn.Linear inside the module"
    no_plan = (
        "a plan maps patterns of module names to styles. Use a dict, {'head': Norm()}, or with Column(), Row(), Vocab() where they fit"
    )
    expected = [
        f"pattern 'blocks.*.1.up' in the plan: matches no module. Modules are {names}",
        f"'table': Column in the plan: it matches 'table' (Embedding), and Column is for {linear}",
        "'head': Vocab in the plan: it matches 'head' (Linear), and Vocab is for nn.Embedding inside the module. Those are table",
        f"'norm': Row in the plan: it matches 'norm' (LayerNorm), and Row is for {linear}",
        f"'blocks': Column in the plan: it matches 'blocks' (ModuleList), and Column is for {linear}",
        "out_features=32 of 32 rows in 3 heads: the heads must divide the rows. There can be one of [1, 2, 4, 8, 16, 32]",
        "'blocks.0.0': None in the plan: it is no style. Use Column(), Row(), Vocab() or Norm()",
        f"'*': Column in the plan: {own}{linear.removeprefix('nn.Linear inside the module')}",
        f"pattern 0 in the plan: names of modules are text. Modules are {names}",
        f"plan={[Column(), Row()]!r}: {no_plan}",
        f"plan=None: {no_plan}",
        "0 with hooks: they would be lost with the module. Add them after parallelize_module",
        "'0': Row in the plan: it matches '0' (Doubled), and Row is for nn.Linear inside the module. There is none; Norm fits any module",
        "a list as module: a plan is for the modules inside a torch module. Give the nn.Module",
        "linear1 in a TransformerEncoderLayer: that reads the weights inside it itself. "
        "Keep it whole, or write it with layers that are called",
        f"'': Column in the plan: {own}. There is none; Norm fits any module",
        "pattern 'x' in the plan: matches no module. Modules are none",
    ]
    assert ranks(2, mistakes) == [expected] * 2


def replaced() -> None:
    mesh: Mesh = init_mesh(tp=2, dp=1, device="cpu")
    module = Mine().eval()
    norm = module.norm
    assert parallelize_module(module, mesh, {**plan(), "blocks.0.0": Norm()}) is module
    assert [type(module.get_submodule(name)) for name in ("table", "blocks.0.0", "blocks.1.0", "blocks.1.2", "head")] == [
        VocabParallelEmbedding, ColumnParallelLinear, ColumnParallelLinear, RowParallelLinear, ColumnParallelLinear,
    ]  # fmt: skip
    assert module.norm is norm
    assert not any(child.training for child in module.modules())
    first = parallelize_module(Mine(), mesh, {"blocks.0.0": Column(gather_output=True), "blocks.*.0": Norm()})
    assert type(first.blocks[0][0]) is ColumnParallelLinear, "the first pattern that matches counts"
    assert type(first.blocks[1][0]) is nn.Linear
    with torch.device("meta"):
        meta = parallelize_module(Mine(), mesh, plan())
    assert all(parameter.is_meta for parameter in meta.parameters())
    assert meta.head.weight is meta.table.weight
    assert meta.table.weight.shape == (10, D)
    mesh.close()


def test_what_is_replaced_and_what_stays(ranks: Ranks) -> None:
    ranks(2, replaced)


def copied() -> list[object]:
    """A copy trained in place of its original goes the same way, and neither sees what happens to the other."""
    mesh = init_mesh(tp=2, dp=1, device="cpu")
    module = parallelize_module(seeded(7), mesh, plan())
    before, first, kept = hashes(module), copy.deepcopy(module), copy.deepcopy(module)
    assert first.head.weight is first.table.weight and first.head.axis is mesh.tp
    norms = []
    for one in (module, first):
        zero = Zero(one, mesh, stage=1, optimizer=torch.optim.AdamW, weight_decay=0.1)
        ids, target = batch()
        vocab_parallel_cross_entropy(one(ids).flatten(0, 1), target.flatten(), mesh=mesh, vocab=V).backward()
        norms.append(zero.step())
    average = copy.deepcopy(module)  # now a part of the flat buffers
    assert norms[0] == norms[1] and hashes(module) == hashes(first) == hashes(average) and hashes(kept) == before != hashes(module)
    assert all(placement_of(p).zero is None for p in average.parameters())
    parallel = parallelize_module(seeded(7), mesh, plan(), sequence_parallel=True)
    with pytest.raises(ConfigError) as refused:
        copy.deepcopy(parallel)
    other = parallelize_module(seeded(8), mesh, plan(), sequence_parallel=True)
    other.load_state_dict(parallel.state_dict())
    trained_names = [name for name, _ in other.named_parameters()]
    assert [hashes(other)[name] for name in trained_names] == [hashes(parallel)[name] for name in trained_names]
    mesh.close()
    return [str(refused.value)]


def test_a_copy_is_a_model_like_its_original(ranks: Ranks) -> None:
    said = "copy.deepcopy of a VocabParallelEmbedding(19, 8, tp=2, sequence_parallel=True): a model with sequence_parallel=True cannot be "
    said += "copied so. Make another in the same way, and use its load_state_dict(model.state_dict())"
    assert ranks(2, copied) == [[said]] * 2

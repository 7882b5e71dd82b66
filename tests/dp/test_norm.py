"""The gradient norm over stages, shards and replicas, and what clipping makes of it."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from pymesh3d.dp.norm import clip_factor, gradient_norm
from pymesh3d.dp.zero import STAGES, Zero
from pymesh3d.launch import launch
from pymesh3d.mesh import Mesh, init_mesh
from pymesh3d.placement import Part, Placement, place, placement_of

Ranks = Callable[..., list[Any]]
SGD = functools.partial(torch.optim.SGD, lr=1.0)


class Weighted(nn.Module):
    """Parameters, of which matrices are sharded in stage 3."""

    def __init__(self, parameters: dict[str, nn.Parameter]) -> None:
        super().__init__()
        for name, parameter in parameters.items():
            self.register_parameter(name, parameter)

    def forward(self, gradients: dict[str, float]) -> torch.Tensor:
        return torch.stack([(self.get_parameter(name) * value).sum() for name, value in gradients.items()]).sum()


def zero_over(mesh: Mesh, parameters: dict[str, nn.Parameter], gradients: dict[str, float], stage: int) -> Zero:
    """Zero over these parameters, after a backward pass that gives each gradient one number throughout."""
    module = Weighted(parameters)
    matrices = [p for p in parameters.values() if p.ndim == 2]
    zero = Zero(nn.ModuleList([module]), mesh, stage=stage, optimizer=SGD, weight_decay=0.0)
    for parameter in matrices:
        sharded = stage == 3 and mesh.dp.size > 1 and not placement_of(parameter).has_summands
        assert bool(parameter.numel()) != sharded, "in stage 3 a rank keeps a share of it only"
    module(gradients).backward()
    return zero


def values(zero: Zero, *parameters: nn.Parameter) -> list[float]:
    """The first number of each."""
    with zero.whole():
        return [parameter.flatten()[0].item() for parameter in parameters]


def norms_of_stages(stage: int, summands: list[list[float]]) -> tuple[float, float, float]:
    """Stages whose gradients have norms 3 and 4: the norm, the factor for max_norm 1, and this stage's weight after a step of SGD at 1.

    `summands` by pp and dp rank."""
    mesh = init_mesh(pp=2, dp=len(summands[0]), device="cpu")
    weight = nn.Parameter(torch.zeros(1, 1, dtype=torch.float64))
    zero = zero_over(mesh, {"weight": weight}, {"weight": summands[mesh.pp.rank][mesh.dp.rank]}, stage)
    zero.reduce()
    norm = zero.norm()
    factor = clip_factor(norm, 1.0)
    zero.update(factor)
    (after,) = values(zero, weight)
    mesh.close()
    return norm.item(), factor.item(), after


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("summands", [[[3.0], [4.0]], [[1.0, 2.0], [5.0, -1.0]]], ids=str)
def test_stages_are_clipped_by_the_norm_of_all(ranks: Ranks, stage: int, summands: list[list[float]]) -> None:
    norms = [3.0, 3.0, 4.0, 4.0] if len(summands[0]) == 2 else [3.0, 4.0]
    for (norm, factor, weight), own in zip(ranks(len(norms), norms_of_stages, stage, summands), norms, strict=True):
        assert norm == 5.0
        assert factor == 1 / (5 + 1e-6) and abs(factor - 0.2) < 1e-7
        assert weight == -own * factor


def norms_of_shards(stage: int, partial: bool) -> tuple[list[float], list[float]]:
    """tp 2, dp 2: sharded gradients 3 | 4, a replicated one of 12, each the sum over dp (and over tp if `partial`) of what ranks have."""
    mesh = init_mesh(tp=2, dp=2, device="cpu")
    sharded = nn.Parameter(torch.zeros(1, 1, dtype=torch.float64))
    place(sharded, Placement(shape=(2, 1), parts=(Part(size=2),), ranks=2))
    replicated = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    place(replicated, Placement(shape=(1,), ranks=2, partial=partial))
    summands = {  # by dp rank, by tp rank
        "sharded": [[1.0, 6.0], [2.0, -2.0]],
        "replicated": [[1.0, 2.0], [4.0, 5.0]] if partial else [[5.0, 5.0], [7.0, 7.0]],
    }
    mine = {name: values[mesh.dp.rank][mesh.tp.rank] for name, values in summands.items()}
    zero = zero_over(mesh, {"sharded": sharded, "replicated": replicated}, mine, stage)
    zero.reduce()
    norms = [zero.norm(p).item() for p in (2.0, 1.0, math.inf)]
    zero.update()
    after = values(zero, sharded, replicated)
    mesh.close()
    return norms, after


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("partial", [False, True])
def test_sharded_and_replicated_gradients_count_once(ranks: Ranks, stage: int, partial: bool) -> None:
    for rank, (norms, after) in enumerate(ranks(4, norms_of_shards, stage, partial)):
        assert norms == [13.0, 19.0, 12.0]
        assert after == [-3.0 if rank % 2 == 0 else -4.0, -12.0]


def norm_of_tied(stage: int) -> float:
    """One weight under two names, gradient 10 in each of its 8 elements."""
    mesh = init_mesh(dp=2, device="cpu")
    embedding, head = nn.Embedding(4, 2, dtype=torch.float64), nn.Linear(2, 4, bias=False, dtype=torch.float64)
    head.weight = embedding.weight
    zero = Zero(nn.ModuleDict({"embedding": embedding, "head": head}), mesh, stage=stage, optimizer=SGD, weight_decay=0.0)
    (embedding.weight * [3.0, 7.0][mesh.dp.rank]).sum().backward()
    zero.reduce()
    norm = zero.norm().item()
    mesh.close()
    return norm


@pytest.mark.parametrize("stage", STAGES)
def test_a_tied_weight_counts_once(ranks: Ranks, stage: int) -> None:
    for norm in ranks(2, norm_of_tied, stage):
        assert norm == pytest.approx(math.sqrt(800), rel=1e-15)


def norm_of_tied_stages(stage: int, summands: list[list[float]]) -> tuple[float, float]:
    """A weight of 8 elements on both stages, gradients by pp and dp rank: the norm, and the weight after a step of SGD at 1."""
    mesh = init_mesh(pp=2, dp=len(summands[0]), device="cpu")
    weight = nn.Parameter(torch.zeros(2, 4, dtype=torch.float64))
    place(weight, Placement(shape=(2, 4), stages=(0, 1), tied="weight"))
    assert mesh.select(mesh.pp, (0, 1)) is mesh.pp
    zero = zero_over(mesh, {"weight": weight}, {"weight": summands[mesh.pp.rank][mesh.dp.rank]}, stage)
    zero.reduce()
    norm = zero.norm().item()
    zero.update()
    (after,) = values(zero, weight)
    mesh.close()
    return norm, after


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(("summands", "total"), [([[4.0], [6.0]], 10.0), ([[0.5, 1.0], [2.0, 4.0]], 7.5)])
def test_a_weight_tied_over_stages_counts_once(ranks: Ranks, stage: int, summands: list[list[float]], total: float) -> None:
    for norm, weight in ranks(2 * len(summands[0]), norm_of_tied_stages, stage, summands):
        assert norm == pytest.approx(math.sqrt(8 * total * total), rel=1e-15) and weight == -total


def norm_of_unplaced() -> float:
    """A layer that nobody sharded, on two tp ranks: gradient 2 in each of its 4 elements."""
    mesh = init_mesh(tp=2, device="cpu")
    zero = zero_over(mesh, {"weight": nn.Parameter(torch.zeros(4, dtype=torch.float64))}, {"weight": 2.0}, stage=1)
    zero.reduce()
    norm = zero.norm().item()
    mesh.close()
    return norm


def test_a_parameter_that_nobody_sharded_counts_once(ranks: Ranks) -> None:
    assert ranks(2, norm_of_unplaced) == [4.0, 4.0]


def norms_of(values: list[list[float]]) -> list[list[float]]:
    mesh = init_mesh(device="cpu")
    found = [[gradient_norm([torch.tensor([v[mesh.rank]])], mesh, p).item() for p in (2.0, 1.0, math.inf)] for v in values]
    found.append([gradient_norm([], mesh, p).item() for p in (2.0, 1.0, math.inf)])
    mesh.close()
    return found


def test_every_rank_sees_what_is_not_finite_on_one(ranks: Ranks) -> None:
    """Also under the maximum norm."""
    for norms in ranks(2, norms_of, [[1.0, math.nan], [math.nan, 1.0], [1.0, math.inf]]):
        assert all(math.isnan(n) for n in norms[0] + norms[1])
        assert norms[2] == [math.inf] * 3
        assert norms[3] == [0.0] * 3


def norm_of_fused(parts: list[Part], spoiled: int) -> tuple[float, float, bool]:
    """The norm of a fused vector cut over tp 2 whose gradients are all 1, and after element `spoiled` of rank 1 became NaN."""
    mesh = init_mesh(tp=2, device="cpu")
    size = sum(part.size for part in parts)
    placement = Placement(shape=(size,), parts=tuple(parts), ranks=2)
    fused = nn.Parameter(torch.zeros(placement.local_shape(), dtype=torch.float64))
    place(fused, placement)
    zero = zero_over(mesh, {"fused": fused}, {"fused": 1.0}, stage=1)
    zero.reduce()
    norm = zero.norm().item()
    zero.zero_grad()
    if mesh.tp.rank:
        fused.main_grad[spoiled] = math.nan  # type: ignore[attr-defined]
    spoiled_norm, taken = zero.step()
    mesh.close()
    return norm, spoiled_norm, taken


CUT, WHOLE = Part(size=4), Part(size=1, heads=1)


@pytest.mark.parametrize(("parts", "copy"), [([CUT, WHOLE, CUT], 2), ([CUT, WHOLE], 2), ([WHOLE, CUT], 0), ([Part(size=64), WHOLE], 32)])
def test_a_replicated_part_of_a_fused_tensor_counts_once(ranks: Ranks, parts: list[Part], copy: int) -> None:
    """Between parts that are cut, at the end and at the beginning; what is not finite in its copy counts too."""
    expected = math.sqrt(sum(part.size for part in parts))
    for norm, spoiled_norm, taken in ranks(2, norm_of_fused, parts, copy):
        assert norm == pytest.approx(expected, rel=1e-15)
        assert math.isnan(spoiled_norm) and not taken


def norms_beside_copies() -> list[float]:
    mesh = init_mesh(device="cpu")
    counted, found = [torch.tensor([3.0])], []
    for value in (4.0, -math.inf, math.nan):
        copies = [torch.ones(2), torch.tensor([value if mesh.rank else 0.0, 1.0])]
        found += [gradient_norm(counted, mesh, p, copies=copies).item() for p in (1.0, math.inf)]
    mesh.close()
    return found


def test_a_copy_counts_only_if_it_is_not_finite(ranks: Ranks) -> None:
    for finite_sum, finite_largest, *others in ranks(2, norms_beside_copies):
        assert (finite_sum, finite_largest) == (6.0, 3.0)
        assert len(others) == 4 and all(math.isnan(norm) for norm in others)


def norms_of_empty_pieces() -> list[float]:
    """A rank may hold nothing of some parameter: of no numbers, and of them beside 3 and -4."""
    mesh = init_mesh(device="cpu")
    nothing, some = torch.empty(0), torch.tensor([3.0, -4.0])
    kinds = [([nothing], []), ([nothing, some], [nothing, some])]
    found = [gradient_norm(pieces, mesh, p, copies=copies).item() for pieces, copies in kinds for p in (2.0, math.inf)]
    mesh.close()
    return found


def test_an_empty_piece_counts_nothing(ranks: Ranks) -> None:
    assert ranks(1, norms_of_empty_pieces) == [[0.0, 0.0, 5.0, 4.0]]


def norm_of_fine_numbers() -> tuple[float, float]:
    """Of float32 gradients 1 and 2**-13, and of three of 1e30: their squares do not fit into float32."""
    mesh = init_mesh(device="cpu")
    found = [gradient_norm([torch.tensor(values)], mesh).item() for values in ([1.0, 2.0**-13], [1e30] * 3)]
    mesh.close()
    return found[0], found[1]


def test_squares_are_summed_in_float64(ranks: Ranks) -> None:
    for fine, large in ranks(1, norm_of_fine_numbers):
        assert fine == pytest.approx(math.sqrt(1 + 2**-26), rel=1e-15)
        assert large == pytest.approx(math.sqrt(3) * 1e30, rel=1e-7)


def on_a_gpu() -> bool:
    """Of pieces of all sizes, some not aligned: as float64 has it, with the same bits each time; and what is not finite. (On a CPU torch
    sums pairwise, but its norm one after the other: 3e-13 wrong here.)
    """
    mesh = init_mesh()
    flat = torch.randn(20_000_003, generator=torch.Generator().manual_seed(1)) * 1e-3
    cuts = [0, 1, 4, 4, 1001, 70_003, 3_000_001, flat.numel()]
    there = [flat.to(mesh.device)[first:last] for first, last in itertools.pairwise(cuts)]
    for p in (1.0, 2.0, 3.0, math.inf):
        found = [gradient_norm(there, mesh, p).item() for _ in range(2)]
        exact = flat.abs().max().item() if p == math.inf else flat.double().abs().pow(p).sum().pow(1 / p).item()
        assert found[0] == found[1] and abs(found[0] - exact) <= 1e-13 * exact, (p, found, exact)
    assert gradient_norm([torch.full((3,), 1e30, device=mesh.device)], mesh).item() == pytest.approx(math.sqrt(3) * 1e30, rel=1e-7)
    for value in (math.inf, -math.inf, math.nan):
        there[-1][-1] = value
        for p in (1.0, 2.0, math.inf):
            assert not math.isfinite(gradient_norm(there, mesh, p).item())
            assert math.isnan(gradient_norm(there[:3], mesh, p, copies=there).item())
    mesh.close()
    return True


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_norms_on_a_gpu() -> None:
    assert launch(["-c", "from tests.dp.test_norm import on_a_gpu; assert on_a_gpu()"], 1) == 0


def test_clip_factor_follows_torch() -> None:
    for norm, max_norm, expected in ((5.0, 1.0, 1 / (5 + 1e-6)), (0.5, 1.0, 1.0), (0.0, 1.0, 1.0)):
        factor = clip_factor(torch.tensor(norm, dtype=torch.float64), max_norm)
        assert factor.item() == expected

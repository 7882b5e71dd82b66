"""A shard of the sum of all ranks' gradients: rounded where they lie, added up in the order of ranks, for one rank or for all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from pymesh3d.triton_kernels.precision import compute_dtype
from pymesh3d.triton_kernels.zero_reduce import (
    AHEAD,
    FEW,
    TILE,
    reduce_shard,
    reduce_shard_ref,
    round_in_place,
    round_in_place_ref,
    rounded,
)
from tests import kernels
from tests.kernels import DEVICE, bits, both, needs_kernels

MARGIN = 64  # numbers on both sides of each tensor that nobody may read or write
PAIRS = [  # gradients, and what is sent
    (torch.float32, torch.bfloat16),
    (torch.float32, torch.float16),
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.float64, torch.bfloat16),
    (torch.float64, torch.float32),
    (torch.float64, torch.float64),
]
RANKS = [1, 2, 3, 4, 5, 8]
TILES = AHEAD["TILES"] + 3  # of a shard: a program's last turn is not full
PROGRAMS = [1, 2, 5, FEW + 1]  # several turns for one, a turn for each, too many, and in the way of many
Forms = Callable[..., torch.Tensor]


def framed(values: torch.Tensor, margin: float = torch.nan) -> torch.Tensor:
    """The same values between two margins, on the device."""
    whole = torch.full((values.numel() + 2 * MARGIN,), margin, dtype=values.dtype, device=DEVICE)
    whole[MARGIN:-MARGIN] = values.to(DEVICE)
    return whole[MARGIN:-MARGIN]


def frame(inner: torch.Tensor) -> torch.Tensor:
    """What `framed` has made, with the margins."""
    return inner.as_strided((inner.numel() + 2 * MARGIN,), (1,), inner.storage_offset() - MARGIN)


def addresses(tensors: list[torch.Tensor], before: int = 0) -> torch.Tensor:
    """Where each begins, for kernels; or so many bytes before that."""
    return torch.tensor([tensor.data_ptr() - before for tensor in tensors], dtype=torch.int64, device=DEVICE)


def buckets(ranks: int, tiles: int, dtype: torch.dtype, seed: int = 0) -> list[torch.Tensor]:
    """Every rank's gradients, of shards of so many tiles."""
    return [framed(kernels.noise(ranks * tiles * TILE, dtype=dtype, seed=100 * seed + rank)) for rank in range(ranks)]


def part(bucket: torch.Tensor, shard: int, tiles: int) -> torch.Tensor:
    """A shard of a bucket."""
    return bucket[shard * tiles * TILE : (shard + 1) * tiles * TILE]


def in_order(contributions: list[torch.Tensor], wire: torch.dtype, shard: int, tiles: int, added: torch.Tensor | None) -> torch.Tensor:
    """The sum of a shard, as it is added up, before it is rounded."""
    parts = [rounded(bucket, wire)[shard * tiles : (shard + 1) * tiles].reshape(-1) for bucket in contributions]
    total = parts[0].to(compute_dtype(wire))
    for one in parts[1:]:
        total = total + one.to(total.dtype)
    return total if added is None else total + added


def by_kernel(
    contributions: list[torch.Tensor], out: torch.Tensor, wire: torch.dtype, *, shard: int, programs: int = 5, **options: Any
) -> torch.Tensor:
    """The squares that each program has left, of a kernel that runs on the rank of the shard."""
    squares = framed(torch.full((programs,), 12345.0, dtype=torch.float64), margin=7.0)
    options = {"rank": shard} | options
    reduce_shard(addresses(contributions), out, squares, shard=shard, wire=wire, **options)
    assert (frame(squares)[:MARGIN] == 7).all() and (frame(squares)[-MARGIN:] == 7).all(), "squares beside those of the programs"
    return squares


def by_reference(
    contributions: list[torch.Tensor], out: torch.Tensor, wire: torch.dtype, *, shard: int, programs: int = 1, add: bool = False
) -> torch.Tensor:
    """The same in plain torch."""
    tiles = out.numel() // TILE
    parts = [rounded(bucket, wire)[shard * tiles : (shard + 1) * tiles] for bucket in contributions]
    return reduce_shard_ref(parts, out, add=add)[None]


BOTH = both(by_kernel, by_reference)


def squares_of_programs(values: torch.Tensor, programs: int) -> torch.Tensor:
    """What each program finds that takes its turns at a shard."""
    turn = AHEAD["TILES"] if programs <= FEW else 1
    tiles, found = values.double().square().view(-1, TILE).sum(1), torch.zeros(programs, dtype=torch.float64, device=DEVICE)
    return found.index_add(0, torch.arange(len(tiles), device=DEVICE) // turn % programs, tiles)


@pytest.mark.parametrize("form", both(round_in_place, round_in_place_ref))
@pytest.mark.parametrize(("dtype", "wire"), PAIRS)
def test_gradients_are_rounded_to_the_front_of_their_tiles(form: Any, dtype: torch.dtype, wire: torch.dtype) -> None:
    """And the rest stays: of a tile, and beside the bucket."""
    (bucket,) = buckets(1, 3, dtype)
    special = torch.tensor([torch.inf, -torch.inf, -0.0, 1 + 2**-8, 1 + 3 * 2**-8, 1 - 2**-12, 2**-30, 60000.0], dtype=torch.float64)
    bucket[TILE - 4 : TILE + 4] = special.to(dtype)
    before, expected = frame(bucket).clone(), bucket.to(wire)
    form(bucket, wire)
    assert torch.equal(bits(rounded(bucket, wire)), bits(expected.view(-1, TILE)))
    rounded(before[MARGIN:-MARGIN], wire).copy_(expected.view(-1, TILE))
    assert torch.equal(bits(frame(bucket)), bits(before)), "what lies behind and beside it has changed"


def agrees(form: Forms, ranks: int, shard: int, dtype: torch.dtype, wire: torch.dtype, programs: int, *, add: bool) -> bool:
    """The sum in its order, bit for bit, and as it is in float64; its squares; nothing else written; the same bits each time."""
    contributions = buckets(ranks, TILES, dtype)
    exact = torch.stack([part(bucket, shard, TILES).double() for bucket in contributions])
    for bucket in contributions:
        round_in_place_ref(bucket, wire)
        for other in {*range(ranks)} - {shard}:  # of shards that are another's nothing is read
            part(bucket, other, TILES).fill_(torch.nan)
    before = [frame(bucket).clone() for bucket in contributions]
    old = kernels.noise(TILES * TILE, dtype=dtype, seed=50) if add else torch.full((TILES * TILE,), torch.nan, dtype=dtype)
    results = []
    for _ in range(2):
        out = framed(old, margin=7.0)
        results.append((out, form(contributions, out, wire, shard=shard, programs=programs, add=add)))
    (out, squares), (again, squares_again) = results
    added = old.to(DEVICE) if add else None
    assert torch.equal(bits(out), bits(in_order(contributions, wire, shard, TILES, added).to(dtype))), "added up in another order"
    unit = max(torch.finfo(wire).eps, torch.finfo(dtype).eps, torch.finfo(compute_dtype(wire)).eps)
    size = exact.abs().sum(0) + (old.to(DEVICE).double().abs() if add else 0.0)
    assert ((out.double() - exact.sum(0) - (old.to(DEVICE).double() if add else 0.0)).abs() <= ranks * unit * size).all()
    found = squares_of_programs(out, len(squares))
    assert torch.allclose(squares, found, rtol=1e-12, atol=0.0), (squares, found)
    assert torch.equal(bits(again), bits(out)) and torch.equal(bits(squares_again), bits(squares)), "other bits the second time"
    assert (frame(out)[:MARGIN] == 7).all() and (frame(out)[-MARGIN:] == 7).all(), "written beside the result"
    return all(torch.equal(bits(frame(bucket)), bits(old)) for bucket, old in zip(contributions, before, strict=True))


@pytest.mark.parametrize("form", BOTH)
@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("ranks", RANKS)
def test_a_shard_of_any_number_of_ranks(form: Forms, ranks: int, add: bool) -> None:
    for shard in {0, ranks // 2, ranks - 1}:
        assert agrees(form, ranks, shard, torch.float32, torch.bfloat16, 5, add=add)
    assert agrees(form, ranks, 0, torch.bfloat16, torch.bfloat16, 5, add=add)


@pytest.mark.parametrize("form", BOTH)
@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize(("dtype", "wire"), PAIRS)
def test_a_shard_in_any_dtype(form: Forms, dtype: torch.dtype, wire: torch.dtype, add: bool) -> None:
    assert agrees(form, 3, 1, dtype, wire, 5, add=add)


@needs_kernels
@pytest.mark.parametrize("programs", PROGRAMS)
@pytest.mark.parametrize(("dtype", "wire"), [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.bfloat16)])
def test_a_shard_by_any_number_of_programs(dtype: torch.dtype, wire: torch.dtype, programs: int) -> None:
    for add in (False, True):
        assert agrees(by_kernel, 2, 1, dtype, wire, programs, add=add)


def for_all(ranks: int, dtype: torch.dtype, wire: torch.dtype, programs: int, *, add: bool, in_place: bool) -> bool:
    """Rank after rank gives its shard to all; then all have the sums, and nothing else has changed. `in_place`: where contributions lie."""
    contributions = buckets(ranks, TILES, dtype)
    for bucket in contributions:
        round_in_place_ref(bucket, wire)
    copies = contributions if in_place else buckets(ranks, TILES, dtype, seed=1)
    expected = [frame(copy).clone() for copy in copies]
    for rank in range(ranks):
        added = part(copies[rank], rank, TILES).clone() if add else None
        value = in_order(contributions, wire, rank, TILES, added).to(dtype)
        for whole in expected:
            part(whole[MARGIN:-MARGIN], rank, TILES).copy_(value)
        options = {"shard": rank, "add": add, "copies": addresses(copies), "programs": programs}
        squares = by_kernel(contributions, part(copies[rank], rank, TILES), wire, **options)
        found = squares_of_programs(value, programs)
        assert torch.allclose(squares, found, rtol=1e-12, atol=0.0), (squares, found)
        assert all(torch.equal(bits(frame(copy)), bits(whole)) for copy, whole in zip(copies, expected, strict=True)), f"after rank {rank}"
    return True


@needs_kernels
@pytest.mark.parametrize("ranks", RANKS)
def test_all_ranks_get_the_sum(ranks: int) -> None:
    assert for_all(ranks, torch.float32, torch.bfloat16, 5, add=ranks == 3, in_place=False)


@needs_kernels
@pytest.mark.parametrize("programs", [2, FEW + 1])
@pytest.mark.parametrize(("dtype", "wire"), PAIRS)
def test_all_ranks_get_the_sum_where_their_gradients_lie(dtype: torch.dtype, wire: torch.dtype, programs: int) -> None:
    assert for_all(2, dtype, wire, programs, add=False, in_place=True)
    assert for_all(2, dtype, wire, programs, add=True, in_place=False)


@needs_kernels
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_any_rank_adds_up_any_shard(rank: int) -> None:
    """The sum depends on the shard alone."""
    contributions, copies = buckets(3, TILES, torch.float32), buckets(3, TILES, torch.float32, seed=1)
    expected = in_order(contributions, torch.float32, 1, TILES, None)
    by_kernel(contributions, part(copies[rank], 1, TILES), torch.float32, shard=1, rank=rank, copies=addresses(copies))
    assert all(torch.equal(part(copy, 1, TILES), expected) for copy in copies)


@pytest.mark.parametrize("form", BOTH)
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_no_number_stays_in_its_place_and_is_in_the_squares(form: Forms, value: float) -> None:
    contributions = buckets(2, TILES, torch.float32)
    out, clean = framed(torch.zeros(TILES * TILE)), framed(torch.zeros(TILES * TILE))
    form(contributions, clean, torch.float32, shard=1)
    part(contributions[1], 1, TILES)[-1] = value
    squares = form(contributions, out, torch.float32, shard=1)
    assert torch.equal(out[:-1], clean[:-1]) and not out[-1].isfinite()
    assert not squares.sum().isfinite()


@pytest.mark.filterwarnings("ignore:overflow encountered")
@pytest.mark.parametrize("form", BOTH)
def test_squares_are_float64(form: Forms) -> None:
    """Those of large numbers are no float32, and those of small ones are not lost."""
    for scale in (1e30, 1e-30):
        contributions = [bucket.mul_(scale) for bucket in buckets(2, TILES, torch.float32)]
        out = framed(torch.zeros(TILES * TILE))
        squares = form(contributions, out, torch.float32, shard=0)
        assert torch.allclose(squares.sum(), out.double().square().sum(), rtol=1e-12, atol=0.0) and squares.sum() > 0


@needs_kernels
@pytest.mark.parametrize("programs", [2, FEW + 1])
def test_a_shard_far_into_a_bucket(programs: int) -> None:
    """More numbers than an int32 counts lie before it: here they are none's memory."""
    shard = 2**31 // TILE
    contributions, copies = buckets(2, 1, torch.float32), buckets(2, 1, torch.float32, seed=1)
    before, margins = 4 * shard * TILE, [frame(copy).clone() for copy in copies]
    squares = torch.full((programs,), torch.nan, dtype=torch.float64, device=DEVICE)
    options = {"shard": shard, "rank": 0, "wire": torch.float32, "copies": addresses(copies, before)}
    reduce_shard(addresses(contributions, before), copies[0][:TILE], squares, **options)
    expected = in_order(contributions, torch.float32, 0, 1, None)
    for copy, whole in zip(copies, margins, strict=True):
        whole[MARGIN : MARGIN + TILE] = expected
        assert torch.equal(bits(frame(copy)), bits(whole))
    assert torch.allclose(squares, squares_of_programs(expected, programs), rtol=1e-12, atol=0.0)


@needs_kernels
def test_what_does_not_belong_together_is_refused() -> None:
    contributions, squares = buckets(2, 2, torch.float32), torch.zeros(2, dtype=torch.float64, device=DEVICE)
    places = addresses(contributions)
    for out in (torch.zeros(TILE + 1, device=DEVICE), torch.zeros(2 * TILE, device=DEVICE)[::2]):
        with pytest.raises(AssertionError, match=str(out.numel())):
            reduce_shard(places, out, squares, shard=0, rank=0, wire=torch.float32)
    narrow = torch.zeros(TILE, dtype=torch.bfloat16, device=DEVICE)
    with pytest.raises(AssertionError, match="wider"):
        reduce_shard(places, narrow, squares, shard=0, rank=0, wire=torch.float32)
    with pytest.raises(AssertionError, match="wider"):
        round_in_place(narrow, torch.float32)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("programs", [1, 32, FEW, 1000, 16384])
@pytest.mark.parametrize(("dtype", "wire"), PAIRS)
def test_large_on_a_gpu(dtype: torch.dtype, wire: torch.dtype, programs: int) -> None:
    """With and without copies, where the gradients lie: the reference's bits, and the same each time."""
    ranks, tiles = 4, 4099
    generator = torch.Generator(DEVICE).manual_seed(0)
    given = [torch.randn(ranks * tiles * TILE, generator=generator, dtype=torch.float32, device=DEVICE).to(dtype) for _ in range(ranks)]
    for _ in range(3):
        contributions, squares = [grads.clone() for grads in given], torch.full((programs,), torch.nan, dtype=torch.float64, device=DEVICE)
        for bucket in contributions:
            round_in_place(bucket, wire)
        for one, whole in zip(contributions, given, strict=True):  # a GPU rounds float64 once, where torch makes a float32 of it before
            found, error = rounded(one, wire).reshape(-1), 0.5 * torch.finfo(wire).eps if wire != dtype else 0.0
            assert torch.equal(found, whole.to(wire)) or (dtype == torch.float64 and wire == torch.bfloat16)
            assert ((found.double() - whole.double()).abs() <= error * whole.double().abs() + torch.finfo(wire).tiny * error).all()
        for rank in range(ranks):
            expected = in_order(contributions, wire, rank, tiles, None).to(dtype)
            out = torch.full_like(expected, torch.nan)
            reduce_shard(addresses(contributions), out, squares, shard=rank, rank=rank, wire=wire)
            assert torch.equal(out, expected)
            mine = part(contributions[rank], rank, tiles)
            reduce_shard(addresses(contributions), mine, squares, shard=rank, rank=rank, wire=wire, copies=addresses(contributions))
            assert all(torch.equal(part(bucket, rank, tiles), expected) for bucket in contributions)
            assert torch.allclose(squares, squares_of_programs(expected, programs), rtol=1e-12, atol=0.0)

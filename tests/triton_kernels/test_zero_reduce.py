"""A shard of the sum of all ranks' gradients: rounded where they lie or by the reader, added up in the order of ranks, for one or all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from pymesh3d.triton_kernels.precision import compute_dtype
from pymesh3d.triton_kernels.zero_reduce import (
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
    (torch.bfloat16, torch.float16),
    (torch.float64, torch.bfloat16),
    (torch.float64, torch.float32),
    (torch.float64, torch.float64),
]
OTHERS = [  # gradients, what is sent, and the sum
    (torch.bfloat16, torch.bfloat16, torch.float32),
    (torch.float32, torch.bfloat16, torch.bfloat16),
    (torch.float32, torch.float16, torch.float64),
    (torch.float64, torch.bfloat16, torch.float32),
    (torch.float64, torch.float64, torch.float32),
]
RANKS = [1, 2, 3, 4, 5, 8]
TILES = 7  # of a shard
PROGRAMS = [1, 2, 5, 65]  # several turns for one, a turn for each, too many, and in the way of many
ROOM = [(1, 1), (1, 5), (2, 3), (2, 65), (64, 65), (3, 8), (65, 68)]  # programs, and places for squares
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


def in_order(
    contributions: list[torch.Tensor],
    wire: torch.dtype,
    shard: int,
    tiles: int,
    added: torch.Tensor | None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """The sum of a shard, as it is added up for a result in `dtype`, before it is rounded."""
    parts = [rounded(bucket, wire)[shard * tiles : (shard + 1) * tiles].reshape(-1) for bucket in contributions]
    total = parts[0].to(compute_dtype(dtype or contributions[0].dtype))
    for one in parts[1:]:
        total = total + one.to(total.dtype)
    return total if added is None else total + added


def sent_by(contributions: list[torch.Tensor], wire: torch.dtype) -> list[torch.Tensor]:
    """What ranks that contribute these send: the same in other memory, rounded."""
    sent = [framed(bucket) for bucket in contributions]
    for bucket in sent:
        round_in_place_ref(bucket, wire)
    return sent


def by_kernel(
    contributions: list[torch.Tensor], out: torch.Tensor, wire: torch.dtype, *, shard: int, places: int = 5, **options: Any
) -> torch.Tensor:
    """What a kernel that runs on the rank of the shard has left in so many places for squares."""
    squares = framed(torch.full((places,), torch.nan, dtype=torch.float64), margin=7.0)
    options = {"rank": shard, "first": shard * (out.numel() // TILE)} | options
    reduce_shard(addresses(contributions), out, squares, wire=wire, **options)
    assert (frame(squares)[:MARGIN] == 7).all() and (frame(squares)[-MARGIN:] == 7).all(), "squares beside those of the programs"
    return squares


def by_reader(contributions: list[torch.Tensor], out: torch.Tensor, wire: torch.dtype, **options: Any) -> torch.Tensor:
    """The same of contributions that nobody has rounded."""
    return by_kernel(contributions, out, wire, rounded=False, **options)


def by_reference(
    contributions: list[torch.Tensor], out: torch.Tensor, wire: torch.dtype, *, shard: int, places: int = 1, add: bool = False
) -> torch.Tensor:
    """The same as `by_kernel` in plain torch."""
    tiles = out.numel() // TILE
    parts = [rounded(bucket, wire)[shard * tiles : (shard + 1) * tiles] for bucket in contributions]
    return reduce_shard_ref(parts, out, add=add)[None]


BOTH = both(by_kernel, by_reference)
ALL = [*BOTH, pytest.param(by_reader, marks=needs_kernels, id="reader")]
KERNELS = [pytest.param(form, marks=needs_kernels, id=name) for form, name in ((by_kernel, "kernel"), (by_reader, "reader"))]


def squares_of_programs(values: torch.Tensor, programs: int, places: int | None = None) -> torch.Tensor:
    """What each program finds that takes its turns at a shard, and zeros in the other places."""
    places = places or programs
    tiles, found = values.double().square().view(-1, TILE).sum(1), torch.zeros(places, dtype=torch.float64, device=DEVICE)
    return found.index_add(0, torch.arange(len(tiles), device=DEVICE) % programs, tiles)


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


@pytest.mark.parametrize("form", both(round_in_place, round_in_place_ref))
@pytest.mark.parametrize(("dtype", "wire"), [pair for pair in PAIRS if pair[0] != pair[1]])
def test_the_largest_number_of_each_tile_is_told(form: Any, dtype: torch.dtype, wire: torch.dtype) -> None:
    """As it is sent; infinite where one is not finite, or too large to be sent."""
    (bucket,) = buckets(1, 6, dtype)
    bucket[5], bucket[TILE + 1], bucket[2 * TILE + 9], bucket[4 * TILE - 1] = -70.0, torch.nan, -torch.inf, 3e38
    bucket[4 * TILE : 5 * TILE] = 0.0
    expected = bucket.to(wire).view(-1, TILE)[:, :].float().abs()
    largest, told = framed(torch.full((6,), torch.nan), margin=7.0), [70.0, torch.inf, torch.inf, torch.inf, 0.0, float(expected[5].max())]
    if wire != torch.float16:
        told[3] = float(expected[3].max())
        assert 2.9e38 < told[3] < torch.inf, "this one can be sent"
    rounded_alone = bucket.clone()
    form(rounded_alone, wire)
    form(bucket, wire, largest)
    assert largest.tolist() == told and torch.equal(bits(bucket), bits(rounded_alone))
    assert (frame(largest) == 7.0).sum() == 2 * MARGIN, "nothing beside it"


def agrees(form: Forms, ranks: int, shard: int, dtype: torch.dtype, wire: torch.dtype, places: int, *, add: bool) -> bool:
    """The sum in its order, bit for bit, and as it is in float64; its squares; nothing else written; the same bits each time."""
    contributions = buckets(ranks, TILES, dtype)
    exact = torch.stack([part(bucket, shard, TILES).double() for bucket in contributions])
    sent = sent_by(contributions, wire)
    if form is not by_reader:
        contributions = sent
    for bucket in contributions:
        for other in {*range(ranks)} - {shard}:  # of shards that are another's nothing is read
            part(bucket, other, TILES).fill_(torch.nan)
    before = [frame(bucket).clone() for bucket in contributions]
    old = kernels.noise(TILES * TILE, dtype=dtype, seed=50) if add else torch.full((TILES * TILE,), torch.nan, dtype=dtype)
    results = []
    for _ in range(2):
        out = framed(old, margin=7.0)
        results.append((out, form(contributions, out, wire, shard=shard, places=places, add=add)))
    (out, squares), (again, squares_again) = results
    added = old.to(DEVICE) if add else None
    assert torch.equal(bits(out), bits(in_order(sent, wire, shard, TILES, added).to(dtype))), "added up in another order"
    unit = max(torch.finfo(wire).eps, torch.finfo(dtype).eps, torch.finfo(compute_dtype(wire)).eps)
    size = exact.abs().sum(0) + (old.to(DEVICE).double().abs() if add else 0.0)
    assert ((out.double() - exact.sum(0) - (old.to(DEVICE).double() if add else 0.0)).abs() <= ranks * unit * size).all()
    found = squares_of_programs(out, len(squares))
    assert torch.allclose(squares, found, rtol=1e-12, atol=0.0), (squares, found)
    assert torch.equal(bits(again), bits(out)) and torch.equal(bits(squares_again), bits(squares)), "other bits the second time"
    assert (frame(out)[:MARGIN] == 7).all() and (frame(out)[-MARGIN:] == 7).all(), "written beside the result"
    return all(torch.equal(bits(frame(bucket)), bits(old)) for bucket, old in zip(contributions, before, strict=True))


@pytest.mark.parametrize("form", ALL)
@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("ranks", RANKS)
def test_a_shard_of_any_number_of_ranks(form: Forms, ranks: int, add: bool) -> None:
    for shard in {ranks // 2} if form is by_reader else {0, ranks // 2, ranks - 1}:
        assert agrees(form, ranks, shard, torch.float32, torch.bfloat16, 5, add=add)
    if form is not by_reader:  # of numbers that have the wire's dtype it is the same
        assert agrees(form, ranks, 0, torch.bfloat16, torch.bfloat16, 5, add=add)


@pytest.mark.parametrize("form", ALL)
@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize(("dtype", "wire"), PAIRS)
def test_a_shard_in_any_dtype(form: Forms, dtype: torch.dtype, wire: torch.dtype, add: bool) -> None:
    assert agrees(form, 3, 1, dtype, wire, 5, add=add)


@pytest.mark.parametrize("form", KERNELS)
@pytest.mark.parametrize("programs", PROGRAMS)
@pytest.mark.parametrize(("dtype", "wire"), [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.bfloat16)])
def test_a_shard_by_any_number_of_programs(form: Forms, dtype: torch.dtype, wire: torch.dtype, programs: int) -> None:
    for add in (False, True):
        assert agrees(form, 2, 1, dtype, wire, programs, add=add)


@pytest.mark.parametrize("form", KERNELS)
@pytest.mark.parametrize(("programs", "places"), ROOM)
def test_fewer_programs_than_places_for_their_squares(form: Forms, programs: int, places: int) -> None:
    """The others are zeros, so that all may be added up."""
    contributions, out = buckets(2, TILES, torch.float32), framed(torch.full((TILES * TILE,), torch.nan))
    sent = sent_by(contributions, torch.bfloat16)
    squares = form(sent if form is by_kernel else contributions, out, torch.bfloat16, shard=1, programs=programs, places=places)
    assert torch.equal(out, in_order(sent, torch.bfloat16, 1, TILES, None))
    found = squares_of_programs(out, programs, places)
    assert torch.allclose(squares, found, rtol=1e-12, atol=0.0), (squares, found)


@needs_kernels
@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered")
@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize(("dtype", "wire"), PAIRS)
def test_who_rounds_does_not_matter(dtype: torch.dtype, wire: torch.dtype, add: bool) -> None:
    """Of ties, numbers that are too large or too small, infinite ones and none, too: by `round_in_place` and by the reader, bit for bit."""
    ties = 1 + torch.tensor([2**-8, 3 * 2**-8, 2**-11, 3 * 2**-11, 2**-24, 2**-8 + 2**-40, 3 * 2**-8 - 2**-40], dtype=torch.float64)
    special = torch.tensor([torch.inf, -torch.inf, torch.nan, 1e39, 3.4e38, 65519.0, 65520.0, 1e-7, 2**-30, -0.0], dtype=torch.float64)
    values = torch.cat((special, ties, -ties))
    contributions = buckets(2, 1, dtype)
    for one, bucket in enumerate(contributions):  # each of the one with each of the other
        part(bucket, 1, 1)[: len(values) ** 2] = (values.repeat(len(values)) if one else values.repeat_interleave(len(values))).to(dtype)
    before = [frame(bucket).clone() for bucket in contributions]
    out, expected = (framed(kernels.noise(TILE, dtype=dtype, seed=50), margin=7.0) for _ in range(2))
    squares = by_reader(contributions, out, wire, shard=1, add=add)
    assert all(torch.equal(bits(frame(bucket)), bits(whole)) for bucket, whole in zip(contributions, before, strict=True)), "written"
    for bucket in contributions:
        round_in_place(bucket, wire)
    squares_expected = by_kernel(contributions, expected, wire, shard=1, add=add)
    assert torch.equal(bits(out), bits(expected)) and torch.equal(bits(squares), bits(squares_expected))
    assert out.isnan().sum() >= 2 * len(values) and (out.isfinite() & (out != 0)).sum() > TILE // 2


@pytest.mark.parametrize("form", KERNELS)
@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize(("accumulated", "wire", "dtype"), OTHERS)
def test_sums_are_of_another_dtype_than_what_is_summed(
    form: Forms, accumulated: torch.dtype, wire: torch.dtype, dtype: torch.dtype, add: bool
) -> None:
    """What lies there is as wide as it was accumulated; the sum is as wide as `out`."""
    contributions = buckets(3, TILES, accumulated)
    sent, old = sent_by(contributions, wire), kernels.noise(TILES * TILE, dtype=dtype, seed=50).to(DEVICE)
    expected = in_order(sent, wire, 1, TILES, old if add else None, dtype).to(dtype)
    contributions = sent if form is by_kernel else contributions
    for copies in (None, buckets(3, TILES, dtype, seed=1)):
        out = framed(old, margin=7.0) if copies is None else part(copies[1], 1, TILES)
        out.copy_(old)
        options = {"accumulated": accumulated, "add": add, "copies": None if copies is None else addresses(copies)}
        squares = form(contributions, out, wire, shard=1, **options)
        assert all(
            torch.equal(bits(one), bits(expected)) for one in ([out] if copies is None else [part(copy, 1, TILES) for copy in copies])
        )
        assert torch.allclose(squares, squares_of_programs(expected, len(squares)), rtol=1e-12, atol=0.0)


@pytest.mark.parametrize("form", KERNELS)
@pytest.mark.parametrize("first", [0, 1, 4, 3 * TILES - 5])
def test_tiles_from_any_on(form: Forms, first: int) -> None:
    """Of a bucket, whatever its shards are: here 5."""
    contributions, copies = buckets(3, TILES, torch.float32), buckets(3, TILES, torch.float32, seed=1)
    sent, before = sent_by(contributions, torch.bfloat16), [frame(copy).clone() for copy in copies]
    expected = in_order(sent, torch.bfloat16, 0, 3 * TILES, None)[first * TILE : (first + 5) * TILE]
    contributions, out = sent if form is by_kernel else contributions, framed(torch.full((5 * TILE,), torch.nan), margin=7.0)
    form(contributions, out, torch.bfloat16, shard=1, first=first)
    assert torch.equal(out, expected) and (frame(out)[:MARGIN] == 7).all() and (frame(out)[-MARGIN:] == 7).all()
    form(contributions, copies[1][first * TILE : (first + 5) * TILE], torch.bfloat16, shard=1, first=first, copies=addresses(copies))
    for copy, whole in zip(copies, before, strict=True):
        whole[MARGIN + first * TILE : MARGIN + (first + 5) * TILE] = expected
        assert torch.equal(bits(frame(copy)), bits(whole))


def for_all(form: Forms, ranks: int, dtype: torch.dtype, wire: torch.dtype, places: int, *, add: bool, in_place: bool) -> bool:
    """Rank after rank gives its shard to all; then all have the sums, and nothing else has changed. `in_place`: where contributions lie."""
    contributions = buckets(ranks, TILES, dtype)
    sent = sent_by(contributions, wire)
    if form is not by_reader:
        contributions = [bucket.copy_(rounded_one) for bucket, rounded_one in zip(contributions, sent, strict=True)]
    copies = contributions if in_place else buckets(ranks, TILES, dtype, seed=1)
    expected = [frame(copy).clone() for copy in copies]
    for rank in range(ranks):
        added = part(copies[rank], rank, TILES).clone() if add else None
        value = in_order(sent, wire, rank, TILES, added).to(dtype)
        for whole in expected:
            part(whole[MARGIN:-MARGIN], rank, TILES).copy_(value)
        options = {"shard": rank, "add": add, "copies": addresses(copies), "places": places}
        squares = form(contributions, part(copies[rank], rank, TILES), wire, **options)
        found = squares_of_programs(value, places)
        assert torch.allclose(squares, found, rtol=1e-12, atol=0.0), (squares, found)
        assert all(torch.equal(bits(frame(copy)), bits(whole)) for copy, whole in zip(copies, expected, strict=True)), f"after rank {rank}"
    return True


@pytest.mark.parametrize("form", KERNELS)
@pytest.mark.parametrize("ranks", RANKS)
def test_all_ranks_get_the_sum(form: Forms, ranks: int) -> None:
    assert for_all(form, ranks, torch.float32, torch.bfloat16, 5, add=ranks == 3, in_place=False)


@pytest.mark.parametrize("form", KERNELS)
@pytest.mark.parametrize(("dtype", "wire", "places"), [(*pair, 2) for pair in PAIRS] + [(*PAIRS[0], 65), (*PAIRS[2], 65)])
def test_all_ranks_get_the_sum_where_their_gradients_lie(form: Forms, dtype: torch.dtype, wire: torch.dtype, places: int) -> None:
    assert for_all(form, 2, dtype, wire, places, add=False, in_place=True)
    assert for_all(form, 2, dtype, wire, places, add=True, in_place=False)


@needs_kernels
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_any_rank_adds_up_any_shard(rank: int) -> None:
    """The sum depends on the shard alone."""
    contributions, copies = buckets(3, TILES, torch.float32), buckets(3, TILES, torch.float32, seed=1)
    expected = in_order(contributions, torch.float32, 1, TILES, None)
    by_kernel(contributions, part(copies[rank], 1, TILES), torch.float32, shard=1, rank=rank, copies=addresses(copies))
    assert all(torch.equal(part(copy, 1, TILES), expected) for copy in copies)


@pytest.mark.parametrize("form", ALL)
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
@pytest.mark.parametrize("form", ALL)
def test_squares_are_float64(form: Forms) -> None:
    """Those of large numbers are no float32, and those of small ones are not lost."""
    for scale in (1e30, 1e-30):
        contributions = [bucket.mul_(scale) for bucket in buckets(2, TILES, torch.float32)]
        out = framed(torch.zeros(TILES * TILE))
        squares = form(contributions, out, torch.float32, shard=0)
        assert torch.allclose(squares.sum(), out.double().square().sum(), rtol=1e-12, atol=0.0) and squares.sum() > 0


@needs_kernels
@pytest.mark.parametrize(("rounded", "wire"), [(True, torch.float32), (False, torch.bfloat16)])
@pytest.mark.parametrize("programs", [2, 65])
def test_a_shard_far_into_a_bucket(programs: int, rounded: bool, wire: torch.dtype) -> None:
    """More numbers than an int32 counts lie before it: here they are none's memory."""
    shard = 2**31 // TILE
    contributions, copies = buckets(2, 1, torch.float32), buckets(2, 1, torch.float32, seed=1)
    before, margins = 4 * shard * TILE, [frame(copy).clone() for copy in copies]
    squares = torch.full((programs,), torch.nan, dtype=torch.float64, device=DEVICE)
    options = {"first": shard, "rank": 0, "wire": wire, "rounded": rounded, "copies": addresses(copies, before)}
    reduce_shard(addresses(contributions, before), copies[0][:TILE], squares, **options)
    expected = in_order(sent_by(contributions, wire), wire, 0, 1, None)
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
            reduce_shard(places, out, squares, first=0, rank=0, wire=torch.float32)
    for programs in (0, -1, 3):
        with pytest.raises(AssertionError, match=f"{programs} programs, 2 places"):
            reduce_shard(places, torch.zeros(TILE, device=DEVICE), squares, first=0, rank=0, wire=torch.float32, programs=programs)
    narrow = torch.zeros(TILE, dtype=torch.bfloat16, device=DEVICE)
    with pytest.raises(AssertionError, match="wider"):
        reduce_shard(places, narrow, squares, first=0, rank=0, wire=torch.float32)
    with pytest.raises(AssertionError, match="wider"):
        reduce_shard(places, squares.new_zeros(TILE), squares, first=0, rank=0, wire=torch.float32, accumulated=torch.bfloat16)
    with pytest.raises(AssertionError, match="wider"):
        round_in_place(narrow, torch.float32)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("programs", [1, 32, 64, 1000, 16384])
@pytest.mark.parametrize(("dtype", "wire"), PAIRS)
def test_large_on_a_gpu(dtype: torch.dtype, wire: torch.dtype, programs: int) -> None:
    """With and without copies, where the gradients lie: the reference's bits, and the same each time."""
    ranks, tiles = 4, 4099
    generator = torch.Generator(DEVICE).manual_seed(0)
    given = [torch.randn(ranks * tiles * TILE, generator=generator, dtype=torch.float32, device=DEVICE).to(dtype) for _ in range(ranks)]
    places = programs + 3
    for _ in range(3):
        contributions, squares = [grads.clone() for grads in given], torch.full((places,), torch.nan, dtype=torch.float64, device=DEVICE)
        for bucket in contributions:
            round_in_place(bucket, wire)
        for one, whole in zip(contributions, given, strict=True):
            assert torch.equal(rounded(one, wire).reshape(-1), whole.to(wire))
        raw = [grads.clone() for grads in given]
        for rank in range(ranks):
            expected = in_order(contributions, wire, rank, tiles, None).to(dtype)
            found = squares_of_programs(expected, programs, places)
            for buckets_read, options in ((contributions, {"rounded": True}), (raw, {"rounded": False})):
                options |= {"first": rank * tiles, "rank": rank, "wire": wire, "programs": programs}
                out, where = torch.full_like(expected, torch.nan), addresses(buckets_read)
                reduce_shard(where, out, squares, **options)
                assert torch.equal(out, expected) and torch.allclose(squares, found, rtol=1e-12, atol=0.0)
                squares.fill_(torch.nan)
                reduce_shard(where, part(buckets_read[rank], rank, tiles), squares, **options, copies=where)
                assert all(torch.equal(part(bucket, rank, tiles), expected) for bucket in buckets_read)
                assert torch.allclose(squares, found, rtol=1e-12, atol=0.0)

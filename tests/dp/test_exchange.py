"""What ranks exchange of buckets, by collectives and over shared memory: the same bits as a loop over the ranks has."""

from __future__ import annotations

import contextlib
import functools
import random
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from pymesh3d.comm.symmetric import SymmetricBuffer
from pymesh3d.dp import shared
from pymesh3d.dp.buckets import Bucket
from pymesh3d.dp.exchange import Collectives, wire_of
from pymesh3d.dp.hierarchical import Hierarchical
from pymesh3d.dp.shared import ALIGNED, SharedMemory
from pymesh3d.mesh import Mesh, init_mesh
from pymesh3d.ops.accumulate import add_to
from pymesh3d.triton_kernels.precision import compute_dtype
from pymesh3d.triton_kernels.zero_reduce import TILE
from tests.kernels import bits, needs_kernels

Ranks = Callable[..., list[Any]]
DOMAINS = {4: 2, 6: 3}  # for a hierarchical exchange: ranks, and how many of them share memory


def each_kind(*worlds: int, larger: Sequence[int] = (4,)) -> pytest.MarkDecorator:
    """Each exchange with its numbers of ranks."""
    plain = [
        pytest.param(kind, world, marks=marks) for kind, marks in ((Collectives, ()), (SharedMemory, needs_kernels)) for world in worlds
    ]
    return pytest.mark.parametrize(("kind", "world"), plain + [pytest.param(Hierarchical, world, marks=needs_kernels) for world in larger])


class Numbers(NamedTuple):
    """What a bucket is of: its parameters, what adds up their gradients, what is asked for as the wire; and what that is then."""

    dtype: torch.dtype
    accumulate: torch.dtype | None
    wire: torch.dtype | None
    sent: torch.dtype


BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
NUMBERS = [
    Numbers(BF16, None, None, BF16),
    Numbers(BF16, None, F32, F32),
    Numbers(F32, None, F16, F16),
    Numbers(F32, None, None, F32),
    Numbers(F32, None, F64, F32),
    Numbers(F64, None, None, F64),
    Numbers(BF16, BF16, None, BF16),
    Numbers(F32, BF16, F32, BF16),
]
FEWER = [NUMBERS[0], NUMBERS[5], NUMBERS[6]]
MORE = [Numbers(F64, None, F32, F32), Numbers(F64, None, BF16, BF16)]


def bucket_of(tiles: int, shards: int, numbers: Numbers = NUMBERS[0]) -> Bucket:
    """One whose shards are of so many tiles."""
    parameter = nn.Parameter(torch.zeros(tiles * shards, TILE, dtype=numbers.dtype))
    bucket = Bucket([parameter], shards=shards, decay=True, accumulate=numbers.accumulate)
    assert bucket.shard_size == tiles * TILE
    return bucket


def contribution(bucket: Bucket, rank: int, turn: int) -> torch.Tensor:
    """What a rank gives: of all magnitudes, so that the order of a sum tells, some of it beyond 16 bits and some not at all."""
    values = torch.randn(bucket.size, generator=torch.Generator().manual_seed(100 * turn + rank), dtype=torch.float64).mul(3).sinh()
    values[rank::7] = 0.0
    return values.to(bucket.grad_dtype)


def by_loop(bucket: Bucket, ranks: int, turns: Sequence[int], sent: torch.dtype, domain: int | None = None) -> torch.Tensor:
    """The sum of a whole bucket: each contribution is rounded once, then added up rank by rank, or so within domains of so many, and domain
    by domain; of several turns one after the other."""
    out: torch.Tensor | None = None
    for turn in turns:
        parts = [contribution(bucket, rank, turn).to(sent).to(compute_dtype(bucket.grad_dtype)) for rank in range(ranks)]
        sums = [functools.reduce(torch.add, parts[first : first + (domain or ranks)]) for first in range(0, ranks, domain or ranks)]
        total = functools.reduce(torch.add, sums)
        out = (total if out is None else total + out.to(total.dtype)).to(bucket.grad_dtype)
    assert out is not None
    return out


def same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.equal(bits(found), bits(expected))


def exchange_of(kind: type, mesh: Mesh, buckets: Sequence[Bucket], *, wire: torch.dtype | None = None, everywhere: bool = False) -> Any:
    if kind is Collectives:
        return Collectives(mesh.dp, mesh.device, wire=wire, everywhere=everywhere)
    if kind is Hierarchical:
        inner, outer = mesh.subgroup(mesh.dp, DOMAINS[mesh.dp.size]), mesh.across(mesh.dp, DOMAINS[mesh.dp.size])
        return Hierarchical(mesh.dp, inner, outer, mesh.device, buckets, wire=wire, everywhere=everywhere)
    return SharedMemory(mesh.dp, mesh.device, buckets, wire=wire, everywhere=everywhere)


def domain_of(kind: type, mesh: Mesh) -> int | None:
    return DOMAINS[mesh.dp.size] if kind is Hierarchical else None


@contextlib.contextmanager
def slow_readers(mesh: Mesh, exchange: Any, buckets: int) -> Iterator[None]:
    """Ranks by turns read late what others have told them of: who does not wait for them has written over it by then."""
    if isinstance(exchange, Collectives):
        yield
        return
    flags = exchange._inner._flags if isinstance(exchange, Hierarchical) else exchange._flags
    wait, late = flags.wait, random.Random(mesh.rank)

    def slowly(index: int, call: int) -> None:
        wait(index, call)
        if index < buckets and late.random() < 0.5:
            time.sleep(0.02)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flags, "wait", slowly)
        yield


MODES = [(beside, last, into_grads) for beside, last in ((False, False), (True, False), (True, True)) for into_grads in (False, True)]


@contextlib.contextmanager
def fetched_at_once(kind: type, mesh: Mesh, tiles: int) -> Iterator[None]:
    """So many tiles of a shard."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared, "FETCHED", (domain_of(kind, mesh) or mesh.dp.size) * tiles * TILE)
        yield


def sums(kind: type, tiles: int, kinds: Sequence[Numbers]) -> list[str]:
    """What is wrong, in all modes: three tiles a shard, of which so many are fetched at once; twice, the second time added to the first."""
    mesh, wrong = init_mesh(device="cpu"), []
    with fetched_at_once(kind, mesh, tiles):
        for numbers in kinds:
            bucket = bucket_of(3, mesh.dp.size, numbers)
            assert wire_of(bucket, numbers.wire) == numbers.sent, numbers
            exchange = exchange_of(kind, mesh, [bucket], wire=numbers.wire)
            (memory,) = exchange.memory([(bucket.size, bucket.grad_dtype)])
            bucket.show_grads(memory)
            for mode in MODES:
                beside, last, into_grads = mode
                out = bucket.shard(memory, mesh.rank) if into_grads else torch.full((bucket.shard_size,), 9.0, dtype=memory.dtype)
                turns = (0,) if into_grads else (0, 1)
                for turn in turns:
                    memory.copy_(contribution(bucket, mesh.rank, turn))
                    exchange.reduce(bucket, out, add=turn > 0, beside=beside, last=last)
                    exchange.finish()
                    exchange.meet()  # before memory is changed that others may read
                expected = bucket.shard(by_loop(bucket, mesh.dp.size, turns, numbers.sent, domain_of(kind, mesh)), mesh.rank)
                if not same(out, expected):
                    wrong.append(f"{numbers} {mode}: {(out != expected).sum()} of {out.numel()}")
                squares = exchange.squares([bucket])
                assert (squares is None) == (kind is not SharedMemory), "only kernels tell squares, where they have the whole sum"
                if squares is not None and not torch.isclose(squares.sum(), out.double().square().sum(), rtol=1e-12):
                    wrong.append(f"{numbers} {mode}: squares {squares.sum()}")
    mesh.close()
    return wrong


@each_kind(2, 3, larger=(4, 6))
def test_each_is_rounded_once_and_summed_in_the_order_of_ranks(ranks: Ranks, kind: type, world: int) -> None:
    """Bit for bit, whether beside a backward pass or not, and by pieces of a shard."""
    tiles = 2 if world in (2, 4) else 8
    assert ranks(world, sums, kind, tiles, NUMBERS if world == 2 else FEWER) == [[]] * world


@each_kind(2)
def test_float64_is_summed_in_float64_whatever_is_sent(ranks: Ranks, kind: type, world: int) -> None:
    assert ranks(world, sums, kind, 8, MORE) == [[]] * world


def test_the_order_of_ranks_tells() -> None:
    bucket = bucket_of(1, 2)
    forward = by_loop(bucket, 3, [0], F32)
    backwards = contribution(bucket, 2, 0) + contribution(bucket, 1, 0) + contribution(bucket, 0, 0)
    assert not torch.equal(forward, backwards), "so the values tell in which order they were summed"


def sums_everywhere(kind: type) -> list[str]:
    """What is wrong where all ranks get all sums."""
    mesh, wrong = init_mesh(device="cpu"), []
    with fetched_at_once(kind, mesh, 1):
        for numbers in FEWER:
            bucket = bucket_of(2, mesh.dp.size, numbers)
            exchange = exchange_of(kind, mesh, [bucket], wire=numbers.wire, everywhere=True)
            (memory,) = exchange.memory([(bucket.size, bucket.grad_dtype)])
            bucket.show_grads(memory)
            for beside, last in ((False, False), (True, False), (True, True)):
                memory.copy_(contribution(bucket, mesh.rank, 0))
                exchange.reduce(bucket, bucket.shard(memory, mesh.rank), beside=beside, last=last)
                exchange.finish()
                exchange.meet()
                if not same(memory, by_loop(bucket, mesh.dp.size, [0], numbers.sent, domain_of(kind, mesh))):
                    wrong.append(f"{numbers} {beside} {last}")
                exchange.meet()
    mesh.close()
    return wrong


@each_kind(3, larger=(4, 6))
def test_all_ranks_get_all_sums_if_asked_to(ranks: Ranks, kind: type, world: int) -> None:
    assert ranks(world, sums_everywhere, kind) == [[]] * world


def several(kind: type) -> list[str]:
    """What is wrong with five buckets of all sizes that are under way at once; some beside a pass, and the last of them."""
    mesh, wrong = init_mesh(device="cpu"), []
    with fetched_at_once(kind, mesh, 2):
        buckets = [bucket_of(tiles, mesh.dp.size, numbers) for tiles, numbers in zip((3, 1, 2, 5, 1), NUMBERS, strict=False)]
        exchange = exchange_of(kind, mesh, buckets)
        for bucket, memory in zip(buckets, exchange.memory([(b.size, b.grad_dtype) for b in buckets]), strict=True):
            bucket.show_grads(memory)
        for turn, beside in enumerate((True, False, True)):
            for number, bucket in enumerate(buckets):
                bucket.grads.copy_(contribution(bucket, mesh.rank, 10 * turn + number))
            with slow_readers(mesh, exchange, len(buckets)):
                for bucket in buckets:
                    exchange.reduce(bucket, bucket.shard(bucket.grads, mesh.rank), beside=beside, last=bucket is buckets[-1])
                exchange.finish()
            for number, bucket in enumerate(buckets):
                expected = by_loop(bucket, mesh.dp.size, [10 * turn + number], wire_of(bucket, None), domain_of(kind, mesh))
                if not same(bucket.shard(bucket.grads, mesh.rank), bucket.shard(expected, mesh.rank)):
                    wrong.append(f"bucket {number} in turn {turn}")
            for chosen in (buckets, buckets[1:4], buckets[3:], [buckets[4], buckets[0]]):
                squares = exchange.squares(chosen)
                exact = sum(bucket.shard(bucket.grads, mesh.rank).double().square().sum() for bucket in chosen)
                if squares is not None and not torch.isclose(squares.sum(), exact, rtol=1e-12):
                    wrong.append(f"squares of {len(chosen)} in turn {turn}")
            exchange.meet()
    mesh.close()
    return wrong


@each_kind(2)
def test_several_are_under_way_at_once(ranks: Ranks, kind: type, world: int) -> None:
    assert ranks(world, several, kind) == [[]] * world


LENT = [1, 3, 1, 2, 1, 2]  # tiles of a shard: memory for two of 1 or 2, which is what overlaps
ORDERS = {"as reserved": [0, 1, 2, 3, 4, 5], "backwards": [5, 4, 3, 2, 1, 0], "mixed": [3, 0, 4, 1, 5, 2]}


def lent(kind: type, order: Sequence[int], opened: int) -> list[str]:
    """What is wrong with gradients in memory that is lent, over and over, to `opened` buckets at once. They are reduced as reserved."""
    mesh, wrong = init_mesh(device="cpu"), []
    with fetched_at_once(kind, mesh, 2):
        buckets = [bucket_of(tiles, mesh.dp.size) for tiles in LENT]
        exchange = exchange_of(kind, mesh, buckets)
        exchange.reserve(buckets)
        outs = [torch.full((bucket.shard_size,), 9.0) for bucket in buckets]
        together = opened == len(order)  # then all are there before the first is reduced
        with slow_readers(mesh, exchange, len(buckets)):
            for turn in range(3):
                for first in range(0, len(order), opened):
                    some = order[first : first + opened]
                    for number in some:
                        buckets[number].show_grads(exchange.lend(buckets[number]).fill_(1e9))
                        if buckets[number].grads.dtype != BF16:
                            wrong.append(f"bucket {number} in turn {turn} was lent {buckets[number].grads.dtype}, not what is sent")
                        buckets[number].freshen()
                        (main_grad,) = (slot.parameter.main_grad for slot in buckets[number].slots)
                        add_to(main_grad, contribution(buckets[number], mesh.rank, 10 * turn + number).view_as(main_grad))
                    for number in sorted(some) if together else some:
                        last = number == (len(order) - 1 if together else order[-1])
                        exchange.reduce(buckets[number], outs[number], add=turn == 1, beside=True, last=last)
                        buckets[number].show_grads(torch.empty(0))
                exchange.finish()
                for number, (bucket, out) in enumerate(zip(buckets, outs, strict=True)):
                    turns = [10 * earlier + number for earlier in ((turn,) if turn != 1 else (0, 1))]
                    if not same(out, bucket.shard(by_loop(bucket, mesh.dp.size, turns, BF16, domain_of(kind, mesh)), mesh.rank)):
                        wrong.append(f"bucket {number} in turn {turn}")
    mesh.close()
    return wrong


@each_kind(2)
@pytest.mark.parametrize(("order", "opened"), [("as reserved", 1), ("mixed", 2), ("backwards", 6)])
def test_memory_is_lent_again_and_again(ranks: Ranks, kind: type, world: int, order: str, opened: int) -> None:
    """Not before all have read it; whichever buckets have it at once, and in whatever order they come."""
    assert ranks(world, lent, kind, ORDERS[order], opened) == [[]] * world


def room() -> tuple[int, list[int], int]:
    """Bytes that ranks share for memory that is lent, and where each bucket is in it."""
    mesh = init_mesh(device="cpu")
    buckets = [bucket_of(tiles, 2) for tiles in (1, 1, 5, 2, 1, 1)]
    exchange = exchange_of(SharedMemory, mesh, buckets)
    before = exchange._flags.shared_bytes
    exchange.reserve([])
    assert exchange._flags.shared_bytes == before, "nothing is made for no buckets"
    exchange.reserve(buckets)
    starts = [exchange.lend(bucket).data_ptr() for bucket in buckets]
    mesh.close()
    return exchange._flags.shared_bytes, [start - min(starts) for start in starts], before


@needs_kernels
def test_there_is_room_for_the_largest_and_a_usual_one(ranks: Ranks) -> None:
    tile = 2 * 2 * TILE  # of a bucket, in bytes, as bfloat16 is sent
    for after_close, places, flags in ranks(2, room):
        assert places == [0, tile, 0, 0, 2 * tile, 3 * tile], places
        assert flags > 0 and after_close == 0, "all is given back with the mesh"


class Sharing(NamedTuple):
    """What `gathered` finds: whether memory is zero and aligned, and gathers are right."""

    zero: bool
    aligned: bool
    shared: bool
    ordinary: bool
    again: bool


def gathered(kind: type) -> Sharing:
    """Shards of two dtypes, collected in memory that ranks share and in their own, twice."""
    mesh = init_mesh(device="cpu")
    rank, ranks = mesh.dp.rank, mesh.dp.size
    exchange = exchange_of(kind, mesh, [bucket_of(1, ranks)])
    wanted = [(ranks * 5, BF16), (ranks * 7, F64), (5, BF16), (7, F64)]
    memory = exchange.memory(wanted)
    zero = not any(flat.any() for flat in memory) and [(flat.numel(), flat.dtype) for flat in memory] == wanted
    aligned = kind is Collectives or not any(flat.data_ptr() % ALIGNED for flat in memory)
    found: dict[str, list[bool]] = {"whole": [], "own": []}
    sent = exchange.gathering([(whole.chunk(ranks)[rank], whole) for whole in memory[:2]])
    own = [torch.full_like(whole, torch.nan) for whole in memory[:2]]
    fetched = exchange.gathering(list(zip(memory[2:], own, strict=True)))
    for turn in (1, 2):
        if rank:
            time.sleep(0.05)
        for whole, shard in zip(memory[:2], memory[2:], strict=True):
            values = torch.arange(whole.numel()).to(whole.dtype) * turn
            whole.chunk(ranks)[rank].copy_(values.chunk(ranks)[rank])
            shard.copy_(values.chunk(ranks)[rank])
        exchange.meet()  # all are here now
        for gathering in (sent, fetched):
            gathering.start()
        for gathering in (sent, fetched):
            gathering.finish()
        exchange.meet()
        right = [torch.arange(whole.numel()).to(whole.dtype) * turn for whole in memory[:2]]
        found["whole"].append(all(torch.equal(whole, one) for whole, one in zip(memory, right, strict=False)))
        found["own"].append(all(torch.equal(one, expected) for one, expected in zip(own, right, strict=True)))
        exchange.meet()
    mesh.close()
    return Sharing(zero, aligned, all(found["whole"]), all(found["own"]), len(found["own"]) == 2)


@each_kind(2, 3, larger=(4, 6))
def test_shards_are_gathered(ranks: Ranks, kind: type, world: int) -> None:
    """In ordinary memory, as layers are, and in shared memory, as what is whole always."""
    for found in ranks(world, gathered, kind):
        assert all(found), found


def where_it_lies() -> bool:
    """Addresses that kernels get, against the memory itself."""
    mesh = init_mesh(device="cpu")
    exchange = exchange_of(SharedMemory, mesh, [bucket_of(1, 3)])
    with pytest.MonkeyPatch.context() as patch:
        made: list[SymmetricBuffer] = []
        patch.setattr(shared, "SymmetricBuffer", lambda *given: made.append(SymmetricBuffer(*given)) or made[-1])
        first, second = exchange.memory([(3, BF16), (4, F64)])
    (buffer,) = made
    for flat, place in ((first, 0), (second, ALIGNED)):
        there = [buffer.part(rank, tuple(flat.shape), flat.dtype, place).data_ptr() for rank in range(3)]
        assert exchange.addresses(flat).tolist() == there and there[mesh.rank] == flat.data_ptr(), place
    assert exchange.memory([]) == [], "it may be nothing"
    mesh.close()
    return True


@needs_kernels
def test_kernels_are_told_where_memory_lies_on_each_rank(ranks: Ranks) -> None:
    assert ranks(3, where_it_lies) == [True] * 3

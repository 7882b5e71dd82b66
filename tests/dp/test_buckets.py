"""Buckets: one layout of parameters, padding and shards, in which every number of the model counts once."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from pymesh3d.dp.buckets import ALIGN, Bucket, make_buckets
from pymesh3d.ops.accumulate import add_to
from pymesh3d.placement import Part, Placement, place, placement_of
from pymesh3d.triton_kernels.zero_reduce import TILE

SHAPES = st.lists(st.one_of(st.tuples(st.integers(1, 300)), st.tuples(st.integers(1, 20), st.integers(1, 20))), min_size=1, max_size=8)


def held(buckets: list[Bucket]) -> list[Bucket]:
    """Buckets with memory."""
    for bucket in buckets:
        bucket.hold_weights(torch.full((bucket.size,), torch.nan, dtype=bucket.dtype))
        bucket.show_grads(torch.zeros(bucket.size, dtype=bucket.grad_dtype))
    return buckets


def is_matrix(parameter: nn.Parameter) -> bool:
    return parameter.ndim >= 2


@given(shapes=SHAPES, shards=st.integers(1, 5), elements=st.integers(1, 2000))
@settings(max_examples=60, deadline=None)
def test_every_parameter_lies_in_one_bucket(shapes: list[tuple[int, ...]], shards: int, elements: int) -> None:
    parameters = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    before = [p.detach().clone() for p in parameters]
    buckets = held(make_buckets(parameters, shards=shards, elements=elements, decays=is_matrix))
    slots = [(number, slot) for number, bucket in enumerate(buckets) for slot in bucket.slots]
    assert sorted(id(slot.parameter) for _, slot in slots) == sorted(map(id, parameters))
    for number, slot in slots:
        assert placement_of(slot.parameter).zero == (number, slot.start)
        assert slot.start % ALIGN == 0 and slot.stop - slot.start == slot.parameter.numel()
        assert buckets[number].decay == is_matrix(slot.parameter)
    for bucket in buckets:
        assert all(a.stop <= b.start for a, b in zip(bucket.slots, bucket.slots[1:], strict=False))
        assert bucket.weights.numel() == bucket.grads.numel() >= bucket.slots[-1].stop
        assert len(bucket.slots) == 1 or sum(slot.parameter.numel() for slot in bucket.slots) <= elements
        shared = [bucket.shard(bucket.weights, rank) for rank in range(shards)]
        assert {part.numel() for part in shared} == {bucket.weights.numel() // shards} and not bucket.weights.numel() % (shards * TILE)
        assert torch.equal(torch.cat(shared), bucket.weights)
    for parameter, old in zip(parameters, before, strict=True):
        assert torch.equal(parameter, old)


def test_parameters_and_gradients_are_views_of_the_flat_buffers() -> None:
    parameters = [nn.Parameter(torch.ones(3, 2)), nn.Parameter(torch.ones(5))]
    (bucket,) = held([Bucket(parameters, shards=2, decay=True)])
    assert (bucket.weights.numel(), bucket.weights.sum()) == (2 * TILE, 11.0), "padding is zero"
    bucket.weights.fill_(7.0)
    bucket.grads.fill_(8.0)
    for parameter in parameters:
        assert (parameter == 7.0).all()
        assert (parameter.main_grad == 8.0).all() and parameter.main_grad.shape == parameter.shape  # type: ignore[attr-defined]
    bucket.shard(bucket.weights, 0).zero_()
    assert parameters[0].sum() == 0.0
    for flat in (bucket.weights.new_empty(0), bucket.weights):
        bucket.show_weights(flat)
        bucket.show_grads(flat)
        assert [p.numel() for p in parameters] == [p.main_grad.numel() for p in parameters] == ([6, 5] if flat.numel() else [0, 0])  # type: ignore[attr-defined]


@given(shapes=SHAPES, given=st.sets(st.integers(0, 7)), twice=st.integers(0, 7))
@settings(max_examples=60, deadline=None)
def test_fresh_memory_holds_what_was_added_and_zeros(shapes: list[tuple[int, ...]], given: set[int], twice: int) -> None:
    """Whatever was in it: nothing of that stays, neither in padding nor where no gradient came."""
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
    bucket = Bucket(parameters, shards=2, decay=True)
    bucket.show_grads(torch.full((bucket.size,), torch.nan))
    for _ in range(2):
        bucket.freshen()
        exact = torch.zeros(bucket.size)
        for number, slot in enumerate(bucket.slots):
            for count in range((number in given) + (number == twice)):
                slot.of(exact).add_(number + count + 1.0)
                add_to(slot.parameter.main_grad, torch.full(slot.shape, number + count + 1.0))  # type: ignore[attr-defined]
        bucket.complete()
        assert torch.equal(bucket.grads, exact)
        bucket.complete()
        assert torch.equal(bucket.grads, exact), "what is complete stays so"


def test_accumulators_are_float32_or_finer() -> None:
    for dtype, wide in ((torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64)):
        (bucket,) = held([Bucket([nn.Parameter(torch.ones(4, dtype=dtype))], shards=1, decay=False)])
        assert (bucket.weights.dtype, bucket.grads.dtype, bucket.master_dtype) == (dtype, wide, wide)


def test_dtypes_and_weight_decay_and_replication_are_kept_apart() -> None:
    kinds = [
        nn.Parameter(torch.ones(2, 2)),
        nn.Parameter(torch.ones(2)),
        nn.Parameter(torch.ones(2, 2, dtype=torch.bfloat16)),
        nn.Parameter(torch.ones(2, 2)),
        nn.Parameter(torch.ones(2, 2)),
    ]
    for parameter in kinds[3:]:
        place(parameter, Placement(shape=(4, 2), parts=(Part(size=4),), ranks=2))
    buckets = make_buckets(kinds, shards=1, elements=1000, decays=is_matrix)
    number = {id(parameter): i for i, parameter in enumerate(kinds)}
    assert [[number[id(slot.parameter)] for slot in bucket.slots] for bucket in buckets] == [[0], [1], [2], [3, 4]]


@st.composite
def placements(draw: st.DrawFn, tp: int) -> Placement:
    """Whole, cut by rows, by columns, by heads with fewer KV heads than ranks, or padded."""
    width, size = draw(st.integers(1, 7)), draw(st.integers(1, tp * 4))
    kv = draw(st.sampled_from([1, max(tp // 2, 1), tp]))
    qkv = (Part(size=tp * 4, heads=tp), Part(size=4 * kv, heads=kv), Part(size=4 * kv, heads=kv))
    return draw(
        st.sampled_from(
            [
                Placement(shape=(31 * width,), ranks=tp),
                Placement(shape=(tp * size, width), parts=(Part(size=tp * size),), ranks=tp),
                Placement(shape=(width, tp * size), dim=1, parts=(Part(size=tp * size),), ranks=tp),
                Placement(shape=(sum(part.size for part in qkv), width), parts=qkv, ranks=tp),
                Placement(shape=(size, width), parts=(Part(size=size, padded=tp * 4),), ranks=tp),
            ]
        )
    )


@given(data=st.data(), tp=st.sampled_from([1, 2, 4]), dp=st.integers(1, 4), elements=st.integers(1, 500))
@settings(max_examples=80, deadline=None)
def test_every_number_is_counted_once_over_all_ranks(data: st.DataObject, tp: int, dp: int, elements: int) -> None:
    """Numbers 1, 2, 3, ... stand for the elements of the unsharded model; what all ranks count must be exactly these (and padding, 0)."""
    wanted = data.draw(st.lists(placements(tp), min_size=1, max_size=5))
    counted, end = [], 1
    wholes = []
    for placement in wanted:
        full = torch.empty(placement.shape)
        full.view(-1).copy_(torch.arange(end, end + full.numel()))
        wholes.append(full)
        end += full.numel()
    for rank in range(tp):
        parameters = []
        for placement, full in zip(wanted, wholes, strict=True):
            parameter = nn.Parameter(torch.empty(placement.local_shape()))
            placement.shard(full, parameter.data, rank)
            place(parameter, placement)
            parameters.append(parameter)
        for bucket in held(make_buckets(parameters, shards=dp, elements=elements, decays=is_matrix)):
            for shard in range(dp):
                own = bucket.shard(bucket.weights, shard)
                counted += [own[start:stop] for start, stop in bucket.counted(rank, 0, shard)]
    numbers = torch.cat(counted)
    assert numbers[numbers != 0].sort().values.tolist() == list(range(1, end))


def test_neighbouring_ranges_are_counted_in_one_piece() -> None:
    """Padding between parameters is zero, so a norm runs over it rather than in many small pieces."""
    bucket = Bucket([nn.Parameter(torch.ones(100)) for _ in range(20)], shards=2, decay=False)
    assert [len(bucket.counted(0, 0, shard)) for shard in range(2)] == [1, 1]

"""Dropout against its definition in single integers, the kernel against its reference bit for bit, and masks that no cut can change."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pymesh3d.errors import ConfigError
from pymesh3d.triton_kernels import backend
from pymesh3d.triton_kernels.dropout import TILE, dropout, dropout_ref, dropped_of, launch
from pymesh3d.triton_kernels.philox import DTYPES, REF_CHUNK, philox4x32_ref
from tests.cuts import draw_cut
from tests.kernels import DEVICE, bits, needs_kernels, noise

KEY, COUNTER = 0xF123456789ABCDEF, 0x8000000700000003
BOTH = [pytest.param(launch, marks=needs_kernels), dropout_ref]
MASK: dict[str, Any] = {"p": 0.3, "key": KEY, "counter": COUNTER}


def special(dtype: torch.dtype) -> torch.Tensor:
    """What arithmetic is not free to treat as it likes; the last is a signalling NaN, which any multiplication would make a quiet one."""
    integer, pattern = {8: (torch.int64, 0x7FF0000000000001), 4: (torch.int32, 0x7F800001), 2: (torch.int16, 0x7F81)}[dtype.itemsize]
    values = torch.tensor([1.5, -0.0, math.inf, -math.inf, math.nan, -math.nan, 1e-40, torch.finfo(dtype).max], dtype=dtype)
    return torch.cat([values.view(integer), torch.tensor([pattern], dtype=integer)]).view(dtype)


def kept(rows: int, cols: int, run: Any = dropout, **mask: Any) -> torch.Tensor:
    """Whether the elements of a whole tensor [rows, cols] are kept."""
    return run(torch.ones(rows, cols, device=DEVICE if run is launch else "cpu"), **MASK | {"global_cols": cols} | mask).cpu() != 0


def slow_half(index: int, key: int, counter: int) -> int:
    """The 16 random bits of one element."""
    words = [torch.tensor([word]) for word in (index // 8 % 2**32, index // 8 // 2**32, counter % 2**32, counter // 2**32)]
    word = int(philox4x32_ref(tuple(words), (key % 2**32, key // 2**32))[index % 8 // 2])
    return word // 2**16 if index % 2 else word % 2**16


def test_the_bits_are_those_of_the_published_vector() -> None:
    words = (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)  # of counter 0 under key 0
    halves = [half for word in words for half in (word & 0xFFFF, word >> 16)]
    for i, half in enumerate(halves):
        for p, stays in ((half / 2**16, True), ((half + 1) / 2**16, False)):
            assert bool(kept(1, 8, p=p, key=0, counter=0)[0, i]) == stays, f"element {i}"


@pytest.mark.parametrize("run", BOTH)
def test_values_are_those_of_the_definition(run: Any) -> None:
    rows, cols, row0, col0, global_cols = 3, 11, 2**30 - 1, 2**31 + 5, 2**32 - 3
    x = noise(rows, cols, dtype=torch.float64)
    t = 19661  # 0.3 * 65536 = 19660.8
    expected = [
        [
            x[r, c].item() * (65536 / (65536 - t)) if slow_half((row0 + r) * global_cols + col0 + c, KEY, COUNTER) >= t else 0.0
            for c in range(cols)
        ]
        for r in range(rows)
    ]
    y = run(x.to(DEVICE if run is launch else "cpu"), **MASK, global_cols=global_cols, row0=row0, col0=col0)
    assert y.tolist() == expected
    assert 0 < sum(value == 0 for row in expected for value in row) < rows * cols


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("shape", "global_cols", "row0", "col0"),
    [
        ((1, 1), 1, 0, 0),
        ((7, 13), 20, 0, 3),
        ((5, 64), 64, 1, 0),  # one row where it is contiguous
        ((9, 24), 64, 3, 16),  # whole groups in every row, more rows than fit a tile of 8
        ((130, 5), 7, 2**31 - 16, 2),  # rows beyond a tile
        ((3, TILE), TILE + 8, 2, 8),  # a full tile across
        ((3, TILE), TILE + 8, 2, 1),  # and one that needs seven more
        ((2, 2 * TILE + 1), 5000, 2**33, 17),
        ((2, 64), 2**31 + 1, 2, 2**30),
        ((4, 8), 2**30, 0, 5),  # the index passes 2^31 within the piece, every argument fits in 32 bits
        ((4, 8), 2**33, 0, 2**33 - 8),  # the number of the group passes 2^32
        ((1000,), 2**40, 0, 2**35 - 501),
        ((1,), 10, 0, 9),
        ((1, 6), 2**63 - 1, 0, 2**63 - 8),
    ],
)
def test_kernel_equals_reference(shape: tuple[int, ...], global_cols: int, row0: int, col0: int, dtype: torch.dtype) -> None:
    x = noise(*shape, dtype=dtype)
    place = {"global_cols": global_cols, "row0": row0, "col0": col0}
    got, expected = launch(x.to(DEVICE), **MASK, **place), dropout_ref(x, **MASK, **place)
    assert torch.equal(bits(got), bits(expected))
    assert x.numel() < 20 or 0.4 < (expected != 0).double().mean() < 1


@needs_kernels
@pytest.mark.parametrize("word", [0, 1, 2**31, 2**32 - 1, 2**32, 2**63, 2**64 - 1])
def test_kernel_takes_every_key_and_counter(word: int) -> None:
    for mask in ({"key": word}, {"counter": word}):
        assert torch.equal(kept(1, 90, launch, **mask), kept(1, 90, dropout_ref, **mask)), f"{mask}"


@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize("run", BOTH)
@pytest.mark.parametrize("dtype", DTYPES)
def test_p_zero_keeps_every_bit(run: Any, dtype: torch.dtype) -> None:
    x = torch.cat([special(dtype), noise(500, dtype=dtype)]).to(DEVICE if run is launch else "cpu")
    y = run(x, **MASK | {"p": 0}, global_cols=509)
    assert torch.equal(bits(y), bits(x))
    assert y.data_ptr() != x.data_ptr()


@needs_kernels
@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("p", [2**-16, 0.1, 0.5, 0.999, 1 - 2**-16])
def test_kernel_rounds_as_the_reference_and_keeps_what_is_no_number(p: float, dtype: torch.dtype) -> None:
    x = torch.cat([special(dtype).repeat(1000), noise(3000, dtype=dtype)])
    got, expected = (run(x.to(device), **MASK | {"p": p}, global_cols=12000) for run, device in ((launch, DEVICE), (dropout_ref, "cpu")))
    assert torch.equal(bits(got), bits(expected))
    dropped = ~kept(1, 12000, p=p)[0]
    assert not bits(expected)[dropped].any(), "what is dropped is +0, whatever it was"
    assert torch.equal(bits(expected)[x.isnan() & ~dropped], bits(x)[x.isnan() & ~dropped])


@pytest.mark.parametrize("dtype", DTYPES)
def test_kept_values_are_rounded_once(dtype: torch.dtype) -> None:
    x, t = noise(4000, dtype=dtype), 6554  # 0.1 * 65536 = 6553.6
    y = dropout(x, **MASK | {"p": 0.1}, global_cols=4000)
    scale = torch.tensor(65536 / (65536 - t), dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    stays = kept(1, 4000, p=0.1)[0]
    assert torch.equal(y[stays], (x.to(scale.dtype) * scale).to(dtype)[stays])
    assert not y[~stays].any()


@pytest.mark.parametrize("run", BOTH)
@pytest.mark.parametrize("step", [1, 2])
def test_any_strides_are_read_and_the_result_is_contiguous(run: Any, step: int) -> None:
    whole = noise(13, 9).to(DEVICE if run is launch else "cpu")
    for view in (whole[2:9, 1:7:step], whole[2:9:step, 1:7].T, whole[:, :1].expand(-1, 20), whole[:5, :5].T):
        place = {"global_cols": view.shape[1] + (view.shape[0] != 5), "row0": 4}
        before = whole.clone()
        got = run(view, **MASK, **place)
        assert torch.equal(bits(got), bits(dropout_ref(view.cpu().contiguous(), **MASK, **place)))
        assert got.is_contiguous() and torch.equal(whole, before)


@pytest.mark.parametrize("run", BOTH)
def test_columns_of_a_wider_tensor_are_read_where_they_lie(run: Any) -> None:
    """They are a whole tensor of 8 columns, whose rows do not follow each other in memory."""
    part = noise(4, 16).to(DEVICE if run is launch else "cpu")[:, :8]
    assert torch.equal(run(part, **MASK, global_cols=8), run(part.contiguous(), **MASK, global_cols=8))


@pytest.mark.parametrize("run", [*BOTH, dropout])
@pytest.mark.parametrize("shape", [(0,), (0, 4), (4, 0), (0, 0)])
def test_an_empty_shard_stays_empty(run: Any, shape: tuple[int, ...]) -> None:
    y = run(torch.empty(shape, dtype=torch.bfloat16), **MASK, global_cols=4)
    assert (y.shape, y.dtype) == (shape, torch.bfloat16)


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_every_cut_gives_slices_of_the_whole(data: st.DataObject) -> None:
    rows, cols, top, left, height, width, row0 = draw_cut(data)
    mask = {
        "key": data.draw(st.integers(0, 2**64 - 1), label="key"),
        "counter": data.draw(st.integers(0, 2**64 - 1), label="counter"),
        "p": data.draw(st.sampled_from([0.1, 0.5, 0.9]), label="p"),
    }
    x = noise(rows, cols, dtype=data.draw(st.sampled_from(DTYPES), label="dtype"))
    whole = dropout_ref(x, row0=row0, global_cols=cols, **mask)
    expected = bits(whole[top : top + height, left : left + width])
    for run in (launch, dropout_ref, dropout) if backend.available else (dropout_ref, dropout):
        shard = x[top : top + height, left : left + width].to(DEVICE if run is launch else "cpu")
        assert torch.equal(bits(run(shard, row0=row0 + top, col0=left, global_cols=cols, **mask)), expected), run.__name__
    flat = dropout_ref(x.flatten(), col0=row0 * cols, global_cols=(row0 + rows) * cols, **mask)
    assert torch.equal(bits(flat), bits(whole).flatten())


@pytest.mark.parametrize("run", BOTH)
@pytest.mark.parametrize("cuts", [(0, 5, 6, 13, 32, 37), (0, 1, 37), (0, 8, 24, 37), (0, 16, 37)])
@pytest.mark.parametrize("dim", [0, 1])
def test_masks_of_shards_together_are_the_whole_mask(dim: int, cuts: tuple[int, ...], run: Any) -> None:
    whole = kept(37, 37)
    shards = []
    for start, end in pairwise(cuts):
        shape, place = ((end - start, 37), {"row0": start}) if dim == 0 else ((37, end - start), {"col0": start})
        shards.append(run(torch.ones(shape, device=DEVICE if run is launch else "cpu"), **MASK, global_cols=37, **place).cpu() != 0)
    assert torch.equal(torch.cat(shards, dim), whole)


def test_chunks_of_the_reference_do_not_show() -> None:
    chunk = 8 * REF_CHUNK
    flat = kept(1, 2 * chunk + 24)[0]
    halves = torch.ones(2, chunk + 12)
    wide = dropout_ref(halves[:, : chunk + 7], **MASK, global_cols=chunk + 12) != 0  # cuts columns, and one row a chunk
    assert torch.equal(wide, flat.view(2, -1)[:, : chunk + 7])
    narrow = dropout_ref(torch.ones(20_000, 3), **MASK, global_cols=13, col0=9) != 0  # cuts rows
    assert torch.equal(narrow, flat[: 20_000 * 13].view(-1, 13)[:, 9:12])


def test_threads_and_calls_do_not_show() -> None:
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 3, 3):
            torch.set_num_threads(threads)
            results.append(kept(1, 200_000))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[0], results[1]) and torch.equal(results[1], results[2])


@pytest.mark.parametrize("p", [2**-16, 0.1, 0.5, 0.9, 1 - 2**-16])
def test_the_share_and_the_mean_are_those_of_p(p: float) -> None:
    n = 10**6
    y = dropout(torch.ones(n, dtype=torch.float64), **MASK | {"p": p}, global_cols=n)
    rate = round(p * 65536) / 65536
    assert abs(rate - p) <= 2**-17
    deviation = math.sqrt(rate * (1 - rate) / n)
    assert abs((y != 0).double().mean() - (1 - rate)) < 5 * deviation
    assert abs(y.mean() - 1) < 5 * deviation / (1 - rate), "the mean of y is that of x"
    for half in range(8):  # every place in a group is as fair
        assert abs((y[half::8] != 0).double().mean() - (1 - rate)) < 5 * deviation * math.sqrt(8)


def test_masks_of_other_keys_counters_and_places_are_uncorrelated() -> None:
    n = 10**5
    one = kept(1, n, p=0.5)
    others = [kept(1, n, p=0.5, **{word: value}) for word, start in (("key", KEY), ("counter", COUNTER)) for value in flips(start)]
    others += [kept(1, n + distance, p=0.5)[:, distance:] for distance in (1, 2, 3, 4, 7, 8, 16, 64, 1024)]
    for other in others:
        agreement = (one == other).double().mean()
        assert abs(agreement - 0.5) < 5 * 0.5 / math.sqrt(n)
    for i, other in enumerate(others):
        assert not any(torch.equal(other, another) for another in others[:i])


def flips(word: int) -> list[int]:
    """`word` with one bit flipped, of each half's first and last."""
    return [word ^ 1 << bit for bit in (0, 31, 32, 63)]


@pytest.mark.parametrize(
    ("change", "given_value"),
    [
        ({"dtype": torch.float16}, "float16"),
        ({"dtype": torch.int64}, "int64"),
        ({"shape": (2, 2, 2)}, "(2, 2, 2)"),
        ({"shape": ()}, "()"),
        *(({"p": p}, f"p={p!r}") for p in (-0.1, 1.0, 1.5, 1 - 2**-17, 2**-17, math.nan, math.inf, True, False, None, "0.1")),
    ],
)
def test_refusals_name_the_value_and_a_way_out(change: dict[str, Any], given_value: str) -> None:
    request = {"dtype": torch.float32, "shape": (2, 2)} | MASK | change
    x = torch.zeros(request.pop("shape"), dtype=request.pop("dtype"))
    with pytest.raises(ConfigError) as refused:
        dropout(x, global_cols=2, **request)
    assert given_value in refused.value.given
    assert "Use " in refused.value.instead
    for p in (0.1, 0):  # what the refusals of p name
        assert dropped_of(p) == round(p * 65536)


@pytest.mark.parametrize(
    "place", [{"col0": 2}, {"col0": -1}, {"row0": -1}, {"row0": 2**62}, {"key": -1}, {"key": 2**64}, {"counter": -1}, {"counter": 2**64}]
)
def test_a_shard_outside_the_tensor_is_our_own_bug(place: dict[str, int]) -> None:
    with pytest.raises(AssertionError, match=r"key|counter|columns|index"):
        dropout(torch.zeros(2, 3), **MASK | {"global_cols": 4} | place)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="compares a GPU with the CPU; there is no GPU here")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("shape", "global_cols", "row0", "col0"),
    [
        ((1000, 1000), 4096, 2**33, 77),
        ((10**6,), 2**40, 0, 2**35 - 5),
        ((70_000, 3), 3, 0, 0),
        ((512, 384), 768, 3, 384),
        ((64, 1), 9, 0, 4),
    ],
)
def test_cuda_equals_cpu(shape: tuple[int, ...], global_cols: int, row0: int, col0: int, dtype: torch.dtype) -> None:
    x, place = noise(*shape, dtype=dtype), {"global_cols": global_cols, "row0": row0, "col0": col0}
    x.view(-1)[::5] = math.nan
    on_cpu = dropout(x, **MASK, **place)
    assert torch.equal(bits(dropout(x.cuda(), **MASK, **place)), bits(on_cpu))
    assert torch.equal(bits(dropout_ref(x.cuda(), **MASK, **place)), bits(on_cpu))
    strided = x.cuda().T.contiguous().T if x.ndim == 2 else x.cuda().repeat_interleave(2)[::2]
    assert torch.equal(bits(dropout(strided, **MASK, **place)), bits(on_cpu))

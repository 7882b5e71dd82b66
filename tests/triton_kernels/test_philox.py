"""Philox fills against published vectors, against a slow Philox of plain integers, and the kernel against its reference, bit for bit."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pymesh3d.errors import ConfigError
from pymesh3d.triton_kernels import backend
from pymesh3d.triton_kernels.backend import jit, tl
from pymesh3d.triton_kernels.philox import DTYPES, NORMAL_STD, launch, philox4x32, philox4x32_ref, philox_fill_, philox_fill_ref
from tests.cuts import draw_cut
from tests.kernels import DEVICE, bits, needs_kernels

KEY = 0xF123456789ABCDEF
KINDS = ("normal", "uniform")

M = 0xFFFFFFFF
VECTORS = [  # counter, key, words: the known answers of the Random123 distribution
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((M, M, M, M), (M, M), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0), (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
]


def slow_words(counter: tuple[int, ...], key: tuple[int, int]) -> tuple[int, ...]:
    """Philox 4x32-10 in integers without a size."""
    a, b, c, d = counter
    for i in range(10):
        p, q = 0xD2511F53 * a, 0xCD9E8D57 * c
        k, m = (key[0] + i * 0x9E3779B9) % 2**32, (key[1] + i * 0xBB67AE85) % 2**32
        a, b, c, d = q // 2**32 ^ b ^ k, q % 2**32, p // 2**32 ^ d ^ m, p % 2**32
    return a, b, c, d


def slow_value(index: int, key: int, kind: str, scale: float) -> float:
    """The float64 value of global index `index`."""
    words = slow_words((index % 2**32, index // 2**32, 0, 0), (key % 2**32, key // 2**32))
    if kind == "uniform":
        return (2 * (words[0] // 2**8) + 1 - 2**24) * (scale * 2.0**-24)
    return sum(w % 2**16 + w // 2**16 - 65535 for w in words) * (scale / math.sqrt(2 * (65536**2 - 1) / 3))


def poisoned(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> torch.Tensor:
    return torch.full(shape, math.nan, dtype=dtype, device=device)


@jit
def words_kernel(counter, key, out):  # type: ignore[no-untyped-def]
    c0 = tl.load(counter + tl.arange(0, 1)).to(tl.uint32)
    c1 = tl.load(counter + 1 + tl.arange(0, 1)).to(tl.uint32)
    c2 = tl.load(counter + 2 + tl.arange(0, 1)).to(tl.uint32)
    c3 = tl.load(counter + 3 + tl.arange(0, 1)).to(tl.uint32)
    w0, w1, w2, w3 = philox4x32(c0, c1, c2, c3, tl.load(key).to(tl.uint32), tl.load(key + 1).to(tl.uint32))
    tl.store(out + tl.arange(0, 1), w0.to(tl.int64))
    tl.store(out + 1 + tl.arange(0, 1), w1.to(tl.int64))
    tl.store(out + 2 + tl.arange(0, 1), w2.to(tl.int64))
    tl.store(out + 3 + tl.arange(0, 1), w3.to(tl.int64))


@pytest.mark.parametrize(("counter", "key", "words"), VECTORS)
def test_published_vectors(counter: tuple[int, ...], key: tuple[int, int], words: tuple[int, ...]) -> None:
    assert slow_words(counter, key) == words
    assert tuple(int(w) for w in philox4x32_ref(tuple(torch.tensor([c]) for c in counter), key)) == words


@needs_kernels
@pytest.mark.parametrize(("counter", "key", "words"), VECTORS)
def test_published_vectors_by_the_kernel(counter: tuple[int, ...], key: tuple[int, int], words: tuple[int, ...]) -> None:
    out = torch.full((4,), -1, device=DEVICE)
    words_kernel[(1,)](torch.tensor(counter, device=DEVICE), torch.tensor(key, device=DEVICE), out)
    assert tuple(out.tolist()) == words


@pytest.mark.parametrize("kind", KINDS)
def test_values_are_those_of_the_definition(kind: str) -> None:
    rows, cols, row0, col0, global_cols = 3, 4, 2**30 - 1, 2**31 + 5, 2**32 - 3
    expected = [[slow_value((row0 + r) * global_cols + col0 + c, KEY, kind, 0.3) for c in range(cols)] for r in range(rows)]
    out = philox_fill_ref(
        poisoned(rows, cols, dtype=torch.float64), key=KEY, kind=kind, scale=0.3, global_cols=global_cols, row0=row0, col0=col0
    )
    assert out.tolist() == expected


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("shape", "global_cols", "row0", "col0"),
    [
        ((1, 1), 1, 0, 0),
        ((7, 13), 20, 0, 3),
        ((33, 5), 5, 2**31 - 16, 0),  # crosses 2^31 rows; one column tile, rows beyond a tile
        ((1100, 1), 1, 2**32 - 600, 0),  # the index crosses 2^32
        ((3, 1025), 5000, 2**33, 17),
        ((2, 64), 2**31 + 1, 2, 2**30),
        ((4, 8), 2**30, 0, 5),  # the index passes 2^31 within the piece, every argument fits in 32 bits
        ((1000,), 2**40, 0, 2**31 - 5),
        ((1,), 10, 0, 9),
    ],
)
def test_kernel_equals_reference(shape: tuple[int, ...], global_cols: int, row0: int, col0: int, kind: str, dtype: torch.dtype) -> None:
    got, expected = poisoned(*shape, dtype=dtype, device=DEVICE), poisoned(*shape, dtype=dtype)
    piece = {"key": KEY, "kind": kind, "scale": 0.02, "global_cols": global_cols, "row0": row0, "col0": col0}
    launch(got, **piece)
    philox_fill_ref(expected, **piece)
    assert not expected.isnan().any()
    assert torch.equal(bits(got), bits(expected))


@needs_kernels
@pytest.mark.parametrize("key", [0, 1, 2**31, 2**32 - 1, 2**32, 2**63, 2**64 - 1])
@pytest.mark.parametrize("scale", [0.0, 1.0, 1e-12, 1e30])
def test_kernel_takes_every_key_and_scale(key: int, scale: float) -> None:
    for dtype in DTYPES:
        piece = {"key": key, "kind": "normal", "scale": scale, "global_cols": 9}
        got, expected = launch(poisoned(9, dtype=dtype, device=DEVICE), **piece), philox_fill_ref(poisoned(9, dtype=dtype), **piece)
        assert torch.equal(bits(got), bits(expected)), f"{dtype}"


@needs_kernels
def test_kernel_rounds_ties_to_even() -> None:
    piece = {"key": KEY, "kind": "normal", "scale": NORMAL_STD, "global_cols": 5000}  # the values are integers below 2^18
    exact = philox_fill_ref(poisoned(5000), **piece)
    ties = (bits(exact) & 0xFFFF) == 0x8000
    assert int(ties.sum()) > 5
    got = launch(poisoned(5000, dtype=torch.bfloat16, device=DEVICE), **piece)
    assert torch.equal(bits(got), bits(exact.to(torch.bfloat16)))


@pytest.mark.parametrize("fill", [pytest.param(launch, marks=needs_kernels), philox_fill_ref])
@pytest.mark.parametrize("transpose", [False, True])
def test_only_the_given_view_is_written(fill: type(philox_fill_ref), transpose: bool) -> None:
    whole = poisoned(11, 9, device=DEVICE if fill is launch else "cpu")
    view = whole[2:9, 3:8]
    view = view.T if transpose else view
    piece = {"key": KEY, "kind": "normal", "scale": 1.0, "global_cols": 12, "row0": 4, "col0": 2}
    fill(view, **piece)
    expected = philox_fill_ref(poisoned(*view.shape), **piece)
    assert torch.equal(view.cpu(), expected)
    assert int(whole.isnan().sum()) == 11 * 9 - 7 * 5


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_every_cut_gives_slices_of_the_whole(data: st.DataObject) -> None:
    rows, cols, top, left, height, width, row0 = draw_cut(data)
    common = {
        "key": data.draw(st.integers(0, 2**64 - 1), label="key"),
        "kind": data.draw(st.sampled_from(KINDS), label="kind"),
        "scale": 0.5,
        "global_cols": cols,
    }
    dtype = data.draw(st.sampled_from(DTYPES), label="dtype")
    whole = philox_fill_ref(poisoned(rows, cols, dtype=dtype), row0=row0, **common)
    expected = bits(whole[top : top + height, left : left + width])
    fills = (launch, philox_fill_ref, philox_fill_) if backend.available else (philox_fill_ref, philox_fill_)
    for fill in fills:
        shard = poisoned(height, width, dtype=dtype, device=DEVICE if fill is launch else "cpu")
        assert torch.equal(bits(fill(shard, row0=row0 + top, col0=left, **common)), expected), fill.__name__
    flat = philox_fill_ref(poisoned(rows * cols, dtype=dtype), col0=row0 * cols, **common | {"global_cols": (row0 + rows) * cols})
    assert torch.equal(bits(flat), bits(whole).flatten())


def test_chunks_of_the_reference_do_not_show() -> None:
    common = {"key": KEY, "kind": "normal", "scale": 1.0}
    wide = philox_fill_ref(poisoned(2, 70_000), global_cols=70_000, **common)  # cuts columns, and one row a chunk
    tall = philox_fill_ref(poisoned(140, 1000), global_cols=1000, **common)  # cuts rows
    narrow = philox_fill_ref(poisoned(140_000, 1), global_cols=1, **common)
    assert torch.equal(wide.flatten(), tall.flatten())
    assert torch.equal(wide.flatten(), narrow.flatten())


def test_threads_do_not_show() -> None:
    piece = {"key": KEY, "kind": "normal", "scale": 1.0, "global_cols": 200_000}
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            results.append(philox_fill_ref(poisoned(200_000), **piece))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*results)


def test_moments_of_a_million_normals() -> None:
    n = 10**6
    x = philox_fill_(poisoned(n, dtype=torch.float64), key=KEY, kind="normal", scale=2.0, global_cols=n) / 2.0
    assert abs(x.mean()) < 5 / math.sqrt(n)
    assert abs((x**2).mean() - 1) < 5 * math.sqrt((2.85 - 1) / n)  # Var x^2 = E x^4 - 1
    assert abs((x**3).mean()) < 5 * math.sqrt(15 / n)  # E x^6 is below the normal's 15, E x^8 below its 105
    assert abs((x**4).mean() - 2.85) < 5 * math.sqrt((105 - 2.85**2) / n)
    assert abs((x[1:] * x[:-1]).mean()) < 5 / math.sqrt(n)  # neighbours are uncorrelated
    assert 4 < x.abs().max() < 4.9


def test_moments_of_a_million_uniforms() -> None:
    n = 10**6
    x = philox_fill_(poisoned(n), key=KEY, kind="uniform", scale=0.125, global_cols=n).double() / 0.125
    assert abs(x.mean()) < 5 * math.sqrt(1 / 3 / n)
    assert abs((x**2).mean() - 1 / 3) < 5 * math.sqrt((1 / 5 - 1 / 9) / n)
    assert abs((x[1:] * x[:-1]).mean()) < 5 / 3 / math.sqrt(n)
    assert 1 - 1e-4 < x.abs().max() < 1


@pytest.mark.parametrize("kind", KINDS)
def test_how_the_dtypes_are_related(kind: str) -> None:
    piece = {"key": KEY, "kind": kind, "scale": 0.0213, "global_cols": 100_000}
    double, single, half = (
        philox_fill_(poisoned(100_000, dtype=dtype), **piece) for dtype in (torch.float64, torch.float32, torch.bfloat16)
    )
    assert torch.equal(half, single.to(torch.bfloat16))
    assert not torch.equal(single, double.float()), "the docstring says that float32 is not the rounded float64: it would now be wrong"
    assert ((single.double() - double).abs().numpy() <= 2 * np.spacing(np.abs(single.numpy())).astype(np.float64)).all()


@pytest.mark.parametrize("bound", [1.0, 1.0 + 2**-23, 1.5, 2.0 - 2**-23, 0.1])
def test_uniform_float32_never_reaches_its_bound(bound: float) -> None:
    largest = np.float32(2**24 - 1) * np.float32(bound * 2.0**-24)
    assert largest < np.float32(bound)


@pytest.mark.parametrize(
    ("change", "given_value"),
    [
        ({"dtype": torch.float16}, "float16"),
        ({"shape": (2, 2, 2)}, "(2, 2, 2)"),
        ({"shape": ()}, "()"),
        ({"kind": "cauchy"}, "cauchy"),
        ({"scale": -1.0}, "-1.0"),
        ({"scale": math.nan}, "nan"),
        ({"scale": math.inf}, "inf"),
    ],
)
def test_refusals_name_the_value(change: dict[str, object], given_value: str) -> None:
    request = {"dtype": torch.float32, "shape": (2, 2), "kind": "normal", "scale": 1.0} | change
    out = torch.zeros(request.pop("shape"), dtype=request.pop("dtype"))
    with pytest.raises(ConfigError) as refused:
        philox_fill_(out, key=0, global_cols=2, **request)
    assert given_value in refused.value.given
    assert not out.any()


@pytest.mark.parametrize("place", [{"col0": 2}, {"col0": -1}, {"row0": -1}, {"row0": 2**62}, {"key": -1}, {"key": 2**64}])
def test_a_piece_outside_the_tensor_is_our_own_bug(place: dict[str, int]) -> None:
    with pytest.raises(AssertionError, match=r"key|columns|index"):
        philox_fill_(torch.zeros(2, 3), **{"key": 0, "kind": "normal", "scale": 1.0, "global_cols": 4} | place)


def test_parameters_that_require_grad_are_filled() -> None:
    weight = torch.nn.Parameter(poisoned(3, 4))
    assert philox_fill_(weight, key=0, kind="normal", scale=1.0, global_cols=4) is weight
    assert weight.is_leaf
    assert not weight.isnan().any()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="compares a GPU with the CPU; there is no GPU here")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("shape", "global_cols", "row0", "col0"),
    [((1000, 1000), 4096, 2**33, 77), ((10**6,), 2**40, 0, 2**32 - 5), ((70_000, 3), 3, 0, 0), ((512, 384), 768, 3, 384)],
)
def test_cuda_equals_cpu(shape: tuple[int, ...], global_cols: int, row0: int, col0: int, kind: str, dtype: torch.dtype) -> None:
    piece = {"key": KEY, "kind": kind, "scale": 0.02, "global_cols": global_cols, "row0": row0, "col0": col0}
    on_cpu = philox_fill_(poisoned(*shape, dtype=dtype), **piece)
    on_gpu = philox_fill_(poisoned(*shape, dtype=dtype, device="cuda"), **piece)
    reference_on_gpu = philox_fill_ref(poisoned(*shape, dtype=dtype, device="cuda"), **piece)
    assert torch.equal(bits(on_gpu), bits(on_cpu))
    assert torch.equal(bits(reference_on_gpu), bits(on_cpu))

"""Cross-entropy over a part of the vocabulary: kernels and references against float64, and the loss made of them against torch's."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from pymesh3d.axis import Axis
from pymesh3d.ops import cross_entropy as ops
from pymesh3d.triton_kernels.cross_entropy import (
    REF_CHUNK,
    RUN,
    RUNS,
    gradient_ref,
    launch_gradient,
    launch_statistics,
    statistics_ref,
)
from tests.kernels import DEVICE, both

KERNEL, REFERENCE = (launch_statistics, launch_gradient), (statistics_ref, gradient_ref)
BOTH = both(KERNEL, REFERENCE)
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
UNIT = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-24, torch.float64: 2**-53}
OF_TORCH = 1e-13  # what its own sums may be off by in float64
BLOCK = RUN * RUNS
IGNORED = -100
# rows, columns, of which valid, entry of the first
SHAPES = [
    (1, 1, 1, 0),
    (5, 1, 1, 7),
    (4, 2, 1, 2),
    (7, 13, 13, 26),
    (3, 24, 17, 0),
    (6, 8, 0, 16),  # nothing but padding
    (2, BLOCK, BLOCK, BLOCK),
    (3, BLOCK + 1, BLOCK + 1, 5),
    (3, 2 * BLOCK + 40, 2 * BLOCK - 3, 2**33),  # a whole block of padding
]

pytestmark = pytest.mark.filterwarnings(
    "ignore:(invalid value|overflow|divide by zero|All-NaN slice) encountered"
)  # of numpy, in the interpreter


def part(rows: int, cols: int, valid: int, start: int, dtype: torch.dtype, size: float = 3.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits with NaN in the padding and between the rows; targets here, in other parts, in padding, outside and ignored."""
    generator = torch.Generator().manual_seed(rows * cols)
    buffer = torch.full((rows, cols + 3), math.nan, dtype=dtype)
    buffer[:, :valid] = size * torch.randn(rows, valid, generator=generator, dtype=torch.float64)
    near = [start, start + valid - 1, start + valid, start - 1, start + cols, IGNORED, -1]
    target = torch.randint(start, start + max(valid, 1), (rows,), generator=generator)
    target[: len(near)] = torch.tensor(near)[:rows]
    return buffer[:, :cols].to(DEVICE), target.to(DEVICE)


def near(found: torch.Tensor, expected: torch.Tensor, bound: float) -> None:
    """Element by element, relative to it or (where it is smaller) to the largest times `bound`."""
    assert expected.isfinite().all()
    scale = expected.abs().clamp(min=bound * float(expected.abs().max()) if expected.numel() else 0).clamp(min=1e-300)
    assert bool(((found.double() - expected).abs() <= bound * scale).all())


@pytest.mark.parametrize("run", BOTH)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("smoothed", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_statistics(run: Any, dtype: torch.dtype, smoothed: bool, shape: tuple[int, int, int, int]) -> None:
    rows, _, valid, start = shape
    logits, target = part(*shape, dtype)
    before, vocab = logits.clone(), start + valid
    maximum, sums = run[0](logits, target, start=start, valid=valid, vocab=vocab, smoothed=smoothed)
    assert torch.equal(logits.nan_to_num(5), before.nan_to_num(5)), "logits are only read"
    assert maximum.dtype == sums.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert sums.shape == (2 + smoothed, rows)

    z = before[:, :valid].double()
    expected = [z[row, entry - start].item() if start <= entry < vocab else 0.0 for row, entry in enumerate(target.tolist())]
    outside = (target < 0) | (target >= vocab)
    assert torch.equal(sums[1].isnan(), outside)
    assert sums[1][~outside].tolist() == [value for value, wrong in zip(expected, outside.tolist(), strict=True) if not wrong]
    if valid == 0:
        assert maximum.tolist() == [-math.inf] * rows
        assert not sums[0::2].any()
        return
    assert torch.equal(maximum.double(), z.amax(1))
    bound = 16 * UNIT[sums.dtype]
    near(sums[0], (z - z.amax(1, True)).exp().sum(1), bound)
    if smoothed:
        near(sums[2], (z - z.amax(1, True)).sum(1), bound)


@pytest.mark.parametrize("run", BOTH)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("shape", SHAPES)
def test_gradient(run: Any, dtype: torch.dtype, smoothing: float, shape: tuple[int, int, int, int]) -> None:
    """Of a part of a vocabulary that goes on behind it: the maximum and the total are those of all."""
    rows, cols, valid, start = shape
    logits, target = part(*shape, dtype)
    before, vocab = logits.clone(), start + valid + 50
    z = before[:, :valid].double()
    compute = torch.float64 if dtype == torch.float64 else torch.float32
    maximum = 1 + (z.amax(1) if valid else torch.zeros(rows, device=DEVICE, dtype=torch.float64)).to(compute)
    total = ((z - maximum[:, None].double()).exp().sum(1) + 1.5).to(compute)
    grad_loss = torch.linspace(-1, 2, rows, dtype=torch.float64).to(compute).to(DEVICE)
    options = {"start": start, "valid": valid, "vocab": vocab, "ignore_index": IGNORED, "smoothing": smoothing}
    grad = run[1](logits, target, maximum, total, grad_loss, **options)
    assert torch.equal(logits.nan_to_num(5), before.nan_to_num(5)), "logits are only read"
    assert (grad.shape, grad.dtype, grad.is_contiguous()) == ((rows, cols), dtype, True)

    expected = torch.zeros(rows, cols, dtype=torch.float64, device=DEVICE)
    expected[:, :valid] = (z - maximum[:, None]).exp() / total[:, None] - smoothing / vocab
    for row, entry in enumerate(target.tolist()):
        if 0 <= entry - start < valid:
            expected[row, entry - start] -= 1 - smoothing
    expected *= grad_loss[:, None]
    expected[target == IGNORED] = 0
    worst = (grad.double() - expected).abs() - 1.01 * UNIT[dtype] * expected.abs()  # rounded once to its dtype, computed in another
    smallest = 2.0**-25 if dtype == torch.float16 else 0.0
    assert worst.max() <= 16 * UNIT[compute] * grad_loss.abs().max() + smallest
    assert not grad[:, valid:].any()
    assert not grad[target == IGNORED].any()


@pytest.mark.parametrize("run", BOTH)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_constant_on_all_logits_changes_no_bit(run: Any, dtype: torch.dtype) -> None:
    shape = (4, BLOCK + 9, BLOCK + 5, 0)
    logits, target = part(*shape, dtype)
    logits = (logits * 16).round() / 16
    lifted = logits + 2.0**14
    results = []
    for z in (logits, lifted):
        maximum, sums = run[0](z, target, start=0, valid=shape[2], vocab=shape[2], smoothed=True)
        grad = run[1](
            z, target, maximum, sums[0], torch.ones_like(maximum), start=0, valid=shape[2], vocab=shape[2], ignore_index=7, smoothing=0.1
        )
        results.append((sums[0], sums[2], grad))
    for plain, shifted in zip(*results, strict=True):
        assert plain.isfinite().all()
        assert torch.equal(plain, shifted)


@pytest.mark.parametrize("run", BOTH)
@pytest.mark.parametrize(("rows", "cols"), [(0, 0), (0, 5), (3, 0)])
def test_without_rows_or_columns(run: Any, rows: int, cols: int) -> None:
    logits, target = torch.zeros(rows, cols, device=DEVICE), torch.zeros(rows, dtype=torch.int64, device=DEVICE)
    maximum, sums = run[0](logits, target, start=0, valid=cols, vocab=5, smoothed=True)
    assert maximum.tolist() == [-math.inf] * rows
    assert sums.tolist() == [[0.0] * rows] * 3
    grad = run[1](logits, target, maximum, sums[0], sums[0], start=0, valid=cols, vocab=5, ignore_index=-1, smoothing=0.0)
    assert grad.shape == (rows, cols)


@pytest.mark.parametrize("run", BOTH)
def test_numbers_of_any_strides_are_read(run: Any) -> None:
    """One of the arguments at a time has other numbers between its own."""
    logits, target = part(4, 9, 9, 0, torch.float32)
    target[:] = torch.tensor([3, 8, 0, 5])
    options = {"start": 0, "valid": 9, "vocab": 9}
    maximum, sums = run[0](logits, target, **options, smoothed=True)
    found = run[0](logits, apart(target), **options, smoothed=True)
    assert torch.equal(found[0], maximum) and torch.equal(found[1], sums)

    numbers = target, maximum, sums[0], torch.linspace(1, 2, 4, device=DEVICE)
    grad = run[1](logits, *numbers, **options, ignore_index=-1, smoothing=0.1)
    for place in range(4):
        changed = [apart(x) if place == i else x for i, x in enumerate(numbers)]
        assert torch.equal(run[1](logits, *changed, **options, ignore_index=-1, smoothing=0.1), grad)


def apart(x: torch.Tensor) -> torch.Tensor:
    return torch.stack((x, x + 1), 1)[:, 0]


@pytest.mark.parametrize("run", BOTH)
def test_what_does_not_belong_to_the_rows_is_refused(run: Any) -> None:
    logits, target = part(4, 9, 9, 0, torch.bfloat16)
    options = {"start": 0, "valid": 9, "vocab": 9}
    for wrong in (target[:2], target[:1], target[:, None], target.int(), target.float()):
        with pytest.raises(AssertionError, match=r"target .* for 4 rows"):
            run[0](logits, wrong, **options, smoothed=False)
        with pytest.raises(AssertionError, match=r"target .* for 4 rows"):
            run[1](logits, wrong, *torch.ones(3, 4, device=DEVICE), **options, ignore_index=-1, smoothing=0.1)
    one = torch.ones(4, device=DEVICE)
    for wrong in (one[:2], one[:1], one[0], one[:, None], one.bfloat16(), one.double()):
        for place in range(3):
            numbers = [wrong if place == i else one for i in range(3)]
            with pytest.raises(AssertionError, match=r"numbers .* for 4 rows computed in torch.float32"):
                run[1](logits, target, *numbers, **options, ignore_index=-1, smoothing=0.1)


@pytest.mark.parametrize("run", BOTH)
@pytest.mark.parametrize("cols", [3, BLOCK + 9])
def test_a_part_in_which_nothing_is_possible_adds_nothing(run: Any, cols: int) -> None:
    logits = torch.full((2, cols), -math.inf, device=DEVICE)
    logits[1, cols - 1] = 2.5
    target = torch.tensor([1, cols - 1], device=DEVICE)
    maximum, sums = run[0](logits, target, start=0, valid=cols, vocab=2 * cols, smoothed=True)
    assert maximum.tolist() == [-math.inf, 2.5]
    assert sums.tolist() == [[0.0, 1.0], [-math.inf, 2.5], [-math.inf, -math.inf]]


@pytest.mark.parametrize("run", BOTH)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pattern", [0x7FC00000, 0x7FFFFFFF, -1])
def test_a_gradient_that_is_no_number_stays_none(run: Any, dtype: torch.dtype, pattern: int) -> None:
    """Whatever its bits, which rounding must not carry into the sign."""
    logits, target = part(1, 5, 5, 0, dtype)
    nan = torch.tensor([pattern], dtype=torch.int32).view(torch.float32).to(torch.float64 if dtype == torch.float64 else torch.float32)
    one = torch.ones_like(nan).to(DEVICE)
    grad = run[1](logits, target, one, one, nan.to(DEVICE), start=0, valid=5, vocab=9, ignore_index=-1, smoothing=0.1)
    assert grad.isnan().all()


@pytest.mark.parametrize("run", BOTH)
def test_equal_calls_give_equal_bits_wherever_the_rows_lie(run: Any) -> None:
    logits, target = part(9, 200, 190, 0, torch.float32)
    packed, wider = logits.contiguous(), F.pad(logits, (0, 1))[:, :200]
    results = [run[0](z, target, start=0, valid=190, vocab=190, smoothed=True) for z in (logits, logits, packed, wider)]
    for maximum, sums in results:
        assert torch.equal(maximum, results[0][0])
        assert torch.equal(sums.nan_to_num(-1), results[0][1].nan_to_num(-1))


def test_chunks_of_the_reference_do_not_show() -> None:
    cols = REF_CHUNK // 2
    logits, target = torch.randn(5, cols, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 3, cols - 1, 7, 2])
    options = {"start": 0, "valid": cols, "vocab": cols}
    maximum, sums = statistics_ref(logits, target, **options, smoothed=True)
    grad = gradient_ref(logits, target, maximum, sums[0], torch.ones(5), **options, ignore_index=7, smoothing=0.1)
    for row in range(5):
        one = logits[row : row + 1], target[row : row + 1]
        alone = statistics_ref(*one, **options, smoothed=True)
        assert alone[0] == maximum[row]
        near(sums[:, row], alone[1][:, 0].double(), 1e-6)
        grad_alone = gradient_ref(*one, *alone[0][None], sums[0, row, None], torch.ones(1), **options, ignore_index=7, smoothing=0.1)
        assert torch.equal(grad[row], grad_alone[0])


def by(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss is made by `run`, whatever the device."""
    monkeypatch.setattr(ops, "statistics", run[0])
    monkeypatch.setattr(ops, "gradient", run[1])


def loss_and_gradient(logits: torch.Tensor, target: torch.Tensor, smoothing: float) -> tuple[torch.Tensor, torch.Tensor]:
    leaf = logits.clone().requires_grad_()
    vocab = logits.shape[-1]
    loss = ops.cross_entropy(leaf, target, Axis("tp", 0, (0,), None), vocab=vocab, label_smoothing=smoothing)
    return loss.detach(), torch.autograd.grad(loss.sum(), leaf)[0]


def of_torch(logits: torch.Tensor, target: torch.Tensor, smoothing: float) -> tuple[torch.Tensor, torch.Tensor]:
    """In float64."""
    leaf = logits.double().requires_grad_()
    loss = F.cross_entropy(leaf, target, label_smoothing=smoothing, reduction="none")
    return loss.detach(), torch.autograd.grad(loss.sum(), leaf)[0]


@pytest.mark.parametrize("run", BOTH)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_is_that_of_torch(run: Any, dtype: torch.dtype, smoothing: float, monkeypatch: pytest.MonkeyPatch) -> None:
    by(run, monkeypatch)
    logits, target = part(9, BLOCK + 77, BLOCK + 77, 0, dtype)
    target[:3] = torch.tensor([0, BLOCK + 76, BLOCK])
    target[5:] = torch.tensor([IGNORED, 8, 9, BLOCK - 1])
    target[3:5] = 1
    loss, grad = loss_and_gradient(logits, target, smoothing)
    expected, expected_grad = of_torch(logits, target, smoothing)
    near(loss, expected, 16 * UNIT[loss.dtype])
    assert (grad - expected_grad).abs().max() <= max(UNIT[dtype], 16 * UNIT[loss.dtype], OF_TORCH)
    assert not grad[5].any()


@pytest.mark.parametrize("run", BOTH)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("cols", [5, BLOCK + 8])
def test_what_is_not_finite_is_that_of_torch(
    run: Any, dtype: torch.dtype, smoothing: float, cols: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    by(run, monkeypatch)
    logits = part(11, cols, cols, 0, dtype)[0].contiguous()
    last = cols - 1
    target = torch.tensor([1, 1, 1, 1, 1, last, 1, 1, IGNORED, 1, 1], device=DEVICE)
    logits[0, last] = math.nan
    logits[1, 0] = math.inf
    logits[2, last] = math.inf
    logits[3, 0] = -math.inf
    logits[4] = -math.inf
    logits[5, last] = -math.inf  # the target itself
    logits[6, :] = -math.inf
    logits[6, last] = 2.0  # behind a block of nothing
    logits[7, 1] = math.inf  # the target itself
    logits[8, 0] = math.nan  # of a target that is ignored
    logits[9, :] = math.nan
    logits[10, 0], logits[10, last] = math.inf, -math.inf
    loss, grad = loss_and_gradient(logits, target, smoothing)
    expected, expected_grad = of_torch(logits, target, smoothing)
    assert torch.equal(loss.isnan(), expected.isnan())
    assert torch.equal(loss.isinf(), expected.isinf())
    assert loss.isnan().tolist()[:6] == [True, True, True, False, True, False]
    expected_grad[8] = 0  # torch gives NaN, which the loss knows nothing of
    assert torch.equal(grad.isnan(), expected_grad.isnan())
    good, good_grad = expected.isfinite(), ~expected_grad.isnan()
    near(loss[good], expected[good], 16 * UNIT[loss.dtype])
    assert (grad - expected_grad)[good_grad].abs().max() <= max(UNIT[dtype], 16 * UNIT[loss.dtype], OF_TORCH)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "cols", "valid"), [(4096, 32768, 32768), (4096, 128256, 128256), (1024, 128256, 128001), (511, 50257, 50257)]
)
def test_full_sizes_on_a_gpu(dtype: torch.dtype, rows: int, cols: int, valid: int) -> None:
    logits = 3 * torch.randn(rows, cols, device="cuda", generator=torch.Generator("cuda").manual_seed(0)).to(dtype)
    logits[:, valid:] = math.nan
    target = torch.randint(valid, (rows,), device="cuda")
    target[::7] = IGNORED
    leaf = logits.clone().requires_grad_()
    axis = Axis("tp", 0, (0,), None)
    loss = ops.cross_entropy(leaf, target, axis, vocab=valid, label_smoothing=0.1)
    grad = torch.autograd.grad(loss.sum(), leaf)[0]
    assert not grad[:, valid:].any()
    for first in range(0, rows, 256):
        chunk = slice(first, first + 256)
        expected, expected_grad = of_torch(logits[chunk, :valid], target[chunk], 0.1)
        near(loss.detach()[chunk], expected, 16 * UNIT[loss.dtype])
        off = (grad[chunk, :valid] - expected_grad).abs() - 1.01 * UNIT[dtype] * expected_grad.abs()
        assert off.max() <= 16 * UNIT[loss.dtype] + OF_TORCH + (2.0**-25 if dtype == torch.float16 else 0.0)


@pytest.mark.gpu
def test_offsets_beyond_32_bits_on_a_gpu() -> None:
    rows, cols = 17_000, 128256  # 2.18e9 elements
    logits = torch.zeros(rows, cols, device="cuda", dtype=torch.bfloat16)
    logits[-1] = torch.randn(cols, device="cuda")
    target = torch.full((rows,), 5, device="cuda")
    loss, grad = loss_and_gradient(logits, target, 0.0)
    expected, expected_grad = of_torch(logits[-1:], target[-1:], 0.0)
    near(loss[-1:], expected, 1e-6)
    near(loss[:-1], torch.full((rows - 1,), math.log(cols), device="cuda", dtype=torch.float64), 1e-6)
    assert ((grad[-1] - expected_grad[0]).abs() <= 2**-8 * expected_grad[0].abs() + 1e-8).all()


@pytest.mark.gpu
def test_nothing_waits_for_the_gpu() -> None:
    logits, target = torch.zeros(8, 64, device="cuda", requires_grad=True), torch.arange(8, device="cuda")
    axis = Axis("tp", 0, (0,), None)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        ops.cross_entropy(logits, target, axis, vocab=60, label_smoothing=0.1).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert logits.grad is not None
    assert not logits.grad[:, 60:].any()

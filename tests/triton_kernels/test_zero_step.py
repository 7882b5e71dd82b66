"""AdamW and SGD on a shard: against torch's own optimizers, whichever way gradients come, masters are kept and parameters go."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pymesh3d.triton_kernels.backend import jit, tl
from pymesh3d.triton_kernels.precision import nearest
from pymesh3d.triton_kernels.zero_reduce import TILE, reduce_shard, round_in_place_ref
from pymesh3d.triton_kernels.zero_step import SGD, AdamW, joined, joined_ref, remainder_of, remainder_ref, update, update_ref
from tests import kernels
from tests.kernels import DEVICE, bits, both, needs_kernels

MARGIN = 64  # numbers on both sides of each tensor that nobody may write
RANKS = [1, 2, 3, 4, 5, 8]
STEPS = 6
WEIGHTS = [torch.bfloat16, torch.float32, torch.float16]
Rule = Callable[[int], Any]
ADAMW: dict[str, Rule] = {
    "usual": lambda step: AdamW(1e-2, 0.9, 0.95, 1e-8, 0.1, step),
    "large eps": lambda step: AdamW(0.1, 0.875, 0.96875, 0.5, 0.0, step),
    "large decay": lambda step: AdamW(0.3, 0.5, 0.75, 1e-3, 1.5, step),
    "Adam": lambda step: AdamW(1e-2, 0.9, 0.95, 1e-8, 0.0, step, decoupled=False),
    "Adam with decay": lambda step: AdamW(0.1, 0.75, 0.875, 1e-2, 0.7, step, decoupled=False),
}
SGDS: dict[str, Rule] = {
    "no momentum": lambda step: SGD(0.1, 0.0, 0.0, 0.0),
    "no momentum, decay": lambda step: SGD(0.1, 0.0, 0.0, 0.5),
    "momentum": lambda step: SGD(0.1, 0.9, 0.0, 0.0, first=step == 1),
    "dampening, decay": lambda step: SGD(0.1, 0.7, 0.4, 0.5, first=step == 1),
    "Nesterov": lambda step: SGD(0.1, 0.9, 0.0, 0.3, nesterov=True, first=step == 1),
}
RULES = ADAMW | SGDS
UNITS = 4  # of float32, that a number may be off which a few operations have made
ACCUMULATED = [  # gradients, and what is sent
    (torch.float32, torch.bfloat16),
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float16),
    (torch.float16, torch.float16),
    (torch.float64, torch.bfloat16),
]
SOME = ["usual", "Adam with decay", "no momentum, decay", "dampening, decay"]


def noise(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return kernels.noise(*shape, dtype=dtype, seed=seed).to(DEVICE)


def framed(values: torch.Tensor) -> torch.Tensor:
    """The same values between two margins."""
    whole = torch.full((values.numel() + 2 * MARGIN,), 123, dtype=values.dtype, device=DEVICE)
    whole[MARGIN:-MARGIN] = values
    return whole[MARGIN:-MARGIN]


def frame(inner: torch.Tensor) -> torch.Tensor:
    """What `framed` has made, with the margins."""
    return inner.as_strided((inner.numel() + 2 * MARGIN,), (1,), inner.storage_offset() - MARGIN)


def addresses(tensors: list[torch.Tensor], before: int = 0) -> torch.Tensor:
    """Where each begins, for kernels; or so many bytes before that."""
    return torch.tensor([tensor.data_ptr() - before for tensor in tensors], dtype=torch.int64, device=DEVICE)


def factor(value: float) -> torch.Tensor:
    """What gradients are multiplied by."""
    return torch.tensor([value], dtype=torch.float64, device=DEVICE)


class Shard:
    """Shard number `shard` of a bucket that so many ranks have: masters, what is remembered, and every rank's parameters."""

    def __init__(self, name: str, ranks: int = 1, shard: int = 0, tiles: int = 2, dtype: torch.dtype = torch.bfloat16) -> None:
        self.name, self.ranks, self.shard, self.numbers, self.dtype = name, ranks, shard, tiles * TILE, dtype
        self.masters = framed(noise(self.numbers))
        state = 2 if name in ADAMW else 0 if name.startswith("no momentum") else 1
        # in the first step of SGD nothing has been remembered, whatever lies there
        self.remembered = tuple(framed(torch.full((self.numbers,), 0.0 if name in ADAMW else torch.nan)) for _ in range(state))
        self.weights = [framed(noise(ranks * self.numbers, dtype=dtype, seed=50 + rank)) for rank in range(ranks)]
        for rank in range(ranks):
            self.part(rank).copy_(self.masters)
        self.before = [frame(tensor).clone() for tensor in self.tensors()]

    def tensors(self) -> list[torch.Tensor]:
        """All that there is."""
        return [self.masters, *self.remembered, *self.weights]

    def part(self, rank: int) -> torch.Tensor:
        """This shard of the parameters that a rank has."""
        return self.weights[rank][self.shard * self.numbers : (self.shard + 1) * self.numbers]

    def in_16_bits(self) -> None:
        """Keep masters as what the parameters, bfloat16, lack."""
        self.masters = framed(remainder_ref(self.masters))

    def step(self, step: int, scale: float = 1.0, *, rank: int = 0, push: bool = True, **gradients: Any) -> None:
        """By the kernel."""
        rule, places = RULES[self.name](step), addresses(self.weights)
        options = {"shard": self.shard, "rank": rank, "push": push} | gradients
        update(rule, self.masters, self.remembered, places, self.dtype, factor(scale), **options)

    def unchanged(self, *, but: tuple[int, ...] | None = ()) -> bool:
        """Whether all is as it was, bit for bit. Unless `but` is None: but masters, what is remembered, and this shard of the parameters of
        the ranks `but`.
        """
        for tensor, before in zip(self.tensors(), self.before, strict=True):
            if but is not None and not any(tensor is weights for weights in self.weights):
                before[MARGIN:-MARGIN] = tensor
        for rank in but or ():
            old = self.before[len(self.before) - self.ranks + rank][MARGIN:-MARGIN]
            old[self.shard * self.numbers : (self.shard + 1) * self.numbers] = self.part(rank)
        return all(torch.equal(bits(frame(tensor)), bits(before)) for tensor, before in zip(self.tensors(), self.before, strict=True))


class Exact:
    """torch's own optimizer in float64."""

    def __init__(self, name: str, masters: torch.Tensor) -> None:
        self.masters = torch.nn.Parameter(masters.double().clone())
        rule = RULES[name](1)
        if isinstance(rule, AdamW):
            kind = torch.optim.AdamW if rule.decoupled else torch.optim.Adam
            options = {"betas": (rule.beta1, rule.beta2), "eps": rule.eps}
            self.optimizer: Any = kind([self.masters], lr=rule.lr, weight_decay=rule.weight_decay, **options)
        else:
            options = {"momentum": rule.momentum, "dampening": rule.dampening, "nesterov": rule.nesterov}
            self.optimizer = torch.optim.SGD([self.masters], lr=rule.lr, weight_decay=rule.weight_decay, **options)

    def step(self, grads: torch.Tensor) -> None:
        """Of gradients that have their scale."""
        self.masters.grad = grads.double()
        self.optimizer.step()

    def remembered(self) -> list[torch.Tensor]:
        """What it remembers, in the order of `update`."""
        state = self.optimizer.state[self.masters]
        return [state[key] for key in ("exp_avg", "exp_avg_sq", "momentum_buffer") if state.get(key) is not None]


def close(found: torch.Tensor, exact: torch.Tensor, units: float) -> bool:
    """In so many units of float32, of numbers that are added up to about as much as these, and 1."""
    return bool(((found.double() - exact).abs() <= units * 2**-23 * (exact.abs() + 1)).all())


@pytest.mark.parametrize("name", RULES)
def test_the_reference_is_torch(name: str) -> None:
    masters = noise(200, dtype=torch.float64)
    exact, one = Exact(name, masters), factor(0.3)
    remembered = tuple(torch.full_like(masters, 0.0 if name in ADAMW else torch.nan) for _ in range(len(Shard(name).remembered)))
    for step in range(1, STEPS + 1):
        grads = noise(200, dtype=torch.float64, seed=step)
        update_ref(RULES[name](step), masters, remembered, grads, one)
        exact.step(grads * 0.3)
        for found, expected in zip((masters, *remembered), (exact.masters, *exact.remembered()), strict=True):
            assert torch.allclose(found, expected, rtol=1e-12, atol=1e-12), f"step {step}"


@needs_kernels
@pytest.mark.parametrize("dtype", WEIGHTS)
@pytest.mark.parametrize("name", RULES)
def test_the_kernel_is_torch(name: str, dtype: torch.dtype) -> None:
    """In float32 to some units; and parameters are the masters, rounded."""
    shard = Shard(name, dtype=dtype)
    exact = Exact(name, shard.masters)
    for step in range(1, STEPS + 1):
        grads, scale = noise(2 * TILE, seed=step), 0.3 if step > 2 else 1.7
        kept = grads.clone()
        shard.step(step, scale, grads=grads)
        exact.step(grads.double() * scale)
        for found, expected in zip((shard.masters, *shard.remembered), (exact.masters, *exact.remembered()), strict=True):
            assert close(found, expected, 4 + 4 * step), f"step {step}: {(found.double() - expected).abs().max()}"
        assert torch.equal(bits(shard.part(0)), bits(shard.masters.to(dtype))) and torch.equal(grads, kept)
        assert shard.unchanged(but=(0,))


@needs_kernels
@pytest.mark.parametrize(("beta1", "beta2"), [(0.9, 0.95), (0.9, 0.999), (0.9995, 0.9999)])
def test_small_gradients_move_as_much(beta1: float, beta2: float) -> None:
    """Averages are right relative to themselves, though float32 knows 1 - beta badly, and eps is added to the root, unscaled."""
    masters, grads = torch.zeros(TILE, device=DEVICE), noise(TILE) * 1e-7
    remembered, weights = (torch.zeros_like(masters), torch.zeros_like(masters)), torch.zeros_like(masters)
    parameter = torch.nn.Parameter(torch.zeros(TILE, dtype=torch.float64, device=DEVICE))
    optimizer = torch.optim.AdamW([parameter], lr=1.0, betas=(beta1, beta2), eps=1e-8, weight_decay=0.0)
    for step in range(1, 4):
        rule = AdamW(1.0, beta1, beta2, 1e-8, 0.0, step)
        update(rule, masters, remembered, addresses([weights]), torch.float32, factor(1.0), shard=0, rank=0, push=False, grads=grads)
        parameter.grad = grads.double()
        optimizer.step()
        state = optimizer.state[parameter]
        for found, expected in zip((masters, *remembered), (parameter, state["exp_avg"], state["exp_avg_sq"]), strict=True):
            assert torch.allclose(found.double(), expected, rtol=UNITS * 2**-23, atol=0.0), f"step {step}"


@needs_kernels
@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize("name", [name for name in SGDS if not name.startswith("no momentum")])
def test_momentum_begins_with_the_first_gradient(name: str) -> None:
    """Whatever has been there; and in the next step it is read."""
    found = []
    for old in (0.0, -0.0, 12345.0, torch.inf, -torch.inf, torch.nan):
        shard = Shard(name)
        shard.remembered[0].fill_(old)
        for step in (1, 2):
            shard.step(step, grads=noise(shard.numbers, seed=step))
        found.append([bits(tensor) for tensor in (shard.masters, *shard.remembered)])
        assert shard.masters.isfinite().all() and shard.unchanged(but=(0,)), f"after {old}"
    assert all(torch.equal(a, b) for one in found for a, b in zip(one, found[0], strict=True))
    shard.remembered[0].fill_(torch.nan)
    shard.step(3, grads=noise(shard.numbers))
    assert shard.masters.isnan().all() and shard.remembered[0].isnan().all()


@needs_kernels
@pytest.mark.parametrize("push", [True, False])
@pytest.mark.parametrize("ranks", RANKS)
def test_who_gets_the_new_parameters(ranks: int, push: bool) -> None:
    """All ranks, at the shard, or one alone; nothing else changes."""
    for rank in {0, ranks // 2, ranks - 1}:
        shard = Shard("usual", ranks, shard=(rank + 1) % ranks, tiles=3)
        old = shard.masters.clone()
        shard.step(1, rank=rank, push=push, grads=noise(shard.numbers, seed=1))
        changed = tuple(range(ranks)) if push else (rank,)
        assert all(torch.equal(bits(shard.part(one)), bits(shard.masters.bfloat16())) for one in changed), f"of rank {rank}"
        assert not torch.equal(shard.masters, old) and shard.unchanged(but=changed), f"of rank {rank}"


@needs_kernels
@pytest.mark.parametrize("wire", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", SOME)
def test_gradients_that_are_summed_on_the_way(name: str, wire: torch.dtype) -> None:
    """The same bits as when they come summed."""
    check_contributions(name, 3, wire)


@needs_kernels
@pytest.mark.parametrize("ranks", RANKS)
def test_gradients_of_any_number_of_ranks(ranks: int) -> None:
    check_contributions("usual", ranks, torch.bfloat16)


@needs_kernels
@pytest.mark.parametrize("in_16_bits", [False, True])
@pytest.mark.parametrize(("accumulated", "wire"), ACCUMULATED)
def test_gradients_accumulated_in_any_dtype(accumulated: torch.dtype, wire: torch.dtype, in_16_bits: bool) -> None:
    for name in SOME:
        check_contributions(name, 2, wire, accumulated, in_16_bits=in_16_bits)


def check_contributions(
    name: str, ranks: int, wire: torch.dtype, accumulated: torch.dtype | None = None, *, in_16_bits: bool = False
) -> None:
    """Two steps of each form, on a shard in the middle. Where nothing is said of accumulators, they are float32."""
    number, rank = ranks // 2, ranks - 1
    one, other = Shard(name, ranks, number), Shard(name, ranks, number)
    options = {"wire": wire} if accumulated is None else {"wire": wire, "accumulated": accumulated}
    for shard in (one, other) if in_16_bits else ():
        shard.in_16_bits()
        shard.before[0] = frame(shard.masters).clone()
    for step in (1, 2):
        contributions = [noise(ranks * one.numbers, dtype=accumulated or torch.float32, seed=10 * step + rank) for rank in range(ranks)]
        for bucket in contributions:
            round_in_place_ref(bucket, wire)
        kept = [bucket.clone() for bucket in contributions]
        places, summed = addresses(contributions), torch.full((one.numbers,), torch.nan, device=DEVICE)
        squares = torch.zeros(3, dtype=torch.float64, device=DEVICE)
        of_shard = {"first": number * one.numbers // TILE, "rank": rank, "accumulated": contributions[0].dtype}
        reduce_shard(places, summed, squares, wire=wire, **of_shard)
        told = torch.full((one.numbers // TILE,), torch.nan, dtype=torch.float64, device=DEVICE)
        one.step(step, 0.3, rank=rank, contributions=places, squares=told, **options)
        other.step(step, 0.3, rank=rank, grads=summed)
        assert torch.allclose(told, summed.double().square().view(-1, TILE).sum(1), rtol=1e-14, atol=0), f"squares in step {step}"
        assert all(torch.equal(bits(a), bits(b)) for a, b in zip(one.tensors(), other.tensors(), strict=True)), f"step {step}"
        assert all(torch.equal(bits(a), bits(b)) for a, b in zip(contributions, kept, strict=True))
    assert not torch.equal(one.part(rank), Shard(name, ranks, number).part(rank)) and one.unchanged(but=tuple(range(ranks)))


@pytest.mark.filterwarnings("ignore:invalid value encountered")
@needs_kernels
@pytest.mark.parametrize("in_16_bits", [False, True])
@pytest.mark.parametrize("name", SOME)
def test_a_scale_that_is_no_number_changes_nothing(name: str, in_16_bits: bool) -> None:
    for poison in (12345.0, torch.nan):
        shard = Shard(name, ranks=3, shard=1)
        if in_16_bits:
            shard.in_16_bits()
        for tensor in (*shard.remembered, *shard.weights):
            tensor.fill_(poison)
        shard.before = [frame(tensor).clone() for tensor in shard.tensors()]
        contributions = [noise(3 * shard.numbers, seed=rank) for rank in range(3)]
        shard.step(1, torch.nan, rank=1, grads=noise(shard.numbers))
        shard.step(2, torch.nan, rank=1, contributions=addresses(contributions))
        assert shard.unchanged(but=None)


def test_nor_in_the_reference() -> None:
    for name in SOME:
        masters, remembered = noise(8), tuple(noise(8, seed=seed) for seed in range(len(Shard(name).remembered)))
        before = [tensor.clone() for tensor in (masters, *remembered)]
        update_ref(RULES[name](2), masters, remembered, noise(8), factor(torch.nan))
        assert all(map(torch.equal, (masters, *remembered), before))


@jit
def halves_kernel(values, high, low, back, NUMBERS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Take float32 apart and put them together."""
    number = tl.arange(0, NUMBERS)
    value = tl.load(values + number)
    first = nearest(value, tl.bfloat16)
    last = remainder_of(value, first)
    tl.store(high + number, first)
    tl.store(low + number, last)
    tl.store(back + number, joined(first, last))


def halves_of_kernel(values: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The nearest bfloat16, what it lacks, and both joined."""
    count = 1 << (values.numel() - 1).bit_length()
    given = torch.zeros(count, device=DEVICE)
    given[: values.numel()] = values
    high, low, back = (torch.zeros(count, dtype=dtype, device=DEVICE) for dtype in (torch.bfloat16, torch.int16, torch.float32))
    halves_kernel[(1,)](given, high, low, back, NUMBERS=count)
    return tuple(tensor[: values.numel()] for tensor in (high, low, back))


def halves_of_reference(values: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The same in plain torch."""
    high, low = values.bfloat16(), remainder_ref(values)
    return high, low, joined_ref(high, low)


def comes_back(form: Any, patterns: list[int]) -> bool:
    """All comes back but for ties that are rounded down, which lose one last bit: those whose first half is even."""
    pattern = torch.tensor(patterns, dtype=torch.int64)
    expected = torch.where(pattern & 0x1FFFF == 0x8000, pattern - 1, pattern)
    values = pattern.to(torch.int32).view(torch.float32).to(DEVICE)
    high, low, back = form(values)
    assert torch.equal(bits(high), bits(values.bfloat16()))
    assert torch.equal(low.cpu().int() & 0xFFFF, (expected & 0xFFFF).int())
    return torch.equal(bits(back), expected.to(torch.int32))


HALVES = both(halves_of_kernel, halves_of_reference)
FIRST = [0, 1, 2, 0x7F, 0x80, 0x81, 0x3F7F, 0x3F80, 0x3F81, 0x7F7E, 0x7F7F]  # halves of a positive number: 0, denormal, ..., largest
LAST = [0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF]


@pytest.mark.parametrize("form", HALVES)
def test_edges_are_kept_in_two_halves(form: Any) -> None:
    assert comes_back(form, [sign | first << 16 | last for sign in (0, 1 << 31) for first in FIRST for last in LAST])
    assert comes_back(form, [0x3F80 << 16 | last for last in range(1 << 16)]) and comes_back(
        form, [0xBF81_0000 | last for last in range(1 << 16)]
    )


@pytest.mark.parametrize("form", HALVES)
@given(st.lists(st.integers(0, 2**32 - 1).filter(lambda pattern: pattern >> 23 & 0xFF != 0xFF), min_size=1, max_size=64))
@settings(max_examples=100, deadline=None)
def test_any_number_is_kept_in_two_halves(form: Any, patterns: list[int]) -> None:
    assert comes_back(form, patterns)


@needs_kernels
@pytest.mark.parametrize("summed", [True, False])
@pytest.mark.parametrize("name", RULES)
def test_masters_in_16_bits(name: str, summed: bool) -> None:
    """They move as those in float32 do, and the parameters are their nearest."""
    short, long = Shard(name, 2, 1), Shard(name, 2, 1)
    masters = long.masters
    short.in_16_bits()
    short.before[0] = frame(short.masters).clone()
    for step in range(1, 11):
        gradients: dict[str, Any] = {"grads": noise(short.numbers, seed=step)}
        if not summed:
            contributions = [noise(2 * short.numbers, seed=10 * step + rank) for rank in range(2)]
            gradients = {"contributions": addresses(contributions)}
        for shard in (short, long):
            shard.step(step, 0.3, rank=1, **gradients)
        found = joined_ref(short.part(1), short.masters)
        assert torch.allclose(found, masters, rtol=1e-6, atol=1e-6), f"step {step}: {(found - masters).abs().max()}"
        assert all(torch.equal(bits(short.part(rank)), bits(found.bfloat16())) for rank in range(2)), f"step {step}"
        assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(short.remembered, long.remembered, strict=True))
    assert short.unchanged(but=(0, 1)) and not torch.equal(masters, Shard(name).masters)


@needs_kernels
def test_ties_lose_one_last_bit_and_no_more() -> None:
    """A step that moves nothing, again and again."""
    shard = Shard("no momentum")
    shard.masters.view(torch.int32).copy_(shard.masters.view(torch.int32) & ~0xFFFF | 0x8000)
    shard.part(0).copy_(shard.masters)
    masters = shard.masters.clone()
    shard.in_16_bits()
    for _ in range(3):
        shard.step(1, grads=torch.zeros(shard.numbers, device=DEVICE))
        lost = bits(masters) - bits(joined_ref(shard.part(0), shard.masters))
        down = bits(masters) & 0x10000 == 0
        assert torch.equal(lost, down.int())


@needs_kernels
@pytest.mark.parametrize("in_16_bits", [False, True])
def test_a_shard_far_into_a_bucket(in_16_bits: bool) -> None:
    """More numbers than an int32 counts lie before it: here they are none's memory."""
    far, near = Shard("usual", 2), Shard("usual", 2)
    number = 2**31 // far.numbers
    contributions = [noise(2 * far.numbers, seed=rank) for rank in range(2)]
    for bucket in contributions:
        round_in_place_ref(bucket, torch.bfloat16)
    for shard, at in ((far, number), (near, 0)):
        if in_16_bits:
            shard.in_16_bits()
        grads, weights = addresses(contributions, 4 * at * shard.numbers), addresses(shard.weights, 2 * at * shard.numbers)
        options = {"shard": at, "rank": 1, "push": True, "contributions": grads, "wire": torch.bfloat16}
        update(RULES["usual"](1), shard.masters, shard.remembered, weights, shard.dtype, factor(1.0), **options)
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(far.tensors(), near.tensors(), strict=True))


@needs_kernels
def test_what_does_not_belong_together_is_refused() -> None:
    shard = Shard("usual")
    places = addresses(shard.weights)
    for gradients in ({}, {"grads": shard.masters, "contributions": places}):
        with pytest.raises(AssertionError, match=f"{shard.numbers} masters"):
            shard.step(1, **gradients)
    with pytest.raises(AssertionError, match="wider"):
        shard.step(1, contributions=places, wire=torch.float64)
    with pytest.raises(AssertionError, match="wider"):
        shard.step(1, contributions=places, wire=torch.float32, accumulated=torch.bfloat16)
    shard.masters = shard.masters[1:]
    with pytest.raises(AssertionError, match=f"{shard.numbers - 1} masters"):
        shard.step(1, grads=shard.masters)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("in_16_bits", [False, True])
@pytest.mark.parametrize("name", RULES)
def test_large_on_a_gpu(name: str, in_16_bits: bool) -> None:
    """Steps of a shard of 1025 tiles: torch's numbers, all ranks' parameters, and the same bits each time."""
    found = []
    for _ in range(2):
        shard = Shard(name, ranks=4, shard=2, tiles=1025)
        exact = Exact(name, shard.masters)
        if in_16_bits:
            shard.in_16_bits()
        for step in range(1, 4):
            contributions = [noise(4 * shard.numbers, seed=10 * step + rank) for rank in range(4)]
            for bucket in contributions:
                round_in_place_ref(bucket, torch.bfloat16)
            summed = torch.full((shard.numbers,), torch.nan, device=DEVICE)
            squares = torch.zeros(32, dtype=torch.float64, device=DEVICE)
            reduce_shard(addresses(contributions), summed, squares, first=2 * 1025, rank=3, wire=torch.bfloat16)
            shard.step(step, 0.3, rank=3, contributions=addresses(contributions), wire=torch.bfloat16)
            exact.step(summed.double() * 0.3)
            masters = joined_ref(shard.part(3), shard.masters) if in_16_bits else shard.masters
            for one, expected in zip((masters, *shard.remembered), (exact.masters, *exact.remembered()), strict=True):
                assert close(one, expected, 4 + 4 * step), f"step {step}: {(one.double() - expected).abs().max()}"
            assert all(torch.equal(bits(shard.part(rank)), bits(masters.bfloat16())) for rank in range(4))
        found.append([bits(tensor) for tensor in shard.tensors()])
    assert all(map(torch.equal, *found))

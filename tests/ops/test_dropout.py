"""Dropout as a model uses it: one mask in every layout, drawn again by backward and by recomputation, and torch's generators left alone."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from pymesh3d.errors import ConfigError
from pymesh3d.ops.dropout import dropout, mask_counter, module_key
from pymesh3d.random import parameter_key

KEY, COUNTER = module_key(0, "layers.0.dropout"), mask_counter(5, 2)
MASK: dict[str, Any] = {"key": KEY, "counter": COUNTER}
P = 0.25

# A change of any of these would silently change the masks of everybody's runs.
GOLDEN_KEYS = {
    (0, "layers.0.dropout"): 0x9CA3C66DBFFA758A,
    (1234, "layers.3.mlp.dropout"): 0x556670771B6D77D8,
    (2**64 - 1, ""): 0xDBD535D055CDD1D7,
}
# 64 elements from index 1001 on, p 0.25, seed 1234, layers.3.mlp.dropout, step 7, microbatch 3
GOLDEN_MASK = "1000101100110011111111110111011001111101100011101110110101100111"


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize(("seed", "name"), GOLDEN_KEYS)
def test_keys_never_change(seed: int, name: str) -> None:
    assert module_key(seed, name) == GOLDEN_KEYS[seed, name]


def test_masks_never_change() -> None:
    mask = {"key": module_key(1234, "layers.3.mlp.dropout"), "counter": mask_counter(7, 3)}
    y = dropout(torch.ones(64), P, start=1001, size=2000, **mask)
    assert "".join("01"[bool(value)] for value in y) == GOLDEN_MASK
    assert set(y.tolist()) == {0.0, torch.tensor(1 / 0.75).item()}


def test_a_module_and_a_parameter_of_one_name_have_streams_of_their_own() -> None:
    assert module_key(3, "a") != parameter_key(3, "a")


def test_every_seed_module_step_and_microbatch_has_a_mask_of_its_own() -> None:
    seeds = [(module_key(seed, name), COUNTER) for seed, name in ((0, "a"), (1, "a"), (2**63, "a"), (0, "b"), (0, "a "))]
    times = [(KEY, mask_counter(step, microbatch)) for step, microbatch in ((0, 0), (0, 1), (1, 0), (0, 2**32 - 1), (2**32 - 1, 0))]
    masks = [dropout(torch.ones(10**5), 0.5, key=key, counter=counter) != 0 for key, counter in seeds + times]
    for i, one in enumerate(masks):
        for other in masks[:i]:
            assert abs((one == other).double().mean() - 0.5) < 5 * 0.5 / 10**2.5, "a fair coin: deviation 0.5 / sqrt(1e5)"


def test_the_gradient_is_the_mask_over_what_is_kept() -> None:
    x, grad_y = noise(6, 37).requires_grad_(), noise(6, 37, seed=1)
    y = dropout(x, P, **MASK)
    y.backward(grad_y)
    mask = (y.detach() != 0).double() / 0.75
    assert torch.equal(y, torch.where(mask != 0, x * (1 / 0.75), 0.0))
    assert 0 < int((mask == 0).sum()) < mask.numel()
    torch.testing.assert_close(x.grad, grad_y * mask, rtol=1e-15, atol=0)
    assert torch.equal(x.grad == 0, mask == 0)


def test_gradients_of_gradients() -> None:
    assert torch.autograd.gradgradcheck(lambda x: dropout(x, P, **MASK) ** 2, noise(3, 7).requires_grad_())


def test_backward_needs_nothing_saved() -> None:
    packed: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        packed.append(tensor)
        return tensor

    x = noise(4, 8).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = dropout(x, P, **MASK)
    assert not packed
    drop = y.grad_fn.next_functions[0][0]  # before the view
    assert vars(drop) == {"mask": {"p": P, **MASK, "row0": 0, "col0": 0, "global_cols": 8}}


def test_the_strides_of_x_and_of_its_gradient_do_not_show() -> None:
    x = noise(5, 4, 6)
    grads = []
    for view in (x, x.permute(2, 0, 1).contiguous().permute(1, 2, 0)):
        leaf = view.detach().requires_grad_()
        y = dropout(leaf, P, **MASK)
        y.backward(noise(4, 5, 6, seed=1).transpose(0, 1))
        grads += [y, leaf.grad]
    assert torch.equal(grads[0], grads[2]) and torch.equal(grads[1], grads[3])


def test_p_zero_is_no_operation() -> None:
    x = noise(2, 3)
    assert dropout(x, 0, **MASK) is x


@pytest.mark.parametrize("shape", [(0,), (2, 0, 3), (0, 4)])
def test_an_empty_activation_stays_empty(shape: tuple[int, ...]) -> None:
    x = torch.empty(shape, requires_grad=True)
    y = dropout(x, P, **MASK)
    y.sum().backward()
    assert y.shape == x.grad.shape == shape


B, S, D = 4, 6, 21  # sequences, tokens, features


@pytest.mark.parametrize(("dim", "cuts"), [(-1, (0, 7, 14, 21)), (2, (0, 1, 3, 21)), (1, (0, 3, 6)), (-2, (0, 1, 2, 6)), (0, (0, 1, 4))])
def test_shards_along_any_dim_have_the_parts_of_the_whole(dim: int, cuts: tuple[int, ...]) -> None:
    """tp cuts features or tokens, dp the sequences; gradients as well as values."""
    x, grad_y = noise(B, S, D).requires_grad_(), noise(B, S, D, seed=1)
    whole = dropout(x, P, **MASK)
    whole.backward(grad_y)
    parts, grads = [], []
    for start, end in pairwise(cuts):
        part = x.detach().narrow(dim, start, end - start).requires_grad_()
        parts.append(dropout(part, P, dim=dim, start=start, size=x.shape[dim], **MASK))
        parts[-1].backward(grad_y.narrow(dim, start, end - start))
        grads.append(part.grad)
    assert torch.equal(torch.cat(parts, dim), whole)
    assert torch.equal(torch.cat(grads, dim), x.grad)


def test_the_examples_of_the_docstring() -> None:
    """Sequences b: of the batch, whole, and as rank 1 of 3 has their features or tokens."""
    x, b = noise(B, S, D), 2
    whole = dropout(x, P, **MASK)
    assert torch.equal(dropout(x[b:], P, row0=b * S, **MASK), whole[b:])
    assert torch.equal(dropout(x[b:, :, 7:14], P, start=7, size=D, row0=b * S, **MASK), whole[b:, :, 7:14])
    assert torch.equal(dropout(x[b:, 2:4], P, dim=1, start=2, size=S, row0=b, **MASK), whole[b:, 2:4])


def block(drop: Callable[[torch.Tensor, str], torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A piece of a model with dropout in two places."""

    def run(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        return x + drop(drop(F.silu(x @ up), "mlp") @ down, "out")

    return run


def gradients(run: Callable[..., torch.Tensor], recompute: bool) -> list[torch.Tensor]:
    leaves = [noise(3, 5, 16).requires_grad_(), noise(16, 24, seed=1).requires_grad_(), noise(24, 16, seed=2).requires_grad_()]
    y = checkpoint(run, *leaves, use_reentrant=False, preserve_rng_state=False) if recompute else run(*leaves)
    (y**2).sum().backward()
    return [y.detach(), *(leaf.grad for leaf in leaves)]


def test_recomputation_draws_the_same_mask_and_leaves_the_generators_alone() -> None:
    run = block(lambda x, name: dropout(x, P, key=module_key(0, name), counter=COUNTER))
    before = torch.get_rng_state()
    plain, recomputed = gradients(run, recompute=False), gradients(run, recompute=True)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(one, other) for one, other in zip(plain, recomputed, strict=True))
    stateful = block(lambda x, _: F.dropout(x, P))  # the same test sees torch's own, which needs its state restored
    torch.manual_seed(0)
    plain = gradients(stateful, recompute=False)
    torch.manual_seed(0)
    assert not torch.equal(plain[1], gradients(stateful, recompute=True)[1])


@pytest.mark.parametrize("seed", [-1, 2**64, 1.0, True, None, "0"])
def test_a_bad_seed_is_refused(seed: object) -> None:
    with pytest.raises(ConfigError, match="seed must be an integer") as refused:
        module_key(seed, "a")
    assert refused.value.given == f"seed={seed!r}"


@pytest.mark.parametrize("value", [-1, 2**32, 1.0, True, None])
def test_a_bad_step_or_microbatch_is_refused(value: object) -> None:
    for name, arguments in (("step", (value, 0)), ("microbatch", (0, value))):
        with pytest.raises(ConfigError, match=f"{name} must be an integer from 0") as refused:
            mask_counter(*arguments)
        assert refused.value.given == f"{name}={value!r}"


@pytest.mark.parametrize(
    ("change", "given_value"),
    [
        ({"x": torch.zeros(2, 3, dtype=torch.float16)}, "dtype torch.float16"),
        ({"x": torch.zeros(())}, "dim=-1 of 0 dims"),
        ({"dim": 2}, "dim=2 of 2 dims"),
        ({"dim": -3}, "dim=-3 of 2 dims"),
        ({"start": -1, "size": 6}, "start=-1, 3 of size=6"),
        ({"start": 4, "size": 6}, "start=4, 3 of size=6"),
        ({"start": 1}, "start=1, 3 of size=3"),
        ({"p": 1.0}, "p=1.0"),
        ({"p": -0.0001}, "p=-0.0001"),
    ],
)
def test_refusals_name_the_value(change: dict[str, Any], given_value: str) -> None:
    request = {"x": torch.zeros(2, 3), "p": P} | MASK | change
    with pytest.raises(ConfigError) as refused:
        dropout(request.pop("x"), request.pop("p"), **request)
    assert refused.value.given == given_value


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="compares a GPU with the CPU; there is no GPU here")
def test_cuda_has_the_values_and_gradients_of_cpu() -> None:
    results = []
    for device in ("cpu", "cuda"):
        x = noise(B, S, D).to(device, torch.bfloat16).requires_grad_()
        y = dropout(x, 0.1, start=3, size=40, row0=9, **MASK)
        y.backward(noise(B, S, D, seed=1).to(device, torch.bfloat16))
        results.append((y.detach().cpu(), x.grad.cpu()))
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))

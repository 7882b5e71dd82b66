"""Master weights and optimizer state in the CPU's memory: the same bits as elsewhere, step by step, and nothing of them on the GPU."""

from __future__ import annotations

import functools
import gc
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pymesh3d.checkpoint.load import load
from pymesh3d.checkpoint.save import save
from pymesh3d.dp import offload as module
from pymesh3d.dp.zero import Zero
from pymesh3d.errors import ConfigError
from pymesh3d.launch import launch
from pymesh3d.mesh import Mesh, init_mesh
from pymesh3d.triton_kernels.zero_reduce import TILE
from tests.kernels import bits, needs_kernels

Ranks = Callable[..., list[Any]]
Optimizer = Callable[..., torch.optim.Optimizer]
RULES: dict[str, Optimizer] = {
    "adamw": functools.partial(torch.optim.AdamW, lr=1e-2),
    "fused": functools.partial(torch.optim.AdamW, lr=1e-2, fused=True),
    "adam": functools.partial(torch.optim.Adam, lr=1e-2, betas=(0.8, 0.95)),
    "sgd": functools.partial(torch.optim.SGD, lr=0.1),
    "momentum": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, dampening=0.2),
    "nesterov": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
}
WIDTH = 80  # 6,400 weights a layer: 7 tiles of one rank, the last of which is not full


def both(mesh: Mesh, optimizer: Optimizer, dtype: torch.dtype, width: int = WIDTH, **options: Any) -> list[tuple[nn.Sequential, Zero]]:
    """The same model twice, without and with offload."""
    found = []
    for away in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Linear(width, width, dtype=dtype, device=mesh.device) for _ in range(2)])
        found.append((model, Zero(model, mesh, optimizer=optimizer, weight_decay=0.1, offload=away, **options)))
    return found


def backward(model: nn.Sequential, mesh: Mesh, step: int) -> None:
    x = torch.randn(8, model[0].in_features, generator=torch.Generator().manual_seed(10 * step + mesh.rank))
    model(x.to(model[0].weight.dtype).to(mesh.device)).square().mean().backward()


@contextmanager
def pieces_of(tiles: int) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "PIECE", tiles * TILE)
        yield


def differing(pair: list[tuple[nn.Sequential, Zero]]) -> list[str]:
    """What of states and parameters does not have the same bits."""
    (first, plain), (second, away) = pair
    wanted, found = plain.state(), away.state()
    names = sorted(wanted.keys() ^ found.keys())
    names += [name for name in wanted.keys() & found.keys() if not torch.equal(bits(wanted[name]), bits(found[name]))]
    with plain.whole(), away.whole():
        others = dict(second.named_parameters())
        names += [name for name, value in first.named_parameters() if not torch.equal(bits(value.detach()), bits(others[name].detach()))]
    return names


def steps_of_both(stage: int, kernels: bool, optimizer: Optimizer, dtype: torch.dtype, tiles: int, device: str = "cpu") -> list[str]:
    """What differs after steps, the first of which and one more are not taken, with a scheduler, values written and a state loaded."""
    mesh, wrong = init_mesh(device=device), []
    with pieces_of(tiles):
        pair = both(mesh, optimizer, dtype, stage=stage, kernels=kernels)
    schedules = [torch.optim.lr_scheduler.ExponentialLR(zero.optimizer, 0.7) for _, zero in pair]
    for step in range(7):
        for (model, zero), schedule in zip(pair, schedules, strict=True):
            backward(model, mesh, step)
            if step in (0, 3):
                model[1].bias.main_grad[0] = math.nan
            if step == 4:
                zero.load_state({name: tensor.clone() for name, tensor in zero.state().items()})
            if step == 5:
                with zero.whole(), torch.no_grad():
                    model[0].weight[:, 3] = 1.5
            norm, taken = zero.step(1.0)
            assert taken == (step not in (0, 3)), f"step {step}: norm {norm}"
            schedule.step()
        wrong += [f"{name} in step {step}" for name in differing(pair)]
    _, away = pair[1]
    owned = [value for group in away.optimizer.param_groups for value in group["params"]]
    assert {id(value) for value in owned} == {id(value) for value in away.masters} and set(away.optimizer.state) <= set(owned)
    kept = [*owned, *(tensor for state in away.optimizer.state.values() for tensor in state.values() if isinstance(tensor, torch.Tensor))]
    assert all(tensor.device.type == "cpu" for tensor in kept)
    assert device == "cpu" or all(tensor.is_pinned() for tensor in kept if tensor.ndim)
    mesh.close()
    return wrong


@pytest.mark.parametrize(
    ("optimizer", "stage", "dtype", "tiles"),
    [
        ("adamw", 1, torch.bfloat16, 2),
        ("fused", 0, torch.bfloat16, 3),
        ("adam", 3, torch.float32, 1),
        ("sgd", 1, torch.bfloat16, 2),
        ("momentum", 2, torch.bfloat16, 1),
        ("nesterov", 1, torch.float32, 1000),
    ],
)
@pytest.mark.parametrize("kernels", [False, pytest.param(True, marks=needs_kernels)])
def test_the_bits_are_the_same(ranks: Ranks, optimizer: str, stage: int, dtype: torch.dtype, tiles: int, kernels: bool) -> None:
    assert ranks(2, steps_of_both, stage, kernels, RULES[optimizer], dtype, tiles) == [[], []]


def test_a_rank_alone(ranks: Ranks) -> None:
    assert ranks(1, steps_of_both, 1, False, RULES["adamw"], torch.bfloat16, 4) == [[]]


def seen_at_once() -> list[tuple[int, int]]:
    """The part and the number of each piece's numbers, in the order in which they are updated."""
    mesh, seen = init_mesh(device="cpu"), []
    with pieces_of(3):
        _, (model, zero) = both(mesh, RULES["adamw"], torch.bfloat16, stage=1, kernels=False)
    torch_step = torch.optim.AdamW.step

    def step(self: torch.optim.AdamW) -> None:
        (here,) = self.param_groups[0]["params"]
        assert [value for value in zero.masters if value.data_ptr() == here.data_ptr()] == [], "the masters themselves are not worked on"
        seen.append((here.numel(), int(self.param_groups[0]["weight_decay"] > 0)))
        torch_step(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.optim.AdamW, "step", step)
        backward(model, mesh, 0)
        zero.step()
    mesh.close()
    return seen


def test_no_more_than_a_piece_is_computed_at_once(ranks: Ranks) -> None:
    """12,800 weights in 13 tiles, then 160 biases in one."""
    assert ranks(1, seen_at_once) == [[*[(3 * TILE, 1)] * 4, (TILE, 1), (TILE, 0)]]


def nothing_of_a_step(kernels: bool) -> bool:
    """Whether a step on NaN as scale leaves all as it was, and no state that was not there."""
    mesh = init_mesh(device="cpu")
    with pieces_of(2):
        _, (model, zero) = both(mesh, RULES["momentum"], torch.bfloat16, stage=1, kernels=kernels)
    same = []
    for step in range(2):
        before = {name: tensor.clone() for name, tensor in (zero.state() | dict(model.named_parameters())).items()}
        backward(model, mesh, step)
        _, taken = zero.step(veto=torch.tensor(math.nan, dtype=torch.float64))
        after = zero.state() | dict(model.named_parameters())
        same.append(not taken and before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before))
        backward(model, mesh, step)
        assert zero.step()[1]
    mesh.close()
    return all(same) and "momentum_buffer.0" in after


@pytest.mark.parametrize("kernels", [False, pytest.param(True, marks=needs_kernels)])
def test_a_step_that_is_not_taken_changes_nothing(ranks: Ranks, kernels: bool) -> None:
    assert ranks(2, nothing_of_a_step, kernels) == [True] * 2


def saved_and_loaded(directory: str) -> list[str]:
    """What differs where each goes on from the other's checkpoint."""
    mesh = init_mesh(device="cpu")
    pair = both(mesh, RULES["adamw"], torch.bfloat16, stage=1, kernels=False)
    for number, (model, zero) in enumerate(pair):
        for step in range(2):
            backward(model, mesh, step)
            zero.step()
        save(Path(directory, str(number)), 2, zero.state(), {}, mesh)
    fresh = both(mesh, RULES["adamw"], torch.bfloat16, stage=1, kernels=False)
    for number, (_, zero) in enumerate(fresh):
        zero.load_state(load(Path(directory, str(1 - number)), zero.state(), {}, mesh)[1])
    for model, zero in (pair[0], *fresh):
        backward(model, mesh, 2)
        zero.step()
    wrong = differing(fresh) + differing([pair[0], fresh[1]])
    mesh.close()
    return wrong


def test_checkpoints_are_the_same_with_and_without(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(2, saved_and_loaded, str(tmp_path)) == [[], []]


def refusals() -> list[str]:
    mesh, texts = init_mesh(device="cpu"), []
    amsgrad = functools.partial(torch.optim.AdamW, amsgrad=True)
    for dtype, optimizer, options in (
        (torch.bfloat16, RULES["adamw"], {"param_remainders": True}),
        (torch.bfloat16, torch.optim.RMSprop, {}),
        (torch.bfloat16, amsgrad, {}),
        (torch.float64, RULES["adamw"], {}),
    ):
        with pytest.raises(ConfigError) as caught:
            Zero(nn.Linear(3, 2, dtype=dtype), mesh, stage=1, optimizer=optimizer, weight_decay=0.0, offload=True, **options)
        texts.append(str(caught.value))
    _, (model, zero) = both(mesh, RULES["adamw"], torch.bfloat16, stage=1, kernels=False)
    with pytest.raises(ConfigError) as caught:
        zero.optimizer.step()
    texts.append(str(caught.value))
    zero.optimizer.register_step_post_hook(lambda *_: None)
    backward(model, mesh, 0)
    with pytest.raises(ConfigError) as caught:
        zero.step()
    texts.append(str(caught.value))
    mesh.close()
    return texts


def test_what_cannot_be_offloaded_is_refused(ranks: Ranks) -> None:
    (texts,) = ranks(1, refusals)
    rule = (
        "only steps of torch's own AdamW, Adam and SGD, without amsgrad, hooks and such, on float32, are taken in pieces. Use offload=False"
    )
    assert texts[0].startswith(
        "offload=True, param_remainders=True: remainders are of the parameters, on the GPU. Use param_remainders=False"
    )
    assert texts[1:4] == [
        f"offload=True with a {kind} of torch.{dtype} masters: {rule}"
        for kind, dtype in (("RMSprop", "float32"), ("AdamW", "float32"), ("AdamW", "float64"))
    ]
    assert texts[4].startswith("optimizer.step(): gradients must be summed over ranks before")
    assert texts[5] == f"offload=True with a AdamW of torch.float32 masters: {rule}"


def on_a_gpu() -> bool:
    """The same bits in kernels and in torch's steps; and between steps the GPU has the parameters and the gradients alone."""
    for kernels in (True, False):
        for rule in RULES.values():
            assert steps_of_both(1, kernels, rule, torch.bfloat16, 2, "cuda") == []
    mesh, width = init_mesh(device="cuda"), 2048
    _, without, there = (memory_taken(mesh, width, away) for away in (False, False, True))  # libraries take theirs in the first
    numbers = 2 * width * width
    assert abs(without - there - 12 * numbers) < numbers // 4, f"of {numbers} parameters {without} and {there} bytes"
    mesh.close()
    return True


def memory_taken(mesh: Mesh, width: int, away: bool) -> int:
    """Bytes of the GPU that a model and its optimizer keep between steps."""
    gc.collect()
    before = torch.cuda.memory_allocated()
    model = nn.Sequential(*[nn.Linear(width, width, bias=False, dtype=torch.bfloat16, device=mesh.device) for _ in range(2)])
    zero = Zero(model, mesh, stage=1, optimizer=RULES["fused"], weight_decay=0.1, offload=away)
    for step in range(3):
        backward(model, mesh, step)
        zero.step(1.0)
    return torch.cuda.memory_allocated() - before


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    assert launch(["-c", "from tests.dp.test_offload import on_a_gpu; assert on_a_gpu()"], 1) == 0

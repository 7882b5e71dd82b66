"""Master weights: what of the parameters they keep, what of a state is theirs, and which of them decay."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from pymesh3d.comm.collectives import all_gather
from pymesh3d.dp.zero import Zero
from pymesh3d.errors import ConfigError
from pymesh3d.mesh import init_mesh
from pymesh3d.placement import placement_of

Ranks = Callable[..., list[Any]]
ADAMW = functools.partial(torch.optim.AdamW, lr=1e-2)
MOMENTUM = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def decayed() -> dict[str, torch.Tensor]:
    """Parameters after a step with no gradient at all."""
    mesh = init_mesh(device="cpu")
    module = nn.Linear(3, 2)
    nn.init.ones_(module.weight)
    nn.init.ones_(module.bias)
    zero = Zero(module, mesh, stage=1, optimizer=functools.partial(torch.optim.AdamW, lr=0.5), weight_decay=0.5)
    zero.step()
    mesh.close()
    return {name: p.detach() for name, p in module.named_parameters()}


def test_weight_decay_is_for_matrices_only(ranks: Ranks) -> None:
    for found in ranks(2, decayed):
        assert (found["weight"] == 0.75).all() and (found["bias"] == 1.0).all()


def written_later(stage: int) -> tuple[dict[str, torch.Tensor], list[bool]]:
    """Masters of two bf16 matrices after small steps of SGD, one of which got new values in the middle; what states held."""
    mesh = init_mesh(device="cpu")
    module = nn.ModuleDict({name: nn.Linear(16, 16, bias=False, dtype=torch.bfloat16) for name in ("kept", "loaded")})
    for layer in module.values():
        nn.init.ones_(layer.weight)
    zero = Zero(module, mesh, stage=stage, optimizer=functools.partial(torch.optim.SGD, lr=1.0), weight_decay=0.0)
    (master,), saved, held = zero.masters, {}, []
    for step in range(6):
        if step == 2:
            module["loaded"].load_state_dict({"weight": torch.full((16, 16), 3.0)})
            saved = {name: tensor.clone() for name, tensor in zero.state().items()}
        for layer in module.values():
            layer.weight.main_grad.fill_(2.0**-10 / mesh.dp.size)  # too small for a bf16 weight of 1 or 3 to change
        zero.step()
    trained = torch.zeros(zero.buckets[0].size)
    trained[:256], trained[256:512] = 1 - 6 * 2.0**-10, 3 - 4 * 2.0**-10
    held.append(torch.equal(master, trained if stage == 0 else trained.chunk(2)[mesh.rank]))
    module["kept"].load_state_dict({"weight": torch.full((16, 16), 9.0)})
    zero.load_state(saved)  # a later step must not take over what was written before it
    for layer in module.values():
        layer.weight.main_grad.zero_()
    zero.step()
    held += [torch.equal(master, saved["master.0"]), zero.steps_taken == 3]
    full = master.detach().clone() if stage == 0 else all_gather(master.detach(), mesh.dp).wait()
    mesh.close()
    return {"kept": full[:256], "loaded": full[256:512]}, held


@pytest.mark.parametrize("stage", [0, 1])
def test_values_written_later_are_taken_over_and_no_others(ranks: Ranks, stage: int) -> None:
    for found, held in ranks(2, written_later, stage):
        assert (found["kept"] == 1 - 2 * 2.0**-10).all(), "the master kept what bf16 cannot hold"
        assert (found["loaded"] == 3).all()
        assert all(held), held


def written_before_a_step() -> list[float]:
    """What a step that changes nothing leaves of values that were written before it."""
    mesh = init_mesh(device="cpu")
    layer = nn.Linear(4, 1, bias=False, dtype=torch.bfloat16)
    zero = Zero(layer, mesh, stage=1, optimizer=functools.partial(torch.optim.SGD, lr=0.0), weight_decay=0.0)
    layer.load_state_dict({"weight": torch.full((1, 4), 3.0)})
    zero.step()
    mesh.close()
    return layer.weight.flatten().tolist()


def test_a_step_takes_over_what_was_written(ranks: Ranks) -> None:
    assert ranks(2, written_before_a_step) == [[3.0] * 4] * 2


def written_at_edges() -> list[torch.Tensor]:
    """Masters, together, of matrices that begin and end within shards, all but one of which were written; then of that one."""
    mesh = init_mesh(device="cpu")
    layers = nn.ModuleList(nn.Linear(10, 100, bias=False, dtype=torch.bfloat16) for _ in range(5))  # of shards of 3,072 numbers
    zero = Zero(layers, mesh, stage=1, optimizer=functools.partial(torch.optim.SGD, lr=1.0), weight_decay=0.0)
    exact = 1 + 2.0**-12  # no bfloat16
    found = []
    for written in ({0, 1, 3, 4}, {2}):
        for master in zero.masters:
            master.data.fill_(exact)
        for number, layer in enumerate(layers):
            if number in written:
                layer.load_state_dict({"weight": torch.full((100, 10), float(number + 2))})
        zero.step()
        (master,) = zero.masters
        whole = all_gather(master.detach(), mesh.dp).wait()
        slots = [placement_of(layer.weight).zero[1] for layer in layers]
        found.append(torch.stack([whole[start : start + 1000] for start in slots]))
    mesh.close()
    return found


def test_what_is_written_across_shards_is_taken_over_and_nothing_beside(ranks: Ranks) -> None:
    exact = torch.tensor(1 + 2.0**-12)
    for first, second in ranks(2, written_at_edges):
        for number in range(5):
            new = torch.tensor(number + 2.0)
            assert (first[number] == (exact if number == 2 else new)).all(), f"matrix {number}: {first[number].unique()}"
            assert (second[number] == (new if number == 2 else exact)).all(), f"matrix {number}: {second[number].unique()}"


FOREIGN = {
    "master.7 [1]": {"master.7": torch.ones(1)},
    "master.0 [3]": {"master.0": torch.ones(3)},
    "master.0 []": {"master.0": torch.tensor(1.0)},
    "steps_taken [2]": {"steps_taken": torch.ones(2)},
    "exp_avg.9 [1024], with exp_avg.-1 []": {"exp_avg.9": torch.ones(1024), "exp_avg.-1": torch.tensor(1.0)},
    "exp_avg.0 []": {"step.0": torch.tensor(1.0), "exp_avg.0": torch.tensor(1.0), "exp_avg_sq.0": torch.ones(1024)},
    "other.0 [1024]": {"other.0": torch.ones(1024)},
    "exp_avg.one [1024], with exp_avg [1024]": {"exp_avg.one": torch.ones(1024), "exp_avg": torch.ones(1024)},
    "exp_avg.1 [32], with step.0 [0]": {"exp_avg.1": torch.ones(32), "exp_avg.0": torch.ones(1024), "step.0": torch.ones(0)},
}


def foreign_states() -> list[str]:
    mesh = init_mesh(device="cpu")
    zero, texts = Zero(nn.Linear(3, 2), mesh, stage=1, optimizer=ADAMW, weight_decay=0.0), []
    good = {name: tensor.clone() for name, tensor in zero.state().items()}
    zero.masters[0].data.fill_(5.0)
    zero.step()
    before = {name: tensor.clone() for name, tensor in zero.state().items()}
    for change in FOREIGN.values():
        with pytest.raises(ConfigError) as caught:
            zero.load_state({**good, **change})
        texts.append(str(caught.value))
    with pytest.raises(ConfigError, match=r"a state without step\.0, without exp_avg_sq\.0"):
        zero.load_state({**good, "exp_avg.0": torch.ones(1024)})
    with pytest.raises(ConfigError) as caught:
        zero.load_state({"exp_avg.1": torch.ones(1024)})
    texts.append(str(caught.value))
    after = zero.state()
    assert list(after) == list(before) and all(torch.equal(after[name], before[name]) for name in before), "it is left as it was"
    zero.load_state(before)
    assert all(torch.equal(zero.state()[name], before[name]) for name in before)
    zero.load_state(good)
    texts.append(str(sorted(zero.state()) == sorted(good)))
    mesh.close()
    return texts


def test_a_state_of_something_else_is_refused(ranks: Ranks) -> None:
    """And one that has no moments yet leaves none."""
    rule = "it must hold steps_taken [], master.0 [1024], master.1 [1024], and besides only what the optimizer keeps for one of them, as "
    rule += "exp_avg.0 [1024] or step.0 []"
    way = "Load what state() gave on the same rank of the same mesh, with the same ZeRO stage, bucket_elements and frozen parameters"
    given = [*(f"with {names}" for names in FOREIGN), "without steps_taken, without master.0, without master.1"]
    assert ranks(1, foreign_states) == [[*(f"a state {names}: {rule}. {way}" for names in given), "True"]]


def remainders(stage: int, kernels: bool, optimizer: Callable[..., torch.optim.Optimizer]) -> tuple[list[bool], list[int]]:
    """Whether parameters, masters and what is remembered are those of float32 masters after some steps, of which one must not be taken and
    one comes after a state was loaded; and how many bytes the masters take besides the parameters."""
    mesh = init_mesh(device="cpu")
    zeros = []
    for kept in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Linear(40, 40, dtype=torch.bfloat16) for _ in range(2)])
        options: dict[str, Any] = {"param_remainders": kept, "kernels": kernels}
        zeros.append((model, Zero(model, mesh, stage=stage, optimizer=optimizer, weight_decay=0.1, **options)))
    same = []
    for step in range(7):
        for model, zero in zeros:
            x = torch.randn(8, 40, generator=torch.Generator().manual_seed(10 * step + mesh.rank)).bfloat16()
            model(x).square().mean().backward()
            if step == 2:
                model[1].bias.main_grad[0] = math.nan
            if step == 4:
                zero.load_state({name: tensor.clone() for name, tensor in zero.state().items()})
            if step == 5:
                with zero.whole(), torch.no_grad():
                    model[0].weight[:, 3] = 1.5
            norm, taken = zero.step(1.0)
            assert taken == (step != 2), f"step {step}: norm {norm}"
        (first, plain), (second, thrifty) = zeros
        wanted, found = plain.state(), thrifty.state()
        assert wanted.keys() == found.keys()
        same.append(all((wanted[name] - tensor).abs().max() <= 1e-6 * wanted[name].abs().max() for name, tensor in found.items()))
        with plain.whole(), thrifty.whole():
            unit = 0.0 if kernels else 2.0**-7  # torch rounds its steps otherwise than ours
            pairs = zip(first.parameters(), second.parameters(), strict=True)
            same.append(all(((a - b).abs() <= unit * a.abs()).all() for a, b in pairs))
    plain.load_state(found)
    same.append(all(torch.equal(plain.state()[name], tensor) for name, tensor in found.items()))
    mesh.close()
    return same, [tensor.nbytes for tensor in thrifty._masters._remainders]


@pytest.mark.parametrize(
    ("stage", "kernels", "optimizer"),
    [(0, False, ADAMW), (1, True, MOMENTUM), (1, False, ADAMW), (3, True, ADAMW), (3, False, MOMENTUM)],
)
def test_remainders_are_as_good_as_masters(
    ranks: Ranks, stage: int, kernels: bool, optimizer: Callable[..., torch.optim.Optimizer]
) -> None:
    for same, sizes in ranks(2, remainders, stage, kernels, optimizer):
        assert all(same), same
        assert sum(sizes) == 2 * sum(-(-size // 2048) * 2048 for size in ([1600, 1600, 80] if stage == 3 else [3200, 80])) // (
            2 if stage else 1
        )


def refused_remainders() -> list[str]:
    mesh = init_mesh(device="cpu")
    texts = []
    for dtype, optimizer in ((torch.float32, ADAMW), (torch.bfloat16, functools.partial(torch.optim.AdamW, amsgrad=True))):
        with pytest.raises(ConfigError) as caught:
            Zero(nn.Linear(3, 2, dtype=dtype), mesh, stage=1, optimizer=optimizer, weight_decay=0.0, param_remainders=True)
        texts.append(str(caught.value))
    mesh.close()
    return texts


def test_remainders_of_what_has_none_are_refused(ranks: Ranks) -> None:
    ((dtype, optimizer),) = ranks(1, refused_remainders)
    assert dtype.startswith("param_remainders=True, parameters of torch.float32: only bfloat16 parameters lack")
    assert optimizer.startswith("param_remainders=True with a AdamW: only steps of torch's own AdamW, Adam and SGD, without amsgrad")

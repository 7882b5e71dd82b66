"""A stage: what it keeps of a model, and its microbatches in flight."""

from __future__ import annotations

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from pymesh3d.models.llama import Llama
from pymesh3d.pp.stage import Stage, keep_layers
from tests.plain import SMALL


def test_stages_hold_every_parameter_once_and_by_its_full_name() -> None:
    whole = {name: tuple(p.shape) for name, p in Llama(SMALL, device="meta").named_parameters()}
    held: dict[str, tuple[int, ...]] = {}
    for layers in (range(0, 1), range(1, 3), range(3, 4)):
        model = Llama(SMALL, device="meta")
        keep_layers(model, layers, first=layers.start == 0, last=layers.stop == 4)
        assert (model.embed is None, model.norm is None, model.head is None) == (layers.start != 0, *(layers.stop != 4,) * 2)
        mine = {name: tuple(p.shape) for name, p in model.named_parameters()}
        assert not mine.keys() & held.keys()
        held |= mine
    assert held == whole


def squares(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (output - targets).square().sum()


class Scale(torch.nn.Module):
    """h * w, or ids * w on the first stage."""

    def __init__(self, w: float) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.tensor(w))

    def forward(self, ids: torch.Tensor, h: torch.Tensor | None, masks: object = None) -> torch.Tensor:
        return self.w * (ids if h is None else h)


def test_two_stages_back_propagate_like_one() -> None:
    """loss = (b a x - y)^2: db = 2 r a x, da = 2 r b x, summed over the microbatches, which are taken back in any order."""
    a, b = Scale(2.0), Scale(3.0)
    first, last = Stage(a, first=True, last=False, loss=squares), Stage(b, first=False, last=True, loss=squares)
    data = [(torch.tensor([1.0]), torch.tensor([5.0])), (torch.tensor([2.0]), torch.tensor([10.0]))]
    losses = []
    for number, (ids, targets) in enumerate(data):
        h = first.forward(number, ids, targets, None, train=True)
        assert h.tolist() == [2.0 * ids.item()] and not h.requires_grad
        losses.append(last.forward(number, ids, targets, h.clone(), train=True).item())
    for number in (1, 0):
        sent = last.backward(number, None)
        assert sent is not None
        assert sent.tolist() == [2 * 3.0 * [1.0, 2.0][number]]
        assert first.backward(number, sent) is None
    assert losses == [1.0, 4.0]
    assert b.w.grad is not None and b.w.grad.item() == 2 * 1 * 2 + 2 * 2 * 4
    assert a.w.grad is not None and a.w.grad.item() == 2 * 1 * 3 + 2 * 2 * 6


def test_what_has_been_sent_takes_no_memory() -> None:
    stage = Stage(Scale(2.0), first=True, last=False, loss=squares)
    output = stage.forward(0, torch.ones(1), torch.ones(1), None, train=True)
    memory = StorageWeakRef(output.untyped_storage())
    del output
    assert memory.expired()
    stage.backward(0, torch.ones(1))
    assert stage.module.w.grad.item() == 1.0


def test_without_training_nothing_is_kept() -> None:
    recorded = []

    def loss_of(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        recorded.append(output.requires_grad)
        return squares(output, targets)

    stage = Stage(Scale(2.0), first=False, last=True, loss=loss_of)
    loss = stage.forward(0, torch.ones(1), torch.ones(1), torch.ones(1), train=False)
    assert loss.item() == 1.0 and recorded == [False], "no graph is built"
    with pytest.raises(KeyError):
        stage.backward(0, None)


def test_what_a_failed_step_left_is_forgotten() -> None:
    stage = Stage(Scale(2.0), first=True, last=True, loss=squares)
    stage.forward(0, torch.ones(1), torch.ones(1), None, train=True)
    stage.forget()
    with pytest.raises(KeyError):
        stage.backward(0, None)

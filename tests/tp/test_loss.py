"""The loss over a cut vocabulary is F.cross_entropy over the whole one, and padding of the vocabulary leaves no trace."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pymesh3d.axis import Axis
from pymesh3d.comm.whole import whole
from pymesh3d.errors import ConfigError
from pymesh3d.mesh import Mesh, init_mesh
from pymesh3d.ops.cross_entropy import cross_entropy
from pymesh3d.ops.linear import vocab_lookup
from pymesh3d.placement import Part, Placement, placement_of
from pymesh3d.tp.layers import ColumnParallelLinear, VocabParallelEmbedding
from pymesh3d.tp.loss import vocab_parallel_cross_entropy
from tests.plain import assert_near

Ranks = Callable[..., list[Any]]

V = 8
ENDS = [0, 1, 2, 3, 4, 5, 6, 7]  # of every shard, with 2 and with 4 ranks


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def own(x: torch.Tensor, mesh: Mesh) -> torch.Tensor:
    return x.detach().chunk(mesh.tp.size, -1)[mesh.tp.rank].clone()


def compare(mesh: Mesh, logits: torch.Tensor, target: torch.Tensor, **options: Any) -> float:
    """Loss and gradient against F.cross_entropy. Returns the loss, or the sum of losses."""
    reference = logits.clone().requires_grad_()
    expected = F.cross_entropy(reference.flatten(0, -2), target.flatten(), **options).view(
        target.shape if options["reduction"] == "none" else ()
    )
    local = own(logits, mesh).requires_grad_()
    loss = vocab_parallel_cross_entropy(local, target, mesh=mesh, **options)
    grad = normal(*expected.shape, seed=9)
    expected.backward(grad)
    loss.backward(grad)
    assert_near({"loss": loss.detach()}, {"loss": expected.detach()})
    assert_near({"logits": local.grad}, {"logits": own(reference.grad, mesh), "whole": reference.grad})
    assert not local.grad[target == options.get("ignore_index", -100)].any()
    return float(loss.sum())


def like_torch() -> list[float]:
    mesh = init_mesh(tp=-1, dp=1, device="cpu")
    logits, target = 3 * normal(8, V), torch.tensor(ENDS)
    two_ignored = torch.tensor([0, 3, -100, 4, 7, -100, 1, 6])
    huge = logits.clone()
    huge[0], huge[1], huge[2] = 0, 0, -1e4
    huge[0, 0], huge[1, -1] = 1e4, 1e4
    losses = []
    for reduction in ("none", "mean", "sum"):
        for smoothing in (0.0, 0.1, 1.0):
            options = {"reduction": reduction, "label_smoothing": smoothing}
            losses.append(compare(mesh, logits, target, **options))
            losses.append(compare(mesh, logits, two_ignored, **options))
            losses.append(compare(mesh, huge, target, **options))
            losses.append(compare(mesh, logits, target, ignore_index=4, **options))
            losses.append(compare(mesh, logits.view(2, 4, V), two_ignored.view(2, 4), **options))
            losses.append(compare(mesh, logits.view(4, 2, V).transpose(0, 1), two_ignored.view(4, 2).T, **options))
        only = vocab_parallel_cross_entropy(own(logits[0], mesh), target[0], reduction=reduction, mesh=mesh)
        assert_near({"loss": only}, {"loss": F.cross_entropy(logits[0], target[0])})
    mesh.close()
    assert all(math.isfinite(loss) for loss in losses)
    return losses


@pytest.mark.parametrize("world", [1, 2, 4])
def test_loss_and_gradient_are_those_of_torch(ranks: Ranks, world: int) -> None:
    losses = ranks(world, like_torch)
    assert losses == [losses[0]] * world, "the same bits on every rank"


ALONE = Axis("tp", 0, (0,), None)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("target", [ENDS, [0, 3, -100, 4, 7, -100, 1, 6]])
def test_targets_may_have_32_bits(dtype: torch.dtype, smoothing: float, target: list[int]) -> None:
    logits, reference = (normal(8, V).requires_grad_() for _ in range(2))
    loss = vocab_parallel_cross_entropy(logits, torch.tensor(target, dtype=dtype), label_smoothing=smoothing, mesh=ALONE)
    expected = F.cross_entropy(reference, torch.tensor(target), label_smoothing=smoothing)
    loss.backward()
    expected.backward()
    assert_near({"loss": loss.detach(), "logits": logits.grad}, {"loss": expected.detach(), "logits": reference.grad})


@pytest.mark.parametrize("order", [(1, 2, 0), (2, 0, 1), (1, 0, 2)])  # of the dims in memory
def test_logits_of_any_strides(order: tuple[int, ...]) -> None:
    back, shape, target = [order.index(dim) for dim in range(3)], (2, 4, V), torch.tensor(ENDS).view(2, 4)
    logits = normal(*(shape[dim] for dim in order)).permute(back).requires_grad_()
    reference = logits.detach().clone().requires_grad_()
    loss = vocab_parallel_cross_entropy(logits, target, mesh=ALONE)
    expected = F.cross_entropy(reference.flatten(0, 1), target.flatten())
    loss.backward()
    expected.backward()
    assert_near({"loss": loss.detach(), "logits": logits.grad}, {"loss": expected.detach(), "logits": reference.grad})


@pytest.mark.parametrize("logits", [normal(0, V), normal(V, 3).t()[:0]], ids=["packed", "columns apart"])
def test_the_loss_of_no_rows_is_0(logits: torch.Tensor) -> None:
    for reduction, expected in (("none", []), ("mean", 0.0), ("sum", 0.0)):
        leaf = logits.detach().requires_grad_()
        loss = vocab_parallel_cross_entropy(leaf, torch.zeros(0, dtype=torch.int64), reduction=reduction, mesh=ALONE)
        loss.sum().backward()
        assert loss.tolist() == expected
        assert leaf.grad is not None and leaf.grad.shape == (0, V)


def all_ignored() -> list[float]:
    mesh = init_mesh(tp=2, dp=1, device="cpu")
    target = torch.full((6,), -100)
    found = []
    for reduction in ("none", "mean", "sum"):
        logits = own(normal(6, V), mesh).requires_grad_()
        loss = vocab_parallel_cross_entropy(logits, target, reduction=reduction, mesh=mesh)
        loss.sum().backward()
        found += [loss.sum().item(), logits.grad.abs().max().item()]
    mesh.close()
    return found


def test_nothing_but_ignored_targets(ranks: Ranks) -> None:
    assert ranks(2, all_ignored) == [[0.0] * 6] * 2


def smoothed() -> tuple[float, torch.Tensor]:
    mesh = init_mesh(tp=2, dp=1, device="cpu")
    logits = own(torch.arange(8, dtype=torch.float64)[None] / 2, mesh).requires_grad_()
    loss = vocab_parallel_cross_entropy(logits, torch.tensor([5]), label_smoothing=0.1, mesh=mesh)
    loss.backward()
    mesh.close()
    return loss.item(), logits.grad[0]


def test_smoothing_spreads_its_mass_over_the_whole_vocabulary(ranks: Ranks) -> None:
    found = ranks(2, smoothed)
    grad = torch.cat([grad for _, grad in found])
    assert [loss for loss, _ in found] == [pytest.approx(1.9892667, abs=1e-7)] * 2
    assert grad.sum().item() == pytest.approx(0, abs=1e-12)
    assert grad[5].item() == pytest.approx(-0.76505, abs=1e-5)


def not_finite() -> list[float]:
    """A logit that is not a number, or infinite, on one rank only."""
    mesh = init_mesh(tp=2, dp=1, device="cpu")
    found = []
    for value in (math.nan, math.inf, -math.inf):
        logits = normal(1, V)
        logits[0, 6] = value
        found.append(vocab_parallel_cross_entropy(own(logits, mesh), torch.tensor([1]), mesh=mesh).item())
    logits = normal(1, V)
    logits[0, 6] = -math.inf
    mesh.close()
    return [*found, F.cross_entropy(logits, torch.tensor([1])).item()]


def test_a_logit_that_is_not_finite_reaches_every_rank(ranks: Ranks) -> None:
    for nan, plus, minus, expected in ranks(2, not_finite):
        assert math.isnan(nan)
        assert math.isnan(plus), "as in torch"
        assert minus == pytest.approx(expected, rel=1e-12)


def only_padding() -> list[float]:
    """A vocabulary so small that half of the ranks hold none of it, with NaN in the padding."""
    mesh = init_mesh(tp=4, dp=1, device="cpu")
    vocab = 3
    target = torch.tensor([0, 2, -100, 1])
    losses = []
    for smoothing in (0.0, 0.1):
        for special in (None, math.nan, math.inf, -math.inf):
            logits = normal(4, V)
            logits[:, vocab:] = math.nan
            if special is not None:
                logits[0, 2] = special
                logits[3, :vocab] = special
            reference = logits[:, :vocab].clone().requires_grad_()
            expected = F.cross_entropy(reference, target, label_smoothing=smoothing, reduction="none")
            expected.sum().backward()
            local = own(logits, mesh).requires_grad_()
            loss = vocab_parallel_cross_entropy(local, target, label_smoothing=smoothing, reduction="none", mesh=mesh, vocab=vocab)
            loss.sum().backward()
            torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0, equal_nan=True)
            whole_grad = own(F.pad(reference.grad, (0, V - vocab)), mesh)
            torch.testing.assert_close(local.grad, whole_grad, rtol=1e-12, atol=1e-15, equal_nan=True)
            losses += loss.nan_to_num(-1.0).tolist()
    mesh.close()
    return losses


def test_ranks_with_nothing_but_padding(ranks: Ranks) -> None:
    losses = ranks(4, only_padding)
    assert losses == [losses[0]] * 4, "the same bits on every rank"


def lifted() -> tuple[list[float], list[float], bool]:
    """Float32 logits, and the same with 2^14 on all of them, where a sum of logits or a logarithm of it has few bits left."""
    mesh = init_mesh(tp=2, dp=1, device="cpu")
    logits, target = (normal(6, 64) * 64).round().float() / 64, torch.arange(6) * 11
    losses, grads = [], []
    for constant in (0, 2**14):
        local = own(logits + constant, mesh).requires_grad_()
        loss = vocab_parallel_cross_entropy(local, target, label_smoothing=0.1, reduction="none", mesh=mesh)
        loss.sum().backward()
        losses.append(loss.tolist())
        grads.append(local.grad)
    mesh.close()
    return losses[0], losses[1], torch.equal(*grads)


def test_a_constant_on_all_logits_changes_nothing(ranks: Ranks) -> None:
    for plain, shifted, same_gradients in ranks(2, lifted):
        assert shifted == pytest.approx(plain, rel=1e-6)
        assert same_gradients


def kept_for_backward() -> tuple[bool, int, str]:
    """Whether the logits themselves are kept, how many numbers a token besides, and what a change in place leads to."""
    mesh = init_mesh(tp=2, dp=1, device="cpu")
    logits, target = own(normal(16, V).bfloat16(), mesh).requires_grad_() * 1, torch.arange(16) % V
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        vocab_parallel_cross_entropy(logits, target, label_smoothing=0.1, reduction="sum", mesh=mesh)
    others = [t for t in kept if t.data_ptr() != logits.data_ptr()]
    loss = vocab_parallel_cross_entropy(logits, target, mesh=mesh)
    with torch.no_grad():
        logits.zero_()
    with pytest.raises(RuntimeError) as error:
        loss.backward()
    mesh.close()
    return len(others) == len(kept) - 1, sum(t.untyped_storage().nbytes() // t.element_size() for t in others) // 16, str(error.value)


def test_backward_needs_the_logits_and_a_few_numbers_a_token(ranks: Ranks) -> None:
    for logits_kept, numbers, error in ranks(2, kept_for_backward):
        assert logits_kept
        assert numbers <= 6
        assert "modified by an inplace operation" in error


def bf16_logits() -> tuple[float, torch.Tensor]:
    mesh = init_mesh(tp=2, dp=1, device="cpu")
    logits = normal(16, 64).bfloat16()
    target = torch.arange(16) * 4
    exact = logits.double().requires_grad_()
    expected = F.cross_entropy(exact, target)
    expected.backward()
    local = own(logits, mesh).requires_grad_()
    loss = vocab_parallel_cross_entropy(local, target, mesh=mesh)
    loss.backward()
    assert loss.dtype == torch.float32
    assert local.grad.dtype == torch.bfloat16
    worst = ((local.grad.double() - own(exact.grad, mesh)).abs() / own(exact.grad, mesh).abs()).max()
    mesh.close()
    return abs(loss.item() / expected.item() - 1), worst


def test_bf16_logits_are_computed_in_float32(ranks: Ranks) -> None:
    for loss_error, grad_error in ranks(2, bf16_logits):
        assert loss_error < 1e-6
        assert grad_error < 2**-8, "rounded once"


def outside() -> tuple[list[list[bool]], list[bool], list[bool]]:
    """Where numbers are NaN when nobody has looked at targets and ids, as on a GPU."""
    mesh = init_mesh(tp=2, dp=1, device="cpu")
    targets = torch.tensor([-100, -1, 0, 6, 7, 8])
    losses = [cross_entropy(torch.zeros(6, 4), targets, mesh.tp, vocab=7, label_smoothing=smoothing) for smoothing in (0.0, 0.1, 1.0)]
    rows = [
        vocab_lookup(torch.tensor([-1, 0, 6, 7, 8, 3]), torch.ones(4, 2), mesh.tp, sp, vocab=7, padding_idx=None) for sp in (False, True)
    ]
    mesh.close()
    return [loss.isnan().tolist() for loss in losses], rows[0].isnan().all(-1).tolist(), rows[1].isnan().any(-1).tolist()


def test_what_is_outside_the_vocabulary_becomes_nan(ranks: Ranks) -> None:
    for rank, (losses, rows, part) in enumerate(ranks(2, outside)):
        assert losses == [[False, True, False, False, True, True]] * 3
        assert rows == [True, False, False, True, True, False]
        assert part == rows[3 * rank : 3 * rank + 3]


REFUSED = [
    ({"reduction": "average"}, "reduction='average': not a reduction. Use 'none', 'mean' or 'sum'"),
    ({"label_smoothing": 1.5}, "label_smoothing=1.5: must lie between 0 and 1. Use 0.0 to switch it off"),
    ({"target": torch.tensor([[1, 2]])}, "logits (2, 4), target (1, 2): logits have the dims of the target and the vocabulary "
     "after them. This target needs logits (1, 2, 4)"),
    ({"target": torch.tensor([1, 8])}, "target 8 with a vocabulary of 8: targets must lie in it or be ignore_index. Use 0..7 or -100"),
    ({"target": torch.tensor([-1, 1])}, "target -1 with a vocabulary of 8: targets must lie in it or be ignore_index. Use 0..7 or -100"),
    ({"vocab": 7, "target": torch.tensor([7, 1])}, "target 7 with a vocabulary of 7: targets must lie in it or be ignore_index. "
     "Use 0..6 or -100"),
    ({"vocab": 9}, "vocab=9 with logits of 8 columns: no more entries than columns. Use vocab=8 or less"),
    ({"vocab": 7.5}, "vocab=7.5 with logits of 8 columns: no more entries than columns. Use vocab=8 or less"),
    ({"ignore_index": None}, "ignore_index=None: it must be an integer. The default is -100"),
    ({"label_smoothing": "0.1"}, "label_smoothing=0.1: must lie between 0 and 1. Use 0.0 to switch it off"),
    ({"logits": torch.zeros(2, 4, dtype=torch.int64)}, "logits (2, 4) of torch.int64, target of torch.int64: logits are [..., V/tp] in "
     "floating point, targets whole numbers, int32 or int64. Use logits.float() and target.long()"),
    ({"logits": torch.tensor(0.5)}, "logits () of torch.float32, target of torch.int64: logits are [..., V/tp] in "
     "floating point, targets whole numbers, int32 or int64. Use logits.float() and target.long()"),
    ({"target": torch.tensor([1.0, 2.0])}, "logits (2, 4) of torch.float32, target of torch.float32: logits are [..., V/tp] in "
     "floating point, targets whole numbers, int32 or int64. Use logits.float() and target.long()"),
    ({"vocab": 0}, "vocab=0 with logits of 8 columns: no more entries than columns. Use vocab=8 or less"),
]  # fmt: skip


def refused() -> list[str]:
    mesh = init_mesh(tp=2, dp=1, device="cpu")
    texts = []
    for options, _ in REFUSED:
        with pytest.raises(ConfigError) as error:
            vocab_parallel_cross_entropy(**{"logits": torch.zeros(2, 4), "target": torch.tensor([1, 2]), "mesh": mesh, **options})
        texts.append(str(error.value))
    mesh.close()
    return texts


def test_bad_arguments_are_refused(ranks: Ranks) -> None:
    assert ranks(2, refused) == [[text for _, text in REFUSED]] * 2


# Vocabularies that tp does not divide.

D = 2
PADDED = [(7, 2, 8), (50257, 8, 50264), (151669, 4, 151672), (65535, 2, 65536), (129280, 24, 129288)]


def language_model(vocab: int) -> tuple[nn.Embedding, nn.Linear, torch.Tensor, torch.Tensor]:
    """Embedding and head with all logits below 0, so that a padding logit of 0 would win; ids and targets at both ends and between."""
    embedding, head = nn.Embedding(vocab, D, dtype=torch.float64), nn.Linear(D, vocab, bias=True, dtype=torch.float64)
    with torch.no_grad():
        embedding.weight.copy_(0.1 + normal(vocab, D, seed=1).abs())
        head.weight.copy_(-0.1 - normal(vocab, D, seed=2).abs())
        head.bias.copy_(-normal(vocab, seed=3).abs())
    ids = torch.tensor([0, vocab - 1, vocab // 2, 1, vocab - 2, vocab - 1])
    return embedding, head, ids, ids.flip(0)


def padded_vocabulary(vocab: int, padded: int) -> None:
    mesh = init_mesh(tp=-1, dp=1, device="cpu")
    embedding, head, ids, target = language_model(vocab)
    logits = head(embedding(ids))
    expected = F.cross_entropy(logits, target, label_smoothing=0.1)
    expected.backward()
    cut = VocabParallelEmbedding.from_embedding(embedding, mesh=mesh, vocab_multiple=1)
    cut_head = ColumnParallelLinear.from_linear(head, mesh=mesh, vocab_multiple=1)
    gathering = ColumnParallelLinear.from_linear(head, True, mesh=mesh, vocab_multiple=1)
    hidden = cut(ids)
    loss = vocab_parallel_cross_entropy(cut_head(hidden), target, label_smoothing=0.1, mesh=mesh, vocab=vocab)
    loss.backward()
    assert_near({"loss": loss.detach()}, {"loss": expected.detach()})
    beyond = torch.arange(padded).chunk(mesh.tp.size)[mesh.tp.rank] >= vocab
    for parameter, plain in ((cut.weight, embedding.weight), (cut_head.weight, head.weight), (cut_head.bias, head.bias)):
        assert parameter.shape[0] * mesh.tp.size == padded
        assert not parameter[beyond].any()
        assert not parameter.grad[beyond].any()
        saved = whole(parameter, placement_of(parameter), mesh.tp)
        assert torch.equal(saved, plain), "exactly V rows, bit for bit"
        assert_near({"grad": whole(parameter.grad, placement_of(parameter), mesh.tp)}, {"grad": plain.grad})
        assert torch.equal(through_another_tp(saved, 3), plain)
    with torch.no_grad():
        whole_logits = gathering(hidden)
    assert whole_logits.shape == logits.shape
    assert torch.equal(whole_logits.argmax(-1), logits.argmax(-1))
    mesh.close()


def through_another_tp(full: torch.Tensor, ranks: int) -> torch.Tensor:
    rows = full.shape[0]
    part = Part(size=rows, padded=math.ceil(rows / ranks / 128) * ranks * 128)
    placement = Placement(shape=tuple(full.shape), parts=(part,), ranks=ranks)
    back = torch.full_like(full, math.nan)
    for rank in range(ranks):
        local = full.new_full(placement.local_shape(), math.nan)
        placement.shard(full, local, rank)
        placement.unshard(local, back, rank)
    return back


@pytest.mark.parametrize(("vocab", "tp", "padded"), [case for case in PADDED if case[1] <= 8])
def test_a_padded_vocabulary_computes_the_same(ranks: Ranks, vocab: int, tp: int, padded: int) -> None:
    ranks(tp, padded_vocabulary, vocab, padded)


@pytest.mark.parametrize(("vocab", "tp", "padded"), PADDED)
def test_where_the_rows_of_a_padded_vocabulary_go(vocab: int, tp: int, padded: int) -> None:
    """Without processes: the placement that a layer of each rank writes, on the meta device."""
    full = torch.arange(1.0, vocab + 1, dtype=torch.float64)[:, None]
    back = torch.zeros_like(full)
    for rank in range(tp):
        axis = Axis("tp", rank, tuple(range(tp)), None)
        head = ColumnParallelLinear(1, vocab, mesh=axis, vocab_multiple=1, device="meta")
        table = VocabParallelEmbedding(vocab, 1, mesh=axis, vocab_multiple=1, device="meta")
        assert head.weight.shape == table.weight.shape == (padded // tp, 1)
        placement = placement_of(head.weight)
        assert placement.parts == placement_of(table.weight).parts
        local = torch.full((padded // tp, 1), math.nan, dtype=torch.float64)
        placement.shard(full, local, rank)
        expected = torch.arange(rank * padded // tp + 1, (rank + 1) * padded // tp + 1, dtype=torch.float64)[:, None]
        assert torch.equal(local, expected.where(expected <= vocab, 0))
        placement.unshard(local, back, rank)
    assert torch.equal(back, full)


def test_the_default_padding_is_a_multiple_of_128_a_rank() -> None:
    axis = Axis("tp", 0, (0, 1, 2, 3), None)
    assert VocabParallelEmbedding(50257, 1, mesh=axis, device="meta").weight.shape[0] * 4 == 50688
    assert VocabParallelEmbedding(512, 1, mesh=axis, device="meta").weight.shape[0] * 4 == 512

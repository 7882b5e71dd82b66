"""Parallel layers compute what torch's own compute in one process: outputs and all gradients, in float64, for every shape of input."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from pymesh3d.comm.workspace import workspace
from pymesh3d.errors import ConfigError
from pymesh3d.mesh import Mesh, init_mesh
from pymesh3d.ops import fused
from pymesh3d.ops.choose import VARIABLE
from pymesh3d.placement import Part
from pymesh3d.tp.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from tests.kernels import needs_kernels
from tests.plain import assert_near

Ranks = Callable[..., list[Any]]

K, N, T, B = 12, 24, 12, 2  # divisible by 1, 2, 3 and 4
SHAPES = ((K,), (T, K), (B, T, K))


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def linear(in_features: int, out_features: int, bias: bool = True) -> nn.Linear:
    layer = nn.Linear(in_features, out_features, bias, dtype=torch.float64)
    with torch.no_grad():
        for seed, parameter in enumerate(layer.parameters()):
            parameter.copy_(normal(*parameter.shape, seed=10 + seed))
    return layer


def part(x: torch.Tensor, mesh: Mesh, dim: int) -> torch.Tensor:
    """This rank's equal part of `x` along `dim`, a leaf."""
    return x.detach().chunk(mesh.tp.size, dim)[mesh.tp.rank].clone()


def own(count: int, mesh: Mesh) -> list[int]:
    """The indices of this rank when `count` are dealt out in order."""
    each = count // mesh.tp.size
    return list(range(mesh.tp.rank * each, (mesh.tp.rank + 1) * each))


def reference(layer: nn.Module, x: torch.Tensor, grad_y: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Output and gradients in one process."""
    x = x.clone().requires_grad_(x.is_floating_point())
    y = layer(x)
    y.backward(grad_y)
    found = {name: parameter.grad.clone() for name, parameter in layer.named_parameters()}
    return y.detach(), {**found, "x": x.grad} if x.requires_grad else found


def column(
    mesh: Mesh, x: torch.Tensor, *, bias: bool, sp: bool = False, gather: bool = False, rows: Sequence[int] = (), **options: Any
) -> None:
    """`rows`: those of the weight that this rank must hold, in its order (default: its run)."""
    plain = linear(K, N, bias)
    mine = list(rows) or own(N, mesh)
    grad_y = normal(*x.shape[:-1], N, seed=2)
    y, expected = reference(plain, x, grad_y)
    layer = ColumnParallelLinear.from_linear(plain, gather, sp, mesh=mesh, **options)
    local = (part(x, mesh, -2) if sp else x.clone()).requires_grad_()
    out = layer(local)
    out.backward(grad_y if gather else grad_y[..., mine])
    assert_near({"y": out}, {"y": y if gather else y[..., mine]})
    expected = {name: grad if name == "x" else grad[mine] for name, grad in expected.items()}
    expected["x"] = part(expected["x"], mesh, -2) if sp else expected["x"]
    found = {**{name: parameter.grad for name, parameter in layer.named_parameters()}, "x": local.grad}
    assert_near(found, expected)
    assert found.keys() == expected.keys()


def row(mesh: Mesh, x: torch.Tensor, *, bias: bool, sp: bool = False, whole_input: bool = False) -> None:
    plain = linear(K, N, bias)
    grad_y = normal(*x.shape[:-1], N, seed=2)
    y, expected = reference(plain, x, grad_y)
    layer = RowParallelLinear.from_linear(plain, not whole_input, sp, mesh=mesh)
    local = (x.clone() if whole_input else part(x, mesh, -1)).requires_grad_()
    out = layer(local)
    out.backward(part(grad_y, mesh, -2) if sp else grad_y)
    assert_near({"y": out}, {"y": part(y, mesh, -2) if sp else y})
    expected["weight"] = part(expected["weight"], mesh, 1)
    expected["x"] = expected["x"] if whole_input else part(expected["x"], mesh, -1)
    if bias and sp:  # of this rank's tokens only: a summand
        expected["bias"] = part(grad_y, mesh, -2).flatten(0, -2).sum(0)
    found = {**{name: parameter.grad for name, parameter in layer.named_parameters()}, "x": local.grad}
    assert_near(found, expected)
    assert found.keys() == expected.keys()


def embedding(mesh: Mesh, shape: tuple[int, ...], *, sp: bool = False, padding_idx: int | None = None, multiple: int = 1) -> None:
    rows = 23  # divided by no tp
    plain = nn.Embedding(rows, 5, padding_idx, dtype=torch.float64)
    with torch.no_grad():
        plain.weight.copy_(normal(rows, 5, seed=3))
    ids = torch.randint(rows, shape, generator=torch.Generator().manual_seed(4))
    if ids.ndim:  # both ends, and one of them twice
        ids.view(-1)[:4] = torch.tensor([0, rows - 1, 0, rows - 2])
    grad_y = normal(*shape, 5, seed=5)
    y, expected = reference(plain, ids, grad_y)
    layer = VocabParallelEmbedding.from_embedding(plain, sp, mesh=mesh, vocab_multiple=multiple)
    out = layer(ids)
    out.backward(part(grad_y, mesh, -2) if sp else grad_y)
    assert_near({"y": out}, {"y": part(y, mesh, -2) if sp else y})
    grad, padded = layer.weight.grad, layer.weight.shape[0] * mesh.tp.size
    assert padded % (multiple * mesh.tp.size) == 0
    full = torch.zeros(padded, 5, dtype=torch.float64)
    full[:rows] = expected["weight"]
    assert_near({"weight": grad}, {"weight": part(full, mesh, 0), "whole": full})  # a rank may have no id at all
    beyond = torch.arange(padded).chunk(mesh.tp.size)[mesh.tp.rank] >= rows
    assert not layer.weight[beyond].any()
    assert not grad[beyond].any()


def every_form() -> None:
    mesh = init_mesh(tp=-1, dp=1, device="cpu")
    for shape in SHAPES:
        x = normal(*shape, seed=1)
        for bias in (True, False):
            for sp in (False, True) if x.ndim > 1 else (False,):
                for flag in (False, True):
                    column(mesh, x, bias=bias, sp=sp, gather=flag)
                    row(mesh, x, bias=bias, sp=sp, whole_input=flag)
        for sp in (False, True) if x.ndim > 1 else (False,):
            embedding(mesh, (*shape[:-1],) or (8,), sp=sp)
    embedding(mesh, ())
    embedding(mesh, (7,), padding_idx=22, multiple=4)
    embedding(mesh, (7,), padding_idx=0)
    strided = normal(T, B, K, seed=1).transpose(0, 1)
    column(mesh, strided, bias=True, sp=True)
    row(mesh, strided, bias=True, sp=True)
    empty = ColumnParallelLinear(K, N, mesh=mesh)
    empty(torch.zeros(0, K)).sum().backward()
    assert not empty.weight.grad.any()
    mesh.close()


def every_form_in_one_kernel() -> None:
    """And the kernels have run: they leave workspaces behind."""
    made = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, "plain")
        patch.setattr(fused, "workspace", lambda op, *rest: made.append(op) or workspace(op, *rest))
        every_form()
    assert set(made) == {"all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"}


@needs_kernels
@pytest.mark.timeout(300)
@pytest.mark.parametrize("world", [2, 3])
def test_layers_in_one_kernel_agree_with_torch(ranks: Ranks, world: int) -> None:
    ranks(world, every_form_in_one_kernel, timeout=250.0)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_layers_agree_with_torch(ranks: Ranks, world: int) -> None:
    ranks(world, every_form)


def fused_forms() -> None:
    """q: 4 heads, k and v: 2 heads, of 3 rows; gate and up. Rows are written down by hand."""
    mesh = init_mesh(tp=2, dp=1, device="cpu")
    x = normal(T, K, seed=1)
    qkv = (Part(size=12, heads=4), Part(size=6, heads=2), Part(size=6, heads=2))
    of_rank = ([*range(6), *range(12, 15), *range(18, 21)], [*range(6, 12), *range(15, 18), *range(21, 24)])
    gate_up = ([*range(6), *range(12, 18)], [*range(6, 12), *range(18, 24)])
    for sp in (False, True):
        column(mesh, x, bias=True, sp=sp, rows=of_rank[mesh.tp.rank], parts=qkv)
        column(mesh, x, bias=True, sp=sp, rows=gate_up[mesh.tp.rank], parts=(12, 12))
    assert ColumnParallelLinear(K, N, mesh=mesh, parts=qkv).parts == (6, 3, 3)
    mesh.close()


def test_fused_weights_are_cut_part_by_part(ranks: Ranks) -> None:
    ranks(2, fused_forms)


def row_bias() -> tuple[list[list[float]], list[list[float]], torch.Tensor]:
    mesh = init_mesh(tp=2, dp=1, device="cpu")
    plain = nn.Linear(4, 3, dtype=torch.float64)
    with torch.no_grad():
        plain.weight.copy_(torch.tensor([[1, 0, 1, 0], [0, 1, 0, 1], [1, 1, 1, 1]]))
        plain.bias.copy_(torch.tensor([100, 200, 300]))
    x = torch.tensor([[1.0, 2, 3, 4], [2, 3, 4, 5]], dtype=torch.float64)
    layer = RowParallelLinear.from_linear(plain, mesh=mesh)
    y = layer(part(x, mesh, 1))
    y.backward(torch.tensor([[1.0, 2, 3], [10, 20, 30]], dtype=torch.float64))
    scattered = RowParallelLinear.from_linear(plain, sequence_parallel=True, mesh=mesh)(part(x, mesh, 1))
    mesh.close()
    return y.tolist(), scattered.tolist(), layer.bias.grad


def test_row_bias_is_added_once_and_its_gradient_is_whole(ranks: Ranks) -> None:
    expected = [[104.0, 206.0, 310.0], [106.0, 208.0, 314.0]]
    for rank, (y, scattered, grad) in enumerate(ranks(2, row_bias)):
        assert y == expected
        assert scattered == [expected[rank]]
        assert grad.tolist() == [11.0, 22.0, 33.0]


def refusals() -> list[str]:
    mesh = init_mesh(tp=-1, dp=1, device="cpu")
    x = torch.zeros(5, 12)
    attempts: list[Callable[[], object]] = [
        lambda: ColumnParallelLinear(4, 5, mesh=mesh),
        lambda: RowParallelLinear(5, 4, mesh=mesh),
        lambda: ColumnParallelLinear(4, 40, heads=5, mesh=mesh),
        lambda: ColumnParallelLinear(4, 18, parts=(12, Part(size=6, heads=4)), mesh=mesh),
        lambda: ColumnParallelLinear(4, 17, parts=(12, 6), mesh=mesh),
        lambda: ColumnParallelLinear(4, 12, parts=(6, 6), heads=2, mesh=mesh),
        lambda: ColumnParallelLinear(4, 12, parts=(6, 6), gather_output=True, mesh=mesh),
        lambda: ColumnParallelLinear(4, 12, heads=1, gather_output=True, mesh=mesh),
        lambda: ColumnParallelLinear(4, 10, parts=(Part(size=10, heads=3),), mesh=mesh),
        lambda: ColumnParallelLinear(4, 12, parts="qkv", mesh=mesh),  # type: ignore[arg-type]
        lambda: ColumnParallelLinear(4, 12, parts=12, mesh=mesh),  # type: ignore[arg-type]
        lambda: ColumnParallelLinear(4, 12, parts=(), mesh=mesh),
        lambda: ColumnParallelLinear(4, 12, vocab_multiple=0, mesh=mesh),
        lambda: ColumnParallelLinear(0, 12, mesh=mesh),
        lambda: RowParallelLinear(12, 4.0, mesh=mesh),  # type: ignore[arg-type]
        lambda: ColumnParallelLinear(4, 12, heads="2", mesh=mesh),  # type: ignore[arg-type]
        lambda: ColumnParallelLinear(4, 12, sequence_parallel=1, mesh=mesh),  # type: ignore[arg-type]
        lambda: ColumnParallelLinear(4, 12, mesh="tp"),  # type: ignore[arg-type]
        lambda: VocabParallelEmbedding(10, 4, padding_idx=10, mesh=mesh),
        lambda: VocabParallelEmbedding(10, 4, mesh=mesh)(torch.tensor([3, 10])),
        lambda: VocabParallelEmbedding(10, 4, mesh=mesh)(torch.tensor([-1])),
        lambda: VocabParallelEmbedding(10, 4, mesh=mesh)(torch.tensor([1], dtype=torch.int16)),
        lambda: VocabParallelEmbedding.from_embedding(nn.Embedding(10, 4, max_norm=1.0), mesh=mesh),
        lambda: RowParallelLinear(12, 4, mesh=mesh)(x),
        lambda: ColumnParallelLinear(12, 12, mesh=mesh)(x[:, :6]),
        lambda: RowParallelLinear(12, 4, sequence_parallel=True, mesh=mesh)(x[:, : 12 // mesh.tp.size]),
        lambda: RowParallelLinear(12, 4, sequence_parallel=True, mesh=mesh)(x[0, : 12 // mesh.tp.size]),
        lambda: ColumnParallelLinear(12, 12, sequence_parallel=True, mesh=mesh)(x[0]),
    ]
    texts = []
    for attempt in attempts:
        try:
            attempt()
            texts.append("accepted")
        except ConfigError as error:
            texts.append(str(error))
    mesh.close()
    return texts


def test_what_tp_does_not_divide_is_refused_at_construction(ranks: Ranks) -> None:
    expected = [
        "out_features=5 of 5 rows, tp=2: tp must divide the rows. tp can be one of [1, 5]",
        "in_features=5 of 5 rows, tp=2: tp must divide the rows. tp can be one of [1, 5]",
        "out_features=40 of 5 heads, tp=2: tp must divide the heads, or be a multiple of them. tp can be one of [1, 5]",
        "part 1 (of 6 rows) of out_features=18 of 6 rows in 4 heads: the heads must divide the rows. There can be one of [1, 2, 3, 6]",
        "parts [12, 6] of out_features=17: the parts must add up to out_features. Use out_features=18",
        "parts together with heads or vocab_multiple: heads belong into the parts. Use parts=(Part(size=..., heads=...), ...)",
        "gather_output=True with several parts or replicated heads: the gathered order would not be the layer's. Gather each part",
        "gather_output=True with several parts or replicated heads: the gathered order would not be the layer's. Gather each part",
        "out_features=10 of 10 rows in 3 heads: the heads must divide the rows. There can be one of [1, 2, 5, 10]",
        *(
            f"parts={given}: parts are a sequence of numbers of rows, or of Parts. Use parts=(12,), or as many that add up to 12"
            for given in ("'qkv'", "12", "()")
        ),
        "vocab_multiple=0: vocab_multiple must be a positive integer. Try vocab_multiple=1 or more",
        "in_features=0: in_features must be a positive integer. Try in_features=1 or more",
        "out_features=4.0: out_features must be a positive integer. Try out_features=1 or more",
        "heads='2': heads must be a positive integer. Try heads=1 or more",
        "sequence_parallel=1: sequence_parallel must be true or false. Use sequence_parallel=False",
        "mesh='tp': it must be a pymesh3d Mesh or a torch DeviceMesh. Make one with pymesh3d.init_mesh(tp=2)",
        "padding_idx=10, num_embeddings=10: padding_idx must be one of the rows. Use padding_idx=None",
        "ids from 3 to 10 of an embedding of 10 rows: an id must be one of the rows. Use 0..9",
        "ids from -1 to -1 of an embedding of 10 rows: an id must be one of the rows. Use 0..9",
        "ids of torch.int16: they must be whole numbers, int32 or int64. Use ids.long()",
        "nn.Embedding(max_norm=1.0): not supported by a cut embedding. Switch max_norm off",
        "input (5, 12) of a RowParallelLinear(12, 4, tp=2, sequence_parallel=False): its last dim must be 6. A column-parallel layer "
        "takes whole features, a row-parallel one this rank's part (whole with input_is_parallel=False)",
        "input (5, 6) of a ColumnParallelLinear(12, 12, tp=2, sequence_parallel=False): its last dim must be 12. A column-parallel layer "
        "takes whole features, a row-parallel one this rank's part (whole with input_is_parallel=False)",
        "input (5, 6) with sequence_parallel=True, tp=2: tp must divide the 5 tokens. Pad to 6 tokens, or use sequence_parallel=False",
        "input (6,) with sequence_parallel=True, tp=2: tp must divide the 1 tokens. Pad to 2 tokens, or use sequence_parallel=False",
        "input (12,) with sequence_parallel=True: there is no dim of tokens. Use x.unsqueeze(0)",
    ]
    for found in ranks(2, refusals):
        assert found == expected


def refused_by_three() -> list[str]:
    mesh = init_mesh(tp=3, dp=1, device="cpu")
    texts = []
    for layer, sizes in ((ColumnParallelLinear, (4, 8)), (RowParallelLinear, (8, 4))):
        with pytest.raises(ValueError) as refused:
            layer(*sizes, mesh=mesh)
        texts.append(str(refused.value))
    mesh.close()
    return texts


def test_eight_features_on_three_ranks(ranks: Ranks) -> None:
    text = "_features=8 of 8 rows, tp=3: tp must divide the rows. tp can be one of [1, 2, 4, 8]"
    assert ranks(3, refused_by_three) == [["out" + text, "in" + text]] * 3


def from_device_meshes() -> None:
    mesh = init_mesh(tp=2, dp=2, device="cpu")
    two = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tp"))
    unnamed = init_device_mesh("cpu", (2, 2))
    plain, x = linear(K, N), normal(T, K)
    expected = plain(x)[:, own(N, mesh)]
    for accepted in (mesh, mesh["tp"], two, two["tp"], mesh.device_mesh, mesh.tp):
        assert_near({"y": ColumnParallelLinear.from_linear(plain, mesh=accepted)(x)}, {"y": expected})
    layers = [ColumnParallelLinear(K, N, mesh=two), RowParallelLinear(K, N, mesh=two["tp"]), ColumnParallelLinear(K, N, mesh=two["tp"])]
    assert len({id(layer.axis) for layer in layers}) == 1, "they share what their axis has"
    assert len(layers[0].axis.ranks) == 2 and layers[0].axis.group is two["tp"].get_group()
    with pytest.raises(ConfigError, match=r"DeviceMesh with dims 2: no dim called 'tp'\. Name it 'tp', or hand over a one-dim"):
        ColumnParallelLinear(K, N, mesh=unnamed)
    with pytest.raises(ConfigError, match="no dim called 'tp'"):
        ColumnParallelLinear(K, N, mesh=mesh["pp", "dp"])
    mesh.close()


def test_a_device_mesh_will_do(ranks: Ranks) -> None:
    ranks(4, from_device_meshes)


def taken_over() -> None:
    """Each rank starts from other values; what counts is the first rank's. dtype and requires_grad go along."""
    mesh = init_mesh(tp=2, dp=1, device="cpu")
    plain, table = nn.Linear(4, 6, dtype=torch.bfloat16), nn.Embedding(6, 4)
    with torch.no_grad():
        plain.weight.copy_(torch.arange(24).view(6, 4) + 100 * mesh.rank)
        table.weight.copy_(torch.arange(24).view(6, 4) + 100 * mesh.rank)
    plain.bias.requires_grad_(False)
    table.weight.requires_grad_(False)
    up = ColumnParallelLinear.from_linear(plain, mesh=mesh)
    down = RowParallelLinear.from_linear(plain, mesh=mesh)
    rows = VocabParallelEmbedding.from_embedding(table, mesh=mesh, vocab_multiple=1)
    whole = torch.arange(24.0).view(6, 4)
    assert torch.equal(up.weight.float(), part(whole, mesh, 0))
    assert torch.equal(down.weight.float(), part(whole, mesh, 1))
    assert torch.equal(rows.weight, part(whole, mesh, 0))
    for layer in (up, down):
        assert [(p.dtype, p.requires_grad) for p in layer.parameters()] == [(torch.bfloat16, True), (torch.bfloat16, False)]
    assert not rows.weight.requires_grad
    up(torch.ones(3, 4, dtype=torch.bfloat16)).sum().backward()
    assert up.bias.grad is None
    assert plain.weight[0, 0].item() == 100 * mesh.rank, "the layer given stays as it was"
    meta = ColumnParallelLinear.from_linear(nn.Linear(4, 6, device="meta"), mesh=mesh)
    assert meta.weight.is_meta
    mesh.close()


def test_from_linear_takes_values_dtype_and_requires_grad(ranks: Ranks) -> None:
    ranks(2, taken_over)


def errors_in_bf16() -> list[tuple[float, float]]:
    """Root mean square errors against float64, of torch in one process and of the layers, both in bf16."""
    mesh = init_mesh(tp=2, dp=1, device="cpu")
    low = torch.bfloat16
    found = []
    x, grad_y = normal(64, 256).to(low), normal(64, 128, seed=2).to(low)
    for kind, cut in ((ColumnParallelLinear, 0), (RowParallelLinear, 1)):
        plain = linear(256, 128).to(low)
        exact = linear(256, 128)
        exact.load_state_dict(plain.state_dict())
        y, grads = reference(exact, x.double(), grad_y.double())
        for layer in (plain, kind.from_linear(plain, True, mesh=mesh)):
            layer.zero_grad()
            local = (part(x, mesh, 1) if layer is not plain and cut == 1 else x.clone()).requires_grad_()
            out = layer(local)
            out.backward(grad_y)
            mine = layer is not plain
            expected = [y, part(grads["weight"], mesh, cut) if mine else grads["weight"]]
            expected.append(part(grads["x"], mesh, 1) if mine and cut == 1 else grads["x"])
            expected.append(part(grads["bias"], mesh, 0) if mine and cut == 0 else grads["bias"])
            values = [out, layer.weight.grad, local.grad, layer.bias.grad]
            assert all(value.dtype == low for value in values)
            found.append([(a.double() - b).square().mean().sqrt().item() for a, b in zip(values, expected, strict=True)])
    mesh.close()
    return [pair for one, other in (found[:2], found[2:]) for pair in zip(one, other, strict=True)]


def test_bf16_is_as_good_as_torch_in_bf16(ranks: Ranks) -> None:
    for pairs in ranks(2, errors_in_bf16):
        for plain, parallel in pairs:
            assert 0 < parallel <= 2 * plain


def under_autocast() -> None:
    mesh = init_mesh(tp=2, dp=1, device="cpu")
    plain, x = linear(K, N).float(), normal(T, K).float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = plain(x)
        up, down = ColumnParallelLinear.from_linear(plain, True, mesh=mesh), RowParallelLinear.from_linear(plain, False, mesh=mesh)
        outs = [up(x), down(x)]
    plain_grad = torch.autograd.grad(expected.float().square().sum(), plain.weight)[0]
    for out, layer, dim in zip(outs, (up, down), (0, 1), strict=True):
        assert out.dtype == torch.bfloat16
        out.float().square().sum().backward()
        assert layer.weight.grad.dtype == torch.float32
        torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(layer.weight.grad, part(plain_grad, mesh, dim), rtol=3e-2, atol=0.3)
    mesh.close()


def test_autocast_reaches_the_products(ranks: Ranks) -> None:
    ranks(2, under_autocast)


def frozen() -> None:
    """With only some gradients asked for, no rank is left waiting, and nobody computes the others."""
    mesh = init_mesh(tp=2, dp=1, device="cpu")
    for sp in (False, True):
        plain = linear(K, N)
        plain.requires_grad_(False)
        grad_y = normal(T, N, seed=2)
        for trained in (True, False):
            up = ColumnParallelLinear.from_linear(plain, True, sp, mesh=mesh).requires_grad_(trained)
            x = normal(T, K)
            local = (part(x, mesh, 0) if sp else x).requires_grad_(not trained)
            up(local).backward(grad_y)
            assert (local.grad is None) is trained
            assert (up.weight.grad is None) is not trained
            expected = grad_y.T @ x if trained else grad_y @ plain.weight
            if trained:
                assert_near({"w": up.weight.grad}, {"w": part(expected, mesh, 0)})
            else:
                assert_near({"x": local.grad}, {"x": part(expected, mesh, 0) if sp else expected})
    mesh.close()


def test_frozen_weights_and_inputs(ranks: Ranks) -> None:
    ranks(2, frozen)

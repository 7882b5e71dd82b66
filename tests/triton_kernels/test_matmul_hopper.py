"""The product on Hopper: values, edges, repetition; and what it can take."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pymesh3d.triton_kernels import all_gather_matmul_hopper, matmul_hopper, matmul_reduce_scatter_hopper
from pymesh3d.triton_kernels.matmul_hopper import LARGE, SMALL, Tiles, fits, launch, readable, tiles_for
from pymesh3d.triton_kernels.matmul_reduce_scatter import Slots
from pymesh3d.triton_kernels.signals import Counters
from tests.hopper import TILES, needs_hopper
from tests.kernels import needs_kernels, noise
from tests.products import close


@pytest.mark.gpu
@needs_hopper()
@pytest.mark.parametrize("tiles", TILES, ids=str)
@pytest.mark.parametrize("shape", [(4096, 4096, 4096), (1000, 520, 200), (40, 8, 72), (8, 2056, 8), (512, 14336, 4096)], ids=str)
def test_values(shape: tuple[int, int, int], tiles: Tiles) -> None:
    rows, cols, depth = shape
    a, b = (noise(size, depth, dtype=torch.bfloat16, seed=size).cuda() for size in (rows, cols))
    found, again = launch(a, b, tiles), launch(a, b, tiles)
    torch.cuda.synchronize()
    assert close(found, [a], [b]) and torch.equal(found, again)
    apart = torch.full((rows, depth + 64), torch.nan, dtype=torch.bfloat16, device="cuda")[:, :depth]
    assert torch.equal(launch(apart.copy_(a), b, tiles), found)
    assert torch.equal(launch(a, b.t().contiguous().t(), tiles), found)


def test_what_fits() -> None:
    bf16 = torch.bfloat16
    assert fits(1, 16, 8, bf16) and fits(5, 8, 24, bf16)
    assert not fits(5, 12, 8, bf16), "rows of the result would not be aligned"
    assert not fits(5, 16, 4, bf16) and not fits(0, 16, 8, bf16) and not fits(5, 16, 8, torch.float32)


def test_what_cannot_be_read_is_copied() -> None:
    whole = torch.arange(5 * 32, dtype=torch.bfloat16).view(5, 32)
    for x in (whole, whole[:, 8:16], whole[1:]):
        assert readable(x) is x
    for x in (whole.t(), whole[:1].expand(5, 32), whole[:, 4:12], whole[:, ::2], whole.view(-1)[4:132].view(4, 32)):
        copy = readable(x)
        assert copy is not x and torch.equal(copy, x) and copy.is_contiguous()
    turned = torch.zeros(32, 16, dtype=torch.bfloat16).t()
    assert readable(turned, turned_too=True) is turned and readable(turned) is not turned


def test_small_results_get_small_tiles() -> None:
    assert tiles_for(8192, 4096).n == 256 and tiles_for(1024, 4096).n == tiles_for(512, 4096).n == 128
    assert Tiles(64, 256, 64, 3).of(129, 257) == 4


@needs_kernels
def test_kernels_are_given_each_of_their_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers where numbers are taken, and the sizes that a rank has: without a GPU, what `launch` hands to `start`."""
    given: dict[str, dict[str, Any]] = {}

    def start(kernel: Any, running: int, device: torch.device, args: tuple[Any, ...], constants: dict[str, Any]) -> None:
        assert len(args) + len(constants) == len(kernel.arg_names) and [*kernel.arg_names[len(args) :]] == [*constants]
        given[kernel.fn.__name__] = dict(zip(kernel.arg_names, args, strict=False)) | constants | {"running": running}

    for module in (matmul_hopper, matmul_reduce_scatter_hopper, all_gather_matmul_hopper):
        monkeypatch.setattr(module, "start", start)
        monkeypatch.setattr(module, "programs", lambda device: 132)
    a, b = torch.zeros(512, 64, dtype=torch.bfloat16), torch.zeros(1024, 64, dtype=torch.bfloat16)
    addresses, ranks, length = torch.zeros(4, dtype=torch.int64), 4, 99
    slots = Slots(addresses, addresses, 1 << 21, length)
    parts = [torch.zeros(2 << 21, dtype=torch.uint8) for _ in range(ranks)]
    counters = Counters(torch.zeros(4, dtype=torch.int32), torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64))
    assert launch(a, b, SMALL).shape == (512, 1024)
    assert matmul_reduce_scatter_hopper.launch(a, b, 2, slots, parts, counters, tiles=SMALL, patience=2.0).shape == (128, 1024)
    turned = b.view(64, 1024).t()
    y = all_gather_matmul_hopper.launch(a, turned, 2, slots, parts, counters, tiles=LARGE, patience=2.0)
    assert y.shape == (2048, 1024)
    alone, scattered, gathered = given.values()
    assert [alone[size] for size in ("rows", "cols", "depth", "running", "TURNED")] == [512, 1024, 64, 32, False]
    assert [scattered[size] for size in ("rows", "cols", "depth", "running", "RANKS")] == [128, 1024, 64, 32, 4]
    assert (scattered["slot_rows"], scattered["length"], scattered["rank"], scattered["patience"]) == (1 << 14, length, 2, 2_000_000_000)
    assert scattered["here"].base.shape == (1 << 15, 64) and scattered["memory"] is scattered["flags"] is addresses
    assert [gathered[size] for size in ("rows", "cols", "depth", "running", "TURNED")] == [512, 1024, 64, 64, True]
    assert [gathered[name].base.data_ptr() for name in ("here", "other_1", "other_2", "other_3")] == [
        parts[rank].data_ptr() for rank in (2, 3, 0, 1)
    ]
    assert gathered["other_4"] is None and gathered["here"].base.shape == (2048, 64) and gathered["flags"] is addresses


@needs_kernels
def test_slots_that_are_too_small_are_refused() -> None:
    a, b = torch.zeros(512, 64, dtype=torch.bfloat16), torch.zeros(1024, 64, dtype=torch.bfloat16)
    addresses, parts = torch.zeros(2, dtype=torch.int64), [torch.zeros(512, dtype=torch.uint8)] * 2
    counters = Counters(torch.zeros(4, dtype=torch.int32), torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64))
    for module, text in (
        (matmul_reduce_scatter_hopper, "1048576 bytes and 16 flags"),
        (all_gather_matmul_hopper, "131072 bytes and 5 flags"),
    ):
        with pytest.raises(AssertionError, match=f"{text} in slots of 256 and 1"):
            module.launch(a, b, 0, Slots(addresses, addresses, 256, 1), parts, counters)


def shares_of(ranks: int, rows: int, cols: int, depth: int, tiles: Tiles) -> tuple[int, int, int, int]:
    """With the number of programs and the columns of tiles."""
    running, across = min(132, ranks * tiles.of(rows, cols)), -(-cols // tiles.n)
    return (*all_gather_matmul_hopper.shares(ranks, rows, cols, depth, tiles, running), running, across)


@pytest.mark.parametrize("tiles", [LARGE, SMALL], ids=str)
@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize("sizes", [(128, 8, 8), (128, 65536, 8), (16384, 8, 16384), (8192, 7168, 8192), (1000, 520, 200)], ids=str)
def test_some_programs_give_rows_away_and_some_columns_come_first(sizes: tuple[int, int, int], ranks: int, tiles: Tiles) -> None:
    givers, lead, running, across = shares_of(ranks, *sizes, tiles)
    assert 1 <= givers <= running and 1 <= lead <= across


def test_more_programs_give_where_there_is_less_to_multiply() -> None:
    assert shares_of(2, 4096, 3072, 4096, LARGE)[0] == 32 > shares_of(2, 4096, 14336, 4096, LARGE)[0] == 16
    assert shares_of(2, 256, 28672, 8192, LARGE)[1] == 66, "as many as 132 programs multiply at once"
    assert shares_of(2, 4096, 14336, 4096, LARGE)[1] == 56, "all, of many rows"


class Kernel:
    """Stands for one that triton compiles: remembers what was compiled and what was started."""

    arg_names = ("a", "rows", "TURNED", "HALF")

    def __init__(self) -> None:
        self.compiled: list[Any] = []
        self.started: list[Any] = []

    def __getitem__(self, grid: tuple[int]) -> Any:
        def compile_and_start(*args: Any, num_warps: int, **constants: Any) -> Any:
            self.compiled.append((grid, args, constants, num_warps))
            kernel = self

            class Compiled:
                def __getitem__(self, grid: tuple[int, int, int]) -> Any:
                    return lambda *values: kernel.started.append((grid, values))

            return Compiled()

        return compile_and_start


def test_a_kernel_is_compiled_once_for_its_constants(monkeypatch: pytest.MonkeyPatch) -> None:
    """And then started with other arguments, and its constants in the order in which it takes them."""
    monkeypatch.setattr(matmul_hopper, "_compiled", {})
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    kernel, gpu = Kernel(), torch.device("cuda", 1)
    for count, half in ((7, 64), (9, 64), (8, 32), (3, 64)):
        matmul_hopper.start(kernel, count, gpu, ("a", count), {"HALF": half, "TURNED": False})
    assert kernel.compiled == [
        ((7,), ("a", 7), {"HALF": 64, "TURNED": False}, 4),
        ((8,), ("a", 8), {"HALF": 32, "TURNED": False}, 4),
    ]
    assert kernel.started == [((9, 1, 1), ("a", 9, False, 64)), ((3, 1, 1), ("a", 3, False, 64))]
    with pytest.raises(AssertionError, match="tensors of cuda:0, the current device is 1"):
        matmul_hopper.start(kernel, 1, torch.device("cuda", 0), (), {})

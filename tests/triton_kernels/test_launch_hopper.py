"""What products on Hopper are started with: sizes of tiles, what can be read, and kernels that are prepared once."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pymesh3d.triton_kernels import all_gather_matmul_hopper, launch_hopper, matmul_all_reduce_hopper, matmul_hopper
from pymesh3d.triton_kernels import matmul_reduce_scatter_hopper as scatter_hopper
from pymesh3d.triton_kernels.launch_hopper import SMALL, Prepared, Tiles, alike, fits, readable
from pymesh3d.triton_kernels.matmul_reduce_scatter import Slots
from pymesh3d.triton_kernels.signals import Counters
from tests.kernels import needs_kernels

BF16 = torch.bfloat16
RANKS, LENGTH = 4, 99


def test_what_fits() -> None:
    assert fits(1, 16, 8, BF16) and fits(5, 8, 24, BF16)
    assert not fits(5, 12, 8, BF16), "rows of the result would not be aligned"
    assert not fits(5, 16, 4, BF16) and not fits(0, 16, 8, BF16) and not fits(5, 16, 8, torch.float32)


def test_what_cannot_be_read_is_copied() -> None:
    whole = torch.arange(5 * 32, dtype=torch.bfloat16).view(5, 32)
    for x in (whole, whole[:, 8:16], whole[1:]):
        assert readable(x) is x
    for x in (whole.t(), whole[:1].expand(5, 32), whole[:, 4:12], whole[:, ::2], whole.view(-1)[4:132].view(4, 32)):
        copy = readable(x)
        assert copy is not x and torch.equal(copy, x) and copy.is_contiguous()
    turned = torch.zeros(32, 16, dtype=torch.bfloat16).t()
    assert readable(turned, turned_too=True) is turned and readable(turned) is not turned


def test_tiles_of_a_result() -> None:
    assert Tiles(64, 256, 64, 3).of(129, 257) == 4 and SMALL.of(512, 3072) == 96


def test_what_is_alike_is_prepared_once() -> None:
    a, b = torch.zeros(6, 16, dtype=BF16), torch.zeros(24, 16, dtype=BF16)
    assert alike(a, b) == alike(torch.ones(6, 16, dtype=BF16), b.clone()) and hash(alike(a, b)) == hash(alike(a.clone(), b))
    others = [(a[:5], b), (a, b[:8]), (a, b.view(16, 24).t()), (torch.zeros(6, 32, dtype=BF16)[:, :16], b)]
    shifted = torch.zeros(7 * 16, dtype=BF16)[4 : 4 + 6 * 16].view(6, 16)
    others += [(shifted, b), (a, torch.zeros(25 * 16, dtype=BF16)[4 : 4 + 24 * 16].view(24, 16))]
    others += [(a.half(), b), (a, b.half()), (a, b.to("meta"))]
    kinds = {alike(a, b), *(alike(*other) for other in others)}
    assert len(kinds) == 1 + len(others), "sizes, strides, dtypes, device, and whether an address is that of 16 bytes"


class Kernel:
    """Stands for one that triton compiles: remembers what was compiled, and what was started by triton."""

    arg_names = ("a", "b", "y", "rows", "other", "RANKS", "TURNED", "HALF", "BLOCK_N", "BLOCK_K", "STAGES", "GROUP")

    def __init__(self) -> None:
        self.compiled: list[Any] = []
        self.started: list[Any] = []

    def __getitem__(self, grid: tuple[int]) -> Any:
        def compile_and_start(*args: Any, num_warps: int, **constants: Any) -> Any:
            self.compiled.append((grid, args, constants, num_warps))
            kernel = self

            class Compiled:
                function = 77
                metadata = type("Metadata", (), {"num_warps": 12, "shared": 1000})

                def __getitem__(self, grid: tuple[int, int, int]) -> Any:
                    return lambda *values: kernel.started.append((grid, values))

            return Compiled()

        return compile_and_start


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of the CPU are on the current GPU, whose current stream is 55."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 55, raising=False)


@needs_kernels
@pytest.mark.usefixtures("gpu")
def test_each_start_is_on_the_current_stream_and_has_a_new_result(monkeypatch: pytest.MonkeyPatch) -> None:
    started, current = [], {None: 0}
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", current.__getitem__, raising=False)
    a, b = torch.zeros(6, 16, dtype=BF16), torch.zeros(24, 16, dtype=BF16)
    one = made(Kernel(), a, b, lambda *_: lambda stream, addresses: started.append((stream, addresses[2])))
    ys = [one(a, b)]
    for current[None] in (55, 56):
        ys.append(one(a, b))
    assert started == [(55, ys[1].data_ptr()), (56, ys[2].data_ptr())] and len({y.data_ptr() for y in ys}) == 3


def made(kernel: Kernel, a: torch.Tensor, b: torch.Tensor, native: Any = None) -> Prepared:
    return Prepared(kernel, 7, a, b, (6, 24), SMALL, (5, None), {"RANKS": 2}, native)


def shown(descriptor: Any) -> tuple[int, list[int], list[int], list[int]]:
    return descriptor.base.data_ptr(), [*descriptor.shape], [*descriptor.strides], [*descriptor.block_shape]


@needs_kernels
@pytest.mark.usefixtures("gpu")
def test_the_first_start_compiles_and_triton_starts_the_next() -> None:
    kernel = Kernel()
    a, b = torch.zeros(6, 16, dtype=BF16), torch.zeros(24, 16, dtype=BF16)
    one = made(kernel, a, b)
    first, other = torch.ones(6, 16, dtype=BF16), torch.ones(24, 16, dtype=BF16)
    ys = [one(a, b), one(first, other)]
    assert [(y.shape, y.dtype, y.is_contiguous()) for y in ys] == [((6, 24), BF16, True)] * 2
    ((grid, args, constants, warps),) = kernel.compiled
    assert (grid, args[3:], warps) == ((7, 1, 1), (5, None), 4)
    assert constants == {"TURNED": False, "RANKS": 2, "HALF": 64, "BLOCK_N": 128, "BLOCK_K": 64, "STAGES": 6, "GROUP": 8}
    assert [shown(one) for one in args[:3]] == [
        (a.data_ptr(), [6, 16], [16, 1], [64, 64]),
        (b.data_ptr(), [24, 16], [16, 1], [128, 64]),
        (ys[0].data_ptr(), [6, 24], [24, 1], [64, 128]),
    ]
    ((grid, values),) = kernel.started
    assert (grid, values[3:]) == ((7, 1, 1), (5, None, 2, False, 64, 128, 64, 6, 8)), "constants in the kernel's order"
    assert [one.base.data_ptr() for one in values[:3]] == [first.data_ptr(), other.data_ptr(), ys[1].data_ptr()]


@needs_kernels
@pytest.mark.usefixtures("gpu")
def test_the_compiled_part_starts_it_where_it_can() -> None:
    kernel, asked, started = Kernel(), [], []

    def native(*given: Any) -> Any:
        asked.append(given)
        return lambda stream, addresses: started.append((stream, addresses))

    a, b = torch.zeros(6, 16, dtype=BF16), torch.zeros(16, 24, dtype=BF16).t()
    one = made(kernel, a, b, native)
    one(a, b)
    ys = [one(x, b) for x in (a.clone(), a)]
    assert asked == [(77, 7, 12 * 32, 1000, [(0, 6, 16, 16, 64, 64), (0, 16, 24, 24, 64, 64), (0, 6, 24, 24, 64, 64), 5])]
    assert len(kernel.compiled) == 1 and not kernel.started and kernel.compiled[0][2]["TURNED"]
    assert [stream for stream, _ in started] == [55, 55] and [given[1] for _, given in started] == [b.data_ptr()] * 2
    assert started[1][1] == (a.data_ptr(), b.data_ptr(), ys[1].data_ptr()) != started[0][1]
    refused = made(kernel, a, b, lambda *given: None)
    refused(a, b)
    refused(a, b)
    assert len(kernel.compiled) == 2 and len(kernel.started) == 1, "by triton, where the compiled part cannot"
    for tiles in (Tiles(64, 256, 32, 6), Tiles(64, 32, 64, 6)):
        Prepared(kernel, 7, a, b, (6, 24), tiles, (5, None), {"RANKS": 2}, native)(a, b)
    assert len(asked) == 1, "blocks of 32 columns have another swizzle"


@needs_kernels
@pytest.mark.usefixtures("gpu")
def test_what_cannot_be_read_is_copied_in_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    kernel = Kernel()
    a, b = torch.arange(12 * 16, dtype=BF16).view(6, 32)[:, ::2], torch.arange(2 * 24 * 16, dtype=BF16).view(16, 48)[:, ::2].t()
    monkeypatch.setattr(launch_hopper, "descriptor", lambda x, rows, cols: seen.append(x.clone()) or x)
    one = made(kernel, a, b)
    one(a, b)
    other = torch.ones_like(a)
    one(other, b)
    assert all(torch.equal(x, y) for x, y in zip(seen[:2] + seen[3:5], (b, a, b, other), strict=True))
    assert all(x.is_contiguous() for x in seen) and not kernel.compiled[0][2]["TURNED"]
    far = torch.zeros(16, 28, dtype=BF16)[:, :24].t()  # turned, but its rows do not begin at 16 bytes
    kernel = Kernel()
    made(kernel, a, far)(a, far)
    assert not kernel.compiled[0][2]["TURNED"] and seen[-3].is_contiguous()


@needs_kernels
@pytest.mark.usefixtures("gpu")
def test_other_devices_and_other_sizes_are_refused() -> None:
    a, b = torch.zeros(6, 16, dtype=BF16), torch.zeros(24, 16, dtype=BF16)
    for wrong in ((a, b[:, :8]), (a.float(), b), (a[:, :4], b[:, :4]), (a[:0], b)):
        with pytest.raises(AssertionError, match=r"of torch\.\w+, \["):
            made(Kernel(), *wrong)
    torch.cuda.current_device = lambda: 1  # the fixture brings the real one back
    with pytest.raises(AssertionError, match="tensors of cpu, the current device is 1"):
        made(Kernel(), a, b)(a, b)


def operands() -> tuple[Any, ...]:
    """a, b, and what ranks share."""
    a, b = torch.zeros(512, 64, dtype=BF16), torch.zeros(1024, 64, dtype=BF16)
    addresses = torch.zeros(RANKS, dtype=torch.int64)
    parts = [torch.zeros(2 << 22, dtype=torch.uint8) for _ in range(RANKS)]
    counters = Counters(torch.zeros(4, dtype=torch.int32), torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64))
    return a, b, addresses, parts, counters


@needs_kernels
def test_kernels_are_given_each_of_their_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers where numbers are taken, and the sizes that a rank has."""
    given: dict[str, dict[str, Any]] = {}

    def prepared(kernel: Any, running: int, a: Any, b: Any, shape: Any, tiles: Tiles, rest: Any, constants: Any, starter: Any) -> str:
        names = kernel.arg_names[3 : 3 + len(rest)]
        assert {*kernel.arg_names[3 + len(rest) :]} == {"TURNED", *constants, *tiles.options()}
        assert (tiles, starter) == (SMALL, "starter")
        given[kernel.fn.__name__] = dict(zip(names, rest, strict=True)) | constants | {"running": running, "shape": shape}
        return kernel.fn.__name__

    for module in (matmul_hopper, scatter_hopper, matmul_all_reduce_hopper, all_gather_matmul_hopper):
        monkeypatch.setattr(module, "Prepared", prepared)
        monkeypatch.setattr(module, "programs", lambda device: 132)
    a, b, addresses, parts, counters = operands()
    slots: Any = Slots(addresses, addresses, 1 << 22, LENGTH)
    options: Any = {"tiles": SMALL, "patience": 2.0, "starter": "starter"}
    matmul_hopper.prepare(a, b, SMALL, "starter")  # type: ignore[arg-type]
    scatter_hopper.prepare(a, b, 2, slots, parts, counters, **options)
    matmul_all_reduce_hopper.prepare(a, b, 2, slots, parts, counters, **options)
    all_gather_matmul_hopper.prepare(a, b, 2, slots, parts, counters, keep=False, **options)
    alone, scattered, reduced, gathered = given.values()
    assert [alone[size] for size in ("rows", "cols", "depth", "running", "shape")] == [512, 1024, 64, 32, (512, 1024)]
    for one, shape in ((scattered, (128, 1024)), (reduced, (512, 1024))):
        assert [one[size] for size in ("rows", "cols", "depth", "running", "RANKS", "shape")] == [128, 1024, 64, 32, 4, shape]
        assert (one["slot_rows"], one["length"], one["rank"], one["patience"]) == (1 << 15, LENGTH, 2, 2_000_000_000)
        assert one["here"].base.shape == (1 << 16, 64) and one["here"].base.data_ptr() == parts[2].data_ptr()
        assert one["memory"] is one["flags"] is addresses and one["calls"] is counters.calls and one["told"] is counters.told
    assert [gathered[size] for size in ("rows", "cols", "depth", "running", "shape")] == [512, 1024, 64, 132, (2048, 1024)]
    assert (gathered["KEEP"], gathered["length"], gathered["rank"], gathered["patience"]) == (False, LENGTH, 2, 2_000_000_000)
    assert [gathered[name].base.data_ptr() for name in ("here", "other_1", "other_2", "other_3")] == [
        parts[rank].data_ptr() for rank in (2, 3, 0, 1)
    ]
    assert gathered["other_4"] is None and gathered["here"].base.shape == (2048, 64) and gathered["flags"] is addresses


@needs_kernels
def test_slots_that_are_too_small_are_refused() -> None:
    a, b, addresses, parts, counters = operands()
    for module, text in (
        (scatter_hopper, "1048576 bytes and 8 flags"),
        (matmul_all_reduce_hopper, "2097152 bytes and 16 flags"),
        (all_gather_matmul_hopper, "262144 bytes and 6 flags"),
    ):
        with pytest.raises(AssertionError, match=f"{text} in slots of 256 and 1"):
            module.prepare(a, b, 0, Slots(addresses, addresses, 256, 1), parts, counters, tiles=SMALL)  # type: ignore[attr-defined]


@needs_kernels
def test_rows_that_make_no_tile_are_refused() -> None:
    a, b, addresses, parts, counters = operands()
    slots = Slots(addresses, addresses, 1 << 22, LENGTH)
    with pytest.raises(AssertionError, match="127 rows, fewer than the 128 of a tile"):
        all_gather_matmul_hopper.prepare(a[:127], b, 0, slots, parts, counters, tiles=SMALL)
    for rows in (508, 511):
        with pytest.raises(AssertionError, match=f"{rows} rows of 4 ranks, by tiles of 128"):
            matmul_all_reduce_hopper.prepare(a[:rows], b, 0, slots, parts, counters, tiles=SMALL)
    with pytest.raises(AssertionError, match="511 rows of 4 ranks"):
        scatter_hopper.prepare(a[:511], b, 0, slots, parts, counters, tiles=SMALL)

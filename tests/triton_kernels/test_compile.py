"""Every kernel compiles for sm_80, sm_90 and sm_100 (those in Gluon for sm_90), on any machine: no GPU is needed. A later kernel joins by a
line in KERNELS.

This file is run as a script, because the interpreter is chosen for a whole process. The script forks for each kernel, because the compiler
may abort.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ARCHITECTURES = (80, 90, 100)
ORDERING = r"acquire|release|bar\.sync|bar\.warp\.sync|acq_rel|fence\.proxy\.async;|wait_group \t?0;|bulk\.tensor|st\.global\.(v4|b16)"
MOVES = r"ld\.global|st\.global|cp\.async\.(ca|cg|wait)|bar\.sync"
ROUNDS = r"cvt\.r\w+\.(bf16|f16|f32)"
# name -> (file, kernel, types of its arguments in order, its constexpr arguments, and how many warps it has if not 4). A pointer "*fp32:16"
# is to an address that 16 divides.
PHILOX = " i64 i64 i64 i64 i64 i64 i32 i32 i64"
DROPOUT = " i32 i32 i64 i64 i64 i64 i32 i32 i32 i32 i32 i64"
SUMS, GRADIENT = " *i64 *{0} *{0} i64 i64 i32 i32 i64 i64", " *i64 *{0} *{0} *{0} *{1} i64 i32 i32 i64 i64 i64 i64"
ROW, TALL = {"ALIGNED": True, "BLOCK_ROWS": 1, "BLOCK_COLS": 1024}, {"ALIGNED": False, "BLOCK_ROWS": 128, "BLOCK_COLS": 8}
PIECE = {"BLOCK_ROWS": 1, "BLOCK_COLS": 2048}
TURN = {"BACKWARD": False, "BLOCK_TOKENS": 32, "BLOCK_HALF": 64}
RUNS = {"RUNS": 512, "RUN": 8}
PIECES = {"BLOCK_ROWS": 16, "BLOCK_COLS": 16}
TILES = {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 32, "GROUP": 8}
SHARED = "*{0} *{0} *{0} *i64 *i64 *i32 *i64 *i64 i32" + " i64" * 8
# In Gluon. A descriptor is "ROWSxCOLS" of its blocks in bfloat16.
HOPPER = {"HALF": 64, "BLOCK_N": 256, "BLOCK_K": 64, "STAGES": 3, "GROUP": 8, "TURNED": False}
TALKS = " *i64 *i32 *i64 *i64{} i64"
BUCKET = {"RANK": 1, "RANKS": 3, "TILE": 1024, "WIDTH": 2, "WIRE": "bfloat16"}
SAME = BUCKET | {"WIDTH": 1}
OF_BFLOAT16, OF_FLOAT32 = ({"DTYPE": dtype, "SQUARES": 70} for dtype in ("bfloat16", "float32"))  # what lies there
ALONE = {"copies": None, "ADD": True}
ADAMW = {"ADAMW": True, "DECOUPLED": True, "WEIGHT": "bfloat16"}
SGD = {"ADAMW": False, "DECOUPLED": False, "WEIGHT": "float32", "PUSHED": 0, "average_square": None, "contributions": None}
NUMBERS = " *i64 *fp64{} i32" + " fp32" * 8
UNTOLD: dict[str, Any] = {"squares": None}
KERNELS: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "philox normal float32": ("philox", "philox_fill_kernel", "*fp32" + PHILOX, {"NORMAL": True, "BLOCK_ROWS": 1, "BLOCK_COLS": 1024}),
    "philox normal bfloat16": ("philox", "philox_fill_kernel", "*bf16" + PHILOX, {"NORMAL": True, "BLOCK_ROWS": 1024, "BLOCK_COLS": 1}),
    "philox uniform float64": ("philox", "philox_fill_kernel", "*fp64" + PHILOX, {"NORMAL": False, "BLOCK_ROWS": 8, "BLOCK_COLS": 128}),
    "dropout bfloat16": ("dropout", "dropout_kernel", "*bf16 *bf16" + DROPOUT, ROW),
    "dropout float32": ("dropout", "dropout_kernel", "*fp32 *fp32" + DROPOUT, TALL),
    "rotary bfloat16": ("rotary", "rotary_kernel", "*bf16 *bf16 *bf16 *bf16 *fp32 *fp32" + " i64" * 10 + " i32" * 4, TURN),
    "rotary backward float64": ("rotary", "rotary_kernel", "*fp64 " * 6 + "i64 " * 10 + "i32 " * 4, TURN | {"BACKWARD": True}),
    "swiglu bfloat16": ("swiglu", "swiglu_kernel", "*bf16 *bf16 i64 i64 i64", PIECE),
    "swiglu float64": ("swiglu", "swiglu_kernel", "*fp64 *fp64 i64 i64 i64", {"BLOCK_ROWS": 512, "BLOCK_COLS": 4}),
    "swiglu backward bfloat16": ("swiglu", "swiglu_backward_kernel", "*bf16 *bf16 *bf16 i64 i64 i64 i64", PIECE),
    "rms norm bfloat16": (
        "rms_norm",
        "rms_norm_kernel",
        "*bf16 *bf16 *bf16 *fp32 i64 i64 i64 i32",
        PIECE | {"added": None, "h": None, "EPS": 1e-5},
    ),
    "rms norm of a sum float16": ("rms_norm", "rms_norm_kernel", "*fp16 " * 5 + "*fp32 i64 i64 i64 i32", PIECE | {"EPS": 1e-5}),
    "rms norm of a sum float64": ("rms_norm", "rms_norm_kernel", "*fp64 " * 6 + "i64 i64 i64 i32", PIECES | {"EPS": 0.0}),
    "rms norm backward bfloat16": (
        "rms_norm",
        "rms_norm_backward_kernel",
        "*bf16 *bf16 *bf16 *fp32 *bf16 *bf16 *fp32 i64 i64 i64 i64 i32",
        PIECE | {"STAGES": 2},
    ),
    "rms norm backward float64": (
        "rms_norm",
        "rms_norm_backward_kernel",
        "*fp64 " * 6 + "i64 i64 i64 i64 i32",
        PIECES | {"grad_h": None, "STAGES": 1},
    ),
    "rms norm total bfloat16": ("rms_norm", "total_kernel", "*fp32 *bf16 i32 i32", {"BLOCK_PROGRAMS": 64, "BLOCK_COLS": 32}),
    "dropout float64": ("dropout", "dropout_kernel", "*fp64 *fp64" + DROPOUT, TALL | {"BLOCK_ROWS": 8, "BLOCK_COLS": 128}),
    "matmul bfloat16": ("matmul", "matmul_kernel", "*bf16 *bf16 *bf16" + " i64" * 5, TILES),
    "matmul float32": ("matmul", "matmul_kernel", "*fp32 *fp32 *fp32" + " i64" * 5, TILES),
    "matmul float64": ("matmul", "matmul_kernel", "*fp64 *fp64 *fp64" + " i64" * 5, TILES | {"BLOCK_K": 16}),
    **{
        f"matmul reduce-scatter {name} of {ranks}": (
            "matmul_reduce_scatter",
            "matmul_reduce_scatter_kernel",
            SHARED.format(name),
            TILES | {"RANKS": ranks, "BLOCK_K": depth},
        )
        for name, ranks, depth in (("bf16", 8, 32), ("fp64", 2, 16))
    },
    "all-gather matmul": ("all_gather_matmul", "all_gather_matmul_kernel", SHARED.format("bf16"), TILES | {"RANKS": 4}),
    "matmul all-reduce": ("matmul_all_reduce", "matmul_all_reduce_kernel", SHARED.format("bf16"), TILES | {"RANKS": 4}),
    "hopper matmul": ("matmul_hopper", "matmul_kernel", "64x64 256x64 64x256 i32 i32 i32", HOPPER),
    "hopper matmul turned": ("matmul_hopper", "matmul_kernel", "64x64 64x256 64x256 i32 i32 i32", HOPPER | {"TURNED": True}),
    **{
        f"hopper matmul {what.replace('_', '-')} of {ranks}": (
            f"matmul_{what}_hopper",
            f"matmul_{what}_kernel",
            "64x64 256x64 64x256 64x64 *i64" + TALKS.format(" i32" * 7),
            HOPPER | {"RANKS": ranks},
        )
        for ranks in (2, 8)
        for what in ("reduce_scatter", "all_reduce")
    },
    **{
        f"hopper all-gather matmul of {ranks}": (
            "all_gather_matmul_hopper",
            "all_gather_matmul_kernel",
            f"64x64 {'64x256' if ranks == 2 else '256x64'} 64x256" + " 64x64" * ranks + TALKS.format(" i32" * 10),
            HOPPER | {"RANKS": ranks, "KEEP": ranks == 2, "TURNED": ranks == 2} | {f"other_{turn}": None for turn in range(ranks, 8)},
        )
        for ranks in (2, 8)
    },
    **{f"squares {dtype}": ("squares", "squares_kernel", f"*{dtype}:16 *fp64 i64", {"TILE": 4096}) for dtype in ("fp32", "bf16", "fp64")},
    "tell ranks": ("signals", "tell_ranks_kernel", "*i64 i32 i32 i32", {"RANKS": 4}),
    "wait for ranks": ("signals", "wait_for_ranks_kernel", "*i64 *i64 *i64 i32 i32 i32 i64", {"RANKS": 4}),
    "meet": ("signals", "meet_kernel", "*i64 *i32 *i64 *i64 i32 i32 i64", {"RANKS": 4, "num_warps": 1}),
    **{
        f"zero round {wide} to {narrow}{', largest told' if told else ''}": (
            "zero_reduce",
            "round_in_place_kernel",
            f"*{wide}:16 *{narrow}:16" + told,
            {"TILE": 1024, "WIDTH": width} | ({} if told else {"largest": None}),
        )
        for wide, narrow, width in (("fp32", "bf16", 2), ("fp64", "bf16", 4), ("fp64", "fp16", 4), ("fp64", "fp32", 2))
        for told in ("", " *fp32")
    },
    **{
        f"zero reduce {kind}": ("zero_reduce", "reduce_shard_kernel", f"*i64 *{out}:16{copies} *fp64 i32 i32", constants)
        for kind, out, copies, constants in (
            ("fp32 of bf16 for all", "fp32", " *i64", BUCKET | OF_BFLOAT16 | {"ADD": False}),
            ("fp32 of bf16 added", "fp32", "", BUCKET | OF_BFLOAT16 | ALONE),
            ("bf16 for all", "bf16", " *i64", SAME | OF_BFLOAT16 | {"ADD": True}),
            ("bf16 alone", "bf16", "", SAME | OF_BFLOAT16 | ALONE | {"ADD": False}),
            ("fp32 added", "fp32", "", SAME | OF_FLOAT32 | ALONE | {"WIRE": "float32"}),
            ("fp64 of fp32 for all", "fp64", " *i64", BUCKET | OF_FLOAT32 | {"WIRE": "float32", "ADD": False}),
            ("fp32 rounded by the reader for all", "fp32", " *i64", SAME | OF_FLOAT32 | {"ADD": False}),
            ("fp32 rounded by the reader for all, added", "fp32", " *i64", SAME | OF_FLOAT32 | {"ADD": True}),
            ("fp32 rounded by the reader added", "fp32", "", SAME | OF_FLOAT32 | ALONE),
        )
    },
    "zero AdamW": (
        "zero_step",
        "update_kernel",
        "*fp32:16 *fp32:16 *fp32:16 *fp32:16" + NUMBERS.format(""),
        BUCKET | ADAMW | UNTOLD | {"contributions": None, "PUSHED": 0},
    ),
    "zero AdamW of contributions with push": (
        "zero_step",
        "update_kernel",
        "*i64 *fp32:16 *fp32:16 *fp32:16" + NUMBERS.format(" *fp64"),
        BUCKET | ADAMW | {"grads": None, "PUSHED": 2},
    ),
    "zero AdamW of contributions, masters of 16 bits": (
        "zero_step",
        "update_kernel",
        "*i64 *i16:16 *fp32:16 *fp32:16" + NUMBERS.format(" *fp64"),
        BUCKET | ADAMW | {"grads": None, "PUSHED": 2},
    ),
    "zero Adam of float32": (
        "zero_step",
        "update_kernel",
        "*fp32:16 *fp32:16 *fp32:16 *fp32:16" + NUMBERS.format(""),
        BUCKET | ADAMW | UNTOLD | {"DECOUPLED": False, "WEIGHT": "float32", "contributions": None, "PUSHED": 2},
    ),
    "zero SGD": ("zero_step", "update_kernel", "*fp32:16 *fp32:16" + NUMBERS.format(""), BUCKET | SGD | UNTOLD | {"average": None}),
    "zero SGD with momentum": ("zero_step", "update_kernel", "*fp32:16 *fp32:16 *fp32:16" + NUMBERS.format(""), BUCKET | SGD | UNTOLD),
    "zero SGD with Nesterov's, masters of 16 bits": (
        "zero_step",
        "update_kernel",
        "*fp32:16 *i16:16 *fp32:16" + NUMBERS.format(""),
        BUCKET | SGD | UNTOLD | {"DECOUPLED": True, "WEIGHT": "bfloat16", "PUSHED": 2},
    ),
    "cross-entropy bfloat16": ("cross_entropy", "statistics_kernel", "*bf16" + SUMS.format("fp32"), RUNS | {"SMOOTHED": False}),
    "cross-entropy float16": ("cross_entropy", "statistics_kernel", "*fp16" + SUMS.format("fp32"), RUNS | {"SMOOTHED": True}),
    "cross-entropy float64": ("cross_entropy", "statistics_kernel", "*fp64" + SUMS.format("fp64"), RUNS | {"SMOOTHED": True}),
    "cross-entropy backward bfloat16": ("cross_entropy", "gradient_kernel", "*bf16" + GRADIENT.format("fp32", "bf16"), {"BLOCK": 4096}),
    "cross-entropy backward float32": ("cross_entropy", "gradient_kernel", "*fp32" + GRADIENT.format("fp32", "fp32"), {"BLOCK": 4096}),
    "cross-entropy backward float64": ("cross_entropy", "gradient_kernel", "*fp64" + GRADIENT.format("fp64", "fp64"), {"BLOCK": 8}),
}


def _descriptor(block: str) -> str:
    """The type of a descriptor, as Gluon spells it."""
    from pymesh3d.triton_kernels.backend import gl

    shape = [int(size) for size in block.split("x")]
    return f"tensordesc<bf16{shape},{gl.NVMMASharedLayout.get_default_for(shape, gl.bfloat16)!r}>"


def _architectures(case: str) -> tuple[int, ...]:
    return (90,) if case.startswith("hopper") else ARCHITECTURES


def _compile(case: str) -> dict[str, tuple[str, int, list[str], list[str], list[str]]]:
    """Architecture -> (target line of the PTX, bytes of machine code, its instructions that order memory, move numbers, and round them)."""
    import triton
    import triton.language as tl
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    file, name, types, constants = KERNELS[case]
    options = {key: value for key, value in constants.items() if key == "num_warps"}
    constexprs = {key: getattr(tl, value) if isinstance(value, str) else value for key, value in constants.items() if key not in options}
    kernel = getattr(importlib.import_module(f"pymesh3d.triton_kernels.{file}"), name)
    arguments = [argument for argument in kernel.arg_names if argument not in constexprs]
    kinds = [_descriptor(kind) if kind[0].isdigit() else kind for kind in types.split()]
    aligned = {argument for argument, kind in zip(arguments, kinds, strict=True) if kind.endswith(":16")}
    attributes = {(at,): [["tt.divisibility", 16]] for at, argument in enumerate(kernel.arg_names) if argument in aligned}
    signature = dict(zip(arguments, (kind.removesuffix(":16") for kind in kinds), strict=True)) | dict.fromkeys(constexprs, "constexpr")
    source = (GluonASTSource if case.startswith("hopper") else ASTSource)(kernel, signature, constexprs, attributes)
    built = {}
    for architecture in _architectures(case):
        binary = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)
        lines = [line.strip() for line in binary.asm["ptx"].splitlines()]
        target = next(line for line in lines if line.startswith(".target"))
        ordering, moves, rounds = ([line for line in lines if re.search(kind, line)] for kind in (ORDERING, MOVES, ROUNDS))
        built[str(architecture)] = (target, len(binary.asm["cubin"]), ordering, moves, rounds)
    return built


def _compile_apart(folder: Path) -> None:
    """Compile every kernel, as many at once as there are cores; what comes of it is in files by the kernel's number."""
    importlib.import_module("pymesh3d.triton_kernels")  # once, for all that are forked
    for number, case in enumerate(KERNELS):
        if number >= (os.cpu_count() or 1):
            os.wait()
        if os.fork() == 0:
            with (folder / f"{number}.err").open("w") as errors:
                os.dup2(errors.fileno(), sys.stderr.fileno())
            (folder / f"{number}.json").write_text(json.dumps(_compile(case)))
            os._exit(0)
    with contextlib.suppress(ChildProcessError):
        while True:
            os.wait()


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with what came of each kernel."""
    pytest.importorskip("triton", reason="triton cannot be installed here, so there is nothing to compile with")
    paths = os.pathsep.join(filter(None, sys.path))
    folder, cache = tmp_path_factory.mktemp("compiled"), tmp_path_factory.mktemp("cache")
    env = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache), "PYTHONPATH": paths}  # 0: unset would mean 1 here
    child = subprocess.run([sys.executable, __file__, str(folder)], env=env, capture_output=True, text=True, timeout=240)
    assert child.returncode == 0, child.stderr
    return folder


@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", KERNELS)
def test_compiles_without_a_gpu(compiled: Path, case: str) -> None:
    number = list(KERNELS).index(case)
    result = compiled / f"{number}.json"
    assert result.exists(), f"{case} does not compile:\n{(compiled / f'{number}.err').read_text()}"
    built = json.loads(result.read_text())
    for architecture in _architectures(case):
        target, size, *_ = built[str(architecture)]
        assert f"sm_{architecture}" in target, f"{case}: asked for sm_{architecture}, the PTX says {target}"
        assert size > 1000, f"{case}: {size} bytes of machine code for sm_{architecture}"


TALKING = [case for case in KERNELS if ("reduce" in case or "gather" in case) and not case.startswith("zero")]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", [case for case in TALKING if not case.startswith("hopper")])
def test_what_other_ranks_read_is_ordered_for_all_gpus(compiled: Path, case: str) -> None:
    """A flag is set by a release, and waited for by an acquire, of the whole system, with a barrier of all threads before and after."""
    built = json.loads((compiled / f"{list(KERNELS).index(case)}.json").read_text())
    for architecture in _architectures(case):
        lines = built[str(architecture)][2]
        acquires = [at for at, line in enumerate(lines) if ".acquire" in line]
        releases = [at for at, line in enumerate(lines) if ".release" in line]
        assert acquires and releases and (len(acquires) == len(releases) or "gather" in case), lines
        for at in acquires:
            assert "ld.global.sys.acquire.b32" in lines[at] and "bar.sync" in lines[at + 1]
        for at in releases:
            assert "atom.global.sys.release.exch.b32" in lines[at] and "bar.sync" in lines[at - 1]
        assert "acq_rel" in lines[-2] and "bar.sync" in lines[-3], "the last program counts the call after all that it has read and written"


@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", [case for case in TALKING if case.startswith("hopper")])
def test_what_the_accelerator_moves_is_ordered_for_all_gpus(compiled: Path, case: str) -> None:
    """What it has stored is there, for all threads of the warp, before the flag is set; after a flag a fence stands before its loads."""
    lines = json.loads((compiled / f"{list(KERNELS).index(case)}.json").read_text())["90"][2]
    acquires = [at for at, line in enumerate(lines) if "ld.global.sys.acquire.b32" in line]
    releases = [at for at, line in enumerate(lines) if "atom.global.sys.release.exch.b32" in line]
    assert acquires and releases
    fences = [at for at, line in enumerate(lines) if "fence.proxy.async;" in line]
    assert all("bar.warp.sync" in lines[at + 1] for at in acquires)
    if "gather" in case:  # it waits for all ranks in a row, looks for all rows of one, and waits for a run of them
        assert len(acquires) == int(case[-1]) - 1 + 2
        assert sum("gpu.acq_rel" in line for line in lines) == 3, "a run is complete, all are, and so is the call"
        stores, given = sum("global.shared::cta.bulk_group" in line for line in lines), 2 * 3 * (int(case[-1]) - 1)  # blocks of a stage
        assert stores == 2 * 4 + given + (2 * 3 if KERNELS[case][3]["KEEP"] else 0), "the result; to all others; to itself, to keep rows"
        for at in acquires:
            after = [line for line in lines[at + 1 :] if re.search(r"fence\.proxy\.async;|shared::(cta|cluster)\.global", line)]
            assert "fence.proxy.async;" in after[0]
    else:
        assert len(fences) == len(acquires)
    of_data = releases[len(releases) // 3 :] if "gather" in case else releases  # the first of a gather only say that this rank has come
    for at in of_data:
        before = lines[:at]
        assert "bar.warp.sync" in before[-1]
        if "gather" in case:
            stored = max(number for number, line in enumerate(before) if "global.shared::cta.bulk_group" in line)
            arrived = max(number for number, line in enumerate(before) if "wait_group 0;" in line)
            assert stored < arrived < at - 1
        else:
            assert any("st.global.v4" in line for line in before), "a tile goes out by the warp's own stores, which a release covers"
            assert not any("st.global.b16" in line for line in lines), "16 bytes at once"


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("case", "told", "waited_for"), [("tell ranks", 3, 0), ("wait for ranks", 0, 3), ("meet", 3, 3)])
def test_who_meets_tells_all_before_it_waits_for_any(compiled: Path, case: str, told: int, waited_for: int) -> None:
    """By releases and acquires of the whole system, with a barrier of all threads before and after, as above."""
    built = json.loads((compiled / f"{list(KERNELS).index(case)}.json").read_text())
    for architecture in _architectures(case):
        lines = built[str(architecture)][2]
        releases = [at for at, line in enumerate(lines) if ".release" in line]
        acquires = [at for at, line in enumerate(lines) if ".acquire" in line]
        assert (len(releases), len(acquires)) == (told, waited_for) and releases + acquires == sorted(releases + acquires), lines
        assert all("atom.global.sys.release.exch.b32" in lines[at] and "bar.sync" in lines[at - 1] for at in releases), lines
        assert all("ld.global.sys.acquire.b32" in lines[at] and "bar.sync" in lines[at + 1] for at in acquires), lines


@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", [case for case in KERNELS if case.startswith("zero")])
def test_a_shard_is_moved_16_bytes_at_once(compiled: Path, case: str) -> None:
    """All but addresses, a scale, a sum of squares and zeros for those of others, each of 8 bytes, which may be loaded ahead as well; and
    the largest number of a tile, of 4."""
    built = json.loads((compiled / f"{list(KERNELS).index(case)}.json").read_text())
    for architecture in _architectures(case):
        moves = [line for line in built[str(architecture)][3] if "bar.sync" not in line and "wait" not in line]
        wide = r"global\.(L1\S+\.)?v(4\.b32|2\.b64|8\.b32|4\.b64) |cp\.async\.cg\..*, 0x10,"
        numbers = [line for line in moves if re.search(wide, line)]
        rest = [line for line in moves if line not in numbers]
        largest = [line for line in rest if "largest" in case and "st.global.b32 " in line]
        others = [line for line in rest if line not in largest]
        assert len(largest) == ("largest" in case), rest
        assert all(re.search(r"(ld|st)\.global\.b64 |cp\.async\.ca\..*, 0x8,", line) for line in others), rest
        assert sum("st.global" in line for line in others) <= 2 * ("reduce" in case) + ("contributions" in case), rest
        assert any("st.global" in line for line in numbers), moves


@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", [case for case in KERNELS if case.startswith("zero round")])
def test_float64_becomes_16_bits_by_way_of_float32(compiled: Path, case: str) -> None:
    """As in torch: it is rounded twice."""
    built = json.loads((compiled / f"{list(KERNELS).index(case)}.json").read_text())
    for architecture in _architectures(case):
        rounds = {line.split()[0].replace("x2", "") for line in built[str(architecture)][4]}
        ways = [("fp64" in case, "cvt.rn.f32.f64"), ("bf16" in case, "cvt.rn.bf16.f32"), ("fp16" in case, "cvt.rn.f16.f32")]
        assert rounds == {way for taken, way in ways if taken}, rounds


@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", [case for case, kernel in KERNELS.items() if kernel[0] == "zero_reduce"])
def test_all_has_been_read_before_it_is_written_over(compiled: Path, case: str) -> None:
    """What a tile is made of may lie in its own place, where other threads read it."""
    built = json.loads((compiled / f"{list(KERNELS).index(case)}.json").read_text())
    for architecture in _architectures(case):
        moves = built[str(architecture)][3]
        stores = [at for at, line in enumerate(moves) if re.search(r"st\.global\.v", line)]
        loads = [at for at, line in enumerate(moves[: stores[0]]) if re.search(r"ld\.global\.v|cp\.async\.wait", line)]
        assert any("bar.sync" in line for line in moves[loads[-1] : stores[0]]), moves


if __name__ == "__main__":
    _compile_apart(Path(sys.argv[1]))

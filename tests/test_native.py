"""The compiled part: it was built, finds libraries, explains why it does not, and lets other threads run meanwhile."""

import ctypes
import hashlib
import os
import shutil
import struct
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from pymesh3d import __version__
from pymesh3d.comm import native
from tests import stub
from tests.processes import ticks_while
from tests.stub import COMPILER

ROOT = Path(__file__).parents[1]
CORE = [ROOT / "csrc" / f"{name}.cpp" for name in ("copier", "gpu", "kernel", "library", "link", "nccl", "probe")]
PROGRAMS = [ROOT / "csrc" / f"{name}.cpp" for name in ("link_test", "link_abort_test", "kernel_test", "copier_test", "core_test")]
LINK_TESTS = {"link_test": ["1000"], "link_abort_test": []}  # and what they take besides the library
SANITIZERS = {
    "memory": ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"],
    "threads": ["-fsanitize=thread"],
}
HEADERS = Path(sysconfig.get_path("include"), "Python.h").is_file()

needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler on this machine")
needs_core = pytest.mark.skipif(not native.available, reason=native.reason or "available")

Build = Callable[..., str]


@pytest.fixture
def fake(tmp_path: Path) -> Build:
    """`fake(body, symbol=..., file=...)`: the path of a library whose version function has `body`."""

    def build(body: str, symbol: str = "ncclGetVersion", file: str = "libfake.so", extra: str = "") -> str:
        source, library = tmp_path / "fake.cpp", tmp_path / file
        source.write_text(f'#include <unistd.h>\n{extra}\nextern "C" int {symbol}(int* version) {{ {body} }}\n')
        assert COMPILER is not None
        subprocess.run([COMPILER, "-shared", "-fPIC", f"-Wl,-soname,{file}", source, "-o", library], check=True, timeout=60)
        return str(library)

    return build


@pytest.mark.skipif(COMPILER is None or not HEADERS, reason="no C++ compiler or no Python.h on this machine")
def test_core_was_built() -> None:
    """An optional extension hides its compile errors; this does not."""
    assert native.available, native.reason


@needs_core
def test_core_is_of_this_version() -> None:
    from pymesh3d import _C

    assert _C.version == __version__
    assert native.reason == ""


@needs_core
@needs_compiler
@pytest.mark.parametrize(
    ("name", "symbol", "code", "version"),
    [
        ("nccl", "ncclGetVersion", 22809, (2, 28, 9)),
        ("nccl", "ncclGetVersion", 21805, (2, 18, 5)),
        ("nccl", "ncclGetVersion", 2708, (2, 7, 8)),
        ("cuda", "cuDriverGetVersion", 13000, (13, 0)),
        ("cuda", "cuDriverGetVersion", 12040, (12, 4)),
    ],
)
def test_version_of_a_library(fake: Build, name: str, symbol: str, code: int, version: tuple[int, ...]) -> None:
    path = fake(f"*version = {code}; return 0;", symbol)
    found = native.probe(name, path)
    assert found is not None
    assert (found.version, found.path, found.error, found.was_loaded) == (version, path, "", False)


@needs_core
@needs_compiler
def test_failed_call_is_an_error_with_its_status(fake: Build) -> None:
    found = native.probe("nccl", fake("*version = 1; return 5;"))
    assert found is not None
    assert (found.version, found.error) == ((), "ncclGetVersion failed with status 5")


@needs_core
@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("/no/such/libnccl.so.2", "cannot open shared object file"),
        (__file__, "invalid ELF header"),
        ("libm.so.6", "undefined symbol: ncclGetVersion"),
    ],
)
def test_library_that_does_not_serve_is_explained(path: str, text: str) -> None:
    found = native.probe("nccl", path)
    assert found is not None
    assert text in found.error
    assert (found.version, found.path) == ((), "")


@needs_core
def test_unknown_name_is_refused() -> None:
    with pytest.raises(ValueError, match='unknown library "nvml": it must be "nccl" or "cuda"'):
        native.probe("nvml")


@needs_core
@needs_compiler
def test_loaded_copy_is_preferred_to_the_one_on_the_search_path(fake: Build, tmp_path: Path) -> None:
    """torch loads the NCCL it brings; another one of the same soname that stands on the search path must not be taken."""
    loaded = fake("*version = 22809; return 0;", file="libnccl.so.2")
    other = tmp_path / "other"
    other.mkdir()
    shutil.move(loaded, tmp_path / "torchs-libnccl.so")
    shutil.copy(fake("*version = 21805; return 0;", file="libnccl.so.2"), other)
    code = f"""
import ctypes
from pymesh3d.comm.native import probe
before = probe("nccl")
torchs = ctypes.CDLL({str(tmp_path / "torchs-libnccl.so")!r})
after = probe("nccl")
print(before.version, before.was_loaded, after.version, after.was_loaded)
"""
    environment = {**os.environ, "LD_LIBRARY_PATH": str(other)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT, env=environment)
    assert done.stdout.strip() == "(2, 18, 5) False (2, 28, 9) True", done.stderr


@needs_core
@needs_compiler
def test_other_threads_run_while_a_library_is_opened(fake: Build) -> None:
    path = fake("*version = 22809; return 0;", extra="struct Slow { Slow() { usleep(600000); } } slow;")
    ticks = ticks_while(lambda: native.probe("nccl", path), seconds=0.5)
    assert ticks >= 5, "no other thread ran while the library was opened"


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """For each kind of sanitizers, a folder with the test programs of the core and the library for CUDA and NCCL."""
    flags = ["-std=c++17", "-g", "-Wall", "-Wextra", "-Werror", "-pthread"]
    folders = {kind: tmp_path_factory.mktemp(kind) for kind in SANITIZERS}

    def compile_and_link(kind: str, *arguments: str | Path) -> None:
        assert COMPILER is not None
        subprocess.run([COMPILER, *flags, *SANITIZERS[kind], *arguments], cwd=folders[kind], check=True, timeout=100)

    with ThreadPoolExecutor(os.cpu_count()) as compilers:
        libraries = [compilers.submit(stub.build, folder, *SANITIZERS[kind]) for kind, folder in folders.items()]
        sources = [compilers.submit(compile_and_link, kind, "-c", source) for source in [*PROGRAMS, *CORE] for kind in SANITIZERS]
        for compiled in [*libraries, *sources]:
            compiled.result()
    for kind in SANITIZERS:
        for program in PROGRAMS:
            compile_and_link(kind, *(f"{source.stem}.o" for source in [program, *CORE]), "-o", program.stem, "-ldl")
    return folders


def started(program: Path, *arguments: str | Path) -> subprocess.Popen[str]:
    return subprocess.Popen([program, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def expect_success(process: subprocess.Popen[str]) -> None:
    try:
        _, errors = process.communicate(timeout=400)
    finally:
        process.kill()
    if "ThreadSanitizer: unexpected memory mapping" in errors:
        pytest.skip("ThreadSanitizer does not know how this kernel lays out memory")
    assert process.returncode == 0, errors


@pytest.fixture(scope="module")
def quick_links(sanitized: dict[str, Path]) -> Iterator[dict[tuple[str, str], subprocess.Popen[str]]]:
    """The tests of links under each kind, all at the same time: most of it is waiting."""
    running = {
        (kind, program): started(folder / program, folder / "libstub.so", *arguments)
        for kind, folder in sanitized.items()
        for program, arguments in LINK_TESTS.items()
    }
    yield running
    for process in running.values():
        process.kill()
        process.communicate(timeout=10)


@pytest.mark.timeout(300)  # the first builds everything
@needs_compiler
def test_core_under_the_sanitizers(fake: Build, sanitized: dict[str, Path]) -> None:
    expect_success(started(sanitized["memory"] / "core_test", fake("*version = 22809; return 0;")))


@pytest.mark.timeout(300)  # the first builds everything
@needs_compiler
@pytest.mark.parametrize("program", ["kernel_test", "copier_test"])
@pytest.mark.parametrize("kind", SANITIZERS)
def test_kernels_and_copies_under_the_sanitizers(sanitized: dict[str, Path], kind: str, program: str) -> None:
    expect_success(started(sanitized[kind] / program, sanitized[kind] / "libstub.so"))


@pytest.mark.timeout(300)  # the first builds everything
@needs_compiler
@pytest.mark.parametrize("program", LINK_TESTS)
@pytest.mark.parametrize("kind", SANITIZERS)
def test_links_under_the_sanitizers(quick_links: dict[tuple[str, str], subprocess.Popen[str]], kind: str, program: str) -> None:
    expect_success(quick_links[kind, program])


@pytest.mark.long
@pytest.mark.timeout(600)
@needs_compiler
@pytest.mark.parametrize("kind", SANITIZERS)
def test_many_transfers_with_long_delays(sanitized: dict[str, Path], kind: str) -> None:
    expect_success(started(sanitized[kind] / "link_test", sanitized[kind] / "libstub.so", "10000"))


# What a CUfunction points to in tests/stub/stub.h, and what it calls when it is started.
STARTED = ctypes.CFUNCTYPE(
    None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint, ctypes.c_uint, ctypes.POINTER(ctypes.c_void_p)
)


class Function(ctypes.Structure):
    _fields_ = (("sizes", ctypes.POINTER(ctypes.c_size_t)), ("started", STARTED))


@needs_core
@needs_compiler
def test_kernel_is_started_from_python(tmp_path: Path) -> None:
    library = stub.build(tmp_path)
    machine = stub.Machine(library)
    machine.use_context()
    sizes = [8, 128, 4, 4, 8, 8, 4, 128, 4, 4, 8, 8, 8, 8]
    starts = []

    def keep(_: int, stream: int, programs: int, threads: int, shared_bytes: int, parameters: Sequence[int]) -> None:
        values = [ctypes.string_at(parameters[index], size) for index, size in enumerate(sizes)]
        maps = [struct.unpack_from("8x4Q2I", value) for value in values if len(value) == 128]  # the start of `Encoded`
        numbers = [int.from_bytes(value, sys.byteorder, signed=True) for value in values if len(value) < 128]
        starts.append(((stream, programs, threads, shared_bytes), maps, numbers))

    function = Function((ctypes.c_size_t * 15)(*sizes, 0), STARTED(keep))
    matrices = (0, 300, 200, 256, 128, 64), (0x3000, 30, 20, 24, 16, 8)
    kernel = native._C.Kernel(native._C.Gpu(library), ctypes.addressof(function), 132, 384, 200_000, [2**40, matrices[0], -3, matrices[1]])
    kernel.start(7, [0x1000])
    numbers = [2**40, 300, 200, 256, 1, -3, 30, 20, 24, 1, 0, 0]
    sizes_and_blocks = (200, 300, 512, 64, 128), (20, 30, 48, 8, 16)
    assert starts == [((7, 132, 384, 200_000), [(0x1000, *sizes_and_blocks[0]), (0x3000, *sizes_and_blocks[1])], numbers)]
    with pytest.raises(native._C.GpuError, match="the kernel takes 1 addresses, not 2"):
        kernel.start(7, [0x1000, 0x2000])
    machine.hang("cuLaunchKernel", 600)
    ticks = ticks_while(lambda: kernel.start(8, (0x2000,)), seconds=0.5)
    assert ticks >= 5, "no other thread ran while a kernel was started"
    assert starts[1:] == [((8, 132, 384, 200_000), [(0x2000, *sizes_and_blocks[0]), (0x3000, *sizes_and_blocks[1])], numbers)]


@needs_core
@pytest.mark.parametrize(
    ("found", "of_torch", "blocking", "text"),
    [
        ((2, 28, 9), (2, 28, 9), "", ""),
        ((2, 28, 9), (2, 28, 9), "1", ""),
        ((2, 27, 3), (2, 28, 9), "", "the NCCL found is (2, 27, 3) in /lib/libnccl.so.2, torch has (2, 28, 9)"),
        ((2, 28, 9), None, "", "the NCCL found is (2, 28, 9) in /lib/libnccl.so.2, torch has ()"),
        ((), (2, 28, 9), "", "NCCL cannot be opened: no such file"),
        ((2, 28, 9), (2, 28, 9), "0", "NCCL_COMM_BLOCKING=0 is set, and they need blocking communicators"),
    ],
)
def test_why_the_bindings_cannot_be_used_beside_torchs(
    monkeypatch: pytest.MonkeyPatch, found: tuple[int, ...], of_torch: tuple[int, ...] | None, blocking: str, text: str
) -> None:
    """`of_torch`: None without a GPU."""
    probe = SimpleNamespace(version=found, path="/lib/libnccl.so.2", error="" if found else "no such file")
    monkeypatch.setattr(native._C, "probe", lambda name: {"nccl": probe}[name])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: of_torch is not None)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: of_torch)
    monkeypatch.setenv("NCCL_COMM_BLOCKING", blocking)
    assert native.no_nccl() == text


def test_nothing_can_be_used_that_was_not_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "available", False)
    monkeypatch.setattr(native, "reason", "not built")
    assert native.no_nccl() == "the compiled part is not built"


STALE = """
import sys, types
stale = types.ModuleType("pymesh3d._C")
stale.version, *rest = sys.argv[1:]
if rest:
    stale.sources, stale.digest = rest
sys.modules["pymesh3d._C"] = stale
from pymesh3d.comm import native
print(native.available, native.probe("nccl"), native.reason)
"""


def told_of_a_core(*inside: str) -> str:
    """What is told of a compiled part with this version, these sources and this digest."""
    done = subprocess.run([sys.executable, "-c", STALE, *inside], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_core_of_another_version_is_not_used() -> None:
    assert told_of_a_core("0.0.9") == f"False None it was built for pymesh3d 0.0.9, this is {__version__}: install again"


DIGEST = hashlib.sha256((ROOT / "csrc" / "gpu.h").read_bytes()).hexdigest()


@pytest.mark.parametrize(
    "inside",
    [
        (),  # as it was before there was a digest
        ("gpu.h", "0" * 64),
        ("gpu.h library.h", DIGEST),
        ("gpu.h gone.h", DIGEST),
    ],
)
def test_core_of_other_sources_is_not_used(inside: tuple[str, ...]) -> None:
    """An editable install stays as it was when the sources change."""
    reason = f"compiled from other sources than those in {ROOT / 'csrc'}: install again, pip install -e {ROOT}"
    assert told_of_a_core(__version__, *inside) == f"False None {reason}"


@needs_core
def test_core_is_of_all_its_sources_and_of_no_test() -> None:
    names = {path.name for path in (ROOT / "csrc").iterdir()}
    assert set(native._C.sources.split()) == {name for name in names if "test" not in name} - {"expect.h"}


@needs_core
@pytest.mark.parametrize("beside", ["nothing", "a folder of the same name", "the sources", "other sources"])
def test_sources_are_compared_in_a_checkout_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, beside: str) -> None:
    monkeypatch.setattr(native, "CSRC", tmp_path / "csrc")
    if beside != "nothing":
        shutil.copytree(ROOT / "csrc", tmp_path / "csrc")
        changed = "link_test.cpp" if beside == "the sources" else "link.cpp"  # a test is not compiled into it
        (tmp_path / "csrc" / changed).write_text("// something else")
    if "sources" in beside:
        (tmp_path / "setup.py").touch()
    assert native._is_stale(native._C.sources, native._C.digest) == (beside == "other sources")


def test_triton_starts_what_the_compiled_part_cannot(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """And the log says so once."""
    errors = {name: type(name, (RuntimeError,), {}) for name in ("GpuError", "LibraryError")}
    given: list[object] = []
    failure: Exception | None = None

    def kernel(*arguments: object) -> SimpleNamespace:
        if failure is not None:
            raise failure
        given.append(arguments)
        return SimpleNamespace(start="started")

    monkeypatch.setattr(native, "_C", SimpleNamespace(**errors, Kernel=kernel), raising=False)
    monkeypatch.setattr(native, "driver", lambda: "driver")
    monkeypatch.setattr(native, "available", True)
    native._say_once.cache_clear()
    assert native.starter(1, 2, 3, 4, [5]) == "started" and given == [("driver", 1, 2, 3, 4, [5])]
    with caplog.at_level("INFO", logger="pymesh3d"):
        for error in errors.values():
            failure = error("other arguments")
            assert native.starter(1, 2, 3, 4, [5]) is None
    assert caplog.messages == ["triton starts its kernels itself: other arguments"]
    monkeypatch.setattr(native, "available", False)
    monkeypatch.setattr(native, "_C", None)
    assert native.starter(1, 2, 3, 4, [5]) is None

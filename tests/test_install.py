"""What an installation contains, with a compiler and without one, and what a bare checkout can import."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from pymesh3d.__main__ import NEEDED

ROOT = Path(__file__).parents[1]
SOURCES = ("pyproject.toml", "setup.py", "README.md", "LICENSE", "csrc", "pymesh3d", "triton_kernels", "bench")
CAN_COMPILE = shutil.which("g++") is not None and Path(sysconfig.get_path("include"), "Python.h").is_file()


def build_wheel(folder: Path, **environment: str) -> tuple[list[str], str]:
    """The names in a wheel built from a copy of the sources in `folder`, and what the build printed. Needs no network."""
    copy = folder / "checkout"
    copy.mkdir()
    for name in SOURCES:
        if (ROOT / name).is_dir():
            ignore = shutil.ignore_patterns("__pycache__", "*.so", "*.egg-info")
            shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=ignore)
        else:
            shutil.copy(ROOT / name, copy / name)
    (copy / "bench" / "results").mkdir(exist_ok=True)
    (copy / "bench" / "results" / "measured.json").write_text("{}")
    command = [sys.executable, "-m", "pip", "wheel", ".", "--no-build-isolation", "--no-deps", "--no-index", "-v", "-w", str(folder)]
    clean = {name: value for name, value in os.environ.items() if name != "PYMESH3D_STRICT_BUILD"}
    done = subprocess.run(command, cwd=copy, env={**clean, **environment}, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = folder.glob("pymesh3d-*.whl")
    return zipfile.ZipFile(wheel).namelist(), done.stdout + done.stderr


def core_in(names: list[str]) -> list[str]:
    return [name for name in names if name.startswith("pymesh3d/_C.") and name.endswith(sysconfig.get_config_var("EXT_SUFFIX"))]


@pytest.fixture(scope="module")
def without_compiler(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], str]:
    return build_wheel(tmp_path_factory.mktemp("without_compiler"), CC="/no/such/cc", CXX="/no/such/c++")


def test_wheel_holds_the_package_and_its_linked_folders(without_compiler: tuple[list[str], str]) -> None:
    names, _ = without_compiler
    for name in (
        "pymesh3d/__init__.py",
        "pymesh3d/py.typed",
        "pymesh3d/_C.pyi",
        "pymesh3d/ops/products.json",
        "pymesh3d/bench/__init__.py",
    ):
        assert name in names
    for folder in ("pymesh3d", "triton_kernels", "bench"):
        inside = "" if folder == "pymesh3d" else "pymesh3d/"
        for path in (ROOT / folder).rglob("*.py"):
            if "results" not in path.parts:
                assert f"{inside}{path.relative_to(ROOT)}" in names
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"pymesh3d"}
    assert not [name for name in names if "results" in name]
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_wheel_without_compiler_says_so(without_compiler: tuple[list[str], str]) -> None:
    names, printed = without_compiler
    assert not core_in(names)
    assert printed.count("pymesh3d._C was not built") == 1, printed


@pytest.mark.skipif(not CAN_COMPILE, reason="no C++ compiler or no Python.h on this machine")
def test_wheel_with_compiler_holds_the_core(tmp_path: Path) -> None:
    names, printed = build_wheel(tmp_path, CXXFLAGS="-O0")  # whose result nobody runs
    assert len(core_in(names)) == 1, printed
    assert "was not built" not in printed


def test_failed_build_fails_the_installation_where_that_is_asked_for(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="/no/such/c"):
        build_wheel(tmp_path, CC="/no/such/cc", CXX="/no/such/c++", PYMESH3D_STRICT_BUILD="1")


def test_bare_checkout_imports_the_linked_folders(tmp_path: Path) -> None:
    code = "import pymesh3d.triton_kernels, pymesh3d.bench; print(pymesh3d.triton_kernels.__file__)"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == str(ROOT / "pymesh3d" / "triton_kernels" / "__init__.py"), done.stderr


WITHOUT = """
import runpy, sys
missing = sys.argv.pop(1)
class Block:
    def find_spec(self, name, path=None, target=None):
        if name == missing:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Block())
runpy.run_module("pymesh3d", run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize("missing", ["torch", "rich", "pymesh3d.commands"])
def test_what_it_needs_and_is_not_there_is_named(missing: str) -> None:
    """In one line, for every command; what is missing of our own is a fault, and has its traceback."""
    dependencies = re.search(r"^dependencies = \[(.*?)^\]", (ROOT / "pyproject.toml").read_text(), re.MULTILINE | re.DOTALL)
    assert dependencies, "the package has some"
    assert set(re.findall(r'^    "(\w+)', dependencies[1], re.MULTILINE)) == {*NEEDED, "triton"}
    command = [sys.executable, "-c", WITHOUT, missing, "draw"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT)
    if missing in NEEDED:
        line = f"pymesh3d: {missing} is not installed. {sys.executable} -m pip install torch numpy safetensors rich\n"
        assert (done.returncode, done.stdout, done.stderr) == (2, "", line)
    else:
        assert done.returncode == 1 and f"ModuleNotFoundError: No module named {missing!r}" in done.stderr

"""Builds the one compiled part, `pymesh3d._C`; everything else stands in pyproject.toml.

The extension is optional: where it cannot be built the package installs without it. `PYMESH3D_STRICT_BUILD=1`, meant for developers and CI,
turns compiler warnings into errors and a failed build of the extension into a failed install.
"""

import contextlib
import hashlib
import importlib.util
import os
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

STRICT = os.environ.get("PYMESH3D_STRICT_BUILD") == "1"


def pybind11_headers() -> "str | None":
    """The folder of pybind11's headers: its own package's, else the copy that torch ships, which serves builds without isolation."""
    with contextlib.suppress(ImportError):
        import pybind11  # only it knows: a distribution's package keeps them in /usr/include

        return pybind11.get_include()
    found = importlib.util.find_spec("torch")
    for folder in (found.submodule_search_locations or []) if found else []:
        if Path(folder, "include", "pybind11", "pybind11.h").is_file():
            return str(Path(folder, "include"))
    return None


class BuildCore(build_ext):
    """Builds the extension with the package's version and a digest of its own sources inside; says plainly where it cannot be built."""

    def build_extension(self, ext: Extension) -> None:
        self.force = True  # by their times, older sources and another version would count as built
        files = [Path(name) for name in sorted([*ext.sources, *ext.depends])]
        inside = {
            "VERSION": self.distribution.get_version(),
            "SOURCES": " ".join(file.name for file in files),
            "DIGEST": hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest(),
        }
        ext.define_macros += [(f"PYMESH3D_{name}", f'"{value}"') for name, value in inside.items()]
        super().build_extension(ext)

    def run(self) -> None:
        super().run()
        for ext in self.extensions:
            if not Path(self.get_ext_fullpath(ext.name)).is_file():
                print(f"{ext.name} was not built (the messages above say why). pymesh3d works without it: see `pymesh3d env`.")


core = Extension(
    "pymesh3d._C",
    sources=[f"csrc/{name}.cpp" for name in ("bindings", "copier", "gpu", "kernel", "library", "link", "nccl", "probe")],
    depends=[f"csrc/{name}.h" for name in ("copier", "gpu", "kernel", "library", "link", "nccl", "probe")],
    include_dirs=[headers] if (headers := pybind11_headers()) else [],
    libraries=["dl"],
    extra_compile_args=["-std=c++17", "-fvisibility=hidden", "-g0", "-Wall", "-Wextra", *(["-Werror"] if STRICT else [])],
    language="c++",
    optional=not STRICT,
)

setup(ext_modules=[core], cmdclass={"build_ext": BuildCore})

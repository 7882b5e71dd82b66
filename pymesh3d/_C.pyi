"""The compiled part of pymesh3d (csrc/). Import it through `pymesh3d.comm.native` only: it may be absent."""

version: str

class Probe:
    """What was found of a shared library: `error` says why there is no `version`; `path` is the file that answered."""

    @property
    def path(self) -> str: ...
    @property
    def version(self) -> tuple[int, ...]: ...
    @property
    def was_loaded(self) -> bool: ...
    @property
    def error(self) -> str: ...

def probe(name: str, path: str = "") -> Probe: ...

"""The compiled part of pymesh3d (csrc/). Import it through `pymesh3d.comm.native` only: it may be absent."""

from collections.abc import Sequence

version: str
sources: str  # the names of the files in csrc/ that it was compiled from, with spaces between
digest: str  # the SHA-256 of their contents, one after the other

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

class LibraryError(RuntimeError): ...
class GpuError(RuntimeError): ...
class NcclError(RuntimeError): ...

class Gpu:
    """The CUDA driver: what a stream does besides kernels, while neither the host nor a processor waits. Every call may raise GpuError.

    `tell` sets the numbers of 32 bits at these addresses, `wait_until` lets the stream wait until they have come to `value`.
    """

    def __init__(self, path: str) -> None: ...
    def tell(self, stream: int, flags: Sequence[int], value: int) -> None: ...
    def wait_until(self, stream: int, flags: Sequence[int], value: int) -> None: ...

class Nccl:
    """The NCCL library."""

    def __init__(self, path: str) -> None: ...
    @property
    def version(self) -> int: ...
    def unique_id(self) -> bytes: ...

class Link:
    """End 0 or 1 of what joins two ranks: transfers both ways, in order. Every call may raise NcclError or GpuError."""

    def __init__(
        self,
        gpu: Gpu,
        nccl: Nccl,
        id: bytes,
        ranks: Sequence[int],
        end: int,
        scratch: int,
        *,
        min_ctas: int = 0,
        max_ctas: int = 0,
        timeout: float = 300.0,
    ) -> None: ...
    def transfer(self, sent: int, sent_bytes: int, received: int, received_bytes: int, stream: int) -> tuple[int, int]: ...
    def join(self, number: int, stream: int) -> None: ...
    def finished(self) -> int: ...
    def check(self) -> None: ...
    def abort(self, seconds: float) -> bool: ...
    def close(self) -> None: ...

class Kernel:
    """A kernel that triton has compiled, and its arguments: numbers, and matrices as (address, rows, cols, stride, block_rows, block_cols).

    Matrices with address 0 get theirs at every start. Every call may raise GpuError, the first LibraryError too, where the driver is
    older than CUDA 12.4.
    """

    def __init__(
        self,
        gpu: Gpu,
        function: int,
        programs: int,
        threads: int,
        shared_bytes: int,
        arguments: Sequence[int | tuple[int, int, int, int, int, int]],
    ) -> None: ...
    def start(self, stream: int, addresses: Sequence[int]) -> None: ...

class Steps:
    """What a copier does, one after the other: copies, numbers of 32 bits that it sets, and those of its own GPU for which it waits."""

    def __init__(self) -> None: ...
    def copy(self, to: int, source: int, bytes: int) -> None: ...
    def tell(self, flag: int) -> None: ...
    def wait_until(self, flag: int) -> None: ...

class Copier:
    """A stream of its own for copies, by the copy engines. Every call may raise GpuError.

    `start` takes the steps after all that is enqueued on `stream`; `value` is what numbers are set to, and must have come to. What is
    enqueued on a stream after a `join` runs after all that was started.
    """

    def __init__(self, gpu: Gpu) -> None: ...
    @property
    def stream(self) -> int: ...
    def start(self, steps: Steps, value: int, stream: int) -> None: ...
    def join(self, stream: int) -> None: ...

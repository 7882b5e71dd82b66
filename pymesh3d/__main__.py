"""Where `pymesh3d` and `python -m pymesh3d` start."""

import contextlib
import os
import signal
import sys
from collections.abc import Iterator

# Before torch is imported. A thread that spins takes the core of the one it waits for wherever something else wants the cores too: one
# process of the default job made 3,000 tokens/s on 2 cores of a shared host, so 7,500.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

NEEDED = ("torch", "numpy", "safetensors", "rich")  # by every command


@contextlib.contextmanager
def ctrl_c_ends_at_once() -> Iterator[None]:
    """Ends the process on Ctrl-C while it imports, where there is nothing to tidy up yet and a traceback would tell nobody anything."""
    usual = signal.default_int_handler
    if signal.getsignal(signal.SIGINT) is not usual:  # as in the background, where the signal is ignored
        yield
        return
    signal.signal(signal.SIGINT, lambda *_: os._exit(128 + signal.SIGINT))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, usual)


try:
    with ctrl_c_ends_at_once():
        from pymesh3d.cli import main
except ModuleNotFoundError as error:
    if error.name not in NEEDED:
        raise
    print(f"pymesh3d: {error.name} is not installed. {sys.executable} -m pip install {' '.join(NEEDED)}", file=sys.stderr)
    sys.exit(2)

if __name__ == "__main__":
    sys.exit(main())

"""What each rank has, known to all of them: texts, numbers on the host, and how something went. The host never waits without a limit."""

from __future__ import annotations

from collections.abc import Callable

import torch

from pymesh3d.axis import Axis
from pymesh3d.comm.collectives import gather_rows
from pymesh3d.comm.watch import on_host
from pymesh3d.errors import DistributedError
from pymesh3d.mesh import Mesh

TEXT_MARK = 0x7465_7874  # upper half of the lengths that `exchange_text` sends, so that nothing else is taken for one


def exchange_numbers(mine: torch.Tensor, mesh: Mesh, operation: str, axis: Axis | None = None) -> torch.Tensor:
    """A small vector of each rank of `axis` (by default of all ranks) as the rows of a matrix [ranks, n]. All are on the host."""
    axis = axis or mesh.all
    if mesh.device.type == "cuda":
        mine = mine.pin_memory().to(mesh.device, non_blocking=True)  # from other memory the host would wait for what the GPU has to do
    return on_host(gather_rows(mine, axis, operation), operation, axis)


def exchange_text(text: str, mesh: Mesh, operation: str = "comparing what each rank has") -> list[str]:
    """The text of every rank, in rank order. All ranks must call; raises DistributedError when one does something else meanwhile."""
    data = text.encode()
    marked = exchange_numbers(torch.tensor([TEXT_MARK << 32 | len(data)]), mesh, operation)
    lengths = [divmod(int(length), 2**32) for length in marked]
    elsewhere = [rank for rank, (mark, _) in enumerate(lengths) if mark != TEXT_MARK]
    if elsewhere:
        raise DistributedError(f"rank {mesh.rank}: ranks {elsewhere} are doing something else. All ranks must take part")
    longest = max(length for _, length in lengths)
    mine = torch.frombuffer(bytearray(data.ljust(longest + 1, b"\0")), dtype=torch.uint8)
    return [row.numpy().tobytes().rstrip(b"\0").decode(errors="replace") for row in exchange_numbers(mine, mesh, operation)]


def together(action: Callable[[], str], mesh: Mesh, operation: str) -> tuple[list[str], list[str]]:
    """Run `action` here. What it returned on every rank, and "rank R: error" for each rank where it raised, the same on all ranks.

    Raises DistributedError, which names `operation`, when a rank does not take part within the time limit.
    """
    try:
        outcome = f"ok {action()}"
    except Exception as error:  # whatever it is, the other ranks are waiting to hear of it
        outcome = f"failed {str(error) or type(error).__name__}"
    outcomes = exchange_text(outcome, mesh, f"{operation}, which all ranks must do,")
    failures = [f"rank {rank}: {text.removeprefix('failed ')}" for rank, text in enumerate(outcomes) if text.startswith("failed ")]
    return [text.removeprefix("ok ") for text in outcomes], failures

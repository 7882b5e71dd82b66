"""Doing something on all ranks such that each learns how it went on the others."""

from __future__ import annotations

from collections.abc import Callable

from pymesh3d.mesh import Mesh, exchange_text


def together(action: Callable[[], str], mesh: Mesh, operation: str) -> tuple[list[str], list[str]]:
    """Run `action` here. What it returned on every rank, and "rank R: error" for each rank where it raised, the same on all ranks.

    Raises DistributedError, which names `operation`, when a rank does not take part within the time limit.
    """
    try:
        outcome = f"ok {action()}"
    except Exception as error:  # whatever it is, the other ranks are waiting to hear of it
        outcome = f"failed {str(error) or type(error).__name__}"
    outcomes = exchange_text(outcome, mesh.device, f"{operation}, which all ranks must do,")
    failures = [f"rank {rank}: {text.removeprefix('failed ')}" for rank, text in enumerate(outcomes) if text.startswith("failed ")]
    return [text.removeprefix("ok ") for text in outcomes], failures

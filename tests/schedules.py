"""Schedules written by hand."""

from __future__ import annotations

from pymesh3d.schedule import Schedule, parse


def hand_made(*ranks: str, microbatches: int = 1, virtual: int = 1) -> Schedule:
    """The schedule with these actions of each rank, as they stand in its text."""
    lines = [f"rank {rank}: {actions}" for rank, actions in enumerate(ranks)]
    return parse("\n".join([f"schedule mine: pp {len(ranks)}, microbatches {microbatches}, virtual {virtual}", *lines]))

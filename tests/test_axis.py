"""Errors along an axis say who waited for whom, where a peer may be to blame."""

from __future__ import annotations

import pytest
import torch

from pymesh3d.axis import Axis, named
from pymesh3d.errors import DistributedError


def test_a_failure_that_is_no_peers_keeps_its_words() -> None:
    axis = Axis("dp", 0, (0, 1), None)  # type: ignore[arg-type]
    for error in (torch.OutOfMemoryError("no room"), DistributedError("rank 1 is gone")):
        with pytest.raises(type(error), match=f"^{error}$"), named("all-reduce", axis):
            raise error
    text = r"rank 0: all-reduce over axis dp with ranks \[1\] failed after 0\.\d s: reset\. One of these ranks"
    with pytest.raises(DistributedError, match=text), named("all-reduce", axis):
        raise RuntimeError("reset")

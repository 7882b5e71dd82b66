"""What is registered is found for as long as somebody holds it."""

from __future__ import annotations

import pytest
import torch

from pymesh3d.axis import Axis
from pymesh3d.comm.registry import find, register
from pymesh3d.errors import ConfigError


def test_what_is_gone_is_not_found_and_named() -> None:
    axes = [Axis("tp", 0, (0,), None) for _ in range(2)]  # type: ignore[arg-type]
    keys = [axis.key for axis in axes]
    buffer = torch.ones(2)
    for name, thing in zip((*keys, "buffer"), (*axes, buffer), strict=True):
        register(name, thing)
    del thing
    assert [find(key) for key in keys] == axes and find("buffer") is buffer
    del axes[0]
    with pytest.raises(ConfigError, match=rf"^axis tp \({keys[0].split('(')[1][:-1]}\) in a compiled layer: it is gone "):
        find(keys[0])
    assert find(keys[1]) is axes[0]

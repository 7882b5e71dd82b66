"""What tests of the kernels for Hopper share."""

from __future__ import annotations

import pytest
import torch

from pymesh3d.triton_kernels.launch_hopper import LARGE, SMALL

TILES = [LARGE, SMALL]
HERE = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


def needs_hopper(gpus: int = 1) -> pytest.MarkDecorator:
    """Skips a test where there are not so many GPUs of that kind."""
    return pytest.mark.skipif(not HERE or torch.cuda.device_count() < gpus, reason=f"needs {gpus} GPU(s) of compute capability 9.0")

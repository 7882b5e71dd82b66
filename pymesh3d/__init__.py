"""pymesh3d: a PyTorch model on a 3D grid of GPUs.

The public names are loaded when they are first asked for, so that the parts that need no torch import without it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pymesh3d.comm.whole import whole_state_dict as whole_state_dict
    from pymesh3d.config import Layout as Layout
    from pymesh3d.config import ModelConfig as ModelConfig
    from pymesh3d.config import TrainConfig as TrainConfig
    from pymesh3d.data import Batches as Batches
    from pymesh3d.data import load_corpus as load_corpus
    from pymesh3d.dp.zero import Zero as Zero
    from pymesh3d.engine import Engine as Engine
    from pymesh3d.engine import parallelize as parallelize
    from pymesh3d.errors import CheckpointError as CheckpointError
    from pymesh3d.errors import ConfigError as ConfigError
    from pymesh3d.errors import DataError as DataError
    from pymesh3d.errors import DistributedError as DistributedError
    from pymesh3d.mesh import Mesh as Mesh
    from pymesh3d.mesh import init_mesh as init_mesh
    from pymesh3d.models.llama import Llama as Llama
    from pymesh3d.placement import Part as Part
    from pymesh3d.placement import Placement as Placement
    from pymesh3d.tp.layers import ColumnParallelLinear as ColumnParallelLinear
    from pymesh3d.tp.layers import RowParallelLinear as RowParallelLinear
    from pymesh3d.tp.layers import VocabParallelEmbedding as VocabParallelEmbedding
    from pymesh3d.tp.loss import vocab_parallel_cross_entropy as vocab_parallel_cross_entropy
    from pymesh3d.tp.plan import Column as Column
    from pymesh3d.tp.plan import Norm as Norm
    from pymesh3d.tp.plan import Row as Row
    from pymesh3d.tp.plan import Vocab as Vocab
    from pymesh3d.tp.plan import parallelize_module as parallelize_module

__version__ = "0.1.0"

_MODULE_OF = {
    "Batches": "data",
    "CheckpointError": "errors",
    "Column": "tp.plan",
    "ColumnParallelLinear": "tp.layers",
    "ConfigError": "errors",
    "DataError": "errors",
    "DistributedError": "errors",
    "Engine": "engine",
    "Layout": "config",
    "Llama": "models.llama",
    "Mesh": "mesh",
    "ModelConfig": "config",
    "Norm": "tp.plan",
    "Part": "placement",
    "Placement": "placement",
    "Row": "tp.plan",
    "RowParallelLinear": "tp.layers",
    "TrainConfig": "config",
    "Vocab": "tp.plan",
    "VocabParallelEmbedding": "tp.layers",
    "Zero": "dp.zero",
    "init_mesh": "mesh",
    "load_corpus": "data",
    "parallelize": "engine",
    "parallelize_module": "tp.plan",
    "vocab_parallel_cross_entropy": "tp.loss",
    "whole_state_dict": "comm.whole",
}

__all__ = list(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted(_MODULE_OF)

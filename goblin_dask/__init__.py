"""Calculations too large for the laboratory, on computers lent by strangers, every piece of the answer verified.

>>> import dask.array as da, goblin_dask as goblin            # doctest: +SKIP
>>> with goblin.LocalGrid(volunteers=2) as grid:              # doctest: +SKIP
...     grid.lab.compute(da.ones((100, 100), chunks=50).sum())

Names are loaded when they are first used: a volunteer, which imports this package too, loads no server.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "LabNode": "goblin_dask.labnode.node",
    "Lab": "goblin_dask.labnode.client",
    "Job": "goblin_dask.labnode.client",
    "connect": "goblin_dask.labnode.client",
    "matmul": "goblin_dask.labnode.matmul",
    "tiled": "goblin_dask.labnode.tiled.program",
    "LocalGrid": "goblin_dask.local",
    "Program": "goblin_dask.graphs.program",
    "formula": "goblin_dask.graphs.formula",
    "capture": "goblin_dask.graphs.capture.captured",
    "CapturedProgram": "goblin_dask.graphs.capture.captured",
}

_ROOMS = {"training"}
"""Packages that are reached through this one: ``goblin.training.Trainer``."""

__all__ = [
    "CapturedProgram",
    "Job",
    "Lab",
    "LabNode",
    "LocalGrid",
    "Program",
    "__version__",
    "capture",
    "connect",
    "formula",
    "matmul",
    "tiled",
    "training",
]

if TYPE_CHECKING:
    from goblin_dask import training
    from goblin_dask.graphs.capture.captured import CapturedProgram, capture
    from goblin_dask.graphs.formula import formula
    from goblin_dask.graphs.program import Program
    from goblin_dask.labnode.client import Job, Lab, connect
    from goblin_dask.labnode.matmul import matmul
    from goblin_dask.labnode.node import LabNode
    from goblin_dask.labnode.tiled.program import tiled
    from goblin_dask.local import LocalGrid


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return importlib.import_module(f"{__name__}.{name}")
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES, *_ROOMS})

"""`Graph`: a PyTorch program as it was recorded, in plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from goblin_dask.graphs.capture.aten.base import Call, Ref
from goblin_dask.graphs.capture.sizes import Sizes


@dataclass(frozen=True)
class Slot:
    """What a graph reads."""

    name: str
    """Of its value."""
    kind: str
    """``leaf``, ``array`` (a parameter, buffer or constant) or ``number``."""
    index: int = 0
    """Which leaf of the arguments."""
    target: str = ""
    """Which parameter, buffer or constant."""
    value: Any = None
    """Of a number."""


@dataclass(frozen=True)
class Graph:
    """A captured program."""

    slots: tuple[Slot, ...]
    calls: tuple[Call, ...]
    outputs: tuple[Any, ...]
    """A `Ref`, or a constant, for each leaf of the result."""
    state: tuple[tuple[str, Ref], ...]
    """Buffers that the program changes, and what they become."""
    structure: Any
    """PyTorch's `TreeSpec` of the result."""
    arrays: dict[str, np.ndarray[Any, Any]]
    """Parameters, buffers and constants; what shares memory is there once."""
    sizes: Sizes | None
    """For which sizes of the batch it holds; None where no size is open."""

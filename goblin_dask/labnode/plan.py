"""A lowered graph, as data: what `lowering` makes, what `fusion` and `placement` rewrite, what `execute` runs.

Keys are Dask's. The value of a key is a *tree*: nested lists, tuples and dicts with arrays (and other picklable
values) at the leaves; chunk reductions return dicts, `topk` lists. On the lab's cluster the arrays of a tree are
`goblin_dask.store.refs.ChunkRef`s.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from goblin_dask.graphs.capture.pytree import Leaf
from goblin_dask.graphs.program import Program
from goblin_dask.messages import ArraySpec

Key = Hashable


@dataclass(frozen=True, slots=True)
class Operand:
    """Array number `leaf` of the value of `key`."""

    key: Key
    leaf: int = 0


@dataclass(frozen=True, slots=True)
class Output:
    """One key that a grid task defines: its tree, whose `Leaf`s number outputs of the program."""

    key: Key
    tree: Any


@dataclass(slots=True)
class GridTask:
    """A program on operands, for a volunteer. Fused tasks define several keys."""

    program: Program
    operands: tuple[Operand, ...]
    outputs: tuple[Output, ...]
    origins: int = 1
    """Tasks of the researcher's graph that it stands for."""
    offload: bool = True
    """Whether volunteers compute it; else the laboratory runs the same program."""
    reason: str = ""
    """Why the laboratory does, for the job's report."""


@dataclass(slots=True)
class LabTask:
    """A task that runs in the laboratory as it is: sources, sinks, and what does not trace."""

    key: Key
    task: Any
    """Dask's `GraphNode`."""
    dependencies: tuple[Key, ...]
    kind: str = "lab"
    """``source`` (reads no array operand), ``sink`` (stores), ``lab`` (did not trace), ``data``; ``alias``: the value
    of its only dependency, and ``view``: arrays of its dependencies in a tree of its own, for which `task` may be
    called with trees of arrays or of references to them alike."""
    reason: str = ""
    """Why it does not run on the grid, for the job's report."""
    region: Region | None = None
    """For a source that is a region of a Zarr array: read in place instead of through the task's function."""
    declared: Any = None
    """For a source that declares what it returns: the tree of `ArraySpec`s."""


@dataclass(frozen=True, slots=True)
class Declared:
    """What a dask array that is wanted says of its blocks."""

    name: str
    chunks: tuple[tuple[float, ...], ...]
    """NaN where it does not know."""
    dtype: str

    def blocks(self) -> Iterator[tuple[Key, tuple[float, ...]]]:
        """Of each block: its key, and the shape that the array says it has."""
        indices = itertools.product(*(range(len(lengths)) for lengths in self.chunks))
        for index, shape in zip(indices, itertools.product(*self.chunks), strict=True):
            yield (self.name, *index), shape


@dataclass(frozen=True, slots=True)
class Region:
    """A rectangular region of a Zarr array (or of anything indexable with NumPy semantics)."""

    array: Any
    index: tuple[Any, ...]


@dataclass(slots=True)
class DynamicTask:
    """A task whose operands' shapes are not known before it runs: traced then (by the same templates)."""

    key: Key
    task: Any
    dependencies: tuple[Key, ...]


@dataclass(slots=True)
class Plan:
    """A whole lowered graph."""

    grid: list[GridTask] = field(default_factory=list)
    lab: list[LabTask] = field(default_factory=list)
    dynamic: list[DynamicTask] = field(default_factory=list)
    keys: tuple[Key, ...] = ()
    """Keys whose values are wanted, culled to."""
    graph: Mapping[Key, Any] = field(default_factory=dict)
    """Dask's own tasks: where a program cannot be run on its data, they are run in its place."""
    specs: dict[Key, Any] = field(default_factory=dict)
    """Tree of `ArraySpec`s of each key where known."""
    templates: int = 0
    tasks: int = 0
    seconds: float = 0.0


Spec = ArraySpec

__all__ = [
    "Declared",
    "DynamicTask",
    "GridTask",
    "Key",
    "LabTask",
    "Leaf",
    "Operand",
    "Output",
    "Plan",
    "Region",
    "Spec",
]

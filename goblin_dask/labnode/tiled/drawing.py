"""Arrays that are drawn, or filled, where they are used: a matrix of weights larger than any store is never kept.

What is made of keys and scalars alone costs less to make again than to move. So its tasks become parts of those that
read them, and are done once for each of these.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import dask.array as da
import numpy as np
from dask.base import tokenize
from dask.highlevelgraph import HighLevelGraph

from goblin_dask.graphs.capture.dask_internals import Alias, GraphNode, convert_legacy_graph


def drawn_where_used(arrays: Sequence[da.Array], drawn: set[str]) -> list[da.Array]:
    """The same arrays, without tasks of their own for what is drawn.

    Parameters
    ----------
    arrays : sequence of dask.array.Array
    drawn : set of str
        Names of arrays that are made of keys and scalars alone. Those among `arrays` keep their tasks.
    """
    inner = drawn - {array.name for array in arrays}
    if not inner:
        return list(arrays)
    merged: dict[Any, Any] = {}
    for array in arrays:
        merged.update(array.__dask_graph__())
    graph = convert_legacy_graph(merged)
    whole: dict[Any, GraphNode] = {}

    def expanded(key: Any) -> GraphNode:
        """A task with all that is drawn for it inside."""
        if key not in whole:
            node = graph[key]
            parts = {dep: expanded(dep) for dep in node.dependencies if _name(dep) in inner}
            whole[key] = node.substitute(parts) if parts else node
        return whole[key]

    kept = {key: expanded(key) for key in graph if _name(key) not in inner}
    shared = f"tiled-{tokenize(*(array.name for array in arrays))}"
    found = []
    for array in arrays:
        name = f"drawn-{array.name}"
        ends = {(name, *place): Alias((name, *place), (array.name, *place)) for place in np.ndindex(array.numblocks)}
        together = HighLevelGraph({shared: kept, name: ends}, {shared: set(), name: {shared}})
        found.append(da.Array(together, name, array.chunks, dtype=array.dtype, meta=array._meta))
    return found


def _name(key: Any) -> Any:
    return key[0] if isinstance(key, tuple) else key

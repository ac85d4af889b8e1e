"""Arrays that are drawn, filled or turned where they are used: a matrix of weights larger than any store is never kept.

What is made of keys and scalars alone costs less to make again than to move, and a view of a block costs nothing. So
their tasks become parts of those that read them, and are done once for each of these.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import dask.array as da
import numpy as np
from dask.base import tokenize
from dask.highlevelgraph import HighLevelGraph

from goblin_dask.graphs.capture.dask_internals import Alias, GraphNode, convert_legacy_graph


def drawn_where_used(arrays: Sequence[da.Array], drawn: set[str], views: set[str]) -> list[da.Array]:
    """The same arrays, without tasks of their own for what is drawn or a view.

    Parameters
    ----------
    arrays : sequence of dask.array.Array
    drawn : set of str
        Names of arrays that are made of keys and scalars alone. Those among `arrays` keep their tasks.
    views : set of str
        Names of arrays each of whose blocks is a view of a block. Likewise.
    """
    ends = {array.name for array in arrays}
    drawn, views = drawn - ends, views - ends
    if not drawn and not views:
        return list(arrays)
    merged: dict[Any, Any] = {}
    for array in arrays:
        merged.update(array.__dask_graph__())
    graph = convert_legacy_graph(merged)
    whole: dict[Any, GraphNode] = {}

    def made(key: Any) -> bool:
        """Whether it is drawn; what is drawn and then cut otherwise is too."""
        deps = graph[key].dependencies if str(_name(key)).startswith("rechunk-") else ()
        return _name(key) in drawn or (bool(deps) and all(map(made, deps)))

    def within(key: Any) -> bool:
        return _name(key) in views or made(key)

    def expanded(key: Any) -> GraphNode:
        """A task with all that is drawn or turned for it inside."""
        if key not in whole:
            node = graph[key]
            parts = {dep: expanded(dep) for dep in node.dependencies if within(dep)}
            whole[key] = node.substitute(parts, key=key) if parts else node  # an alias would take its target's key
        return whole[key]

    kept = {key: expanded(key) for key in graph if not within(key)}
    shared = f"tiled-{tokenize(*(array.name for array in arrays))}"
    found = []
    for array in arrays:
        name = f"drawn-{array.name}"
        blocks = {(name, *place): Alias((name, *place), (array.name, *place)) for place in np.ndindex(array.numblocks)}
        together = HighLevelGraph({shared: kept, name: blocks}, {shared: set(), name: {shared}})
        found.append(da.Array(together, name, array.chunks, dtype=array.dtype, meta=array._meta))
    return found


def _name(key: Any) -> Any:
    return key[0] if isinstance(key, tuple) else key

"""Everything that knows how Dask builds its graphs: written for dask 2026.8, so the next release breaks here alone.

`Request.of` turns what a Dask scheduler is handed (an expression, a `HighLevelGraph`, a dict) into a flat dict of task
nodes, *unoptimised* wherever Dask still has the unoptimised graph: its optimisation fuses reads, arithmetic and
stores into single tasks that no longer can be told apart. The ``finalize`` task, which would concatenate everything,
is cut off and done at the end by whoever wants the result (`Request.assemble`).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from dask._expr import Expr, FinalizeCompute, HLGExpr, ProhibitReuse, _HLGExprSequence
from dask._task_spec import (
    Alias,
    DataNode,
    Dict,
    GraphNode,
    List,
    NestedContainer,
    Set,
    Task,
    TaskRef,
    Tuple,
    _execute_subgraph,
    _identity_cast,
    _instantiate_named_tuple,
    convert_legacy_graph,
    cull,
)
from dask.array.core import (
    getter,
    getter_inline,
    getter_nofancy,
    load_chunk,
    load_store_chunk,
)
from dask.array.random import _apply_random, _apply_random_func
from dask.array.wrap import _broadcast_trick_inner
from dask.base import collections_to_expr, is_dask_collection
from dask.blockwise import Blockwise
from dask.highlevelgraph import HighLevelGraph, MaterializedLayer
from dask.tokenize import TokenizationError, tokenize

from goblin_dask.errors import InputError

__all__ = [
    "Alias",
    "DataNode",
    "Dict",
    "GraphNode",
    "List",
    "NestedContainer",
    "Request",
    "Set",
    "Task",
    "TaskRef",
    "Tuple",
    "check_names",
    "collections_in",
    "convert_legacy_graph",
    "expression_of",
    "identity_cast",
    "named_tuple",
    "normalise",
    "tokenize",
]

Key = Hashable
Graph = dict[Key, GraphNode]

identity_cast = _identity_cast
named_tuple = _instantiate_named_tuple

GETTERS = frozenset({getter, getter_nofancy, getter_inline})
STORES = frozenset({load_store_chunk})
LOADS = frozenset({load_chunk})
RANDOM = frozenset({_apply_random, _apply_random_func})
BROADCAST_TRICK = _broadcast_trick_inner.func


@dataclass(frozen=True, slots=True)
class Request:
    """What a scheduler is asked for."""

    graph: Graph
    """Culled to `keys`; nothing fused, no ``finalize``."""
    keys: tuple[Key, ...]
    """Wanted, without repetition."""
    assemble: Callable[[Mapping[Key, Any]], Any]
    """From the values of `keys` to what the scheduler must return."""

    @classmethod
    def of(cls, graph: Expr | HighLevelGraph | Mapping[Key, Any], keys: Any) -> Request:
        """Read what ``scheduler(graph, keys)`` is called with."""
        layers = _unoptimised(graph)
        wanted = list(_flat(keys))
        if isinstance(layers, HighLevelGraph):
            layers = _low_level(layers, wanted)
        flat = normalise(layers, wanted)
        cut = {key: _Finalizer.cut(flat[key]) for key in set(wanted) if key in flat}
        ends = {key: end for key, end in cut.items() if end is not None}
        inner: dict[Key, None] = {}
        for key in wanted:
            end = ends.get(key)
            inner.update(dict.fromkeys(_flat(end.keys) if end is not None else [key]))
        if ends:
            flat = cull(flat, list(inner))
        return cls(flat, tuple(inner), functools.partial(_assemble, keys, ends))

    @classmethod
    def of_collections(cls, collections: Iterable[Any]) -> Request:
        """Read collections themselves, as ``dask.compute`` would: `assemble` gives the list of their results."""
        return cls.of(*expression_of(collections))


def expression_of(collections: Iterable[Any]) -> tuple[Expr, list[Key]]:
    """What ``dask.compute`` would hand to a scheduler for these collections, unoptimised.

    Raises
    ------
    InputError
        When two of them use one name for different data: Dask's graph would keep one of the two.
    """
    collections = list(collections)
    check_names(collections)
    expression = FinalizeCompute(collections_to_expr(collections, optimize_graph=False)).optimize()
    return expression, list(_flat(expression.__dask_keys__()))


@dataclass(frozen=True, slots=True)
class _Finalizer:
    keys: Any
    function: Callable[..., Any]
    extra: tuple[Any, ...]

    @classmethod
    def cut(cls, node: GraphNode) -> _Finalizer | None:
        """The finalizer that `compute` appended as this task, else None."""
        if not (isinstance(node, Task) and isinstance(node.key, str) and node.key.startswith("finalize-hlgfinalize")):
            return None
        keys, *extra = node.args
        return cls(_references(keys), node.func, tuple(extra))


def _references(node: Any) -> Any:
    if isinstance(node, List):
        return [_references(each) for each in node.args]
    return node.key


def _assemble(keys: Any, ends: dict[Key, _Finalizer], values: Mapping[Key, Any]) -> Any:
    """Values in the structure of the keys: tuples, as Dask's own schedulers give them."""
    if isinstance(keys, list):
        return tuple(_assemble(each, ends, values) for each in keys)
    end = ends.get(keys)
    return values[keys] if end is None else end.function(_listed(end.keys, values), *end.extra)


def _listed(keys: Any, values: Mapping[Key, Any]) -> Any:
    return [_listed(each, values) for each in keys] if isinstance(keys, list) else values[keys]


def _flat(keys: Any) -> Iterable[Key]:
    if isinstance(keys, (list, set, frozenset)):
        for each in keys:
            yield from _flat(each)
    else:
        yield keys


def _unoptimised(graph: Any) -> Mapping[Key, Any] | HighLevelGraph:
    if isinstance(graph, _HLGExprSequence) and all(isinstance(each, HLGExpr) for each in graph.operands):
        return HighLevelGraph.merge(*[each.hlg for each in graph.operands])
    if isinstance(graph, HLGExpr):
        return graph.hlg
    if isinstance(graph, Expr):
        return graph.__dask_graph__()
    return graph


def collections_in(values: Any) -> Iterator[Any]:
    """Every dask collection in nested lists, tuples, sets and dicts; `dask.base.unpack_collections` skips later ones
    that have the name of an earlier one."""
    if is_dask_collection(values):
        yield values
    elif isinstance(values, dict):
        yield from collections_in([*values.keys(), *values.values()])
    elif isinstance(values, list | tuple | set):
        for value in values:
            yield from collections_in(value)


def check_names(collections: Iterable[Any]) -> None:
    """Check that no two collections use one name for different data.

    Raises
    ------
    InputError
        When they do: Dask's merged graph would keep one of the two.
    """
    seen: dict[str, Any] = {}
    for collection in collections:
        for name, layer in getattr(getattr(collection, "dask", None), "layers", {}).items():
            other = seen.setdefault(name, layer)
            if other is not layer and not _same_data(name, other, layer):
                raise InputError(
                    f"two arrays of different data have the same name {name!r}, so Dask would use one for both; "
                    "give each a name of its own, or none"
                )


_TOKEN = re.compile(r"-[0-9a-f]{32}$")
"""Ends a name that Dask made of what the layer computes; a name that somebody chose says nothing."""

LOOKED_AT = 8
"""Tasks of two layers of one chosen name that are compared."""


def _same_data(name: str, a: Mapping[Key, Any], b: Mapping[Key, Any]) -> bool:
    """Whether two layers of one name hold the same data, as far as can be said: one of them may be computed already."""
    chosen = _TOKEN.search(name) is None
    if isinstance(a, Blockwise) and isinstance(b, Blockwise):
        return not chosen or _same_tasks([a.task], [b.task])
    if not isinstance(a, MaterializedLayer) or not isinstance(b, MaterializedLayer):
        return True
    if set(a) != set(b):
        return False
    tasks: list[tuple[Any, Any]] = []
    for key, node in a.items():
        x, y = (getattr(each, "value", each) for each in (node, b[key]))
        arrays = isinstance(x, np.ndarray) + isinstance(y, np.ndarray)
        if arrays == 2 and x is not y:
            if x.dtype != y.dtype or x.shape != y.shape or x.tobytes() != y.tobytes():
                return False
        elif not arrays and chosen and len(tasks) < LOOKED_AT:
            tasks.append((x, y))
    return not tasks or _same_tasks([x for x, _ in tasks], [y for _, y in tasks])


def _same_tasks(a: list[Any], b: list[Any]) -> bool:
    try:
        return bool(tokenize(a, ensure_deterministic=True) == tokenize(b, ensure_deterministic=True))
    except TokenizationError:  # nothing can be said of them
        return True


def _low_level(graph: HighLevelGraph, keys: list[Key]) -> dict[Key, Any]:
    culled = graph.cull(set(keys))
    flat: dict[Key, Any] = {}
    for layer in culled.layers.values():
        flat.update(layer)
    return flat


def normalise(graph: Mapping[Key, Any], keys: Iterable[Key]) -> Graph:
    """Task nodes alone: legacy tuples converted, fused tasks taken apart again, culled to `keys`."""
    if not all(isinstance(node, GraphNode) for node in graph.values()):
        graph = convert_legacy_graph(graph)
    flat: Graph = {key: _bare(node) for key, node in cull(dict(graph), list(keys)).items()}
    fused = [node for node in flat.values() if type(node) is Task and node.func is _execute_subgraph]
    while fused:
        flat = dict(flat)
        parts = [part for node in fused for part in _take_apart(node)]
        flat.update({part.key: part for part in parts})
        fused = [node for node in parts if type(node) is Task and node.func is _execute_subgraph]
    return flat


def _bare(node: GraphNode) -> GraphNode:
    """A task without the call of an identity that `ProhibitReuse` puts around it."""
    while type(node) is Task and node.func is ProhibitReuse._identity and isinstance(node.args[0], GraphNode):
        node = node.args[0].substitute({}, key=node.key)
    return node


def _take_apart(node: Task) -> list[GraphNode]:
    """Tasks of a fused task, under names of their own: other fused tasks may hold copies of the same ones."""
    inner, out, outer, *operands = node.args
    names: dict[Key, Any] = {key: ("part", tokenize(node.key), key) for key in inner}
    names[out] = node.key
    for key, operand in zip(outer, operands, strict=True):
        names[key] = operand.key if isinstance(operand, (TaskRef, Alias)) else operand
    parts = convert_legacy_graph(inner, all_keys=set(inner) | set(outer))
    result = []
    for key, part in parts.items():
        subs = {dep: names[dep] for dep in part.dependencies if dep in names}
        result.append(_renamed(part, subs, names[key]))
    return result


def _renamed(node: GraphNode, subs: dict[Key, Any], key: Key) -> GraphNode:
    if isinstance(node, Alias):
        target = subs.get(node.target, node.target)
        return DataNode(key, target.value) if isinstance(target, DataNode) else Alias(key, target)
    return node.substitute(subs, key=key)


def function_parts(function: Any) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The innermost function of nested partials, with the arguments that they bind."""
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}
    while True:
        inner = getattr(function, "func", None)
        if inner is None or not hasattr(function, "args") or not hasattr(function, "keywords"):
            return function, args, kwargs
        args = (*function.args, *args)
        kwargs = {**function.keywords, **kwargs}
        function = inner

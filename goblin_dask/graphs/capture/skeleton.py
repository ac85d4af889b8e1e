"""A task, seen as its *skeleton*: everything of it but the keys it reads and the arrays it holds.

Most tasks of a graph differ in keys alone, so tasks of equal skeletons, with operands of equal shapes and dtypes, share
one program. A skeleton is a nested tuple that can be hashed; two are equal only where the tasks do the same:
1, True and 1.0 differ, and so do 0.0 and -0.0. Functions are told apart by identity, which is sound for as long as
the graph is alive, so `Skeletons` serves one lowering.

`evaluate` calls a task, `Skeletons.of` walks it; both meet operands and literals in the same order.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterator
from typing import Any

import numpy as np

from goblin_dask.graphs.capture.dask_internals import (
    Alias,
    DataNode,
    NestedContainer,
    Task,
    TaskRef,
    identity_cast,
    tokenize,
)
from goblin_dask.graphs.capture.pytree import is_array

_PLAIN = frozenset({int, str, bool, bytes, type(None), type(Ellipsis)})
_LIBRARIES = frozenset(
    {
        "goblin_dask",
        "numpy",
        "dask",
        "scipy",
        "operator",
        "_operator",
        "builtins",
        "functools",
        "toolz",
        "tlz",
        "cytoolz",
    }
)


class Skeletons:
    """Makes skeletons of the tasks of one graph."""

    def __init__(self) -> None:
        self.refs: list[Hashable] = []
        """Keys that the last task reads, one for each occurrence."""
        self.literals: list[Any] = []
        """Arrays that it holds."""
        self.library = True
        """Whether all functions in it are NumPy's, SciPy's, Dask's or Python's own."""
        self._tokens: dict[int, tuple[Any, Any, bool, tuple[Any, ...]]] = {}

    def of(self, node: Any) -> Any:
        """Skeleton of a task; sets `refs`, `literals` and `library`."""
        self.refs = []
        self.literals = []
        self.library = True
        return self._walk(node)

    def _walk(self, node: Any) -> Any:
        kind = type(node)
        if kind is TaskRef:
            self.refs.append(node.key)
            return None
        if kind is slice:
            return (slice, self._walk(node.start), self._walk(node.stop), self._walk(node.step))
        if kind in _PLAIN:
            return (kind, node)
        if kind is tuple or kind is list:
            return (kind, *[self._walk(each) for each in node])
        if kind is Alias:
            self.refs.append(node.target)
            return None
        if kind is DataNode:
            return self._walk(node.value)
        if isinstance(node, Task):
            walk = self._walk
            function = self._object(node.func)
            if node.kwargs:
                named = [(name, walk(value)) for name, value in node.kwargs.items()]
                return (Task, function, tuple([walk(each) for each in node.args]), *named)
            return (Task, function, *[walk(each) for each in node.args])
        if kind is float or kind is complex:
            return (kind, repr(node))
        if kind is dict:
            return (dict, *[(self._walk(name), self._walk(value)) for name, value in node.items()])
        if kind is np.ndarray and is_array(node):
            self.literals.append(node)
            return (np.ndarray, node.shape, node.dtype)
        if isinstance(node, np.generic):
            return (kind, node.dtype, node.tobytes()) if node.dtype != object else self._object(node)
        return self._object(node)

    def _object(self, value: Any) -> Any:
        """Token of a function or of any other object, remembered by its identity."""
        known = self._tokens.get(id(value))
        if known is None:
            before, self.library = self.library, True
            literals = len(self.literals)
            token = self._token(value)
            known = (value, token, self.library, tuple(self.literals[literals:]))
            del self.literals[literals:]
            self._tokens[id(value)] = known
            self.library = before
        if not known[2]:
            self.library = False
        self.literals.extend(known[3])
        return known[1]

    def _token(self, value: Any) -> Any:
        if isinstance(value, functools.partial):
            named = [(name, self._walk(each)) for name, each in value.keywords.items()]
            return (functools.partial, self._walk(value.func), tuple([self._walk(each) for each in value.args]), *named)
        if callable(value):
            module = getattr(value, "__module__", None) or type(value).__module__
            if module.partition(".")[0] not in _LIBRARIES or getattr(value, "__closure__", None):
                self.library = False
            return ("function", id(value))
        if isinstance(value, (np.dtype, type)):
            return ("type", value)
        return ("object", tokenize(value))


def only_applies(node: Any) -> bool:
    """Whether a task calls nothing but functions marked by `goblin_dask.graphs.apply.applies_operators`."""
    if isinstance(node, NestedContainer):
        return all(map(only_applies, node.args))
    if isinstance(node, Task):
        function = node.func
        while isinstance(function, functools.partial):
            function = function.func
        known = function is identity_cast or getattr(function, "applies_operators", False)
        return known and all(map(only_applies, (*node.args, *node.kwargs.values())))
    if isinstance(node, DataNode):
        return not callable(node.value)
    if isinstance(node, (tuple, list)):
        return all(map(only_applies, node))
    return not callable(node) or isinstance(node, (TaskRef, Alias))


def evaluate(node: Any, refs: Iterator[Any], literals: Iterator[Any], route: Any) -> Any:
    """Call a task.

    Parameters
    ----------
    node : GraphNode
    refs, literals : iterator
        What the keys that it reads, and the arrays that it holds, stand for, in the order of `Skeletons.of`.
    route : callable
        What every function is taken through before it is called or handed on.
    """
    kind = type(node)
    if kind is TaskRef or kind is Alias:
        return next(refs)
    if kind is DataNode:
        return evaluate(node.value, refs, literals, route)
    if isinstance(node, Task):
        function = _function(node.func, literals, route)
        # In the order in which `Skeletons` walks: arguments by name first.
        named = {name: evaluate(value, refs, literals, route) for name, value in node.kwargs.items()}
        return function(*[evaluate(each, refs, literals, route) for each in node.args], **named)
    if kind is tuple or kind is list:
        return kind([evaluate(each, refs, literals, route) for each in node])
    if kind is dict:
        return {
            evaluate(name, refs, literals, route): evaluate(value, refs, literals, route)
            for name, value in node.items()
        }
    if kind is np.ndarray and is_array(node):
        return next(literals)
    if callable(node) and not isinstance(node, type):
        return _function(node, literals, route)
    return node


def _function(function: Any, literals: Iterator[Any], route: Any) -> Any:
    if isinstance(function, functools.partial):
        named = {name: evaluate(each, iter(()), literals, route) for name, each in function.keywords.items()}
        inner = _function(function.func, literals, route)
        args = [evaluate(each, iter(()), literals, route) for each in function.args]
        return functools.partial(inner, *args, **named)
    return route(function)

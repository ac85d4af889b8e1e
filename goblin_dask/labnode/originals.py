"""A program's own Dask tasks, run in its place: for data that the program refuses, and their functions may not.

A program is recorded from shapes and dtypes alone. That a matrix is singular, an index out of range or a count too
large shows only on the data; then the functions that the researcher called give their own result, or their own error.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from goblin_dask.errors import InputError
from goblin_dask.graphs.capture.pytree import map_tree
from goblin_dask.labnode import sources
from goblin_dask.labnode.assemble import writable
from goblin_dask.labnode.plan import Key
from goblin_dask.labnode.residents import called_one


def call_on_copies_if_need_be(node: Any, values: Mapping[Key, Any]) -> Any:
    """Call a task. A blob never changes, so a function that changes its operands in place is given copies to change."""
    try:
        return node(values)
    except ValueError as error:
        if "read-only" not in str(error) or called_one():  # an actor would be told everything twice
            raise
    return node({key: map_tree(_own, value) for key, value in values.items()})


def _own(value: Any) -> Any:
    return writable(value) if isinstance(value, np.ndarray) else value


def run_originals(graph: Mapping[Key, Any], keys: Iterable[Key], known: Mapping[Key, Any]) -> dict[Key, Any]:
    """Values of some keys by the tasks of the researcher's graph.

    Parameters
    ----------
    graph : mapping
        Dask's tasks.
    keys : iterable of key
    known : mapping
        Values that are there already; what lies above them is not run.

    Raises
    ------
    InputError
        When a task that stores something would have to be run again.
    Exception
        Whatever the researcher's functions raise.
    """
    wanted = list(keys)
    values = dict(known)
    stack = list(reversed(wanted))
    while stack:
        key = stack[-1]
        if key in values:
            stack.pop()
            continue
        node = graph[key]
        missing = [each for each in node.dependencies if each not in values]
        if missing:
            stack.extend(missing)
            continue
        function = getattr(node, "func", None)
        if sources.is_sink(function) or sources.is_load(function):
            raise InputError(f"{key!r} stores what it computes, and is not run twice")
        values[key] = call_on_copies_if_need_be(node, {each: values[each] for each in node.dependencies})
        stack.pop()
    return {key: values[key] for key in wanted}

"""Tasks known by their function: sources, whose shapes follow from their arguments, and sinks. Neither is ever traced.

A source reads or makes an array without reading another. Nothing of it runs while a graph is lowered: what it will give
is told from its arguments, and where that cannot be, its readers are traced when it has run.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import zarr
from dask.array import chunk
from dask.utils import apply

from goblin_dask.errors import InputError
from goblin_dask.graphs.capture.dask_internals import (
    BROADCAST_TRICK,
    GETTERS,
    LOADS,
    RANDOM,
    STORES,
    DataNode,
    Task,
    function_parts,
)
from goblin_dask.graphs.capture.pytree import flatten, is_constant, map_tree, representable, specs_of
from goblin_dask.labnode.plan import Region
from goblin_dask.messages import ArraySpec

SINKS = frozenset({*STORES, np.save, np.savetxt, np.savez, np.savez_compressed})
CREATION = frozenset(
    {
        np.zeros, np.ones, np.empty, np.full, np.eye, np.identity, np.arange, np.linspace, np.tri,
        np.zeros_like, np.ones_like, np.empty_like, np.full_like, chunk.arange, chunk.linspace,
    }
)  # fmt: skip
FLOATS = frozenset(
    {
        "beta", "chisquare", "exponential", "f", "gamma", "gumbel", "laplace", "logistic", "lognormal", "noncentral_f",
        "noncentral_chisquare", "normal", "pareto", "power", "rayleigh", "standard_cauchy", "standard_t", "triangular",
        "uniform", "vonmises", "wald", "weibull", "random_sample",
    }
)  # fmt: skip
"""Distributions that are always float64."""
CHOSEN = frozenset(["random", "standard_exponential", "standard_gamma", "standard_normal"])
"""Distributions that are float64 unless told otherwise."""
COUNTS = frozenset(["binomial", "geometric", "hypergeometric", "logseries", "negative_binomial", "poisson", "zipf"])


def is_sink(function: Any) -> bool:
    """Whether a task's function stores what it is given."""
    return _among(function, SINKS)


def is_load(function: Any) -> bool:
    """Whether it reads back what a sink stored."""
    return _among(function, LOADS)


def is_getter(function: Any) -> bool:
    """Whether it reads a region of something that can be indexed."""
    return _among(function, GETTERS)


def _among(function: Any, known: frozenset[Any]) -> bool:
    try:
        return function in known
    except TypeError:  # functions that cannot be hashed
        return False


def region_of(task: Task, graph: Mapping[Any, Any]) -> Region | None:
    """What a getter reads, where that is a Zarr or NumPy array."""
    if len(task.args) < 2 or task.kwargs:
        return None
    array, index = (_value(each, graph) for each in task.args[:2])
    if (
        not isinstance(array, (np.ndarray, zarr.Array))
        or not isinstance(index, tuple)
        or (len(task.args) > 2 and not task.args[2])
    ):
        return None
    if isinstance(array, np.ndarray) and type(array) not in (np.ndarray, np.memmap):
        return None
    if not all(isinstance(each, (slice, int, np.integer)) for each in index) or len(index) > len(array.shape):
        return None
    return Region(array, index)


def region_spec(region: Region) -> ArraySpec | None:
    """Shape and dtype of a region; None where a program cannot hold them."""
    dtype = np.dtype(region.array.dtype)
    if not representable(dtype) or not dtype.isnative:
        return None
    shape = []
    for axis, size in enumerate(region.array.shape):
        part = region.index[axis] if axis < len(region.index) else slice(None)
        if isinstance(part, slice):
            shape.append(len(range(*part.indices(size))))
    return ArraySpec(tuple(shape), dtype.name)


def _value(argument: Any, graph: Mapping[Any, Any]) -> Any:
    if isinstance(argument, DataNode):
        return argument.value
    key = getattr(argument, "key", None)
    if key is not None:
        node = graph.get(key)
        return node.value if isinstance(node, DataNode) else None
    return argument


def data_spec(value: Any) -> Any:
    """Tree of specs of a value that is part of the graph; None where a program cannot hold it."""
    try:
        return specs_of(value)
    except TypeError:
        return None


def source_spec(task: Task) -> ArraySpec | None:
    """Shape and dtype of what a task without operands makes, where they are known."""
    function, args, kwargs = function_parts(task.func)
    args = (*args, *map(_plain, task.args))
    kwargs = {**kwargs, **{name: _plain(value) for name, value in task.kwargs.items()}}
    try:
        return _spec(function, args, kwargs)
    except (TypeError, ValueError, IndexError, KeyError, OverflowError):
        return None  # the task will say itself what is wrong with it


def declared_specs(task: Any) -> Any:
    """What the function of a task without operands declares that it returns; None where it declares nothing.

    A callable does so by an attribute ``specs``: the tree (of tuples, lists and dicts) of `ArraySpec`s of its result.
    """
    function, args, _ = function_parts(task.func)
    if function is apply:
        function = (*args, *map(_plain, task.args))[0]
    tree = getattr(function, "specs", None)
    try:
        return map_tree(_declared, tree) if flatten(tree, lambda each: isinstance(each, ArraySpec))[0] else None
    except TypeError:
        return None  # something else of that name, or no program can hold it: its readers are traced when it has run


def _declared(value: Any) -> Any:
    if isinstance(value, ArraySpec):
        if (made := _made(value.shape, value.dtype)) is None:
            raise TypeError(value.dtype)
        return made
    if not is_constant(value):
        raise TypeError(type(value).__name__)
    return value


def check_returned(key: Any, declared: Any, found: Any) -> None:
    """Refuse what a source has returned if it declared something else, for which its readers were lowered.

    Parameters
    ----------
    key : key
    declared, found : tree of ArraySpec

    Raises
    ------
    InputError
        With both.
    """
    if found != declared:
        raise InputError(
            f"the source {key!r} declares in its specs that it returns {shown(declared)}, but it returned "
            f"{shown(found)}: give it the specs of what it returns"
        )


def shown(tree: Any) -> str:
    """A tree of specs, to be read."""
    leaves, _ = flatten(tree, lambda value: True)
    each = [f"{leaf.dtype} {leaf.shape}" if isinstance(leaf, ArraySpec) else repr(leaf) for leaf in leaves]
    few = each if len(each) < 8 else [*each[:6], f"… ({len(each)} in all)"]
    return few[0] if tree is leaves[0] else f"{type(tree).__name__} of {', '.join(few)}"


def _plain(argument: Any) -> Any:
    return argument.value if isinstance(argument, DataNode) else argument


def _spec(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ArraySpec | None:
    if function is apply:
        function, args, kwargs = args[0], tuple(args[1]), dict(args[2]) if len(args) > 2 else {}
    if function is BROADCAST_TRICK:
        _, shape, *_ = args
        dtype = kwargs.get("dtype")
        return _made(shape, float if dtype is None else dtype)
    if _among(function, RANDOM):
        return _random(*args[1:2], *args[3:6])
    if not _among(function, CREATION):
        return None
    kwargs.pop("like", None)
    if function is chunk.arange:
        return _made((args[3],), args[4])
    if function is chunk.linspace or function is np.linspace:
        dtype = kwargs.get("dtype")
        return _made((args[2] if len(args) > 2 else kwargs.get("num", 50),), float if dtype is None else dtype)
    if function in (np.eye, np.identity, np.tri):
        rows = args[0]
        columns = args[1] if len(args) > 1 and args[1] is not None and function is not np.identity else rows
        dtype = kwargs.get("dtype") or (args[3] if len(args) > 3 else float)
        return _made((rows, columns), dtype)
    if function in (np.zeros, np.ones, np.empty):
        return _made(args[0] if args else kwargs["shape"], kwargs.get("dtype") or (args[1] if len(args) > 1 else float))
    if function in (np.zeros_like, np.ones_like, np.empty_like, np.full_like):
        shape = kwargs.get("shape")
        given = args[2 if function is np.full_like else 1 :]
        dtype = kwargs.get("dtype") or (given[0] if given else None) or args[0].dtype
        return _made(args[0].shape if shape is None else shape, dtype) if type(args[0]) is np.ndarray else None
    return None


def _made(shape: Any, dtype: Any) -> ArraySpec | None:
    dtype = np.dtype(dtype)
    if not representable(dtype):
        return None
    return ArraySpec((int(shape),) if np.ndim(shape) == 0 else tuple(map(int, shape)), dtype.name)


def _random(name: str, size: Any, args: Any, kwargs: Any) -> ArraySpec | None:
    if not all(isinstance(each, (int, float, np.generic, type(None))) for each in (*args, *kwargs.values())):
        named = {key: value for key, value in kwargs.items() if key not in ("dtype", "out", "method")}
        if any(not isinstance(each, (int, float, np.generic, type(None))) for each in (*args, *named.values())):
            return None
    if name in FLOATS:
        return _made(size, float)
    if name in CHOSEN:
        return _made(size, kwargs.get("dtype") or float)
    if name in ("integers", "randint"):
        return _made(size, kwargs.get("dtype") or np.int64)
    return _made(size, np.int64) if name in COUNTS else None

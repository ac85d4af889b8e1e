"""Trees: nested lists, tuples (named ones too) and dicts with arrays at the leaves.

The value of a Dask key is such a tree: chunk reductions hand over dicts, decompositions tuples, `topk` lists. What is
neither a container nor an array is a *constant* of the tree.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from goblin_dask.messages import ArraySpec


@dataclass(frozen=True, slots=True)
class Leaf:
    """Placeholder of an array in a tree: number `index` of the task's arrays."""

    index: int
    scalar: bool = False
    """The array is a NumPy scalar, as NumPy's functions return in place of 0-d arrays."""


def map_tree(function: Callable[[Any], Any], tree: Any) -> Any:
    """The same tree with `function` applied to everything that is not a container."""
    kind = type(tree)
    if kind is dict:
        return {key: map_tree(function, value) for key, value in tree.items()}
    if kind is list:
        return [map_tree(function, value) for value in tree]
    if kind is tuple:
        return tuple([map_tree(function, value) for value in tree])
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return kind._make([map_tree(function, value) for value in tree])
    return function(tree)


def flatten(tree: Any, is_leaf: Callable[[Any], bool]) -> tuple[list[Any], Any]:
    """Leaves of a tree, in order, and the tree with `Leaf`s in their places.

    Parameters
    ----------
    tree : tree
    is_leaf : callable
        Tells arrays from constants.
    """
    leaves: list[Any] = []

    def visit(value: Any) -> Any:
        if not is_leaf(value):
            return value
        leaves.append(value)
        return Leaf(len(leaves) - 1, scalar=isinstance(value, np.generic))

    return leaves, map_tree(visit, tree)


def unflatten(tree: Any, leaves: Any) -> Any:
    """The tree with each `Leaf` replaced by the array of its number."""

    def fill(value: Any) -> Any:
        if isinstance(value, Leaf):
            array = leaves[value.index]
            return array[()] if value.scalar and isinstance(array, np.ndarray) else array
        return value

    return map_tree(fill, tree)


def is_array(value: Any) -> bool:
    """Whether a value is an array, or a NumPy scalar, that a blob can hold: plain, numeric or boolean."""
    if type(value) is np.ndarray:
        return representable(value.dtype)
    return isinstance(value, np.generic) and representable(value.dtype)


def representable(dtype: np.dtype[Any]) -> bool:
    """Whether arrays of this dtype can be programs' values: booleans, integers, floats and complex numbers."""
    return dtype.kind in "biufc" and dtype.itemsize <= 16 and dtype.name not in ("longdouble", "float128")


CONSTANTS = (type(None), bool, int, float, complex, str, bytes, slice, range, type(Ellipsis), np.dtype, type)


def is_constant(value: Any) -> bool:
    """Whether a value that is no array may stand in a tree: one that its `repr` tells apart from all others."""
    return type(value) in CONSTANTS or isinstance(value, (np.dtype, type))


def specs_of(tree: Any) -> Any:
    """Tree with an `ArraySpec` in the place of every array.

    Raises
    ------
    TypeError
        For a tree that holds anything but arrays and constants: masked, structured, sparse or object arrays, and
        whatever else a program cannot hold.
    """

    def spec(value: Any) -> Any:
        if is_array(value):
            return spec_of(value)
        if not is_constant(value):
            raise TypeError(f"a value of type {type(value).__name__} is neither a plain array nor a constant")
        return value

    return map_tree(spec, tree)


def spec_of(array: Any) -> ArraySpec:
    """Shape and dtype of an array."""
    return ArraySpec(tuple(array.shape), array.dtype.name)

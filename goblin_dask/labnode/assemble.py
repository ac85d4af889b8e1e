"""From references to what a researcher asked for: trees with their arrays, blocks joined without holding them twice."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from goblin_dask.graphs.capture.pytree import Leaf, flatten, map_tree, unflatten
from goblin_dask.messages import ArraySpec
from goblin_dask.store.buffers import dtype_of
from goblin_dask.store.refs import ChunkRef


@dataclass(frozen=True, slots=True)
class Reference:
    """Stands for an array where trees are rearranged without being read."""

    ref: ChunkRef
    scalar: bool

    @property
    def spec(self) -> ArraySpec:
        """Its shape and dtype; having it counts as being an array."""
        return self.ref.spec


@dataclass(frozen=True, slots=True)
class Stored:
    """Value of a key of the lab's graph: a tree of references."""

    tree: Any
    """With `Leaf`s in the places of the arrays; what no blob can hold (masked arrays, objects) stands in it itself."""
    refs: tuple[ChunkRef, ...]

    @classmethod
    def of_references(cls, tree: Any) -> Stored:
        """From a tree made of other values' `references`."""
        leaves, numbered = flatten(tree, lambda value: isinstance(value, Reference))

        def mark(value: Any) -> Any:
            return Leaf(value.index, leaves[value.index].scalar) if isinstance(value, Leaf) else value

        return cls(map_tree(mark, numbered), tuple(leaf.ref for leaf in leaves))

    def references(self) -> Any:
        """The tree with a `Reference` in the place of each array."""

        def refer(value: Any) -> Any:
            return Reference(self.refs[value.index], value.scalar) if isinstance(value, Leaf) else value

        return map_tree(refer, self.tree)

    def specs(self) -> Any:
        """The tree with an `ArraySpec` in the place of each array; None when it holds what no program can take."""

        def spec(value: Any) -> Any:
            if isinstance(value, Leaf):
                return self.refs[value.index].spec
            if hasattr(value, "__array__"):
                raise TypeError(f"an array of type {type(value).__name__} is not plain")
            return value

        try:
            return map_tree(spec, self.tree)
        except TypeError:
            return None

    @property
    def block(self) -> ChunkRef | None:
        """The one array that this value is, if it is nothing else."""
        whole = isinstance(self.tree, Leaf) and not self.tree.scalar
        return self.refs[self.tree.index] if whole else None


Fetch = Callable[[ChunkRef], Any]
"""From a reference to its array."""


class Values(Mapping[Hashable, Any]):
    """Values of keys, each fetched when it is asked for and not kept."""

    def __init__(self, stored: Mapping[Hashable, Stored], fetch: Fetch):
        self._stored = stored
        self._fetch = fetch

    def __getitem__(self, key: Hashable) -> Any:
        value = self._stored[key]
        return unflatten(value.tree, [writable(self._fetch(ref)) for ref in value.refs])

    def __iter__(self) -> Iterator[Hashable]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)


def writable(array: Any) -> Any:
    """The array itself or a copy that its owner may change, as `compute` gives it."""
    return array if array.flags.writeable else array.copy()


def join(keys: Any, stored: Mapping[Hashable, Stored], fetch: Fetch) -> Any | None:
    """Blocks of a dask array in one NumPy array, each copied to its place as it comes.

    Parameters
    ----------
    keys : nested lists
        ``array.__dask_keys__()``.
    stored : mapping
    fetch : callable

    Returns
    -------
    numpy.ndarray, or None
        None when the blocks are not plain arrays that fit together: then Dask's own way is to be taken.
    """
    depth, probe = 0, keys
    while isinstance(probe, list):
        if not probe:
            return None
        depth, probe = depth + 1, probe[0]
    blocks: dict[tuple[int, ...], ChunkRef] = {}
    if not _collect(keys, (), stored, blocks):
        return None
    first = blocks[(0,) * depth]
    if len(blocks) == 1:
        return writable(fetch(first)) if len(first.spec.shape) == depth else None
    sides: list[dict[int, int]] = [{} for _ in range(depth)]
    for index, ref in blocks.items():
        if len(ref.spec.shape) != depth or ref.spec.dtype != first.spec.dtype:
            return None
        for axis, (position, length) in enumerate(zip(index, ref.spec.shape, strict=True)):
            if sides[axis].setdefault(position, length) != length:
                return None
    starts = [np.concatenate([[0], np.cumsum([side[i] for i in range(len(side))])]).astype(int) for side in sides]
    if np.prod([len(side) for side in sides]) != len(blocks):
        return None
    result = np.empty([int(start[-1]) for start in starts], dtype_of(first.spec.dtype))
    for index, ref in blocks.items():
        region = tuple(slice(starts[axis][i], starts[axis][i + 1]) for axis, i in enumerate(index))
        result[region] = fetch(ref)
    return result


def _collect(
    keys: Any, index: tuple[int, ...], stored: Mapping[Hashable, Stored], blocks: dict[tuple[int, ...], ChunkRef]
) -> bool:
    if isinstance(keys, list):
        return all(_collect(each, (*index, i), stored, blocks) for i, each in enumerate(keys))
    ref = stored[keys].block
    if ref is not None:
        blocks[index] = ref
    return ref is not None

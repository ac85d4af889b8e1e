"""A stage that no volunteer has the memory for, in blocks: `in_blocks` evaluates its program as dask arrays.

The stage's operators become operations on blocks (`goblin_dask.labnode.tiled`), each of which fits a volunteer. How
arrays are cut, and in which order sums are taken, depends on the given memory alone: not on who is there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import dask.array as da
import numpy as np
from dask.highlevelgraph import HighLevelGraph

from goblin_dask.graphs.operators.dtypes import DTYPES
from goblin_dask.graphs.program import Program
from goblin_dask.labnode.tiled.blocks import cut
from goblin_dask.labnode.tiled.program import tiled, tiles_of
from goblin_dask.messages import ArraySpec, GridOffer

Array = np.ndarray[Any, Any]
Index = tuple[slice, ...]


def in_blocks(program: Program, inputs: Sequence[da.Array | Array], memory: int) -> tuple[da.Array, ...]:
    """Outputs of a program, lazily, made by tasks none of which needs more than so much memory.

    Parameters
    ----------
    program : Program
    inputs : sequence of dask.array.Array or numpy.ndarray
        In the program's order. Those in blocks that are too large are cut.
    memory : int
        Bytes that a task may need.

    Returns
    -------
    tuple of dask.array.Array

    Raises
    ------
    TooLarge
        When an operator has no form in such small blocks.
    """
    offer = _offer(memory)
    block = tiles_of(offer).block
    given = [cut(x, block) if isinstance(x, da.Array) else x for x in inputs]
    found = tiled(program, given, offer=offer)
    return found if isinstance(found, tuple) else (found,)


@dataclass(frozen=True)
class Block:
    """A block of an array that is kept elsewhere: a call without arguments that reads it, for a task of the laboratory.

    Parameters
    ----------
    read : callable
        Gives the block at an index, a tuple of slices.
    index : tuple of slice
    specs : ArraySpec
        What it gives.
    """

    read: Callable[[Index], Array]
    index: Index
    specs: ArraySpec

    def __call__(self) -> Array:
        return np.asarray(self.read(self.index))


def source(name: str, read: Callable[[Index], Array], shape: Sequence[int], dtype: Any, memory: int) -> da.Array:
    """An array that is kept elsewhere, such as a parameter, as a dask array of blocks that fit.

    Parameters
    ----------
    name : str
        Of the array in the graph; another one whenever its numbers change.
    read : callable
        Gives the block at an index, a tuple of slices; it is called in the laboratory.
    shape : sequence of int
    dtype : dtype
    memory : int
        Bytes that a task may need.
    """
    shape, dtype = tuple(shape), DTYPES[np.dtype(dtype).name]
    chunks = tiles_of(_offer(memory)).chunks(shape, dtype)
    layer: dict[Any, Any] = {}
    for place, index in zip(np.ndindex(*map(len, chunks)), da.core.slices_from_chunks(chunks), strict=True):
        spec = ArraySpec(tuple(part.stop - part.start for part in index), dtype.name)
        layer[(name, *place)] = (Block(read, index, spec),)
    meta = np.empty((0,) * len(shape), dtype)
    return da.Array(HighLevelGraph({name: layer}, {name: set()}), name, chunks, dtype=dtype, meta=meta)


def _offer(memory: int) -> GridOffer:
    """Of as many volunteers as it takes not to matter, each with so much memory."""
    return GridOffer(1, 1, (memory,))

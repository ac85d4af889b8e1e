"""`tiled`: a program on arrays larger than any machine, operator by operator, as dask arrays.

Each operator becomes operations on blocks, so Dask's graph is the tiling, and it lowers like any other. Random arrays
are drawn block by block where they are used.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import dask.array as da
import numpy as np
import zarr

from goblin_dask.errors import InputError
from goblin_dask.graphs.check import specs as specs_of
from goblin_dask.graphs.operators import CATALOGUE, ELEMENTWISE
from goblin_dask.graphs.operators.base import Kind
from goblin_dask.graphs.program import Program
from goblin_dask.labnode.tiled.blocks import Application, Tiles, single, spec_of
from goblin_dask.labnode.tiled.drawing import drawn_where_used
from goblin_dask.labnode.tiled.layers import LAYERS
from goblin_dask.labnode.tiled.rules import RULES, tile
from goblin_dask.labnode.tiling import DEFAULT_MEMORY, task_memory
from goblin_dask.messages import ArraySpec, GridOffer

SHARE = 32
"""A block is at most this part of what a task may need: it is read with others, and kernels copy."""

IN_BLOCKS = RULES | LAYERS
"""By operator, how it is computed in blocks."""

VIEWS = frozenset({"permute_dims", "expand_dims", "squeeze", "broadcast_to"})
"""What is done to each block where it is read."""

BLOCK_BYTES = (1 << 16, 1 << 24)
"""Bounds of a block's bytes."""


def tiled(program: Program, inputs: Sequence[Any], *, offer: GridOffer | None = None) -> Any:
    """Outputs of a program, lazily, as dask arrays.

    Parameters
    ----------
    program : Program
    inputs : sequence of numpy.ndarray, zarr.Array or dask.array.Array
        In the program's order. Dask and Zarr arrays keep their chunks.
    offer : GridOffer, optional
        What the grid offers, ``lab.offer``: decides how large blocks are, and what fits no volunteer.

    Returns
    -------
    dask.array.Array, or tuple of them
        A tuple where the program has several outputs.

    Raises
    ------
    InputError
        For inputs that are not those of the program.
    ProgramError
        For a program that is none.
    TooLarge
        When an operator that has no tiled form needs more memory than the largest volunteer offers.
    """
    if not isinstance(program, Program):
        hint = ": captured.bound(x) gives both its program and the inputs" if hasattr(program, "bound") else ""
        raise InputError(f"a Program and its inputs are needed, got a {type(program).__name__}{hint}")
    specs = specs_of(program)
    tiles = tiles_of(offer)
    given = list(inputs) if isinstance(inputs, list | tuple) else [inputs]
    if len(given) != len(program.inputs):
        raise InputError(f"the program has {len(program.inputs)} inputs, {len(given)} were given")
    values = [_input(i, x, spec, tiles) for i, (x, spec) in enumerate(zip(given, program.inputs, strict=True))]
    drawn: set[str] = set()
    views: set[str] = set()
    for node in program.nodes:
        operator = CATALOGUE[node.operator]
        operands = tuple(values[operand] for operand in node.operands)
        read = tuple(specs[operand] for operand in node.operands)
        outputs = operator.outputs_of(read, node.attributes)
        this = Application(operator, operands, operator.complete(node.attributes), read, outputs, tiles)
        made = tile(this, IN_BLOCKS)
        values.extend(single(this) if made is None else made)
        if made is not None and _is_drawn(this, drawn):
            drawn.update(each.name for each in made)
        elif made is not None and this.operator.name in VIEWS:
            views.update(each.name for each in made)
    found = tuple(drawn_where_used([values[output] for output in program.outputs], drawn, views))
    return found[0] if len(found) == 1 else found


def _is_drawn(this: Application, drawn: set[str]) -> bool:
    """Whether it makes arrays of keys and scalars alone."""
    if Kind.RANDOM in this.operator.kinds or Kind.CREATION in this.operator.kinds:
        return True
    elementwise = this.operator.name in ELEMENTWISE or this.operator.name == "broadcast_to"
    return elementwise and all(each.name in drawn or each.size == 1 for each in this.operands)


def tiles_of(offer: GridOffer | None) -> Tiles:
    """How large blocks are for such volunteers."""
    memory = DEFAULT_MEMORY if offer is None else task_memory(offer)
    block = min(BLOCK_BYTES[1], max(BLOCK_BYTES[0], memory // SHARE))
    return Tiles(block, offer.memory[0] if offer is not None and offer.memory else None)


def _input(number: int, x: Any, spec: ArraySpec, tiles: Tiles) -> da.Array:
    if isinstance(x, zarr.Array):
        x = da.from_zarr(x)
    elif not isinstance(x, da.Array):
        if not hasattr(x, "__array__"):
            raise InputError(f"input {number} must be a Zarr, NumPy or dask array, got {type(x).__name__}")
        x = np.asarray(x)
        x = da.from_array(x, chunks=tiles.chunks(x.shape, x.dtype) if x.size else -1)
    if any(np.isnan(size) for size in x.shape):
        raise InputError(f"input {number} is a dask array of unknown shape: call its compute_chunk_sizes first")
    if spec_of(x) != spec:
        raise InputError(
            f"input {number} is {x.dtype.name} {x.shape}, but the program takes {spec.dtype} {spec.shape} there"
        )
    return x

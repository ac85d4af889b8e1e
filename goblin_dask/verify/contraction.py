"""A chunk that ends in sums of matrix products: tiles of output, and the operands that they share."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from goblin_dask.verify.operands import Array, Operand
from goblin_dask.verify.tolerances import WIDTH, accumulator, smallest_normal, unit_roundoff


@dataclass(frozen=True)
class Tile:
    """One output: the sum of some products."""

    output: Array
    """2-D, as it was handed in."""
    terms: tuple[tuple[int, int], ...]
    """Positions of the left and right operand of each product."""


@dataclass(frozen=True)
class Contraction:
    """Tiles, each a sum of products ``left[i] @ right[j]``.

    All operands and outputs are real and floating, of one precision; a complex product is written with real parts.
    """

    left: Sequence[Operand]
    right: Sequence[Operand]
    tiles: Sequence[Tile]

    def depth(self, tile: Tile) -> int:
        """Terms of each element's sum."""
        return sum(self.left[i].shape[1] for i, _ in tile.terms)

    @property
    def precision(self) -> np.dtype[Any]:
        """Dtype in which an honest volunteer sums."""
        return accumulator(np.result_type(*(o.values.dtype for o in (*self.left, *self.right))))

    @property
    def prologue(self) -> bool:
        """Whether some operand was computed, and so is uncertain itself."""
        return any(o.coarse is not None for o in (*self.left, *self.right))

    @property
    def roundoff(self) -> float:
        """Unit roundoff of the summation."""
        return unit_roundoff(self.precision)

    def output_roundoff(self, tile: Tile) -> float:
        """Unit roundoff of the tile's dtype, where a sum is rounded once more."""
        return max(unit_roundoff(tile.output.dtype), self.roundoff)

    def output_floor(self, tile: Tile) -> float:
        """Absolute error of an element that may be flushed to zero."""
        if tile.output.dtype == np.float16:
            return 2.0**-24
        return max(smallest_normal(tile.output.dtype), smallest_normal(self.precision))


@dataclass
class Columns:
    """Tiles that have their right operands in common, and the random numbers that they are projected with."""

    right: tuple[int, ...]
    tiles: list[int]
    width: int
    """Columns of each of these tiles."""
    scale: Array = field(default_factory=lambda: np.empty(0))
    """Exact powers of two, near the norms of the right operands' columns."""
    bad: Array = field(default_factory=lambda: np.empty(0, int))
    """Columns in which a right operand is not finite."""
    sampled: Array = field(default_factory=lambda: np.empty(0, int))
    """Columns in which the exact rows are looked at more closely; ascending."""
    x: Array = field(default_factory=lambda: np.empty(0))
    """Random numbers, divided by `scale`: one row for a column, one column for a projection."""

    @property
    def blocks(self) -> list[slice]:
        """The column blocks that are projected together."""
        count = max(1, -(-self.width // WIDTH))
        edges = [self.width * i // count for i in range(count + 1)]
        return [slice(a, b) for a, b in itertools.pairwise(edges)]

    def overlaps(self, columns: slice) -> list[tuple[int, slice, slice]]:
        """Blocks that meet some columns: number, columns of the block there, the same counted from the start."""
        found = []
        for number, block in enumerate(self.blocks):
            a, b = max(block.start, columns.start), min(block.stop, columns.stop)
            if a < b:
                found.append((number, slice(a, b), slice(a - columns.start, b - columns.start)))
        return found


def group_columns(contraction: Contraction) -> list[Columns]:
    """Tiles by the right operands that they share."""
    groups: dict[tuple[int, ...], Columns] = {}
    for number, tile in enumerate(contraction.tiles):
        right = tuple(j for _, j in tile.terms)
        groups.setdefault(right, Columns(right, [], tile.output.shape[1])).tiles.append(number)
    return list(groups.values())

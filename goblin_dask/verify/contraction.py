"""A chunk that ends in sums of matrix products: tiles of output, and the operands that they share."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
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


QUARTERS = 4
"""Parts of a block whose projections in float32 are added in float64."""


@dataclass(frozen=True)
class Run:
    """Neighbouring blocks of columns, or parts of them, of which all are equally wide."""

    blocks: slice
    """Their numbers."""
    here: slice
    """Their columns, counted from the first of those that were asked for."""
    x: Array
    """Their random numbers: (blocks, projections, columns of a block, 1)."""
    single: Array
    """The same in float32; where the blocks have quarters, of each quarter."""
    weights: Array
    """One over the squares of their scales, in float32: (blocks, columns of a block, 1)."""

    def split(self, block: Array, parts: int = 0) -> Array:
        """The blocks of some rows, or other equal parts: (blocks, rows, columns of a block)."""
        return split_columns(block[:, self.here], parts or len(self.x))


def split_columns(columns: Array, count: int) -> Array:
    """Equal parts of a matrix: (parts, rows, columns of a part)."""
    return columns.reshape(len(columns), count, columns.shape[1] // count).swapaxes(0, 1)


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
    """Random numbers, divided by `scale`: one row for each projection; exact in float32 where that is multiplied."""
    single: bool = False
    """Whether what is in float32 may be projected in float32."""
    estimates: dict[int, Array] = field(default_factory=dict)
    """Sums of the squares of right operands' columns that the scale rests on and that some of the rows gave."""
    _runs: dict[tuple[int, int], list[Run]] = field(default_factory=dict)

    @cached_property
    def blocks(self) -> list[slice]:
        """The column blocks that are projected together: equally wide, in quarters too, but for the last."""
        count = max(1, -(-self.width // WIDTH))
        width = -(-self.width // (QUARTERS * count)) * QUARTERS
        return [slice(i * width, min((i + 1) * width, self.width)) for i in range(count)]

    def clear(self, block: Array, columns: slice) -> None:
        """Set the bad ones of some columns to zero."""
        if self.bad.size:
            block[:, self.bad[(self.bad >= columns.start) & (self.bad < columns.stop)] - columns.start] = 0.0

    def forget(self) -> None:
        """Random numbers and scales have changed."""
        self._runs.clear()

    def runs(self, columns: slice) -> list[Run]:
        """The parts of blocks that some columns consist of."""
        name = columns.start, columns.stop
        if name not in self._runs:
            meets = [(max(b.start, columns.start), min(b.stop, columns.stop), n) for n, b in enumerate(self.blocks)]
            found = []
            for _, equal in itertools.groupby((m for m in meets if m[0] < m[1]), key=lambda m: m[1] - m[0]):
                met = list(equal)
                (start, _, first), (_, stop, _), count = met[0], met[-1], len(met)
                x = self.x[:, start:stop]
                parts = 1 if (stop - start) % (QUARTERS * count) else QUARTERS
                here = slice(start - columns.start, stop - columns.start)
                single = split_columns(x.astype(np.float32), parts * count)[..., None]
                weights = split_columns((self.scale[None, start:stop] ** -2.0).astype(np.float32), count)[:, 0, :, None]
                found.append(
                    Run(slice(first, first + count), here, split_columns(x, count)[..., None], single, weights)
                )
            self._runs[name] = found
        return self._runs[name]


def group_columns(contraction: Contraction) -> list[Columns]:
    """Tiles by the right operands that they share."""
    groups: dict[tuple[int, ...], Columns] = {}
    for number, tile in enumerate(contraction.tiles):
        right = tuple(j for _, j in tile.terms)
        groups.setdefault(right, Columns(right, [], tile.output.shape[1])).tiles.append(number)
    return list(groups.values())

"""Scales of columns and norms of blocks, which random numbers are divided by and tolerances rest on.

Each is taken in float32 where the matrix is, and again in float64 where some numbers are very small or large.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from goblin_dask.verify.contraction import Columns, Contraction
from goblin_dask.verify.operands import Array, Operand, OperandStatistics, Scratch
from goblin_dask.verify.tolerances import LONG, PROJECTIONS, largest

SMALLEST_SCALE = {"float32": 2.0**-80, "float64": 2.0**-500}
"""Columns with smaller norms share this scale: below it, flushing to zero decides, not rounding."""

SAFE = (1e-30, 1e30)
"""Range in which sums of products of magnitudes may be taken in float32."""

RUNS, SHARE = 4, 8
"""Runs of rows that the columns' norms are estimated from, and of which share of the rows they consist."""

ESTIMATED = (1 / 4, 16.0)
"""By what the sum of a column's squares may exceed its estimate.

A column whose scale is too large is less visible, by a factor of 2; one whose scale is too small more visible.
"""

UNDERFLOW = 1e-37
"""A sum of as many float32 squares as a block has columns is lost in rounding only if it is smaller."""


def draw(shape: tuple[int, int], dtype: np.dtype[Any], rng: np.random.Generator) -> Array:
    """Random signs times uniform numbers in [1/2, 3/2].

    Plain signs would miss every other pair of equal errors.
    """
    x = rng.random(shape, np.float32 if dtype == np.float32 else np.float64)
    x += 0.5
    return np.where(rng.integers(0, 2, shape, np.int8), x, -x)


def is_safe(squares: Array) -> bool:
    """Whether numbers, given their squares, are far from where float32 ends."""
    return bool(np.all((squares > SAFE[0]) & (squares < SAFE[1])))


def estimated_squares(operand: Operand) -> Array:
    """Sum of the squares of each column of an operand in float32, from a few runs of its rows."""
    depth, length = operand.shape[0], operand.shape[0] // (RUNS * SHARE)
    total = np.zeros(operand.shape[1])
    for run in range(RUNS):
        rows = operand.values[run * depth // RUNS :][:length]
        total += np.einsum("ij,ij->j", rows, rows)
    return total * (depth / (RUNS * length))


def column_squares(operand: Operand, scratch: Scratch, statistics: OperandStatistics | None) -> Array:
    """Sum of the squares of each column, nan or inf where a column is not finite."""
    if (known := known_squares(operand, statistics)) is not None:
        return known
    total = np.zeros(operand.shape[1])
    if operand.values.dtype == np.float32 and operand.shape[0]:
        for rows, columns in operand:
            block = operand.values[rows, columns]
            total[columns] += np.einsum("ij,ij->j", block, block)
    if operand.values.dtype != np.float32 or not np.all((total > 1e-20) & (total < 1e37)):
        total[:] = 0
        for rows, columns in operand:
            block = operand.exact(rows, columns, scratch)
            total[columns] += np.einsum("ij,ij->j", block, block)
        lost = np.flatnonzero(~np.isfinite(total))
        for j in lost:
            if np.all(np.isfinite(operand.values[:, j])):
                total[j] = largest(np.float64)
    keep_squares(operand, total, statistics)
    return total


def known_squares(operand: Operand, statistics: OperandStatistics | None) -> Array | None:
    """Squares of columns that were kept."""
    return None if operand.key is None or statistics is None else statistics.get(("squares", operand.key))


def keep_squares(operand: Operand, squares: Array, statistics: OperandStatistics | None) -> None:
    """Keep them for the next check."""
    if operand.key is not None and statistics is not None:
        statistics.put(("squares", operand.key), squares)


def prepare(
    group: Columns,
    contraction: Contraction,
    rng: np.random.Generator,
    scratch: Scratch,
    statistics: OperandStatistics | None,
    estimate: bool = False,
) -> None:
    """Scale the columns of a group and draw its random numbers.

    With `estimate`, norms of the columns of long right operands are estimated where they are not known, which
    `project_right` confirms.
    """
    total, group.estimates = np.zeros(group.width), {}
    long = contraction.precision == np.float32 and contraction.depth(contraction.tiles[group.tiles[0]]) >= LONG
    for j in dict.fromkeys(group.right):
        operand = contraction.right[j]
        sampled = estimate and long and operand.shape[0] >= LONG and operand.plain_single
        if sampled and known_squares(operand, statistics) is None:
            found = group.estimates[j] = estimated_squares(operand)
        else:
            found = column_squares(operand, scratch, statistics)
        total += found
    if group.estimates and not is_safe(np.where(total == 0, 1.0, total)):
        prepare(group, contraction, rng, scratch, statistics)
        return
    group.bad = np.flatnonzero(~np.isfinite(total))
    total[group.bad] = 1.0
    total[total == 0] = 1.0
    group.scale = np.maximum(np.exp2(np.round(np.log2(total) / 2)), SMALLEST_SCALE[contraction.precision.name])
    group.x = draw((PROJECTIONS, group.width), contraction.precision, rng) / group.scale
    group.x[:, group.bad] = 0.0
    group.single = long and not group.bad.size and is_safe(total)
    group.forget()


def add_squares(total: Array, block: Array, group: Columns, columns: slice) -> None:
    """Add the sums of the squares of each row, block by block, to `total`, of shape (blocks, rows)."""
    for run in group.runs(columns):
        part = run.split(block)
        by_rows = part.strides[-1] == part.itemsize
        total[run.blocks] += np.vecdot(part, part) if by_rows else np.einsum("bij,bij->bi", part, part)


class BlockSquares:
    """Squares of the scaled norms of each row's blocks, of a matrix that is read block by block.

    Taken in float32 where the matrix is, and again in float64 where some are very small or large.
    """

    def __init__(self, operand: Operand, group: Columns, scratch: Scratch, count_columns: bool = False):
        self.operand, self.group, self.scratch, self.count_columns = operand, group, scratch, count_columns
        self.inverse = 1.0 / group.scale
        self.single = operand.single and is_safe(group.scale**2)
        self.total = np.zeros((len(group.blocks), operand.shape[0]))
        self.columns = np.zeros(operand.shape[1])
        """Of the columns, not scaled; only of an operand in float32."""

    def add(self, rows: slice, columns: slice, block: Array) -> None:
        """Add a block, as it is or in float64; one in float64 may be lost."""
        if self.single:
            squares = self.operand.squares(rows, columns, self.scratch)
            self.group.clear(squares, columns)
            for run in self.group.runs(columns):
                self.total[run.blocks, rows] += (run.split(squares) @ run.weights)[..., 0]
            if self.count_columns:
                self.columns[columns] += np.ones(len(squares), np.float32) @ squares
        elif not self.operand.single:
            self._add_double(rows, columns, block)

    def _add_double(self, rows: slice, columns: slice, block: Array) -> None:
        block *= self.inverse[columns]
        add_squares(self.total[:, rows], block, self.group, columns)

    def confirm(self, estimate: Array) -> bool:
        """Whether the sums of the columns' squares are about what was estimated."""
        least, most = ESTIMATED
        return bool(np.all((self.columns >= least * estimate) & (self.columns <= most * estimate)))

    def found(self) -> Array:
        """The sums, of shape (blocks, rows)."""
        lost = UNDERFLOW * self.inverse.max(initial=0.0) ** 2
        if self.operand.single and not (self.single and is_safe(self.total) and self.total.min(initial=1.0) > lost):
            self.total[:] = 0.0
            for rows, columns in self.operand:
                block = self.operand.exact(rows, columns, self.scratch)
                self.group.clear(block, columns)
                self._add_double(rows, columns, block)
        return self.total

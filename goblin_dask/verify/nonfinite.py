"""Rows and columns that NaN or infinity reach: their elements have a class, not a value.

A row in which a left operand is not finite has no finite element, in whatever order it is summed: each element is NaN,
or the one infinity of its terms. The class does not depend on the order unless sums overflow.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from goblin_dask.verify.contraction import Contraction, Tile
from goblin_dask.verify.operands import Array, Scratch

RUN = 64
"""Rows that are computed at a time."""


@dataclass(frozen=True)
class NonFinite:
    """Where operands are not finite."""

    rows: Array
    columns: Array

    def __bool__(self) -> bool:
        return bool(len(self.rows) or len(self.columns))


@dataclass(frozen=True)
class Classes:
    """What was found there."""

    reason: str = ""
    """Why the result is wrong; empty when it is right."""
    overflow: bool = False
    """Finite operands whose sums overflow: nothing can be said."""


def classify(values: Array) -> Array:
    """0 for finite, 1 for NaN, 2 and 3 for the infinities."""
    values = np.asarray(values)
    codes = np.zeros(values.shape, np.int8)
    codes[np.isnan(values)] = 1
    codes[np.isposinf(values)] = 2
    codes[np.isneginf(values)] = 3
    return codes


def check_classes(contraction: Contraction, tile: Tile, where: NonFinite, scratch: Scratch) -> Classes:
    """Compare the class of every element in non-finite rows and columns with its right one."""
    m, n = tile.output.shape
    for start in range(0, len(where.rows), RUN):
        rows = where.rows[start : start + RUN]
        if _finite_rows(contraction, tile, rows).any():
            return Classes(overflow=True)
        value = np.zeros((len(rows), n))
        for i, j in tile.terms:
            left = contraction.left[i].take(rows, slice(None))
            for ks, columns in contraction.right[j]:
                value[:, columns] += left[:, ks] @ contraction.right[j].exact(ks, columns, scratch)
        if (reason := _differ(value, tile.output[rows], rows, np.arange(n))) is not None:
            return Classes(reason)
    for start in range(0, len(where.columns), RUN):
        columns_ = where.columns[start : start + RUN]
        value = np.zeros((m, len(columns_)))
        for i, j in tile.terms:
            right = contraction.right[j].take(slice(None), columns_)
            for rs, ks in contraction.left[i]:
                value[rs] += contraction.left[i].exact(rs, ks, scratch) @ right[ks]
        if (reason := _differ(value, tile.output[:, columns_], np.arange(m), columns_)) is not None:
            return Classes(reason)
    return Classes()


def _finite_rows(contraction: Contraction, tile: Tile, rows: Array) -> Array:
    """Rows in which all left operands are finite: only overflow brought them here."""
    finite = np.ones(len(rows), bool)
    for i, _ in tile.terms:
        finite &= np.isfinite(contraction.left[i].values[rows]).all(axis=1)
    return finite


def _differ(value: Array, output: Array, rows: Array, columns: Array) -> str | None:
    right, given = classify(value), classify(output)
    if np.array_equal(right, given):
        return None
    i, j = (int(at[0]) for at in np.nonzero(right != given))
    return f"row {rows[i]}, column {columns[j]} is {output[i, j]}, but must be {value[i, j]}"

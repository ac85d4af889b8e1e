"""How far honest volunteers' operands are apart that a prologue computed, and what that makes of a product's error."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np

from goblin_dask.graphs.program import Program
from goblin_dask.verify.bounds import carry
from goblin_dask.verify.evaluate import Source
from goblin_dask.verify.operands import Array
from goblin_dask.verify.tolerances import BLAME, largest

Bounds = tuple[Array, Array]
"""The tight and the hard bound of an honest error, element by element."""


class Rounding:
    """Bounds of values that a program computes, themselves computed when first asked for."""

    def __init__(self, program: Program, inputs: Sequence[Source], values: Sequence[int]):
        self._program, self._inputs, self._values = program, inputs, values

    @cached_property
    def _found(self) -> dict[int, Bounds]:
        found = {}
        for value, bounded in zip(self._values, carry(self._program, self._inputs, self._values), strict=True):
            tight, hard = bounded.errors()
            found[value] = tight, hard * (BLAME if bounded.soft else 1.0)
        return found

    def __getitem__(self, value: int) -> Bounds:
        return self._found[value]


def overflows(values: Array, fine: Array) -> bool:
    """Whether what a prologue computes is finite, or not, by rounding alone."""
    finite = np.isfinite(fine)
    beyond = np.any(np.abs(fine[finite]) > largest(values.real.dtype) / 2)
    return bool(beyond) or not np.array_equal(finite, np.isfinite(values))


class Carried:
    """What the rounding of operands adds to the error of some rows of a product, term by term.

    Errors of operands are independent, or alike along the sum (a mean's, a norm's): then they either are about equal or
    proportional to the operand. The tight bound is the sum of what these make; the hard one allows for any.
    """

    def __init__(self, rows: int, columns: int):
        shape = rows, columns
        self.hard, self._squares, self._of_left, self._of_right, self._of_both = (np.zeros(shape) for _ in range(5))
        self._left, self._right = np.zeros((2, rows, 1)), np.zeros((2, 1, columns))

    def add_left(self, left: Array, bounds: Bounds) -> None:
        """Rows of a left operand."""
        for total, part in zip(self._left, (bounds[0], left), strict=True):
            np.hypot(total, _norms(part, 1), out=total)

    def add(self, columns: slice, left: Array, of_left: Bounds, right: Array, of_right: Bounds) -> None:
        """A block of a product: all those rows, some columns, some terms of the sum."""
        (a, most_a), (b, most_b) = of_left, of_right
        self.hard[:, columns] += most_a @ np.abs(right) + (np.abs(left) + most_a) @ most_b
        self._squares[:, columns] += a**2 @ right**2 + left**2 @ b**2
        self._of_left[:, columns] += a @ right
        self._of_right[:, columns] += left @ b
        self._of_both[:, columns] += a @ b
        for total, part in zip(self._right, (b, right), strict=True):
            total[:, columns] = np.hypot(total[:, columns], _norms(part, 0))

    def tight(self, product: Array) -> Array:
        """What is expected at most; not finite where nothing bounds an operand."""
        # Squares may overflow where the product does not.
        independent = np.where(np.isfinite(self._squares), np.sqrt(self._squares), self.hard)
        alike = np.abs(self._of_left) + np.abs(self._of_right) + self._of_both
        shares = [np.where(size > 0, error / size, 0.0) for error, size in (self._left, self._right)]
        return np.asarray(independent + alike + (shares[0] + shares[1]) * np.abs(product))


def _norms(values: Array, axis: int) -> Array:
    """Euclidean norms along an axis, which is kept."""
    top = np.abs(values).max(axis=axis, keepdims=True, initial=0.0)
    return np.asarray(top * np.sqrt(np.sum((values / np.where(top > 0, top, 1.0)) ** 2, axis=axis, keepdims=True)))

"""Second layer of the product check: rows that are computed exactly, and what their errors look like.

An honest row's error is about as large as what deliberate changes of the order of summation do to it. Hardware that
rounds its operands (TF32, bfloat16) makes another error, which is predicted and looked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import ml_dtypes
import numpy as np

from goblin_dask.verify.contraction import Columns, Contraction, Tile
from goblin_dask.verify.operands import Array, Scratch
from goblin_dask.verify.prologue import Carried
from goblin_dask.verify.tolerances import (
    REGRESSION_R2,
    REGRESSION_SLOPE,
    gamma,
    smallest_normal,
    unit_roundoff,
)

SAMPLED_COLUMNS = 64
"""Columns in which deliberate orders and low precision are tried."""

SAMPLED_ELEMENTS = 1 << 21
"""Elements of the operands that are kept for it, at most."""

FEW = 8
"""With fewer columns than this, the errors of four orders say little."""

FEWEST = 16
"""Errors in which a low precision can be recognised: a few may look like anything."""

RUN = 128
"""Terms of a sum that are formed at a time."""

LANES = 8
"""Partial sums of the strided order."""


@dataclass
class Sample:
    """Operands, cut to some rows and columns: float32 as multiplied, and their product exactly."""

    left: Array
    right: Array
    exact: Array
    """Their product in float64."""
    scale: Array
    """Of the columns."""

    @cached_property
    def deviations(self) -> dict[str, Array]:
        """What each low precision would do to it, in scaled columns."""
        multiplied = self.left.astype(np.float64) @ self.right.astype(np.float64)
        return {name: (self._product(rounded) - multiplied) / self.scale for name, rounded in LOW_PRECISIONS.items()}

    def _product(self, rounded: Callable[[Array], Array]) -> Array:
        left, right = (rounded(np.ascontiguousarray(x)).astype(np.float64) for x in (self.left, self.right))
        return np.asarray(left @ right)


def sample_columns(group: Columns, depth: int, count: int, rng: np.random.Generator) -> Array:
    """Random columns that are finite, fewer where the sums are long."""
    usable = np.setdiff1d(np.arange(group.width), group.bad, assume_unique=True)
    count = min(len(usable), count, max(16, SAMPLED_ELEMENTS // max(depth, 1)))
    return np.sort(rng.choice(usable, count, replace=False)) if count else usable


def take_sample(contraction: Contraction, tile: Tile, group: Columns, rows: Array, columns: Array) -> Sample:
    """Cut a tile's operands to some rows and columns."""
    whole = slice(None)
    left = [contraction.left[i] for i, _ in tile.terms]
    right = [contraction.right[j] for _, j in tile.terms]
    exact = np.zeros((len(rows), len(columns)))
    for a, b in zip(left, right, strict=True):
        exact += a.take(rows, whole) @ b.take(whole, columns)
    return Sample(
        np.hstack([a.take(rows, whole, exact=False) for a in left]),
        np.vstack([b.take(whole, columns, exact=False) for b in right]),
        exact,
        group.scale[columns],
    )


def _sequential(left: Array, right: Array, order: Array) -> Array:
    """Sum the products one after the other, in float32."""
    total = np.zeros((left.shape[0], right.shape[1]), np.float32)
    for start in range(0, len(order), RUN):
        run = order[start : start + RUN]
        terms = left.T[run][:, :, None] * right[run][:, None, :]
        terms[0] += total
        # NumPy sums a single column pairwise, several one after the other.
        total = np.add.reduce(terms, axis=0) if total.size > 1 else np.add.accumulate(terms, axis=0)[-1]
    return total


def _strided(left: Array, right: Array) -> Array:
    """Sum every eighth product into a partial sum of its own, then the partial sums."""
    depth = left.shape[1] // LANES * LANES
    lanes = np.zeros((LANES, left.shape[0], right.shape[1]), np.float32)
    for start in range(0, depth, RUN):
        run = slice(start, min(start + RUN, depth))
        terms = left.T[run][:, :, None] * right[run][:, None, :]
        terms = terms.reshape(-1, *lanes.shape)
        terms[0] += lanes
        lanes = np.add.reduce(terms, axis=0)
    rest = _sequential(left[:, depth:], right[depth:], np.arange(left.shape[1] - depth))
    return np.asarray(np.add.reduce(lanes, axis=0) + rest)


def _flushed(sample: Sample) -> Array:
    """The product on a machine that takes denormal operands for zeros."""
    tiny = smallest_normal(np.float32)
    left, right = (np.where(np.abs(x) < tiny, 0.0, x).astype(np.float64) for x in (sample.left, sample.right))
    return np.asarray(left @ right)


class Spread:
    """Largest root-mean-square error of deliberate orders of summation, for each row of a sample, in scaled columns.

    Four orders, and flushing denormal operands as a fifth; each is tried when what those before it did is not enough.

    Never less than a quarter of the last rounding of the whole row: where all orders are exact in the sampled columns,
    other columns of a sparse row may be rounded.

    Parameters
    ----------
    sample : Sample
    size : float64 array
        Root of the mean square of each whole row, in scaled columns.
    dtype : dtype
        Of the result.
    tiny : float
        What flushing to zero does to an element.
    rng : numpy.random.Generator
    """

    def __init__(self, sample: Sample, size: Array, dtype: Any, tiny: float, rng: np.random.Generator):
        self.sample, self.dtype, depth = sample, dtype, sample.left.shape[1]
        last = float(ml_dtypes.finfo(dtype).eps) / 8
        self._worst = np.maximum(
            last * np.maximum(size, rms(sample.exact / sample.scale)), (depth + 1) * tiny * rms(1 / sample.scale)
        )
        if len(sample.scale) < FEW:
            # Four orders of a few sums may all be lucky: half of what a random walk of partial sums makes.
            squares = (sample.left.astype(np.float64) ** 2) @ (sample.right.astype(np.float64) ** 2)
            walk = 0.5 * unit_roundoff(np.float32) * np.sqrt(depth * squares)
            self._worst = np.maximum(self._worst, rms(walk / sample.scale))
        self._sums = self._orders(rng)

    def _orders(self, rng: np.random.Generator) -> Iterator[Array]:
        left, right = self.sample.left, self.sample.right
        natural = np.arange(left.shape[1])
        yield _sequential(left, right, natural)
        yield _sequential(left, right, natural[::-1])
        yield _strided(left, right)
        yield _sequential(left, right, rng.permutation(natural))
        yield _flushed(self.sample)

    def at_least(self, enough: Array | float, rows: Any = slice(None)) -> Array:
        """The spread of some rows: what all orders do, or those that suffice for as much as is enough in every row."""
        while not np.all(self._worst[rows] >= enough) and (total := next(self._sums, None)) is not None:
            error = total.astype(self.dtype).astype(np.float64) - self.sample.exact
            self._worst = np.maximum(self._worst, rms(error / self.sample.scale))
        return np.asarray(self._worst[rows])


def rms(values: Array) -> Array:
    """Root of the mean square of each row."""
    if not values.shape[-1]:
        return np.zeros(values.shape[:-1])
    return np.asarray(np.sqrt(np.mean(np.square(values), axis=-1)))


def _bits(values: Array, add: int, mask: int) -> Array:
    return ((values.view(np.uint32) + np.uint32(add)) & np.uint32(mask)).view(np.float32)


def tf32(values: Array) -> Array:
    """Rounded to ten bits of mantissa, as tensor cores do."""
    return _bits(values, 0x1000, 0xFFFFE000)


def tf32_truncated(values: Array) -> Array:
    """Cut to ten bits of mantissa."""
    return _bits(values, 0, 0xFFFFE000)


def bfloat16(values: Array) -> Array:
    """Rounded to bfloat16."""
    return values.astype(ml_dtypes.bfloat16).astype(np.float32)


LOW_PRECISIONS: dict[str, Callable[[Array], Array]] = {
    "TF32": tf32,
    "truncated TF32": tf32_truncated,
    "bfloat16": bfloat16,
}
"""How hardware may round operands without being asked to."""


def low_precision(sample: Sample, rows: Array, error: Array, spread: Array) -> str | None:
    """Name of the low precision that explains a tile's errors, if one does.

    Parameters
    ----------
    sample : Sample
    rows : integer array
        Those of the sample that are the tile's.
    error : float64 array
        Of the handed-in result there, in scaled columns.
    spread : float64 array
        What deliberate orders do to the rows. A smaller error is an order's, whatever it looks like, and so may be that
        of a few elements.
    """
    power = float(np.sum(error * error))
    if error.size < FEWEST or not np.isfinite(power) or power <= error.shape[1] * float(np.sum(spread * spread)):
        return None
    for name, deviation in sample.deviations.items():
        predicted = deviation[rows]
        size, common = float(np.sum(predicted * predicted)), float(np.sum(error * predicted))
        if size and abs(common / size - 1) < REGRESSION_SLOPE and common**2 > REGRESSION_R2 * size * power:
            return name
    return None


@dataclass
class ExactRows:
    """Rows of a tile, computed exactly."""

    error: Array
    """Of the handed-in rows; float64."""
    summing: Array
    """What no order of summation exceeds, element by element."""
    tight: Array
    """What an honest prologue's rounding is expected to add at most; not finite where nothing bounds it."""
    hard: Array
    """What it may add."""


def exact_rows(contraction: Contraction, tile: Tile, rows: Array, scratch: Scratch) -> ExactRows:
    """Compute rows of a tile in float64, with the rigorous bound of their elements' errors."""
    n, whole = tile.output.shape[1], slice(None)
    value, size = np.zeros((len(rows), n)), np.zeros((len(rows), n))
    carried = Carried(len(rows), n) if contraction.prologue else None
    magnitude = np.zeros(len(rows))
    tiny = smallest_normal(contraction.precision)
    for i, j in tile.terms:
        a, b = contraction.left[i], contraction.right[j]
        left = a.take(rows, whole)
        left_size = np.abs(left)
        magnitude += left_size.sum(axis=1)
        of_left = a.bounds(rows, whole)
        if carried is not None:
            carried.add_left(left, of_left)
        for ks, columns in b:
            block = b.exact(ks, columns, scratch)
            value[:, columns] += left[:, ks] @ block
            if carried is not None:
                tight, hard = of_left
                carried.add(columns, left[:, ks], (tight[:, ks], hard[:, ks]), block, b.bounds(ks, columns))
            np.abs(block, out=block)
            size[:, columns] += left_size[:, ks] @ block
            tiny_columns = tiny * block.sum(axis=0)
            size_floor = tiny_columns[None, :]
            value_floor = size_floor / contraction.roundoff / max(contraction.depth(tile), 1)
            size[:, columns] += value_floor
    depth = contraction.depth(tile)
    handed = tile.output[rows].astype(np.float64)
    bound = gamma(depth + 1, contraction.roundoff) * size + 2 * contraction.output_roundoff(tile) * np.abs(handed)
    bound += (depth + 1) * contraction.output_floor(tile) + tiny * magnitude[:, None]
    if contraction.precision == np.float64:
        bound *= 2  # the exact values are summed in float64 too
    if carried is None:
        return ExactRows(handed - value, bound, *np.zeros((2, *bound.shape)))
    carried.hard[np.isnan(carried.hard)] = np.inf
    return ExactRows(handed - value, bound, carried.tight(value), carried.hard)

"""Operands of a product, read in cache-sized blocks, and what is known of them alone.

A check is bound by memory, not by arithmetic: whole operands are never concatenated or cast. Statistics that depend
on an operand only (column norms, block norms) may be kept between the chunks that read it; random numbers may not.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from goblin_dask.verify.tolerances import BLOCK_ELEMENTS, unit_roundoff

Array = np.ndarray[Any, np.dtype[Any]]


class Blocks:
    """Iterate over a 2-D array in blocks of about a mebibyte, along its memory.

    Parameters
    ----------
    shape : (int, int)
    strides : (int, int)
        Of the array that is read; they decide whether blocks are runs of rows or of columns.
    dtype : dtype
        Of the array that is read.
    """

    def __init__(self, shape: tuple[int, int], strides: tuple[int, int], dtype: np.dtype[Any]):
        self.shape, self.elements = shape, BLOCK_ELEMENTS * (2 if dtype == np.float32 else 1)
        self.by_rows = abs(strides[0]) >= abs(strides[1])

    def __iter__(self) -> Iterator[tuple[slice, slice]]:
        outer, inner = self.shape if self.by_rows else self.shape[::-1]
        width = max(1, min(inner, self.elements // 8))
        height = max(8, self.elements // width)
        for i in range(0, outer, height):
            for j in range(0, inner, width):
                across, along = slice(i, min(i + height, outer)), slice(j, min(j + width, inner))
                yield (across, along) if self.by_rows else (along, across)


class Operand:
    """A matrix that is a factor of a product.

    Parameters
    ----------
    values : 2-D array of a real floating dtype
        As a volunteer has it: an input, or the prologue evaluated in the product's precision.
    fine : 2-D float64 array, optional
        The prologue evaluated in float64, where that is another array.
    coarse : 2-D array, optional
        The prologue evaluated in float32: its distance from `fine`, times `weight`, is the operand's own uncertainty.
    weight : float
        1 for a product in float32, 2**-29 for one in float64.
    bounds : callable, optional
        Needed with `coarse`: the tight and the hard bound of how far an honest volunteer's operand is from `fine`,
        element by element. Called where a result is suspicious.
    key : hashable, optional
        Equal keys mean equal values; statistics are kept under it.
    sign : 1 or -1
        Factor of the operand in its product.
    """

    def __init__(
        self,
        values: Array,
        fine: Array | None = None,
        coarse: Array | None = None,
        weight: float = 1.0,
        key: Hashable = None,
        sign: int = 1,
        bounds: Callable[[], tuple[Array, Array]] | None = None,
    ):
        if (coarse is None) != (bounds is None):
            raise ValueError("what a prologue computes has both an evaluation in float32 and bounds")
        self._bounds = bounds
        self.values, self.coarse, self.weight, self.key, self.sign = values, coarse, weight, key, sign
        self._exact = values if fine is None else fine
        self.shape: tuple[int, int] = (values.shape[0], values.shape[1])
        self._blocks = Blocks(self.shape, (values.strides[0], values.strides[1]), self._exact.dtype)

    def __iter__(self) -> Iterator[tuple[slice, slice]]:
        return iter(self._blocks)

    def exact(self, rows: Any, columns: Any, scratch: Scratch) -> Array:
        """A block in float64; valid until the next call with the same `scratch`."""
        block = scratch.cast(self._exact[rows, columns], np.float64)
        return np.negative(block, out=block) if self.sign < 0 else block

    def magnitudes(self, rows: Any, columns: Any, scratch: Scratch) -> Array:
        """Absolute values of a block, in the product's own precision."""
        block = self.values[rows, columns]
        if block.dtype == np.float32 or block.dtype == np.float64:
            out = scratch.take(block.shape, block.dtype, block.strides, "changed")
            np.abs(block, out=out)
            return out
        return np.asarray(np.abs(block.astype(np.float32)))

    @property
    def single(self) -> bool:
        """Whether its exact values are of single precision."""
        return bool(self._exact.dtype == np.float32 and self.sign > 0)

    @property
    def plain_single(self) -> bool:
        """Whether it is a matrix in single precision, as it was handed in or moved."""
        return self.single and self._exact is self.values and self.coarse is None

    def plain(self, rows: Any, columns: Any, scratch: Scratch) -> Array:
        """A block of an operand in single precision, as it is; copied only where no product could read it in place."""
        block = self._exact[rows, columns]
        in_place = block.itemsize in block.strides and min(block.strides) > 0
        return block if in_place else scratch.cast(block, np.float32, "plain")

    def squares(self, rows: Any, columns: Any, scratch: Scratch) -> Array:
        """The squares of a block of an operand in single precision."""
        block = self._exact[rows, columns]
        out = scratch.take(block.shape, block.dtype, block.strides, "changed")
        np.square(block, out=out)
        return out

    def deviation(self, rows: Any, columns: Any) -> Array:
        """How uncertain the elements of a block are, because a prologue computed them; float64."""
        if self.coarse is None:
            return np.zeros(self._exact[rows, columns].shape)
        exact = self._exact[rows, columns]
        difference: Array = np.subtract(exact, self.coarse[rows, columns], dtype=np.float64)
        np.abs(difference, out=difference)
        difference *= self.weight
        # float64 data beyond float32's range: a guess, which is too small rather than too large
        lost = np.isfinite(exact) & ~np.isfinite(difference)
        difference[lost] = np.abs(exact[lost]) * unit_roundoff(self.values.dtype)
        return difference

    def bounds(self, rows: Any, columns: Any) -> tuple[Array, Array]:
        """Tight and hard bound of an honest volunteer's error in chosen rows and columns; float64."""
        if self._bounds is None:
            zeros = np.zeros(self._exact[rows, columns].shape)
            return zeros, zeros
        tight, hard = self._bounds()
        return tight[rows, columns], hard[rows, columns]

    def take(self, rows: Any, columns: Any, exact: bool = True) -> Array:
        """Chosen rows and columns, in float64 (exact) or float32 (as they are multiplied)."""
        source = self._exact if exact else self.values
        chosen: Array = source[rows][:, columns].astype(np.float64 if exact else np.float32)
        return np.negative(chosen) if self.sign < 0 else chosen


class Scratch:
    """Buffers that blocks are cast into, one for each dtype and purpose, reused."""

    def __init__(self) -> None:
        self._memory: dict[tuple[str, str], Array] = {}
        self._views: dict[tuple[Any, ...], Array] = {}

    def take(self, shape: tuple[int, ...], dtype: Any, strides: tuple[int, ...], purpose: str = "") -> Array:
        """An uninitialised array of that shape, with the memory order of those strides."""
        by_columns = len(shape) == 2 and abs(strides[0]) < abs(strides[1])
        wanted = (shape, dtype, by_columns, purpose)
        if (view := self._views.get(wanted)) is not None:
            return view
        size, name = math.prod(shape), (np.dtype(dtype).str, purpose)
        if name not in self._memory or self._memory[name].size < size:
            self._memory[name] = np.empty(max(size, BLOCK_ELEMENTS), dtype)
            self._views.clear()
        flat = self._memory[name][:size]
        self._views[wanted] = flat.reshape(shape[::-1]).T if by_columns else flat.reshape(shape)
        return self._views[wanted]

    def cast(self, block: Array, dtype: Any, purpose: str = "") -> Array:
        """`block` in another dtype."""
        out = self.take(block.shape, dtype, block.strides, purpose)
        np.copyto(out, block, casting="unsafe")
        return out


@dataclass
class _Entry:
    value: Any
    nbytes: int


class OperandStatistics:
    """What is known of operands alone, kept for the next chunk that reads them; the least used goes first. Thread-safe.

    It never holds anything that depends on a check's random numbers.

    Parameters
    ----------
    limit : int
        Bytes of statistics that are kept.
    """

    def __init__(self, limit: int = 32 << 20):
        self.limit, self.nbytes = limit, 0
        self._entries: OrderedDict[Hashable, _Entry] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Hashable) -> Any:
        """The statistic of that name, or None."""
        with self._lock:
            if key not in self._entries:
                return None
            self._entries.move_to_end(key)
            return self._entries[key].value

    def put(self, key: Hashable, value: Array) -> None:
        """Keep a statistic."""
        with self._lock:
            if key in self._entries:
                self.nbytes -= self._entries.pop(key).nbytes
            self._entries[key] = _Entry(value, value.nbytes)
            self.nbytes += value.nbytes
            while self.nbytes > self.limit:
                self.nbytes -= self._entries.popitem(last=False)[1].nbytes

"""Windows that slide over the last axes of an array: what convolution and pooling have in common.

A *tap* is one place in the window. For each tap the positions of the window where it hits the array, and the elements
that it hits there, are two slices; so neither padded copies nor masks of the array are needed, and taps that hit
nothing, however many, cost nothing.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from goblin_dask.errors import InputError

Sizes = tuple[int, ...]
Slices = tuple[slice, ...]


@dataclass(frozen=True)
class Windows:
    """Windows over `sizes`, at `outs` positions of each axis."""

    sizes: Sizes
    outs: Sizes
    kernel: Sizes
    stride: Sizes
    padding: Sizes
    dilation: Sizes

    @property
    def rank(self) -> int:
        return len(self.sizes)

    @property
    def positions(self) -> int:
        return math.prod(self.outs)

    @property
    def volume(self) -> int:
        """Taps of a window, those included that hit nothing."""
        return math.prod(self.kernel)

    def taps(self) -> Iterator[tuple[Sizes, Slices, Slices]]:
        """Taps in C order: (index in the window, positions where it hits, elements that it hits there)."""
        axes = [list(self._axis(axis)) for axis in range(self.rank)]
        for chosen in itertools.product(*axes):
            yield tuple(c[0] for c in chosen), tuple(c[1] for c in chosen), tuple(c[2] for c in chosen)

    def _axis(self, axis: int) -> Iterator[tuple[int, slice, slice]]:
        size, out, stride = self.sizes[axis], self.outs[axis], self.stride[axis]
        padding, dilation = self.padding[axis], self.dilation[axis]
        least = max(0, _ceil(padding - (out - 1) * stride, dilation))
        most = min(self.kernel[axis] - 1, (padding + size - 1) // dilation)
        for tap in range(least, most + 1):
            offset = tap * dilation - padding
            first = max(0, _ceil(-offset, stride))
            last = min(out - 1, (size - 1 - offset) // stride)
            if first <= last:
                start = first * stride + offset
                yield tap, slice(first, last + 1), slice(start, start + (last - first) * stride + 1, stride)


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


def positions(size: int, kernel: int, stride: int, padding: int, dilation: int, ceil_mode: bool = False) -> int:
    """Positions of a window along an axis, as ATen counts them.

    Raises
    ------
    InputError
        Where there is none.
    """
    free = size + 2 * padding - dilation * (kernel - 1) - 1
    count = (free + (stride - 1 if ceil_mode else 0)) // stride + 1
    if ceil_mode and (count - 1) * stride >= size + padding:
        count -= 1  # The last window has to start inside of the array or of the padding before it.
    if count < 1:
        raise InputError(
            f"a window of {kernel} with dilation {dilation} does not fit into an axis of {size} padded by {padding}"
        )
    return count

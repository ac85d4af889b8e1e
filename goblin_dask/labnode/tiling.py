"""How a matrix product is cut: pure arithmetic on shapes and on what the volunteers offer.

A product of side-``s`` super-tiles moves ``2·m·k·n/s`` elements of operands; a volunteer whose memory holds ``M``
elements can use ``s`` up to about ``√M`` (Hong and Kung, *I/O complexity: the red-blue pebble game*, 1981; Irony,
Toledo and Tiskin, 2004). So tiles are as large as memory allows, and as small as it takes to keep everybody busy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from goblin_dask.messages import GridOffer

DEFAULT_MEMORY = 1 << 30
"""Bytes that a task may need while no volunteer has said what it offers."""

TASKS_PER_VOLUNTEER = 2
"""At least so many tasks for each volunteer, so that a slow one does not leave the others idle."""

SIDE = 2048
"""Side of a block where nothing else decides: 16 MB of float32, products of which run at full speed."""

STORED_BYTES = (1 << 19, 1 << 26)
"""A stored chunk between these sizes, in bytes, is a good panel as it is."""


@dataclass(frozen=True, slots=True)
class Tiling:
    """Block sides of ``A (m × k) @ B (k × n)``."""

    m: int
    k: int
    n: int


def task_memory(offer: GridOffer) -> int:
    """Bytes that a task may need to fit at least half of the volunteers."""
    return offer.memory[len(offer.memory) // 2] if offer.memory else DEFAULT_MEMORY


def super_tile(m: int, n: int, itemsize: int, offer: GridOffer) -> int:
    """Side of the square super-tile, in elements: half of the memory for the accumulators, and work for everybody."""
    by_memory = math.isqrt(max(1, task_memory(offer) // (2 * itemsize)))
    by_parallelism = math.isqrt(max(1, m * n // (TASKS_PER_VOLUNTEER * max(1, offer.volunteers))))
    return max(1, min(by_memory, by_parallelism))


def blocks(length: int, side: int, stored: int | None = None) -> int:
    """Block side along an axis of `length`: near `side`, a multiple of the `stored` chunk where there is one."""
    if stored and stored < length:
        return min(length, max(1, round(side / stored)) * stored)
    return max(1, math.ceil(length / max(1, math.ceil(length / side))))


def choose(
    shape: tuple[int, int, int],
    itemsize: int,
    offer: GridOffer,
    stored_a: tuple[int, int] | None = None,
    stored_b: tuple[int, int] | None = None,
) -> Tiling:
    """Block sides for a product.

    Parameters
    ----------
    shape : (m, k, n)
    itemsize : int
        Bytes of one element of the result.
    offer : GridOffer
        What the volunteers offer.
    stored_a, stored_b : (rows, columns), optional
        Chunks in which the operands are stored. A stored chunk of a good size is kept, for it is read in place.
    """
    m, k, n = shape
    side = min(SIDE, super_tile(m, n, itemsize, offer))

    def good(stored: tuple[int, int] | None) -> bool:
        return stored is not None and STORED_BYTES[0] <= stored[0] * stored[1] * itemsize <= STORED_BYTES[1]

    if stored_a is not None and stored_b is not None and good(stored_a) and good(stored_b):
        rows, columns = stored_a[0], stored_b[1]
        if stored_a[1] == stored_b[0] and max(rows, columns) <= super_tile(m, n, itemsize, offer):
            return Tiling(rows, stored_a[1], columns)
    return Tiling(
        blocks(m, side, stored_a and stored_a[0]),
        blocks(k, SIDE, stored_a and stored_a[1]),
        blocks(n, side, stored_b and stored_b[1]),
    )

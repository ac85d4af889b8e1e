"""Super-tiles: which sums of products are given to one volunteer together, because they share operands."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from goblin_dask.graphs.operators.base import nbytes
from goblin_dask.graphs.program import Program
from goblin_dask.graphs.schedule import schedule
from goblin_dask.labnode.plan import GridTask, Operand

_PRODUCTS = {"matmul": (0, 1), "addmm": (1, 2), "baddbmm": (1, 2), "tensordot": (0, 1)}
"""Operators of a sum of products, with their two factors."""


def sides(program: Program) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Slots that feed the left and those that feed the right factors of a sum of products.

    Returns None where the program is none, or where a slot feeds both sides.
    """
    reaches: list[frozenset[int]] = [frozenset((slot,)) for slot in range(len(program.inputs))]
    left: set[int] = set()
    right: set[int] = set()
    plan = schedule(program)
    for step in plan.steps:
        factors = _PRODUCTS.get(step.operator.name)
        if factors is not None:
            left |= reaches[step.operands[factors[0]]]
            right |= reaches[step.operands[factors[1]]]
        everything = frozenset().union(*(reaches[operand] for operand in step.operands))
        reaches.extend(everything for _ in step.outputs)
    if not left or not right or left & right or len(left) + len(right) != len(program.inputs):
        return None
    return tuple(sorted(left)), tuple(sorted(right))


def super_tiles(tasks: Mapping[int, GridTask], most: int, memory: int) -> Iterator[list[int]]:
    """Groups of tasks of one program that form rectangles of a product's blocks.

    Parameters
    ----------
    tasks : mapping of int to GridTask
        Tasks of one program, by number.
    most : int
        Blocks in a rectangle, at most: everybody should have something to do.
    memory : int
        Bytes that a rectangle's results may take, with half as much again for panels.
    """
    first = next(iter(tasks.values()))
    found = sides(first.program)
    if found is None or most < 2:
        return
    left, right = found
    rows: dict[tuple[Operand, ...], int] = {}
    columns: dict[tuple[Operand, ...], int] = {}
    grid: dict[tuple[int, int], int] = {}
    for number, task in tasks.items():
        row = rows.setdefault(tuple(task.operands[slot] for slot in left), len(rows))
        column = columns.setdefault(tuple(task.operands[slot] for slot in right), len(columns))
        if (row, column) in grid:
            return
        grid[row, column] = number
    specs = schedule(first.program).specs
    block = sum(nbytes(specs[output]) for output in first.program.outputs)
    most = min(most, max(1, int(memory / 1.5 / max(1, block))))
    height, width = rectangle(len(rows), len(columns), most)
    for top in range(0, len(rows), height):
        for start in range(0, len(columns), width):
            group = [
                grid[row, column]
                for row in range(top, min(top + height, len(rows)))
                for column in range(start, min(start + width, len(columns)))
                if (row, column) in grid
            ]
            if len(group) > 1:
                yield group


def rectangle(rows: int, columns: int, most: int) -> tuple[int, int]:
    """The rectangle of at most `most` blocks that moves the fewest operands: the squarest one that divides well."""
    best, least = (1, 1), math.inf
    for height in range(1, min(rows, most) + 1):
        width = min(columns, most // height)
        tiles = math.ceil(rows / height) * math.ceil(columns / width)
        moved = math.ceil(columns / width) * rows + math.ceil(rows / height) * columns
        # Among equals the one of fewer, more even tiles.
        unevenness = (height * width * tiles - rows * columns) / (rows * columns)
        if moved * (1 + 0.1 * unevenness) < least:
            best, least = (height, width), moved * (1 + 0.1 * unevenness)
    return best

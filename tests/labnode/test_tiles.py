"""Super-tiles and tilings: pure arithmetic."""

import numpy as np
import pytest

from goblin_dask.graphs.builder import Builder
from goblin_dask.labnode.plan import GridTask, Leaf, Operand, Output
from goblin_dask.labnode.tiles import rectangle, sides, super_tiles
from goblin_dask.labnode.tiling import choose, super_tile
from goblin_dask.messages import ArraySpec, GridOffer

GB = 1 << 30


def block(side: int = 4, panels: int = 3):
    """One block of a product: a chain of `panels` products."""
    build = Builder()
    inputs = [build.input(ArraySpec((side, side), "float32")) for _ in range(2 * panels)]
    (total,) = build.add("matmul", inputs[:2])
    for panel in range(1, panels):
        (total,) = build.add("addmm", (total, *inputs[2 * panel : 2 * panel + 2]))
    return build.finish([total])[0]


def product_tasks(rows: int, columns: int, panels: int = 3):
    program = block(panels=panels)
    left, right = sides(program)
    tasks = {}
    for i, j in np.ndindex(rows, columns):
        operands = [None] * len(program.inputs)
        for k in range(panels):
            operands[left[k]], operands[right[k]] = Operand(("a", i, k)), Operand(("b", k, j))
        tasks[i * columns + j] = GridTask(program, tuple(operands), (Output(("c", i, j), Leaf(0)),))
    return tasks


def test_sides_are_the_factors():
    program = block()
    left, right = sides(program)
    assert sorted(left + right) == list(range(6))
    assert {node.operands[-2] for node in program.nodes} == set(left)


def test_a_slot_that_feeds_both_factors_has_no_sides():
    build = Builder()
    x = build.input(ArraySpec((3, 3), "float32"))
    assert sides(build.finish(build.add("matmul", (x, x)))[0]) is None


@pytest.mark.parametrize(
    ("rows", "columns", "most", "expected"),
    [(8, 8, 16, (4, 4)), (4, 4, 4, (2, 2)), (1, 9, 3, (1, 3)), (6, 1, 2, (2, 1)), (3, 3, 1, (1, 1)), (2, 2, 9, (2, 2))],
)
def test_rectangles_are_square_where_they_can_be(rows, columns, most, expected):
    assert rectangle(rows, columns, most) == expected


def test_super_tiles_cover_each_block_at_most_once():
    tasks = product_tasks(5, 7)
    groups = list(super_tiles(tasks, 6, GB))
    members = [number for group in groups for number in group]
    assert len(members) == len(set(members))
    assert max(map(len, groups)) <= 6
    for group in groups:
        rows, columns = {n // 7 for n in group}, {n % 7 for n in group}
        assert len(group) == len(rows) * len(columns)


def test_memory_bounds_a_super_tile():
    assert not list(super_tiles(product_tasks(4, 4), 16, 64))


def test_tiling_keeps_stored_chunks_of_a_good_size():
    offer = GridOffer(2, 1, memory=(GB, GB))
    tiling = choose((8192, 8192, 8192), 4, offer, (2048, 2048), (2048, 2048))
    assert (tiling.m, tiling.k, tiling.n) == (2048, 2048, 2048)


def test_tiling_gives_everybody_work():
    offer = GridOffer(8, 1, memory=(GB,) * 8)
    assert super_tile(8192, 8192, 4, offer) == 2048
    tiling = choose((1000, 300, 1000), 4, offer)
    assert (1000 / tiling.m) * (1000 / tiling.n) >= 16


def test_tiling_of_nothing():
    assert choose((0, 5, 3), 8, GridOffer(0, 0)).m >= 1

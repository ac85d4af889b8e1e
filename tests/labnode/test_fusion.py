"""Fused plans compute what the plans that they came from compute, with fewer tasks and fewer bytes."""

import dask.array as da
import numpy as np
import pytest

from goblin_dask.errors import InputError, TooLarge
from goblin_dask.labnode.fusion import fuse
from goblin_dask.labnode.lowering import lower
from goblin_dask.labnode.matmul import matmul
from goblin_dask.labnode.placement import place
from goblin_dask.labnode.price import Prices, price
from goblin_dask.messages import GridOffer
from goblin_dask.verify.check import plan_check
from tests.expressions import EXPRESSIONS, operands
from tests.interpreter import Interpreter

GB = 1 << 30
OFFER = GridOffer(2, 1, memory=(GB, GB), flops=2e11, local=True)


def lowered(collection):
    return lower(collection.__dask_graph__(), collection.__dask_keys__())


def traffic(plan):
    return sum(price(task.program).read + price(task.program).written for task in plan.grid)


@pytest.mark.full
@pytest.mark.parametrize("name", sorted(EXPRESSIONS))
def test_every_program_is_the_same_after_fusion(name, sample, tmp_path):
    if name not in sample(sorted(EXPRESSIONS), 25):
        pytest.skip("not in the sample")
    collection = EXPRESSIONS[name](*operands("plain", tmp_path))
    keys = list(collection.__dask_keys__()) if not isinstance(collection, da.Array) else None
    plan = lower(collection.__dask_graph__(), keys or collection.__dask_keys__())
    fused = fuse(plan, OFFER)
    assert len(fused.grid) <= len(plan.grid)
    assert sum(task.origins for task in fused.grid) >= sum(task.origins for task in plan.grid)
    before, after = Interpreter().run(plan), Interpreter().run(fused)
    assert before.keys() == after.keys()
    for key, value in before.items():
        if isinstance(value, np.ndarray):
            np.testing.assert_allclose(after[key], value, rtol=1e-10, atol=1e-10, equal_nan=True)


def test_a_producer_that_is_read_by_another_one_is_kept():
    """The permutation of an LU decomposition, computed back: transposes that several tasks read, and each other."""
    a = np.diag([7.0, 8, 4, 6, 3, 5])
    p, lower_part, upper_part = da.linalg.lu(da.from_array(a, chunks=2))
    plan = lowered(da.allclose(p.dot(lower_part).dot(upper_part), a))
    fused = fuse(plan, OFFER)
    made = {output.key for task in fused.grid for output in task.outputs} | {task.key for task in fused.lab}
    assert {operand.key for task in fused.grid for operand in task.operands} <= made
    assert all(Interpreter().run(fused).values())


def big(side, chunk, seed=0):
    return da.random.default_rng(seed).random((side, side), chunks=chunk)


@pytest.mark.parametrize("make", [lambda x, y: x @ y, lambda x, y: da.tensordot(x, y, axes=1), matmul])
def test_a_product_becomes_super_tiles_that_algebra_checks(make):
    plan = lowered(make(big(4096, 512), big(4096, 512, 1)))
    fused = fuse(plan, OFFER)
    assert len(fused.grid) == 4
    assert all(plan_check(task.program).method == "algebraic" for task in fused.grid)
    assert {node.operator for task in fused.grid for node in task.program.nodes} == {"matmul", "addmm"}
    assert traffic(fused) < traffic(plan) / 2


def test_no_work_is_put_behind_a_contraction():
    fused = fuse(lowered((big(2048, 512) @ big(2048, 512, 1)).sum(axis=0)), OFFER)
    heavy = [task for task in fused.grid if price(task.program).contraction]
    assert all(plan_check(task.program).method == "algebraic" for task in heavy)
    assert sum(price(task.program).contraction for task in heavy) == pytest.approx(2 * 2048**3)


def test_an_elementwise_prologue_moves_into_the_contraction():
    x = big(2048, 512)
    fused = fuse(lowered((x - 0.5) @ da.exp(x)), OFFER)
    assert all(price(task.program).contraction for task in fused.grid)
    assert all(plan_check(task.program).method == "algebraic" for task in fused.grid)


def test_small_tasks_are_bundled():
    plan = lowered(da.exp(big(200, 10)))
    assert len(plan.grid) == 400
    assert len(fuse(plan, OFFER).grid) <= 16


def test_joined_tasks_never_wait_for_each_other():
    """A grid task that depends on another through the laboratory is not bundled with it."""
    x = big(20, 10)
    y = da.map_blocks(lambda b: np.array(b.tolist()), x + 1, dtype="f8", meta=np.empty((0, 0)))
    collection = (y + 1).sum()
    plan = lowered(collection)
    assert plan.lab
    result = Interpreter().run(fuse(plan, OFFER))
    np.testing.assert_allclose(next(iter(result.values())), collection.compute(scheduler="sync"))


def test_memory_bounds_what_is_fused():
    small = GridOffer(2, 1, memory=(8 << 20,) * 2, local=True)
    prices = Prices()
    fused = fuse(lowered(big(2048, 256) @ big(2048, 256, 1)), small, prices)
    assert max(prices(task.program).peak for task in fused.grid) <= 8 << 20


def test_placement_weighs_bytes_against_arithmetic():
    slow = GridOffer(2, 1, memory=(GB, GB), bandwidth=10e6)
    x = big(2048, 1024)
    adding, product = lowered(x + 1), fuse(lowered(big(8192, 2048) @ big(8192, 2048, 1)), slow)
    assert not any(task.offload for task in place(adding, slow).grid)
    assert all(task.offload for task in place(adding, slow, "always").grid)
    assert all(task.offload for task in place(product, OFFER).grid)
    assert not any(task.offload for task in place(product, OFFER, "never").grid)
    assert {task.reason for task in place(adding, slow).grid} == {"moving its data takes longer than computing it"}
    assert not any(task.offload for task in place(product, GridOffer(0, 0)).grid)
    assert {task.reason for task in product.grid} == {"there are no volunteers"}


def test_a_task_that_fits_nobody_is_refused_with_the_numbers():
    tiny = GridOffer(1, 1, memory=(1 << 20,), local=True)
    with pytest.raises(TooLarge, match=r"needs [\d.]+ [GM]B .* offers 1\.05 MB: rechunk"):
        place(lowered(big(2048, 1024) @ big(2048, 1024)), tiny)


def test_another_word_for_offload_is_refused():
    with pytest.raises(InputError, match="auto"):
        place(lowered(big(4, 2) + 1), OFFER, "sometimes")

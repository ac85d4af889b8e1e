"""Programs of ``dask.array``, lowered and run in this process, against Dask's own scheduler."""

from __future__ import annotations

import dask
import dask.array as da
import numpy as np
import pytest
import zarr

from goblin_dask.errors import InputError
from goblin_dask.graphs.capture import selfcheck
from goblin_dask.graphs.capture.dask_internals import Request
from goblin_dask.labnode.client import declared
from goblin_dask.labnode.lowering import check_declared, lower, summary
from goblin_dask.messages import ArraySpec
from tests.expressions import DATA_DEPENDENT, EXPRESSIONS, SUMMING, VARIANTS, operands
from tests.interpreter import Interpreter

pytestmark = pytest.mark.filterwarnings("ignore::dask.array.core.PerformanceWarning", "ignore:invalid value")


def agree(got, want, summing, scale):
    """Bit for bit, or within twice the bound of an honest sum's error."""
    got, want = np.asarray(got), np.asarray(want)
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    if summing and want.dtype.kind in "fc":
        bound = 2 * scale * np.finfo(want.dtype).eps * max(1.0, float(np.abs(want).max(initial=0)))
        np.testing.assert_allclose(got, want, rtol=0, atol=bound)
    else:
        np.testing.assert_array_equal(got, want)


@pytest.fixture(scope="module")
def shares():
    """By variant and program: grid tasks, and all tasks that count."""
    return {}


def cases():
    for variant in VARIANTS:
        for name in EXPRESSIONS:
            yield pytest.param(variant, name, id=f"{variant}-{name}")


@pytest.mark.full
@pytest.mark.parametrize(("variant", "name"), list(cases()))
def test_every_program_in_every_variant(variant, name, tmp_path, full, shares):
    if not full and hash_of(variant + name) % 4 and variant != "plain":
        pytest.skip("by default a quarter of the variants")
    x, y, z = operands(variant, tmp_path)
    if (variant, name) == ("one_element_chunks", "gradient"):
        with pytest.raises(ValueError, match="Chunk size must be larger"):
            EXPRESSIONS[name](x, y, z)
        return
    collection = EXPRESSIONS[name](x, y, z)
    want = collection.compute(scheduler="sync")
    scheduler = Interpreter()
    got = collection.compute(scheduler=scheduler)
    if isinstance(want, np.ma.MaskedArray):
        assert np.ma.allequal(got, want)
    agree(got, want, name in SUMMING, x.shape[0] ** 2)
    assert type(got) is type(want)
    counts = summary(scheduler.plans[0])
    grid = counts["grid"] + scheduler.late.count(True)
    total = counts["grid"] + counts["lab"] + counts["dynamic"]
    shares.setdefault(variant, {})[name] = (grid, total)
    if name not in DATA_DEPENDENT:
        assert grid == total, counts["reasons"]


def test_nearly_all_tasks_are_for_the_grid(shares, report):
    """Of the programs above that were run; alone it has nothing to count."""
    for variant, rows in shares.items():
        grid, total = (sum(row[i] for row in rows.values()) for i in (0, 1))
        fewer = [f"{name} {some} of {every}" for name, (some, every) in rows.items() if some < every]
        report(
            f"lowering, {variant}: {grid} of {total} tasks are for the grid ({grid / total:.1%}); {', '.join(fewer)}"
        )
        assert grid >= 0.9 * total


def hash_of(text):
    return sum(map(ord, text))


def blocks(function, **kwargs):
    x = da.from_array(np.arange(12.0).reshape(4, 3), chunks=(2, 3))
    collection = da.map_blocks(function, x, **kwargs)
    scheduler = Interpreter()
    got = collection.compute(scheduler=scheduler)
    return got, collection.compute(scheduler="sync"), scheduler.plans[0]


def test_a_branch_on_the_type_runs_in_the_laboratory():
    got, want, plan = blocks(lambda b: b + 1 if isinstance(b, np.ndarray) else b + 2, dtype=float)
    np.testing.assert_array_equal(got, want)
    assert not plan.grid
    assert {task.reason for task in plan.lab if task.kind == "lab"} == {
        "self-check: the function and its recording give different results"
    }


def test_noise_is_drawn_in_the_laboratory_for_each_block():
    x = da.zeros((6, 3), chunks=(2, 3))
    scheduler = Interpreter()
    noise = da.map_blocks(lambda b: b + np.random.normal(size=b.shape), x).compute(scheduler=scheduler)
    assert not scheduler.plans[0].grid
    assert len(np.unique(noise)) == 18


def test_block_numbers_are_constants_of_their_blocks():
    got, want, plan = blocks(lambda b, block_id=None: b * block_id[0], dtype=float)
    np.testing.assert_array_equal(got, want)
    assert len(plan.grid) == 2


def test_blocks_unlike_their_declaration_have_the_specs_that_they_have():
    x = da.ones(6, chunks=3)
    collection = x.map_blocks(lambda b: b.astype("f4")[:2], dtype="i8")
    plan = lower(Request.of_collections([collection]), None)
    assert {(spec.shape, spec.dtype) for spec in (plan.specs[key] for key in plan.keys)} == {((2,), "float32")}
    with pytest.raises(InputError, match=r"declared int64 \(3,\), but its function returns float32 \(2,\)"):
        check_declared(declared(collection), plan.specs)
    wrong = x.map_blocks(lambda b: b.astype("f4"), dtype="i8")
    with pytest.raises(InputError, match=r"declared int64 \(3,\), but its function returns float32 \(3,\)"):
        check_declared(declared(wrong), lower(Request.of_collections([wrong]), None).specs)
    percentile = da.percentile(x.astype("f4"), [50])  # Dask's own is float64 and says float32
    for fine in (x + 1, percentile, x.map_blocks(lambda b: b.astype("f4"), dtype="f8")):
        check_declared(declared(fine), lower(Request.of_collections([fine]), None).specs)


def test_one_name_for_different_data_is_refused():
    zeros, ones = (da.from_array(array, name="in") for array in (np.zeros(2), np.ones(2)))
    with pytest.raises(InputError, match="have the same name 'in'"):
        Request.of_collections([zeros, ones + 1])
    Request.of_collections([zeros, da.from_array(np.zeros(2), name="in")])


@pytest.mark.parametrize(
    "make",
    [
        lambda value: da.from_array(zarr.full(2, value), name="in"),
        lambda value: da.full(2, value, name="in"),
        lambda value: da.ones(4, chunks=2).map_blocks(lambda block: block + value, name="in", dtype=float),
    ],
)
def test_one_chosen_name_for_different_tasks_is_refused(make):
    with pytest.raises(InputError, match=r"have the same name '(original-)?in'"):
        Request.of_collections([make(0.0), make(1.0) + 1])
    Request.of_collections([make(0.0), make(0.0) + 1, make(0.0).persist(scheduler="sync") + 2])


def test_large_blocks_of_library_functions_are_checked_on_small_ones(monkeypatch):
    sizes = []
    confirm = selfcheck.confirm

    def watched(call, operands, literals, traced, seed=0):
        sizes.extend(spec.shape for spec in operands if isinstance(spec, ArraySpec))
        return confirm(call, operands, literals, traced, seed)

    monkeypatch.setattr(selfcheck, "confirm", watched)
    x = da.zeros((4096, 8192), chunks=4096)
    plan = lower(Request.of_collections([x.T @ x]), None)
    assert summary(plan)["share"] == 1.0
    assert len(sizes) >= 3
    assert max(max(shape) for shape in sizes) < 100
    sizes.clear()
    y = da.zeros((4096, 4096), chunks=4096)
    lower(Request.of_collections([y.map_blocks(lambda b: b[:2], chunks=((2,), (4096,)))]), None)
    assert sizes == [(4096, 4096)]


def test_literals_that_differ_in_type_or_sign_do_not_share_a_program():
    x = da.from_array(np.array([1.0, -1.0]), chunks=1)
    results = [da.map_blocks(np.multiply, x, value, dtype=float) for value in (0.0, -0.0, 0, False)]
    got = dask.compute(*results, scheduler=Interpreter())
    for result, array in zip(results, got, strict=True):
        want = result.compute(scheduler="sync")
        np.testing.assert_array_equal(np.signbit(array), np.signbit(want))


def test_nothing_is_read_while_lowering(tmp_path, monkeypatch):
    da.ones((8, 8), chunks=4).to_zarr(str(tmp_path / "a"))
    x = da.from_zarr(str(tmp_path / "a"))

    def read(*args):
        raise AssertionError("an element was read")

    monkeypatch.setattr(zarr.Array, "__getitem__", read)
    plan = lower(Request.of_collections([(x @ x).sum()]), None)
    sources = [task for task in plan.lab if task.kind == "source"]
    assert len(sources) == 4
    assert all(task.region is not None for task in sources)
    assert summary(plan)["share"] == 1.0


def test_stores_are_sinks_and_run_once(tmp_path):
    x = da.from_array(np.arange(16.0).reshape(4, 4), chunks=2)
    scheduler = Interpreter()
    with dask.config.set(scheduler=scheduler):
        (da.exp(x) + 1).to_zarr(str(tmp_path / "b"))
    (plan,) = scheduler.plans
    assert sum(task.kind == "sink" for task in plan.lab) == 4
    assert len(plan.grid) == 8
    np.testing.assert_array_equal(zarr.open_array(str(tmp_path / "b"))[...], np.exp(np.arange(16.0).reshape(4, 4)) + 1)


def test_optimised_graphs_are_taken_apart():
    x = da.from_array(np.arange(16.0).reshape(4, 4), chunks=2)
    collection = (da.exp(x) + 1).sum(axis=0)
    (optimised,) = dask.optimize(collection)
    plan = lower(dict(optimised.dask), optimised.__dask_keys__())
    assert summary(plan)["share"] == 1.0
    assert len(plan.grid) >= 8
    got = Interpreter()(dict(optimised.dask), optimised.__dask_keys__())
    np.testing.assert_array_equal(np.concatenate(got), collection.compute(scheduler="sync"))


def test_plain_dicts_and_delayed_objects():
    assert Interpreter()({"a": 1, "b": (lambda a: a + 1, "a")}, ["b", ["a"]]) == (2, (1,))
    value = dask.delayed(lambda a, b: a + b)(np.ones(3), 2)
    np.testing.assert_array_equal(value.compute(scheduler=Interpreter()), [3, 3, 3])


def test_optimised_graphs_within_delayed_objects_are_taken_apart():
    x = da.from_array(np.arange(12.0), chunks=3)
    spread = dask.delayed(lambda total, mean: total / mean)(((x - x.mean()) ** 2).sum(), x.mean())
    scheduler = Interpreter()
    got = spread.compute(scheduler=scheduler)
    assert got == pytest.approx(spread.compute(scheduler="sync"))
    assert summary(scheduler.plans[0])["grid"] >= 12


def test_several_collections_at_once():
    x = da.from_array(np.arange(6.0), chunks=2)
    got = dask.compute(x + 1, {"a": x.sum()}, 5, scheduler=Interpreter())
    want = dask.compute(x + 1, {"a": x.sum()}, 5, scheduler="sync")
    np.testing.assert_array_equal(got[0], want[0])
    assert got[1:] == want[1:]


def test_persist_gives_a_collection():
    x = da.from_array(np.arange(6.0), chunks=2)
    kept = (x + 1).persist(scheduler=Interpreter())
    np.testing.assert_array_equal(kept.compute(scheduler="sync"), np.arange(6.0) + 1)


def test_errors_of_functions_are_their_own():
    def fails(block):
        raise ZeroDivisionError("mine")

    x = da.ones(4, chunks=2)
    with pytest.raises(ZeroDivisionError, match="mine"):
        da.map_blocks(fails, x, dtype=float, meta=np.ones(0)).compute(scheduler=Interpreter())


def test_a_function_that_raises_on_drawn_data_is_compared_on_the_real_ones():
    def picky(block):
        if not block.sum() == 6.5:
            raise ValueError("only these")
        return block * 2

    class Traced:
        """Traces, for the branch is hidden from the recording; raises on all but one block."""

        def __call__(self, block):
            return picky(block) if isinstance(block, np.ndarray) else block * 2

    x = da.from_array(np.array([2.5, 4.0]), chunks=2)
    scheduler = Interpreter()
    got = da.map_blocks(Traced(), x, dtype=float, meta=np.ones(0)).compute(scheduler=scheduler)
    assert got.tolist() == [5, 8]
    assert len(scheduler.plans[0].dynamic) == 1
    assert scheduler.late == [True]


def test_one_program_for_all_blocks_of_a_product():
    x = da.from_array(np.ones((12, 12)), chunks=4)
    plan = lower(Request.of_collections([x @ x]), None)
    products = {task.program.digest for task in plan.grid if any(n.operator == "matmul" for n in task.program.nodes)}
    assert len(products) == 1


def test_masked_arrays_keep_their_masks():
    a = np.ma.array(range(8), mask=[0, 0, 1, 0, 0, 1, 0, 1])
    x = da.from_array(a, chunks=3)
    got = x[[2, 6]].compute(scheduler=Interpreter())
    assert got.mask.tolist() == [True, False]


def test_empty_blocks_and_scalars():
    x = da.from_array(np.arange(6.0), chunks=2)
    scheduler = Interpreter()
    assert x[x > 10].compute(scheduler=scheduler).shape == (0,)
    assert (da.zeros((2, 0), chunks=2) + 1).compute(scheduler=Interpreter()).shape == (2, 0)
    assert isinstance(x.sum().compute(scheduler=Interpreter()), np.float64)

"""Small inputs on which systems like this one have failed people, through a whole grid, with their right values."""

import threading

import dask.array as da
import numpy as np
import pytest

from goblin_dask.errors import InputError
from goblin_dask.graphs import cost
from goblin_dask.graphs.builder import Builder
from goblin_dask.graphs.capture.dask_internals import Request
from goblin_dask.graphs.execute import execute
from goblin_dask.labnode.lowering import lower
from goblin_dask.labnode.matmul import matmul
from goblin_dask.messages import ArraySpec
from goblin_dask.testing.inprocess import InProcessGrid


@pytest.fixture(scope="module")
def grid(tmp_path_factory):
    with InProcessGrid(volunteers=2, directory=tmp_path_factory.mktemp("grid")) as grid:
        yield grid


@pytest.fixture
def lab(grid):
    return grid.lab


@pytest.mark.parametrize("panels", [2, 3, 6])
@pytest.mark.parametrize(
    ("left", "right"),
    [
        (np.full((2, 6), 11, "i1"), np.full((6, 2), 7, "i1")),
        (np.full((1, 6), 200, "u1"), np.full((6, 1), 200, "u1")),
        (np.ones((2, 6), bool), np.ones((6, 2), bool)),
        (np.zeros((2, 6), bool), np.ones((6, 2), bool)),
    ],
    ids=["int8", "uint8", "bool", "no"],
)
def test_products_of_integers_and_booleans_are_numpys_however_they_are_cut(lab, left, right, panels):
    x, y = da.from_array(left, chunks=(1, panels)), da.from_array(right, chunks=(panels, 1))
    got = lab.compute(lab.matmul(x, y))
    assert got.dtype == left.dtype
    np.testing.assert_array_equal(got, left @ right)


def test_shapes_that_do_not_match_are_refused_at_once(lab):
    with pytest.raises(InputError, match=r"shapes \(1,\) and \(3,\) do not match"):
        matmul(np.ones(1), np.ones(3))
    with pytest.raises(ValueError, match="mismatch"):  # Dask lets these pass: the block's own error, and at once
        lab.compute(da.dot(da.ones(1), da.ones(3)))


def test_no_thread_gets_the_rows_of_another():
    shape = (100_000, 3)
    build = Builder()
    x, eye = build.input(ArraySpec(shape, "float64")), build.input(ArraySpec((3, 3), "float64"))
    (turned,) = build.add("permute_dims", (eye,), axes=(1, 0))
    program, slots = build.finish(build.add("matmul", (x, turned)))
    ready, wrong, done = threading.Barrier(8), [], []

    def work(t):
        rows = t * np.ones(shape)
        ready.wait()
        for _ in range(3):
            operands = [rows, np.eye(3)]
            (result,) = execute(program, [operands[slot] for slot in slots])
            if not (result == t).all():
                wrong.append(t)
        done.append(t)

    threads = [threading.Thread(target=work, args=(t,)) for t in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(done) == list(range(8))
    assert not wrong


def test_a_product_and_its_transpose_agree(lab):
    random = np.random.default_rng(0)
    a, b = random.random((625, 5)), random.random((5, 625))
    x, y = da.from_array(a, chunks=(200, 5)), da.from_array(b, chunks=(5, 200))
    one, other = lab.compute(x @ y, (y.T @ x.T).T)
    np.testing.assert_allclose(one, other, rtol=2 * 5 * 2.0**-53)


def test_double_contraction(lab):
    x = da.from_array(np.arange(20.0).reshape(4, 5), chunks=(2, 3))
    assert lab.compute(da.tensordot(x, x, axes=2)) == 2470.0


def test_einsum_of_partials(grid, lab):
    x = da.ones((1024, 8, 8), chunks=(256, 4, 4))
    product = da.einsum("aij,akl->ijkl", x, x)
    peaks = [cost.peak(task.program) for task in lower(Request.of_collections([product]), None).grid]
    assert len(peaks) >= 64
    assert 0 < max(peaks) < grid.node.offer.memory[0]
    np.testing.assert_array_equal(lab.compute(product), np.full((8, 8, 8, 8), 1024.0))


def test_the_variance_of_complex_numbers_is_real(lab):
    z = da.from_array(np.array([-1j, 0, 1j]), chunks=1)
    got = lab.compute(z.var())
    assert got.dtype == np.float64
    assert got == pytest.approx(2 / 3, rel=1e-15)


def test_cumulative_sums_in_chunks_are_honest(lab):
    r = (np.random.default_rng(0).random((2, 1500)) * 1000).astype("f4")
    with lab.submit(da.from_array(r, chunks=(2, 500)).cumsum(axis=1)) as job:
        got = job.result()
        assert job.progress["rejected"] == 0
        assert job.progress["grid"] >= 1
    assert got.dtype == np.float32
    tolerance = 2 * np.arange(1, 1501) * 2.0**-24 * r.cumsum(axis=1, dtype="f8")
    assert (np.abs(got - r.cumsum(axis=1, dtype="f8")) <= tolerance).all()


def test_rows_alone_or_in_a_batch(lab):
    b = np.random.default_rng(0).random((90, 128))
    whole, rows = (
        lab.compute(da.from_array(np.ones((2, 90)), chunks=(size, 90)) @ da.from_array(b, chunks=-1)) for size in (2, 1)
    )
    np.testing.assert_allclose(whole, rows, rtol=2 * 90 * 2.0**-53)


def test_equal_names_for_different_data_are_refused(lab):
    zeros, ones = (da.from_array(array, name="in") for array in (np.zeros(2), np.ones(2)))
    with pytest.raises(InputError, match="have the same name 'in'"):
        lab.compute(zeros, ones + 1)
    with pytest.raises(InputError, match="have the same name 'in'"):  # Dask itself would answer ones for both
        lab.compute({"ones": ones}, [zeros])


class TestBlockUnlikeItsDeclaration:
    def test_refused_before_it_runs(self, lab):
        x = da.ones(6, chunks=3).map_blocks(lambda b: b.astype("f4")[:2], dtype="i8")
        with pytest.raises(InputError, match=r"declared int64 \(3,\), but .* float32 \(2,\)"):
            lab.compute(x)

    def test_refused_when_it_has_run(self, lab):
        def hidden(block):
            return np.asarray(block.tolist(), "f4")[:2]

        x = da.ones(6, chunks=3).map_blocks(hidden, dtype="i8", meta=np.empty(0, "i8"))
        with pytest.raises(InputError, match=r"block \(0,\) .*declared int64 \(3,\), but .* float32 \(2,\)"):
            lab.compute(x)

    def test_refused_when_it_is_to_be_written(self, lab, tmp_path):
        x = da.ones(6, chunks=3).map_blocks(lambda b: b[:2], dtype="f8")
        with pytest.raises(InputError, match=r"declared float64 \(3,\), but .* float64 \(2,\)"):
            lab.to_zarr(x, tmp_path / "w.zarr")
        assert list(tmp_path.iterdir()) == []

    def test_unknown_lengths_are_no_contradiction(self, lab):
        x = da.from_array(np.arange(6.0), chunks=3)
        np.testing.assert_array_equal(lab.compute(x[x > 2] + 1), [4, 5, 6])


class TestEmptyAndScalar:
    def test_empty_chunks_after_a_mask(self, lab):
        x = da.from_array(np.arange(12.0), chunks=3)
        np.testing.assert_array_equal(lab.compute(x[x > 8] * 2), [18, 20, 22])
        assert lab.compute(x[x > 20].sum()) == 0

    def test_an_empty_reshape(self, lab):
        x = np.zeros((2, 0, 0))
        assert lab.compute(da.from_array(x, chunks=-1).reshape((2, -1))).shape == x.reshape((2, -1)).shape
        with pytest.raises(TypeError, match="empty iterable"):  # Dask's own
            da.from_array(x, chunks=1).reshape((2, -1))

    def test_scalars(self, lab):
        got = lab.compute(da.from_array(np.array(3.0), chunks=()) + 1)
        assert got.shape == ()
        assert got == 4

    def test_products_over_nothing(self, lab):
        x = da.from_array(np.zeros((3, 0)), chunks=(2, 1))
        np.testing.assert_array_equal(lab.compute(x @ x.T), np.zeros((3, 3)))
        y = da.from_array(np.ones((3, 2)), chunks=((1, 0, 2), (2,)))
        np.testing.assert_array_equal(lab.compute(y @ y.T), np.full((3, 3), 2.0))


class TestMaskedAndObjects:
    def test_the_mask_survives_fancy_indexing(self, lab):
        a = np.ma.array(range(8), mask=[0, 0, 1, 0, 0, 1, 0, 1])
        got = lab.compute(da.from_array(a, chunks=3)[[2, 6]])
        assert isinstance(got, np.ma.MaskedArray)
        assert got.mask.tolist() == [True, False]
        assert got[1] == 6

    def test_objects_are_refused_by_name(self, lab, tmp_path):
        objects = da.from_array(np.array([None, 1], object), chunks=1)
        with pytest.raises(InputError, match="dtype object"):
            lab.matmul(objects, objects)
        with pytest.raises(InputError, match="objects"):
            lab.to_zarr(objects, tmp_path / "o.zarr")


def test_payloads_of_nan_and_the_sign_of_zero_come_back(lab):
    bits = np.array([0x7FC00001, 0x7F800001, 0x80000000], "u4").view("f4")
    got = lab.compute(da.from_array(bits, chunks=2)[::-1])
    assert got.view("u4").tolist() == bits[::-1].view("u4").tolist()


class TestDataThatAProgramIsNotFor:
    """What the grid cannot compute is done by the researcher's own functions, and so is their error."""

    def test_the_functions_own_error(self, lab):
        singular = da.from_array(np.zeros((4, 4)), chunks=(4, 4))
        with pytest.raises(np.linalg.LinAlgError, match=r"[Ss]ingular"):
            lab.compute(da.map_blocks(np.linalg.inv, singular, dtype=float))

    def test_an_index_that_is_out_of_range(self, lab):
        x, index = da.from_array(np.arange(4.0), chunks=4), da.from_array(np.array([1, 7]), chunks=2)
        picked = da.map_blocks(lambda a, i: a[i], x, index, dtype=float, chunks=((2,),), meta=np.empty(0))
        with pytest.raises(IndexError, match="out of bounds"):
            lab.compute(picked)

    def test_counts_that_are_larger_than_was_expected(self, lab):
        z = np.array([0, 1, 5, 1])
        x = da.from_array(z, chunks=2)
        counted = da.map_blocks(lambda b: np.bincount(b, minlength=3), x, dtype=int, chunks=((np.nan, np.nan),))
        np.testing.assert_array_equal(lab.compute(counted + 1), [2, 2, 1, 1, 2, 1, 1, 1, 2])


def test_a_function_that_changes_its_block_changes_a_copy(lab):
    def hidden(block):
        block[block.argmax().item()] = 0  # a branch on data: it runs in the laboratory
        return block

    x = da.from_array(np.array([1.0, 2.0, 3.0, 1.0]), chunks=2)
    doubled = x * 2
    changed, same = lab.compute(doubled.map_blocks(hidden, dtype=float, meta=np.empty(0)), doubled)
    np.testing.assert_array_equal(changed, [2, 0, 0, 2])
    np.testing.assert_array_equal(same, [2, 4, 6, 2])

"""The product check: honest products of every kind pass in every order; what is not honest does not."""

import itertools

import numpy as np
import pytest

from goblin_dask.testing.matrices import ORDERS, operands
from goblin_dask.verify.contraction import Contraction, Tile, group_columns
from goblin_dask.verify.norms import BlockSquares, estimated_squares, prepare
from goblin_dask.verify.operands import Operand, OperandStatistics, Scratch
from goblin_dask.verify.product import check_product
from goblin_dask.verify.projection import project_right, times_in_parts
from goblin_dask.verify.rows import tf32

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # overflow and NaN are among the subjects


def check(a, b, c, seed=0):
    contraction = Contraction([Operand(a)], [Operand(b)], [Tile(c, ((0, 0),))])
    return check_product(contraction, np.random.default_rng(seed))


def test_biased_rounding_is_settled_not_blamed():
    a, b = np.full((60, 3000), 0.1, np.float32), np.full((3000, 200), 0.1, np.float32)
    c = ORDERS["sequential"](a, b)
    findings = [check(a, b, c, seed=seed) for seed in range(6)]
    assert {finding.verdict for finding in findings} == {"accepted"}
    # every row errs alike, so the projections look suspicious of all or, where their signs happen to cancel, of none
    settled = [finding.settled for finding in findings]
    assert set(settled) <= {0, 60}
    assert settled.count(60) > 3


@pytest.mark.parametrize("shape", [(300, 60, 1300), (64, 128, 96)])
def test_sparse_rows_whose_sampled_columns_are_exact_are_not_suspicious(shape):
    for seed in range(12):
        a, b = operands("sparse", "sparse", shape, np.random.default_rng(seed))
        found = check(a, b, a @ b, seed=seed)
        assert (found.verdict, found.settled) == ("accepted", 0)


@pytest.mark.parametrize("layout", ["C", "F"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
def test_memory_order_and_dtype_do_not_matter(layout, dtype):
    rng = np.random.default_rng(4)
    a, b = (np.asarray(rng.standard_normal(shape), dtype, order=layout) for shape in ((90, 300), (300, 70)))
    c = (a.astype("f4") @ b.astype("f4")).astype(dtype) if dtype == "float16" else a @ b
    assert check(a, b, np.asarray(c, order=layout), seed=1).verdict == "accepted"
    wrong = c.copy()
    wrong[5, 6] += np.asarray(0.5, dtype)
    assert check(a, b, wrong, seed=1).verdict == "wrong"


@pytest.mark.parametrize("kind", ["normal", "uniform", "scaled rows", "scaled columns", "huge row", "integers"])
def test_one_entry_at_the_threshold_is_never_used(kind):
    rng = np.random.default_rng(5)
    a, b = operands(kind, "normal", (100, 800, 300), rng)
    c = a @ b
    threshold = check(a, b, c, seed=2).thresholds[0]
    exact = a.astype("f8") @ b
    size = np.abs(a).max(axis=1)
    typical = np.flatnonzero(size < 100 * np.median(size)) if kind == "huge row" else np.arange(100)
    for _ in range(20):
        wrong = c.copy()
        at = rng.choice(typical), rng.integers(300)
        wrong[at] += np.float32(threshold * rng.choice([-1, 1])) * 1.01
        if abs(wrong[at] - exact[at]) < threshold:  # too small to be stored beside the entry
            continue
        assert check(a, b, wrong, seed=rng.integers(2**32)).verdict == "wrong"


def test_every_column_counts_whatever_its_scale():
    """One norm for all columns would hide a wrong sign in a small one."""
    rng = np.random.default_rng(6)
    a, b = operands("normal", "scaled columns", (60, 500, 1500), rng)
    c = a @ b
    column = int(np.argmin(np.abs(b).max(axis=0)))
    c[:, column] *= -1
    assert check(a, b, c, seed=1).verdict == "wrong"


@pytest.mark.parametrize("kind", ["normal", "uniform", "offset", "lognormal", "low rank"])
@pytest.mark.parametrize("depth", [64, 1024, 4096])
def test_low_precision_is_recognised(kind, depth):
    rng = np.random.default_rng(7)
    a, b = operands(kind, kind, (48, depth, 130), rng)
    for seed in range(3):
        assert check(a, b, tf32(a) @ tf32(b), seed=seed).verdict != "accepted"


def test_a_missing_panel_is_wrong_even_where_it_is_a_hundredth():
    rng = np.random.default_rng(8)
    a, b = operands("normal", "normal", (64, 6400, 256), rng)
    assert check(a, b, a[:, 64:] @ b[64:], seed=1).verdict == "wrong"


def test_a_nan_is_not_accepted():
    """A comparison that rejects what is large would accept it."""
    a, b = operands("normal", "normal", (20, 30, 40), np.random.default_rng(9))
    c = a @ b
    for value in (np.nan, np.inf, -np.inf):
        wrong = c.copy()
        wrong[3, 4] = value
        finding = check(a, b, wrong)
        assert finding.verdict == "wrong"
        assert not finding.ratio <= 1
    assert check(a, b, np.full_like(c, np.nan)).verdict == "wrong"


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("side", ["left", "right", "both"])
def test_what_is_not_finite_is_compared_by_class(value, side):
    rng = np.random.default_rng(10)
    a, b = operands("normal", "normal", (40, 50, 60), rng)
    if side != "right":
        a[3, 4] = a[7, 7] = value
    if side != "left":
        b[5, 6] = value
    b[4] = np.where(np.arange(60) % 2, b[4], 0)  # infinity times zero
    for order in ("BLAS", "sequential", "pairwise", "reversed"):
        c = ORDERS[order](a, b)
        assert check(a, b, c).verdict == "accepted", order
    special = np.argwhere(~np.isfinite(c))[0]
    wrong = c.copy()
    wrong[tuple(special)] = 1.0
    assert check(a, b, wrong).verdict == "wrong"
    wrong = c.copy()
    wrong[20, 20] += 1.0
    assert check(a, b, wrong).verdict == "wrong"
    wrong = c.copy()
    wrong[20, 20] = np.nan
    assert check(a, b, wrong).verdict == "wrong"


def test_where_sums_may_overflow_nothing_is_said():
    a, b = (np.full(shape, 1e19, np.float32) * np.float32(1.5) for shape in ((8, 40), (40, 8)))
    b[::2] *= -1
    finding = check(a, b, a @ b)
    assert finding.verdict == "unproven"
    assert "largest number" in finding.reason


def test_a_tf32_answer_and_a_cancelling_entry():
    """Tolerances come from the magnitudes that are summed, not from the entry that is left."""
    a = np.array([[0.83899, 0.54414, 3.3142e5], [-0.54414, 0.83899, 4.6909e6], [0, 0, 1]], np.float32)
    b = np.array([[0.83899, -0.54414, 2.2745e6], [0.54414, 0.83899, -4.1160e6], [0, 0, 1]], np.float32)
    honest, other = a @ b, tf32(a) @ tf32(b)
    assert abs(other[0, 2] - honest[0, 2]) > 1000
    for seed in range(50):
        for order in ORDERS.values():
            assert check(a, b, order(a, b), seed=seed).verdict == "accepted"
        assert check(a, b, other, seed=seed).verdict == "wrong"


def test_tiles_share_operands_and_each_is_checked():
    rng = np.random.default_rng(11)
    a = [rng.standard_normal((50, 40), np.float32) for _ in range(6)]
    b = [rng.standard_normal((40, 70), np.float32) for _ in range(6)]
    tiles = []
    for i, j in itertools.product(range(2), range(2)):
        terms = tuple((3 * i + l, 3 * j + l) for l in range(3))
        tiles.append(Tile(sum(a[x] @ b[y] for x, y in terms), terms))
    left, right = [Operand(x) for x in a], [Operand(x) for x in b]
    assert check_product(Contraction(left, right, tiles), rng).verdict == "accepted"
    for broken in range(4):
        wrong = [Tile(t.output.copy(), t.terms) for t in tiles]
        wrong[broken].output[1, 2] *= 2
        assert check_product(Contraction(left, right, wrong), rng).verdict == "wrong"


def test_statistics_are_kept_and_bounded_and_change_nothing():
    rng = np.random.default_rng(13)
    a, b = operands("normal", "normal", (50, 300, 200), rng)
    statistics = OperandStatistics(limit=16 * 1024)
    for number in range(8):
        contraction = Contraction(
            [Operand(a, key=("a", number))], [Operand(b, key=("b", number))], [Tile(a @ b, ((0, 0),))]
        )
        first = check_product(contraction, np.random.default_rng(number), statistics)
        again = check_product(contraction, np.random.default_rng(number), statistics)
        assert first == again
        assert 0 < statistics.nbytes <= statistics.limit
    assert statistics.get(("squares", ("b", 0))) is None
    assert statistics.get(("squares", ("b", 7))) is not None


@pytest.mark.parametrize("size", [1.0, 0.0, 1e-22, 1e22])
@pytest.mark.parametrize("order", "CF")
def test_norms_of_blocks_lose_nothing_in_single_precision(size, order):
    rng = np.random.default_rng(4)
    b = np.asarray(rng.standard_normal((40, 2500), np.float32), order=order)
    b[5], b[7, 9] = size * b[5], np.inf
    contraction = Contraction([Operand(b.T)], [Operand(b)], [Tile(b.T @ b, ((0, 0),))])
    group, scratch = group_columns(contraction)[0], Scratch()
    prepare(group, contraction, rng, scratch, None)
    squares = BlockSquares(contraction.right[0], group, scratch)
    for rows, columns in contraction.right[0]:
        squares.add(rows, columns, contraction.right[0].exact(rows, columns, scratch))
    scaled = np.delete(b, 9, axis=1).astype(np.float64) / np.delete(group.scale, 9)
    ends = [0, *(block.stop - 1 for block in group.blocks)]
    right = [(scaled[:, a:b] ** 2).sum(axis=1) for a, b in itertools.pairwise(ends)]
    np.testing.assert_allclose(squares.found(), right, rtol=1e-5)


@pytest.mark.parametrize("value", [0.0, 1e-6, 1e6, 1e25, np.nan])
def test_norms_that_a_share_of_the_rows_does_not_show_are_measured(value):
    rng = np.random.default_rng(21)
    a, b = operands("normal", "normal", (40, 1100, 60), rng)
    first = estimated_squares(Operand(b))
    assert np.all((first > 500) & (first < 2000))
    b[200:250, 9] = b[1099, 11] = value  # none of these rows counts for the estimate
    c = a @ b
    contraction = Contraction([Operand(a)], [Operand(b, key="b")], [Tile(c, ((0, 0),))])
    group, scratch, statistics = group_columns(contraction)[0], Scratch(), OperandStatistics()
    for estimate in (True, False, False):
        prepare(group, contraction, rng, scratch, statistics, estimate)
        side = project_right(0, group, contraction, np.empty((0, 1100)), np.empty((0, 60)), scratch, statistics)
        assert side.confirmed == (value <= 1e-6 or not estimate)
        if side.confirmed:
            norms = np.linalg.norm(np.delete(b / group.scale, group.bad, axis=1), axis=1)
            np.testing.assert_allclose(side.weights[0], norms, rtol=1e-5)
    assert check(a, b, c).verdict == "accepted"
    wrong = c.copy()
    wrong[5, 20] += 1.0
    assert check(a, b, wrong).verdict == "wrong"


@pytest.mark.parametrize("count", [4, 16])
@pytest.mark.parametrize("depth", [50, 128, 1000])
@pytest.mark.parametrize("order", "CF")
def test_parts_of_a_float32_projection_are_those_of_the_whole(order, depth, count):
    rng = np.random.default_rng(22)
    block = np.asarray(rng.standard_normal((30, depth), np.float32), order=order)
    vectors = rng.standard_normal((count, depth), np.float32)
    right = vectors.astype(np.float64) @ block.T
    np.testing.assert_allclose(times_in_parts(block, vectors), right, atol=1e-4)


def test_equal_and_opposite_errors_do_not_hide_each_other():
    """With plain signs, half of such pairs would pass each projection."""
    rng = np.random.default_rng(15)
    a, b = operands("normal", "normal", (30, 200, 100), rng)
    c = a @ b
    size = 10 * check(a, b, c, seed=0).thresholds[0]
    passed = 0
    for seed in range(300):
        wrong = c.copy()
        i, (j, l) = rng.integers(30), rng.choice(100, 2, replace=False)
        wrong[i, j] += size
        wrong[i, l] -= size
        passed += check(a, b, wrong, seed=seed).verdict == "accepted"
    assert passed <= 3


def test_empty_products_are_checked():
    for m, k, n in ((0, 3, 4), (3, 0, 4), (3, 4, 0)):
        a, b = np.ones((m, k), np.float32), np.ones((k, n), np.float32)
        assert check(a, b, a @ b).verdict == "accepted"
    assert check(np.ones((3, 0), "f4"), np.ones((0, 4), "f4"), np.ones((3, 4), "f4")).verdict == "wrong"

"""Integer products are checked exactly, modulo their width."""

import numpy as np
import pytest

from goblin_dask.verify.contraction import Contraction, Tile
from goblin_dask.verify.integers import check_integers, count_booleans
from goblin_dask.verify.operands import Operand, OperandStatistics


def check(a, b, c, seed=0, statistics=None):
    contraction = Contraction([Operand(a, key="a")], [Operand(b, key="b")], [Tile(c, ((0, 0),))])
    return check_integers(contraction, np.random.default_rng(seed), statistics)


@pytest.mark.parametrize("dtype", ["i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8"])
@pytest.mark.parametrize("span", ["all", "small", "tiny"])
def test_every_width_and_the_highest_bit(dtype, span):
    info = np.iinfo(dtype)
    low, high = {"all": (info.min, info.max), "small": (max(info.min, -100), 100), "tiny": (0, 1)}[span]
    rng = np.random.default_rng(1)
    a, b = (rng.integers(low, high, shape, dtype, endpoint=True) for shape in ((20, 60), (60, 30)))
    c = a @ b
    statistics = OperandStatistics()
    for seed in range(5):
        reason, miss = check(a, b, c, seed, statistics)
        assert reason == ""
        assert 0 <= miss <= 2.0**-40
        for bit in (0, info.bits // 2, info.bits - 1):
            wrong = c.copy()
            view = wrong.view(f"u{info.bits // 8}")
            view[3, 4] ^= view.dtype.type(1 << bit)
            assert check(a, b, wrong, seed, statistics)[0]


def test_extremes_have_no_absolute_value_of_their_own_dtype():
    a, b = np.full((3, 4), -(2**63), "i8"), np.full((4, 5), -1, "i8")
    assert check(a, b, a @ b)[0] == ""
    assert check(a, b, (a @ b) + 1)[0]


def test_a_sum_that_cannot_be_so_large_is_noticed():
    a, b = np.zeros((3, 4), "i8"), np.zeros((4, 5), "i8")
    wrong = a @ b
    wrong[1, 1] = 2**62
    assert check(a, b, wrong)[0]


def test_empty_sums_are_zero():
    a, b = np.ones((3, 0), "i8"), np.ones((0, 5), "i8")
    assert check(a, b, a @ b)[0] == ""
    assert check(a, b, (a @ b) + 1)[0]


def test_booleans_are_counted():
    rng = np.random.default_rng(0)
    a, b = rng.random((30, 9000)) < 0.01, rng.random((9000, 20)) < 0.01
    c = a @ b
    assert 0 < c.sum() < c.size
    assert np.array_equal(count_booleans(Contraction([Operand(a)], [Operand(b)], []), Tile(c, ((0, 0),))), c)

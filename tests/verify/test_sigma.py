"""The scale of rounding, for two honest runs."""

import numpy as np
import pytest

from goblin_dask.verify.sigma import distance, rms, sigma


def test_rms_neither_overflows_nor_forgets_small_numbers():
    assert rms(np.array([3e200, 4e200])) == pytest.approx(np.sqrt(12.5) * 1e200)
    assert rms(np.array([3e-200, 4e-200])) == pytest.approx(np.sqrt(12.5) * 1e-200)
    assert rms(np.array([3 + 4j])) == pytest.approx(5)
    assert rms(np.empty(0)) == 0


def test_a_true_zero_has_the_scale_of_its_own_noise():
    """A relative tolerance would find an error of 4e9 here."""
    noise = np.random.default_rng(0).standard_normal(1000) * 1e-7
    scale = sigma(noise.astype("f4"), noise * 1e-9, np.dtype("f4"))
    assert scale == pytest.approx(1e-7, rel=0.2)
    other = np.random.default_rng(1).standard_normal(1000) * 1e-7
    assert distance(noise, other, scale).ratio < 1
    assert distance(noise, other + 1e-4, scale).ratio > 1


def test_the_scale_is_never_below_the_last_rounding():
    y = np.ones(5)
    assert sigma(y.astype("f4"), y, np.dtype("f4")) == 2.0**-25
    assert sigma(y, y, np.dtype("f8")) == 2.0**-54


def test_double_precision_has_a_smaller_scale():
    y = np.random.default_rng(0).standard_normal(100)
    coarse = y.astype("f4").astype("f8")
    assert sigma(coarse, y, np.dtype("f8")) == pytest.approx(sigma(coarse, y, np.dtype("f4")) * 2.0**-29, rel=0.5)


def test_not_numbers_must_stand_in_the_same_places():
    a = np.array([1.0, np.nan, np.inf])
    assert distance(a, a.copy(), 1.0).ratio == 0
    for other in ([np.nan, 1.0, np.inf], [1.0, np.nan, -np.inf], [1.0, 2.0, np.inf]):
        assert not distance(a, np.array(other), 1.0).ratio <= 1

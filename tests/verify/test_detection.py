"""How small an error the product check finds: some points of the curves of ``benchmarks.detection``."""

import pytest

from benchmarks.detection import SIZED, WHOLE, Bench, Kind


@pytest.fixture(scope="module", params=["float32", "float64"])
def bench(request):
    return request.param, Bench(2048, request.param, rows=256, columns=1024)


SURE = {
    "one entry": (9e-3, 1.2e-10),
    "pair ±δ": (4e-2, 6e-10),
    "32 × 32 tile": (6e-4, 1.2e-11),
    "5 % of rows scaled": (8e-5, 1e-11),
    "all rows scaled": (3e-5, 1e-11),
    "rank-one bias": (3e-5, 8e-12),
}
"""Sizes in float32 and float64, by the root mean square of the product, that pass at most once in a hundred times."""


@pytest.mark.full
@pytest.mark.parametrize("name", SURE)
def test_what_is_to_be_found_is_found(bench, name, full):
    dtype, product = bench
    kind = Kind(SIZED[name].corrupt, 256, {})
    assert product.share(kind, SURE[name][dtype == "float64"], 200 if full else 5) >= 0.99
    assert product.share(kind, 0.0, 1) == 0


@pytest.mark.parametrize("name", WHOLE)
def test_low_precision_and_missing_terms_are_always_found(bench, name):
    dtype, product = bench
    if name != f"{dtype} operands":
        assert product.share_whole(WHOLE[name], 1) == 1

"""A part of a random array is what the whole array has there."""

import numpy as np
import pytest

from goblin_dask.errors import InputError
from goblin_dask.graphs.apply import apply
from goblin_dask.graphs.operators import CATALOGUE

KEY = np.asarray([3, 2**63 + 5], "uint64")
WHOLES = [(), (1,), (7,), (10, 9), (9, 11), (3, 4, 5), (5, 3, 4, 2), (0, 3)]


@pytest.mark.parametrize("name", ["bits", "uniform", "normal"])
@pytest.mark.parametrize("whole", WHOLES)
def test_a_part_is_part_of_the_whole(name, whole):
    rng = np.random.default_rng(len(whole))
    attributes = {} if name == "bits" else {"dtype": "float32"}
    array = apply(f"random_{name}", KEY, shape=whole, **attributes)
    for _ in range(30):
        start = [int(rng.integers(size)) if size else 0 for size in whole]
        shape = tuple(int(rng.integers(size - at + 1)) if size else 0 for at, size in zip(start, whole, strict=True))
        got = apply(f"random_{name}_part", KEY, np.asarray(start, "int64"), shape=shape, whole=whole, **attributes)
        expected = array[tuple(slice(at, at + size) for at, size in zip(start, shape, strict=True))]
        assert got.dtype == expected.dtype
        if name == "normal":  # NumPy's cosine differs in the last bit with the place in the array
            np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-7)
        else:
            np.testing.assert_array_equal(got, expected)


def test_a_part_far_into_an_array_that_is_larger_than_memory():
    whole, start = (2**24, 2**24), np.asarray([2**23 + 1, 12345], "int64")
    got = apply("random_bits_part", KEY, start, shape=(2, 5), whole=whole)
    for row in range(2):
        at = (2**23 + 1 + row) * 2**24 + 12345
        words = np.random.Philox(key=KEY, counter=at // 4).random_raw(8)
        np.testing.assert_array_equal(got[row], words[at % 4 : at % 4 + 5])


def test_a_part_over_the_edge_is_moved_back():
    whole = apply("random_uniform", KEY, shape=(5, 6))
    got = apply("random_uniform_part", KEY, np.asarray([9, -9], "int64"), shape=(2, 3), whole=(5, 6))
    np.testing.assert_array_equal(got, whole[3:, :3])


@pytest.mark.parametrize(
    ("start", "attributes", "text"),
    [
        ([0], {"shape": (2, 3), "whole": (5, 6)}, "2 axes is as many int64"),
        ([0, 0], {"shape": (2, 7), "whole": (5, 6)}, "is no part of one"),
        ([0, 0], {"shape": (2, 2), "whole": (2**40, 2**40)}, "more elements"),
        ([0, 0], {"shape": (2, 2), "whole": (5, 6), "dtype": "int8"}, "float32 or float64"),
    ],
)
def test_parts_that_are_none(start, attributes, text):
    with pytest.raises(InputError, match=text):
        apply("random_uniform_part", KEY, np.asarray(start, "int64"), **attributes)
    assert CATALOGUE["random_uniform_part"].since == 2

"""References back to arrays."""

import dask.array as da
import numpy as np
import pytest

from goblin_dask.graphs.capture.pytree import Leaf, flatten, is_array
from goblin_dask.labnode.assemble import Stored, Values, join
from goblin_dask.store.blobs import BlobStore
from goblin_dask.store.chunks import load_array, store_array


@pytest.fixture
def blobs(tmp_path):
    blobs = BlobStore(tmp_path)
    yield blobs
    blobs.close()


def stored(blobs, value):
    arrays, tree = flatten(value, is_array)
    return Stored(tree, tuple(store_array(blobs, array) for array in arrays))


@pytest.mark.parametrize("chunks", [(3, 4), (10, 9), (1, 9), ((2, 5, 3), (4, 5))])
def test_blocks_are_joined_as_dask_joins_them(blobs, chunks):
    x = da.from_array(np.random.default_rng(0).random((10, 9)), chunks=chunks)
    blocks = {
        (x.name, *index): stored(blobs, x.blocks[index].compute(scheduler="sync")) for index in np.ndindex(x.numblocks)
    }
    result = join(x.__dask_keys__(), blocks, lambda ref: load_array(blobs, ref))
    np.testing.assert_array_equal(result, x.compute(scheduler="sync"))
    assert result.flags.writeable


def test_what_does_not_fit_together_is_left_to_dask(blobs):
    def fetch(ref):
        return load_array(blobs, ref)

    ones, scalar = stored(blobs, np.ones(3)), stored(blobs, np.float64(1))
    masked = stored(blobs, np.ma.masked_greater(np.arange(3.0), 1))
    assert join([("x", 0), ("x", 1)], {("x", 0): ones, ("x", 1): scalar}, fetch) is None
    assert join([("x", 0)], {("x", 0): masked}, fetch) is None
    assert join([("x", 0), ("x", 1)], {("x", 0): ones, ("x", 1): stored(blobs, np.ones(3, "f4"))}, fetch) is None
    assert join([], {}, fetch) is None


def test_trees_come_back_as_they_were(blobs):
    value = {"total": np.float32(2), "n": [np.arange(3), 7, None], "big": (np.ones((200, 200)),)}
    found = Values({"k": stored(blobs, value)}, lambda ref: load_array(blobs, ref))["k"]
    assert type(found["total"]) is np.float32
    np.testing.assert_array_equal(found["n"][0], np.arange(3))
    assert found["n"][1:] == [7, None]
    np.testing.assert_array_equal(found["big"][0], np.ones((200, 200)))


def test_trees_are_rearranged_without_being_read(blobs):
    value = stored(blobs, {"a": np.arange(3), "b": np.float64(2)})
    references = value.references()
    turned = Stored.of_references([references["b"], references["a"]])
    assert turned.refs == (value.refs[1], value.refs[0])
    assert turned.tree == [Leaf(0, scalar=True), Leaf(1)]


def test_specs_of_what_programs_can_take(blobs):
    plain = stored(blobs, {"a": np.ones((2, 3), "f4")})
    assert plain.specs()["a"].shape == (2, 3)
    assert stored(blobs, np.ma.masked_greater(np.arange(3.0), 1)).specs() is None

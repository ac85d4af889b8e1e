"""Named arrays: read in place, written by one writer for each stored object."""

from concurrent.futures import ThreadPoolExecutor
from itertools import product

import dask.array as da
import ml_dtypes
import numpy as np
import pytest
import zarr
from zarr.storage import LocalStore, MemoryStore

from goblin_dask.errors import BlobMissing, InputError
from goblin_dask.messages import ArraySpec
from goblin_dask.store import arrays
from goblin_dask.store.blobs import BlobStore
from goblin_dask.store.buffers import spec_of
from goblin_dask.store.chunks import load_array, store_array


@pytest.fixture
def blobs(tmp_path):
    store = BlobStore(tmp_path / "blobs")
    yield store
    store.close()


X = np.random.default_rng(1).random((250, 130)).astype("f4")
IN_PLACE = [
    np.s_[0:100, 0:130],
    np.s_[100:200, :],
    np.s_[200:250],  # the last chunk: stored whole, valid in its first half
    np.s_[110:180],  # a piece of one
    (0,),
]


def stored(tmp_path, data=X, chunks=(100, 130), **options):
    array = arrays.create_array(tmp_path / "x.zarr", spec_of(data), chunks, **({"compressors": None} | options))
    array[...] = data
    return array


@pytest.mark.parametrize("index", IN_PLACE, ids=str)
@pytest.mark.parametrize("format", [2, 3])
def test_regions_of_one_uncompressed_chunk_stay_where_they_are(tmp_path, blobs, index, format, monkeypatch):
    monkeypatch.setattr(arrays, "INLINE_LIMIT", 0)
    array = stored(tmp_path, zarr_format=format)
    ref = arrays.source_region(array, index, blobs)
    assert ref.place is not None
    assert blobs.used == 0
    np.testing.assert_array_equal(load_array(blobs, ref), X[index])


def test_arrays_that_dask_opened_stay_where_they_are(tmp_path, blobs, monkeypatch):
    monkeypatch.setattr(arrays, "INLINE_LIMIT", 0)
    stored(tmp_path)
    nodes = dict(da.from_zarr(str(tmp_path / "x.zarr")).dask).values()
    (array,) = (node for node in nodes if isinstance(node, zarr.Array))
    ref = arrays.source_region(array, np.s_[100:200], blobs)
    assert ref.place is not None
    np.testing.assert_array_equal(load_array(blobs, ref), X[100:200])


@pytest.mark.parametrize(
    "index",
    [
        np.s_[50:150],
        np.s_[:, 3:50],
        np.s_[::2, ::3],
        np.s_[::-1],
        np.s_[200:10:-3, 5:20],
        np.s_[3:200:-1, ::-2],
        (5, 6),
        (slice(3, 3), slice(None)),
        np.s_[..., 4],
        ([3, 1, 200],),
    ],
    ids=str,
)
def test_other_regions_are_decoded(tmp_path, blobs, index):
    array = stored(tmp_path)
    expected = X[index]
    ref = arrays.source_region(array, index, blobs)
    assert ref.spec == spec_of(expected)
    assert ref.place is None
    np.testing.assert_array_equal(load_array(blobs, ref), expected)


@pytest.mark.parametrize(
    "options",
    [{"compressors": "auto"}, {"shards": (200, 130)}, {"serializer": zarr.codecs.BytesCodec(endian="big")}],
    ids=lambda o: next(iter(o)),
)
def test_encoded_chunks_are_decoded(tmp_path, blobs, options):
    array = stored(tmp_path, chunks=(100, 130), **options)
    ref = arrays.source_region(array, np.s_[0:100], blobs)
    assert ref.place is None
    np.testing.assert_array_equal(load_array(blobs, ref), X[:100])


def test_a_large_region_is_copied_slab_by_slab(tmp_path, blobs, monkeypatch):
    monkeypatch.setattr(arrays, "SLAB", 1000)
    array = stored(tmp_path, compressors="auto")
    ref = arrays.source_region(array, np.s_[30:240, 5:100], blobs)
    np.testing.assert_array_equal(load_array(blobs, ref), X[30:240, 5:100])
    one = arrays.source_region(array, np.s_[30, :], blobs)
    np.testing.assert_array_equal(load_array(blobs, one), X[30])


def test_chunks_that_were_never_written_have_the_fill_value(tmp_path, blobs):
    array = arrays.create_array(tmp_path / "e", ArraySpec((30, 3000), "float64"), (10, 3000), fill_value=7.0)
    ref = arrays.source_region(array, np.s_[0:10], blobs)
    assert (load_array(blobs, ref) == 7).all()


def test_a_chunk_that_changes_while_a_job_reads_it_is_noticed(tmp_path, blobs, monkeypatch):
    monkeypatch.setattr(arrays, "INLINE_LIMIT", 0)
    array = stored(tmp_path)
    ref = arrays.source_region(array, np.s_[0:100], blobs)
    array[0, 0] = 5
    with pytest.raises(BlobMissing, match="was changed while a job reads it"):
        load_array(blobs, ref)


def test_numpy_arrays_are_sources_too(blobs):
    big = np.random.default_rng(0).random((300, 300))
    for index in [np.s_[10:200, ::2], np.s_[:], (3,), np.s_[..., 0]]:
        np.testing.assert_array_equal(load_array(blobs, arrays.source_region(big, index, blobs)), big[index])
    zero = np.array(3.5)
    assert load_array(blobs, arrays.source_region(zero, (), blobs)) == 3.5


@pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3)], ids=str)
def test_zero_d_and_zero_length(tmp_path, blobs, shape):
    data = np.full(shape, 2.5)
    array = arrays.create_array(tmp_path / "z", spec_of(data), shape, compressors=None)
    index = tuple(slice(0, n) for n in shape)
    arrays.write_region(array, index, store_array(blobs, data), blobs)
    ref = arrays.source_region(array, index, blobs)
    np.testing.assert_array_equal(load_array(blobs, ref), data)


@pytest.mark.parametrize("options", [{"compressors": None}, {}, {"store": "memory"}], ids=["plain", "zstd", "memory"])
def test_regions_are_written_as_zarr_would(tmp_path, blobs, options):
    store = MemoryStore() if options.pop("store", "") else LocalStore(tmp_path / "w")
    array = arrays.create_array(store, spec_of(X), (100, 60), fill_value=3, **options)
    for rows, columns in product(range(0, 250, 100), range(0, 130, 60)):
        index = (slice(rows, min(rows + 100, 250)), slice(columns, min(columns + 60, 130)))
        arrays.write_region(array, index, store_array(blobs, X[index]), blobs)
    np.testing.assert_array_equal(zarr.open_array(store, mode="r")[...], X)
    array.resize((300, 180))  # what lies behind the edge is the fill value, as Zarr pads
    assert (array[250:] == 3).all()
    assert (array[:, 130:] == 3).all()


def test_two_writers_in_one_stored_object_are_refused_before_writing(tmp_path, blobs):
    array = arrays.create_array(tmp_path / "s", ArraySpec((40, 40, 40), "float64"), (10, 10, 10), shards=(20, 20, 20))
    assert arrays.alignment(array) == (20, 20, 20)
    part = store_array(blobs, np.ones((10, 10, 10)))
    with pytest.raises(InputError, match=r"shards .* only in part .*rechunk to multiples of \(20, 20, 20\)"):
        arrays.write_region(array, np.s_[0:10, 0:10, 0:10], part, blobs)
    assert not (array[...] != 0).any()
    plain = arrays.create_array(tmp_path / "p", ArraySpec((8, 8), "float64"), (4, 4))
    with pytest.raises(InputError, match="rechunk to multiples of \\(4, 4\\)"):
        arrays.write_region(plain, np.s_[0:2, 0:2], store_array(blobs, np.ones((2, 2))), blobs)
    with pytest.raises(InputError, match="slices of step 1"):
        arrays.write_region(plain, np.s_[::2], store_array(blobs, np.ones((4, 8))), blobs)


def test_one_writer_for_each_stored_object_loses_nothing(tmp_path, blobs):
    data = np.random.default_rng(2).random((40, 40, 40))
    array = arrays.create_array(tmp_path / "s", spec_of(data), (10, 10, 10), shards=(20, 20, 20))
    regions = [tuple(slice(a, a + 20) for a in corner) for corner in product((0, 20), repeat=3)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda r: arrays.write_region(array, r, store_array(blobs, data[r]), blobs), regions))
    np.testing.assert_array_equal(array[...], data)


@pytest.mark.parametrize(
    ("dtype", "word"),
    [([("a", ">i4"), ("b", ">f8")], "records"), (object, "objects"), ("U5", "strings"), ("g", "extended")],
)
def test_dtypes_are_refused_by_name(blobs, dtype, word):
    with pytest.raises(InputError, match=word):
        arrays.source_region(np.zeros(2, dtype), (slice(None),), blobs)


def test_unknown_dtypes_are_refused(tmp_path):
    with pytest.raises(InputError, match="no dtype is called 'float33'"):
        arrays.create_array(tmp_path / "a", ArraySpec((2,), "float33"), (2,))


def test_big_endian_numbers_are_exact(tmp_path, blobs):
    data = np.arange(30_000, dtype=">f8")
    array = zarr.create_array(tmp_path / "b", shape=data.shape, chunks=(10_000,), dtype=">f8", compressors=None)
    array[:] = data
    ref = arrays.source_region(array, np.s_[0:10_000], blobs)
    assert ref.spec.dtype == "float64"
    np.testing.assert_array_equal(load_array(blobs, ref), data[:10_000])
    arrays.write_region(array, np.s_[10_000:20_000], ref, blobs)
    np.testing.assert_array_equal(array[10_000:20_000], data[:10_000])


@pytest.mark.parametrize("compressors", [None, "auto"])
def test_bfloat16_is_stored_as_uint16_and_remembered(tmp_path, blobs, compressors):
    data = np.arange(80_000).astype(ml_dtypes.bfloat16)
    array = arrays.create_array(tmp_path / "h", spec_of(data), (40_000,), compressors=compressors)
    assert array.dtype == "uint16"
    for part in (np.s_[0:40_000], np.s_[40_000:80_000]):
        arrays.write_region(array, (part,), store_array(blobs, data[part]), blobs)
    again = arrays.open_array(tmp_path / "h")
    assert arrays.array_spec(again) == spec_of(data)
    for part in (np.s_[0:40_000], np.s_[10:70_000]):
        back = load_array(blobs, arrays.source_region(again, (part,), blobs))
        assert back.dtype == ml_dtypes.bfloat16
        assert (back.view("u2") == data[part].view("u2")).all()


@pytest.mark.parametrize("compressors", [None, "auto"])
def test_bits_are_preserved(tmp_path, blobs, compressors):
    data = np.array([0x7FC00001, 0x7F800001, 0x80000000], "u4").view("f4")
    array = arrays.create_array(tmp_path / "n", spec_of(data), (3,), compressors=compressors)
    arrays.write_region(array, np.s_[0:3], store_array(blobs, data), blobs)
    back = load_array(blobs, arrays.source_region(array, np.s_[0:3], blobs))
    assert (back.view("u4") == data.view("u4")).all()


def test_wrong_shape_or_dtype_is_refused(tmp_path, blobs):
    array = arrays.create_array(tmp_path / "a", ArraySpec((4, 4), "float32"), (4, 4))
    with pytest.raises(InputError, match="does not fit the region"):
        arrays.write_region(array, np.s_[0:4, 0:4], store_array(blobs, np.zeros((4, 4))), blobs)
    with pytest.raises(InputError, match="does not fit the region"):
        arrays.write_region(array, np.s_[0:4, 0:4], store_array(blobs, np.zeros((4, 3), "f4")), blobs)


def test_paths_are_checked(tmp_path):
    with pytest.raises(InputError, match="there is no Zarr array at"):
        arrays.open_array(tmp_path / "missing.zarr")
    arrays.create_array(tmp_path / "a", ArraySpec((4,), "float32"), (4,))
    with pytest.raises(InputError, match="is an array already"):
        arrays.create_array(tmp_path / "a", ArraySpec((4,), "float32"), (4,))


def test_the_certificate_is_in_the_attributes(tmp_path):
    array = arrays.create_array(tmp_path / "c", ArraySpec((4,), "bfloat16"), (4,))
    arrays.certify(array, {"method": "algebraic", "volunteers": 3})
    noted = zarr.open_array(tmp_path / "c", mode="r").attrs["goblin_dask"]
    assert noted == {"dtype": "bfloat16", "certificate": {"method": "algebraic", "volunteers": 3}}


def written(tmp_path, blobs, data):
    """An array of one chunk that shares its file with a blob; the chunk's path, and the reference."""
    array = arrays.create_array(tmp_path / "y.zarr", spec_of(data), data.shape, compressors=None)
    ref = store_array(blobs, data)
    arrays.write_region(array, (slice(None),) * data.ndim, ref, blobs)
    (path,) = (p for p in (tmp_path / "y.zarr").rglob("*") if p.is_file() and "zarr.json" not in p.name)
    return array, path, ref


def test_a_written_chunk_is_not_copied_and_is_an_ordinary_file(tmp_path, blobs):
    array, path, ref = written(tmp_path, blobs, X)
    np.testing.assert_array_equal(array[:], X)
    assert path.stat().st_nlink == 2
    (tmp_path / "ordinary").touch()
    assert path.stat().st_mode == (tmp_path / "ordinary").stat().st_mode
    arrays.write_region(array, (slice(None), slice(None)), ref, blobs)  # once more: the same file
    assert [p.name for p in path.parent.iterdir() if "partial" in p.name] == []


def test_whoever_writes_into_a_chunk_file_spoils_no_blob_unnoticed(tmp_path, blobs):
    _, path, ref = written(tmp_path, blobs, X)
    np.testing.assert_array_equal(load_array(blobs, ref), X)
    with path.open("r+b") as file:
        file.write(b"\xff")
    assert not blobs.has(ref.digest)
    with pytest.raises(BlobMissing):
        load_array(blobs, ref)
    assert path.stat().st_nlink == 1


def test_an_array_outlives_the_blobs_that_it_was_written_from(tmp_path, blobs):
    array, _, ref = written(tmp_path, blobs, X)
    blobs.retain(ref.digest)
    blobs.release(ref.digest, at_once=True)
    assert not blobs.has(ref.digest)
    np.testing.assert_array_equal(array[:], X)
    array[0, 0] = 7  # and may be written as any other
    assert array[0, 0] == 7

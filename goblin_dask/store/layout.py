"""Where the elements of a Zarr array lie in files, for arrays whose files are the elements themselves."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import zarr
from fsspec.implementations.local import LocalFileSystem
from zarr.abc.store import Store
from zarr.codecs import BytesCodec
from zarr.codecs.bytes import Endian
from zarr.core.metadata import ArrayV2Metadata, ArrayV3Metadata
from zarr.storage import FsspecStore, LocalStore

from goblin_dask.store.refs import FileRange

Bounds = tuple[tuple[int, int], ...]
"""Start and stop of a region along each axis."""


def bounds(shape: tuple[int, ...], index: tuple[Any, ...]) -> Bounds | None:
    """Region that a NumPy index means, when it is made of integers, slices of step 1 and an ellipsis; else None."""
    if sum(1 for item in index if item is Ellipsis) == 1:
        at = next(n for n, item in enumerate(index) if item is Ellipsis)
        index = (*index[:at], *[slice(None)] * (len(shape) - len(index) + 1), *index[at + 1 :])
    if len(index) > len(shape):
        return None
    result = []
    for item, length in zip((*index, *[slice(None)] * (len(shape) - len(index))), shape, strict=True):
        if isinstance(item, slice):
            start, stop, step = item.indices(length)
            if step != 1:
                return None
            result.append((start, max(start, stop)))
        elif hasattr(item, "__index__") and not isinstance(item, bool) and getattr(item, "ndim", 0) == 0:
            at = item.__index__()
            if not -length <= at < length:
                return None  # the array itself raises NumPy's error
            result.append((at % length, at % length + 1))
        else:
            return None
    return tuple(result)


def result_shape(shape: tuple[int, ...], index: tuple[Any, ...], region: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of ``array[index]`` for an index that `bounds` understood."""
    missing = len(shape) - sum(1 for item in index if item is not Ellipsis)
    kept: list[bool] = []
    for item in index:
        kept += [True] * missing if item is Ellipsis else [isinstance(item, slice)]
    kept += [True] * (len(shape) - len(kept))
    return tuple(n for n, keep in zip(region, kept, strict=True) if keep)


def is_plain(array: zarr.Array[Any]) -> bool:
    """Whether each chunk's object is just its elements, in C order and little-endian."""
    metadata = array.metadata
    if array.dtype.kind not in "biufc" or array.dtype.byteorder == ">":
        return False
    if isinstance(metadata, ArrayV3Metadata):
        codecs = metadata.codecs
        return (
            len(codecs) == 1
            and isinstance(codecs[0], BytesCodec)
            and (codecs[0].endian is Endian.little or array.dtype.itemsize == 1)
        )
    return (
        isinstance(metadata, ArrayV2Metadata)
        and metadata.compressor is None
        and not metadata.filters
        and metadata.order == "C"
    )


def folder_of(store: Store) -> Path | None:
    """Directory of this machine that a store is, if it is one.

    `dask.array.from_zarr` opens paths through fsspec, not as a `LocalStore`.
    """
    if isinstance(store, LocalStore):
        return Path(store.root)
    # zarr wraps file systems that are not asynchronous themselves
    if isinstance(store, FsspecStore) and isinstance(getattr(store.fs, "sync_fs", None), LocalFileSystem):
        return Path(store.path)
    return None


def chunk_nbytes(array: zarr.Array[Any]) -> int:
    """Bytes of a chunk; the last one of an axis is stored whole too."""
    return int(math.prod(array.chunks) * array.dtype.itemsize)


def in_place(array: zarr.Array[Any], region: Bounds) -> FileRange | None:
    """The bytes of a file that are this region in C order, or None when there are none such.

    They are where the region lies in one chunk, is one piece of it in C order, and chunks are files as they stand.
    The file itself need not exist.
    """
    folder = folder_of(array.store_path.store)
    if folder is None or not is_plain(array) or any(a == b for a, b in region):
        return None
    chunks = tuple(array.chunks)
    coordinates = tuple(a // n for (a, _), n in zip(region, chunks, strict=True))
    inside = [(a - c * n, b - c * n) for (a, b), c, n in zip(region, coordinates, chunks, strict=True)]
    if any(stop > n for (_, stop), n in zip(inside, chunks, strict=True)):
        return None
    # in one piece: single elements along leading axes, any range along one, whole chunks along the others
    first = next((axis for axis, (a, b) in enumerate(inside) if b - a > 1), len(inside))
    if any((a, b) != (0, n) for (a, b), n in list(zip(inside, chunks, strict=True))[first + 1 :]):
        return None
    itemsize = int(array.dtype.itemsize)
    strides = [math.prod(chunks[axis + 1 :]) for axis in range(len(chunks))]
    offset = sum(a * stride for (a, _), stride in zip(inside, strides, strict=True)) * itemsize
    nbytes = math.prod(b - a for a, b in inside) * itemsize
    name = array.metadata.encode_chunk_key(coordinates)
    return FileRange(str(folder / array.store_path.path / name), offset, nbytes)

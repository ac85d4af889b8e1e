"""Named arrays: ordinary Zarr arrays that anybody can open, read in place where possible, written by one writer each.

A Zarr array is stored as objects, one a shard (or a chunk, without shards). Two tasks that write one object at a time
lose data silently, so a region may be written only when it consists of whole objects (`alignment`).
"""

from __future__ import annotations

import inspect
import math
import os
import uuid
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from zarr.abc.store import Store
from zarr.errors import ContainsArrayError

from goblin_dask.digest import digest
from goblin_dask.errors import InputError, StoreError
from goblin_dask.messages import INLINE_LIMIT, ArraySpec
from goblin_dask.store import layout
from goblin_dask.store.blobs import BlobStore
from goblin_dask.store.buffers import Array, buffer_of, dtype_name, dtype_of, nbytes
from goblin_dask.store.chunks import load_array, open_chunk, store_array
from goblin_dask.store.descriptors import map_file
from goblin_dask.store.refs import ChunkRef, FileRange

ATTRIBUTE = "goblin_dask"
"""Attribute of a Zarr array under which the project keeps what it has to say: dtype and certificate."""

OPTIONS = inspect.signature(zarr.create_array).parameters.keys() - {
    "store", "name", "shape", "dtype", "data", "chunks", "overwrite", "attributes", "write_data",
}  # fmt: skip
"""What `create_array` passes on."""

SLAB = 64 << 20
"""Bytes of a decoded array that are held at a time while a region is copied into the blob store."""


def check_options(options: Iterable[str]) -> None:
    """Check names of what is to be passed to `zarr.create_array` for a dask array.

    Raises
    ------
    InputError
        For an option that there is not, or that says what the array itself does.
    """
    for name in options:
        if name == "chunks":
            raise InputError("to_zarr takes no chunks=: they are the dask array's blocks, rechunk it first")
        if name in ("shape", "dtype"):
            raise InputError(f"to_zarr takes no {name}=: it is the dask array's")
        if name not in OPTIONS:
            raise InputError(f"to_zarr has no option {name}=; zarr.create_array's are {', '.join(sorted(OPTIONS))}")


def create_array(
    store: Store | Path | str,
    spec: ArraySpec,
    chunks: Sequence[int],
    *,
    path: str = "",
    overwrite: bool = False,
    **options: Any,
) -> zarr.Array[Any]:
    """New Zarr array; bfloat16, which Zarr does not know, is stored as uint16 with a note in the attributes.

    Parameters
    ----------
    store : zarr.abc.store.Store, path or str
        Where; `path` is the array's name therein.
    chunks : sequence of int
        Shape of a chunk.
    **options
        Passed to `zarr.create_array`: ``compressors``, ``shards``, ….

    Raises
    ------
    InputError
        For a dtype that is refused, or an array that is there already.
    """
    dtype = dtype_of(spec.dtype)
    attributes = {ATTRIBUTE: {"dtype": "bfloat16"}} if spec.dtype == "bfloat16" else {}
    try:
        return zarr.create_array(
            store if isinstance(store, Store) else str(store),
            name=path or None,
            shape=spec.shape,
            chunks=tuple(max(1, n) for n in chunks),
            dtype=np.dtype("<u2") if spec.dtype == "bfloat16" else dtype,
            attributes=attributes,
            overwrite=overwrite,
            **options,
        )
    except ContainsArrayError as error:
        raise InputError(f"{store}/{path} is an array already: choose another name, or pass overwrite=True") from error


def open_array(store: Store | Path | str, path: str = "", *, mode: str = "r") -> zarr.Array[Any]:
    """An existing Zarr array.

    Raises
    ------
    InputError
        When none is there.
    """
    try:
        return zarr.open_array(store if isinstance(store, Store) else str(store), path=path or None, mode=mode)
    except FileNotFoundError as error:
        raise InputError(f"there is no Zarr array at {store}{'/' * bool(path)}{path}: check the path") from error


def array_spec(array: Any) -> ArraySpec:
    """Shape and dtype of a Zarr array (or of anything that has these), with the dtype that was meant.

    Raises
    ------
    InputError
        For a dtype that is refused: objects, strings, records.
    """
    name = dtype_name(array.dtype)
    if isinstance(array, zarr.Array):
        name = dict(array.attrs.get(ATTRIBUTE, {})).get("dtype", name)
    return ArraySpec(tuple(int(n) for n in array.shape), name)


def alignment(array: zarr.Array[Any]) -> tuple[int, ...]:
    """Shape of the array's stored objects: whoever writes must own whole ones."""
    return tuple(array.shards or array.chunks)


def certify(array: zarr.Array[Any], certificate: dict[str, Any]) -> None:
    """Write into the array's attributes how it was verified."""
    noted = dict(array.attrs.get(ATTRIBUTE, {}))
    array.attrs[ATTRIBUTE] = noted | {"certificate": certificate}


# --- reading ----------------------------------------------------------------------------------------------------
def source_region(array: Any, index: Any, blobs: BlobStore) -> ChunkRef:
    """Reference to a region of an array.

    A region that lies in one piece in one uncompressed chunk of a local directory stays where it is and is only hashed;
    everything else is decoded into the blob store, a slab at a time.

    Parameters
    ----------
    array : zarr.Array, or anything indexable with NumPy's semantics
    index : tuple
        What would stand between its brackets.
    """
    spec = array_spec(array)
    index = index if isinstance(index, tuple) else (index,)
    bounds = layout.bounds(spec.shape, index)
    if isinstance(array, zarr.Array) and bounds is not None:
        shape = tuple(stop - start for start, stop in bounds)
        # an integer in the index drops its axis; the bytes are the same
        kept = ArraySpec(layout.result_shape(spec.shape, index, shape), spec.dtype)
        place = layout.in_place(array, bounds)
        if place is not None:
            ref = _hash_in_place(place, kept)
            if ref is not None:
                return ref
        if nbytes(kept) > SLAB:
            return ChunkRef(blobs.put(_slabs(array, bounds, spec.dtype)), kept, nbytes(kept))
    return store_array(blobs, _meant(_select(array, index, spec.shape), spec.dtype))


def _select(array: Any, index: tuple[Any, ...], shape: tuple[int, ...]) -> Array:
    """``array[index]``; Zarr knows no slices of negative step, so what these span is read and turned round."""
    if isinstance(array, zarr.Array) and bool(index) and all(isinstance(item, slice) for item in index):
        ranges = [range(*item.indices(length)) for item, length in zip(index, shape, strict=False)]
        if any(r.step < 0 for r in ranges):
            span = tuple(
                item if r.step > 0 else slice(r[-1], r[0] + 1) if r else slice(0, 0)
                for r, item in zip(ranges, index, strict=True)
            )
            turn = tuple(slice(None, None, r.step if r.step < 0 else 1) for r in ranges)
            return np.asarray(array[span])[turn]
    return np.asarray(array[index if len(index) != 1 else index[0]])


def _meant(array: Array, dtype: str) -> Array:
    return array.view(dtype_of("bfloat16")) if dtype == "bfloat16" and array.dtype.name == "uint16" else array


def _slabs(array: zarr.Array[Any], bounds: layout.Bounds, dtype: str) -> Any:
    """The region's bytes in C order, cut along the first axis at the borders of stored objects."""
    (start, stop), rest = bounds[0], tuple(slice(*b) for b in bounds[1:])
    step = alignment(array)[0]
    while start < stop:
        end = min(stop, (start // step + 1) * step)
        yield buffer_of(_meant(np.asarray(array[(slice(start, end), *rest)]), dtype))
        start = end


def _hash_in_place(place: FileRange, spec: ArraySpec) -> ChunkRef | None:
    try:
        fd = os.open(place.path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None  # a chunk that was never written: Zarr answers with the fill value
    try:
        status = os.fstat(fd)
        if status.st_size < place.offset + place.nbytes:
            raise StoreError(
                f"{place.path} has {status.st_size} bytes, its chunk needs {place.offset + place.nbytes}: it is damaged"
            )
        view = map_file(fd, place.offset, place.nbytes)
        stamp = (status.st_ino, status.st_size, status.st_mtime_ns)
        inline = bytes(view) if place.nbytes <= INLINE_LIMIT else None
        found = None if inline is not None else FileRange(place.path, place.offset, place.nbytes, stamp)
        return ChunkRef(digest(view), spec, place.nbytes, inline, found)
    finally:
        os.close(fd)


# --- writing ----------------------------------------------------------------------------------------------------
def check_writable(array: zarr.Array[Any], index: Any) -> layout.Bounds:
    """Bounds of a region that one task may write while others write other regions.

    Raises
    ------
    InputError
        When a stored object lies only partly in the region; says to what to rechunk.
    """
    shape, objects = tuple(array.shape), alignment(array)
    index = index if isinstance(index, tuple) else (index,)
    bounds = layout.bounds(shape, index)
    if bounds is None:
        raise InputError(f"a region to write is given by slices of step 1, not by {index}")
    whole = all(a % n == 0 and (b % n == 0 or b == end) for (a, b), n, end in zip(bounds, objects, shape, strict=True))
    if not whole:
        text = ", ".join(f"{a}:{b}" for a, b in bounds)
        kind = "shards" if array.shards else "chunks"
        raise InputError(
            f"the region [{text}] covers {kind} of {array.store_path} only in part ({kind} are {objects}): tasks that "
            f"write one of them at the same time lose data; rechunk to multiples of {objects} before storing"
        )
    return bounds


def write_region(array: zarr.Array[Any], index: Any, ref: ChunkRef, blobs: BlobStore) -> None:
    """Write a chunk into a region of an array.

    Raises
    ------
    InputError
        Before anything is written: for another shape or dtype, or a region that shares stored objects with others.
    """
    spec = array_spec(array)
    bounds = check_writable(array, index)
    shape = tuple(b - a for a, b in bounds)
    if ref.spec.dtype != spec.dtype or math.prod(ref.spec.shape) != math.prod(shape):
        raise InputError(
            f"a chunk of shape {ref.spec.shape} and dtype {ref.spec.dtype} does not fit the region of shape {shape} "
            f"of {array.store_path}, which holds {spec.dtype}"
        )
    place = layout.in_place(array, bounds)
    if place is not None and place.offset == 0 and ref.nbytes > 0:
        _copy_chunk(array, place, ref, blobs)
        return
    data = load_array(blobs, ref).reshape(shape)
    stored = data.view("<u2") if spec.dtype == "bfloat16" else data
    array[tuple(slice(*b) for b in bounds)] = stored


def _copy_chunk(array: zarr.Array[Any], place: FileRange, ref: ChunkRef, blobs: BlobStore) -> None:
    """Make a blob a chunk's file, as Zarr would write it: by another name for the file, else by a copy in the kernel.

    Other programs may write into chunk files; a blob with two names is therefore hashed whenever it is read.
    """
    path = Path(place.path)
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f"{path.name}.{uuid.uuid4().hex}.partial")
    padded = layout.chunk_nbytes(array) != ref.nbytes
    if ref.inline is None and ref.place is None and not padded and blobs.link(ref.digest, fresh):
        fresh.replace(path)
        fresh.unlink(missing_ok=True)  # a rename between two names of one file does nothing
        return
    source, offset, size = open_chunk(blobs, ref)
    try:
        with fresh.open("xb", buffering=0) as file:
            done = 0
            while done < size:
                done += os.sendfile(file.fileno(), source, offset + done, size - done)
            padding = layout.chunk_nbytes(array) - size
            if padding:  # the last chunk of an axis is stored whole
                fill = np.full(padding // array.dtype.itemsize, array.fill_value, array.dtype)
                file.write(memoryview(buffer_of(fill)))
        fresh.replace(path)
    except OSError as error:
        fresh.unlink(missing_ok=True)
        raise StoreError(f"{path} could not be written ({error.strerror})") from error
    finally:
        os.close(source)

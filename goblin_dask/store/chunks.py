"""`ChunkRef`s to arrays and back: inline where they are small, in the blob store, or where a file has them already."""

from __future__ import annotations

import os

from goblin_dask.digest import digest
from goblin_dask.errors import BlobMissing
from goblin_dask.messages import INLINE_LIMIT, BlobRef
from goblin_dask.store.blobs import BlobStore
from goblin_dask.store.buffers import Array, array_of, buffer_of, spec_of
from goblin_dask.store.descriptors import map_file, memory_file
from goblin_dask.store.refs import ChunkRef


def store_array(blobs: BlobStore, array: Array) -> ChunkRef:
    """Put an array where a `ChunkRef` finds it."""
    buffer, spec = buffer_of(array), spec_of(array)
    if buffer.nbytes <= INLINE_LIMIT:
        return ChunkRef(digest(buffer), spec, buffer.nbytes, inline=bytes(buffer))
    return ChunkRef(blobs.put(buffer), spec, buffer.nbytes)


def from_wire(ref: BlobRef) -> ChunkRef:
    """The lab's reference to a blob that came back from the grid."""
    return ChunkRef(ref.digest, ref.spec, ref.nbytes, ref.inline)


def open_chunk(blobs: BlobStore, ref: ChunkRef) -> tuple[int, int, int]:
    """Descriptor, offset and length of a chunk's bytes; the caller closes the descriptor.

    Raises
    ------
    BlobMissing
        When the blob is gone, or the file that had it was changed since it was hashed.
    """
    if ref.inline is not None:
        return memory_file([ref.inline]), 0, ref.nbytes
    if ref.place is None:
        return blobs.open(ref.digest), 0, ref.nbytes
    try:
        fd = os.open(ref.place.path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise BlobMissing(f"{ref.place.path} was deleted while a job reads it: start the job again") from error
    if not ref.place.same_file(os.fstat(fd)):
        os.close(fd)
        raise BlobMissing(f"{ref.place.path} was changed while a job reads it: start the job again")
    return fd, ref.place.offset, ref.nbytes


def buffer_of_chunk(blobs: BlobStore, ref: ChunkRef) -> memoryview:
    """The bytes of a chunk, mapped where they lie in a file."""
    if ref.inline is not None:
        return memoryview(ref.inline)
    fd, offset, nbytes = open_chunk(blobs, ref)
    try:
        return map_file(fd, offset, nbytes)
    finally:
        os.close(fd)


def load_array(blobs: BlobStore, ref: ChunkRef) -> Array:
    """The array of a chunk, read-only."""
    return array_of(buffer_of_chunk(blobs, ref), ref.spec)

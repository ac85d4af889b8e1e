"""References to arrays that lie in the laboratory: what the keys of the lab's Dask graphs hold instead of arrays."""

from __future__ import annotations

import os
from dataclasses import dataclass

from goblin_dask.messages import ArraySpec, BlobRef


@dataclass(frozen=True, slots=True)
class FileRange:
    """Bytes of a local file that are a blob as they stand: an uncompressed Zarr chunk read in place."""

    path: str
    offset: int
    nbytes: int
    stamp: tuple[int, int, int] = (0, 0, 0)
    """Inode, size and time of change (ns) of the file when it was hashed: whoever opens it compares (`same_file`)."""

    def same_file(self, status: os.stat_result) -> bool:
        """Whether `status` is that of the very file that was hashed."""
        return (status.st_ino, status.st_size, status.st_mtime_ns) == self.stamp


@dataclass(frozen=True, slots=True)
class ChunkRef:
    """One array of the laboratory, by content address."""

    digest: str
    spec: ArraySpec
    nbytes: int
    inline: bytes | None = None
    """The blob itself where it is at most `goblin_dask.messages.INLINE_LIMIT` long; then it is in no store."""
    place: FileRange | None = None
    """Where it lies in place; None: in the blob store (or inline). Never leaves the laboratory."""

    def wire(self) -> BlobRef:
        """The part that may leave the laboratory."""
        return BlobRef(self.digest, self.spec, self.nbytes, self.inline)

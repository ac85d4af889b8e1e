"""References to arrays that lie in the laboratory: what the keys of the lab's Dask graphs hold instead of arrays."""

from __future__ import annotations

from dataclasses import dataclass

from goblin_dask.messages import ArraySpec, BlobRef


@dataclass(frozen=True, slots=True)
class FileRange:
    """Bytes of a local file that are a blob as they stand: an uncompressed Zarr chunk read in place."""

    path: str
    offset: int
    nbytes: int


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

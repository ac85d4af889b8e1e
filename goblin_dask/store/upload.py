"""`Upload`: a blob that is being received."""

from __future__ import annotations

import errno
import mmap
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from blake3 import blake3

from goblin_dask.digest import Digest
from goblin_dask.errors import StoreError, StoreFull
from goblin_dask.store.descriptors import write_all, write_cold

PIECE = 4 << 20
"""Bytes that are written at a time."""


@contextmanager
def room(where: str) -> Iterator[None]:
    """Translate the file system's ways to say that it is full."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise StoreFull(f"{where} is full ({error.strerror}): free some space there or move the store") from error
        raise


class Upload:
    """A blob that is being received: hashed as it grows, bounded, nothing until it is finished.

    What comes is gathered in a buffer, so that the disk and the hash get large pieces. Who must not wait for the disk
    calls `take` itself and `flush` in a thread.

    Parameters
    ----------
    folder : Path
        Where the file is made.
    limit : int
        Most bytes.
    cold : bool
        It will not be read soon: it is written past the page cache.
    """

    def __init__(self, folder: Path, limit: int, *, cold: bool = False):
        self.limit = limit
        self.nbytes = 0
        self._hash = blake3()
        self._cold = cold
        self._buffer: mmap.mmap | None = None
        self._filled = 0
        self.path = folder / uuid.uuid4().hex
        with room(str(folder)):
            self._fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)

    def write(self, data: Any) -> None:
        """Take the next bytes, and write them when there are enough.

        Raises
        ------
        StoreError
            When there are more than `limit` of them.
        StoreFull
            When the disk is full.
        """
        view = memoryview(data).cast("B")
        if view.nbytes >= PIECE and not self._filled and not self._cold:
            self._admit(view)
            self._write(view)
            self.nbytes += view.nbytes
            return
        while view:
            view = self.take(view)
            if view:
                self.flush()

    def take(self, view: memoryview) -> memoryview:
        """Take bytes while there is room in the buffer; the rest, for which it must be flushed.

        Raises
        ------
        StoreError
            As `write` does.
        """
        self._admit(view)
        if self._buffer is None:
            self._buffer = mmap.mmap(-1, max(1, min(self.limit, PIECE)))
        count = min(view.nbytes, len(self._buffer) - self._filled)
        self._buffer[self._filled : self._filled + count] = view[:count]
        self._filled += count
        self.nbytes += count
        return view[count:]

    def flush(self) -> None:
        """Write what was taken.

        Raises
        ------
        StoreFull
            When the disk is full.
        """
        if self._buffer is not None and self._filled:
            with memoryview(self._buffer) as whole, whole[: self._filled] as view:
                self._write(view)
            self._filled = 0

    def _admit(self, view: memoryview) -> None:
        if self.nbytes + view.nbytes > self.limit:
            raise StoreError(f"an upload of more than the {self.limit} bytes that were expected")

    def _write(self, view: memoryview) -> None:
        with room(str(self.path.parent)):
            if self._cold:
                write_cold(self._fd, view)
            else:
                write_all(self._fd, view)
        self._hash.update(view)

    @property
    def open(self) -> bool:
        """Whether it still grows."""
        return self._fd >= 0

    def finish(self) -> Digest:
        """Write the rest and close the file; the digest of all that was taken."""
        self.flush()
        self.close()
        return str(self._hash.hexdigest())

    def close(self) -> None:
        """Close the file and keep it."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        if self._buffer is not None:
            self._buffer.close()
            self._buffer, self._filled = None, 0

    def abort(self) -> None:
        """Remove what was received."""
        self.close()
        self.path.unlink(missing_ok=True)

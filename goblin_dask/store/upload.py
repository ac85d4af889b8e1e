"""`Upload`: a blob that is being received."""

from __future__ import annotations

import errno
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from blake3 import blake3

from goblin_dask.digest import Digest
from goblin_dask.errors import StoreError, StoreFull
from goblin_dask.store.descriptors import write_all


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
    """A blob that is being received: hashed as it grows, bounded, nothing until it is finished."""

    def __init__(self, folder: Path, limit: int):
        self.limit = limit
        self.nbytes = 0
        self._hash = blake3()
        self.path = folder / uuid.uuid4().hex
        with room(str(folder)):
            self._fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)

    def write(self, data: Any) -> None:
        """Take the next bytes.

        Raises
        ------
        StoreError
            When there are more than `limit` of them.
        StoreFull
            When the disk is full.
        """
        view = memoryview(data).cast("B")
        if self.nbytes + view.nbytes > self.limit:
            raise StoreError(f"an upload of more than the {self.limit} bytes that were expected")
        with room(str(self.path.parent)):
            write_all(self._fd, view)
        self._hash.update(view)
        self.nbytes += view.nbytes

    @property
    def open(self) -> bool:
        """Whether it still grows."""
        return self._fd >= 0

    def finish(self) -> Digest:
        """Close the file; the digest of all that was written."""
        self.close()
        return str(self._hash.hexdigest())

    def close(self) -> None:
        """Close the file and keep it."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def abort(self) -> None:
        """Remove what was received."""
        self.close()
        self.path.unlink(missing_ok=True)

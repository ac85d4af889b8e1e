"""Where verified blobs lie: files below a `LocalStore`, or objects of any other Zarr v3 store.

Both have the same keys, ``blobs/<first two characters>/<digest>``, so a directory written by one can be read by the
other. A shelf knows neither references nor caps; `goblin_dask.store.blobs.BlobStore` does.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from blake3 import blake3
from zarr.abc.store import Store
from zarr.core.buffer import default_buffer_prototype
from zarr.core.sync import collect_aiterator, sync

from goblin_dask.digest import Digest, is_digest
from goblin_dask.errors import BlobMissing, StoreError
from goblin_dask.store.descriptors import map_file, memory_file


def key_of(digest: Digest) -> str:
    """Key of a blob in a Zarr store; only a well-formed digest may become part of a path."""
    if not is_digest(digest):
        raise StoreError(f"{digest!r} is no blob address: 64 lower-case hexadecimal characters are")
    return f"blobs/{digest[:2]}/{digest}"


class Shelf(Protocol):
    """What `BlobStore` needs of a place for blobs."""

    staging: Path
    """Directory of this machine in which uploads grow."""

    def listing(self) -> Iterator[tuple[Digest, int]]:
        """Digests and sizes of all blobs, least recently written first."""

    def holds(self, digest: Digest) -> bool:
        """Whether the blob is there and sound."""

    def open(self, digest: Digest) -> int:
        """Read-only descriptor of the blob's bytes; `BlobMissing` when it is gone."""

    def place(self, digest: Digest, staged: Path) -> None:
        """Make a staged file the blob, at once or not at all; the staged file is gone then."""

    def remove(self, digest: Digest) -> None:
        """Delete the blob; that it is gone already is no error."""

    def free(self) -> int | None:
        """Bytes that the medium has left, None when it does not say."""

    def close(self) -> None:
        """Let go of the place."""


def _umask() -> int:
    """The process's umask; it can be read only by setting it, so it is read from the kernel's status file."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("Umask:"):
            return int(line.split()[1], 8)
    return 0o022


class FileShelf:
    """Blobs as files, read through mappings, written by rename.

    After a power cut a file can have its name and length but not its bytes, unless every write waits for the disk.
    Instead the shelf notes in which boot of the machine it was opened. When it finds that it was not closed and the
    machine has been started anew since, every older file is *suspect*: hashed when it is first asked for.
    """

    def __init__(self, root: Path):
        self.root = root
        self.staging = root / "staging"
        root.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            raise StoreError(
                f"the blob store at {root} is open in another process: stop that lab node or name another directory"
            ) from error
        shutil.rmtree(self.staging, ignore_errors=True)  # uploads of an earlier life: their senders send them again
        self.staging.mkdir(mode=0o700)
        self._suspect_before = self._note_opening()

    def _note_opening(self) -> float:
        note = self.root / "opened.json"
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        before: dict[str, Any] = {"boot": boot, "closed": True, "suspect_before": 0.0}
        with contextlib.suppress(FileNotFoundError, ValueError):
            before |= json.loads(note.read_text())
        suspect = float(before["suspect_before"])
        if not before["closed"] and before["boot"] != boot:
            suspect = time.time()
        self._note = {"boot": boot, "closed": False, "suspect_before": suspect}
        self._write_note()
        return suspect

    def _write_note(self) -> None:
        fresh = self.root / "opened.json.new"
        with fresh.open("w") as file:
            json.dump(self._note, file)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(self.root / "opened.json")

    def _path(self, digest: Digest) -> Path:
        return self.root / key_of(digest)

    def listing(self) -> Iterator[tuple[Digest, int]]:
        found = []
        for folder in (self.root / "blobs").glob("??"):
            for entry in os.scandir(folder):
                if is_digest(entry.name):
                    status = entry.stat()
                    found.append((status.st_mtime_ns, entry.name, status.st_size))
        for _, name, size in sorted(found):
            yield name, size

    def holds(self, digest: Digest) -> bool:
        path = self._path(digest)
        try:
            status = path.stat()
        except FileNotFoundError:
            return False
        shared = status.st_nlink > 1
        if shared or status.st_mtime < self._suspect_before:
            if blake3().update_mmap(path).hexdigest() != digest:
                path.unlink(missing_ok=True)
                return False
            if not shared:
                os.utime(path)
        return True

    def open(self, digest: Digest) -> int:
        try:
            return os.open(self._path(digest), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError as error:
            raise BlobMissing(f"blob {digest} was deleted from {self.root}") from error

    def place(self, digest: Digest, staged: Path) -> None:
        path = self._path(digest)
        path.parent.mkdir(parents=True, exist_ok=True)
        staged.chmod(0o400)
        staged.replace(path)

    def link(self, digest: Digest, target: Path) -> bool:
        """Give a blob's file another name, as a file that its owner may write; False where that cannot be.

        Whoever writes into the file by that name changes the blob: while it has two names it is hashed whenever it is
        asked for, and is gone when it is not what it was.
        """
        path = self._path(digest)
        try:
            path.chmod(0o666 & ~_umask())
            os.link(path, target)
        except OSError:  # another file system, or one without links
            return False
        return True

    def remove(self, digest: Digest) -> None:
        self._path(digest).unlink(missing_ok=True)

    def free(self) -> int | None:
        return shutil.disk_usage(self.root).free

    def close(self) -> None:
        shutil.rmtree(self.staging, ignore_errors=True)
        self._note["closed"] = True
        self._write_note()
        os.close(self._lock)


class ZarrShelf:
    """Blobs as objects of any Zarr v3 store: in memory, in object storage, behind fsspec."""

    def __init__(self, store: Store):
        self.store = store
        self._folder = tempfile.TemporaryDirectory(prefix="goblin-staging-")
        self.staging = Path(self._folder.name)
        self._buffer = default_buffer_prototype().buffer

    def listing(self) -> Iterator[tuple[Digest, int]]:
        for key in collect_aiterator(self.store.list_prefix("blobs/")):
            name = key.rpartition("/")[2]
            if is_digest(name) and key == key_of(name):
                yield name, sync(self.store.getsize(key))

    def holds(self, digest: Digest) -> bool:
        return bool(sync(self.store.exists(key_of(digest))))

    def open(self, digest: Digest) -> int:
        value = sync(self.store.get(key_of(digest), default_buffer_prototype()))
        if value is None:
            raise BlobMissing(f"blob {digest} is not in the store {self.store}")
        return memory_file([value.as_numpy_array().tobytes()])

    def place(self, digest: Digest, staged: Path) -> None:
        data: Any = b""
        with staged.open("rb") as file:
            data = bytes(map_file(file.fileno(), 0, os.fstat(file.fileno()).st_size))
        sync(self.store.set(key_of(digest), self._buffer.from_bytes(data)))
        staged.unlink()

    def remove(self, digest: Digest) -> None:
        sync(self.store.delete(key_of(digest)))

    def free(self) -> int | None:
        return None

    def close(self) -> None:
        self._folder.cleanup()

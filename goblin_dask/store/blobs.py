"""`BlobStore`: bytes by the digest of those bytes, counted, capped, and quarantined until they were verified."""

from __future__ import annotations

import os
import threading
import time
import uuid
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zarr.abc.store import Store
from zarr.storage import LocalStore

from goblin_dask.digest import Digest, digest
from goblin_dask.errors import BlobMissing, DigestMismatch, StoreError, StoreFull
from goblin_dask.store.descriptors import copy_file, map_file
from goblin_dask.store.shelf import FileShelf, Shelf, ZarrShelf
from goblin_dask.store.upload import Upload, room


@dataclass(slots=True)
class _Quarantined:
    """Whole, with the right digest, but not verified: nobody but a validator reads it."""

    nbytes: int
    path: Path | None = None
    fd: int = -1
    """Sealed memory file, where the blob came as one."""
    copy: Future[Path] | None = None
    """Its copy on the disk, under way: most uploads are accepted, and then nobody waits for the disk."""
    owners: set[str] = field(default_factory=set)


def _remove_copy(copy: Future[Path]) -> None:
    """Remove the copy of an upload that was dropped while it was being copied."""
    if copy.exception() is None:
        copy.result().unlink(missing_ok=True)


class BlobStore:
    """Content-addressed blobs on a Zarr store. Thread-safe; owned by one process.

    A blob lives while somebody retains it, and for `grace` seconds after it was stored or released. Blobs of earlier
    runs, which nobody has retained yet, are kept too (resuming needs them), until the room is needed.

    Parameters
    ----------
    store : zarr.abc.store.Store, path or str
        Where blobs lie; a path means a directory of this machine.
    cap : int, optional
        Bytes that blobs and uploads may take; by default what the medium has.
    grace : float
        Seconds that a blob outlives its last reference.
    memory : int
        Bytes of uploads that may wait for their verdict in memory files; more are written to disk at once.
    clock : callable
        Seconds, for `grace`.
    """

    def __init__(
        self,
        store: Store | Path | str,
        *,
        cap: int | None = None,
        grace: float = 60.0,
        memory: int = 1 << 30,
        clock: Callable[[], float] = time.monotonic,
    ):
        if isinstance(store, LocalStore):
            store = store.root
        self._shelf: Shelf = ZarrShelf(store) if isinstance(store, Store) else FileShelf(Path(store))
        self.path = None if isinstance(store, Store) else Path(store)
        self.cap, self.grace, self.memory = cap, grace, memory
        self._clock = clock
        self._lock = threading.RLock()
        self._sizes: OrderedDict[Digest, int] = OrderedDict(self._shelf.listing())
        self._used = sum(self._sizes.values())
        self._references: Counter[Digest] = Counter()
        self._doomed: dict[Digest, float] = {}
        """When the grace of a released blob ends."""
        self._fresh: dict[Digest, float] = {}
        """Until when a blob that was stored, and not retained yet, makes no room for others."""
        self._quarantine: dict[Digest, _Quarantined] = {}
        self._in_memory = 0
        self._receiving: weakref.WeakSet[Upload] = weakref.WeakSet()
        self._copier = ThreadPoolExecutor(1, thread_name_prefix="goblin-blobs")

    def __repr__(self) -> str:
        return f"<BlobStore {self.path or self._shelf}: {len(self._sizes)} blobs, {self._used / 1e9:.2f} GB>"

    # --- verified blobs --------------------------------------------------------------------------------------
    def put(self, data: Any) -> Digest:
        """Store the bytes of a buffer, or of an iterable of buffers; storing them again does nothing.

        Raises
        ------
        StoreFull
            When the disk or the cap leaves no room.
        """
        chunks: Iterable[Any] = data
        limit = 1 << 62
        if not isinstance(data, Iterator):
            name = digest(data)
            if self.has(name):
                self._touch(name)
                return name
            limit = memoryview(data).nbytes
            chunks = (data,)
            self._make_room(limit)
        upload = Upload(self._shelf.staging, limit)
        try:
            for chunk in chunks:
                upload.write(chunk)
            name = upload.finish()
            if limit == 1 << 62:
                self._make_room(upload.nbytes, staged=True)
            self._place(name, upload.path, upload.nbytes)
        except BaseException:
            upload.abort()
            raise
        return name

    def _place(self, name: Digest, staged: Path, nbytes: int) -> None:
        with self._lock:
            if self.has(name):
                staged.unlink(missing_ok=True)
            else:
                with room(str(self.path or self._shelf)):
                    self._shelf.place(name, staged)
                self._sizes[name] = nbytes
                self._used += nbytes
            self._touch(name)

    def _touch(self, name: Digest) -> None:
        with self._lock:
            self._sizes.move_to_end(name)
            if name in self._doomed:  # wanted again: its grace starts anew
                self._doomed[name] = self._clock() + self.grace
            elif name not in self._references:
                self._fresh[name] = self._clock() + self.grace

    def has(self, name: Digest) -> bool:
        """Whether a verified blob is here."""
        with self._lock:
            if name not in self._sizes:
                return False
            if self._shelf.holds(name):
                return True
            self._used -= self._sizes.pop(name)  # removed by somebody else, or spoilt by a power cut
            return False

    def size(self, name: Digest) -> int:
        """Bytes of a blob, quarantined ones included."""
        with self._lock:
            if name in self._quarantine:
                return self._quarantine[name].nbytes
            if name in self._sizes:
                return self._sizes[name]
        raise BlobMissing(f"blob {name} is not in the store")

    def open(self, name: Digest) -> int:
        """New read-only descriptor of a verified blob; the caller closes it."""
        if not self.has(name):
            raise BlobMissing(f"blob {name} is not in the store")
        return self._shelf.open(name)

    def get(self, name: Digest) -> memoryview:
        """The bytes of a verified blob, mapped where the store is of files."""
        fd = self.open(name)
        try:
            return map_file(fd, 0, os.fstat(fd).st_size)
        finally:
            os.close(fd)

    def link(self, name: Digest, target: Path) -> bool:
        """Make a file of the same bytes without copying them; False where the store has no files to link."""
        return self.has(name) and isinstance(self._shelf, FileShelf) and self._shelf.link(name, target)

    # --- references ------------------------------------------------------------------------------------------
    def retain(self, name: Digest) -> None:
        """One more holder of this blob."""
        with self._lock:
            self._references[name] += 1
            self._doomed.pop(name, None)
            self._fresh.pop(name, None)

    def release(self, name: Digest, *, at_once: bool = False) -> None:
        """One holder less; after the last and the grace `collect` deletes it, or it goes `at_once`."""
        with self._lock:
            if self._references[name] <= 0:
                raise StoreError(f"blob {name} was released more often than retained")
            self._references[name] -= 1
            if not self._references[name]:
                del self._references[name]
                if at_once:
                    self._remove(name)
                else:
                    self._doomed[name] = self._clock() + self.grace

    def collect(self) -> list[Digest]:
        """Delete blobs whose grace is over; their digests."""
        with self._lock:
            now = self._clock()
            over = [name for name, when in self._doomed.items() if when <= now]
            for name in over:
                self._remove(name)
            self._fresh = {name: when for name, when in self._fresh.items() if when > now}
            return over

    def _remove(self, name: Digest) -> None:
        self._doomed.pop(name, None)
        self._fresh.pop(name, None)
        if name in self._sizes:
            self._used -= self._sizes.pop(name)
            self._shelf.remove(name)

    def _make_room(self, nbytes: int, *, staged: bool = False) -> None:
        """Make sure that `nbytes` more fit, deleting what nobody retains, oldest first, if need be."""
        with self._lock:
            idle = self._idle()
            while (lack := self._lack(nbytes, staged=staged)) is not None:
                victim = next(idle, None)
                if victim is None:
                    raise lack
                self._remove(victim)

    def _idle(self) -> Iterator[Digest]:
        """Blobs that nobody retains, of earlier runs too, oldest first."""
        now = self._clock()
        for name in list(self._sizes):
            if name not in self._references and self._fresh.get(name, now) <= now:
                yield name

    def _lack(self, nbytes: int, *, staged: bool) -> StoreFull | None:
        """Why `nbytes` more do not fit; None when they do."""
        if self.cap is not None:
            used = self._used + sum(q.nbytes for q in self._quarantine.values() if q.path)
            used += sum(upload.limit for upload in self._receiving if upload.open)
            if used + nbytes > self.cap:
                return StoreFull(
                    f"the blob store may take {self.cap / 1e9:.2f} GB, {used / 1e9:.2f} GB are in use and "
                    f"{nbytes / 1e9:.2f} GB more are needed: raise its cap or finish jobs first"
                )
        free = None if staged else self._shelf.free()
        if free is not None and free < nbytes:
            return StoreFull(
                f"the disk of {self.path} has {free / 1e9:.2f} GB left and {nbytes / 1e9:.2f} GB are needed: "
                "free some space there or move the store"
            )
        return None

    # --- uploads ---------------------------------------------------------------------------------------------
    def upload(self, nbytes: int, *, cold: bool = False) -> Upload:
        """Begin to receive a blob of at most `nbytes`; hand it to `quarantine` or `Upload.abort` it.

        One that is `cold` will not be read soon: it goes to the disk past the page cache.
        """
        with self._lock:
            self._make_room(nbytes)
            upload = Upload(self._shelf.staging, nbytes, cold=cold)
            self._receiving.add(upload)
        return upload

    def quarantine(self, name: Digest, owner: str, source: Upload | int, *, cold: bool = False) -> None:
        """Keep a received blob until it is promoted or dropped.

        Parameters
        ----------
        name : str
            Digest under which it was announced.
        owner : str
            The attempt that it belongs to; the same blob may belong to several.
        source : Upload or int
            A whole upload, or the descriptor of a sealed memory file, which is duplicated.
        cold : bool
            It will not be read soon: a memory file goes to the disk past the page cache.

        Raises
        ------
        DigestMismatch
            When the bytes have another digest; nothing is kept of them.
        """
        if isinstance(source, Upload):
            found, nbytes = source.finish(), source.nbytes
        else:
            nbytes = os.fstat(source).st_size
            found = digest(map_file(source, 0, nbytes))
        if found != name:
            if isinstance(source, Upload):
                source.abort()
            raise DigestMismatch(f"a blob announced as {name} has the digest {found}: it was damaged or changed")
        with self._lock:
            entry = self._quarantine.get(name)
            if entry is None:
                entry = _Quarantined(nbytes)
                if isinstance(source, Upload):
                    entry.path = source.path
                else:
                    entry.fd = os.dup(source)
                    entry.copy = self._copier.submit(self._copy_out, os.dup(source), nbytes, cold)
                    self._in_memory += nbytes
                self._quarantine[name] = entry
            elif isinstance(source, Upload):
                source.abort()
            entry.owners.add(owner)
            crowded = entry.copy is not None and self._in_memory > self.memory
        if crowded:
            self._settle(name)

    def _settle(self, name: Digest) -> None:
        """Wait until an upload is on the disk and give its memory back."""
        with self._lock:
            entry = self._quarantine.get(name)
        if entry is None or entry.copy is None:
            return
        path = entry.copy.result()
        with self._lock:
            if self._quarantine.get(name) is entry and entry.copy is not None:
                entry.path, entry.copy = path, None
                self._forget_memory(entry)

    def _forget_memory(self, entry: _Quarantined) -> None:
        if entry.fd >= 0:
            os.close(entry.fd)
            entry.fd = -1
            self._in_memory -= entry.nbytes

    def _copy_out(self, fd: int, nbytes: int, cold: bool) -> Path:
        """Staged file with the bytes of a memory file; closes the descriptor."""
        path = self._shelf.staging / uuid.uuid4().hex
        try:
            with self._lock:
                self._make_room(nbytes)
            with room(str(self._shelf.staging)):
                copy_file(fd, path, nbytes, cold=cold)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        finally:
            os.close(fd)
        return path

    def quarantined(self, name: Digest) -> frozenset[str]:
        """The attempts whose unverified upload this blob is."""
        with self._lock:
            entry = self._quarantine.get(name)
            return frozenset(entry.owners) if entry else frozenset()

    def open_quarantined(self, name: Digest) -> int:
        """New descriptor of an unverified blob, for a validator; it cannot change."""
        with self._lock:
            entry = self._quarantine.get(name)
            if entry is None:
                raise BlobMissing(f"no upload {name} waits for a verdict")
            # opened anew and not duplicated: the uploader's descriptor shares its position with every duplicate
            return os.open(entry.path or f"/proc/self/fd/{entry.fd}", os.O_RDONLY | os.O_CLOEXEC)

    def promote(self, name: Digest) -> None:
        """The blob was verified: it is an ordinary one from now on. Doing it again does nothing."""
        self._settle(name)
        with self._lock:
            entry = self._quarantine.get(name)
            if entry is None:
                if self.has(name):
                    return
                raise BlobMissing(f"no upload {name} waits for a verdict")
            if not self.has(name):
                assert entry.path is not None, "an upload is settled before it is promoted"
                self._place(name, entry.path, entry.nbytes)
                entry.path = None
            self._discard(name, entry)

    def drop(self, name: Digest, owner: str) -> None:
        """This attempt's upload is not wanted; it goes when no other attempt has the same."""
        with self._lock:
            entry = self._quarantine.get(name)
            if entry is not None:
                entry.owners.discard(owner)
                if not entry.owners:
                    self._discard(name, entry)

    def _discard(self, name: Digest, entry: _Quarantined) -> None:
        del self._quarantine[name]
        if entry.path is not None:
            entry.path.unlink(missing_ok=True)
        if entry.copy is not None:
            entry.copy.add_done_callback(_remove_copy)
        self._forget_memory(entry)

    @property
    def used(self) -> int:
        """Bytes of verified blobs."""
        return self._used

    def close(self) -> None:
        """Drop what is unverified and let go of the store."""
        with self._lock:
            for name, entry in list(self._quarantine.items()):
                self._discard(name, entry)
        self._copier.shutdown()
        with self._lock:
            self._shelf.close()

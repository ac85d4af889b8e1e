"""A program's inputs, fetched one ahead of the computation, so that no more are in memory than are needed."""

from __future__ import annotations

import mmap
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Executor, Future
from functools import lru_cache

import numpy as np

from goblin_dask.errors import DigestMismatch, GoblinError
from goblin_dask.graphs.program import decode
from goblin_dask.messages import BlobRef, Routes
from goblin_dask.store.buffers import Array, array_of, nbytes
from goblin_dask.volunteer.cache import Blob, BlobCache
from goblin_dask.volunteer.transfer import Transfers

decode_program = lru_cache(maxsize=64)(decode)
"""`decode`, once for the many tasks that share a program."""


class Abandoned(Exception):
    """The attempt was withdrawn while it was being worked on."""


class FetchFailed(Exception):
    """An input cannot be had; the cause says why."""


class Inputs:
    """The arrays of some references, each fetched when it is asked for or one before.

    Parameters
    ----------
    refs : sequence of BlobRef
        In the order in which they will be asked for.
    routes, grant
        How to get them.
    transfers, cache, pool
        The worker's; fetching blocks threads of `pool`.
    stop : threading.Event
        Set when the attempt is withdrawn.
    """

    def __init__(
        self,
        refs: Sequence[BlobRef],
        routes: Routes,
        grant: str,
        *,
        transfers: Transfers,
        cache: BlobCache,
        pool: Executor,
        stop: threading.Event,
    ):
        for ref in refs:
            if ref.nbytes != nbytes(ref.spec) or (ref.inline is not None and len(ref.inline) != ref.nbytes):
                raise DigestMismatch(f"a reference to {ref.nbytes} bytes for an array that has {nbytes(ref.spec)}")
        self._refs = refs
        self._routes, self._grant = routes, grant
        self._transfers, self._cache, self._pool, self._stop = transfers, cache, pool, stop
        self._futures: dict[int, Future[Blob]] = {}
        self._distant = [slot for slot, ref in enumerate(refs) if ref.inline is None]
        self.fetched = 0
        """Bytes moved so far, mapped ones too."""
        self._start(2)

    def _start(self, count: int) -> None:
        """Begin to fetch the next few that were not begun yet."""
        for slot in self._distant[:count]:
            self._futures[slot] = self._pool.submit(self._fetch, self._refs[slot])
        del self._distant[:count]

    def _fetch(self, ref: BlobRef) -> Blob:
        if self._stop.is_set():
            raise Abandoned
        blob, held = self._cache.get(
            ref.digest, lambda: self._transfers.fetch(ref, self._routes, self._grant, self._stop)
        )
        if not held:
            self.fetched += ref.nbytes
        return blob

    def sources(self) -> list[Callable[[], Array]]:
        """For each reference a function that returns its array, read-only."""
        return [lambda slot=slot: self._load(slot) for slot in range(len(self._refs))]  # type: ignore[misc]

    def _load(self, slot: int) -> Array:
        ref = self._refs[slot]
        if self._stop.is_set():
            raise Abandoned
        if ref.inline is not None:
            return array_of(ref.inline, ref.spec)
        if slot not in self._futures:  # asked for again, or out of order
            if slot in self._distant:
                self._distant.remove(slot)
            self._futures[slot] = self._pool.submit(self._fetch, ref)
        self._start(1)
        try:
            blob = self._futures.pop(slot).result()
        except (Abandoned, CancelledError):
            raise Abandoned from None
        except GoblinError as error:
            raise FetchFailed(str(error)) from error
        array = array_of(blob.view, ref.spec)
        if blob.mapped and isinstance(blob.view.obj, mmap.mmap):
            # What is kept mapped for later tasks shall not stay in this process's resident set, by which a nanny, or
            # the owner, judges it. The pages stay in the page cache; whoever reads them again finds them there.
            owner = array
            while isinstance(
                owner.base, np.ndarray
            ):  # views refer to the first array, not to the one they were made of
                owner = owner.base
            weakref.finalize(owner, blob.view.obj.madvise, mmap.MADV_DONTNEED).atexit = False
        return array

    def close(self) -> None:
        """Cancel what was begun and not asked for."""
        for future in self._futures.values():
            future.cancel()
        self._futures.clear()

"""Blobs that a volunteer keeps for later tasks: bounded, least recently used out first, fetched once at a time."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass

from goblin_dask.digest import Digest

MAPPINGS = 256
"""Mapped blobs kept; each holds a descriptor and address space, no memory of its own."""


@dataclass(frozen=True, slots=True)
class Blob:
    """The bytes of a blob in this process."""

    view: memoryview
    mapped: bool
    """The lab's own file: costs this machine no memory."""

    @property
    def cost(self) -> int:
        """Bytes that it takes here."""
        return 0 if self.mapped else self.view.nbytes


class BlobCache:
    """Least recently used cache of blobs. Thread-safe.

    Parameters
    ----------
    limit : int
        Bytes that are kept; what is in use beyond that goes when its user drops it.
    """

    def __init__(self, limit: int):
        self.limit = limit
        self.used = 0
        self._blobs: OrderedDict[Digest, Blob] = OrderedDict()
        self._fetching: dict[Digest, Future[Blob]] = {}
        self._lock = threading.Lock()

    def get(self, name: Digest, fetch: Callable[[], Blob]) -> tuple[Blob, bool]:
        """The blob, and whether it was here; fetched by `fetch` when it is not, by one thread for all who ask."""
        with self._lock:
            blob = self._blobs.get(name)
            if blob is not None:
                self._blobs.move_to_end(name)
                return blob, True
            future = self._fetching.get(name)
            mine = future is None
            if future is None:
                future = self._fetching[name] = Future()
        if not mine:
            try:
                return future.result(), True
            except Exception:
                # the other one's failure may be its own (an expired grant): try for ourselves
                return self.get(name, fetch)
        try:
            blob = fetch()
        except BaseException as error:
            with self._lock:
                del self._fetching[name]
            future.set_exception(error)
            raise
        with self._lock:
            del self._fetching[name]
            self._keep(name, blob)
        future.set_result(blob)
        return blob, False

    def _keep(self, name: Digest, blob: Blob) -> None:
        if blob.cost > self.limit:
            return
        self._blobs[name] = blob
        self.used += blob.cost
        while self.used > self.limit or len(self._blobs) > MAPPINGS:
            _, old = self._blobs.popitem(last=False)
            self.used -= old.cost

    def held(self, names: Iterable[Digest]) -> tuple[Digest, ...]:
        """Those of `names` that are here."""
        with self._lock:
            return tuple(name for name in dict.fromkeys(names) if name in self._blobs)

    def clear(self) -> None:
        """Drop everything."""
        with self._lock:
            self._blobs.clear()
            self.used = 0

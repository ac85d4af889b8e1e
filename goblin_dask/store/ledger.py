"""The ledger: which tasks were accepted, with what outputs and by what verdict. It outlives the process.

Resume, reuse across jobs and "nothing computed twice" are one look-up here. Writes are grouped: a thread commits
whatever has gathered since the last commit, so that thousands of tiny tasks share a few transactions.
"""

from __future__ import annotations

import queue
import sqlite3
import threading
from collections.abc import Iterable
from concurrent.futures import Future
from pathlib import Path

import msgspec

from goblin_dask.errors import StoreError
from goblin_dask.messages import BlobRef, Verdict, encode
from goblin_dask.store.blobs import BlobStore

_SCHEMA = """
CREATE TABLE IF NOT EXISTS accepted (task BLOB PRIMARY KEY, entry BLOB NOT NULL) WITHOUT ROWID;
"""
_VERSION = 1
_MANY = 500
"""Tasks in one statement; SQLite bounds the variables of a statement."""


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """An accepted task."""

    outputs: tuple[BlobRef, ...]
    """References, small outputs themselves."""
    verdict: Verdict


_decoder = msgspec.msgpack.Decoder(Entry)


class Ledger:
    """Accepted tasks in a SQLite file. Thread-safe.

    Parameters
    ----------
    path : path or str
        File; made when it is not there.

    Raises
    ------
    StoreError
        When the file is not a ledger of this version.
    """

    def __init__(self, path: Path | str):
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._pending: dict[str, tuple[Entry | None, Future[None]]] = {}
        self._lock = threading.Lock()
        self._wake: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._broken: StoreError | None = None
        self._reader = self._connect()
        self._thread = threading.Thread(target=self._write, name="goblin-ledger", daemon=True)
        self._thread.start()

    def _connect(self) -> sqlite3.Connection:
        try:
            connection = sqlite3.connect(self.path, isolation_level=None, check_same_thread=False, timeout=30)
            connection.execute("PRAGMA journal_mode=WAL")
            # a power cut may lose the last commits, which are then computed again; it never spoils the file
            connection.execute("PRAGMA synchronous=NORMAL")
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            if version not in (0, _VERSION):
                raise StoreError(f"{self.path} is a ledger of version {version}; this program reads {_VERSION}")
            connection.executescript(_SCHEMA)
            connection.execute(f"PRAGMA user_version={_VERSION}")
        except sqlite3.Error as error:
            raise StoreError(f"{self.path} cannot be opened as a ledger ({error}): move it away or name another") from (
                error
            )
        return connection

    def record(self, task: str, outputs: Iterable[BlobRef], verdict: Verdict) -> Future[None]:
        """Note an accepted task; looked up at once, on disk when the future is done."""
        return self._enqueue(task, Entry(tuple(outputs), verdict))

    def withdraw(self, task: str) -> Future[None]:
        """Forget a task: its volunteer was proven wrong, or its blobs are gone."""
        return self._enqueue(task, None)

    def _enqueue(self, task: str, entry: Entry | None) -> Future[None]:
        future: Future[None] = Future()
        with self._lock:
            if self._broken is not None:
                raise self._broken
            earlier = self._pending.get(task)
            if earlier is not None:  # superseded before it was written: both are done when the later one is
                future.add_done_callback(lambda done: _follow(done, earlier[1]))
            first = not self._pending
            self._pending[task] = (entry, future)
        if first:
            self._wake.put(True)
        return future

    def lookup(self, tasks: Iterable[str], blobs: BlobStore | None = None) -> dict[str, Entry]:
        """Those of `tasks` that were accepted and, with `blobs`, whose outputs are all still there."""
        wanted = list(dict.fromkeys(tasks))
        found: dict[str, Entry] = {}
        with self._lock:
            # under the lock, so that nothing moves from `pending` to the file in between
            pending = {task: self._pending[task][0] for task in wanted if task in self._pending}
            on_disk = [task for task in wanted if task not in pending]
            for start in range(0, len(on_disk), _MANY):
                part = [bytes.fromhex(task) for task in on_disk[start : start + _MANY]]
                marks = ",".join("?" * len(part))
                rows = self._reader.execute(f"SELECT task, entry FROM accepted WHERE task IN ({marks})", part)  # noqa: S608
                found.update((bytes(task).hex(), _decoder.decode(entry)) for task, entry in rows)
        found.update((task, entry) for task, entry in pending.items() if entry is not None)
        if blobs is None:
            return found
        return {
            task: entry
            for task, entry in found.items()
            if all(ref.inline is not None or blobs.has(ref.digest) for ref in entry.outputs)
        }

    def _write(self) -> None:
        connection = self._connect()
        while self._wake.get():
            with self._lock:
                batch = dict(self._pending)
            try:
                self._commit(connection, batch)
            except sqlite3.Error as error:
                failure = StoreError(f"the ledger {self.path} cannot be written ({error}): free space and start again")
                failure.__cause__ = error
                with self._lock:
                    self._broken = failure
                    batch, self._pending = self._pending, {}
                for _, future in batch.values():
                    future.set_exception(failure)
                break
            with self._lock:
                for task, (_, future) in batch.items():
                    if self._pending[task][1] is future:
                        del self._pending[task]
                if self._pending:
                    self._wake.put(True)
            for _, future in batch.values():
                if not future.done():
                    future.set_result(None)
        connection.close()

    @staticmethod
    def _commit(connection: sqlite3.Connection, batch: dict[str, tuple[Entry | None, Future[None]]]) -> None:
        kept = [(bytes.fromhex(task), encode(entry)) for task, (entry, _) in batch.items() if entry is not None]
        gone = [(bytes.fromhex(task),) for task, (entry, _) in batch.items() if entry is None]
        connection.execute("BEGIN IMMEDIATE")
        try:
            connection.executemany("INSERT OR REPLACE INTO accepted VALUES (?, ?)", kept)
            connection.executemany("DELETE FROM accepted WHERE task = ?", gone)
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise

    def __len__(self) -> int:
        with self._lock:
            (count,) = self._reader.execute("SELECT count(*) FROM accepted").fetchone()
            return int(count)

    def close(self) -> None:
        """Write what is pending and close the file."""
        with self._lock:
            waiting = [future for _, future in self._pending.values()]
        for future in waiting:
            future.exception()
        self._wake.put(False)
        self._thread.join()
        self._reader.close()


def _follow(done: Future[None], other: Future[None]) -> None:
    if not other.done():
        error = done.exception()
        if error is None:
            other.set_result(None)
        else:
            other.set_exception(error)

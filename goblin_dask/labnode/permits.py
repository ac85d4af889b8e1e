"""Who may move which blob: the lab's own knowledge of its tasks, unlocked by the gateway's grants."""

from __future__ import annotations

import os
import threading
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from goblin_dask.digest import is_digest
from goblin_dask.errors import BlobMissing, Refused
from goblin_dask.messages import BlobRef, SubmitTask
from goblin_dask.store import chunks, grants
from goblin_dask.store.blobs import BlobStore
from goblin_dask.store.buffers import nbytes
from goblin_dask.store.grants import Grant
from goblin_dask.store.refs import ChunkRef
from goblin_dask.store.upload import Upload


@dataclass(slots=True)
class _Expected:
    """A task that is on the grid."""

    inputs: dict[str, ChunkRef]
    sizes: frozenset[int]
    """Bytes that its outputs have."""
    outputs: int
    """How many it has."""
    peak: int = 0
    """Projected peak memory: more than that never lives at a time."""
    uploads: dict[str, set[str]] = field(default_factory=dict)
    """Digests of the uploads that wait for a verdict, by attempt."""
    unchecked: frozenset[str] = frozenset()
    """Digests of the blobs that were accepted without a check, which may come yet."""
    cold: bool = False
    """Nobody computes with its outputs."""


class Permits:
    """Answers for every request, of any route, whether it may be served. Thread-safe.

    Parameters
    ----------
    blobs : BlobStore
        Where blobs and uploads are.
    key : bytes
        The lab's grant key.
    """

    def __init__(self, blobs: BlobStore, key: bytes):
        self.blobs = blobs
        self._key = key
        self._tasks: dict[str, _Expected] = {}
        self._lock = threading.Lock()

    def expect(self, task: SubmitTask, refs: Iterable[ChunkRef], *, cold: bool = False) -> None:
        """From now on grants for `task` are honoured.

        Parameters
        ----------
        refs : iterable of ChunkRef
            Where its inputs lie.
        cold : bool
            Nobody computes with its outputs: they need not stay in memory.
        """
        inputs = {ref.digest: ref for ref in refs}
        sizes = frozenset(nbytes(spec) for spec in task.outputs)
        with self._lock:
            known = self._tasks.get(task.task)
            uploads, unchecked = (known.uploads, known.unchecked) if known else ({}, frozenset())
            self._tasks[task.task] = _Expected(
                inputs, sizes, len(task.outputs), task.peak, uploads, unchecked, cold
            )  # fmt: skip

    def accept(self, task: str, outputs: Collection[BlobRef], *, unchecked: bool = False) -> None:
        """The task was accepted: these uploads become blobs, its others go.

        Parameters
        ----------
        task, outputs
            As the gateway says.
        unchecked : bool
            Nobody has checked it: whoever is granted a check is served until the task is forgotten.

        Raises
        ------
        BlobMissing
            When one of them is neither an upload of this task nor a blob.
        """
        with self._lock:
            expected = self._tasks.get(task)
            uploaded = set().union(*expected.uploads.values()) if expected else set()
        for ref in outputs:
            if ref.inline is None:
                if ref.digest in uploaded:
                    self.blobs.promote(ref.digest)
                elif not self.blobs.has(ref.digest):
                    raise BlobMissing(f"output {ref.digest} was accepted but never uploaded for task {task}")
        self.forget(task)
        if unchecked and expected is not None:
            names = frozenset(ref.digest for ref in outputs if ref.inline is None)
            with self._lock:
                self._tasks[task] = _Expected(
                    expected.inputs, expected.sizes, expected.outputs, expected.peak, unchecked=names
                )

    def forget(self, task: str) -> None:
        """Grants for this task are void, its unverified uploads go."""
        with self._lock:
            expected = self._tasks.pop(task, None)
        for attempt, digests in (expected.uploads if expected else {}).items():
            for name in digests:
                self.blobs.drop(name, attempt)

    def drop(self, task: str, attempt: str) -> None:
        """One attempt's uploads are not wanted."""
        with self._lock:
            expected = self._tasks.get(task)
            digests = expected.uploads.pop(attempt, set()) if expected else set()
        for name in digests:
            self.blobs.drop(name, attempt)

    def _granted(self, text: str, name: str) -> tuple[Grant, _Expected]:
        if not is_digest(name):
            raise Refused(f"{name[:80]!r} is no blob address: 64 lower-case hexadecimal characters are")
        grant = grants.verify(self._key, text)
        expected = self._tasks.get(grant.task)
        if expected is None:
            raise Refused("nobody waits for this task any more")
        return grant, expected

    def open(self, text: str, name: str) -> tuple[int, int, int]:
        """Descriptor, offset and length of a blob that the bearer may read; the caller closes the descriptor.

        Raises
        ------
        Refused
            When the grant does not cover it.
        BlobMissing
            When it is covered, and gone.
        """
        with self._lock:
            grant, expected = self._granted(text, name)
            ref = expected.inputs.get(name)
            handed_in = (expected.unchecked, *expected.uploads.values())
            uploaded = grant.kind == "check" and any(name in digests for digests in handed_in)
        if ref is not None:
            return chunks.open_chunk(self.blobs, ref)
        if uploaded:
            # another task's equal upload may have been accepted meanwhile
            fd = self.blobs.open_quarantined(name) if self.blobs.quarantined(name) else self.blobs.open(name)
            return fd, 0, os.fstat(fd).st_size
        raise Refused("the grant does not cover this blob: it belongs to another task")

    def admit(self, text: str, name: str, size: int) -> Grant:
        """The grant of somebody who may hand in this blob, before a byte of it is read.

        Raises
        ------
        Refused
            When the grant does not cover it, or no output of the task has this size.
        """
        with self._lock:
            grant, expected = self._granted(text, name)
            sizes, count = _handed_in(grant, expected)
            if size not in sizes:
                raise Refused(f"an upload of {size} bytes; the outputs of this task have {sorted(sizes)}")
            digests = expected.uploads.get(grant.attempt, set())
            if name not in digests and len(digests) >= count:
                raise Refused(f"attempt {grant.attempt} has handed in its {count} outputs already")
        return grant

    def admit_any(self, text: str, name: str) -> Upload:
        """An upload of any of the bearer's outputs; refuses as `admit` and `begin` do."""
        with self._lock:
            longest = max(_handed_in(*self._granted(text, name))[0])
        return self.begin(self.admit(text, name, longest), longest)

    def begin(self, grant: Grant, size: int) -> Upload:
        """An upload for what `admit` let in; raises `StoreFull`."""
        with self._lock:
            expected = self._tasks.get(grant.task)
        return self.blobs.upload(size, cold=expected is not None and expected.cold)

    def receive(self, grant: Grant, name: str, source: Upload | int) -> None:
        """Quarantine what `admit` let in.

        Raises
        ------
        DigestMismatch
            When it is not what it was announced as.
        Refused
            When nobody waits for it any more.
        """
        with self._lock:
            expected = self._tasks.get(grant.task)
        self.blobs.quarantine(name, grant.attempt, source, cold=expected is not None and expected.cold)
        with self._lock:
            expected = self._tasks.get(grant.task)
            digests = expected.uploads.setdefault(grant.attempt, set()) if expected else set()
            kept = expected is not None and (name in digests or len(digests) < _handed_in(grant, expected)[1])
            if kept:
                digests.add(name)
        if not kept:
            self.blobs.drop(name, grant.attempt)
            raise Refused("nobody waits for this upload any more")


def _handed_in(grant: Grant, expected: _Expected) -> tuple[frozenset[int], int]:
    """Sizes, in bytes, and number of what the bearer may hand in.

    Raises
    ------
    Refused
        When the grant is for a check, or for more than the task's program ever has in memory.
    """
    if grant.kind == "lease":
        return expected.sizes, expected.outputs
    if grant.kind != "reveal" or not grant.sizes:
        raise Refused("a grant to check hands in nothing")
    if sum(grant.sizes) > expected.peak:
        raise Refused(f"{sum(grant.sizes)} bytes of a program that never has more than {expected.peak} in memory")
    return frozenset(grant.sizes), len(grant.sizes)

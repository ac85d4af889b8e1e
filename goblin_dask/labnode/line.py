"""The researcher's line to a lab node: HTTP with the laboratory's token, over connections that are used again."""

from __future__ import annotations

import http.client
import pickle
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self
from urllib.parse import urlsplit

import numpy as np

from goblin_dask.errors import ConnectionLost, InputError, JobError, Refused
from goblin_dask.labnode import parcels
from goblin_dask.labnode.parcels import Pieces
from goblin_dask.store.buffers import array_of, dtype_of, nbytes
from goblin_dask.store.refs import ChunkRef


class Releases:
    """A context manager that lets go of something in the laboratory at its end."""

    def release(self) -> None:
        """Let go of it."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        try:
            self.release()
        except ConnectionLost:
            if error is None:
                raise


class Line:
    """Requests to a lab node. Thread-safe.

    Parameters
    ----------
    url, token : str

    Raises
    ------
    InputError
        When that is no address.
    """

    def __init__(self, url: str, token: str):
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname:
            raise InputError(f"{url!r} is not the address of a lab node; http://HOST:PORT is expected")
        self.url, self._token = url, token
        self._address = (parts.hostname, parts.port or 80)
        self._idle: list[http.client.HTTPConnection] = []
        self._lock = threading.Lock()
        weakref.finalize(self, _close_all, self._idle)

    def close(self) -> None:
        """Close the connections that are not in use."""
        with self._lock:
            _close_all(self._idle)

    def request(self, method: str, path: str, body: bytes | None = None) -> bytes:
        """Ask, and read the answer.

        Raises
        ------
        ConnectionLost
            When nobody answers, or not to the end.
        GoblinError
            What the lab node says in its place: `Refused`, `InputError`, `JobError`, or a job's own error.
        """
        with self.response(method, path, body) as response:
            return response.read()

    @contextmanager
    def response(
        self, method: str, path: str, body: bytes | Pieces | None = None, *, once: bool = False
    ) -> Iterator[http.client.HTTPResponse]:
        """A response; its connection is used again when all of it was read.

        Parameters
        ----------
        method, path : str
        body : bytes, or sequence of bytes and memoryviews
        once : bool
            Never send it twice: over a connection of its own, for one that was used before may be closed by now, or
            after the lab node has read what was sent.
        """
        connection, response = self._send(method, path, body, once)
        error = None
        try:
            if response.status >= 400:
                error = _error(response)  # raised below: a function's own error may be an OSError too
            else:
                yield response
        except (http.client.HTTPException, OSError) as lost:
            connection.close()
            raise ConnectionLost(f"the lab node at {self.url} went away: {lost}") from lost
        finally:
            if response.isclosed() and connection.sock is not None and not once:
                with self._lock:
                    self._idle.append(connection)
            else:
                connection.close()
        if error is not None:
            raise error

    def _send(
        self, method: str, path: str, body: bytes | Pieces | None, once: bool
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        headers = {"Authorization": f"Bearer {self._token}"}
        if body is not None and not isinstance(body, bytes):
            headers["Content-Length"] = str(parcels.size(body))
        with self._lock:
            connection = self._idle.pop() if self._idle and not once else None
        for fresh in (False, True):
            if connection is None:
                fresh = True
                connection = http.client.HTTPConnection(*self._address)
            try:
                if connection.sock is None:
                    connection.connect()  # with TCP_NODELAY
                connection.request(method, path, body, headers)
                return connection, connection.getresponse()
            except (http.client.HTTPException, OSError) as error:
                connection.close()
                if fresh:
                    raise ConnectionLost(
                        f"the lab node at {self.url} cannot be reached ({error}): check the address, and that "
                        "`goblin lab` runs there"
                    ) from error
                connection = None  # an idle connection that the lab node has closed in the meantime
        raise AssertionError

    def fetch(self, job: str, ref: ChunkRef) -> Any:
        """An array of a result, read into the memory that it stays in."""
        if ref.inline is not None:
            return array_of(ref.inline, ref.spec)
        buffer = np.empty(nbytes(ref.spec), np.uint8)
        with self.response("GET", f"/jobs/{job}/blobs/{ref.digest}") as response:
            view, done = memoryview(buffer.data), 0
            while done < len(view):
                count = response.readinto(view[done:])
                if not count:
                    raise ConnectionLost(f"the lab node at {self.url} sent only a part of an array")
                done += count
            response.read()
        return buffer.view(dtype_of(ref.spec.dtype)).reshape(ref.spec.shape)


def _close_all(connections: list[http.client.HTTPConnection]) -> None:
    while connections:
        connections.pop().close()


def _error(response: http.client.HTTPResponse) -> Exception:
    """What an answer other than success means."""
    body = response.read()
    if response.status == 409:
        error, cause = pickle.loads(body)  # noqa: S301 from the researcher's own laboratory
        if cause is not None:
            error.__cause__ = cause
        return error  # type: ignore[no-any-return]
    text = body.decode(errors="replace")
    if response.status in (401, 403):
        return Refused(text)
    if response.status == 400:
        return InputError(text)
    return JobError(f"the lab node answers {response.status}: {text[:500]}")

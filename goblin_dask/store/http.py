"""Blobs over HTTP, the side that asks: blocking, for threads, with one copy between socket and memory.

A blocking client with ``readinto`` moves several times what an asynchronous one does, and whoever fetches or sends a
blob has a thread to wait in anyway.
"""

from __future__ import annotations

import http.client
import os
import ssl
import threading
from contextlib import suppress
from typing import Any, NoReturn
from urllib.parse import urlsplit

from blake3 import blake3

from goblin_dask.digest import Digest
from goblin_dask.errors import BlobMissing, ConnectionLost, DigestMismatch, InputError, Refused, StoreError
from goblin_dask.store.descriptors import empty_memory_file, map_file
from goblin_dask.store.upload import Upload

PIECE = 1 << 20
"""Bytes taken from a socket at a time; large enough to hash without the GIL."""

_BROKEN = (OSError, http.client.HTTPException)


class BlobClient:
    """Connections to one server, kept for the next blob. Thread-safe.

    Parameters
    ----------
    url : str
        ``http://host:port`` or ``https://…``, with a path before the blobs' where there is one.
    context : ssl.SSLContext, optional
        For https; the system's authorities by default.
    timeout : float
        Seconds after which a silent server is given up.
    quote : bool
        Whether errors repeat what the server said. Not where a stranger names the server and hears of the errors: he
        could read other servers of this network so.
    """

    def __init__(self, url: str, *, context: ssl.SSLContext | None = None, timeout: float = 60.0, quote: bool = True):
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InputError(f"{url!r} is no address of blobs; http://HOST:PORT or https://HOST:PORT is expected")
        self.url = url.rstrip("/")
        self._path = parts.path.rstrip("/")
        self._quote = quote
        self._host, self._port, self._timeout = parts.hostname, parts.port, timeout
        self._context = (context or ssl.create_default_context()) if parts.scheme == "https" else None
        self._idle: list[http.client.HTTPConnection] = []
        self._lock = threading.Lock()

    def fetch(self, path: str, grant: str, name: Digest, nbytes: int) -> memoryview:
        """The blob at a path, in a memory file of its own, so that all of it goes back when the view is dropped.

        Raises
        ------
        BlobMissing, Refused, ConnectionLost
            As the server, or the lack of one, says.
        DigestMismatch
            When other bytes came.
        """
        if nbytes == 0:
            return memoryview(b"")
        fd, memory = empty_memory_file(nbytes)
        try:
            with memory, memoryview(memory) as view:
                self._receive(path, grant, name, view)
            return map_file(fd, 0, nbytes)
        finally:
            os.close(fd)

    def _receive(self, path: str, grant: str, name: Digest, view: memoryview) -> None:
        connection, response = self._ask("GET", path, grant)
        try:
            self._expect(response, (200,))
            if response.length != view.nbytes:
                raise DigestMismatch(f"{self.url} sends {response.length} bytes of a blob that has {view.nbytes}")
            hasher, done = blake3(), 0
            while done < view.nbytes:
                count = response.readinto(view[done : done + PIECE])
                if not count:
                    raise ConnectionLost(f"{self.url} stopped after {done} of {view.nbytes} bytes")
                hasher.update(view[done : done + count])
                done += count
        except _BROKEN as error:
            connection.close()
            self._lost(error)
        except BaseException:
            connection.close()
            raise
        self._keep(connection, response)
        if hasher.hexdigest() != name:
            raise DigestMismatch(f"{self.url} sent other bytes than those of blob {name}")

    def download(self, path: str, grant: str, upload: Upload) -> None:
        """Write what a server sends into an upload of the blob store."""
        connection, response = self._ask("GET", path, grant)
        try:
            self._expect(response, (200,))
            while piece := response.read(PIECE):
                upload.write(piece)
            if response.length:
                raise ConnectionLost(f"{self.url} stopped {response.length} bytes before the end")
        except _BROKEN as error:
            connection.close()
            self._lost(error)
        except BaseException:
            connection.close()
            raise
        self._keep(connection, response)

    def send(self, method: str, path: str, grant: str, data: Any = b"", *, fd: int = -1, offset: int = 0) -> None:
        """Send a buffer, or as many bytes of a file as `data` says when it is an integer.

        Raises
        ------
        Refused, StoreError, ConnectionLost
            As the server, or the lack of one, says.
        """
        nbytes = data if fd >= 0 else memoryview(data).nbytes

        def body(connection: http.client.HTTPConnection) -> None:
            if fd < 0:
                connection.sock.sendall(data)
            else:
                with os.fdopen(os.dup(fd), "rb") as file:
                    connection.sock.sendfile(file, offset, nbytes)

        connection, response = self._ask(method, path, grant, nbytes=nbytes, body=body if nbytes else None)
        try:
            self._expect(response, (200, 204))
        except BaseException:
            connection.close()
            raise
        self._keep(connection, response)

    # --- connections -----------------------------------------------------------------------------------------
    def _ask(
        self, method: str, path: str, grant: str, *, nbytes: int | None = None, body: Any = None
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        with self._lock:
            connection = self._idle.pop() if self._idle else None
        if connection is not None:
            with suppress(*_BROKEN):  # it may have been closed while it was idle
                return connection, self._exchange(connection, method, path, grant, nbytes, body)
            connection.close()
        if self._context is not None:
            connection = http.client.HTTPSConnection(
                self._host, self._port, timeout=self._timeout, context=self._context
            )
        else:
            connection = http.client.HTTPConnection(self._host, self._port, timeout=self._timeout)
        try:
            return connection, self._exchange(connection, method, path, grant, nbytes, body)
        except ssl.SSLCertVerificationError as error:
            connection.close()
            raise Refused(
                f"the certificate of {self.url} is not trusted ({error.verify_message}): set goblin.tls.ca-file to the "
                "file of the authority that signed it"
            ) from error
        except _BROKEN as error:
            connection.close()
            self._lost(error)

    def _exchange(
        self, connection: http.client.HTTPConnection, method: str, path: str, grant: str, nbytes: int | None, body: Any
    ) -> http.client.HTTPResponse:
        connection.putrequest(method, self._path + path, skip_accept_encoding=True)
        connection.putheader("Authorization", f"Bearer {grant}")
        if nbytes is not None:
            connection.putheader("Content-Length", str(nbytes))
        connection.endheaders()
        if body is not None:
            try:
                body(connection)
            except (BrokenPipeError, ConnectionResetError):
                connection.sock.settimeout(5)  # it may have said why before it closed
        return connection.getresponse()

    def _keep(self, connection: http.client.HTTPConnection, response: http.client.HTTPResponse) -> None:
        response.read()
        if response.will_close:
            connection.close()
        else:
            with self._lock:
                self._idle.append(connection)

    def _expect(self, response: http.client.HTTPResponse, statuses: tuple[int, ...]) -> None:
        if response.status in statuses:
            return
        reason = response.read(500).decode(errors="replace").strip() or response.reason
        text = f"{self.url} answers {response.status}" + (f": {reason}" if self._quote else "")
        if response.status in (401, 403):
            raise Refused(text)
        if response.status in (404, 410):
            raise BlobMissing(text)
        if response.status >= 500 or response.status in (408, 429):
            raise ConnectionLost(text)
        raise StoreError(text)

    def _lost(self, error: BaseException) -> NoReturn:
        if isinstance(error, ConnectionLost):
            raise error
        raise ConnectionLost(f"{self.url} cannot be reached or was cut off ({error})") from error

    def close(self) -> None:
        """Close idle connections."""
        with self._lock:
            for connection in self._idle:
                connection.close()
            self._idle.clear()

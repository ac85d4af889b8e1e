"""Blobs between a worker and the lab by the best of three routes: descriptors, HTTP to the lab, HTTP by the gateway."""

from __future__ import annotations

import logging
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from goblin_dask.errors import BlobMissing, ConnectionLost, GoblinError, Refused
from goblin_dask.messages import BlobRef, Message, Routes, decode, encode
from goblin_dask.store import descriptors as d
from goblin_dask.store.http import BlobClient
from goblin_dask.volunteer.cache import Blob

logger = logging.getLogger(__name__)

T = TypeVar("T")

ROUNDS = 6
"""Times that all routes are tried before an attempt is given up. The pauses are 15 s together: longer than a short cut,
or the restart of a gateway."""
PAUSE = 0.5
"""Seconds before the second round; doubled for each further one."""
SULK = 60.0
"""Seconds for which a route that failed is tried last."""


class LocalClient:
    """Connections to one lab's Unix socket, one for each thread that uses it at a time."""

    def __init__(self, name: str):
        self._name = name
        self._idle: list[socket.socket] = []
        self._lock = threading.Lock()

    def fetch(self, ref: BlobRef, grant: str) -> memoryview:
        """Mapping of a blob."""
        reply, fd = self._ask(d.Get(ref.digest, grant), None)
        if not isinstance(reply, d.Opened) or fd is None or reply.nbytes != ref.nbytes:
            if fd is not None:
                os.close(fd)
            raise ConnectionLost(f"the laboratory's socket answered {type(reply).__name__} to a request for a blob")
        try:
            return d.map_file(fd, reply.offset, reply.nbytes)
        finally:
            os.close(fd)

    def send(self, ref: BlobRef, grant: str, fd: int) -> None:
        """Hand in a sealed memory file."""
        reply, extra = self._ask(d.Put(ref.digest, grant, ref.nbytes), fd)
        if extra is not None:
            os.close(extra)
        if not isinstance(reply, d.Stored) or reply.digest != ref.digest:
            raise ConnectionLost(f"the laboratory's socket answered {type(reply).__name__} to an upload")

    def _ask(self, request: Message, fd: int | None) -> tuple[d.Reply, int | None]:
        with self._lock:
            sock = self._idle.pop() if self._idle else None
        try:
            if sock is None:
                sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                sock.settimeout(60)
                sock.connect(d.address(self._name))
            d.send_packet(sock, encode(request), fd)
            data, received = d.receive_packet(sock)
            if not data:
                raise ConnectionLost("the laboratory's socket was closed")
        except OSError as error:
            if sock is not None:
                sock.close()
            if isinstance(error, ConnectionLost):
                raise
            raise ConnectionLost(f"the laboratory's socket cannot be reached ({error})") from error
        reply = decode(data, d.reply_decoder)
        with self._lock:
            self._idle.append(sock)
        if isinstance(reply, d.Denied):
            if received is not None:
                os.close(received)
            raise (BlobMissing if reply.missing else Refused)(f"the laboratory says: {reply.reason}")
        return reply, received

    def close(self) -> None:
        """Close idle connections."""
        with self._lock:
            for sock in self._idle:
                sock.close()
            self._idle.clear()


class Transfers:
    """Moves blobs. Methods block, for threads; a cut transfer is repeated whole, which changes nothing.

    Parameters
    ----------
    gateway : str
        Base URL of the gateway, for the relay; empty when there is none.
    context : ssl.SSLContext, optional
        Whom to trust with https.
    """

    def __init__(self, gateway: str = "", context: ssl.SSLContext | None = None):
        self._gateway, self._context = gateway, context
        self._local: dict[str, LocalClient] = {}
        self._http: dict[str, BlobClient] = {}
        self._failed: dict[str, float] = {}
        self._lock = threading.Lock()

    def fetch(self, ref: BlobRef, routes: Routes, grant: str, stop: threading.Event) -> Blob:
        """The bytes of a blob, with the right digest unless the lab itself mapped them.

        Raises
        ------
        GoblinError
            What the last route said.
        """

        def local() -> Blob:
            return Blob(self._local_client(routes.local).fetch(ref, grant), mapped=True)

        def http(base: str, path: str) -> Callable[[], Blob]:
            return lambda: Blob(self._client(base).fetch(path, grant, ref.digest, ref.nbytes), mapped=False)

        return self._by_any_route(routes, ref, local, http, stop)

    def send(self, ref: BlobRef, fd: int, routes: Routes, grant: str, stop: threading.Event) -> None:
        """Hand in an output that lies in a sealed memory file.

        Raises
        ------
        GoblinError
            What the last route said.
        """

        def local() -> None:
            self._local_client(routes.local).send(ref, grant, fd)

        def http(base: str, path: str) -> Callable[[], None]:
            return lambda: self._client(base).send("PUT", path, grant, ref.nbytes, fd=fd)

        self._by_any_route(routes, ref, local, http, stop)

    def _by_any_route(
        self,
        routes: Routes,
        ref: BlobRef,
        local: Callable[[], T],
        http: Callable[[str, str], Callable[[], T]],
        stop: threading.Event,
    ) -> T:
        ways: list[tuple[str, Callable[[], T]]] = []
        if routes.local.startswith(d.PREFIX):  # no other socket of this machine is dialled for a stranger
            ways.append((routes.local, local))
        if routes.direct:
            ways.append((routes.direct, http(routes.direct, f"/blobs/{ref.digest}")))
        if routes.relay and self._gateway:
            ways.append((self._gateway, http(self._gateway, f"{routes.relay}/{ref.digest}")))
        problem: GoblinError = ConnectionLost("the lease names no way to the laboratory")
        pause = PAUSE
        for round_ in range(ROUNDS if ways else 0):
            if round_ and stop.wait(pause * 2 ** (round_ - 1)):
                break
            now = time.monotonic()
            for name, way in sorted(ways, key=lambda w: self._failed.get(w[0], 0.0) > now):  # stable: best first
                try:
                    result = way()
                except (Refused, BlobMissing):
                    raise  # the same laboratory answers on every route
                except GoblinError as error:
                    logger.info("route %s: %s", name, error)
                    self._failed[name] = time.monotonic() + SULK
                    problem = error
                else:
                    self._failed.pop(name, None)
                    return result
        raise problem

    def _local_client(self, name: str) -> LocalClient:
        with self._lock:
            return self._local.setdefault(name, LocalClient(name))

    def _client(self, base: str) -> BlobClient:
        with self._lock:
            if base not in self._http:
                self._http[base] = BlobClient(base, context=self._context, quote=False)
            return self._http[base]

    def close(self) -> None:
        """Close idle connections."""
        for local in self._local.values():
            local.close()
        for remote in self._http.values():
            remote.close()

"""The lab's Unix socket: blobs as file descriptors, for volunteers and validators of the same host and user.

A descriptor tells the path of its file, and gives all of the file where only a part is an input. To processes of the
lab's own user that is nothing new; others of the host are not served, and get their blobs over HTTP.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import struct
import threading

from goblin_dask.errors import BlobMissing, GoblinError, WireError
from goblin_dask.labnode.permits import Permits
from goblin_dask.messages import decode, encode
from goblin_dask.store import descriptors as d

logger = logging.getLogger(__name__)

PEERS = 128
"""Connections at a time; more are closed at once."""


def _user(peer: socket.socket) -> int:
    """Whose process is at the other end, says the kernel."""
    _, user, _ = struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return int(user)


class LocalServer:
    """Listens on an abstract address in a thread of its own; each peer has a thread, which blocks on nobody else.

    Parameters
    ----------
    permits : Permits
        Decides what is served.
    """

    def __init__(self, permits: Permits):
        self._permits = permits
        self.name = f"{d.PREFIX}{secrets.token_hex(16)}"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(d.address(self.name))
        self._listener.listen(PEERS)
        self._peers: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._closed = False
        self._acceptor = threading.Thread(target=self._accept, name="goblin-local", daemon=True)
        self._acceptor.start()

    def _accept(self) -> None:
        while True:
            try:
                peer, _ = self._listener.accept()
            except OSError:
                if self._closed:
                    return
                raise
            with self._lock:
                self._threads = [thread for thread in self._threads if thread.is_alive()]
                if self._closed or len(self._peers) >= PEERS or _user(peer) != os.geteuid():
                    peer.close()
                    continue
                self._peers.add(peer)
                thread = threading.Thread(target=self._serve, args=(peer,), name="goblin-local-peer", daemon=True)
                self._threads.append(thread)
                thread.start()

    def _serve(self, peer: socket.socket) -> None:
        try:
            while True:
                data, fd = d.receive_packet(peer)
                if not data:
                    break
                try:
                    self._answer(peer, data, fd)
                finally:
                    if fd is not None:
                        os.close(fd)
        except WireError as error:
            logger.warning("a local peer broke the protocol: %s", error)
            with contextlib.suppress(OSError):
                d.send_packet(peer, encode(d.Denied(str(error))))
        except OSError as error:
            if not self._closed:
                logger.info("a local peer went away: %s", error)
        finally:
            with self._lock:
                self._peers.discard(peer)
            peer.close()

    def _answer(self, peer: socket.socket, data: bytes, fd: int | None) -> None:
        request = decode(data, d.request_decoder)
        try:
            if isinstance(request, d.Get):
                opened, offset, nbytes = self._permits.open(request.grant, request.digest)
                try:
                    d.send_packet(peer, encode(d.Opened(offset, nbytes)), opened)
                finally:
                    os.close(opened)
                return
            grant = self._permits.admit(request.grant, request.digest, request.nbytes)
            if fd is None:
                raise WireError("an upload came without its memory file")
            d.check_sealed(fd, request.nbytes)
            self._permits.receive(grant, request.digest, fd)
            reply: d.Reply = d.Stored(request.digest)
        except WireError as error:  # a refusal too: the peer stays, it may have other business
            reply = d.Denied(str(error))
        except GoblinError as error:
            reply = d.Denied(str(error), missing=isinstance(error, BlobMissing))
        d.send_packet(peer, encode(reply))

    def close(self) -> None:
        """Stop serving; blocked peers are cut off."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._acceptor.join()
        self._listener.close()
        with self._lock:
            peers, threads = list(self._peers), list(self._threads)
        for peer in peers:
            with contextlib.suppress(OSError):
                peer.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            thread.join()

"""Blobs as file descriptors: sealed memory files, mappings, and the protocol that passes them over a Unix socket.

A volunteer on the lab's own host gets read-only descriptors of the files in which blobs lie and maps them; it hands in
its outputs as *sealed* memory files, which nobody, its maker included, can change after they were verified. The
protocol is one packet a request and one packet a reply on a ``SOCK_SEQPACKET`` socket of an abstract address.
"""

from __future__ import annotations

import array
import contextlib
import errno
import fcntl
import mmap
import os
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from goblin_dask.errors import DigestMismatch, WireError
from goblin_dask.messages import Message

PACKET_LIMIT = 4096
"""Longest request or reply, in bytes."""

PREFIX = "goblin-"
"""How the names of labs' sockets begin."""

_HUGE = 4 << 20
"""Bytes from which a memory file is given huge pages where there are some: each would round a small one up."""

_BLOCK = 1 << 16
"""Direct I/O takes multiples of a medium's block, which this is one of."""

_PIECE = 8 << 20
"""Bytes of one direct write."""

SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
"""All four: no write, no change of length, and no seal can be added or removed any more."""


class Get(Message, frozen=True):
    """Asks for a read-only descriptor of a blob."""

    digest: str
    grant: str


class Put(Message, frozen=True):
    """Hands in a blob: a sealed memory file comes with it."""

    digest: str
    grant: str
    nbytes: int


class Opened(Message, frozen=True):
    """The blob is the bytes from `offset` of the descriptor that comes with this."""

    offset: int
    nbytes: int


class Stored(Message, frozen=True):
    """The blob was received whole and has this digest."""

    digest: str


class Denied(Message, frozen=True):
    """It will not be done; why, in a sentence."""

    reason: str
    missing: bool = False
    """The blob is not here; asking again or elsewhere does not help."""


Request = Get | Put
Reply = Opened | Stored | Denied


def memory_file(chunks: Iterable[Any], *, seal: bool = True) -> int:
    """Descriptor of a new memory file with these bytes, sealed unless told otherwise.

    The bytes are written, never mapped, so that no second copy lies in the process's own anonymous memory and nothing
    has to be unmapped before sealing.
    """
    fd = os.memfd_create("goblin", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        for chunk in chunks:
            write_all(fd, chunk)
        if seal:
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
    except BaseException:
        os.close(fd)
        raise
    return fd


def empty_memory_file(nbytes: int) -> tuple[int, mmap.mmap]:
    """Descriptor of a new memory file of `nbytes` (at least one), which can be sealed later, and a mapping to fill it.

    Raises
    ------
    MemoryError
        When there is no room for it.
    """
    fd = os.memfd_create("goblin", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, nbytes)
        memory = mmap.mmap(fd, nbytes)
        if nbytes >= _HUGE:
            with contextlib.suppress(OSError):  # a kernel without huge pages
                memory.madvise(mmap.MADV_HUGEPAGE)
    except (OSError, ValueError, OverflowError) as error:
        os.close(fd)
        raise MemoryError(f"no memory file of {nbytes} bytes can be made: {error}") from error
    return fd, memory


def write_all(fd: int, data: Any) -> None:
    """Write a buffer at the descriptor's position, however often the kernel takes only a part."""
    view, done = memoryview(data).cast("B"), 0
    while done < view.nbytes:
        with view[done:] as rest:
            done += os.write(fd, rest)


def copy_file(fd: int, path: Path, nbytes: int, *, cold: bool = False) -> None:
    """New file at `path` with the bytes of a memory file, copied by the kernel.

    Parameters
    ----------
    fd : int
    path : Path
        Where nothing is yet.
    nbytes : int
        Length of the memory file.
    cold : bool
        The copy will not be read soon: it is written from the memory file to the medium, where the file system can do
        that, and takes no second room in the page cache.
    """
    with path.open("xb", buffering=0) as file:
        if cold and nbytes:
            with mmap.mmap(fd, nbytes, access=mmap.ACCESS_READ) as source, memoryview(source) as view:
                write_cold(file.fileno(), view)
            return
        done = 0
        while done < nbytes:
            done += os.sendfile(file.fileno(), fd, done, nbytes - done)


def write_cold(fd: int, data: memoryview) -> None:
    """Write a mapped buffer at the descriptor's position, past the page cache where the file system can do that.

    Parameters
    ----------
    fd : int
        At a multiple of 64 KiB.
    data : memoryview
        Of bytes, from the beginning of a page on. What is not a whole block is written in the usual way.
    """
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    done, whole = 0, data.nbytes - data.nbytes % _BLOCK
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT)
        while done < whole:
            with data[done : min(whole, done + _PIECE)] as piece:
                done += os.write(fd, piece)
    except OSError as error:
        if error.errno != errno.EINVAL:  # which says that this file system has no direct I/O
            raise
    finally:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags)
    with data[done:] as rest:
        write_all(fd, rest)


def check_sealed(fd: int, nbytes: int) -> None:
    """Make sure that a descriptor from a stranger is a memory file that cannot change any more.

    Raises
    ------
    WireError
        When it is no memory file, lacks a seal, or has not `nbytes` bytes.
    """
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as error:
        raise WireError("an output must be handed in as a memory file (memfd), not as another kind of file") from error
    if seals & SEALS != SEALS:
        raise WireError("the memory file is not sealed against write, shrink, grow and seal: it could still change")
    size = os.fstat(fd).st_size
    if size != nbytes:
        raise WireError(f"the memory file has {size} bytes, {nbytes} were announced")


def map_file(fd: int, offset: int, nbytes: int) -> memoryview:
    """Read-only mapping of a part of a file; the mapping lives as long as the view does.

    Raises
    ------
    DigestMismatch
        When the file is shorter than that.
    """
    if nbytes == 0:
        return memoryview(b"")
    if os.fstat(fd).st_size < offset + nbytes:
        raise DigestMismatch(f"a file of {os.fstat(fd).st_size} bytes, its blob would end at {offset + nbytes}")
    start = offset % mmap.ALLOCATIONGRANULARITY
    # the descriptor that mmap duplicates is closed with it
    mapped = mmap.mmap(fd, start + nbytes, access=mmap.ACCESS_READ, offset=offset - start)
    return memoryview(mapped)[start:].toreadonly()


def send_packet(sock: socket.socket, data: bytes, fd: int | None = None) -> None:
    """Send one packet, with a descriptor where one is given."""
    if fd is None:
        sock.sendall(data)
    else:
        socket.send_fds(sock, [data], [fd])


def receive_packet(sock: socket.socket) -> tuple[bytes, int | None]:
    """The next packet and its descriptor; empty bytes when the peer is gone.

    Raises
    ------
    WireError
        For a packet that is too long, or that carries more than one descriptor (all are closed).
    """
    room = socket.CMSG_SPACE(array.array("i").itemsize)
    data, ancillary, flags, _ = sock.recvmsg(PACKET_LIMIT, room, socket.MSG_CMSG_CLOEXEC)
    fds = array.array("i")
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
    if len(fds) > 1 or flags & (socket.MSG_CTRUNC | socket.MSG_TRUNC):
        for fd in fds:
            with contextlib.suppress(OSError):
                os.close(fd)
        raise WireError(f"a packet of more than {PACKET_LIMIT} bytes or with more than one descriptor")
    return data, (fds[0] if fds else None)


request_decoder: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
reply_decoder: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)


def address(name: str) -> str:
    """Abstract socket address of a name; it disappears with its owner, and no file system sees it."""
    return "\0" + name

"""A further preload of volunteers under test: writes down every byte that the process is sent, whatever the route.

Under the directory ``GOBLIN_TEST_TAP``, in a folder named by the process: ``tcp-PORT-N`` and ``unix-0-N`` for each
connection, ``mapped`` for what was mapped of files that came as descriptors, ``leases`` for the inputs of each lease.
"""

from __future__ import annotations

import json
import os
import socket
import weakref
from pathlib import Path

from goblin_dask.messages import Lease
from goblin_dask.store import descriptors
from goblin_dask.volunteer.runner import Runner

_folder = Path(os.environ["GOBLIN_TEST_TAP"]) / str(os.getpid())
_files: weakref.WeakKeyDictionary[socket.socket, object] = weakref.WeakKeyDictionary()


def _file(sock):
    file = _files.get(sock)
    if file is None:
        kind, port = ("unix", 0) if sock.family == socket.AF_UNIX else ("tcp", sock.getpeername()[1])
        file = _files[sock] = (_folder / f"{kind}-{port}-{len(list(_folder.iterdir()))}").open("xb", buffering=0)
    return file


def _returning(name):
    original = getattr(socket.socket, name)

    def noted(self, *args):
        found = original(self, *args)
        _file(self).write(found if isinstance(found, bytes) else found[0])
        return found

    setattr(socket.socket, name, noted)


def _filling(name):
    original = getattr(socket.socket, name)

    def noted(self, buffer, *args):
        found = original(self, buffer, *args)
        _file(self).write(memoryview(buffer).cast("B")[: found if isinstance(found, int) else found[0]])
        return found

    setattr(socket.socket, name, noted)


def _map_file(fd, offset, nbytes, original=descriptors.map_file):
    view = original(fd, offset, nbytes)
    with (_folder / "mapped").open("ab") as file:
        file.write(view)
    return view


async def _run(self, work, original=Runner.run):
    if isinstance(work, Lease):
        with (_folder / "leases").open("a") as file:
            file.write(json.dumps([ref.digest for ref in work.inputs]) + "\n")
    await original(self, work)


if not _folder.exists():  # Dask imports a preload that is a file, and then imports it again
    _folder.mkdir(parents=True)
    for _name in ("recv", "recvfrom", "recvmsg"):
        _returning(_name)
    for _name in ("recv_into", "recvfrom_into"):
        _filling(_name)
    # Preloads are imported before the first of them makes a runner, which binds its `run`.
    descriptors.map_file, Runner.run = _map_file, _run

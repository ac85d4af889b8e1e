"""`Proxy`: a TCP proxy that cuts, refuses and holds what goes through it, when a test says so."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Coroutine
from typing import Any

from goblin_dask.labnode.cluster import LoopThread

PIECE = 1 << 16


class Proxy:
    """Stands between one volunteer and its gateway; a context manager.

    Parameters
    ----------
    address : str
        What it stands in front of, ``goblin://HOST:PORT``.
    """

    def __init__(self, address: str):
        self._scheme, _, rest = address.partition("://")
        host, _, port = rest.rpartition(":")
        self._target = host, int(port)
        self._lines: dict[asyncio.StreamWriter, asyncio.StreamWriter] = {}
        self._closed = False
        self._most: int | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.tripped = threading.Event()
        """Set when `cut_upload_after` has cut a connection."""
        self.connections = 0
        self._loop = LoopThread("goblin-proxy")
        self._server = self._run(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.port: int = self._server.sockets[0].getsockname()[1]

    @property
    def address(self) -> str:
        """What the volunteer is to dial."""
        return f"{self._scheme}://127.0.0.1:{self.port}"

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self._loop.run(work).result()

    # --- for tests ----------------------------------------------------------------------------------------------
    def cut(self) -> None:
        """Cut all connections, and refuse new ones until `heal`."""
        self._run(self._cut())

    async def _cut(self) -> None:
        self._closed = True
        for line in list(self._lines):
            self._abort(line)

    def heal(self) -> None:
        """Let new connections through again."""
        self._closed = False

    def cut_upload_after(self, nbytes: int) -> None:
        """Cut, once, the first connection on which the volunteer sends more than so many bytes."""
        self.tripped.clear()
        self._most = nbytes

    def close(self) -> None:
        """Cut everything and stop listening."""
        self.cut()
        self._run(self._stop())
        self._loop.stop()

    async def _stop(self) -> None:
        self._server.close()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # --- connections --------------------------------------------------------------------------------------------
    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            if not self._closed:
                await self._join(reader, writer)
        except OSError:
            pass  # a gateway that is away: so is this connection
        finally:
            writer.transport.abort()

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(*self._target)
        self._lines[writer] = far_writer
        self.connections += 1
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pump(reader, far_writer, writer))
                group.create_task(self._pump(far_reader, writer, None))
        except* OSError:
            pass
        finally:
            del self._lines[writer]
            far_writer.transport.abort()

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, line: asyncio.StreamWriter | None
    ) -> None:
        sent = 0
        while data := await reader.read(PIECE):
            sent += len(data)
            if line is not None and self._most is not None and sent > self._most:
                self._most = None
                self._abort(line)
                self.tripped.set()
                return
            writer.write(data)
            await writer.drain()
        with contextlib.suppress(OSError):
            writer.write_eof()

    def _abort(self, line: asyncio.StreamWriter) -> None:
        self._lines[line].transport.abort()
        line.transport.abort()

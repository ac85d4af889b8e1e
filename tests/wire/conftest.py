"""A gateway that is nothing but a border, a cable that can be cut, and stock Dask workers behind it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web
from distributed import Client

from goblin_dask import messages as m
from goblin_dask.errors import Refused
from goblin_dask.wire.dask_internals import GridScheduler
from goblin_dask.wire.server import Admission, SessionServer
from goblin_dask.wire.session import PATH
from goblin_dask.wire.work import run_work

PLUGIN = Path(__file__).with_name("plugin.py")
_counter = itertools.count(1)


class Changes:
    """Wakes whoever waits for a condition, whenever something happened."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def tell(self) -> None:
        self._event.set()
        self._event = asyncio.Event()

    async def until(self, condition, seconds: float = 20.0):
        async with asyncio.timeout(seconds):
            while not (value := condition()):
                await self._event.wait()
            return value


class Gateway:
    """Scheduler, session server and HTTP server; `port` may be that of an earlier one."""

    def __init__(self, port: int = 0, tls=None, **options):
        self.port = port
        self.tls = tls
        self.options = options
        self.changes = Changes()
        self.messages: list[tuple[str, object]] = []
        self.closed: list[tuple[str, str]] = []

    async def start(self) -> Gateway:
        changes = self.changes

        class Plugin:
            name = "changes"

            def __getattr__(self, name):
                return lambda *args, **kwargs: changes.tell()

            async def start(self, scheduler):
                pass

            async def before_close(self):
                pass

            async def close(self):
                pass

        self.scheduler = await GridScheduler(plugins=[Plugin()])
        self.server = SessionServer(
            on_hello=self.admit,
            on_message=self.message,
            on_open=lambda session: changes.tell(),
            on_close=self.left,
            on_comm=self.scheduler.handle_comm,
            **self.options,
        )
        app = web.Application()
        app.router.add_get(PATH, self.server.handle)
        self.runner = web.AppRunner(app, access_log=None)
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", self.port, reuse_address=True, ssl_context=self.tls)
        await site.start()
        self.port = self.runner.addresses[0][1]
        self.client = await Client(self.scheduler.address, asynchronous=True)
        return self

    async def stop(self) -> None:
        await self.server.close()
        await self.client.close()
        await self.runner.cleanup()
        await self.scheduler.close()

    async def admit(self, hello, request) -> Admission:
        if hello.token == "wrong":
            raise Refused("this gateway does not know the token: ask for one")
        return Admission(f"{hello.role}-{next(_counter)}", nthreads=2)

    def message(self, session, message) -> None:
        self.messages.append((session.admission.worker, message))
        self.changes.tell()

    def left(self, session, reason) -> None:
        self.closed.append((session.admission.worker, reason))
        self.changes.tell()

    def said(self, kind):
        return [message for _, message in self.messages if isinstance(message, kind)]

    def session_of(self, role="volunteer"):
        return next((s for s in self.server.sessions.values() if s.role == role), None)

    async def worker(self) -> str:
        """Address of the one worker, once it is there."""
        return await self.changes.until(lambda: next(iter(self.scheduler.workers), None), 30)

    def lease(self, attempt: str):
        lease = m.Lease(attempt, b"", (), "", m.Routes(), 0, 60.0)
        return self.client.submit(run_work, lease, key=attempt, pure=False, workers=list(self.scheduler.workers))


class Cable:
    """A TCP proxy that can be cut and mended."""

    def __init__(self, port: int):
        self.to = port
        self._tasks: set[asyncio.Task] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        self.whole = True
        self.changes = Changes()
        self.connections = self.refused = self.carried = 0
        self._deaf: set[asyncio.StreamWriter] = set()

    async def start(self) -> Cable:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def _serve(self, reader, writer):
        if not self.whole:
            self.refused += 1
            self.changes.tell()
            writer.transport.abort()
            return
        try:
            there_reader, there_writer = await asyncio.open_connection("127.0.0.1", self.to)
        except ConnectionError:
            writer.transport.abort()
            return
        self.connections += 1
        self._writers |= {writer, there_writer}
        await asyncio.gather(self._pump(reader, there_writer), self._pump(there_reader, writer))
        self._writers -= {writer, there_writer}

    async def _pump(self, reader, writer):
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65536):
                self.carried += 1
                self.changes.tell()
                if writer not in self._deaf:
                    writer.write(data)
                    await writer.drain()
        writer.transport.abort()

    def cut(self) -> None:
        self.whole = False
        for writer in self._writers:
            writer.transport.abort()

    def mute(self) -> None:
        """Present connections stay open and carry nothing any more."""
        self._deaf |= self._writers

    def mend(self) -> None:
        self.whole = True

    async def stop(self) -> None:
        self.cut()
        self._server.close()
        await self._server.wait_closed()


class Volunteer:
    """``dask worker goblin://…`` in a process group of its own."""

    def __init__(self, process: asyncio.subprocess.Process):
        self.process = process

    def kill(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)


@pytest.fixture
async def gateways() -> AsyncIterator:
    """Start gateways; those that still run are stopped at the end."""
    started: list[Gateway] = []

    async def start(port: int = 0, **options) -> Gateway:
        started.append(await Gateway(port, **options).start())
        return started[-1]

    yield start
    for gateway in started:
        await gateway.stop()


@pytest.fixture
async def cables() -> AsyncIterator:
    started: list[Cable] = []

    async def start(port: int) -> Cable:
        started.append(await Cable(port).start())
        return started[-1]

    yield start
    for cable in started:
        await cable.stop()


@pytest.fixture
async def volunteers(tmp_path) -> AsyncIterator:
    started: list[Volunteer] = []

    async def start(
        port: int, *options: str, token: str = "secret", preload: bool = True, scheme="goblin", **env
    ) -> Volunteer:
        command = [sys.executable, "-m", "dask", "worker", f"{scheme}://127.0.0.1:{port}", *options]
        if preload:
            command += ["--preload", str(PLUGIN)]
        with (tmp_path / f"worker-{len(started)}.log").open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                *command,
                env={**os.environ, "DASK_GOBLIN__TOKEN": token, **env},
                cwd=tmp_path,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        started.append(Volunteer(process))
        return started[-1]

    yield start
    for volunteer in started:
        volunteer.kill(signal.SIGKILL)
        await volunteer.process.wait()

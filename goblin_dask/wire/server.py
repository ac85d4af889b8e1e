"""The end that answers: sessions of volunteers, validators, nannies and laboratories, on one route of the gateway.

::

    server = SessionServer(on_hello=admit, on_message=handle, on_comm=scheduler.handle_comm)
    app.router.add_get(goblin_dask.wire.session.PATH, server.handle)

A session that loses its connection is kept for `linger` seconds. What a peer does wrong costs its own session only.
"""

from __future__ import annotations

import asyncio
import hmac
import inspect
import logging
import secrets
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp import web

from goblin_dask import messages as m
from goblin_dask.errors import ConnectionLost, Refused, WireError
from goblin_dask.wire.comm import GatewayComm
from goblin_dask.wire.frames import PACKET_LIMIT, Limits
from goblin_dask.wire.session import (
    HANDSHAKE_SECONDS,
    SENDS,
    Channel,
    OnMessage,
    Preface,
    Session,
    farewell,
    read_text,
    write_text,
)

logger = logging.getLogger(__name__)

PROTOCOLS = (m.PROTOCOL,)

LIMITS: dict[str, Limits] = {
    "lab": Limits(channels=0),
    "volunteer": Limits(message=8 * 1024 * 1024, channels=16, outbox=2 * m.MESSAGE_LIMIT),
    "validator": Limits(message=8 * 1024 * 1024, channels=16, outbox=2 * m.MESSAGE_LIMIT),
    "nanny": Limits(message=64 * 1024, channels=8, outbox=1024 * 1024),
}


@dataclass(frozen=True)
class Admission:
    """The gateway's answer to a `Hello` that it accepts. Everything here is the gateway's own."""

    worker: str
    """Random identity; a volunteer's Dask address is ``goblin://~`` and this."""
    nthreads: int = 1
    """Tasks that the scheduler gives it at a time."""
    memory: int = 0
    """Bytes, for Dask's displays."""
    resources: Mapping[str, float] = field(default_factory=dict)
    peer: Any = None
    """Whatever the gateway wants to find again on the session: owner, network, database row."""


class ServerSession(Session):
    """One peer, as the gateway sees it: `role`, `hello`, `admission`, `send`, `drain`, `close`."""

    def __init__(self, server: SessionServer, hello: m.Hello, admission: Admission):
        super().__init__(server.limits[hello.role], hello.role, server.on_message, SENDS[hello.role])
        self.server = server
        self.hello = hello
        self.admission = admission
        self.identity = secrets.token_hex(16)
        self.secret = secrets.token_hex(32)
        self.keepalive = server.keepalive
        self.alias = ""
        """Of the Dask worker that registered through it, at most one; its nanny, nobody else, knows it too."""
        self._expiry: asyncio.TimerHandle | None = None
        self._told = False

    @property
    def address(self) -> str:
        """Its address in Dask's eyes; nobody can dial it."""
        return f"goblin://~{self.admission.worker}"

    def close(self, reason: str, retry: bool = False) -> None:
        """End the session; the peer is told why, and whether it may come back."""
        self._end(reason, retry)

    def _channel_opened(self, channel: Channel) -> None:
        if self.server.on_comm is None:
            raise WireError("this gateway takes no Dask workers")
        self.server.on_comm(GatewayComm(channel, self))

    def _end(self, reason: str, retry: bool = False) -> None:
        if not self.closed:
            super()._end(reason, retry)
            if self._expiry is not None:
                self._expiry.cancel()
            self.server._ended(self)

    async def serve(self, ws: web.WebSocketResponse, received: int, resumed: bool) -> None:
        """Carry the session over this connection; an older one is given up."""
        while self._ws is not None:
            older, self._ws = self._ws, None
            await older.close()
        if self.closed:
            raise ConnectionLost("the session ended meanwhile")
        self.link.attach(received)
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None
            self.server.on_back(self)
        welcome = m.Welcome(
            m.PROTOCOL, self.identity, self.secret, self.link.received, resumed, keepalive=self.keepalive
        )
        goodbye = await self._converse(ws, write_text(welcome))
        if goodbye is not None:
            logger.info("session %s (%s) leaves: %.200r", self.identity, self.role, goodbye.reason)
            self._end(f"the other side left: {goodbye.reason[:200]}")

    def wait(self, seconds: float) -> None:
        """Without a connection: end unless it comes back in time."""
        if not self.closed and self._ws is None and self._expiry is None:
            self._expiry = asyncio.get_running_loop().call_later(seconds, self._expire, seconds)
            self.server.on_cut(self)

    def _expire(self, seconds: float) -> None:
        self._expiry = None
        if self._ws is None:
            self._end(f"not heard from for {seconds:g} s", retry=True)


class SessionServer:
    """All sessions of a gateway.

    Parameters
    ----------
    on_hello : coroutine function
        Called with the `Hello` and the aiohttp request of a new session; returns an `Admission`, or raises `Refused`
        (for good) or `ConnectionLost` (try later) with the sentence that the peer is shown.
    on_message : callable
        Called with the session and each message, in order; may be a coroutine function. `WireError` from it ends the
        session.
    on_open, on_close : callable, optional
        Called with a new session before its first message; with a session and the reason once it is over for good.
    on_comm : callable, optional
        Called with the `GatewayComm` of each Dask channel: ``scheduler.handle_comm``.
    on_cut, on_back : callable, optional
        Called with a session that has lost its connection, and when it has one again.
    linger : float
        Seconds for which a session without a connection is kept.
    keepalive : float
        Seconds between keep-alives.
    most : int
        Sessions at a time.
    """

    def __init__(
        self,
        *,
        on_hello: Callable[[m.Hello, web.Request], Awaitable[Admission]],
        on_message: OnMessage,
        on_open: Callable[[ServerSession], Awaitable[None] | None] | None = None,
        on_close: Callable[[ServerSession, str], Awaitable[None] | None] | None = None,
        on_comm: Callable[[GatewayComm], Any] | None = None,
        on_cut: Callable[[ServerSession], None] = lambda session: None,
        on_back: Callable[[ServerSession], None] = lambda session: None,
        linger: float = 60.0,
        keepalive: float = 20.0,
        most: int = 20_000,
        limits: Mapping[str, Limits] | None = None,
    ):
        self.on_hello = on_hello
        self.on_message = on_message
        self.on_open = on_open
        self.on_close = on_close
        self.on_comm = on_comm
        self.on_cut, self.on_back = on_cut, on_back
        self.linger = linger
        self.keepalive = keepalive
        self.most = most
        self.limits = {**LIMITS, **(limits or {})}
        self.sessions: dict[str, ServerSession] = {}
        self._sockets: set[web.WebSocketResponse] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing = False

    async def handle(self, request: web.Request) -> web.WebSocketResponse:
        """Answer one connection; an aiohttp handler."""
        ws = web.WebSocketResponse(max_msg_size=PACKET_LIMIT, compress=False, timeout=2.0)
        await ws.prepare(request)
        self._sockets.add(ws)
        session: ServerSession | None = None
        try:
            hello = await self._first(ws)
            resumed = self._resumable(hello)
            session = resumed or await self._admit(hello, request)
            await session.serve(ws, hello.received if resumed else 0, resumed is not None)
        except ConnectionLost as error:
            await farewell(ws, str(error), retry=True)
        except WireError as error:
            if session is not None:
                session.fail(error)
            logger.warning("connection from %s refused: %.500r", request.remote, str(error))
            await farewell(ws, str(error))
        finally:
            self._sockets.discard(ws)
            if session is not None and not self._closing:
                session.wait(self.linger)
        return ws

    async def _first(self, ws: web.WebSocketResponse) -> m.Hello:
        try:
            message = await ws.receive(timeout=HANDSHAKE_SECONDS)
        except TimeoutError as error:
            raise WireError(f"no Hello within {HANDSHAKE_SECONDS:g} s") from error
        if message.type is not aiohttp.WSMsgType.TEXT:
            raise WireError("the first message must be a Hello, as text")
        preface = read_text(message.data, Preface)
        if preface.type != "Hello":
            raise WireError("the first message must be a Hello")
        if not set(preface.protocols) & set(PROTOCOLS):
            spoken = ", ".join(map(str, preface.protocols[:8])) or "none"
            raise Refused(
                f"this gateway speaks version {m.PROTOCOL} of the goblin protocol and was offered {spoken}: "
                "install the version of goblin-dask that the gateway runs"
            )
        return read_text(message.data, m.Hello)

    def _resumable(self, hello: m.Hello) -> ServerSession | None:
        session = self.sessions.get(hello.session)
        if session is None:
            return None
        if not hmac.compare_digest(session.secret.encode(), hello.secret.encode()):
            raise Refused("a session is resumed with its secret, which this is not")
        return session

    async def _admit(self, hello: m.Hello, request: web.Request) -> ServerSession:
        if len(self.sessions) >= self.most or self._closing:
            raise ConnectionLost(f"this gateway is full ({self.most} sessions): try again later")
        admission = await self.on_hello(hello, request)
        session = ServerSession(self, hello, admission)
        self.sessions[session.identity] = session
        if self.on_open is not None:
            result = self.on_open(session)
            if inspect.isawaitable(result):
                await result
        return session

    def widow(self, alias: str) -> None:
        """End the session of a worker whose nanny says that its process is gone."""
        for session in list(self.sessions.values()):
            if session.alias and hmac.compare_digest(session.alias, alias):
                session.close("its nanny says that the process ended", retry=True)

    def _ended(self, session: ServerSession) -> None:
        if self.sessions.pop(session.identity, None) is not None and self.on_close is not None:
            result = self.on_close(session, session.reason or "")
            if inspect.isawaitable(result):
                task = asyncio.ensure_future(result)
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """The gateway stops: connections are closed, and peers come back when it answers again.

        Call it before the scheduler is closed, or the volunteers are told to stop.
        """
        self._closing = True
        for session in list(self.sessions.values()):
            session.close("the gateway stops", retry=True)
        await asyncio.gather(*(ws.close() for ws in list(self._sockets)), *self._tasks)

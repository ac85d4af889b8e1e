"""The end that dials, and dials again: `dial` for anybody, `introduce` and `current` for the processes of Dask workers.

A cut is met with a new connection of the same session, at once and then with growing, random pauses. When the gateway
does not know the session any more, because it was restarted or the cut lasted too long, a *new* session is opened in
its place: the owner is told first (`on_open`), then the messages of the control channel of which it is not known that
they were taken are sent again, then Dask's registration is. Messages are so delivered exactly once within a session
and at least once from one session to the next.
"""

from __future__ import annotations

import asyncio
import logging
import random
import ssl as tls
import time
from typing import Any, Protocol

import aiohttp

from goblin_dask import messages as m
from goblin_dask.errors import ConnectionLost, Refused, WireError
from goblin_dask.wire.frames import CONTROL, DATA, OPEN, PACKET_LIMIT, Limits, Link
from goblin_dask.wire.session import (
    HANDSHAKE_SECONDS,
    RECEIVES,
    Channel,
    OnMessage,
    Preface,
    Renewed,
    Session,
    farewell,
    read_text,
    write_text,
)

logger = logging.getLogger(__name__)

FIRST_PAUSE, PAUSE, LATE_PAUSE = 0.1, 2.0, 30.0
"""Seconds: the first pause between two attempts, the longest in the first minute, the longest later."""


class Owner(Protocol):
    """Who a session is opened for. Methods are called on the session's loop and must not block it."""

    def hello(self) -> m.Hello:
        """What to introduce oneself with; asked before every connection. The session's own fields are filled in."""

    def opened(self, session: ClientSession) -> None:
        """A new session stands (the first, or one in the place of a forgotten one): send what it must know."""

    def received(self, session: ClientSession, message: Any) -> Any:
        """A message of the gateway's; may return an awaitable. The next one waits until it is done."""

    def closed(self, session: ClientSession, reason: str) -> None:
        """It is over for good."""


class ClientSession(Session):
    """A session that this process dialled; `connected` and `ended` are events."""

    opens_channels = True

    def __init__(self, url: str, owner: Owner, ssl: tls.SSLContext | None = None, limits: Limits | None = None):
        self.url = url
        self.owner = owner
        on_message: OnMessage = owner.received
        role = owner.hello().role
        super().__init__(limits or Limits(channels=0), role, on_message, RECEIVES[role])
        self.undelivered: tuple[bytes, ...] = ()
        """When a session is opened anew: messages that the forgotten one had not taken, and that are sent again."""
        self._ssl = ssl
        self._http: aiohttp.ClientSession | None = None
        self._keeper: asyncio.Task[None] | None = None

    # --- for owners ---------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Connect for the first time, and keep connected from then on.

        Raises
        ------
        ConnectionLost
            When the gateway cannot be reached.
        Refused
            When it does not want us.
        """
        first: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._keeper = asyncio.create_task(self._keep(first))
        try:
            await first
        except asyncio.CancelledError:
            self._keeper.cancel()
            raise

    def open_channel(self, greeting: bytes | None = None) -> Channel:
        """Open a channel."""
        self._opened += 1
        channel = Channel(self, self._opened)
        channel.greeting = greeting
        self.transmit(channel.number, b"", OPEN)
        self.channels[channel.number] = channel
        return channel

    async def close(self, reason: str = "leaves", patience: float = 2.0) -> None:
        """Leave, after what was sent has been taken or `patience` seconds have passed."""
        if not self.closed:
            try:
                await asyncio.wait_for(self.flush(), patience if self.connected.is_set() else 0)
            except TimeoutError:
                logger.info("session %s: left with messages that the gateway has not taken", self.identity)
            self._end(reason)
        if self._keeper is not None and self._keeper is not asyncio.current_task():
            await asyncio.wait([self._keeper])

    def leave(self, reason: str) -> None:
        """Leave at once."""
        self._end(reason)

    # --- connecting ---------------------------------------------------------------------------------------------

    async def _keep(self, first: asyncio.Future[None]) -> None:
        pause, since = FIRST_PAUSE, time.monotonic()
        async with aiohttp.ClientSession() as self._http:
            first.add_done_callback(lambda done: done.cancelled() or done.exception())
            while not self.closed:
                connected_at = time.monotonic()
                try:
                    await self._connect(first)
                    logger.info("session %s: the connection to %s was cut", self.identity, self.url)
                except ConnectionLost as error:
                    if not first.done():
                        self._end(str(error))
                        first.set_exception(error)
                        break
                    logger.info("%s", error)
                except WireError as error:
                    if not first.done():
                        self._end(str(error))
                        first.set_exception(error)
                        break
                    self.fail(error)
                now = time.monotonic()
                if now - connected_at > 5:
                    pause, since = FIRST_PAUSE, now
                if not self.closed:
                    # Random, or all volunteers of a restarted gateway would come back in the same instant.
                    delay = asyncio.ensure_future(self.ended.wait())
                    await asyncio.wait([delay], timeout=pause * random.uniform(0.5, 1.0))  # noqa: S311
                    delay.cancel()
                    pause = min(2 * pause, PAUSE if now - since < 60 else LATE_PAUSE)

    async def _connect(self, first: asyncio.Future[None]) -> None:
        assert self._http is not None
        ws = await self._open_socket(self._http)
        try:
            welcome = await self._greet(ws)
            if welcome.resumed:
                self.link.attach(welcome.received)
            else:
                self._renew(welcome)
            if not first.done():
                first.set_result(None)
            try:
                goodbye = await self._converse(ws)
            except asyncio.CancelledError:
                self._end("its process stops")
                await farewell(ws, "its process stops")
                raise
            if goodbye is not None and not goodbye.retry:
                raise Refused(f"the gateway at {self.url} closed the session: {goodbye.reason}")
        finally:
            await ws.close()

    async def _open_socket(self, http: aiohttp.ClientSession) -> aiohttp.ClientWebSocketResponse:
        try:
            return await http.ws_connect(
                self.url,
                ssl=self._ssl if self._ssl is not None else True,
                max_msg_size=PACKET_LIMIT,
                timeout=aiohttp.ClientWSTimeout(ws_close=2.0),
            )
        except aiohttp.ClientConnectorCertificateError as error:
            raise Refused(
                f"the certificate of {self.url} is not trusted ({error.certificate_error}): give its authority's file "
                "as dask config `goblin.tls.ca-file`"
            ) from error
        except aiohttp.ClientSSLError as error:
            raise Refused(f"no TLS at {self.url} ({error}): without TLS the address begins with goblin://") from error
        except aiohttp.WSServerHandshakeError as error:
            hint = " (it wants TLS: goblins://)" if error.status in (301, 302, 307, 308, 400, 426) else ""
            text = f"{self.url} answers {error.status}, not as a goblin gateway{hint}: check host, port and scheme"
            if error.status in (429, 500, 502, 503, 504):  # a proxy whose gateway is being restarted
                raise ConnectionLost(text) from error
            raise Refused(text) from error
        except aiohttp.ServerDisconnectedError as error:
            hint = "" if self._ssl else ": if it wants TLS, its address begins with goblins://"
            raise ConnectionLost(f"the gateway at {self.url} hung up without an answer{hint}") from error
        except (aiohttp.ClientError, OSError) as error:
            raise ConnectionLost(f"the gateway at {self.url} cannot be reached: {error}") from error

    async def _greet(self, ws: aiohttp.ClientWebSocketResponse) -> m.Welcome:
        hello = self.owner.hello()
        mine = m.Hello(
            hello.protocols,
            hello.role,
            hello.token,
            self.identity,
            self.secret,
            self.link.received if self.identity else 0,
            hello.machine,
        )
        try:
            await ws.send_str(write_text(mine))
            message = await ws.receive(timeout=HANDSHAKE_SECONDS)
        except (OSError, RuntimeError, aiohttp.ClientError) as error:  # TimeoutError is an OSError
            raise ConnectionLost(f"the gateway at {self.url} does not answer: {error!r}") from error
        if message.type is not aiohttp.WSMsgType.TEXT:
            raise ConnectionLost(f"the gateway at {self.url} hung up without an answer")
        preface = read_text(message.data, Preface)
        if preface.type == "Goodbye":
            if preface.retry:
                raise ConnectionLost(f"the gateway at {self.url} asks to come back later: {preface.reason}")
            raise Refused(f"the gateway at {self.url} refuses: {preface.reason}")
        welcome = read_text(message.data, m.Welcome)
        if welcome.protocol not in hello.protocols or not 0 < welcome.keepalive < 60:
            raise WireError(f"a welcome to something that was not offered: {welcome.protocol}, {welcome.keepalive}")
        if welcome.resumed and welcome.session != self.identity:
            raise WireError("a session was resumed that is not ours")
        return welcome

    def _renew(self, welcome: m.Welcome) -> None:
        if self.identity:
            logger.warning("the gateway at %s does not know session %s any more: a new one", self.url, self.identity)
        self.undelivered = tuple(self.link.unreleased_controls())
        mortal = [number for number, channel in self.channels.items() if channel.greeting is None]
        self.link = Link(self.limits)
        self.identity, self.secret, self.keepalive = welcome.session, welcome.secret, welcome.keepalive
        for number in mortal:
            self.channels.pop(number).lose("the gateway was restarted")
        self.owner.opened(self)
        for payload in self.undelivered:
            self.transmit(CONTROL, payload, DATA)
        self.undelivered = ()
        for channel in self.channels.values():
            assert channel.greeting is not None
            self.transmit(channel.number, b"", OPEN)
            self.transmit(channel.number, channel.greeting, DATA)
            channel.feed(Renewed)

    def _end(self, reason: str, retry: bool = False) -> None:
        if not self.closed:
            super()._end(reason, retry)
            self.owner.closed(self, reason)


async def dial(url: str, owner: Owner, *, ssl: tls.SSLContext | None = None) -> ClientSession:
    """Open a session.

    Parameters
    ----------
    url : str
        ``ws://`` or ``wss://``, host, port and `goblin_dask.wire.session.PATH`.
    owner : Owner
    ssl : SSLContext, optional
        The system's by default.

    Raises
    ------
    ConnectionLost
        When the gateway cannot be reached; later cuts are mended silently.
    Refused
        When it does not want us, with its reason.
    """
    session = ClientSession(url, owner, ssl)
    await session.start()
    return session

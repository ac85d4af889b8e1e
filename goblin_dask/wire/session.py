"""What both ends of a session share: one WebSocket at a time, channels, keep-alives.

The first message of each side is text, JSON, and the same in every version of the protocol: ``{"type": "Hello",
"protocols": […], …}`` is answered by ``{"type": "Welcome", …}`` or ``{"type": "Goodbye", "reason": …}``. Text that
comes later is a ``Goodbye``. Everything else is packets (`goblin_dask.wire.frames`).
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeVar

import aiohttp
import msgspec

from goblin_dask import messages as m
from goblin_dask.errors import ConnectionLost, WireError
from goblin_dask.wire.frames import CLOSE, CONTROL, DATA, OPEN, Arrival, Limits, Link

logger = logging.getLogger(__name__)

T = TypeVar("T")

PATH = "/goblin/session"
"""Where a gateway answers sessions."""

TEXT_LIMIT = 64 * 1024
HANDSHAKE_SECONDS = 10.0
ACK_SECONDS = 0.1
"""How long a release may wait for a packet that goes anyway."""

RECEIVES: dict[str, Any] = {
    "lab": m.TaskProgress
    | m.TaskAccepted
    | m.TaskFailed
    | m.TaskReopened
    | m.DropUploads
    | m.GridOffer
    | m.RelayRequest,
    "volunteer": m.Abandon,
    "validator": m.Abandon,
    "nanny": m.Abandon,
}
"""What the gateway may send on the control channel, by the role of who dialled."""

SENDS: dict[str, Any] = {
    "lab": m.LabReady | m.SubmitTask | m.DefineProgram | m.CancelTask,
    "volunteer": m.Committed | m.Uploaded | m.AttemptFailed | m.Holding,
    "validator": m.Checked | m.AttemptFailed | m.Holding,
    "nanny": None,
}
"""What it may be sent."""


class Preface(msgspec.Struct, frozen=True):
    """What every version can read of a first message, and of a refusal, whatever else is in it."""

    type: str
    protocols: tuple[int, ...] = ()
    reason: str = ""
    retry: bool = False


class WebSocket(Protocol):
    """What the two WebSockets of aiohttp have in common."""

    async def receive(self) -> aiohttp.WSMessage: ...
    async def send_bytes(self, data: bytes) -> None: ...
    async def send_str(self, data: str) -> None: ...
    async def close(self) -> bool: ...


def read_text(text: str, kind: type[T]) -> T:
    """Read a first message.

    Raises
    ------
    WireError
        When it is too long or not what it must be.
    """
    if len(text) > TEXT_LIMIT:
        raise WireError(f"a first message of {len(text)} characters; at most {TEXT_LIMIT} are read")
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        raise WireError(f"a first message that is not a {kind.__name__}: {error}") from error


def write_text(message: m.Message) -> str:
    return msgspec.json.encode(message).decode()


Renewed = object()
"""What `Channel.get` returns, once, after the other side has forgotten the session and the channel was opened anew."""


class Channel:
    """A stream of messages, in both directions, within a session."""

    def __init__(self, session: Session, number: int):
        self.session = session
        self.number = number
        self.greeting: bytes | None = None
        """Sent when the channel is opened anew in a new session; None: it does not survive the old one."""
        self._queue: deque[tuple[Any, Callable[[], None] | None]] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._lost: str | None = None

    @property
    def closed(self) -> bool:
        return self._lost is not None

    async def get(self) -> Any:
        """Next message, or `Renewed`.

        Raises
        ------
        ConnectionLost
            When the channel is closed and everything that came before has been taken.
        """
        while not self._queue:
            if self._lost is not None:
                raise ConnectionLost(self._lost)
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        payload, take = self._queue.popleft()
        if take is not None:
            take()
        return payload

    async def put(self, payload: bytes) -> None:
        """Send a message; waits while the other side is behind.

        Raises
        ------
        ConnectionLost
            When the channel is closed.
        """
        if self._lost is not None:
            raise ConnectionLost(self._lost)
        self.session.transmit(self.number, payload, DATA)
        if self.session.link.full:
            await self.session.drain()

    def close(self, reason: str = "closed on this side") -> None:
        """Close it in both directions; what was sent before still arrives."""
        if self._lost is None:
            self.session.forget(self)
            self.lose(reason)

    def lose(self, reason: str) -> None:
        if self._lost is None:
            self._lost = reason
            self._wake()

    def feed(self, payload: Any, take: Callable[[], None] | None = None) -> None:
        self._queue.append((payload, take))
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


OnMessage = Callable[[Any, Any], Awaitable[None] | None]
"""Called with the session and a message, in order; the next one waits until it is done."""


class Session:
    """One end. It outlives its connections; `closed` says that it is over, `reason` why."""

    opens_channels = False

    def __init__(self, limits: Limits, role: str, on_message: OnMessage, decode: Any):
        self.limits = limits
        self.link = Link(limits)
        self.role = role
        self.reason: str | None = None
        self.identity = ""
        """The session's public name; changes when it is opened anew."""
        self.secret = ""
        self.keepalive = 20.0
        self.channels: dict[int, Channel] = {}
        self.connected = asyncio.Event()
        self.ended = asyncio.Event()
        self._opened = 0  # highest number of a channel so far
        self._on_message = on_message
        self._decoder = m.decoder(decode) if decode is not None else None
        self._work = asyncio.Event()
        self._room: list[asyncio.Future[None]] = []
        self._controls: asyncio.Queue[tuple[bytes, Callable[[], None]]] = asyncio.Queue()
        self._control_task: asyncio.Task[None] | None = None
        self._ws: WebSocket | None = None
        self._ack_timer: asyncio.TimerHandle | None = None
        self._beat = False
        self._parting: asyncio.Task[None] | None = None

    # --- for owners ---------------------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        return self.reason is not None

    def send(self, message: object) -> None:
        """Queue a message on the control channel; it is kept until it was taken, through any number of cuts.

        Raises
        ------
        ConnectionLost
            When the session is over.
        """
        self.transmit(CONTROL, m.encode(message), DATA)

    async def drain(self) -> None:
        """Wait until the other side has taken so much that more may be sent.

        Raises
        ------
        ConnectionLost
            When the session is over.
        """
        while self.link.full or self.closed:
            if self.closed:
                raise ConnectionLost(self.reason or "the session is over")
            future = asyncio.get_running_loop().create_future()
            self._room.append(future)
            await future

    async def flush(self) -> None:
        """Wait until the other side has taken everything, or the session is over."""
        while not self.link.idle and not self.closed:
            future = asyncio.get_running_loop().create_future()
            self._room.append(future)
            await future

    # --- for channels -------------------------------------------------------------------------------------------

    def transmit(self, channel: int, payload: bytes, kind: int) -> None:
        if self.closed:
            raise ConnectionLost(self.reason or "the session is over")
        try:
            self.link.send(channel, payload, kind)
        except WireError as error:
            self.fail(error)
            raise ConnectionLost(str(error)) from error
        self._work.set()

    def forget(self, channel: Channel) -> None:
        if self.channels.pop(channel.number, None) is not None and not self.closed:
            self.transmit(channel.number, b"", CLOSE)

    # --- one connection -----------------------------------------------------------------------------------------

    async def _converse(self, ws: WebSocket, greeting: str | None = None) -> m.Goodbye | None:
        """Exchange packets until the connection ends; returns the peer's farewell if there was one.

        The link has been attached in the same step of the loop: an older connection can take nothing in between.

        Raises
        ------
        WireError
            When the peer broke the protocol.
        """
        self._ws = ws
        self._start_controls()
        self.connected.set()
        self._work.set()
        writer = asyncio.create_task(self._write(ws, greeting))
        heard = time.monotonic()
        loop = asyncio.get_running_loop()

        def watch() -> None:
            silent = time.monotonic() - heard
            if silent > 2.5 * self.keepalive:
                logger.info("session %s: nothing heard for %.0f s, the connection is given up", self.identity, silent)
                last_words.append(asyncio.create_task(ws.close()))
                return
            self._beat = True
            self._work.set()
            timers[0] = loop.call_later(self.keepalive, watch)

        last_words: list[asyncio.Task[Any]] = []
        timers = [loop.call_later(self.keepalive, watch)]
        try:
            while True:
                message = await ws.receive()
                heard = time.monotonic()
                if message.type is aiohttp.WSMsgType.BINARY:
                    if self._ws is not ws or self.closed:
                        return None  # taken over by a younger connection
                    for arrival in self.link.receive(message.data):
                        self._dispatch(arrival)
                    self._settle()
                elif message.type is aiohttp.WSMsgType.TEXT:
                    return read_text(message.data, m.Goodbye)
                else:
                    return None
        finally:
            timers[0].cancel()
            writer.cancel()
            if self._parting is not None:
                last_words.append(self._parting)
            await asyncio.gather(writer, *last_words, return_exceptions=True)
            if self._ws is ws:
                self._ws = None
                self.connected.clear()

    async def _write(self, ws: WebSocket, greeting: str | None) -> None:
        try:
            if greeting is not None:
                await ws.send_str(greeting)
            while self._ws is ws:
                beat, self._beat = self._beat, False
                packet = self.link.packet(even_empty=beat)
                if packet is not None:
                    await ws.send_bytes(packet)
                else:
                    await self._work.wait()
                    self._work.clear()
        except (ConnectionError, RuntimeError, aiohttp.ClientError):
            pass  # the reader sees the same end

    def _settle(self) -> None:
        """After something was received or taken: wake who waits for room, see to it that releases are told."""
        if self._room and (self.link.idle or not self.link.full):
            waiting, self._room = self._room, []
            for future in waiting:
                if not future.done():
                    future.set_result(None)
        self._work.set()
        if self.link.owes_much:
            self._beat = True
        elif self.link.owes and self._ack_timer is None:
            self._ack_timer = asyncio.get_running_loop().call_later(ACK_SECONDS, self._acknowledge)

    def _acknowledge(self) -> None:
        self._ack_timer = None
        if self.link.owes:
            self._beat = True
            self._work.set()

    def _taker(self, number: int) -> Callable[[], None]:
        link = self.link

        def take() -> None:
            link.release(number)
            if link is self.link and not self.closed:
                self._settle()

        return take

    def _dispatch(self, arrival: Arrival) -> None:
        take = self._taker(arrival.number)
        number = arrival.channel
        if number == CONTROL:
            if arrival.kind != DATA:
                raise WireError("the control channel is neither opened nor closed")
            self._controls.put_nowait((arrival.payload, take))
            return
        channel = self.channels.get(number)
        if arrival.kind == OPEN:
            if self.opens_channels or number <= self._opened:
                raise WireError(f"channel {number} may not be opened by this side, or was before")
            if len(self.channels) >= self.limits.channels:
                raise WireError(f"more than {self.limits.channels} channels at a time")
            self._opened = number
            self.channels[number] = Channel(self, number)
            self._channel_opened(self.channels[number])
            take()
        elif channel is None:
            if number > self._opened:
                raise WireError(f"channel {number} was never opened")
            take()  # was under way when this side closed the channel
        elif arrival.kind == CLOSE:
            del self.channels[number]
            channel.lose("closed on the other side")
            take()
        else:
            channel.feed(arrival.payload, take)

    def _channel_opened(self, channel: Channel) -> None:
        raise NotImplementedError

    # --- the control channel ------------------------------------------------------------------------------------

    def _start_controls(self) -> None:
        if self._control_task is None:
            self._control_task = asyncio.create_task(self._read_controls())

    async def _read_controls(self) -> None:
        while True:
            payload, take = await self._controls.get()
            try:
                if self._decoder is None:
                    raise WireError(f"a {self.role} has nothing to say on the control channel")
                message = m.decode(payload, self._decoder)
                result = self._on_message(self, message)
                if inspect.isawaitable(result):
                    await result
                take()
            except WireError as error:
                self.fail(error)
                return
            except Exception as error:
                logger.exception("session %s: a message could not be handled", self.identity)
                self.fail(WireError(f"a message could not be handled: {type(error).__name__}"))
                return

    # --- the end ------------------------------------------------------------------------------------------------

    def fail(self, error: WireError) -> None:
        """The peer broke the protocol, or cannot be kept: this session ends, no other."""
        if not self.closed:
            logger.warning("session %s (%s) is closed: %.500r", self.identity, self.role, str(error))
            self._end(str(error))

    def _end(self, reason: str, retry: bool = False) -> None:
        """Mark the session as over, tell the other side, and let go of everything that waits on it."""
        if self.closed:
            return
        self.reason = reason
        if self._ws is not None:
            self._parting = asyncio.create_task(farewell(self._ws, reason, retry))
        for channel in list(self.channels.values()):
            channel.lose(reason)
        self.channels.clear()
        for future in self._room:
            if not future.done():
                future.set_result(None)
        self._room.clear()
        if self._ack_timer is not None:
            self._ack_timer.cancel()
            self._ack_timer = None
        if self._control_task is not None and self._control_task is not asyncio.current_task():
            self._control_task.cancel()
        self.ended.set()


async def farewell(ws: WebSocket, reason: str, retry: bool = False) -> None:
    """Say goodbye and close a connection, as far as it still carries anything."""
    try:
        await ws.send_str(write_text(m.Goodbye(reason[:1000], retry)))
    except (ConnectionError, RuntimeError, aiohttp.ClientError):
        pass  # it is gone already
    await ws.close()

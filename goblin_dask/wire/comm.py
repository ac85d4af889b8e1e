"""``goblin://`` and ``goblins://`` as comms of Dask, so that ``dask worker goblin://HOST:PORT`` is all it takes.

On the worker's side a comm is a channel of the process's session (`GoblinComm`) and its listener listens on nothing.
On the gateway's side channels are `GatewayComm` objects, handed to the scheduler. Neither ever loads a pickle: what
travels are the structs of `goblin_dask.wire.codec`.
"""

from __future__ import annotations

import asyncio
import logging
import ssl as tls
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from distributed.comm.addressing import parse_host_port
from distributed.comm.core import BaseListener, Comm, CommClosedError, Connector, FatalCommClosedError
from distributed.comm.registry import Backend

from goblin_dask.errors import ConnectionLost, WireError
from goblin_dask.wire.client import ClientSession
from goblin_dask.wire.codec import HERE, SchedulerCodec, WorkerCodec, alias, done, missing
from goblin_dask.wire.process import PORTS, session_for
from goblin_dask.wire.schema import Heartbeat, Register, Retire, Unregister
from goblin_dask.wire.session import Channel, Renewed

if TYPE_CHECKING:
    from goblin_dask.wire.server import ServerSession

logger = logging.getLogger(__name__)

HANDSHAKE = {"compression": None, "python": (3, 11, 0), "pickle-protocol": 4}
"""Dask's own handshake, which each end holds with itself: nothing of it is anybody else's business."""


class ChannelComm(Comm):  # type: ignore[misc]
    """A comm on a channel.

    Parameters
    ----------
    channel : Channel
    local, peer : str
        Addresses.
    """

    def __init__(self, channel: Channel, local: str, peer: str):
        super().__init__(deserialize=False)
        self.channel = channel
        self._local_addr = local
        self._peer_addr = peer

    @property
    def local_address(self) -> str:
        return self._local_addr

    @property
    def peer_address(self) -> str:
        return self._peer_addr

    @property
    def same_host(self) -> bool:
        return False

    def handshake_info(self) -> dict[str, Any]:
        return dict(HANDSHAKE)

    async def _get(self) -> Any:
        try:
            return await self.channel.get()
        except ConnectionLost as error:
            raise CommClosedError(str(error)) from error

    async def _put(self, payload: bytes | None) -> int:
        if payload is None:
            return 0
        try:
            await self.channel.put(payload)
        except ConnectionLost as error:
            raise CommClosedError(str(error)) from error
        return len(payload)

    async def close(self) -> None:
        self.channel.close()

    def abort(self) -> None:
        self.channel.close()

    def closed(self) -> bool:
        return self.channel.closed


class GoblinComm(ChannelComm):
    """The comm of a worker or nanny."""

    def __init__(self, session: ClientSession, peer: str):
        super().__init__(session.open_channel(), "goblin://~here", peer)
        self.session = session
        self.codec = WorkerCodec()
        self.deserialize = True  # failures are raised, not kept
        self._handshaking = 2

    async def read(self, deserializers: Any = None) -> Any:
        if self._handshaking:
            self._handshaking -= 1
            return dict(HANDSHAKE)
        while True:
            payload = await self._get()
            if payload is Renewed:
                self.codec.renewed()
                continue
            try:
                message = self.codec.decode(payload)
            except WireError as error:
                self.session.fail(error)
                raise CommClosedError(str(error)) from error
            if self.codec.missing:
                # The registration is on its way to a gateway that was restarted; Dask would stop the worker.
                self.channel.close("the gateway does not know this worker yet")
                raise CommClosedError("the gateway does not know this worker yet")
            if message is not None:
                return message

    async def write(self, msg: Any, serializers: Any = None, on_error: Any = None) -> int:
        if self._handshaking == 2:
            self._handshaking -= 1
            return 0
        payload = self.codec.encode(msg)
        self.channel.greeting = self.codec.greeting
        return await self._put(payload)

    async def close(self) -> None:
        await super().close()
        if self._last:
            await self.session.close("the worker stops" if self.codec.streaming else "the nanny has said all")

    def abort(self) -> None:
        super().abort()
        if self._last:
            self.session.leave("the worker stopped")

    @property
    def _last(self) -> bool:
        """Whether the session is of no more use: its worker leaves, or its nanny has nothing open."""
        return self.codec.streaming or (self.session.role == "nanny" and not self.session.channels)


class GatewayComm(ChannelComm):
    """A volunteer's, validator's or nanny's comm, as the gateway's scheduler sees it.

    Whatever it reads was built here, from numbers and short strings; addresses, names and sizes are the gateway's own.
    """

    def __init__(self, channel: Channel, session: ServerSession):
        super().__init__(channel, "goblin://~gateway", session.address)
        self.session = session
        admission = session.admission
        self.codec = SchedulerCodec(
            session.role,
            {
                "address": session.address,
                "name": admission.worker,
                "nthreads": admission.nthreads,
                "memory_limit": admission.memory,
                "resources": dict(admission.resources),
            },
        )

    async def read(self, deserializers: Any = None) -> Any:
        while True:
            payload = await self._get()
            try:
                message = await self._understand(payload)
            except WireError as error:
                self.session.fail(error)
                raise CommClosedError(str(error)) from error
            if message is not None:
                return message

    async def _understand(self, payload: bytes) -> Any:
        if self.codec.streaming:
            messages = self.codec.stream(payload)
            if self.codec.unknown:
                await self._put(self.codec.freed())
            return messages or None
        call = self.codec.call(payload)
        match call:
            case Register():
                if self.session.alias:
                    raise WireError("a second worker registers in one session")
                self.session.alias = call.alias
            case Heartbeat() if not self.session.alias:
                await self._put(missing())
                return None
            case Unregister():
                self.session.server.widow(call.alias)
                await self._put(done())
                return None
            case Retire():
                await self._put(done())
                return None
        return self.codec.for_scheduler(call)

    async def write(self, msg: Any, serializers: Any = None, on_error: Any = None) -> int:
        return await self._put(self.codec.encode(msg))


class NannyComm(Comm):  # type: ignore[misc]
    """What a worker gets that calls its nanny to say that it stops.

    The nanny listens on nothing, and learns of the end when the process ends.
    """

    _local_addr = "goblin://~here"

    def __init__(self, peer: str):
        super().__init__()
        self._peer_addr = peer
        self._closed = False
        self._answers: asyncio.Queue[Any] = asyncio.Queue()

    async def read(self, deserializers: Any = None) -> Any:
        return await self._answers.get()

    async def write(self, msg: Any, serializers: Any = None, on_error: Any = None) -> int:
        op = msg.get("op")
        if op not in (None, "close_gracefully", "close"):
            raise CommClosedError(f"nothing listens at {self._peer_addr}: {op} cannot be called there")
        self._answers.put_nowait(dict(HANDSHAKE) if op is None else "OK")
        return 0

    async def close(self) -> None:
        self._closed = True

    def abort(self) -> None:
        self._closed = True

    def closed(self) -> bool:
        return self._closed

    @property
    def local_address(self) -> str:
        return self._local_addr

    @property
    def peer_address(self) -> str:
        return self._peer_addr

    @property
    def same_host(self) -> bool:
        return False

    def handshake_info(self) -> dict[str, Any]:
        return dict(HANDSHAKE)


class NullListener(BaseListener):  # type: ignore[misc]
    """Listens on nothing: no port is opened on a lent machine."""

    def __init__(self, scheme: str):
        super().__init__()
        self.prefix = f"{scheme}://"
        self._address = f"{self.prefix}{HERE}{alias()}"

    async def start(self) -> None:
        pass

    def stop(self) -> None:
        pass

    @property
    def listen_address(self) -> str:
        return self._address

    @property
    def contact_address(self) -> str:
        return self._address


_told: set[str] = set()


class GoblinConnector(Connector):  # type: ignore[misc]
    def __init__(self, scheme: str):
        self.scheme = scheme

    async def connect(
        self, address: str, deserialize: bool = True, ssl_context: tls.SSLContext | None = None, **kwargs: Any
    ) -> Comm:
        peer = f"{self.scheme}://{address}"
        if address.startswith(HERE):
            return NannyComm(peer)
        if address.startswith("~"):
            raise FatalCommClosedError(f"{peer} is a worker behind a gateway; nobody dials it")
        try:
            session = await session_for(peer, ssl_context if self.scheme == "goblins" else None)
            _told.discard(peer)
            return GoblinComm(session, peer)
        except ConnectionLost as error:
            # Dask tries again in silence, and often; the person should read why, and once.
            if peer not in _told:
                _told.add(peer)
                logger.warning("%s", error)
            raise CommClosedError(str(error)) from error


class GoblinBackend(Backend):  # type: ignore[misc]
    """``goblin://``: over WebSockets without TLS."""

    scheme = "goblin"

    def get_connector(self) -> GoblinConnector:
        return GoblinConnector(self.scheme)

    def get_listener(self, loc: str, handle_comm: Callable[..., Any], deserialize: bool, **kwargs: Any) -> NullListener:
        return NullListener(self.scheme)

    def get_address_host(self, loc: str) -> str:
        return loc if loc.startswith("~") else self.get_address_host_port(loc)[0]

    def get_address_host_port(self, loc: str) -> tuple[str, int]:
        if loc.startswith("~"):
            raise NotImplementedError
        host, port = parse_host_port(loc.partition("#")[0].partition("/")[0], PORTS[self.scheme])
        return host, port

    def resolve_address(self, loc: str) -> str:
        return loc

    def get_local_address_for(self, loc: str) -> str:
        return loc


class GoblinTLSBackend(GoblinBackend):
    """``goblins://``: over WebSockets with TLS."""

    scheme = "goblins"

"""Peers that keep to nothing: raw WebSockets that send what they like."""

from __future__ import annotations

import asyncio
import pickle
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from goblin_dask import messages as m
from goblin_dask.wire.frames import CLOSE, CONTROL, DATA, OPEN, PACKET_LIMIT
from goblin_dask.wire.session import PATH

ALIAS = "5" * 32


def pack(value: Any) -> bytes:
    return msgspec.msgpack.encode(value)


class Canary:
    """Pickled: code that, wherever it is loaded, leaves a file."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)

    @property
    def pickled(self) -> bytes:
        return pickle.dumps(self)

    @property
    def dead(self) -> bool:
        return self.path.exists()


class Stranger:
    """One connection to a gateway, with a session if `hello` was said."""

    def __init__(self, port: int):
        self.port = port
        self.sent = 0
        self.got = 0
        self.channels = 1
        self.reason: str | None = None
        """Of the gateway's goodbye."""

    async def __aenter__(self) -> Stranger:
        self.http = aiohttp.ClientSession()
        self.ws = await self.http.ws_connect(f"ws://127.0.0.1:{self.port}{PATH}", max_msg_size=PACKET_LIMIT)
        return self

    async def __aexit__(self, *exc) -> None:
        await self.ws.close()
        await self.http.close()

    async def hello(self, role: str = "volunteer", **fields) -> m.Welcome:
        hello = m.Hello((m.PROTOCOL,), role, **fields)
        await self.ws.send_str(msgspec.json.encode(hello).decode())
        return msgspec.json.decode((await self.ws.receive(timeout=5)).data, type=m.Welcome)

    async def frames(self, *frames: tuple[int, int, bytes]) -> None:
        await self.ws.send_bytes(pack([self.sent + 1, self.got, frames]))
        self.sent += len(frames)

    async def control(self, message: Any) -> None:
        await self.frames((CONTROL, DATA, pack(message)))

    async def call(self, channel: int, message: Any) -> Any:
        """Say something on a channel and get the answer."""
        await self.frames((channel, DATA, pack(message)))
        return await self.answer(channel)

    async def answer(self, channel: int) -> Any:
        while True:
            message = await self.ws.receive(timeout=5)
            if message.type is not aiohttp.WSMsgType.BINARY:
                raise ConnectionError(f"no answer but {message}")
            first, _, frames = msgspec.msgpack.decode(message.data)
            self.got = first + len(frames) - 1
            for number, kind, payload in frames:
                if number == channel and kind == DATA:
                    return msgspec.msgpack.decode(payload)

    async def register(self) -> None:
        """Become a worker, on channel 1."""
        await self.hello()
        await self.frames((1, OPEN, b""))
        answer = await self.call(1, {"type": "Register", "alias": ALIAS, "status": "running"})
        assert answer["type"] == "Registered"

    async def beat(self) -> str:
        """Open a channel for a heartbeat; the scheduler's answer."""
        self.channels += 1
        channel = self.channels
        await self.frames((channel, OPEN, b""))
        status = (await self.call(channel, {"type": "Heartbeat", "memory": 1, "cpu": 1.0}))["status"]
        await self.frames((channel, CLOSE, b""))
        return status

    async def dismissed(self, seconds: float = 5) -> str:
        """Wait for the gateway to hang up; its reason."""
        async with asyncio.timeout(seconds):
            while True:
                message = await self.ws.receive()
                if message.type is aiohttp.WSMsgType.TEXT:
                    self.reason = msgspec.json.decode(message.data)["reason"]
                elif message.type is not aiohttp.WSMsgType.BINARY:
                    return self.reason or ""

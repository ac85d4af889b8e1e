"""Laboratories, volunteers and validators that speak the real protocol and compute nothing: what a gateway sees."""

from __future__ import annotations

import asyncio
import secrets

import aiohttp

from goblin_dask import messages as m
from goblin_dask.digest import digest, task_digest
from goblin_dask.gateway.server import Gateway
from goblin_dask.gateway.settings import GatewayConfig
from goblin_dask.graphs.builder import Builder
from goblin_dask.graphs.program import encode
from goblin_dask.wire import schema
from goblin_dask.wire.client import dial
from goblin_dask.wire.session import PATH, Renewed

SPEC = m.ArraySpec((4,), "float32")
_downs = m.decoder(schema.Down)
_answers = m.decoder(schema.Answer)


def program(operator="add"):
    """A small real program, encoded: x + x."""
    build = Builder()
    x = build.input(SPEC)
    return encode(build.finish(build.add(operator, (x, x)))[0])


PROGRAM = program()


def machine(**changes):
    kwargs = {
        "host": secrets.token_hex(16),
        "threads": 4,
        "slots": 2,
        "memory": 8 << 30,
        "cache": 2 << 30,
        "flops": 5e10,
        "bandwidth": 2e7,
        "versions": (("numpy", "2.4"), ("python", "3.11")),
    }
    return m.Machine(**{**kwargs, **changes})


def blob(data, spec=SPEC, inline=True):
    return m.BlobRef(digest(data), spec, len(data), data if inline else None)


def submission(number, *, large=0, job="", flops=2e9, program=PROGRAM, policy=None, inputs=None):
    """A task whose input is 16 inline bytes, or `large` bytes that lie in the laboratory."""
    outputs = (SPEC,) if inputs is None else (inputs[0].spec,)
    if inputs is None:
        data = number.to_bytes(16, "big")
        if large:
            spec = m.ArraySpec((large // 4,), "float32")
            inputs = (m.BlobRef(digest(data), spec, large),)
        else:
            inputs = (blob(data),)
    name = task_digest(digest(program), [ref.digest for ref in inputs])
    return m.SubmitTask(name, digest(program), inputs, outputs, flops, 1 << 20, (number,), policy or m.Policy(), job)


class Peer:
    """One end of a session."""

    role = ""

    def __init__(self, gateway, token="", **changes):
        self.url = f"{gateway.url.replace('http', 'ws', 1)}{PATH}"
        self.http_url = gateway.url
        self.token, self.machine = token, None
        self.session = None
        self.messages: list = []
        self.reason = None
        self._changed = asyncio.Event()

    # --- Owner
    def hello(self):
        return m.Hello((m.PROTOCOL,), self.role, self.token, machine=self.machine)

    def opened(self, session):
        pass

    def received(self, session, message):
        self.messages.append(message)
        self.tell()

    def closed(self, session, reason):
        self.reason = reason
        self.tell()

    # --- for tests
    async def connect(self):
        self.session = await dial(self.url, self)
        return self

    async def close(self):
        await self.session.close("done", patience=0.5)

    def tell(self):
        self._changed.set()
        self._changed = asyncio.Event()

    async def until(self, condition, seconds=10.0):
        async with asyncio.timeout(seconds):
            while not (value := condition()):
                await self._changed.wait()
            return value

    def got(self, kind):
        return [message for message in self.messages if isinstance(message, kind)]


class FakeLab(Peer):
    role = "lab"

    def __init__(self, gateway, token="", **changes):
        super().__init__(gateway, token)
        self.id = changes.pop("id", secrets.token_hex(16))
        self.key = changes.pop("key", secrets.token_bytes(32))
        self.blobs: dict[str, bytes] = {}
        self.submitted: list = []

    def opened(self, session):
        session.send(m.LabReady(self.id, self.key, "goblin-test-socket", "http://127.0.0.1:1"))
        session.send(m.DefineProgram(digest(PROGRAM), PROGRAM))
        for task in self.submitted:  # a gateway that was restarted
            session.send(task)

    def submit(self, *tasks):
        for task in tasks:
            self.submitted.append(task)
            self.session.send(task)

    async def accepted(self, count, seconds=20.0):
        return await self.until(
            lambda: self.got(m.TaskAccepted)[: count or None] if len(self.got(m.TaskAccepted)) >= count else None,
            seconds,
        )

    async def move(self, request):
        """The laboratory's part of one relayed transfer."""
        url = f"{self.http_url}/goblin/relay/{request.transfer}"
        async with aiohttp.ClientSession() as http:
            if request.direction == "fetch":
                async with http.post(url, data=self.blobs[request.digest]) as response:
                    return response.status
            async with http.get(url) as response:
                self.blobs[request.digest] = await response.read()
            async with http.post(url) as response:
                return response.status


class Worker(Peer):
    """Registers as a stock Dask worker does, and answers work with `perform`."""

    def __init__(self, gateway, token="", **changes):
        super().__init__(gateway, token)
        self.machine = machine(**changes)
        self.alias = secrets.token_hex(16)
        self.work: dict[str, m.Work] = {}
        self.holding: tuple[str, ...] = ()
        self.auto = True
        self.registered = asyncio.Event()
        self.freed: list[str] = []
        self._streaming = False

    def opened(self, session):
        session.send(m.Holding(tuple(self.work)))

    async def connect(self):
        await super().connect()
        self._channel = self.session.open_channel(m.encode(schema.Register(self.alias, "running")))
        await self._channel.put(self._channel.greeting)
        self._reader = asyncio.create_task(self._read())
        await asyncio.wait_for(self.registered.wait(), 10)
        return self

    async def close(self):
        await super().close()
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)

    async def _read(self):
        awaits_answer = True
        while True:
            payload = await self._channel.get()
            if payload is Renewed:
                awaits_answer = True
            elif awaits_answer:
                answer = m.decode(payload, _answers)
                assert isinstance(answer, schema.Registered), answer
                awaits_answer = False
                self.registered.set()
                self.tell()
            else:
                for down in m.decode(payload, _downs):
                    await self._down(down)

    async def _down(self, down):
        if isinstance(down, schema.Compute):
            self.work[down.work.attempt] = down.work
            self.tell()
            if self.auto:
                await self.perform(down.work)
                await self.finish(down)
        elif isinstance(down, schema.FreeKeys):
            self.freed += down.keys
            self.tell()

    async def finish(self, compute):
        self.work.pop(compute.work.attempt, None)
        await self._channel.put(m.encode([schema.Finished(compute.work.attempt, compute.run_id, 0.1)]))

    async def perform(self, work):
        raise NotImplementedError


class FakeVolunteer(Worker):
    role = "volunteer"
    result = b"\x00\x00\x80\x3f" * 4
    wall = 0.05

    async def perform(self, work):
        self.commit(work)

    def commit(self, work, result=None):
        data = self.result if result is None else result
        held = tuple(ref.digest for ref in work.inputs if ref.inline is None)
        moved = sum(ref.nbytes for ref in work.inputs if ref.inline is None)
        self.session.send(m.Committed(work.attempt, (blob(data),), self.wall, self.wall, moved, held, uploaded=True))


class FakeValidator(Worker):
    role = "validator"
    verdict = "accepted"
    method = "algebraic"

    async def perform(self, work):
        report = m.CheckReport(self.verdict, self.method, 0.3 if self.verdict == "accepted" else 50.0, seconds=0.002)
        self.session.send(m.Checked(work.attempt, report))


class Bench:
    """A gateway and its peers in one process."""

    def __init__(self, **options):
        self.options = {"port": 0, "open": True, "keepalive": 5.0, "probe": False, **options}
        self.peers = []

    async def __aenter__(self):
        self.gateway = Gateway(GatewayConfig(**self.options))
        await self.gateway.start()
        return self

    async def __aexit__(self, *exc):
        for peer in self.peers:
            if peer.session is not None:
                await peer.close()
        await self.gateway.stop()

    async def token(self, role, owner="Ada"):
        from goblin_dask.gateway.accounts import create_token

        return await create_token(self.gateway.database, role, owner)

    async def add(self, kind, owner="Ada", connect=True, **changes):
        role = kind.role
        token = changes.pop("token", None)
        if token is None:
            token = "" if role == "volunteer" else await self.token(role, owner)
        peer = kind(self.gateway, token, **changes)
        self.peers.append(peer)
        return await peer.connect() if connect else peer

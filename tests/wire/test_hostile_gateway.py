"""A gateway that wants a volunteer to run something: the volunteer leaves."""

from __future__ import annotations

import asyncio
import logging
import os
import sys

import aiohttp
import msgspec
import pytest
from aiohttp import web
from conftest import PLUGIN
from distributed.comm.core import CommClosedError, connect
from strangers import ALIAS, Canary, pack

from goblin_dask import messages as m
from goblin_dask.errors import WireError
from goblin_dask.wire import process
from goblin_dask.wire.dask_internals import work_task
from goblin_dask.wire.frames import CONTROL, DATA, OPEN, Arrival
from goblin_dask.wire.session import PATH

KEY = "ab" * 32 + "#1"
LEASE = {
    "type": "Lease",
    "attempt": KEY,
    "program": b"",
    "inputs": [],
    "grant": "",
    "routes": {},
    "peak": 0,
    "deadline": 1.0,
}
COMPUTE = {"type": "Compute", "run_id": 1, "priority": [0], "work": LEASE}
PICKLED = "<pickled>"


class Hostile:
    """Accepts one session, takes the registration, then says what it is told to say."""

    def __init__(self, welcome=None, registered=None, says=None, channel=1):
        self.welcome, self.registered, self.says, self.channel = welcome, registered, says, channel
        self.goodbye: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def start(self) -> Hostile:
        app = web.Application()
        app.router.add_get(PATH, self.handle)
        self.runner = web.AppRunner(app, access_log=None)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", 0).start()
        self.port = self.runner.addresses[0][1]
        return self

    async def handle(self, request):
        ws = web.WebSocketResponse()
        await ws.prepare(request)
        await ws.receive()
        welcome = m.Welcome(1, "a" * 32, "b" * 64, 0, False)
        await ws.send_str(self.welcome or msgspec.json.encode(welcome).decode())
        sent, registered = 0, False
        async for message in ws:
            if message.type is aiohttp.WSMsgType.TEXT:
                self.goodbye.set_result(msgspec.json.decode(message.data)["reason"])
                break
            first, _, frames = msgspec.msgpack.decode(message.data)
            if not registered and any(number == 1 and kind == DATA for number, kind, _ in frames):
                registered = True
                answer = self.registered or {"type": "Registered", "time": 0.0, "interval": 1.0}
                out = [[1, DATA, pack(answer)]]
                if self.says is not None:
                    out.append([self.channel, DATA, pack(self.says)])
                await ws.send_bytes(pack([sent + 1, first + len(frames) - 1, out]))
                sent += len(out)
        return ws


@pytest.fixture
async def hostile():
    started = []

    async def start(**options) -> Hostile:
        started.append(await Hostile(**options).start())
        return started[-1]

    yield start
    for gateway in started:
        await gateway.runner.cleanup()


@pytest.fixture
def canary(tmp_path):
    canary = Canary(tmp_path / "dead")
    yield canary
    assert not canary.dead


REGISTER = {
    "op": "register-worker",
    "address": f"goblin://~here/{ALIAS}",
    "status": "init",
    "nanny": None,
    "name": "x",
}


async def registered(port: int):
    comm = await connect(f"goblin://127.0.0.1:{port}")
    await comm.write(REGISTER)
    return comm, await comm.read()


def poisoned(value, pickled: bytes):
    if value == PICKLED:
        return pickled
    if isinstance(value, dict):
        return {key: poisoned(item, pickled) for key, item in value.items()}
    return [poisoned(item, pickled) for item in value] if isinstance(value, list) else value


async def test_an_honest_answer_and_lease_are_understood(hostile):
    gateway = await hostile(says=[COMPUTE])
    comm, answer = await registered(gateway.port)
    assert answer["status"] == "OK"
    assert answer["worker-plugins"] == {}
    [message] = await comm.read()
    assert message["run_spec"] == work_task(KEY, m.decode(pack(LEASE), m.decoder(m.Work)))
    await comm.close()
    assert await asyncio.wait_for(gateway.goodbye, 5) == "the worker stops"


@pytest.mark.parametrize(
    "says",
    [
        [{"op": "compute-task", "key": KEY, "run_spec": PICKLED}],
        [{"op": "plugin-add", "plugin": PICKLED, "name": "x"}],
        [{"op": "run", "function": PICKLED}],
        [{"type": "Run", "function": PICKLED}],
        [{"type": "acquire-replicas", "who_has": {"x": ["tcp://10.1.2.3:22"]}}],
        [{**COMPUTE, "who_has": {"x": ["tcp://10.1.2.3:22"]}}],
        [{**COMPUTE, "function": "os.system"}],
        [{**COMPUTE, "work": PICKLED}],
        [{**COMPUTE, "work": {**LEASE, "function": "os.system"}}],
        [{**COMPUTE, "work": {**LEASE, "program": 7}}],
        [{**COMPUTE, "work": {"type": "Run", "attempt": KEY}}],
        [{**COMPUTE, "annotations": {"executor": "x"}}],
        [{"type": "FreeKeys", "keys": [PICKLED]}],
        [{"type": "CloseWorker", "reason": PICKLED}],
        [{"type": "StatusShallBe", "status": "closed"}],
        {"type": "Registered", "time": 0.0, "interval": 1.0},
        PICKLED,
    ],
    ids=lambda says: str(says)[:70],
)
async def test_code_is_refused_and_the_session_is_over(hostile, canary, caplog, says):
    gateway = await hostile(says=poisoned(says, canary.pickled))
    comm, _ = await registered(gateway.port)
    with pytest.raises(CommClosedError):
        await comm.read()
    reason = await asyncio.wait_for(gateway.goodbye, 5)
    assert "not of the protocol" in reason
    assert any("not of the protocol" in r.getMessage() for r in caplog.records if r.levelno == logging.WARNING)
    assert process.current(f"goblin://127.0.0.1:{gateway.port}") is None


@pytest.mark.parametrize(
    "answer",
    [
        {"status": "OK", "worker-plugins": {"shuffle": PICKLED}},
        {"type": "Registered", "time": 0.0, "interval": 1.0, "worker-plugins": {"x": PICKLED}},
        {"type": "Beat", "status": "OK"},
        PICKLED,
    ],
    ids=str,
)
async def test_a_registration_is_answered_with_a_registration(hostile, canary, answer):
    gateway = await hostile(registered=poisoned(answer, canary.pickled))
    with pytest.raises(CommClosedError):
        await registered(gateway.port)
    assert await asyncio.wait_for(gateway.goodbye, 5)


@pytest.mark.parametrize("kind", [*m.FromGateway.__args__, *m.ToGateway.__args__, *m.Work.__args__], ids=str)
async def test_the_control_channel_carries_nothing_that_is_not_for_volunteers(hostile, kind):
    gateway = await hostile(says={"type": kind.__name__}, channel=CONTROL)
    comm, _ = await registered(gateway.port)
    with pytest.raises(CommClosedError):
        await comm.read()
    assert "not of the protocol" in await asyncio.wait_for(gateway.goodbye, 5)


async def test_a_gateway_opens_no_channels(hostile):
    gateway = await hostile()
    comm, _ = await registered(gateway.port)
    with pytest.raises(WireError, match="may not be opened"):
        comm.session._dispatch(Arrival(7, OPEN, b"", 1))
    await comm.close()


@pytest.mark.parametrize(
    "welcome",
    [
        "null",
        '{"type": "Welcome", "protocol": 2, "session": "a", "secret": "b", "received": 0, "resumed": false}',
        '{"type": "Welcome", "protocol": 1, "session": "a", "secret": "b", "received": 0, "resumed": true}',
        '{"type": "Welcome", "protocol": 1, "session": "a", "secret": "b", "received": 0, "resumed": false, '
        '"keepalive": 1e9}',
        '{"type": "Welcome", "protocol": 1, "session": "a", "secret": "b", "received": 0, "resumed": false, "code": 1}',
    ],
)
async def test_a_welcome_to_something_else_is_refused(hostile, welcome):
    gateway = await hostile(welcome=welcome)
    with pytest.raises(WireError):
        await connect(f"goblin://127.0.0.1:{gateway.port}")


@pytest.mark.system
async def test_a_stock_worker_that_is_sent_a_plugin_stops(hostile, canary, tmp_path):
    gateway = await hostile(says=[{"op": "plugin-add", "plugin": canary.pickled, "name": "x"}])
    command = [sys.executable, "-m", "dask", "worker", f"goblin://127.0.0.1:{gateway.port}", "--no-nanny"]
    with (tmp_path / "log").open("wb") as log:
        worker = await asyncio.create_subprocess_exec(
            *command, "--preload", str(PLUGIN), stdout=log, stderr=log, env={**os.environ}
        )
    assert "not of the protocol" in await asyncio.wait_for(gateway.goodbye, 30)
    await asyncio.wait_for(worker.wait(), 10)
    assert "a message that is not of the protocol" in (tmp_path / "log").read_text()

"""Both ends of a session over real sockets: cuts, silence, restarts, refusals, back-pressure."""

from __future__ import annotations

import asyncio
import gc
import ssl
from pathlib import Path

import dask
import psutil
import pytest
from aiohttp import web
from strangers import Stranger

from goblin_dask import messages as m
from goblin_dask.errors import ConnectionLost, InputError, Refused
from goblin_dask.wire import process
from goblin_dask.wire.client import ClientSession, dial
from goblin_dask.wire.frames import Limits
from goblin_dask.wire.server import Admission, SessionServer
from goblin_dask.wire.session import PATH

TLS = Path(__file__).with_name("tls")


def program(number: int, size: int = 0) -> m.DefineProgram:
    return m.DefineProgram(f"{number:064x}", bytes(size))


class Lab:
    """An owner that remembers everything."""

    def __init__(self, changes, role: str = "lab"):
        self.changes = changes
        self.role = role
        self.openings = 0
        self.got: list = []
        self.reason: str | None = None
        self.at_open: list = []
        self.hold: asyncio.Event | None = None

    def hello(self) -> m.Hello:
        return m.Hello((m.PROTOCOL,), self.role, "token")

    def opened(self, session) -> None:
        self.openings += 1
        for message in self.at_open:
            session.send(message)
        self.changes.tell()

    async def received(self, session, message) -> None:
        if self.hold is not None:
            await self.hold.wait()
        self.got.append(message)
        self.changes.tell()

    def closed(self, session, reason) -> None:
        self.reason = reason
        self.changes.tell()


@pytest.fixture
async def gateway(gateways):
    return await gateways()


@pytest.fixture
async def dialled():
    sessions: list[ClientSession] = []

    async def start(port: int, owner, path: str = PATH) -> ClientSession:
        sessions.append(await dial(f"ws://127.0.0.1:{port}{path}", owner))
        return sessions[-1]

    yield start
    for session in sessions:
        await session.close()


async def test_messages_arrive_once_and_in_order_through_many_cuts(gateway, cables, dialled):
    cable = await cables(gateway.port)
    lab = Lab(gateway.changes)
    session = await dialled(cable.port, lab)
    there = gateway.session_of("lab")
    up = [program(i, size=(i * 7919) % 300_000) for i in range(60)]
    down = [m.TaskProgress(f"{i:064x}", "queued") for i in range(60)]
    for i, (one, other) in enumerate(zip(up, down, strict=True)):
        session.send(one)
        there.send(other)
        if i % 12 == 5:
            await gateway.changes.until(lambda i=i: len(gateway.messages) > i - 5)
            cable.cut()
            cable.mend()
    await gateway.changes.until(lambda: len(gateway.messages) >= 60 and len(lab.got) >= 60)
    assert [message for _, message in gateway.messages] == up
    assert lab.got == down
    assert lab.openings == 1
    await asyncio.wait_for(session.flush(), 5)
    await asyncio.wait_for(there.flush(), 5)
    assert there is gateway.session_of("lab")


async def test_silence_is_noticed_and_the_connection_replaced(gateways, dialled, cables):
    """A router that forgot the connection: no reset comes, bytes go nowhere."""
    gateway = await gateways(keepalive=0.2)
    cable = await cables(gateway.port)
    lab = Lab(gateway.changes)
    session = await dialled(cable.port, lab)
    cable.mute()
    session.send(program(1))
    await gateway.changes.until(lambda: gateway.messages, 10)
    assert gateway.session_of("lab").identity == session.identity
    assert lab.openings == 1


async def test_an_idle_session_stays_up_by_its_keepalives(gateways, dialled, cables):
    gateway = await gateways(keepalive=0.1)
    lab = Lab(gateway.changes)
    cable = await cables(gateway.port)
    session = await dialled(cable.port, lab)
    before = cable.carried
    await cable.changes.until(lambda: cable.carried > before + 20)
    assert session.connected.is_set()
    assert cable.connections == 1


async def test_a_restarted_gateway_is_told_again_what_the_old_one_may_not_have_taken(gateways, dialled):
    first = await gateways()
    lab = Lab(first.changes)
    lab.at_open = [m.LabReady("0" * 32, bytes(32))]
    session = await dialled(first.port, lab)
    await first.changes.until(lambda: first.said(m.LabReady))
    name = session.identity
    await first.stop()
    big = program(7, size=1_000_000)
    session.send(big)
    lab.changes = changes = (second := await gateways(first.port)).changes
    await changes.until(lambda: second.said(m.DefineProgram))
    messages = [message for _, message in second.messages]
    assert messages[0] == lab.at_open[0]  # before anything that is sent again
    assert messages.count(big) == 1
    assert lab.openings == 2
    assert session.identity != name


async def test_a_goodbye_is_passed_on_to_the_owner(gateway, dialled):
    lab = Lab(gateway.changes)
    session = await dialled(gateway.port, lab)
    gateway.session_of("lab").close("this lab is not welcome any more")
    await gateway.changes.until(lambda: lab.reason)
    assert "not welcome any more" in lab.reason
    with pytest.raises(ConnectionLost, match="not welcome"):
        session.send(program(1))
    with pytest.raises(ConnectionLost, match="not welcome"):
        await session.drain()


async def test_a_goodbye_until_later_opens_a_new_session(gateway, dialled):
    lab = Lab(gateway.changes)
    await dialled(gateway.port, lab)
    gateway.session_of("lab").close("tidying up", retry=True)
    await gateway.changes.until(lambda: lab.openings == 2)
    assert gateway.closed[0][1] == "tidying up"


async def test_leaving_is_noticed_at_once_after_everything_was_said(gateways, dialled):
    gateway = await gateways(linger=600)
    session = await dialled(gateway.port, Lab(gateway.changes))
    messages = [program(i, 100_000) for i in range(20)]
    for message in messages:
        session.send(message)
    await session.close("done")
    await gateway.changes.until(lambda: gateway.closed)
    assert gateway.closed[0][1] == "the other side left: done"
    assert gateway.said(m.DefineProgram) == messages
    assert not gateway.server.sessions


async def test_a_slow_taker_holds_the_sender_back(gateway, dialled):
    lab = Lab(gateway.changes)
    lab.hold = asyncio.Event()
    await dialled(gateway.port, lab)
    there = gateway.session_of("lab")
    sent = 0

    async def flood():
        nonlocal sent
        while sent < 400:
            there.send(m.TaskAccepted("0" * 64, (blob(60_000),), m.Verdict("recompute", 0.0, 0.0, ())))
            sent += 1
            await there.drain()

    task = asyncio.create_task(flood())
    await there.connected.wait()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.shield(task), 0.5)
    assert sent < 100  # 4 MiB of 60 kB
    lab.hold.set()
    await asyncio.wait_for(task, 10)
    await gateway.changes.until(lambda: len(lab.got) == 400)


def blob(size: int) -> m.BlobRef:
    return m.BlobRef("0" * 64, m.ArraySpec((size,), "int8"), size, bytes(size))


async def test_who_takes_nothing_is_given_up(gateways, dialled):
    gateway = await gateways(limits={"lab": Limits(outbox=1_000_000)})
    lab = Lab(gateway.changes)
    lab.hold = asyncio.Event()
    await dialled(gateway.port, lab)
    there = gateway.session_of("lab")

    def flood():
        while True:
            there.send(m.TaskAccepted("0" * 64, (blob(60_000),), m.Verdict("recompute", 0.0, 0.0, ())))

    with pytest.raises(ConnectionLost, match="wait for a peer that takes none"):
        flood()
    assert there.closed


async def test_an_owner_that_fails_costs_its_session_only(gateway, dialled):
    def broken(session, message):
        raise ZeroDivisionError

    one = await dialled(gateway.port, Lab(gateway.changes))
    other = await dialled(gateway.port, Lab(gateway.changes))
    gateway.server.sessions[one.identity]._on_message = broken
    one.send(program(1))
    other.send(program(2))
    await gateway.changes.until(lambda: one.closed and gateway.messages)
    assert one.reason is not None
    assert "ZeroDivisionError" in one.reason
    assert not other.closed


async def test_the_younger_connection_of_a_session_wins(gateway, dialled):
    session = await dialled(gateway.port, Lab(gateway.changes))
    async with Stranger(gateway.port) as again:
        await again.ws.send_str(
            f'{{"type": "Hello", "protocols": [1], "role": "lab", "session": "{session.identity}", '
            f'"secret": "{session.secret}"}}'
        )
        assert '"resumed":true' in (await again.ws.receive(timeout=5)).data
        await again.dismissed()  # the first one came back and took over in turn
    session.send(program(1))
    await gateway.changes.until(lambda: gateway.messages)


# --- refusals, each a sentence --------------------------------------------------------------------------------------
async def test_a_refused_hello(gateway):
    lab = Lab(gateway.changes)
    lab.hello = lambda: m.Hello((m.PROTOCOL,), "lab", "wrong")
    with pytest.raises(Refused, match="does not know the token: ask for one"):
        await dial(f"ws://127.0.0.1:{gateway.port}{PATH}", lab)


async def test_an_older_protocol(gateway):
    lab = Lab(gateway.changes)
    lab.hello = lambda: m.Hello((0,), "lab")
    with pytest.raises(Refused, match="speaks version 1 of the goblin protocol and was offered 0: install the version"):
        await dial(f"ws://127.0.0.1:{gateway.port}{PATH}", lab)


async def test_a_full_gateway(gateways, dialled):
    gateway = await gateways(most=1)
    await dialled(gateway.port, Lab(gateway.changes))
    with pytest.raises(ConnectionLost, match="is full"):
        await dial(f"ws://127.0.0.1:{gateway.port}{PATH}", Lab(gateway.changes))


async def test_nobody_there(gateway, unused_tcp_port):
    with pytest.raises(ConnectionLost, match="cannot be reached"):
        await dial(f"ws://127.0.0.1:{unused_tcp_port}{PATH}", Lab(gateway.changes))


async def test_something_else_there(gateway):
    with pytest.raises(Refused, match="answers 404, not as a goblin gateway"):
        await dial(f"ws://127.0.0.1:{gateway.port}/elsewhere", Lab(gateway.changes))


@pytest.mark.parametrize(
    "address", ["goblin://", "goblin://a b", "goblin://host:port", "http://host", "goblin://h:1:2"]
)
def test_what_is_no_address(address):
    with pytest.raises(InputError, match="goblin://HOST:PORT"):
        process.url_of(address)


@pytest.mark.parametrize(
    ("address", "url"),
    [
        ("goblin://host", "ws://host:8787/goblin/session"),
        ("goblin://1.2.3.4:99", "ws://1.2.3.4:99/goblin/session"),
        ("goblins://[::1]", "wss://[::1]:443/goblin/session"),
        ("goblins://host/grid/#2", "wss://host:443/grid/goblin/session"),
    ],
)
def test_where_a_gateway_answers(address, url):
    assert process.url_of(address) == url


# --- TLS ------------------------------------------------------------------------------------------------------------
@pytest.fixture
async def encrypted():
    """Port of a gateway behind TLS, whose certificate nobody knows."""

    async def admit(hello, request):
        return Admission("x")

    server = SessionServer(on_hello=admit, on_message=lambda session, message: None)
    app = web.Application()
    app.router.add_get(PATH, server.handle)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(TLS / "certificate.pem", TLS / "key.pem")
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context).start()
    yield runner.addresses[0][1]
    await server.close()
    await runner.cleanup()


async def test_tls_with_the_authority_that_the_configuration_names(encrypted):
    with dask.config.set({"goblin.tls.ca-file": str(TLS / "certificate.pem")}):
        session = await process.session_for(f"goblins://localhost:{encrypted}")
    assert process.current(f"goblins://localhost:{encrypted}") is session
    await session.close()
    assert process.current(f"goblins://localhost:{encrypted}") is None


async def test_a_certificate_that_nobody_vouches_for(encrypted):
    with pytest.raises(Refused, match=r"is not trusted .*goblin\.tls\.ca-file"):
        await process.session_for(f"goblins://localhost:{encrypted}")


async def test_no_tls_where_it_is_wanted(gateway):
    with pytest.raises(Refused, match="without TLS the address begins with goblin://"):
        await process.session_for(f"goblins://127.0.0.1:{gateway.port}")


async def test_tls_where_it_is_not_expected(encrypted):
    with pytest.raises((Refused, ConnectionLost), match="goblins://"):
        await process.session_for(f"goblin://127.0.0.1:{encrypted}")


async def test_an_authority_file_that_is_none(tmp_path):
    (tmp_path / "ca.pem").write_text("not a certificate")
    for path in (tmp_path / "ca.pem", tmp_path / "missing.pem"):
        with (
            dask.config.set({"goblin.tls.ca-file": str(path)}),
            pytest.raises(InputError, match="is no file of certificates"),
        ):
            process.trust("goblins://host")


# --- many -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("count", [300, pytest.param(5_000, marks=pytest.mark.full)])
async def test_memory_does_not_grow_with_joins_and_leaves(gateways, count, full):
    if count > 300 and not full:
        pytest.skip("in `make full`")
    gateway = await gateways(linger=0.05)

    async def join(times: int) -> None:
        for i in range(times):
            async with Stranger(gateway.port) as stranger:
                await stranger.register()
                if i % 2:
                    await stranger.ws.send_str('{"type": "Goodbye", "reason": "leaves"}')

    await join(100)
    gc.collect()
    before = psutil.Process().memory_info().rss
    await join(count)
    await gateway.changes.until(lambda: not gateway.server.sessions and not gateway.scheduler.workers)
    gc.collect()
    assert not gateway.scheduler.stream_comms
    assert psutil.Process().memory_info().rss - before < 20e6 + 8e3 * count

"""Strangers at the border: whatever they say, nothing of it is run, and nobody else notices."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import struct

import aiohttp
import msgspec
import psutil
import pytest
from strangers import ALIAS, Canary, Stranger, pack

from goblin_dask import messages as m
from goblin_dask.errors import GoblinError
from goblin_dask.wire import schema
from goblin_dask.wire.frames import CLOSE, CONTROL, DATA, OPEN, PACKET_LIMIT, PIECE
from goblin_dask.wire.session import SENDS

KEY = "ab" * 32 + "#1"
PICKLED = "<pickled>"  # stands for the canary's pickle in the tables below


@pytest.fixture
def canary(tmp_path):
    canary = Canary(tmp_path / "dead")
    yield canary
    assert not canary.dead


@pytest.fixture
async def gateway(gateways):
    return await gateways(linger=1)


@pytest.fixture
async def honest(gateway):
    """A volunteer that does everything right, and must not notice anything."""
    async with Stranger(gateway.port) as stranger:
        await stranger.register()
        (mine,) = gateway.scheduler.workers
        yield stranger
        assert await stranger.beat() == "OK"
        assert mine in gateway.scheduler.workers


def poisoned(value, pickled: bytes):
    if value == PICKLED:
        return pickled
    if isinstance(value, dict):
        return {key: poisoned(item, pickled) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [poisoned(item, pickled) for item in value]
    return value


async def dismissed(gateway, caplog, stranger) -> None:
    """The gateway hung up, said why, logged why, and kept nothing."""
    reason = await stranger.dismissed()
    assert reason
    assert any(reason[:40] in record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING)
    await gateway.changes.until(lambda: len(gateway.server.sessions) == 1)  # the honest one


# --- before there is a session ------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "first",
    [
        PICKLED.encode(),
        b"",
        "",
        "null",
        "[]",
        "{}",
        "x" * 100_000,
        "[" * 50_000,
        '{"type": "Hello"}',
        '{"type": "Hello", "protocols": [1], "role": "scheduler"}',
        '{"type": "Hello", "protocols": [1], "role": "volunteer", "address": "tcp://10.1.2.3:22"}',
        '{"type": "Hello", "protocols": [1], "role": "volunteer", "session": 7}',
        '{"type": "Hello", "protocols": "1", "role": "volunteer"}',
        '{"type": "Welcome", "protocols": [1]}',
        '{"type": "Hello", "protocols": [1], "role": "volunteer", "machine": {"host": ["x"]}}',
    ],
    ids=lambda first: str(first)[:60],
)
async def test_a_first_message_that_is_no_hello(gateway, honest, canary, caplog, first):
    async with Stranger(gateway.port) as stranger:
        if isinstance(first, bytes):
            await stranger.ws.send_bytes(canary.pickled if first else first)
        else:
            await stranger.ws.send_str(first)
        await dismissed(gateway, caplog, stranger)


@pytest.mark.parametrize("offered", [[], [0], [2, 3]])
async def test_another_version_is_refused_with_a_sentence_whatever_else_it_says(gateway, honest, caplog, offered):
    async with Stranger(gateway.port) as stranger:
        hello = {"type": "Hello", "protocols": offered, "role": "of the future", "news": {"x": [1, 2]}}
        await stranger.ws.send_str(msgspec.json.encode(hello).decode())
        await dismissed(gateway, caplog, stranger)
        assert "speaks version 1" in stranger.reason
        assert "install the version" in stranger.reason


async def test_a_session_is_not_resumed_without_its_secret(gateway, honest, caplog):
    session = gateway.session_of()
    async with Stranger(gateway.port) as thief:
        hello = m.Hello((1,), "volunteer", session=session.identity, secret="0" * 64)
        await thief.ws.send_str(msgspec.json.encode(hello).decode())
        await dismissed(gateway, caplog, thief)


# --- frames ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "frames",
    [
        [(CONTROL, DATA, PICKLED)],
        [(1, OPEN, b""), (1, DATA, PICKLED)],
        [(1, DATA, PICKLED)],
        [(1, OPEN, b""), (1, PIECE, PICKLED), (1, DATA, PICKLED)],
        [(CONTROL, OPEN, b"")],
        [(CONTROL, CLOSE, b"")],
        [(1, OPEN, b""), (1, OPEN, b"")],
        [(number, OPEN, b"") for number in range(1, 40)],
        [(1, OPEN, b""), (1, PIECE, b"a"), (CONTROL, DATA, b"b")],
        [(PICKLED, DATA, b"")],
        [(1, PICKLED, b"")],
    ],
    ids=str,
)
async def test_frames_that_no_peer_of_ours_sends(gateway, honest, canary, caplog, frames):
    async with Stranger(gateway.port) as stranger:
        await stranger.hello()
        await stranger.frames(*poisoned(frames, canary.pickled))
        await dismissed(gateway, caplog, stranger)


async def test_bytes_that_are_no_packet(gateway, honest, canary, caplog):
    async with Stranger(gateway.port) as stranger:
        await stranger.hello()
        await stranger.ws.send_bytes(canary.pickled)
        await dismissed(gateway, caplog, stranger)


@pytest.mark.parametrize("size", [PACKET_LIMIT + 1, 32 * PACKET_LIMIT])
async def test_a_packet_that_is_too_long_is_not_read(gateway, honest, size):
    async with Stranger(gateway.port) as stranger:
        await stranger.hello()

        async def flood():
            while True:
                await stranger.ws.send_bytes(bytes(size))

        with pytest.raises((ConnectionError, aiohttp.ClientError)):
            await asyncio.wait_for(flood(), 10)
        assert all(session.link.received == 0 for session in gateway.server.sessions.values() if not session.alias)


async def test_a_message_that_is_too_long_is_refused_piece_by_piece(gateway, honest, caplog):
    async with Stranger(gateway.port) as stranger:
        await stranger.hello()
        await stranger.frames((1, OPEN, b""))
        for _ in range(80):
            await stranger.frames((1, PIECE, bytes(120_000)))
        await dismissed(gateway, caplog, stranger)
        assert "longer than" in stranger.reason


# --- the control channel --------------------------------------------------------------------------------------------
@pytest.mark.parametrize("role", ["volunteer", "validator", "lab", "nanny"])
async def test_each_role_says_only_what_is_its_to_say(gateway, honest, caplog, role):
    mine = getattr(SENDS[role], "__args__", ())
    for kind in m.ToGateway.__args__ + m.FromGateway.__args__ + m.Session.__args__ + m.Work.__args__:
        if kind in mine:
            continue
        caplog.clear()
        async with Stranger(gateway.port) as stranger:
            await stranger.hello(role)
            await stranger.control({"type": kind.__name__})
            await dismissed(gateway, caplog, stranger)
    assert not gateway.messages


async def test_a_pickle_in_every_field_of_every_control_message(gateway, honest, canary, caplog):
    for role, union in SENDS.items():
        for kind in getattr(union, "__args__", ()):
            for field in [*kind.__struct_fields__, "type", "unknown"]:
                caplog.clear()
                async with Stranger(gateway.port) as stranger:
                    await stranger.hello(role)
                    await stranger.control({"type": kind.__name__, field: canary.pickled})
                    await dismissed(gateway, caplog, stranger)


# --- Dask's channels ------------------------------------------------------------------------------------------------
REGISTER = {"type": "Register", "alias": ALIAS}
FINISHED = {"type": "Finished", "key": KEY, "run_id": 1}


@pytest.mark.parametrize(
    "call",
    [
        {"op": "register-worker", "address": "tcp://10.1.2.3:22", "name": "x", "nthreads": 1},
        {"op": "register-client", "client": "x"},
        {"op": "run", "function": PICKLED},
        {"op": "run_function", "function": PICKLED},
        {"op": "plugin-add", "plugin": PICKLED},
        {"op": "register_scheduler_plugin", "plugin": PICKLED},
        {"op": "update-graph", "graph": PICKLED},
        {"op": "terminate"},
        {"op": "identity"},
        {"type": "register-client"},
        {"type": "Unregister", "alias": ALIAS},  # a nanny's to say
        {"type": "RegisterNanny"},
        {"type": "NannyStarted", "ok": True},
        {**REGISTER, "address": "tcp://10.1.2.3:22"},
        {**REGISTER, "name": "another"},
        {**REGISTER, "nanny": "tcp://10.1.2.3:22"},
        {**REGISTER, "services": {"dashboard": 22}},
        {**REGISTER, "extra": PICKLED},
        {**REGISTER, "versions": PICKLED},
        {**REGISTER, "nthreads": 10**9},
        {**REGISTER, "alias": "../../etc"},
        {**REGISTER, "alias": PICKLED},
        {**REGISTER, "status": PICKLED},
        {"type": PICKLED},
        PICKLED,
        [REGISTER],
        [FINISHED],
        None,
    ],
    ids=str,
)
async def test_calls_that_no_volunteer_of_ours_makes(gateway, honest, canary, caplog, call):
    async with Stranger(gateway.port) as stranger:
        await stranger.hello()
        await stranger.frames((1, OPEN, b""), (1, DATA, pack(poisoned(call, canary.pickled))))
        await dismissed(gateway, caplog, stranger)


async def test_a_second_worker_in_one_session(gateway, honest, caplog):
    async with Stranger(gateway.port) as stranger:
        await stranger.register()
        await stranger.frames((3, OPEN, b""), (3, DATA, pack(REGISTER)))
        await dismissed(gateway, caplog, stranger)
        await gateway.changes.until(lambda: len(gateway.scheduler.workers) == 1)


@pytest.mark.parametrize(
    "said",
    [
        FINISHED,
        [{**FINISHED, "type": PICKLED}],
        [{**FINISHED, "typename": PICKLED}],
        [{**FINISHED, "metadata": {"x": PICKLED}}],
        [{**FINISHED, "worker": "goblin://~volunteer-1"}],
        [{**FINISHED, "nbytes": -(10**15)}],
        [{**FINISHED, "startstops": [{"action": "compute", "start": 0, "stop": 1e300}]}],
        [{**FINISHED, "key": PICKLED}],
        [{**FINISHED, "key": "x" * 10_000}],
        [{**FINISHED, "run_id": PICKLED}],
        [{**FINISHED, "run_id": -5}],
        [{**FINISHED, "seconds": PICKLED}],
        [{"op": "task-finished", "key": KEY, "type": PICKLED, "nbytes": 1, "run_id": 1}],
        [{"op": "add-keys", "keys": [KEY]}],
        [{"op": "log-event", "topic": "all", "msg": PICKLED}],
        [{"op": "worker-status-change", "worker": "goblin://~volunteer-1", "status": "paused"}],
        [{"type": "Erred", "key": KEY, "run_id": 1, "kind": "E", "text": PICKLED}],
        [{"type": "Erred", "key": KEY, "run_id": 1, "kind": "E", "text": "", "exception": PICKLED}],
        [{"type": "Erred", "key": KEY, "run_id": 1, "kind": "E", "text": "x" * 5000}],
        [{"type": "StatusIs", "status": "closed"}],
        [{"type": "StatusIs", "status": PICKLED}],
        [{"type": "Rescheduled", "key": PICKLED}],
        [FINISHED] * 20_000,
        [None],
        PICKLED,
    ],
    ids=lambda said: str(said)[:80],
)
async def test_what_no_worker_of_ours_streams(gateway, honest, canary, caplog, said):
    async with Stranger(gateway.port) as stranger:
        await stranger.register()
        data = pack(poisoned(said, canary.pickled))
        cut = [data[start : start + 100_000] for start in range(0, len(data), 100_000)]
        for part in cut[:-1]:
            await stranger.frames((1, PIECE, part))
        await stranger.frames((1, DATA, cut[-1]))
        await dismissed(gateway, caplog, stranger)
        await gateway.changes.until(lambda: len(gateway.scheduler.workers) == 1)


async def test_nobody_ends_a_task_of_somebody_else(gateway, honest):
    """What was not given to a worker, it cannot end: it is told to forget it, and the owner goes on."""
    future = gateway.lease(KEY)
    owner = next(iter(gateway.scheduler.workers.values()))
    await gateway.changes.until(lambda: owner.processing)
    (task,) = owner.processing
    async with Stranger(gateway.port) as stranger:
        await stranger.register()
        claims = [
            {"type": "Finished", "key": KEY, "run_id": task.run_id},
            {"type": "Erred", "key": KEY, "run_id": task.run_id, "kind": "E", "text": "t"},
            {"type": "Rescheduled", "key": KEY},
        ]
        for claim in claims:
            [answer] = await stranger.call(1, [claim])
            assert answer == {"type": "FreeKeys", "keys": [KEY]}
        assert task.state == "processing"
        assert task.processing_on is owner
    assert not future.done()
    [order] = await honest.answer(1)
    assert order["work"]["attempt"] == KEY
    await honest.frames((1, DATA, pack([{**FINISHED, "run_id": order["run_id"], "seconds": float("nan")}])))
    await gateway.changes.until(lambda: task.state == "memory")
    assert task.type == "NoneType"
    assert task.nbytes == 16
    await asyncio.wait_for(future._state.wait(), 5)


async def test_a_failure_is_told_in_words_only(gateway, honest, canary):
    future = gateway.lease(KEY)
    [order] = await honest.answer(1)
    text = canary.pickled.decode("latin-1")
    erred = {"type": "Erred", "key": KEY, "run_id": order["run_id"], "kind": "MemoryError", "text": text}
    await honest.frames((1, DATA, pack([erred])))
    error = await asyncio.wait_for(future.exception(), 5)
    assert "MemoryError" in str(error)
    assert error.__cause__ is None


async def test_the_scheduler_dials_no_volunteer_and_runs_nothing_it_is_sent(gateway, honest, canary):
    worker = next(iter(gateway.scheduler.workers))
    async with asyncio.timeout(5):
        with pytest.raises(GoblinError, match="dials no worker"):
            await gateway.scheduler.rpc(worker).identity()
        for name in ("broadcast", "gather", "run_function", "register_worker_plugin", "restart", "proxy", "scatter"):
            assert name not in gateway.scheduler.handlers


# --- mutations ------------------------------------------------------------------------------------------------------
PAYLOADS = [
    m.encode(m.Committed(KEY, (m.BlobRef("0" * 64, m.ArraySpec((3, 4), "float32"), 48, bytes(48)),), 1.5)),
    m.encode(m.AttemptFailed(KEY, "memory", "too big", 10, 5)),
    m.encode(m.Holding((KEY,))),
    m.encode(schema.Register(ALIAS)),
    m.encode(schema.Heartbeat(123456, 50.0)),
    m.encode([schema.Finished(KEY, 3, 1.0), schema.StatusIs("running")]),
    m.encode([schema.Erred(KEY, 3, "ValueError", "text", 1.0)]),
]


def conversation(rng: random.Random, pickled: bytes) -> bytes:
    """A first packet of which a message, or anything at all, was mutated."""
    payload, inside = rng.choice(PAYLOADS), rng.random() < 0.5
    if inside:
        payload = mutate(rng, payload, pickled)
    said = rng.choice(
        [
            [[CONTROL, DATA, payload]],
            [[1, OPEN, b""], [1, DATA, payload]],
            [[1, OPEN, b""], [1, PIECE, payload[:7]], [1, DATA, payload[7:] or b"x"]],
            [[1, OPEN, b""], [1, DATA, m.encode(schema.Register(rng.randbytes(16).hex()))], [1, DATA, payload]],
        ]
    )
    packet = pack([1, 0, said])
    return packet if inside else mutate(rng, packet, pickled)


BOMBS = [
    b"\xdd\xff\xff\xff\xff",  # arrays, maps and bytes that claim to be enormous
    b"\xdf\xff\xff\xff\xff",
    b"\xc6\xff\xff\xff\xff",
    b"\xdb\x7f\xff\xff\xff",
    b"\x91" * 5000,
    b"\x81\xa1x" * 3000,
    b"\xcf\xff\xff\xff\xff\xff\xff\xff\xff",
    b"\xcb\x7f\xf8\x00\x00\x00\x00\x00\x00",
]


def mutate(rng: random.Random, data: bytes, pickled: bytes) -> bytes:
    out = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(out) + 1)
        match rng.randrange(7):
            case 0 if at < len(out):
                out[at] ^= 1 << rng.randrange(8)
            case 1:
                del out[at : at + rng.randint(1, 16)]
            case 2:
                out[at:at] = rng.randbytes(rng.randint(1, 16))
            case 3:
                out[at:at] = rng.choice(BOMBS)
            case 4:
                out[at : at + rng.randint(0, 8)] = pickled
            case 5:
                out[at : at + 4] = struct.pack(">i", rng.choice([0, -1, 2**31 - 1, 65536]))
            case _:
                out[at:at] = data[rng.randrange(len(data)) :]
    return bytes(out)


async def bombard(gateway, honest, canary, count: int, seed: int) -> int:
    """Send mutated packets, each to a session of its own; how many of them were refused.

    The honest volunteer beats in between.
    """
    rng = random.Random(seed)
    refused = 0
    for number in range(count):
        if number % 200 == 0:
            assert await honest.beat() == "OK"
        async with Stranger(gateway.port) as stranger:
            await stranger.hello(rng.choice(["volunteer", "validator", "lab", "nanny"]))
            await stranger.ws.send_bytes(conversation(rng, canary.pickled)[: PACKET_LIMIT - 1])
            with contextlib.suppress(TimeoutError):
                while (await stranger.ws.receive(timeout=0.02)).type is aiohttp.WSMsgType.BINARY:
                    pass
                refused += 1
    return refused


@pytest.mark.full
@pytest.mark.timeout(1800)
async def test_mutated_frames(gateway, honest, canary, caplog, full, report):
    count = 100_000 if full else 1_000
    caplog.set_level(logging.CRITICAL)
    before = psutil.Process().memory_info().rss
    refused = await bombard(gateway, honest, canary, count, seed=20261130)
    grown = psutil.Process().memory_info().rss - before
    report(
        f"{refused} of {count} mutated frames were refused, the others are still of the protocol; "
        f"{grown / 1e6:.0f} MB more are resident"
    )
    assert refused > count / 2
    assert grown < 100e6
    assert not gateway.said(m.SubmitTask)
    await gateway.changes.until(lambda: len(gateway.scheduler.workers) == 1)

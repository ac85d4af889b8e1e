"""The gateway as a whole: real sockets on loopback, peers that speak the protocol."""

from __future__ import annotations

import asyncio
import io
import json
import secrets

import aiohttp
import msgspec
import numpy as np
import pytest

from goblin_dask import messages as m
from goblin_dask.digest import digest
from goblin_dask.errors import InputError, Refused
from goblin_dask.gateway.hosts import list_hosts, pardon
from goblin_dask.gateway.labs import LabLimits
from goblin_dask.gateway.server import Gateway
from goblin_dask.gateway.settings import GatewayConfig
from goblin_dask.gateway.status import Status
from goblin_dask.graphs.execute import execute
from goblin_dask.graphs.program import decode
from goblin_dask.store import grants
from goblin_dask.store.buffers import array_of, buffer_of, spec_of
from goblin_dask.verify.reputation import host_key
from goblin_dask.wire import schema
from tests.gridpeers import PROGRAM, Bench, FakeLab, FakeValidator, FakeVolunteer, blob, program, submission


@pytest.fixture
async def bench():
    async with Bench() as bench:
        yield bench


async def test_tasks_are_computed_checked_and_accepted(bench):
    lab = await bench.add(FakeLab)
    await bench.add(FakeVolunteer)
    await bench.add(FakeValidator)
    lab.submit(*(submission(i, job="j" * 32) for i in range(60)))
    answers = await lab.accepted(60)
    assert {answer.task for answer in answers} == {task.task for task in lab.submitted}
    assert all(answer.verdict.method == "algebraic" for answer in answers)
    assert answers[0].outputs[0].inline == FakeVolunteer.result
    offer = await lab.until(lambda: next((o for o in lab.got(m.GridOffer) if o.validators), None))
    assert (offer.volunteers, offer.validators, offer.local) == (1, 1, True)
    assert not bench.gateway.grid.unrunnable


async def test_a_lease_carries_program_grant_and_routes(bench):
    lab = await bench.add(FakeLab)
    volunteer = await bench.add(FakeVolunteer)
    volunteer.auto = False
    lab.submit(submission(1))
    lease = await volunteer.until(lambda: next(iter(volunteer.work.values()), None))
    assert lease.program == PROGRAM
    assert lease.inputs == submission(1).inputs
    grant = grants.verify(lab.key, lease.grant)
    assert (grant.task, grant.attempt, grant.kind) == (submission(1).task, lease.attempt, "lease")
    assert lease.routes == m.Routes("goblin-test-socket", "http://127.0.0.1:1", "/goblin/blobs")
    lab.session.send(m.CancelTask(submission(1).task))
    await volunteer.until(lambda: volunteer.got(m.Abandon))
    assert volunteer.got(m.Abandon)[0].attempt == lease.attempt


async def test_programs_may_come_after_their_tasks(bench):
    lab = await bench.add(FakeLab)
    volunteer = await bench.add(FakeVolunteer)
    other = program("multiply")
    task = submission(1, program=other)
    lab.submit(task)
    lab.submit(submission(2))
    volunteer.auto = False
    await volunteer.until(lambda: volunteer.work)
    assert [work.program for work in volunteer.work.values()] == [PROGRAM]
    lab.session.send(m.DefineProgram(digest(other), other))
    await volunteer.until(lambda: len(volunteer.work) == 2)
    assert {work.program for work in volunteer.work.values()} == {PROGRAM, other}


async def test_a_failing_dask_task_is_given_to_somebody_else(bench):
    lab = await bench.add(FakeLab)
    first = await bench.add(FakeVolunteer)
    first.auto = False
    lab.submit(submission(1))
    await first.until(lambda: first.work)
    second = await bench.add(FakeVolunteer)
    await bench.add(FakeValidator)
    [attempt] = first.work
    task = bench.gateway.grid.tasks[attempt]
    await first._channel.put(m.encode([schema.Erred(attempt, task.run_id, "GoblinError", "no plugin")]))
    [answer] = await lab.accepted(1)
    assert answer.verdict.attempts == 2
    await second.until(lambda: second.freed)


@pytest.mark.parametrize("role", ["lab", "validator"])
async def test_a_token_is_needed(bench, role):
    kind = {"lab": FakeLab, "validator": FakeValidator}[role]
    for token in ("", "goblin_0000000000000000_" + "0" * 48):
        with pytest.raises(Refused, match="token"):
            await bench.add(kind, token=token)
    with pytest.raises(Refused, match=f"for a volunteer, not for a {role}"):
        await bench.add(kind, token=await bench.token("volunteer"))


async def test_closed_grids_admit_no_strangers():
    async with Bench(open=False) as bench:
        with pytest.raises(Refused, match="goblin gateway token volunteer"):
            await bench.add(FakeVolunteer)
        await bench.add(FakeVolunteer, token=await bench.token("volunteer"))
        assert bench.gateway.health().refused == 1


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"host": "../../etc/passwd"}, "32 hexadecimal"),
        ({"versions": (("x", "y" * 1000),)}, "128 characters"),
        ({"versions": tuple((str(i), "1") for i in range(100))}, "64 versions"),
        ({"memory": -1}, "memory is a number from 0"),
        ({"slots": 2**62}, None),
    ],
)
async def test_what_a_machine_says_of_itself_is_bounded(bench, changes, text):
    if text is None:
        await bench.add(FakeVolunteer, **changes)
        [worker] = bench.gateway.grid.workers.values()
        assert worker.nthreads == 64
    else:
        with pytest.raises(Refused, match=text):
            await bench.add(FakeVolunteer, **changes)


async def test_a_task_is_what_its_name_says_or_the_laboratory_is_dropped(bench):
    good = await bench.add(FakeLab)
    for message in (
        m.SubmitTask("0" * 64, digest(PROGRAM), (), submission(1).outputs, 1.0, 1),
        msgspec.structs.replace(submission(1), inputs=submission(2).inputs),
        msgspec.structs.replace(submission(1), job="j" * 1000),
        m.DefineProgram("0" * 64, PROGRAM),
        m.DefineProgram(digest(b"nonsense"), b"nonsense"),
        m.LabReady(good.id, b"k" * 32),
    ):
        lab = await bench.add(FakeLab, owner="Eve")
        lab.session.send(message)
        await lab.until(lambda lab=lab: lab.reason)
    await bench.add(FakeVolunteer)
    await bench.add(FakeValidator)
    good.submit(submission(3))
    await good.accepted(1)


async def test_another_owner_cannot_take_over_a_laboratory(bench):
    lab = await bench.add(FakeLab, owner="Ada")
    thief = await bench.add(FakeLab, owner="Eve", id=lab.id)
    await thief.until(lambda: thief.reason)
    assert "another owner" in thief.reason
    again = await bench.add(FakeLab, owner="Ada", id=lab.id)
    await lab.until(lambda: lab.reason)
    assert "another session" in lab.reason
    assert again.reason is None


async def test_a_laboratorys_share_is_bounded():
    async with Bench(lab_limits=LabLimits(open_tasks=5, inline_bytes=100)) as bench:
        lab = await bench.add(FakeLab)
        lab.submit(*(submission(i, large=1 << 20) for i in range(8)))
        failed = await lab.until(lambda: lab.got(m.TaskFailed) if len(lab.got(m.TaskFailed)) == 3 else None)
        assert "submit fewer" in failed[0].reason
        other = await bench.add(FakeLab)
        other.submit(*(submission(i) for i in range(8)))  # 16 bytes inline each
        failed = await other.until(lambda: other.got(m.TaskFailed) if len(other.got(m.TaskFailed)) == 3 else None)
        assert "inline" in failed[-1].reason or "on the grid" in failed[-1].reason


async def test_a_flood_of_messages_delays_its_sender_only():
    async with Bench(worker_pace=(50.0, 100.0)) as bench:
        lab = await bench.add(FakeLab)
        flood = await bench.add(FakeVolunteer)
        flood.auto = False
        await bench.add(FakeVolunteer)
        await bench.add(FakeValidator)
        for _ in range(3000):
            flood.session.send(m.Uploaded("nothing#1"))
        lab.submit(*(submission(i) for i in range(20)))
        await lab.accepted(15)  # all but what the flooding one sits on
        assert flood.reason is None


async def test_blobs_through_the_relay_with_grants_from_the_gateway(bench):
    lab = await bench.add(FakeLab)
    volunteer = await bench.add(FakeVolunteer)
    volunteer.auto = False
    data = secrets.token_bytes(1 << 20)
    spec = m.ArraySpec((1 << 18,), "float32")
    ref = m.BlobRef(digest(data), spec, len(data))
    lab.blobs[ref.digest] = data
    lab.submit(submission(0, inputs=(ref,)))
    lease = await volunteer.until(lambda: next(iter(volunteer.work.values()), None))
    url = f"{bench.gateway.url}{lease.routes.relay}/{ref.digest}"
    async with aiohttp.ClientSession() as http:

        async def answer():
            request = await lab.until(lambda: lab.got(m.RelayRequest))
            lab.messages.remove(request[0])
            return await lab.move(request[0])

        good = {"Authorization": f"Bearer {lease.grant}"}
        moving = asyncio.create_task(answer())
        async with http.get(url, headers=good) as response:
            assert await response.read() == data
        assert await moving == 204
        assert bench.gateway.relay.counts.to_volunteers == 1 << 20

        result = secrets.token_bytes(1 << 20)
        moving = asyncio.create_task(answer())
        place = f"{bench.gateway.url}{lease.routes.relay}/{digest(result)}"
        async with http.put(place, data=io.BytesIO(result), headers=good) as response:
            assert response.status == 204
        assert await moving == 204
        assert lab.blobs[digest(result)] == result

        forged = grants.sign(b"x" * 32, grants.verify(lab.key, lease.grant))
        expired = grants.sign(lab.key, msgspec.structs.replace(grants.verify(lab.key, lease.grant), expires=1.0))
        check = grants.sign(lab.key, msgspec.structs.replace(grants.verify(lab.key, lease.grant), kind="check"))
        other = grants.sign(lab.key, msgspec.structs.replace(grants.verify(lab.key, lease.grant), task="0" * 64))
        for method, where, text, status in (
            ("GET", url, forged, 403),
            ("GET", url, expired, 403),
            ("GET", url, other, 403),
            ("GET", f"{bench.gateway.url}{lease.routes.relay}/{'0' * 64}", lease.grant, 404),
            ("PUT", place, check, 403),
        ):
            body = io.BytesIO(result) if method == "PUT" else None
            async with http.request(method, where, data=body, headers={"Authorization": f"Bearer {text}"}) as response:
                assert response.status == status, (method, where, await response.text())
        for _ in range(20):
            async with http.put(place, data=io.BytesIO(b"x"), headers=good) as response:
                assert response.status in (413, 403)
    assert not lab.got(m.RelayRequest)


async def test_nothing_of_the_data_is_at_rest(tmp_path, caplog):
    caplog.set_level("DEBUG")
    planted = b"PLANTED-VALUE-16"
    result = b"PLANTED-RESULT16"
    async with Bench(database=f"sqlite:///{tmp_path}/gateway.db") as bench:
        lab = await bench.add(FakeLab)
        volunteer = await bench.add(FakeVolunteer)
        volunteer.result = result
        await bench.add(FakeValidator)
        lab.submit(submission(0, inputs=(blob(planted),), job="f" * 32))
        [answer] = await lab.accepted(1)
        bad = m.Committed("x#1", (m.BlobRef(digest(result), submission(0).outputs[0], 3, result),), 0.0)
        volunteer.session.send(bad)
        await volunteer.until(lambda: volunteer.reason)
        task = answer.task
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert files
    written = b"".join(path.read_bytes() for path in files) + caplog.text.encode()
    for secret in (planted, result, digest(planted).encode(), task.encode(), PROGRAM):
        assert secret not in written


async def test_status_json_is_of_its_schema_and_names_nobody(bench):
    lab = await bench.add(FakeLab, owner="Marie Curie")
    await bench.add(FakeVolunteer, token=await bench.token("volunteer", "Lise Meitner"))
    await bench.add(FakeValidator)
    lab.submit(*(submission(i, job="ab" * 16) for i in range(10)))
    await lab.accepted(10)
    bench.gateway._seen = None
    bench.gateway.board.sample(bench.gateway.dispatcher.snapshot(), bench.gateway.loop.time())
    async with aiohttp.ClientSession() as http, http.get(f"{bench.gateway.url}/goblin/status.json") as response:
        assert response.status == 200
        text = await response.text()
    status = msgspec.json.decode(text, type=Status)  # unknown or missing fields fail
    assert (status.labs, status.volunteers, status.validators) == (1, 1, 1)
    assert status.tasks["accepted"] == 10
    assert status.jobs[0].accepted == 10
    assert [method.method for method in status.methods] == ["algebraic"]
    assert status.methods[0].accepted == 10
    assert status.totals.flops == pytest.approx(10 * 2e9)
    assert len(status.history.time) == len(status.history.gflops) == 1
    for name in ("Curie", "Meitner", "127.0.0", "anonymous", "ab" * 16, submission(1).task):
        assert name not in text


async def test_metrics(bench):
    lab = await bench.add(FakeLab)
    await bench.add(FakeVolunteer)
    await bench.add(FakeValidator)
    lab.submit(*(submission(i) for i in range(5)))
    await lab.accepted(5)
    bench.gateway._seen = None
    async with aiohttp.ClientSession() as http, http.get(f"{bench.gateway.url}/metrics") as response:
        text = await response.text()
        assert response.content_type == "text/plain"
    for line in (
        'goblin_tasks_ended_total{how="accepted"} 5.0',
        'goblin_results_accepted_total{method="algebraic"} 5.0',
        "goblin_flop_total 1e+10",
        "goblin_sessions 3.0",
        "goblin_labs 1.0",
    ):
        assert line in text, text


async def test_kill_and_restart(tmp_path):
    """The process is gone without a word: sessions are opened anew, attempts in hand are kept, liars stay out."""
    url = f"sqlite:///{tmp_path}/gateway.db"
    async with Bench(database=url) as bench:
        port = bench.gateway.port
        lab = await bench.add(FakeLab)
        volunteer = await bench.add(FakeVolunteer)
        volunteer.auto = False
        await bench.add(FakeValidator)
        liar = await bench.add(FakeVolunteer)
        liar.auto = False
        lab.submit(submission(1))
        holder = await _who_has(volunteer, liar)
        [lease] = holder.work.values()
        hosts = bench.gateway.dispatcher.reputation.hosts
        other = liar if holder is volunteer else volunteer
        peer = next(p for p in bench.gateway._peers.values() if p.machine.host == other.machine.host)
        key = host_key(peer.owner, peer.machine)
        hosts[key].quarantined = "3 results that were proven wrong"
        bench.gateway._touched.add(key)
        bench.gateway._remember()
        await bench.gateway.database.flush()
        await _kill(bench.gateway)

        holder.commit(lease)  # done while nobody listens
        bench.gateway = Gateway(GatewayConfig(port=port, open=True, database=url, probe=False))
        await bench.gateway.start()
        [answer] = await lab.accepted(1)
        assert answer.verdict.attempts == 1  # the attempt that was under way counts, nothing was computed twice
        await other.until(lambda: other.reason)
        assert "quarantine" in other.reason


async def test_quarantine_and_pardon(tmp_path):
    """A host that goes into quarantine is told why and sent away; it stays out until the operator pardons it."""
    async with Bench(database=f"sqlite:///{tmp_path}/gateway.db") as bench:
        lab, validator = await bench.add(FakeLab), await bench.add(FakeValidator)
        validator.verdict, validator.method = "wrong", "structural"
        liar = await bench.add(FakeVolunteer)
        lab.submit(submission(1))
        await liar.until(lambda: liar.reason)
        assert "is in quarantine: a result that no honest machine returns" in liar.reason
        host = liar.machine.host
        database = bench.gateway.database
        await database.flush()
        [info] = await list_hosts(database)
        assert (info.wrong, info.pardoned) == (1, False)
        with pytest.raises(Refused, match=f"this host \\({info.key[:16]}\\) is in quarantine"):
            await bench.add(FakeVolunteer, host=host)
        with pytest.raises(InputError, match="no host has a key that begins with 'x'"):
            await pardon(database, "x")
        assert (await pardon(database, info.key[:8])).key == info.key
        await bench.add(FakeVolunteer, host=host)
        bench.gateway._remember()
        await database.flush()
        [info] = await list_hosts(database)
        assert (info.quarantined, info.wrong, info.pardoned) == ("", 0, False)
        with pytest.raises(InputError, match="is not in quarantine"):
            await pardon(database, info.key)


async def _who_has(*workers):
    async with asyncio.timeout(10):
        while True:
            for worker in workers:
                if worker.work:
                    return worker
            await asyncio.wait(
                [asyncio.ensure_future(w._changed.wait()) for w in workers], return_when="FIRST_COMPLETED"
            )


async def _kill(gateway):
    """As `kill -9`: sockets are cut, nothing is said and nothing written."""
    gateway._stopping = True
    gateway._timer.cancel()
    gateway._sampler.cancel()
    gateway.server._closing = True
    for site in list(gateway._runner.sites):
        await site.stop()
    for connection in list(gateway._runner.server.connections):
        connection.transport.abort()
    gateway.grid.status = type(gateway.grid.status).closed
    gateway.database._facts.clear()
    await gateway.database.stop()
    await gateway._runner.cleanup()


async def test_an_address_that_is_taken(bench):
    second = Gateway(GatewayConfig(port=bench.gateway.port, probe=False))
    with pytest.raises(InputError, match="choose another port"):
        await second.start()


async def test_hostile_http(bench):
    async with aiohttp.ClientSession() as http:
        for path, status in (
            ("/goblin/static/../server.py", 404),
            ("/goblin/static/%2e%2e%2fserver.py", 404),
            ("/goblin/blobs/..%2f..%2f", 400),
            ("/goblin/nothing", 404),
            ("/" + "x" * 20_000, 400),
        ):
            async with http.get(f"{bench.gateway.url}{path}") as response:
                assert response.status == status, path
        async with http.get(bench.gateway.url, headers={"X": "y" * 100_000}) as response:
            assert response.status == 400
        async with http.get(bench.gateway.url) as response:
            assert response.status == 200
            assert str(response.url).endswith("/goblin")
            assert "default-src 'none'" in response.headers["Content-Security-Policy"]
        async with http.get(f"{bench.gateway.url}/goblin/charts.json") as response:
            assert len(json.loads(await response.text())) == 4


class Measured(FakeVolunteer):
    """Answers its probe as `how` says."""

    how = staticmethod(lambda arrays: arrays)

    async def perform(self, work):
        if not work.attempt.startswith("probe#"):
            return await super().perform(work)
        given = [array_of(ref.inline, ref.spec) for ref in work.inputs]
        arrays = self.how(list(execute(decode(work.program), given)))
        buffers = [bytes(buffer_of(array)) for array in arrays]
        refs = tuple(
            m.BlobRef(digest(data), spec_of(array), len(data), data)
            for data, array in zip(buffers, arrays, strict=True)
        )
        self.session.send(m.Committed(work.attempt, refs, 0.1, uploaded=True))


async def test_a_volunteer_is_probed_before_it_gets_work():
    async with Bench(probe=True) as bench:
        lab = await bench.add(FakeLab)
        await bench.add(FakeValidator)
        lab.submit(submission(1))
        volunteer = await bench.add(Measured)
        await lab.accepted(1)
        assert [name.startswith("probe#") for name in volunteer.freed[:1]] == [True]
        assert len(bench.gateway._probing.contracts) == 1


async def test_a_machine_that_computes_wrongly_is_told_so_and_gets_nothing():
    async with Bench(probe=True) as bench:
        lab = await bench.add(FakeLab)
        lab.submit(submission(1))
        volunteer = Measured(bench.gateway)
        volunteer.how = lambda arrays: [arrays[0] * np.float32(1.001), *arrays[1:]]
        bench.peers.append(volunteer)
        await volunteer.connect()
        await volunteer.until(lambda: volunteer.session.closed)
        assert "float32 products in low precision" in volunteer.reason
        assert not volunteer.work
        assert not bench.gateway._probing.contracts

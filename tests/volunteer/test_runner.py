"""The runner: leases and checks over real routes, and every way in which they end otherwise."""

import asyncio
import datetime
import os
import threading

import aiohttp
import numpy as np
import pytest

from goblin_dask.digest import digest
from goblin_dask.graphs.builder import Builder
from goblin_dask.graphs.execute import execute
from goblin_dask.graphs.program import encode
from goblin_dask.messages import (
    ArraySpec,
    AttemptFailed,
    BlobRef,
    Checked,
    CheckReport,
    Committed,
    Lease,
    Routes,
    Uploaded,
)
from goblin_dask.store.buffers import array_of
from goblin_dask.volunteer import outputs as outputs_module
from goblin_dask.volunteer import runner as runner_module
from goblin_dask.volunteer import transfer
from goblin_dask.volunteer.limits import Limits
from goblin_dask.volunteer.runner import Runner
from goblin_dask.volunteer.transfer import Transfers
from tests.datalab import DataLab, product_program

RNG = np.random.default_rng(0)
A, B = RNG.random((200, 300)).astype("f4"), RNG.random((300, 250)).astype("f4")
LIMITS = Limits(memory=1 << 30, cache=1 << 26, threads=1)


@pytest.fixture
async def lab(tmp_path):
    lab = await DataLab(tmp_path / "lab").start()
    yield lab
    await lab.close()


def recompute(program, inputs, outputs, *, method, replica, values, digests):
    """A check of the plainest kind."""
    good = all((a == b).all() for a, b in zip(execute(program, inputs), outputs, strict=True))
    return CheckReport("accepted" if good else "wrong", method)


class Worker:
    """A runner and what it said."""

    def __init__(self, limits=LIMITS, checker=None):
        self.said = []
        self.runner = Runner(limits, Transfers(), self.said.append, checker=checker)


@pytest.fixture
async def worker():
    worker = Worker()
    yield worker
    await worker.runner.close()


@pytest.fixture
async def validator():
    worker = Worker(checker=recompute)
    yield worker
    await worker.runner.close()


PRODUCT = product_program(A.shape, B.shape)


@pytest.mark.parametrize("route", ["local", "direct"])
async def test_a_lease_is_computed_committed_and_uploaded(lab, worker, validator, route):
    task, lease = lab.lease(PRODUCT, [A, B], route)
    await worker.runner.run(lease)
    committed, uploaded = worker.said
    (ref,) = committed.outputs
    expected = A @ B
    assert isinstance(committed, Committed)
    assert ref == BlobRef(digest(expected), ArraySpec((200, 250), "float32"), expected.nbytes)
    assert not committed.uploaded
    assert committed.fetched == A.nbytes + B.nbytes
    assert set(committed.held) == {i.digest for i in lease.inputs}
    assert isinstance(uploaded, Uploaded)
    assert uploaded.sent == expected.nbytes
    assert lab.blobs.quarantined(ref.digest)
    assert worker.runner.holding == ()

    await validator.runner.run(lab.check(task, lease, committed.outputs, route))
    (checked,) = validator.said
    assert checked == Checked(f"{task}#2", CheckReport("accepted", "auto"))
    lab.data.accept(task, committed.outputs)
    assert (array_of(lab.blobs.get(ref.digest), ref.spec) == expected).all()

    worker.said.clear()  # held inputs are not fetched again
    _, again = lab.lease(PRODUCT, [A, B], route)
    await worker.runner.run(again)
    assert worker.said[0].fetched == 0


async def test_small_arrays_travel_in_messages(worker):
    program = product_program((2, 3), (3, 2), dtype="float64")
    arrays = [np.arange(6.0).reshape(2, 3), np.arange(6.0).reshape(3, 2)]
    refs = tuple(BlobRef(digest(a), ArraySpec(a.shape, "float64"), a.nbytes, a.tobytes()) for a in arrays)
    await worker.runner.run(Lease("t#1", encode(program), refs, "", Routes(), 0, 9.0))
    (committed,) = worker.said
    assert committed.uploaded
    (ref,) = committed.outputs
    assert (array_of(ref.inline, ref.spec) == arrays[0] @ arrays[1]).all()
    assert ref.digest == digest(ref.inline)


async def test_a_message_does_not_outgrow_what_a_gateway_reads(worker, lab, monkeypatch):
    monkeypatch.setattr(outputs_module, "TOGETHER", 100)
    build = Builder()
    x = build.input(ArraySpec((8,), "float64"))
    outputs = [build.add(name, [x])[0] for name in ("exp", "sin", "cos")]
    program, _ = build.finish(outputs)
    data = np.arange(8.0)
    ref = BlobRef(digest(data), ArraySpec((8,), "float64"), 64, data.tobytes())
    task = lab.expect([], [ref.spec] * 3)
    await worker.runner.run(Lease(f"{task}#1", encode(program), (ref,), lab.grant(task), lab.routes(), 0, 9.0))
    committed, uploaded = worker.said
    assert [r.inline is None for r in committed.outputs] == [False, True, True]
    assert uploaded.sent == 128


async def test_a_wrong_result_is_reported(lab, worker, validator):
    task, lease = lab.lease(PRODUCT, [A, B])
    await worker.runner.run(lease)
    lie = (A @ B) + 1
    other, _ = lab.lease(PRODUCT, [A, B])
    assert other != task
    inline = BlobRef("0" * 64, ArraySpec((1,), "uint8"), 1, b"x")
    await validator.runner.run(lab.check(task, lease, (inline,)))
    assert validator.said[-1].report.verdict == "wrong"
    for ref in (changed(inline, nbytes=1 << 50), changed(inline, spec=ArraySpec((1,), "object"))):
        await validator.runner.run(lab.check(task, lease, (ref,)))
        assert (validator.said[-1].report.verdict, validator.said[-1].report.method) == ("wrong", "structural")
    liar = np.ascontiguousarray(lie)
    fd = transfer.d.memory_file([liar])
    ref = BlobRef(digest(liar), worker.said[0].outputs[0].spec, liar.nbytes)
    client = transfer.LocalClient(lab.data.local)
    await asyncio.to_thread(client.send, ref, lab.grant(other), fd)
    os.close(fd)
    client.close()
    check = lab.check(other, lease, (ref,))
    await validator.runner.run(check)
    assert validator.said[-1].report.verdict == "wrong"


async def test_a_check_that_cannot_be_done_says_nothing_of_the_result(lab, validator):
    task, lease = lab.lease(PRODUCT, [A, B])
    missing = BlobRef("0" * 64, ArraySpec((200, 250), "float32"), 200_000)
    await validator.runner.run(lab.check(task, lease, (missing,)))
    report = validator.said[0].report
    assert report.verdict == "failed"
    assert "could not be fetched" in report.reason


async def test_a_volunteer_checks_nobody(lab, worker):
    task, lease = lab.lease(PRODUCT, [A, B])
    await worker.runner.run(lab.check(task, lease, ()))
    assert worker.said[0].kind == "unsupported"


def changed(lease, **fields):
    return type(lease)(**{name: getattr(lease, name) for name in lease.__struct_fields__} | fields)


async def test_what_goes_wrong_is_said_with_its_kind(lab, worker):
    _, lease = lab.lease(PRODUCT, [A, B])
    await worker.runner.run(changed(lease, program=b"\x80\x04N."))
    await worker.runner.run(changed(lease, inputs=lease.inputs[:1]))
    await worker.runner.run(changed(lease, grant="nonsense"))
    await worker.runner.run(changed(lease, routes=Routes()))
    kinds = [(message.kind, message.reason) for message in worker.said]
    assert [kind for kind, _ in kinds] == ["unsupported", "compute", "fetch", "fetch"]
    assert "not those that the program declares" in kinds[1][1]
    assert "grant" in kinds[2][1]
    assert "names no way" in kinds[3][1]


async def test_references_that_lie_about_their_length_are_refused(lab, worker):
    _, lease = lab.lease(PRODUCT, [A, B])
    first = lease.inputs[0]
    lying = BlobRef(first.digest, first.spec, 1 << 50)
    await worker.runner.run(changed(lease, inputs=(lying, lease.inputs[1])))
    assert "for an array that has 240000" in worker.said[0].reason


async def test_an_upload_that_is_refused_is_said(lab, worker):
    task, lease = lab.lease(PRODUCT, [A, B])
    await worker.runner.run(lease)
    again, second = lab.lease(PRODUCT, [A, B])
    worker.said.clear()
    lab.data.forget(again)
    await worker.runner.run(second)  # its inputs are held, so only the upload meets the lab
    committed, failed = worker.said
    assert isinstance(committed, Committed)
    assert failed.kind == "upload"
    assert "nobody waits" in failed.reason
    assert task != again


async def test_too_large_is_refused_with_numbers(lab, monkeypatch):
    monkeypatch.setattr(runner_module, "SMALL", 0)
    worker = Worker(Limits(memory=300_000, cache=0, threads=1))
    _, lease = lab.lease(PRODUCT, [A, B])
    await worker.runner.run(lease)
    (failed,) = worker.said
    assert (failed.kind, failed.offers) == ("memory", 300_000)
    assert failed.needs >= A.nbytes + B.nbytes
    await worker.runner.close()


async def test_memory_held_by_somebody_else_counts(lab, worker, monkeypatch):
    monkeypatch.setattr(runner_module, "SMALL", 0)
    monkeypatch.setattr(runner_module, "free_memory", lambda: 1234)
    _, lease = lab.lease(PRODUCT, [A, B])
    await worker.runner.run(lease)
    assert (worker.said[0].kind, worker.said[0].offers) == ("memory", 1234)


async def test_memory_that_runs_out_is_said(lab, worker, monkeypatch):
    def out(*args, **kwargs):
        raise MemoryError

    monkeypatch.setattr(runner_module, "execute", out)
    _, lease = lab.lease(PRODUCT, [A, B])
    await worker.runner.run(lease)
    assert worker.said[0].kind == "memory"


async def test_the_owners_hours_are_kept(lab):
    now = datetime.datetime.now()
    hours = ((now + datetime.timedelta(hours=2)).time(), (now + datetime.timedelta(hours=3)).time())
    worker = Worker(Limits(1 << 30, 0, 1, hours=hours))
    _, lease = lab.lease(PRODUCT, [A, B])
    await worker.runner.run(lease)
    assert worker.said[0].kind == "cancelled"
    assert "lends this machine from" in worker.said[0].reason
    await worker.runner.close()


@pytest.fixture
def gate(monkeypatch):
    """Computing waits until `gate.go` is set; `gate.begun` says that it has begun."""

    class Gate:
        begun, go = threading.Event(), threading.Event()

    gate = Gate()

    def slow(program, inputs, **more):
        gate.begun.set()
        assert gate.go.wait(30)
        return execute(program, inputs, **more)

    monkeypatch.setattr(runner_module, "execute", slow)
    yield gate
    gate.go.set()


async def test_an_abandoned_attempt_ends_at_once_and_says_nothing(lab, worker, gate):
    _, lease = lab.lease(PRODUCT, [A, B])
    running = asyncio.create_task(worker.runner.run(lease))
    await asyncio.to_thread(gate.begun.wait, 30)
    assert worker.runner.holding == (lease.attempt,)
    _, lease_to_come = lab.lease(PRODUCT, [A, B])
    worker.runner.abandon(lease_to_come.attempt)  # overtook its lease, which comes on another channel
    await worker.runner.run(lease_to_come)
    worker.runner.abandon(lease.attempt)
    await asyncio.wait_for(running, 10)  # while the thread still computes
    assert worker.runner.holding == ()
    gate.go.set()
    _, other = lab.lease(PRODUCT, [A, B])
    await worker.runner.run(other)
    assert [message.attempt for message in worker.said] == [other.attempt] * 2


async def test_cancelling_the_dask_task_abandons_it(lab, worker, gate):
    _, lease = lab.lease(PRODUCT, [A, B])
    running = asyncio.create_task(worker.runner.run(lease))
    await asyncio.to_thread(gate.begun.wait, 30)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert worker.runner.holding == ()
    assert worker.said == []


async def test_the_next_lease_is_fetched_while_this_one_computes(lab, worker, gate):
    _, lease = lab.lease(PRODUCT, [A, B])
    _, ahead = lab.lease(PRODUCT, [A + 1, B + 1])
    fetched = asyncio.Event()
    loop = asyncio.get_running_loop()
    get = worker.runner.cache.get

    def noting(name, fetch):
        result = get(name, fetch)
        if name in {ref.digest for ref in ahead.inputs}:
            loop.call_soon_threadsafe(fetched.set)
        return result

    worker.runner.cache.get = noting
    running = [asyncio.create_task(worker.runner.run(work)) for work in (lease, ahead)]
    await asyncio.to_thread(gate.begun.wait, 30)
    await asyncio.wait_for(fetched.wait(), 10)
    assert worker.said == []
    gate.go.set()
    await asyncio.gather(*running)
    assert len(worker.said) == 4


async def test_what_was_committed_is_repeated_until_it_is_uploaded(lab, worker, monkeypatch):
    sending, go = threading.Event(), threading.Event()
    send = Transfers.send

    def held_up(self, *args):
        sending.set()
        assert go.wait(30)
        return send(self, *args)

    monkeypatch.setattr(Transfers, "send", held_up)
    _, lease = lab.lease(PRODUCT, [A, B])
    running = asyncio.create_task(worker.runner.run(lease))
    await asyncio.to_thread(sending.wait, 30)
    assert worker.runner.repeat() == worker.said
    go.set()
    await running
    assert worker.runner.repeat() == []


async def test_another_route_is_taken_when_one_fails(lab, worker, monkeypatch):
    monkeypatch.setattr(transfer, "PAUSE", 0.0)
    _, lease = lab.lease(PRODUCT, [A, B])
    routes = Routes(local="goblin-nobody", direct=lab.data.direct)
    await worker.runner.run(changed(lease, routes=routes))
    assert [type(message) for message in worker.said] == [Committed, Uploaded]


async def test_no_route_at_all_is_said(lab, worker, monkeypatch):
    monkeypatch.setattr(transfer, "PAUSE", 0.0)
    _, lease = lab.lease(PRODUCT, [A, B])
    await worker.runner.run(changed(lease, routes=Routes(local="goblin-nobody", direct="http://127.0.0.1:9")))
    (failed,) = worker.said
    assert isinstance(failed, AttemptFailed)
    assert failed.kind == "fetch"
    assert "cannot be reached" in failed.reason


async def test_zero_length_arrays(lab, worker):
    program = product_program((4, 0), (0, 3))
    empty = [np.zeros((4, 0), "f4"), np.zeros((0, 3), "f4")]
    _, lease = lab.lease(program, empty)
    await worker.runner.run(lease)
    assert worker.said[0].outputs[0].inline == bytes(48)


async def test_a_gateway_cannot_read_other_servers_through_a_volunteer(worker, lab, monkeypatch):
    monkeypatch.setattr(transfer, "ROUNDS", 1)

    async def secret(request):
        raise aiohttp.web.HTTPForbidden(text="the router's password is 1234")

    app = aiohttp.web.Application()
    app.router.add_get("/{any:.*}", secret)
    server = aiohttp.web.AppRunner(app)
    await server.setup()
    await aiohttp.web.TCPSite(server, "127.0.0.1", 0).start()
    _, lease = lab.lease(PRODUCT, [A, B])
    for routes in (
        Routes(direct=f"http://127.0.0.1:{server.addresses[0][1]}"),
        Routes(direct="file:///etc/passwd"),
        Routes(local="/tmp/.X11-unix/X0"),
    ):
        await worker.runner.run(changed(lease, routes=routes))
    assert [message.kind for message in worker.said] == ["fetch"] * 3
    assert not any("1234" in message.reason for message in worker.said)
    assert "no address of blobs" in worker.said[1].reason
    assert "names no way" in worker.said[2].reason
    await server.cleanup()

"""The plugin in stock ``dask worker`` processes: work over the wire, blobs over the data path, no open port."""

import asyncio
import os
import signal
import sys

import numpy as np
import psutil
import pytest
from distributed import wait

from goblin_dask import messages as m
from goblin_dask.digest import digest
from goblin_dask.store.buffers import array_of
from goblin_dask.store.descriptors import memory_file
from goblin_dask.volunteer.plugin import Member, http_base
from goblin_dask.volunteer.transfer import LocalClient
from goblin_dask.wire.work import run_work
from tests.datalab import DataLab, product_program
from tests.wire.conftest import Gateway

pytestmark = pytest.mark.system

RNG = np.random.default_rng(0)
A, B = RNG.random((400, 600)).astype("f4"), RNG.random((600, 500)).astype("f4")


@pytest.fixture
async def gateway():
    gateway = await Gateway().start()
    yield gateway
    await gateway.stop()


@pytest.fixture
async def lab(tmp_path):
    lab = await DataLab(tmp_path / "lab").start()
    yield lab
    await lab.close()


@pytest.fixture
async def worker(tmp_path):
    """Starts a worker; stops its whole process group at the end."""
    started = []

    async def start(port, *options, **config):
        env = {f"DASK_GOBLIN__VOLUNTEER__{name.upper()}": str(value) for name, value in config.items()}
        env["DASK_GOBLIN__VOLUNTEER__DIRECTORY"] = str(tmp_path / "state")
        command = [sys.executable, "-m", "dask", "worker", f"goblin://127.0.0.1:{port}"]
        with (tmp_path / f"worker-{len(started)}.log").open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                *command,
                *options,
                "--preload",
                "goblin_dask.volunteer",
                env={**os.environ, **env},
                cwd=tmp_path,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


def submit(gateway, work, worker):
    return gateway.client.submit(run_work, work, key=work.attempt, pure=False, workers=[worker])


def ports(process):
    family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    return [c.laddr for p in family for c in p.net_connections("inet") if c.status == psutil.CONN_LISTEN]


SPY = """
import psutil
def dask_setup(worker):
    listening = [c.laddr for c in psutil.Process().net_connections("inet") if c.status == psutil.CONN_LISTEN]
    open("spied", "w").write(repr(listening))
"""
"""What Dask has opened before it calls the plugin."""


@pytest.mark.parametrize("options", [(), ("--no-nanny",)], ids=["nanny", "no-nanny"])
async def test_a_stock_worker_computes_and_opens_no_port(gateway, lab, worker, options, tmp_path):
    (tmp_path / "spy.py").write_text(SPY)
    process = await worker(gateway.port, "--nthreads", "1", "--preload", "spy.py", *options)
    address = await gateway.worker()
    assert (tmp_path / "spied").read_text() == "[]"
    machine = gateway.session_of().hello.machine
    assert (machine.threads, machine.slots) == (1, 2)
    assert machine.memory > 1 << 28
    assert ports(process) == []
    program = product_program(A.shape, B.shape)
    _, lease = lab.lease(program, [A, B])
    future = submit(gateway, lease, address)
    await wait(future, 30)
    assert future.status == "finished"
    await gateway.changes.until(lambda: gateway.said(m.Uploaded))
    (ref,) = gateway.said(m.Committed)[0].outputs
    fd = lab.blobs.open_quarantined(ref.digest)
    with os.fdopen(fd, "rb") as file:
        np.testing.assert_allclose(array_of(file.read(), ref.spec), A @ B, rtol=1e-4)
    process.send_signal(signal.SIGTERM)
    assert await asyncio.wait_for(process.wait(), 30) == 0


async def test_a_stock_validator_checks_with_the_real_checks(gateway, lab, worker):
    await worker(gateway.port, "--nthreads", "1", "--no-nanny", role="validator")
    address = await gateway.worker()
    assert gateway.session_of("validator").hello.role == "validator"
    program = product_program(A.shape, B.shape)
    honest = A @ B
    lie = honest.copy()
    lie[7, 8] *= 2
    for product, verdict in ((honest, "accepted"), (lie, "wrong")):
        task, lease = lab.lease(program, [A, B])
        ref = m.BlobRef(digest(product), m.ArraySpec(product.shape, "float32"), product.nbytes)
        client = LocalClient(lab.data.local)
        fd = memory_file([product])
        await asyncio.to_thread(client.send, ref, lab.grant(task), fd)
        os.close(fd)
        client.close()
        await wait(submit(gateway, lab.check(task, lease, (ref,)), address), 30)
        checked = await gateway.changes.until(lambda: gateway.said(m.Checked)[-1:])
        gateway.messages.clear()
        assert checked[0].report.verdict == verdict, checked
        assert checked[0].report.reason or verdict == "accepted"


async def test_what_dask_takes_back_is_abandoned(gateway, lab, worker):
    await worker(gateway.port, "--nthreads", "1", "--no-nanny")
    address = await gateway.worker()
    program = product_program((4000, 4000), *[(4000, 4000)] * 12)
    big = np.ones((4000, 4000), "f4")
    _, lease = lab.lease(program, [big] * 13)
    future = submit(gateway, lease, address)
    await gateway.changes.until(lambda: gateway.scheduler.workers[address].processing)
    await future.cancel()
    _, small = lab.lease(product_program(A.shape, B.shape), [A, B])
    done = submit(gateway, small, address)
    await wait(done, 60)
    assert [message.attempt for message in gateway.said(m.Committed)] == [small.attempt]


async def test_a_volunteer_that_cannot_work_does_not_join(gateway, worker, tmp_path):
    process = await worker(gateway.port, "--no-nanny", hours="always")
    assert await asyncio.wait_for(process.wait(), 30) != 0
    assert "goblin.volunteer.hours is 'always'" in (tmp_path / "worker-0.log").read_text()
    assert not gateway.scheduler.workers


def test_what_ended_without_a_gateway_is_still_in_hand():
    """Its messages wait, and would be nobody's if the new session had not been told of the attempt."""

    class Session:
        closed = False
        undelivered = (
            m.encode(m.Holding(("old",))),
            m.encode(m.Committed("t#1", (), 1.0)),
            m.encode(m.Uploaded("t#1")),
        )

        def __init__(self):
            self.sent = []

        def send(self, message):
            self.sent.append(message)

    class Runner:
        holding = ("t#2",)

        def repeat(self):
            return [m.Committed("t#2", (), 1.0)]

    member, session = Member("volunteer", m.Machine("host")), Session()
    member.runner = Runner()
    member.opened(session)
    assert session.sent == [m.Holding(("t#2", "t#1")), m.Committed("t#2", (), 1.0)]


def test_the_gateways_http_is_where_its_sessions_are():
    assert http_base("goblin://10.0.0.1:8787") == "http://10.0.0.1:8787"
    assert http_base("goblins://grid.example/under") == "https://grid.example:443/under"

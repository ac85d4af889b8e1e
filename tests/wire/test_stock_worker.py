"""Stock ``dask worker`` processes through cuts, kills and restarts."""

from __future__ import annotations

import os
import signal
import ssl
import time
from pathlib import Path

import psutil
import pytest
from distributed import wait

from goblin_dask import messages as m

pytestmark = pytest.mark.system

NANNY = pytest.mark.parametrize("options", [(), ("--no-nanny",)], ids=["nanny", "no-nanny"])


async def started(gateway) -> str:
    """A lease that is running on the one worker; its attempt."""
    attempt = f"{'ab' * 32}#1"
    worker = await gateway.worker()
    future = gateway.lease(attempt)
    gateway.future = future
    await gateway.changes.until(lambda: gateway.said(m.Uploaded))
    assert gateway.scheduler.workers[worker].processing
    return attempt


def pid(gateway) -> str:
    return dict(gateway.session_of().hello.machine.versions)["pid"]


@NANNY
async def test_connects_works_and_leaves(gateways, volunteers, options):
    gateway = await gateways()
    volunteer = await volunteers(gateway.port, *options)
    assert await gateway.worker() == gateway.session_of().address
    attempt = await started(gateway)
    gateway.session_of().send(m.Abandon(attempt))
    await wait(gateway.future, 10)
    assert gateway.future.status == "finished"
    assert [c.attempt for c in gateway.said(m.Committed)] == [attempt]
    assert gateway.session_of().hello.token == "secret"
    volunteer.process.send_signal(signal.SIGTERM)
    await gateway.changes.until(lambda: not gateway.scheduler.workers and not gateway.server.sessions)
    assert await volunteer.process.wait() == 0


@NANNY
async def test_a_cut_of_seconds_loses_nothing(gateways, cables, volunteers, options):
    gateway = await gateways()
    cable = await cables(gateway.port)
    await volunteers(cable.port, *options)
    await gateway.worker()
    attempt = await started(gateway)
    session = gateway.session_of()
    address, process = session.address, pid(gateway)
    cable.cut()
    await cable.changes.until(lambda: cable.refused)
    assert not session.connected.is_set()
    session.send(m.Abandon(attempt))  # said into the cut
    second = gateway.lease(f"{'cd' * 32}#1")
    await cable.changes.until(lambda: cable.refused >= 5)  # with growing pauses: seconds
    cable.mend()
    await wait(gateway.future, 10)
    assert [c.attempt for c in gateway.said(m.Committed)] == [attempt]
    session.send(m.Abandon(second.key))
    await wait(second, 10)
    assert gateway.future.status == second.status == "finished"
    assert gateway.session_of() is session
    assert list(gateway.scheduler.workers) == [address]
    assert pid(gateway) == process
    assert not gateway.closed or all(worker.startswith("nanny") for worker, _ in gateway.closed)


@NANNY
async def test_a_restarted_gateway_gets_its_workers_and_their_running_tasks_back(gateways, volunteers, options):
    first = await gateways()
    await volunteers(first.port, *options)
    await first.worker()
    attempt = await started(first)
    process = pid(first)
    await first.stop()
    second = await gateways(first.port)
    since = time.monotonic()
    await second.worker()
    assert time.monotonic() - since < 5
    assert pid(second) == process
    [holding] = await second.changes.until(lambda: second.said(m.Holding))
    assert holding.attempts == (attempt,)
    second.session_of().send(m.Abandon(attempt))
    await second.changes.until(lambda: second.said(m.Committed))
    after = second.lease(f"{'ef' * 32}#2")
    await second.changes.until(lambda: second.scheduler.workers[second.session_of().address].processing)
    second.session_of().send(m.Abandon(after.key))
    await wait(after, 10)
    assert after.status == "finished"


async def test_a_session_that_was_given_up_is_opened_anew(gateways, cables, volunteers):
    gateway = await gateways(linger=0.2)
    cable = await cables(gateway.port)
    await volunteers(cable.port, "--no-nanny")
    before = await gateway.worker()
    attempt = await started(gateway)
    process = pid(gateway)
    cable.cut()
    await gateway.changes.until(lambda: not gateway.scheduler.workers)
    cable.mend()
    assert await gateway.worker() != before
    assert pid(gateway) == process
    assert gateway.said(m.Holding)[-1].attempts == (attempt,)


async def test_a_killed_worker_is_noticed_through_its_nanny_and_replaced(gateways, volunteers):
    gateway = await gateways(linger=600)
    await volunteers(gateway.port)
    before = await gateway.worker()
    await gateway.changes.until(lambda: any(worker.startswith("nanny") for worker, _ in gateway.closed))  # it is up
    os.kill(int(pid(gateway)), signal.SIGKILL)
    await gateway.changes.until(lambda: before not in gateway.scheduler.workers)
    assert "its nanny says that the process ended" in [reason for _, reason in gateway.closed]
    assert await gateway.worker() != before


async def test_no_port_is_opened_for_dask_on_the_lent_machine(gateways, volunteers):
    gateway = await gateways()
    volunteer = await volunteers(gateway.port, "--no-nanny", "--no-dashboard", preload=False)
    await gateway.worker()
    listening = [c for c in psutil.Process(volunteer.process.pid).net_connections() if c.status == psutil.CONN_LISTEN]
    # Dask's own HTTP server, which the goblin plugin closes; no comm listens.
    assert len(listening) <= 1


async def test_a_wrong_token_is_refused_with_the_gateways_sentence(gateways, volunteers, tmp_path):
    gateway = await gateways()
    volunteer = await volunteers(gateway.port, "--no-nanny", token="wrong")
    assert await volunteer.process.wait() != 0
    assert "this gateway does not know the token: ask for one" in (tmp_path / "worker-0.log").read_text()
    assert not gateway.server.sessions


async def test_tls(gateways, volunteers):
    tls = Path(__file__).with_name("tls")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(tls / "certificate.pem", tls / "key.pem")
    gateway = await gateways(tls=context)
    authority = {"DASK_GOBLIN__TLS__CA_FILE": str(tls / "certificate.pem")}
    await volunteers(gateway.port, "--no-nanny", scheme="goblins", **authority)
    await gateway.worker()
    await started(gateway)

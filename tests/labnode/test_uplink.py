"""`GridLink` and what supervises a job, against a real gateway and real volunteers in this process."""

import asyncio
import logging
import threading

import dask.array as da
import numpy as np
import pytest

from goblin_dask.digest import digest
from goblin_dask.errors import InputError, Refused
from goblin_dask.gateway.outcomes import Outcomes
from goblin_dask.graphs.builder import Builder
from goblin_dask.labnode.uplink import Order, Prepared
from goblin_dask.messages import ArraySpec, BlobRef, Check, Policy
from goblin_dask.store.chunks import load_array, store_array
from goblin_dask.testing.inprocess import InProcessGrid
from goblin_dask.verify.policy import UNCHECKED
from goblin_dask.verify.reputation import Reputation
from goblin_dask.volunteer.runner import Runner

SPEC = ArraySpec((4,), "float64")


class Gate:
    """Volunteers and validators work only while it is open."""

    def __init__(self):
        self.reached, self.open = threading.Event(), threading.Event()
        self.works = []

    async def run(self, runner, run, work):
        self.works.append(work)
        self.reached.set()
        await asyncio.to_thread(self.open.wait)
        return await run(runner, work)


@pytest.fixture
def gate(monkeypatch):
    gate, run = Gate(), Runner.run
    monkeypatch.setattr(Runner, "run", lambda runner, work: gate.run(runner, run, work))
    yield gate
    gate.open.set()


@pytest.fixture(scope="module")
def grid(tmp_path_factory):
    with InProcessGrid(volunteers=1, directory=tmp_path_factory.mktemp("grid")) as grid:
        yield grid


@pytest.fixture(scope="module")
def double():
    builder = Builder()
    x = builder.input(SPEC)
    program, _ = builder.finish(builder.add("add", (x, x)))
    return Prepared(program)


def order(grid, program, seed, job="j"):
    array = np.random.default_rng(seed).random(4)
    return Order(program, (store_array(grid.node.blobs, array),), (), Policy(), job), array


def test_one_task_for_all_who_want_it(grid, gate, double):
    wish, array = order(grid, double, 1)
    first, second = grid.node._link.submit(wish), grid.node._link.submit(wish)
    assert gate.reached.wait(20)
    assert grid.node._link.outstanding == 1
    gate.open.set()
    one, other = first.result(20), second.result(20)
    assert one is other
    np.testing.assert_array_equal(load_array(grid.node.blobs, one.outputs[0]), array + array)
    assert len({work.attempt for work in gate.works if not hasattr(work, "outputs")}) == 1


def test_a_withdrawn_wish_leaves_the_others(grid, gate, double):
    wish, array = order(grid, double, 2)
    first, second = grid.node._link.submit(wish), grid.node._link.submit(wish)
    assert gate.reached.wait(20)
    assert first.cancel()
    gate.open.set()
    np.testing.assert_array_equal(load_array(grid.node.blobs, second.result(20).outputs[0]), array + array)


def test_the_last_wish_withdrawn_cancels_the_task(grid, gate, double):
    wish, _ = order(grid, double, 3)
    future = grid.node._link.submit(wish)
    assert gate.reached.wait(20)
    assert future.cancel()

    async def outstanding():
        return grid.node._link.outstanding

    assert grid.run_in_lab(outstanding()) == 0


def test_what_is_in_the_ledger_is_not_submitted(grid, gate, double):
    gate.open.set()
    wish, _ = order(grid, double, 4)
    assert not grid.node._link.submit(wish).result(20).reused
    gate.open.clear()
    assert grid.node._link.submit(wish).result(20).reused


@pytest.fixture
def known(monkeypatch):
    """All hosts have shown enough for ``sample`` to spare them."""
    monkeypatch.setattr(Reputation, "share", lambda reputation, host, flops: float(bool(host.wrong)))


@pytest.mark.usefixtures("known")
def test_a_result_accepted_unchecked_can_be_checked_later(grid, gate):
    """Its outputs lie in the store then, no longer among the uploads; a validator is served all the same."""
    gate.open.set()
    builder = Builder()
    x = builder.input(ArraySpec((20_000,), "float64"))
    program = Prepared(builder.finish(builder.add("add", (x, x)))[0])
    inputs = (store_array(grid.node.blobs, np.random.default_rng(7).random(20_000)),)
    link = grid.node._link

    def submit(policy):
        return link.submit(Order(program, inputs, (), policy, "later", on_reopened=lambda: None)).result(30)

    unchecked = submit(Policy("sample", 1e-12))
    assert unchecked.verdict.method == UNCHECKED
    assert unchecked.outputs[0].inline is None
    works = len(gate.works)
    checked = submit(Policy())
    assert checked.verdict.method == "recompute"
    assert checked.outputs == unchecked.outputs
    assert [type(work) for work in gate.works[works:]] == [Check]

    async def settle():
        link.settle("later")

    grid.run_in_lab(settle())
    with pytest.raises(Refused, match="nobody waits"):
        grid.node._link._data.permits.open(gate.works[-1].grant, unchecked.outputs[0].digest)


@pytest.mark.usefixtures("known")
def test_the_gateway_forgets_unchecked_results_with_their_job(grid, gate, double, monkeypatch):
    """Past `Limits.remember` of them it would check everything."""
    gate.open.set()
    forgotten, forget = threading.Event(), Outcomes.forget

    def tell(outcomes, ticket):
        forget(outcomes, ticket)
        forgotten.set()

    link, outcomes = grid.node._link, grid.gateway.dispatcher.outcomes
    inputs = (store_array(grid.node.blobs, np.full(SPEC.shape, 77, SPEC.dtype)),)
    order = Order(double, inputs, (), Policy("sample", 1e-12), "short", on_reopened=lambda: None)
    assert link.submit(order).result(30).verdict.method == UNCHECKED
    assert outcomes.unchecked_count == 1

    async def settle():
        monkeypatch.setattr(Outcomes, "forget", tell)
        link.settle("short")

    grid.run_in_lab(settle())
    assert forgotten.wait(20)
    assert outcomes.unchecked_count == 0


@pytest.mark.usefixtures("known")
@pytest.mark.parametrize("checked_meanwhile", [False, True])
def test_a_result_withdrawn_while_it_is_taken_over_is_not_used(tmp_path, monkeypatch, double, checked_meanwhile):
    """Its blobs are still being moved when its volunteer is proven wrong elsewhere."""

    def tamper(number, runner):
        compute = runner._compute

        def lie(program, inputs, attempt, trace):
            outputs, seconds = compute(program, inputs, attempt, trace)
            for output in outputs:
                if output.ref.inline is not None:
                    data = np.frombuffer(output.ref.inline, output.ref.spec.dtype) + 1
                    output.ref = BlobRef(digest(data), output.ref.spec, output.ref.nbytes, data.tobytes())
            return outputs, seconds

        runner._compute = lie

    builder = Builder()
    x = builder.input(ArraySpec((20_000,), "float64"))
    large = Prepared(builder.finish(builder.add("add", (x, x)))[0])
    with InProcessGrid(volunteers=1, directory=tmp_path, tamper=tamper, gateway_config={"probe": False}) as grid:
        link, data = grid.node._link, grid.node._link._data
        taking, go_on, withdrawn, again = (threading.Event() for _ in range(4))
        accept, reopened, accepted = data.accept, link._reopened, link._accept

        def slowly(*args, **kwargs):
            taking.set()
            assert go_on.wait(20)
            accept(*args, **kwargs)

        def told(name):
            reopened(name)
            withdrawn.set()

        def told_again(message):
            accepted(message)
            if message.verdict.method != UNCHECKED:
                again.set()

        monkeypatch.setattr(data, "accept", slowly)
        monkeypatch.setattr(link, "_reopened", told)
        monkeypatch.setattr(link, "_accept", told_again)
        inputs = (store_array(grid.node.blobs, np.random.default_rng(8).random(20_000)),)
        future = link.submit(Order(large, inputs, (), Policy("sample", 1e-12), "sampled", on_reopened=lambda: None))
        assert taking.wait(20)
        link.submit(order(grid, double, 9)[0])
        assert withdrawn.wait(20)
        if checked_meanwhile:
            assert again.wait(20)
        go_on.set()
        result = future.result(20)
        assert result.verdict.method == "recompute"
        (entry,) = grid.node.ledger.lookup([result.task]).values()
        assert entry.verdict.method == "recompute"


def test_a_cut_line_is_mended_and_nothing_lost(grid, gate, double):
    wish, array = order(grid, double, 5)
    future = grid.node._link.submit(wish)
    assert gate.reached.wait(20)

    async def cut():
        await grid.node._link._session._ws.close()

    grid.run_in_lab(cut())
    gate.open.set()
    np.testing.assert_array_equal(load_array(grid.node.blobs, future.result(30).outputs[0]), array + array)


def test_a_forgotten_session_means_that_all_is_submitted_again(grid, gate, double, caplog):
    wish, array = order(grid, double, 6)
    future = grid.node._link.submit(wish)
    assert gate.reached.wait(20)

    async def forget():
        for session in list(grid.gateway.server.sessions.values()):
            if session.role == "lab":
                session.close("the test forgets it", retry=True)

    with caplog.at_level(logging.INFO, "goblin_dask.labnode.uplink"):
        grid.run(forget())
        gate.open.set()
        np.testing.assert_array_equal(load_array(grid.node.blobs, future.result(30).outputs[0]), array + array)
    assert "outstanding tasks are submitted to the gateway again" in caplog.text


def test_a_lost_job_actor_is_made_again(grid, gate, caplog):
    """The lab worker that holds it goes away in the middle of a job; another one is there."""
    cluster = grid.node._cluster
    other = cluster._main.run(cluster._worker("other", 1, {"lab": 1})).result()
    x = da.from_array(np.random.default_rng(7).random((4, 8)), chunks=4)
    with grid.lab.submit(x * 2.5) as job:
        assert gate.reached.wait(20)
        events = job.events()
        while not next(events)["progress"].get("states"):
            pass  # until its actor stands, and knows that tasks are on the grid
        events.close()
        (holder,) = [worker for worker in (cluster.worker, other) if worker.state.actors]
        cluster._main.run(holder.close(nanny=False)).result()
        gate.open.set()
        np.testing.assert_array_equal(job.result(), (x * 2.5).compute(scheduler="sync"))
        assert job.progress["done"] == job.progress["total"]
        assert job.certificate["complete"]
    assert "its actor was lost" in caplog.text
    if holder is cluster.worker:
        cluster.worker = other


def test_an_address_that_is_none(grid):
    from goblin_dask.labnode.node import LabNode

    async def start():
        await LabNode("gateway:8787", directory=grid.directory / "other", port=0).start()

    with pytest.raises(InputError, match="is not the address of a gateway"):
        grid.run_in_lab(start())

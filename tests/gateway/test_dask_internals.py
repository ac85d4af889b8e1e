"""The embedded scheduler, with workers that are the ends of its own streams."""

from __future__ import annotations

import logging
import time

import pytest

from goblin_dask.errors import ConnectionLost
from goblin_dask.gateway.dask_internals import Grid
from goblin_dask.messages import Lease, Routes
from goblin_dask.wire.codec import Register, SchedulerCodec
from goblin_dask.wire.dask_internals import heartbeat_metrics


class Stream:
    """Where the scheduler's messages to a worker go."""

    def __init__(self):
        self.messages = []

    def send(self, *messages):
        self.messages += messages

    def abort(self):
        self.messages = None

    def closed(self):
        return False

    async def close(self):
        self.abort()


class Comm:
    name = ""
    peer_address = "test"

    async def write(self, message):
        self.answer = message


def lease(attempt):
    return Lease(attempt, b"program", (), "grant", Routes(), 1000, 60.0)


class Bench:
    def __init__(self):
        self.joined, self.left, self.failed = [], [], []
        self.grid = Grid(self.joined.append, self.left.append, lambda *args: self.failed.append(args))

    async def worker(self, name):
        """Register, without the endless loop that reads its messages."""
        address = f"goblin://~{name}"
        seen = {}

        async def handle_worker(comm, worker):
            seen["worker"] = worker

        self.grid.handle_worker = handle_worker
        codec = SchedulerCodec(
            "volunteer",
            {"address": address, "name": name, "nthreads": 2, "memory_limit": 0, "resources": {}},
        )
        message = codec.for_scheduler(Register("0" * 32, "running"))
        for extra in ("op", "reply"):
            message.pop(extra)
        comm = Comm()
        await self.grid.add_worker(comm, **message)
        del self.grid.handle_worker
        assert comm.answer["status"] == "OK", comm.answer
        assert seen["worker"] == address
        self.grid.stream_comms[address] = Stream()
        return address

    def finished(self, address, key, run_id=None):
        message = self.sent(address, "compute-task")[-1]
        self.grid.handle_task_finished(
            key=key,
            worker=address,
            stimulus_id="x",
            run_id=message["run_id"] if run_id is None else run_id,
            nbytes=1,
            type=b"",
            typename="NoneType",
            metadata={},
            thread=0,
            startstops=[],
        )

    def sent(self, address, op):
        return [message for message in self.grid.stream_comms[address].messages if message["op"] == op]


@pytest.fixture
async def bench():
    logging.getLogger("distributed").setLevel(logging.ERROR)
    bench = Bench()
    await bench.grid
    yield bench
    await bench.grid.close()


async def test_no_port_is_opened(bench):
    assert bench.grid.address.startswith("inproc://")
    assert not hasattr(bench.grid, "http_server")
    assert not bench.grid.services
    assert not bench.grid.extensions


async def test_an_attempt_goes_to_its_worker_and_leaves_nothing_behind(bench):
    addresses = [await bench.worker(f"w{i}") for i in range(3)]
    for round_ in range(20):
        for i, address in enumerate(addresses):
            key = f"{'ab' * 32}#{round_ * 3 + i}"
            bench.grid.dispatch(address, key, lease(key))
            assert bench.sent(address, "compute-task")[-1]["key"] == key
            bench.finished(address, key)
            assert bench.sent(address, "free-keys")[-1]["keys"] == [key]
    assert not bench.grid.tasks
    assert not bench.grid.task_groups
    assert len(bench.grid.task_prefixes) == 1
    assert not bench.grid._dispatcher.wants_what
    assert not bench.grid.unrunnable
    assert all(not ws.processing and not ws.has_what for ws in bench.grid.workers.values())


async def test_many_for_one_worker_are_all_sent_in_order(bench):
    address, _idle = await bench.worker("w0"), await bench.worker("w1")
    for i in range(50):
        bench.grid.dispatch(address, f"t#{i}", lease(f"t#{i}"))
    messages = bench.sent(address, "compute-task")
    assert [message["key"] for message in messages] == [f"t#{i}" for i in range(50)]
    assert sorted(message["priority"] for message in messages) == [message["priority"] for message in messages]


async def test_cancel(bench):
    address = await bench.worker("w0")
    bench.grid.dispatch(address, "t#1", lease("t#1"))
    bench.grid.cancel("t#1")
    bench.grid.cancel("t#1")
    assert bench.sent(address, "free-keys")[-1]["keys"] == ["t#1"]
    assert not bench.grid.tasks


async def test_an_error_is_reported_once_and_only_for_the_worker_that_has_it(bench):
    address, other = await bench.worker("w0"), await bench.worker("w1")
    bench.grid.dispatch(address, "t#1", lease("t#1"))
    bench.grid.handle_task_erred(key="t#1", stimulus_id="x", worker=other, exception_text="boom")
    assert not bench.failed
    bench.grid.dispatch(address, "t#2", lease("t#2"))
    for _ in range(2):
        bench.grid.handle_task_erred(key="t#2", stimulus_id="x", worker=address, exception_text="boom")
    bench.grid.dispatch(address, "t#3", lease("t#3"))
    bench.grid._reschedule("t#3", worker=address, stimulus_id="x")
    assert bench.failed == [(address, "t#2", "boom"), (address, "t#3", "the worker put the attempt back")]
    assert len(bench.sent(address, "compute-task")) == 3


async def test_a_worker_that_leaves_takes_its_attempts_along_and_tells_nobody(bench):
    address, other = await bench.worker("w0"), await bench.worker("w1")
    bench.grid.dispatch(address, "t#1", lease("t#1"))
    await bench.grid.remove_worker(address, stimulus_id="x")
    assert not bench.grid.tasks
    assert not bench.grid.unrunnable
    assert bench.grid.stream_comms[other].messages == []
    with pytest.raises(ConnectionLost, match="left before"):
        bench.grid.dispatch(address, "t#2", lease("t#2"))


async def test_thousands_of_joins_and_leaves_leave_nothing(bench):
    for i in range(300):
        address = await bench.worker(f"w{i}")
        bench.grid.heartbeat_worker(address=address, metrics=heartbeat_metrics(1, 1.0), now=time.time())
        await bench.grid.remove_worker(address, stimulus_id="x")
    grid = bench.grid
    assert not grid.workers
    assert not grid.host_info
    assert not grid.aliases
    assert len(grid.total_nthreads_history) <= 100
    assert not grid._broker._topics
    assert len(grid.bandwidth_workers) == 0

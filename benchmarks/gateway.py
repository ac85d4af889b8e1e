"""What a task costs the gateway: the scheduler alone, the whole server over sockets, and a blob through the relay.

The gateway is a process of its own; laboratory, volunteers and validator are fakes that speak the protocol.
"""

from __future__ import annotations

import asyncio
import io
import logging
import multiprocessing
import secrets
import sys
import time

import aiohttp
import psutil

from goblin_dask import messages as m
from goblin_dask.digest import digest
from goblin_dask.gateway.accounts import create_token
from goblin_dask.gateway.dask_internals import Grid
from goblin_dask.gateway.server import Gateway
from goblin_dask.gateway.settings import GatewayConfig
from goblin_dask.wire.codec import SchedulerCodec
from goblin_dask.wire.schema import Register
from tests.gridpeers import FakeLab, FakeValidator, FakeVolunteer, submission

GOAL = 500e-6
"""Seconds of gateway CPU for one Dask task; an accepted result takes two, a lease and a check."""


class Sink:
    """Takes the place of a worker's stream, and encodes as the border does."""

    def __init__(self, codec):
        self.codec, self.run_id = codec, 0

    def send(self, *messages):
        for message in messages:
            self.run_id = message.get("run_id", self.run_id)
        self.codec.encode(list(messages))

    def closed(self):
        return False

    def abort(self):
        pass

    async def close(self):
        pass


class Answer:
    name = peer_address = "benchmark"

    async def write(self, message):
        pass


async def scheduler(workers, tasks):
    """The embedded scheduler alone: dispatch, encode, finish, release."""
    grid = await Grid(lambda a: None, lambda a: None, lambda *a: None)

    async def handle_worker(comm, worker):
        pass

    grid.handle_worker = handle_worker
    sinks = {}
    began = time.process_time()
    for i in range(workers):
        address = f"goblin://~w{i}"
        mine = {"address": address, "name": f"w{i}", "nthreads": 2, "memory_limit": 0, "resources": {}}
        codec = SchedulerCodec("volunteer", mine)
        registration = codec.for_scheduler(Register("0" * 32, "running"))
        await grid.add_worker(Answer(), **{k: v for k, v in registration.items() if k not in ("op", "reply")})
        grid.stream_comms[address] = sinks[address] = Sink(codec)
    joined = time.process_time() - began
    addresses = list(sinks)
    inputs = tuple(m.BlobRef(secrets.token_hex(32), m.ArraySpec((512, 512), "float32"), 1 << 20) for _ in range(2))
    began = time.process_time()
    for i in range(tasks):
        address, attempt = addresses[i % workers], f"{i:064x}#{i}"
        lease = m.Lease(attempt, b"p" * 200, inputs, "g" * 200, m.Routes(), 1 << 22, 60.0)
        grid.dispatch(address, attempt, lease)
        grid.handle_task_finished(
            key=attempt, worker=address, stimulus_id="b", run_id=sinks[address].run_id, nbytes=1, type=b"",
            typename="None", metadata={}, thread=0, startstops=[],
        )  # fmt: skip
    spent = (time.process_time() - began) / tasks
    began = time.process_time()
    for address in addresses:
        await grid.remove_worker(address, stimulus_id="b")
    left = time.process_time() - began
    await grid.close()
    print(
        f"scheduler, {workers:5d} workers: {spent * 1e6:5.0f} µs/task, join {joined / workers * 1e3:.2f} ms, "
        f"leave {left / workers * 1e3:.2f} ms"
    )


def serve(pipe):
    """The gateway's process."""

    async def run():
        logging.disable(logging.INFO)
        gateway = Gateway(
            GatewayConfig(port=0, open=True, database="sqlite://", probe=False, sessions_per_network=10_000)
        )
        await gateway.start()
        tokens = {role: await create_token(gateway.database, role, "bench") for role in ("lab", "validator")}
        pipe.send((gateway.url, tokens))
        await asyncio.to_thread(pipe.recv)
        await gateway.stop()

    asyncio.run(run())


class Address:
    """What the fakes need of a gateway in another process."""

    def __init__(self, url):
        self.url = url


async def server(url, tokens, process, workers, tasks):
    """Tasks through everything: leased, committed, checked, accepted."""
    gateway = Address(url)
    lab = await FakeLab(gateway, tokens["lab"]).connect()
    validators = [await FakeValidator(gateway, tokens["validator"], slots=8).connect() for _ in range(4)]
    volunteers = [await FakeVolunteer(gateway, slots=4).connect() for _ in range(workers)]
    await lab.until(lambda: any(offer.volunteers == workers for offer in lab.got(m.GridOffer)), 30)
    warm = [submission(i, job="w" * 32) for i in range(200)]
    lab.submit(*warm)
    await lab.accepted(len(warm), 60)
    before, began = sum(process.cpu_times()[:2]), time.perf_counter()
    lab.submit(*(submission(1_000 + i, job="b" * 32) for i in range(tasks)))
    await lab.accepted(len(warm) + tasks, 300)
    wall, cpu = time.perf_counter() - began, sum(process.cpu_times()[:2]) - before
    print(
        f"server, {workers:4d} volunteers: {cpu / tasks * 1e6:5.0f} µs of gateway CPU a result (lease, check), "
        f"{tasks / wall:,.0f} tasks/s with all peers in one other process, gateway {rss(process):.0f} MB"
    )
    for peer in (lab, *volunteers, *validators):
        await peer.close()
    return cpu / tasks / 2


async def relay(url, tokens, process, size):
    """A blob down and one up."""
    gateway = Address(url)
    lab = await FakeLab(gateway, tokens["lab"]).connect()
    volunteer = await FakeVolunteer(gateway).connect()
    volunteer.auto = False
    data = secrets.token_bytes(size)
    spec = m.ArraySpec((size // 4,), "float32")
    ref = m.BlobRef(digest(data), spec, size)
    lab.submit(submission(0, inputs=(ref,)))
    lease = await volunteer.until(lambda: next(iter(volunteer.work.values()), None))
    head = {"Authorization": f"Bearer {lease.grant}"}
    before = rss(process)
    most = before
    async with aiohttp.ClientSession(read_bufsize=1 << 20) as http:

        async def watch():
            nonlocal most
            while True:
                most = max(most, rss(process))
                await asyncio.sleep(0.02)

        async def move():
            request = await lab.until(lambda: lab.got(m.RelayRequest))
            lab.messages.remove(request[0])
            path = f"{url}/goblin/relay/{request[0].transfer}"
            if request[0].direction == "fetch":
                async with http.post(path, data=io.BytesIO(data)) as response:
                    assert response.status == 204
                return
            async with http.get(path) as response:
                async for _ in response.content.iter_any():
                    pass
            async with http.post(path) as response:
                assert response.status == 204

        watching = asyncio.create_task(watch())
        for direction in ("down", "up"):
            moving = asyncio.create_task(move())
            cpu, began = sum(process.cpu_times()[:2]), time.perf_counter()
            if direction == "down":
                async with http.get(f"{url}/goblin/blobs/{ref.digest}", headers=head) as response:
                    async for _ in response.content.iter_any():
                        pass
            else:
                body = io.BytesIO(data)
                async with http.put(f"{url}/goblin/blobs/{ref.digest}", data=body, headers=head) as response:
                    assert response.status == 204, await response.text()
            await moving
            wall, cpu = time.perf_counter() - began, sum(process.cpu_times()[:2]) - cpu
            print(
                f"relay {direction}, {size >> 20} MiB: {size / wall / 1e6:,.0f} MB/s, "
                f"{cpu / size * 1e9:.2f} s of gateway CPU a GB"
            )
        watching.cancel()
    print(f"relay: the gateway grew by {most - before:.1f} MB at most")
    await lab.close()
    await volunteer.close()


def rss(process):
    """Resident megabytes."""
    return process.memory_info().rss / 1e6


async def main():
    logging.disable(logging.INFO)
    for workers in (100, 1_000, 5_000):
        await scheduler(workers, 5_000)
    here, there = multiprocessing.get_context("spawn").Pipe()
    child = multiprocessing.get_context("spawn").Process(target=serve, args=(there,))
    child.start()
    url, tokens = await asyncio.to_thread(here.recv)
    process = psutil.Process(child.pid)
    try:
        costs = [await server(url, tokens, process, workers, 3_000) for workers in (8, 100)]
        await relay(url, tokens, process, 256 << 20)
    finally:
        here.send("stop")
        await asyncio.to_thread(child.join, 20)
    print(f"goal: {GOAL * 1e6:.0f} µs of gateway CPU a Dask task; worst {max(costs) * 1e6:.0f} µs")
    return max(costs) > GOAL


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))

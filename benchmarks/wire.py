"""CPU time that sessions cost the gateway for each task, without the scheduler.

One process is the gateway: session server, codec, control messages. Another plays all volunteers: for each lease it
sends a `Committed` on the control channel and ends the task on its stream, as real ones do. Prints, for each way of
handing out: tasks a second, and the gateway's CPU time a task.

    python benchmarks/wire.py [--volunteers 50] [--tasks 20000]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import subprocess
import sys
import time

from aiohttp import web
from distributed.protocol.serialize import ToPickle

from goblin_dask import messages as m
from goblin_dask.wire import schema
from goblin_dask.wire.client import dial
from goblin_dask.wire.dask_internals import work_task
from goblin_dask.wire.server import Admission, SessionServer
from goblin_dask.wire.session import PATH

OUTPUTS = (m.BlobRef("0" * 64, m.ArraySpec((256, 256), "float32"), 262144),)
INPUTS = (m.BlobRef("1" * 64, m.ArraySpec((256, 256), "float32"), 262144),) * 2


def lease(number: int) -> m.Lease:
    routes = m.Routes("goblin-lab", "http://127.0.0.1:1", "/goblin/blobs")
    return m.Lease(f"{'a' * 64}#{number}", bytes(300), INPUTS, "g" * 120, routes, 10**6, 60.0)


class Volunteer:
    def hello(self) -> m.Hello:
        return m.Hello((m.PROTOCOL,), "volunteer")

    def opened(self, session) -> None: ...

    def received(self, session, message) -> None: ...

    def closed(self, session, reason) -> None: ...


async def volunteer(port: int, number: int) -> None:
    session = await dial(f"ws://127.0.0.1:{port}{PATH}", Volunteer())
    channel = session.open_channel()
    await channel.put(m.encode(schema.Register(f"{number:032x}")))
    await channel.get()
    with contextlib.suppress(OSError):
        while True:
            ended = []
            for order in schema.DOWNS.decode(await channel.get()):
                session.send(m.Committed(order.work.attempt, OUTPUTS, 0.1, held=("1" * 64, "2" * 64)))
                ended.append(schema.Finished(order.work.attempt, order.run_id, 0.1))
            await channel.put(m.encode(ended))


async def volunteers(port: int, count: int) -> None:
    await asyncio.gather(*(volunteer(port, i) for i in range(count)))


class Gateway:
    def __init__(self) -> None:
        self.comms: list = []
        self.ended = 0
        self.committed = 0
        self.ready = asyncio.Event()
        self.next = 0

    async def start(self) -> int:
        async def admit(hello, request):
            return Admission(str(len(self.comms)))

        server = SessionServer(
            on_hello=admit,
            on_message=self.message,
            on_comm=lambda comm: asyncio.ensure_future(self.serve(comm)),
        )
        app = web.Application()
        app.router.add_get(PATH, server.handle)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return runner.addresses[0][1]

    def message(self, session, message) -> None:
        self.committed += 1

    async def serve(self, comm) -> None:
        await comm.read()
        await comm.write({"status": "OK", "time": 0.0, "heartbeat-interval": 1.0})
        self.comms.append(comm)
        self.ready.set()
        while True:
            ended = await comm.read()
            self.ended += len(ended)
            if self.next < self.limit:
                await self.hand_out(comm, len(ended))

    async def hand_out(self, comm, count: int) -> None:
        orders = []
        for _ in range(min(count, self.limit - self.next)):
            self.next += 1
            work = lease(self.next)
            orders.append(
                {
                    "op": "compute-task",
                    "key": work.attempt,
                    "run_id": self.next,
                    "priority": (0, 1, self.next),
                    "who_has": {},
                    "actor": False,
                    "run_spec": ToPickle(work_task(work.attempt, work)),
                }
            )
        await comm.write(orders)

    limit = 0

    async def run(self, tasks: int, at_a_time: int) -> dict[str, float]:
        self.next = self.ended = self.committed = 0
        self.limit = tasks
        wall, cpu = time.perf_counter(), time.process_time()
        for comm in self.comms:
            await self.hand_out(comm, at_a_time)
        while self.ended < tasks or self.committed < tasks:
            await asyncio.sleep(0.01)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        return {"tasks/s": round(tasks / wall), "gateway CPU, µs a task": round(cpu / tasks * 1e6, 1)}


async def main(count: int, tasks: int) -> None:
    gateway = Gateway()
    port = await gateway.start()
    command = [sys.executable, __file__, "--volunteers", str(count), "--port", str(port)]
    with subprocess.Popen(command) as process:
        try:
            while len(gateway.comms) < count:
                await gateway.ready.wait()
                gateway.ready.clear()
            for at_a_time in (1, 2, 8):
                print(json.dumps({"in hand": at_a_time, "volunteers": count, **await gateway.run(tasks, at_a_time)}))
        finally:
            process.kill()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--volunteers", type=int, default=50)
    parser.add_argument("--tasks", type=int, default=20_000)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.port:
        asyncio.run(volunteers(arguments.port, arguments.volunteers))
    else:
        asyncio.run(main(arguments.volunteers, arguments.tasks))

"""MB/s of each way between a lab's blobs and a worker, on loopback, and CPU time of a tiny task in the runner.

The peers, in the same run: one copy of the same bytes in memory (for descriptors, which copy nothing going out and once
coming back), and `asyncio` streams without HTTP, hashing or storing (for HTTP).

    python -m benchmarks.transfer [--mb 64] [--repeat 5]
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from aiohttp import web

from goblin_dask.digest import digest
from goblin_dask.gateway.relay import Permit, Relay
from goblin_dask.graphs.builder import Builder
from goblin_dask.graphs.program import encode
from goblin_dask.labnode.data import DataServer
from goblin_dask.messages import ArraySpec, BlobRef, Lease, Routes, SubmitTask
from goblin_dask.store.blobs import BlobStore
from goblin_dask.store.chunks import store_array
from goblin_dask.store.descriptors import memory_file
from goblin_dask.store.grants import Grant, sign
from goblin_dask.volunteer.limits import Limits
from goblin_dask.volunteer.runner import Runner
from goblin_dask.volunteer.transfer import Transfers

KEY = b"\1" * 32


def serve(pipe: Connection, nbytes: int) -> None:
    """A lab and a gateway's relay, in a process of their own."""
    asyncio.run(_serve(pipe, nbytes))


async def _serve(pipe: Connection, nbytes: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        blobs = BlobStore(folder)
        data = DataServer(blobs, KEY)
        await data.start()
        array = np.random.default_rng(0).integers(0, 256, nbytes, "u1")
        ref = store_array(blobs, array)
        spec = ArraySpec((nbytes,), "uint8")
        for n in range(64):
            data.expect(SubmitTask(f"{n:064x}", "", (ref.wire(),), (spec,), 0.0, 0), [ref])
        jobs: set[asyncio.Task[None]] = set()
        relay = Relay(
            lambda grant, name, upload: Permit("lab", grant, frozenset({nbytes})),
            lambda lab, request: jobs.add(asyncio.create_task(data.relay(base, request))),
        )
        app = web.Application()
        app.add_routes(relay.routes())
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        base = f"http://127.0.0.1:{runner.addresses[0][1]}"
        raw = await asyncio.start_server(lambda reader, writer: _swallow(reader, writer), "127.0.0.1", 0)
        pipe.send((data.local, data.direct, base, raw.sockets[0].getsockname()[1], ref.wire()))
        await asyncio.to_thread(pipe.recv)
        await asyncio.gather(*jobs)
        raw.close()
        await runner.cleanup()
        await data.close()
        blobs.close()


async def _swallow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while await reader.read(1 << 20):
        pass
    writer.close()


def rate(nbytes: int, work: Callable[[int], Any], repeat: int) -> str:
    seconds = []
    for n in range(repeat):
        start = time.perf_counter()
        work(n)
        seconds.append(time.perf_counter() - start)
    return f"{nbytes / statistics.median(seconds) / 1e6:8.0f} MB/s"


def raw_stream(port: int, data: bytes) -> None:
    import socket

    with socket.create_connection(("127.0.0.1", port)) as sock:
        sock.sendall(data)
        sock.shutdown(socket.SHUT_WR)
        sock.recv(1)


def transfers(nbytes: int, repeat: int) -> None:
    ours, theirs = multiprocessing.Pipe()
    lab = multiprocessing.get_context("spawn").Process(target=serve, args=(theirs, nbytes))
    lab.start()
    local, direct, gateway, port, ref = ours.recv()
    moved, never = Transfers(gateway), threading.Event()
    print(f"blobs of {nbytes / 1e6:.0f} MB; fetched blobs are read once by the receiver, outputs differ each time")
    source = os.urandom(nbytes)
    target = bytearray(nbytes)
    print(f"  copy in memory             {rate(nbytes, lambda n: target.__setitem__(slice(None), source), repeat)}")
    print(f"  asyncio stream, thrown away{rate(nbytes, lambda n: raw_stream(port, source), repeat)}")
    ways = {
        "descriptors": Routes(local=local),
        "http to the lab": Routes(direct=direct),
        "http by the relay": Routes(relay="/goblin/blobs"),
    }
    number = 0
    for name, routes in ways.items():

        def fetch(n: int, routes: Routes = routes) -> None:
            grant = sign(KEY, Grant(f"{n:064x}", "a", "lease", time.time() + 600))
            np.frombuffer(moved.fetch(ref, routes, grant, never).view, "u8").max()

        spent: list[float] = []

        def send(n: int, routes: Routes = routes, spent: list[float] = spent) -> None:
            nonlocal number
            number += 1
            data = number.to_bytes(8, "little") + source[8:]
            grant = sign(KEY, Grant(f"{number:064x}", "a", "lease", time.time() + 600))
            start = time.perf_counter()
            fd = memory_file([data])
            out = BlobRef(digest(data), ArraySpec((nbytes,), "uint8"), nbytes)
            moved.send(out, fd, routes, grant, never)
            spent.append(time.perf_counter() - start)
            os.close(fd)

        print(f"  {name:18} fetch   {rate(nbytes, fetch, repeat)}", end="")
        rate(nbytes, send, repeat)
        print(f"   hand in {nbytes / statistics.median(spent) / 1e6:8.0f} MB/s")
    ours.send(None)
    lab.join()
    moved.close()


async def tiny(count: int) -> None:
    """Tasks on a few numbers, all in messages: what the runner itself costs."""
    build = Builder()
    spec = ArraySpec((10,), "float64")
    x, y = build.input(spec), build.input(spec)
    program, _ = build.finish([build.add("add", [x, y])[0]])
    data = np.arange(10.0)
    ref = BlobRef(digest(data), spec, data.nbytes, data.tobytes())
    said: list[Any] = []
    runner = Runner(Limits(1 << 30, 0, 1), Transfers(), said.append)
    encoded = encode(program)
    leases = [Lease(f"{n}#1", encoded, (ref, ref), "", Routes(), 0, 60.0) for n in range(count)]
    wall, cpu = time.perf_counter(), time.process_time()
    for start in range(0, count, 2):
        await asyncio.gather(*(runner.run(lease) for lease in leases[start : start + 2]))
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    await runner.close()
    if len(said) != count or not all(message.uploaded for message in said):
        raise SystemExit(f"{len(said)} of {count} tiny tasks were committed")
    print(f"tiny tasks: {wall / count * 1e3:.3f} ms wall, {cpu / count * 1e3:.3f} ms CPU each (limit 1 ms CPU)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mb", type=int, default=64)
    parser.add_argument("--repeat", type=int, default=5)
    options = parser.parse_args()
    transfers(options.mb << 20, options.repeat)
    asyncio.run(tiny(2000))


if __name__ == "__main__":
    main()

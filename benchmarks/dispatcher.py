"""Events that the gateway's dispatcher handles per second, in one thread, without sockets.

Usage: ``python benchmarks/dispatcher.py [--tasks 100000] [--workers 1000 5000] [--profile]``. A life of a task is four
events (submitted, committed, uploaded, checked); all tasks are submitted before the first worker joins, so the queue
is as long as it gets. Inputs are super-tiles' (16 blobs a task) and volunteers say that they keep them. The slowest
event is the one in which Python's garbage collector looked at everything.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import random
import time
from collections import deque

from goblin_dask import messages as m
from goblin_dask.digest import digest
from goblin_dask.gateway import events as e
from goblin_dask.gateway.dispatcher import Dispatcher
from goblin_dask.gateway.limits import Limits

SPEC = m.ArraySpec((1024, 1024), "float32")
INPUTS = 16


def submissions(count: int) -> list[m.SubmitTask]:
    """Tasks of a product: each reads eight blobs of its row and eight of its column."""
    side = max(1, int(count**0.5))
    program = digest(b"program")
    blobs = {
        (kind, i, k): m.BlobRef(digest(f"{kind} {i} {k}".encode()), SPEC, 1 << 22)
        for kind in "rc"
        for i in range(side + 2)
        for k in range(INPUTS // 2)
    }
    tasks = []
    for number in range(count):
        row, column = divmod(number, side)
        row %= side + 2
        inputs = tuple(blobs["r", row, k] for k in range(8)) + tuple(blobs["c", column, k] for k in range(8))
        tasks.append(
            m.SubmitTask(
                digest(str(number).encode()), program, inputs, (SPEC,), 1e10, 10**8, (0, number), m.Policy(), "job"
            )
        )
    return tasks


def run(workers: int, count: int) -> tuple[int, float, float]:
    """Number of events, seconds, and the slowest event's seconds."""
    dispatcher = Dispatcher(Limits(), random.Random(0))
    tasks = submissions(count)
    now, events, slowest = 1000.0, 0, 0.0
    pending: deque[e.Dispatch] = deque()
    accepted = 0

    def handle(event: e.Event) -> None:
        nonlocal events, slowest, accepted
        begin = time.perf_counter()
        out = dispatcher.handle(event, now)
        slowest = max(slowest, time.perf_counter() - begin)
        events += 1
        for instruction in out:
            if isinstance(instruction, e.Dispatch):
                pending.append(instruction)
            elif isinstance(instruction, e.ToLab) and isinstance(instruction.message, m.TaskAccepted):
                accepted += 1

    begin = time.perf_counter()
    handle(e.LabJoined("lab"))
    for task in tasks:
        handle(e.TaskSubmitted("lab", task))
    for number in range(max(1, workers // 50)):
        machine = m.Machine(f"validator {number}", slots=16, memory=1 << 36)
        handle(e.WorkerJoined(f"v{number}", "validator", "operator", "here", machine))
    for number in range(workers):
        machine = m.Machine(f"{number:032x}", slots=2, memory=1 << 33, cache=1 << 28, flops=1e10, bandwidth=1e7)
        handle(e.WorkerJoined(f"w{number}", "volunteer", f"o{number}", f"n{number}", machine))
    while pending:
        now += 0.001
        due = dispatcher.next_tick(now)
        if due is not None and due <= now:
            handle(e.Tick())
        order = pending.popleft()
        if order.check is not None:
            report = m.CheckReport("accepted", "algebraic", 0.5, miss=1e-9)
            handle(e.FromWorker(order.worker, m.Checked(order.attempt, report)))
            continue
        outputs = (m.BlobRef(digest(order.attempt.encode()), SPEC, 1 << 22),)
        held = tuple(blob.digest for blob in order.inputs)
        handle(e.FromWorker(order.worker, m.Committed(order.attempt, outputs, 1.0, 1.0, 1 << 26, held)))
        handle(e.FromWorker(order.worker, m.Uploaded(order.attempt, 0.1, 1 << 22)))
    seconds = time.perf_counter() - begin
    if accepted != count:
        raise SystemExit(f"{accepted} of {count} tasks were accepted")
    return events, seconds, slowest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", type=int, default=100_000)
    parser.add_argument("--workers", type=int, nargs="+", default=[1000, 5000])
    parser.add_argument("--profile", action="store_true")
    arguments = parser.parse_args()
    for workers in arguments.workers:
        profile = cProfile.Profile()
        if arguments.profile:
            profile.enable()
        events, seconds, slowest = run(workers, arguments.tasks)
        profile.disable()
        print(
            f"{workers:5d} workers, {arguments.tasks} tasks: {events / seconds:8,.0f} events/s "
            f"({1e6 * seconds / events:.1f} µs an event, slowest {1e3 * slowest:.1f} ms)"
        )
        if arguments.profile:
            pstats.Stats(profile).sort_stats("tottime").print_stats(25)


if __name__ == "__main__":
    main()

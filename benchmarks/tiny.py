"""2,000 tiny tasks, everything offloaded, unfused, each with a verdict of its own: what a task costs on the whole path.

Two volunteers and one validator, every actor a process of its own. The peer is a `LocalCluster` of two one-thread
workers that computes the same tasks, without a border or verdicts.

    python -m benchmarks.tiny [--tasks 2000]
"""

from __future__ import annotations

import argparse
import time

import dask.array as da
import numpy as np
import psutil
from dask.distributed import Client, LocalCluster

import goblin_dask as goblin


def tasks(count: int, seed: int) -> da.Array:
    """`count` blocks, each of which is one task on data of its own."""
    return da.from_array(np.random.default_rng(seed).random((count, 16)), chunks=(1, 16)) + 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", type=int, default=2000)
    options = parser.parse_args()
    count = options.tasks
    with LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster, Client(cluster):
        tasks(count, 0).compute(optimize_graph=False)
        started = time.perf_counter()
        tasks(count, 1).compute(optimize_graph=False)
        peer = time.perf_counter() - started
    with goblin.LocalGrid(volunteers=2, offload="always") as grid:
        grid.lab.fuse = False
        grid.lab.compute(tasks(50, 0))
        before = {p.name: sum(psutil.Process(p.pid).cpu_times()[:2]) for p in grid.processes}
        started = time.perf_counter()
        job = grid.lab.submit(tasks(count, 1))
        result = job.result()
        seconds = time.perf_counter() - started
        spent = {p.name: sum(psutil.Process(p.pid).cpu_times()[:2]) - before[p.name] for p in grid.processes}
        parts = sum(m["parts"] for name, m in job.certificate["methods"].items() if name != "laboratory")
    assert parts == count, f"{parts} verdicts for {count} tasks"
    np.testing.assert_array_equal(result, tasks(count, 1).compute(scheduler="sync"))
    print(f"{count} tasks in {seconds:.2f} s: {seconds / count * 1e3:.2f} ms each (bar 8 ms), {parts} verdicts")
    print("CPU ms a task:", ", ".join(f"{name} {value / count * 1e3:.2f}" for name, value in spent.items()))
    print(f"LocalCluster, without border or verdicts: {peer / count * 1e3:.2f} ms each; ratio {seconds / peer:.1f}")


if __name__ == "__main__":
    main()

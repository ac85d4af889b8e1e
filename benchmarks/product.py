"""An 8192 × 8192 float32 product from Zarr to Zarr on a local grid, against NumPy and against Dask's `LocalCluster`.

Two one-thread volunteers and one validator, every actor a process of its own, both layers of checks on every chunk;
everything on this machine's cores. Each run has a new left operand, for what was accepted is never computed again.
Peers are measured in the same run: NumPy from Zarr to Zarr (read, ``a @ b``, write), ``a @ b`` alone, and a
`LocalCluster` of two one-thread workers at the best of its chunkings.

    python -m benchmarks.product [--side 8192] [--route local|http] [--repeat 3]
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import dask
import dask.array as da
import numpy as np
import psutil
import zarr
from dask.distributed import Client, LocalCluster

import goblin_dask as goblin


def best(function: Callable[[], object], repeat: int) -> float:
    """Median seconds of several runs."""
    times = []
    for _ in range(repeat):
        os.sync()  # nobody pays for what was written before
        started = time.perf_counter()
        function()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def make(path: Path, side: int, chunk: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    array = zarr.create_array(str(path), shape=(side, side), chunks=(chunk, chunk), dtype="f4", compressors=None)
    for row in range(0, side, chunk):
        array[row : row + chunk] = rng.standard_normal((min(chunk, side - row), side), dtype="f4")


def product_alone(folder: Path, repeat: int) -> tuple[float, np.ndarray]:
    """Seconds of NumPy's product, and its first rows."""
    a, b = (zarr.open_array(str(folder / name), mode="r")[:] for name in ("a.zarr", "b.zarr"))
    return best(lambda: a @ b, repeat), a[:64] @ b


def numpy_zarr_to_zarr(folder: Path, chunk: int) -> None:
    a, b = (zarr.open_array(str(folder / name), mode="r") for name in ("a.zarr", "b.zarr"))
    c = a[:] @ b[:]
    out = zarr.create_array(
        str(folder / "numpy.zarr"), shape=c.shape, chunks=(chunk, chunk), dtype="f4", compressors=None, overwrite=True
    )
    out[:] = c


def cluster(folder: Path, side: int, chunks: list[int]) -> dict[int, float]:
    """Seconds of Dask's own product, by chunk."""
    seconds = {}
    with (
        dask.config.set({"distributed.worker.daemon": False}),
        LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as local,
        Client(local),
    ):
        for chunk in chunks:
            a, b = (da.from_zarr(str(folder / name), chunks=chunk) for name in ("a.zarr", "b.zarr"))
            os.sync()
            started = time.perf_counter()
            da.to_zarr(a @ b, str(folder / f"dask{chunk}.zarr"), compressors=None)
            seconds[chunk] = time.perf_counter() - started
    return seconds


def cpu_seconds(grid: goblin.LocalGrid) -> float:
    return sum(sum(psutil.Process(process.pid).cpu_times()[:2]) for process in grid.processes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--side", type=int, default=8192)
    parser.add_argument("--chunk", type=int, default=2048)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--route", choices=["local", "http"], default="local")
    parser.add_argument("--memory", default="1 GiB", help="of each volunteer")
    parser.add_argument("--no-cluster", action="store_true", help="leave Dask's LocalCluster out")
    options = parser.parse_args()
    side = options.side
    folder = Path(tempfile.mkdtemp(prefix="goblin-product-"))
    try:
        make(folder / "a.zarr", side, options.chunk, 0)
        make(folder / "b.zarr", side, options.chunk, 1)
        alone, _ = product_alone(folder, options.repeat)
        whole = best(lambda: numpy_zarr_to_zarr(folder, options.chunk), options.repeat)
        dask_seconds = {} if options.no_cluster else cluster(folder, side, [side // 4, side // 2])
        with goblin.LocalGrid(
            volunteers=2, memory=options.memory, routes="auto" if options.route == "local" else "direct"
        ) as grid:
            grid.lab.compute(da.ones((64, 64), chunks=32) @ da.ones((64, 64), chunks=32))  # everybody is awake
            times, spent = [], 0.0
            for run in range(options.repeat):
                shutil.rmtree(folder / "a.zarr")
                make(folder / "a.zarr", side, options.chunk, 10 + run)
                os.sync()
                before, started = cpu_seconds(grid), time.perf_counter()
                stored = [zarr.open_array(str(folder / name), mode="r") for name in ("a.zarr", "b.zarr")]
                product = goblin.matmul(*stored, offer=grid.lab.offer)
                job = grid.lab.to_zarr(product, str(folder / "ours.zarr"), overwrite=True, compressors=None)
                times.append(time.perf_counter() - started)
                spent += (cpu_seconds(grid) - before) / options.repeat
            seconds, certificate = statistics.median(times), job.certificate
        _, expected = product_alone(folder, 1)
        got = zarr.open_array(str(folder / "ours.zarr"), mode="r")[:64]
        bound = 2 * side * np.finfo("f4").eps / 2 * side
        assert np.max(np.abs(got - expected)) <= bound
        memory = dask.utils.parse_bytes(options.memory) / 4
        least = (2 * (2 * side**3 / 2) / (2 * math.sqrt(memory)) + side * side) * 4
        print(f"side {side}, chunk {options.chunk}, route {options.route}; medians of {options.repeat}")
        print(f"a @ b alone             {alone:7.2f} s")
        print(f"NumPy, Zarr to Zarr     {whole:7.2f} s")
        for chunk, value in dask_seconds.items():
            print(f"LocalCluster, {chunk:5}     {value:7.2f} s")
        print(f"goblin, Zarr to Zarr    {seconds:7.2f} s")
        local = options.route == "local"
        print(f"  / NumPy Zarr to Zarr  {seconds / whole:7.2f}   {'(bar 1.20)' if local else ''}")
        print(f"  / a @ b alone         {seconds / alone:7.2f}   (bar {1.35 if local else 1.5:.2f})")
        if dask_seconds:
            print(f"  / best LocalCluster   {seconds / min(dask_seconds.values()):7.2f}   (bar 1.00)")
        methods = certificate["methods"]
        assert list(methods) == ["algebraic"], methods
        share = methods["algebraic"]["check_seconds"] / spent
        print(f"verification            {share:7.1%} of {spent:.1f} CPU seconds (bar 10 %)")
        moved = methods["algebraic"]["bytes_in"] + methods["algebraic"]["bytes_out"]
        print(f"bytes moved             {moved / 1e9:7.2f} GB, {moved / least:.2f} × the least (bar 2.00)")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()

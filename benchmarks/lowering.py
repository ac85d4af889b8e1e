"""Cost of lowering: a matrix product of 32 × 32 blocks from Zarr, 78,850 tasks. Prints microseconds a task.

Capture and tracing (`lower`) and `fuse` for a grid of four volunteers; Dask's own making of the graph is apart.

Usage: ``python benchmarks/lowering.py [blocks a side]``
"""

from __future__ import annotations

import gc
import sys
import tempfile
import time
import warnings

import dask.array as da
import zarr

from goblin_dask.graphs.capture.dask_internals import Request
from goblin_dask.labnode.fusion import fuse
from goblin_dask.labnode.lowering import lower
from goblin_dask.messages import GridOffer

BAR = 40.0
"""Microseconds a task that all of it may take."""


def main(blocks: int = 32) -> float:
    """Run and print; microseconds a task, best of three."""
    offer = GridOffer(4, 4, memory=(1 << 30,) * 4, local=True)
    with tempfile.TemporaryDirectory() as folder:
        for name in "ab":
            zarr.create_array(f"{folder}/{name}", shape=(4 * blocks,) * 2, chunks=(4, 4), dtype="float32")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", da.PerformanceWarning)
            product = da.from_zarr(f"{folder}/a") @ da.from_zarr(f"{folder}/b")
        best = float("inf")
        for _ in range(3):
            gc.collect()
            start = time.perf_counter()
            request = Request.of_collections([product])
            middle = time.perf_counter()
            plan = lower(request, None)
            lowered = time.perf_counter()
            fused = fuse(plan, offer)
            end = time.perf_counter()
            each = (end - middle) / plan.tasks * 1e6
            best, before = min(best, each), (middle - start) / plan.tasks * 1e6
            print(
                f"{plan.tasks} tasks, {plan.templates} templates, {len(plan.grid)} programs, fused to "
                f"{len(fused.grid)}: lowering {lowered - middle:.2f} s, fusion {end - lowered:.2f} s, "
                f"together {each:.1f} µs a task (bar {BAR:.0f}); Dask's own graph {before:.1f} µs a task"
            )
    return best


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])) > BAR)

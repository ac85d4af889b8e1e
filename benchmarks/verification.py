"""What the product check costs beside the product: ``python -m benchmarks.verification [size …]``.

Everything on one thread, in one process. For each size n: NumPy's float32 product of n × n matrices, the projections
alone, and both layers, by turns for at least `SECONDS` and three times; CPU times, and what the checks are of the
product's, by the least and by the median. The same of a long thin product. Then the main job's four chunks of an
8192 × 8192 product, with the statistics of operands kept between chunks, each chunk one tile or two by two tiles of
eight panels; and the peak of the check's own memory.
"""

from __future__ import annotations

import statistics
import sys
import time
import tracemalloc

import numpy as np
from threadpoolctl import threadpool_limits

from goblin_dask.verify.contraction import Contraction, Tile
from goblin_dask.verify.operands import Operand, OperandStatistics
from goblin_dask.verify.product import check_product

REPEATS = 3
SECONDS = 20.0
"""Of runs for each size; other work on the machine comes and goes meanwhile."""
THIN = (512, 8192, 512)


def timed(function):
    """CPU seconds of one run."""
    start = time.process_time()
    function()
    return time.process_time() - start


def seconds(function, repeats=REPEATS):
    """Least CPU time of some runs."""
    return min(timed(function) for _ in range(repeats))


def accepted(finding):
    assert finding.verdict == "accepted", finding


def product(shape, rng):
    """A product of normal matrices, of shape (rows, depth, columns), and its checks by turns."""
    m, k, n = shape
    a, b = rng.standard_normal((m, k), np.float32), rng.standard_normal((k, n), np.float32)
    out = np.empty((m, n), np.float32)
    contraction = Contraction([Operand(a)], [Operand(b)], [Tile(out, ((0, 0),))])

    def check(layers):
        accepted(check_product(contraction, np.random.default_rng(), layers=layers))

    runs = {
        "product": lambda: np.matmul(a, b, out=out),
        "projections": lambda: check(1),
        "both layers": lambda: check(2),
    }
    times = {name: [] for name in runs}
    started = time.perf_counter()
    while len(times["product"]) < REPEATS or time.perf_counter() - started < SECONDS:
        for name, run in runs.items():
            times[name].append(timed(run))
    whole, median = min(times["product"]), statistics.median(times["product"])
    rate = 2 * m * k * n / whole / 1e9
    print(f"{m} × {k} × {n}, {len(times['product'])} runs")
    print(f"  {'product':12} {whole:.4f} s, {rate:.0f} GFLOP/s; median {median:.4f} s")
    for name in ("projections", "both layers"):
        least, middle = min(times[name]), statistics.median(times[name])
        print(
            f"  {name:12} {least:.4f} s, {least / whole:.1%}; median {middle:.4f} s, {middle / median:.1%}", flush=True
        )


def chunk(a, b, c, i, j, half, panels):
    """One chunk of the product: one tile, or two by two of them, each a sum of panels."""
    rows, columns = slice(i * half, (i + 1) * half), slice(j * half, (j + 1) * half)
    if panels == 1:
        left, right = [Operand(a[rows], key=("a", i))], [Operand(b[:, columns], key=("b", j))]
        return Contraction(left, right, [Tile(c[rows, columns], ((0, 0),))])
    quarter, depth = half // 2, a.shape[1] // panels
    left, right, tiles = [], [], []
    for t in range(2):
        for l in range(panels):
            ks = slice(l * depth, (l + 1) * depth)
            at = slice((2 * i + t) * quarter, (2 * i + t + 1) * quarter)
            left.append(Operand(np.ascontiguousarray(a[at, ks]), key=("a", i, t, l)))
            at = slice((2 * j + t) * quarter, (2 * j + t + 1) * quarter)
            right.append(Operand(np.ascontiguousarray(b[ks, at]), key=("b", j, t, l)))
    for p in range(2):
        for q in range(2):
            terms = tuple((p * panels + l, q * panels + l) for l in range(panels))
            block = c[rows, columns][p * quarter : (p + 1) * quarter, q * quarter : (q + 1) * quarter]
            tiles.append(Tile(np.ascontiguousarray(block), terms))
    return Contraction(left, right, tiles)


def main_job(n, rng):
    a, b = (rng.standard_normal((n, n), np.float32) for _ in range(2))
    c = np.empty((n, n), np.float32)
    whole = seconds(lambda: np.matmul(a, b, out=c), 1)
    for panels, name in ((1, "one tile"), (8, "2 × 2 tiles of 8 panels")):
        chunks = [chunk(a, b, c, i, j, n // 2, panels) for i in range(2) for j in range(2)]

        def check(chunks=chunks):
            statistics = OperandStatistics()
            for each in chunks:
                accepted(check_product(each, np.random.default_rng(), statistics))

        cost = seconds(check)
        tracemalloc.start()
        check()
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        print(
            f"{n}² in four chunks, each {name}: checks {cost:.3f} s of {whole:.3f} s, {cost / whole:.1%}; "
            f"peak of own memory {peak / 1e6:.0f} MB"
        )


if __name__ == "__main__":
    sizes = [int(word) for word in sys.argv[1:]] or [2048, 4096, 8192]
    with threadpool_limits(1):
        generator = np.random.default_rng(0)
        for size in sizes:
            product((size, size, size), generator)
        product(THIN, generator)
        main_job(max(sizes), generator)

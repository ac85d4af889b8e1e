"""What the product check costs beside the product: ``python benchmarks/verification.py [size …]``.

Everything on one thread, in one process. For each size n: NumPy's float32 product of n × n matrices, the projections
alone, and both layers, as shares of the product's time. Then the main job's four chunks of an 8192 × 8192 product, with
the statistics of operands kept between chunks, each chunk one tile or two by two tiles of eight panels; and the peak of
the check's own memory.
"""

from __future__ import annotations

import sys
import time
import tracemalloc

import numpy as np
from threadpoolctl import threadpool_limits

from goblin_dask.verify.contraction import Contraction, Tile
from goblin_dask.verify.operands import Operand, OperandStatistics
from goblin_dask.verify.product import check_product

REPEATS = 3


def seconds(function, repeats=REPEATS):
    """Least CPU time of some runs."""
    best = float("inf")
    for _ in range(repeats):
        start = time.process_time()
        function()
        best = min(best, time.process_time() - start)
    return best


def accepted(finding):
    assert finding.verdict == "accepted", finding


def square(n, rng):
    a, b = (rng.standard_normal((n, n), np.float32) for _ in range(2))
    out = np.empty((n, n), np.float32)
    whole = seconds(lambda: np.matmul(a, b, out=out), 1 if n > 4096 else REPEATS)
    contraction = Contraction([Operand(a)], [Operand(b)], [Tile(out, ((0, 0),))])
    costs = [
        seconds(lambda layers=layers: accepted(check_product(contraction, np.random.default_rng(), layers=layers)))
        for layers in (1, 2)
    ]
    shares = ", ".join(
        f"{name} {cost / whole:.1%}" for name, cost in zip(("projections", "both layers"), costs, strict=True)
    )
    print(f"n = {n}: product {whole:.3f} s ({2 * n**3 / whole / 1e9:.0f} GFLOP/s), {shares}")


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
            square(size, generator)
        main_job(max(sizes), generator)

"""How small an error the product check finds: ``python -m benchmarks.detection [tries [size ...]]``.

Of normal data, products with 2048 columns and a contraction of each size k are corrupted in several ways and sizes, and
checked as volunteers' results are. Printed is the share of refused results (any verdict but *accepted*) and, for each
way, the smallest size from which on 99 of 100 are refused; all is drawn to ``docs/detection.svg``. One thread; about
half an hour with 100 tries of k = 512, 2048 and 8192.

Sizes are relative to the root mean square of the right product. Operands and the right product are kept between the
tries, which draw where the error is, what it is, and the check's own random numbers.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np
from threadpoolctl import threadpool_limits

from goblin_dask.verify.contraction import Contraction, Tile
from goblin_dask.verify.operands import Operand, OperandStatistics
from goblin_dask.verify.product import check_product
from goblin_dask.verify.rows import tf32

COLUMNS = 2048
STEPS = 8
"""Sizes in a decade."""
SURE, HOPELESS = 0.99, 0.05
"""Shares at which larger sizes, and smaller ones, need not be tried."""
FIRST, CLOSE = 30, 0.9
"""Tries after which no more are made of a size of which a smaller share was refused."""
MOST = 2048
"""Rows of a product; of long sums fewer, as many as make a left operand of `MOST` × `MOST`."""
DRAWING = Path(__file__).parent.parent / "docs" / "detection.svg"

Corruption = Callable[[np.ndarray, float, np.random.Generator], None]
"""Changes a product in place: product, size in its own unit, generator."""


def one_entry(c, size, rng):
    c[rng.integers(c.shape[0]), rng.integers(c.shape[1])] += size * rng.choice([-1, 1])


def pair(c, size, rng):
    """Equal and opposite errors in neighbouring entries."""
    i, j = rng.integers(c.shape[0]), rng.integers(c.shape[1] - 1)
    c[i, j : j + 2] += np.array([size, -size], c.dtype)


def tile(c, size, rng):
    """Normal noise in 32 × 32 entries."""
    i, j = (rng.integers(n - 31) for n in c.shape)
    c[i : i + 32, j : j + 32] += (size * rng.standard_normal((32, 32))).astype(c.dtype)


def some_rows(c, size, rng):
    """5 % of the rows times 1 + size."""
    rows = rng.choice(c.shape[0], max(1, c.shape[0] // 20), replace=False)
    c[rows] *= 1 + size / unit(c)


def all_rows(c, size, rng):
    """The whole product times 1 + size."""
    c *= c.dtype.type(1 + size / unit(c))


def rank_one(c, size, rng):
    """The product of two normal vectors."""
    u, v = (rng.standard_normal(n).astype(c.dtype) for n in c.shape)
    c += np.multiply.outer(u * c.dtype.type(size), v)


def unit(c):
    return np.sqrt(np.mean(np.square(c[:256], dtype=np.float64)))


@dataclass(frozen=True)
class Kind:
    """One way of being wrong."""

    corrupt: Corruption
    rows: int
    """Of the product: one entry is as visible in few rows as in many."""
    guess: dict[str, float]
    """By dtype, the size near which the search begins at k = 2048."""


SIZED = {
    "one entry": Kind(one_entry, 256, {"float32": 4e-3, "float64": 6e-11}),
    "pair ±δ": Kind(pair, 256, {"float32": 6e-3, "float64": 8e-11}),
    "32 × 32 tile": Kind(tile, 2048, {"float32": 3e-4, "float64": 5e-12}),
    "5 % of rows scaled": Kind(some_rows, 2048, {"float32": 3e-5, "float64": 3e-12}),
    "all rows scaled": Kind(all_rows, 2048, {"float32": 6e-6, "float64": 3e-12}),
    "rank-one bias": Kind(rank_one, 2048, {"float32": 6e-6, "float64": 1e-12}),
}


def half(x):
    return x.astype(np.float16).astype(x.dtype)


def brain(x):
    return x.astype(ml_dtypes.bfloat16).astype(x.dtype)


def rounded_to(function):
    return lambda a, b: function(a) @ function(b)


WHOLE = {
    "missing block of 64": lambda a, b: a[:, 64:] @ b[64:],
    "TF32 operands": rounded_to(lambda x: tf32(x.astype(np.float32)).astype(x.dtype)),
    "bfloat16 operands": rounded_to(brain),
    "float16 operands": rounded_to(half),
    "float32 operands": rounded_to(lambda x: x.astype(np.float32).astype(x.dtype)),
}

GOALS = {
    (2048, "one entry"): 9e-3,
    (2048, "32 × 32 tile"): 6e-4,
    (2048, "5 % of rows scaled"): 8e-5,
    (2048, "TF32 operands"): 1.0,
    (8192, "one entry"): 7.1e-2,
    (8192, "32 × 32 tile"): 2e-3,
    (8192, "5 % of rows scaled"): 3e-4,
    (8192, "TF32 operands"): 0.78,
}
"""What an earlier check of one layer (two projections of 1024 columns) reached in float32."""


class Bench:
    """Operands of one size and dtype, and their right product."""

    def __init__(self, k: int, dtype: str, rows: int = MOST, columns: int = COLUMNS, seed: int = 0):
        rng = np.random.default_rng(seed)
        self.a = rng.standard_normal((rows, k)).astype(dtype)
        self.b = rng.standard_normal((k, columns)).astype(dtype)
        self.c = self.a @ self.b
        self.unit = unit(self.c)
        self.statistics = OperandStatistics()

    def refused(self, output: np.ndarray, rng: np.random.Generator) -> bool:
        left, right = Operand(self.a[: len(output)], key="left"), Operand(self.b, key="right")
        found = check_product(Contraction([left], [right], [Tile(output, ((0, 0),))]), rng, self.statistics)
        return found.verdict != "accepted"

    def share(self, kind: Kind, size: float, tries: int, seed: int = 0) -> float:
        """Of results refused that are wrong by so many units."""
        count = 0
        for attempt in range(tries):
            rng = np.random.default_rng([seed, attempt])
            wrong = self.c[: kind.rows].copy()
            kind.corrupt(wrong, size * self.unit, rng)
            count += self.refused(wrong, rng)
            if attempt + 1 == FIRST and count < CLOSE * FIRST:
                return count / FIRST
        return count / tries

    def share_whole(self, compute, tries: int) -> float:
        wrong = compute(self.a, self.b)
        return sum(self.refused(wrong, np.random.default_rng(attempt)) for attempt in range(tries)) / tries

    def curve(self, kind: Kind, guess: float, tries: int) -> dict[float, float]:
        """Share refused by size, from where nearly none is to where nearly all are, twice over."""
        at, shares = round(STEPS * np.log10(guess)), {}

        def share(step):
            size = 10.0 ** (step / STEPS)
            shares[size] = self.share(kind, size, tries)
            return shares[size]

        low = at
        while share(low) > HOPELESS:
            low -= 1
        high, sure = at, 0
        while sure < 2:
            size = 10.0 ** (high / STEPS)
            sure = sure + 1 if (shares[size] if size in shares else share(high)) >= SURE else 0
            high += 1
        return dict(sorted(shares.items()))


def smallest(curve: dict[float, float]) -> float:
    """Smallest size from which on all shares are sure."""
    unsure = [size for size, share in curve.items() if share < SURE]
    return min(size for size in curve if not unsure or size > max(unsure))


def compared(k: int, dtype: str, name: str, value: float) -> str:
    goal = GOALS.get((k, name)) if dtype == "float32" else None
    return "" if goal is None else f"   goal {goal:.2g}, ratio {value / goal:.2f}"


def measure(k: int, dtype: str, tries: int) -> dict[str, dict[float, float]]:
    """All curves of one size and dtype, printed."""
    bench, curves = Bench(k, dtype, min(MOST, MOST**2 // k)), {}
    print(
        f"\n{dtype}, k = {k}, n = {COLUMNS}: smallest size refused in {SURE:.0%}, by the rms of the product", flush=True
    )
    for name, kind in SIZED.items():
        curves[name] = bench.curve(kind, kind.guess[dtype] * k / 2048, tries)
        value = smallest(curves[name])
        points = ", ".join(f"{size:.2g}: {share:.0%}" for size, share in curves[name].items())
        print(f"  {name:20} {value:.2g}{compared(k, dtype, name, value)}   [{points}]", flush=True)
    for name, compute in WHOLE.items():
        if name == f"{dtype} operands":
            continue
        share = bench.share_whole(compute, tries)
        print(f"  {name:20} {share:.0%} refused{compared(k, dtype, name, share)}", flush=True)
    return curves


def draw(curves: dict[tuple[str, int], dict[str, dict[float, float]]], path: Path) -> None:
    """One panel for each dtype and kind of corruption, one curve for each k."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "detection", "svg.fonttype": "none", "font.size": 8})
    import matplotlib.pyplot as plt
    from matplotlib.ticker import NullFormatter

    dtypes = list(dict.fromkeys(dtype for dtype, _ in curves))
    figure, axes = plt.subplots(
        len(dtypes), len(SIZED), figsize=(13, 2.3 * len(dtypes)), sharey=True, squeeze=False, layout="constrained"
    )
    for row, dtype in zip(axes, dtypes, strict=True):
        for panel, name in zip(row, SIZED, strict=True):
            for (of, k), found in curves.items():
                if of == dtype:
                    panel.semilogx(list(found[name]), list(found[name].values()), marker=".", label=f"k = {k}")
            panel.set_title(f"{name}, {dtype}")
            panel.grid(alpha=0.3)
            panel.xaxis.set_minor_formatter(NullFormatter())
        row[0].set_ylabel("share refused")
    for panel in axes[-1]:
        panel.set_xlabel("size by rms of the product")
    axes[0][1].legend(loc="lower right")
    figure.savefig(path, metadata={"Date": None, "Creator": None})


def main(words: list[str]) -> None:
    tries = int(words[0]) if words else 100
    sizes = [int(word) for word in words[1:]] or [512, 2048, 8192]
    with threadpool_limits(1):
        curves = {}
        for k, dtype in itertools.product(sizes, ("float32", "float64")):
            curves[dtype, k] = measure(k, dtype, tries)
            if not words:
                draw(curves, DRAWING)


if __name__ == "__main__":
    main(sys.argv[1:])

"""Products of integers, which wrap around as NumPy's do: checked exactly, modulo a power of two.

Where sums stay below 2**53 the projections go through float64's fast matrix product; else through uint64.
Booleans have no such check (their sum is *or*): they are recomputed, by counting in float32.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from goblin_dask.verify.contraction import Contraction, Tile
from goblin_dask.verify.operands import Array, Operand, OperandStatistics
from goblin_dask.verify.tolerances import INTEGER_PROJECTIONS

EXACT = 2**53
"""Integers below it are exact in float64."""


def _extreme(operand: Operand, statistics: OperandStatistics | None) -> int:
    """Largest magnitude."""
    name = ("extreme", operand.key) if operand.key is not None and statistics is not None else None
    if name is not None and statistics is not None and (known := statistics.get(name)) is not None:
        return int(known[0]) + int(known[1])
    values = operand.values
    found = max(int(values.max()), -int(values.min())) if values.size else 0
    if name is not None and statistics is not None:
        # 2**63 is no int64; kept in two parts
        statistics.put(name, np.array([found - found // 2, found // 2], np.int64))
    return found


def check_integers(
    contraction: Contraction, rng: np.random.Generator, statistics: OperandStatistics | None = None
) -> tuple[str, float]:
    """Check tiles of integer products.

    Returns
    -------
    reason : str
        Why a tile is wrong; empty when all are right.
    miss : float
        Bound of the probability that a wrong tile passes.
    """
    miss = 0.0
    for tile in contraction.tiles:
        bits, n = tile.output.dtype.itemsize * 8, tile.output.shape[1]
        depth = contraction.depth(tile)
        terms = [(contraction.left[i], contraction.right[j]) for i, j in tile.terms]
        most = sum(a.shape[1] * _extreme(a, statistics) * _extreme(b, statistics) for a, b in terms)
        info = np.iinfo(tile.output.dtype)
        wraps = most > info.max or (info.min == 0 and any(a.sign * b.sign < 0 for a, b in terms))
        widest = max(most, int(max(info.max, -info.min)) if wraps else most, 1)
        if not tile.output.size:
            continue
        if not depth:
            if tile.output.any():
                return "a sum of no terms is not zero", 0.0
            continue
        values = EXACT // (2 * n * widest)
        if not wraps and values >= 1 << 10:
            projections = math.ceil(INTEGER_PROJECTIONS / math.log2(values))
            x = rng.integers(0, values, (n, projections)).astype(np.float64)
            bad = _residual(tile, terms, x, np.float64) != 0
            miss += float(values) ** -projections
        elif wraps and values >= 2:
            x = rng.integers(0, values, (n, INTEGER_PROJECTIONS)).astype(np.float64)
            bad = np.mod(_residual(tile, terms, x, np.float64), 2.0**bits) != 0
            miss += 2.0**-INTEGER_PROJECTIONS
        else:
            x = rng.integers(0, 2**64, (n, INTEGER_PROJECTIONS), np.uint64)
            bad = _residual(tile, terms, x, np.uint64) << np.uint64(64 - bits) != 0
            miss += 2.0**-INTEGER_PROJECTIONS
        if bad.any():
            return f"{bad.any(axis=1).sum()} rows are wrong, the first is {np.argmax(bad.any(axis=1))}", miss
        if not wraps and tile.output.size and max(int(tile.output.max()), -int(tile.output.min())) > most:
            return f"an element exceeds {most}, which no sum does", miss
    return "", miss


def _residual(tile: Tile, terms: list[tuple[Operand, Operand]], x: Array, dtype: Any) -> Array:
    total = _times(Operand(tile.output), x, dtype)
    for a, b in terms:
        part = _times(a, _times(b, x, dtype), dtype)
        total = total - part if a.sign * b.sign > 0 else total + part
    return total


def _times(operand: Operand, x: Array, dtype: Any) -> Array:
    out = np.zeros((operand.shape[0], x.shape[1]), dtype)
    for rows, columns in operand:
        out[rows] += operand.values[rows, columns].astype(dtype) @ x[columns]
    return out


def count_booleans(contraction: Contraction, tile: Tile) -> Array:
    """The right result of a tile of boolean products: *or* over the terms of *and*; exact at every depth."""
    found = np.zeros(tile.output.shape, bool)
    for i, j in tile.terms:
        a, b = contraction.left[i].values, contraction.right[j].values
        for start in range(0, a.shape[1], 4096):
            part = slice(start, start + 4096)
            found |= (a[:, part].astype(np.float32) @ b[part].astype(np.float32)) > 0
    return found

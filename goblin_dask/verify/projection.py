"""First layer of the product check: random projection of column blocks, decided in float64.

With ``x`` drawn afresh from the operating system's entropy after the result was committed, ``C x`` must equal
``A (B x)`` up to what honest rounding explains. Every row of every column block gives one number for each projection.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from goblin_dask.verify.contraction import QUARTERS, Columns, Contraction, Tile, split_columns
from goblin_dask.verify.norms import SAFE, BlockSquares, add_squares, is_safe, keep_squares
from goblin_dask.verify.operands import Array, Operand, OperandStatistics, Scratch
from goblin_dask.verify.tolerances import (
    ACCEPT,
    ACCEPT_DOUBLE,
    CLEAR,
    LONG,
    PROJECTIONS,
    PROLOGUE,
    gamma,
    largest,
    smallest_normal,
)

FEW = 40
"""Bytes of one element of each vector, up to which a block is multiplied with one after the other."""

PART = 128
"""Terms that the float32 projection of a left operand sums before it adds in float64."""


@dataclass
class TileResiduals:
    """What the projections of one tile say."""

    residual: Array
    """Largest over the projections, for each block and row, over its tolerance: at most 1 is accepted."""
    unusable: Array
    """Rows in which a left operand is not finite (or so large that sums may overflow)."""
    overflow: bool
    """Whether some order of summation might exceed the largest number."""
    smallest: float
    """Smallest single wrong entry that always shows, in 99 of 100 rows and columns."""

    @property
    def clear(self) -> bool:
        """Whether the residuals are so small that projecting in float32 was enough."""
        return bool(np.all(np.delete(self.residual, self.unusable, axis=1) <= CLEAR))


def times(block: Array, vectors: Array) -> Array:
    """Product of a block in cache with each of some vectors, one row for each vector.

    A product of matrices copies the block first; one with each of a few vectors does not, and is faster.
    """
    if len(vectors) * vectors.itemsize > FEW:
        return np.asarray(vectors @ block.T)
    return np.asarray((block @ vectors[:, :, None])[..., 0])


def times_in_parts(block: Array, vectors: Array) -> Array:
    """The same of float32 in float64, where only parts of the sums are taken in float32."""
    whole = block.shape[1] // PART * PART
    found = times(block[:, whole:], vectors[:, whole:]).astype(np.float64)
    if whole:
        parts = split_columns(block[:, :whole], whole // PART)
        x = split_columns(vectors[:, :whole], whole // PART)
        if len(vectors) * vectors.itemsize > FEW:
            found += (x @ parts.swapaxes(1, 2)).sum(axis=0, dtype=np.float64)
        else:
            found += (parts[:, None] @ x[..., None])[..., 0].sum(axis=0, dtype=np.float64)
    return found


def add_projections(total: Array, block: Array, group: Columns, columns: slice) -> None:
    """Add ``block x`` for some columns of a group to `total`, of shape (blocks, parts, projections, rows)."""
    for run in group.runs(columns):
        x = run.single if block.dtype == np.float32 else run.x
        parts = len(x) // len(run.x)
        found = (run.split(block, len(x))[:, None] @ x)[..., 0]
        total[run.blocks, :parts] += found.reshape(len(run.x), parts, *found.shape[1:])


def _block(operand: Operand, rows: slice, columns: slice, group: Columns, scratch: Scratch, single: bool) -> Array:
    """A block of an operand, in float32 as it is, or in float64 without the bad columns."""
    if single:
        return operand.plain(rows, columns, scratch)
    block = operand.exact(rows, columns, scratch)
    group.clear(block, columns)
    return block


def project(
    operand: Operand, group: Columns, scratch: Scratch, single: bool, squares: BlockSquares | None = None
) -> Array:
    """``C x`` for an output or a right operand, of shape (blocks, projections, rows), in float32 or float64.

    In float32 it errs by a few roundings of the norm of a row's block: of the tolerance of a sum of k terms, that is of
    the order of 1/k where the terms are alike in size and not in sign, and of 1/sqrt(k) where they are all alike.
    """
    projected = np.zeros((len(group.blocks), QUARTERS, PROJECTIONS, operand.shape[0]))
    for rows, columns in operand:
        block = _block(operand, rows, columns, group, scratch, single)
        add_projections(projected[..., rows], block, group, columns)
        if squares is not None:
            squares.add(rows, columns, block)
    return np.asarray(projected.sum(axis=1))


@dataclass
class RightSide:
    """Projections of one right operand, for one group: a column for each row of the operand."""

    projected: Array
    """``B x``, of shape (blocks, projections, rows)."""
    weights: Array
    """Block norms, which the magnitudes of A are multiplied with to get the tolerance."""
    norms: Array
    """Squares of the block norms (only with a prologue; else empty)."""
    uncertain: Array
    """Squares of the block norms of the operand's uncertainty (only with a prologue; else empty)."""
    sample: Array
    """The operand's sampled columns, in float32 (only where the products are)."""
    confirmed: bool
    """Whether its columns' norms are about what was estimated, if they were."""


def project_right(
    j: int,
    group: Columns,
    contraction: Contraction,
    chosen: Array,
    exact: Array,
    scratch: Scratch,
    statistics: OperandStatistics | None,
) -> RightSide:
    """Read a right operand once: project it, and multiply the chosen rows of the left operands with it.

    Parameters
    ----------
    chosen : float64 array, shape (rows, depth of the operand)
        Rows of left operands.
    exact : float64 array, shape (rows, columns)
        Where the products of those rows are added.
    """
    operand, blocks = contraction.right[j], len(group.blocks)
    depth = operand.shape[0]
    single = group.single and operand.single
    projected = np.zeros((blocks, QUARTERS, PROJECTIONS, depth))
    name = ("norms", operand.key, hash(group.scale.tobytes()))
    kept = None if operand.key is None or group.bad.size else statistics
    known: Array | None = None if kept is None else kept.get(name)
    estimate = group.estimates.get(j)
    squares = BlockSquares(operand, group, scratch, estimate is not None)
    uncertain = np.zeros((blocks, depth)) if contraction.prologue else np.empty(0)
    sample = np.empty((depth, len(group.sampled)), np.float32)
    for rows, columns in operand:
        block = _block(operand, rows, columns, group, scratch, single)
        if len(chosen):
            exact[:, columns] += chosen[:, rows] @ (operand.exact(rows, columns, scratch) if single else block)
            a, b = np.searchsorted(group.sampled, (columns.start, columns.stop))
            sample[rows, a:b] = block[:, group.sampled[a:b] - columns.start]
        add_projections(projected[..., rows], block, group, columns)
        if known is None or estimate is not None:
            squares.add(rows, columns, block)
        if operand.coarse is not None:
            deviation = operand.deviation(rows, columns) / group.scale[columns]
            group.clear(deviation, columns)
            add_squares(uncertain[:, rows], deviation, group, columns)
    confirmed = estimate is None or squares.confirm(estimate)
    if estimate is not None and confirmed:
        keep_squares(operand, estimate, statistics)
    if known is None:
        known = squares.found()
        if kept is not None:
            kept.put(name, known)
    projected = projected.sum(axis=1)
    if single and not is_safe(known[known > 0]):
        projected = project(operand, group, scratch, single=False)
    norms = known if contraction.prologue else np.empty(0)
    return RightSide(projected, np.sqrt(known), norms, uncertain, sample, confirmed)


@dataclass
class _Sums:
    """Accumulated over the terms of one tile: a column for each row of the tile."""

    projected: Array
    weights: Array
    magnitude: Array
    uncertain: Array


def project_left(
    contraction: Contraction, groups: list[Columns], sides: dict[tuple[int, int], RightSide], scratch: Scratch
) -> list[_Sums]:
    """Read each left operand once, and multiply it with the projections of all right operands that it meets."""
    group_of = {tile: g for g, group in enumerate(groups) for tile in group.tiles}
    sums: list[_Sums] = []
    prologue = contraction.prologue
    for number, tile in enumerate(contraction.tiles):
        side, m = sides[group_of[number], tile.terms[0][1]], tile.output.shape[0]
        uncertain = np.zeros((len(side.norms), m)) if prologue else np.empty(0)
        sums.append(
            _Sums(
                np.zeros((side.projected.shape[0] * PROJECTIONS, m)),
                np.zeros((len(side.weights), m)),
                np.zeros(m),
                uncertain,
            )
        )
    for i, operand in enumerate(contraction.left):
        uses = [(t, sides[group_of[t], b]) for t, tile in enumerate(contraction.tiles) for a, b in tile.terms if a == i]
        if not uses:
            continue
        projected = np.vstack([side.projected.reshape(len(side.projected) * PROJECTIONS, -1) for _, side in uses])
        weights = np.vstack([side.weights for _, side in uses])
        least = weights[weights > 0].min(initial=1.0)
        fast = operand.values.dtype == np.float32 and least > SAFE[0] and weights.max(initial=0.0) < SAFE[1]
        single = fast and operand.single and all(groups[group_of[t]].single for t, _ in uses)
        if not single:
            weights = np.vstack([weights, np.ones(operand.shape[1])])
        weights = weights.astype(np.float32) if fast else weights
        singles = projected.astype(np.float32) if single else np.empty((0, 0))
        z = np.zeros((len(projected), operand.shape[0]))
        w = np.zeros((len(weights), operand.shape[0]))
        for rows, columns in operand:
            if single:
                z[:, rows] += times_in_parts(operand.plain(rows, columns, scratch), singles[:, columns])
            else:
                block = operand.exact(rows, columns, scratch)
                z[:, rows] += times(block, projected[:, columns])
            size = operand.magnitudes(rows, columns, scratch) if fast else np.abs(block, out=block)
            w[:, rows] += times(size, weights[:, columns])
            if prologue:
                # Where errors are alike along a row (a mean's), this is too little: such rows are settled.
                deviation = operand.deviation(rows, columns) ** 2
                squares = operand.exact(rows, columns, scratch) ** 2 + PROLOGUE**2 * deviation
                for t, side in uses:
                    sums[t].uncertain[:, rows] += side.norms[:, columns] @ deviation.T
                    sums[t].uncertain[:, rows] += side.uncertain[:, columns] @ squares.T
        p = q = 0
        for t, side in uses:
            sums[t].projected += z[p : (p := p + len(side.projected) * PROJECTIONS)]
            sums[t].weights += w[q : (q := q + len(side.weights))]
            # where every weight counts, the sum of the magnitudes is at most that of the weighted ones over the least
            sums[t].magnitude += w.max(axis=0) / least if single else w[-1]
    return sums


def compare(
    tile: Tile, group: Columns, contraction: Contraction, sums: _Sums, sides: list[RightSide], scratch: Scratch
) -> TileResiduals:
    """Compare the two sides of a tile's projections."""
    depth, u, out = contraction.depth(tile), contraction.roundoff, contraction.output_roundoff(tile)
    tiny, blocks = smallest_normal(contraction.precision), group.blocks
    output = Operand(tile.output)
    if group.single and not is_safe(sums.weights[sums.weights > 0] ** 2):
        return TileResiduals(np.full((len(blocks), tile.output.shape[0]), np.inf), np.empty(0, int), False, 0.0)
    # Of the rounded output at most 2/sqrt(depth) of the sum's own tolerance: not worth a pass where that is little.
    squares = BlockSquares(output, group, scratch) if depth < LONG or out > u else None
    single = group.single and output.single
    projected = project(output, group, scratch, single, squares)
    norms = 0.0 if squares is None else np.sqrt(squares.found())
    residual = np.abs(projected - sums.projected.reshape(projected.shape)).max(axis=1)
    inverse = np.sqrt([[np.sum(group.scale[b] ** -2.0)] for b in blocks])
    floor = (depth * tiny + contraction.output_floor(tile) + tiny * sums.magnitude) * inverse
    floor += tiny * sum(np.sum(side.weights, axis=1, keepdims=True) for side in sides)
    uncertain = PROLOGUE * np.sqrt(sums.uncertain) if contraction.prologue else 0.0
    double = contraction.precision == np.float64
    rounding = np.sqrt(depth) * u * sums.weights + 2 * out * norms
    limit = (ACCEPT_DOUBLE if double else ACCEPT) * rounding + 2 * floor + uncertain
    most = np.array([[group.scale[b].max(initial=0.0)] for b in blocks])
    usable = np.isfinite(sums.magnitude) & np.isfinite(sums.weights).all(axis=0)
    top = largest(contraction.precision) / 4
    overflow = bool(np.any(usable & (sums.weights * most >= top)))
    with np.errstate(invalid="ignore", divide="ignore"):
        ratio = residual / limit
    # 0/0 is an exact agreement of zeros; every other NaN stays one, and is no acceptance.
    ratio[(residual == 0) & (limit == 0)] = 0.0
    ratio[~np.isfinite(limit)] = np.nan  # nothing is small beside infinity
    smallest = 0.0
    if usable.any() and group.width:
        # A wrong entry of size e moves the residual by at least e/2 over its column's scale. In float64, settling
        # excuses as much as any order of summation makes of it.
        if double:
            excused = 2 * gamma(depth + 1, u) / np.sqrt([[b.stop - b.start] for b in blocks])
            limit = np.maximum(limit, excused * sums.weights)
        smallest = 2 * max(
            _typical(row[usable]) * _typical(group.scale[b]) for row, b in zip(limit, blocks, strict=True)
        )
    return TileResiduals(ratio, np.flatnonzero(~usable), overflow, smallest)


def _typical(values: Array) -> float:
    """What 99 of 100 values do not exceed."""
    place = -(-99 * (len(values) - 1) // 100)
    return float(np.partition(values, place)[place])

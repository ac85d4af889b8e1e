"""Check of a chunk that ends in sums of products: projection, exact rows, and the settling of what looks suspicious.

Three verdicts: *accepted*, *wrong* (an element is off by more than any order of summation explains) and *unproven*.
Every comparison accepts what is small, never rejects what is large: so a NaN is not accepted.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from goblin_dask.verify.contraction import Columns, Contraction, Tile, group_columns
from goblin_dask.verify.nonfinite import NonFinite, check_classes
from goblin_dask.verify.norms import prepare
from goblin_dask.verify.operands import Array, OperandStatistics, Scratch
from goblin_dask.verify.projection import (
    RightSide,
    TileResiduals,
    compare,
    project,
    project_left,
    project_right,
)
from goblin_dask.verify.rows import (
    SAMPLED_COLUMNS,
    Sample,
    Spread,
    exact_rows,
    low_precision,
    rms,
    sample_columns,
    take_sample,
)
from goblin_dask.verify.sigma import LARGEST, RMS
from goblin_dask.verify.tolerances import MISS, ROWS, SETTLE_ALL, SETTLED_ROWS, SPREAD, smallest_normal

RECOMPUTED_ROWS = 256
"""Rows that are computed exactly at a time when many are."""


@dataclass
class Finding:
    """What a check of one chunk found."""

    verdict: Literal["accepted", "wrong", "unproven"]
    ratio: float
    """Worst residual over its tolerance; at most 1 when everything was accepted at first sight or settled."""
    settled: int = 0
    reason: str = ""
    miss: float = MISS
    thresholds: tuple[float, ...] = ()
    """For each tile, the smallest single wrong entry that the projections always show (of the typical row)."""


def worse(a: Finding, b: Finding) -> Finding:
    """Two findings on parts of a result as one: the worse verdict, the larger ratio and miss. NaN is large."""
    rank = ("accepted", "unproven", "wrong")
    worst = b if rank.index(b.verdict) > rank.index(a.verdict) else a
    ratio = a.ratio if not b.ratio > a.ratio and b.ratio == b.ratio else b.ratio
    return replace(worst, ratio=ratio, settled=a.settled + b.settled, miss=max(a.miss, b.miss))


class _Judge:
    """Collects what the parts of a check find, the worst verdict counting."""

    def __init__(self) -> None:
        self.finding = Finding("accepted", 0.0)

    def found(self, verdict: Literal["accepted", "wrong", "unproven"], reason: str) -> None:
        rank = ("accepted", "unproven", "wrong")
        if rank.index(verdict) > rank.index(self.finding.verdict):
            self.finding.verdict, self.finding.reason = verdict, reason

    def ratio(self, value: float) -> None:
        # max() would forget a NaN
        self.finding.ratio = value if not value <= self.finding.ratio else self.finding.ratio


def check_product(
    contraction: Contraction,
    rng: np.random.Generator,
    statistics: OperandStatistics | None = None,
    layers: int = 2,
    every_row: bool = False,
) -> Finding:
    """Check tiles of sums of products.

    Parameters
    ----------
    rng : numpy.random.Generator
        Seeded from the operating system's entropy after the result was committed, and used for this check only.
    statistics : OperandStatistics, optional
        Kept between checks.
    layers : 1 or 2
        1 leaves out the exact rows (measurements only).
    every_row : bool
        Compute every row exactly, as if it were suspicious.
    """
    with np.errstate(all="ignore"):
        return _Check(contraction, rng, statistics, every_row).run(layers)


@dataclass
class _Chosen:
    """Random rows of a tile."""

    rows: Array
    exact: Array
    """Their right values."""
    spread: Spread | None
    """What deliberate orders of summation do to them, and to those of the tiles in the same columns."""
    place: int
    """Where they begin among those."""


class _Check:
    def __init__(
        self,
        contraction: Contraction,
        rng: np.random.Generator,
        statistics: OperandStatistics | None,
        every_row: bool,
    ):
        self.contraction, self.rng, self.statistics, self.every_row = contraction, rng, statistics, every_row
        self.scratch, self.judge, self.groups = Scratch(), _Judge(), group_columns(contraction)

    def run(self, layers: int) -> Finding:
        contraction = self.contraction
        single = contraction.precision == np.float32
        rows = self._choose_rows(ROWS if single and layers == 2 else 0)
        sides: dict[tuple[int, int], RightSide] = {}
        exact = [np.zeros((len(rows[t]), tile.output.shape[1])) for t, tile in enumerate(contraction.tiles)]
        for g, group in enumerate(self.groups):
            if not self._read_right(g, group, rows, exact, sides, estimate=True):
                self._read_right(g, group, rows, exact, sides, estimate=False)
        residuals = self._project(sides)
        if self._repeat_in_double(residuals, sides):
            residuals = self._project(sides)
        thresholds = [0.0] * len(contraction.tiles)
        for g, group in enumerate(self.groups):
            spread, place = self._sample_group(g, group, rows, exact, sides), 0
            for t in group.tiles:
                thresholds[t] = residuals[t].smallest
                chosen = _Chosen(rows[t], exact[t], spread, place)
                self._judge_tile(contraction.tiles[t], group, residuals[t], chosen)
                place += len(rows[t])
        self.judge.finding.thresholds = tuple(thresholds)
        return self.judge.finding

    def _choose_rows(self, count: int) -> list[Array]:
        """Random rows of every tile: eight for a column of tiles, at least four for each of them."""
        chosen = [np.empty(0, int)] * len(self.contraction.tiles)
        for group in self.groups:
            each = max(4, count // len(group.tiles)) if count else 0
            for t in group.tiles:
                height = self.contraction.tiles[t].output.shape[0]
                chosen[t] = np.sort(self.rng.choice(height, min(each, height), replace=False))
        return chosen

    def _read_right(
        self,
        g: int,
        group: Columns,
        rows: list[Array],
        exact: list[Array],
        sides: dict[tuple[int, int], RightSide],
        estimate: bool,
    ) -> bool:
        """Read the right operands of a group; whether the columns' norms were as estimated."""
        prepare(group, self.contraction, self.rng, self.scratch, self.statistics, estimate)
        for t in group.tiles:
            exact[t][:] = 0.0
        if any(len(rows[t]) for t in group.tiles):
            depth = self.contraction.depth(self.contraction.tiles[group.tiles[0]])
            group.sampled = sample_columns(group, depth, SAMPLED_COLUMNS, self.rng)
        for j in dict.fromkeys(group.right):
            uses = [(t, i) for t in group.tiles for i, b in self.contraction.tiles[t].terms if b == j]
            chosen = [self.contraction.left[i].take(rows[t], slice(None)) for t, i in uses]
            stacked = np.vstack(chosen)
            products = np.zeros((len(stacked), group.width))
            sides[g, j] = project_right(j, group, self.contraction, stacked, products, self.scratch, self.statistics)
            p = 0
            for (t, _), part in zip(uses, chosen, strict=True):
                exact[t] += products[p : (p := p + len(part))]
        return all(sides[g, j].confirmed for j in group.right)

    def _project(self, sides: dict[tuple[int, int], RightSide]) -> dict[int, TileResiduals]:
        """What the projections of each tile say."""
        contraction, scratch = self.contraction, self.scratch
        sums, found = project_left(contraction, self.groups, sides, scratch), {}
        for g, group in enumerate(self.groups):
            for t in group.tiles:
                right = [sides[g, j] for _, j in contraction.tiles[t].terms]
                found[t] = compare(contraction.tiles[t], group, contraction, sums[t], right, scratch)
        return found

    def _repeat_in_double(self, found: dict[int, TileResiduals], sides: dict[tuple[int, int], RightSide]) -> bool:
        """Project right operands in float64 where what was projected in float32 is not clearly small."""
        again = False
        for g, group in enumerate(self.groups):
            if group.single and not all(found[t].clear for t in group.tiles):
                group.single, again = False, True
                for j in dict.fromkeys(group.right):
                    sides[g, j].projected = project(self.contraction.right[j], group, self.scratch, single=False)
        return again

    def _judge_tile(self, tile: Tile, group: Columns, found: TileResiduals, chosen: _Chosen) -> None:
        judge, contraction = self.judge, self.contraction
        if found.overflow:
            judge.found("unproven", "sums may exceed the largest number: the order of summation would decide")
            return
        outside = NonFinite(found.unusable, group.bad)
        if outside:
            classes = check_classes(contraction, tile, outside, self.scratch)
            if classes.overflow:
                judge.found("unproven", "sums may exceed the largest number: the order of summation would decide")
                return
            if classes.reason:
                judge.found("wrong", classes.reason)
        ratio = found.residual.max(axis=0, initial=0.0)
        ratio[found.unusable] = 0.0
        usable = np.flatnonzero(~np.isin(chosen.rows, found.unusable))
        suspicious = ~(ratio <= 1) | self.every_row
        if len(usable) and chosen.spread is not None:
            suspicious[self._look_at_rows(tile, group, chosen, chosen.spread, usable)] = True
        judge.ratio(float(np.max(ratio[~suspicious], initial=0.0)))
        if suspicious.any():
            order = np.argsort(np.where(np.isnan(ratio), np.inf, ratio))[::-1]
            self._settle(tile, group, order[suspicious[order]], ratio)

    def _sample_group(
        self, g: int, group: Columns, rows: list[Array], exact: list[Array], sides: dict[tuple[int, int], RightSide]
    ) -> Spread | None:
        """What deliberate orders do to the chosen rows of a column of tiles, in the sampled columns."""
        contraction, whole = self.contraction, slice(None)
        if not len(group.sampled):
            return None
        tiles = [contraction.tiles[t] for t in group.tiles]
        left = [
            np.hstack([contraction.left[i].take(rows[t], whole, exact=False) for i, _ in tile.terms])
            for t, tile in zip(group.tiles, tiles, strict=True)
        ]
        if contraction.prologue:
            right = [contraction.right[j].take(whole, group.sampled, exact=False) for j in group.right]
        else:
            right = [sides[g, j].sample for j in group.right]
        sums = np.vstack([exact[t][:, group.sampled] for t in group.tiles])
        sample = Sample(np.vstack(left), np.vstack(right), sums, group.scale[group.sampled])
        return self._spread(tiles[0], group, sample, np.vstack([exact[t] for t in group.tiles]))

    def _look_at_rows(self, tile: Tile, group: Columns, chosen: _Chosen, spread: Spread, usable: Array) -> Array:
        """Compare some exact rows; returns those that want settling."""
        rows = chosen.rows[usable]
        error = (tile.output[rows].astype(np.float64) - chosen.exact[usable]) / group.scale
        error[:, group.bad] = 0.0
        size, sampled, places = rms(error), error[:, group.sampled], chosen.place + usable
        # Further orders would only excuse more: none is tried where these excuse the error already.
        excused = spread.at_least(np.maximum(size / SPREAD, rms(sampled)), places)
        if name := low_precision(spread.sample, places, sampled, excused):
            self.judge.found("unproven", f"computed with operands rounded to {name}")
        return np.asarray(rows[~(size <= SPREAD * excused)])

    def _spread(self, tile: Tile, group: Columns, sample: Sample, exact: Array) -> Spread:
        tiny = max(smallest_normal(self.contraction.precision), self.contraction.output_floor(tile))
        size = rms(np.delete(exact / group.scale, group.bad, axis=1))
        return Spread(sample, size, tile.output.dtype, tiny, self.rng)

    def _settle(self, tile: Tile, group: Columns, rows: Array, ratio: Array) -> None:
        """Compute suspicious rows exactly, the worst first; all of them only where the worst prove honest."""
        first, others = rows[:SETTLED_ROWS], rows[SETTLED_ROWS:]
        if not self._settle_rows(tile, group, first) or not len(others):
            return
        if not ratio[others].max() <= SETTLE_ALL and not self.contraction.prologue:
            self.judge.found("unproven", f"{len(rows)} suspicious rows, the worst of {np.max(ratio[rows]):.3g}")
            return
        for start in range(0, len(others), RECOMPUTED_ROWS):
            if not self._settle_rows(tile, group, others[start : start + RECOMPUTED_ROWS]):
                return

    def _settle_rows(self, tile: Tile, group: Columns, rows: Array) -> bool:
        judge, contraction = self.judge, self.contraction
        found = exact_rows(contraction, tile, rows, self.scratch)
        found.error[:, group.bad] = 0.0
        judge.finding.settled += len(rows)
        found.tight[:, group.bad] = 0.0
        over = np.abs(found.error) / (found.summing + found.hard)
        over[found.error == 0] = 0.0
        if not over.max(initial=0.0) <= 1:
            at = np.unravel_index(np.argmax(np.where(np.isnan(over), np.inf, over)), over.shape)
            judge.ratio(float(over[at]))
            judge.found("wrong", f"row {rows[at[0]]}, column {at[1]}: {over[at]:.3g} times the largest honest error")
            return False
        if not np.isfinite(found.tight).all():
            judge.found("unproven", "nothing bounds the rounding of what is multiplied")
            return False
        if contraction.precision == np.float64:
            # The rounding of sums may reach its bound; that of a prologue should be what is expected of it.
            over = np.abs(found.error) / (found.summing + found.tight)
            over[found.error == 0] = 0.0
            judge.ratio(float(over.max(initial=0.0)))
            if not over.max(initial=0.0) <= 1:
                judge.found("unproven", f"an error is {over.max():.3g} times what rounding explains")
            return bool(over.max(initial=0.0) <= 1)
        columns = sample_columns(group, contraction.depth(tile), 4 * SAMPLED_COLUMNS, self.rng)
        error, tight = found.error / group.scale, found.tight / group.scale
        size, allowed = (np.sqrt(np.mean(part**2, axis=1)) for part in (error, tight))
        for start in range(0, len(rows), ROWS):
            part = slice(start, start + ROWS)
            sample = take_sample(contraction, tile, group, rows[part], columns)
            exact = tile.output[rows[part]].astype(np.float64) - found.error[part]
            explained = SPREAD * self._spread(tile, group, sample, exact).at_least(np.inf)
            over = size[part] / (explained + allowed[part])
            if contraction.prologue:
                largest = np.abs(error[part]) / (LARGEST / RMS * explained[:, None] + tight[part])
                over = np.maximum(over, largest.max(axis=1, initial=0.0))
            judge.ratio(float(over.max()))
            if not over.max() <= 1:
                row = rows[part][np.argmax(over)]
                judge.found("unproven", f"the error of row {row} is {over.max():.3g} times what rounding explains")
                return False
        return True

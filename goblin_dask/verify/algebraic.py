"""From a program that ends in sums of products, and its arrays, to the checks of products."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from goblin_dask.graphs.program import Program
from goblin_dask.graphs.schedule import schedule
from goblin_dask.verify.contraction import Contraction, Tile
from goblin_dask.verify.decompose import Labels, Matrices, moves_only
from goblin_dask.verify.evaluate import AS_IS, DOUBLE, SINGLE, Source, evaluate, load, needed
from goblin_dask.verify.integers import check_integers, count_booleans
from goblin_dask.verify.operands import Array, Operand, OperandStatistics
from goblin_dask.verify.product import Finding, check_product, worse
from goblin_dask.verify.prologue import Rounding, overflows
from goblin_dask.verify.recompute import check_by_recomputation
from goblin_dask.verify.sigma import DOUBLE as DOUBLE_WEIGHT
from goblin_dask.verify.tolerances import is_floating

Value = tuple[Array, Array | None, Array | None]
"""An operand as multiplied, in double precision, and in single precision; None where that is the same."""


def values_of(program: Program, inputs: Sequence[Source], wanted: Sequence[int]) -> dict[int, Value]:
    """Operands of the products: inputs as they are, what a prologue computes in two precisions."""
    plan, count = schedule(program), len(program.inputs)
    found: dict[int, Value] = {v: (load(inputs[v]), None, None) for v in wanted if v < count}
    moved = [v for v in wanted if v >= count and moves_only(plan, needed(program, [v]))]
    computed = [v for v in wanted if v >= count and v not in moved]
    loaded = [found[v][0] if v in found else source for v, source in enumerate(inputs)]
    for value, array in zip(moved, evaluate(program, loaded, moved), strict=True):
        found[value] = (array, None, None)
    floating = [v for v in computed if plan.specs[v].dtype[0] in "bfc" and plan.specs[v].dtype != "bool"]
    fine = dict(zip(floating, evaluate(program, loaded, floating, DOUBLE), strict=True))
    double = any(plan.specs[v].dtype in SINGLE for v in floating)
    coarse = dict(zip(floating, evaluate(program, loaded, floating, SINGLE), strict=True)) if double else {}
    for value, array in zip(computed, evaluate(program, loaded, computed, AS_IS), strict=True):
        is_double = plan.specs[value].dtype in SINGLE
        found[value] = (array, fine.get(value), coarse.get(value) if is_double else array if value in fine else None)
    return found


def matrix(array: Array, axes: Labels, batch: Labels, rows: Labels, columns: Labels) -> Array:
    """An array as (batch, rows, columns); a view where its memory allows it."""
    order = [axes.index(label) for group in (batch, rows, columns) for label in group]
    rest = [i for i in range(len(axes)) if i not in order]
    moved = array.transpose([*order, *rest])
    shape = moved.shape
    a, b = len(batch), len(batch) + len(rows)
    return moved.reshape(math.prod(shape[:a]), math.prod(shape[a:b]), math.prod(shape[b:]))


class _Side:
    """Operands on one side of the products, each once."""

    def __init__(self) -> None:
        self.operands: list[Operand] = []
        self.positions: dict[Any, int] = {}


class _Assembly:
    """Collects tiles, each operand once."""

    def __init__(self, values: dict[int, Value], rounding: Rounding, keys: Sequence[Hashable] | None):
        self.values, self.rounding, self.keys = values, rounding, keys
        self.left, self.right = _Side(), _Side()
        self.tiles: list[Tile] = []

    def add(self, matrices: Matrices, outputs: Sequence[Array]) -> None:
        array = outputs[matrices.output]
        for shape in matrices.views:
            array = array.reshape(shape)
        piece = matrices.piece
        box = tuple(slice(o, o + n) for o, n in zip(piece.offset, piece.shape, strict=True))
        output = matrix(array[box], piece.axes, matrices.batch, matrices.rows, matrices.columns)
        for entry in range(matrices.extent(matrices.batch)):
            if np.iscomplexobj(output):
                self._complex(matrices, output[entry], entry)
            else:
                self._real(matrices, output[entry], entry)

    def _real(self, matrices: Matrices, output: Array, entry: int) -> None:
        terms = []
        for term in matrices.piece.terms:
            depth = matrices.depth(term)
            left = self._operand(
                self.left, term.left, term.left_axes, matrices.batch, matrices.rows, depth, entry, "", term.sign
            )
            right = self._operand(
                self.right, term.right, term.right_axes, matrices.batch, depth, matrices.columns, entry
            )
            terms.append((left, right))
        self.tiles.append(Tile(output, tuple(terms)))

    def _complex(self, matrices: Matrices, output: Array, entry: int) -> None:
        """Two tiles of two real products each."""
        real, imaginary = [], []
        for term in matrices.piece.terms:
            depth = matrices.depth(term)

            def left(part: str, sign: int, term: Any = term, depth: Labels = depth) -> int:
                return self._operand(
                    self.left, term.left, term.left_axes, matrices.batch, matrices.rows, depth, entry, part, sign
                )

            def right(part: str, term: Any = term, depth: Labels = depth) -> int:
                return self._operand(
                    self.right, term.right, term.right_axes, matrices.batch, depth, matrices.columns, entry, part
                )

            real += [(left("real", term.sign), right("real")), (left("imag", -term.sign), right("imag"))]
            imaginary += [(left("real", term.sign), right("imag")), (left("imag", term.sign), right("real"))]
        self.tiles.append(Tile(output.real, tuple(real)))
        self.tiles.append(Tile(output.imag, tuple(imaginary)))

    def _operand(
        self,
        side: _Side,
        value: int,
        axes: Labels,
        batch: Labels,
        rows: Labels,
        columns: Labels,
        entry: int,
        part: str = "",
        sign: int = 1,
    ) -> int:
        order = tuple(axes.index(label) for group in (batch, rows, columns) for label in group)
        name = (value, order, entry, part, sign)
        if name not in side.positions:
            parts = [
                None
                if array is None
                else matrix(getattr(array, part) if part else array, axes, batch, rows, columns)[entry]
                for array in self.values[value]
            ]
            values, fine, coarse = parts
            assert values is not None
            key = None
            if self.keys is not None and value < len(self.keys) and self.keys[value] is not None:
                key = (self.keys[value], self.values[value][0].shape, order, entry, part)
            weight = DOUBLE_WEIGHT if values.dtype == np.float64 else 1.0
            side.positions[name] = len(side.operands)

            def bounds() -> tuple[Array, Array]:
                tight, hard = (matrix(array, axes, batch, rows, columns)[entry] for array in self.rounding[value])
                return tight, hard

            uncertain = None if coarse is None else bounds
            side.operands.append(Operand(values, fine, coarse, weight, key, sign, uncertain))
        return side.positions[name]

    def contraction(self) -> Contraction:
        return Contraction(self.left.operands, self.right.operands, self.tiles)


def check_algebraically(
    program: Program,
    found: Sequence[Matrices],
    inputs: Sequence[Source],
    outputs: Sequence[Array],
    rng: np.random.Generator,
    statistics: OperandStatistics | None = None,
    keys: Sequence[Hashable] | None = None,
    every_row: bool = False,
) -> Finding:
    """Check every output of a program that ends in sums of products.

    Parameters
    ----------
    found : sequence of Matrices
        `goblin_dask.verify.decompose.decompose` of the program.
    keys : sequence of hashable, optional
        Addresses of the inputs, for `statistics`.
    every_row : bool
        Compute every row of floating products exactly.
    """
    if any(a.dtype == np.float16 and not np.isfinite(a).all() for a in outputs):
        # A sum that is finite in float32 overflows when it is rounded to half: recomputation compares those.
        return check_by_recomputation(program, inputs, outputs)
    wanted = sorted({v for m in found for term in m.piece.terms for v in (term.left, term.right)})
    values = values_of(program, inputs, wanted)
    computed = {value: (own, fine) for value, (own, fine, _) in values.items() if fine is not None}
    if any(overflows(own, fine) for own, fine in computed.values()):
        return check_by_recomputation(program, inputs, outputs)
    rounding = Rounding(program, inputs, list(computed))
    kinds: dict[str, _Assembly] = {}
    tiles_of: dict[str, list[int]] = {}
    for matrices in found:
        name = schedule(program).specs[program.outputs[matrices.output]].dtype
        assembly = kinds.setdefault(name, _Assembly(values, rounding, keys))
        assembly.add(matrices, outputs)
        tiles_of.setdefault(name, []).extend([matrices.output] * (len(assembly.tiles) - len(tiles_of.get(name, []))))
    total = Finding("accepted", 0.0, miss=0.0, thresholds=())
    thresholds = [0.0] * len(outputs)
    for name, assembly in kinds.items():
        finding = _check_kind(assembly.contraction(), rng, statistics, every_row)
        for number, threshold in zip(tiles_of[name], finding.thresholds, strict=False):
            thresholds[number] = max(thresholds[number], threshold)
        total = worse(total, finding)
    return replace(total, thresholds=tuple(thresholds))


def _check_kind(
    contraction: Contraction, rng: np.random.Generator, statistics: OperandStatistics | None, every_row: bool
) -> Finding:
    dtype = contraction.tiles[0].output.dtype
    if is_floating(dtype):
        return check_product(contraction, rng, statistics, every_row=every_row)
    if dtype == np.bool_:
        for tile in contraction.tiles:
            if not np.array_equal(count_booleans(contraction, tile), tile.output):
                return Finding("wrong", math.inf, reason="a product of booleans differs", miss=0.0)
        return Finding("accepted", 0.0, miss=0.0)
    reason, miss = check_integers(contraction, rng, statistics)
    return Finding("wrong" if reason else "accepted", math.inf if reason else 0.0, reason=reason, miss=miss)

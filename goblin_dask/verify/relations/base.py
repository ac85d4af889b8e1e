"""What a relation is, and what they have in common."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from goblin_dask.graphs.operators.base import Attributes
from goblin_dask.graphs.operators.dtypes import DTYPES
from goblin_dask.graphs.schedule import Step
from goblin_dask.messages import ArraySpec
from goblin_dask.verify.bounds import Bounded
from goblin_dask.verify.operands import Array
from goblin_dask.verify.product import Finding
from goblin_dask.verify.tolerances import BLAME, MISS, PROJECTIONS, smallest_normal, unit_roundoff

Specs = Sequence[ArraySpec]
Check = Callable[[Attributes, Sequence[Bounded], Sequence[Array], np.random.Generator], "Finding | None"]
"""Of attributes, operands and claimed outputs; None where the relation says nothing of these data."""


@dataclass(frozen=True)
class Relation:
    """How the outputs of one operator are checked against its operands."""

    rule: str
    """Its name in the table of operators: residual, order or combination."""
    check: Check
    passes: float = 4.0
    """How often the check goes over operands and outputs: its price."""
    miss: float = MISS
    applies: Callable[[Step, Specs], bool] = lambda step, specs: True
    """Whether it is for this node and these operands; by shapes, before there are data."""

    def elements(self, step: Step, specs: Specs) -> float:
        """Elements that it goes over."""
        return self.passes * sum(math.prod(spec.shape) for spec in (*specs, *step.specs))


class Residuals:
    """Collects residuals over their tolerances; the worst counts.

    Everything is compared as ``residual <= tolerance``, which a NaN fails.
    """

    def __init__(self, miss: float = MISS) -> None:
        self.finding = Finding("accepted", 0.0, miss=miss)

    def add(self, what: str, residual: Array, tight: Array, hard: Array | None = None) -> None:
        """Compare a residual with what honest rounding leaves, and with what no rounding exceeds.

        Parameters
        ----------
        hard : array, optional
            Where no rigorous bound is known, `BLAME` times the tight one.
        """
        tight = np.broadcast_to(tight, residual.shape)
        wrong = tight * BLAME if hard is None else np.broadcast_to(np.maximum(tight, hard), residual.shape)
        with np.errstate(all="ignore"):
            ratio = np.where(residual == 0, 0.0, residual / tight)
        worst = float(np.max(ratio, initial=0.0))
        finding = self.finding
        finding.ratio = worst if not worst <= finding.ratio else finding.ratio
        if (residual <= tight).all():
            return
        proven = not (residual <= wrong).all()
        if finding.verdict == "accepted" or (proven and finding.verdict == "unproven"):
            finding.verdict = "wrong" if proven else "unproven"
            finding.reason = f"{what}: {worst:.3g} times what rounding explains"

    def require(self, holds: bool, what: str) -> None:
        """Something that holds exactly for every honest result."""
        if not holds and self.finding.verdict != "wrong":
            self.finding.verdict, self.finding.ratio, self.finding.reason = "wrong", math.inf, what


def roundoff(*arrays: Array) -> float:
    """Unit roundoff of the arithmetic that made these: that of the coarsest."""
    return max(unit_roundoff(array.dtype) for array in arrays)


def flushed(array: Array) -> float:
    """What flushing to zero may change in one element."""
    return smallest_normal(array.real.dtype)


def norm(array: Array, axis: int = -1) -> Array:
    """Euclidean norms over an axis, which stays; without overflow in float64."""
    size = np.abs(array)
    top = size.max(axis=axis, keepdims=True, initial=0.0)
    top[top == 0] = 1.0
    return np.asarray(top * np.sqrt(np.square(size / top).sum(axis=axis, keepdims=True)))


def frobenius(array: Array) -> Array:
    """Frobenius norms of matrices, as matrices of one element."""
    return norm(norm(array, -1), -2)


def powers_of_two(sizes: Array) -> Array:
    """Exact scales near some sizes; 1 for those that are zero."""
    _, exponents = np.frexp(np.where(sizes > 0, sizes, 1.0))
    return np.asarray(np.ldexp(1.0, exponents))


def vectors(rng: np.random.Generator, length: int) -> Array:
    """Random columns to project with: sign times U[1/2, 3/2], as the check of products has them."""
    x = rng.uniform(0.5, 1.5, (length, PROJECTIONS))
    return np.asarray(x * rng.choice((-1.0, 1.0), x.shape))


def wide(array: Array) -> Array:
    """In double precision."""
    return array.astype(np.complex128 if DTYPES[array.dtype.name].kind == "c" else np.float64)


def adjoint(array: Array) -> Array:
    """Conjugate transposes of matrices."""
    return np.conj(np.swapaxes(array, -1, -2))


def moved(operand: Bounded, move: Callable[[Array], Array]) -> Bounded:
    """An operand whose elements are moved; its errors go with them."""
    tight, hard = operand.errors()
    if operand.exact:
        return Bounded(move(operand.fine), move(operand.coarse))
    return Bounded(move(operand.fine), move(operand.coarse), move(tight), move(hard), operand.soft)


def finite(*arrays: Any) -> bool:
    """Whether there are numbers only."""
    return all(bool(np.isfinite(array).all()) for array in arrays)

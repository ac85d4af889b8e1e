"""Linear equations: the residual of the claimed solution, projected on random combinations of right-hand sides.

By elimination with pivoting ``(A + E) x = b`` with ``|E| <= gamma_3n |L| |U|``, in norm a small multiple of
``u ||A||_F`` unless the factors grow (Higham, chapter 9); by substitution ``|E| <= gamma_n |A|`` (chapter 8). A
solution whose residual is that small is as right as any: on an ill-conditioned matrix honest ones are far apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from goblin_dask.graphs.operators.base import Attributes
from goblin_dask.verify.bounds import TIGHT, Bounded
from goblin_dask.verify.operands import Array
from goblin_dask.verify.product import Finding
from goblin_dask.verify.relations.base import (
    Relation,
    Residuals,
    adjoint,
    finite,
    flushed,
    frobenius,
    norm,
    powers_of_two,
    roundoff,
    vectors,
    wide,
)
from goblin_dask.verify.tolerances import gamma

GROWTH = (8.0, 4.0)
"""An honest residual is at most ``(8 + 4 sqrt(n)) u ||A||_F ||x||``."""


def _residual(
    residuals: Residuals, a: Array, error: Array, x: Array, b: Array, moved: Array, u: float, rng: Any
) -> None:
    """``A x = b``, columns of x scaled alike; `error` is A's own uncertainty, `moved` that of b."""
    n, columns = a.shape[-1], x.shape[-1]
    sizes = frobenius(a) * norm(x, -2) + norm(b, -2)
    y = vectors(rng, columns) / np.swapaxes(powers_of_two(sizes), -1, -2)
    xy = x @ y
    found = norm(a @ xy - b @ y, -2)
    relative = (GROWTH[0] + GROWTH[1] * float(np.sqrt(n))) * u
    tight = relative * np.sqrt(columns) + norm(error @ (np.abs(x) @ np.abs(y)), -2) + norm(moved @ np.abs(y), -2)
    floor = n * flushed(np.empty(0, np.float32 if u > 2.0**-53 else np.float64))
    floor = floor * (1 + frobenius(a)) * np.abs(y).sum(axis=-2, keepdims=True)
    residuals.add("A x - b", found, tight + floor)


def _solve(attributes: Attributes, operands: Sequence[Bounded], outputs: Sequence[Array], rng: Any) -> Finding | None:
    (left, right), (x,) = operands, outputs
    a, b = wide(left.fine), wide(right.fine)
    if not x.size or not finite(a, b, left.errors()[0], right.errors()[0], *outputs):
        return None
    residuals, u = Residuals(), roundoff(x)
    error, moved = left.errors()[0], right.errors()[0]
    x = wide(x)
    if b.ndim == 1:
        b, x, moved = b[:, None], x[..., None], moved[:, None]
    _residual(residuals, a, error, x, b, moved, u, rng)
    return residuals.finding


def _inv(attributes: Attributes, operands: Sequence[Bounded], outputs: Sequence[Array], rng: Any) -> Finding | None:
    (operand,), (x,) = operands, outputs
    a = wide(operand.fine)
    if not x.size or not finite(a, operand.errors()[0], *outputs):
        return None
    residuals, u = Residuals(), roundoff(x)
    eye = np.broadcast_to(np.eye(a.shape[-1]), a.shape)
    _residual(residuals, a, operand.errors()[0], wide(x), eye, np.zeros(eye.shape), u, rng)
    return residuals.finding


def _triangular(
    attributes: Attributes, operands: Sequence[Bounded], outputs: Sequence[Array], rng: Any
) -> Finding | None:
    (left, right), (x,) = operands, outputs
    a, b = wide(left.fine), wide(right.fine)
    if not x.size or not finite(a, b, left.errors()[0], right.errors()[0], *outputs):
        return None
    residuals, u = Residuals(), roundoff(x)
    half = np.tril if attributes["lower"] else np.triu
    a, error, most = (half(part) for part in (a, *map(np.asarray, left.errors())))
    if attributes["unit_diagonal"]:
        np.fill_diagonal(a, 1.0)
        error, most = error - np.diag(np.diag(error)), most - np.diag(np.diag(most))
    if attributes["trans"]:
        a = a.T if attributes["trans"] == 1 else adjoint(a)
        error, most = error.T, most.T
    x, b, moved, furthest = (part.reshape(len(a), -1) for part in (wide(x), b, *map(np.asarray, right.errors())))
    # Substitution is backward stable for each column by itself and for each row, so every element is compared.
    n = len(a)
    size = np.abs(a) @ np.abs(x) + np.abs(b)
    floor = n * flushed(np.empty(0, np.float32 if u > 2.0**-53 else np.float64)) * (1 + np.abs(a).max(axis=1))[:, None]
    tight = TIGHT * np.sqrt(n) * u * size + error @ np.abs(x) + moved + floor
    hard = 2 * gamma(n + 2, u) * size + most @ np.abs(x) + furthest + floor
    residuals.add("A x - b", np.abs(a @ x - b), tight, None if left.soft or right.soft else hard)
    return residuals.finding


SOLVERS: dict[str, Relation] = {
    "solve": Relation("residual", _solve, passes=8.0),
    "inv": Relation("residual", _inv, passes=8.0),
    "solve_triangular": Relation("residual", _triangular, miss=0.0, passes=64.0),
}

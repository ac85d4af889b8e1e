"""QR, SVD, eigenvectors, LU and Cholesky: their residual, projected on random vectors, and orthogonality.

Tolerances: Householder's methods leave a residual of ``p(n) u`` times the norm of the operand (Higham, *Accuracy and
Stability of Numerical Algorithms*, 2nd ed., chapters 19 and 20; for QR column by column), with p as it was measured;
factors by elimination obey ``|A - L U| <= gamma_n |L| |U|`` in any order of summation (chapters 9 and 10).
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
    moved,
    norm,
    powers_of_two,
    roundoff,
    vectors,
    wide,
)
from goblin_dask.verify.tolerances import gamma

RESIDUAL = (32.0, 8.0)
"""An honest residual is at most ``(32 + 8 sqrt(n)) u``, relative to the norm of the operand and for each column."""


def honest(length: int, u: float) -> float:
    """Relative residual of an orthogonal method on matrices of that longer side."""
    return (RESIDUAL[0] + RESIDUAL[1] * float(np.sqrt(length))) * u


def orthonormal(residuals: Residuals, what: str, q: Array, u: float, rng: np.random.Generator) -> None:
    """That the columns are: ``Q* Q y = y``."""
    rows, columns = q.shape[-2:]
    y = vectors(rng, columns)
    difference = norm(adjoint(q) @ (q @ y) - y, -2)
    residuals.add(what, difference, np.asarray(honest(max(rows, columns), u) * np.sqrt(columns)))


def uncertain(operand: Bounded, x: Array) -> Array:
    """What the operand's own uncertainty moves ``A x`` by."""
    tight, _ = operand.errors()
    return norm(np.asarray(tight) @ np.abs(x), -2)


def _qr(attributes: Attributes, operands: Sequence[Bounded], outputs: Sequence[Array], rng: Any) -> Finding | None:
    (operand,), (q, r) = operands, outputs
    a = wide(operand.fine)
    if not a.size or not finite(a, operand.errors()[0], *outputs):
        return None
    residuals, u = Residuals(), roundoff(q, r)
    residuals.require(not np.tril(r, -1).any(), "a triangular factor has elements below the diagonal")
    q, r = wide(q), wide(r)
    rows, columns = a.shape[-2:]
    scales = powers_of_two(norm(a, -2))
    x = vectors(rng, columns) / np.swapaxes(scales, -1, -2)
    floor = flushed(outputs[0]) * rows * np.abs(x).sum(axis=-2, keepdims=True)
    tight = honest(max(rows, columns), u) * np.sqrt(columns) + floor + uncertain(operand, x)
    residuals.add("A - Q R", norm(q @ (r @ x) - a @ x, -2), tight)
    orthonormal(residuals, "orthogonality of Q", q, u, rng)
    return residuals.finding


def _svd(attributes: Attributes, operands: Sequence[Bounded], outputs: Sequence[Array], rng: Any) -> Finding | None:
    (operand,), (left, values, right) = operands, outputs
    a = wide(operand.fine)
    if not a.size or not finite(a, operand.errors()[0], *outputs):
        return None
    residuals, u = Residuals(), roundoff(left, right)
    residuals.require(bool((values >= 0).all()), "a singular value is negative")
    residuals.require(bool((np.diff(values, axis=-1) <= 0).all()), "singular values do not descend")
    left, values, right = wide(left), wide(values), wide(right)
    rows, columns = a.shape[-2:]
    inner = values.shape[-1]
    scale = np.minimum(values[..., :1, None], frobenius(a))
    tight = honest(max(rows, columns), u) * np.sqrt(inner) * scale + max(rows, columns) * flushed(outputs[0])
    x, y = vectors(rng, inner), vectors(rng, inner)
    # Both sides: A V = U S says nothing of the part of U where S is zero, nor A* U = V S of that of V.
    vx, uy = adjoint(right)[..., :inner] @ x, left[..., :inner] @ y
    residuals.add(
        "A V - U S", norm(a @ vx - left[..., :inner] @ (values[..., None] * x), -2), tight + uncertain(operand, vx)
    )
    residuals.add(
        "A* U - V S",
        norm(adjoint(a) @ uy - adjoint(right)[..., :inner] @ (values[..., None] * y), -2),
        tight + uncertain(moved(operand, adjoint), uy),
    )
    orthonormal(residuals, "orthogonality of U", left, u, rng)
    orthonormal(residuals, "orthogonality of V", adjoint(right), u, rng)
    return residuals.finding


def _eigh(attributes: Attributes, operands: Sequence[Bounded], outputs: Sequence[Array], rng: Any) -> Finding | None:
    (operand,), (values, q) = operands, outputs
    a = _from_triangle(wide(operand.fine), attributes["triangle"])
    if not a.size or not finite(a, operand.errors()[0], *outputs):
        return None
    residuals, u = Residuals(), roundoff(q)
    residuals.require(bool((np.diff(values, axis=-1) >= 0).all()), "eigenvalues do not ascend")
    values, q = wide(values), wide(q)
    n = a.shape[-1]
    x = vectors(rng, n)
    qx = q @ x
    scale = np.minimum(np.abs(values).max(axis=-1)[..., None, None], frobenius(a))
    tight = honest(n, u) * np.sqrt(n) * scale + n * flushed(outputs[1])
    error = _from_triangle(np.asarray(operand.errors()[0], float), attributes["triangle"])
    residuals.add("A V - V D", norm(a @ qx - q @ (values[..., None] * x), -2), tight + norm(error @ np.abs(qx), -2))
    orthonormal(residuals, "orthogonality of eigenvectors", q, u, rng)
    return residuals.finding


def _from_triangle(a: Array, triangle: Any) -> Array:
    """The Hermitian matrix of which one triangle is read."""
    half = np.tril(a, -1) if triangle == "L" else np.triu(a, 1)
    diagonal = np.zeros_like(a)
    i = np.arange(a.shape[-1])
    diagonal[..., i, i] = a[..., i, i].real
    return np.asarray(half + adjoint(half) + diagonal)


def eliminated(
    residuals: Residuals, what: str, operand: Bounded, a: Array, factors: Sequence[Array], u: float, rng: Any
) -> None:
    """That A is the product of two factors, element by element of ``A x``."""
    left, right = factors
    x = vectors(rng, a.shape[-1])
    n = left.shape[-1]
    size = np.abs(left) @ (np.abs(right) @ np.abs(x))
    error, most = operand.errors()
    floor = n * np.abs(x).sum(axis=-2) * flushed(a.astype(np.float32) if u > 2.0**-53 else a)
    tight = TIGHT * np.sqrt(n) * u * size + floor + np.asarray(error) @ np.abs(x)
    hard = 4 * gamma(n + 2, u) * size + floor + np.asarray(most) @ np.abs(x)
    residuals.add(what, np.abs(left @ (right @ x) - a @ x), tight, None if operand.soft else hard)


def _cholesky(
    attributes: Attributes, operands: Sequence[Bounded], outputs: Sequence[Array], rng: Any
) -> Finding | None:
    (operand,), (factor,) = operands, outputs
    upper = attributes["upper"]
    a = wide(operand.fine)
    if not a.size or not finite(a, operand.errors()[0], *outputs):
        return None
    residuals, u = Residuals(), roundoff(factor)
    other = np.tril(factor, -1) if upper else np.triu(factor, 1)
    residuals.require(not other.any(), "a triangular factor has elements in its other half")
    i = np.arange(factor.shape[-1])
    residuals.require(bool((factor[..., i, i].real > 0).all()), "the diagonal of a Cholesky factor is not positive")
    factor = wide(factor)
    pair = (adjoint(factor), factor) if upper else (factor, adjoint(factor))
    triangle = "U" if upper else "L"
    symmetric = moved(operand, lambda part: _from_triangle(wide(part), triangle))
    eliminated(residuals, "A - L L*", symmetric, _from_triangle(a, triangle), pair, u, rng)
    return residuals.finding


def _lu(attributes: Attributes, operands: Sequence[Bounded], outputs: Sequence[Array], rng: Any) -> Finding | None:
    (operand,), (permutation, lower, upper) = operands, outputs
    a = wide(operand.fine)
    if not a.size or not finite(a, operand.errors()[0], *outputs):
        return None
    residuals, u = Residuals(), roundoff(lower, upper)
    one = permutation != 0
    residuals.require(
        bool((permutation[one] == 1).all() and (one.sum(0) == 1).all() and (one.sum(1) == 1).all()),
        "the permutation is none",
    )
    i = np.arange(lower.shape[1])
    residuals.require(
        not np.triu(lower, 1).any() and bool((lower[i, i] == 1).all()), "the lower factor is not unit triangular"
    )
    residuals.require(not np.tril(upper, -1).any(), "the upper factor is not triangular")
    # LAPACK measures complex numbers by |re| + |im|
    most = np.sqrt(2.0) if np.iscomplexobj(lower) else 1.0
    residuals.require(bool((np.abs(lower) <= most + 8 * u).all()), "the pivots are not the largest of their columns")
    if residuals.finding.verdict == "accepted":
        rows = one.argmax(axis=0)  # A[rows] = L U
        eliminated(
            residuals, "A - P L U", moved(operand, lambda part: part[rows]), a[rows], (wide(lower), wide(upper)), u, rng
        )
    return residuals.finding


DECOMPOSITIONS: dict[str, Relation] = {
    "qr": Relation("residual", _qr),
    "svd": Relation("residual", _svd, passes=6.0),
    "eigh": Relation("residual", _eigh),
    "cholesky": Relation("residual", _cholesky, passes=12.0),
    "lu": Relation("residual", _lu, passes=6.0),
}

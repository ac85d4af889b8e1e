"""Decompositions, solvers and norms, by LAPACK."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import scipy

from goblin_dask.errors import InputError
from goblin_dask.graphs.operators import samples
from goblin_dask.graphs.operators.base import (
    Array,
    Attributes,
    Example,
    Kind,
    Operator,
    Specs,
    broadcast,
    check_count,
    nbytes,
)
from goblin_dask.graphs.operators.contraction import c_order
from goblin_dask.graphs.operators.dtypes import DTYPES, probe
from goblin_dask.graphs.operators.reductions import axes_of, reduced
from goblin_dask.graphs.operators.rules import Axes, Bool, Choice, Int, Number, Order
from goblin_dask.messages import ArraySpec

LINALG = frozenset({Kind.LINALG})


def _matrix(spec: ArraySpec, square: bool = False) -> tuple[tuple[int, ...], int, int]:
    """Batch, rows and columns."""
    if len(spec.shape) < 2:
        raise InputError("expected a matrix")
    *batch, rows, columns = spec.shape
    if square and rows != columns:
        raise InputError(f"expected a square matrix, got {rows} rows and {columns} columns")
    return tuple(batch), rows, columns


def _lapack(spec: ArraySpec) -> str:
    """The dtype in which LAPACK computes."""
    return probe(_inverse, spec.dtype)[0]


def _inverse(array: Array) -> Array:
    return np.linalg.inv(array.reshape(1, 1))


def _real_of(dtype: str) -> str:
    return np.zeros((), DTYPES[dtype]).real.dtype.name


def _cubic(factor: float) -> Callable[[Specs, Specs, Attributes], float]:
    def flops(specs: Specs, outputs: Specs, attributes: Attributes) -> float:
        *batch, rows, columns = specs[0].shape if len(specs[0].shape) > 1 else (1, *specs[0].shape)
        return factor * math.prod(batch) * rows * columns * min(rows, columns)

    return flops


def _lapack_copies(specs: Specs, outputs: Specs, attributes: Attributes) -> int:
    """Copies in Fortran order of operands and results, and work arrays."""
    size = sum(math.prod(spec.shape) for spec in (*specs, *outputs))
    return 2 * 16 * size if any(DTYPES[s.dtype].kind == "c" for s in specs) else 2 * 8 * size


def _infer_qr(specs: Specs, attributes: Any) -> Specs:
    batch, rows, columns = _matrix(specs[0])
    dtype, inner = _lapack(specs[0]), rows if attributes["mode"] == "complete" else min(rows, columns)
    return ArraySpec((*batch, rows, inner), dtype), ArraySpec((*batch, inner, columns), dtype)


def _infer_svd(specs: Specs, attributes: Any) -> Specs:
    batch, rows, columns = _matrix(specs[0])
    dtype, inner = _lapack(specs[0]), min(rows, columns)
    left, right = (rows, columns) if attributes["full_matrices"] else (inner, inner)
    return (
        ArraySpec((*batch, rows, left), dtype),
        ArraySpec((*batch, inner), _real_of(dtype)),
        ArraySpec((*batch, right, columns), dtype),
    )


def _infer_singular_values(specs: Specs, attributes: Any) -> Specs:
    batch, rows, columns = _matrix(specs[0])
    return (ArraySpec((*batch, min(rows, columns)), _real_of(_lapack(specs[0]))),)


def _infer_square(specs: Specs, attributes: Any) -> Specs:
    _matrix(specs[0], square=True)
    return (ArraySpec(specs[0].shape, _lapack(specs[0])),)


def _infer_lu(specs: Specs, attributes: Any) -> Specs:
    _, rows, columns = _matrix(specs[0])
    check_count("the operand's shape", len(specs[0].shape), 2)
    if not rows or not columns:
        raise InputError("an empty matrix has no factors")
    dtype, inner = probe(_lu_dtype, specs[0].dtype)[0], min(rows, columns)
    real = _real_of(dtype)
    return ArraySpec((rows, rows), real), ArraySpec((rows, inner), dtype), ArraySpec((inner, columns), dtype)


def _lu_dtype(array: Array) -> Array:
    return scipy.linalg.lu(array.reshape(1, 1))[1]


def _scipy_linalg(xp: Any) -> Any:
    """SciPy's linear algebra for the arrays of a namespace."""
    if xp is np:
        return scipy.linalg
    import cupyx.scipy.linalg  # only where the namespace is CuPy's

    return cupyx.scipy.linalg


def _infer_solve(specs: Specs, attributes: Any) -> Specs:
    batch, rows, _ = _matrix(specs[0], square=True)
    right = specs[1].shape
    dtype = probe(_solve_dtype, specs[0].dtype, specs[1].dtype)[0]
    if len(right) == 1:
        if right[0] != rows:
            raise InputError(f"{rows} equations for {right[0]} right-hand sides")
        return (ArraySpec((*batch, rows), dtype),)
    if not right or right[-2] != rows:
        raise InputError(f"{rows} equations for a right-hand side of shape {right}")
    return (ArraySpec((*broadcast(batch, right[:-2]), rows, right[-1]), dtype),)


def _solve_dtype(a: Array, b: Array) -> Array:
    return np.linalg.solve(a.reshape(1, 1), b)


def _infer_triangular(specs: Specs, attributes: Any) -> Specs:
    _, rows, _ = _matrix(specs[0], square=True)
    check_count("the matrix's shape", len(specs[0].shape), 2)
    if len(specs[1].shape) not in (1, 2) or specs[1].shape[0] != rows:
        raise InputError(f"{rows} equations for a right-hand side of shape {specs[1].shape}")
    dtype = probe(_triangular_dtype, specs[0].dtype, specs[1].dtype)[0]
    return (ArraySpec(specs[1].shape, dtype),)


def _triangular_dtype(a: Array, b: Array) -> Array:
    return scipy.linalg.solve_triangular(a.reshape(1, 1), b)


def _triangular(xp: Any, operands: tuple[Array, ...], a: Any) -> tuple[Array, ...]:
    if 0 in operands[1].shape:
        return (xp.zeros(operands[1].shape, probe(_triangular_dtype, *(o.dtype.name for o in operands))[0]),)
    result = _scipy_linalg(xp).solve_triangular(
        *operands, lower=a["lower"], trans=a["trans"], unit_diagonal=a["unit_diagonal"], check_finite=False
    )
    return (c_order(xp, result),)


def _infer_determinant(specs: Specs, attributes: Any) -> Specs:
    batch, _, _ = _matrix(specs[0], square=True)
    return (ArraySpec(batch, _lapack(specs[0])),)


def _infer_slogdet(specs: Specs, attributes: Any) -> Specs:
    batch, _, _ = _matrix(specs[0], square=True)
    dtype = _lapack(specs[0])
    return ArraySpec(batch, dtype), ArraySpec(batch, _real_of(dtype))


def _infer_eigh(specs: Specs, attributes: Any) -> Specs:
    batch, rows, _ = _matrix(specs[0], square=True)
    dtype = _lapack(specs[0])
    return ArraySpec((*batch, rows), _real_of(dtype)), ArraySpec(specs[0].shape, dtype)


def _infer_eigvalsh(specs: Specs, attributes: Any) -> Specs:
    return _infer_eigh(specs, attributes)[:1]


def _infer_pinv(specs: Specs, attributes: Any) -> Specs:
    batch, rows, columns = _matrix(specs[0])
    return (ArraySpec((*batch, columns, rows), _lapack(specs[0])),)


def _infer_power(specs: Specs, attributes: Any) -> Specs:
    _matrix(specs[0], square=True)
    n = attributes["n"]
    dtype = _lapack(specs[0]) if n < 0 else probe(_square, specs[0].dtype)[0]
    return (ArraySpec(specs[0].shape, dtype if n not in (0, 1) else specs[0].dtype),)


def _square(array: Array) -> Array:
    return np.matmul(array.reshape(1, 1), array.reshape(1, 1))


def _infer_rank(specs: Specs, attributes: Any) -> Specs:
    batch, _, _ = _matrix(specs[0])
    _lapack(specs[0])
    return (ArraySpec(batch, "int64"),)


def _infer_norm(specs: Specs, attributes: Any) -> Specs:
    order, shape = attributes["ord"], specs[0].shape
    axes = axes_of(attributes, len(shape))
    if order is not None and len(axes) not in (1, 2):
        raise InputError("a norm of that order is over one axis or two")
    if order is None and attributes["axes"] is not None and len(axes) not in (1, 2, len(shape)):
        raise InputError("a norm is over one axis, two, or all")
    if order in ("fro", "nuc") and len(axes) != 2:
        raise InputError(f"the norm {order!r} is over two axes")
    if len(axes) == 2 and order not in (None, "fro", "nuc", 1, -1, 2, -2, math.inf, -math.inf):
        raise InputError(f"matrices have no norm of order {order}")
    if (order in (2, -2) and len(axes) == 2) or order == "nuc":
        _lapack(specs[0])
    if 0 in (shape[axis] for axis in axes) and order not in (None, "fro"):
        raise InputError("an empty axis has no such norm")
    return (ArraySpec(reduced(shape, axes, attributes["keepdims"]), _norm_dtype(specs[0].dtype, order, len(axes))),)


def _norm_dtype(dtype: str, order: Any, axes: int) -> str:
    key = (dtype, order, min(axes, 3))
    if key not in _norm_dtypes:
        if len(_norm_dtypes) > 10_000:  # orders are any number
            _norm_dtypes.clear()
        with np.errstate(all="ignore"):
            value = np.linalg.norm(np.ones((1,) * min(axes, 3), DTYPES[dtype]), order)
        _norm_dtypes[key] = np.asarray(value).dtype.name
    return _norm_dtypes[key]


_norm_dtypes: dict[tuple[str, Any, int], str] = {}


def _norm(xp: Any, operands: tuple[Array, ...], attributes: Any) -> tuple[Array, ...]:
    (array,) = operands
    order, axes = attributes["ord"], axes_of(attributes, operands[0].ndim)
    if order is None and len(axes) == array.ndim:
        return (xp.linalg.norm(array, keepdims=attributes["keepdims"]),)
    return (xp.linalg.norm(array, order, axes if len(axes) > 1 else axes[0], attributes["keepdims"]),)


def _workspace_norm(specs: Specs, outputs: Specs, attributes: Any) -> int:
    """The norm of everything is a dot product, once integers are floats and complex numbers two parts."""
    (spec,) = specs
    size, kind = math.prod(spec.shape), DTYPES[spec.dtype].kind
    if attributes["ord"] is None and len(axes_of(attributes, len(spec.shape))) == len(spec.shape):
        return 8 * size if kind in "iub" else nbytes(spec) if kind == "c" else 0
    return 3 * max(nbytes(spec), 8 * size)


def _of_numpy(name: str, *given: str) -> Callable[..., tuple[Array, ...]]:
    """`numpy.linalg`'s function with these attributes; results in C order."""

    def kernel(xp: Any, operands: tuple[Array, ...], attributes: Any) -> tuple[Array, ...]:
        result = getattr(xp.linalg, name)(*operands, *(attributes[a] for a in given))
        parts = result if isinstance(result, tuple) else (result,)
        return tuple(c_order(xp, xp.asarray(part)) for part in parts)

    return kernel


def _svd(xp: Any, operands: tuple[Array, ...], attributes: Any) -> tuple[Array, ...]:
    return tuple(c_order(xp, part) for part in xp.linalg.svd(operands[0], full_matrices=attributes["full_matrices"]))


def _cholesky(xp: Any, operands: tuple[Array, ...], attributes: Any) -> tuple[Array, ...]:
    if not attributes["upper"]:
        return (c_order(xp, xp.linalg.cholesky(operands[0])),)
    lower = xp.linalg.cholesky(xp.conj(xp.swapaxes(operands[0], -1, -2)))  # which reads the upper triangle
    return (c_order(xp, xp.conj(xp.swapaxes(lower, -1, -2))),)


def _lu(xp: Any, operands: tuple[Array, ...], attributes: Any) -> tuple[Array, ...]:
    permutation, lower, upper = _scipy_linalg(xp).lu(operands[0], check_finite=False)
    # SciPy's of a single complex number is complex.
    return tuple(c_order(xp, part) for part in (permutation.real, lower, upper))


def _pinv(xp: Any, operands: tuple[Array, ...], attributes: Any) -> tuple[Array, ...]:
    result = c_order(xp, xp.linalg.pinv(operands[0]))
    # An empty matrix comes back in its own dtype.
    return (result if result.size else result.astype(probe(_inverse, operands[0].dtype.name)[0]),)


def _power(xp: Any, operands: tuple[Array, ...], attributes: Any) -> tuple[Array, ...]:
    return (xp.array(xp.linalg.matrix_power(operands[0], attributes["n"]), order="C"),)


def _rank(xp: Any, operands: tuple[Array, ...], attributes: Any) -> tuple[Array, ...]:
    return (xp.asarray(xp.linalg.matrix_rank(operands[0], attributes["tol"])),)


def _matrices(shape: tuple[int, ...], dtype: str, seed: int = 0) -> Array:
    """Well conditioned, symmetric (Hermitian) positive definite where square."""
    array = samples.sample(shape, dtype, seed, special=False)
    if len(shape) > 1 and shape[-1] == shape[-2]:
        array = np.matmul(array, np.conj(np.swapaxes(array, -1, -2))) if DTYPES[dtype].kind in "fc" else array
        array = array + (30 * np.eye(shape[-1])).astype(array.dtype)
    return array.astype(DTYPES[dtype])


NUMBERS = ("float32", "float64", "complex64", "complex128", "int32", "bool", "float16")


def _examples(
    *shapes: tuple[int, ...], dtypes: tuple[str, ...] = NUMBERS, **attributes: Any
) -> Callable[[], Iterator[Example]]:
    def examples() -> Iterator[Example]:
        for dtype in dtypes:
            for shape in shapes:
                array = _matrices(shape, dtype)
                yield (array,), attributes
                yield (samples.strided(array),), attributes
                yield (np.asfortranarray(array),), attributes

    return examples


SQUARE = ((3, 3), (1, 1), (2, 3, 3), (3, 4))
ANY = ((3, 3), (4, 2), (2, 4), (2, 3, 2), (3,))


def _examples_solve(batch: bool) -> Callable[[], Iterator[Example]]:
    def examples() -> Iterator[Example]:
        for dtype in NUMBERS:
            a = _matrices((3, 3), dtype)
            for shape in ((3,), (3, 2), (3, 0)):
                yield (samples.strided(a), samples.sample(shape, dtype, special=False)), {}
                yield (a, samples.sample(shape, "float32", special=False)), {}
            if batch:
                yield (_matrices((2, 3, 3), dtype), samples.sample((3, 2), dtype, special=False)), {}
            else:
                yield (
                    (a.T, samples.sample((3,), dtype, special=False)),
                    {"lower": True, "trans": 1, "unit_diagonal": True},
                )

    return examples


def _examples_norm() -> Iterator[Example]:
    for dtype in samples.ALL:
        array = samples.sample((3, 4), dtype, special=False)
        yield (array,), {}
        yield (array[0],), {}
        yield (samples.strided(array),), {"axes": 1, "keepdims": True}
        orders: tuple[Any, ...] = (1, 2, np.inf, -np.inf, 0, 3)
        for order in orders:
            yield (array,), {"ord": order, "axes": 0}
        orders = ("fro", "nuc", 1, 2, -2, np.inf)
        for order in orders:
            yield (array,), {"ord": order}
        yield (samples.sample((2, 3, 4), dtype, special=False),), {"keepdims": True}
        yield (samples.sample((0,), dtype),), {}


def _op(name: str, summary: str, infer: Any, kernel: Any, examples: Any, factor: float, **more: Any) -> Operator:
    more.setdefault("workspace", _lapack_copies)
    return Operator(name, summary, LINALG, infer, kernel, examples, flops=_cubic(factor), contiguous=True, **more)


OPERATORS: tuple[Operator, ...] = (
    _op(
        "qr",
        "Orthogonal and upper triangular factor.",
        _infer_qr,
        _of_numpy("qr", "mode"),
        _examples(*ANY),
        4,
        outputs=2,
        attributes={"mode": Choice("reduced", ("reduced", "complete"))},
        check="residual",
    ),
    _op(
        "svd",
        "Left singular vectors, singular values, right singular vectors (conjugate, transposed).",
        _infer_svd,
        _svd,
        _examples(*ANY, full_matrices=False),
        12,
        outputs=3,
        attributes={"full_matrices": Bool(True)},
        check="residual",
    ),
    _op("svdvals", "Singular values.", _infer_singular_values, _of_numpy("svdvals"), _examples(*ANY), 4),
    _op(
        "cholesky",
        "Triangular factor of a positive definite matrix.",
        _infer_square,
        _cholesky,
        _examples(*SQUARE, upper=True),
        1 / 3,
        attributes={"upper": Bool(False)},
        check="residual",
    ),
    _op(
        "lu",
        "Permutation, unit lower and upper triangular factor.",
        _infer_lu,
        _lu,
        _examples(*ANY, (1, 1)),
        2 / 3,
        outputs=3,
        check="residual",
    ),
    _op(
        "solve",
        "Solution of linear equations.",
        _infer_solve,
        _of_numpy("solve"),
        _examples_solve(True),
        1,
        arity=2,
        check="residual",
    ),
    _op(
        "solve_triangular",
        "Solution of linear equations with a triangular matrix (or its transpose, ``trans=1``; conjugate, 2).",
        _infer_triangular,
        _triangular,
        _examples_solve(False),
        1,
        arity=2,
        attributes={"lower": Bool(False), "trans": Int(0, low=0, high=2), "unit_diagonal": Bool(False)},
        check="residual",
    ),
    _op("inv", "Inverse.", _infer_square, _of_numpy("inv"), _examples(*SQUARE), 2, check="residual"),
    _op("det", "Determinant.", _infer_determinant, _of_numpy("det"), _examples(*SQUARE), 2 / 3),
    _op(
        "slogdet",
        "Sign and logarithm of the determinant.",
        _infer_slogdet,
        _of_numpy("slogdet"),
        _examples(*SQUARE),
        2 / 3,
        outputs=2,
    ),
    _op(
        "eigh",
        "Eigenvalues and eigenvectors of a symmetric or Hermitian matrix.",
        _infer_eigh,
        _of_numpy("eigh", "triangle"),
        _examples(*SQUARE),
        9,
        outputs=2,
        attributes={"triangle": Choice("L", ("L", "U"))},
        check="residual",
    ),
    _op(
        "eigvalsh",
        "Eigenvalues of a symmetric or Hermitian matrix.",
        _infer_eigvalsh,
        _of_numpy("eigvalsh", "triangle"),
        _examples(*SQUARE),
        4 / 3,
        attributes={"triangle": Choice("L", ("L", "U"))},
    ),
    _op("pinv", "Pseudo-inverse.", _infer_pinv, _pinv, _examples(*ANY), 16),
    _op(
        "matrix_power",
        "Integer power of a square matrix.",
        _infer_power,
        _power,
        _examples(*SQUARE, n=3),
        8,
        attributes={"n": Int(low=-1000, high=1000)},
    ),
    _op(
        "matrix_rank",
        "Number of singular values above ``tol``.",
        _infer_rank,
        _rank,
        _examples(*ANY),
        4,
        attributes={"tol": Number(None, optional=True)},
    ),
    Operator(
        "norm",
        "Norm of vectors (one axis), matrices (two) or of everything.",
        frozenset({Kind.LINALG, Kind.REDUCTION}),
        _infer_norm,
        _norm,
        _examples_norm,
        attributes={"ord": Order(None), "axes": Axes(None, ordered=True), "keepdims": Bool(False)},
        flops=lambda specs, outputs, attributes: 2.0 * math.prod(specs[0].shape),
        workspace=_workspace_norm,
        contiguous=True,
        copies_strided=True,
    ),
)

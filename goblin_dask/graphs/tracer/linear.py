"""Rules of products, decompositions, solvers and Fourier transforms, NumPy's and SciPy's."""

from __future__ import annotations

from typing import Any

import array_api_compat.numpy
import numpy
import scipy.fft
import scipy.linalg
from numpy.lib.array_utils import normalize_axis_index, normalize_axis_tuple

from goblin_dask.errors import NotTraceable
from goblin_dask.graphs.tracer import casting
from goblin_dask.graphs.tracer.array import Tracer
from goblin_dask.graphs.tracer.casting import astype, tracer
from goblin_dask.graphs.tracer.dispatch import routed, rule
from goblin_dask.graphs.tracer.rebind import stand_in
from goblin_dask.graphs.tracer.recorder import op, ops
from goblin_dask.graphs.tracer.reductions import into

np: Any = numpy
"""NumPy, to be called with tracers, which its annotations do not know."""


def _common(*values: Any) -> list[Tracer]:
    dtype = casting.result_type(*values)
    return [tracer(each, dtype) for each in values]


# --- products ---------------------------------------------------------------------------------------------------
@rule(np.dot)
def dot(a: Any, b: Any, out: Any = None) -> Any:
    a, b = _common(a, b)
    if a.ndim == 0 or b.ndim == 0:
        return into(out, np.multiply(a, b))
    if b.ndim == 1:
        if a.ndim == 1 or a.ndim == 2:
            return into(out, np.matmul(a, b))
        return into(out, tensordot(a, b, ([a.ndim - 1], [0])))
    if a.ndim <= 2 and b.ndim == 2:
        return into(out, np.matmul(a, b))
    return into(out, tensordot(a, b, ([a.ndim - 1], [b.ndim - 2])))


@rule(np.vdot)
def vdot(a: Any, b: Any) -> Any:
    a, b = _common(a, b)
    return np.matmul(np.conjugate(np.ravel(a)), np.ravel(b))


@rule(np.inner)
def inner(a: Any, b: Any) -> Any:
    a, b = _common(a, b)
    if a.ndim == 0 or b.ndim == 0:
        return np.multiply(a, b)
    return tensordot(a, b, ([a.ndim - 1], [b.ndim - 1]))


@rule(np.outer)
def outer(a: Any, b: Any, out: Any = None) -> Any:
    return into(out, np.multiply(np.ravel(tracer(a))[:, None], np.ravel(tracer(b))[None, :]))


@rule(np.tensordot)
def tensordot(a: Any, b: Any, axes: Any = 2) -> Any:
    a, b = _common(a, b)
    if np.ndim(axes) == 0 and not isinstance(axes, (list, tuple)):
        left, right = list(range(a.ndim - int(axes), a.ndim)), list(range(int(axes)))
    else:
        left, right = ([int(each)] if np.ndim(each) == 0 else [int(i) for i in each] for each in axes)
    left = [normalize_axis_index(i, a.ndim) for i in left]
    right = [normalize_axis_index(i, b.ndim) for i in right]
    if len(left) != len(right) or any(a.shape[i] != b.shape[j] for i, j in zip(left, right, strict=True)):
        raise ValueError(f"shape-mismatch for sum: {a.shape} and {b.shape} over {axes}")
    return op("tensordot", a, b, a_axes=tuple(left), b_axes=tuple(right))


@rule(np.einsum)
def einsum(
    *operands: Any,
    out: Any = None,
    optimize: Any = False,
    dtype: Any = None,
    order: Any = "K",
    casting: Any = "safe",
    **kw: Any,
) -> Any:
    if kw or not isinstance(operands[0], str):
        raise NotTraceable("np.einsum without a subscript string")
    subscripts, *arrays = operands
    target = np.dtype(dtype) if dtype is not None else np.result_type(*(tracer(each).dtype for each in arrays))
    return into(
        out,
        op(
            "einsum",
            *(tracer(each, target) for each in arrays),
            subscripts=_explicit(subscripts, [tracer(e).ndim for e in arrays]),
        ),
    )


def _explicit(subscripts: str, ranks: list[int]) -> str:
    """Subscripts with an arrow and without an ellipsis."""
    text = subscripts.replace(" ", "")
    left, arrow, right = text.partition("->")
    terms = left.split(",")
    if len(terms) != len(ranks):
        raise ValueError("more operands provided to einstein sum function than specified in the subscripts string")
    free = [letter for letter in "zyxwvutsrqponmlkjihgfedcbaZYXWVUTSRQPONMLKJIHGFEDCBA" if letter not in text]
    longest = max(
        (rank - len(term.replace("...", "")) for term, rank in zip(terms, ranks, strict=True) if "..." in term),
        default=0,
    )
    names = "".join(sorted(free[:longest]))
    full = []
    for term, rank in zip(terms, ranks, strict=True):
        count = rank - len(term.replace("...", ""))
        full.append(term.replace("...", names[longest - count :] if count else ""))
    if arrow:
        right = right.replace("...", names)
    else:
        joined = "".join(full)
        right = names + "".join(sorted(each for each in set(joined) - set(names) if joined.count(each) == 1))
    return ",".join(full) + "->" + right


@rule(np.kron)
def kron(a: Any, b: Any) -> Any:
    a, b = tracer(a), tracer(b)
    ndim = max(a.ndim, b.ndim)
    a = casting.reshape(a, (1,) * (ndim - a.ndim) + a.shape)
    b = casting.reshape(b, (1,) * (ndim - b.ndim) + b.shape)
    left = casting.reshape(a, tuple(n for size in a.shape for n in (size, 1)))
    right = casting.reshape(b, tuple(n for size in b.shape for n in (1, size)))
    product = np.multiply(left, right)
    return casting.reshape(product, tuple(x * y for x, y in zip(a.shape, b.shape, strict=True)))


# --- numpy.linalg -----------------------------------------------------------------------------------------------
def _inexact(a: Tracer) -> Tracer:
    if a.dtype == np.float16:
        raise TypeError("array type float16 is unsupported in linalg")
    return a if a.dtype.kind in "fc" else astype(a, np.float64)


def _square(a: Tracer) -> None:
    if a.ndim < 2 or a.shape[-1] != a.shape[-2]:
        raise np.linalg.LinAlgError("Last 2 dimensions of the array must be square")


@rule(np.linalg.norm)
def norm(x: Any, ord: Any = None, axis: Any = None, keepdims: bool = False) -> Any:
    x = tracer(x)
    x = x if x.dtype.kind in "fc" else astype(x, np.float64)
    axes = tuple(range(x.ndim)) if axis is None else normalize_axis_tuple(axis, x.ndim)
    if ord is None or (ord == 2 and len(axes) == 1) or (ord in ("fro", "f") and len(axes) == 2):
        squares = np.multiply(x, x) if x.dtype.kind != "c" else np.square(np.real(x)) + np.square(np.imag(x))
        return np.sqrt(np.sum(squares, axis=axes, keepdims=keepdims))
    if (isinstance(ord, str) and (ord != "nuc" or len(axes) != 2)) or len(axes) > 2:
        raise ValueError(f"Invalid norm order {ord!r}")
    return op("norm", x, ord=ord, axes=axes, keepdims=bool(keepdims))


@rule(np.linalg.inv)
def inv(a: Any) -> Any:
    a = _inexact(tracer(a))
    _square(a)
    return op("inv", a)


@rule(np.linalg.det)
def det(a: Any) -> Any:
    a = _inexact(tracer(a))
    _square(a)
    return op("det", a)


@rule(np.linalg.slogdet)
def slogdet(a: Any) -> Any:
    a = _inexact(tracer(a))
    _square(a)
    return np.linalg._linalg.SlogdetResult(*ops("slogdet", a))


@rule(np.linalg.solve)
def solve(a: Any, b: Any) -> Any:
    a, b = (_inexact(each) for each in _common(a, b))
    _square(a)
    return op("solve", a, b)


@rule(np.linalg.cholesky)
def cholesky(a: Any, /, *, upper: bool = False) -> Any:
    a = _inexact(tracer(a))
    _square(a)
    return op("cholesky", a, upper=bool(upper))


@rule(np.linalg.qr)
def qr(a: Any, mode: str = "reduced") -> Any:
    a = _inexact(tracer(a))
    if mode not in ("reduced", "complete", "r"):
        raise NotTraceable(f"np.linalg.qr with mode={mode!r}")
    q, r = ops("qr", a, mode="reduced" if mode == "r" else mode)
    return r if mode == "r" else np.linalg._linalg.QRResult(q, r)


@rule(np.linalg.svd)
def svd(a: Any, full_matrices: bool = True, compute_uv: bool = True, hermitian: bool = False) -> Any:
    if hermitian:
        raise NotTraceable("np.linalg.svd with hermitian=True")
    a = _inexact(tracer(a))
    if not compute_uv:
        return op("svdvals", a)
    return np.linalg._linalg.SVDResult(*ops("svd", a, full_matrices=bool(full_matrices)))


@rule(np.linalg.eigh)
def eigh(a: Any, UPLO: str = "L") -> Any:
    a = _inexact(tracer(a))
    _square(a)
    return np.linalg._linalg.EighResult(*ops("eigh", a, triangle=UPLO.upper()))


@rule(np.linalg.eigvalsh)
def eigvalsh(a: Any, UPLO: str = "L") -> Any:
    a = _inexact(tracer(a))
    _square(a)
    return op("eigvalsh", a, triangle=UPLO.upper())


@rule(np.linalg.matrix_power)
def matrix_power(a: Any, n: int) -> Any:
    a = tracer(a)
    _square(a)
    return op("matrix_power", a, n=int(n))


@rule(np.linalg.pinv)
def pinv(a: Any, rcond: Any = None, hermitian: bool = False, *, rtol: Any = np._NoValue) -> Any:
    a = _inexact(tracer(a))
    if hermitian:
        raise NotTraceable("np.linalg.pinv with hermitian=True")
    if rcond is None and rtol is np._NoValue:
        return op("pinv", a)
    if 0 in a.shape:
        return np.swapaxes(a, -1, -2)
    if rcond is None:
        rcond = max(a.shape[-2:]) * np.finfo(a.dtype).eps if rtol is None else rtol
    u, s, vt = ops("svd", np.conjugate(a), full_matrices=False)
    large = np.greater(s, np.multiply(tracer(rcond)[..., None], np.max(s, axis=-1, keepdims=True)))
    s = np.where(large, np.true_divide(s.dtype.type(1), s), s.dtype.type(0))
    return np.matmul(np.swapaxes(vt, -1, -2), np.multiply(s[..., None], np.swapaxes(u, -1, -2)))


@rule(np.linalg.matrix_rank)
def matrix_rank(A: Any, tol: Any = None, hermitian: bool = False, *, rtol: Any = None) -> Any:
    a = _inexact(tracer(A))
    if hermitian or a.ndim < 2 or 0 in a.shape or isinstance(tol, Tracer) or np.ndim(tol):
        raise NotTraceable("np.linalg.matrix_rank of no matrix, with hermitian=True or with several tolerances")
    if rtol is None:
        return op("matrix_rank", a, tol=None if tol is None else float(tol))
    s = op("svdvals", a)
    return np.count_nonzero(np.greater(s, np.max(s, axis=-1, keepdims=True) * tracer(rtol)[..., None]), axis=-1)


@rule(np.cross, np.linalg.cross)
def cross(a: Any, b: Any, /, axisa: int = -1, axisb: int = -1, axisc: int = -1, axis: int | None = None) -> Any:
    if axis is not None:
        axisa = axisb = axisc = axis
    a, b = tracer(a), tracer(b)
    a, b = np.moveaxis(a, axisa, -1), np.moveaxis(b, axisb, -1)
    if a.shape[-1] != 3 or b.shape[-1] != 3:
        raise NotTraceable("np.cross of vectors that have not three components")
    (a0, a1, a2), (b0, b1, b2) = ([each[..., i] for i in range(3)] for each in (a, b))
    parts = [a1 * b2 - a2 * b1, a2 * b0 - a0 * b2, a0 * b1 - a1 * b0]
    return np.moveaxis(np.stack(parts, axis=-1), -1, axisc)


stand_in(array_api_compat.numpy.linalg.solve)(solve)


@rule(np.linalg.eig, np.linalg.eigvals, np.linalg.lstsq, np.linalg.cond)
def _unknown(a: Any, *args: Any, **kwargs: Any) -> Any:
    raise NotTraceable("this decomposition is not in the catalogue, or its shape or dtype depends on data")


# --- scipy.linalg -----------------------------------------------------------------------------------------------
@routed(scipy.linalg.solve_triangular)
def solve_triangular(
    a: Any,
    b: Any,
    trans: Any = 0,
    lower: bool = False,
    unit_diagonal: bool = False,
    overwrite_b: bool = False,
    check_finite: bool = True,
) -> Any:
    a, b = (_inexact(each) for each in _common(a, b))
    _square(a)
    kinds = {0: 0, 1: 1, 2: 2, "N": 0, "T": 1, "C": 2}
    return op("solve_triangular", a, b, lower=bool(lower), unit_diagonal=bool(unit_diagonal), trans=kinds[trans])


@routed(scipy.linalg.lu)
def lu(
    a: Any, permute_l: bool = False, overwrite_a: bool = False, check_finite: bool = True, p_indices: bool = False
) -> Any:
    if permute_l or p_indices:
        raise NotTraceable("scipy.linalg.lu with permute_l= or p_indices=")
    return ops("lu", _inexact(tracer(a)))


@routed(scipy.linalg.cholesky)
def scipy_cholesky(a: Any, lower: bool = False, overwrite_a: bool = False, check_finite: bool = True) -> Any:
    return cholesky(a, upper=not lower)


@routed(scipy.linalg.qr)
def scipy_qr(
    a: Any,
    overwrite_a: bool = False,
    lwork: Any = None,
    mode: str = "full",
    pivoting: bool = False,
    check_finite: bool = True,
) -> Any:
    if pivoting or mode not in ("full", "economic"):
        raise NotTraceable("scipy.linalg.qr with pivoting= or mode=")
    return ops("qr", _inexact(tracer(a)), mode="complete" if mode == "full" else "reduced")


@routed(scipy.linalg.svd)
def scipy_svd(
    a: Any,
    full_matrices: bool = True,
    compute_uv: bool = True,
    overwrite_a: bool = False,
    check_finite: bool = True,
    lapack_driver: str = "gesdd",
) -> Any:
    result = svd(a, full_matrices, compute_uv)
    return tuple(result) if compute_uv else result


# --- Fourier transforms -----------------------------------------------------------------------------------------
def _plain(name: str, args: Any, kwargs: Any) -> None:
    if any(each is not None and each is not False for each in (*args, *kwargs.values())):
        raise NotTraceable(f"{name} with more than an array, sizes, axes and a norm")


def _along(name: str) -> Any:
    def recorded(a: Any, n: Any = None, axis: int = -1, norm: Any = None, *args: Any, **kwargs: Any) -> Any:
        _plain(name, args, kwargs)
        a = tracer(a)
        axis = normalize_axis_index(int(axis), a.ndim)
        return op(name, a, axis=axis, n=None if n is None else int(n), norm=norm or "backward")

    return recorded


def _over(name: str, operator: str, default: Any, exact: bool) -> Any:
    def recorded(a: Any, s: Any = None, axes: Any = default, norm: Any = None, *args: Any, **kwargs: Any) -> Any:
        _plain(name, args, kwargs)
        a = tracer(a)
        if exact and a.dtype in (np.float16, np.float32, np.complex64):
            raise NotTraceable(f"scipy.fft.{name} in single precision, which NumPy rounds otherwise")
        if axes is None:
            axes = range(a.ndim) if s is None else range(a.ndim - len(s), a.ndim)
        axes = normalize_axis_tuple(tuple(axes), a.ndim)
        sizes = () if s is None else tuple(int(each) for each in s)
        if tuple(sorted(axes)) != axes and (sizes or operator.startswith(("r", "ir"))):
            raise NotTraceable(f"{name} over axes in another order than the array's")
        return op(operator, a, axes=axes, s=sizes, norm=norm or "backward")

    return recorded


for _module, _register in ((np.fft, rule), (scipy.fft, routed)):
    for _name in ("fft", "ifft", "rfft", "irfft", "hfft", "ihfft"):
        _register(getattr(_module, _name))(_along(_name))
    for _name in ("fft", "ifft", "rfft", "irfft"):
        _register(getattr(_module, _name + "2"))(_over(_name + "2", _name + "n", (-2, -1), _module is scipy.fft))
        _register(getattr(_module, _name + "n"))(_over(_name + "n", _name + "n", None, _module is scipy.fft))

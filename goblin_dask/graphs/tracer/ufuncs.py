"""Universal functions: NumPy's own dtype resolution, then one operator on operands of the resolved dtypes."""

from __future__ import annotations

from typing import Any

import numpy
import scipy.special

from goblin_dask.errors import NotTraceable
from goblin_dask.graphs.operators import CATALOGUE
from goblin_dask.graphs.operators.elementwise import UFUNCS
from goblin_dask.graphs.tracer import reductions
from goblin_dask.graphs.tracer.array import Tracer
from goblin_dask.graphs.tracer.casting import PYTHON_SCALARS, astype, broadcast_to, is_real_tracer, tracer
from goblin_dask.graphs.tracer.recorder import op, ops

np: Any = numpy
"""NumPy, to be called with tracers, which its annotations do not know."""

SPECIAL = {
    scipy.special.psi: "digamma",
    scipy.special.gammaln: "lgamma",
    **{getattr(scipy.special, name): name for name in CATALOGUE if hasattr(scipy.special, name)},
}
"""Operators of SciPy's ufuncs."""
COMPARISONS = {np.equal, np.not_equal, np.less, np.less_equal, np.greater, np.greater_equal}
REDUCE = {
    np.add: "sum",
    np.multiply: "prod",
    np.maximum: "max",
    np.minimum: "min",
    np.logical_and: "all",
    np.logical_or: "any",
    np.fmax: "nanmax",
    np.fmin: "nanmin",
}
ACCUMULATE = {np.add: "cumulative_sum", np.multiply: "cumulative_prod"}


def apply(ufunc: numpy.ufunc, method: str, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``__array_ufunc__``."""
    out = kwargs.pop("out", None)
    if out is not None and all(each is None for each in out):
        out = None
    if out is None and not any(map(is_real_tracer, (*inputs, *kwargs.values()))):
        return _fold(ufunc, method, inputs, kwargs)
    if out is not None and not all(each is None or isinstance(each, Tracer) for each in out):
        raise NotTraceable("a result is written into an array that is none of the operands")
    if method == "__call__":
        return _call(ufunc, inputs, out, kwargs)
    (target,) = out or (None,)
    if method == "reduce":
        name = REDUCE.get(ufunc)
        if name is None:
            raise NotTraceable(f"np.{ufunc.__name__}.reduce is not in the catalogue")
        result = reductions.reduce(name, *inputs, **{"axis": 0, **kwargs})
    elif method == "accumulate":
        name = ACCUMULATE.get(ufunc)
        if name is None:
            raise NotTraceable(f"np.{ufunc.__name__}.accumulate is not in the catalogue")
        result = reductions.accumulate(name, *inputs, **{"axis": 0, **kwargs})
    elif method == "outer":
        a, b = map(tracer, inputs)
        return apply(ufunc, "__call__", (a[(..., *(None,) * b.ndim)], b), {**kwargs, "out": out})
    else:
        raise NotTraceable(f"np.{ufunc.__name__}.{method} is not in the catalogue")
    return _into(target, result, "same_kind")


def _fold(ufunc: numpy.ufunc, method: str, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """All operands are known: so is the result."""
    literals: frozenset[int] = frozenset().union(*(each.literals for each in inputs if isinstance(each, Tracer)))
    values = [_scalar(each._known) if isinstance(each, Tracer) else each for each in inputs]
    options = {name: each._known if isinstance(each, Tracer) else each for name, each in kwargs.items()}
    result = getattr(ufunc, method)(*values, **options)
    if isinstance(result, tuple):
        return tuple(Tracer.of(each, literals) for each in result)
    return Tracer.of(result, literals)


def _scalar(array: Any) -> Any:
    return array[()] if array.ndim == 0 else array


def _call(ufunc: numpy.ufunc, inputs: tuple[Any, ...], out: tuple[Any, ...] | None, kwargs: dict[str, Any]) -> Any:
    where = kwargs.pop("where", True)
    casting = kwargs.pop("casting", "same_kind")
    kwargs.pop("subok", None)
    kwargs.pop("order", None)
    if ufunc is np.matmul:
        result: Any = _matmul(inputs, casting, kwargs)
    elif ufunc is np.vecdot:
        result = _vecdot(inputs, casting, kwargs)
    elif ufunc.signature is not None:
        raise NotTraceable(f"np.{ufunc.__name__} is not in the catalogue")
    else:
        result = _elementwise(ufunc, inputs, casting, kwargs)
    if kwargs:
        raise NotTraceable(f"np.{ufunc.__name__} with {', '.join(kwargs)}")
    if where is not True:
        if out is None or isinstance(result, tuple):
            raise NotTraceable(f"np.{ufunc.__name__} with where= but without out= leaves elements undefined")
        result = op("where", tracer(where, bool), astype(result, out[0].dtype), out[0])
    if isinstance(result, tuple):
        return tuple(_into(target, each, casting) for target, each in zip(out or (None,) * 9, result, strict=False))
    return _into(out[0] if out else None, result, casting)


def _into(target: Tracer | None, result: Tracer, casting: str) -> Tracer:
    if target is None:
        return result
    if not np.can_cast(result.dtype, target.dtype, casting=casting):
        raise np._core._exceptions._UFuncOutputCastingError(np.add, casting, result.dtype, target.dtype, 0)
    if result.shape != target.shape and np.broadcast_shapes(result.shape, target.shape) != target.shape:
        raise ValueError(f"non-broadcastable output operand with shape {target.shape}")
    target.become(result)
    return target


def resolve(ufunc: Any, operands: tuple[Any, ...], casting: str, kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Dtypes of the loop that NumPy would run; Python scalars count weakly (NEP 50)."""
    dtype = kwargs.pop("dtype", None)
    signature = kwargs.pop("signature", kwargs.pop("sig", None))
    if dtype is not None:
        signature = (None,) * ufunc.nin + (np.dtype(dtype),) * ufunc.nout
    kinds = tuple(
        type(each)
        if type(each) in (int, float, complex)
        else each.dtype
        if hasattr(each, "dtype")
        else tracer(each).dtype
        for each in operands
    )
    given = {} if signature is None else {"signature": signature}
    return tuple(ufunc.resolve_dtypes((*kinds, *(None,) * ufunc.nout), casting=casting, **given))


def _elementwise(ufunc: numpy.ufunc, inputs: tuple[Any, ...], casting: str, kwargs: dict[str, Any]) -> Any:
    name = UFUNCS.get(ufunc) or SPECIAL.get(ufunc)
    if name is None or name not in CATALOGUE:
        raise NotTraceable(f"{ufunc.__name__} is not in the catalogue")
    operands = tuple(
        each if isinstance(each, (Tracer, *PYTHON_SCALARS, np.generic)) else tracer(each) for each in inputs
    )
    if ufunc in COMPARISONS:
        outside = _outside(ufunc, operands)
        if outside is not None:
            return outside
    dtypes = resolve(ufunc, operands, casting, kwargs)
    cast = [tracer(each, dtype) for each, dtype in zip(operands, dtypes, strict=False)]
    results = ops(name, *cast)
    wanted = dtypes[ufunc.nin :]
    results = tuple(astype(each, dtype) for each, dtype in zip(results, wanted, strict=True))
    return results if ufunc.nout > 1 else results[0]


def _outside(ufunc: numpy.ufunc, operands: tuple[Any, ...]) -> Tracer | None:
    """Comparisons with Python integers beyond the dtype's bounds have an answer; nothing else has."""
    for i, each in enumerate(operands):
        other = operands[1 - i]
        if type(each) is int and isinstance(other, Tracer) and other.dtype.kind in "iu":
            bounds = np.iinfo(other.dtype)
            if not bounds.min <= each <= bounds.max:
                sample: list[Any] = [each, each]
                sample[1 - i] = np.zeros((), other.dtype)
                return broadcast_to(Tracer.of(ufunc(*sample)), other.shape)
    return None


def _matmul(inputs: tuple[Any, ...], casting: str, kwargs: dict[str, Any]) -> Tracer:
    if kwargs.pop("axes", None) is not None or kwargs.pop("axis", None) is not None:
        raise NotTraceable("np.matmul with axes=")
    operands = tuple(map(tracer, inputs))
    *dtypes, target = resolve(np.matmul, operands, casting, kwargs)
    return astype(op("matmul", *(astype(each, dtype) for each, dtype in zip(operands, dtypes, strict=True))), target)


def _vecdot(inputs: tuple[Any, ...], casting: str, kwargs: dict[str, Any]) -> Tracer:
    if kwargs.pop("axes", None) is not None:
        raise NotTraceable("np.vecdot with axes=")
    axis = kwargs.pop("axis", -1)
    operands = tuple(np.moveaxis(tracer(each), axis, -1) for each in inputs)
    *dtypes, target = resolve(np.vecdot, operands, casting, kwargs)
    return astype(op("vecdot", *(astype(each, dtype) for each, dtype in zip(operands, dtypes, strict=True))), target)

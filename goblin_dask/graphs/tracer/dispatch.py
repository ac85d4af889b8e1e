"""NumPy's functions on tracers: a rule where one is needed, else NumPy's own text, run on tracers."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import numpy as np

from goblin_dask.errors import NotTraceable
from goblin_dask.graphs.tracer.array import Tracer
from goblin_dask.graphs.tracer.rebind import Rebinding, stand_in
from goblin_dask.graphs.tracer.recorder import current

RULES: dict[Any, Callable[..., Any]] = {}
"""Rule of each function that has one."""
REFUSED: dict[Any, str] = {}
IN_PLACE = frozenset({np.copyto, np.putmask, np.put, np.place, np.fill_diagonal, np.put_along_axis})
"""Functions that change an argument: never called with the elements of a known tracer, which others may share."""


def rule(*functions: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register how functions that dispatch on their arguments are recorded."""

    def register(recorded: Callable[..., Any]) -> Callable[..., Any]:
        for function in functions:
            RULES[function] = recorded
        return recorded

    return register


def routed(*functions: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register how functions that do *not* dispatch (SciPy's) are recorded, by standing in for them."""

    def register(recorded: Callable[..., Any]) -> Callable[..., Any]:
        for function in functions:
            RULES[function] = recorded

            def stand(*args: Any, _function: Any = function, **kwargs: Any) -> Any:
                return call(_function, args, kwargs)

            stand_in(function)(stand)
        return recorded

    return register


def call(function: Any, args: Any, kwargs: Any) -> Any:
    """``__array_function__``."""
    if function not in IN_PLACE and not _any_real((args, kwargs)):
        return _fold(function, args, kwargs)
    recorded = RULES.get(function)
    if recorded is not None:
        return recorded(*args, **kwargs)
    reason = REFUSED.get(function)
    name = f"{getattr(function, '__module__', 'numpy')}.{getattr(function, '__name__', function)}"
    if reason is not None:
        raise NotTraceable(f"{name}: {reason}")
    text = getattr(function, "__wrapped__", None) or getattr(function, "_implementation", None)
    if not isinstance(text, types.FunctionType):
        raise NotTraceable(f"{name} is not in the catalogue")
    return current().rebind(text)(*args, **kwargs)


def _any_real(value: Any) -> bool:
    if isinstance(value, Tracer):
        return not value.is_known
    if isinstance(value, (list, tuple)):
        return any(map(_any_real, value))
    if isinstance(value, dict):
        return any(map(_any_real, value.values()))
    return False


def _fold(function: Any, args: Any, kwargs: Any) -> Any:
    literals: set[int] = set()

    def concrete(value: Any) -> Any:
        if isinstance(value, Tracer):
            literals.update(value.literals)
            return value._known
        if isinstance(value, list):
            return [concrete(each) for each in value]
        if isinstance(value, tuple) and type(value) is tuple:
            return tuple(concrete(each) for each in value)
        if isinstance(value, dict):
            return {name: concrete(each) for name, each in value.items()}
        return value

    result = function(*concrete(tuple(args)), **concrete(dict(kwargs)))
    return known(result, frozenset(literals))


def known(result: Any, literals: frozenset[int] = frozenset()) -> Any:
    """Known tracers in the place of the arrays in a result."""
    if type(result) is np.ndarray and result.dtype.kind in "biufc":
        return Tracer.of(result, literals)
    if isinstance(result, np.generic) and literals:
        return Tracer.of(result, literals)
    if type(result) in (tuple, list):
        return type(result)(known(each, literals) for each in result)
    if isinstance(result, tuple) and hasattr(result, "_fields"):
        return type(result)._make(known(each, literals) for each in result)  # type: ignore[attr-defined]
    return result


def rebinding() -> Rebinding:
    """The stand-ins of a new recording."""
    return Rebinding(known, known, lambda value: isinstance(value, Tracer))


def refuse(reason: str, *functions: Any) -> None:
    """Functions that cannot be programs, and why."""
    for function in functions:
        REFUSED[function] = reason


refuse(
    "the shape of the result depends on data",
    np.nonzero, np.argwhere, np.flatnonzero, np.unique, np.unique_all, np.unique_counts, np.unique_inverse,
    np.unique_values, np.compress, np.extract, np.intersect1d, np.union1d, np.setdiff1d, np.setxor1d, np.trim_zeros,
)  # fmt: skip
refuse("writes into its argument", np.put, np.place, np.fill_diagonal, np.put_along_axis)
refuse("calls Python for every slice", np.apply_along_axis, np.piecewise)
refuse(
    "writes or prints", np.save, np.savetxt, np.savez, np.savez_compressed, np.array2string, np.array_repr, np.array_str
)

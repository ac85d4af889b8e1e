"""The catalogue's elementwise operators as functions of whatever arrays: NumPy's, tracers, Dask's, xarray's."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from goblin_dask.graphs.apply import apply
from goblin_dask.graphs.operators import CATALOGUE, ELEMENTWISE, UFUNCS, activation
from goblin_dask.graphs.tracer.ufuncs import SPECIAL

SYNONYMS: Mapping[str, str] = {ufunc.__name__: name for ufunc, name in [*UFUNCS.items(), *SPECIAL.items()]}
"""The catalogue's name of each of NumPy's and SciPy's."""


@dataclass(frozen=True, slots=True)
class Own:
    """An operator that NumPy has no function of."""

    name: str

    def __call__(self, *operands: Any) -> Any:
        array = sys.modules.get("dask.array")
        if array is not None and any(isinstance(each, array.Array) for each in operands):
            return array.core.elemwise(self, *operands)
        return apply(self.name, *operands)


@dataclass(frozen=True, slots=True)
class Labelled:
    """A function that is no ufunc, and whose dispatch does not reach xarray's objects."""

    function: Callable[..., Any]

    def __call__(self, *operands: Any) -> Any:
        xarray = sys.modules.get("xarray")
        if xarray is None or not any(isinstance(each, xarray.DataArray | xarray.Dataset) for each in operands):
            return self.function(*operands)
        join = xarray.get_options()["arithmetic_join"]
        return xarray.apply_ufunc(self.function, *operands, dask="allowed", join=join, dataset_join=join)


@cache
def functions() -> dict[str, tuple[int, Callable[..., Any]]]:
    """Of each elementwise operator with one result, by its name: the number of arguments, and the function."""
    known: dict[str, Any] = {name: ufunc for ufunc, name in [*SPECIAL.items(), *UFUNCS.items()]}
    found: dict[str, tuple[int, Callable[..., Any]]] = {}
    layers = {operator.name for operator in activation.OPERATORS if operator.arity == 1}
    for name in sorted(ELEMENTWISE | layers):
        operator = CATALOGUE[name]
        wanted = set(operator.attributes) - set(operator.defaults)
        if operator.outputs == 1 and operator.arity is not None and not wanted:
            function = known.get(name) or getattr(np, name, None) or Own(name)
            found[name] = (operator.arity, function if isinstance(function, np.ufunc) else Labelled(function))
    return found

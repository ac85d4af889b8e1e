"""The catalogue: every operator that a volunteer computes, as data."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from goblin_dask.graphs.operators import (
    activation,
    batches,
    contraction,
    convolution,
    counting,
    creation,
    elementwise,
    embedding,
    fft,
    filling,
    indexing,
    linalg,
    movement,
    normalization,
    parts,
    pooling,
    reductions,
    resampling,
    scattering,
    sorting,
)
from goblin_dask.graphs.operators.base import Kind, Operator

CATALOGUE_VERSION = 2
"""Raised with every release that makes an existing program mean something else, or that adds an operator.

1: what dask.array programs need. 2: neural networks, parts of random arrays.
"""

_MODULES = (
    elementwise,
    reductions,
    contraction,
    movement,
    filling,
    sorting,
    counting,
    indexing,
    linalg,
    fft,
    creation,
    parts,
    activation,
    convolution,
    pooling,
    normalization,
    batches,
    scattering,
    embedding,
    resampling,
)

CATALOGUE: Mapping[str, Operator] = MappingProxyType(
    {operator.name: operator for module in _MODULES for operator in module.OPERATORS}
)


def of_kind(kind: Kind) -> frozenset[str]:
    """Names of the operators of a kind."""
    return frozenset(name for name, operator in CATALOGUE.items() if kind in operator.kinds)


UFUNCS = elementwise.UFUNCS

ELEMENTWISE = of_kind(Kind.ELEMENTWISE)
REDUCTION = of_kind(Kind.REDUCTION)
CUMULATIVE = of_kind(Kind.CUMULATIVE)
MOVEMENT = of_kind(Kind.MOVEMENT)
INDEXING = of_kind(Kind.INDEXING)
CONTRACTION = of_kind(Kind.CONTRACTION)
SORTING = of_kind(Kind.SORTING)
LINALG = of_kind(Kind.LINALG)
FFT = of_kind(Kind.FFT)
RANDOM = of_kind(Kind.RANDOM)
CREATION = of_kind(Kind.CREATION)
NEURAL = of_kind(Kind.NEURAL)

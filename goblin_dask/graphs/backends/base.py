"""`Backend`: an array library, how arrays get there and back, and its own kernels; NumPy's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from goblin_dask.graphs.operators.base import Array, Kernel, Operator


def _kernel(operator: Operator) -> Kernel:
    return operator.kernel


def _dtype(array: Array) -> Any:
    return array.dtype


def _no_threads(count: int) -> None:
    pass


@dataclass(frozen=True)
class Backend:
    """Where a program runs."""

    name: str
    """As `goblin_dask.graphs.backends.choice.backend_named` takes it."""
    namespace: Any
    """What kernels get as their array namespace."""
    array: type
    """Type of its arrays."""
    to_device: Callable[[Array], Array]
    """From a NumPy array."""
    to_host: Callable[[Array], Array]
    """To a NumPy array in C order."""
    overrides: Mapping[str, Kernel] = field(default_factory=dict)
    """Kernels that it has of its own, by operator."""
    kernel: Callable[[Operator], Kernel] = _kernel
    """Of all other operators."""
    dtype: Callable[[Array], Any] = _dtype
    """NumPy's dtype of one of its arrays."""
    inplace: bool = False
    """Whether kernels may write into operands that nobody reads any more."""
    quiet: Callable[[], AbstractContextManager[Any]] = nullcontext
    device: str = ""
    """What it computes with, where that is not the CPU."""
    driver: str = ""
    libraries: tuple[str, ...] = ()
    """Distributions whose versions decide on its results."""
    memory: int = 0
    """Bytes of the device's own memory; 0 where it has none of its own."""
    use_threads: Callable[[int], Any] = _no_threads
    """Sets how many threads of the CPU it computes with, beside BLAS's."""


def _in_c_order(array: Array) -> Array:
    return np.require(array, requirements="C")


NUMPY = Backend("numpy", np, np.ndarray, np.asarray, _in_c_order, inplace=True, quiet=lambda: np.errstate(all="ignore"))

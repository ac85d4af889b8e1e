"""The table of ATen's operators, and what its functions have in common."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from goblin_dask.errors import NotTraceable
from goblin_dask.graphs.tracer.array import Tracer
from goblin_dask.graphs.tracer.casting import astype, broadcast_to
from goblin_dask.graphs.tracer.recorder import op

Lowering = Callable[..., Any]
F = TypeVar("F", bound=Lowering)
LOWERINGS: dict[str, Lowering] = {}
"""By overload, as in ``aten.add.Tensor``: a function of the `Call`, the arguments and the keyword arguments."""


@dataclass(frozen=True)
class Call:
    """One node of a captured graph."""

    name: str
    """Of its result."""
    target: str
    """Overload of ATen's operator, or a function of Python's `operator` on sizes."""
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    """Both with a `Ref` in the place of what other nodes give."""
    dtypes: tuple[str, ...] = ()
    """Of its results, those that are arrays; NumPy's names."""
    promoted: str = ""
    """Dtype that ATen's promotion gives to its operands."""
    where: str = ""
    """File and line of the user's code."""

    @property
    def dtype(self) -> str:
        """Of its first result."""
        return self.dtypes[0]


@dataclass(frozen=True)
class Ref:
    """What another node gives."""

    name: str


def lowers(*overloads: str) -> Callable[[F], F]:
    """Register a function for some overloads."""

    def register(function: F) -> F:
        for overload in overloads:
            assert overload not in LOWERINGS, overload
            LOWERINGS[overload] = function
        return function

    return register


def array(value: Any, dtype: str | None = None) -> Tracer:
    """A tensor, or a number, as an array of some dtype."""
    if not isinstance(value, Tracer):
        if dtype is not None and np.dtype(dtype).kind in "iu" and isinstance(value, int):
            bits = np.dtype(dtype).itemsize * 8  # ATen wraps numbers around
            value = (value + (1 << (bits - 1))) % (1 << bits) - (1 << (bits - 1)) if dtype[0] == "i" else value
        return Tracer.of(np.asarray(value, dtype))
    return value if dtype is None else astype(value, dtype)


def arrays(call: Call, *values: Any) -> tuple[Tracer, ...]:
    """Operands in the dtype that they are computed in: of integers, functions are computed in the result's."""
    floating = bool(call.dtypes) and np.dtype(call.dtype).kind in "fcV"
    return tuple(array(value, call.dtype if floating else call.promoted or call.dtype) for value in values)


def optional(*values: Any) -> tuple[Tracer, ...]:
    """Those that are there, of operands of which the last ones may be missing."""
    return tuple(value for value in values if value is not None)


def axis_of(x: Tracer, dim: Any) -> int:
    """An axis counted from the front; ATen lets scalars have one."""
    rank = max(x.ndim, 1)
    if not -rank <= dim < rank:
        raise NotTraceable(f"axis {dim} of an array of {x.ndim} axes")
    return int(dim) % rank


def axes_of(x: Tracer, dim: Any) -> tuple[int, ...]:
    """Axes counted from the front; none means all. Scalars have none, whatever is said."""
    if not x.ndim:
        return ()
    if dim is None or (isinstance(dim, Sequence) and not len(dim)):
        return tuple(range(x.ndim))
    dims = dim if isinstance(dim, Sequence) else (dim,)
    return tuple(axis_of(x, each) for each in dims)


def shaped(x: Tracer, shape: Sequence[Any]) -> Tracer:
    """Reshaped; one length may be -1."""
    sizes = [int(each) for each in shape]
    if -1 in sizes:
        rest = math.prod(each for each in sizes if each != -1)
        sizes[sizes.index(-1)] = x.size // rest if rest else 0
    return op("reshape", x, shape=tuple(sizes))


def expanded(x: Tracer, shape: Sequence[Any]) -> Tracer:
    """Broadcast; -1 keeps a length."""
    sizes = [int(each) for each in shape]
    lead = len(sizes) - x.ndim
    return broadcast_to(x, tuple(x.shape[i - lead] if size == -1 else size for i, size in enumerate(sizes)))


def ordered(x: Tracer) -> Tracer:
    """In a dtype that is sorted: float32 has every bfloat16."""
    return astype(x, "float32") if x.dtype.name == "bfloat16" else x


def refuse(value: Any, default: Any, what: str) -> None:
    """Refuse an argument that is not computed with."""
    if value != default:
        raise NotTraceable(f"{what} is {value!r}, which volunteers do not compute")


class Streams:
    """Random numbers of one evaluation: each operator that draws has a stream of its own, below one key.

    Parameters
    ----------
    key : Tracer or None
        Two uint64; None where the program draws nothing.
    """

    def __init__(self, key: Tracer | None):
        self._key = key
        self._count = 0

    def uniform(self, shape: tuple[int, ...]) -> Tracer:
        """Uniform float32 numbers in [0, 1) that no other operator draws."""
        return op("random_uniform", self._next(), shape=shape, dtype="float32")

    def normal(self, shape: tuple[int, ...]) -> Tracer:
        """Normal float32 numbers that no other operator draws."""
        return op("random_normal", self._next(), shape=shape, dtype="float32")

    def _next(self) -> Tracer:
        if self._key is None:
            raise NotTraceable("random numbers are drawn, and there is no key")
        self._count += 1
        return op("add", self._key, Tracer.of(np.array([0, self._count], np.uint64)))


drawing: ContextVar[Streams] = ContextVar("drawing")
"""The streams of the evaluation that is under way."""

"""`Tracer`: an array without elements that records operators.

Its shape and dtype are those that NumPy's array would have. Whatever asks for elements (``bool``, ``float``, a
boolean mask) raises `NotTraceable`, unless they are known: arrays that a function makes of nothing but constants, or
finds in its closure, are tracers that carry their elements along.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from goblin_dask.errors import NotTraceable
from goblin_dask.graphs.tracer.recorder import current, spec_of
from goblin_dask.messages import ArraySpec


class Tracer(NDArrayOperatorsMixin):
    """An array of a recording.

    Parameters
    ----------
    value : int, optional
        Its number in the program; made when first needed for a known array.
    spec : ArraySpec
    known : numpy.ndarray, optional
        Its elements.
    literals : frozenset of int
        Arrays of the task's own arguments that `known` was computed from.
    literal : int, optional
        The array of the task's own arguments that it is.
    """

    __slots__ = ("_known", "_recorder", "_shape", "_value", "dtype", "literal", "literals")
    __array_priority__ = 0

    def __init__(
        self,
        value: int | None,
        spec: ArraySpec,
        known: Any = None,
        literals: frozenset[int] = frozenset(),
        literal: int | None = None,
    ) -> None:
        self._value = value
        self._recorder = None if value is None else current()
        self._known = known
        self.literals = literals
        self.literal = literal
        self._shape = spec.shape
        self.dtype = np.dtype(spec.dtype)

    @classmethod
    def of(cls, array: Any, literals: frozenset[int] = frozenset(), literal: int | None = None) -> Tracer:
        """A known array."""
        array = np.asarray(array)
        return cls(None, spec_of(array), array, literals, literal)

    # --- what recording needs -----------------------------------------------------------------------------------
    @property
    def value(self) -> int:
        """Its number in the program."""
        recorder = current()
        if self._value is not None and self._recorder is not recorder:
            raise NotTraceable("the function keeps an array between its calls")
        if self._value is None:
            self._recorder = recorder
            if self.literal is not None:
                self._value = recorder.literal(self.literal, self._known)
            else:
                recorder.baked.update(self.literals)
                self._value = recorder.found(self._known)
        return self._value

    @property
    def is_known(self) -> bool:
        return self._known is not None

    def elements(self, why: str) -> Any:
        """The elements, where they are known.

        Raises
        ------
        NotTraceable
            Where they are not: what follows depends on data.
        """
        if self._known is None:
            raise NotTraceable(f"{why} depends on data")
        current().baked.update(self.literals)
        return self._known

    def adopt(self, recorded: Tracer) -> None:
        """Take another tracer's number in the program: both stand for the same array."""
        self._value, self._recorder = recorded._value, recorded._recorder

    def become(self, other: Tracer) -> None:
        """Assignment in place: from now on this tracer stands for `other`'s value, in its own dtype."""
        from goblin_dask.graphs.tracer.casting import astype, broadcast_to

        if other.shape != self.shape:
            other = broadcast_to(other, self.shape)
        other = astype(other, self.dtype)
        self._value, self._known, self._recorder = other._value, other._known, other._recorder
        self.literals, self.literal = other.literals, other.literal

    # --- NumPy's protocols --------------------------------------------------------------------------------------
    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        from goblin_dask.graphs.tracer.ufuncs import apply

        return apply(ufunc, method, inputs, kwargs)

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        from goblin_dask.graphs.tracer.dispatch import call

        return call(function, args, kwargs)

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotTraceable("the function asks for the elements of an array (np.asarray)")

    def __array_namespace__(self, api_version: str | None = None) -> Any:
        return current().rebind(np)

    # --- shape and elements -------------------------------------------------------------------------------------
    @property
    def shape(self) -> tuple[int, ...]:
        return self._shape

    @shape.setter
    def shape(self, shape: Any) -> None:
        from goblin_dask.graphs.tracer.casting import reshape

        other = reshape(self, tuple(map(int, shape)) if isinstance(shape, (tuple, list)) else (int(shape),))
        self._value, self._known, self._recorder = other._value, other._known, other._recorder
        self.literals, self.literal = other.literals, other.literal
        self._shape = other._shape

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        return self.size * self.itemsize

    @property
    def flags(self) -> Any:
        return np.empty((0,) * self.ndim, self.dtype).flags

    @property
    def device(self) -> str:
        return "cpu"

    def to_device(self, device: str, /, *, stream: Any = None) -> Tracer:
        if device != "cpu" or stream is not None:
            raise ValueError(f"Unsupported device {device!r}, or a stream")
        return self

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of unsized object")
        return self.shape[0]

    def __iter__(self) -> Iterator[Any]:
        if not self.shape:
            raise TypeError("iteration over a 0-d array")
        if self.shape[0] > 4096:
            raise NotTraceable(f"the function iterates over {self.shape[0]} rows of an array")
        return iter([self[i] for i in range(self.shape[0])])

    def __bool__(self) -> bool:
        return bool(self.elements("a branch"))

    def __int__(self) -> int:
        return int(self.elements("an integer"))

    def __index__(self) -> int:
        return self.elements("an index").__index__()  # type: ignore[no-any-return]

    def __float__(self) -> float:
        return float(self.elements("a number"))

    def __complex__(self) -> complex:
        return complex(self.elements("a number"))

    def __contains__(self, item: Any) -> bool:
        return bool((self == item).any())

    def __hash__(self) -> int:
        raise TypeError("unhashable type: 'numpy.ndarray'")

    def __repr__(self) -> str:
        return f"<Tracer {self.dtype.name} {self.shape}>"

    def __getitem__(self, index: Any) -> Any:
        from goblin_dask.graphs.tracer.indexing import getitem

        return getitem(self, index)

    def __setitem__(self, index: Any, value: Any) -> None:
        from goblin_dask.graphs.tracer.indexing import setitem

        setitem(self, index, value)

    def item(self, *args: Any) -> Any:
        return self.elements("a Python number").item(*args)

    def tolist(self) -> Any:
        return self.elements("a list").tolist()

    def __copy__(self) -> Tracer:
        return self.copy()

    def __deepcopy__(self, memo: Any) -> Tracer:
        return self.copy()

    def copy(self, order: str = "C") -> Tracer:
        return Tracer(self._value, ArraySpec(self.shape, self.dtype.name), self._known, self.literals, self.literal)

    def view(self, dtype: Any = None, type: Any = None) -> Tracer:
        if dtype is not None and dtype is not np.ndarray and np.dtype(dtype) != self.dtype:
            from goblin_dask.graphs.tracer.casting import bitcast

            return bitcast(self, np.dtype(dtype))
        return self.copy()

    def fill(self, value: Any) -> None:
        self[...] = value

    @property
    def real(self) -> Any:
        return np.real(self)

    @real.setter
    def real(self, value: Any) -> None:
        raise NotTraceable("the real part is assigned to")

    @property
    def imag(self) -> Any:
        return np.imag(self)

    @property
    def T(self) -> Any:
        return np.transpose(self)

    @property
    def mT(self) -> Any:
        return np.swapaxes(self, -1, -2)

    @property
    def flat(self) -> Any:
        return self.reshape(-1)

    def astype(
        self, dtype: Any, order: str = "K", casting: str = "unsafe", subok: bool = True, copy: bool = True
    ) -> Tracer:
        from goblin_dask.graphs.tracer.casting import astype

        if not np.can_cast(self.dtype, dtype, casting=casting):  # type: ignore[arg-type]
            raise TypeError(
                f"Cannot cast array data from {self.dtype!r} to {np.dtype(dtype)!r} according to {casting!r}"
            )
        return astype(self, dtype).copy() if copy or np.dtype(dtype) != self.dtype else self

    def reshape(self, *shape: Any, order: str = "C", copy: bool | None = None) -> Any:
        return np.reshape(self, shape[0] if len(shape) == 1 else shape, order=order)  # type: ignore[call-overload]

    def resize(self, *shape: Any, **kwargs: Any) -> None:
        raise NotTraceable("the function resizes an array in place")

    def transpose(self, *axes: Any) -> Any:
        return np.transpose(self, None if not axes else axes[0] if len(axes) == 1 else axes)

    def ravel(self, order: str = "C") -> Any:
        return np.ravel(self, order=order)  # type: ignore[call-overload]

    def flatten(self, order: str = "C") -> Any:
        return np.ravel(self, order=order)  # type: ignore[call-overload]

    def sort(self, axis: int = -1, kind: Any = None, order: Any = None, stable: Any = None) -> None:
        self.become(np.sort(self, axis=axis))  # type: ignore[arg-type]

    def partition(self, kth: Any, axis: int = -1, **kwargs: Any) -> None:
        self.become(np.partition(self, kth, axis=axis))  # type: ignore[arg-type]

    def byteswap(self, inplace: bool = False) -> Any:
        raise NotTraceable("byteswap")


def _method(name: str, function: Any) -> Any:
    def method(self: Tracer, *args: Any, **kwargs: Any) -> Any:
        return function(self, *args, **kwargs)

    method.__name__ = name
    return method


for _name in [
    "all",
    "any",
    "argmax",
    "argmin",
    "argpartition",
    "argsort",
    "choose",
    "clip",
    "compress",
    "cumprod",
    "cumsum",
    "diagonal",
    "dot",
    "max",
    "mean",
    "min",
    "nonzero",
    "prod",
    "ptp",
    "put",
    "repeat",
    "round",
    "searchsorted",
    "squeeze",
    "std",
    "sum",
    "swapaxes",
    "take",
    "trace",
    "var",
]:
    setattr(Tracer, _name, _method(_name, getattr(np, _name)))
for _name in ("conj", "conjugate"):
    setattr(Tracer, _name, _method(_name, np.conjugate))

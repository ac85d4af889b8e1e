"""What one recording knows: the program in the making, the operands it was given, those it found."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import numpy as np

from goblin_dask.errors import InputError, NotTraceable
from goblin_dask.graphs.builder import CONSTANT_LIMIT, Builder
from goblin_dask.messages import ArraySpec

if TYPE_CHECKING:
    from goblin_dask.graphs.tracer.array import Tracer
    from goblin_dask.graphs.tracer.rebind import Rebinding

LONGEST = 10_000
"""Operators in a recording: a function that applies more loops in Python, and its program would be slower than it."""

_active: ContextVar[Recorder | None] = ContextVar("recorder", default=None)


class Recorder:
    """State of one recording."""

    def __init__(self, rebind: Rebinding) -> None:
        self.rebind = rebind
        self.builder = Builder()
        self.slots: list[tuple[str, Any]] = []
        """Of each declared input: ``("operand", number)``, ``("literal", number)`` or ``("found", array)``."""
        self.baked: set[int] = set()
        """Literals whose values the recording looked at: the program holds for these values alone."""
        self.length = 0
        """Operators recorded so far."""
        self._found: dict[int, tuple[Any, int]] = {}
        self._literals: dict[int, int] = {}

    def operand(self, number: int, spec: ArraySpec) -> int:
        """Declare the input that is operand `number` of the task."""
        self.slots.append(("operand", number))
        return self.builder.input(spec)

    def literal(self, number: int, array: np.ndarray[Any, Any]) -> int:
        """The input that is array `number` of the task's own arguments."""
        if number not in self._literals:
            self.slots.append(("literal", number))
            self._literals[number] = self.builder.input(spec_of(array))
        return self._literals[number]

    def found(self, array: np.ndarray[Any, Any]) -> int:
        """A value that holds an array which is known now: part of the program when small, an input else."""
        known = self._found.get(id(array))
        if known is not None:
            return known[1]
        spec = spec_of(array)
        if array.size and array.ndim and uniform(array):
            (value,) = self.builder.add(
                "broadcast_to", [self.builder.constant(array.reshape(-1)[0])], shape=array.shape
            )
        elif array.nbytes <= CONSTANT_LIMIT:
            value = self.builder.constant(array)
        else:
            self.slots.append(("found", array))
            value = self.builder.input(spec)
        self._found[id(array)] = (array, value)
        return value


def uniform(array: np.ndarray[Any, Any]) -> bool:
    """Whether all elements have the same bits."""
    flat = np.ascontiguousarray(array).reshape(-1).view(np.dtype((np.void, array.itemsize)))
    return bool((flat == flat[0]).all())


def spec_of(array: Any) -> ArraySpec:
    """Shape and dtype of an array that a program can hold.

    Raises
    ------
    NotTraceable
        For any other.
    """
    dtype = array.dtype
    if dtype.kind not in "biufcV" or (dtype.kind == "V" and dtype.name != "bfloat16") or not dtype.isnative:
        raise NotTraceable(f"arrays of dtype {dtype} are not computed on volunteers")
    if (dtype.itemsize > 8 and dtype.kind != "c") or dtype.itemsize > 16:
        raise NotTraceable(f"arrays of dtype {dtype} are not computed on volunteers")
    return ArraySpec(tuple(map(int, array.shape)), dtype.name)


def current() -> Recorder:
    """The recording under way."""
    recorder = _active.get()
    if recorder is None:
        raise NotTraceable("an array of a recording that has ended is used")
    return recorder


@contextmanager
def recording(rebind: Rebinding) -> Iterator[Recorder]:
    """Record what happens to tracers."""
    recorder = Recorder(rebind)
    token = _active.set(recorder)
    try:
        yield recorder
    finally:
        _active.reset(token)


def op(name: str, *operands: Tracer, **attributes: Any) -> Tracer:
    """Record an operator of one output."""
    return ops(name, *operands, **attributes)[0]


def ops(name: str, *operands: Tracer, **attributes: Any) -> tuple[Tracer, ...]:
    """Record an operator.

    Raises
    ------
    NotTraceable
        When the catalogue does not have it, or not for such operands.
    """
    from goblin_dask.graphs.tracer.array import Tracer

    recorder = current()
    recorder.length += 1
    if recorder.length > LONGEST:
        raise NotTraceable(f"the function applies more than {LONGEST} operators")
    try:
        values = recorder.builder.add(name, [operand.value for operand in operands], **attributes)
    except InputError as error:
        raise NotTraceable(str(error)) from error
    return tuple(Tracer(value, recorder.builder.spec(value)) for value in values)

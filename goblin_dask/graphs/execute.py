"""`execute`: a program on arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from goblin_dask.errors import GoblinError, InputError, ProgramError
from goblin_dask.graphs.backends.base import NUMPY, Backend
from goblin_dask.graphs.operators.base import shorten
from goblin_dask.graphs.operators.dtypes import DTYPES
from goblin_dask.graphs.program import Program
from goblin_dask.graphs.schedule import Schedule, Step, schedule
from goblin_dask.messages import ArraySpec

Array = Any
Source = Array | Callable[[], Array]
Observer = Callable[[int, tuple[Array, ...]], None]
Allocator = Callable[[ArraySpec], "Array | None"]


def execute(
    program: Program,
    inputs: Sequence[Source],
    *,
    backend: Backend | None = None,
    observe: Observer | None = None,
    allocate: Allocator | None = None,
) -> tuple[Array, ...]:
    """Run a program that was checked.

    Parameters
    ----------
    program : Program
    inputs : sequence of array or callable
        One for each slot. A callable without arguments is called when its slot is first read, and its array dropped
        after the last use; slots are first read in ascending order.
    backend : Backend, optional
        Default: `NUMPY`.
    observe : callable, optional
        Called with the number of each node and its outputs, before anything else can overwrite them.
    allocate : callable, optional
        Called with the spec of an output that can be computed in memory of the caller's choice, and returns an array in
        C order for it, or None. Only where the backend's arrays are NumPy's.

    Returns
    -------
    tuple of numpy.ndarray
        The outputs, in C order. One that is an input, or a view of one, shares its memory.

    Raises
    ------
    InputError
        An input of another shape or dtype than declared; data that an operator cannot compute with (a singular matrix,
        an index that is out of range).
    ProgramError
        A kernel returned something else than its rule says.
    """
    plan = schedule(program)
    if len(inputs) != len(program.inputs):
        raise InputError(f"a program of {len(program.inputs)} inputs was given {len(inputs)}")
    backend = backend or NUMPY
    values: list[Array] = [None] * len(plan.specs)
    with backend.quiet():
        for index, step in enumerate(plan.steps):
            for slot in step.loads:
                values[slot] = _load(slot, inputs[slot], program.inputs[slot], backend)
            _run(index, step, values, backend, observe, allocate if backend.inplace else None)
        for slot in plan.loads:
            values[slot] = _load(slot, inputs[slot], program.inputs[slot], backend)
        return _outputs(program, plan, values, backend)


def _load(slot: int, source: Any, spec: ArraySpec, backend: Backend) -> Array:
    array = source() if callable(source) else source
    kinds: Any = (np.ndarray, backend.array)
    if not isinstance(array, kinds):
        raise InputError(f"input {slot} is a {type(array).__name__}, expected an array")
    dtype = array.dtype if isinstance(array, np.ndarray) else backend.dtype(array)
    if array.shape != spec.shape or dtype != DTYPES[spec.dtype]:
        raise InputError(f"input {slot} is {dtype} {array.shape}, declared was {spec.dtype} {spec.shape}")
    return array if isinstance(array, backend.array) else backend.to_device(array)


def _run(
    index: int,
    step: Step,
    values: list[Array],
    backend: Backend,
    observe: Observer | None,
    allocate: Allocator | None,
) -> None:
    operator = step.operator
    operands = tuple([values[operand] for operand in step.operands])
    try:
        override = backend.overrides.get(operator.name)
        if override is not None:
            results = override(backend.namespace, operands, step.attributes)
        elif operator.into is not None and (out := _destination(step, operands, backend, allocate)) is not None:
            operator.into(backend.namespace, operands, step.attributes, out)
            results = (out,)
        else:
            results = backend.kernel(operator)(backend.namespace, operands, step.attributes)
    except (GoblinError, MemoryError):
        raise
    except Exception as error:
        given = " and ".join(f"{backend.dtype(o)} {tuple(o.shape)}" for o in operands[:4])
        raise InputError(f"node {index}, {operator.name} of {given}: {error}") from error
    if len(results) != len(step.outputs):
        raise ProgramError(f"node {index}: {operator.name} returned {len(results)} arrays, not {len(step.outputs)}")
    kept = []
    for value, result, spec in zip(step.outputs, results, step.specs, strict=True):
        if type(result) is not backend.array:
            result = backend.namespace.asarray(result)
        dtype = backend.dtype(result)
        if result.shape != spec.shape or dtype != DTYPES[spec.dtype]:
            raise ProgramError(
                f"node {index}: {operator.name} returned {dtype} {result.shape}, its rule says {spec.dtype} "
                f"{spec.shape}; attributes {shorten(step.attributes)}"
            )
        values[value] = result
        kept.append(result)
    if observe is not None:
        observe(index, tuple(kept))
    for value in step.releases:
        values[value] = None


def _destination(step: Step, operands: tuple[Array, ...], backend: Backend, allocate: Allocator | None) -> Array | None:
    """The array that a step writes into, where it does not make its own."""
    if step.reuse >= 0 and backend.inplace and operands[step.reuse].flags.c_contiguous:
        return operands[step.reuse]
    return allocate(step.specs[0]) if allocate is not None and step.final else None


def _outputs(program: Program, plan: Schedule, values: list[Array], backend: Backend) -> tuple[Array, ...]:
    done: dict[int, Array] = {}
    for output in program.outputs:
        if output not in done:
            done[output] = backend.to_host(values[output])
            values[output] = None
    return tuple([done[output] for output in program.outputs])

"""`execute`: a program on arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from goblin_dask.errors import GoblinError, InputError, ProgramError
from goblin_dask.graphs.operators.base import Kernel, shorten
from goblin_dask.graphs.operators.dtypes import DTYPES
from goblin_dask.graphs.program import Program
from goblin_dask.graphs.schedule import Schedule, Step, schedule
from goblin_dask.messages import ArraySpec

Array = Any
Source = Array | Callable[[], Array]
Observer = Callable[[int, tuple[Array, ...]], None]
Allocator = Callable[[ArraySpec], "Array | None"]


@dataclass(frozen=True)
class Backend:
    """Where a program runs: an array namespace with NumPy's names, and how arrays get there and back."""

    name: str
    namespace: Any
    array: type
    """Type of its arrays."""
    to_device: Callable[[Array], Array]
    """From a NumPy array."""
    to_host: Callable[[Array], Array]
    """To a NumPy array in C order."""
    overrides: Mapping[str, Kernel] = field(default_factory=dict)
    """Kernels that it has of its own, by operator."""
    inplace: bool = False
    """Whether kernels may write into operands that nobody reads any more."""
    quiet: Callable[[], AbstractContextManager[Any]] = nullcontext


def _in_c_order(array: Array) -> Array:
    return np.require(array, requirements="C")


NUMPY = Backend("numpy", np, np.ndarray, np.asarray, _in_c_order, inplace=True, quiet=lambda: np.errstate(all="ignore"))


def cupy_backend() -> Backend:
    """CuPy on the current device.

    Raises
    ------
    InputError
        When CuPy is not installed.
    """
    try:
        import cupy
    except ImportError as error:
        raise InputError("there is no CuPy here: install goblin-dask[cupy]") from error
    return Backend("cupy", cupy, cupy.ndarray, cupy.asarray, lambda array: cupy.asnumpy(array, order="C"))


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
    if array.shape != spec.shape or array.dtype != DTYPES[spec.dtype]:
        raise InputError(f"input {slot} is {array.dtype} {array.shape}, declared was {spec.dtype} {spec.shape}")
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
            results = operator.kernel(backend.namespace, operands, step.attributes)
    except (GoblinError, MemoryError):
        raise
    except Exception as error:
        given = " and ".join(f"{o.dtype} {o.shape}" for o in operands[:4])
        raise InputError(f"node {index}, {operator.name} of {given}: {error}") from error
    if len(results) != len(step.outputs):
        raise ProgramError(f"node {index}: {operator.name} returned {len(results)} arrays, not {len(step.outputs)}")
    kept = []
    for value, result, spec in zip(step.outputs, results, step.specs, strict=True):
        if type(result) is not backend.array:
            result = backend.namespace.asarray(result)
        if result.shape != spec.shape or result.dtype != DTYPES[spec.dtype]:
            raise ProgramError(
                f"node {index}: {operator.name} returned {result.dtype} {result.shape}, its rule says {spec.dtype} "
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

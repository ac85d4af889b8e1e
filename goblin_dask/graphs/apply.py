"""`apply`: one operator of the catalogue as a function of arrays, which computes on arrays and records on tracers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from goblin_dask.graphs.operators import CATALOGUE
from goblin_dask.graphs.tracer.array import Tracer
from goblin_dask.graphs.tracer.recorder import ops

F = TypeVar("F", bound=Callable[..., Any])


def applies_operators(function: F) -> F:
    """Mark a function that does nothing but apply operators with `apply`, and take its arguments apart.

    Its recording is what it does: a check of one against the other would run the same kernels twice.
    """
    function.applies_operators = True  # type: ignore[attr-defined]
    return function


def apply(name: str, *operands: Any, **attributes: Any) -> Any:
    """Apply an operator.

    Parameters
    ----------
    name : str
        Its name in the catalogue.
    *operands : array_like
        NumPy arrays, or the tracers of a function that is being recorded.
    **attributes
        As `goblin_dask.graphs.builder.Builder.add` takes them.

    Returns
    -------
    array, or tuple of arrays
        A tuple where it has several outputs.

    Raises
    ------
    ProgramError
        When there is no such operator or attribute.
    InputError
        Where it does not take such operands.
    """
    if any(isinstance(operand, Tracer) for operand in operands):
        given = [each if isinstance(each, Tracer) else Tracer.of(each) for each in operands]
        outputs: Any = ops(name, *given, **attributes)
    else:
        outputs = _computed(name, [np.asarray(each) for each in operands], attributes)
    return outputs[0] if len(outputs) == 1 and CATALOGUE[name].outputs == 1 else outputs


def _computed(name: str, operands: list[Any], attributes: dict[str, Any]) -> tuple[Any, ...]:
    from goblin_dask.graphs.builder import Builder
    from goblin_dask.graphs.execute import execute
    from goblin_dask.graphs.tracer.recorder import spec_of

    build = Builder()
    numbers = [build.input(spec_of(each)) for each in operands]
    program, slots = build.finish(build.add(name, numbers, **attributes))
    return execute(program, [operands[slot] for slot in slots])

"""The registry of ways to lie, and what they have in common."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from goblin_dask.errors import InputError
from goblin_dask.graphs.program import Program
from goblin_dask.verify.check import thresholds
from goblin_dask.verify.operands import Array

Outputs = list[Array]
Liar = Callable[[Program, Sequence[Array], Outputs, np.random.Generator, Mapping[str, Any]], Outputs]
LIARS: dict[str, Liar] = {}
"""By name."""


def liar(name: str) -> Callable[[Liar], Liar]:
    """Register a way of lying."""

    def register(function: Liar) -> Liar:
        LIARS[name] = function
        return function

    return register


def corrupt(
    name: str,
    program: Program,
    inputs: Sequence[Array],
    outputs: Sequence[Array],
    rng: np.random.Generator,
    **options: Any,
) -> Outputs:
    """Outputs as a liar would hand them in; the given ones are not touched.

    Parameters
    ----------
    name : str
        One of `LIARS`.
    options
        ``times``: size of the error in thresholds of the check (``entry``, ``pair``, ``tile``, ``low_rank``, ``bias``,
        ``margin``), default 3. ``share``: of rows, columns, depth or rank (``scaled_rows``, ``panel``, ``truncated``,
        ``approximated``). ``bits``: of a mantissa that stay (``coarse``). ``factor``: by which results are too large
        (``scaled_rows``, ``blown_up``). ``limits``: the thresholds, where they are known. ``previous``: outputs of
        another task (``another_chunk``, ``old_result``).

    Raises
    ------
    InputError
        For a name that nobody registered.
    """
    if name not in LIARS:
        raise InputError(f"no liar is called {name!r}; there are: {', '.join(sorted(LIARS))}")
    copies = [np.array(output) for output in outputs]
    with np.errstate(all="ignore"):
        return LIARS[name](program, inputs, copies, rng, options)


def victim_of(outputs: Outputs, rng: np.random.Generator) -> int:
    """Which output is going to be wrong: one that has elements."""
    filled = [n for n, output in enumerate(outputs) if output.size]
    return int(rng.choice(filled)) if filled else 0


def place(array: Array, rng: np.random.Generator) -> tuple[int, ...]:
    """Index of an entry at random."""
    return tuple(int(rng.integers(n)) for n in array.shape)


def error_size(
    program: Program, inputs: Sequence[Array], outputs: Outputs, victim: int, options: Mapping[str, Any]
) -> float:
    """Size of a wrong entry; computed from the check's own thresholds."""
    limits = options["limits"] if "limits" in options else thresholds(program, inputs, outputs)
    return float(options.get("times", 3.0) * limits[victim])


def shift(array: Array, at: tuple[int, ...], by: float) -> None:
    """Change an entry; one of a dtype without fractions changes by at least one unit."""
    if array.dtype == np.bool_:
        array[at] = ~array[at]
    elif array.dtype.kind in "iu":
        array[at] ^= array.dtype.type(1)
    else:
        before = array[at]
        array[at] = array.dtype.type(before + by)
        if array[at] == before:
            array[at] = np.nextafter(before, array.dtype.type(np.inf)) if array.dtype.kind == "f" else before * 2 + 1

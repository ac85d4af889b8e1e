"""Cheaper answers that look like results: what the lazy hand in."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from goblin_dask.graphs.execute import execute
from goblin_dask.graphs.program import Program
from goblin_dask.testing.liars.registry import LIARS, Outputs, liar, place, shift
from goblin_dask.verify.operands import Array
from goblin_dask.verify.tolerances import is_floating

Shortcut = Callable[[Array, np.random.Generator, Mapping[str, Any]], Array]


def _each(name: str) -> Callable[[Shortcut], Shortcut]:
    """Register a shortcut that is taken for every output; integers, which it would not change, get a wrong entry."""

    def register(function: Shortcut) -> Shortcut:
        def lie(
            program: Program,
            inputs: Sequence[Array],
            outputs: Outputs,
            rng: np.random.Generator,
            options: Mapping[str, Any],
        ) -> Outputs:
            answers = [function(array, rng, options).astype(array.dtype, copy=False) for array in outputs]
            for answer, array in zip(answers, outputs, strict=True):
                if answer.size and not is_floating(answer.dtype) and np.array_equal(answer, array):
                    shift(answer, place(answer, rng), 0.0)
            return answers

        lie.__doc__ = function.__doc__
        LIARS[name] = lie
        return function

    return register


@_each("approximated")
def _approximated(array: Array, rng: np.random.Generator, options: Mapping[str, Any]) -> Array:
    """The best approximation of low rank: an eighth of the full one."""
    if array.ndim < 2 or not is_floating(array.dtype):
        return array
    u, s, v = np.linalg.svd(np.nan_to_num(array.astype(np.float64)), full_matrices=False)
    rank = max(1, int(s.shape[-1] * float(options.get("share", 0.125))))
    low: Array = (u[..., :rank] * s[..., None, :rank]) @ v[..., :rank, :]
    return low


@_each("coarse")
def _coarse(array: Array, rng: np.random.Generator, options: Mapping[str, Any]) -> Array:
    """Rounded to fewer bits, so that it packs better."""
    if not is_floating(array.dtype):
        return array
    mantissa, exponent = np.frexp(array.astype(np.float64))
    steps = 2.0 ** float(options.get("bits", 8))
    rounded: Array = np.ldexp(np.round(mantissa * steps) / steps, exponent)
    return rounded


@_each("repeated")
def _repeated(array: Array, rng: np.random.Generator, options: Mapping[str, Any]) -> Array:
    """The first half of the rows, twice."""
    if not array.ndim:
        return np.zeros_like(array)
    half = -(-array.shape[0] // 2)
    return np.concatenate([array[:half], array[: array.shape[0] - half]])


@_each("interpolated")
def _interpolated(array: Array, rng: np.random.Generator, options: Mapping[str, Any]) -> Array:
    """Every second row was computed, and those between are the mean of their neighbours."""
    if not array.ndim or not is_floating(array.dtype):
        return array
    answer = array.copy()
    between = answer[1::2]
    between[...] = (array[0 : 2 * len(between) : 2] + np.roll(array, -2, axis=0)[0 : 2 * len(between) : 2]) / 2
    return answer


@_each("constant")
def _constant(array: Array, rng: np.random.Generator, options: Mapping[str, Any]) -> Array:
    """The mean, everywhere."""
    if not array.size or array.dtype.kind == "b":
        return array
    return np.full_like(array, np.nan_to_num(array.astype(np.complex128)).mean().real)


@_each("guessed")
def _guessed(array: Array, rng: np.random.Generator, options: Mapping[str, Any]) -> Array:
    """Numbers at random, without a look at the inputs."""
    return np.asarray(rng.standard_normal(array.shape) * 100)


@liar("truncated")
def _truncated(
    program: Program, inputs: Sequence[Array], outputs: Outputs, rng: np.random.Generator, options: Mapping[str, Any]
) -> Outputs:
    """Sums that end early: the end of the last axis of every input counts as zero."""
    changed = [np.array(array) for array in inputs]
    for array in changed:
        if array.ndim:
            left = int(array.shape[-1] * float(options.get("share", 0.5)))
            array[..., left:] = 0
    return list(execute(program, changed))

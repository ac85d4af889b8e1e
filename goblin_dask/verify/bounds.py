"""Errors of rounding, carried through a program node by node, element by element.

Beside each value in double precision go two bounds of an honest volunteer's error: a *tight* one that honest results
keep (sums of n terms err like the square root of n) and a *hard* one that no order of summation exceeds. Elementwise
operators carry errors by being evaluated at the ends of the operand's interval, so discontinuities (comparisons,
rounding, argmax) become uncertain exactly where the operand is near one. Operators without a rule get a scale from the
distance of a run in single precision: the sigma rule, for that node; what depends on it is *soft*.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from goblin_dask.graphs.operators import CATALOGUE, CREATION, CUMULATIVE, ELEMENTWISE, INDEXING, MOVEMENT
from goblin_dask.graphs.operators.base import Specs
from goblin_dask.graphs.operators.dtypes import DTYPES
from goblin_dask.graphs.program import Program
from goblin_dask.graphs.schedule import Step, schedule
from goblin_dask.messages import ArraySpec
from goblin_dask.verify.evaluate import DOUBLE, SINGLE, Source, apply, cast, load, needed
from goblin_dask.verify.operands import Array
from goblin_dask.verify.sigma import DOUBLE as DOUBLE_WEIGHT
from goblin_dask.verify.sigma import LARGEST, rms
from goblin_dask.verify.tolerances import accumulator, gamma, is_floating, largest, real, smallest_normal, unit_roundoff

BASIC = frozenset(
    {
        *("abs", "add", "astype", "bitwise_invert", "clip", "conj", "copysign", "divide", "equal", "fabs", "fmax"),
        *("floor_divide", "fmin", "greater", "greater_equal", "less", "less_equal", "maximum", "minimum", "multiply"),
        *("negative", "not_equal", "positive", "reciprocal", "sign", "sqrt", "square", "subtract", "where"),
    }
)
"""Elementwise operators that IEEE arithmetic rounds correctly: one rounding; others may err by a few."""

FUNCTION_ULPS = 16.0
"""Roundings that a library's other functions may err by."""

TIGHT = 4.0
"""Times sqrt(n) roundings of the sum of magnitudes: the tight bound of a sum of n terms."""


@dataclass
class Bounded:
    """A value in double precision, and how far an honest volunteer's may be from it."""

    fine: Array
    coarse: Array
    """From the run in single precision."""
    tight: Array | None = None
    """None: exact."""
    hard: Array | None = None
    soft: bool = False
    """Whether some bound is a guess from two runs, so that nothing can be proven wrong by it."""

    @property
    def exact(self) -> bool:
        return self.tight is None

    def errors(self) -> tuple[Array, Array]:
        """Both bounds; zeros where the value is exact."""
        if self.tight is None or self.hard is None:
            zeros = np.zeros(self.fine.shape)
            return zeros, zeros
        return self.tight, self.hard


def carry(program: Program, inputs: Sequence[Source], values: Sequence[int]) -> tuple[Bounded, ...]:
    """Bounds of some values of a program."""
    plan, steps = schedule(program), needed(program, values)
    last = {operand: number for number in steps for operand in plan.steps[number].operands}
    double = any(plan.specs[v].dtype in SINGLE for number in steps for v in plan.steps[number].outputs)
    precision = SINGLE if double else {}
    known: dict[int, Bounded] = {}

    def read(value: int) -> Bounded:
        if value not in known:
            array = load(inputs[value])
            known[value] = Bounded(cast(array, DOUBLE), cast(array, precision))
        return known[value]

    with np.errstate(all="ignore"):
        for number in steps:
            step = plan.steps[number]
            operands = [read(operand) for operand in step.operands]
            for value, found in zip(step.outputs, _step(step, operands, precision), strict=True):
                known[value] = found
            for operand in step.operands:
                if last[operand] == number and operand not in values:
                    known.pop(operand, None)
        return tuple(read(value) for value in values)


def _step(step: Step, operands: list[Bounded], precision: Any) -> list[Bounded]:
    fine = apply(step, [o.fine for o in operands], DOUBLE)
    coarse = apply(step, [o.coarse for o in operands], precision)
    soft = any(o.soft for o in operands)
    dtypes = [DTYPES[spec.dtype] for spec in step.specs]
    rule = _rule(step)
    inexact = not all(o.exact for o in operands)
    found = []
    for number, (y, z, dtype) in enumerate(zip(fine, coarse, dtypes, strict=True)):
        number_like = is_floating(dtype) or dtype.kind == "c"
        certain = step.operator.name in MOVEMENT | INDEXING | CREATION or not number_like
        if certain and not inexact and not _may_choose(step):
            found.append(Bounded(y, z))
            continue
        bounds = rule(step, operands, y, number, dtype) if rule is not None and y.shape == z.shape else None
        if bounds is None:
            found.append(_guess(operands, y, z, dtype, inexact))
            continue
        tight, hard = (_limits(np.asarray(bound, np.float64), y, dtype) for bound in bounds)
        if not number_like and not tight.any() and not hard.any():
            found.append(Bounded(y, z))  # a comparison far from its edge is certain, and so is what depends on it
            continue
        found.append(Bounded(y, z, tight, hard, soft))
    return found


def _finite(values: Array) -> Array:
    """Zeros in place of infinities and NaN, in each part of a complex number."""
    if values.dtype.kind == "c":
        return np.asarray(_finite(values.real) + 1j * _finite(values.imag))
    return np.where(np.isfinite(values), values, 0) if values.dtype.kind not in "biu" else values


def _limits(bound: Array, y: Array, dtype: np.dtype[Any]) -> Array:
    """Add what ends of the dtype's range do: flushing to zero, overflow."""
    bound = np.broadcast_to(bound, y.shape)
    if not (is_floating(dtype) or dtype.kind == "c"):
        return bound
    part = real(dtype)
    tiny = 2.0**-24 if part == np.float16 else smallest_normal(part)
    bound = bound + tiny
    # NaN bounds come from infinities that meet: anything may have happened
    bound = np.where(np.isnan(bound) & np.isfinite(y), np.inf, bound)
    return np.where(np.isfinite(y) & ~(np.abs(y) + bound < largest(part)), np.inf, bound)


def _guess(operands: list[Bounded], y: Array, z: Array, dtype: np.dtype[Any], inexact: bool) -> Bounded:
    """The sigma rule for one node. Where squares may overflow, the steps decide what is infinite: nothing is proven."""
    if y.shape != z.shape or not (is_floating(dtype) or dtype.kind == "c"):
        anything = np.full(y.shape, np.inf) if inexact else np.zeros(y.shape)
        return Bounded(y, z, anything, anything, soft=True)
    u = unit_roundoff(dtype)
    apart = _finite(np.where(np.isfinite(z), y, 0) - _finite(z))
    spread = rms(apart) * (DOUBLE_WEIGHT if u <= 2.0**-53 else 1.0)
    scale = LARGEST * max(spread, u * rms(_finite(y)) / 2)
    tight = _limits(np.full(y.shape, scale), y, dtype)
    end = np.sqrt(largest(accumulator(real(dtype)))) / 1024
    # infinities that masks put in and that are gone from the result do no harm
    within = all(np.abs(_finite(o.fine)).max(initial=0) < end for o in operands if o.fine.dtype.kind not in "biu")
    within = within and bool(np.isfinite(y).all() and np.isfinite(z).all())
    return Bounded(y, z, tight, tight if within else np.full(y.shape, np.inf), soft=True)


Rule = Callable[[Step, list[Bounded], Array, int, np.dtype[Any]], "tuple[Array, Array] | None"]


def _rule(step: Step) -> Rule | None:
    name = step.operator.name
    if _may_choose(step):
        return _split
    if name in RULES:
        return RULES[name]
    if name in ("bitcast", "setitem") or name in CREATION:
        return None
    if name in ELEMENTWISE:
        return _elementwise
    if name in MOVEMENT or name in INDEXING:
        return _moved
    return None


def _both(operands: list[Bounded], function: Callable[[list[Array], Callable[[int, float], float]], Array]) -> Any:
    """Apply a function to the tight errors with the tight growth of sums, and to the hard ones with theirs."""
    tight = function([o.errors()[0] for o in operands], lambda n, u: TIGHT * np.sqrt(n) * u)
    hard = function([o.errors()[1] for o in operands], lambda n, u: 2 * gamma(n, u))
    return tight, hard


def _elementwise(step: Step, operands: list[Bounded], y: Array, number: int, dtype: np.dtype[Any]) -> Any:
    ulps = 1.0 if step.operator.name in BASIC else FUNCTION_ULPS
    if dtype.kind == "c":
        ulps *= 4
    u = unit_roundoff(dtype) if is_floating(dtype) or dtype.kind == "c" else 0.0
    fine = [o.fine for o in operands]

    def error(errors: list[Array], growth: Any) -> Array:
        total = ulps * u * np.abs(_finite(y)) if u else np.zeros(y.shape)
        for i, operand in enumerate(operands):
            if operand.exact or fine[i].dtype.kind == "b":
                if not operand.exact:
                    total = total + np.where(errors[i] > 0, np.inf, 0.0)
                continue
            worst = np.zeros(y.shape)
            for way in (1, -1, 1j, -1j) if fine[i].dtype.kind == "c" else (1, -1):
                moved = fine[i] + way * errors[i]
                if fine[i].dtype.kind in "iu":
                    moved = np.where(errors[i] > 0, moved, fine[i])
                    moved = np.where(np.isfinite(moved), moved, 0).astype(fine[i].dtype)
                there = apply(step, [*fine[:i], moved.astype(fine[i].dtype), *fine[i + 1 :]], DOUBLE)[number]
                change = _difference(there, y)
                worst = np.maximum(worst, np.broadcast_to(np.where(np.isnan(change), np.inf, change), y.shape))
            total = total + worst
        return total

    return _both(operands, error)


def _difference(a: Array, b: Array) -> Array:
    """Distance, 0 between equal infinities and between NaNs."""
    if a.dtype.kind == "b":
        return np.asarray(a != b, np.float64)
    wide = np.complex128 if "c" in a.dtype.kind + b.dtype.kind else np.float64
    a, b = a.astype(wide), b.astype(wide)
    return np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, np.abs(a - b))


def _moved(step: Step, operands: list[Bounded], y: Array, number: int, dtype: np.dtype[Any]) -> Any:
    if step.operator.name in INDEXING and not all(o.exact for o in operands[1:]):
        return None
    joined = step.operator.name in ("concat", "stack")

    def error(errors: list[Array], growth: Any) -> Array:
        parts = errors if joined else [errors[0], *(o.fine for o in operands[1:])]
        return np.abs(apply(step, parts, DOUBLE)[number])

    return _both(operands, error)


def _linear(step: Step, operands: list[Bounded], y: Array, number: int, dtype: np.dtype[Any]) -> Any:
    """Sums over axes, running or not; without a bound where some order of the finite terms may overflow."""
    if not is_floating(dtype) and dtype.kind != "c":
        return None
    size = np.abs(_finite(operands[0].fine)).astype(np.float64)
    terms = size.size // max(y.size, 1)
    if step.operator.name in CUMULATIVE:
        axis = step.attributes.get("axis")
        terms = size.shape[axis] if isinstance(axis, int) else size.size
    u, end = unit_roundoff(dtype), largest(accumulator(real(dtype))) / 2
    whole = np.abs(apply(step, [size], DOUBLE)[number])
    certain = whole * (terms if step.operator.name == "mean" else 1) < end

    def error(errors: list[Array], growth: Any) -> Array:
        carried = np.abs(apply(step, [errors[0]], DOUBLE)[number])
        return np.asarray(carried + np.where(certain, growth(terms + 2, u) * whole, np.inf))

    return _both(operands, error)


def _bilinear(step: Step, operands: list[Bounded], y: Array, number: int, dtype: np.dtype[Any]) -> Any:
    """Sums of products of two operands, on top of an addend where there are three."""
    if len(operands) not in (2, 3) or not (is_floating(dtype) or dtype.kind == "c"):
        return None
    *addend, a, b = (np.abs(_finite(o.fine)).astype(np.float64) for o in operands)
    nothing = [np.zeros_like(c) for c in addend]
    specs = tuple(step.specs)
    flops = float(step.operator.flops(_specs(operands, step), specs, step.attributes))
    terms = int(flops / 2 / max(y.size, 1)) + 2
    # Sums of halves are rounded once more; inside they are in float32.
    inner, outer = min(unit_roundoff(dtype), 2.0**-24), unit_roundoff(dtype)
    size = apply(step, [*addend, a, b], DOUBLE)[number].real
    factor = 4.0 if dtype.kind == "c" else 1.0
    certain = size < largest(accumulator(real(dtype))) / 2
    if dtype.kind == "c":  # of complex products with infinities libraries make different ones
        certain &= np.isfinite(y)

    def error(errors: list[Array], growth: Any) -> Array:
        own = factor * growth(terms, inner) * size + 2 * outer * np.abs(_finite(y))
        total = np.where(certain, own, np.inf)
        if not operands[-2].exact:
            total = total + apply(step, [*nothing, errors[-2], b], DOUBLE)[number].real
        if not operands[-1].exact:
            total = total + apply(step, [*nothing, a + errors[-2], errors[-1]], DOUBLE)[number].real
        return np.asarray(total + errors[0] if addend else total)

    return _both(operands, error)


def _specs(operands: list[Bounded], step: Step) -> Specs:
    return tuple(ArraySpec(o.fine.shape, o.fine.dtype.name) for o in operands)


def _extreme(step: Step, operands: list[Bounded], y: Array, number: int, dtype: np.dtype[Any]) -> Any:
    """Largest or smallest element: as uncertain as the most uncertain of the elements."""
    largest_of = CATALOGUE["max"]
    return _both(operands, lambda errors, _: largest_of.kernel(np, (errors[0],), step.attributes)[0])


def _position(step: Step, operands: list[Bounded], y: Array, number: int, dtype: np.dtype[Any]) -> Any:
    """Position of the largest or smallest element: any, where others are as near as their errors."""
    axis = step.attributes.get("axis")
    keeps = bool(step.attributes.get("keepdims"))
    values = operands[0].fine if step.operator.name == "argmax" else -operands[0].fine
    if axis is not None and not isinstance(axis, int):
        return None
    if not keeps and axis is not None:
        best = np.expand_dims(y, axis)
    else:
        best = y.reshape((1,) * values.ndim) if axis is None else y

    def error(errors: list[Array], growth: Any) -> Array:
        if axis is None:
            top = values.reshape(-1)[best.reshape(-1)] - errors[0].reshape(-1)[best.reshape(-1)]
            near = values + errors[0] >= top.reshape((1,) * values.ndim)
            return np.where(near.sum() > 1, float(values.size), 0.0).reshape((1,) * y.ndim)
        top = np.take_along_axis(values, best, axis) - np.take_along_axis(errors[0], best, axis)
        near = (values + errors[0] >= top).sum(axis=axis, keepdims=keeps)
        return np.where(near > 1, float(values.shape[axis]), 0.0)

    return _both(operands, error)


def _sorted(step: Step, operands: list[Bounded], y: Array, number: int, dtype: np.dtype[Any]) -> Any:
    """Sorting does not spread errors: each is at most the largest one along the axis."""
    axis = step.attributes.get("axis", -1)
    if not isinstance(axis, int):
        return None
    return _both(
        operands, lambda errors, _: np.broadcast_to(errors[0].max(axis=axis, keepdims=True, initial=0.0), y.shape)
    )


def _may_choose(step: Step) -> bool:
    """Whether another library may give another order, and be as right."""
    name = step.operator.name
    return name in ("partition", "argpartition") or (name == "argsort" and not step.attributes["stable"])


def _split(step: Step, operands: list[Bounded], y: Array, number: int, dtype: np.dtype[Any]) -> Any:
    """Nothing is proven wrong by the order that was chosen. It has a check of its own, on its own."""
    tight = operands[0].errors()[0].max(initial=0.0) if dtype.kind in "fc" else 0.0
    return np.full(y.shape, tight), np.full(y.shape, np.inf)


RULES: dict[str, Rule] = {
    "sum": _linear,
    "mean": _linear,
    "cumulative_sum": _linear,
    "trace": _linear,
    "matmul": _bilinear,
    "addmm": _bilinear,
    "baddbmm": _bilinear,
    "tensordot": _bilinear,
    "vecdot": _bilinear,
    "einsum": _bilinear,
    "outer": _bilinear,
    "max": _extreme,
    "min": _extreme,
    "argmax": _position,
    "argmin": _position,
    "sort": _sorted,
}
"""By operator; the others follow their kind."""

"""Adaptive means and upsampling, and their gradients, as ATen defines them.

Each is linear and separable. Along one axis it is a few *passes*: each result takes one element, weighted, in each
pass. The gradient goes the same passes backwards; the elements of a pass ascend, so that those that meet are runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from goblin_dask.errors import InputError
from goblin_dask.graphs.operators import samples
from goblin_dask.graphs.operators.base import Array, Example, Operator, Specs, added_in, check_count, like
from goblin_dask.graphs.operators.dtypes import DTYPES
from goblin_dask.graphs.operators.embedding import sums_of_runs
from goblin_dask.graphs.operators.neural import (
    NEURAL,
    narrowed,
    require_floating,
    require_shape,
    spread,
    wide,
    wide_bytes,
    widened,
)
from goblin_dask.graphs.operators.rules import Bool, Number, Shape

SCALES = {1: ("scales",), 2: ("scales_h", "scales_w"), 3: ("scales_d", "scales_h", "scales_w")}
LARGEST_SCALE = 1e6

Passes = list[tuple[Any, Any, Any]]
"""Of each: results, elements that they take (ascending), weights."""
Rule = Callable[[int, int, float | None, Any, Any], Passes]
"""Passes of (size before, size after, scale, attributes, dtype)."""


def _adaptive(size: int, out: int, scale: float | None, a: Any, dtype: Any) -> Passes:
    """Result i is the mean from floor(i * size / out) to ceil((i + 1) * size / out)."""
    each = np.arange(out)
    start, stop = each * size // out, -(-(each + 1) * size // out)
    length = stop - start
    passes = []
    for step in range(int(length.max(initial=0))):
        hit = np.flatnonzero(step < length)
        passes.append((hit, start[hit] + step, (1 / length[hit]).astype(dtype)))
    return passes


def _ratio(size: int, out: int, scale: float | None) -> np.float32:
    return np.float32(1.0 / scale) if scale else np.float32(size) / np.float32(out)


def _nearest(exact: bool, shortcuts: bool = False) -> Rule:
    """`shortcuts`: look at no scale where sizes are equal or double, as ATen's gradients do, and both of its 2d."""

    def rule(size: int, out: int, scale: float | None, a: Any, dtype: Any) -> Passes:
        each = np.arange(out)
        if shortcuts and out in (size, 2 * size):
            index = each * size // out
        else:  # in float32, as ATen: it decides which element it is
            moved = each.astype(np.float32) + np.float32(0.5 if exact else 0)
            index = np.floor(moved * _ratio(size, out, scale)).astype(np.int64)
        return [(each, np.minimum(index, size - 1), None)]

    return rule


def _linear(size: int, out: int, scale: float | None, a: Any, dtype: Any) -> Passes:
    each = np.arange(out).astype(dtype)
    if size == out:
        return [(np.arange(out), np.arange(out), None)]
    if a["align_corners"]:
        place = each * (dtype.type(size - 1) / dtype.type(out - 1) if out > 1 else dtype.type(0))
    else:
        ratio = dtype.type(1.0 / scale) if scale else dtype.type(size) / dtype.type(out)
        place = np.maximum(ratio * (each + dtype.type(0.5)) - dtype.type(0.5), 0)
    low = np.minimum(np.floor(place).astype(np.int64), size - 1)
    high = np.minimum(low + 1, size - 1)
    weight = np.clip(place - low.astype(dtype), 0, 1).astype(dtype)
    every = np.arange(out)
    return [(every, low, 1 - weight), (every, high, weight)]


def _forward(xp: Any, array: Array, axis: int, passes: Passes, out: int) -> Array:
    if len(passes) == 1 and passes[0][2] is None:
        return xp.take(array, xp.asarray(passes[0][1]), axis=axis)
    shape = (*array.shape[:axis], out, *array.shape[axis + 1 :])
    result = xp.zeros(shape, array.dtype)
    for hit, elements, weight in passes:
        part = xp.take(array, xp.asarray(elements), axis=axis)
        part *= xp.asarray(weight).reshape(-1, *(1,) * (array.ndim - axis - 1))
        if len(hit) == out:
            result += part
        else:
            result[(*(slice(None),) * axis, xp.asarray(hit))] += part
    return result


def _backward(xp: Any, grad: Array, axis: int, passes: Passes, size: int) -> Array:
    moved = xp.moveaxis(grad, axis, 0)
    result = xp.zeros((size, *moved.shape[1:]), grad.dtype)
    for hit, elements, weight in passes:
        rows = moved[xp.asarray(hit)]
        if weight is not None:
            rows *= xp.asarray(weight).reshape(-1, *(1,) * (grad.ndim - 1))
        result += sums_of_runs(xp, rows, xp.asarray(elements), size)
    return xp.moveaxis(result, 0, axis)


def _scales(a: Any, rank: int, names: tuple[str, ...] | None) -> tuple[float | None, ...]:
    if names is None:
        return (None,) * rank
    scales = tuple(a[name] for name in names)
    for scale in scales:
        if scale is not None and not 1 / LARGEST_SCALE <= scale <= LARGEST_SCALE:
            raise InputError(f"a scale of {scale}, expected {1 / LARGEST_SCALE} to {LARGEST_SCALE}")
    return scales


def _kernel(rank: int, rule: Rule, names: tuple[str, ...] | None) -> Callable[..., tuple[Array, ...]]:
    def kernel(xp: Any, operands: tuple[Array, ...], a: Any) -> tuple[Array, ...]:
        (array,) = widened(*operands)
        scales, outs = _scales(a, rank, names), spread(a["output_size"], rank, "output_size")
        result = array
        for i, (scale, out) in enumerate(zip(scales, outs, strict=True)):
            axis = array.ndim - rank + i
            result = _forward(xp, result, axis, rule(array.shape[axis], out, scale, a, array.dtype), out)
        return (narrowed(result, operands[0].dtype),)

    return kernel


def _kernel_backward(rank: int, rule: Rule, names: tuple[str, ...] | None) -> Callable[..., tuple[Array, ...]]:
    def kernel(xp: Any, operands: tuple[Array, ...], a: Any) -> tuple[Array, ...]:
        (grad,) = widened(operands[0])
        shape = operands[1].shape if names is None else a["input_size"]
        scales, result = _scales(a, rank, names), grad
        for i in reversed(range(rank)):
            axis = grad.ndim - rank + i
            passes = rule(shape[axis], grad.shape[axis], scales[i], a, grad.dtype)
            result = _backward(xp, result, axis, passes, shape[axis])
        return (xp.ascontiguousarray(narrowed(result, operands[0].dtype)).reshape(shape),)

    return kernel


def _require_image(shape: tuple[int, ...], rank: int, batched: bool) -> None:
    if len(shape) != rank + 2 and (batched or len(shape) != rank + 1):
        raise InputError(f"the array has shape {shape}, expected (images, channels, *{rank} sizes)")
    if 0 in shape[-rank - 1 :]:
        raise InputError(f"the array has shape {shape}; only images may be none")


def _infer(rank: int, names: tuple[str, ...] | None) -> Callable[[Specs, Any], Specs]:
    def infer(specs: Specs, a: Any) -> Specs:
        require_floating(specs[0])
        _require_image(specs[0].shape, rank, names is not None)
        _scales(a, rank, names)
        outs = spread(a["output_size"], rank, "output_size")
        if 0 in outs and names is not None:
            raise InputError(f"output_size {outs} is empty")
        return like(specs[0], (*specs[0].shape[:-rank], *outs))

    return infer


def _infer_backward(rank: int, names: tuple[str, ...] | None) -> Callable[[Specs, Any], Specs]:
    def infer(specs: Specs, a: Any) -> Specs:
        require_floating(*specs)
        shape = specs[1].shape if names is None else a["input_size"]
        _require_image(shape, rank, names is not None)
        _scales(a, rank, names)
        check_count("the gradient's shape", len(specs[0].shape), len(shape))
        require_shape(specs[0], (*shape[:-rank], *specs[0].shape[-rank:]), "the gradient")
        if 0 in specs[0].shape[-rank:]:
            raise InputError(f"a gradient of shape {specs[0].shape} is empty")
        return like(specs[0], shape)

    return infer


def _sides(rank: int, specs: Specs, outputs: Specs) -> int:
    """Elements of the largest array on the way, where the axes are taken one by one."""
    before, after = specs[0].shape, outputs[0].shape
    return max(
        max(math.prod((*after[:i], *before[i:])), math.prod((*before[:i], *after[i:])))
        for i in range(len(before) - rank, len(before) + 1)
    )


def _workspace(rank: int) -> Callable[[Specs, Specs, Any], int]:
    def workspace(specs: Specs, outputs: Specs, a: Any) -> int:
        size = DTYPES[wide(specs[0].dtype)].itemsize
        lines = 8 * sum(6 * max(b, c) for b, c in zip(specs[0].shape[-rank:], outputs[0].shape[-rank:], strict=True))
        passes = 24 * sum((b // max(c, 1) + 2) * c + b for b, c in _axes(rank, specs, outputs))
        return 5 * _sides(rank, specs, outputs) * size + wide_bytes(specs[0]) + lines + passes

    return workspace


def _axes(rank: int, specs: Specs, outputs: Specs) -> list[tuple[int, int]]:
    """Of each axis the larger and the smaller size."""
    pairs = zip(specs[0].shape[-rank:], outputs[0].shape[-rank:], strict=True)
    return [(max(pair), min(pair)) for pair in pairs]


def _flops(rank: int) -> Callable[[Specs, Specs, Any], float]:
    return lambda specs, outputs, a: 4.0 * rank * _sides(rank, specs, outputs)


_IMAGES = {1: (2, 3, 5), 2: (2, 2, 4, 5), 3: (1, 2, 3, 2, 4)}
_OUTPUTS = {
    1: ((8,), (5,), (10,), (1,), (2,)),
    2: ((8, 10), (3, 5), (1, 7), (4, 5), (6, 1)),
    3: ((6, 4, 8), (2, 1, 3), (3, 5, 4)),
}


def _images(rank: int) -> Iterator[tuple[Array, tuple[int, ...]]]:
    for dtype in samples.FLOATS:
        for out in _OUTPUTS[rank]:
            x = samples.sample(_IMAGES[rank], dtype, special=False)
            yield x, out
            yield samples.strided(x), out
        yield samples.sample((1, 2, *(1,) * rank), dtype, special=False), _OUTPUTS[rank][0]
        yield samples.sample((0, 2, *(3,) * rank), dtype, special=False), _OUTPUTS[rank][0]


def _variants(names: tuple[str, ...] | None, corners: bool) -> Iterator[dict[str, Any]]:
    for aligned in (False, True) if corners else (None,):
        given = {} if aligned is None else {"align_corners": aligned}
        yield given
        if names is not None:
            yield {**given, **dict.fromkeys(names, 1.7)}


def _examples(rank: int, names: tuple[str, ...] | None, corners: bool) -> Callable[[], Iterator[Example]]:
    def examples() -> Iterator[Example]:
        for x, out in _images(rank):
            for variant in _variants(names, corners):
                yield (x,), {"output_size": out, **variant}

    return examples


def _examples_backward(rank: int, names: tuple[str, ...] | None, corners: bool) -> Callable[[], Iterator[Example]]:
    def examples() -> Iterator[Example]:
        for x, out in _images(rank):
            grad = samples.sample((*x.shape[:-rank], *out), x.dtype.name, 5, special=False)
            for variant in _variants(names, corners):
                if names is None:
                    yield (samples.strided(grad), x), {}
                else:
                    yield (grad,), {"input_size": x.shape, **variant}

    return examples


def _operators(
    name: str, summary: str, rank: int, rules: tuple[Rule, Rule], names: tuple[str, ...] | None, corners: bool = False
) -> Iterator[Operator]:
    more: dict[str, Any] = dict.fromkeys(names or (), Number(None, optional=True))
    if corners:
        more["align_corners"] = Bool()
    yield Operator(
        name,
        summary,
        NEURAL,
        _infer(rank, names),
        _kernel(rank, rules[0], names),
        _examples(rank, names, corners),
        attributes={"output_size": Shape(), **more},
        flops=_flops(rank),
        workspace=_workspace(rank),
        contiguous=True,
    )
    if name == "adaptive_avg_pool1d":  # ATen takes an image of one row for it
        return
    yield Operator(
        f"{name}_backward",
        f"Gradient of ``{name}``: of gradient" + (" and operand." if names is None else "."),
        NEURAL,
        _infer_backward(rank, names),
        _kernel_backward(rank, rules[1], names),
        _examples_backward(rank, names, corners),
        arity=2 if names is None else 1,
        attributes=more if names is None else {"input_size": Shape(), **more},
        flops=_flops(rank),
        workspace=_workspace(rank),
        contiguous=True,
    )


def _nearest_rules(rank: int, exact: bool) -> tuple[Rule, Rule]:
    return _nearest(exact, shortcuts=rank == 2 and not exact), _nearest(exact, shortcuts=not exact)


_MEANS = "Means of windows that make a given size."
_NEAREST = "Resized: each result is the nearest element."
_LINEAR = "Resized: each result lies on the line between elements."

OPERATORS: tuple[Operator, ...] = added_in(
    2,
    *_operators("adaptive_avg_pool1d", _MEANS, 1, (_adaptive, _adaptive), None),
    *_operators("_adaptive_avg_pool2d", _MEANS, 2, (_adaptive, _adaptive), None),
    *_operators("_adaptive_avg_pool3d", _MEANS, 3, (_adaptive, _adaptive), None),
    *(
        operator
        for rank in (1, 2, 3)
        for name, exact in (("upsample_nearest", False), ("_upsample_nearest_exact", True))
        for operator in _operators(f"{name}{rank}d", _NEAREST, rank, _nearest_rules(rank, exact), SCALES[rank])
    ),
    *(
        operator
        for rank, name in ((1, "upsample_linear1d"), (2, "upsample_bilinear2d"), (3, "upsample_trilinear3d"))
        for operator in _operators(name, _LINEAR, rank, (_linear, _linear), SCALES[rank], corners=True)
    ),
)

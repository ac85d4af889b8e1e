"""Largest and mean elements of windows, and their gradients, as ATen defines them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from goblin_dask.errors import InputError
from goblin_dask.graphs.operators import samples
from goblin_dask.graphs.operators.base import Array, Example, Operator, Specs, added_in, like, require_integers
from goblin_dask.graphs.operators.dtypes import DTYPES
from goblin_dask.graphs.operators.neural import (
    NEURAL,
    SIZE,
    casts,
    narrowed,
    require_floating,
    require_shape,
    spread,
    wide_bytes,
    widened,
)
from goblin_dask.graphs.operators.rules import Bool, Int, Ints
from goblin_dask.graphs.operators.windows import Windows, positions
from goblin_dask.messages import ArraySpec


def windows(shape: tuple[int, ...], rank: int, a: Any) -> Windows:
    """The windows of a pooling over the last `rank` axes.

    Raises
    ------
    InputError
        Where the array has no such axes, or no window fits.
    """
    if len(shape) not in (rank + 1, rank + 2) or 0 in shape[-rank - 1 :]:
        raise InputError(
            f"the array has shape {shape}, expected ([images,] channels, *{rank} sizes), none but images 0"
        )
    kernel = spread(a["kernel_size"], rank, "kernel_size")
    stride = spread(a["stride"], rank, "stride") if a["stride"] else kernel
    padding = spread(a["padding"], rank, "padding")
    dilation = spread(a.get("dilation", (1,)), rank, "dilation")
    if any(2 * p > k for p, k in zip(padding, kernel, strict=True)):
        raise InputError(f"a padding of {padding} is more than half of the window {kernel}")
    outs = tuple(
        positions(*axis, a["ceil_mode"]) for axis in zip(shape[-rank:], kernel, stride, padding, dilation, strict=True)
    )
    return Windows(shape[-rank:], outs, kernel, stride, padding, dilation)


def _pooled(shape: tuple[int, ...], w: Windows) -> tuple[int, ...]:
    return (*shape[: -w.rank], *w.outs)


def _infer_max(rank: int) -> Callable[[Specs, Any], Specs]:
    def infer(specs: Specs, a: Any) -> Specs:
        if DTYPES[specs[0].dtype].kind in "cb":
            raise InputError(f"{specs[0].dtype} has no order here; cast it")
        w = windows(specs[0].shape, rank, a)
        if any(p and d > size for p, d, size in zip(w.padding, w.dilation, w.sizes, strict=True)):
            raise InputError("a dilation larger than the axis leaves windows that see nothing but padding")
        shape = _pooled(specs[0].shape, w)
        return ArraySpec(shape, specs[0].dtype), ArraySpec(shape, "int64")

    return infer


def _infer_max_backward(rank: int) -> Callable[[Specs, Any], Specs]:
    def infer(specs: Specs, a: Any) -> Specs:
        grad, x, index = specs
        require_floating(grad, x)
        require_integers(index)
        shape = _pooled(x.shape, windows(x.shape, rank, a))
        require_shape(grad, shape, "the gradient")
        require_shape(index, shape, "the indices")
        return (x,)

    return infer


def _lowest(dtype: Any) -> Any:
    return np.iinfo(dtype).min if dtype.kind in "iu" else -np.inf


def _max_pool(rank: int) -> Callable[..., tuple[Array, ...]]:
    def kernel(xp: Any, operands: tuple[Array, ...], a: Any) -> tuple[Array, ...]:
        (x,) = operands
        w = windows(x.shape, rank, a)
        shape = _pooled(x.shape, w)
        best = xp.full(shape, _lowest(x.dtype), x.dtype)
        index = xp.empty(shape, "int64")
        plane = xp.arange(math.prod(w.sizes)).reshape(w.sizes)
        index[...] = _first(xp, w, plane)
        for _, hit, elements in w.taps():
            seen, place = best[(..., *hit)], index[(..., *hit)]
            value = x[(..., *elements)]
            # As ATen's loop: the first of equals, but the last NaN.
            larger = (value > seen) | (value != value)
            xp.copyto(seen, value, where=larger)
            xp.copyto(place, plane[elements], where=larger)
        return best, index

    return kernel


def _first(xp: Any, w: Windows, plane: Array) -> Array:
    """Of each window the first element inside of the array; of those that lie in the padding, the element after it."""
    starts = []
    for size, out, stride, padding, dilation in zip(w.sizes, w.outs, w.stride, w.padding, w.dilation, strict=True):
        start = xp.arange(out) * stride - padding
        inside = xp.where(start < 0, start + -(start // dilation) * dilation, start)
        starts.append(xp.minimum(inside, size - 1))
    return plane[xp.ix_(*starts)]


def _max_pool_backward(rank: int) -> Callable[..., tuple[Array, ...]]:
    def kernel(xp: Any, operands: tuple[Array, ...], a: Any) -> tuple[Array, ...]:
        grad, x, index = operands
        plane = math.prod(x.shape[-rank:])
        (values,) = widened(grad)
        planes = math.prod(x.shape[:-rank])
        if index.size and not (int(index.min()) >= 0 and int(index.max()) < plane):
            raise InputError(f"an index is not one of a plane of {plane} elements")
        places = (
            index.reshape(planes, math.prod(index.shape[-rank:])).astype("int64") + xp.arange(planes)[:, None] * plane
        )
        total = xp.bincount(places.reshape(-1), values.reshape(-1), minlength=planes * plane)
        return (narrowed(total, x.dtype).reshape(x.shape),)

    return kernel


def _infer_mean(rank: int) -> Callable[[Specs, Any], Specs]:
    def infer(specs: Specs, a: Any) -> Specs:
        require_floating(specs[0])
        return like(specs[0], _pooled(specs[0].shape, windows(specs[0].shape, rank, a)))

    return infer


def _infer_mean_backward(rank: int) -> Callable[[Specs, Any], Specs]:
    def infer(specs: Specs, a: Any) -> Specs:
        require_floating(*specs)
        require_shape(specs[0], _pooled(specs[1].shape, windows(specs[1].shape, rank, a)), "the gradient")
        return (specs[1],)

    return infer


def _counts(xp: Any, w: Windows, a: Any, dtype: Any) -> Array:
    """By what the sum of each window is divided."""
    if a.get("divisor_override") is not None:
        return xp.full(w.outs, a["divisor_override"], dtype)
    result = xp.ones((), dtype)
    for size, out, kernel, stride, padding in zip(w.sizes, w.outs, w.kernel, w.stride, w.padding, strict=True):
        start = xp.arange(out) * stride - padding
        if a["count_include_pad"]:
            length = xp.minimum(start + kernel, size + padding) - start
        else:
            length = xp.maximum(xp.minimum(start + kernel, size) - xp.maximum(start, 0), 1)
        result = result[..., None] * length.astype(dtype)
    return result


def _mean_pool(rank: int) -> Callable[..., tuple[Array, ...]]:
    def kernel(xp: Any, operands: tuple[Array, ...], a: Any) -> tuple[Array, ...]:
        (x,) = widened(*operands)
        w = windows(x.shape, rank, a)
        total = xp.zeros(_pooled(x.shape, w), x.dtype)
        for _, hit, elements in w.taps():
            total[(..., *hit)] += x[(..., *elements)]
        xp.divide(total, _counts(xp, w, a, x.dtype), out=total)
        return (narrowed(total, operands[0].dtype),)

    return kernel


def _mean_pool_backward(rank: int) -> Callable[..., tuple[Array, ...]]:
    def kernel(xp: Any, operands: tuple[Array, ...], a: Any) -> tuple[Array, ...]:
        (grad,), shape = widened(operands[0]), operands[1].shape
        w = windows(shape, rank, a)
        share = grad / _counts(xp, w, a, grad.dtype)
        total = xp.zeros(shape, grad.dtype)
        for _, hit, elements in w.taps():
            total[(..., *elements)] += share[(..., *hit)]
        return (narrowed(total, operands[1].dtype),)

    return kernel


def _flops(rank: int, operand: int) -> Callable[[Specs, Specs, Any], float]:
    def flops(specs: Specs, outputs: Specs, a: Any) -> float:
        shape = specs[operand].shape
        w = windows(shape, rank, a)
        return float(math.prod(_pooled(shape, w)) * w.volume)

    return flops


def _workspace_max(specs: Specs, outputs: Specs, a: Any) -> int:
    """Masks, and the indices of a plane and of the windows' firsts."""
    rank = len(outputs[0].shape)
    plane = math.prod(specs[0].shape[-min(rank, 3) :]) + math.prod(outputs[0].shape[-min(rank, 3) :])
    return 3 * math.prod(outputs[0].shape) + 8 * plane + 32 * sum(outputs[0].shape)


def _workspace_max_backward(specs: Specs, outputs: Specs, a: Any) -> int:
    """Indices, values and sums of 64 bits; `bincount` may copy the first two."""
    return 8 * (5 * math.prod(specs[0].shape) + math.prod(specs[1].shape)) + casts(specs[0])


def _workspace_mean(specs: Specs, outputs: Specs, a: Any) -> int:
    planes = math.prod(outputs[0].shape)
    return casts(*specs, *outputs) + 2 * 8 * planes + 32 * sum(outputs[0].shape)


def _workspace_mean_backward(specs: Specs, outputs: Specs, a: Any) -> int:
    return casts(*specs, *outputs) + wide_bytes(specs[0]) + 2 * 8 * math.prod(specs[0].shape) + 32 * sum(specs[0].shape)


_SIZES: dict[str, Any] = {
    "kernel_size": Ints(low=1, high=SIZE),
    "stride": Ints((), low=1, high=SIZE),
    "padding": Ints((0,), low=0, high=SIZE),
    "ceil_mode": Bool(False),
}
_MAX = {**_SIZES, "dilation": Ints((1,), low=1, high=SIZE)}
_MEAN_1D = {**_SIZES, "count_include_pad": Bool(True)}
_MEAN = {**_MEAN_1D, "divisor_override": Int(None, low=-SIZE, high=SIZE, optional=True)}

_CASES: dict[int, tuple[tuple[tuple[int, ...], dict[str, Any]], ...]] = {
    1: (
        ((2, 3, 7), {"kernel_size": (3,), "stride": (2,), "padding": (1,), "ceil_mode": True}),
        ((3, 1), {"kernel_size": (1,)}),
        ((0, 3, 5), {"kernel_size": (5,)}),
    ),
    2: (
        ((2, 3, 6, 5), {"kernel_size": (3, 2), "stride": (2, 1), "padding": (1, 0)}),
        ((1, 7, 6), {"kernel_size": (2,), "stride": (3,), "padding": (1,), "ceil_mode": True}),
        ((0, 1, 4, 4), {"kernel_size": (2,)}),
        ((2, 1, 1, 1), {"kernel_size": (2,), "padding": (1,)}),
    ),
    3: (
        ((1, 2, 4, 3, 5), {"kernel_size": (2, 3, 2), "padding": (1, 1, 0), "ceil_mode": True}),
        ((2, 4, 4, 4), {"kernel_size": (3,), "stride": (1,)}),
    ),
}
_INTEGERS = ("int32", "uint8", "int64")


def _examples(rank: int, *more: dict[str, Any], dtypes: tuple[str, ...]) -> Callable[[], Iterator[Example]]:
    def examples() -> Iterator[Example]:
        for dtype in dtypes:
            for shape, attributes in _CASES[rank]:
                for extra in ({}, *more):
                    x = samples.sample(shape, dtype, special=True)
                    yield (x,), {**attributes, **extra}
                    yield (samples.strided(x),), {**attributes, **extra}

    return examples


def _examples_backward(forward: Operator) -> Callable[[], Iterator[Example]]:
    def examples() -> Iterator[Example]:
        for (x,), attributes in forward.examples():
            if x.dtype.name not in samples.FLOATS:
                continue
            specs = (ArraySpec(x.shape, x.dtype.name),)
            try:
                given = forward.complete(forward.canonical(specs, attributes))
                with np.errstate(all="ignore"):
                    results = forward.kernel(np, (x,), given)
            except InputError:
                continue
            grad = samples.sample(results[0].shape, x.dtype.name, 9, special=False)
            yield (grad, x, *results[1:]), attributes
            yield (samples.strided(grad), samples.strided(x), *results[1:]), attributes

    return examples


def _operators(rank: int) -> Iterator[Operator]:
    more: tuple[dict[str, Any], ...] = ({"dilation": (2,)}, {"dilation": (1,), "ceil_mode": False})
    forward = Operator(
        f"max_pool{rank}d_with_indices",
        "Largest elements of windows, and where they are in their plane.",
        NEURAL,
        _infer_max(rank),
        _max_pool(rank),
        _examples(rank, *more, dtypes=(*samples.FLOATS, *_INTEGERS)),
        outputs=2,
        attributes=_MAX,
        flops=_flops(rank, 0),
        workspace=_workspace_max,
        contiguous=True,
    )
    yield forward
    if rank > 1:  # as ATen, which takes a plane of one row for it
        yield Operator(
            f"max_pool{rank}d_with_indices_backward",
            "Gradient of the largest elements of windows: of gradient, operand and indices.",
            NEURAL,
            _infer_max_backward(rank),
            _max_pool_backward(rank),
            _examples_backward(forward),
            arity=3,
            attributes=_MAX,
            workspace=_workspace_max_backward,
            contiguous=True,
        )
    more = ({"count_include_pad": False}, {"divisor_override": 3})[: 2 if rank > 1 else 1]
    forward = Operator(
        f"avg_pool{rank}d",
        "Means of windows.",
        NEURAL,
        _infer_mean(rank),
        _mean_pool(rank),
        _examples(rank, *more, dtypes=samples.FLOATS),
        attributes=_MEAN if rank > 1 else _MEAN_1D,
        flops=_flops(rank, 0),
        workspace=_workspace_mean,
        contiguous=True,
    )
    yield forward
    if rank > 1:
        yield Operator(
            f"avg_pool{rank}d_backward",
            "Gradient of the means of windows: of gradient and operand.",
            NEURAL,
            _infer_mean_backward(rank),
            _mean_pool_backward(rank),
            _examples_backward(forward),
            arity=2,
            attributes=_MEAN,
            flops=_flops(rank, 1),
            workspace=_workspace_mean_backward,
            contiguous=True,
        )


OPERATORS: tuple[Operator, ...] = added_in(2, *(operator for rank in (1, 2, 3) for operator in _operators(rank)))

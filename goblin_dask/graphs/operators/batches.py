"""Normalization over batches in ATen's functional forms, whose running statistics are results, and its gradient."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from goblin_dask.errors import InputError
from goblin_dask.graphs.operators import samples
from goblin_dask.graphs.operators.base import Array, Example, Operator, Specs, added_in
from goblin_dask.graphs.operators.neural import (
    MASK,
    NEURAL,
    is_floating,
    masked,
    narrowed,
    require_floating,
    require_shape,
    wide,
    widened,
)
from goblin_dask.graphs.operators.normalization import copies, work
from goblin_dask.graphs.operators.rules import Bool, Number
from goblin_dask.messages import ArraySpec


def _channels(spec: ArraySpec) -> int:
    if len(spec.shape) < 2:
        raise InputError(f"the input has shape {spec.shape}, expected (images, channels, *sizes)")
    require_floating(spec)
    return spec.shape[1]


def _checked(specs: Specs, counts: tuple[int, ...], x: int = 0) -> int:
    """Channels; every operand after the input has that many elements."""
    if len(specs) not in counts:
        raise InputError(f"takes {' or '.join(map(str, counts))} operands, got {len(specs)}")
    channels = _channels(specs[x])
    for spec in specs[x + 1 :]:
        require_shape(spec, (channels,), "a weight or bias or statistic")
        if not is_floating(spec.dtype):
            raise InputError(f"a weight or bias or statistic is {spec.dtype}, expected floating-point numbers")
    return channels


def _axes(rank: int) -> tuple[int, ...]:
    return (0, *range(2, rank))


def _along(array: Array, rank: int, dtype: Any) -> Array:
    """One number a channel, for broadcasting."""
    return array.astype(dtype, copy=False).reshape(-1, *(1,) * (rank - 2))


def _infer_functional(specs: Specs, a: Any) -> Specs:
    channels = _checked(specs, (3, 5))
    saved = ArraySpec((channels if a["training"] else 0,), wide(specs[0].dtype))
    return specs[0], saved, saved, specs[-2], specs[-1]


def _infer_no_training(specs: Specs, a: Any) -> Specs:
    _checked(specs, (3, 5))
    saved = ArraySpec((0,), wide(specs[0].dtype))
    return specs[0], saved, saved


def _infer_no_stats(specs: Specs, a: Any) -> Specs:
    saved = ArraySpec((_checked(specs, (1, 3)),), wide(specs[0].dtype))
    return specs[0], saved, saved


def _count(x: Array) -> int:
    return int(x.shape[0] * math.prod(x.shape[2:]))


def _batch_moments(xp: Any, x: Array) -> tuple[Array, Array]:
    """Means of the channels, and sums of the squares of what is left."""
    axes, count = _axes(x.ndim), x.dtype.type(_count(x))
    mean = xp.add.reduce(x, axis=axes) / count
    centred = x - _along(mean, x.ndim, x.dtype)
    centred *= centred
    return mean, xp.add.reduce(centred, axis=axes)


def _applied(xp: Any, x: Array, mean: Array, invstd: Array, affine: tuple[Array, ...]) -> Array:
    rank, dtype = x.ndim, x.dtype
    scale = invstd * affine[0].astype(dtype, copy=False) if affine else invstd
    result = xp.subtract(x, _along(mean, rank, dtype), order="C")
    result *= _along(scale, rank, dtype)
    if affine:
        result += _along(affine[1], rank, dtype)
    return result


def _functional(xp: Any, operands: tuple[Array, ...], a: Any) -> tuple[Array, ...]:
    x, *affine, running_mean, running_var = widened(*operands)
    if not a["training"]:
        return (*_no_training(xp, operands, a), operands[-2].copy(), operands[-1].copy())
    mean, squares = _batch_moments(xp, x)
    count, momentum = x.dtype.type(_count(x)), x.dtype.type(a["momentum"])
    invstd = 1 / xp.sqrt(squares / count + x.dtype.type(a["eps"]))
    new_mean = mean * momentum + running_mean * (1 - momentum)
    new_var = squares / (count - 1) * momentum + running_var * (1 - momentum)
    result = narrowed(_applied(xp, x, mean, invstd, tuple(affine)), operands[0].dtype)
    return result, mean, invstd, narrowed(new_mean, operands[-2].dtype), narrowed(new_var, operands[-1].dtype)


def _no_training(xp: Any, operands: tuple[Array, ...], a: Any) -> tuple[Array, ...]:
    x, *affine, running_mean, running_var = widened(*operands)
    mean, variance = running_mean.astype(x.dtype, copy=False), running_var.astype(x.dtype, copy=False)
    invstd = 1 / xp.sqrt(variance + x.dtype.type(a["eps"]))
    result = narrowed(_applied(xp, x, mean, invstd, tuple(affine)), operands[0].dtype)
    return result, xp.empty((0,), x.dtype), xp.empty((0,), x.dtype)


def _no_stats(xp: Any, operands: tuple[Array, ...], a: Any) -> tuple[Array, ...]:
    x, *affine = widened(*operands)
    mean, squares = _batch_moments(xp, x)
    invstd = 1 / xp.sqrt(squares / x.dtype.type(_count(x)) + x.dtype.type(a["eps"]))
    return narrowed(_applied(xp, x, mean, invstd, tuple(affine)), operands[0].dtype), mean, invstd


def _infer_backward(specs: Specs, a: Any) -> Specs:
    channels = _checked(specs, (4, 5), x=1)
    require_floating(*specs[:2])
    require_shape(specs[0], specs[1].shape, "the gradient")
    parameter = ArraySpec((channels,), specs[2].dtype if len(specs) == 5 else specs[1].dtype)
    return masked(a["output_mask"], specs[1], parameter, parameter)


def _backward(xp: Any, operands: tuple[Array, ...], a: Any) -> tuple[Array, ...]:
    grad, x, *weight, mean, spread = widened(*operands)
    dtype, rank, axes = x.dtype, x.ndim, _axes(x.ndim)
    parameter = operands[2].dtype if weight else operands[1].dtype
    mean, spread = mean.astype(dtype, copy=False), spread.astype(dtype, copy=False)
    invstd = spread if a["train"] else 1 / xp.sqrt(spread + dtype.type(a["eps"]))
    centred = x - _along(mean, rank, dtype)
    slope = xp.add.reduce(grad * centred, axis=axes)
    total = xp.add.reduce(grad, axis=axes)
    results = []
    if a["output_mask"][0]:
        scale = _along(invstd * weight[0].astype(dtype, copy=False) if weight else invstd, rank, dtype)
        if a["train"]:
            count = dtype.type(_count(x))
            centred *= _along(slope * invstd * invstd / count, rank, dtype)
            centred += _along(total / count, rank, dtype)
            result = xp.subtract(grad, centred, order="C")
            result *= scale
        else:
            result = xp.multiply(grad, scale, order="C")
        results.append(narrowed(result, operands[1].dtype))
    if a["output_mask"][1]:
        results.append(narrowed(slope * invstd, parameter))
    if a["output_mask"][2]:
        results.append(narrowed(total, parameter))
    return tuple(results)


_SHAPES = ((4, 3), (2, 3, 5), (3, 2, 2, 2), (2, 1, 1, 2), (1, 2, 3, 1, 2))


def _channelwise(x: Array, seed: int, positive: bool = False) -> Array:
    values = samples.sample(x.shape[1:2], x.dtype.name, seed, special=False)
    return np.abs(values) + values.dtype.type(0.5) if positive else values


def _inputs() -> Iterator[tuple[Array, tuple[Array, ...], tuple[Array, ...]]]:
    """Inputs, weights with biases, running statistics."""
    for dtype in samples.FLOATS:
        for shape in _SHAPES:
            x = samples.sample(shape, dtype, special=False)
            affine, running = (_channelwise(x, 5), _channelwise(x, 6)), (_channelwise(x, 7), _channelwise(x, 8, True))
            yield x, affine, running
            yield samples.strided(x), (), running


def _examples_functional() -> Iterator[Example]:
    for x, affine, running in _inputs():
        yield (x, *affine, *running), {"training": True, "momentum": 0.1, "eps": 1e-5}
        yield (x, *affine, *running), {"training": False, "momentum": 0.1, "eps": 1e-5}


def _examples_no_training() -> Iterator[Example]:
    for x, affine, running in _inputs():
        yield (x, *affine, *running), {"eps": 1e-3}
    yield (np.zeros((0, 2, 3), "f4"), np.zeros(2, "f4"), np.ones(2, "f4")), {"eps": 1e-3}


def _examples_no_stats() -> Iterator[Example]:
    for x, affine, _ in _inputs():
        yield (x, *affine), {"eps": 1e-3}


def _examples_backward() -> Iterator[Example]:
    for x, affine, running in _inputs():
        grad = samples.sample(x.shape, x.dtype.name, 9, special=False)
        for train, mask in ((True, (1, 1, 1)), (False, (1, 1, 1)), (True, (1, 0, 1)), (False, (0, 1, 0))):
            yield (grad, x, *affine[:1], *running), {"train": train, "eps": 1e-3, "output_mask": mask}


OPERATORS: tuple[Operator, ...] = added_in(
    2,
    Operator(
        "_native_batch_norm_legit_functional",
        "Normalized over batches; means and deviations of the batch; running means and variances.",
        NEURAL,
        _infer_functional,
        _functional,
        _examples_functional,
        arity=None,
        least=3,
        outputs=5,
        attributes={"training": Bool(), "momentum": Number(), "eps": Number()},
        flops=work(8),
        workspace=copies(2),
        contiguous=True,
    ),
    Operator(
        "_native_batch_norm_legit_no_training",
        "Normalized by the running means and variances; two empty arrays.",
        NEURAL,
        _infer_no_training,
        _no_training,
        _examples_no_training,
        arity=None,
        least=3,
        outputs=3,
        attributes={"eps": Number()},
        flops=work(4),
        workspace=copies(2),
        contiguous=True,
    ),
    Operator(
        "_native_batch_norm_legit_no_stats",
        "Normalized over batches, without running statistics; means and deviations of the batch.",
        NEURAL,
        _infer_no_stats,
        _no_stats,
        _examples_no_stats,
        arity=None,
        least=1,
        outputs=3,
        attributes={"eps": Number()},
        flops=work(8),
        workspace=copies(2),
        contiguous=True,
    ),
    Operator(
        "native_batch_norm_backward",
        "Gradients by input, weight and bias, those asked for: of gradient, input, weight and the statistics used.",
        NEURAL,
        _infer_backward,
        _backward,
        _examples_backward,
        arity=None,
        least=4,
        outputs=None,
        attributes={"train": Bool(), "eps": Number(), "output_mask": MASK},
        flops=work(15),
        workspace=copies(4),
        contiguous=True,
    ),
)

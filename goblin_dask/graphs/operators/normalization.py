"""Normalization over layers, groups and batches, softmax, and their gradients, as ATen defines them.

All see the operand as (outer, channels, inner) or rows; statistics of halves are float32, and stay so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from goblin_dask.errors import InputError
from goblin_dask.graphs.operators import samples
from goblin_dask.graphs.operators.base import Array, Example, Operator, Specs, added_in, require_axis
from goblin_dask.graphs.operators.contraction import c_order
from goblin_dask.graphs.operators.dtypes import DTYPES, HALVES
from goblin_dask.graphs.operators.neural import (
    MASK,
    NEURAL,
    is_floating,
    masked,
    narrowed,
    require_count,
    require_floating,
    require_shape,
    wide,
    wide_bytes,
    widened,
)
from goblin_dask.graphs.operators.rules import Axis, Bool, DType, Int, Number, Shape
from goblin_dask.messages import ArraySpec


def _statistics(shape: tuple[int, ...], spec: ArraySpec) -> ArraySpec:
    return ArraySpec(shape, wide(spec.dtype))


def _require_affine(operands: Specs, shape: tuple[int, ...]) -> None:
    for spec in operands:
        require_shape(spec, shape, "a weight or bias or statistic")
        if not is_floating(spec.dtype):
            raise InputError(f"a weight or bias or statistic is {spec.dtype}, expected floating-point numbers")


def _moments(xp: Any, rows: Array, eps: float) -> tuple[Array, Array, Array]:
    """Rows less their means, the means, and one over the standard deviations: over the last axis."""
    count = rows.dtype.type(rows.shape[-1])
    mean = xp.add.reduce(rows, axis=-1, keepdims=True) / count
    centred = rows - mean
    variance = xp.add.reduce(centred * centred, axis=-1, keepdims=True) / count
    return centred, mean, 1 / xp.sqrt(variance + rows.dtype.type(eps))


# --- layers -----------------------------------------------------------------------------------------------------
def _layer(shape: tuple[int, ...], normalized: tuple[int, ...]) -> tuple[tuple[int, ...], int, int]:
    """Shape of the statistics, number of rows, length of a row."""
    rank = len(shape) - len(normalized)
    if not normalized or rank < 0 or shape[rank:] != normalized:
        raise InputError(f"normalized_shape {normalized} is not how the shape {shape} ends")
    return (*shape[:rank], *(1,) * len(normalized)), math.prod(shape[:rank]), math.prod(normalized)


def _infer_layer(specs: Specs, a: Any) -> Specs:
    require_count(specs, 1, 3)
    require_floating(specs[0])
    shape, _, _ = _layer(specs[0].shape, a["normalized_shape"])
    _require_affine(specs[1:], a["normalized_shape"])
    statistics = _statistics(shape, specs[0])
    return specs[0], statistics, statistics


def _layer_norm(xp: Any, operands: tuple[Array, ...], a: Any) -> tuple[Array, ...]:
    x, *affine = widened(*operands)
    shape, rows, length = _layer(x.shape, a["normalized_shape"])
    result, mean, rstd = _moments(xp, x.reshape(rows, length), a["eps"])
    result *= rstd
    if affine:
        result *= affine[0].reshape(-1).astype(result.dtype, copy=False)
    if len(affine) > 1:
        result += affine[1].reshape(-1).astype(result.dtype, copy=False)
    return narrowed(result, operands[0].dtype).reshape(x.shape), mean.reshape(shape), rstd.reshape(shape)


def _infer_layer_backward(specs: Specs, a: Any) -> Specs:
    require_count(specs, 4, 5)
    require_floating(*specs[:2])
    shape, _, _ = _layer(specs[1].shape, a["normalized_shape"])
    require_shape(specs[0], specs[1].shape, "the gradient")
    _require_affine(specs[2:4], shape)
    _require_affine(specs[4:], a["normalized_shape"])
    parameter = ArraySpec(a["normalized_shape"], specs[4].dtype if len(specs) == 5 else specs[1].dtype)
    return masked(a["output_mask"], specs[1], parameter, parameter)


def _rows_gradient(xp: Any, grad: Array, normal: Array, rstd: Array) -> Array:
    """Gradient by rows, of the gradient by rows that were normalized over the last axis."""
    count = grad.dtype.type(grad.shape[-1])
    mean = xp.add.reduce(grad, axis=-1, keepdims=True) / count
    slope = xp.add.reduce(grad * normal, axis=-1, keepdims=True) / count
    result = normal * -slope
    result += grad
    result -= mean
    result *= rstd
    return result


def _layer_norm_backward(xp: Any, operands: tuple[Array, ...], a: Any) -> tuple[Array, ...]:
    grad, x, mean, rstd, *weight = widened(*operands)
    _, rows, length = _layer(x.shape, a["normalized_shape"])
    dtype, parameter = operands[1].dtype, operands[4].dtype if weight else operands[1].dtype
    grad, (mean, rstd) = grad.reshape(rows, length), _typed(x.dtype, mean.reshape(-1, 1), rstd.reshape(-1, 1))
    normal = (x.reshape(rows, length) - mean) * rstd
    results = []
    if a["output_mask"][0]:
        scaled = grad * weight[0].reshape(-1).astype(grad.dtype, copy=False) if weight else grad
        results.append(narrowed(_rows_gradient(xp, scaled, normal, rstd), dtype).reshape(x.shape))
    if a["output_mask"][1]:
        results.append(narrowed(xp.add.reduce(grad * normal, axis=0), parameter).reshape(a["normalized_shape"]))
    if a["output_mask"][2]:
        results.append(narrowed(xp.add.reduce(grad, axis=0), parameter).reshape(a["normalized_shape"]))
    return tuple(results)


def _typed(dtype: Any, *arrays: Array) -> tuple[Array, ...]:
    return tuple(array.astype(dtype, copy=False) for array in arrays)


# --- groups -----------------------------------------------------------------------------------------------------
def _grouped(shape: tuple[int, ...], group: int) -> tuple[int, int, int]:
    """Images, channels and elements of a channel."""
    if len(shape) < 2 or shape[1] % group or not shape[1]:
        raise InputError(f"the shape {shape} has no channels that make {group} groups")
    return shape[0], shape[1], math.prod(shape[2:])


def _infer_group(specs: Specs, a: Any) -> Specs:
    require_count(specs, 1, 3)
    require_floating(specs[0])
    images, channels, _ = _grouped(specs[0].shape, a["group"])
    _require_affine(specs[1:], (channels,))
    statistics = _statistics((images, a["group"]), specs[0])
    return specs[0], statistics, statistics


def _group_norm(xp: Any, operands: tuple[Array, ...], a: Any) -> tuple[Array, ...]:
    x, *affine = widened(*operands)
    images, channels, inner = _grouped(x.shape, a["group"])
    rows = x.reshape(images, a["group"], channels // a["group"] * inner)
    result, mean, rstd = _moments(xp, rows, a["eps"])
    result *= rstd
    result = result.reshape(images, channels, inner)
    if affine:
        result *= affine[0].reshape(-1, 1).astype(result.dtype, copy=False)
    if len(affine) > 1:
        result += affine[1].reshape(-1, 1).astype(result.dtype, copy=False)
    return narrowed(result, operands[0].dtype).reshape(x.shape), mean[..., 0], rstd[..., 0]


def _infer_group_backward(specs: Specs, a: Any) -> Specs:
    require_count(specs, 4, 5)
    require_floating(*specs[:2])
    images, channels, _ = _grouped(specs[1].shape, a["group"])
    require_shape(specs[0], specs[1].shape, "the gradient")
    _require_affine(specs[2:4], (images, a["group"]))
    _require_affine(specs[4:], (channels,))
    parameter = ArraySpec((channels,), specs[4].dtype if len(specs) == 5 else specs[1].dtype)
    return masked(a["output_mask"], specs[1], parameter, parameter)


def _group_norm_backward(xp: Any, operands: tuple[Array, ...], a: Any) -> tuple[Array, ...]:
    grad, x, mean, rstd, *weight = widened(*operands)
    images, channels, inner = _grouped(x.shape, a["group"])
    dtype, parameter = operands[1].dtype, operands[4].dtype if weight else operands[1].dtype
    mean, rstd = _typed(x.dtype, mean[..., None], rstd[..., None])
    shape, rows = (images, channels, inner), (images, a["group"], channels // a["group"] * inner)
    normal, grad = (x.reshape(rows) - mean) * rstd, grad.reshape(shape)
    results = []
    if a["output_mask"][0]:
        scaled = grad * weight[0].reshape(-1, 1).astype(grad.dtype, copy=False) if weight else grad
        results.append(narrowed(_rows_gradient(xp, scaled.reshape(rows), normal, rstd), dtype).reshape(x.shape))
    if a["output_mask"][1]:
        results.append(narrowed(xp.add.reduce(grad * normal.reshape(shape), axis=(0, 2)), parameter))
    if a["output_mask"][2]:
        results.append(narrowed(xp.add.reduce(grad, axis=(0, 2)), parameter))
    return tuple(results)


# --- softmax ----------------------------------------------------------------------------------------------------
def _infer_softmax(specs: Specs, a: Any) -> Specs:
    require_axis(specs, {"axis": a["dim"]})
    require_floating(specs[0])
    if a["half_to_float"] and specs[0].dtype not in HALVES:
        raise InputError(f"half_to_float is of halves, not of {specs[0].dtype}")
    return (ArraySpec(specs[0].shape, "float32" if a["half_to_float"] else specs[0].dtype),)


def _softmax(logarithm: bool) -> Callable[..., tuple[Array, ...]]:
    def kernel(xp: Any, operands: tuple[Array, ...], a: Any) -> tuple[Array, ...]:
        (x,) = widened(*operands)
        dim, dtype = a["dim"], DTYPES["float32"] if a["half_to_float"] else operands[0].dtype
        if not x.size:
            return (xp.empty(x.shape, dtype),)
        shifted = xp.subtract(x, x.max(axis=dim, keepdims=True), order="C")
        if logarithm:
            shifted -= xp.log(xp.exp(shifted).sum(axis=dim, keepdims=True))
        else:
            xp.exp(shifted, out=shifted)
            shifted /= shifted.sum(axis=dim, keepdims=True)
        return (narrowed(shifted, dtype),)

    return kernel


def _infer_softmax_backward(specs: Specs, a: Any) -> Specs:
    require_axis(specs, {"axis": a["dim"]})
    require_floating(*specs)
    require_shape(specs[0], specs[1].shape, "the gradient")
    if a["input_dtype"] != specs[0].dtype and (a["input_dtype"] not in HALVES or specs[0].dtype != "float32"):
        raise InputError(f"a gradient of {specs[0].dtype} is not that of a softmax of {a['input_dtype']}")
    return (ArraySpec(specs[0].shape, a["input_dtype"]),)


def _softmax_backward(logarithm: bool) -> Callable[..., tuple[Array, ...]]:
    def kernel(xp: Any, operands: tuple[Array, ...], a: Any) -> tuple[Array, ...]:
        (grad, y), dim = (c_order(xp, o) for o in widened(*operands)), a["dim"]
        if logarithm:
            result = xp.exp(y)
            result *= grad.sum(axis=dim, keepdims=True)
            xp.subtract(grad, result, out=result)
        else:
            result = grad * y
            result -= y * result.sum(axis=dim, keepdims=True)
        return (narrowed(result, DTYPES[a["input_dtype"]]),)

    return kernel


# --- declarations -----------------------------------------------------------------------------------------------
def copies(count: int, operand: int = 0) -> Callable[[Specs, Specs, Any], int]:
    """So many arrays like an operand, wide, and the wide copies of all operands."""

    def workspace(specs: Specs, outputs: Specs, a: Any) -> int:
        return count * wide_bytes(specs[operand]) + sum(map(wide_bytes, specs)) + 4 * wide_bytes(outputs[-1])

    return workspace


def work(per_element: float) -> Callable[[Specs, Specs, Any], float]:
    """Operations for each element of the first operand."""
    return lambda specs, outputs, a: per_element * math.prod(specs[0].shape)


_LAYERS = (((2, 3, 4), (4,)), ((2, 3, 4), (3, 4)), ((5,), (5,)), ((0, 3), (3,)), ((3, 1), (1,)))
_GROUPS = (((2, 4, 3), 2), ((2, 4), 2), ((1, 6, 2, 2), 3), ((3, 2, 1, 1), 1))


def _affine(x: Array, shape: tuple[int, ...]) -> Iterator[tuple[Array, ...]]:
    dtype = x.dtype.name
    weight, bias = (samples.sample(shape, dtype, seed, special=False) for seed in (5, 6))
    yield (x,)
    yield (samples.strided(x), weight)
    yield (x, weight, bias)


def _examples_layer() -> Iterator[Example]:
    for dtype in samples.FLOATS:
        for shape, normalized in _LAYERS:
            for operands in _affine(samples.sample(shape, dtype, special=False), normalized):
                yield operands, {"normalized_shape": normalized, "eps": 1e-5}


def _examples_group() -> Iterator[Example]:
    for dtype in samples.FLOATS:
        for shape, group in _GROUPS:
            for operands in _affine(samples.sample(shape, dtype, special=False), shape[1:2]):
                yield operands, {"group": group, "eps": 1e-3}


def _examples_backward(forward: Operator, keep: str) -> Callable[[], Iterator[Example]]:
    def examples() -> Iterator[Example]:
        for (x, *affine), attributes in forward.examples():
            specs = tuple(ArraySpec(o.shape, o.dtype.name) for o in (x, *affine))
            given = forward.complete(forward.canonical(specs, attributes))
            with np.errstate(all="ignore"):
                _, mean, rstd = forward.kernel(np, (x, *affine), given)
            grad = samples.sample(x.shape, x.dtype.name, 9, special=False)
            for mask in ((1, 1, 1), (1, 0, 0), (0, 1, 1)):
                yield (grad, x, mean, rstd, *affine[:1]), {keep: attributes[keep], "output_mask": mask}

    return examples


def _examples_softmax() -> Iterator[Example]:
    for dtype in samples.FLOATS:
        for shape in ((5,), (3, 4), (2, 0, 3), (0,), (2, 3, 4)):
            for dim in {0, -1}:
                for special in (False, True):
                    x = samples.sample(shape, dtype, special=special)
                    yield (x,), {"dim": dim}
                    yield (samples.strided(x),), {"dim": dim}
                    if dtype in HALVES:
                        yield (x,), {"dim": dim, "half_to_float": True}


def _examples_softmax_backward(logarithm: bool) -> Callable[[], Iterator[Example]]:
    def examples() -> Iterator[Example]:
        for (x,), attributes in _examples_softmax():
            if "half_to_float" in attributes:
                continue
            grad = samples.sample(x.shape, x.dtype.name, 8, special=False)
            with np.errstate(all="ignore"):
                (y,) = _softmax(logarithm)(np, (x,), {**attributes, "half_to_float": False})
            yield (grad, y), {**attributes, "input_dtype": x.dtype.name}
            if x.dtype.name in HALVES:
                yield (grad.astype("f4"), y.astype("f4")), {**attributes, "input_dtype": x.dtype.name}

    return examples


_LAYER = Operator(
    "native_layer_norm",
    "Normalized over the last axes, scaled and moved; the means; one over the standard deviations.",
    NEURAL,
    _infer_layer,
    _layer_norm,
    _examples_layer,
    arity=None,
    least=1,
    outputs=3,
    attributes={"normalized_shape": Shape(), "eps": Number()},
    flops=work(8),
    workspace=copies(2),
    contiguous=True,
    copies_strided=True,
)
_GROUP = Operator(
    "native_group_norm",
    "Normalized over groups of channels, scaled and moved; the means; one over the standard deviations.",
    NEURAL,
    _infer_group,
    _group_norm,
    _examples_group,
    arity=None,
    least=1,
    outputs=3,
    attributes={"group": Int(low=1), "eps": Number()},
    flops=work(8),
    workspace=copies(2),
    contiguous=True,
    copies_strided=True,
)

OPERATORS: tuple[Operator, ...] = added_in(
    2,
    _LAYER,
    Operator(
        "native_layer_norm_backward",
        "Gradients by input, weight and bias, those asked for: of gradient, input, means, deviations and weight.",
        NEURAL,
        _infer_layer_backward,
        _layer_norm_backward,
        _examples_backward(_LAYER, "normalized_shape"),
        arity=None,
        least=4,
        outputs=None,
        attributes={"normalized_shape": Shape(), "output_mask": MASK},
        flops=work(15),
        workspace=copies(5),
        contiguous=True,
        copies_strided=True,
    ),
    _GROUP,
    Operator(
        "native_group_norm_backward",
        "Gradients by input, weight and bias, those asked for: of gradient, input, means, deviations and weight.",
        NEURAL,
        _infer_group_backward,
        _group_norm_backward,
        _examples_backward(_GROUP, "group"),
        arity=None,
        least=4,
        outputs=None,
        attributes={"group": Int(low=1), "output_mask": MASK},
        flops=work(15),
        workspace=copies(5),
        contiguous=True,
        copies_strided=True,
    ),
    *(
        Operator(
            name,
            summary,
            NEURAL,
            _infer_softmax,
            _softmax(logarithm),
            _examples_softmax,
            attributes={"dim": Axis(), "half_to_float": Bool(False)},
            flops=work(5),
            workspace=copies(2),
            contiguous=True,
        )
        for name, summary, logarithm in (
            ("_softmax", "Exponentials over their sum along an axis.", False),
            ("_log_softmax", "Logarithm of the softmax along an axis.", True),
        )
    ),
    *(
        Operator(
            f"{name}_backward_data",
            f"Gradient of ``{name}``: of gradient and result.",
            NEURAL,
            _infer_softmax_backward,
            _softmax_backward(logarithm),
            _examples_softmax_backward(logarithm),
            arity=2,
            attributes={"dim": Axis(), "input_dtype": DType()},
            flops=work(5),
            workspace=copies(3),
            contiguous=True,
            copies_strided=True,
        )
        for name, logarithm in (("_softmax", False), ("_log_softmax", True))
    ),
)

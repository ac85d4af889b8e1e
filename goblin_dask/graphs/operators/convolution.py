"""Convolution in one to three dimensions and its gradients, as ATen defines them.

All four are made of three products with the *columns* of an array: the elements that each tap of the window hits, one
row a tap, one column a position. They are made for a few images at a time, so that they take little memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from goblin_dask.errors import InputError
from goblin_dask.graphs.operators import samples
from goblin_dask.graphs.operators.base import Array, Example, Kind, Operator, Specs, added_in
from goblin_dask.graphs.operators.contraction import c_order
from goblin_dask.graphs.operators.dtypes import DTYPES
from goblin_dask.graphs.operators.neural import (
    MASK,
    SIZE,
    casts,
    masked,
    narrowed,
    require_count,
    require_floating,
    require_shape,
    spread,
    wide,
    widened,
)
from goblin_dask.graphs.operators.rules import Bool, Int, Ints
from goblin_dask.graphs.operators.windows import Windows, positions
from goblin_dask.messages import ArraySpec

COLUMNS = 2**20
"""Elements of the columns that are made at a time, where one image's are not more."""


def _windows(shape: tuple[int, ...], weight: tuple[int, ...], a: Any) -> tuple[Windows, tuple[int, ...]]:
    """The windows over the larger side of a convolution, and the shape of its result."""
    rank = len(shape) - 2
    if not 1 <= rank <= 3:
        raise InputError(f"the input has shape {shape}, expected (images, channels, *1 to 3 sizes)")
    if len(weight) != rank + 2 or 0 in weight:
        raise InputError(f"the weight has shape {weight}, expected {rank + 2} axes, none of them empty")
    stride, padding = spread(a["stride"], rank, "stride"), spread(a["padding"], rank, "padding")
    dilation, more = spread(a["dilation"], rank, "dilation"), spread(a["output_padding"], rank, "output_padding")
    groups, kernel, sizes = a["groups"], weight[2:], shape[2:]
    channels = weight[0] if a["transposed"] else weight[1] * groups
    if shape[1] != channels or weight[0] % groups:
        raise InputError(f"{shape[1]} channels and a weight of shape {weight} do not make {groups} groups")
    if not a["transposed"]:
        if any(more):
            raise InputError("output_padding is of transposed convolutions")
        per_axis = zip(sizes, kernel, stride, padding, dilation, strict=True)
        outs = tuple(positions(*axis) for axis in per_axis)
        return Windows(sizes, outs, kernel, stride, padding, dilation), (shape[0], weight[0], *outs)
    if any(m >= max(s, d) for m, s, d in zip(more, stride, dilation, strict=True)):
        raise InputError("output_padding has to be smaller than stride or dilation")
    outs = tuple(
        (n - 1) * s - 2 * p + d * (k - 1) + m + 1
        for n, k, s, p, d, m in zip(sizes, kernel, stride, padding, dilation, more, strict=True)
    )
    if min(outs) < 1 or min(sizes) < 1:
        raise InputError(f"the result would have the sizes {outs}")
    return Windows(outs, sizes, kernel, stride, padding, dilation), (shape[0], weight[1] * groups, *outs)


def _infer(specs: Specs, attributes: Any) -> Specs:
    require_count(specs, 2, 3)
    require_floating(*specs)
    _, shape = _windows(specs[0].shape, specs[1].shape, attributes)
    if len(specs) == 3:
        require_shape(specs[2], (shape[1],), "the bias")
    return (ArraySpec(shape, specs[0].dtype),)


def _infer_backward(specs: Specs, attributes: Any) -> Specs:
    require_floating(*specs)
    grad, x, weight = specs
    _, shape = _windows(x.shape, weight.shape, attributes)
    require_shape(grad, shape, "the gradient")
    return masked(attributes["output_mask"], x, weight, ArraySpec((shape[1],), x.dtype))


def _per_image(w: Windows, channels: int) -> int:
    return channels * w.volume * w.positions


def _at_once(w: Windows, channels: int, images: int) -> int:
    """Images whose columns are made at a time."""
    return max(1, min(images, COLUMNS // max(1, _per_image(w, channels))))


def _plain(w: Windows) -> bool:
    """Whether the columns are the array itself."""
    return w.volume == 1 and w.outs == w.sizes and not any(w.padding)


def _columns(xp: Any, x: Array, w: Windows, groups: int, buffer: Array | None) -> Array:
    """(images, groups, channels of a group x taps, positions) of (images, channels, *sizes)."""
    images, channels = x.shape[:2]
    if buffer is None:
        return x.reshape(images, groups, channels // groups, w.positions)
    columns = buffer[:images]
    for tap, hit, elements in w.taps():
        columns[(..., *tap, *hit)] = x[(..., *elements)]
    return columns.reshape(images, groups, channels // groups * w.volume, w.positions)


def _buffer(xp: Any, w: Windows, channels: int, images: int, dtype: Any) -> Array | None:
    """Memory of columns; zero where taps hit nothing, and no tap writes there. None: none is needed."""
    if _plain(w):
        return None
    shape = (_at_once(w, channels, images), channels, *w.kernel, *w.outs)
    return xp.zeros(shape, dtype)


def _slabs(w: Windows, channels: int, images: int) -> Iterator[slice]:
    step = _at_once(w, channels, images)
    return (slice(start, min(start + step, images)) for start in range(0, images, step))


def _forward(xp: Any, x: Array, weight: Array, w: Windows, groups: int, bias: Array | None, dtype: Any) -> Array:
    """The small side from the large one."""
    images, channels = x.shape[:2]
    matrix = weight.reshape(groups, weight.shape[0] // groups, -1)
    result = xp.empty((images, groups, matrix.shape[1], w.positions), dtype)
    buffer = _buffer(xp, w, channels, images, x.dtype)
    for part in _slabs(w, channels, images):
        columns = _columns(xp, x[part], w, groups, buffer)
        if dtype == x.dtype:
            xp.matmul(matrix, columns, out=result[part])
            if bias is not None:
                result[part] += bias.reshape(groups, -1, 1)
        else:
            product = xp.matmul(matrix, columns)
            if bias is not None:
                product += bias.reshape(groups, -1, 1)
            result[part] = product
    return result.reshape(images, weight.shape[0], *w.outs)


def _transposed(xp: Any, y: Array, weight: Array, w: Windows, groups: int, bias: Array | None, dtype: Any) -> Array:
    """The large side from the small one: each element is added to all that its window shows."""
    images, channels = y.shape[0], weight.shape[1] * groups
    matrix = weight.reshape(groups, weight.shape[0] // groups, -1).swapaxes(1, 2)
    result = xp.empty((images, channels, *w.sizes), dtype)
    for part in _slabs(w, channels, images):
        slab = y[part].reshape(-1, groups, weight.shape[0] // groups, w.positions)
        columns = xp.matmul(matrix, slab).reshape(-1, channels, *w.kernel, *w.outs)
        total = xp.zeros((columns.shape[0], channels, *w.sizes), y.dtype)
        for tap, hit, elements in w.taps():
            total[(..., *elements)] += columns[(..., *tap, *hit)]
        if bias is not None:
            total += bias.reshape(-1, *(1,) * w.rank)
        result[part] = total
    return result


def _weight_gradient(xp: Any, x: Array, y: Array, shape: tuple[int, ...], w: Windows, groups: int) -> Array:
    """Sum over images and positions of the products of the small side `y` with the columns of the large side `x`."""
    images, channels = x.shape[:2]
    total = xp.zeros((groups, shape[0] // groups, math.prod(shape[1:])), x.dtype)
    buffer = _buffer(xp, w, channels, images, x.dtype)
    for part in _slabs(w, channels, images):
        columns = _columns(xp, x[part], w, groups, buffer)
        slab = y[part].reshape(-1, groups, shape[0] // groups, w.positions)
        for image in range(len(slab)):
            total += xp.matmul(slab[image], columns[image].swapaxes(1, 2))
    return total.reshape(shape)


def _convolution(xp: Any, operands: tuple[Array, ...], a: Any) -> tuple[Array, ...]:
    w, _ = _windows(operands[0].shape, operands[1].shape, a)
    dtype = operands[0].dtype
    x, weight, *bias = (c_order(xp, array) for array in widened(*operands))
    compute = _transposed if a["transposed"] else _forward
    return (compute(xp, x, weight, w, a["groups"], bias[0] if bias else None, dtype),)


def _convolution_backward(xp: Any, operands: tuple[Array, ...], a: Any) -> tuple[Array, ...]:
    w, _ = _windows(operands[1].shape, operands[2].shape, a)
    dtype, groups, mask = operands[0].dtype, a["groups"], a["output_mask"]
    grad, x, weight = (c_order(xp, array) for array in widened(*operands))
    results = []
    if mask[0]:
        compute = _forward if a["transposed"] else _transposed
        results.append(compute(xp, grad, weight, w, groups, None, dtype))
    if mask[1]:
        large, small = (grad, x) if a["transposed"] else (x, grad)
        results.append(narrowed(_weight_gradient(xp, large, small, weight.shape, w, groups), dtype))
    if mask[2]:
        axes = (0, *range(2, grad.ndim))
        results.append(narrowed(xp.asarray(grad.sum(axis=axes)), dtype))
    return tuple(results)


def _macs(x: tuple[int, ...], weight: tuple[int, ...], a: Any) -> float:
    w, _ = _windows(x, weight, a)
    return float(x[0] * math.prod(weight) * w.positions)


def _flops(specs: Specs, outputs: Specs, a: Any) -> float:
    return 2 * _macs(specs[0].shape, specs[1].shape, a)


def _flops_backward(specs: Specs, outputs: Specs, a: Any) -> float:
    return 2.0 * _macs(specs[1].shape, specs[2].shape, a) * int(max(1, sum(a["output_mask"][:2])))


def _scratch(x: ArraySpec, weight: ArraySpec, a: Any) -> int:
    """Columns, and one slab of a result."""
    w, shape = _windows(x.shape, weight.shape, a)
    channels = (shape if a["transposed"] else x.shape)[1]
    count = _at_once(w, channels, x.shape[0])
    slab = count * (channels * math.prod(w.sizes) + weight.shape[0] * w.positions)
    # A product of strided matrices may be made in two parts, and adding one slice to another copies none of them.
    return (count * _per_image(w, channels) + slab) * DTYPES[wide(x.dtype)].itemsize


def _workspace(specs: Specs, outputs: Specs, a: Any) -> int:
    return casts(*specs) + _scratch(specs[0], specs[1], a)


def _workspace_backward(specs: Specs, outputs: Specs, a: Any) -> int:
    gradient = 3 * math.prod(specs[2].shape) * DTYPES[wide(specs[2].dtype)].itemsize
    return casts(*specs) + _scratch(specs[1], specs[2], a) + gradient


_ATTRIBUTES = {
    "stride": Ints(low=1, high=SIZE),
    "padding": Ints(low=0, high=SIZE),
    "dilation": Ints(low=1, high=SIZE),
    "transposed": Bool(),
    "output_padding": Ints(low=0, high=SIZE),
    "groups": Int(low=1, high=SIZE),
}


def _cases() -> Iterator[tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]]:
    """Shapes of input and weight, attributes."""
    for shape, weight, stride, padding, dilation, groups in (
        ((2, 3, 7), (4, 3, 3), (1,), (1,), (1,), 1),
        ((2, 4, 6, 5), (6, 2, 3, 2), (2, 1), (1, 0), (1, 2), 2),
        ((1, 2, 4, 4), (2, 1, 3, 3), (1,), (1,), (1,), 2),
        ((0, 2, 4, 4), (2, 2, 1, 1), (1,), (0,), (1,), 1),
        ((2, 3, 4, 5), (5, 3, 1, 1), (1,), (0,), (1,), 1),
        ((1, 1, 1), (1, 1, 1), (3,), (2,), (1,), 1),
        ((1, 2, 3, 4, 5), (2, 2, 2, 1, 3), (1, 2, 3), (1, 0, 4), (2, 1, 1), 1),
    ):
        given = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
        yield shape, weight, {**given, "transposed": False, "output_padding": (0,)}
        if math.prod(weight[2:]) != 1:
            more = tuple(max(0, max(s, d) - 1) for s, d in zip((*stride, 1, 1), (*dilation, 1, 1), strict=False))
            channels = (shape[0], weight[0], *shape[2:])
            yield channels, weight, {**given, "transposed": True, "output_padding": more[: len(stride)]}


def _examples() -> Iterator[Example]:
    for dtype in samples.FLOATS:
        for shape, weight, attributes in _cases():
            x, k = samples.sample(shape, dtype, 1, special=False), samples.sample(weight, dtype, 2, special=False)
            channels = weight[1] * attributes["groups"] if attributes["transposed"] else weight[0]
            yield (x, k, samples.sample((channels,), dtype, 3, special=False)), attributes
            yield (samples.strided(x), samples.strided(k)), attributes


def _examples_backward() -> Iterator[Example]:
    for dtype in samples.FLOATS:
        for shape, weight, a in _cases():
            x, k = samples.sample(shape, dtype, 1, special=False), samples.sample(weight, dtype, 2, special=False)
            try:
                _, result = _windows(shape, weight, {**a})
            except InputError:
                continue
            grad = samples.sample(result, dtype, 3, special=False)
            yield (grad, x, k), {**a, "output_mask": (1, 1, 1)}
            yield (samples.strided(grad), samples.strided(x), samples.strided(k)), {**a, "output_mask": (0, 1, 0)}
            yield (grad, x, k), {**a, "output_mask": (1, 0, 0)}


_KINDS = frozenset({Kind.NEURAL, Kind.CONTRACTION})

OPERATORS: tuple[Operator, ...] = added_in(
    2,
    Operator(
        "convolution",
        "Convolution, or transposed convolution, of images (first) with a weight, plus a bias where one is given.",
        _KINDS,
        _infer,
        _convolution,
        _examples,
        arity=None,
        least=2,
        attributes=_ATTRIBUTES,
        flops=_flops,
        workspace=_workspace,
        contiguous=True,
        copies_strided=True,
    ),
    Operator(
        "convolution_backward",
        "Gradients of a convolution by input, weight and bias, those that ``output_mask`` asks for.",
        _KINDS,
        _infer_backward,
        _convolution_backward,
        _examples_backward,
        arity=3,
        outputs=None,
        attributes={**_ATTRIBUTES, "output_mask": MASK},
        flops=_flops_backward,
        workspace=_workspace_backward,
        contiguous=True,
        copies_strided=True,
    ),
)

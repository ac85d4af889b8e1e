"""Order statistics, counting, and elements chosen by integers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from goblin_dask.errors import InputError
from goblin_dask.graphs.operators import samples
from goblin_dask.graphs.operators.base import (
    Array,
    Attributes,
    Example,
    Kind,
    Operator,
    Specs,
    broadcast,
    check_count,
    like,
    nbytes,
)
from goblin_dask.graphs.operators.contraction import c_order
from goblin_dask.graphs.operators.dtypes import DTYPES, probe
from goblin_dask.graphs.operators.reductions import OVER_AXES, axes_of, reduced
from goblin_dask.graphs.operators.rules import Axis, Bool, Choice, Int, Ints, Shape
from goblin_dask.messages import ArraySpec

SORTING = frozenset({Kind.SORTING})
INDEXING = frozenset({Kind.INDEXING})
STATISTIC = frozenset({Kind.SORTING, Kind.REDUCTION})
METHODS = (
    "inverted_cdf",
    "averaged_inverted_cdf",
    "closest_observation",
    "interpolated_inverted_cdf",
    "hazen",
    "weibull",
    "linear",
    "median_unbiased",
    "normal_unbiased",
    "lower",
    "higher",
    "midpoint",
    "nearest",
)
"""Of `quantile`, as NumPy names them."""


def _sorts(specs: Specs, outputs: Specs, attributes: Attributes) -> float:
    elements = math.prod(specs[0].shape)
    return elements * math.log2(elements + 2)


def _copy(specs: Specs, outputs: Specs, attributes: Attributes) -> int:
    return nbytes(specs[0])


def _copies(specs: Specs, outputs: Specs, attributes: Attributes) -> int:
    """A partitioned copy, its transposed copy and some of the results' size."""
    return 2 * nbytes(specs[0]) + math.prod(specs[0].shape) + 128 * math.prod(outputs[0].shape)


def _integers(spec: ArraySpec, what: str = "an index") -> None:
    if DTYPES[spec.dtype].kind not in "iu":
        raise InputError(f"{what} has dtype {spec.dtype}, expected integers")


def _real(spec: ArraySpec) -> None:
    if DTYPES[spec.dtype].kind == "c":
        raise InputError("complex numbers have no such order; take their real or absolute values")


def _indices(array: Array) -> Array:
    """NumPy refuses uint64 as an index."""
    return array.astype("int64") if array.dtype.name == "uint64" else array


def _axis_of(specs: Specs, attributes: Any) -> int:
    if not specs[0].shape:
        raise InputError("a scalar has no axis")
    return int(attributes["axis"])


def _infer_sort(dtype: str | None = None, kth: bool = False) -> Callable[[Specs, Any], Specs]:
    def infer(specs: Specs, attributes: Any) -> Specs:
        axis = _axis_of(specs, attributes)
        if specs[0].dtype == "bfloat16":
            raise InputError("bfloat16 is not sorted; cast it to float32")
        if kth and any(entry >= specs[0].shape[axis] for entry in attributes["kth"]):
            raise InputError(f"kth={attributes['kth']} in axis {axis} of length {specs[0].shape[axis]}")
        return (ArraySpec(specs[0].shape, dtype or specs[0].dtype),)

    return infer


def _sorting(name: str) -> Callable[..., tuple[Array, ...]]:
    def kernel(xp: Any, operands: tuple[Array, ...], attributes: Any) -> tuple[Array, ...]:
        kind = "stable" if attributes["stable"] else None
        return (getattr(xp, name)(operands[0], axis=attributes["axis"], kind=kind),)

    return kernel


def _partitioning(name: str) -> Callable[..., tuple[Array, ...]]:
    def kernel(xp: Any, operands: tuple[Array, ...], attributes: Any) -> tuple[Array, ...]:
        return (getattr(xp, name)(operands[0], attributes["kth"], axis=attributes["axis"]),)

    return kernel


def _infer_topk(specs: Specs, attributes: Any) -> Specs:
    (spec,) = _infer_sort()(specs, attributes)
    axis, k = attributes["axis"], attributes["k"]
    if k > spec.shape[axis]:
        raise InputError(f"k={k} in axis {axis} of length {spec.shape[axis]}")
    shape = (*spec.shape[:axis], k, *spec.shape[axis + 1 :])
    return ArraySpec(shape, spec.dtype), ArraySpec(shape, "int64")


def _topk(xp: Any, operands: tuple[Array, ...], attributes: Any) -> tuple[Array, ...]:
    """By a stable sort: among equals the earlier one comes first."""
    axis, k = attributes["axis"], attributes["k"]
    array = xp.moveaxis(operands[0], axis, -1)
    if attributes["largest"]:
        last = array.shape[-1] - 1
        order = last - xp.flip(xp.argsort(xp.flip(array, -1), axis=-1, kind="stable"), -1)
    else:
        order = xp.argsort(array, axis=-1, kind="stable")
    order = xp.ascontiguousarray(xp.moveaxis(order[..., :k], -1, axis))
    return xp.take_along_axis(operands[0], order, axis), order


def _infer_searchsorted(specs: Specs, attributes: Any) -> Specs:
    check_count("the sorted operand's shape", len(specs[0].shape), 1)
    for spec in specs:
        if spec.dtype == "bfloat16":
            raise InputError("bfloat16 is not ordered; cast it to float32")
    return (ArraySpec(specs[1].shape, "int64"),)


def _searchsorted(xp: Any, operands: tuple[Array, ...], attributes: Any) -> tuple[Array, ...]:
    return (xp.searchsorted(operands[0], operands[1], side=attributes["side"]),)


def _infer_digitize(specs: Specs, attributes: Any) -> Specs:
    check_count("the bins' shape", len(specs[1].shape), 1)
    for spec in specs:
        _real(spec)
        if spec.dtype == "bfloat16":
            raise InputError("bfloat16 is not ordered; cast it to float32")
    return (ArraySpec(specs[0].shape, "int64"),)


def _digitize(xp: Any, operands: tuple[Array, ...], attributes: Any) -> tuple[Array, ...]:
    return (xp.digitize(operands[0], operands[1], right=attributes["right"]),)


def _weights(specs: Specs) -> None:
    """The last operand: weights of the first one's shape."""
    if specs[-1].shape != specs[0].shape:
        raise InputError("the weights have another shape")
    if DTYPES[specs[-1].dtype].kind == "c" or specs[-1].dtype == "bfloat16":
        raise InputError("weights are real numbers")


def _infer_bincount(specs: Specs, attributes: Any) -> Specs:
    check_count("the operand's shape", len(specs[0].shape), 1)
    _integers(specs[0], "the operand")
    if len(specs) > 2:
        raise InputError("expected the array and at most its weights")
    if len(specs) == 2:
        _weights(specs)
    return (ArraySpec((attributes["length"],), "float64" if len(specs) == 2 else "int64"),)


def _bincount(xp: Any, operands: tuple[Array, ...], attributes: Any) -> tuple[Array, ...]:
    length, array = attributes["length"], _indices(operands[0])
    if array.size and int(xp.max(array)) >= length:
        raise InputError(f"the value {int(xp.max(array))} does not fit into {length} bins")
    return (xp.bincount(array, operands[1] if len(operands) == 2 else None, minlength=length),)


def _infer_histogram(specs: Specs, attributes: Any) -> Specs:
    check_count("the edges' shape", len(specs[1].shape), 1)
    if len(specs) > 3 or specs[1].shape[0] < 2:
        raise InputError("expected the array, at least two edges and at most the array's weights")
    for spec in specs[:2]:
        _real(spec)
        if spec.dtype in ("bfloat16", "bool"):
            raise InputError(f"{spec.dtype} is not counted; cast it")
    if len(specs) == 3:
        _weights(specs)
        weights = DTYPES[specs[2].dtype]
        dtype = specs[2].dtype if weights.kind != "b" else "float64"
    else:
        dtype = "int64"
    return (ArraySpec((specs[1].shape[0] - 1,), dtype),)


def _histogram(xp: Any, operands: tuple[Array, ...], attributes: Any) -> tuple[Array, ...]:
    weights = operands[2] if len(operands) == 3 else None
    if weights is not None and weights.dtype.kind == "b":
        weights = weights.astype("float64")
    return (xp.histogram(operands[0], operands[1], weights=weights)[0],)


def _infer_histogramdd(specs: Specs, attributes: Any) -> Specs:
    sample, edges = specs[0], specs[1 : len(specs) - attributes["weighted"]]
    check_count("the sample's shape", len(sample.shape), 2)
    check_count("the list of edges", len(edges), sample.shape[1])
    for edge in edges:
        check_count("an edge's shape", len(edge.shape), 1)
        if edge.shape[0] < 2:
            raise InputError("expected at least two edges")
    for spec in specs:
        _real(spec)
        if spec.dtype in ("bfloat16", "float16", "bool"):
            raise InputError(f"{spec.dtype} is not counted; cast it")
    if attributes["weighted"] and specs[-1].shape != sample.shape[:1]:
        raise InputError("the weights have another length than the sample")
    return (ArraySpec(tuple(edge.shape[0] - 1 for edge in edges), "float64"),)


def _histogramdd(xp: Any, operands: tuple[Array, ...], attributes: Any) -> tuple[Array, ...]:
    edges = operands[1 : len(operands) - attributes["weighted"]]
    weights = operands[-1] if attributes["weighted"] else None
    return (c_order(xp, xp.histogramdd(operands[0], edges, weights=weights)[0]),)


def _infer_isin(specs: Specs, attributes: Any) -> Specs:
    for spec in specs:
        if spec.dtype == "bfloat16":
            raise InputError("bfloat16 is not ordered; cast it to float32")
    return (ArraySpec(specs[0].shape, "bool"),)


def _isin(xp: Any, operands: tuple[Array, ...], attributes: Any) -> tuple[Array, ...]:
    return (xp.isin(operands[0], operands[1], invert=attributes["invert"]),)


def _infer_interp(specs: Specs, attributes: Any) -> Specs:
    x, points, values = specs
    if len(points.shape) != 1 or points.shape != values.shape or points.shape == (0,):
        raise InputError("the coordinates and their values are two vectors of equal length")
    _real(x)
    _real(points)
    return (ArraySpec(x.shape, "complex128" if DTYPES[values.dtype].kind == "c" else "float64"),)


def _infer_statistic(name: str) -> Callable[[Specs, Any], Specs]:
    function = getattr(np, name)

    def infer(specs: Specs, attributes: Any) -> Specs:
        shape, axes = specs[0].shape, axes_of(attributes, len(specs[0].shape))
        _real(specs[0])
        if specs[0].dtype == "bfloat16":
            raise InputError("bfloat16 is not sorted; cast it to float32")
        if any(shape[axis] == 0 for axis in axes):
            raise InputError("an empty axis has no such value")
        if not axes:
            raise InputError("expected at least one axis")
        rest = reduced(shape, axes, attributes["keepdims"])
        if len(specs) == 1:
            return (ArraySpec(rest, probe(function, specs[0].dtype)[0]),)
        if len(specs[1].shape) > 1 or DTYPES[specs[1].dtype].kind != "f" or specs[1].dtype == "bfloat16":
            raise InputError("the probabilities are floats, one or a vector")
        return (ArraySpec((*specs[1].shape, *rest), _quantile_dtype(function, attributes["method"], specs)),)

    return infer


def _quantile_dtype(function: Any, method: str, specs: Specs) -> str:
    """Of the values between two elements, which are interpolated for a scalar probability as for a vector."""
    key = (function.__name__, method, specs[0].dtype, specs[1].dtype, len(specs[1].shape))
    if key not in _quantile_dtypes:
        half = np.full((1,) * len(specs[1].shape), 0.5, DTYPES[specs[1].dtype])
        value = function(np.ones((2,), DTYPES[specs[0].dtype]), half, method=method)
        _quantile_dtypes[key] = np.asarray(value).dtype.name
    return _quantile_dtypes[key]


_quantile_dtypes: dict[tuple[str, str, str, str, int], str] = {}
"""Bounded by the catalogue's dtypes and methods."""


def _statistic(name: str) -> Callable[..., tuple[Array, ...]]:
    def kernel(xp: Any, operands: tuple[Array, ...], attributes: Any) -> tuple[Array, ...]:
        array, more = operands[0], {}
        axes = axes_of(attributes, array.ndim)
        if len(operands) == 2:
            more["method"] = attributes["method"]
        hidden = None
        if name.startswith("nan") and array.dtype.kind not in "iub":
            missing = xp.all(xp.isnan(array), axis=axes, keepdims=True)
            if bool(xp.any(missing)):  # NumPy warns of a slice of NaN alone
                hidden = missing
                array = xp.where(missing, xp.zeros((), array.dtype), array)
        result = getattr(xp, name)(array, *operands[1:], axis=axes, keepdims=attributes["keepdims"], **more)
        if hidden is not None:
            shape = reduced(array.shape, axes, attributes["keepdims"])
            result = xp.where(hidden.reshape(shape), xp.asarray(np.nan, dtype=result.dtype), result)
        return (c_order(xp, xp.asarray(result)),)

    return kernel


def _infer_take(specs: Specs, attributes: Any) -> Specs:
    axis, shape = _axis_of(specs, attributes), specs[0].shape
    _integers(specs[1])
    if shape[axis] == 0 and 0 not in specs[1].shape:
        raise InputError(f"axis {axis} is empty: there is nothing to take")
    return like(specs[0], (*shape[:axis], *specs[1].shape, *shape[axis + 1 :]))


def _take(xp: Any, operands: tuple[Array, ...], attributes: Any) -> tuple[Array, ...]:
    return (xp.take(operands[0], _indices(operands[1]), axis=attributes["axis"]),)


def _along(specs: Specs, attributes: Any) -> tuple[int, ...]:
    """Shape of the elements that an index along an axis chooses."""
    axis, shape, index = _axis_of(specs, attributes), specs[0].shape, specs[1].shape
    _integers(specs[1])
    check_count("the index's shape", len(index), len(shape))
    if shape[axis] == 0 and index[axis]:
        raise InputError(f"axis {axis} is empty: there is nothing to choose")
    outer = broadcast((*shape[:axis], 1, *shape[axis + 1 :]), (*index[:axis], 1, *index[axis + 1 :]))
    return (*outer[:axis], index[axis], *outer[axis + 1 :])


def _infer_take_along(specs: Specs, attributes: Any) -> Specs:
    return like(specs[0], _along(specs, attributes))


def _infer_scatter(specs: Specs, attributes: Any) -> Specs:
    chosen, axis = _along(specs, attributes), attributes["axis"]
    if any(size != specs[0].shape[i] for i, size in enumerate(chosen) if i != axis):
        raise InputError("the index is larger than the array")
    if broadcast(specs[2].shape, chosen) != chosen:
        raise InputError(f"the values do not broadcast to the index's shape {chosen}")
    return (specs[0],)


def _scatter(xp: Any, operands: tuple[Array, ...], attributes: Any) -> tuple[Array, ...]:
    result = operands[0].copy(order="C")
    values = operands[2].real if operands[2].dtype.kind == "c" and result.dtype.kind not in "cb" else operands[2]
    xp.put_along_axis(result, _indices(operands[1]), values.astype(result.dtype), attributes["axis"])
    return (result,)


def _chosen(shape: tuple[int, ...], indices: Specs, axis: int) -> tuple[int, ...]:
    """Shape of ``array[:, …, *indices]``."""
    if not indices or axis + len(indices) > len(shape):
        raise InputError(f"{len(indices)} indices from axis {axis} on for an array with {len(shape)} axes")
    for spec in indices:
        _integers(spec)
    points = broadcast(*(spec.shape for spec in indices))
    if math.prod(points) and 0 in shape[axis : axis + len(indices)]:
        raise InputError("an indexed axis is empty")
    return (*shape[:axis], *points, *shape[axis + len(indices) :])


def _infer_index(specs: Specs, attributes: Any) -> Specs:
    return like(specs[0], _chosen(specs[0].shape, specs[1:], attributes["axis"]))


def _index(xp: Any, operands: tuple[Array, ...], attributes: Any) -> tuple[Array, ...]:
    key = (*(slice(None),) * attributes["axis"], *map(_indices, operands[1:]))
    return (c_order(xp, operands[0][key]),)


def _infer_index_put(specs: Specs, attributes: Any) -> Specs:
    chosen = _chosen(specs[0].shape, specs[2:], attributes["axis"])
    if broadcast(specs[1].shape, chosen) != chosen:
        raise InputError(f"the values do not broadcast to the indexed shape {chosen}")
    return (specs[0],)


def _index_put(xp: Any, operands: tuple[Array, ...], attributes: Any) -> tuple[Array, ...]:
    result, values = operands[0].copy(order="C"), operands[1]
    values = (values.real if values.dtype.kind == "c" and result.dtype.kind not in "cb" else values).astype(
        result.dtype
    )
    key = (*(slice(None),) * attributes["axis"], *map(_indices, operands[2:]))
    if attributes["accumulate"]:
        xp.add.at(result, key, values)
    else:
        result[key] = values
    return (result,)


def _infer_unravel(specs: Specs, attributes: Any) -> Specs:
    _integers(specs[0])
    return (ArraySpec(specs[0].shape, "int64"),) * len(attributes["shape"])


def _unravel(xp: Any, operands: tuple[Array, ...], attributes: Any) -> tuple[Array, ...]:
    return tuple(xp.array(part) for part in xp.unravel_index(_indices(operands[0]), attributes["shape"]))


def _infer_ravel(specs: Specs, attributes: Any) -> Specs:
    for spec in specs:
        _integers(spec)
    check_count("the shape", len(attributes["shape"]), len(specs))
    return (ArraySpec(broadcast(*(spec.shape for spec in specs)), "int64"),)


def _ravel(xp: Any, operands: tuple[Array, ...], attributes: Any) -> tuple[Array, ...]:
    return (xp.ravel_multi_index(tuple(map(_indices, operands)), attributes["shape"]),)


ORDERED = tuple(dtype for dtype in samples.ALL if dtype != "bfloat16")


def _examples_axis(dtypes: tuple[str, ...] = samples.ALL, **more: Any) -> Callable[[], Iterator[Example]]:
    def examples() -> Iterator[Example]:
        for dtype in dtypes:
            for shape, axis in (((5,), 0), ((3, 4), 1), ((4, 3), 0), ((2, 4, 3), 1)):
                yield (samples.sample(shape, dtype),), {"axis": axis, **more}
                yield (samples.strided(samples.sample(shape, dtype)),), {"axis": axis, **more}
        yield (samples.sample((3, 0), "float32"),), {"axis": 1, **more}
        yield (samples.sample((), "float32"),), {**more}

    return examples


def _examples_statistic(*probabilities: Any) -> Callable[[], Iterator[Example]]:
    def examples() -> Iterator[Example]:
        for dtype in ("float16", "float32", "float64", "int8", "int64", "uint8", "bool"):
            for i, (shape, axes) in enumerate((((5,), None), ((3, 4), 1), ((2, 3, 4), (0, 2)), ((1,), 0))):
                array = samples.sample(shape, dtype, i, special=i == 1)
                for q in probabilities or (None,):
                    more = {} if q is None else {"method": METHODS[(i + len(dtype)) % len(METHODS)]}
                    operands = (array,) if q is None else (array, np.asarray(q))
                    yield operands, {"axes": axes, "keepdims": bool(i % 2), **more}
        yield (np.asarray([[np.nan, np.nan], [1, np.nan]]), *map(np.asarray, probabilities[:1])), {"axes": 1}

    return examples


def _examples_search(**more: Any) -> Callable[[], Iterator[Example]]:
    def examples() -> Iterator[Example]:
        for dtype in ORDERED:
            edges = np.sort(samples.sample((5,), dtype, special=False))
            for shape in ((), (4,), (2, 3), (0,)):
                yield (edges, samples.sample(shape, dtype)), more
            yield (edges, samples.strided(samples.sample((3, 2), "float64"))), more

    return examples


def _examples_digitize() -> Iterator[Example]:
    for (edges, array), _ in _examples_search()():
        yield (array, edges), {}
        yield (array, edges[::-1].copy()), {"right": True}


def _examples_bincount() -> Iterator[Example]:
    for dtype in samples.INTEGERS:
        values = np.asarray([0, 3, 3, 1], dtype)
        yield (values,), {"length": 5}
        yield (values, samples.sample((4,), "float32")), {"length": 4}
        yield (values[:0],), {"length": 2}


def _examples_histogram() -> Iterator[Example]:
    for dtype in ("float16", "float32", "float64", "int8", "int64", "uint8"):
        array = samples.sample((3, 7), dtype, special=False)
        edges = np.asarray([-2, -1, 0, 0.5, 2, 9])
        yield (array, edges), {}
        yield (array[:0], edges), {}
        for weights in ("float32", "int8", "float64"):
            yield (array, edges.astype("float32"), samples.sample((3, 7), weights, special=False)), {}


def _examples_histogramdd() -> Iterator[Example]:
    sample = samples.sample((20, 2), "float64", special=False)
    edges = np.asarray([-3.0, 0, 1]), np.asarray([-2.0, -1, 0, 5])
    yield (sample, *edges), {}
    yield (sample, *edges, samples.sample((20,), "float64", special=False)), {"weighted": True}
    yield (sample[:0], *edges), {}


def _examples_isin() -> Iterator[Example]:
    for dtype in ORDERED:
        for shape in ((), (5,), (2, 3), (0,)):
            yield (samples.sample(shape, dtype), samples.sample((3,), dtype)), {}
            yield (samples.sample(shape, dtype), samples.sample((2,), dtype, 3)), {"invert": True}


def _examples_interp() -> Iterator[Example]:
    for dtype in ("float32", "float64", "int16", "complex128"):
        for shape in ((), (5,), (2, 3), (0,)):
            yield (samples.sample(shape, "float64"), np.asarray([-1.0, 0, 2]), samples.sample((3,), dtype)), {}


def _examples_take() -> Iterator[Example]:
    for dtype in samples.ALL:
        array = samples.sample((4, 3), dtype)
        for index in samples.INTEGERS:
            yield (array, np.asarray([2, 0, 2, 1], index)), {"axis": 1}
        yield (samples.strided(array), np.asarray([[-1, 0]])), {"axis": 0}
        yield (array, np.asarray(3)), {"axis": 0}
        yield (array[:0], np.zeros((0,), "int64")), {"axis": 0}


def _examples_take_along() -> Iterator[Example]:
    for dtype in samples.ALL:
        array = samples.sample((4, 3), dtype)
        yield (array, np.asarray([[2], [0], [-1], [1]])), {"axis": 1}
        yield (samples.strided(array), np.asarray([[0, 3, 1], [1, 1, 0]], "uint8")), {"axis": 0}
        yield (array, np.asarray([[2]], "uint64")), {"axis": 0}


def _examples_scatter() -> Iterator[Example]:
    for (array, index), attributes in _examples_take_along():
        chosen = np.take_along_axis(array, index.astype("int64"), attributes["axis"])
        yield (array, index, chosen + chosen), attributes
        yield (array, index, samples.sample((), "complex64", special=False)), attributes


def _examples_index() -> Iterator[Example]:
    for dtype in samples.ALL:
        array = samples.sample((3, 4, 2), dtype)
        yield (array, np.asarray([2, 0])), {}
        yield (array, np.asarray([[2], [0]]), np.asarray([1, -1, 3])), {"axis": 0}
        yield (samples.strided(array), np.asarray([2, 0], "uint64"), np.asarray(1)), {}
        yield (array, np.asarray([3, 0, 1]), np.asarray([0, 1, 1], "int8")), {"axis": 1}


def _examples_index_put() -> Iterator[Example]:
    for (array, *indices), attributes in _examples_index():
        for values in (samples.sample((), "float32", special=False), samples.sample((1, 2), "int8", special=False)):
            yield (array, values[..., 0:1] if values.ndim and attributes else values, *indices), attributes
            yield (array, np.asarray(1, array.dtype), *indices), {**attributes, "accumulate": True}


def _examples_unravel() -> Iterator[Example]:
    for dtype in samples.INTEGERS:
        for values in (np.asarray(5), np.asarray([[0, 11]]), np.zeros((0,))):
            yield (values.astype(dtype),), {"shape": (3, 4)}


def _examples_ravel() -> Iterator[Example]:
    for dtype in samples.INTEGERS:
        yield (np.asarray([[2], [0]], dtype), np.asarray([1, 3], dtype)), {"shape": (3, 4)}
        yield (np.asarray(2, dtype),), {"shape": (3,)}


_BY_AXIS = {"axis": Axis(0), "stable": Bool(False)}
_QUANTILE = {**OVER_AXES, "method": Choice("linear", METHODS)}


def _sort(name: str, summary: str, infer: Any, kernel: Any, attributes: Any, **more: Any) -> Operator:
    examples = more.pop("examples", None) or _examples_axis(ORDERED)
    return Operator(
        name, summary, SORTING, infer, kernel, examples, attributes=attributes, flops=_sorts, workspace=_copy, **more
    )


def _statistics(name: str, summary: str, attributes: Any = OVER_AXES, probabilities: Any = (), **more: Any) -> Operator:
    return Operator(
        name,
        summary,
        STATISTIC,
        _infer_statistic(name),
        _statistic(name),
        _examples_statistic(*probabilities),
        attributes=attributes,
        flops=_sorts,
        workspace=_copies,
        **more,
    )


def _plain(
    name: str, summary: str, kinds: Any, infer: Any, kernel: Any, examples: Any, arity: Any, **more: Any
) -> Operator:
    more.setdefault("contiguous", True)
    return Operator(name, summary, kinds, infer, kernel, examples, arity=arity, **more)


OPERATORS: tuple[Operator, ...] = (
    _sort("sort", "Elements of an axis in ascending order, NaN last.", _infer_sort(), _sorting("sort"), _BY_AXIS),
    _sort("argsort", "Indices that sort an axis.", _infer_sort("int64"), _sorting("argsort"), _BY_AXIS),
    _sort(
        "partition",
        "An axis reordered so that elements number ``kth`` stand where sorting puts them.",
        _infer_sort(kth=True),
        _partitioning("partition"),
        {"axis": Axis(0), "kth": Ints(low=0)},
        examples=_examples_axis(ORDERED, kth=(1,)),
    ),
    _sort(
        "argpartition",
        "Indices that partition an axis.",
        _infer_sort("int64", kth=True),
        _partitioning("argpartition"),
        {"axis": Axis(0), "kth": Ints(low=0)},
        examples=_examples_axis(ORDERED, kth=(1, 2)),
    ),
    _sort(
        "topk",
        "The ``k`` largest, or smallest, elements of an axis in order, and their indices.",
        _infer_topk,
        _topk,
        {"axis": Axis(0), "k": Int(low=0), "largest": Bool(True)},
        examples=_examples_axis(ORDERED, k=2),
        outputs=2,
    ),
    _statistics("median", "Median."),
    _statistics("nanmedian", "Median of the numbers among NaN."),
    _statistics(
        "quantile", "Quantiles at the second operand's probabilities.", _QUANTILE, (0.25, [0.0, 0.5, 0.9]), arity=2
    ),
    _statistics("nanquantile", "Quantiles of the numbers among NaN.", _QUANTILE, (0.25, [0.0, 0.5, 0.9]), arity=2),
    _plain(
        "searchsorted",
        "Where the second operand's elements go into the first, a sorted vector.",
        SORTING,
        _infer_searchsorted,
        _searchsorted,
        _examples_search(side="right"),
        2,
        attributes={"side": Choice("left", ("left", "right"))},
        workspace=lambda specs, outputs, attributes: 16 * (math.prod(specs[0].shape) + math.prod(specs[1].shape)),
    ),
    _plain(
        "digitize",
        "Number of the bin of each element; the second operand has the monotonic edges.",
        SORTING,
        _infer_digitize,
        _digitize,
        _examples_digitize,
        2,
        attributes={"right": Bool(False)},
        workspace=lambda specs, outputs, attributes: 24 * (math.prod(specs[0].shape) + math.prod(specs[1].shape)),
    ),
    _plain(
        "bincount",
        "How often each integer below ``length`` occurs, or the sum of its weights.",
        SORTING,
        _infer_bincount,
        _bincount,
        _examples_bincount,
        None,
        least=1,
        attributes={"length": Int(low=0)},
        workspace=lambda specs, outputs, attributes: 24 * math.prod(specs[0].shape),
    ),
    _plain(
        "histogram",
        "How many elements, or the sum of whose weights, lie between neighbouring edges.",
        SORTING,
        _infer_histogram,
        _histogram,
        _examples_histogram,
        None,
        least=2,
        workspace=lambda specs, outputs, attributes: (
            64 * min(65536, math.prod(specs[0].shape)) + 64 * specs[1].shape[0]
        ),
    ),
    _plain(
        "histogramdd",
        "Histogram of points; operands are points, edges of each coordinate, and weights when ``weighted``.",
        SORTING,
        _infer_histogramdd,
        _histogramdd,
        _examples_histogramdd,
        None,
        least=2,
        attributes={"weighted": Bool(False)},
        workspace=lambda specs, outputs, attributes: 64 * math.prod(specs[0].shape) + 32 * math.prod(outputs[0].shape),
    ),
    _plain(
        "isin",
        "Whether an element is one of the second operand's.",
        SORTING,
        _infer_isin,
        _isin,
        _examples_isin,
        2,
        attributes={"invert": Bool(False)},
        workspace=lambda specs, outputs, attributes: (
            64 * (math.prod(specs[0].shape) + math.prod(specs[1].shape)) + 2**20
        ),
    ),
    _plain(
        "interp",
        "Linear interpolation between the points (second operand, third operand).",
        SORTING,
        _infer_interp,
        lambda xp, operands, attributes: (xp.interp(*operands),),
        _examples_interp,
        3,
        workspace=lambda specs, outputs, attributes: 16 * (math.prod(specs[0].shape) + 3 * math.prod(specs[1].shape)),
    ),
    _plain(
        "take",
        "Elements of an axis, by index.",
        INDEXING,
        _infer_take,
        _take,
        _examples_take,
        2,
        attributes={"axis": Axis(0)},
    ),
    _plain(
        "take_along_axis",
        "Elements of an axis, by an index of their own for each slice.",
        INDEXING,
        _infer_take_along,
        lambda xp, o, attributes: (xp.take_along_axis(o[0], _indices(o[1]), attributes["axis"]),),
        _examples_take_along,
        2,
        attributes={"axis": Axis(0)},
        workspace=lambda specs, outputs, attributes: 8 * sum(outputs[0].shape) + 8 * math.prod(specs[1].shape),
    ),
    _plain(
        "scatter",
        "A copy of the first operand with the third's elements at the second's indices of an axis.",
        INDEXING,
        _infer_scatter,
        _scatter,
        _examples_scatter,
        3,
        attributes={"axis": Axis(0)},
        workspace=lambda specs, outputs, attributes: nbytes(outputs[0]) + 8 * math.prod(specs[1].shape),
    ),
    _plain(
        "index",
        "Elements at points: operands after the first index consecutive axes from ``axis`` on.",
        INDEXING,
        _infer_index,
        _index,
        _examples_index,
        None,
        least=2,
        attributes={"axis": Axis(0)},
        workspace=lambda specs, outputs, attributes: nbytes(outputs[0]),
    ),
    _plain(
        "index_put",
        "A copy of the first operand with the second put, or added, at points that the others index.",
        INDEXING,
        _infer_index_put,
        _index_put,
        _examples_index_put,
        None,
        least=3,
        attributes={"axis": Axis(0), "accumulate": Bool(False)},
        workspace=lambda specs, outputs, attributes: nbytes(outputs[0]),
    ),
    _plain(
        "unravel_index",
        "Flat indices into an array of that shape as one index for each axis.",
        INDEXING,
        _infer_unravel,
        _unravel,
        _examples_unravel,
        1,
        outputs=None,
        attributes={"shape": Shape()},
        workspace=lambda specs, outputs, attributes: 8 * (1 + len(outputs)) * math.prod(specs[0].shape),
    ),
    _plain(
        "ravel_multi_index",
        "One index for each axis of an array of that shape as flat indices.",
        INDEXING,
        _infer_ravel,
        _ravel,
        _examples_ravel,
        None,
        least=1,
        attributes={"shape": Shape()},
        workspace=lambda specs, outputs, attributes: 8 * len(specs) * math.prod(outputs[0].shape),
    ),
)

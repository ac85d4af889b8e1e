"""Order statistics."""

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
    check_count,
    nbytes,
    ordered_operator,
    require_axis,
    require_real,
)
from goblin_dask.graphs.operators.contraction import c_order
from goblin_dask.graphs.operators.dtypes import DTYPES, probe
from goblin_dask.graphs.operators.reductions import OVER_AXES, axes_of, reduced
from goblin_dask.graphs.operators.rules import Axis, Bool, Choice, Int, Ints
from goblin_dask.graphs.operators.samples import ORDERED
from goblin_dask.messages import ArraySpec

SORTING = frozenset({Kind.SORTING})


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


def _infer_sort(dtype: str | None = None, kth: bool = False) -> Callable[[Specs, Any], Specs]:
    def infer(specs: Specs, attributes: Any) -> Specs:
        axis = require_axis(specs, attributes)
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
        require_real(spec)
        if spec.dtype == "bfloat16":
            raise InputError("bfloat16 is not ordered; cast it to float32")
    return (ArraySpec(specs[0].shape, "int64"),)


def _digitize(xp: Any, operands: tuple[Array, ...], attributes: Any) -> tuple[Array, ...]:
    return (xp.digitize(operands[0], operands[1], right=attributes["right"]),)


def _infer_statistic(name: str) -> Callable[[Specs, Any], Specs]:
    function = getattr(np, name)

    def infer(specs: Specs, attributes: Any) -> Specs:
        shape, axes = specs[0].shape, axes_of(attributes, len(specs[0].shape))
        require_real(specs[0])
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
        function = getattr(xp, name if array.size else name.removeprefix("nan"))  # whose empty results are of any dtype
        if len(operands) == 2:
            more["method"] = attributes["method"]
        hidden = None
        if name.startswith("nan") and array.dtype.kind not in "iub":
            missing = xp.all(xp.isnan(array), axis=axes, keepdims=True)
            if bool(xp.any(missing)):  # NumPy warns of a slice of NaN alone
                hidden = missing
                array = xp.where(missing, xp.zeros((), array.dtype), array)
        result = function(array, *operands[1:], axis=axes, keepdims=attributes["keepdims"], **more)
        if hidden is not None:
            shape = reduced(array.shape, axes, attributes["keepdims"])
            result = xp.where(hidden.reshape(shape), xp.asarray(np.nan, dtype=result.dtype), result)
        return (c_order(xp, xp.asarray(result)),)

    return kernel


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


OPERATORS: tuple[Operator, ...] = (
    _sort(
        "sort",
        "Elements of an axis in ascending order, NaN last.",
        _infer_sort(),
        _sorting("sort"),
        _BY_AXIS,
        check="order",
    ),
    _sort(
        "argsort",
        "Indices that sort an axis.",
        _infer_sort("int64"),
        _sorting("argsort"),
        _BY_AXIS,
        check="order",
    ),
    _sort(
        "partition",
        "An axis reordered so that elements number ``kth`` stand where sorting puts them.",
        _infer_sort(kth=True),
        _partitioning("partition"),
        {"axis": Axis(0), "kth": Ints(low=0)},
        examples=_examples_axis(ORDERED, kth=(1,)),
        check="order",
    ),
    _sort(
        "argpartition",
        "Indices that partition an axis.",
        _infer_sort("int64", kth=True),
        _partitioning("argpartition"),
        {"axis": Axis(0), "kth": Ints(low=0)},
        examples=_examples_axis(ORDERED, kth=(1, 2)),
        check="order",
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
    ordered_operator(
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
    ordered_operator(
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
)

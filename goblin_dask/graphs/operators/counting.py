"""Counting, membership and interpolation."""

from __future__ import annotations

import math
from collections.abc import Iterator
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
    ordered_operator,
    require_integers,
    require_real,
)
from goblin_dask.graphs.operators.contraction import c_order
from goblin_dask.graphs.operators.dtypes import DTYPES
from goblin_dask.graphs.operators.indexing import indices
from goblin_dask.graphs.operators.rules import Bool, Int
from goblin_dask.graphs.operators.samples import ORDERED
from goblin_dask.messages import ArraySpec

SORTING = frozenset({Kind.SORTING})


def _weights(specs: Specs) -> None:
    """The last operand: weights of the first one's shape."""
    if specs[-1].shape != specs[0].shape:
        raise InputError("the weights have another shape")
    if DTYPES[specs[-1].dtype].kind == "c" or specs[-1].dtype == "bfloat16":
        raise InputError("weights are real numbers")


def _infer_bincount(specs: Specs, attributes: Any) -> Specs:
    check_count("the operand's shape", len(specs[0].shape), 1)
    require_integers(specs[0], "the operand")
    if len(specs) > 2:
        raise InputError("expected the array and at most its weights")
    if len(specs) == 2:
        _weights(specs)
    return (ArraySpec((attributes["length"],), "float64" if len(specs) == 2 else "int64"),)


def _bincount(xp: Any, operands: tuple[Array, ...], attributes: Any) -> tuple[Array, ...]:
    length, array = attributes["length"], indices(operands[0])
    if array.size and int(xp.max(array)) >= length:
        raise InputError(f"the value {int(xp.max(array))} does not fit into {length} bins")
    counts = xp.bincount(array, operands[1] if len(operands) == 2 else None, minlength=length)
    return (counts.astype("float64") if len(operands) == 2 and not array.size else counts,)


def _infer_histogram(specs: Specs, attributes: Any) -> Specs:
    check_count("the edges' shape", len(specs[1].shape), 1)
    if len(specs) > 3 or specs[1].shape[0] < 2:
        raise InputError("expected the array, at least two edges and at most the array's weights")
    for spec in specs[:2]:
        require_real(spec)
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
        require_real(spec)
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


def _workspace_isin(specs: Specs, outputs: Specs, attributes: Attributes) -> int:
    """NumPy compares with few elements one by one, and sorts everything with many."""
    elements, tested = math.prod(specs[0].shape), math.prod(specs[1].shape)
    if tested < 10 * elements**0.145:
        return 2 * elements + 65_536
    return 48 * (elements + tested) + 65_536


def _infer_interp(specs: Specs, attributes: Any) -> Specs:
    x, points, values = specs
    if len(points.shape) != 1 or points.shape != values.shape or points.shape == (0,):
        raise InputError("the coordinates and their values are two vectors of equal length")
    require_real(x)
    require_real(points)
    return (ArraySpec(x.shape, "complex128" if DTYPES[values.dtype].kind == "c" else "float64"),)


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


OPERATORS: tuple[Operator, ...] = (
    ordered_operator(
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
    ordered_operator(
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
    ordered_operator(
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
    ordered_operator(
        "isin",
        "Whether an element is one of the second operand's.",
        SORTING,
        _infer_isin,
        _isin,
        _examples_isin,
        2,
        attributes={"invert": Bool(False)},
        workspace=_workspace_isin,
    ),
    ordered_operator(
        "interp",
        "Linear interpolation between the points (second operand, third operand).",
        SORTING,
        _infer_interp,
        lambda xp, operands, attributes: (xp.interp(*operands),),
        _examples_interp,
        3,
        workspace=lambda specs, outputs, attributes: 16 * (math.prod(specs[0].shape) + 3 * math.prod(specs[1].shape)),
    ),
)

"""Reductions and running reductions, as NumPy computes them but without its warnings."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from goblin_dask.errors import InputError
from goblin_dask.graphs.operators import samples
from goblin_dask.graphs.operators.base import Array, Attributes, Example, Kind, Operator, Specs, nbytes
from goblin_dask.graphs.operators.dtypes import DTYPES, probe
from goblin_dask.graphs.operators.rules import Axes, Axis, Bool, DType, Int, Number
from goblin_dask.messages import ArraySpec

REDUCTION = frozenset({Kind.REDUCTION})
CUMULATIVE = frozenset({Kind.CUMULATIVE})
OVER_AXES = {"axes": Axes(None), "keepdims": Bool(False)}
OVER_AXIS = {"axis": Axis(None, optional=True), "keepdims": Bool(False)}


def axes_of(attributes: Any, rank: int) -> tuple[int, ...]:
    """The axes that a reduction is over."""
    axes = attributes["axes"]
    return tuple(range(rank)) if axes is None else axes


def reduced(shape: tuple[int, ...], axes: tuple[int, ...], keepdims: bool) -> tuple[int, ...]:
    """Shape without some axes."""
    if keepdims:
        return tuple(1 if axis in axes else size for axis, size in enumerate(shape))
    return tuple(size for axis, size in enumerate(shape) if axis not in axes)


def _flops(specs: Specs, outputs: Specs, attributes: Attributes) -> float:
    return float(math.prod(specs[0].shape))


def _one_mask(specs: Specs, outputs: Specs, attributes: Attributes) -> int:
    """A mask and a copy of the operand."""
    return nbytes(specs[0]) + math.prod(specs[0].shape)


def _several_copies(specs: Specs, outputs: Specs, attributes: Attributes) -> int:
    wide = max(nbytes(specs[0]), math.prod(specs[0].shape) * DTYPES[outputs[0].dtype].itemsize)
    return 2 * wide + nbytes(specs[0]) + 2 * math.prod(specs[0].shape) + 4 * 16 * math.prod(outputs[0].shape)


def _infer(
    function: Callable[..., Any] | str, empty: bool = True, dtype: bool = False
) -> Callable[[Specs, Any], Specs]:
    """Shape rule over axes; dtype by asking `function`, or the dtype `function` names."""

    def infer(specs: Specs, attributes: Any) -> Specs:
        shape = specs[0].shape
        axes = axes_of(attributes, len(shape))
        if not empty and any(shape[axis] == 0 for axis in axes):
            raise InputError("an empty axis has no such value")
        if isinstance(function, str):
            result = function
        elif dtype and attributes["dtype"] is not None:
            result = attributes["dtype"]
        else:
            result = probe(function, specs[0].dtype)[0]
        return (ArraySpec(reduced(shape, axes, attributes["keepdims"]), result),)

    return infer


def _kernel(name: str) -> Callable[..., tuple[Array, ...]]:
    """NumPy's function of that name over axes; bfloat16, which NumPy lacks, accumulates in float32."""

    def kernel(xp: Any, operands: tuple[Array, ...], attributes: Any) -> tuple[Array, ...]:
        (array,) = operands
        more: dict[str, Any] = {}
        target = attributes.get("dtype")
        if target is not None:
            more["dtype"] = DTYPES[target]
            if array.dtype.kind == "c" and more["dtype"].kind not in "cb":
                array = array.real
        result = more.get("dtype", array.dtype)
        if name in ("sum", "prod", "nansum", "nanprod") and result.name == "bfloat16":
            more["dtype"] = np.dtype("float32")
            array = array.astype(more["dtype"])  # NumPy does not look for NaN in what it does not know
        axes = axes_of(attributes, array.ndim)
        value = xp.asarray(getattr(xp, name)(array, axis=axes, keepdims=attributes["keepdims"], **more))
        return (value.astype(result) if more.get("dtype", result) != result else value,)

    return kernel


def _nan_extreme(name: str) -> Callable[..., tuple[Array, ...]]:
    """`nanmax` and `nanmin` as `fmax` and `fmin` reductions: NaN, silently, where there is nothing else."""

    def kernel(xp: Any, operands: tuple[Array, ...], attributes: Any) -> tuple[Array, ...]:
        axes = axes_of(attributes, operands[0].ndim)
        return (getattr(xp, name).reduce(operands[0], axis=axes, keepdims=attributes["keepdims"]),)

    return kernel


def _count_of(array: Array, axes: tuple[int, ...]) -> Any:
    """As the typed integer by which NumPy divides: float32 by it is float64, cast back."""
    return np.intp(math.prod(array.shape[axis] for axis in axes))


def mean(xp: Any, operands: tuple[Array, ...], attributes: Any) -> tuple[Array, ...]:
    """`numpy.mean`, step by step, without its warning for empty arrays."""
    (array,) = operands
    axes = axes_of(attributes, array.ndim)
    kind = array.dtype.name
    target = DTYPES[attributes["dtype"]] if attributes["dtype"] else None
    accumulator = target
    if target is None and array.dtype.kind in "iub":
        accumulator = np.dtype("float64")
    elif (target is None and kind in ("float16", "bfloat16")) or (target is not None and target.name == "bfloat16"):
        accumulator = np.dtype("float32")
    total = xp.asarray(xp.add.reduce(array, axis=axes, dtype=accumulator, keepdims=attributes["keepdims"]))
    result = xp.asarray(xp.true_divide(total, _count_of(array, axes)).astype(total.dtype))
    if target is not None:
        return (result.astype(target, copy=False),)
    return (result.astype(array.dtype) if kind in ("float16", "bfloat16") else result,)


def variance(xp: Any, operands: tuple[Array, ...], attributes: Any) -> tuple[Array, ...]:
    """`numpy.var`, step by step, without its warning for too few degrees of freedom."""
    (array,) = operands
    axes, count = axes_of(attributes, array.ndim), _count_of(array, axes_of(attributes, array.ndim))
    half = array.dtype.name == "bfloat16"
    accumulator = np.dtype("float64") if array.dtype.kind in "iub" else np.dtype("float32") if half else None
    centre = xp.asarray(xp.add.reduce(array, axis=axes, dtype=accumulator, keepdims=True))
    centre = xp.asarray(xp.true_divide(centre, count).astype(centre.dtype))
    deviation = xp.asarray(xp.subtract(array, centre))
    if deviation.dtype.kind == "c":
        deviation = deviation.real * deviation.real + deviation.imag * deviation.imag
    else:
        deviation = xp.multiply(deviation, deviation)
    total = xp.asarray(xp.add.reduce(deviation, axis=axes, dtype=accumulator, keepdims=attributes["keepdims"]))
    freedom = np.maximum(count - attributes["correction"], 0)
    result = xp.asarray(xp.true_divide(total, freedom).astype(total.dtype))
    return (result.astype(array.dtype) if half else result,)


def _nan_parts(xp: Any, array: Array, axes: tuple[int, ...]) -> tuple[Array, Array, Array]:
    """Elements with zeros for NaN, where numbers are, how many of them along the axes (kept)."""
    missing = xp.isnan(array)
    valid = xp.logical_not(missing)
    cleaned = xp.array(array, copy=True)  # as NumPy does: the order of its elements in memory is that of the sum
    xp.copyto(cleaned, xp.zeros((), array.dtype), where=missing)
    return cleaned, valid, xp.sum(valid, axis=axes, keepdims=True, dtype="int64")


def nanmean(xp: Any, operands: tuple[Array, ...], attributes: Any) -> tuple[Array, ...]:
    """`numpy.nanmean`, NaN where there is no number, silently."""
    (array,) = operands
    if array.dtype.kind in "iub":
        return mean(xp, operands, {**attributes, "dtype": None})
    axes = axes_of(attributes, array.ndim)
    cleaned, _, count = _nan_parts(xp, array, axes)
    wide = np.dtype("float32") if array.dtype.name == "bfloat16" else array.dtype
    total = xp.asarray(xp.sum(cleaned, axis=axes, keepdims=attributes["keepdims"], dtype=wide))
    result = xp.true_divide(total, count.reshape(total.shape))
    return (xp.asarray(result).astype(array.dtype),)


def nanvar(xp: Any, operands: tuple[Array, ...], attributes: Any) -> tuple[Array, ...]:
    """`numpy.nanvar`, NaN where the degrees of freedom do not suffice, silently."""
    (array,) = operands
    if array.dtype.kind in "iub":
        return variance(xp, operands, attributes)
    axes = axes_of(attributes, array.ndim)
    cleaned, valid, count = _nan_parts(xp, array, axes)
    wide = np.dtype("float32") if array.dtype.name == "bfloat16" else array.dtype
    centre = xp.true_divide(xp.sum(cleaned, axis=axes, keepdims=True, dtype=wide), count).astype(wide)
    deviation = xp.asarray(xp.subtract(cleaned, centre).astype(wide))
    xp.copyto(deviation, xp.zeros((), wide), where=xp.logical_not(valid))
    deviation = xp.multiply(deviation, xp.conj(deviation)).real if wide.kind == "c" else deviation * deviation
    total = xp.asarray(xp.sum(deviation, axis=axes, keepdims=attributes["keepdims"]))
    freedom = count.reshape(total.shape) - attributes["correction"]
    result = xp.asarray(xp.true_divide(total, freedom)).astype(total.dtype)
    result = xp.where(freedom <= 0, xp.asarray(np.nan, dtype=total.dtype), result)
    return (result.astype(array.dtype) if array.dtype.name == "bfloat16" else result,)


def _infer_axis(specs: Specs, attributes: Any) -> Specs:
    shape, axis = specs[0].shape, attributes["axis"]
    axes = tuple(range(len(shape))) if axis is None else (axis,)
    if any(shape[i] == 0 for i in axes):
        raise InputError("an empty axis has no such element")
    return (ArraySpec(reduced(shape, axes, attributes["keepdims"]), "int64"),)


def _arg(name: str) -> Callable[..., tuple[Array, ...]]:
    def kernel(xp: Any, operands: tuple[Array, ...], attributes: Any) -> tuple[Array, ...]:
        return (getattr(xp, name)(operands[0], axis=attributes["axis"], keepdims=attributes["keepdims"]),)

    return kernel


def _nan_arg(name: str, fill: float) -> Callable[..., tuple[Array, ...]]:
    """`nanargmax` and `nanargmin`: NumPy's, which refuse slices of NaN alone."""

    def kernel(xp: Any, operands: tuple[Array, ...], attributes: Any) -> tuple[Array, ...]:
        array, axis = operands[0], attributes["axis"]
        if array.dtype.kind not in "iub":
            missing = xp.isnan(array)
            if bool(xp.any(xp.all(missing, axis=axis))):
                raise InputError("a slice of NaN alone has no such element")
            array = xp.where(missing, xp.asarray(fill, dtype=array.dtype), array)
        return (getattr(xp, name)(array, axis=axis, keepdims=attributes["keepdims"]),)

    return kernel


def _infer_cumulative(name: str) -> Callable[[Specs, Any], Specs]:
    function = getattr(np, name)

    def infer(specs: Specs, attributes: Any) -> Specs:
        shape = specs[0].shape
        if not shape:
            raise InputError("a scalar has no axis to accumulate along")
        dtype = attributes.get("dtype") or probe(function, specs[0].dtype)[0]
        return (ArraySpec(shape, dtype),)

    return infer


def _cumulative(name: str) -> Callable[..., tuple[Array, ...]]:
    def kernel(xp: Any, operands: tuple[Array, ...], attributes: Any) -> tuple[Array, ...]:
        (array,) = operands
        target = DTYPES[attributes["dtype"]] if attributes["dtype"] else None
        if target is not None and array.dtype.kind == "c" and target.kind not in "cb":
            array = array.real
        if (target or array.dtype).name == "bfloat16":
            wide = getattr(xp, name)(array, axis=attributes["axis"], dtype=np.dtype("float32"))
            return (wide.astype(target or array.dtype),)
        return (getattr(xp, name)(array, axis=attributes["axis"], dtype=target),)

    return kernel


def _running(name: str) -> Callable[..., tuple[Array, ...]]:
    def kernel(xp: Any, operands: tuple[Array, ...], attributes: Any) -> tuple[Array, ...]:
        return (getattr(xp, name).accumulate(operands[0], axis=attributes["axis"]),)

    return kernel


def _infer_diff(specs: Specs, attributes: Any) -> Specs:
    shape, axis = specs[0].shape, attributes["axis"]
    if not shape:
        raise InputError("a scalar has no axis to take differences along")
    length = max(0, shape[axis] - 1)
    dtype = "bool" if specs[0].dtype == "bool" else probe(np.subtract, specs[0].dtype, specs[0].dtype)[0]
    return (ArraySpec((*shape[:axis], length, *shape[axis + 1 :]), dtype),)


def _infer_gradient(specs: Specs, attributes: Any) -> Specs:
    shape, axis = specs[0].shape, attributes["axis"]
    if len(specs) > 2 or (len(specs) == 2 and specs[1].shape not in ((), (shape[axis],))):
        raise InputError("expected the array and a spacing: one number or the coordinates along the axis")
    if shape[axis] < attributes["edge_order"] + 1:
        raise InputError(f"axis {axis} has {shape[axis]} elements, too few for edge_order={attributes['edge_order']}")
    spacing = specs[1] if len(specs) == 2 else ArraySpec((), "float64")
    rank = len(spacing.shape)
    return (ArraySpec(shape, probe(_gradient_along[rank], specs[0].dtype, spacing.dtype)[0]),)


def _gradient(xp: Any, operands: tuple[Array, ...], attributes: Any) -> tuple[Array, ...]:
    return (xp.gradient(*operands, axis=attributes["axis"], edge_order=attributes["edge_order"]),)


_gradient_along: tuple[Callable[..., Any], ...] = (
    lambda array, spacing: np.gradient(np.repeat(array, 3), spacing[0]),
    lambda array, spacing: np.gradient(np.repeat(array, 3), np.asarray([0, 1, 3], spacing.dtype)),
)


def _examples(dtypes: tuple[str, ...] = samples.ALL, axis: bool = False, special: bool = True, **more: Any) -> Any:
    """Every dtype over all axes and over some; empty axes too."""
    key = "axis" if axis else "axes"

    def examples() -> Iterator[Example]:
        for dtype in dtypes:
            for seed, (shape, over) in enumerate((((), None), ((5,), None), ((3, 4), 1), ((3, 4), None), ((0,), None))):
                yield (samples.sample(shape, dtype, seed, special),), {key: over, **more}
            chosen: tuple[Any, ...] = (0, -1) if axis else ((0, 2), (1,), ())
            for over in chosen:
                array = samples.sample((2, 3, 4), dtype, 9, special)
                yield (samples.strided(array),), {key: over, "keepdims": True, **more}
                yield (array.T,), {key: over, **more}
        yield (samples.sample((2, 0, 3), "float32"),), {key: 1, **more}
        yield (samples.sample((2, 0, 3), "float32"),), {key: 0, **more}
        yield (np.full((2, 3), np.nan),), {key: 1, **more}

    return examples


def _examples_along(**more: Any) -> Callable[[], Iterator[Example]]:
    def examples() -> Iterator[Example]:
        for dtype in samples.ALL:
            for shape in ((5,), (3, 4), (2, 0, 3), (1,)):
                yield (samples.sample(shape, dtype),), {"axis": -1, **more}
            yield (samples.strided(samples.sample((3, 4), dtype)),), {"axis": 0, **more}

    return examples


def _examples_gradient() -> Iterator[Example]:
    for dtype in ("float16", "float32", "float64", "int8", "int64", "complex64"):
        array = samples.sample((5, 4), dtype)
        yield (array,), {"axis": 0}
        yield (array, np.asarray(0.5)), {"axis": 1, "edge_order": 2}
        yield (array, np.asarray([0.0, 1, 3, 4, 7], "float32")), {"axis": 0}
        yield (array[:1], np.asarray(0.5)), {"axis": 0}


_TYPED = {**OVER_AXES, "dtype": DType(None, optional=True)}


def _over(
    name: str, summary: str, infer: Any, kernel: Any, attributes: Any = OVER_AXES, examples: Any = None, **more: Any
) -> Operator:
    return Operator(
        name, summary, REDUCTION, infer, kernel, examples or _examples(), attributes=attributes, flops=_flops, **more
    )


def _along(name: str, summary: str, infer: Any, kernel: Any, attributes: Any, examples: Any, **more: Any) -> Operator:
    return Operator(name, summary, CUMULATIVE, infer, kernel, examples, attributes=attributes, **more)


def _mean_dtype(array: Any) -> Any:
    return mean(np, (array,), {"axes": None, "keepdims": False, "dtype": None})[0]


def _var_dtype(array: Any) -> Any:
    return variance(np, (array,), {"axes": None, "keepdims": False, "correction": 0})[0]


_CORRECTED = {**OVER_AXES, "correction": Number(0)}
_DTYPED = {"axis": Axis(0), "dtype": DType(None, optional=True)}

OPERATORS: tuple[Operator, ...] = (
    _over("sum", "Sum over axes.", _infer(np.sum, dtype=True), _kernel("sum"), _TYPED),
    _over("prod", "Product over axes.", _infer(np.prod, dtype=True), _kernel("prod"), _TYPED),
    _over("max", "Largest element over axes; NaN where there is one.", _infer(np.max, empty=False), _kernel("max")),
    _over("min", "Smallest element over axes; NaN where there is one.", _infer(np.min, empty=False), _kernel("min")),
    _over("any", "Whether any element over axes is true.", _infer("bool"), _kernel("any")),
    _over("all", "Whether all elements over axes are true.", _infer("bool"), _kernel("all")),
    _over("count_nonzero", "Number of elements that are not zero.", _infer("int64"), _kernel("count_nonzero")),
    _over("mean", "Arithmetic mean.", _infer(_mean_dtype, dtype=True), mean, _TYPED),
    _over(
        "var",
        "Variance with ``n - correction`` degrees of freedom.",
        _infer(_var_dtype),
        variance,
        _CORRECTED,
        workspace=_several_copies,
    ),
    _over(
        "nansum",
        "Sum of the numbers among NaN.",
        _infer(np.nansum, dtype=True),
        _kernel("nansum"),
        _TYPED,
        workspace=_one_mask,
    ),
    _over(
        "nanprod",
        "Product of the numbers among NaN.",
        _infer(np.nanprod, dtype=True),
        _kernel("nanprod"),
        _TYPED,
        workspace=_one_mask,
    ),
    _over(
        "nanmax",
        "Largest number among NaN; NaN where there is none.",
        _infer(np.max, empty=False),
        _nan_extreme("fmax"),
    ),
    _over(
        "nanmin",
        "Smallest number among NaN; NaN where there is none.",
        _infer(np.min, empty=False),
        _nan_extreme("fmin"),
    ),
    _over("nanmean", "Mean of the numbers among NaN.", _infer(_mean_dtype), nanmean, workspace=_several_copies),
    _over(
        "nanvar",
        "Variance of the numbers among NaN.",
        _infer(_var_dtype),
        nanvar,
        _CORRECTED,
        workspace=_several_copies,
    ),
    _over(
        "argmax", "Index of the first largest element.", _infer_axis, _arg("argmax"), OVER_AXIS, _examples(axis=True)
    ),
    _over(
        "argmin", "Index of the first smallest element.", _infer_axis, _arg("argmin"), OVER_AXIS, _examples(axis=True)
    ),
    _over(
        "nanargmax",
        "Index of the first largest number among NaN.",
        _infer_axis,
        _nan_arg("argmax", -np.inf),
        OVER_AXIS,
        _examples(axis=True, special=False),
        workspace=_one_mask,
    ),
    _over(
        "nanargmin",
        "Index of the first smallest number among NaN.",
        _infer_axis,
        _nan_arg("argmin", np.inf),
        OVER_AXIS,
        _examples(axis=True, special=False),
        workspace=_one_mask,
    ),
    _along(
        "cumulative_sum", "Running sum.", _infer_cumulative("cumsum"), _cumulative("cumsum"), _DTYPED, _examples_along()
    ),
    _along(
        "cumulative_prod",
        "Running product.",
        _infer_cumulative("cumprod"),
        _cumulative("cumprod"),
        _DTYPED,
        _examples_along(),
    ),
    _along(
        "cumulative_max",
        "Running maximum.",
        lambda specs, attributes: (specs[0],) if specs[0].shape else _infer_cumulative("cumsum")(specs, attributes),
        _running("maximum"),
        {"axis": Axis(0)},
        _examples_along(),
    ),
    _along(
        "cumulative_min",
        "Running minimum.",
        lambda specs, attributes: (specs[0],) if specs[0].shape else _infer_cumulative("cumsum")(specs, attributes),
        _running("minimum"),
        {"axis": Axis(0)},
        _examples_along(),
    ),
    _along(
        "diff",
        "Differences of neighbours.",
        _infer_diff,
        lambda xp, operands, attributes: (xp.diff(operands[0], axis=attributes["axis"]),),
        {"axis": Axis(0)},
        _examples_along(),
    ),
    _along(
        "gradient",
        "Central differences along an axis; the second operand, when there, is the spacing or the coordinates.",
        _infer_gradient,
        _gradient,
        {"axis": Axis(0), "edge_order": Int(1, low=1, high=2)},
        _examples_gradient,
        arity=None,
        least=1,
        workspace=lambda specs, outputs, attributes: 3 * nbytes(outputs[0]),
    ),
)

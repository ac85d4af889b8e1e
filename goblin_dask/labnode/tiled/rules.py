"""How operators are tiled. A rule takes an `Application` and answers dask arrays; None where there is no tiled form.

Layers of neural networks have theirs in `goblin_dask.labnode.tiled.layers`.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import dask.array as da
import numpy as np
from dask.highlevelgraph import HighLevelGraph

from goblin_dask.graphs.apply import applies_operators, apply
from goblin_dask.graphs.operators import CATALOGUE, ELEMENTWISE, LINALG, activation
from goblin_dask.graphs.operators.dtypes import DTYPES
from goblin_dask.labnode.tiled.blocks import Application, Arrays, block_of_sum, blockwise, cut

Rule = Callable[[Application], Arrays | None]
HALVES = ("float16", "bfloat16")


def tile(this: Application, rules: Mapping[str, Rule]) -> Arrays | None:
    """The outputs of an operator as dask arrays; None where it has no tiled form for such operands."""
    rule = rules.get(this.operator.name)
    if rule is None or any(0 in spec.shape for spec in (*this.specs, this.outputs[0])):
        return None
    return rule(this)


def then(this: Application, name: str, *operands: Any, **attributes: Any) -> da.Array:
    """A further operator, of one output, that has its rule here."""
    found = tile(Application.of(name, operands, this.tiles, **attributes), RULES)
    assert found is not None  # only of operators that are tiled whatever their operands are
    return found[0]


# --- elementwise ------------------------------------------------------------------------------------------------------
def _elementwise(this: Application) -> Arrays:
    rank = len(this.outputs[0].shape)
    labels = [tuple(range(rank - len(spec.shape), rank)) for spec in this.specs]
    return blockwise(this, labels, [tuple(range(rank))] * len(this.outputs))


# --- reductions -------------------------------------------------------------------------------------------------------
_COMBINED = {
    "sum": "sum", "prod": "prod", "max": "max", "min": "min", "any": "any", "all": "all", "count_nonzero": "sum",
    "nansum": "sum", "nanprod": "prod", "nanmax": "nanmax", "nanmin": "nanmin",
}  # fmt: skip
"""Reductions of parts whose results are reduced further, and by what."""


@applies_operators
def _reduce(x: Any, axis: Any, keepdims: bool, *, name: str, attributes: tuple[tuple[str, Any], ...]) -> Any:
    return apply(name, x, axes=axis, keepdims=keepdims, **dict(attributes))


def _tree(this: Application) -> Arrays:
    """Part by part, then the parts' results."""
    (x,), attributes, (output,) = this.operands, dict(this.attributes), this.outputs
    axes, keepdims = attributes.pop("axes"), attributes.pop("keepdims")
    axes = tuple(range(x.ndim)) if axes is None else axes
    if not axes:
        return blockwise(this, [tuple(range(x.ndim))], [tuple(range(x.ndim))])
    if this.tiles.memory is not None:  # several parts' results are read together
        x = cut(x, this.tiles.memory // 16)
    name = this.operator.name
    # Parts of few digits are summed up in more.
    kept = "float32" if output.dtype in HALVES and "dtype" in attributes else output.dtype
    typed: tuple[tuple[str, Any], ...] = (("dtype", kept),) if "dtype" in attributes else ()
    again = _COMBINED[name]
    result = da.reduction(
        x,
        partial(_reduce, name=name, attributes=typed),
        partial(_reduce, name=again, attributes=(("dtype", kept),) if "dtype" in CATALOGUE[again].attributes else ()),
        axis=axes,
        keepdims=keepdims,
        dtype=DTYPES[kept],
        meta=np.empty((0,) * len(output.shape), DTYPES[kept]),
    )
    return (result if kept == output.dtype else then(this, "astype", result, dtype=output.dtype),)


def _wide(dtype: str, target: str | None = None) -> str:
    """In which dtype a mean is taken."""
    if target is not None:
        return "float32" if target == "bfloat16" else target
    return "float64" if DTYPES[dtype].kind in "iub" else "float32" if dtype in HALVES else dtype


def _average(this: Application, x: da.Array, axes: tuple[int, ...], keepdims: bool, dtype: str, less: Any = 0) -> Any:
    total = then(this, "sum", x, axes=axes, keepdims=keepdims, dtype=dtype)
    count = np.intp(math.prod(x.shape[axis] for axis in axes))
    divisor: Any = count if not less else np.float64(max(count - less, 0))
    return then(this, "astype", then(this, "divide", total, divisor), dtype=dtype)


def _mean(this: Application) -> Arrays:
    (x,), a = this.operands, this.attributes
    axes = tuple(range(x.ndim)) if a["axes"] is None else a["axes"]
    wide = _wide(this.specs[0].dtype, a["dtype"])
    result = _average(this, x, axes, a["keepdims"], wide)
    return (then(this, "astype", result, dtype=this.outputs[0].dtype),)


def _var(this: Application) -> Arrays:
    """Mean of the squares of the distances from the mean."""
    (x,), a = this.operands, this.attributes
    axes = tuple(range(x.ndim)) if a["axes"] is None else a["axes"]
    wide = then(this, "astype", x, dtype=_wide(this.specs[0].dtype))
    distance = then(this, "subtract", wide, _average(this, wide, axes, True, wide.dtype.name))
    squares = then(this, "square", then(this, "abs", distance))
    result = _average(this, squares, axes, a["keepdims"], squares.dtype.name, a["correction"])
    return (then(this, "astype", result, dtype=this.outputs[0].dtype),)


# --- along axes -------------------------------------------------------------------------------------------------------
def _along(this: Application) -> Arrays | None:
    """One block along the axes that are named, any blocks along the others."""
    (spec, *others), a = this.specs, this.attributes
    axes = a.get("axes", a.get("axis"))
    rank = len(spec.shape)
    if axes is None or others:
        return None
    whole = set(axes if isinstance(axes, tuple) else (axes,))
    outputs = []
    for output in this.outputs:
        if len(output.shape) == rank:
            outputs.append(tuple(rank + i if i in whole else i for i in range(rank)))
        elif len(output.shape) == rank - len(whole):
            outputs.append(tuple(i for i in range(rank) if i not in whole))
        else:
            return None
    return blockwise(this, [tuple(range(rank))], outputs, whole=whole)


def _batched(core: int) -> Rule:
    """Whole along the last `core` axes of operands and outputs, any blocks along those before."""

    def rule(this: Application) -> Arrays | None:
        rank = max(len(spec.shape) for spec in this.specs) - core
        if rank <= 0 or any(len(spec.shape) - core != rank for spec in this.specs):
            return None
        fresh = iter(range(rank, 1 << 30))

        def labelled(spec: Any) -> tuple[int, ...]:
            return (*range(rank), *(next(fresh) for _ in spec.shape[rank:]))

        labels = [labelled(spec) for spec in this.specs]
        if len({spec.shape[:rank] for spec in (*this.specs, *this.outputs)}) > 1:
            return None
        whole = {label for each in labels for label in each if label >= rank}
        return blockwise(this, labels, [labelled(spec) for spec in this.outputs], whole=whole)

    return rule


def _take(this: Application) -> Arrays:
    """Whole along the axis that is indexed, any blocks along the others and of the indices."""
    axis, rank = this.attributes["axis"], len(this.specs[0].shape)
    labels = tuple(range(rank))
    indices = tuple(range(rank, rank + len(this.specs[1].shape)))
    output = (*labels[:axis], *indices, *labels[axis + 1 :])
    return blockwise(this, [labels, indices], [output], whole={axis})


def _take_along(this: Application) -> Arrays | None:
    axis, rank = this.attributes["axis"], len(this.specs[0].shape)
    sides = [spec.shape[:axis] + spec.shape[axis + 1 :] for spec in this.specs]
    if axis is None or len(set(sides)) > 1:
        return None
    labels = tuple(range(rank))
    others = [tuple(rank + n if i == axis else i for i in labels) for n in range(1, len(this.specs))]
    output = (
        others[0]
        if this.operator.name == "take_along_axis"
        else tuple(2 * rank + 9 if i == axis else i for i in labels)
    )
    return blockwise(this, [labels, *others], [output], whole={axis, *(each[axis] for each in others)})


# --- contractions -----------------------------------------------------------------------------------------------------
def contract(this: Application, labels: list[tuple[int, ...]], output: tuple[int, ...]) -> Arrays | None:
    """Sums of products of blocks; along one axis they are added up, block by block."""
    sizes: dict[int, set[int]] = {}
    for spec, each in zip(this.specs, labels, strict=True):
        if len(set(each)) < len(each):
            return None
        for label, size in zip(each, spec.shape, strict=True):
            sizes.setdefault(label, set()).add(size)
    summed = [label for label in sizes if label not in output]
    if any(len(sizes[label]) > 1 for label in summed):
        return None
    whole = set(summed)
    if summed and this.outputs[0].dtype not in HALVES:  # sums of few digits are taken in more, and not cut
        whole.discard(max(summed, key=lambda label: max(sizes[label])))
    operands = _aligned(this.operands, labels, whole)
    aligned = Application(this.operator, operands, this.attributes, this.specs, this.outputs, this.tiles)
    return blockwise(aligned, labels, [output], whole=whole, function=block_of_sum)


def _aligned(operands: Arrays, labels: list[tuple[int, ...]], whole: set[int]) -> Arrays:
    """Operands with equal blocks along equal labels: those of the largest one, for it costs most to cut anew."""
    chunks: dict[int, Any] = {}
    for array, each in sorted(zip(operands, labels, strict=True), key=lambda pair: -pair[0].nbytes):
        for label, lengths in zip(each, array.chunks, strict=True):
            if label not in chunks or sum(chunks[label]) == 1:
                chunks[label] = lengths if label not in whole else (sum(lengths),)
    return tuple(
        array.rechunk({i: chunks[label] for i, label in enumerate(each) if array.shape[i] == sum(chunks[label])})
        for array, each in zip(operands, labels, strict=True)
    )


def _matmul(this: Application) -> Arrays | None:
    (a, b), rank = this.specs, len(this.outputs[0].shape)
    row, column = len(a.shape) == 1, len(b.shape) == 1
    batch = tuple(range(rank - (not row) - (not column)))
    i, k, j = 100, 101, 102
    left = (*batch[len(batch) - max(0, len(a.shape) - 2) :], *(() if row else (i,)), k)
    right = (*batch[len(batch) - max(0, len(b.shape) - 2) :], k, *(() if column else (j,)))
    return contract(this, [left, right], (*batch, *(() if row else (i,)), *(() if column else (j,))))


def _vecdot(this: Application) -> Arrays | None:
    rank = len(this.outputs[0].shape)
    labels = [(*range(rank - len(spec.shape) + 1, rank), 100) for spec in this.specs]
    return contract(this, labels, tuple(range(rank)))


def _tensordot(this: Application) -> Arrays | None:
    (a, b), left = this.specs, this.attributes["a_axes"]
    first = list(range(len(a.shape)))
    second = list(range(100, 100 + len(b.shape)))
    for one, other in zip(left, this.attributes["b_axes"], strict=True):
        second[other] = first[one]
    kept = [*(label for i, label in enumerate(first) if i not in left), *(label for label in second if label >= 100)]
    return contract(this, [tuple(first), tuple(second)], tuple(kept))


def _einsum(this: Application) -> Arrays | None:
    operands, output = this.attributes["subscripts"].split("->")
    labels = [tuple(map(ord, each)) for each in operands.split(",")]
    return contract(this, labels, tuple(map(ord, output)))


def _outer(this: Application) -> Arrays:
    return blockwise(this, [(0,), (1,)], [(0, 1)])


def _addmm(this: Application) -> Arrays:
    c, a, b = this.operands
    product = then(this, "matmul", a, b)
    return (then(this, "astype", then(this, "add", c, product), dtype=this.outputs[0].dtype),)


# --- movement: Dask's own ---------------------------------------------------------------------------------------------
def _moved(function: Callable[[da.Array, dict[str, Any]], da.Array]) -> Rule:
    return lambda this: (function(this.operands[0], this.attributes),)


def _reshape(this: Application) -> Arrays:
    """Dask merges axes and splits them, and does not do both to the same ones: these are merged first."""
    limit = None if this.tiles.memory is None else this.tiles.memory // 4
    x, shape = this.operands[0], this.outputs[0].shape
    try:
        return (da.reshape(x, shape, limit=limit),)
    except NotImplementedError:
        return (da.reshape(da.reshape(x, _merged(x.shape, shape), limit=limit), shape, limit=limit),)


def _merged(one: Sequence[int], other: Sequence[int]) -> tuple[int, ...]:
    """The shape with most axes from which splitting alone leads to either shape."""
    common = {1} | (set(itertools.accumulate(one, operator.mul)) & set(itertools.accumulate(other, operator.mul)))
    return tuple(after // before for before, after in itertools.pairwise(sorted(common)))


def _joined(this: Application) -> Arrays | None:
    axis = this.attributes["axis"]
    if axis is None:
        return None
    same = [then(this, "astype", x, dtype=this.outputs[0].dtype) for x in this.operands]
    return ((da.concatenate if this.operator.name == "concat" else da.stack)(same, axis=axis),)


def _slice(x: da.Array, a: dict[str, Any]) -> da.Array:
    index = []
    for start, length, step in zip(a["start"], a["length"], a["step"], strict=True):
        stop = start + length * step
        index.append(slice(start, None if stop < 0 else stop, step))
    return x[tuple(index)]


def _broadcast(this: Application) -> Arrays:
    """Blocks of the operand along the axes that it has, and no more of the new ones than make a block of good size."""
    (x,), (output,) = this.operands, this.outputs
    new = [axis for axis in range(-len(output.shape), 0) if -axis > x.ndim or x.shape[axis] != output.shape[axis]]
    x = cut(x, this.tiles.block)
    kept = math.prod(max(x.chunks[axis]) for axis in range(-x.ndim, 0) if axis not in new) * x.dtype.itemsize
    limit = max(1, this.tiles.block // kept)
    chunks = da.core.normalize_chunks("auto", tuple(output.shape[axis] for axis in new), limit=limit, dtype="u1")
    of_new = dict(zip(new, chunks, strict=True))
    whole = tuple(of_new[axis] if axis in of_new else x.chunks[axis] for axis in range(-len(output.shape), 0))
    return (da.broadcast_to(x, output.shape, chunks=whole),)


# --- arrays from nothing ----------------------------------------------------------------------------------------------
def _constant(this: Application) -> Arrays:
    """What is part of the program is known here."""
    return (da.from_array(apply("constant", **this.attributes), chunks=-1),)


def _filled(this: Application) -> Arrays:
    """Of a scalar, which is all that travels."""
    (output,), name = this.outputs, this.operator.name
    value: Any = this.operands[0] if this.operands else np.asarray(name == "ones", DTYPES[output.dtype])
    scalar = value if isinstance(value, da.Array) else da.from_array(value)
    return (_windows(this, "full", scalar, {}, False),)


def _arange(this: Application) -> Arrays | None:
    """Each block is the first one and its place; where these sums are exact, as they are of integers."""
    (output,), a = this.outputs, this.attributes
    dtype, (length,), start, step = DTYPES[output.dtype], output.shape, a["start"], a["step"]
    if dtype.kind not in "if":
        return None
    exact = 2 ** (np.finfo(dtype).nmant + 1) if dtype.kind == "f" else np.iinfo(dtype).max
    ends = (start, step, start + length * step, length * step)
    if any(not float(each).is_integer() or abs(each) > exact for each in ends):
        return None
    (chunks,) = this.tiles.chunks(output.shape, dtype)
    token = f"arange-{da.core.tokenize(a, chunks)}"
    layer = {}
    for number, (place, size) in enumerate(zip(itertools.accumulate((0, *chunks)), chunks, strict=False)):
        first = np.asarray(start + place * step, dtype)
        layer[(token, number)] = (partial(count, length=size, step=step, dtype=output.dtype), first)
    graph = HighLevelGraph.from_collections(token, layer)
    return (da.Array(graph, token, (chunks,), dtype=dtype, meta=np.empty(0, dtype)),)


@applies_operators
def count(start: Any, *, length: int, step: float, dtype: str) -> Any:
    """A block of numbers in steps."""
    return apply("add", apply("arange", start=0, stop=length * step, step=step, dtype=dtype), start)


def _random(this: Application) -> Arrays:
    attributes = {name: value for name, value in this.attributes.items() if name != "shape"}
    return (_windows(this, f"{this.operator.name}_part", this.operands[0], attributes, True),)


@applies_operators
def draw(operand: Any, start: Any, *, name: str, attributes: tuple[tuple[str, Any], ...]) -> Any:
    """A block that is made of a scalar or a key, and of its place."""
    return apply(name, operand, *([] if start is None else [start]), **dict(attributes))


RUN = 1 << 13
"""Neighbouring elements of a block that is drawn: to move the generator on costs as much as to draw thousands."""


def _windows(this: Application, name: str, operand: da.Array, attributes: dict[str, Any], placed: bool) -> da.Array:
    (output,) = this.outputs
    dtype = DTYPES[output.dtype]
    chunks = this.tiles.chunks(output.shape, dtype)
    if placed and len(output.shape) > 1 and max(chunks[-1]) < min(RUN, output.shape[-1]):
        last = min(RUN, output.shape[-1])
        rest = max(1, this.tiles.block // (last * dtype.itemsize))
        before = da.core.normalize_chunks("auto", output.shape[:-1], limit=rest, dtype="u1")
        chunks = (*before, *da.core.normalize_chunks((last,), output.shape[-1:]))
    operand = operand.rechunk(-1)
    token = f"{name}-{da.core.tokenize(operand.name, output.shape, chunks, attributes)}"
    whole = {"whole": output.shape} if placed else {}
    starts = [np.cumsum((0, *lengths[:-1])) for lengths in chunks]
    source = (operand.name, *(0 for _ in range(operand.ndim)))
    layer = {}
    for index in np.ndindex(*map(len, chunks)):
        shape = tuple(int(lengths[i]) for lengths, i in zip(chunks, index, strict=True))
        start = np.asarray([each[i] for each, i in zip(starts, index, strict=True)], np.int64) if placed else None
        given = tuple({"shape": shape, **whole, **attributes}.items())
        layer[(token, *index)] = (partial(draw, name=name, attributes=given), source, start)
    graph = HighLevelGraph.from_collections(token, layer, dependencies=[operand])
    return da.Array(graph, token, chunks, dtype=dtype, meta=np.empty((0,) * len(chunks), dtype))


_ALONG = (
    "cumulative_sum", "cumulative_prod", "cumulative_max", "cumulative_min", "diff", "gradient", "sort", "argsort",
    "partition", "argpartition", "topk", "median", "nanmedian", "nanmean", "nanvar", "argmax", "argmin", "nanargmax",
    "nanargmin", "norm", "fft", "ifft", "rfft", "irfft", "hfft", "ihfft", "fftn", "ifftn", "rfftn", "irfftn",
    "fftshift", "ifftshift", "repeat",
)  # fmt: skip

RULES: dict[str, Rule] = {
    **dict.fromkeys(ELEMENTWISE, _elementwise),
    **dict.fromkeys(_COMBINED, _tree),
    **dict.fromkeys(_ALONG, _along),
    **dict.fromkeys(LINALG - {"norm", "solve"}, _batched(2)),
    "mean": _mean,
    "var": _var,
    "take": _take,
    "take_along_axis": _take_along,
    "scatter": _take_along,
    "matmul": _matmul,
    "vecdot": _vecdot,
    "tensordot": _tensordot,
    "einsum": _einsum,
    "outer": _outer,
    "addmm": _addmm,
    "baddbmm": _addmm,
    "reshape": _reshape,
    "permute_dims": _moved(lambda x, a: da.transpose(x, a["axes"])),
    "expand_dims": _moved(lambda x, a: da.expand_dims(x, a["axes"])),
    "squeeze": _moved(lambda x, a: da.squeeze(x, axis=a["axes"])),
    "flip": _moved(lambda x, a: da.flip(x, a["axes"])),
    "slice": _moved(_slice),
    "diagonal": _moved(lambda x, a: da.diagonal(x, a["offset"], a["axis1"], a["axis2"])),
    "tril": _moved(lambda x, a: da.tril(x, a["k"])),
    "triu": _moved(lambda x, a: da.triu(x, a["k"])),
    "concat": _joined,
    "stack": _joined,
    "broadcast_to": _broadcast,
    "constant": _constant,
    "zeros": _filled,
    "ones": _filled,
    "full": _filled,
    "arange": _arange,
    "random_bits": _random,
    "random_uniform": _random,
    "random_normal": _random,
    **dict.fromkeys((each.name for each in activation.OPERATORS), _elementwise),
}
"""Rule of each operator on arrays that has a tiled form."""

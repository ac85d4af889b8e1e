"""Sums of products, and the accumulating ones that a tile of a large product is made of."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy

from goblin_dask.errors import InputError
from goblin_dask.graphs.operators import samples
from goblin_dask.graphs.operators.base import Array, Attributes, Example, Kind, Operator, Specs, broadcast, check_count
from goblin_dask.graphs.operators.dtypes import DTYPES, HALVES, common, probe
from goblin_dask.graphs.operators.rules import Attribute, Axes, Text
from goblin_dask.messages import ArraySpec

CONTRACTION = frozenset({Kind.CONTRACTION})
GEMM = frozenset({"float32", "float64", "complex64", "complex128"})
"""Dtypes that BLAS multiplies."""


def c_order(xp: Any, array: Array) -> Array:
    """The array in C order, itself where it is."""
    return array if array.flags.c_contiguous else xp.ascontiguousarray(array)


def product_dtype(*dtypes: str) -> str:
    """NumPy's dtype of a sum of products."""
    result = common(*dtypes)
    return result if result in HALVES else probe(np.matmul, result, result)[0]


def _widened(operands: tuple[Array, ...]) -> tuple[Any, tuple[Array, ...]]:
    """Dtype of the result, and the operands in the dtype in which they are multiplied."""
    result = product_dtype(*(operand.dtype.name for operand in operands))
    wide = DTYPES["float32" if result in HALVES else result]
    return DTYPES[result], tuple(operand.astype(wide, copy=False) for operand in operands)


def _contracting(function: Callable[..., Array]) -> Callable[[Any, tuple[Array, ...], Attributes], tuple[Array, ...]]:
    """Kernel of a function of (namespace, operands, attributes) that accumulates halves in float32."""

    def kernel(xp: Any, operands: tuple[Array, ...], attributes: Attributes) -> tuple[Array, ...]:
        dtype, wide = _widened(operands)
        result = xp.asarray(function(xp, wide, attributes))
        return (c_order(xp, result.astype(dtype, copy=False)),)

    return kernel


def _casts(specs: Specs, outputs: Specs, attributes: Attributes) -> int:
    """Bytes of the operands, and of a half's result, in the dtype that is multiplied in."""
    result = outputs[0].dtype
    wide = DTYPES["float32" if result in HALVES else result].itemsize
    total = sum(math.prod(spec.shape) * wide for spec in specs if spec.dtype != result or result in HALVES)
    return total + (math.prod(outputs[0].shape) * wide if result in HALVES else 0)


def _copies(specs: Specs, outputs: Specs, attributes: Attributes) -> int:
    """Casts, and transposed copies of the operands."""
    wide = DTYPES["float32" if outputs[0].dtype in HALVES else outputs[0].dtype].itemsize
    return _casts(specs, outputs, attributes) + sum(math.prod(spec.shape) * wide for spec in specs)


def _turned(order: tuple[int, ...]) -> bool:
    """Whether an order of axes is a rotation, which reshapes to a matrix, or its transpose, without a copy."""
    return not order or order == (*range(order[0], len(order)), *range(order[0]))


def _copies_tensordot(specs: Specs, outputs: Specs, attributes: Any) -> int:
    """Casts, and copies of the operands whose axes do not already lie as a product needs them."""
    total, wide = _casts(specs, outputs, attributes), 4 if outputs[0].dtype in HALVES else 0
    for spec, axes, last in zip(specs, (attributes["a_axes"], attributes["b_axes"]), (True, False), strict=True):
        free = tuple(axis for axis in range(len(spec.shape)) if axis not in axes)
        if not _turned((*free, *axes) if last else (*axes, *free)):
            total += math.prod(spec.shape) * (wide or DTYPES[outputs[0].dtype].itemsize)
    return total


def _infer_matmul(specs: Specs, attributes: Any) -> Specs:
    a, b = specs[0].shape, specs[1].shape
    if not a or not b:
        raise InputError("a scalar is no matrix; multiply instead")
    inner = b[-2] if len(b) > 1 else b[0]
    if a[-1] != inner:
        raise InputError(f"the inner lengths {a[-1]} and {inner} differ")
    batch = broadcast(a[:-2], b[:-2])
    rows = a[-2:-1] if len(a) > 1 else ()
    columns = b[-1:] if len(b) > 1 else ()
    return (ArraySpec((*batch, *rows, *columns), product_dtype(specs[0].dtype, specs[1].dtype)),)


def _matmul(xp: Any, operands: tuple[Array, ...], attributes: Attributes) -> Array:
    return xp.matmul(*(_taken_by_blas(xp, operand) for operand in operands))


def _matmul_into(xp: Any, operands: tuple[Array, ...], attributes: Attributes, out: Array) -> None:
    dtype, wide = _widened(operands)
    if dtype.name in HALVES:
        out[...] = _matmul(xp, wide, attributes)
    else:
        xp.matmul(*(_taken_by_blas(xp, operand) for operand in wide), out=out)


def _taken_by_blas(xp: Any, array: Array) -> Array:
    """The array, copied where NumPy would otherwise multiply without BLAS: 4 times slower for 512 × 512 float64."""
    if xp is not np or array.ndim < 2 or array.dtype.name not in GEMM or not array.size:
        return array
    rows, columns = array.shape[-2:]
    item: int = array.itemsize
    down, across = array.strides[-2:]
    by_rows = across == item and down >= columns * item and not down % item
    by_columns = down == item and across >= rows * item and not across % item
    return array if by_rows or by_columns else np.ascontiguousarray(array)


def _flops_inner(specs: Specs, outputs: Specs, attributes: Attributes) -> float:
    return 2.0 * math.prod(outputs[0].shape) * specs[0].shape[-1]


def _infer_vecdot(specs: Specs, attributes: Any) -> Specs:
    shape = broadcast(specs[0].shape, specs[1].shape)
    if not specs[0].shape or not specs[1].shape or specs[0].shape[-1] != specs[1].shape[-1]:
        raise InputError("the last axes differ")
    return (ArraySpec(shape[:-1], product_dtype(specs[0].dtype, specs[1].dtype)),)


def _infer_tensordot(specs: Specs, attributes: Any) -> Specs:
    a, b, first, second = specs[0].shape, specs[1].shape, attributes["a_axes"], attributes["b_axes"]
    check_count("b_axes", len(second), len(first))
    for left, right in zip(first, second, strict=True):
        if a[left] != b[right]:
            raise InputError(f"axis {left} of {a} and axis {right} of {b} differ in length")
    shape = tuple(n for i, n in enumerate(a) if i not in first) + tuple(n for i, n in enumerate(b) if i not in second)
    return (ArraySpec(shape, product_dtype(specs[0].dtype, specs[1].dtype)),)


def _flops_tensordot(specs: Specs, outputs: Specs, attributes: Any) -> float:
    inner: int = math.prod([specs[0].shape[axis] for axis in attributes["a_axes"]])
    return 2.0 * math.prod(outputs[0].shape) * inner


@dataclass(frozen=True)
class Subscripts(Text):
    """Subscripts of `einsum`, explicit; canonical: letters in the order of their first appearance."""

    def convert(self, value: Any, specs: Specs) -> Attribute:
        text = str(super().convert(value.replace(" ", "") if isinstance(value, str) else value, specs))
        letters: dict[str, str] = {}
        return "".join(c if c in ",->" else letters.setdefault(c, _LETTERS[len(letters)]) for c in text)


_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


def _sizes(specs: Specs, subscripts: str) -> tuple[dict[str, int], str]:
    """Length of each index, and the indices of the result."""
    left, _, result = subscripts.partition("->")
    terms = left.split(",")
    check_count("subscripts", len(terms), len(specs))
    sizes: dict[str, int] = {}
    for term, spec in zip(terms, specs, strict=True):
        if len(term) != len(spec.shape):
            raise InputError(f"{term!r} for an array with {len(spec.shape)} axes")
        for letter, size in zip(term, spec.shape, strict=True):
            known = sizes.setdefault(letter, size)
            if known == 1:
                sizes[letter] = size
            elif size not in (1, known):
                raise InputError(f"index {letter!r} has the lengths {known} and {size}")
    if len(set(result)) != len(result) or not set(result) <= set(sizes):
        raise InputError(f"{result!r} must name indices of the operands, each once")
    return sizes, result


def _infer_einsum(specs: Specs, attributes: Any) -> Specs:
    sizes, result = _sizes(specs, attributes["subscripts"])
    return (ArraySpec(tuple(sizes[letter] for letter in result), product_dtype(*(spec.dtype for spec in specs))),)


def _largest(shapes: Any) -> int:
    return max(1, *[int(math.prod(shape)) for shape in shapes])


def _einsum(xp: Any, operands: tuple[Array, ...], attributes: Any) -> Array:
    text = attributes["subscripts"]
    if len(operands) == 1:
        return xp.array(xp.einsum(text, operands[0]), order="C")  # einsum alone gives a view of a diagonal
    sizes, result = _sizes(tuple(ArraySpec(o.shape, o.dtype.name) for o in operands), text)
    limit = _largest([*(o.shape for o in operands), tuple(sizes[letter] for letter in result)])
    return xp.einsum(text, *operands, optimize=("greedy", limit))


def _workspace_einsum(specs: Specs, outputs: Specs, attributes: Any) -> int:
    wide = DTYPES["float32" if outputs[0].dtype in HALVES else outputs[0].dtype].itemsize
    limit = _largest([spec.shape for spec in (*specs, *outputs)]) * wide
    return _copies(specs, outputs, attributes) + (limit if len(specs) < 3 else 3 * limit)


def _flops_einsum(specs: Specs, outputs: Specs, attributes: Any) -> float:
    sizes, _ = _sizes(specs, attributes["subscripts"])
    return float(len(specs)) * math.prod(sizes.values())


def _infer_outer(specs: Specs, attributes: Any) -> Specs:
    for spec in specs:
        check_count("a shape", len(spec.shape), 1)
    shape = (*specs[0].shape, *specs[1].shape)
    return (ArraySpec(shape, probe(np.multiply, specs[0].dtype, specs[1].dtype)[0]),)


def _infer_accumulate(rank: int) -> Callable[[Specs, Any], Specs]:
    def infer(specs: Specs, attributes: Any) -> Specs:
        c, a, b = specs
        if not len(c.shape) == len(a.shape) == len(b.shape) == rank:
            raise InputError(f"expected three arrays with {rank} axes")
        if a.shape[-1] != b.shape[-2] or c.shape != (*a.shape[:-1], b.shape[-1]) or a.shape[:-2] != b.shape[:-2]:
            raise InputError(f"a product of {a.shape} and {b.shape} is not added to {c.shape}")
        if a.dtype != b.dtype or (c.dtype != a.dtype and not (c.dtype == "float32" and a.dtype in HALVES)):
            raise InputError("the dtypes differ; halves may be added to float32")
        return (c,)

    return infer


def _flops_accumulate(specs: Specs, outputs: Specs, attributes: Any) -> float:
    return 2.0 * math.prod(outputs[0].shape) * specs[1].shape[-1]


def _workspace_accumulate(specs: Specs, outputs: Specs, attributes: Any) -> int:
    """BLAS adds to the output itself; the rest makes the product first."""
    if specs[1].dtype in GEMM:
        return 0
    wide = 4 if specs[1].dtype in HALVES else DTYPES[outputs[0].dtype].itemsize
    casts = sum(math.prod(spec.shape) * wide for spec in specs) if specs[1].dtype in HALVES else 0
    return casts + 2 * math.prod(outputs[0].shape) * wide


def _gemm(c: Array, a: Array, b: Array) -> None:
    """``c += a @ b`` for matrices of NumPy; `c` in C order and not empty.

    BLAS counts columns first, so it is given the transposes: Cᵀ += Bᵀ Aᵀ. An operand in C order is, transposed, what it
    wants; one in Fortran order goes along as it is, marked as transposed; only others are copied.
    """
    gemm = getattr(scipy.linalg.blas, {"f4": "sgemm", "f8": "dgemm", "c8": "cgemm", "c16": "zgemm"}[c.dtype.str[1:]])
    right, right_transposed = _for_blas(b)
    left, left_transposed = _for_blas(a)
    gemm(1, right, left, 1, c.T, trans_a=right_transposed, trans_b=left_transposed, overwrite_c=1)


def _for_blas(array: Array) -> tuple[Array, int]:
    if array.flags.c_contiguous:
        return array.T, 0
    if array.flags.f_contiguous:
        return array, 1
    return np.ascontiguousarray(array).T, 0  # SciPy would copy it too


def _add_product(xp: Any, c: Array, a: Array, b: Array) -> None:
    """``c += a @ b`` in place, `c` in C order."""
    if xp is np and c.dtype == a.dtype and c.dtype.name in GEMM and c.size and a.size:
        for entry in np.ndindex(c.shape[:-2]):
            _gemm(c[entry], a[entry], b[entry])
        return
    if a.dtype.name in HALVES:
        wide = DTYPES["float32"]
        c[...] = xp.add(c, xp.matmul(a.astype(wide), b.astype(wide)))
    else:
        xp.add(c, xp.matmul(a, b), out=c)


def _accumulate(xp: Any, operands: tuple[Array, ...], attributes: Attributes) -> tuple[Array, ...]:
    c = operands[0].copy(order="C")
    _add_product(xp, c, *operands[1:])
    return (c,)


def _accumulate_into(xp: Any, operands: tuple[Array, ...], attributes: Attributes, out: Array) -> None:
    c, a, b = operands
    if out is not c:
        out[...] = c
    _add_product(xp, out, a, b)


def _pairs(*shapes: tuple[tuple[int, ...], ...], **attributes: Any) -> Callable[[], Iterator[Example]]:
    def examples() -> Iterator[Example]:
        for i, dtype in enumerate(samples.ALL):
            for j, group in enumerate(shapes):
                finite = [samples.sample(shape, dtype, 10 * j + n, special=n > 0) for n, shape in enumerate(group)]
                yield tuple(finite), attributes
                yield tuple(samples.strided(array) for array in finite), attributes
                other = samples.ALL[(i + 3) % len(samples.ALL)]
                mixed = samples.sample(group[-1], other, j, special=False)
                yield (*finite[:-1], mixed), attributes

    return examples


def _examples_accumulate(batch: tuple[int, ...]) -> Callable[[], Iterator[Example]]:
    def examples() -> Iterator[Example]:
        for dtype in samples.ALL:
            for m, k, n in ((3, 4, 5), (1, 1, 1), (0, 2, 3), (2, 0, 3), (2, 3, 1)):
                shapes = ((*batch, m, n), (*batch, m, k), (*batch, k, n))
                c, a, b = (samples.sample(shape, dtype, i, special=False) for i, shape in enumerate(shapes))
                yield (c, a, b), {}
                yield (samples.strided(c), samples.strided(a), np.swapaxes(np.swapaxes(b, -1, -2).copy(), -1, -2)), {}
                if dtype in HALVES:
                    yield (c.astype("float32"), a, b), {}

    return examples


def _examples_einsum() -> Iterator[Example]:
    a, b, c = (samples.sample((4, 4), "float64", i, special=False) for i in range(3))
    row, batch = a[0], a.reshape(1, 4, 4)
    for text, operands in (
        ("ij,jk->ik", (a, b)),
        ("ij->ji", (a,)),
        ("ii->i", (a,)),
        ("ii->", (a,)),
        ("ij,kj->", (a, b)),
        ("ij,ij->ij", (a, b)),
        ("ij,jk,kl->il", (a, b, c)),
        ("i,j->ij", (row, row)),
        ("zij,zjk->zik", (batch, batch)),
        ("ij,jk->ki", (a, b[:, :0])),
        ("ij,jk->ik", (a[:, :1], b)),
    ):
        yield operands, {"subscripts": text}
    for dtype in samples.ALL:
        x = samples.sample((3, 4), dtype, special=False)
        yield (x, x), {"subscripts": "ij,kj->ik"}
        yield (samples.strided(x),), {"subscripts": "ij->j"}


_PROJECTION = "projection"
"""Sums of products are verified by random projections (`goblin_dask.verify`)."""

OPERATORS: tuple[Operator, ...] = (
    Operator(
        "matmul",
        "Matrix product; vectors and batches as NumPy's.",
        CONTRACTION,
        _infer_matmul,
        _contracting(_matmul),
        _pairs(
            ((3, 4), (4, 5)),
            ((4,), (4,)),
            ((2, 3, 4), (4,)),
            ((2, 1, 3, 4), (5, 4, 2)),
            ((0, 4), (4, 2)),
            ((3, 0), (0, 2)),
        ),
        arity=2,
        flops=_flops_inner,
        workspace=_casts,
        contiguous=True,
        copies_strided=True,
        into=_matmul_into,
        check=_PROJECTION,
    ),
    Operator(
        "vecdot",
        "Sum over the last axis of products, the first operand conjugated.",
        CONTRACTION,
        _infer_vecdot,
        _contracting(lambda xp, operands, attributes: xp.vecdot(*operands)),
        _pairs(((3, 4), (3, 4)), ((4,), (2, 4)), ((2, 0), (2, 0))),
        arity=2,
        flops=_flops_inner,
        workspace=_casts,
        contiguous=True,
        check=_PROJECTION,
    ),
    Operator(
        "tensordot",
        "Sum of products over some axes of each operand.",
        CONTRACTION,
        _infer_tensordot,
        _contracting(lambda xp, operands, a: xp.tensordot(*operands, axes=(a["a_axes"], a["b_axes"]))),
        _pairs(((3, 4, 2), (4, 3, 5)), ((3, 4), (4, 3)), ((0, 1), (1, 0)), a_axes=(0, 1), b_axes=(1, 0)),
        arity=2,
        attributes={"a_axes": Axes(ordered=True), "b_axes": Axes(operand=1, ordered=True)},
        flops=_flops_tensordot,
        workspace=_copies_tensordot,
        copies_strided=True,
        contiguous=True,
        check=_PROJECTION,
    ),
    Operator(
        "einsum",
        "Einstein's sum of products, with explicit subscripts.",
        CONTRACTION,
        _infer_einsum,
        _contracting(_einsum),
        _examples_einsum,
        arity=None,
        least=1,
        attributes={"subscripts": Subscripts(pattern="[a-zA-Z]*(,[a-zA-Z]*)*->[a-zA-Z]*", limit=500)},
        flops=_flops_einsum,
        workspace=_workspace_einsum,
        contiguous=True,
        check=_PROJECTION,
    ),
    Operator(
        "outer",
        "Products of each element of a vector with each of another.",
        CONTRACTION,
        _infer_outer,
        lambda xp, operands, attributes: (xp.multiply(operands[0][:, None], operands[1][None, :]),),
        _pairs(((3,), (4,)), ((0,), (2,))),
        arity=2,
        contiguous=True,
    ),
    Operator(
        "addmm",
        "First operand plus the matrix product of the second and third.",
        CONTRACTION,
        _infer_accumulate(2),
        _accumulate,
        _examples_accumulate(()),
        arity=3,
        flops=_flops_accumulate,
        workspace=_workspace_accumulate,
        contiguous=True,
        into=_accumulate_into,
        reusable=(0,),
        copies_strided=True,
        check=_PROJECTION,
    ),
    Operator(
        "baddbmm",
        "First operand plus the matrix products of the second and third, entry by entry of a batch.",
        CONTRACTION,
        _infer_accumulate(3),
        _accumulate,
        _examples_accumulate((2,)),
        arity=3,
        flops=_flops_accumulate,
        workspace=_workspace_accumulate,
        contiguous=True,
        into=_accumulate_into,
        reusable=(0,),
        copies_strided=True,
        check=_PROJECTION,
    ),
)

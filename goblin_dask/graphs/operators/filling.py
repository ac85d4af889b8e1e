"""Operators that repeat elements, or put constants beside them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from goblin_dask.errors import InputError
from goblin_dask.graphs.operators import samples
from goblin_dask.graphs.operators.base import Example, Operator, Specs, check_count, like
from goblin_dask.graphs.operators.movement import examples_of, movement
from goblin_dask.graphs.operators.rules import Axis, Choice, Int, Ints

PAD_MODES = ("constant", "edge", "reflect", "symmetric", "wrap")


def _infer_pad(specs: Specs, attributes: Any) -> Specs:
    shape, width = specs[0].shape, attributes["width"]
    check_count("width", len(width), 2 * len(shape))
    if attributes["mode"] == "constant" and (len(specs) != 2 or specs[1].shape != ()):
        raise InputError("constant padding takes the array and one scalar")
    if attributes["mode"] != "constant":
        check_count("the operands", len(specs), 1)
        for axis, size in enumerate(shape):
            if size == 0 and width[2 * axis] + width[2 * axis + 1]:
                raise InputError(f"axis {axis} is empty: there is nothing to pad it with")
    padded = tuple(size + width[2 * axis] + width[2 * axis + 1] for axis, size in enumerate(shape))
    return like(specs[0], padded)


def _pad(xp: Any, operands: tuple[Any, ...], attributes: Any) -> Any:
    width, mode = attributes["width"], attributes["mode"]
    pairs = [(width[i], width[i + 1]) for i in range(0, len(width), 2)]
    if mode != "constant":
        return xp.pad(operands[0], pairs, mode=mode)
    array = operands[0]
    shape = tuple(size + before + after for size, (before, after) in zip(array.shape, pairs, strict=True))
    result = xp.empty(shape, array.dtype)
    result[...] = operands[1].astype(array.dtype)
    result[tuple(slice(before, before + size) for size, (before, _) in zip(array.shape, pairs, strict=True))] = array
    return result


def _infer_repeat(specs: Specs, attributes: Any) -> Specs:
    counts, axis, shape = attributes["counts"], attributes["axis"], specs[0].shape
    if len(counts) != 1:
        check_count("counts", len(counts), shape[axis])
    total = counts[0] * shape[axis] if len(counts) == 1 else sum(counts)
    return like(specs[0], (*shape[:axis], total, *shape[axis + 1 :]))


def _repeat(xp: Any, operands: tuple[Any, ...], attributes: Any) -> Any:
    counts = attributes["counts"]
    return xp.repeat(operands[0], counts[0] if len(counts) == 1 else xp.asarray(counts), axis=attributes["axis"])


def _infer_tile(specs: Specs, attributes: Any) -> Specs:
    counts, shape = attributes["counts"], specs[0].shape
    rank = max(len(counts), len(shape))
    counts = (1,) * (rank - len(counts)) + counts
    shape = (1,) * (rank - len(shape)) + shape
    return like(specs[0], tuple(a * b for a, b in zip(counts, shape, strict=True)))


def _tile(xp: Any, operands: tuple[Any, ...], attributes: Any) -> Any:
    """One copy of a broadcast view, where `numpy.tile` makes one for each axis."""
    counts, shape = attributes["counts"], operands[0].shape
    rank = max(len(counts), len(shape))
    counts = (1,) * (rank - len(counts)) + counts
    shape = (1,) * (rank - len(shape)) + shape
    spread = tuple(part for pair in zip(counts, shape, strict=True) for part in pair)
    single = operands[0].reshape(tuple(part for size in shape for part in (1, size)))
    result = xp.empty(tuple(a * b for a, b in zip(counts, shape, strict=True)), operands[0].dtype)
    result.reshape(spread)[...] = single
    return result


def _infer_triangle(specs: Specs, attributes: Any) -> Specs:
    if len(specs[0].shape) < 2:
        raise InputError("expected at least two axes")
    return (specs[0],)


def _infer_diag(specs: Specs, attributes: Any) -> Specs:
    check_count("the operand's shape", len(specs[0].shape), 1)
    size = specs[0].shape[0] + abs(attributes["offset"])
    return like(specs[0], (size, size))


def _examples_pad() -> Iterator[Example]:
    for mode in PAD_MODES:
        for width in ((1, 2, 0, 3), (0, 0, 0, 0), (5, 0, 9, 1)):
            array = samples.sample((3, 4), "float32")
            yield (
                (array, np.asarray(2.5))[: 2 if mode == "constant" else 1],
                {"width": width, "mode": mode},
            )
    for dtype in samples.ALL:
        yield (samples.sample((2, 0), dtype), samples.sample((), dtype)), {"width": (1, 1, 0, 2)}


OPERATORS: tuple[Operator, ...] = (
    movement(
        "pad",
        "Elements added before and after each axis; with ``constant`` they are the second operand.",
        _infer_pad,
        _pad,
        _examples_pad,
        arity=None,
        least=1,
        attributes={"width": Ints(low=0), "mode": Choice("constant", PAD_MODES)},
        contiguous=True,
    ),
    movement(
        "repeat",
        "Each element of an axis repeated.",
        _infer_repeat,
        _repeat,
        examples_of(
            ((3, 4), {"counts": 2, "axis": 0}),
            ((3, 2), {"counts": (0, 3, 1), "axis": 0}),
            ((2,), {"counts": 0, "axis": 0}),
        ),
        attributes={"counts": Ints(low=0), "axis": Axis()},
        contiguous=True,
    ),
    movement(
        "tile",
        "The whole array repeated along its axes.",
        _infer_tile,
        _tile,
        examples_of(
            ((3, 2), {"counts": (2, 2)}),
            ((2,), {"counts": (2, 1, 3)}),
            ((2, 2), {"counts": (0,)}),
            ((), {"counts": ()}),
        ),
        attributes={"counts": Ints(low=0)},
        contiguous=True,
    ),
    movement(
        "tril",
        "Lower triangles; zeros above the diagonal number ``k``.",
        _infer_triangle,
        lambda xp, operands, attributes: xp.tril(operands[0], attributes["k"]),
        examples_of(((3, 4), {}), ((4, 3), {"k": -1}), ((2, 3, 3), {"k": 9}), ((0, 2), {})),
        attributes={"k": Int(0)},
        workspace=lambda specs, outputs, attributes: math.prod(specs[0].shape[-2:]),
        contiguous=True,
    ),
    movement(
        "triu",
        "Upper triangles; zeros below the diagonal number ``k``.",
        _infer_triangle,
        lambda xp, operands, attributes: xp.triu(operands[0], attributes["k"]),
        examples_of(((3, 4), {}), ((4, 3), {"k": -1}), ((2, 3, 3), {"k": 9}), ((0, 2), {})),
        attributes={"k": Int(0)},
        workspace=lambda specs, outputs, attributes: math.prod(specs[0].shape[-2:]),
        contiguous=True,
    ),
    movement(
        "diag",
        "A matrix with the operand as a diagonal and zeros else.",
        _infer_diag,
        lambda xp, operands, attributes: xp.diag(operands[0], attributes["offset"]),
        examples_of(((3,), {}), ((0,), {"offset": 2}), ((4,), {"offset": -1})),
        attributes={"offset": Int(0)},
        contiguous=True,
    ),
)

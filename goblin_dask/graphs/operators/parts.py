"""Parts of arrays of random numbers: the elements that the whole array has there, without making the rest of it.

An array of weights larger than any machine is drawn block by block, each block in the task that uses it. The place is
an operand, so that all blocks of a shape are one program.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from goblin_dask.errors import InputError
from goblin_dask.graphs.operators.base import Array, Example, Kind, Operator, Specs, added_in
from goblin_dask.graphs.operators.creation import unit
from goblin_dask.graphs.operators.dtypes import DTYPES
from goblin_dask.graphs.operators.rules import DType, Shape
from goblin_dask.messages import ArraySpec

WORDS = 4
"""64-bit words that one count of Philox gives."""
COUNTERS = 2**256
"""Counts before it begins again."""


def _infer(fixed: str = "") -> Callable[[Specs, Any], Specs]:
    def infer(specs: Specs, attributes: Any) -> Specs:
        shape, whole, dtype = attributes["shape"], attributes["whole"], fixed or attributes["dtype"]
        if specs[0] != ArraySpec((2,), "uint64"):
            raise InputError("the key is an array of two uint64")
        if specs[1] != ArraySpec((len(shape),), "int64"):
            raise InputError(f"the start of a part with {len(shape)} axes is as many int64")
        if len(whole) != len(shape) or any(part > size for part, size in zip(shape, whole, strict=True)):
            raise InputError(f"an array of shape {shape} is no part of one of shape {whole}")
        if math.prod(whole) > 2**62:
            raise InputError(f"an array of shape {whole} has more elements than the generator has numbers")
        if dtype not in ("float32", "float64", "uint64"):
            raise InputError("random numbers are float32 or float64; cast them")
        return (ArraySpec(shape, dtype),)

    return infer


def _runs(start: Any, shape: tuple[int, ...], whole: tuple[int, ...]) -> tuple[Any, int]:
    """Where the runs of neighbouring elements of a part begin in the whole array, ascending, and their length."""
    # As XLA's dynamic_slice: a part that would reach over the edge is moved back.
    first = np.clip(np.asarray(start, np.int64), 0, np.subtract(whole, shape).astype(np.int64))
    axis, length = len(shape), 1
    while axis and (axis == len(shape) or shape[axis] == whole[axis]):
        axis -= 1
        length *= shape[axis]
    strides = np.asarray([math.prod(whole[i + 1 :]) for i in range(len(whole))], np.int64)
    begins = np.asarray([np.dot(first, strides)], np.int64)
    for size, stride in zip(shape[:axis], strides[:axis], strict=True):
        begins = (begins[:, None] + stride * np.arange(size)).reshape(-1)
    return begins, length


def _read(key: Any, begins: Any, length: int) -> Any:
    """The generator's words of some runs, one after the other."""
    words = np.empty((len(begins), length), np.uint64)
    generator, at = np.random.Philox(key=key), 0  # one that is moved on: another for each run takes ten times as long
    for row, begin in zip(words, begins.tolist(), strict=True):
        count, skipped = divmod(begin, WORDS)
        generator.advance((count - at) % COUNTERS)
        row[...] = generator.random_raw(skipped + length)[skipped:]
        at = count - (-(skipped + length) // WORDS)
    return words.reshape(-1)


def _place(operands: tuple[Array, ...]) -> tuple[Any, Any]:
    """Key and start, on the host."""
    key, start = (each.get() if hasattr(each, "get") else each for each in operands)
    return np.asarray(key), start


def _bits_part(xp: Any, operands: tuple[Array, ...], attributes: Any) -> tuple[Array, ...]:
    key, start = _place(operands)
    words = _read(key, *_runs(start, attributes["shape"], attributes["whole"]))
    return (xp.asarray(words.reshape(attributes["shape"])),)


def _uniform_part(xp: Any, operands: tuple[Array, ...], attributes: Any) -> tuple[Array, ...]:
    key, start = _place(operands)
    words = _read(key, *_runs(start, attributes["shape"], attributes["whole"]))
    return (xp.asarray(unit(words, DTYPES[attributes["dtype"]]).reshape(attributes["shape"])),)


def _normal_part(xp: Any, operands: tuple[Array, ...], attributes: Any) -> tuple[Array, ...]:
    """As `random_normal`: element p of the first half of the array shares its two words with element half + p."""
    key, start = _place(operands)
    shape, whole = attributes["shape"], attributes["whole"]
    half = (math.prod(whole) + 1) // 2
    begins, length = _runs(start, shape, whole)
    cosines = int(np.clip(half - begins, 0, length).sum())
    parts = [(begins, length)]
    across = np.flatnonzero((begins < half) & (begins + length > half))
    if len(across):  # one run lies across the middle
        at = int(across[0])
        left = half - int(begins[at])
        parts = [(begins[:at], length), (begins[at : at + 1], left)]
        parts += [(np.asarray([half]), length - left), (begins[at + 1 :], length)]
    firsts = [(np.where(each >= half, each - half, each), size) for each, size in parts]
    double = np.dtype("float64")
    radius = np.sqrt(-2.0 * np.log1p(-unit(np.concatenate([_read(key, *part) for part in firsts]), double)))
    angle = 2.0 * np.pi * unit(np.concatenate([_read(key, each + half, size) for each, size in firsts]), double)
    np.cos(angle[:cosines], out=angle[:cosines])
    np.sin(angle[cosines:], out=angle[cosines:])
    angle *= radius
    return (xp.asarray(angle.astype(DTYPES[attributes["dtype"]]).reshape(shape)),)


def _examples(*dtypes: str) -> Callable[[], Iterator[Example]]:
    def examples() -> Iterator[Example]:
        key = np.asarray([7, 2**64 - 1], "uint64")
        for whole, shape, start in (
            ((), (), ()),
            ((9,), (4,), (3,)),
            ((0,), (0,), (0,)),
            ((6, 7), (3, 2), (1, 4)),
            ((6, 7), (6, 7), (0, 0)),
            ((5, 7), (4, 3), (9, -9)),
            ((4, 3, 5), (2, 3, 5), (1, 0, 0)),
            ((4, 3, 5), (4, 1, 2), (0, 2, 3)),
        ):
            for dtype in dtypes or ("",):
                more = {"dtype": dtype} if dtype else {}
                yield (key, np.asarray(start, "int64")), {"shape": shape, "whole": whole, **more}

    return examples


def _part(name: str, infer: Any, kernel: Any, examples: Any, attributes: Any, words: int, work: float) -> Operator:
    return Operator(
        f"{name}_part",
        f"Part of an array of `{name}`; operands: the key, and where the part starts in the whole.",
        frozenset({Kind.RANDOM}),
        infer,
        kernel,
        examples,
        arity=2,
        attributes={"shape": Shape(), "whole": Shape(), **attributes},
        flops=lambda specs, outputs, a: work * math.prod(outputs[0].shape),
        workspace=lambda specs, outputs, a: words * 8 * (math.prod(outputs[0].shape) + WORDS),
    )


_FLOATS = ("float32", "float64")

OPERATORS: tuple[Operator, ...] = added_in(
    2,
    _part("random_bits", _infer("uint64"), _bits_part, _examples(), {}, 3, 10.0),
    _part("random_uniform", _infer(), _uniform_part, _examples(*_FLOATS), {"dtype": DType("float64")}, 4, 20.0),
    _part("random_normal", _infer(), _normal_part, _examples(*_FLOATS), {"dtype": DType("float64")}, 8, 60.0),
)

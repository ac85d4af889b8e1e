"""The Python array API standard 2024.12, function by function: how each is recorded.

Every function has one small call here. `support` records it, and so tells, without a list kept by hand, by which
operators of the catalogue it is computed, or why it is not; docs/array-api.md is generated from it.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import array_api_compat.numpy

from goblin_dask.errors import NotTraceable
from goblin_dask.graphs.trace import trace
from goblin_dask.graphs.tracer.recorder import current
from goblin_dask.messages import ArraySpec

NAMESPACE: Any = array_api_compat.numpy
"""The standard's functions as researchers call them with NumPy arrays."""

OPERANDS: Mapping[str, ArraySpec] = {
    "x": ArraySpec((3, 4), "float64"),
    "y": ArraySpec((3, 4), "float64"),
    "n": ArraySpec((3, 4), "int64"),
    "m": ArraySpec((3, 4), "int64"),
    "b": ArraySpec((3, 4), "bool"),
    "c": ArraySpec((3, 4), "bool"),
    "z": ArraySpec((3, 4), "complex128"),
    "v": ArraySpec((3,), "float64"),
    "w": ArraySpec((3,), "float64"),
    "s": ArraySpec((3, 3), "float64"),
    "u": ArraySpec((1, 4), "complex128"),
    "i": ArraySpec((2,), "int64"),
}
"""Of the calls, by their names in them."""

_ELEMENTWISE = """
abs x|acos x|acosh x|add x y|asin x|asinh x|atan x|atan2 x y|atanh x|bitwise_and n m|bitwise_left_shift n m
bitwise_invert n|bitwise_or n m|bitwise_right_shift n m|bitwise_xor n m|ceil x|conj z|copysign x y|cos x|cosh x
divide x y|equal x y|exp x|expm1 x|floor x|floor_divide x y|greater x y|greater_equal x y|hypot x y|imag z
isfinite x|isinf x|isnan x|less x y|less_equal x y|log x|log1p x|log2 x|log10 x|logaddexp x y|logical_and b c
logical_not b|logical_or b c|logical_xor b c|maximum x y|minimum x y|multiply x y|negative x|nextafter x y
not_equal x y|positive x|pow x y|real z|reciprocal x|remainder x y|round x|sign x|signbit x|sin x|sinh x|sqrt x
square x|subtract x y|tan x|tanh x|trunc x
"""
"""Functions of their operands alone."""

_ALONE = """
matmul s x|matrix_transpose x|nonzero x|unique_all x|unique_counts x|unique_inverse x|unique_values x|vecdot v w
meshgrid v w|argsort x|sort x|searchsorted v x
empty_like x|ones_like x|zeros_like x|tril x|triu x|sum x|prod x|mean x|std x|var x|max x|min x|all b|any b
count_nonzero x|argmax x|argmin x|diff x|unstack x
linalg.cholesky s|linalg.cross v w|linalg.det s|linalg.diagonal x|linalg.eigh s|linalg.eigvalsh s|linalg.inv s
linalg.matmul s s|linalg.matrix_norm x|linalg.matrix_rank x|linalg.matrix_transpose x|linalg.outer v w|linalg.pinv x
linalg.qr x|linalg.slogdet s|linalg.solve s s|linalg.svd x|linalg.svdvals x|linalg.tensordot x y|linalg.trace x
linalg.vecdot v w|linalg.vector_norm x|tensordot x y
fft.fft z|fft.ifft z|fft.fftn z|fft.ifftn z|fft.rfft x|fft.irfft z|fft.rfftn x|fft.irfftn z|fft.hfft z|fft.ihfft x
fft.fftshift x|fft.ifftshift x
"""

Call = Callable[[Any, Any], Any]
"""Of the namespace and the operands, as attributes."""

_CALLS: dict[str, Call] = {
    "arange": lambda xp, o: xp.arange(4),
    "asarray": lambda xp, o: xp.asarray(o.x),
    "empty": lambda xp, o: xp.empty((2, 3)),
    "eye": lambda xp, o: xp.eye(3),
    "from_dlpack": lambda xp, o: xp.from_dlpack(o.x),
    "full": lambda xp, o: xp.full((3, 4), 2.0),
    "full_like": lambda xp, o: xp.full_like(o.x, 2.0),
    "linspace": lambda xp, o: xp.linspace(0.0, 1.0, 4),
    "ones": lambda xp, o: xp.ones((3, 4)),
    "zeros": lambda xp, o: xp.zeros((3, 4)),
    "astype": lambda xp, o: xp.astype(o.x, xp.float32),
    "can_cast": lambda xp, o: o.x if xp.can_cast(o.n.dtype, o.x.dtype) else o.n,
    "finfo": lambda xp, o: o.x if xp.finfo(o.x.dtype).bits == 64 else o.y,
    "iinfo": lambda xp, o: o.n if xp.iinfo(o.n.dtype).bits == 64 else o.m,
    "isdtype": lambda xp, o: o.x if xp.isdtype(o.x.dtype, "real floating") else o.n,
    "result_type": lambda xp, o: o.x if xp.result_type(o.x, o.v) == xp.float64 else o.y,
    "clip": lambda xp, o: xp.clip(o.x, 0.0, 1.0),
    "where": lambda xp, o: xp.where(o.b, o.x, o.y),
    "broadcast_arrays": lambda xp, o: xp.broadcast_arrays(o.x, o.u),
    "broadcast_to": lambda xp, o: xp.broadcast_to(o.x, (2, 3, 4)),
    "concat": lambda xp, o: xp.concat([o.x, o.y]),
    "expand_dims": lambda xp, o: xp.expand_dims(o.x, axis=0),
    "flip": lambda xp, o: xp.flip(o.x, axis=0),
    "moveaxis": lambda xp, o: xp.moveaxis(o.x, 0, 1),
    "permute_dims": lambda xp, o: xp.permute_dims(o.x, (1, 0)),
    "repeat": lambda xp, o: xp.repeat(o.x, 2, axis=0),
    "reshape": lambda xp, o: xp.reshape(o.x, (2, 6)),
    "roll": lambda xp, o: xp.roll(o.x, 1, axis=0),
    "squeeze": lambda xp, o: xp.squeeze(o.u, axis=0),
    "stack": lambda xp, o: xp.stack([o.x, o.y]),
    "tile": lambda xp, o: xp.tile(o.x, (2, 1)),
    "take": lambda xp, o: xp.take(o.x, o.i, axis=0),
    "take_along_axis": lambda xp, o: xp.take_along_axis(o.x, o.n, axis=0),
    "cumulative_sum": lambda xp, o: xp.cumulative_sum(o.x, axis=0),
    "cumulative_prod": lambda xp, o: xp.cumulative_prod(o.x, axis=0),
    "linalg.matrix_power": lambda xp, o: xp.linalg.matrix_power(o.s, 3),
    "fft.fftfreq": lambda xp, o: xp.fft.fftfreq(4),
    "fft.rfftfreq": lambda xp, o: xp.fft.rfftfreq(6),
}
"""Functions that take more than their operands."""


def _apply(name: str, operands: list[str]) -> Call:
    def call(xp: Any, o: Any) -> Any:
        for part in name.split("."):
            xp = getattr(xp, part)
        return xp(*(getattr(o, each) for each in operands))

    return call


def _rows(text: str) -> dict[str, Call]:
    rows = [row.split() for line in text.strip().split("\n") for row in line.split("|")]
    return {name: _apply(name, operands) for name, *operands in rows}


STANDARD: Mapping[str, Call] = dict(sorted({**_rows(_ELEMENTWISE), **_rows(_ALONE), **_CALLS}.items()))
"""A call of each function; those of the extensions have their namespace before their name."""


@dataclass(frozen=True, slots=True)
class Support:
    """How a function is supported."""

    operators: tuple[str, ...] = ()
    """By which its call is computed; none where its result is known while it is recorded, or an operand as it is."""
    reason: str = ""
    """Why it runs in the laboratory; empty where it does not."""


def support(name: str) -> Support:
    """How a function of the standard is recorded."""
    call = STANDARD[name]

    def function(*arrays: Any) -> Any:
        operands = types.SimpleNamespace(**dict(zip(OPERANDS, arrays, strict=True)))
        return call(current().rebind(NAMESPACE), operands)

    try:
        traced = trace(function, tuple(OPERANDS.values()))
    except NotTraceable as error:
        return Support(reason=str(error))
    nodes = traced.program.nodes if traced.program is not None else ()
    return Support(tuple(dict.fromkeys(node.operator for node in nodes)))

"""Discrete Fourier transforms."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from goblin_dask.errors import InputError
from goblin_dask.graphs.operators import samples
from goblin_dask.graphs.operators.base import Array, Attributes, Example, Kind, Operator, Specs, check_count, nbytes
from goblin_dask.graphs.operators.contraction import c_order
from goblin_dask.graphs.operators.dtypes import probe
from goblin_dask.graphs.operators.reductions import axes_of
from goblin_dask.graphs.operators.rules import Axes, Axis, Choice, Int, Ints
from goblin_dask.messages import ArraySpec

FFT = frozenset({Kind.FFT})
NORMS = ("backward", "ortho", "forward")


def _halved(length: int) -> int:
    return length // 2 + 1


def _doubled(length: int) -> int:
    return 2 * (length - 1)


def _dtype(name: str, spec: ArraySpec) -> str:
    if name in ("rfft", "rfftn", "ihfft") and spec.dtype.startswith("complex"):
        raise InputError("the input of that transform is real")
    return probe(_TRANSFORMS[name], spec.dtype)[0]


_TRANSFORMS: dict[str, Callable[[Array], Array]] = {
    "fft": lambda a: np.fft.fft(a),
    "ifft": lambda a: np.fft.ifft(a),
    "rfft": lambda a: np.fft.rfft(a),
    "irfft": lambda a: np.fft.irfft(a, 2),
    "hfft": lambda a: np.fft.hfft(a, 2),
    "ihfft": lambda a: np.fft.ihfft(a),
    "fftn": lambda a: np.fft.fftn(a),
    "ifftn": lambda a: np.fft.ifftn(a),
    "rfftn": lambda a: np.fft.rfftn(a),
    "irfftn": lambda a: np.fft.irfftn(a.reshape(1, 1), (1, 2), (0, 1)),
}


def _one(name: str, summary: str) -> Operator:
    """A transform of one axis."""

    def infer(specs: Specs, attributes: Any) -> Specs:
        shape, axis, n = specs[0].shape, attributes["axis"], attributes["n"]
        if not shape:
            raise InputError("a scalar has no axis to transform")
        length = n
        if name in ("irfft", "hfft"):
            length = _doubled(shape[axis]) if n is None else n
            wanted = length
        else:
            length = shape[axis] if n is None else n
            wanted = _halved(length) if name in ("rfft", "ihfft") else length
        if length < 1:
            raise InputError(f"a transform of {length} points")
        return (ArraySpec((*shape[:axis], wanted, *shape[axis + 1 :]), _dtype(name, specs[0])),)

    def kernel(xp: Any, operands: tuple[Array, ...], a: Any) -> tuple[Array, ...]:
        return (c_order(xp, getattr(xp.fft, name)(operands[0], a["n"], a["axis"], a["norm"])),)

    def examples() -> Iterator[Example]:
        for dtype in samples.ALL:
            for shape, axis, n in (((6,), 0, None), ((3, 5), 1, 4), ((4, 3), 0, 7), ((1,), 0, 1), ((2, 0), 0, None)):
                array = samples.sample(shape, dtype, special=False)
                yield (array,), {"axis": axis, "n": n}
                yield (samples.strided(array),), {"axis": axis, "n": n, "norm": "ortho"}
        yield (samples.sample((0,), "float64"),), {"axis": 0}

    return Operator(
        name,
        summary,
        FFT,
        infer,
        kernel,
        examples,
        attributes={"axis": Axis(0), "n": Int(None, low=1, optional=True), "norm": Choice("backward", NORMS)},
        flops=_flops,
        workspace=_workspace,
        contiguous=True,
        check="combination",
    )


def _several(name: str, summary: str) -> Operator:
    """A transform of several axes, the last of which is the halved one."""

    def infer(specs: Specs, attributes: Any) -> Specs:
        shape, axes = list(specs[0].shape), axes_of(attributes, len(specs[0].shape))
        points = attributes["s"]
        if points == ():
            points = tuple(shape[axis] for axis in axes)
            if name == "irfftn" and axes:
                points = (*points[:-1], _doubled(points[-1]))
        check_count("s", len(points), len(axes))
        if not axes or min(points) < 1:
            raise InputError(f"a transform of {points} points")
        for axis, size in zip(axes, points, strict=True):
            shape[axis] = size
        if name == "rfftn":
            shape[axes[-1]] = _halved(points[-1])
        # Of one axis it is ``irfft``, of several it has a complex intermediate result, which float16 does not survive.
        rule = "irfft" if name == "irfftn" and len(axes) == 1 else name
        return (ArraySpec(tuple(shape), _dtype(rule, specs[0])),)

    def kernel(xp: Any, operands: tuple[Array, ...], a: Any) -> tuple[Array, ...]:
        axes = axes_of(a, operands[0].ndim)
        return (c_order(xp, getattr(xp.fft, name)(operands[0], a["s"] or None, axes, a["norm"])),)

    def examples() -> Iterator[Example]:
        for dtype in samples.ALL:
            array = samples.sample((3, 4, 5), dtype, special=False)
            yield (array,), {}
            yield (samples.strided(array),), {"axes": (2, 0)}
            yield (array,), {"axes": (0, 1), "s": (4, 6), "norm": "forward"}
        yield (samples.sample((2, 0), "float64"),), {}

    return Operator(
        name,
        summary,
        FFT,
        infer,
        kernel,
        examples,
        attributes={"axes": Axes(None, ordered=True), "s": Ints((), low=1), "norm": Choice("backward", NORMS)},
        flops=_flops,
        workspace=_workspace,
        contiguous=True,
        check="combination",
    )


def _flops(specs: Specs, outputs: Specs, attributes: Attributes) -> float:
    elements = max(math.prod(specs[0].shape), math.prod(outputs[0].shape))
    return 5.0 * elements * math.log2(elements + 2)


def _workspace(specs: Specs, outputs: Specs, attributes: Attributes) -> int:
    """A transform of several axes has one intermediate result and makes the next of it; integers are cast."""
    return 2 * max(nbytes(outputs[0]), 16 * math.prod(specs[0].shape)) + 2**17


def _shift(name: str, summary: str) -> Operator:
    def infer(specs: Specs, attributes: Any) -> Specs:
        if not axes_of(attributes, len(specs[0].shape)):
            raise InputError("there is no axis to shift")
        return (specs[0],)

    def kernel(xp: Any, operands: tuple[Array, ...], a: Any) -> tuple[Array, ...]:
        return (getattr(xp.fft, name)(operands[0], axes_of(a, operands[0].ndim)),)

    def examples() -> Iterator[Example]:
        for array in samples.arrays():
            yield (array,), {}
        yield (samples.sample((3, 4), "float32"),), {"axes": 1}

    return Operator(
        name,
        summary,
        frozenset({Kind.MOVEMENT}),
        infer,
        kernel,
        examples,
        attributes={"axes": Axes(None)},
    )


OPERATORS: tuple[Operator, ...] = (
    _one("fft", "Discrete Fourier transform of an axis."),
    _one("ifft", "Inverse transform of an axis."),
    _one("rfft", "Transform of an axis of real numbers: the half that determines the rest."),
    _one("irfft", "Inverse of ``rfft``."),
    _one("hfft", "Transform of an axis with Hermitian symmetry: real."),
    _one("ihfft", "Inverse of ``hfft``."),
    _several("fftn", "Discrete Fourier transform of several axes."),
    _several("ifftn", "Inverse transform of several axes."),
    _several("rfftn", "Transform of several axes of real numbers."),
    _several("irfftn", "Inverse of ``rfftn``."),
    _shift("fftshift", "Zero frequency moved to the middle of axes."),
    _shift("ifftshift", "Inverse of ``fftshift``."),
)

"""Arrays that are made of nothing, or of random numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from goblin_dask.errors import NotTraceable
from goblin_dask.graphs.capture.aten.base import LOWERINGS, Call, array, drawing, lowers
from goblin_dask.graphs.tracer.array import Tracer
from goblin_dask.graphs.tracer.casting import astype
from goblin_dask.graphs.tracer.recorder import op


def _filled(shape: Sequence[Any], value: Any, dtype: str) -> Tracer:
    return op("full", array(value, dtype), shape=tuple(int(each) for each in shape))


@lowers("aten.full.default")
def _full(call: Call, shape: Sequence[Any], value: Any, **kwargs: Any) -> Tracer:
    return _filled(shape, value, call.dtype)


@lowers("aten.full_like.default", "aten.fill.Scalar", "aten.fill.Tensor")
def _full_like(call: Call, x: Tracer, value: Any, **kwargs: Any) -> Tracer:
    return _filled(x.shape, value, call.dtype)


@lowers("aten.new_full.default")
def _new_full(call: Call, x: Tracer, shape: Sequence[Any], value: Any, **kwargs: Any) -> Tracer:
    return _filled(shape, value, call.dtype)


@lowers("aten.zeros.default", "aten.empty.memory_format", "aten.empty_permuted.default", "aten.empty_strided.default")
def _zeros(call: Call, shape: Sequence[Any], *args: Any, **kwargs: Any) -> Tracer:
    """What is called empty holds zeros: a program gives the same everywhere."""
    return _filled(shape, 0, call.dtype)


@lowers("aten.ones.default")
def _ones(call: Call, shape: Sequence[Any], **kwargs: Any) -> Tracer:
    return _filled(shape, 1, call.dtype)


@lowers("aten.zeros_like.default", "aten.empty_like.default", "aten.zero.default")
def _zeros_like(call: Call, x: Tracer, **kwargs: Any) -> Tracer:
    return _filled(x.shape, 0, call.dtype)


@lowers("aten.ones_like.default")
def _ones_like(call: Call, x: Tracer, **kwargs: Any) -> Tracer:
    return _filled(x.shape, 1, call.dtype)


@lowers("aten.new_zeros.default", "aten.new_empty.default", "aten.new_empty_strided.default")
def _new_zeros(call: Call, x: Tracer, shape: Sequence[Any], *args: Any, **kwargs: Any) -> Tracer:
    return _filled(shape, 0, call.dtype)


@lowers("aten.new_ones.default")
def _new_ones(call: Call, x: Tracer, shape: Sequence[Any], **kwargs: Any) -> Tracer:
    return _filled(shape, 1, call.dtype)


@lowers("aten.scalar_tensor.default")
def _scalar_tensor(call: Call, value: Any, **kwargs: Any) -> Tracer:
    return array(value, call.dtype)


def _range(start: Any, stop: Any, step: Any, dtype: str) -> Tracer:
    if np.dtype(dtype).kind in "iu":
        return op("arange", start=int(start), stop=int(stop), step=int(step), dtype=dtype)
    return astype(op("arange", start=start, stop=stop, step=step, dtype="float64"), dtype)


@lowers("aten.arange.default")
def _arange(call: Call, stop: Any, **kwargs: Any) -> Tracer:
    return _range(0, stop, 1, call.dtype)


@lowers("aten.arange.start")
def _arange_start(call: Call, start: Any, stop: Any, **kwargs: Any) -> Tracer:
    return _range(start, stop, 1, call.dtype)


@lowers("aten.arange.start_step", "prims.iota.arange")
def _arange_step(call: Call, start: Any, stop: Any, step: Any = 1, **kwargs: Any) -> Tracer:
    return _range(start, stop, step, call.dtype)


@lowers("prims.iota.default")
def _iota(call: Call, length: Any, *, start: Any, step: Any, **kwargs: Any) -> Tracer:
    return _range(start, start + step * length, step, call.dtype)


@lowers("aten.linspace.default")
def _linspace(call: Call, start: Any, stop: Any, steps: Any, **kwargs: Any) -> Tracer:
    return op("linspace", start=start, stop=stop, num=int(steps), endpoint=True, dtype=call.dtype)


@lowers("aten.eye.default", "aten.eye.m")
def _eye(call: Call, rows: Any, columns: Any = None, **kwargs: Any) -> Tracer:
    columns = rows if columns is None else columns
    return op("eye", rows=int(rows), columns=int(columns), k=0, dtype=call.dtype)


# --- random numbers -------------------------------------------------------------------------------------------------
@lowers("aten.native_dropout.default")
def _dropout(call: Call, x: Tracer, p: float, train: bool | None = None) -> tuple[Tracer, Tracer]:
    """Elements that are kept, scaled, and which they are: those whose uniform number is at least `p`."""
    if train is False or p == 0:
        return x, op("full", array(True, "bool"), shape=x.shape)
    kept = op("greater_equal", drawing.get().uniform(x.shape), array(p, "float32"))
    scale = 1.0 / (1.0 - p) if p < 1 else 0.0
    return op("multiply", op("multiply", x, astype(kept, x.dtype)), array(scale, x.dtype.name)), kept


@lowers("aten.bernoulli.p")
def _bernoulli_p(call: Call, x: Tracer, p: float, generator: Any = None) -> Tracer:
    return astype(op("less", drawing.get().uniform(x.shape), array(p, "float32")), call.dtype)


@lowers("aten.bernoulli.default")
def _bernoulli(call: Call, x: Tracer, generator: Any = None) -> Tracer:
    return astype(op("less", drawing.get().uniform(x.shape), array(x, "float32")), call.dtype)


@lowers("aten.rand.default")
def _rand(call: Call, shape: Sequence[Any], **kwargs: Any) -> Tracer:
    return astype(drawing.get().uniform(tuple(int(each) for each in shape)), call.dtype)


@lowers("aten.rand_like.default")
def _rand_like(call: Call, x: Tracer, **kwargs: Any) -> Tracer:
    return astype(drawing.get().uniform(x.shape), call.dtype)


@lowers("aten.randn.default")
def _randn(call: Call, shape: Sequence[Any], **kwargs: Any) -> Tracer:
    return astype(drawing.get().normal(tuple(int(each) for each in shape)), call.dtype)


@lowers("aten.randn_like.default")
def _randn_like(call: Call, x: Tracer, **kwargs: Any) -> Tracer:
    return astype(drawing.get().normal(x.shape), call.dtype)


DRAWING = frozenset(
    f"aten.{name}"
    for name in (
        "native_dropout.default", "bernoulli.p", "bernoulli.default", "rand.default", "rand_like.default",
        "randn.default", "randn_like.default",
    )
)  # fmt: skip
"""They need a key."""


def _unkeyed(name: str) -> Any:
    def lower(call: Call, *args: Any, **kwargs: Any) -> Any:
        raise NotTraceable(f"{name} draws random numbers in a way that no key decides on")

    return lower


UNKEYED = tuple(
    f"aten.{name}"
    for name in (
    "randint.default", "randint.low", "randint_like.default", "randint_like.low_dtype", "randperm.default",
    "normal.Tensor_float", "normal_functional.default", "uniform.default", "multinomial.default",
    "exponential.default", "geometric.default", "cauchy.default", "log_normal.default", "poisson.default",
    "binomial.default", "rrelu_with_noise_functional.default", "_fused_dropout.default",
)
)  # fmt: skip
"""They draw random numbers, and are refused."""
for _overload in UNKEYED:
    LOWERINGS[_overload] = _unkeyed(_overload)

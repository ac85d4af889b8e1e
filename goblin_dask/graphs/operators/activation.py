"""Activation functions of neural networks and their gradients, by ATen's names; halves are computed in float32."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from goblin_dask.graphs.operators import samples
from goblin_dask.graphs.operators.base import Array, Example, Operator, Specs, added_in, broadcast
from goblin_dask.graphs.operators.elementwise import special
from goblin_dask.graphs.operators.neural import NEURAL, narrowed, require_floating, wide_bytes, widened
from goblin_dask.graphs.operators.rules import Bool, Choice, Number
from goblin_dask.messages import ArraySpec

_SQRT2 = 2.0**0.5
_BETA = 2.0**0.5 * (2.0 / np.pi**0.5) * 0.5
"""Of GELU's approximation by tanh: the square root of 2 / pi."""
_KAPPA = 0.044715


def _infer(specs: Specs, attributes: Any) -> Specs:
    require_floating(*specs)
    return (ArraySpec(broadcast(*(spec.shape for spec in specs)), specs[0].dtype),)


def sigmoid(xp: Any, x: Array) -> Array:
    """The logistic function, which neither overflows nor loses digits."""
    return special(xp).expit(x)


def _relu(xp: Any, x: Array, a: Any) -> Array:
    return xp.maximum(x, xp.zeros((), x.dtype))


def _gelu(xp: Any, x: Array, a: Any) -> Array:
    if a["approximate"] == "none":
        return 0.5 * x * (1 + special(xp).erf(x / _SQRT2))
    return 0.5 * x * (1 + xp.tanh(_BETA * (x + _KAPPA * x * x * x)))


def _gelu_backward(xp: Any, grad: Array, x: Array, a: Any) -> Array:
    if a["approximate"] == "none":
        cdf = 0.5 * (1 + special(xp).erf(x / _SQRT2))
        return grad * (cdf + x * xp.exp(-0.5 * x * x) / (2 * np.pi) ** 0.5)
    square = x * x
    inner = xp.tanh(_BETA * (x + _KAPPA * square * x))
    slope = (1 - inner * inner) * (_BETA * (1 + 3 * _KAPPA * square))
    return grad * (0.5 * (1 + inner) + 0.5 * x * slope)


def _silu(xp: Any, x: Array, a: Any) -> Array:
    return x / (1 + xp.exp(-x))


def _silu_backward(xp: Any, grad: Array, x: Array, a: Any) -> Array:
    s = sigmoid(xp, x)
    return grad * (s * (1 + x * (1 - s)))


def _leaky_relu(xp: Any, x: Array, a: Any) -> Array:
    return xp.where(x > 0, x, x * a["negative_slope"])


def _leaky_relu_backward(xp: Any, grad: Array, x: Array, a: Any) -> Array:
    return xp.where(x > 0, grad, grad * a["negative_slope"])


def _elu(xp: Any, x: Array, a: Any) -> Array:
    scale = a["scale"]
    # NaN is not below zero: it takes the first branch.
    return xp.where(x < 0, xp.expm1(x * a["input_scale"]) * (a["alpha"] * scale), x * scale)


def _elu_backward(xp: Any, grad: Array, x: Array, a: Any) -> Array:
    alpha, scale, inner = a["alpha"], a["scale"], a["input_scale"]
    if a["is_result"]:
        return xp.where(x <= 0, grad * inner * (x + alpha * scale), grad * scale)
    return xp.where(x <= 0, grad * inner * (alpha * scale) * xp.exp(x * inner), grad * scale)


def _hardtanh(xp: Any, x: Array, a: Any) -> Array:
    return xp.clip(x, x.dtype.type(a["min_val"]), x.dtype.type(a["max_val"]))


def _hardtanh_backward(xp: Any, grad: Array, x: Array, a: Any) -> Array:
    return xp.where((x <= a["min_val"]) | (x >= a["max_val"]), grad.dtype.type(0), grad)


def _softplus(xp: Any, x: Array, a: Any) -> Array:
    scaled = x * a["beta"]
    return xp.where(scaled > a["threshold"], x, xp.log1p(xp.exp(scaled)) / a["beta"])


def _softplus_backward(xp: Any, grad: Array, x: Array, a: Any) -> Array:
    scaled = x * a["beta"]
    return xp.where(scaled > a["threshold"], grad, grad * sigmoid(xp, scaled))


def _clipped(xp: Any, x: Array, low: float, high: float) -> Array:
    return xp.clip(x, x.dtype.type(low), x.dtype.type(high))


def _hardsigmoid(xp: Any, x: Array, a: Any) -> Array:
    return _clipped(xp, x + 3, 0, 6) / 6


def _hardsigmoid_backward(xp: Any, grad: Array, x: Array, a: Any) -> Array:
    return xp.where((x > -3) & (x < 3), grad / 6, grad.dtype.type(0))


def _hardswish(xp: Any, x: Array, a: Any) -> Array:
    return x * _clipped(xp, x + 3, 0, 6) / 6


def _hardswish_backward(xp: Any, grad: Array, x: Array, a: Any) -> Array:
    inner = xp.where(x < 3, grad * (x / 3 + 0.5), grad)
    return xp.where(x <= -3, grad.dtype.type(0), inner)


def _mish(xp: Any, x: Array, a: Any) -> Array:
    return x * xp.tanh(xp.logaddexp(x, x.dtype.type(0)))


def _mish_backward(xp: Any, grad: Array, x: Array, a: Any) -> Array:
    inner = xp.tanh(xp.logaddexp(x, x.dtype.type(0)))
    return grad * (inner + x * sigmoid(xp, x) * (1 - inner * inner))


def _sigmoid(xp: Any, x: Array, a: Any) -> Array:
    return sigmoid(xp, x)


def _sigmoid_backward(xp: Any, grad: Array, y: Array, a: Any) -> Array:
    return grad * (1 - y) * y


def _tanh_backward(xp: Any, grad: Array, y: Array, a: Any) -> Array:
    return grad * (1 - y * y)


def _threshold(xp: Any, x: Array, a: Any) -> Array:
    return xp.where(x <= a["threshold"], x.dtype.type(a["value"]), x)


def _threshold_backward(xp: Any, grad: Array, x: Array, a: Any) -> Array:
    return xp.where(x <= a["threshold"], grad.dtype.type(0), grad)


def _log_sigmoid(xp: Any, x: Array, a: Any) -> Array:
    zero = x.dtype.type(0)
    return xp.minimum(x, zero) - xp.log1p(xp.exp(-xp.abs(x)))


def _log_sigmoid_backward(xp: Any, grad: Array, x: Array, a: Any) -> Array:
    return grad * sigmoid(xp, -x)


_SLOPE = {"negative_slope": Number(0.01)}
_ELU = {"alpha": Number(1), "scale": Number(1), "input_scale": Number(1)}
_RANGE = {"min_val": Number(-1), "max_val": Number(1)}
_SOFT = {"beta": Number(1), "threshold": Number(20)}
_GELU = {"approximate": Choice("none", ("none", "tanh"))}

_TABLE: tuple[tuple[str, str, Callable[..., Array], dict[str, Any], tuple[dict[str, Any], ...]], ...] = (
    ("relu", "The operand where it is positive, zero else.", _relu, {}, ({},)),
    ("gelu", "Gaussian error linear unit.", _gelu, _GELU, ({}, {"approximate": "tanh"})),
    ("silu", "The operand times its logistic function.", _silu, {}, ({},)),
    ("leaky_relu", "The operand, scaled where it is negative.", _leaky_relu, _SLOPE, ({}, {"negative_slope": 0.5})),
    ("elu", "Exponential linear unit.", _elu, _ELU, ({}, {"alpha": 1.5, "scale": 0.5, "input_scale": 2.0})),
    ("hardtanh", "The operand, limited.", _hardtanh, _RANGE, ({}, {"min_val": 0.0, "max_val": 6.0})),
    ("softplus", "Logarithm of one plus the exponential.", _softplus, _SOFT, ({}, {"beta": 0.5, "threshold": 1.0})),
    ("hardswish", "The operand times its hardsigmoid.", _hardswish, {}, ({},)),
    ("hardsigmoid", "Logistic function, piecewise linear.", _hardsigmoid, {}, ({},)),
    ("mish", "The operand times tanh of its softplus.", _mish, {}, ({},)),
    ("sigmoid", "Logistic function.", _sigmoid, {}, ({},)),
    ("log_sigmoid_forward", "Logarithm of the logistic function.", _log_sigmoid, {}, ({},)),
    (
        "threshold",
        "The operand above a threshold, a value elsewhere.",
        _threshold,
        {"threshold": Number(), "value": Number()},
        ({"threshold": 0.5, "value": -1.0},),
    ),
)
_BACKWARD: tuple[tuple[str, Callable[..., Array], dict[str, Any], tuple[dict[str, Any], ...]], ...] = (
    ("gelu", _gelu_backward, _GELU, ({}, {"approximate": "tanh"})),
    ("silu", _silu_backward, {}, ({},)),
    (
        "leaky_relu",
        _leaky_relu_backward,
        {"negative_slope": Number(), "self_is_result": Bool(False)},
        ({"negative_slope": 0.1},),
    ),
    (
        "elu",
        _elu_backward,
        {**_ELU, "is_result": Bool()},
        ({"is_result": False, "alpha": 1.5}, {"is_result": True, "scale": 2.0, "input_scale": 0.5}),
    ),
    ("hardtanh", _hardtanh_backward, _RANGE, ({}, {"min_val": 0.0})),
    ("softplus", _softplus_backward, _SOFT, ({}, {"beta": 0.5, "threshold": 1.0})),
    ("hardswish", _hardswish_backward, {}, ({},)),
    ("hardsigmoid", _hardsigmoid_backward, {}, ({},)),
    ("mish", _mish_backward, {}, ({},)),
    ("sigmoid", _sigmoid_backward, {}, ({},)),
    ("tanh", _tanh_backward, {}, ({},)),
    ("threshold", _threshold_backward, {"threshold": Number()}, ({"threshold": 0.0},)),
    ("log_sigmoid", _log_sigmoid_backward, {}, ({},)),
)


def _operator(
    name: str,
    summary: str,
    function: Callable[..., Array],
    arity: int,
    attributes: dict[str, Any],
    cases: tuple[dict[str, Any], ...],
) -> Operator:
    def kernel(xp: Any, operands: tuple[Array, ...], a: Any) -> tuple[Array, ...]:
        return (narrowed(xp.asarray(function(xp, *widened(*operands), a)), operands[0].dtype),)

    def examples() -> Iterator[Example]:
        source = samples.unary(samples.FLOATS) if arity == 1 else samples.binary(samples.FLOATS)
        for operands, _ in source():
            if all(operand.dtype == operands[0].dtype for operand in operands):
                for case in cases:
                    yield operands, case

    def workspace(specs: Specs, outputs: Specs, a: Any) -> int:
        # float32 copies of halves, and at most five intermediate results at a time.
        return sum(map(wide_bytes, specs)) + 5 * wide_bytes(outputs[0])

    return Operator(
        name, summary, NEURAL, _infer, kernel, examples, arity=arity, attributes=attributes, workspace=workspace
    )


OPERATORS: tuple[Operator, ...] = added_in(
    2,
    *(_operator(name, summary, function, 1, given, cases) for name, summary, function, given, cases in _TABLE),
    *(
        _operator(f"{name}_backward", f"Gradient of ``{name}``: of gradient and operand.", function, 2, given, cases)
        for name, function, given, cases in _BACKWARD
    ),
)

"""Elementwise operators, and what replaces elements by a condition."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from goblin_dask.graphs.capture.aten.base import LOWERINGS, Call, array, arrays, lowers, shaped
from goblin_dask.graphs.tracer.array import Tracer
from goblin_dask.graphs.tracer.casting import astype, broadcast_to
from goblin_dask.graphs.tracer.recorder import op, ops

UNARY = {
    "abs": "abs", "acos": "acos", "acosh": "acosh", "asin": "asin", "asinh": "asinh", "atan": "atan",
    "atanh": "atanh", "ceil": "ceil", "cos": "cos", "cosh": "cosh", "digamma": "digamma", "erf": "erf",
    "erfc": "erfc", "erfinv": "erfinv", "exp": "exp", "exp2": "exp2", "expm1": "expm1", "floor": "floor",
    "lgamma": "lgamma", "log": "log", "log10": "log10", "log1p": "log1p", "log2": "log2", "neg": "negative",
    "positive": "positive", "reciprocal": "reciprocal", "sigmoid": "sigmoid", "sin": "sin",
    "sinh": "sinh", "sqrt": "sqrt", "square": "square", "tan": "tan", "tanh": "tanh", "trunc": "trunc",
    "bitwise_not": "bitwise_invert", "i0": "i0", "special_ndtri": "ndtri", "special_log_ndtr": "log_ndtr",
    "sinc": "sinc", "rad2deg": "rad2deg", "deg2rad": "deg2rad", "angle": "angle", "conj_physical": "conj",
    "mish": "mish", "silu": "silu", "hardswish": "hardswish", "hardsigmoid": "hardsigmoid",
}  # fmt: skip
"""Computed in the result's dtype."""

INTEGERS_STAY = ("ceil", "floor", "trunc")

BINARY = {
    "atan2": "atan2", "maximum": "maximum", "minimum": "minimum", "fmax": "fmax", "fmin": "fmin", "fmod": "fmod",
    "remainder": "remainder", "bitwise_and": "bitwise_and", "bitwise_or": "bitwise_or",
    "bitwise_xor": "bitwise_xor", "bitwise_left_shift": "bitwise_left_shift",
    "bitwise_right_shift": "bitwise_right_shift", "copysign": "copysign", "hypot": "hypot", "nextafter": "nextafter",
    "gcd": "gcd", "lcm": "lcm", "logaddexp": "logaddexp", "logaddexp2": "logaddexp2", "heaviside": "heaviside",
    "xlogy": "xlogy", "special_xlog1py": "xlog1py", "mul": "multiply", "true_divide": "divide",
    "floor_divide": "floor_divide", "multiply": "multiply",
}  # fmt: skip

COMPARISONS = {
    "eq": "equal", "ne": "not_equal", "lt": "less", "le": "less_equal", "gt": "greater", "ge": "greater_equal",
}  # fmt: skip

LOGICAL = {"logical_and": "logical_and", "logical_or": "logical_or", "logical_xor": "logical_xor"}


def _unary(name: str, integers_stay: bool) -> Any:
    def lower(call: Call, x: Tracer) -> Tracer:
        if integers_stay and x.dtype.kind in "iub":
            return x
        return op(name, array(x, call.dtype if name not in ("abs", "angle") else None)).astype(call.dtype)

    return lower


def _binary(name: str) -> Any:
    def lower(call: Call, a: Any, b: Any) -> Tracer:
        return astype(op(name, *arrays(call, a, b)), call.dtype)

    return lower


def _comparison(name: str) -> Any:
    def lower(call: Call, a: Any, b: Any) -> Tracer:
        return op(name, *arrays(call, a, b))

    return lower


def _logical(name: str) -> Any:
    def lower(call: Call, a: Any, b: Any) -> Tracer:
        return op(name, array(a), array(b))

    return lower


for _aten, _name in UNARY.items():
    LOWERINGS[f"aten.{_aten}.default"] = _unary(_name, _aten in INTEGERS_STAY)
for _aten, _name in BINARY.items():
    for _overload in ("Tensor", "default", "Scalar", "Scalar_Tensor", "Tensor_Scalar", "Scalar_Self", "Scalar_Other"):
        LOWERINGS[f"aten.{_aten}.{_overload}"] = _binary(_name)
for _aten, _name in COMPARISONS.items():
    for _overload in ("Tensor", "Scalar"):
        LOWERINGS[f"aten.{_aten}.{_overload}"] = _comparison(_name)
for _aten, _name in LOGICAL.items():
    LOWERINGS[f"aten.{_aten}.default"] = _logical(_name)


def _scaled(call: Call, a: Any, b: Any, alpha: Any) -> tuple[Tracer, Tracer]:
    a, b = arrays(call, a, b)
    return a, op("multiply", b, array(alpha, b.dtype.name)) if alpha != 1 else b


@lowers("aten.add.Tensor", "aten.add.Scalar")
def _add(call: Call, a: Any, b: Any, *, alpha: Any = 1) -> Tracer:
    return op("add", *_scaled(call, a, b, alpha))


@lowers("aten.sub.Tensor", "aten.sub.Scalar")
def _sub(call: Call, a: Any, b: Any, *, alpha: Any = 1) -> Tracer:
    return op("subtract", *_scaled(call, a, b, alpha))


@lowers("aten.rsub.Tensor", "aten.rsub.Scalar")
def _rsub(call: Call, a: Any, b: Any, alpha: Any = 1) -> Tracer:
    a, b = arrays(call, a, b)
    return op("subtract", b, op("multiply", a, array(alpha, a.dtype.name)) if alpha != 1 else a)


@lowers("aten.div.Tensor", "aten.div.Scalar")
def _div(call: Call, a: Any, b: Any) -> Tracer:
    return op("divide", array(a, call.dtype), array(b, call.dtype))


@lowers("aten.div.Tensor_mode", "aten.div.Scalar_mode")
def _div_mode(call: Call, a: Any, b: Any, *, rounding_mode: str | None = None) -> Tracer:
    a, b = array(a, call.dtype), array(b, call.dtype)
    if rounding_mode == "floor":
        return op("floor_divide", a, b)
    if rounding_mode == "trunc" and a.dtype.kind in "iub":
        quotient, rest = op("floor_divide", a, b), op("remainder", a, b)
        # rounded down, and so one too small where there is a rest and the signs differ
        inexact = op("not_equal", rest, array(0, rest.dtype.name))
        apart = op("less", op("bitwise_xor", a, b), array(0, a.dtype.name))
        return op("add", quotient, astype(op("logical_and", inexact, apart), quotient.dtype))
    quotient = op("divide", a, b)
    return op("trunc", quotient) if rounding_mode == "trunc" else quotient


@lowers("aten.pow.Tensor_Tensor", "aten.pow.Tensor_Scalar", "aten.pow.Scalar")
def _pow(call: Call, a: Any, b: Any) -> Tracer:
    if isinstance(b, (int, float)) and isinstance(a, Tracer):
        x = array(a, call.dtype)
        if b == 2:
            return op("multiply", x, x)
        if b == 0.5 and x.dtype.kind in "fc":
            return op("sqrt", x)
    return op("pow", array(a, call.dtype), array(b, call.dtype))


@lowers("aten.float_power.Tensor_Tensor", "aten.float_power.Tensor_Scalar", "aten.float_power.Scalar")
def _float_power(call: Call, a: Any, b: Any) -> Tracer:
    return op("pow", array(a, call.dtype), array(b, call.dtype))


@lowers("aten.rsqrt.default")
def _rsqrt(call: Call, x: Tracer) -> Tracer:
    return op("reciprocal", op("sqrt", array(x, call.dtype)))


@lowers("aten.sign.default", "aten.sgn.default")
def _sign(call: Call, x: Tracer) -> Tracer:
    if x.dtype.kind == "b":
        return x
    if x.dtype.kind in "fV":  # of NaN it is 0 in ATen, NaN in NumPy
        return op("where", op("isnan", x), array(0, x.dtype.name), op("sign", x))
    return op("sign", x)


@lowers("aten.round.default")
def _round(call: Call, x: Tracer) -> Tracer:
    return op("rint", x) if x.dtype.kind not in "iub" else x


@lowers("aten.round.decimals")
def _round_decimals(call: Call, x: Tracer, *, decimals: int = 0) -> Tracer:
    return op("round", x, decimals=decimals)


@lowers("aten.frac.default")
def _frac(call: Call, x: Tracer) -> Tracer:
    return op("subtract", x, op("trunc", x))


@lowers("aten.logit.default")
def _logit(call: Call, x: Tracer, eps: float | None = None) -> Tracer:
    x = array(x, call.dtype)
    if eps is not None:
        x = _clamp(call, x, eps, 1.0 - eps)
    return op("logit", x)


@lowers("aten.logical_not.default")
def _not(call: Call, x: Tracer) -> Tracer:
    return op("logical_not", x)


@lowers("aten.isnan.default")
def _isnan(call: Call, x: Tracer) -> Tracer:
    return op("isnan", x)


@lowers("aten.isinf.default")
def _isinf(call: Call, x: Tracer) -> Tracer:
    return op("isinf", x)


@lowers("aten.isfinite.default")
def _isfinite(call: Call, x: Tracer) -> Tracer:
    return op("isfinite", x)


@lowers("aten.signbit.default")
def _signbit(call: Call, x: Tracer) -> Tracer:
    return op("signbit", x) if x.dtype.kind in "fV" else op("less", x, array(0, x.dtype.name))


@lowers("aten.clamp.default", "aten.clamp.Tensor", "aten.clip.default")
def _clamp(call: Call, x: Tracer, min: Any = None, max: Any = None) -> Tracer:
    x = array(x, call.dtype)
    if min is not None:
        x = op("maximum", x, array(min, call.dtype))
    return x if max is None else op("minimum", x, array(max, call.dtype))


@lowers("aten.clamp_min.default", "aten.clamp_min.Tensor")
def _clamp_min(call: Call, x: Tracer, min: Any) -> Tracer:
    return _clamp(call, x, min)


@lowers("aten.clamp_max.default", "aten.clamp_max.Tensor")
def _clamp_max(call: Call, x: Tracer, max: Any) -> Tracer:
    return _clamp(call, x, None, max)


@lowers("aten.where.self", "aten.where.ScalarOther", "aten.where.ScalarSelf", "aten.where.Scalar")
def _where(call: Call, condition: Tracer, a: Any, b: Any) -> Tracer:
    return op("where", array(condition, "bool"), array(a, call.dtype), array(b, call.dtype))


@lowers("aten.masked_fill.Scalar", "aten.masked_fill.Tensor")
def _masked_fill(call: Call, x: Tracer, mask: Tracer, value: Any) -> Tracer:
    return op("where", mask, array(value, call.dtype), x)


@lowers("aten.lerp.Scalar", "aten.lerp.Tensor")
def _lerp(call: Call, a: Tracer, b: Tracer, weight: Any) -> Tracer:
    a, b, weight = array(a, call.dtype), array(b, call.dtype), array(weight, call.dtype)
    return op("add", a, op("multiply", weight, op("subtract", b, a)))


@lowers("aten.addcmul.default")
def _addcmul(call: Call, x: Any, a: Any, b: Any, *, value: Any = 1) -> Tracer:
    x, a, b = (array(each, call.dtype) for each in (x, a, b))
    return op("add", x, op("multiply", op("multiply", array(value, call.dtype), a), b))


@lowers("aten.addcdiv.default")
def _addcdiv(call: Call, x: Any, a: Any, b: Any, *, value: Any = 1) -> Tracer:
    x, a, b = (array(each, call.dtype) for each in (x, a, b))
    return op("add", x, op("multiply", array(value, call.dtype), op("divide", a, b)))


# --- dtypes and complex numbers -------------------------------------------------------------------------------------
@lowers(
    "aten._to_copy.default",
    "aten.clone.default",
    "aten.alias.default",
    "aten.detach.default",
    "aten.lift_fresh_copy.default",
    "aten.contiguous.default",
    "prims.convert_element_type.default",
    "aten.to.dtype",
    "aten.resolve_conj.default",
    "aten.resolve_neg.default",
)
def _copy(call: Call, x: Tracer, *args: Any, **kwargs: Any) -> Tracer:
    """Dtype alone counts: here there are no devices, layouts or memory formats."""
    if x.dtype.kind == "c" and np.dtype(call.dtype).kind != "c":
        x = op("real", x)
    return astype(x, call.dtype)


@lowers("aten.copy.default")
def _copy_into(call: Call, into: Tracer, x: Tracer, non_blocking: bool = False) -> Tracer:
    return broadcast_to(astype(x, call.dtype), into.shape)


@lowers("aten._conj.default", "aten._conj_physical.default", "aten.conj.default")
def _conj(call: Call, x: Tracer) -> Tracer:
    return op("conj", x) if x.dtype.kind == "c" else x


@lowers("aten._neg_view.default")
def _neg_view(call: Call, x: Tracer) -> Tracer:
    return op("negative", x)


@lowers("aten.real.default")
def _real(call: Call, x: Tracer) -> Tracer:
    return op("real", x) if x.dtype.kind == "c" else x


@lowers("aten.imag.default")
def _imag(call: Call, x: Tracer) -> Tracer:
    return op("imag", x)


@lowers("aten.view_as_real.default")
def _view_as_real(call: Call, x: Tracer) -> Tracer:
    return op("stack", op("real", x), op("imag", x), axis=x.ndim)


@lowers("aten.view_as_complex.default")
def _view_as_complex(call: Call, x: Tracer) -> Tracer:
    return _complex(call, x[..., 0], x[..., 1])


@lowers("aten.complex.default")
def _complex(call: Call, real: Tracer, imag: Tracer) -> Tracer:
    """By the bits: i times infinity has a real part that is none."""
    parts = [broadcast_to(each, np.broadcast_shapes(real.shape, imag.shape)) for each in (real, imag)]
    return shaped(op("bitcast", op("stack", *parts, axis=parts[0].ndim), dtype=call.dtype), parts[0].shape)


@lowers("aten.polar.default")
def _polar(call: Call, size: Tracer, angle: Tracer) -> Tracer:
    return _complex(call, op("multiply", size, op("cos", angle)), op("multiply", size, op("sin", angle)))


# --- activation functions -------------------------------------------------------------------------------------------
@lowers("aten.relu.default")
def _relu(call: Call, x: Tracer) -> Tracer:
    return op("relu", x) if x.dtype.kind in "fV" else op("maximum", x, array(0, x.dtype.name))


@lowers("aten.gelu.default")
def _gelu(call: Call, x: Tracer, *, approximate: str = "none") -> Tracer:
    return op("gelu", x, approximate=approximate)


@lowers("aten.gelu_backward.default")
def _gelu_backward(call: Call, grad: Tracer, x: Tracer, *, approximate: str = "none") -> Tracer:
    return op("gelu_backward", grad, x, approximate=approximate)


@lowers("aten.elu.default")
def _elu(call: Call, x: Tracer, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> Tracer:
    return op("elu", x, alpha=float(alpha), scale=float(scale), input_scale=float(input_scale))


@lowers("aten.elu_backward.default")
def _elu_backward(
    call: Call, grad: Tracer, alpha: float, scale: float, input_scale: float, is_result: bool, x: Tracer
) -> Tracer:
    given = {"alpha": float(alpha), "scale": float(scale), "input_scale": float(input_scale)}
    return op("elu_backward", grad, x, is_result=is_result, **given)


@lowers("aten.leaky_relu.default")
def _leaky_relu(call: Call, x: Tracer, negative_slope: float = 0.01) -> Tracer:
    return op("leaky_relu", x, negative_slope=float(negative_slope))


@lowers("aten.leaky_relu_backward.default")
def _leaky_relu_backward(call: Call, grad: Tracer, x: Tracer, negative_slope: float, is_result: bool) -> Tracer:
    return op("leaky_relu_backward", grad, x, negative_slope=float(negative_slope), self_is_result=is_result)


@lowers("aten.hardtanh.default")
def _hardtanh(call: Call, x: Tracer, min_val: float = -1, max_val: float = 1) -> Tracer:
    if x.dtype.kind in "iu":
        return _clamp(call, x, int(min_val), int(max_val))
    return op("hardtanh", x, min_val=float(min_val), max_val=float(max_val))


@lowers("aten.hardtanh_backward.default")
def _hardtanh_backward(call: Call, grad: Tracer, x: Tracer, min_val: float, max_val: float) -> Tracer:
    return op("hardtanh_backward", grad, x, min_val=float(min_val), max_val=float(max_val))


@lowers("aten.relu6.default")
def _relu6(call: Call, x: Tracer) -> Tracer:
    return _clamp(call, x, 0, 6)


@lowers("aten.softplus.default")
def _softplus(call: Call, x: Tracer, beta: float = 1, threshold: float = 20) -> Tracer:
    return op("softplus", x, beta=float(beta), threshold=float(threshold))


@lowers("aten.softplus_backward.default")
def _softplus_backward(call: Call, grad: Tracer, x: Tracer, beta: float, threshold: float) -> Tracer:
    return op("softplus_backward", grad, x, beta=float(beta), threshold=float(threshold))


@lowers("aten.threshold_backward.default")
def _threshold_backward(call: Call, grad: Tracer, x: Tracer, threshold: float) -> Tracer:
    return op("threshold_backward", grad, x, threshold=float(threshold))


@lowers("aten.log_sigmoid_forward.default")
def _log_sigmoid_forward(call: Call, x: Tracer) -> Any:
    return ops("log_sigmoid_forward", x)


@lowers("aten.log_sigmoid_backward.default")
def _log_sigmoid_backward(call: Call, grad: Tracer, x: Tracer, buffer: Any) -> Tracer:
    return op("log_sigmoid_backward", grad, x)


def _gradient(name: str) -> Any:
    def lower(call: Call, grad: Tracer, x: Tracer) -> Tracer:
        return op(name, grad, x)

    return lower


for _name in ("tanh", "sigmoid", "silu", "hardswish", "hardsigmoid", "mish"):
    LOWERINGS[f"aten.{_name}_backward.default"] = _gradient(f"{_name}_backward")


# --- sizes, which are numbers ---------------------------------------------------------------------------------------
NUMBERS: dict[str, Any] = {
    "add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul": lambda a, b: a * b,
    "floordiv": lambda a, b: a // b, "truediv": lambda a, b: a / b, "mod": lambda a, b: a % b,
    "pow": lambda a, b: a**b, "neg": lambda a: -a, "eq": lambda a, b: a == b, "ne": lambda a, b: a != b,
    "lt": lambda a, b: a < b, "le": lambda a, b: a <= b, "gt": lambda a, b: a > b, "ge": lambda a, b: a >= b,
    "and_": lambda a, b: a and b, "or_": lambda a, b: a or b, "sym_max": max, "sym_min": min,
    "sym_sum": sum, "sym_float": float, "sym_int": int, "sym_not": lambda a: not a, "ceil": math.ceil,
    "floor": math.floor, "trunc": math.trunc, "sym_ite": lambda c, a, b: a if c else b,
}  # fmt: skip
"""Functions of Python, and of torch, on sizes."""

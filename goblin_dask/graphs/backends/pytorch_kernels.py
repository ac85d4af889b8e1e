"""PyTorch's own kernels for operators of the catalogue, and the operands for which they mean the same."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from goblin_dask.graphs.backends.tensors import NUMPY_DTYPES, TORCH_DTYPES
from goblin_dask.graphs.operators.base import Attributes
from goblin_dask.graphs.operators.dtypes import DTYPES

Tensor = torch.Tensor
aten: Any = torch.ops.aten

FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
WIDE = frozenset({torch.float32, torch.float64})
NUMBERS = FLOATS | {torch.complex64, torch.complex128}
PLAIN = FLOATS | {torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8}
"""On which comparisons, sums and products of both libraries are the same."""

Takes = Callable[[tuple[Tensor, ...], Attributes], bool]
Own = tuple[Takes, Callable[[tuple[Tensor, ...], Attributes], Any]]


def _of(dtypes: frozenset[torch.dtype]) -> Takes:
    """Operands that are all of one of these dtypes."""

    def takes(operands: tuple[Tensor, ...], attributes: Attributes) -> bool:
        first = operands[0].dtype
        return first in dtypes and all(operand.dtype == first for operand in operands)

    return takes


def _first_of(dtypes: frozenset[torch.dtype]) -> Takes:
    return lambda operands, attributes: operands[0].dtype in dtypes


def _always(operands: tuple[Tensor, ...], attributes: Attributes) -> bool:
    return True


def _call(function: Any) -> Callable[[tuple[Tensor, ...], Attributes], Any]:
    return lambda operands, attributes: function(*operands)


def _paired(operands: tuple[Tensor, ...], attributes: Attributes) -> bool:
    """Gradient and operand of one shape: oneDNN's gradients do not broadcast."""
    return _of(WIDE)(operands, attributes) and operands[0].shape == operands[1].shape


def _filled(operands: tuple[Tensor, ...], attributes: Any) -> bool:
    return _of(WIDE)(operands, attributes) and operands[0].numel() > 0


OWN: dict[str, Own] = {}
"""By operator: which operands PyTorch's kernel is for, and that kernel."""

for _name, _function in {
    "add": torch.add, "subtract": torch.sub, "multiply": torch.mul, "maximum": torch.maximum,
    "minimum": torch.minimum,
}.items():  # fmt: skip
    OWN[_name] = _of(PLAIN), _call(_function)
for _name, _function in {
    "equal": torch.eq, "not_equal": torch.ne, "less": torch.lt, "less_equal": torch.le, "greater": torch.gt,
    "greater_equal": torch.ge,
}.items():  # fmt: skip
    OWN[_name] = _of(PLAIN), _call(_function)
for _name, _function in {
    "divide": torch.div, "negative": torch.neg, "abs": torch.abs, "square": torch.square,
    "floor": torch.floor, "ceil": torch.ceil, "trunc": torch.trunc, "rint": torch.round,
    "reciprocal": torch.reciprocal, "isnan": torch.isnan, "isfinite": torch.isfinite,
}.items():  # fmt: skip
    OWN[_name] = _of(FLOATS), _call(_function)
for _name, _function in {
    "exp": torch.exp, "expm1": torch.expm1, "log": torch.log, "log1p": torch.log1p, "log2": torch.log2,
    "log10": torch.log10, "sin": torch.sin, "cos": torch.cos, "tan": torch.tan, "tanh": torch.tanh,
    "asin": torch.asin, "acos": torch.acos, "atan": torch.atan, "atan2": torch.atan2, "erf": torch.erf,
    "exp2": torch.exp2, "expit": torch.sigmoid, "hypot": torch.hypot,
}.items():  # fmt: skip
    OWN[_name] = _of(WIDE), _call(_function)


def _on_cuda(dtypes: frozenset[torch.dtype]) -> Takes:
    """Where PyTorch's kernel for CPUs does not mean the same."""
    same = _of(dtypes)
    return lambda operands, attributes: operands[0].is_cuda and same(operands, attributes)


# On CPUs its square root is not correctly rounded; sinh and cosh overflow early. Its erfc is the better one: SciPy's
# errs by up to 258 units in the last place, so that no other library's is within what rounding explains.
OWN["sqrt"] = _on_cuda(FLOATS), _call(torch.sqrt)
for _name, _function in {"sinh": torch.sinh, "cosh": torch.cosh}.items():
    OWN[_name] = _on_cuda(WIDE), _call(_function)

OWN["where"] = (
    (lambda operands, attributes: operands[0].dtype == torch.bool and _of(PLAIN)(operands[1:], attributes)),
    _call(torch.where),
)
OWN["positive"] = _of(PLAIN), _call(torch.clone)
OWN["logical_not"] = _of(frozenset({torch.bool})), _call(torch.logical_not)


def _own(name: str, takes: Takes) -> Callable[[Any], Any]:
    def register(function: Any) -> Any:
        OWN[name] = takes, function
        return function

    return register


_CASTS = PLAIN | {torch.bool, torch.complex64, torch.complex128}


def _casts_alike(operands: tuple[Tensor, ...], attributes: Any) -> bool:
    """Whether casting means the same: not from floats to integers, where what is out of range is nobody's rule."""
    into = TORCH_DTYPES[DTYPES[attributes["dtype"]]]
    (x,) = operands
    return x.dtype in _CASTS and into in _CASTS and not (x.dtype in NUMBERS and into not in NUMBERS)


@_own("astype", _casts_alike)
def _astype(operands: tuple[Tensor, ...], attributes: Any) -> Any:
    (x,) = operands
    into = TORCH_DTYPES[DTYPES[attributes["dtype"]]]
    return torch.real(x).to(into) if x.is_complex() and not into.is_complex else x.to(into)


# --- what moves elements: on a device the operands stay there; on a CPU these are views as NumPy's are
@_own("reshape", _always)
def _reshape(operands: tuple[Tensor, ...], attributes: Any) -> Any:
    return operands[0].reshape(attributes["shape"])


@_own("permute_dims", _always)
def _permute(operands: tuple[Tensor, ...], attributes: Any) -> Any:
    return operands[0].permute(attributes["axes"])


@_own("broadcast_to", _always)
def _broadcast_to(operands: tuple[Tensor, ...], attributes: Any) -> Any:
    return operands[0].broadcast_to(attributes["shape"])


@_own("squeeze", _always)
def _squeeze(operands: tuple[Tensor, ...], attributes: Any) -> Any:
    return operands[0].squeeze(attributes["axes"]) if attributes["axes"] else operands[0]


@_own("concat", lambda operands, attributes: operands[0].dtype in _CASTS and _of(_CASTS)(operands, attributes))
def _concat(operands: tuple[Tensor, ...], attributes: Any) -> Any:
    return torch.cat(operands, attributes["axis"])


@_own("stack", _of(_CASTS))
def _stack(operands: tuple[Tensor, ...], attributes: Any) -> Any:
    return torch.stack(operands, attributes["axis"])


def _forward(operands: tuple[Tensor, ...], attributes: Any) -> bool:
    return all(step > 0 for step in attributes["step"])


@_own("slice", _forward)
def _slice(operands: tuple[Tensor, ...], attributes: Any) -> Any:
    ranges = zip(attributes["start"], attributes["length"], attributes["step"], strict=True)
    return operands[0][tuple(slice(a, a + n * step, step) for a, n, step in ranges)]


@_own("expand_dims", _always)
def _expand_dims(operands: tuple[Tensor, ...], attributes: Any) -> Any:
    x = operands[0]
    axes = {axis % (x.ndim + len(attributes["axes"])) for axis in attributes["axes"]}
    sizes = iter(x.shape)
    return x.reshape([1 if axis in axes else next(sizes) for axis in range(x.ndim + len(axes))])


# --- reductions
def _axes(x: Tensor, attributes: Any) -> tuple[int, ...]:
    axes = attributes["axes"]
    return tuple(range(x.ndim)) if axes is None else tuple(axes)


def _reduces(dtypes: frozenset[torch.dtype]) -> Takes:
    """Real work: some axes, none of them empty, and no dtype asked for."""

    def takes(operands: tuple[Tensor, ...], attributes: Any) -> bool:
        (x,) = operands
        axes = _axes(x, attributes)
        wanted = attributes.get("dtype")
        same = wanted is None or DTYPES[wanted] == NUMPY_DTYPES[x.dtype]
        return x.dtype in dtypes and bool(axes) and same and math.prod(x.shape[axis] for axis in axes) > 0

    return takes


for _name, _function in {"sum": torch.sum, "mean": torch.mean, "max": torch.amax, "min": torch.amin}.items():

    def _reduce(operands: tuple[Tensor, ...], attributes: Any, function: Any = _function) -> Any:
        (x,) = operands
        return function(x, dim=_axes(x, attributes), keepdim=attributes["keepdims"])

    OWN[_name] = _reduces(WIDE), _reduce


@_own("var", _reduces(WIDE))
def _var(operands: tuple[Tensor, ...], attributes: Any) -> Any:
    (x,) = operands
    return torch.var(x, dim=_axes(x, attributes), correction=attributes["correction"], keepdim=attributes["keepdims"])


# --- products
@_own("matmul", _of(WIDE))
def _matmul(operands: tuple[Tensor, ...], attributes: Any) -> Any:
    return torch.matmul(*operands)


@_own("addmm", _of(WIDE))
def _addmm(operands: tuple[Tensor, ...], attributes: Any) -> Any:
    addend, a, b = operands
    return torch.addmm(addend, a, b)


@_own("baddbmm", _of(WIDE))
def _baddbmm(operands: tuple[Tensor, ...], attributes: Any) -> Any:
    addend, a, b = operands
    return torch.baddbmm(addend, a, b) if a.ndim == 3 and b.ndim == 3 else addend + torch.matmul(a, b)


# --- layers of neural networks, in ATen's names and with ATen's arguments
def _spread(values: Any, rank: int) -> list[int]:
    return list(values) * rank if len(values) == 1 else list(values)


@_own("convolution", _of(FLOATS))
def _convolution(operands: tuple[Tensor, ...], a: Any) -> Any:
    x, weight, *bias = operands
    rank = x.ndim - 2
    sizes = (_spread(a[name], rank) for name in ("stride", "padding", "dilation"))
    more = _spread(a["output_padding"], rank)
    return aten.convolution(x, weight, bias[0] if bias else None, *sizes, a["transposed"], more, a["groups"])


@_own("convolution_backward", _of(FLOATS))
def _convolution_backward(operands: tuple[Tensor, ...], a: Any) -> Any:
    grad, x, weight = operands
    rank = x.ndim - 2
    sizes = (_spread(a[name], rank) for name in ("stride", "padding", "dilation"))
    more, mask = _spread(a["output_padding"], rank), [bool(each) for each in a["output_mask"]]
    found = aten.convolution_backward(
        grad, x, weight, [grad.shape[1]], *sizes, a["transposed"], more, a["groups"], mask
    )
    return tuple(each for each, wanted in zip(found, mask, strict=True) if wanted)


for _rank in (2, 3):

    def _max_pool(operands: tuple[Tensor, ...], a: Any, rank: int = _rank) -> Any:
        kernel = _spread(a["kernel_size"], rank)
        sizes = (_spread(a[name], rank) if a[name] else kernel for name in ("stride", "padding", "dilation"))
        function = aten.max_pool2d_with_indices if rank == 2 else aten.max_pool3d_with_indices
        return tuple(function(operands[0], kernel, *sizes, a["ceil_mode"]))

    OWN[f"max_pool{_rank}d_with_indices"] = _of(WIDE), _max_pool

    def _avg_pool(operands: tuple[Tensor, ...], a: Any, rank: int = _rank) -> Any:
        kernel = _spread(a["kernel_size"], rank)
        stride = _spread(a["stride"], rank) if a["stride"] else kernel
        function = aten.avg_pool2d if rank == 2 else aten.avg_pool3d
        padding, pads = _spread(a["padding"], rank), a["count_include_pad"]
        return function(operands[0], kernel, stride, padding, a["ceil_mode"], pads, a["divisor_override"])

    def _within(operands: tuple[Tensor, ...], a: Any, rank: int = _rank) -> bool:
        """PyTorch refuses windows larger than what they are moved over, even where they are cut off at its end."""
        kernel = _spread(a["kernel_size"], rank)
        return _filled(operands, a) and all(k <= n for k, n in zip(kernel, operands[0].shape[-rank:], strict=True))

    OWN[f"avg_pool{_rank}d"] = _within, _avg_pool


@_own("max_pool2d_with_indices_backward", lambda operands, attributes: operands[0].dtype in WIDE)
def _max_pool_backward(operands: tuple[Tensor, ...], a: Any) -> Any:
    grad, x, indices = operands
    kernel = _spread(a["kernel_size"], 2)
    sizes = [_spread(a[name], 2) if a[name] else kernel for name in ("stride", "padding", "dilation")]
    return aten.max_pool2d_with_indices_backward(grad, x, kernel, *sizes, a["ceil_mode"], indices.long())


@_own("native_layer_norm", _filled)
def _layer_norm(operands: tuple[Tensor, ...], a: Any) -> Any:
    x, *affine = operands
    weight, bias = (*affine, None, None)[:2]
    return tuple(aten.native_layer_norm(x, list(a["normalized_shape"]), weight, bias, a["eps"]))


@_own("native_layer_norm_backward", _filled)
def _layer_norm_backward(operands: tuple[Tensor, ...], a: Any) -> Any:
    grad, x, mean, rstd, *weight = map(torch.Tensor.contiguous, operands)  # strides of some are ignored
    mask = [bool(each) for each in a["output_mask"]]
    ones = weight[0] if weight else torch.ones(a["normalized_shape"], dtype=x.dtype, device=x.device)
    found = aten.native_layer_norm_backward(
        grad, x, list(a["normalized_shape"]), mean, rstd, ones, torch.zeros_like(ones), mask
    )
    return tuple(each for each, wanted in zip(found, mask, strict=True) if wanted)


@_own("native_group_norm", _filled)
def _group_norm(operands: tuple[Tensor, ...], a: Any) -> Any:
    x, *affine = map(torch.Tensor.contiguous, operands)  # strides of weight and bias are ignored
    weight, bias = (*affine, None, None)[:2]
    sizes = x.shape[0], x.shape[1], math.prod(x.shape[2:])
    return tuple(aten.native_group_norm(x, weight, bias, *sizes, a["group"], a["eps"]))


@_own("_native_batch_norm_legit_no_training", _filled)
def _batch_norm(operands: tuple[Tensor, ...], a: Any) -> Any:
    x, *affine, mean, var = operands
    weight, bias = (*affine, None, None)[:2]
    found = aten._native_batch_norm_legit_no_training(x, weight, bias, mean, var, 0.0, a["eps"])
    return found[0], *(torch.empty(0, dtype=x.dtype, device=x.device) for _ in range(2))


@_own(
    "_native_batch_norm_legit_functional",
    lambda operands, a: bool(a["training"]) and _filled(operands, a) and operands[0].numel() > operands[0].shape[1],
)
def _batch_norm_training(operands: tuple[Tensor, ...], a: Any) -> Any:
    x, *affine, mean, var = operands
    weight, bias = (*affine, None, None)[:2]
    found = aten._native_batch_norm_legit_functional(x, weight, bias, mean, var, True, a["momentum"], a["eps"])
    return tuple(found)


def _soft(function: Any) -> Any:
    return lambda operands, a: function(operands[0], a["dim"], False)


def _soft_backward(function: Any) -> Any:
    return lambda operands, a: function(*operands, a["dim"], operands[0].dtype)


def _softens(operands: tuple[Tensor, ...], a: Any) -> bool:
    return _filled(operands, a) and not a["half_to_float"]


def _softened(operands: tuple[Tensor, ...], a: Any) -> bool:
    """Numbers alone: PyTorch takes the products apart, and makes NaN of an infinity in another order."""
    alike = _filled(operands, a) and DTYPES[a["input_dtype"]] == NUMPY_DTYPES[operands[0].dtype]
    return alike and all(bool(torch.isfinite(operand).all()) for operand in operands)


for _name in ("_softmax", "_log_softmax"):
    OWN[_name] = _softens, _soft(getattr(aten, _name))
    OWN[f"{_name}_backward_data"] = _softened, _soft_backward(getattr(aten, f"{_name}_backward_data"))

for _name, _function in {
    "relu": torch.relu, "sigmoid": torch.sigmoid, "silu": torch.nn.functional.silu,
}.items():  # fmt: skip
    OWN[_name] = _of(WIDE), _call(_function)


@_own("gelu", _of(WIDE))
def _gelu(operands: tuple[Tensor, ...], a: Any) -> Any:
    return torch.nn.functional.gelu(operands[0], approximate=a["approximate"])


@_own("gelu_backward", _paired)
def _gelu_backward(operands: tuple[Tensor, ...], a: Any) -> Any:
    return aten.gelu_backward(*operands, approximate=a["approximate"])


@_own("threshold_backward", _paired)
def _threshold_backward(operands: tuple[Tensor, ...], a: Any) -> Any:
    return aten.threshold_backward(*operands, a["threshold"])


@_own("tanh_backward", _paired)
def _tanh_backward(operands: tuple[Tensor, ...], a: Any) -> Any:
    return aten.tanh_backward(*operands)


@_own("sigmoid_backward", _paired)
def _sigmoid_backward(operands: tuple[Tensor, ...], a: Any) -> Any:
    return aten.sigmoid_backward(*operands)


@_own("embedding", lambda operands, a: operands[1].dtype in (torch.int32, torch.int64) and operands[0].dtype in _CASTS)
def _embedding(operands: tuple[Tensor, ...], a: Any) -> Any:
    return aten.embedding(*operands)


@_own("upsample_nearest2d", _filled)
def _upsample_nearest(operands: tuple[Tensor, ...], a: Any) -> Any:
    return aten.upsample_nearest2d(operands[0], list(a["output_size"]), a["scales_h"], a["scales_w"])


def _finite(operands: tuple[Tensor, ...], attributes: Attributes) -> bool:
    """Numbers alone: PyTorch makes NaN of an infinity whose weight is zero."""
    return _filled(operands, attributes) and bool(torch.isfinite(operands[0]).all())


@_own("upsample_bilinear2d", _finite)
def _upsample_bilinear(operands: tuple[Tensor, ...], a: Any) -> Any:
    return aten.upsample_bilinear2d(
        operands[0], list(a["output_size"]), a["align_corners"], a["scales_h"], a["scales_w"]
    )

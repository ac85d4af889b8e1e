"""Layers of neural networks, and their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from goblin_dask.errors import NotTraceable
from goblin_dask.graphs.capture.aten.base import (
    LOWERINGS,
    Call,
    array,
    axis_of,
    lowers,
    optional,
    shaped,
)
from goblin_dask.graphs.tracer.array import Tracer
from goblin_dask.graphs.tracer.casting import astype
from goblin_dask.graphs.tracer.recorder import op, ops


def _ints(values: Any) -> tuple[int, ...]:
    return tuple(int(each) for each in values) if isinstance(values, Sequence) else (int(values),)


def _wanted(mask: Sequence[bool], results: Sequence[Tracer]) -> tuple[Tracer | None, ...]:
    """Gradients in their places."""
    given = iter(results)
    return tuple(next(given) if wanted else None for wanted in mask)


# --- convolution ----------------------------------------------------------------------------------------------------
@lowers("aten.convolution.default")
def _convolution(
    call: Call,
    x: Tracer,
    weight: Tracer,
    bias: Tracer | None,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: int,
) -> Tracer:
    given = {
        "stride": _ints(stride),
        "padding": _ints(padding),
        "dilation": _ints(dilation),
        "transposed": transposed,
        "output_padding": _ints(output_padding) if transposed else (0,),
        "groups": groups,
    }
    if x.ndim == weight.ndim - 1:  # one image
        return op(
            "squeeze", op("convolution", op("expand_dims", x, axes=(0,)), *optional(weight, bias), **given), axes=(0,)
        )
    return op("convolution", x, *optional(weight, bias), **given)


@lowers("aten.convolution_backward.default")
def _convolution_backward(
    call: Call,
    grad: Tracer,
    x: Tracer,
    weight: Tracer,
    bias_sizes: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: int,
    output_mask: Sequence[bool],
) -> Any:
    given = {
        "stride": _ints(stride),
        "padding": _ints(padding),
        "dilation": _ints(dilation),
        "transposed": transposed,
        "output_padding": _ints(output_padding) if transposed else (0,),
        "groups": groups,
    }
    mask = tuple(int(each) for each in output_mask)
    return _wanted(output_mask, ops("convolution_backward", grad, x, weight, output_mask=mask, **given))


# --- windows --------------------------------------------------------------------------------------------------------
def _max_pool(rank: int) -> Any:
    def lower(
        call: Call,
        x: Tracer,
        kernel_size: Any,
        stride: Any = (),
        padding: Any = 0,
        dilation: Any = 1,
        ceil_mode: bool = False,
    ) -> Any:
        return ops(
            f"max_pool{rank}d_with_indices",
            x,
            kernel_size=_ints(kernel_size),
            stride=_ints(stride) if stride else (),
            padding=_ints(padding),
            dilation=_ints(dilation),
            ceil_mode=ceil_mode,
        )

    return lower


def _max_pool_backward(rank: int) -> Any:
    def lower(
        call: Call,
        grad: Tracer,
        x: Tracer,
        kernel_size: Any,
        stride: Any,
        padding: Any,
        dilation: Any,
        ceil_mode: bool,
        indices: Tracer,
    ) -> Tracer:
        return op(
            f"max_pool{rank}d_with_indices_backward",
            grad,
            x,
            indices,
            kernel_size=_ints(kernel_size),
            stride=_ints(stride) if stride else (),
            padding=_ints(padding),
            dilation=_ints(dilation),
            ceil_mode=ceil_mode,
        )

    return lower


def _window(
    kernel_size: Any, stride: Any, padding: Any, ceil_mode: bool, count_include_pad: bool, divisor: Any, rank: int
) -> dict[str, Any]:
    given: dict[str, Any] = {
        "kernel_size": _ints(kernel_size),
        "stride": _ints(stride) if stride else (),
        "padding": _ints(padding),
        "ceil_mode": ceil_mode,
        "count_include_pad": count_include_pad,
    }
    if divisor is not None:
        given["divisor_override"] = int(divisor)
    return given


def _avg_pool(rank: int) -> Any:
    def lower(
        call: Call,
        x: Tracer,
        kernel_size: Any,
        stride: Any = (),
        padding: Any = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: Any = None,
    ) -> Tracer:
        given = _window(kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override, rank)
        return op(f"avg_pool{rank}d", x, **given)

    return lower


def _avg_pool_backward(rank: int) -> Any:
    def lower(
        call: Call,
        grad: Tracer,
        x: Tracer,
        kernel_size: Any,
        stride: Any,
        padding: Any,
        ceil_mode: bool,
        count_include_pad: bool,
        divisor_override: Any,
    ) -> Tracer:
        given = _window(kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override, rank)
        return op(f"avg_pool{rank}d_backward", grad, x, **given)

    return lower


for _rank in (1, 2, 3):
    LOWERINGS[f"aten.max_pool{_rank}d_with_indices.default"] = _max_pool(_rank)
    LOWERINGS[f"aten.avg_pool{_rank}d.default"] = _avg_pool(_rank)
for _rank in (2, 3):
    LOWERINGS[f"aten.max_pool{_rank}d_with_indices_backward.default"] = _max_pool_backward(_rank)
    LOWERINGS[f"aten.avg_pool{_rank}d_backward.default"] = _avg_pool_backward(_rank)


def _adaptive(name: str) -> Any:
    def lower(call: Call, x: Tracer, output_size: Any) -> Tracer:
        return op(name, x, output_size=_ints(output_size))

    return lower


def _adaptive_backward(name: str) -> Any:
    def lower(call: Call, grad: Tracer, x: Tracer) -> Tracer:
        return op(name, grad, x)

    return lower


for _name in ("_adaptive_avg_pool2d", "_adaptive_avg_pool3d"):
    LOWERINGS[f"aten.{_name}.default"] = _adaptive(_name)
    LOWERINGS[f"aten.{_name}_backward.default"] = _adaptive_backward(f"{_name}_backward")
LOWERINGS["aten.adaptive_avg_pool1d.default"] = _adaptive("adaptive_avg_pool1d")


# --- resampling -----------------------------------------------------------------------------------------------------
SCALES = {1: ("scales",), 2: ("scales_h", "scales_w"), 3: ("scales_d", "scales_h", "scales_w")}


def _factors(rank: int, values: Sequence[Any]) -> dict[str, float]:
    return {name: float(value) for name, value in zip(SCALES[rank], values, strict=False) if value is not None}


def _size(x: Tracer, output_size: Any, factors: Any) -> tuple[int, ...]:
    if output_size is not None:
        return _ints(output_size)
    return tuple(int(size * factor) for size, factor in zip(x.shape[2:], factors, strict=True))


def _nearest(name: str, rank: int) -> Any:
    def lower(call: Call, x: Tracer, output_size: Any, *scales: Any) -> Tracer:
        return op(name, x, output_size=_ints(output_size), **_factors(rank, scales))

    def by_factors(call: Call, x: Tracer, output_size: Any, factors: Any) -> Tracer:
        return op(name, x, output_size=_size(x, output_size, factors), **_factors(rank, factors or ()))

    def backward(call: Call, grad: Tracer, output_size: Any, input_size: Any, *scales: Any) -> Tracer:
        return op(f"{name}_backward", grad, input_size=_ints(input_size), **_factors(rank, scales))

    return lower, by_factors, backward


def _linear(name: str, rank: int) -> Any:
    def lower(call: Call, x: Tracer, output_size: Any, align_corners: bool, *scales: Any) -> Tracer:
        return op(name, x, output_size=_ints(output_size), align_corners=align_corners, **_factors(rank, scales))

    def by_factors(call: Call, x: Tracer, output_size: Any, align_corners: bool, factors: Any) -> Tracer:
        size = _size(x, output_size, factors)
        return op(name, x, output_size=size, align_corners=align_corners, **_factors(rank, factors or ()))

    def backward(
        call: Call, grad: Tracer, output_size: Any, input_size: Any, align_corners: bool, *scales: Any
    ) -> Tracer:
        given = _factors(rank, scales)
        return op(f"{name}_backward", grad, input_size=_ints(input_size), align_corners=align_corners, **given)

    return lower, by_factors, backward


for _rank in (1, 2, 3):
    for _name, _kind in (
        (f"upsample_nearest{_rank}d", _nearest),
        (f"_upsample_nearest_exact{_rank}d", _nearest),
        ({1: "upsample_linear1d", 2: "upsample_bilinear2d", 3: "upsample_trilinear3d"}[_rank], _linear),
    ):
        _lower, _by_factors, _backward = _kind(_name, _rank)
        LOWERINGS[f"aten.{_name}.default"] = _lower
        LOWERINGS[f"aten.{_name}.vec"] = _by_factors
        LOWERINGS[f"aten.{_name}_backward.default"] = _backward


# --- normalization --------------------------------------------------------------------------------------------------
def _affine(weight: Tracer | None, bias: Tracer | None, length: int, dtype: str) -> tuple[Tracer, ...]:
    """Weight and bias: both, the weight alone, or none; a bias alone comes with a weight of ones."""
    if bias is not None and weight is None:
        weight = op("full", array(1, dtype), shape=bias.shape)
    return optional(weight, bias)


@lowers("aten.native_layer_norm.default")
def _layer_norm(
    call: Call, x: Tracer, shape: Sequence[Any], weight: Tracer | None, bias: Tracer | None, eps: float
) -> Any:
    return ops(
        "native_layer_norm", x, *_affine(weight, bias, 0, x.dtype.name), normalized_shape=_ints(shape), eps=float(eps)
    )


@lowers("aten.native_layer_norm_backward.default")
def _layer_norm_backward(
    call: Call,
    grad: Tracer,
    x: Tracer,
    shape: Sequence[Any],
    mean: Tracer,
    rstd: Tracer,
    weight: Tracer | None,
    bias: Tracer | None,
    output_mask: Sequence[bool],
) -> Any:
    mask = tuple(int(each) for each in output_mask)
    given = ops(
        "native_layer_norm_backward",
        grad, x, mean, rstd, *optional(weight),
        normalized_shape=_ints(shape), output_mask=mask,
    )  # fmt: skip
    return _wanted(output_mask, given)


@lowers("aten.native_group_norm.default")
def _group_norm(
    call: Call,
    x: Tracer,
    weight: Tracer | None,
    bias: Tracer | None,
    images: Any,
    channels: Any,
    sizes: Any,
    group: int,
    eps: float,
) -> Any:
    return ops("native_group_norm", x, *_affine(weight, bias, 0, x.dtype.name), group=group, eps=float(eps))


@lowers("aten.native_group_norm_backward.default")
def _group_norm_backward(
    call: Call,
    grad: Tracer,
    x: Tracer,
    mean: Tracer,
    rstd: Tracer,
    weight: Tracer | None,
    images: Any,
    channels: Any,
    sizes: Any,
    group: int,
    output_mask: Sequence[bool],
) -> Any:
    mask = tuple(int(each) for each in output_mask)
    given = ops("native_group_norm_backward", grad, x, mean, rstd, *optional(weight), group=group, output_mask=mask)
    return _wanted(output_mask, given)


def _both(x: Tracer, weight: Tracer | None, bias: Tracer | None) -> tuple[Tracer, ...]:
    """Weight and bias of a batch norm: both or none."""
    if weight is None and bias is None:
        return ()
    channels = (x.shape[1],)
    dtype = (weight if weight is not None else bias).dtype.name  # type: ignore[union-attr]
    return (
        weight if weight is not None else op("full", array(1, dtype), shape=channels),
        bias if bias is not None else op("full", array(0, dtype), shape=channels),
    )


@lowers("aten._native_batch_norm_legit_functional.default")
def _batch_norm(
    call: Call,
    x: Tracer,
    weight: Tracer | None,
    bias: Tracer | None,
    mean: Tracer,
    var: Tracer,
    training: bool,
    momentum: float,
    eps: float,
) -> Any:
    given = {"training": training, "momentum": float(momentum), "eps": float(eps)}
    return ops("_native_batch_norm_legit_functional", x, *_both(x, weight, bias), mean, var, **given)


@lowers("aten._native_batch_norm_legit_no_training.default")
def _batch_norm_no_training(
    call: Call,
    x: Tracer,
    weight: Tracer | None,
    bias: Tracer | None,
    mean: Tracer,
    var: Tracer,
    momentum: float,
    eps: float,
) -> Any:
    return ops("_native_batch_norm_legit_no_training", x, *_both(x, weight, bias), mean, var, eps=float(eps))


@lowers("aten._native_batch_norm_legit.no_stats")
def _batch_norm_no_stats(
    call: Call, x: Tracer, weight: Tracer | None, bias: Tracer | None, training: bool, momentum: float, eps: float
) -> Any:
    return ops("_native_batch_norm_legit_no_stats", x, *_both(x, weight, bias), eps=float(eps))


@lowers("aten.native_batch_norm_backward.default")
def _batch_norm_backward(
    call: Call,
    grad: Tracer,
    x: Tracer,
    weight: Tracer | None,
    running_mean: Tracer | None,
    running_var: Tracer | None,
    save_mean: Tracer | None,
    save_invstd: Tracer | None,
    train: bool,
    eps: float,
    output_mask: Sequence[bool],
) -> Any:
    statistics = (save_mean, save_invstd) if train else (running_mean, running_var)
    if any(each is None for each in statistics):
        raise NotTraceable("the gradient of a batch norm needs its statistics")
    mask = tuple(int(each) for each in output_mask)
    given = ops(
        "native_batch_norm_backward", grad, x, *optional(weight, *statistics),
        train=train, eps=float(eps), output_mask=mask,
    )  # fmt: skip
    return _wanted(output_mask, given)


# --- softmax, embeddings, losses ------------------------------------------------------------------------------------
def _soft(name: str) -> Any:
    def lower(call: Call, x: Tracer, dim: int, half_to_float: bool = False) -> Tracer:
        if not x.ndim:
            return op("squeeze", op(name, x.reshape((1,)), dim=0, half_to_float=half_to_float), axes=(0,))
        return op(name, x, dim=axis_of(x, dim), half_to_float=half_to_float)

    def backward(call: Call, grad: Tracer, result: Tracer, dim: int, input_dtype: str) -> Tracer:
        if not grad.ndim:
            flat = op(f"{name}_backward_data", grad.reshape((1,)), result.reshape((1,)), dim=0, input_dtype=input_dtype)
            return shaped(flat, ())
        return op(f"{name}_backward_data", grad, result, dim=axis_of(grad, dim), input_dtype=input_dtype)

    return lower, backward


for _name in ("_softmax", "_log_softmax"):
    _lower, _backward = _soft(_name)
    LOWERINGS[f"aten.{_name}.default"] = _lower
    LOWERINGS[f"aten.{_name}_backward_data.default"] = _backward


@lowers("aten.embedding.default")
def _embedding(
    call: Call, weight: Tracer, index: Tracer, padding_idx: int = -1, scale: bool = False, sparse: bool = False
) -> Tracer:
    return op("embedding", weight, index)


@lowers("aten.embedding_dense_backward.default")
def _embedding_backward(
    call: Call, grad: Tracer, index: Tracer, num_weights: Any, padding_idx: int, scale_grad_by_freq: bool
) -> Tracer:
    return op(
        "embedding_dense_backward", grad, index,
        num_weights=int(num_weights), padding_idx=padding_idx, scale_grad_by_freq=scale_grad_by_freq,
    )  # fmt: skip


def _loss(name: str) -> Any:
    def forward(call: Call, x: Tracer, target: Tracer, weight: Tracer | None, reduction: int, ignore_index: int) -> Any:
        return ops(f"{name}_forward", x, target, *optional(weight), reduction=reduction, ignore_index=ignore_index)

    def backward(
        call: Call,
        grad: Tracer,
        x: Tracer,
        target: Tracer,
        weight: Tracer | None,
        reduction: int,
        ignore_index: int,
        total: Tracer,
    ) -> Tracer:
        operands = (grad, x, target, *optional(weight), astype(total, x.dtype))
        return op(f"{name}_backward", *operands, reduction=reduction, ignore_index=ignore_index)

    return forward, backward


for _name in ("nll_loss", "nll_loss2d"):
    _forward, _backward = _loss(_name)
    LOWERINGS[f"aten.{_name}_forward.default"] = _forward
    LOWERINGS[f"aten.{_name}_backward.default"] = _backward

"""How layers of neural networks and their gradients are tiled: rules as those of `goblin_dask.labnode.tiled.rules`.

Most are computed row by row, image by image or channel by channel. What is a sum over these, such as the gradient of
a weight, is summed up in each block, and the blocks' sums are added in their order.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import dask.array as da
import numpy as np

from goblin_dask.errors import InputError
from goblin_dask.graphs.builder import infer
from goblin_dask.graphs.operators import CATALOGUE
from goblin_dask.graphs.operators.dtypes import DTYPES
from goblin_dask.graphs.operators.neural import spread
from goblin_dask.labnode.tiled.blocks import Application, Arrays, Labels, block_of_sum, blockwise
from goblin_dask.labnode.tiled.rules import HALVES, Rule, then


def _summed(
    this: Application, labels: Sequence[Labels], outputs: Sequence[Labels | None], whole: Iterable[int]
) -> Arrays:
    """Block by block, and sums of what blocks give for an output that lacks labels along which there are several."""
    made = blockwise(this, labels, outputs, whole=whole)
    specs = [spec for spec, each in zip(this.outputs, outputs, strict=True) if each is not None]
    return tuple(
        array
        if array.ndim == len(spec.shape)
        else then(this, "sum", array, axes=tuple(range(array.ndim - len(spec.shape))), dtype=spec.dtype)
        for array, spec in zip(made, specs, strict=True)
    )


def _asked(this: Application, outputs: Sequence[Labels]) -> list[Labels]:
    """Labels of those outputs that ``output_mask`` asks for."""
    return [each for each, asked in zip(outputs, this.attributes["output_mask"], strict=True) if asked]


# --- images and rows --------------------------------------------------------------------------------------------------
def _leading(free: Callable[[Application], int], operands: int = 1) -> Rule:
    """Any blocks along so many leading axes of the first operands; everything else is whole."""

    def rule(this: Application) -> Arrays | None:
        count = free(this)
        first = this.specs[0].shape[:count]
        if count < 1 or any(each.shape[:count] != first for each in (*this.specs[:operands], *this.outputs)):
            return None
        fresh = itertools.count(count)

        def labelled(spec: Any, leads: bool) -> Labels:
            kept = tuple(range(count)) if leads else ()
            return (*kept, *(next(fresh) for _ in spec.shape[len(kept) :]))

        labels = [labelled(spec, number < operands) for number, spec in enumerate(this.specs)]
        whole = {label for each in labels for label in each if label >= count}
        return blockwise(this, labels, [labelled(spec, True) for spec in this.outputs], whole=whole)

    return rule


def _images(this: Application) -> int:
    """Images, and their channels where each is computed by itself."""
    name = this.operator.name.removesuffix("_backward").removesuffix("_with_indices")
    return len(this.specs[0].shape) - int(name[-2])


def _rows(this: Application) -> int:
    return len(this.specs[0].shape) - len(this.attributes["normalized_shape"])


def _layer_norm_backward(this: Application) -> Arrays:
    rank, rows = len(this.specs[1].shape), len(this.specs[1].shape) - len(this.attributes["normalized_shape"])
    x, weight = tuple(range(rank)), tuple(range(rows, rank))
    statistics = (*range(rows), *range(rank, 2 * rank - rows))
    labels = [x, x, statistics, statistics, weight][: len(this.specs)]
    return _summed(this, labels, _asked(this, [x, weight, weight]), {*weight, *statistics[rows:]})


def _group_norm_backward(this: Application) -> Arrays:
    x, groups = tuple(range(len(this.specs[1].shape))), len(this.specs[1].shape)
    labels = [x, x, (0, groups), (0, groups), (1,)][: len(this.specs)]
    return _summed(this, labels, _asked(this, [x, (1,), (1,)]), {*x[1:], groups})


def _along_dim(this: Application) -> Arrays:
    """Whole along the axis of a softmax."""
    labels = tuple(range(len(this.specs[0].shape)))
    return blockwise(this, [labels] * len(this.specs), [labels], whole={this.attributes["dim"]})


# --- batch norms: channel by channel ----------------------------------------------------------------------------------
def _channels(this: Application) -> Arrays:
    """Any blocks of the channels."""
    ranks = [len(spec.shape) for spec in this.specs]
    x = tuple(range(max(ranks)))

    def labelled(spec: Any) -> Labels:
        return x if len(spec.shape) > 1 else (1,)

    return blockwise(this, [*map(labelled, this.specs)], [*map(labelled, this.outputs)], whole={0, *x[2:]})


def _batch_norm_functional(this: Application) -> Arrays:
    if this.attributes["training"]:
        return _channels(this)
    return (*_batch_norm(this), *this.operands[-2:])


def _batch_norm(this: Application) -> Arrays:
    """Element by element, once the channels' numbers stand beside them."""
    x, *affine, mean, var = this.operands
    dtype = this.outputs[0].dtype
    wide = "float32" if dtype in HALVES else dtype

    def along(array: da.Array) -> da.Array:
        return then(this, "astype", array, dtype=wide).reshape((1, -1, *(1,) * (x.ndim - 2)))

    scale = then(this, "sqrt", then(this, "add", along(var), np.asarray(this.attributes["eps"], wide)))
    result = then(this, "divide", then(this, "subtract", then(this, "astype", x, dtype=wide), along(mean)), scale)
    if affine:
        result = then(this, "add", then(this, "multiply", result, along(affine[0])), along(affine[1]))
    empty = tuple(da.zeros(output.shape, dtype=DTYPES[output.dtype]) for output in this.outputs[1:3])
    return (then(this, "astype", result, dtype=dtype), *empty)


# --- convolutions -----------------------------------------------------------------------------------------------------
_N, _OUT, _IN, _OTHER = range(4)
"""Labels of images, of channels of result and of input, and of the channels of a weight where there are groups."""


def _labels(this: Application, rank: int) -> tuple[Labels, Labels, Labels, set[int]]:
    """Of the axes of input, weight and result; those that are whole: sizes, and channels where there are groups."""
    sizes, taps, places = (tuple(range(first, first + rank)) for first in (10, 20, 30))
    whole = {*sizes, *taps, *places}
    first, second = (_IN, _OUT) if this.attributes["transposed"] else (_OUT, _IN)
    if this.attributes["groups"] > 1:
        second = _OTHER
        whole |= {_IN, _OUT, _OTHER}
    return (_N, _IN, *sizes), (first, second, *taps), (_N, _OUT, *places), whole


def _convolution(this: Application) -> Arrays:
    """Blocks of images and of channels; those of the input are summed over."""
    x, weight, result, whole = _labels(this, len(this.specs[0].shape) - 2)
    if this.outputs[0].dtype in HALVES:
        whole.add(_IN)
    product = replace(this, operands=this.operands[:2], specs=this.specs[:2])
    (found,) = blockwise(product, [x, weight], [result], whole=whole, function=block_of_sum)
    if len(this.operands) > 2:
        bias = da.reshape(this.operands[2], (1, -1, *(1,) * (len(result) - 2)))
        found = then(this, "add", found, bias)
    return (found,)


def _convolution_backward(this: Application) -> Arrays | None:
    """The gradient by the input is the opposite convolution of the gradient, that by the weight a sum over images."""
    (grad, x, weight), a = this.operands, this.attributes
    rank = x.ndim - 2
    of_x, of_weight, of_result, whole = _labels(this, rank)
    asked = a["output_mask"]
    found: list[da.Array] = []
    if asked[0]:
        opposite = _opposite(this, rank)
        if opposite is None:
            return None
        found.extend(_convolution(Application.of("convolution", (grad, weight), this.tiles, **opposite)))
    if asked[1]:
        mask = {**a, "output_mask": (0, 1, 0)}
        alone = replace(this, attributes=mask, outputs=(this.specs[2],))
        images = {_N} if this.specs[2].dtype in HALVES else set()
        found.extend(
            blockwise(alone, [of_result, of_x, of_weight], [of_weight], whole=whole | images, function=block_of_sum)
        )
    if asked[2]:
        found.append(then(this, "sum", grad, axes=(0, *range(2, rank + 2)), dtype=this.specs[0].dtype))
    return tuple(found)


def _opposite(this: Application, rank: int) -> dict[str, Any] | None:
    """Attributes of the convolution that goes from the result back to the input; None where there is none."""
    a = {name: value for name, value in this.attributes.items() if name != "output_mask"}
    grad, x, weight = (spec.shape for spec in this.specs)
    a["transposed"] = not a["transposed"]
    stride, padding, dilation = (spread(a[name], rank, name) for name in ("stride", "padding", "dilation"))
    if a["transposed"]:
        least = [
            (n - 1) * s - 2 * p + d * (k - 1) + 1
            for n, k, s, p, d in zip(grad[2:], weight[2:], stride, padding, dilation, strict=True)
        ]
        a["output_padding"] = tuple(size - small for size, small in zip(x[2:], least, strict=True))
    else:
        a["output_padding"] = (0,)
    try:
        _, (found,) = infer("convolution", (this.specs[0], this.specs[2]), a)
    except InputError:
        return None
    return a if found.shape == x else None


# --- embeddings and losses --------------------------------------------------------------------------------------------
def _embedding(this: Application) -> Arrays:
    """All rows, of any of their columns."""
    indices = tuple(range(2, 2 + len(this.specs[1].shape)))
    return blockwise(this, [(0, 1), indices], [(*indices, 1)], whole={0})


def _embedding_backward(this: Application) -> Arrays:
    """The sums of all rows, in any of their columns."""
    indices = tuple(range(2, 2 + len(this.specs[1].shape)))
    return blockwise(this, [(*indices, 1), indices], [(0, 1)], whole=indices)


def _of_targets(this: Application, x: int) -> tuple[list[Labels], Labels]:
    """Labels of each operand where the log-probabilities are number `x`, and of the targets; 1 is the classes'."""
    rank = len(this.specs[x].shape)
    targets = (0, *range(2, rank))
    return [tuple(range(rank)), targets, (1,)], targets


def _likelihood(this: Application) -> Arrays | None:
    if len(this.specs[0].shape) == 1:
        return None
    labels, targets = _of_targets(this, 0)
    labels, reduction = labels[: len(this.specs)], this.attributes["reduction"]
    if reduction == 0:
        zero = then(this, "zeros", shape=(), dtype=this.outputs[1].dtype)
        return (*blockwise(this, labels, [targets, None], whole={1}), zero)
    sums = replace(this, attributes={**this.attributes, "reduction": 2})
    total, weights = _summed(sums, labels, [(), ()], {1})
    return (then(this, "divide", total, weights) if reduction == 1 else total), weights


def _likelihood_backward(this: Application) -> Arrays | None:
    if len(this.specs[1].shape) == 1:
        return None
    (x, target, weight), targets = _of_targets(this, 1)
    grad = targets if this.attributes["reduction"] == 0 else ()
    labels = [grad, x, target, *[weight] * (len(this.specs) - 4), ()]
    return blockwise(this, labels, [x], whole={1})


# --- elements by index ------------------------------------------------------------------------------------------------
def _by_index(this: Application) -> Arrays | None:
    """Whole along the axis of the index, any blocks along the others, where all arrays are as long along these."""
    dim, rank = this.attributes["dim"], len(this.specs[0].shape)
    if len({spec.shape[:dim] + spec.shape[dim + 1 :] for spec in this.specs}) > 1:
        return None
    labels = [tuple(rank + n if axis == dim else axis for axis in range(rank)) for n in range(len(this.specs))]
    output = labels[1] if this.operator.name == "gather" else labels[0]
    return blockwise(this, labels, [output], whole={each[dim] for each in labels})


def _setitem(this: Application) -> Arrays | None:
    """What lies before and behind the region, and the value between them, axis by axis."""
    (x, value), a = this.operands, this.attributes
    if any(step != 1 for step in a["step"]):
        return None
    length = a["length"]
    value = then(this, "astype", value, dtype=this.specs[0].dtype)
    value = then(this, "broadcast_to", value, shape=length) if value.shape != length else value

    def filled(part: da.Array, axis: int) -> da.Array:
        if axis == part.ndim:
            return value
        start, stop = a["start"][axis], a["start"][axis] + length[axis]
        before = (slice(None),) * axis
        inner = filled(part[(*before, slice(start, stop))], axis + 1)
        pieces = [part[(*before, slice(0, start))], inner, part[(*before, slice(stop, None))]]
        return da.concatenate([each for each in pieces if each.shape[axis]], axis=axis)

    return None if 0 in length else (filled(x, 0),)


def _named(*ends: str) -> list[str]:
    kinds = ("pool", "upsample")
    return [
        name
        for name in CATALOGUE
        if any(kind in name for kind in kinds) and name.removesuffix("_with_indices").endswith(ends)
    ]


LAYERS: dict[str, Rule] = {
    "convolution": _convolution,
    "convolution_backward": _convolution_backward,
    **dict.fromkeys(_named("1d", "2d", "3d"), _leading(_images)),
    **dict.fromkeys([name for name in _named("_backward") if "pool" in name], _leading(_images, 3)),
    "native_layer_norm": _leading(_rows),
    "native_layer_norm_backward": _layer_norm_backward,
    "native_group_norm": _leading(lambda this: 1),
    "native_group_norm_backward": _group_norm_backward,
    "_softmax": _along_dim,
    "_log_softmax": _along_dim,
    "_softmax_backward_data": _along_dim,
    "_log_softmax_backward_data": _along_dim,
    "_native_batch_norm_legit_no_training": _batch_norm,
    "_native_batch_norm_legit_functional": _batch_norm_functional,
    "_native_batch_norm_legit_no_stats": _channels,
    "native_batch_norm_backward": _channels,
    "embedding": _embedding,
    "embedding_dense_backward": _embedding_backward,
    **dict.fromkeys(("nll_loss_forward", "nll_loss2d_forward"), _likelihood),
    **dict.fromkeys(("nll_loss_backward", "nll_loss2d_backward"), _likelihood_backward),
    **dict.fromkeys(("gather", "scatter_add", "scatter_reduce"), _by_index),
    "setitem": _setitem,
}
"""Rule of each operator of layers of neural networks that has a tiled form."""

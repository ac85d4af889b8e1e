"""Embeddings and the negative log likelihood: rows and elements by index, and their gradients, as ATen has them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from goblin_dask.errors import InputError
from goblin_dask.graphs.operators import samples
from goblin_dask.graphs.operators.base import (
    Array,
    Example,
    Operator,
    Specs,
    added_in,
    check_count,
    like,
    require_integers,
)
from goblin_dask.graphs.operators.dtypes import DTYPES
from goblin_dask.graphs.operators.neural import (
    NEURAL,
    narrowed,
    require_count,
    require_floating,
    require_shape,
    wide_bytes,
    widened,
)
from goblin_dask.graphs.operators.rules import Bool, Int
from goblin_dask.graphs.operators.scattering import KINDS, copies_of_index, within
from goblin_dask.messages import ArraySpec

_IGNORE = -100


# --- embeddings -------------------------------------------------------------------------------------------------
def _infer_embedding(specs: Specs, a: Any) -> Specs:
    check_count("the weight's shape", len(specs[0].shape), 2)
    require_integers(specs[1])
    if specs[0].shape[0] == 0 and 0 not in specs[1].shape:
        raise InputError("the weight is empty: there is nothing to choose")
    return like(specs[0], (*specs[1].shape, specs[0].shape[1]))


def _embedding(xp: Any, operands: tuple[Array, ...], a: Any) -> tuple[Array, ...]:
    return (xp.take(operands[0], within(operands[1], operands[0].shape[0], "indices"), axis=0),)


def _infer_embedding_backward(specs: Specs, a: Any) -> Specs:
    require_floating(specs[0])
    require_integers(specs[1])
    if specs[0].shape[:-1] != specs[1].shape or not specs[0].shape:
        raise InputError(f"a gradient of shape {specs[0].shape} is not one row for each of {specs[1].shape} indices")
    return like(specs[0], (a["num_weights"], specs[0].shape[-1]))


def sums_of_runs(xp: Any, rows: Array, places: Array, size: int) -> Array:
    """Sums of those rows that go to each of `size` places; `places` ascends."""
    result = xp.zeros((size, *rows.shape[1:]), rows.dtype)
    if places.size and rows.size:
        starts = xp.flatnonzero(xp.concatenate([xp.ones(1, bool), places[1:] != places[:-1]]))
        result[places[starts]] = xp.add.reduceat(rows, starts, axis=0)
    return result


def _embedding_backward(xp: Any, operands: tuple[Array, ...], a: Any) -> tuple[Array, ...]:
    (grad,), size = widened(operands[0]), a["num_weights"]
    index = within(operands[1], size, "indices").reshape(-1)
    order = xp.argsort(index, stable=True)
    places, rows = index[order], grad.reshape(index.size, grad.shape[-1])
    keep = places != a["padding_idx"]
    order, places = order[keep], places[keep]
    result = sums_of_runs(xp, rows[order], places, size)
    if a["scale_grad_by_freq"]:
        counts = xp.bincount(places, minlength=size)
        result /= xp.maximum(counts, 1)[:, None].astype(result.dtype)
    return (narrowed(result, operands[0].dtype),)


def _workspace_embedding_backward(specs: Specs, outputs: Specs, a: Any) -> int:
    index = math.prod(specs[1].shape)
    return 3 * wide_bytes(specs[0]) + 2 * wide_bytes(outputs[0]) + 8 * (8 * index + 4 * int(a["num_weights"]))


# --- negative log likelihood ------------------------------------------------------------------------------------
def _require_likelihood(specs: Specs, planes: bool, at: int = 0) -> None:
    """Log-probabilities (images, classes, rows, columns) or ([images,] classes), targets, perhaps weights."""
    x, target, *weight = specs[at:]
    require_floating(x)
    require_integers(target, "a target")
    if len(x.shape) not in ((4,) if planes else (1, 2)):
        expected = "(images, classes, rows, columns)" if planes else "([images,] classes)"
        raise InputError(f"the log-probabilities have shape {x.shape}, expected {expected}")
    axis = min(1, len(x.shape) - 1)
    require_shape(target, (*x.shape[:axis], *x.shape[axis + 1 :]), "the target")
    for spec in weight[:1]:
        require_shape(spec, (x.shape[axis],), "the weight")
        require_floating(x, spec)


def _infer_nll(planes: bool) -> Callable[[Specs, Any], Specs]:
    def infer(specs: Specs, a: Any) -> Specs:
        require_count(specs, 2, 3)
        _require_likelihood(specs, planes)
        loss = specs[1].shape if a["reduction"] == 0 else ()
        return ArraySpec(loss, specs[0].dtype), ArraySpec((), specs[0].dtype)

    return infer


def _infer_nll_backward(planes: bool) -> Callable[[Specs, Any], Specs]:
    def infer(specs: Specs, a: Any) -> Specs:
        require_count(specs, 4, 5)
        _require_likelihood(specs[:-1], planes, at=1)
        require_floating(*specs[:2], specs[-1])
        require_shape(specs[0], specs[2].shape if a["reduction"] == 0 else (), "the gradient")
        require_shape(specs[-1], (), "the total weight")
        return (specs[1],)

    return infer


def _weights(xp: Any, x: Array, target: Array, weight: Array | None, a: Any) -> tuple[Array, Array, int]:
    """Weight of each target, zero of those that are ignored; the class to look at; the axis of the classes."""
    axis = min(1, x.ndim - 1)
    ignored = target == a["ignore_index"]
    label = within(xp.where(ignored, 0, target), x.shape[axis] or 1, "targets")
    if weight is not None and x.shape[axis]:
        each = xp.where(ignored, weight.dtype.type(0), weight[label])
    else:
        each = xp.where(ignored, x.dtype.type(0), x.dtype.type(1))
    return xp.asarray(each), xp.asarray(label), axis


def _nll(xp: Any, operands: tuple[Array, ...], a: Any) -> tuple[Array, ...]:
    x, target, *weight = widened(*operands)
    dtype = operands[0].dtype
    each, label, axis = _weights(xp, x, target, weight[0] if weight else None, a)
    chosen = xp.take_along_axis(x, xp.expand_dims(label, axis), axis=axis).squeeze(axis)
    loss = xp.where(target == a["ignore_index"], x.dtype.type(0), -chosen * each)
    if a["reduction"] == 0 and x.ndim > 1:
        return narrowed(xp.asarray(loss), dtype), xp.zeros((), dtype)
    total, weights = xp.asarray(loss.sum()), xp.asarray(each.sum())
    if a["reduction"] == 1:
        total = xp.asarray(total / weights)
    return narrowed(total, dtype), narrowed(weights, dtype)


def _nll_backward(xp: Any, operands: tuple[Array, ...], a: Any) -> tuple[Array, ...]:
    grad, x, target, *weight, total = widened(*operands)
    each, label, axis = _weights(xp, x, target, weight[0] if weight else None, a)
    scaled = -grad * each
    if a["reduction"] == 1:
        scaled = scaled / total
    scaled = xp.where(target == a["ignore_index"], x.dtype.type(0), scaled)
    result = xp.zeros(x.shape, operands[1].dtype)
    place, value = xp.expand_dims(label, axis), xp.expand_dims(scaled.astype(result.dtype), axis)
    xp.put_along_axis(result, place, value, axis)
    return (result,)


def _workspace_nll(specs: Specs, outputs: Specs, a: Any) -> int:
    target = max(math.prod(spec.shape) for spec in specs if DTYPES[spec.dtype].kind in "iu")
    return sum(map(wide_bytes, specs)) + 64 * target + 16 * sum(sum(spec.shape) for spec in specs)


def _examples_embedding() -> Iterator[Example]:
    for dtype in samples.FLOATS:
        weight = samples.sample((4, 3), dtype)
        for index in (np.asarray([[1, 0, 3]]), np.asarray(2), np.zeros((0, 2), "int32")):
            yield (weight, index), {}
            yield (samples.strided(weight), samples.strided(index)), {}


def _examples_embedding_backward() -> Iterator[Example]:
    for (weight, index), _ in _examples_embedding():
        grad = samples.sample((*index.shape, 3), weight.dtype.name, 3, special=False)
        for more in ({}, {"padding_idx": 1}, {"scale_grad_by_freq": True}):
            yield (grad, index), {"num_weights": 5, **more}
    many = np.asarray([0, 2, 2, 2, 0])
    yield (samples.sample((5, 2), "float32", special=False), many), {"num_weights": 3, "scale_grad_by_freq": True}
    yield (samples.sample((5, 2), "float32", special=False), many), {"num_weights": 3, "padding_idx": 0}


def _examples_nll(planes: bool) -> Callable[[], Iterator[Example]]:
    def examples() -> Iterator[Example]:
        shapes = ((2, 3, 2, 2), (0, 3, 1, 2)) if planes else ((5, 3), (3,), (1, 1), (0, 2))
        for dtype in samples.FLOATS:
            for shape in shapes:
                x = samples.sample(shape, dtype, special=False)
                axis = min(1, len(shape) - 1)
                rest = (*shape[:axis], *shape[axis + 1 :])
                target = np.random.default_rng(len(shape)).integers(0, shape[axis], rest)
                weight = np.abs(samples.sample(shape[axis : axis + 1], dtype, 3, special=False))
                for reduction in (0, 1, 2):
                    for ignore in (_IGNORE, 1):
                        attributes = {"reduction": reduction, "ignore_index": ignore}
                        yield (x, np.asarray(target)), attributes
                        yield (samples.strided(x), np.asarray(target), weight), attributes

    return examples


def _examples_nll_backward(planes: bool) -> Callable[[], Iterator[Example]]:
    def examples() -> Iterator[Example]:
        for operands, attributes in _examples_nll(planes)():
            with np.errstate(all="ignore"):
                loss, total = _nll(np, operands, attributes)
            grad = samples.sample(loss.shape, loss.dtype.name, 8, special=False)
            yield (grad, *operands, total), attributes

    return examples


_NLL = {"reduction": Int(1, low=0, high=2), "ignore_index": Int(_IGNORE)}


OPERATORS: tuple[Operator, ...] = added_in(
    2,
    Operator(
        "embedding",
        "Rows of a matrix by index.",
        KINDS,
        _infer_embedding,
        _embedding,
        _examples_embedding,
        arity=2,
        workspace=copies_of_index,
        contiguous=True,
        copies_strided=True,
    ),
    Operator(
        "embedding_dense_backward",
        "Sums of the rows of a gradient that belong to each row of an embedding.",
        NEURAL,
        _infer_embedding_backward,
        _embedding_backward,
        _examples_embedding_backward,
        arity=2,
        attributes={
            "num_weights": Int(low=0, high=2**48),
            "padding_idx": Int(-1),
            "scale_grad_by_freq": Bool(False),
        },
        flops=lambda specs, outputs, a: float(math.prod(specs[0].shape) + math.prod(outputs[0].shape)),
        workspace=_workspace_embedding_backward,
        contiguous=True,
        copies_strided=True,
    ),
    *(
        operator
        for name, planes in (("nll_loss", False), ("nll_loss2d", True))
        for operator in (
            Operator(
                f"{name}_forward",
                "Negative log likelihood of targets; the total weight of those that are not ignored.",
                NEURAL,
                _infer_nll(planes),
                _nll,
                _examples_nll(planes),
                arity=None,
                least=2,
                outputs=2,
                attributes=_NLL,
                workspace=_workspace_nll,
                contiguous=True,
            ),
            Operator(
                f"{name}_backward",
                "Gradient of the negative log likelihood: of gradient, log-probabilities, targets[, weight], total.",
                NEURAL,
                _infer_nll_backward(planes),
                _nll_backward,
                _examples_nll_backward(planes),
                arity=None,
                least=4,
                attributes=_NLL,
                workspace=_workspace_nll,
                contiguous=True,
            ),
        )
    ),
)

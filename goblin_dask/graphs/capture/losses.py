"""A loss over a micro-batch as (sum, count): means of parts do not average, sums and counts add up.

Needs PyTorch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from goblin_dask.errors import InputError

_BY_CLASS: dict[Any, Any] = {F.cross_entropy: nn.CrossEntropyLoss, F.nll_loss: nn.NLLLoss}
_BY_ELEMENT: dict[Any, Any] = {
    F.mse_loss: nn.MSELoss,
    F.l1_loss: nn.L1Loss,
    F.smooth_l1_loss: nn.SmoothL1Loss,
    F.huber_loss: nn.HuberLoss,
    F.binary_cross_entropy: nn.BCELoss,
    F.binary_cross_entropy_with_logits: nn.BCEWithLogitsLoss,
}
_OPTIONS = {
    F.cross_entropy: ("weight", "ignore_index", "label_smoothing"),
    F.nll_loss: ("weight", "ignore_index"),
    F.smooth_l1_loss: ("beta",),
    F.huber_loss: ("delta",),
    F.binary_cross_entropy: ("weight",),
    F.binary_cross_entropy_with_logits: ("weight", "pos_weight"),
}
"""Of each loss, what may be given with `functools.partial`, or is an attribute of its module."""
IGNORED = -100
"""PyTorch's `ignore_index`, where none is given."""


class Summed(nn.Module):
    """A loss that returns (sum, count), of which the mean over any number of micro-batches is made.

    Parameters
    ----------
    loss : callable
        One of `torch.nn.functional`, its module, or a `functools.partial` of it: ``cross_entropy`` and ``nll_loss``
        count the weights of the targets that are not ignored; ``mse_loss``, ``l1_loss``, ``smooth_l1_loss``,
        ``huber_loss``, ``binary_cross_entropy`` and ``binary_cross_entropy_with_logits`` count elements. Any other
        function of the model's result and the target may return (sum, count), or a scalar, which is taken for a mean
        over the rows of the batch, with the number of rows as its count.

    Raises
    ------
    InputError
        For a reduction other than the mean, and options that no sum and count can be given for.
    """

    def __init__(self, loss: Callable[..., Any]):
        super().__init__()
        self._function, options = _taken_apart(loss)
        self._numbers: dict[str, Any] = {}
        for name, value in options.items():
            if isinstance(value, torch.Tensor):
                self.register_buffer(name, value.detach())
            else:
                self._numbers[name] = value
        self.of: Callable[..., Any] | None = loss if self._function is None else None
        """The loss itself, where it is none of the known ones."""

    def forward(self, output: Any, target: Any) -> tuple[torch.Tensor, torch.Tensor]:
        options = {**self._numbers, **dict(self.named_buffers(recurse=False))}
        if self._function is None:
            assert self.of is not None
            return _of_any(self.of(output, target), target)
        total = self._function(output, target, reduction="sum", **options)
        if self._function in _BY_ELEMENT:
            return total, _number(np.prod(np.broadcast_shapes(output.shape, target.shape), dtype=int), total)
        return total, _counted(output, target, options).to(total.dtype)


def _taken_apart(loss: Any) -> tuple[Callable[..., Any] | None, dict[str, Any]]:
    """The function of `torch.nn.functional` and its options; no function for a loss that is none of the known ones."""
    given: dict[str, Any] = {}
    while isinstance(loss, functools.partial):
        if loss.args:
            raise InputError("give the options of the loss by name: functools.partial with positional arguments")
        given = {**loss.keywords, **given}
        loss = loss.func
    known = {**_BY_CLASS, **_BY_ELEMENT}
    if isinstance(loss, nn.Module):
        function = next((function for function, kind in known.items() if type(loss) is kind), None)
        if function is not None:
            given = {name: getattr(loss, name) for name in (*_OPTIONS.get(function, ()), "reduction")}
    else:
        function = loss if loss in known else None
    if function is None:
        return None, {}
    if given.pop("reduction", "mean") != "mean":
        raise InputError(
            f"the loss of a round is a mean: {function.__name__} with another reduction gives none; "
            "a loss of your own may return (sum, count)"
        )
    return function, _known_options(function, given)


def _known_options(function: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    unknown = [name for name in given if name not in _OPTIONS.get(function, ())]
    if unknown:
        raise InputError(
            f"{function.__name__} with {unknown[0]}= has no count here: a loss of your own may return (sum, count)"
        )
    return {name: value for name, value in given.items() if value is not None}


def _counted(output: torch.Tensor, target: torch.Tensor, options: Mapping[str, Any]) -> torch.Tensor:
    """The sum of the weights of the targets that count; PyTorch's means divide by it."""
    if target.is_floating_point():  # probabilities of classes: weights are part of the sum alone
        return _number(output.numel() // output.shape[1 if output.ndim > 1 else 0], output)
    counts: torch.Tensor = target != options.get("ignore_index", IGNORED)
    weight: torch.Tensor | None = options.get("weight")
    if weight is None:
        return counts.sum()
    weights: torch.Tensor = weight[torch.where(counts, target, 0)]
    return (weights * counts).sum()


def _of_any(found: Any, target: Any) -> tuple[torch.Tensor, torch.Tensor]:
    if isinstance(found, (tuple, list)):
        if len(found) != 2 or not isinstance(found[0], torch.Tensor):
            raise InputError("a loss returns a scalar tensor, or a pair of sum and count")
        total, count = found
        total = _scalar(total)
        count = count.detach().to(total.dtype) if isinstance(count, torch.Tensor) else _number(count, total)
        return total, count
    found = _scalar(found)
    leaf = next((each for each in torch.utils._pytree.tree_leaves(target) if isinstance(each, torch.Tensor)), None)
    if leaf is None or not leaf.ndim:
        raise InputError("the target has no rows to count: let the loss return (sum, count)")
    return found * leaf.shape[0], _number(leaf.shape[0], found)


def _scalar(value: Any) -> torch.Tensor:
    if not isinstance(value, torch.Tensor) or value.numel() != 1:
        what = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
        raise InputError(f"a loss returns a scalar, or a pair of sum and count, not {what}")
    return value.reshape(()) if value.is_floating_point() else value.reshape(()).float()


def _number(value: Any, like: torch.Tensor) -> torch.Tensor:
    return torch.full((), float(value), dtype=like.dtype)

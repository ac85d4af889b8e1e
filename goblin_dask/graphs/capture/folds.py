"""Buffers that micro-batches change side by side, each from the state before the round: which can be put together.

A running average of a batch norm is linear in what it was, and a counter adds a constant. Both are taken out of the
program: it returns what its micro-batch contributes, and `Fold` puts contributions together in their order, which gives
what one batch after the other would have given.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from goblin_dask.graphs.capture.aten.base import Call, Ref

BATCH_NORM = "aten._native_batch_norm_legit_functional.default"
BATCH_NORM_BACKWARD = "aten.native_batch_norm_backward.default"


@dataclass(frozen=True)
class Fold:
    """How a buffer takes up a micro-batch: ``buffer ← keep · buffer + contribution``."""

    keep: float
    """For a batch norm 1 - momentum, to the power of the times that it is applied."""

    def __call__(self, buffer: np.ndarray[Any, Any], contribution: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """The buffer afterwards, in its dtype."""
        kept = buffer if self.keep == 1 else buffer * buffer.dtype.type(self.keep)
        return np.asarray(kept + contribution, buffer.dtype)


def taken_out(
    calls: Sequence[Call],
    buffers: Mapping[str, str],
    state: Mapping[str, Ref],
    arrays: Mapping[str, np.ndarray[Any, Any]],
) -> tuple[list[Call], dict[str, Fold]]:
    """The calls with zeros in the place of buffers that are folded, and the folds.

    Parameters
    ----------
    calls : sequence of Call
    buffers : mapping of str to str
        Of each array that the graph reads, by the name of the value: the name of the array.
    state : mapping
        What each changed buffer becomes.
    arrays : mapping
        Parameters and buffers, for shapes and dtypes.
    """
    by_name = {call.name: call for call in calls}
    users: dict[str, list[Call]] = defaultdict(list)
    for call in calls:
        for name in refs_of((call.args, call.kwargs)):
            users[name].append(call)
    made: dict[str, str] = {}
    folds = {}
    for name, ref in state.items():
        found = _chain(ref.name, by_name, users, {v for v, array in buffers.items() if array == name})
        # The last value of the chain becomes the state, and nothing else reads it; so it is with each before it.
        if found is not None:
            start, keep = found
            folds[name] = Fold(keep)
            made[start] = f"{start}_zeros"
    zeros = []
    for value, zero in made.items():
        array = arrays[buffers[value]]
        zeros.append(Call(zero, "aten.full.default", (array.shape, 0), {}, (array.dtype.name,)))
    return [*zeros, *(_with(call, made) for call in calls)], folds


def refs_of(value: Any) -> Iterator[str]:
    """Names of the values that arguments refer to."""
    if isinstance(value, Ref):
        yield value.name
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from refs_of(each)
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from refs_of(each)


def _chain(
    name: str, calls: Mapping[str, Call], users: Mapping[str, list[Call]], starts: set[str]
) -> tuple[str, float] | None:
    """From what a buffer becomes back to the buffer: its value's name, and the factor that is left of it."""
    keep, after = 1.0, None
    while True:
        if any(user is not after and not _does_not_read(user, name) for user in users[name]):
            return None
        if name in starts:
            return (name, keep) if after is not None else None
        call = calls.get(name)
        if call is None:
            return None
        if call.target == "operator.getitem" and call.args[1] in (3, 4):
            norm = calls[call.args[0].name]
            if norm.target != BATCH_NORM or norm.args[5] is not True:
                return None
            keep *= 1.0 - norm.args[6]
            name, after = norm.args[call.args[1]].name, norm
        elif call.target in ("aten.add.Tensor", "aten.add.Scalar") and not isinstance(call.args[1], Ref):
            if not isinstance(call.args[0], Ref) or call.kwargs:
                return None
            name, after = call.args[0].name, call
        else:
            return None


def _does_not_read(user: Call, name: str) -> bool:
    """The gradient of a batch norm that is training is told the running statistics, and has its own."""
    return user.target == BATCH_NORM_BACKWARD and user.args[7] is True and name not in refs_of(user.args[:3])


def _with(call: Call, names: Mapping[str, str]) -> Call:
    if not any(name in names for name in refs_of((call.args, call.kwargs))):
        return call

    def renamed(value: Any) -> Any:
        if isinstance(value, Ref):
            return Ref(names.get(value.name, value.name))
        if isinstance(value, (tuple, list)):
            return type(value)(renamed(each) for each in value)
        return value

    return dataclasses.replace(call, args=renamed(call.args), kwargs={k: renamed(v) for k, v in call.kwargs.items()})

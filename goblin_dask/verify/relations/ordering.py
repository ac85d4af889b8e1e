"""Orders: that the claimed order is one, and that its elements are those of the operand.

Among equal elements an unstable sort may choose, so another library's indices are other ones and as right; a partition
may have any order on either side. Only for operands that are exact: where they are uncertain, so is their order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from goblin_dask.graphs.operators.base import Attributes
from goblin_dask.verify.bounds import Bounded
from goblin_dask.verify.operands import Array
from goblin_dask.verify.product import Finding
from goblin_dask.verify.relations.base import Relation, Residuals

MULTISET_MISS = 2.0**-60
"""Bound of the probability that two different multisets have the same sum of random hashes: 1/2^64, twice, and the
hash's own bias."""


def _last(array: Array, axis: Any) -> Array:
    return np.moveaxis(array, axis, -1)


def _known(operand: Bounded) -> Array | None:
    """The operand in its own dtype, if it is exact; the run in double precision keeps every order."""
    return operand.fine if operand.exact else None


def _ascend(array: Array) -> bool:
    """Whether each element of the last axis is at least the one before it, NaN being larger than all."""
    a, b = array[..., :-1], array[..., 1:]
    ordered = a <= b
    if array.dtype.kind in "fc":
        ordered |= np.isnan(b)
        if array.dtype.kind == "c":  # lexicographic; where a part is NaN, NumPy has an order of its own: by its sort
            return bool(np.array_equal(np.sort(array, axis=-1), array, equal_nan=True))
    return bool(ordered.all())


def _hashes(array: Array, key: Any) -> Array:
    """64 bits of each element under a random key (splitmix64's mixing); equal numbers have equal bits."""
    if array.dtype.kind == "c":
        return _hashes(array.real, key) * np.uint64(0x9E3779B97F4A7C15) + _hashes(array.imag, key + np.uint64(1))
    if array.dtype.kind == "f":
        array = np.where(np.isnan(array), np.nan, array + 0.0).astype(np.float64)  # one zero, one NaN
    words = {"i": np.int64, "f": np.float64}.get(array.dtype.kind, np.uint64)
    bits = np.ascontiguousarray(array).astype(words).view(np.uint64)
    x = (bits ^ key) + np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
    return np.asarray(x ^ (x >> np.uint64(31)))


def _same_elements(a: Array, b: Array, rng: Any) -> bool:
    """Whether the last axes hold the same multisets."""
    key = np.uint64(rng.integers(0, 2**64, dtype=np.uint64))
    with np.errstate(over="ignore"):
        return bool((_hashes(a, key).sum(axis=-1) == _hashes(b, key).sum(axis=-1)).all())


def _are_permutations(indices: Array) -> bool:
    """Whether the last axes hold each index once."""
    length = indices.shape[-1]
    if ((indices < 0) | (indices >= length)).any():
        return False
    seen = np.zeros(indices.shape, bool)
    np.put_along_axis(seen, indices, True, axis=-1)
    return bool(seen.all())


def _ties_in_order(values: Array, indices: Array) -> bool:
    """Whether indices ascend among equal neighbours."""
    a, b = values[..., :-1], values[..., 1:]
    equal = a == b
    if values.dtype.kind in "fc":
        equal |= np.isnan(a) & np.isnan(b)
    return bool((~equal | (indices[..., :-1] < indices[..., 1:])).all())


def _split(values: Array, kth: Any) -> bool:
    """Whether each element number ``kth`` stands where sorting puts it."""
    filled = values
    if values.dtype.kind == "f":  # NaN is the largest; infinities stay below it
        numbers = np.where(np.isnan(values), np.inf, values)
        filled = numbers
    elif values.dtype.kind == "c":
        return False
    length = values.shape[-1]
    for k in kth:
        k = k % length
        pivot = filled[..., k : k + 1]
        if not ((filled[..., :k] <= pivot).all() and (pivot <= filled[..., k + 1 :]).all()):
            return False
        if values.dtype.kind == "f":
            missing = np.isnan(values)
            if (missing[..., :k] & ~missing[..., k : k + 1]).any() or (
                missing[..., k : k + 1] & ~missing[..., k + 1 :]
            ).any():
                return False
    return True


def _sort(attributes: Attributes, operands: Sequence[Bounded], outputs: Sequence[Array], rng: Any) -> Finding | None:
    array = _known(operands[0])
    if array is None:
        return None
    array, given = _last(array, attributes["axis"]), _last(outputs[0], attributes["axis"])
    residuals = Residuals(MULTISET_MISS)
    residuals.require(_ascend(given), "elements do not ascend")
    residuals.require(_same_elements(array, given, rng), "the elements are not those of the operand")
    return residuals.finding


def _argsort(attributes: Attributes, operands: Sequence[Bounded], outputs: Sequence[Array], rng: Any) -> Finding | None:
    array = _known(operands[0])
    if array is None:
        return None
    array, indices = _last(array, attributes["axis"]), _last(outputs[0], attributes["axis"])
    residuals = Residuals(0.0)
    residuals.require(_are_permutations(indices), "the indices are no permutation")
    if residuals.finding.verdict == "accepted":
        values = np.take_along_axis(array, indices, -1)
        residuals.require(_ascend(values), "the indices do not sort the operand")
        if attributes["stable"]:
            residuals.require(_ties_in_order(values, indices), "equal elements changed places")
    return residuals.finding


def _partition(
    attributes: Attributes, operands: Sequence[Bounded], outputs: Sequence[Array], rng: Any
) -> Finding | None:
    array = _known(operands[0])
    if array is None or array.dtype.kind == "c":
        return None
    array, given = _last(array, attributes["axis"]), _last(outputs[0], attributes["axis"])
    residuals = Residuals(MULTISET_MISS)
    if array.size:
        residuals.require(_split(given, attributes["kth"]), "the elements are not partitioned")
        residuals.require(_same_elements(array, given, rng), "the elements are not those of the operand")
    return residuals.finding


def _argpartition(
    attributes: Attributes, operands: Sequence[Bounded], outputs: Sequence[Array], rng: Any
) -> Finding | None:
    array = _known(operands[0])
    if array is None or array.dtype.kind == "c":
        return None
    array, indices = _last(array, attributes["axis"]), _last(outputs[0], attributes["axis"])
    residuals = Residuals(0.0)
    residuals.require(_are_permutations(indices), "the indices are no permutation")
    if array.size and residuals.finding.verdict == "accepted":
        values = np.take_along_axis(array, indices, -1)
        residuals.require(_split(values, attributes["kth"]), "the indices do not partition the operand")
    return residuals.finding


ORDERS: dict[str, Relation] = {
    "sort": Relation("order", _sort, passes=8.0, miss=MULTISET_MISS),
    "argsort": Relation("order", _argsort, passes=8.0, miss=0.0),
    "partition": Relation("order", _partition, passes=8.0, miss=MULTISET_MISS),
    "argpartition": Relation("order", _argpartition, passes=8.0, miss=0.0),
}

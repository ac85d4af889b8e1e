"""Rules of attributes: what each may be, how what a user writes becomes the one canonical form of it."""

from __future__ import annotations

import math
import operator
import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from goblin_dask.errors import InputError
from goblin_dask.graphs.operators.dtypes import named
from goblin_dask.messages import ArraySpec

Attribute = None | bool | int | float | str | tuple[int, ...]
"""Value of an attribute in a `Node`."""

Specs = tuple[ArraySpec, ...]


class _Required:
    """Type of `REQUIRED`: the default of an attribute without one."""


REQUIRED = _Required()
LARGEST = 2**62
"""Bound of every integer attribute: products of a few still are far from where msgpack ends."""
ENTRIES = 65_536
"""Most entries of a tuple."""


def identical(a: object, b: object) -> bool:
    """Equality that tells 1 from True from 1.0 and 0.0 from -0.0, and finds NaN equal to itself."""
    if type(a) is not type(b):
        return False
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(identical, a, b))
    return repr(a) == repr(b) if isinstance(a, float) else a == b


@dataclass(frozen=True)
class Rule:
    """Base. A value is canonical when `convert` returns it unchanged."""

    default: Any = REQUIRED
    exact = True
    """Whether equal values are interchangeable, and short."""

    def convert(self, value: Any, specs: Specs) -> Attribute:
        """Canonical form of `value`, for operands `specs`; raises where it has none."""
        raise NotImplementedError

    def is_default(self, value: Attribute, specs: Specs) -> bool:
        """Whether a canonical value says what leaving it out says."""
        return identical(value, self.default)


@dataclass(frozen=True)
class Bool(Rule):
    """True or False."""

    def convert(self, value: Any, specs: Specs) -> Attribute:
        if not isinstance(value, (bool, np.bool_)) and value not in (0, 1):
            raise InputError("expected True or False")
        return bool(value)


@dataclass(frozen=True)
class Int(Rule):
    """An integer within bounds."""

    low: int = -LARGEST
    high: int = LARGEST
    optional: bool = False

    def convert(self, value: Any, specs: Specs) -> Attribute:
        if value is None and self.optional:
            return None
        return _bounded(value, self.low, self.high)


@dataclass(frozen=True)
class Number(Rule):
    """An integer or a float."""

    optional: bool = False
    exact = False

    def convert(self, value: Any, specs: Specs) -> Attribute:
        if value is None and self.optional:
            return None
        if isinstance(value, (float, np.floating)):
            return float(value)
        return _bounded(value, -LARGEST, LARGEST)


@dataclass(frozen=True)
class Axis(Rule):
    """An axis of operand `operand` (with `extra` axes more); canonical: not negative."""

    operand: int = 0
    extra: int = 0
    optional: bool = False

    def convert(self, value: Any, specs: Specs) -> Attribute:
        if value is None and self.optional:
            return None
        return _axis(value, _rank(specs, self.operand) + self.extra)


@dataclass(frozen=True)
class Axes(Rule):
    """Several axes of operand `operand`; None: all of them. Canonical: not negative, ascending unless `ordered`."""

    operand: int = 0
    ordered: bool = False
    grows: bool = False
    """Axes of the output, which has as many more as are named here."""

    def convert(self, value: Any, specs: Specs) -> Attribute:
        rank = _rank(specs, self.operand)
        if value is None:
            return tuple(range(rank))
        items = tuple(value) if isinstance(value, (tuple, list)) else (value,)
        if len(items) > 64:
            raise InputError("more than 64 axes")
        if self.grows:
            rank += len(items)
        axes = tuple(_axis(item, rank) for item in items)
        if len(set(axes)) != len(axes):
            raise InputError("an axis is named twice")
        return axes if self.ordered else tuple(sorted(axes))

    def is_default(self, value: Attribute, specs: Specs) -> bool:
        return self.default is None and identical(value, self.convert(None, specs))


@dataclass(frozen=True)
class Ints(Rule):
    """Integers within bounds; a single one is taken for a tuple of one."""

    low: int = -LARGEST
    high: int = LARGEST

    def convert(self, value: Any, specs: Specs) -> Attribute:
        items = tuple(value) if isinstance(value, (tuple, list, np.ndarray)) else (value,)
        if len(items) > ENTRIES:
            raise InputError(f"{len(items)} entries, at most {ENTRIES} are allowed")
        return tuple(_bounded(item, self.low, self.high) for item in items)


def Shape(default: Any = REQUIRED) -> Ints:
    """Sizes of axes."""
    return Ints(default=default, low=0)


@dataclass(frozen=True)
class DType(Rule):
    """A dtype's name, as in `ArraySpec`."""

    optional: bool = False

    def convert(self, value: Any, specs: Specs) -> Attribute:
        if value is None and self.optional:
            return None
        return named(value)


@dataclass(frozen=True)
class Choice(Rule):
    """One of some words."""

    options: tuple[Any, ...] = ()

    def convert(self, value: Any, specs: Specs) -> Attribute:
        for option in self.options:
            if value is option or (type(value) is type(option) and value == option):
                return option  # type: ignore[no-any-return]
        raise InputError(f"expected one of {', '.join(map(repr, self.options))}")


@dataclass(frozen=True)
class Text(Rule):
    """Text of limited length that matches a pattern whole."""

    pattern: str = ".*"
    limit: int = 1000
    optional: bool = False
    exact = False

    def convert(self, value: Any, specs: Specs) -> Attribute:
        if value is None and self.optional:
            return None
        if not isinstance(value, str) or len(value) > self.limit or not re.fullmatch(self.pattern, value):
            raise InputError(f"expected text of at most {self.limit} characters like {self.pattern}")
        return value


@dataclass(frozen=True)
class Order(Rule):
    """Order of a norm: a number, None, ``fro`` or ``nuc``."""

    exact = False

    def convert(self, value: Any, specs: Specs) -> Attribute:
        if value is None or (isinstance(value, str) and value in ("fro", "nuc")):
            return value
        number = float(value)
        if math.isnan(number):
            raise InputError("not a number")
        return number


def _bounded(value: Any, low: int, high: int) -> int:
    number = operator.index(value)
    if not low <= number <= high:
        raise InputError(f"expected an integer from {low} to {high}, got {number}")
    return int(number)


def _axis(value: Any, rank: int) -> int:
    axis = operator.index(value)
    if not -rank <= axis < rank:
        raise InputError(f"axis {axis} of an array with {rank} axes")
    return int(axis) % rank


def _rank(specs: Specs, operand: int) -> int:
    if not -len(specs) <= operand < len(specs):
        raise InputError(f"there is no operand {operand} with axes")
    return len(specs[operand].shape)

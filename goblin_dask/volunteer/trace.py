"""What an attempt's nodes made, as digests: a volunteer commits to all of it by the root of a hash tree."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from goblin_dask.digest import Digest, digest
from goblin_dask.graphs.backends.base import Backend
from goblin_dask.store.buffers import buffer_of

REMEMBERED = 1 << 18
"""Digests that are kept, of all attempts: some 25 MB."""


class Trace:
    """Observer of `goblin_dask.graphs.execute.execute` that takes the digest of every value.

    Parameters
    ----------
    backend : Backend
        Whose arrays the values are.
    """

    def __init__(self, backend: Backend):
        self._backend = backend
        self.leaves: list[Digest] = []

    def __call__(self, number: int, values: tuple[Any, ...]) -> None:
        """A node has made its values."""
        self.leaves += [digest(buffer_of(self._backend.to_host(value))) for value in values]


class Traces:
    """Digests of the attempts that were traced last, for when they are asked for in a dispute."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, tuple[Digest, ...]] = OrderedDict()
        self._count = 0

    def keep(self, attempt: str, leaves: tuple[Digest, ...]) -> None:
        """Keep an attempt's, and forget the oldest where there are too many."""
        self._count += len(leaves) - len(self._kept.pop(attempt, ()))
        self._kept[attempt] = leaves
        while self._count > REMEMBERED:
            self._count -= len(self._kept.popitem(last=False)[1])

    def of(self, attempt: str) -> tuple[Digest, ...]:
        """An attempt's; none where it was forgotten."""
        return self._kept.get(attempt, ())

"""Digests of what a program's nodes make: in a dispute a volunteer commits to all of it."""

from __future__ import annotations

from typing import Any

from goblin_dask.digest import Digest, digest
from goblin_dask.graphs.backends.base import Backend
from goblin_dask.store.buffers import buffer_of


class Trace:
    """Observer of `goblin_dask.graphs.execute.execute` that takes the digest of every value.

    Parameters
    ----------
    backend : Backend
        Whose arrays the values are.
    """

    def __init__(self, backend: Backend):
        self._backend = backend
        self.digests: list[Digest] = []

    def __call__(self, number: int, values: tuple[Any, ...]) -> None:
        """A node has made its values."""
        self.digests += [digest(buffer_of(self._backend.to_host(value))) for value in values]

"""`Program`: a small typed DAG of catalogue operators, the only thing that a volunteer runs."""

from __future__ import annotations

import msgspec

from goblin_dask.digest import Digest
from goblin_dask.messages import ArraySpec

Attribute = None | bool | int | float | str | bytes | tuple["Attribute", ...]


class Node(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """One application of an operator."""

    operator: str
    """Its name in the catalogue."""
    operands: tuple[int, ...]
    """Values it reads; each is an input or comes from an earlier node."""
    attributes: tuple[tuple[str, Attribute], ...] = ()
    """Sorted by name."""


class Program(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """A typed DAG. Values are numbered: first the inputs, then each node's outputs, node by node.

    One slot per input *occurrence* (``A @ A`` has two inputs), and nodes in the order of a depth-first traversal from
    the outputs: so equal calculations have equal bytes, and `digest` is an address.
    """

    inputs: tuple[ArraySpec, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[int, ...]

    @property
    def digest(self) -> Digest:
        """Address of the canonical encoding."""
        raise NotImplementedError

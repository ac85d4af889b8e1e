"""`Program`: a small typed DAG of catalogue operators, the only thing that a volunteer runs."""

from __future__ import annotations

import msgspec

from goblin_dask.digest import Digest, digest
from goblin_dask.errors import ProgramError
from goblin_dask.graphs.check import LIMITS, Limits, check
from goblin_dask.graphs.operators import CATALOGUE
from goblin_dask.graphs.operators.rules import Attribute
from goblin_dask.messages import ArraySpec


class Node(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """One application of an operator."""

    operator: str
    """Its name in the catalogue."""
    operands: tuple[int, ...]
    """Values it reads; each is an input or comes from an earlier node."""
    attributes: tuple[tuple[str, Attribute], ...] = ()
    """Sorted by name; those that equal their defaults are left out."""


class Program(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """A typed DAG. Values are numbered: first the inputs, then each node's outputs, node by node.

    `goblin_dask.graphs.builder.Builder.finish` makes it canonical: equal calculations have equal bytes, so `digest` is
    an address. Nodes stand in the order in which they are executed, inputs in the order in which they are first read
    (outputs that are inputs count as read at the end), one slot for each input that was declared. ``A @ A`` has one
    slot if its author declared one input, two if two.
    """

    inputs: tuple[ArraySpec, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[int, ...]

    @property
    def digest(self) -> Digest:
        """Address of the encoding. Computed at every call."""
        return digest(encode(self))

    @property
    def operators(self) -> frozenset[str]:
        """Names of the operators that it applies."""
        return frozenset(node.operator for node in self.nodes)

    @property
    def catalogue(self) -> int:
        """Version of the catalogue that it needs."""
        return max((CATALOGUE[name].since for name in self.operators), default=1)


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Program)


def encode(program: Program) -> bytes:
    """Bytes of a program: msgpack, the same on every machine."""
    return _encoder.encode(program)


def decode(data: bytes | memoryview, limits: Limits = LIMITS) -> Program:
    """Read a program that came from anywhere, and check it.

    Raises
    ------
    ProgramError
        When `data` is no program, or one that `check` refuses.
    """
    if len(data) > limits.encoded:
        raise ProgramError(f"a program of {len(data)} bytes; at most {limits.encoded} are accepted")
    try:
        program = _decoder.decode(data)
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        raise ProgramError(f"bytes that are not a program: {error}") from error
    check(program, limits)
    return program

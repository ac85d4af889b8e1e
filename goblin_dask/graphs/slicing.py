"""Slicing: parts of a program as programs of their own, and arrays that come together in one."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from goblin_dask.errors import ProgramError
from goblin_dask.graphs.builder import Builder
from goblin_dask.graphs.program import Program
from goblin_dask.graphs.schedule import schedule
from goblin_dask.messages import ArraySpec


@dataclass(frozen=True)
class Piece:
    """Part of a program, as a program of its own. Equal parts are equal programs, wherever they stand."""

    program: Program
    reads: tuple[int, ...]
    """Of each of its inputs: the number of the value in the whole program, whose inputs are its first values."""
    gives: tuple[int, ...]
    """Of each of its outputs: the number of the value in the whole program."""


def piece(program: Program, nodes: Iterable[int], gives: Sequence[int]) -> Piece:
    """Cut some nodes out of a program.

    Parameters
    ----------
    program : Program
    nodes : iterable of int
        Numbers of nodes. Values that they read and do not make are inputs; those that `gives` does not need are left
        out.
    gives : sequence of int
        Numbers of values that the nodes make: what is handed out.

    Raises
    ------
    ProgramError
        When the nodes do not make a value that is to be given.

    Examples
    --------
    >>> build = Builder()
    >>> x = build.input(ArraySpec((3,), "float32"))
    >>> program, _ = build.finish(build.add("negative", build.add("exp", [x])))
    >>> piece(program, [1], [2]).reads
    (1,)
    """
    plan = schedule(program)
    build = Builder()
    known: dict[int, int] = {}
    read: list[int] = []
    made: set[int] = set()
    for number in sorted(set(nodes)):
        step = plan.steps[number]
        for operand in step.operands:
            if operand not in known:
                known[operand] = build.input(plan.specs[operand])
                read.append(operand)
        results = build.add(
            step.operator.name, [known[o] for o in step.operands], **dict(program.nodes[number].attributes)
        )
        known.update(zip(step.outputs, results, strict=True))
        made.update(step.outputs)
    missing = [value for value in gives if value not in made]
    if missing:
        raise ProgramError(f"value {missing[0]} is to be given, and none of the nodes makes it")
    part, slots = build.finish([known[value] for value in gives])
    return Piece(part, tuple([read[slot] for slot in slots]), tuple(gives))


@dataclass(frozen=True)
class Packed:
    """A piece some of whose inputs are parts of vectors."""

    program: Program
    reads: tuple[int | tuple[int, ...], ...]
    """Of each of its inputs: the number of the value, or the numbers of those that lie in the vector, each flat in C
    order, one after another."""
    gives: tuple[int, ...]
    """As those of the piece."""


def vectors(specs: Sequence[ArraySpec], values: Iterable[int]) -> tuple[tuple[int, ...], ...]:
    """Which values lie together in a vector: those of one dtype, in the order in which they are given.

    Parameters
    ----------
    specs : sequence of ArraySpec
        By number of the value.
    values : iterable of int
    """
    groups: dict[str, list[int]] = {}
    for value in values:
        groups.setdefault(specs[value].dtype, []).append(value)
    return tuple(tuple(group) for group in groups.values())


def packed(part: Piece, groups: Sequence[Sequence[int]], specs: Sequence[ArraySpec]) -> Packed:
    """Let a piece read vectors in the place of many small arrays: what belongs together is one blob.

    Parameters
    ----------
    part : Piece
    groups : sequence of sequence of int
        Of each vector: the values that lie in it, of one dtype; see `vectors`. A vector may hold values that the piece
        does not read; one of which it reads nothing is none of its inputs.
    specs : sequence of ArraySpec
        By number of the value: of those in the groups at least.
    """
    build = Builder()
    values: dict[int, int] = {}
    wanted = set(part.reads)
    declared: list[int | tuple[int, ...]] = []
    for group in groups:
        if wanted.isdisjoint(group):
            continue
        sizes = [math.prod(specs[value].shape) for value in group]
        vector = build.input(ArraySpec((sum(sizes),), specs[group[0]].dtype))
        declared.append(tuple(group))
        ends = itertools.accumulate(sizes)
        for value, size, end in zip(group, sizes, ends, strict=True):
            if value in wanted:
                start = end - size if size else 0
                (flat,) = build.add("slice", [vector], start=(start,), length=(size,), step=(1,))
                (values[value],) = build.add("reshape", [flat], shape=specs[value].shape)
    for value, spec in zip(part.reads, part.program.inputs, strict=True):
        if value not in values:
            values[value] = build.input(spec)
            declared.append(value)
    inner = [values[value] for value in part.reads]
    for node in part.program.nodes:
        inner.extend(build.add(node.operator, [inner[o] for o in node.operands], **dict(node.attributes)))
    program, slots = build.finish([inner[output] for output in part.program.outputs])
    return Packed(program, tuple([declared[slot] for slot in slots]), part.gives)

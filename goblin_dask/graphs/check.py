"""`check`: the executable specification of programs, for all that comes over the wire and after every rewrite."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from goblin_dask.errors import InputError, ProgramError
from goblin_dask.graphs.operators import CATALOGUE
from goblin_dask.graphs.operators.base import nbytes, shorten
from goblin_dask.graphs.operators.dtypes import DTYPES
from goblin_dask.graphs.operators.rules import identical
from goblin_dask.messages import ArraySpec

if TYPE_CHECKING:
    from goblin_dask.graphs.program import Node, Program


@dataclass(frozen=True)
class Limits:
    """What is absurd. A program within them can still be too large for a volunteer: `goblin_dask.graphs.cost` tells."""

    encoded: int = 16 * 2**20
    """Bytes of an encoded program."""
    nodes: int = 20_000
    operands: int = 200_000
    """Of all nodes together; bounds inputs and outputs too."""
    rank: int = 64
    """Axes of an array; NumPy's own limit."""
    array: int = 2**44
    """Bytes of one array."""
    values: int = 2**48
    """Bytes of all values together."""
    flops: float = 1e19
    """Of all nodes together."""


LIMITS = Limits()


def specs(program: Program) -> tuple[ArraySpec, ...]:
    """Shape and dtype of every value of a program.

    Raises
    ------
    ProgramError
        Where the program does not check.
    """
    return _walk(program, LIMITS)


def check(program: Program, limits: Limits = LIMITS) -> None:
    """Refuse a program that is not one; in time and memory proportional to its encoding.

    Raises
    ------
    ProgramError
        Unknown operator, bad attribute, operand that no earlier node gives, shapes or dtypes that do not follow,
        absurd size. The message shows the node and what leads to it.
    """
    _walk(program, limits)


def _walk(program: Program, limits: Limits) -> tuple[ArraySpec, ...]:
    if len(program.nodes) > limits.nodes:
        raise ProgramError(f"a program of {len(program.nodes)} nodes; at most {limits.nodes} are accepted")
    operands = len(program.inputs) + len(program.outputs) + sum(len(node.operands) for node in program.nodes)
    if operands > limits.operands:
        raise ProgramError(f"a program of {operands} operands; at most {limits.operands} are accepted")
    if not program.outputs:
        raise ProgramError("a program without outputs computes nothing")
    values: list[ArraySpec] = []
    total = 0
    for i, spec in enumerate(program.inputs):
        total += _size(spec, f"input {i}", limits)
        values.append(spec)
    flops = 0.0
    for i, node in enumerate(program.nodes):
        try:
            flops += _node(node, values, limits)
        except InputError as error:
            raise ProgramError(f"{error}\n{neighbourhood(program, i)}") from error
        total += sum(map(nbytes, values[-1:]))
        if total > limits.values or flops > limits.flops:
            raise ProgramError(
                f"a program that moves {total:.3g} bytes in {flops:.3g} operations; "
                f"at most {limits.values:.3g} and {limits.flops:.3g} are accepted\n{neighbourhood(program, i)}"
            )
    for output in program.outputs:
        if not 0 <= output < len(values):
            raise ProgramError(f"output {output} is none of the {len(values)} values of the program")
    return tuple(values)


def _node(node: Node, values: list[ArraySpec], limits: Limits) -> float:
    """Append a node's outputs to `values`; its FLOPs."""
    operator = CATALOGUE.get(node.operator)
    if operator is None:
        raise ProgramError(f"unknown operator {shorten(node.operator)}")
    for operand in node.operands:
        if not 0 <= operand < len(values):
            raise ProgramError(f"{operator.name} reads value {operand}; only 0 to {len(values) - 1} come before it")
    read = tuple(values[operand] for operand in node.operands)
    names = [name for name, _ in node.attributes]
    if len(set(names)) != len(names):
        raise ProgramError(f"{operator.name}: an attribute is given twice")
    canonical = operator.canonical(read, dict(node.attributes))
    if not identical(canonical, node.attributes):
        raise ProgramError(f"{operator.name}: attributes {shorten(node.attributes)} instead of {shorten(canonical)}")
    outputs = operator.outputs_of(read, node.attributes)
    for spec in outputs:
        _size(spec, f"a result of {operator.name}", limits)
    values.extend(outputs)
    try:
        return operator.flops(read, outputs, operator.complete(node.attributes))
    except OverflowError as error:
        raise ProgramError(f"{operator.name} takes more operations than any number says") from error


def _size(spec: ArraySpec, what: str, limits: Limits) -> int:
    if spec.dtype not in DTYPES:
        raise ProgramError(f"{what} has the unknown dtype {shorten(spec.dtype)}; known are {', '.join(DTYPES)}")
    if len(spec.shape) > limits.rank:
        raise ProgramError(f"{what} has {len(spec.shape)} axes; at most {limits.rank} are accepted")
    if any(size < 0 or size > 2**48 for size in spec.shape):
        raise ProgramError(f"{what} has the impossible shape {shorten(spec.shape)}")
    size = nbytes(spec)
    # An empty array whose other axes are huge has strides that NumPy refuses.
    if math.prod(max(1, length) for length in spec.shape) > limits.array or size > limits.array:
        raise ProgramError(
            f"{what} of shape {shorten(spec.shape)} has {size:.3g} bytes; at most {limits.array:.3g} are accepted"
        )
    return size


def neighbourhood(program: Program, index: int) -> str:
    """A node of a program and the nodes whose outputs it reads, for a person."""
    firsts, value = [], len(program.inputs)
    for node in program.nodes[: index + 1]:
        firsts.append(value)
        operator = CATALOGUE.get(node.operator)
        value += (operator.outputs or 1) if operator else 1
    shown = {index}
    for operand in program.nodes[index].operands[:8]:
        shown.update(i for i, first in enumerate(firsts[:index]) if first == operand)
    lines = []
    for i in sorted(shown):
        node = program.nodes[i]
        attributes = ", ".join(f"{name}={shorten(value, 40)}" for name, value in node.attributes[:8])
        operands = ", ".join(f"%{operand}" for operand in node.operands[:8])
        listed = ", ".join(filter(None, [operands, attributes]))
        lines.append(f"{'→' if i == index else ' '} %{firsts[i]} = {shorten(node.operator)[1:-1]}({listed})")
    for operand in program.nodes[index].operands[:8]:
        if 0 <= operand < len(program.inputs):
            spec = program.inputs[operand]
            lines.insert(0, f"  %{operand} = input {spec.dtype} {shorten(spec.shape)}")
    return "\n".join(lines)

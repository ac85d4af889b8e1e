"""The canonical order of a program's nodes: a function of the calculation alone, chosen for little memory."""

from __future__ import annotations

from collections.abc import Sequence

from goblin_dask.graphs.program import Node, Program
from goblin_dask.graphs.schedule import plan
from goblin_dask.messages import ArraySpec


def canonical(
    specs: Sequence[ArraySpec],
    origins: Sequence[tuple[int, int]],
    nodes: Sequence[Node],
    firsts: Sequence[int],
    inputs: Sequence[int],
    outputs: tuple[int, ...],
) -> tuple[Program, tuple[int, ...]]:
    """Renumber what `outputs` need.

    Two orders are tried. Depth first from the outputs finishes one output after the other. Level by level, by the
    distance from the outputs, advances all of them together: of a tile of sums of products it needs one panel of each
    operand at a time, where depth first would hold a whole operand. The one of lower peak memory is taken, depth first
    where both are equal.

    Parameters
    ----------
    specs, origins, nodes, firsts, inputs
        As in `goblin_dask.graphs.builder.Builder`.
    outputs
        Values that are wanted.

    Returns
    -------
    program : Program
    slots : tuple of int
        Number of the declared input that each of the program's inputs is.
    """
    depth = _depth_first(origins, nodes, outputs)
    best, slots, ordered = _renumbered(specs, origins, nodes, firsts, inputs, outputs, depth)
    levels = _levels(origins, nodes, depth)
    if levels != depth:
        other, other_slots, other_ordered = _renumbered(specs, origins, nodes, firsts, inputs, outputs, levels)
        if plan(other, other_ordered).peak < plan(best, ordered).peak:
            return other, other_slots
    return best, slots


def _depth_first(origins: Sequence[tuple[int, int]], nodes: Sequence[Node], outputs: tuple[int, ...]) -> list[int]:
    """Nodes in post-order, operands from left to right; without recursion, programs are deep."""
    order: list[int] = []
    state: dict[int, int] = {}
    for output in outputs:
        stack = [origins[output][0]]
        while stack:
            node = stack[-1]
            position = state.get(node, 0)
            if node < 0 or position > len(nodes[node].operands):
                stack.pop()
                continue
            operands = nodes[node].operands
            state[node] = position + 1
            if position == len(operands):
                order.append(node)
                stack.pop()
                state[node] = position + 1
                continue
            below = origins[operands[position]][0]
            if below not in state:
                stack.append(below)
    return order


def _levels(origins: Sequence[tuple[int, int]], nodes: Sequence[Node], depth: list[int]) -> list[int]:
    """The same nodes, those farthest from the outputs first; as in `depth` among equals."""
    distance = dict.fromkeys(depth, 0)
    for node in reversed(depth):
        below = distance[node] + 1
        for operand in nodes[node].operands:
            source = origins[operand][0]
            if source >= 0 and distance[source] < below:
                distance[source] = below
    return sorted(depth, key=lambda node: -distance[node])


def _renumbered(
    specs: Sequence[ArraySpec],
    origins: Sequence[tuple[int, int]],
    nodes: Sequence[Node],
    firsts: Sequence[int],
    inputs: Sequence[int],
    outputs: tuple[int, ...],
    order: list[int],
) -> tuple[Program, tuple[int, ...], list[ArraySpec]]:
    """The program in that order, its slots, and the specs of its values."""
    slots: dict[int, int] = {}
    for node in order:
        for operand in nodes[node].operands:
            if origins[operand][0] < 0:
                slots.setdefault(operand, len(slots))
    for output in outputs:
        if origins[output][0] < 0:
            slots.setdefault(output, len(slots))
    number = dict(slots)
    ordered = [specs[value] for value in slots]
    renumbered = []
    for node in order:
        source = nodes[node]
        renumbered.append(Node(source.operator, tuple([number[o] for o in source.operands]), source.attributes))
        value = firsts[node]
        while value < len(specs) and origins[value][0] == node:
            number[value] = len(ordered)
            ordered.append(specs[value])
            value += 1
    program = Program(tuple(ordered[: len(slots)]), tuple(renumbered), tuple([number[output] for output in outputs]))
    return program, tuple([origins[value][1] for value in slots]), ordered

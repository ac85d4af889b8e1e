"""What a task of the lab's graph is called with: where its operands lie among the values that Dask passes to it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from goblin_dask.graphs.capture.pytree import Leaf, map_tree
from goblin_dask.labnode.assemble import Stored
from goblin_dask.labnode.plan import DynamicTask, GridTask, Key, LabTask
from goblin_dask.labnode.uplink import Prepared
from goblin_dask.store.refs import ChunkRef


@dataclass(frozen=True, slots=True)
class Call:
    """A grid task, with its operands as (position among the dependencies, position in that tuple, leaf)."""

    task: GridTask
    program: Prepared
    operands: tuple[tuple[int, int | None, int], ...]
    trees: tuple[tuple[Any, tuple[int, ...]], ...]
    """For each key that it defines: its tree, and the outputs that the tree's leaves are."""
    several: bool

    def values(self, values: tuple[Any, ...]) -> tuple[Stored, ...]:
        """Of each operand, the whole value of its key."""
        return tuple(values[at] if position is None else values[at][position] for at, position, _ in self.operands)

    def known(self, values: tuple[Any, ...]) -> dict[Key, Stored]:
        """The same by the operands' keys in the researcher's graph."""
        return {operand.key: value for operand, value in zip(self.task.operands, self.values(values), strict=True)}

    def inputs(self, values: tuple[Any, ...]) -> tuple[ChunkRef, ...] | None:
        """References that the program is to be run on; None where they are not what it was recorded for.

        That happens behind a task that Dask's own functions did in its program's place, on data that it was not for.
        """
        found = []
        for stored, (_, _, leaf), spec in zip(
            self.values(values), self.operands, self.program.program.inputs, strict=True
        ):
            if leaf >= len(stored.refs) or stored.refs[leaf].spec != spec:
                return None
            found.append(stored.refs[leaf])
        return tuple(found)


@dataclass(frozen=True, slots=True)
class Local:
    """A task of the laboratory."""

    task: LabTask | DynamicTask
    names: tuple[tuple[Key, int, int | None], ...]
    """Key in the researcher's graph, position among the dependencies, position in that tuple."""

    def values(self, values: tuple[Any, ...]) -> dict[Key, Stored]:
        """Of each operand, the whole value by its key in the researcher's graph."""
        return {name: values[at] if position is None else values[at][position] for name, at, position in self.names}


def numbered(tree: Any) -> tuple[tuple[int, ...], Any]:
    """Outputs of the program that the leaves of a tree are, in order, and the tree with leaves numbered so."""
    outputs: list[int] = []

    def visit(value: Any) -> Any:
        if not isinstance(value, Leaf):
            return value
        outputs.append(value.index)
        return Leaf(len(outputs) - 1, value.scalar)

    visited = map_tree(visit, tree)
    return tuple(outputs), visited

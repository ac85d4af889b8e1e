"""A round as one Dask graph: pieces of micro-batches are programs for volunteers, and their gradients go to the actors.

The parameters of a stage are one array, a source that reads them from the actors when it is reached. What one piece
gives another reads by its key, so that a volunteer that disappears costs the task that it had.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import dask.array as da
import numpy as np
from dask.delayed import Delayed

from goblin_dask.graphs.capture.folds import Fold
from goblin_dask.graphs.operators.dtypes import DTYPES
from goblin_dask.graphs.program import Program
from goblin_dask.messages import ArraySpec
from goblin_dask.training.blocks import in_blocks, source
from goblin_dask.training.tasks import Adds, Evaluates, Owned, Reads, ReadsBlock, assembled, counted, picked

Owners = list[tuple[str, ...]]
"""Of each stage, the names of what it owns."""


@dataclass(frozen=True)
class Task:
    """A piece of a micro-batch's program, for a volunteer.

    Attributes
    ----------
    evaluates : Evaluates
        The piece's program.
    reads : tuple of int or tuple of str
        What its inputs are: values of the whole program, or the names of arrays that make one vector.
    gives : tuple of int
        What its outputs are.
    """

    stage: int
    direction: str
    evaluates: Evaluates
    reads: tuple[int | tuple[str, ...], ...]
    gives: tuple[int, ...]

    @property
    def name(self) -> str:
        """For keys."""
        return f"{self.direction}-{self.stage}"

    @property
    def program(self) -> Program:
        """What it evaluates."""
        return self.evaluates.program


@dataclass(frozen=True)
class Blocked:
    """A piece that no volunteer has the memory for: many tasks, on blocks.

    Attributes
    ----------
    program : Program
        The piece's.
    reads : tuple of int
        Values of the whole program that its inputs are.
    gives : tuple of int
        What its outputs are.
    memory : int
        Bytes that a task may take.
    """

    stage: int
    direction: str
    program: Program
    reads: tuple[int, ...]
    gives: tuple[int, ...]
    memory: int


@dataclass(frozen=True)
class Cut:
    """A program for micro-batches of one shape, cut into tasks.

    Attributes
    ----------
    tasks : tuple of Task or Blocked
        In an order in which each finds what it reads.
    loss : tuple of int
        Values that are the sum of the loss, and its count.
    gradients : dict of str to tuple of int
        Of each parameter, the values whose sum is its gradient.
    state : dict of str to (int, Fold or None)
        Of each buffer that changes, the value that says how, and how it is taken up.
    """

    program: Program
    tasks: tuple[Task | Blocked, ...]
    loss: tuple[int, int]
    gradients: dict[str, tuple[int, ...]] = field(default_factory=dict)
    state: dict[str, tuple[int, Fold | None]] = field(default_factory=dict)


@dataclass(frozen=True)
class MicroBatch:
    """Inputs of a cut program.

    Attributes
    ----------
    inputs : tuple
        Of the whole program: arrays, or names of what actors own.
    """

    cut: Cut
    inputs: tuple[Any, ...]


def round_graph(
    batches: Sequence[MicroBatch],
    owned: Mapping[str, Owned],
    adding: bool = True,
) -> Delayed:
    """A round, lazily: the sum of the loss and its count, with gradients added into the actors.

    Parameters
    ----------
    batches : sequence of MicroBatch
    owned : mapping of str to Owned
    adding : bool
        Whether gradients and buffers are added; an evaluation has none.
    """
    making = _Graph(owned)
    pairs = []
    for number, batch in enumerate(batches):
        making.micro_batch(number, batch)
        pairs.append([making.operand(value, batch.inputs) for value in batch.cut.loss])
        if adding:
            making.add(number, batch)
    making.graph["round"] = (counted, pairs, list(making.added.values()))
    return Delayed("round", making.graph)


class _Graph:
    """A graph while it is made."""

    def __init__(self, owned: Mapping[str, Owned]):
        self.graph: dict[str, Any] = {}
        self.values: dict[int, str] = {}
        """Keys of the values of the micro-batch that is being added."""
        self.added: dict[str, str] = {}
        """Of each actor, the key of what was added last."""
        self._blocks: dict[int, da.Array] = {}
        """Those of its values that are there in blocks."""
        self._owned = owned
        self._sources: dict[Any, str] = {}
        self._state: dict[str, str] = {}
        """Keys of buffers that are handed on."""

    def micro_batch(self, number: int, batch: MicroBatch) -> None:
        """Add its tasks."""
        values = self.values = {}
        self._blocks = {}
        for task in batch.cut.tasks:
            if isinstance(task, Blocked):
                self._in_blocks(task, batch.inputs)
                continue
            key = f"{task.name}-{number}"
            operands = [self.operand(read, batch.inputs) for read in task.reads]
            self.graph[key] = (task.evaluates, *operands)
            for position, value in enumerate(task.gives):
                values[value] = f"{key}-{position}"
                self.graph[values[value]] = (picked, key, position)
        for name, (value, fold) in batch.cut.state.items():
            if fold is None:  # the next one reads it as this one leaves it
                self._state[name] = self.operand(value, batch.inputs)

    def add(self, number: int, batch: MicroBatch) -> None:
        """Add what goes to the actors."""
        cut = batch.cut
        for actor in dict.fromkeys(each.actor for each in self._owned.values()):
            gradients = {name: parts for name, parts in cut.gradients.items() if self._owned[name].actor == actor}
            state = {name: how for name, how in cut.state.items() if self._owned[name].actor == actor}
            if not gradients and not state:
                continue
            counts = tuple((name, len(parts)) for name, parts in gradients.items())
            folds = tuple((name, fold) for name, (_, fold) in state.items())
            operands = [self.operand(part, batch.inputs) for parts in gradients.values() for part in parts]
            operands += [self.operand(value, batch.inputs) for value, _ in state.values()]
            key = f"add-{actor.key}-{number}"
            self.graph[key] = (Adds(actor, number, counts, folds), self.added.get(actor.key, 0), *operands)
            self.added[actor.key] = key

    def operand(self, read: int | tuple[str, ...], inputs: Sequence[Any]) -> str:
        """Key of what a piece reads."""
        if isinstance(read, tuple):
            return self._source(Reads(tuple(self._owned[name] for name in read), flat=True))
        if read in self._blocks and read not in self.values:
            array = self._blocks[read]
            self.values[read] = f"whole-{array.name}"
            self.graph[self.values[read]] = (assembled, array.__dask_keys__())
        if read not in self.values:
            self.values[read] = self._input(inputs[read])
        return self.values[read]

    def _in_blocks(self, task: Blocked, inputs: Sequence[Any]) -> None:
        """Add the tasks of a piece in blocks."""
        given = [
            self._array(read, spec, inputs, task.memory)
            for read, spec in zip(task.reads, task.program.inputs, strict=True)
        ]
        for value, array in zip(task.gives, in_blocks(task.program, given, task.memory), strict=True):
            self._blocks[value] = array
            for key, step in array.__dask_graph__().items():
                self.graph.setdefault(key, step)  # what it reads of others is there already

    def _array(self, read: int, spec: ArraySpec, inputs: Sequence[Any], memory: int) -> Any:
        """What a piece in blocks reads: an array in blocks, or whole."""
        if read in self._blocks:
            return self._blocks[read]
        given = inputs[read] if read not in self.values and read < len(inputs) else None
        if isinstance(given, np.ndarray):
            return given
        if isinstance(given, str) and given not in self._state:
            owned = self._owned[given]
            return source(f"{owned.actor.key}-{given}", ReadsBlock(owned), spec.shape, spec.dtype, memory)
        key = self.operand(read, inputs)
        whole = Delayed(key, {key: self.graph[key]})
        return da.from_delayed(whole, spec.shape, DTYPES[spec.dtype])

    def _input(self, given: Any) -> str:
        """Key of an input: an array, or the name of one that an actor owns."""
        if isinstance(given, str):
            return self._state.get(given) or self._source(Reads((self._owned[given],), flat=False))
        key = self._sources.setdefault(id(given), f"input-{len(self._sources)}")
        self.graph[key] = given
        return key

    def _source(self, reads: Reads) -> str:
        key = self._sources.setdefault(reads, f"source-{len(self._sources)}")
        self.graph[key] = (reads,)
        return key

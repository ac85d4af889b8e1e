"""A round as one Dask graph: pieces of micro-batches are programs for volunteers, and their gradients go to the actors.

The parameters of a stage are one array, a source that reads them from the actors when it is reached. What one piece
gives another reads by its key, so that a volunteer that disappears costs the task that it had.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from dask.delayed import Delayed

from goblin_dask.errors import NotTraceable
from goblin_dask.graphs.apply import applies_operators
from goblin_dask.graphs.capture.folds import Fold
from goblin_dask.graphs.execute import execute
from goblin_dask.graphs.program import Program
from goblin_dask.graphs.tracer.array import Tracer
from goblin_dask.graphs.tracer.recorder import ops
from goblin_dask.labnode.residents import ActorRef, resident
from goblin_dask.messages import ArraySpec

Array = np.ndarray[Any, Any]
Owners = list[tuple[str, ...]]
"""Of each stage, the names of what it owns."""


class Evaluates:
    """A program as a function of its inputs, which gives a tuple of its outputs; lowered, it is the program again."""

    applies_operators = True

    def __init__(self, program: Program):
        self.program = program

    def __call__(self, *inputs: Any) -> tuple[Any, ...]:
        program = self.program
        if not any(isinstance(each, Tracer) for each in inputs):
            return tuple(execute(program, [np.asarray(each) for each in inputs]))
        values: list[Any] = list(inputs)
        for node in program.nodes:
            values.extend(ops(node.operator, *(values[each] for each in node.operands), **dict(node.attributes)))
        return tuple(values[output] for output in program.outputs)


@applies_operators
def picked(results: Any, number: int) -> Any:
    """One of the results of a program."""
    return results[number]


@dataclass(frozen=True)
class Owned:
    """An array that an actor owns."""

    actor: ActorRef
    name: str
    spec: ArraySpec


@dataclass(frozen=True)
class Reads:
    """A task of the laboratory: an array that an actor owns as it is, or several, one after another, as a vector."""

    arrays: tuple[Owned, ...]
    flat: bool

    @property
    def specs(self) -> ArraySpec:
        """Of what it returns."""
        first = self.arrays[0].spec
        if not self.flat:
            return first
        return ArraySpec((sum(math.prod(each.spec.shape) for each in self.arrays),), first.dtype)

    def __call__(self) -> Array:
        wanted: dict[ActorRef, list[str]] = {}
        for each in self.arrays:
            wanted.setdefault(each.actor, []).append(each.name)
        found = {
            (actor, name): array
            for actor, names in wanted.items()
            for name, array in zip(names, resident(actor).read(names), strict=True)
        }
        arrays = [found[each.actor, each.name] for each in self.arrays]
        return np.concatenate([each.reshape(-1) for each in arrays]) if self.flat else np.array(arrays[0])


@dataclass(frozen=True)
class Adds:
    """A task of the laboratory: an actor takes up a micro-batch.

    Attributes
    ----------
    gradients : tuple of (str, int)
        Names of parameters, and how many parts of each are given.
    state : tuple of (str, Fold or None)
        Buffers, whose contributions are given after them, and how they take them up.
    """

    actor: ActorRef
    number: int
    gradients: tuple[tuple[str, int], ...]
    state: tuple[tuple[str, Fold | None], ...]

    def __call__(self, before: Any, *values: Any) -> int:
        given = iter(values)
        gradients = {name: [next(given) for _ in range(count)] for name, count in self.gradients}
        state = {name: (fold, next(given)) for name, fold in self.state}
        return int(resident(self.actor).add(self.number, gradients, state))


def counted(pairs: Sequence[tuple[Any, Any]], added: Sequence[Any]) -> tuple[float, float]:
    """Sums over micro-batches of losses and of what they are divided by, in float64 and in their order.

    They wait for what was `added`.
    """
    if any(isinstance(each, Tracer) for pair in pairs for each in pair):
        raise NotTraceable("sums over micro-batches are made in the laboratory, in their order")
    total = count = 0.0
    for loss, weight in pairs:
        total, count = total + float(loss), count + float(weight)
    return total, count


# --- the graph --------------------------------------------------------------------------------------------------------
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


@dataclass(frozen=True)
class Cut:
    """A program for micro-batches of one shape, cut into tasks.

    Attributes
    ----------
    tasks : tuple of Task
        In an order in which each finds what it reads.
    loss : tuple of int
        Values that are the sum of the loss, and its count.
    gradients : dict of str to tuple of int
        Of each parameter, the values whose sum is its gradient.
    state : dict of str to (int, Fold or None)
        Of each buffer that changes, the value that says how, and how it is taken up.
    """

    program: Program
    tasks: tuple[Task, ...]
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
        pairs.append([making.values[value] for value in batch.cut.loss])
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
        self._owned = owned
        self._sources: dict[Any, str] = {}
        self._state: dict[str, str] = {}
        """Keys of buffers that are handed on."""

    def micro_batch(self, number: int, batch: MicroBatch) -> None:
        """Add its tasks."""
        values = self.values = {}
        for task in batch.cut.tasks:
            key = f"{task.name}-{number}"
            operands = [self._operand(read, batch.inputs) for read in task.reads]
            self.graph[key] = (task.evaluates, *operands)
            for position, value in enumerate(task.gives):
                values[value] = f"{key}-{position}"
                self.graph[values[value]] = (picked, key, position)
        for name, (value, fold) in batch.cut.state.items():
            if fold is None:  # the next one reads it as this one leaves it
                self._state[name] = self._operand(value, batch.inputs)

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
            operands = [self._operand(part, batch.inputs) for parts in gradients.values() for part in parts]
            operands += [self._operand(value, batch.inputs) for value, _ in state.values()]
            key = f"add-{actor.key}-{number}"
            self.graph[key] = (Adds(actor, number, counts, folds), self.added.get(actor.key, 0), *operands)
            self.added[actor.key] = key

    def _operand(self, read: int | tuple[str, ...], inputs: Sequence[Any]) -> str:
        """Key of what a piece reads."""
        if isinstance(read, tuple):
            return self._source(Reads(tuple(self._owned[name] for name in read), flat=True))
        if read not in self.values:
            self.values[read] = self._input(inputs[read])
        return self.values[read]

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

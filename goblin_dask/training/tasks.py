"""What tasks of a round do: evaluate a piece, read what actors own, give them gradients, add up losses."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

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
class ReadsBlock:
    """Gives a block of an array that an actor owns, at an index."""

    owned: Owned

    def __call__(self, index: tuple[slice, ...]) -> Array:
        (array,) = resident(self.owned.actor).read([self.owned.name])
        return np.array(array[index], order="C")


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


def assembled(blocks: Any) -> Array:
    """An array of its blocks, nested as Dask nests them: in the laboratory, for no volunteer has the memory."""
    if any(isinstance(each, Tracer) for each in _flat(blocks)):
        raise NotTraceable("what was computed in blocks is put together in the laboratory")
    if not isinstance(blocks[0], list) and np.ndim(blocks[0]) == 0:
        return np.asarray(blocks[0])
    return np.block(blocks)


def _flat(nested: Any) -> Iterator[Any]:
    if isinstance(nested, list):
        for each in nested:
            yield from _flat(each)
    else:
        yield nested

"""From a captured program to the tasks of a round: divided into stages, each with its parameters as one array."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from goblin_dask.graphs.capture.captured import CapturedProgram
from goblin_dask.graphs.capture.folds import Fold
from goblin_dask.graphs.capture.joint import CapturedGradients
from goblin_dask.graphs.capture.torch_internals import flatten, is_tensor, to_numpy
from goblin_dask.graphs.cost import peak
from goblin_dask.graphs.program import Program
from goblin_dask.training.division import Division, divide, refusal
from goblin_dask.training.graph import Blocked, Cut, Owners, Task
from goblin_dask.training.plan import Entry, in_blocks_entry
from goblin_dask.training.tasks import Evaluates

NO_KEY = np.zeros(2, np.uint64)
Sources = Callable[[Any, Any], tuple[Any, ...]]
"""Inputs of a program, of a micro-batch and a key: arrays, or names of what actors own."""


@dataclass(frozen=True)
class Captured:
    """A program for micro-batches of one shape."""

    cut: Cut
    sources: Sources
    draws: bool
    division: Division
    inputs: tuple[str | None, ...]
    """Of the program's inputs, the names of those that actors own."""
    blocked: tuple[Entry, ...]
    """What is computed in blocks."""

    @property
    def flow(self) -> tuple[Any, ...]:
        """What it gives: alike for all micro-batches that are added up."""
        return tuple(self.cut.gradients), {name: fold for name, (_, fold) in self.cut.state.items()}

    def owners(self, names: Sequence[str]) -> Owners:
        """Of each stage, what it is to own: what it gives the gradient of, or changes, or is the first to read.

        Parameters
        ----------
        names : sequence of str
            All that there is; what no stage knows of belongs to the first one.
        """
        makers = {value: task.stage for task in self.cut.tasks for value in task.gives}
        made = {name: parts[-1] for name, parts in self.cut.gradients.items()}
        made.update({name: value for name, (value, _) in self.cut.state.items()})
        known = {name: makers[value] for name, value in made.items() if value in makers}
        for number, stage in enumerate(self.division.stages):
            for value in stage.parameters:
                known.setdefault(self.inputs[value] or "", number)
        owners: list[list[str]] = [[] for _ in self.division.stages]
        for name in names:
            owners[known.get(name, 0)].append(name)
        return [tuple(each) for each in owners]


def cut_gradients(
    captured: CapturedGradients, example: Any, names: Sequence[str], memory: int | None, stages: int | None
) -> Captured:
    """Cut a captured round.

    Parameters
    ----------
    captured : CapturedGradients
    example : pair
        Inputs and target of a micro-batch.
    names : sequence of str
        What actors own.
    memory, stages : int, optional
        As for `goblin_dask.training.division.divide`.

    Raises
    ------
    TooLarge
        When a piece of it fits no volunteer, however it is cut.
    """
    owned = set(names)
    named = {name: name if name in owned else array for name, array in captured.parameters.items()}

    def sources(pair: Any, key: Any) -> tuple[Any, ...]:
        return tuple(captured.sources(captured.leaves(*pair), named, key))

    given = sources(example, NO_KEY if captured.draws else None)
    folds = {name: captured.folds.get(name) for name in captured.state}
    return _cut(captured.program(), sources, given, captured.draws, captured.gradients, folds, memory, stages)


def cut_forward(
    captured: CapturedProgram, example: Any, names: Mapping[str, str], memory: int | None, stages: int | None
) -> Captured:
    """Cut an evaluation, whose results are a sum and a count.

    Parameters
    ----------
    captured : CapturedProgram
    example : tuple
        Its positional arguments.
    names : mapping of str to str
        By what its parameters are called here, what they are called by their owners.
    memory, stages : int, optional
        As for `cut_gradients`.
    """
    named = {name: names.get(name, array) for name, array in captured.parameters.items()}

    def sources(arguments: Any, key: Any) -> tuple[Any, ...]:
        leaves = [to_numpy(x) if is_tensor(x) else x for x in flatten((arguments, {}))[0]]
        return tuple(captured.recordings.sources(leaves, named, None)[1])

    given = sources(example, None)
    program = captured.bound(*example)[0]
    return _cut(program, sources, given, False, (), {}, memory, stages)


def _cut(
    program: Program,
    sources: Sources,
    given: Sequence[Any],
    draws: bool,
    gradients: Sequence[str],
    folds: Mapping[str, Fold | None],
    memory: int | None,
    stages: int | None,
) -> Captured:
    inputs = tuple(each if isinstance(each, str) else None for each in given)
    handed = {name for name, fold in folds.items() if fold is None}
    fixed = [value for value, name in enumerate(inputs) if name is not None and name not in handed]
    after = range(2 + len(gradients), len(program.outputs))
    division = divide(
        program, loss=(0, 1), fixed=fixed, state=after, memory=memory, stages=stages, anyway=stages is None
    )
    tasks: list[Task | Blocked] = []
    blocked = []
    for stage, kind, part in division.pieces():
        packed = division.packed(stage, kind)
        if memory is not None and peak(packed.program) > memory:
            large = Blocked(stage, kind, part.program, part.reads, part.gives, memory)
            blocked.append(in_blocks_entry(large, inputs))
            if blocked[-1].peak > memory:
                raise refusal(division, memory)
            tasks.append(large)
            continue
        reads = tuple(
            tuple(inputs[each] or "" for each in read) if isinstance(read, tuple) else read for read in packed.reads
        )
        tasks.append(Task(stage, kind, Evaluates(packed.program), reads, packed.gives))
    count = len(gradients)
    state = zip(folds.items(), division.gradients[count:], strict=True)
    cut = Cut(
        program,
        tuple(tasks),
        (program.outputs[0], program.outputs[1]),
        dict(zip(gradients, division.gradients[:count], strict=True)),
        {name: (value, fold) for (name, fold), (value,) in state},
    )
    return Captured(cut, sources, draws, division, inputs, tuple(blocked))

"""`Plan`: what a round of training takes of volunteers, before anything runs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from dask.core import flatten

from goblin_dask.graphs.cost import bytes_written, flops, peak
from goblin_dask.graphs.operators.base import nbytes
from goblin_dask.graphs.program import Program
from goblin_dask.labnode.lowering import lower
from goblin_dask.training import pictures, tables
from goblin_dask.training.blocks import in_blocks, source
from goblin_dask.training.graph import Blocked
from goblin_dask.verify import policy as policies
from goblin_dask.verify.check import is_heavy


class CutProgram(Protocol):
    """A program for micro-batches, cut into tasks."""

    @property
    def program(self) -> Program:
        """The whole of it."""

    @property
    def tasks(self) -> Sequence[Any]:
        """Each is `Blocked`, or has a `stage`, a `direction`, its `program`, and what its inputs are: `reads`."""


@dataclass(frozen=True)
class Entry:
    """What a task of one micro-batch takes."""

    stage: int
    """From 0."""
    direction: str
    """``forward`` or ``backward``; a backward task computes again what it needs of the forward course."""
    operators: int
    flops: float
    """Floating-point operations of one of its copies."""
    peak: int
    """Projected peak memory, in bytes; in blocks, that of the largest."""
    vectors: tuple[tuple[tuple[str, ...], int], ...]
    """Parameters that it reads: names of those that are one array, and its bytes."""
    reads: int
    """Bytes that it reads besides: rows of the batch, and what other tasks give."""
    gives: int
    """Bytes of its results."""
    copies: int = 1
    """How many volunteers compute it: several, whose results are compared, where it is replicated."""
    blocks: int = 1
    """How many tasks there are in its place, where no volunteer could hold it and it is computed in blocks."""

    @property
    def parameters(self) -> int:
        """Bytes of parameters that it reads."""
        return sum(size for _, size in self.vectors)

    @property
    def title(self) -> str:
        """Its direction, and in how many blocks it is computed."""
        return self.direction if self.blocks == 1 else f"{self.direction}, {self.blocks} blocks"


@dataclass(frozen=True, repr=False)
class Plan:
    """Tasks of a round; prints as a table, and `save` draws it.

    Examples
    --------
    >>> print(trainer.plan(batch=64))                          # doctest: +SKIP
    >>> trainer.plan(batch=64).save("plan.svg")                # doctest: +SKIP
    """

    entries: tuple[Entry, ...]
    """By stage; those of one micro-batch."""
    micro_batches: int
    """Of a round."""
    memory: int | None
    """Bytes that a task may take; None where nobody has said."""
    once: float
    """Floating-point operations of a micro-batch if nothing were computed twice."""

    @classmethod
    def of(
        cls,
        cut: CutProgram,
        *,
        micro_batches: int,
        memory: int | None = None,
        verify: str | None = None,
        blocks: Iterable[Entry] = (),
    ) -> Plan:
        """The plan of a program that was cut.

        Parameters
        ----------
        cut : CutProgram
        micro_batches : int
            Of a round.
        memory : int, optional
            Bytes that a task may take.
        verify : str, optional
            Policy, as for `Lab.submit`: under ``replicate`` each task has copies, under ``auto`` those that nothing
            cheaper can check.
        blocks : iterable of Entry
            Of the tasks that are `Blocked`, as `in_blocks_entry` makes them.
        """
        policy = policies.parse(verify or "auto")
        entries = [_entry(task, policy.method) for task in cut.tasks if not isinstance(task, Blocked)]
        entries = sorted([*entries, *blocks], key=lambda each: (each.stage, each.direction != "forward"))
        return cls(tuple(entries), micro_batches, memory, flops(cut.program))

    # --- figures ------------------------------------------------------------------------------------------------------
    @property
    def stages(self) -> tuple[tuple[str, ...], ...]:
        """Of each stage, the names of the parameters that it reads."""
        found: list[dict[str, None]] = [{} for _ in range(1 + max((each.stage for each in self.entries), default=-1))]
        for each in self.entries:
            for names, _ in each.vectors:
                found[each.stage].update(dict.fromkeys(names))
        return tuple(tuple(names) for names in found)

    @property
    def tasks(self) -> int:
        """Tasks of a round, copies and blocks included."""
        return self.micro_batches * sum(each.copies * each.blocks for each in self.entries)

    @property
    def flops(self) -> float:
        """Floating-point operations of a round, copies included."""
        return self.micro_batches * sum(each.copies * each.flops for each in self.entries)

    @property
    def recomputation(self) -> float:
        """Floating-point operations of a micro-batch, over those if nothing were computed twice; copies apart."""
        return sum(each.flops for each in self.entries) / self.once if self.once else math.nan

    def moved(self, held: bool = True) -> int:
        """Bytes that volunteers read and give in a round, copies included.

        Parameters
        ----------
        held : bool
            Whether volunteers hold parameters for the round: then each vector is read once by as many as compare their
            results, else by every task.
        """
        total = self.micro_batches * sum(each.copies * (each.reads + each.gives) for each in self.entries)
        if not held:
            return total + self.micro_batches * sum(each.copies * each.parameters for each in self.entries)
        vectors: dict[tuple[str, ...], int] = {}
        for each in self.entries:
            for names, size in each.vectors:
                vectors[names] = max(vectors.get(names, 0), each.copies * size)
        return total + sum(vectors.values())

    @property
    def too_large(self) -> tuple[Entry, ...]:
        """What fits no volunteer."""
        return tuple(each for each in self.entries if self.memory is not None and each.peak > self.memory)

    # --- for eyes -----------------------------------------------------------------------------------------------------
    def __repr__(self) -> str:
        return tables.plan_text(self)

    def _repr_html_(self) -> str:
        return tables.plan_html(self)

    def save(self, path: str | Path) -> None:
        """Draw it; the ending of the path chooses the format, such as png or svg. Needs matplotlib."""
        pictures.write(pictures.plan(self), path)


def _entry(task: Any, method: str) -> Entry:
    program: Program = task.program
    sizes = [(read, nbytes(spec)) for read, spec in zip(task.reads, program.inputs, strict=True)]
    replicated = method == "replicate" or (method == "auto" and is_heavy(program))
    return Entry(
        task.stage,
        task.direction,
        len(program.nodes),
        flops(program),
        peak(program),
        tuple((read, size) for read, size in sizes if isinstance(read, tuple)),
        sum(size for read, size in sizes if not isinstance(read, tuple)),
        bytes_written(program),
        policies.REPLICAS if replicated else 1,
    )


def in_blocks_entry(task: Blocked, inputs: Sequence[str | None]) -> Entry:
    """What a piece takes that is computed in blocks.

    Parameters
    ----------
    task : Blocked
    inputs : sequence of str or None
        Of the whole program's inputs, the names of those that are parameters and buffers.

    Raises
    ------
    TooLarge
        When an operator has no form in blocks.
    """
    program = task.program
    names = [inputs[read] if read < len(inputs) else None for read in task.reads]
    sizes = [(name, nbytes(spec)) for name, spec in zip(names, program.inputs, strict=True)]
    given = [
        source(f"input-{n}", _unread, spec.shape, spec.dtype, task.memory) for n, spec in enumerate(program.inputs)
    ]
    graph: dict[Any, Any] = {}
    keys: list[Any] = []
    for array in in_blocks(program, given, task.memory):
        graph.update(array.__dask_graph__())
        keys.extend(flatten(array.__dask_keys__()))
    programs = [each.program for each in lower(graph, keys).grid]
    return Entry(
        task.stage,
        task.direction,
        len(program.nodes),
        sum(flops(each) for each in programs),
        max((peak(each) for each in programs), default=0),
        tuple(((name,), size) for name, size in sizes if name is not None),
        sum(size for name, size in sizes if name is None),
        bytes_written(program),
        blocks=len(programs),
    )


def _unread(index: tuple[slice, ...]) -> Any:
    raise AssertionError("a plan reads nothing")

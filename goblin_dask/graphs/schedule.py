"""`Schedule`: when inputs are loaded, values released and memory reused; what `execute` does and `cost.peak` prices."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from goblin_dask.graphs.check import specs as specs_of
from goblin_dask.graphs.operators import CATALOGUE
from goblin_dask.graphs.operators.base import Attributes, Operator, Specs, nbytes
from goblin_dask.messages import ArraySpec

if TYPE_CHECKING:
    from goblin_dask.graphs.program import Program


@dataclass(frozen=True, slots=True)
class Step:
    """One node, with all that is known of it before it runs."""

    operator: Operator
    operands: tuple[int, ...]
    attributes: Attributes
    outputs: tuple[int, ...]
    specs: Specs
    """Of the outputs."""
    loads: tuple[int, ...]
    """Inputs that are first read here, ascending."""
    releases: tuple[int, ...]
    """Values that nobody reads afterwards."""
    reuse: int
    """Number of the operand whose memory becomes the output's, or -1."""
    final: bool = False
    """Its memory becomes an output's of the program, by later steps that reuse it if not by this one."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """A program, ready to run."""

    specs: Specs
    """Of all values."""
    steps: tuple[Step, ...]
    loads: tuple[int, ...]
    """Inputs that are outputs and nothing else, loaded at the end."""
    peak: int
    """Upper bound of the bytes that are allocated at a time: inputs loaded at first use and the next one ahead of it,
    values until their last use, kernels' workspaces."""


class _Recent:
    """The schedules used last, for as many nodes together as are remembered: a peer's programs may be large."""

    def __init__(self, nodes: int):
        self._budget = nodes
        self._nodes = 0
        self._known: OrderedDict[Program, Schedule] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, program: Program) -> Schedule | None:
        with self._lock:
            known = self._known.get(program)
            if known is not None:
                self._known.move_to_end(program)
            return known

    def put(self, program: Program, made: Schedule) -> None:
        with self._lock:
            if program not in self._known:
                self._known[program] = made
                self._nodes += _weight(program)
            while self._nodes > self._budget:
                oldest, _ = self._known.popitem(last=False)
                self._nodes -= _weight(oldest)


def _weight(program: Program) -> int:
    return 1 + len(program.inputs) + len(program.nodes) + sum([len(node.operands) for node in program.nodes])


_recent = _Recent(nodes=200_000)


def schedule(program: Program) -> Schedule:
    """The schedule of a program that was checked; remembered for a while."""
    known = _recent.get(program)
    if known is None:
        known = plan(program, specs_of(program))
        _recent.put(program, known)
    return known


class _Memory:
    """Which values share which buffer, and what is allocated."""

    def __init__(self, values: int):
        self.buffer = [-1] * values
        self.contiguous = [False] * values
        self.whole = [False] * values
        """Contiguous in some order of its axes."""
        self.size: list[int] = []
        self.users: list[int] = []
        """Of each buffer: values in it, and buffers that keep it."""
        self.fresh: list[bool] = []
        self.keeps: list[int] = []
        """Of each buffer: another that lives as long, or -1."""
        self.live = 0

    def is_matrix(self, value: int, spec: ArraySpec) -> bool:
        """Whether BLAS takes it as it lies, as far as is known."""
        return self.contiguous[value] or (self.whole[value] and len(spec.shape) <= 2)

    def allocate(self, value: int, size: int, contiguous: bool, fresh: bool = True, keeps: int = -1) -> None:
        self.buffer[value] = len(self.size)
        self.contiguous[value] = self.whole[value] = contiguous
        self.size.append(size)
        self.users.append(1)
        self.fresh.append(fresh)
        self.keeps.append(keeps)
        self.live += size
        if keeps >= 0:
            self.users[keeps] += 1

    def share(self, value: int, base: int, contiguous: bool, permuted: bool = False) -> None:
        buffer = self.buffer[value] = self.buffer[base]
        self.contiguous[value] = contiguous
        self.whole[value] = contiguous or (permuted and self.whole[base])
        self.users[buffer] += 1

    def release(self, value: int) -> None:
        buffer = self.buffer[value]
        while buffer >= 0:
            self.users[buffer] -= 1
            if self.users[buffer]:
                return
            self.live -= self.size[buffer]
            buffer = self.keeps[buffer]


def plan(program: Program, specs: Sequence[ArraySpec]) -> Schedule:
    """`schedule`, when the specs of the values are known."""
    last = _last_uses(program, len(specs))
    memory = _Memory(len(specs))
    inputs = len(program.inputs)
    steps: list[Step] = []
    loaded, peak, value = 0, 0, inputs
    for index, node in enumerate(program.nodes):
        operator = CATALOGUE[node.operator]
        attributes = operator.complete(node.attributes)
        operands = node.operands
        read = tuple([specs[operand] for operand in operands])
        fresh_loads = sorted({o for o in operands if o < inputs and memory.buffer[o] < 0})
        for slot in fresh_loads:
            memory.allocate(slot, nbytes(specs[slot]), True, fresh=False)
            loaded = max(loaded, slot + 1)
        ahead = nbytes(specs[loaded]) if loaded < inputs else 0
        count = operator.outputs if operator.outputs is not None else len(operator.infer(read, attributes))
        outputs = tuple(range(value, value + count))
        results = tuple([specs[output] for output in outputs])
        reuse = _reuse(operator, operands, read, results, memory, last, index)
        _results(operator, operands, read, attributes, outputs, results, memory, reuse)
        workspace = operator.workspace(read, results, attributes)
        if operator.copies_strided:
            workspace += sum(
                nbytes(spec) for o, spec in zip(operands, read, strict=True) if not memory.is_matrix(o, spec)
            )
        peak = max(peak, memory.live + ahead + workspace)
        releases = tuple(sorted({v for v in (*operands, *outputs) if last[v] <= index}))
        for released in releases:
            memory.release(released)
        steps.append(Step(operator, operands, attributes, outputs, results, tuple(fresh_loads), releases, reuse))
        value += count
    late = tuple(sorted({o for o in program.outputs if o < inputs and memory.buffer[o] < 0}))
    for slot in late:
        memory.allocate(slot, nbytes(specs[slot]), True, fresh=False)
    copies = sum(nbytes(specs[o]) for o in set(program.outputs) if not memory.contiguous[o])
    return Schedule(tuple(specs), _finals(program, steps), late, max(peak, memory.live + copies))


def _finals(program: Program, steps: list[Step]) -> tuple[Step, ...]:
    """The steps, those marked that begin the memory of an output."""
    wanted = set(program.outputs)
    for number in range(len(steps) - 1, -1, -1):
        step = steps[number]
        if step.operator.into is None or step.outputs[0] not in wanted:
            continue
        if step.reuse >= 0:
            wanted.add(step.operands[step.reuse])
        else:
            steps[number] = replace(step, final=True)
    return tuple(steps)


def _last_uses(program: Program, values: int) -> list[int]:
    """For each value the last node that reads it; -1: none; past the end: it is an output."""
    last = [-1] * values
    for index, node in enumerate(program.nodes):
        for operand in node.operands:
            last[operand] = index
    for output in program.outputs:
        last[output] = len(program.nodes)
    return last


def _reuse(
    operator: Operator,
    operands: tuple[int, ...],
    read: Specs,
    results: Specs,
    memory: _Memory,
    last: list[int],
    index: int,
) -> int:
    """An operand that dies here, alone in a buffer that this program allocated, like the output in shape and dtype."""
    if operator.into is None:
        return -1
    for slot in operator.reusable if operator.reusable is not None else range(len(operands)):
        operand = operands[slot]
        buffer = memory.buffer[operand]
        if (
            read[slot] == results[0]
            and last[operand] == index
            and memory.fresh[buffer]
            and memory.users[buffer] == 1
            and memory.contiguous[operand]
            and (operator.reusable is None or operands.count(operand) == 1)
        ):
            return slot
    return -1


def _results(
    operator: Operator,
    operands: tuple[int, ...],
    read: Specs,
    attributes: Attributes,
    outputs: tuple[int, ...],
    results: Specs,
    memory: _Memory,
    reuse: int,
) -> None:
    """Account for the outputs of a node."""
    ordered = all(memory.contiguous[operand] for operand in operands)
    for number, (output, spec) in enumerate(zip(outputs, results, strict=True)):
        if number == 0 and reuse >= 0:
            memory.share(output, operands[reuse], True)
        elif number == 0 and operands and operator.view(read, attributes):
            base = operands[0]
            if operator.keeps_order and not memory.contiguous[base]:
                # Whether a reshape of it is a view or a copy depends on its strides: both are paid for.
                memory.allocate(output, nbytes(spec), False, fresh=False, keeps=memory.buffer[base])
            else:
                unbroken = operator.keeps_order or (memory.contiguous[base] and operator.unbroken(read, attributes))
                memory.share(output, base, unbroken, operator.permutes)
        else:
            memory.allocate(output, nbytes(spec), operator.contiguous or ordered)

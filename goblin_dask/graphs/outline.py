"""`Outline`: a program as those see it who ask for the values between its nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

from goblin_dask.graphs.builder import Builder
from goblin_dask.graphs.operators import CREATION, MOVEMENT
from goblin_dask.graphs.program import Program, decode
from goblin_dask.graphs.schedule import Schedule, Step, schedule
from goblin_dask.messages import ArraySpec

_PLAIN = CREATION | MOVEMENT


class Outline:
    """Where a program can be cut, and the programs on either side of a cut.

    Nodes that only make constants or move inputs are left aside: anybody has their values. The others are counted here
    from 0, and cut *c* lies behind the first *c* of them. What is *live* there are the values made before it that are
    read, or handed out, behind it: two runs that agree on those agree on all that went before, as far as it matters.

    Parameters
    ----------
    encoded : bytes
        The program, which is decoded, and so checked, when it is first asked for.
    """

    def __init__(self, encoded: bytes):
        self._encoded = encoded

    @cached_property
    def program(self) -> Program:
        """The program itself."""
        return decode(self._encoded)

    @property
    def nodes(self) -> int:
        """How many nodes compute; the last cut lies behind all of them."""
        return len(self._computing)

    @property
    def values(self) -> int:
        """How many values its nodes make, all of them."""
        return len(self._plan.specs) - len(self.program.inputs)

    def specs(self, values: Sequence[int]) -> tuple[ArraySpec, ...]:
        """Shapes and dtypes of some values."""
        return tuple([self._plan.specs[value] for value in values])

    @cached_property
    def _plan(self) -> Schedule:
        return schedule(self.program)

    @cached_property
    def _computing(self) -> list[Step]:
        plain = set(range(len(self.program.inputs)))
        found = []
        for step in self._plan.steps:
            if step.operator.name in _PLAIN and plain.issuperset(step.operands):
                plain.update(step.outputs)
            else:
                found.append(step)
        return found

    @cached_property
    def _spans(self) -> Mapping[int, tuple[int, int]]:
        """Of each computed value that is read: the cut behind its node, and the last at which it lives."""
        made = {value: number + 1 for number, step in enumerate(self._computing) for value in step.outputs}
        last = {operand: number for number, step in enumerate(self._computing) for operand in step.operands}
        last |= dict.fromkeys(self.program.outputs, self.nodes)
        return {value: (cut, last[value]) for value, cut in made.items() if value in last}

    def live(self, cut: int) -> tuple[int, ...]:
        """Numbers of the values that are live at a cut, ascending."""
        return tuple([value for value, (first, last) in self._spans.items() if first <= cut <= last])

    def before(self, cut: int) -> tuple[Program, tuple[int, ...]]:
        """The program that hands out what is live at a cut, and which input of this one each of its inputs is."""
        build = Builder()
        values = {value: build.input(spec) for value, spec in enumerate(self.program.inputs)}
        for step in self._plan.steps:
            _add(build, step, values)
        return build.finish([values[value] for value in self.live(cut)])

    def node(self, number: int) -> tuple[Program, tuple[int, ...], tuple[int, ...]]:
        """One node as a program.

        Returns
        -------
        program : Program
        operands : tuple of int
            Values of the whole program that its inputs are: live ones, or inputs.
        outputs : tuple of int
            Values of the whole program that its outputs are: those that live on.
        """
        node = self._computing[number]
        outputs = tuple([value for value in node.outputs if value in self._spans])
        given = (*range(len(self.program.inputs)), *self.live(number))
        build = Builder()
        values = {value: build.input(self._plan.specs[value]) for value in given}
        computing = {step.outputs for step in self._computing}
        for step in self._plan.steps:
            if step is node or step.outputs not in computing:
                _add(build, step, values)
        program, slots = build.finish([values[value] for value in outputs])
        return program, tuple([given[slot] for slot in slots]), outputs


def _add(build: Builder, step: Step, values: dict[int, int]) -> None:
    made = build.add(step.operator.name, [values[value] for value in step.operands], **step.attributes)
    values.update(zip(step.outputs, made, strict=True))

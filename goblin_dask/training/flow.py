"""`Flow`: what a joint program is to someone who cuts it: forward, backward, and what anybody can make again."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cached_property
from itertools import accumulate

from goblin_dask.graphs.operators import CREATION, ELEMENTWISE, MOVEMENT, RANDOM
from goblin_dask.graphs.operators.base import nbytes
from goblin_dask.graphs.program import Program
from goblin_dask.graphs.schedule import schedule

_PLAIN = CREATION | ELEMENTWISE | MOVEMENT | RANDOM
_SUNK = frozenset({"astype", "broadcast_to", "expand_dims", "flip", "full", "permute_dims", "reshape", "squeeze"})
"""Operators that are computed below a cut rather than above it, where what they read is no larger than their result."""


class Flow:
    """The nodes of a program on their places along its forward course.

    Nodes of three kinds are told apart:

    * *free* ones, which everybody who reads them computes again. They only make constants, draw random numbers, move
      or change elements of inputs, of parameters or of the micro-batch, not of both together; or they lay out anew
      what somebody else made, so that the source crosses a cut and not what becomes of it.
    * *forward* ones: what the loss, or the state, is made of. Those of the loss are counted in their order, and that
      number is their *place*; a cut lies between two places. What only the state needs stands where its sources stand.
    * *backward* ones: all others. They stand at the last place that holds all that they read: a value is held where it
      is made and where it is read on the forward course, a parameter where it is read. As every place is the least of
      some, cutting anywhere leaves no backward node in a later part than those it reads.

    Parameters
    ----------
    program : Program
    loss, state : sequence of int
        Positions of outputs that are the loss, and of those that belong to the forward course besides.
    fixed : collection of int
        Slots of parameters, buffers and constants; the other inputs come with the micro-batch.
    """

    def __init__(self, program: Program, loss: Sequence[int], state: Sequence[int], fixed: Collection[int]):
        self.program = program
        self.plan = schedule(program)
        self.inputs = len(program.inputs)
        self.makers = [-1] * len(self.plan.specs)
        """Of each value: the node that makes it, -1 for inputs."""
        for number, step in enumerate(self.plan.steps):
            for value in step.outputs:
                self.makers[value] = number
        self.free = self._free(frozenset(fixed))
        """Of each node."""
        core = self._ancestors([program.outputs[each] for each in loss])
        self.forward = core | self._ancestors([program.outputs[each] for each in state])
        """Nodes, free ones among them."""
        self.place = [-1] * len(program.nodes)
        """Of each node; of free ones -1."""
        course = [node for node in sorted(core) if not self.free[node]]
        for place, node in enumerate(course):
            self.place[node] = place
        self.places = max(1, len(course))
        """How many there are."""
        self.held = [-1] * len(self.plan.specs)
        """Of each value: the last place at which it is made or read on the forward course; -1 where it is not."""
        self._place_forward()
        self._place_backward()

    def size(self, value: int) -> int:
        """Bytes."""
        return nbytes(self.plan.specs[value])

    def _free(self, fixed: frozenset[int]) -> list[bool]:
        """Which nodes are free."""
        own, given = 1, 2  # What a plain value is made of: parameters, the micro-batch.
        made_of: dict[int, int] = {slot: own if slot in fixed else given for slot in range(self.inputs)}
        free = []
        for step in self.plan.steps:
            name = step.operator.name
            sources = 0
            for operand in step.operands:
                sources |= made_of.get(operand, 4)
            plain = name in _PLAIN and sources < own | given
            if plain:
                made_of.update(dict.fromkeys(step.outputs, sources))
            sunk = name in _SUNK and self.size(step.operands[0]) <= self.size(step.outputs[0])
            free.append(plain or (sunk and len(step.operands) == 1))
        return free

    def _ancestors(self, values: Sequence[int]) -> frozenset[int]:
        found: set[int] = set()
        stack = [self.makers[value] for value in values]
        while stack:
            node = stack.pop()
            if node >= 0 and node not in found:
                found.add(node)
                stack.extend(self.makers[operand] for operand in self.plan.steps[node].operands)
        return frozenset(found)

    def _place_forward(self) -> None:
        steps = self.plan.steps
        above = [0] * len(self.plan.specs)  # the place of a value's sources
        for node in sorted(self.forward):
            least = max([above[operand] for operand in steps[node].operands], default=0)
            if not self.free[node] and self.place[node] < 0:
                self.place[node] = least
            for value in steps[node].outputs:
                above[value] = least if self.free[node] else self.place[node]
        for node in sorted(self.forward, reverse=True):
            outputs = steps[node].outputs
            if self.free[node]:
                read = max([self.held[value] for value in outputs])
            else:
                read = self.place[node]
                for value in outputs:
                    self.held[value] = max(self.held[value], read)
            for operand in steps[node].operands:
                self.held[operand] = max(self.held[operand], read)

    def _place_backward(self) -> None:
        last = self.places - 1
        self.until = [place if place >= 0 else last for place in self.held]
        """Of each value: the last place at which it is at hand."""
        constant = [False] * len(self.plan.specs)
        for node, step in enumerate(self.plan.steps):
            forward, free = node in self.forward, self.free[node]
            least = min([self.until[operand] for operand in step.operands], default=last)
            for value in step.outputs:
                constant[value] = free and all(constant[operand] for operand in step.operands)
                if constant[value]:
                    self.until[value] = last
                elif not forward or self.held[value] < 0:
                    self.until[value] = least
            if not forward and not free:
                self.place[node] = least

    # --- what a cut costs ---------------------------------------------------------------------------------------------
    @cached_property
    def widths(self) -> list[int]:
        """Of each cut, from before the first place to behind the last: bytes that cross it on the forward course."""
        change = [0] * (self.places + 2)
        for node in self.forward:
            if not self.free[node]:
                for value in self.plan.steps[node].outputs:
                    change[self.place[node] + 1] += self.size(value)
                    change[self.held[value] + 1] -= self.size(value)
        return list(accumulate(change))[: self.places + 1]

    @cached_property
    def work(self) -> tuple[list[float], list[float]]:
        """FLOP of the nodes at each place: of forward ones, and of backward ones."""
        forward, backward = [0.0] * self.places, [0.0] * self.places
        for node, step in enumerate(self.plan.steps):
            if not self.free[node]:
                read = tuple([self.plan.specs[operand] for operand in step.operands])
                flops = step.operator.flops(read, step.specs, step.attributes)
                (forward if node in self.forward else backward)[self.place[node]] += flops
        return forward, backward

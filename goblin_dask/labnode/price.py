"""What a program costs, kept by program: lowering asks for the same few programs thousands of times."""

from __future__ import annotations

from dataclasses import dataclass

from goblin_dask.graphs.cost import bytes_read, bytes_written
from goblin_dask.graphs.operators.base import Kind
from goblin_dask.graphs.program import Program
from goblin_dask.graphs.schedule import schedule
from goblin_dask.messages import GridOffer

CONTRACTION_SPEED = 5e10
"""FLOP/s of products on one machine of a laboratory; a bound of the order of magnitude for placement."""

OTHER_SPEED = 5e8
"""Elements per second of everything else there."""

UNKNOWN_BANDWIDTH = 10e6
"""Bytes/s of a volunteer's link that was not measured: a home's upstream."""

LOCAL_BANDWIDTH = 2e9
"""Bytes/s of volunteers that map the laboratory's blobs."""

TASK_SECONDS = 0.01
"""What a task costs besides its arithmetic and its bytes: messages, a lease, a check, a verdict."""


@dataclass(frozen=True, slots=True)
class Price:
    """Cost of one run of a program."""

    contraction: float
    """Floating-point operations of its contractions."""
    other: float
    """All other operations."""
    read: int
    """Bytes of its inputs."""
    written: int
    """Bytes of its outputs."""
    peak: int
    """Projected peak memory, in bytes."""
    light: bool
    """Only elementwise operators and movement: cheaper to do again than to move."""

    @property
    def flops(self) -> float:
        """All operations."""
        return self.contraction + self.other

    @property
    def seconds(self) -> float:
        """Time of its arithmetic on one machine of the laboratory, roughly."""
        return self.contraction / CONTRACTION_SPEED + self.other / OTHER_SPEED


class Prices:
    """Prices by identity of the program; the programs are kept alive so that an identity stays one."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Program, Price]] = {}

    def __call__(self, program: Program) -> Price:
        """Price of a program."""
        known = self._known.get(id(program))
        if known is None:
            known = self._known[id(program)] = (program, price(program))
        return known[1]


_LIGHT = frozenset({Kind.ELEMENTWISE, Kind.MOVEMENT, Kind.CREATION})


def price(program: Program) -> Price:
    """Price of a program, worked out from its schedule."""
    plan = schedule(program)
    contraction = other = 0.0
    light = True
    for step in plan.steps:
        operands = tuple(plan.specs[operand] for operand in step.operands)
        flops = float(step.operator.flops(operands, step.specs, step.attributes))
        if Kind.CONTRACTION in step.operator.kinds:
            contraction += flops
        else:
            other += flops
        light = light and not step.operator.kinds.isdisjoint(_LIGHT)
    return Price(contraction, other, bytes_read(program), bytes_written(program), plan.peak, light)


def transfer_seconds(price: Price, offer: GridOffer) -> float:
    """Time that moving a task's operands and results takes, roughly."""
    bandwidth = LOCAL_BANDWIDTH if offer.local else offer.bandwidth or UNKNOWN_BANDWIDTH
    return (price.read + price.written) / bandwidth

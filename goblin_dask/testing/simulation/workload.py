"""The tasks of a simulated grid: real programs, with the costs that `plan_check` finds for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from goblin_dask import messages as m
from goblin_dask.digest import digest
from goblin_dask.graphs.builder import Builder
from goblin_dask.graphs.cost import bytes_read, bytes_written, flops
from goblin_dask.graphs.program import Program
from goblin_dask.graphs.schedule import schedule
from goblin_dask.verify.check import CheckPlan, is_heavy, plan_check
from goblin_dask.verify.operands import Array

Make = Callable[[int], Program]
"""Program whose arrays have sides of about this length."""


@dataclass(frozen=True, eq=False)
class OperatorClass:
    """Programs that are checked in the same way."""

    name: str
    make: Make
    sides: tuple[int, ...]
    """Of the tasks: they are all as frequent."""
    small: int
    """Side at which lies are rehearsed; checked by the same method as the large ones."""
    share: float
    """Of all tasks."""


@dataclass(frozen=True, eq=False)
class Kind:
    """Tasks of one program."""

    of: OperatorClass
    program: Program
    task: m.SubmitTask
    """As the laboratory would submit it; its policy is to be replaced."""
    plan: CheckPlan
    moved: int
    """Bytes of inputs and outputs."""

    @property
    def flops(self) -> float:
        """Of the task."""
        return self.task.flops


def _program(*shapes: tuple[int, ...]) -> tuple[Builder, list[int]]:
    builder = Builder()
    return builder, [builder.input(m.ArraySpec(shape, "float32")) for shape in shapes]


def _product(n: int) -> Program:
    builder, operands = _program((n, 2 * n), (2 * n, n))
    return builder.finish(builder.add("matmul", operands))[0]


def _elementwise(n: int) -> Program:
    """A softmax."""
    builder, (x,) = _program((n, n))
    (e,) = builder.add("exp", [x])
    (s,) = builder.add("sum", [e], axes=(1,), keepdims=True)
    return builder.finish(builder.add("divide", [e, s]))[0]


def _decomposition(n: int) -> Program:
    builder, operands = _program((n, n))
    return builder.finish(builder.add("svd", operands, full_matrices=False))[0]


def _several(n: int) -> Program:
    """Attention without its projections, and a perceptron behind it."""
    builder, (q, k, v, wide, narrow) = _program((n, n), (n, n), (n, n), (n, 4 * n), (4 * n, n))
    (scores,) = builder.add("matmul", [q, k])
    (e,) = builder.add("exp", builder.add("multiply", [scores, builder.constant(n**-0.5, "float32")]))
    (s,) = builder.add("sum", [e], axes=(1,), keepdims=True)
    (mixed,) = builder.add("matmul", [builder.add("divide", [e, s])[0], v])
    (hidden,) = builder.add("tanh", builder.add("matmul", [mixed, wide]))
    return builder.finish(builder.add("matmul", [hidden, narrow]))[0]


CLASSES = (
    OperatorClass("product", _product, (1024, 2048, 4096), 384, 0.4),
    OperatorClass("elementwise", _elementwise, (1024, 2048, 4096), 64, 0.3),
    OperatorClass("decomposition", _decomposition, (512, 1024, 2048), 128, 0.1),
    OperatorClass("several operators", _several, (512, 1024, 2048), 64, 0.2),
)
"""What a laboratory's tasks are; the shares are a choice, the costs are the programs'."""


@cache
def kinds_of(one: OperatorClass) -> tuple[Kind, ...]:
    """The tasks of a class, one program for each side."""
    return tuple(_kind(one, side) for side in one.sides)


def _kind(one: OperatorClass, side: int) -> Kind:
    program = one.make(side)
    plan = schedule(program)
    outputs = tuple(plan.specs[value] for value in program.outputs)
    name = digest(f"{one.name} {side}".encode())
    task = m.SubmitTask(name, program.digest, (), outputs, flops(program), 0, heavy=is_heavy(program))
    moved = bytes_read(program) + bytes_written(program)
    return Kind(one, program, task, plan_check(program), moved)


def draw_inputs(program: Program, rng: np.random.Generator) -> Sequence[Array]:
    """Normal numbers for all inputs."""
    return [rng.standard_normal(spec.shape).astype(spec.dtype) for spec in program.inputs]

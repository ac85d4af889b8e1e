"""What a program costs, before it runs."""

from __future__ import annotations

from goblin_dask.graphs.operators.base import nbytes
from goblin_dask.graphs.program import Program
from goblin_dask.graphs.schedule import schedule


def flops(program: Program) -> float:
    """Floating-point operations, roughly: one multiplication and one addition of a contraction are two."""
    plan = schedule(program)
    return float(
        sum(
            step.operator.flops(tuple(plan.specs[o] for o in step.operands), step.specs, step.attributes)
            for step in plan.steps
        )
    )


def bytes_read(program: Program) -> int:
    """Bytes of the inputs, each slot once."""
    return sum(map(nbytes, program.inputs))


def bytes_written(program: Program) -> int:
    """Bytes of the outputs."""
    specs = schedule(program).specs
    return sum(nbytes(specs[output]) for output in program.outputs)


def peak(program: Program) -> int:
    """Projected peak memory in bytes: an upper bound of what `execute` allocates at a time, inputs included.

    Inputs are loaded when they are first read, and the next one is being loaded meanwhile; values go after their last
    use; views cost nothing but keep what they show; kernels' workspaces count.
    """
    return schedule(program).peak

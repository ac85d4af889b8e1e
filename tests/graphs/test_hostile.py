"""Well-formed bytes with arbitrary operators and attributes: refused, or priced and run, never anything else."""

from __future__ import annotations

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from goblin_dask.errors import InputError, ProgramError
from goblin_dask.graphs import cost
from goblin_dask.graphs.check import check
from goblin_dask.graphs.execute import execute
from goblin_dask.graphs.operators import CATALOGUE
from goblin_dask.graphs.operators.dtypes import DTYPES
from goblin_dask.graphs.program import Node, Program, decode, encode
from goblin_dask.messages import ArraySpec

SIZES = st.sampled_from([0, 1, 2, 3, 3, 4])
INTS = st.integers(-3, 5) | st.sampled_from([2**31, 2**62, -(2**62), 10**6])
VALUES = (
    st.none()
    | st.booleans()
    | INTS
    | st.floats()
    | st.sampled_from(
        [*DTYPES, "constant", "reflect", "linear", "left", "ortho", "fro", "L", "ab,bc->ac", "a->", "00" * 8]
    )
    | st.lists(INTS, max_size=4).map(tuple)
)


@st.composite
def specs(draw):
    return ArraySpec(tuple(draw(st.lists(SIZES, max_size=3))), draw(st.sampled_from([*DTYPES])))


@st.composite
def programs(draw):
    inputs = tuple(draw(st.lists(specs(), min_size=1, max_size=3)))
    nodes = []
    for i in range(draw(st.integers(1, 3))):
        operator = CATALOGUE[draw(st.sampled_from([*CATALOGUE]))]
        count = operator.arity if operator.arity is not None else draw(st.integers(operator.least, 4))
        operands = tuple(draw(st.integers(0, len(inputs) + i - 1)) for _ in range(count))
        attributes = {}
        for name, rule in operator.attributes.items():
            if draw(st.booleans()) or name not in operator.defaults:
                value = draw(VALUES)
                try:  # half of the values in their canonical form, so that the shape rules are reached
                    value = rule.convert(value, tuple(inputs[o] if o < len(inputs) else inputs[0] for o in operands))
                except (InputError, TypeError, ValueError, OverflowError, IndexError):
                    value = draw(VALUES)
                attributes[name] = value
        nodes.append(Node(operator.name, operands, tuple(sorted(attributes.items()))))
    return Program(inputs, tuple(nodes), (len(inputs) + len(nodes) - 1,))


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(programs())
def test_whatever_checks_is_priced_and_runs_or_refuses_its_numbers(program):
    try:
        check(program)
    except ProgramError:
        return
    assert decode(encode(program)) == program
    projected = cost.peak(program)
    assert cost.flops(program) >= 0

    if projected > 10**6:
        return
    ones = [np.ones(spec.shape, DTYPES[spec.dtype]) for spec in program.inputs]
    try:
        outputs = execute(program, ones)
    except ProgramError:
        raise
    except InputError:
        return
    assert len(outputs) == 1

"""Pieces of programs: they compute what the whole does, equal ones are equal bytes, and vectors cost no copy."""

import numpy as np
import pytest

from goblin_dask.errors import ProgramError
from goblin_dask.graphs.builder import Builder
from goblin_dask.graphs.check import check
from goblin_dask.graphs.cost import peak
from goblin_dask.graphs.execute import execute
from goblin_dask.graphs.program import encode
from goblin_dask.graphs.slicing import packed, piece, vectors
from goblin_dask.messages import ArraySpec


def layers(count, width=16, rows=4):
    """Linear layers with a nonlinearity: x, then a weight and a bias for each."""
    build = Builder()
    x = build.input(ArraySpec((rows, width), "float32"))
    for _ in range(count):
        weight = build.input(ArraySpec((width, width), "float32"))
        bias = build.input(ArraySpec((width,), "float32"))
        (y,) = build.add("matmul", [x, weight])
        (y,) = build.add("add", [y, bias])
        (x,) = build.add("tanh", [y])
    return build.finish([x])[0]


def drawn(program):
    random = np.random.default_rng(0)
    return [random.standard_normal(spec.shape).astype(spec.dtype) for spec in program.inputs]


def test_equal_pieces_are_equal_programs_and_give_what_the_whole_does():
    program = layers(3)
    inputs = drawn(program)
    values = dict(enumerate(inputs))
    first = len(inputs)
    pieces = [piece(program, range(3 * k, 3 * k + 3), [first + 3 * k + 2]) for k in range(3)]
    assert len({encode(each.program) for each in pieces}) == 1
    for each in pieces:
        check(each.program)
        values.update(zip(each.gives, execute(each.program, [values[v] for v in each.reads]), strict=True))
    assert values[program.outputs[0]].tobytes() == execute(program, inputs)[0].tobytes()


def test_a_piece_reads_only_what_it_needs():
    program = layers(2)
    first = len(program.inputs)
    only = piece(program, range(6), [first])
    assert len(only.program.nodes) == 1
    assert set(only.reads) == set(program.nodes[0].operands)
    assert piece(program, [1, 2], [first + 2, first + 1]).gives == (first + 2, first + 1)
    with pytest.raises(ProgramError, match=f"value {first + 4} is to be given"):
        piece(program, [0, 1], [first + 4])


def test_vectors_cost_no_copy():
    """The peak of a packed piece is that of the piece with all of its parameters loaded, and nothing besides."""
    build = Builder()
    specs = [ArraySpec((4, 64), "float32"), ArraySpec((64, 64), "float32"), ArraySpec((64,), "float32")]
    specs += [ArraySpec((), "float64"), ArraySpec((0, 3), "float32"), ArraySpec((64, 64), "float32")]
    x, one, bias, scale, empty, two = map(build.input, specs)
    (y,) = build.add("matmul", [x, one])
    (y,) = build.add("add", [y, bias])
    (y,) = build.add("matmul", [y, two])
    (wide,) = build.add("multiply", [y, scale])
    program, slots = build.finish([wide, *build.add("sum", [empty], axes=(0,))])
    part = piece(program, range(len(program.nodes)), program.outputs)
    declared = [specs[slot] for slot in slots]
    groups = vectors(declared, [number for number, slot in enumerate(slots) if slot])
    assert sorted(map(len, groups)) == [1, 4]
    flat = packed(part, groups, declared)
    check(flat.program)
    inputs = drawn(program)
    given = [
        inputs[read] if isinstance(read, int) else np.concatenate([inputs[value].ravel() for value in read])
        for read in flat.reads
    ]
    for a, b in zip(execute(flat.program, given), execute(program, inputs), strict=True):
        assert a.tobytes() == b.tobytes()
    whole = sum(np.asarray(each).nbytes for each in given)
    assert peak(flat.program) <= whole + 3 * 4 * 64 * 8


def test_a_vector_may_hold_more_than_is_read():
    program = layers(2)
    first = len(program.inputs)
    parameters = [slot for slot in range(first) if slot != program.nodes[0].operands[0]]
    part = piece(program, [3, 4, 5], [first + 5])
    flat = packed(part, [parameters], program.inputs)
    assert tuple(parameters) in flat.reads
    inputs = drawn(program)
    middle = execute(piece(program, [0, 1, 2], [first + 2]).program, [inputs[n] for n in range(3)])[0]
    vector = np.concatenate([inputs[slot].ravel() for slot in parameters])
    given = [vector if isinstance(read, tuple) else middle for read in flat.reads]
    assert execute(flat.program, given)[0].tobytes() == execute(program, inputs)[0].tobytes()
    assert packed(part, [[0]], program.inputs).program == part.program

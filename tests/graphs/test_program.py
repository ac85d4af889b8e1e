from __future__ import annotations

import itertools
import tracemalloc

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from goblin_dask.digest import is_digest
from goblin_dask.errors import GoblinError, InputError, ProgramError
from goblin_dask.graphs.builder import Builder
from goblin_dask.graphs.check import LIMITS, Limits, check, specs
from goblin_dask.graphs.program import Node, Program, decode, encode
from goblin_dask.messages import ArraySpec

F = ArraySpec((3, 4), "float32")
ROW = ArraySpec((4,), "float32")


def norm_of_difference() -> Program:
    build = Builder()
    x, y = build.input(F), build.input(ROW)
    (difference,) = build.add("subtract", (x, y))
    (square,) = build.add("square", (difference,))
    (total,) = build.add("sum", (square,), axes=1)
    return build.finish(build.add("sqrt", (total,)))[0]


def test_encoding_is_an_address():
    program = norm_of_difference()
    again = decode(encode(program))
    assert again == program
    assert hash(again) == hash(program)
    assert again.digest == program.digest
    assert is_digest(program.digest)
    # Written down: a change of it loses every researcher's ledger.
    assert program.digest == "feab3ea3a34a539249715969cdacb75a1124a7cf2af9f09014611e68af11a795"


def test_specs_of_all_values():
    assert specs(norm_of_difference()) == (F, ROW, F, F, ArraySpec((3,), "float32"), ArraySpec((3,), "float32"))


X = (F,)
LARGE = ArraySpec((2**20, 2**20, 2**20), "float64")


def node(operator, *operands, **attributes):
    return Node(operator, operands, tuple(sorted(attributes.items())))


MALFORMED = {
    "unknown operator": (X, (node("system", 0),), (1,)),
    "unknown operator of great length": (X, (node("x" * 10**6, 0),), (1,)),
    "operand from the future": (X, (node("exp", 2), node("exp", 1)), (2,)),
    "operand that is itself": (X, (node("exp", 1),), (1,)),
    "negative operand": (X, (node("exp", -1),), (1,)),
    "too few operands": (X, (node("add", 0),), (1,)),
    "too many operands": (X, (node("exp", 0, 0),), (1,)),
    "no operands for a variadic": (X, (node("concat"),), (1,)),
    "shapes that do not broadcast": ((F, ArraySpec((3,), "float32")), (node("add", 0, 1),), (2,)),
    "shapes that do not multiply": (X, (node("matmul", 0, 0),), (1,)),
    "dtypes that do not shift": (X, (node("bitwise_left_shift", 0, 0),), (1,)),
    "unknown attribute": (X, (node("exp", 0, path="/etc/passwd"),), (1,)),
    "missing attribute": (X, (node("reshape", 0),), (1,)),
    "attribute of the wrong type": (X, (node("sum", 0, axes=(0,), keepdims=1),), (1,)),
    "attribute that is its default": (X, (node("sum", 0, axes=(0,), keepdims=False),), (1,)),
    "attributes out of order": (X, (Node("sum", (0,), (("keepdims", True), ("axes", (0,)))),), (1,)),
    "attribute given twice": (X, (Node("sum", (0,), (("axes", (0,)), ("axes", (1,)))),), (1,)),
    "negative axis": (X, (node("sum", 0, axes=(-1,)),), (1,)),
    "axis out of range": (X, (node("sum", 0, axes=(2,)),), (1,)),
    "axis twice": (X, (node("sum", 0, axes=(1, 1)),), (1,)),
    "reshape of another size": (X, (node("reshape", 0, shape=(5, 5)),), (1,)),
    "reshape to negative sizes": (X, (node("reshape", 0, shape=(-3, -4)),), (1,)),
    "slice beyond the end": (X, (node("slice", 0, start=(0, 0), length=(4, 4), step=(1, 1)),), (1,)),
    "slice before the start": (X, (node("slice", 0, start=(1, 0), length=(3, 4), step=(-1, 1)),), (1,)),
    "constant without data": ((), (node("constant", data="", dtype="float32", shape=(2,)),), (0,)),
    "constant that is no boolean": ((), (node("constant", data="07", dtype="bool", shape=()),), (0,)),
    "constant that is huge": ((), (node("constant", data="00" * 10**6, dtype="uint8", shape=(10**6,)),), (0,)),
    "dtype of objects": ((), (node("zeros", dtype="object", shape=()),), (0,)),
    "array bomb": ((), (node("zeros", dtype="uint8", shape=(2**40, 2**40)),), (0,)),
    "array bomb of an empty array": ((), (node("zeros", dtype="uint8", shape=(0, 2**61, 2**61)),), (0,)),
    "array bomb by tiling": (X, (node("tile", 0, counts=(2**61,)),), (1,)),
    "array bomb by padding": (X, (node("pad", 0, mode="edge", width=(2**61, 0, 0, 0)),), (1,)),
    "array bomb by broadcasting": (X, (node("broadcast_to", 0, shape=(2**50, 3, 4)),), (1,)),
    "array bomb by outer products": ((ArraySpec((2**40,), "int8"),), (node("outer", 0, 0),), (1,)),
    "array bomb by steps": ((), (node("arange", stop=1e300, step=1e-300, dtype="float64"),), (0,)),
    "too many axes": (X, (node("expand_dims", 0, axes=tuple(range(63))),), (1,)),
    "attribute bomb": (X, (node("tile", 0, counts=(1,) * 10**6),), (1,)),
    "memory bomb of many arrays": ((), tuple(node("zeros", dtype="int8", shape=(2**43 + i,)) for i in range(40)), (0,)),
    "work bomb": (
        (ArraySpec((2**20, 2**21), "int8"), ArraySpec((2**21, 2**20), "int8")),
        (node("matmul", 0, 1),) * 9,
        (2,),
    ),
    "input bomb": ((LARGE,), (node("exp", 0),), (1,)),
    "input of an unknown dtype": ((ArraySpec((3,), "datetime64[s]"),), (node("exp", 0),), (1,)),
    "input of negative size": ((ArraySpec((-3,), "float32"),), (node("exp", 0),), (1,)),
    "output that does not exist": (X, (node("exp", 0),), (2,)),
    "output before the first": (X, (node("exp", 0),), (-1,)),
    "no outputs": (X, (node("exp", 0),), ()),
    "inconsistent subscripts": (X, (node("einsum", 0, 0, subscripts="ab,bc->ac"),), (1,)),
    "subscripts that are not canonical": (X, (node("einsum", 0, subscripts="ji->ij"),), (1,)),
    "subscripts with an index from nowhere": (X, (node("einsum", 0, subscripts="ab->c"),), (1,)),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_programs_are_refused(name):
    program = Program(*MALFORMED[name])
    tracemalloc.start()
    try:
        with pytest.raises(ProgramError) as caught:
            check(program)
        assert tracemalloc.get_traced_memory()[1] < 2**24, "what it asks for was allocated"
    finally:
        tracemalloc.stop()
    assert len(str(caught.value)) < 4000
    with pytest.raises(ProgramError):
        decode(encode(program))


def test_refusal_shows_the_neighbourhood():
    build = (node("exp", 0), node("permute_dims", 1, axes=(1, 0)), node("add", 1, 2))
    with pytest.raises(ProgramError) as caught:
        check(Program(X, build, (3,)))
    text = str(caught.value)
    assert "float32 (3, 4) and float32 (4, 3)" in text
    assert "%1 = exp(%0)" in text
    assert "%2 = permute_dims(%1, axes=(1, 0))" in text
    assert "→ %3 = add(%1, %2)" in text


def test_counts_are_limited():
    chain = Program(X, tuple(node("exp", i) for i in range(100)), (100,))
    check(chain)
    with pytest.raises(ProgramError, match="100 nodes"):
        check(chain, Limits(nodes=99))
    wide = Program(X, (node("concat", *([0] * 1000)),), (1,))
    with pytest.raises(ProgramError, match="operands"):
        check(wide, Limits(operands=999))
    with pytest.raises(ProgramError, match="bytes"):
        decode(encode(wide), Limits(encoded=100))


def test_deep_programs_neither_recurse_nor_take_long():
    build = Builder()
    value = build.input(F)
    for _ in range(LIMITS.nodes):
        (value,) = build.add("exp", (value,))
    program, _ = build.finish([value])
    assert len(decode(encode(program)).nodes) == LIMITS.nodes


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=200))
def test_bytes_from_anywhere_are_refused_or_read(data):
    try:
        decode(data)
    except ProgramError:
        pass


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_mutated_programs_are_refused_or_checked(data):
    encoded = bytearray(encode(_MIXED))
    for _ in range(data.draw(st.integers(1, 3))):
        position = data.draw(st.integers(0, len(encoded) - 1))
        encoded[position] = data.draw(st.integers(0, 255))
    try:
        program = decode(bytes(encoded))
    except ProgramError:
        return
    specs(program)
    assert decode(encode(program)) == program


def _mixed() -> Program:
    build = Builder()
    x, y = build.input(F), build.input(ArraySpec((4, 3), "int16"))
    (product,) = build.add("matmul", (x, y))
    (total,) = build.add("sum", (product,), axes=(0,), keepdims=True)
    (scaled,) = build.add("divide", (total, build.constant(3.0, "float32")))
    (text,) = build.add("einsum", (scaled, product), subscripts="ij,jk->ik")
    (norm,) = build.add("norm", (text,), ord=2.5, axes=0)
    q, r = build.add("divmod", (norm, norm))
    (cut,) = build.add("slice", (q,), start=(0,), length=(2,), step=(1,))
    return build.finish([cut, r])[0]


_MIXED = _mixed()


@settings(max_examples=50, deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
        lambda inner: st.lists(inner, max_size=4),
        max_leaves=20,
    )
)
def test_msgpack_that_is_no_program_is_refused(tree):
    try:
        data = msgspec.msgpack.encode(tree)
    except (OverflowError, UnicodeEncodeError):
        return
    with pytest.raises(ProgramError):
        decode(data)


# --- canonical form ---------------------------------------------------------------------------------------------


def test_names_orders_and_dead_code_do_not_matter():
    one = Builder()
    x, y = one.input(F), one.input(ROW)
    (a,) = one.add("exp", (x,))
    (b,) = one.add("sin", (y,))
    (c,) = one.add("add", (a, b))
    other = Builder()
    unused, y, x = other.input(F), other.input(ROW), other.input(F)
    other.add("cos", (unused,))
    (b,) = other.add("sin", (y,))
    (a,) = other.add("exp", (x,))
    (again,) = other.add("exp", (x,))
    (d,) = other.add("add", (again, b))
    first, first_slots = one.finish([c])
    second, second_slots = other.finish([d])
    assert encode(first) == encode(second)
    assert (first_slots, second_slots) == ((0, 1), (2, 1))


def test_attributes_are_canonical():
    def program(**attributes):
        build = Builder()
        return build.finish(build.add("sum", (build.input(F),), **attributes))[0]

    spellings = itertools.product(((0, 1), [1, 0], (-1, -2), None), (False, np.bool_(False), 0))
    assert len({encode(program(axes=axes, keepdims=keepdims)) for axes, keepdims in spellings}) == 1
    assert program() == program(axes=(0, 1))
    assert program(axes=1) == program(axes=np.int8(-1))
    assert program(axes=1) != program(axes=0)


def test_slots_follow_the_declared_inputs():
    build = Builder()
    x = build.input(F)
    (t,) = build.add("permute_dims", (x,), axes=(1, 0))
    program, slots = build.finish(build.add("matmul", (x, t)))
    assert (len(program.inputs), slots) == (1, (0,))
    build = Builder()
    x, again = build.input(F), build.input(F)
    (t,) = build.add("permute_dims", (again,), axes=(1, 0))
    program, slots = build.finish(build.add("matmul", (x, t)))
    assert (len(program.inputs), slots) == (2, (1, 0)), "the transposed one is read first"


def test_values_are_told_apart_that_compare_equal():
    build = Builder()
    assert build.constant(0.0) != build.constant(-0.0)
    assert build.constant(1) != build.constant(True)
    assert build.constant(np.nan) == build.constant(np.nan)
    x = build.input(F)
    assert build.add("norm", (x,), ord=0.0, axes=0) != build.add("norm", (x,), ord=-0.0, axes=0)
    assert build.add("exp", (x,)) == build.add("exp", (x,))


def test_operators_that_change_nothing_leave_no_trace():
    build = Builder()
    x = build.input(F)
    assert build.add("astype", (x,), dtype="f4") == (x,)
    assert build.add("reshape", (x,), shape=F.shape) == (x,)
    assert build.add("broadcast_to", (x,), shape=F.shape) == (x,)
    assert build.add("real", (x,)) == (x,)
    assert build.add("conj", (x,)) != (x,)


def test_an_input_may_be_an_output():
    build = Builder()
    x, y = build.input(F), build.input(ROW)
    program, slots = build.finish([y, *build.add("exp", (x,)), y])
    assert slots == (0, 1)
    assert program.outputs == (1, 2, 1)
    assert decode(encode(program)) == program


def test_tiles_advance_together():
    """2 x 2 tiles of a product over 6 panels: panel by panel, so that inputs stream."""
    build = Builder()
    tiles = []
    rows = [[build.input(ArraySpec((64, 32), "float32")) for _ in range(6)] for _ in range(2)]
    columns = [[build.input(ArraySpec((32, 64), "float32")) for _ in range(6)] for _ in range(2)]
    for row, column in itertools.product(rows, columns):
        (tile,) = build.add("matmul", (row[0], column[0]))
        for a, b in zip(row[1:], column[1:], strict=True):
            (tile,) = build.add("addmm", (tile, a, b))
        tiles.append(tile)
    program, slots = build.finish(tiles)
    panel = [slot % 6 for slot in slots]
    assert panel == sorted(panel)
    assert [node.operator for node in program.nodes] == ["matmul"] * 4 + ["addmm"] * 20


@pytest.mark.parametrize(
    ("operator", "operands", "attributes", "error", "words"),
    [
        ("add", (0, 1), {}, InputError, "add of float32 (3, 4) and float32 (3,)"),
        ("matmul", (0, 0), {}, InputError, "inner lengths 4 and 3"),
        ("exq", (0,), {}, ProgramError, "unknown operator 'exq'"),
        ("exp", (7,), {}, ProgramError, "reads value 7 of 2"),
        ("exp", (-1,), {}, ProgramError, "reads value"),
        ("sum", (0,), {"axis": 1}, ProgramError, "it has: axes, keepdims, dtype"),
        ("sum", (0,), {"axes": 2}, ProgramError, "axis 2 of an array with 2 axes"),
        ("reshape", (0,), {"shape": (7,)}, InputError, "12 elements do not have the shape (7,)"),
        ("cholesky", (0,), {}, InputError, "3 rows and 4 columns"),
    ],
)
def test_builder_refuses_with_a_sentence(operator, operands, attributes, error, words):
    build = Builder()
    build.input(F)
    build.input(ArraySpec((3,), "float32"))
    with pytest.raises(error) as caught:
        build.add(operator, operands, **attributes)
    assert words in str(caught.value)
    assert isinstance(caught.value, GoblinError)


def test_large_constants_are_refused():
    with pytest.raises(InputError, match="make it an input"):
        Builder().constant(np.zeros(1000))

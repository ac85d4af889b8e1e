"""Composition of programs, and sums of products in the form that accumulates in place."""

import numpy as np
import pytest

from goblin_dask.graphs.builder import Builder
from goblin_dask.graphs.check import check
from goblin_dask.graphs.execute import execute
from goblin_dask.graphs.program import Program
from goblin_dask.graphs.rewrite import accumulate, compose, side_by_side
from goblin_dask.messages import ArraySpec

M, K, N = 6, 4, 5


def product(dtype: str, newaxis: bool = True) -> Program:
    """``(a @ b)[:, None, :]``: a partial product as dask cuts it."""
    build = Builder()
    a, b = build.input(ArraySpec((M, K), dtype)), build.input(ArraySpec((K, N), dtype))
    (c,) = build.add("matmul", (a, b))
    if newaxis:
        (c,) = build.add("expand_dims", (c,), axes=(1,))
    return build.finish([c])[0]


def total(count: int, dtype: str, how: str) -> Program:
    """The sum of `count` partial products, as dask writes it for `@` and for `tensordot`."""
    build = Builder()
    parts = [build.input(ArraySpec((M, 1, N), dtype)) for _ in range(count)]
    if how == "chain":
        result = parts[0]
        for part in parts[1:]:
            (result,) = build.add("add", (result, part))
        (result,) = build.add("squeeze", (result,), axes=(1,))
    else:
        (whole,) = build.add("concat", parts, axis=1)
        (result,) = build.add("sum", (whole,), axes=(1,))
    return build.finish([result])[0]


def operators(program: Program) -> list[str]:
    return [node.operator for node in program.nodes]


def drawn(dtype: str, count: int) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    arrays = []
    for _ in range(count):
        for shape in ((M, K), (K, N)):
            arrays.append((rng.standard_normal(shape) * 90).astype(dtype))
    return arrays


@pytest.mark.parametrize("how", ["chain", "concatenated"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64", "int64"])
def test_a_sum_of_partial_products_becomes_one_accumulation(how, dtype):
    outer = total(3, dtype, how)
    program, slots = compose(outer, [(product(dtype), {slot: 0}) for slot in range(3)])
    check(program)
    assert operators(program) == ["matmul", "addmm", "addmm"]
    arrays = drawn(dtype, 3)
    (result,) = execute(program, [arrays[slot - 3] for slot in slots])
    expected = sum(a.astype("c16") @ b for a, b in zip(arrays[::2], arrays[1::2], strict=True))
    np.testing.assert_allclose(result, expected, rtol=2e-4, atol=1e-2)
    assert result.dtype == dtype


def test_narrow_integers_wrap_as_the_original_does():
    outer = total(2, "int8", "chain")
    program, slots = compose(outer, [(product("int8"), {slot: 0}) for slot in range(2)])
    arrays = drawn("int8", 2)
    (result,) = execute(program, [arrays[slot - 2] for slot in slots])
    np.testing.assert_array_equal(result, arrays[0] @ arrays[1] + arrays[2] @ arrays[3])


def test_booleans_stay_any_of_ands():
    outer = total(2, "bool", "chain")
    program, slots = compose(outer, [(product("bool"), {slot: 0}) for slot in range(2)])
    assert "addmm" not in operators(program)
    arrays = drawn("bool", 2)
    (result,) = execute(program, [arrays[slot - 2] for slot in slots])
    np.testing.assert_array_equal(result, (arrays[0] @ arrays[1]) | (arrays[2] @ arrays[3]))


def test_float16_sums_keep_their_own_accumulation():
    outer = total(2, "float16", "concatenated")
    program, _ = compose(outer, [(product("float16"), {slot: 0}) for slot in range(2)])
    assert operators(program)[-1] == "sum"


def test_a_product_with_another_use_is_not_accumulated():
    build = Builder()
    a, b, x = (build.input(ArraySpec((3, 3), "float32")) for _ in range(3))
    (c,) = build.add("matmul", (a, b))
    (d,) = build.add("add", (x, c))
    program, _ = accumulate(build.finish([d, c])[0])
    assert operators(program) == ["matmul", "add"]


def test_trees_of_sums_become_one_chain():
    build = Builder()
    arrays = [build.input(ArraySpec((3, 3), "float64")) for _ in range(9)]
    products = [build.add("matmul", arrays[i : i + 2])[0] for i in range(0, 8, 2)]
    (left,) = build.add("add", products[:2])
    (right,) = build.add("add", (products[2], arrays[8]))
    (right,) = build.add("add", (right, products[3]))
    (result,) = build.add("add", (left, right))
    original, slots = build.finish([result])
    program, kept = accumulate(original)
    assert operators(program) == ["addmm"] * 4
    rng = np.random.default_rng(1)
    values = [rng.standard_normal((3, 3)) for _ in range(9)]
    inputs = [values[slot] for slot in slots]
    np.testing.assert_allclose(
        execute(program, [inputs[k] for k in kept])[0], execute(original, inputs)[0], rtol=1e-12, atol=1e-12
    )


def test_side_by_side_shares_operands_and_advances_together():
    chain = compose(total(4, "float32", "chain"), [(product("float32"), {slot: 0}) for slot in range(4)])[0]
    # Two blocks of one row: the panels of the left operand are shared.
    left = {slot for node in chain.nodes for slot in [node.operands[-2]]}
    first = list(range(8))
    second = [slot if slot in left else slot + 8 for slot in range(8)]
    specs = [chain.inputs[slot % 8] for slot in range(16)]
    used = sorted({*first, *second})
    number = {slot: position for position, slot in enumerate(used)}
    program, slots = side_by_side(
        chain, [[number[s] for s in first], [number[s] for s in second]], [specs[s] for s in used]
    )
    check(program)
    assert len(program.inputs) == 12 == len(slots)
    assert len(program.outputs) == 2


@pytest.mark.parametrize("subscripts", ["ij,jk->ik", "ji,jk->ik", "ij,kj->ik", "ij,jk->ki", "ji,kj->ki"])
def test_an_einsum_of_two_matrices_is_a_product(subscripts):
    build = Builder()
    left, right, _ = subscripts.replace("->", ",").split(",")
    sizes = {"i": 3, "j": 4, "k": 5}
    shapes = [tuple(sizes[c] for c in term) for term in (left, right)]
    inputs = [build.input(ArraySpec(shape, "float64")) for shape in shapes]
    original = build.finish(build.add("einsum", inputs, subscripts=subscripts))[0]
    program, slots = compose(original, [])
    assert "matmul" in operators(program)
    assert "einsum" not in operators(program)
    arrays = [np.random.default_rng(i).standard_normal(shape) for i, shape in enumerate(shapes)]
    np.testing.assert_allclose(
        execute(program, [arrays[slot] for slot in slots])[0], np.einsum(subscripts, *arrays), rtol=1e-12
    )


@pytest.mark.parametrize("subscripts", ["ij,ij->ij", "ij,jk->ijk", "ii,ij->ij", "ij,jk->k"])
def test_other_einsums_stay(subscripts):
    build = Builder()
    inputs = [build.input(ArraySpec((3, 3), "float64")) for _ in range(2)]
    program, _ = compose(build.finish(build.add("einsum", inputs, subscripts=subscripts))[0], [])
    assert operators(program) == ["einsum"]


def test_a_sum_of_sums_without_products_stays_as_it_is():
    build = Builder()
    a, b, c, d = (build.input(ArraySpec((3, 3), "float32")) for _ in range(4))
    (left,), (right,) = build.add("add", (a, b)), build.add("add", (c, d))
    original, _ = build.finish(build.add("add", (left, right)))
    assert accumulate(original)[0] == original

"""Recomputation: another honest machine's rounding is explained, whatever the operator; a lie is not."""

from functools import partial

import numpy as np
import pytest

from goblin_dask.errors import InputError
from goblin_dask.graphs.builder import Builder
from goblin_dask.graphs.execute import execute
from goblin_dask.graphs.operators import CATALOGUE, LINALG
from goblin_dask.messages import ArraySpec
from goblin_dask.verify.check import check_result
from goblin_dask.verify.evaluate import DOUBLE, evaluate
from goblin_dask.verify.recompute import check_by_recomputation

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def build(specs, make):
    builder = Builder()
    values = [builder.input(ArraySpec(shape, dtype)) for shape, dtype in specs]
    program, slots = builder.finish(make(builder, *values))
    return program, slots


def example_programs(name, most):
    """Programs of one operator, from its own examples."""
    for operands, attributes in list(CATALOGUE[name].examples())[:most]:
        arrays = [np.asarray(operand) for operand in operands]
        builder = Builder()
        values = [builder.input(ArraySpec(array.shape, array.dtype.name)) for array in arrays]
        try:
            program, slots = builder.finish(builder.add(name, values, **attributes))
            outputs = execute(program, [arrays[slot] for slot in slots])
        except InputError:  # examples tell what is refused, too
            continue
        yield program, [arrays[slot] for slot in slots], outputs


@pytest.mark.full
@pytest.mark.parametrize("name", sorted(CATALOGUE))
def test_every_operator_accepts_its_own_result_and_a_better_rounded_one(name, full):
    """The better one is computed in double precision and rounded once: an honest machine may be that good."""
    for program, inputs, outputs in example_programs(name, most=200 if full else 20):
        assert check_by_recomputation(program, inputs, outputs).verdict == "accepted"
        better = evaluate(program, inputs, program.outputs, DOUBLE)
        if any(a.shape != b.shape for a, b in zip(outputs, better, strict=True)):
            continue
        rounded = [b.astype(a.dtype) if a.dtype.kind not in "biu" else a for a, b in zip(outputs, better, strict=True)]
        finding = check_by_recomputation(program, inputs, rounded)
        wanted = ("accepted", "unproven") if name in LINALG | {"partition"} else ("accepted",)
        assert finding.verdict in wanted, (program, inputs, outputs, rounded, finding)


@pytest.mark.parametrize("name", sorted(CATALOGUE))
def test_every_operator_refuses_a_wrong_result(name):
    """One element of an output that cannot be uncertain is changed beyond doubt."""
    refused = 0
    for program, inputs, own in example_programs(name, most=200):
        outputs = [np.array(output) for output in own]
        target = next((o for o in outputs if np.isfinite(o.astype(np.complex128)).any()), None)
        if target is None:
            continue
        finite = np.argwhere(np.isfinite(target.astype(np.complex128)))
        at = tuple(finite[len(finite) // 2])
        if target.dtype.kind == "b":
            target[at] = ~target[at]
        elif target.dtype.kind in "iu":
            target[at] ^= target.dtype.type(1)
        else:
            top = float(np.abs(target[np.isfinite(target)].astype(np.complex128)).max())
            target[at] = target.dtype.type(float(np.abs(target[at])) + 3 * top + 1)
        if not np.isfinite(np.complex128(target[at])):
            continue
        finding = check_by_recomputation(program, inputs, outputs)
        assert finding.verdict != "accepted", (program, inputs, outputs, finding)
        refused += 1
        if refused == 8:
            break
    assert refused


SUM = [((1000, 40), "float32")]


def test_sums_in_another_order_are_honest():
    program, _ = build(SUM, lambda b, x: b.add("sum", [b.add("exp", [x])[0]], axes=(0,)))
    rng = np.random.default_rng(0)
    x = rng.standard_normal((1000, 40), np.float32)
    terms = np.exp(x)
    honest = {
        "reversed": terms[::-1].sum(axis=0),
        "pairwise": np.ascontiguousarray(terms.T).sum(axis=1),
        "running": terms.cumsum(axis=0)[-1],
        "permuted": terms[rng.permutation(1000)].sum(axis=0),
    }
    for name, y in honest.items():
        assert check_result(program, [x], [y.astype("f4")]).verdict == "accepted", name
    wrong = terms.sum(axis=0)
    wrong[3] += terms[7, 3]
    report = check_result(program, [x], [wrong])
    assert (report.verdict, report.method) == ("wrong", "recompute")


def test_a_running_sum_cut_in_chunks_is_no_lie():
    """Most values differ in bits from the flat running sum, none by more than rounding explains."""
    r = (np.random.default_rng(0).random((2, 1500)) * 1000).astype("f4")
    program, _ = build([(r.shape, "float32")], lambda b, x: b.add("cumulative_sum", [x], axis=1))
    parts, total = [], np.zeros((2, 1), "f4")
    for start in range(0, 1500, 500):
        parts.append(r[:, start : start + 500].cumsum(axis=1) + total)
        total = parts[-1][:, -1:]
    chunked = np.hstack(parts)
    assert np.mean(chunked != r.cumsum(axis=1)) > 0.3
    assert check_result(program, [r], [chunked]).verdict == "accepted"
    chunked[1, 700] *= np.float32(1.001)
    assert check_result(program, [r], [chunked]).verdict == "wrong"


def test_a_small_element_is_checked_beside_large_ones():
    program, _ = build([((2, 50), "float32")], lambda b, x: b.add("exp", [b.add("multiply", [x, x])[0]]))
    x = np.random.default_rng(0).uniform(-9, 9, (2, 50)).astype("f4")
    (y,) = execute(program, [x])
    at = np.unravel_index(np.argmin(y), y.shape)
    wrong = y.copy()
    wrong[at] *= np.float32(1.001)
    assert check_result(program, [x], [wrong]).verdict == "wrong"


def test_decisions_near_a_discontinuity_are_not_blamed():
    """floor and argmax of values that rounding may carry over the edge: either side is honest there, only there."""
    program, _ = build(
        [((4, 6), "float32")],
        lambda b, x: (
            b.add("floor", [b.add("exp", [x])[0]])[0],
            b.add("argmax", [b.add("exp", [x])[0]], axis=1)[0],
        ),
    )
    x = np.random.default_rng(0).uniform(0, 2, (4, 6)).astype("f4")
    x[0, 0] = np.float32(np.log(3.0))
    x[1, 2] = x[1, 4] = 2.5
    floor, best = execute(program, [x])
    other, tied = floor.copy(), best.copy()
    other[0, 0] = 5 - floor[0, 0]  # 2 or 3
    tied[1] = 6 - best[1]  # 2 or 4
    assert check_result(program, [x], [other, tied]).verdict == "accepted"
    elsewhere = floor.copy()
    elsewhere[2, 2] += 1
    assert check_result(program, [x], [elsewhere, best]).verdict == "wrong"
    elsewhere = best.copy()
    elsewhere[2] = (best[2] + 1) % 6
    assert check_result(program, [x], [floor, elsewhere]).verdict == "wrong"


def test_a_true_zero_has_an_absolute_tolerance():
    """Cancellation leaves noise whose relative error is anything."""
    program, _ = build(
        [((300,), "float32")],
        lambda b, x: b.add("sum", [b.add("subtract", [b.add("exp", [x])[0], b.add("expm1", [x])[0]])[0]], axes=(0,)),
    )
    x = np.random.default_rng(0).standard_normal(300, np.float32)
    (y,) = execute(program, [x])
    assert check_result(program, [x], [np.asarray(y + np.float32(2e-5))]).verdict == "accepted"
    assert check_result(program, [x], [np.asarray(y + np.float32(1))]).verdict == "wrong"


def test_classes_of_not_numbers():
    program, _ = build([((3,), "float64")], lambda b, x: b.add("log", [x]))
    x = np.array([-1.0, 0.0, 1.0])
    (y,) = execute(program, [x])
    assert check_result(program, [x], [y]).verdict == "accepted"
    for i, value in ((0, 1.0), (1, np.inf), (1, np.nan), (2, np.nan), (2, np.inf)):
        wrong = y.copy()
        wrong[i] = value
        assert check_result(program, [x], [wrong]).verdict == "wrong", (i, value)


def test_what_the_checker_cannot_compute_says_nothing():
    program, _ = build([((3, 3), "float64")], lambda b, x: b.add("inv", [x]))
    assert check_result(program, [np.zeros((3, 3))], [np.ones((3, 3))]).verdict == "failed"


def test_a_sum_of_products_is_proven_wrong_as_algebra_would():
    """A host that has lied before is recomputed: that must not prove less than the check that caught it."""
    shapes = [((38, 450), "float32"), ((450, 36), "float32"), ((38, 450), "float32"), ((450, 36), "float32")]

    def chain(builder, a, b, c, d):
        return builder.add("addmm", [*builder.add("matmul", [a, b]), c, d])

    program, slots = build(shapes, chain)
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(shape, np.float32) for shape, _ in shapes]
    inputs = [arrays[slot] for slot in slots]
    (output,) = execute(program, inputs)
    a, b, c, d = arrays
    sequential = np.zeros_like(output)
    for left, right in ((c, d), (a, b)):
        for column, row in zip(left.T, right, strict=True):
            sequential += np.outer(column, row)
    assert check_by_recomputation(program, inputs, [sequential]).verdict == "accepted"
    lie = np.array(output)
    lie[5, 7] += 0.1  # the threshold of the algebraic check of such data
    assert check_by_recomputation(program, inputs, [lie]).verdict == "wrong"


def vague(b, x, limit):
    """``where(all(exp(x) < limit), exp(x), 2 exp(x))``: one comparison at its edge is in doubt of every element."""
    (y,) = b.add("exp", [x])
    (every,) = b.add("all", b.add("less", [y, b.constant(np.float32(limit))]))
    return b.add("where", [every, y, *b.add("add", [y, y])])


@pytest.mark.parametrize("limit", [1.0, 100.0])
def test_what_has_no_bound_is_not_anything(limit):
    program, _ = build([((8, 8), "float32")], partial(vague, limit=limit))
    x = -np.abs(np.random.default_rng(0).standard_normal((8, 8), np.float32))
    x[3, 4] = 0.0
    (own,) = execute(program, [x])
    slightly = own * np.float32(1 + 2**-23)
    assert check_by_recomputation(program, [x], [slightly]).verdict == "accepted"
    for lie in (own * np.float32(1000), -own, own * 0, own * np.float32(np.nan)):
        assert check_by_recomputation(program, [x], [lie]).verdict == ("unproven" if limit == 1.0 else "wrong")


@pytest.mark.parametrize("key", [2**63, 1])
def test_masks_and_keys_save_no_lie_from_being_proven(key):
    """Infinities that a mask puts in are gone after the softmax; keys of random numbers are large, and no numbers."""
    rng = np.random.default_rng(0)
    x = np.where(np.tri(8, dtype=bool), rng.standard_normal((8, 8)), -np.inf).astype("f4")

    def make(b, x, v, key):
        (kept,) = b.add("random_uniform", [key], shape=(8, 8), dtype="float32")
        (weights,) = b.add("multiply", [b.add("_softmax", [x], dim=1)[0], kept])
        return b.add("matmul", [weights, v])

    program, slots = build([((8, 8), "float32"), ((8, 4), "float32"), ((2,), "uint64")], make)
    given = (x, rng.standard_normal((8, 4)).astype("f4"), np.array([key, key], "u8"))
    inputs = [given[slot] for slot in slots]
    (honest,) = execute(program, inputs)
    assert check_by_recomputation(program, inputs, [honest]).verdict == "accepted"
    assert check_by_recomputation(program, inputs, [1000 * honest]).verdict == "wrong"

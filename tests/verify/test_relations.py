"""Relations: results that are as right as the checker's own are accepted, and no others."""

import re

import numpy as np
import pytest
from threadpoolctl import threadpool_limits

from goblin_dask.errors import InputError
from goblin_dask.graphs.builder import Builder
from goblin_dask.graphs.execute import execute
from goblin_dask.graphs.operators import CATALOGUE
from goblin_dask.messages import ArraySpec
from goblin_dask.testing.liars import corrupt
from goblin_dask.verify.check import check_result, plan_check, thresholds
from goblin_dask.verify.claims import check_claims, claims_of
from goblin_dask.verify.relations import RELATIONS

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def matrices(rng, m, n):
    """Kinds of matrices that make decompositions hard."""
    g = rng.standard_normal((m, n))
    i, j = np.ogrid[:m, :n]
    k = min(m, n)
    left, right = (np.linalg.qr(rng.standard_normal((size, k)))[0] for size in (m, n))
    return {
        "normal": g,
        "uniform": rng.random((m, n)),
        "constant": 1 + 1e-3 * g,
        "hilbert": 1.0 / (i + j + 1),
        "columns": g * 10.0 ** rng.integers(-8, 8, n),
        "rows": g * 10.0 ** rng.integers(-8, 8, m)[:, None],
        "ill-conditioned": (left * np.logspace(0, -10, k)) @ right.T,
        "low rank": g[:, : max(1, k // 4)] @ rng.standard_normal((max(1, k // 4), n)),
        "sparse": g * (rng.random((m, n)) < 0.1),
        "alternating": (-1.0) ** (i + j) * (1 + 1e-2 * g),
        "tiny": g * 1e-20,
        "identity": np.eye(m, n),
        "zeros": np.zeros((m, n)),
    }


SINGULAR = re.compile("ingular|ositive|factorization")
SHAPES = ((1, 1), (3, 3), (5, 2), (2, 5), (40, 40), (200, 30), (150, 150), (30, 200))
CASES = [(dtype, shape) for dtype in ("float32", "float64", "complex64", "complex128") for shape in SHAPES]


def applications(rng, a):
    """What is computed of a matrix: operator, operands, attributes."""
    m, n = a.shape
    yield "qr", (a,), {}
    yield "qr", (a,), {"mode": "complete"}
    yield "svd", (a,), {"full_matrices": False}
    yield "svd", (a,), {}
    yield "lu", (a,), {}
    if m == n:
        h = a @ a.conj().T
        h = h + np.eye(n, dtype=a.dtype) * a.dtype.type(n * 1e-5 * float(np.abs(h).max()) + 1e-30)
        b = (rng.standard_normal((n, 7)) * 10.0 ** np.arange(7)).astype(a.dtype)
        yield "eigh", (h,), {}
        yield "eigh", (h,), {"triangle": "U"}
        yield "cholesky", (h,), {}
        yield "cholesky", (h,), {"upper": True}
        yield "inv", (a,), {}
        yield "solve", (a, b), {}
        yield "solve", (a, b[:, 0].copy()), {}
        yield "solve_triangular", (np.tril(a) + np.eye(n, dtype=a.dtype), b), {"lower": True}
        yield "solve_triangular", (a + np.eye(n, dtype=a.dtype), b), {"trans": 2, "unit_diagonal": True}


def program_of(name, operands, **attributes):
    builder = Builder()
    values = [builder.input(ArraySpec(o.shape, o.dtype.name)) for o in operands]
    program, slots = builder.finish(builder.add(name, values, **attributes))
    assert slots == tuple(range(len(operands)))
    return program


def judged(program, operands, outputs, seed=1):
    """By relations alone, cheaper or not."""
    return check_claims(claims_of(program), operands, outputs, np.random.default_rng(seed))


def by_torch(name, operands, attributes):
    """The same by PyTorch, which calls another LAPACK in other ways."""
    torch = pytest.importorskip("torch")
    torch.set_num_threads(1)
    linalg, given = torch.linalg, [torch.from_numpy(np.array(o)) for o in operands]
    if name == "qr":
        found = linalg.qr(*given, **attributes)
    elif name == "svd":
        found = linalg.svd(*given, full_matrices=attributes.get("full_matrices", True))
    elif name == "eigh":
        found = linalg.eigh(*given, UPLO=attributes.get("triangle", "L"))
    elif name == "cholesky":
        found = (linalg.cholesky(*given, **attributes),)
    elif name in ("inv", "solve"):
        found = (getattr(linalg, name)(*given),)
    else:
        return None
    return [part.resolve_conj().numpy() for part in found]


@pytest.fixture(autouse=True)
def one_thread():
    """Several make small decompositions slow, on a busy machine very slow."""
    with threadpool_limits(1):
        yield


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_honest_decompositions_are_accepted(sample, full, report):
    """Every kind of matrix, size and dtype, by two libraries; the largest residual over its tolerance."""
    worst, count, rng = {}, 0, np.random.default_rng(5)
    for dtype, (m, n) in sample(CASES, 6):
        for kind, a in matrices(rng, m, n).items():
            a = (a + 1j * np.roll(a, 1)).astype(dtype) if dtype.startswith("c") else a.astype(dtype)
            for name, operands, attributes in applications(rng, a):
                program = program_of(name, operands, **attributes)
                results = []
                for compute in (execute, lambda _, operands, a=(name, attributes): by_torch(a[0], operands, a[1])):
                    try:
                        results.append(compute(program, operands))
                    except (InputError, RuntimeError) as error:  # there is no result to check
                        if not SINGULAR.search(str(error)):
                            raise
                for outputs in results:
                    if outputs is None:
                        continue
                    finding = judged(program, operands, outputs)
                    if finding is None:
                        continue
                    assert finding.verdict == "accepted", (name, attributes, kind, dtype, m, n, finding)
                    assert check_result(program, operands, outputs).verdict == "accepted"
                    worst[name] = max(worst.get(name, 0.0), finding.ratio)
                    count += 1
    report(
        f"honest decompositions: {count} accepted, none refused; largest residual over its tolerance: "
        + ", ".join(f"{name} {ratio:.2f}" for name, ratio in sorted(worst.items()))
    )
    assert count > (300 if not full else 3000)


LIES = ("entry", "tile", "zeros", "permuted", "sign", "nan")


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64"])
@pytest.mark.parametrize("shape", [(60, 60), (90, 30)])
def test_wrong_decompositions_are_not(dtype, shape, full):
    if not full and (dtype, shape) not in (("float32", (60, 60)), ("complex64", (90, 30))):
        pytest.skip("in the whole table")
    rng = np.random.default_rng(6)
    a = rng.standard_normal(shape) + (1j * rng.standard_normal(shape) if dtype.startswith("c") else 0)
    for name, operands, attributes in applications(rng, a.astype(dtype)):
        program = program_of(name, operands, **attributes)
        outputs = execute(program, operands)
        sizes = thresholds(program, operands, outputs)
        largest = [float(np.abs(output).max()) for output in outputs]
        for size, scale, output in zip(sizes, largest, outputs, strict=True):
            if output.dtype == np.float32:
                assert size <= 4e-2 * scale, (name, size, scale)
        for lie in LIES:
            if lie == "sign" and name in ("qr", "svd", "eigh"):
                continue  # of a whole factor: then the other one's must turn as well, and it is refused as it does not
            wrong = corrupt(lie, program, operands, outputs, rng, times=3.0)
            if all(np.array_equal(x, y, equal_nan=True) for x, y in zip(wrong, outputs, strict=True)):
                continue
            finding = judged(program, operands, wrong)
            if lie == "nan":
                assert finding is None
                assert check_result(program, operands, wrong).verdict == "wrong"
            else:
                assert finding.verdict != "accepted", (name, attributes, lie)


def test_gross_lies_are_proven():
    rng = np.random.default_rng(7)
    a = rng.standard_normal((50, 50)).astype("float32")
    for name, operands, attributes in applications(rng, a):
        program = program_of(name, operands, **attributes)
        wrong = [np.ascontiguousarray(np.roll(output, 1, axis=0)) for output in execute(program, operands)]
        assert check_result(program, operands, wrong).verdict == "wrong", name


def test_another_decomposition_is_as_right():
    """Signs of vectors are free, and a matrix of equal singular values has any vectors."""
    rng = np.random.default_rng(8)
    a = rng.standard_normal((40, 20))
    program = program_of("qr", (a,))
    q, r = execute(program, (a,))
    signs = rng.choice((-1.0, 1.0), 20)
    assert check_result(program, (a,), (q * signs, r * signs[:, None])).verdict == "accepted"
    eye = np.eye(30)
    program = program_of("svd", (eye,))
    turned = np.linalg.qr(rng.standard_normal((30, 30)))[0]
    assert check_result(program, (eye,), (turned, np.ones(30), turned.T)).verdict == "accepted"
    assert judged(program, (eye,), (turned, np.ones(30), -turned.T)).verdict == "wrong"


def test_a_batch_of_matrices():
    rng = np.random.default_rng(9)
    a = rng.standard_normal((3, 4, 30, 20)).astype("float32")
    for name in ("qr", "svd"):
        program = program_of(name, (a,))
        outputs = execute(program, (a,))
        assert judged(program, (a,), outputs).verdict == "accepted"
        wrong = [np.array(output) for output in outputs]
        wrong[0][2, 1, 5, 5] += 0.01
        assert judged(program, (a,), wrong).verdict != "accepted"


ARRAYS = {
    "floats": np.random.default_rng(1).standard_normal((5, 400)),
    "equal": np.random.default_rng(2).integers(0, 3, (5, 400)).astype("float32"),
    "nan": np.where(np.random.default_rng(3).random((5, 400)) < 0.1, np.nan, 1.0),
    "zeros": np.random.default_rng(4).choice([0.0, -0.0, np.inf, -np.inf], (5, 400)),
    "int8": np.random.default_rng(5).integers(-128, 128, (5, 400)).astype("int8"),
    "uint64": np.random.default_rng(6).integers(2**64 - 9, 2**64, (5, 400), dtype="uint64"),
    "bool": np.random.default_rng(7).random((5, 400)) < 0.5,
    "complex": np.random.default_rng(8).choice([0, 1], (5, 400)) * 1j + np.random.default_rng(9).choice([0, 1], 400),
}


class TestOrders:
    OPERATORS = (
        ("sort", {}),
        ("argsort", {}),
        ("argsort", {"stable": True}),
        ("partition", {"kth": (7, 300)}),
        ("argpartition", {"kth": (7, 300)}),
    )

    @pytest.mark.parametrize("kind", sorted(ARRAYS))
    @pytest.mark.parametrize("axis", [0, 1])
    def test_honest_orders_are_accepted_and_changed_ones_are_not(self, kind, axis):
        array = ARRAYS[kind] if axis else np.ascontiguousarray(ARRAYS[kind].T)
        for name, attributes in self.OPERATORS:
            program = program_of(name, (array,), axis=axis, **attributes)
            outputs = execute(program, (array,))
            finding = judged(program, (array,), outputs)
            if finding is None:
                assert kind == "complex"
                assert name in ("partition", "argpartition")
                continue
            assert finding.verdict == "accepted", (name, finding)
            wrong = np.array(outputs[0])
            wrong[tuple(n // 2 for n in wrong.shape)] = wrong[(0,) * wrong.ndim]
            if not np.array_equal(
                np.sort(wrong, axis=axis), np.sort(outputs[0], axis=axis), equal_nan=kind != "uint64"
            ):
                assert judged(program, (array,), [wrong]).verdict == "wrong"
            backwards = np.ascontiguousarray(np.flip(outputs[0], axis))
            assert check_result(program, (array,), [backwards]).verdict == "wrong"

    def test_equal_elements_may_stand_in_any_order_unless_the_sort_is_stable(self):
        array = ARRAYS["equal"]
        order = np.argsort(array, axis=1, kind="stable")
        other = 399 - np.argsort(array[:, ::-1], axis=1, kind="stable")
        assert (order != other).any()
        np.testing.assert_array_equal(np.take_along_axis(array, order, 1), np.take_along_axis(array, other, 1))
        free, stable = (program_of("argsort", (array,), axis=1, stable=flag) for flag in (False, True))
        assert check_result(free, (array,), [order]).verdict == "accepted"
        assert check_result(free, (array,), [other]).verdict == "accepted"
        assert check_result(stable, (array,), [order]).verdict == "accepted"
        assert check_result(stable, (array,), [other]).verdict == "wrong"

    def test_a_partition_may_have_any_order_on_either_side(self):
        array = ARRAYS["floats"]
        program = program_of("partition", (array,), axis=1, kth=(100,))
        (given,) = execute(program, (array,))
        other = np.sort(given, axis=1)
        assert (other != given).any()
        assert check_result(program, (array,), [other]).verdict == "accepted"
        other[:, [0, 399]] = other[:, [399, 0]]
        assert check_result(program, (array,), [other]).verdict == "wrong"

    def test_other_elements_in_order_are_not_the_operands(self):
        array = ARRAYS["floats"]
        program = program_of("sort", (array,), axis=1)
        assert judged(program, (array,), [np.sort(array + 1e-9, axis=1)]).verdict == "wrong"
        assert judged(program, (array,), [np.sort(np.flip(array, 0), axis=1)]).verdict == "wrong"


class TestTransforms:
    @pytest.mark.parametrize("dtype", ["float32", "float64"])
    @pytest.mark.parametrize("name", sorted(n for n, r in RELATIONS.items() if r.rule == "combination"))
    def test_honest_ones_are_accepted_and_wrong_ones_are_not(self, name, dtype, full):
        rng = np.random.default_rng(11)
        for shape, n, norm in (((30, 64), None, "backward"), ((50, 37), 50, "ortho"), ((1300, 20), 16, "forward")):
            array = rng.standard_normal(shape) * 10.0 ** rng.integers(-6, 6, (shape[0], 1))
            array = array.astype(dtype)
            if name not in ("rfft", "ihfft", "rfftn"):
                array = (array + 1j * np.roll(array, 3)).astype("complex64" if dtype == "float32" else "complex128")
            more = {"axes": (1,), "s": (n,) if n else ()} if name.endswith("n") else {"axis": 1, "n": n}
            program = program_of(name, (array,), norm=norm, **more)
            outputs = execute(program, (array,))
            finding = judged(program, (array,), outputs)
            assert finding.verdict == "accepted", finding
            assert finding.ratio < 0.5
            wrong = np.array(outputs[0])
            wrong[7, 3] *= 1 + (1e-3 if dtype == "float32" else 1e-11)
            at = judged(program, (array,), [wrong])
            assert at.verdict != "accepted", (name, shape, at)
            assert judged(program, (array,), [np.roll(outputs[0], 1, 0)]).verdict == "wrong"

    def test_several_axes(self):
        rng = np.random.default_rng(12)
        array = rng.standard_normal((20, 6, 5, 7))
        for name, axes in (("fftn", (3, 1)), ("rfftn", (1, 3)), ("irfftn", (2, 3)), ("ifftn", (1, 2, 3))):
            program = program_of(name, (array,), axes=axes)
            outputs = execute(program, (array,))
            assert judged(program, (array,), outputs).verdict == "accepted"
            wrong = np.array(outputs[0])
            wrong[3, 2, 1, 1] += 1e-9
            assert judged(program, (array,), [wrong]).verdict != "accepted"

    def test_few_vectors_are_transformed_again(self):
        assert claims_of(program_of("fft", (np.ones((2, 64)),), axis=1)) is None


class TestClaims:
    def program(self, dtype="float32"):
        """A prologue, a decomposition, and something that is computed from its factors."""
        builder = Builder()
        x = builder.input(ArraySpec((120, 60), dtype))
        y = builder.input(ArraySpec((60,), dtype))
        (a,) = builder.add("exp", [x])
        (a,) = builder.add("multiply", [a, y])
        q, r = builder.add("qr", [a])
        u, s, v = builder.add("svd", [r])
        (log,) = builder.add("log", [s])
        (total,) = builder.add("sum", [q], axes=(0,))
        program, _ = builder.finish([q, r, u, s, v, log, total])
        rng = np.random.default_rng(13)
        return program, [rng.standard_normal(spec.shape).astype(dtype) for spec in program.inputs]

    @pytest.mark.parametrize("dtype", ["float32", "float64"])
    def test_a_program_around_them(self, dtype):
        program, inputs = self.program(dtype)
        claims = claims_of(program)
        assert [claim.step.operator.name for claim in claims.claims] == ["qr", "svd"]
        assert claims.rest.outputs == (5, 6)
        outputs = execute(program, inputs)
        report = check_result(program, inputs, outputs)
        assert (report.verdict, report.method) == ("accepted", plan_check(program).method)
        for number, output in enumerate(outputs):
            wrong = [np.array(one) for one in outputs]
            wrong[number] = np.ascontiguousarray(output[::-1])
            assert judged(program, inputs, wrong).verdict == "wrong", number

    def test_results_of_other_machines(self):
        """Factors of another sign, and what follows from them."""
        program, inputs = self.program()
        q, r, u, s, v, log, total = execute(program, inputs)
        assert check_result(program, inputs, (-q, -r, -u, s, v, log, -total)).verdict == "accepted"
        assert check_result(program, inputs, (-q, -r, u, s, v, log, -total)).verdict == "wrong"

    def test_what_is_not_handed_out_is_not_claimed(self):
        builder = Builder()
        x = builder.input(ArraySpec((50, 50), "float64"))
        _, r = builder.add("qr", [x])
        program, _ = builder.finish([r])
        assert claims_of(program) is None

    def test_an_output_that_occurs_twice(self):
        builder = Builder()
        x = builder.input(ArraySpec((50, 50), "float64"))
        q, r = builder.add("qr", [x])
        program, _ = builder.finish([q, r, q])
        a = np.random.default_rng(14).standard_normal((50, 50))
        q, r, again = execute(program, [a])
        assert judged(program, [a], (q, r, again)).verdict == "accepted"
        assert judged(program, [a], (q, r, -again)).verdict == "wrong"

    def test_operands_that_are_no_numbers_are_computed_again(self):
        a = np.full((30, 30), np.nan)
        program = program_of("qr", (a,))
        outputs = execute(program, (a,))
        assert judged(program, (a,), outputs) is None
        assert check_result(program, (a,), outputs).method == "recompute"
        assert check_result(program, (a,), outputs).verdict == "accepted"

    def test_the_order_of_uncertain_elements_is_computed_again(self):
        builder = Builder()
        x = builder.input(ArraySpec((500,), "float32"))
        (y,) = builder.add("exp", [x])
        (order,) = builder.add("argsort", [y])
        program, _ = builder.finish([order])
        a = np.random.default_rng(15).standard_normal(500).astype("float32")
        outputs = execute(program, [a])
        assert judged(program, [a], outputs) is None
        assert check_result(program, [a], outputs).verdict == "accepted"


def test_relations_are_of_operators():
    assert RELATIONS.keys() <= CATALOGUE.keys()
    rules = {name: operator.check for name, operator in CATALOGUE.items()}
    assert {name: rule for name, rule in rules.items() if rule not in ("recompute", "projection")} == {
        name: relation.rule for name, relation in RELATIONS.items()
    }
    assert {relation.rule for relation in RELATIONS.values()} == {"residual", "order", "combination"}


def test_large_ones_are_checked_by_relation_and_small_ones_again():
    large, small = (np.random.default_rng(16).standard_normal((n, n)) for n in (400, 4))
    for name in ("qr", "svd", "eigh"):
        assert plan_check(program_of(name, (large,))).method == "relation"
        assert plan_check(program_of(name, (small,))).method == "recompute"

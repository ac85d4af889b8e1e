"""No honest result is blamed: products of every kind of data, shape, order of summation, dtype and backend.

Beside the products themselves go programs, as volunteers of both backends compute them, each checked as `check_result`
would and by projection.
"""

import itertools
from collections import Counter

import numpy as np
import pytest

from goblin_dask.graphs.backends.choice import backend_named
from goblin_dask.graphs.builder import Builder
from goblin_dask.graphs.execute import execute
from goblin_dask.messages import ArraySpec
from goblin_dask.testing.matrices import KINDS, ORDERS, matrix, operands
from goblin_dask.verify.algebraic import check_algebraically
from goblin_dask.verify.check import check_result
from goblin_dask.verify.contraction import Contraction, Tile
from goblin_dask.verify.decompose import decompose
from goblin_dask.verify.operands import Operand
from goblin_dask.verify.product import check_product

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # overflow and NaN are among the subjects

PARTNERS = ("same", "normal", "uniform", "any")
"""Kinds of the right operand; "any" is drawn."""
SHAPES = (
    (3, 3, 3),
    (40, 1, 30),
    (1, 700, 1),
    (64, 128, 96),
    (100, 1000, 80),
    (300, 60, 1300),
    (33, 2100, 1100),
    (20, 8192, 30),
)
BACKENDS = ("numpy", "torch")


def by_torch(a, b):
    return torch.matmul(torch.from_numpy(a), torch.from_numpy(b)).numpy()


COMPUTE = {**ORDERS, "torch": by_torch}


class Table:
    """Verdicts by dtype and partner; at the end, one line for each and no blame."""

    def __init__(self, name):
        self.name, self.rows, self.refused, self.settled = name, {}, [], 0

    def add(self, row, case, found):
        self.rows.setdefault(row, Counter())[found.verdict] += 1
        self.settled += bool(found.settled)
        if found.verdict != "accepted" or not found.ratio <= 1:
            self.refused.append(f"{case}: {found.verdict}, {found.ratio:.3g} {found.reason}")

    def finish(self, report):
        total = sum(self.rows.values(), Counter())
        for row, counts in sorted(self.rows.items()):
            report(f"{self.name}, {', '.join(row)}: {dict(counts)}")
        report(f"{self.name}, all: {dict(total)}; in {self.settled} rows were settled")
        for line in self.refused[:100]:
            report(f"    {line}")
        assert set(total) <= {"accepted", "unproven"}, self.refused
        assert total["unproven"] <= total.total() / 1000, self.refused
        assert len(self.refused) == total["unproven"]


def partner_of(kind, partner, rng):
    return {"same": kind, "any": rng.choice(list(KINDS))}.get(partner, partner)


def generator(case):
    """Deterministic, and its own for each case: a sample draws what the whole table draws."""
    return np.random.default_rng(list(repr(case).encode()))


@pytest.mark.full
def test_products_of_every_kind_shape_and_order(sample, report):
    cases = itertools.product(("float32", "float64"), PARTNERS, KINDS, SHAPES, COMPUTE)
    table = Table("honest products")
    for case in sample(list(cases), 120):
        dtype, partner, kind, shape, order = case
        rng = generator(case)
        a, b = operands(kind, partner_of(kind, partner, rng), shape, rng, dtype)
        contraction = Contraction([Operand(a)], [Operand(b)], [Tile(COMPUTE[order](a, b), ((0, 0),))])
        found = check_product(contraction, rng)
        table.add((dtype, partner), case, found)
    table.finish(report)


def build(specs, make):
    builder = Builder()
    values = [builder.input(ArraySpec(shape, dtype)) for shape, dtype in specs]
    return builder.finish(make(builder, *values))


def one(b, name, *operands, **attributes):
    return b.add(name, operands, **attributes)[0]


def turned(b, x):
    return one(b, "permute_dims", x, axes=(1, 0))


def scalar(b, x, value):
    return b.constant(value, b.spec(x).dtype)


def chain(b, *v):
    """A sum of panels, which accumulates."""
    half = len(v) // 2
    total = one(b, "matmul", v[0], v[half])
    for x, y in zip(v[1:half], v[half + 1 :], strict=True):
        total = one(b, "addmm", total, x, y)
    return total


def layer_norm(b, x, y):
    moved = one(b, "add", x, scalar(b, x, 1e4))
    return one(
        b, "matmul", b.add("native_layer_norm", (moved,), normalized_shape=(b.spec(x).shape[1],), eps=1e-5)[0], y
    )


def centred(b, x):
    return one(b, "subtract", x, one(b, "mean", x, axes=(0,), keepdims=True))


def small(b, x):
    return one(b, "multiply", one(b, "abs", x), scalar(b, x, 1e-4))


def softmax(b, x):
    """Weights of attention."""
    e = one(b, "exp", one(b, "subtract", x, one(b, "max", x, axes=(1,), keepdims=True)))
    return one(b, "divide", e, one(b, "sum", e, axes=(1,), keepdims=True))


M, K, N = 60, 300, 70
LEFT, RIGHT = ("left", (M, K)), ("right", (K, N))
FORMS = {
    "matmul": ((LEFT, RIGHT), lambda b, x, y: one(b, "matmul", x, y)),
    "transposed": ((("left", (K, M)), RIGHT), lambda b, x, y: one(b, "matmul", turned(b, x), y)),
    "Gram": ((LEFT,), lambda b, x: one(b, "matmul", x, turned(b, x))),
    "covariance": ((("left", (K, M)),), lambda b, x: one(b, "matmul", turned(b, centred(b, x)), centred(b, x))),
    "batch": ((("left", (3, M, K)), ("right", (3, K, N))), lambda b, x, y: one(b, "matmul", x, y)),
    "einsum": (
        (("left", (K, 6, 10)), ("right", (K, 7, 5))),
        lambda b, x, y: one(b, "einsum", x, y, subscripts="aij,akl->ijkl"),
    ),
    "tensordot": (
        (("left", (M, 30, 10)), ("right", (10, 30, N))),
        lambda b, x, y: one(b, "tensordot", x, y, a_axes=(1, 2), b_axes=(1, 0)),
    ),
    "chain": ((LEFT,) * 3 + (RIGHT,) * 3, chain),
    "difference": (
        (LEFT, RIGHT, LEFT, RIGHT),
        lambda b, p, q, r, s: one(b, "subtract", one(b, "matmul", p, q), one(b, "matmul", r, s)),
    ),
    "log1p": ((LEFT, RIGHT), lambda b, x, y: one(b, "matmul", one(b, "log1p", small(b, x)), y)),
    "log": (
        (LEFT, RIGHT),
        lambda b, x, y: one(b, "matmul", one(b, "log", one(b, "add", small(b, x), scalar(b, x, 1.0))), y),
    ),
    "tanh and softmax": ((LEFT, RIGHT), lambda b, x, y: one(b, "matmul", one(b, "tanh", x), softmax(b, y))),
    "exp": ((LEFT, RIGHT), lambda b, x, y: one(b, "matmul", one(b, "exp", x), y)),
    "layer norm": ((LEFT, RIGHT), layer_norm),
    "scaled": (
        (LEFT, RIGHT, ("scale", (1, K))),
        lambda b, x, y, s: one(b, "matmul", one(b, "multiply", x, s), y),
    ),
}


def draw(name, shape, kinds, rng, dtype):
    flat = (int(np.prod(shape[:-1])), shape[-1])
    return matrix(kinds[name], rng, flat, dtype).reshape(shape)


def check_both(table, row, case, program, inputs, outputs, rng):
    """As volunteers' results are checked, and by projection where that is not how."""
    found = check_result(program, inputs, outputs, rng=rng)
    table.add((row, found.method), case, found)
    if found.method not in ("algebraic", "settle"):
        finding = check_algebraically(program, decompose(program), inputs, outputs, rng)
        table.add((row, "algebraic"), case, finding)


@pytest.mark.full
def test_programs_of_every_kind_on_every_backend(sample, report):
    cases = itertools.product(("float32", "float64"), PARTNERS, FORMS, KINDS, BACKENDS)
    table = Table("honest programs")
    for case in sample(list(cases), 60):
        dtype, partner, form, kind, backend = case
        rng = generator(case)
        specs, make = FORMS[form]
        program, slots = build([(shape, dtype) for _, shape in specs], lambda b, *v, make=make: [make(b, *v)])
        kinds = {"left": kind, "right": partner_of(kind, partner, rng), "scale": "lognormal"}
        arrays = [draw(name, shape, kinds, rng, dtype) for name, shape in specs]
        inputs = [arrays[slot] for slot in slots]
        outputs = execute(program, inputs, backend=backend_named(backend))
        check_both(table, dtype, case, program, inputs, outputs, rng)
    table.finish(report)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("form", FORMS)
def test_a_wrong_entry_after_a_prologue_is_refused(form, dtype):
    """However much the rounding of what is multiplied excuses."""
    specs, make = FORMS[form]
    program, slots = build([(shape, dtype) for _, shape in specs], lambda b, *v: [make(b, *v)])
    rng = np.random.default_rng(1)
    arrays = [
        draw(name, shape, {"left": "normal", "right": "normal", "scale": "normal"}, rng, dtype) for name, shape in specs
    ]
    inputs = [arrays[slot] for slot in slots]
    for backend in BACKENDS:
        (output,) = execute(program, inputs, backend=backend_named(backend))
        for size in (1.0,) if dtype == "float32" else (1.0, 1e-3):
            wrong = output.copy()
            at = tuple(rng.integers(n) for n in wrong.shape)
            wrong[at] += size * np.sqrt(np.mean(output**2))
            finding = check_algebraically(program, decompose(program), inputs, [wrong], rng)
            assert finding.verdict != "accepted", (backend, size, finding)


@pytest.mark.full
def test_other_dtypes_on_every_backend(sample, report):
    dtypes = ("complex64", "complex128", "float16", "bfloat16", "int32", "int64", "uint8", "bool")
    shapes = ((3, 3, 3), (1, 700, 1), (50, 300, 60), (30, 2100, 40))
    cases = itertools.product(dtypes, ("same", "any"), KINDS, shapes, BACKENDS)
    table = Table("honest products of other dtypes")
    for case in sample(list(cases), 60):
        dtype, partner, kind, shape, backend = case
        rng = generator(case)
        a, b = operands(kind, partner_of(kind, partner, rng), shape, rng, dtype)
        program, _ = build([(a.shape, dtype), (b.shape, dtype)], lambda b, x, y: b.add("matmul", [x, y]))
        outputs = execute(program, [a, b], backend=backend_named(backend))
        check_both(table, dtype, case, program, [a, b], outputs, rng)
    table.finish(report)

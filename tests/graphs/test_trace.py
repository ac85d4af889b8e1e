"""Functions of NumPy become programs that do the same; what cannot says why."""

from __future__ import annotations

import random

import numpy as np
import pytest
import scipy.fft
import scipy.linalg
import scipy.special

from goblin_dask.errors import NotTraceable
from goblin_dask.graphs.capture import selfcheck
from goblin_dask.graphs.capture.pytree import flatten, is_array
from goblin_dask.graphs.execute import execute
from goblin_dask.graphs.trace import trace
from goblin_dask.messages import ArraySpec

WEIGHTS = np.arange(6.0)


def in_place(a):
    a = a.copy()
    a[1:3] = 0
    a[a > 1] = 1
    a[:, [0, 3]] = 7
    a += 1
    a[0] *= 2
    return a


def loop(a):
    out = np.empty_like(a)
    for i, row in enumerate(a):
        out[i] = row * i
    out[::2] = 1
    return out


def shape_assigned(a):
    b = a.copy()
    b.shape = (6, 4)
    return b


TRACEABLE = {
    "operators": lambda a: (a + 1) * 2 - a / 3 + abs(-a) ** 2 % 5 // 1,
    "comparisons": lambda a: (a > 0.5) & ~(a == 1) | (a <= -1),
    "reflected": lambda a: 1 - a + 2 / (a + 10) + 3 * a,
    "numpy scalar": lambda a: a * np.float64(0.1) + np.int8(3),
    "boolean": lambda a: a + True,
    "out": lambda a: np.add(a, 1, out=np.zeros_like(a)),
    "where": lambda a: np.add(a, 1, out=np.zeros_like(a), where=a > 0),
    "dtype": lambda a: np.add(a, a, dtype=np.float64),
    "outer": lambda a: np.multiply.outer(a[0], a[1]),
    "reduce": lambda a: np.add.reduce(a) + np.maximum.reduce(a, axis=1, keepdims=True),
    "accumulate": lambda a: np.add.accumulate(a, axis=1),
    "modf": lambda a: np.modf(a),
    "methods": lambda a: a.sum(0) + a.mean(axis=0) + a.T.reshape(6, 4).max(axis=1) + a.std(0) + a.ravel()[:6],
    "clip": lambda a: (a.clip(0, 1), np.clip(a, None, 0.5), np.clip(a, a_min=0, a_max=None)),
    "round": lambda a: (a.round(2), np.round(a)),
    "casts": lambda a: a.astype("f8").astype("i4"),
    "basic index": lambda a: (a[1], a[-1, ::-2], a[..., None], a[1:3, 2], a[None, 1:]),
    "integer index": lambda a: (a[[1, 0, 2]], a[:, [5, 0]], a[[0, 1], [2, 3]], a[1, [0, 2]], a[np.array([[0, 1]])]),
    "known mask": lambda a: a[:, np.array([True, False, True, False, True, True])],
    "in place": in_place,
    "loop": loop,
    "assigned shape": shape_assigned,
    "found array": lambda a: a * WEIGHTS,
    "made array": lambda a: a + np.arange(6) * np.linspace(0, 1, 6) - np.eye(4, 6),
    "joined": lambda a: (np.concatenate([a, a], 1), np.stack([a, a]), np.vstack([a, a]), np.hstack([a, a])),
    "diff": lambda a: (np.diff(a), np.diff(a, axis=0, n=2), np.gradient(a)),
    "pad": lambda a: (np.pad(a, 1), np.pad(a, ((0, 2), (1, 0)), mode="edge"), np.pad(a, 2, mode="reflect")),
    "moves": lambda a: (np.roll(a, 3), np.roll(a, 1, 0), np.flip(a), np.rot90(a), np.tile(a, (2, 1))),
    "repeats": lambda a: (np.repeat(a, 2, 0), np.repeat(a, [1, 0, 2, 1], axis=0)),
    "swaps": lambda a: (np.moveaxis(a, 0, 1), np.swapaxes(a, 0, 1), np.squeeze(a[None]), np.expand_dims(a, (0, 3))),
    "triangles": lambda a: (np.tril(a), np.triu(a, 1), np.diagonal(a), np.trace(a), np.diag(a[0])),
    "windows": lambda a: np.lib.stride_tricks.sliding_window_view(a, (2, 3)).sum((-1, -2)),
    "broadcast": lambda a: (np.broadcast_to(a, (3, 4, 6)), np.broadcast_arrays(a, a[0]), np.meshgrid(a[0], a[1])),
    "select": lambda a: np.select([a > 1, a < 0], [a, a * 2], 0),
    "likes": lambda a: (np.ones_like(a) + a, a * np.full_like(a, 3), np.zeros_like(a, dtype="i4") + a),
    "statistics": lambda a: (np.median(a, 0), np.percentile(a, [10, 50], axis=1), np.quantile(a, 0.3), np.ptp(a)),
    "averages": lambda a: (np.average(a, axis=1, weights=WEIGHTS), np.cov(a), np.corrcoef(a), np.var(a, ddof=1)),
    "nan": lambda a: (np.nansum(a, 0), np.nanmean(a), np.nanmax(a, 1), np.nanvar(a, 0), np.nancumsum(a)),
    "median among nan": lambda a: np.nanmedian(a),
    "order": lambda a: (np.sort(a), np.argsort(a, 0), np.partition(a, 2), np.argmax(a, 1), np.argmin(a), a.argmax(0)),
    "search": lambda a: (np.digitize(a, np.array([0.0, 1.0])), np.searchsorted(np.arange(4.0), a), np.isin(a, [0, 1])),
    "counts": lambda a: (np.histogram(a, 10, range=(0, 1))[0], np.count_nonzero(a, axis=0)),
    "products": lambda a: (a @ a.T, np.dot(a, a.T), np.tensordot(a, a, 2), np.inner(a, a), np.outer(a, a)),
    "kron": lambda a: np.kron(a, a),
    "einsum": lambda a: (np.einsum("ij,kj->ik", a, a), np.einsum("ij,kj", a, a), np.einsum("...j->...", a)),
    "norms": lambda a: (np.linalg.norm(a), np.linalg.norm(a, axis=1), np.linalg.norm(a, 1), np.linalg.norm(a[0], 3)),
    "decompositions": lambda a: (np.linalg.qr(a), np.linalg.svd(a, full_matrices=False), scipy.linalg.lu(a[:, :4])),
    "square": lambda a: np.linalg.inv(a[:, :4]) + np.linalg.solve(a[:, :4] + 10 * np.eye(4), a[:, :4]),
    "scipy": lambda a: (scipy.special.erf(a), scipy.fft.rfft(a), np.fft.fft2(a), np.fft.ifftn(a)),
    "complex": lambda a: ((a + 1j).real, (a * 1j).imag, np.conj(a + 2j), np.abs(a + 1j), np.angle(a + 1j)),
    "branch on shape": lambda a: a * 2 if a.shape[0] > 3 else a,
    "tree": lambda a: {"n": a.shape[0], "parts": [a[0], (a[1], None)]},
}  # fmt: skip


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("name", TRACEABLE)
def test_does_what_numpy_does(name, dtype):
    spec = ArraySpec((4, 6), dtype)
    traced = trace(TRACEABLE[name], (spec,))
    assert traced.program is not None
    selfcheck.confirm(lambda operands, literals: TRACEABLE[name](*operands), [spec], [], traced)


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint8", "int32", "int64", "float16", "float32", "complex64"])
@pytest.mark.parametrize("other", [1, True, 2.5, 1j, np.int16(3), np.float32(0.5), np.uint64(7)])
def test_promotes_as_numpy(dtype, other):
    function = lambda a: (a + other, a * other, np.equal(a, other), np.maximum(a, other))  # noqa: E731
    spec = ArraySpec((3,), dtype)
    traced = trace(function, (spec,))
    selfcheck.confirm(lambda operands, literals: function(*operands), [spec], [], traced)


def test_integers_beyond_the_dtype():
    with pytest.raises(NotTraceable, match="OverflowError: Python integer 300 out of bounds for int8"):
        trace(lambda a: a + 300, (ArraySpec((3,), "int8"),))
    traced = trace(lambda a: (a < 300, a + a), (ArraySpec((3,), "int8"),))
    less, double = execute(traced.program, [np.array([1, 100, -3], "i1")])
    assert less.all()
    assert double.tolist() == [2, -56, -6]


def view_is_written(a):
    b = a.copy()
    row = b[0]
    row[:] = 5
    return b + 0


REFUSED = {
    "mask": (lambda a: a[a > 0], "boolean mask"),
    "branch": (lambda a: a if a.any() else -a, "branch depends on data"),
    "float": (lambda a: float(a[0, 0]), "number depends on data"),
    "asarray": (lambda a: np.frombuffer(memoryview(a)), "TypeError"),
    "unique": (lambda a: np.unique(a), "depends on data"),
    "random": (lambda a: a + np.random.normal(size=a.shape), "random numbers"),
    "generator": (lambda a: a + np.random.default_rng(0).random(a.shape), "random numbers"),
    "python random": (lambda a: a + random.random(), "random numbers"),
    "unknown function": (lambda a: np.linalg.eig(a[:, :4]), "not in the catalogue"),
    "structured": (lambda a: a["x"], "structured"),
    "long loop": (lambda a: sum(a for _ in range(20_000)), "more than 10000"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refuses_with_a_reason(name):
    function, reason = REFUSED[name]
    with pytest.raises(NotTraceable, match=reason):
        trace(function, (ArraySpec((4, 6), "float64"),))


def test_arrays_among_the_arguments_are_inputs():
    traced = trace(lambda a, i: a[i], (ArraySpec((4, 6), "float64"), np.array([1, 3])))
    assert traced.slots == (("operand", 0), ("literal", 0))
    assert not traced.baked
    traced = trace(lambda a, n: a * int(n[0]), (ArraySpec((4,), "float64"), np.array([3])))
    assert traced.baked == {0}


def test_every_occurrence_is_an_input():
    spec = ArraySpec((4, 4), "float64")
    assert len(trace(lambda a, b: a @ b, (spec, spec)).program.inputs) == 2


def test_pads_with_numbers_and_edges():
    spec = ArraySpec((4, 6), "float64")
    assert [n.operator for n in trace(lambda a: np.pad(a, 1), (spec,)).program.nodes] == ["constant", "pad"]


def test_equal_functions_have_equal_programs():
    spec = ArraySpec((4, 4), "float64")
    first = trace(lambda a: np.tanh(a) * 2, (spec,)).program
    assert first.digest == trace(lambda b: np.tanh(b) * 2, (spec,)).program.digest


def branch_on_type(a):
    return a + 1 if isinstance(a, np.ndarray) else a + 2


class Noise:
    def __call__(self, a):
        return a + NOISE.normal()


NOISE = np.random.default_rng(0)
CALLS = []


def counts_calls(a):
    CALLS.append(1)
    return a + len(CALLS)


@pytest.mark.parametrize("function", [branch_on_type, Noise(), counts_calls, view_is_written])
def test_the_self_check_finds_what_traces_wrongly(function):
    spec = ArraySpec((4, 6), "float64")
    traced = trace(function, (spec,))
    with pytest.raises(selfcheck.Different):
        selfcheck.confirm(lambda operands, literals: function(*operands), [spec], [], traced)


def test_the_self_check_is_undecided_where_the_function_always_raises():
    spec = ArraySpec((4,), "float64")
    traced = trace(lambda a: a + 1, (spec,))

    def raises(operands, literals):
        raise ValueError("never")

    with pytest.raises(selfcheck.Undecided, match="never"):
        selfcheck.confirm(raises, [spec], [], traced)


def test_a_wrong_sum_is_found():
    """Of 512 float32 terms, where honest results differ by 512 · 2⁻²⁴ of the sum at most."""
    spec = ArraySpec((512,), "float32")
    traced = trace(lambda a: (a * a).sum(), (spec,))
    selfcheck.confirm(lambda operands, literals: np.dot(operands[0], operands[0]), [spec], [], traced)
    with pytest.raises(selfcheck.Different):
        selfcheck.confirm(lambda operands, literals: (operands[0] ** 2).sum() * np.float32(1.001), [spec], [], traced)


def test_trees_keep_their_kind():
    leaves, tree = flatten({"a": [np.ones(2), (np.float64(1), 3)]}, is_array)
    assert len(leaves) == 2
    assert tree["a"][1][0].scalar
    assert not tree["a"][0].scalar

"""The array API standard: every function, recorded and executed, gives what the reference implementation gives."""

from __future__ import annotations

import inspect
import warnings

import array_api_compat
import array_api_strict
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from goblin_dask.errors import GoblinError, NotTraceable
from goblin_dask.graphs.capture.pytree import Leaf, flatten
from goblin_dask.graphs.execute import execute
from goblin_dask.graphs.standard import NAMESPACE, STANDARD, support
from goblin_dask.graphs.trace import trace
from goblin_dask.messages import ArraySpec

from .array_api import CALLS, array, call, dtypes, small, together, xp, xps

IN_THE_LABORATORY = {"nonzero", "unique_all", "unique_counts", "unique_inverse", "unique_values"}
"""Their results' shapes depend on data."""
LATER = {"broadcast_shapes", "isin", "linalg.eig", "linalg.eigvals"}
"""Of a later edition of the standard."""
UNDEFINED = {"empty", "empty_like"}
"""Elements are whatever they are."""
ROUNDED = ("linalg.", "fft.", "matmul", "tensordot", "vecdot", "sum", "mean", "std", "var", "cumulative", "prod")
"""An order of summation is as good as another."""


def resolve(namespace, name):
    for part in name.split("."):
        namespace = getattr(namespace, part)
    return namespace


def plain(value):
    """Arguments for NumPy: the reference implementation's arrays and dtypes replaced."""
    if isinstance(value, type(xp.asarray(1))):
        return np.asarray(value).copy()
    if isinstance(value, type(xp.float32)):
        return np.dtype(str(value).rpartition(".")[2])
    if isinstance(value, (list, tuple)):
        return type(value)(map(plain, value))
    return {name: plain(each) for name, each in value.items()} if isinstance(value, dict) else value


def recorded(function, args, kwargs):
    """What a function gives when it is recorded with its arrays as operands and the program is executed."""
    arrays, skeleton = flatten((args, kwargs), lambda value: isinstance(value, np.ndarray))
    specs = [ArraySpec(each.shape, each.dtype.name) for each in arrays]

    def fill(value, given):
        if isinstance(value, Leaf):
            return given[value.index]
        if isinstance(value, (list, tuple)):
            return type(value)(fill(each, given) for each in value)
        return {name: fill(each, given) for name, each in value.items()} if isinstance(value, dict) else value

    filled_args, filled_kwargs = fill(skeleton, specs)
    traced = trace(function, filled_args, filled_kwargs)
    inputs = [arrays[what] if kind == "operand" else what for kind, what in traced.slots]
    assert all(kind in ("operand", "found") for kind, _ in traced.slots)
    results = execute(traced.program, inputs) if traced.program is not None else inputs
    return [results[leaf.index] for leaf in flatten(traced.tree, lambda value: isinstance(value, Leaf))[0]], traced


def leaves(result):
    if isinstance(result, (list, tuple)):
        return [each for part in result for each in leaves(part)]
    return [np.asarray(result)]


def agree(name, got, want):
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        if name in UNDEFINED:
            continue
        if name.startswith(ROUNDED) and a.dtype.kind in "fc":
            close = np.finfo(a.dtype).eps * 64
            scale = np.abs(b[np.isfinite(b)]).max(initial=1.0)
            np.testing.assert_allclose(a, b, rtol=close, atol=close * scale)
        else:
            np.testing.assert_array_equal(a, b)


def drawn(full, many, few, strategy, test):
    settings(
        max_examples=many if full else few,
        deadline=None,
        derandomize=not full,
        database=None,
        suppress_health_check=list(HealthCheck),
    )(given(strategy)(test))()


def test_the_table_is_the_standard():
    assert array_api_strict.get_array_api_strict_flags()["api_version"] == "2024.12"
    assert set(STANDARD) == set(CALLS) | IN_THE_LABORATORY
    every = {name for name in xp.__all__ if inspect.isfunction(getattr(xp, name)) and "flags" not in name}
    for extension in (xp.linalg, xp.fft):
        every |= {f"{extension.__name__.rpartition('.')[2].strip('_')}.{name}" for name in extension.__all__}
    assert every - LATER == set(STANDARD) | {"__array_namespace_info__"}


@pytest.mark.full
@pytest.mark.parametrize("name", CALLS)
def test_every_function(name, full, report):
    computed, drawings = [], []

    def test(given):
        args, kwargs = given
        drawings.append(1)
        with np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # of degrees of freedom
            try:
                want = resolve(xp, name)(*args, **kwargs)
            except (TypeError, ValueError, OverflowError, np.linalg.LinAlgError):
                return  # no arguments of the standard's
            args, kwargs = plain(args), plain(kwargs)
            if name in ("can_cast", "finfo", "iinfo", "isdtype", "result_type"):
                got = resolve(NAMESPACE, name)(*args)
                if name == "can_cast":  # NumPy casts between kinds too
                    assert got or not want
                else:
                    assert want.bits == got.bits if "info" in name else str(want).rpartition(".")[2] == str(got)
            else:
                got, _ = recorded(resolve(NAMESPACE, name), args, kwargs)
                agree(name, got, leaves(want))
        computed.append(1)

    drawn(full, 200, 6, CALLS[name], test)
    if full:
        report(f"{name:24} {len(computed)} calls agree")
    assert 2 * len(computed) >= len(drawings), "most arguments must be the standard's"


@pytest.mark.parametrize("name", IN_THE_LABORATORY)
def test_shapes_that_depend_on_data_are_left_to_the_laboratory(name):
    with pytest.raises(NotTraceable, match="the shape of the result depends on data"):
        trace(resolve(NAMESPACE, name), (ArraySpec((3, 4), "float64"),))
    assert support(name).reason
    with pytest.raises(NotTraceable, match="depends on data"):
        trace(lambda x: x[x > 0], (ArraySpec((3, 4), "float64"),))
    with pytest.raises(NotTraceable, match="depends on data"):
        trace(lambda x, n: NAMESPACE.repeat(x, n), (ArraySpec((3,), "float64"), ArraySpec((3,), "int64")))


def test_every_other_function_is_recorded():
    for name in STANDARD:
        assert bool(support(name).reason) is (name in IN_THE_LABORATORY), (name, support(name))


OPERATORS = {
    "numeric": ["+", "-", "*"],
    "real": ["//", "%", "<", "<=", ">", ">="],
    "all": ["==", "!="],
    "inexact": ["/", "**"],
    "bits": ["&", "|", "^"],
}


@pytest.mark.full
@pytest.mark.parametrize(("kind", "operator"), [(kind, each) for kind, group in OPERATORS.items() for each in group])
def test_operators_of_arrays(kind, operator, full):
    function = eval(f"lambda a, b: a {operator} b")

    def draw_it(draw):
        a, b = together(draw, kind)
        number = small(a.dtype)
        if number is not None and draw(st.booleans()):
            b = draw(number)
            return ((a, b) if draw(st.booleans()) else (b, a)), {}
        return (a, b), {}

    def test(given):
        args, _ = given
        with np.errstate(all="ignore"):
            try:
                want = function(*args)
            except (TypeError, ValueError, OverflowError):
                return
            got, _ = recorded(function, plain(args), {})
        agree("operator", got, leaves(want))

    drawn(full, 200, 6, call(draw_it), test)


@pytest.mark.full
def test_indexing(full):
    def draw_it(draw):
        x = array(draw, "all")
        return (x, draw(xps.indices(x.shape, allow_newaxis=True))), {}

    def test(given):
        (x, index), _ = given
        got, _ = recorded(lambda x: x[index], (np.asarray(x),), {})
        agree("index", got, leaves(x[index]))

    drawn(full, 500, 30, call(draw_it), test)


@pytest.mark.full
def test_assignment(full):
    def draw_it(draw):
        x = array(draw, "real")
        index = draw(xps.indices(x.shape))
        value = draw(xps.arrays(x.dtype, draw(st.sampled_from([(), x[index].shape]))))
        return (x, index, value), {}

    def test(given):
        (x, index, value), _ = given

        def assign(x, value):
            x = x.copy()
            x[index] = value
            return x

        want = np.asarray(x).copy()
        want[index] = np.asarray(value)
        got, _ = recorded(assign, (np.asarray(x), np.asarray(value)), {})
        agree("index", got, [want])

    drawn(full, 500, 30, call(draw_it), test)


def normalised(x):
    own = x.__array_namespace__()
    centred = x - own.mean(x, axis=-1, keepdims=True)
    weights = own.asarray([1.0, 2.0, 3.0, 4.0], dtype=x.dtype)
    return own.sum(centred * weights / own.linspace(1, 2, 4), axis=0), x.mT, x.T, x.to_device("cpu")


def standardised(x):
    own = array_api_compat.array_namespace(x)
    order = own.argsort(x, axis=0, descending=True)
    return own.take_along_axis(x, order, axis=0) * own.ones((3, 4)), array_api_compat.size(x), x.device


@pytest.mark.parametrize("function", [normalised, standardised])
def test_functions_that_ask_for_the_namespace(function):
    x = np.linspace(-1, 1, 12).reshape(3, 4)
    got, traced = recorded(function, (x,), {})
    assert traced.program is not None
    want = [np.asarray(each) for each in function(x) if isinstance(each, np.ndarray)]
    agree("sum", got, want)


def test_dtypes_of_the_standard_are_the_catalogues():
    for kind in ("all", "complex"):
        dtypes(kind).validate()
    with pytest.raises(GoblinError):
        recorded(NAMESPACE.add, (np.zeros(3), np.zeros(4)), {})

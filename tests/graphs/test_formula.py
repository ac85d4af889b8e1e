"""Formulas: they mean what NumPy means by the same text, wherever they are called; everything else is refused."""

from __future__ import annotations

import pickle

import dask.array as da
import numpy as np
import pytest
import scipy.special
import xarray as xr
from dask.base import tokenize
from hypothesis import given, settings
from hypothesis import strategies as st

import goblin_dask as goblin
from goblin_dask.errors import InputError
from goblin_dask.graphs.capture import selfcheck
from goblin_dask.graphs.formula import CONSTANTS, formula
from goblin_dask.graphs.functions import functions
from goblin_dask.graphs.operators import CATALOGUE, ELEMENTWISE
from goblin_dask.graphs.trace import trace
from goblin_dask.messages import ArraySpec
from goblin_dask.testing.inprocess import InProcessGrid

GAUSS = "a * exp(-(x - mu)**2 / (2 * s**2))"
X = np.linspace(-2, 2, 12).reshape(3, 4)
NAMESPACE = {name: function for name, (_, function) in functions().items()} | CONSTANTS
"""The functions are NumPy's and SciPy's own, which `test_functions_are_numpys` tests."""


def test_a_formula_names_its_variables_in_their_order():
    gauss = goblin.formula(GAUSS)
    assert gauss.names == ("a", "x", "mu", "s")
    expected = 2 * np.exp(-((X - 0.5) ** 2) / (2 * 1.5**2))
    np.testing.assert_array_equal(gauss(2, X, 0.5, 1.5), expected)
    np.testing.assert_array_equal(gauss(2, s=1.5, x=X, mu=0.5), expected)
    assert formula("gamma * gamma(x)").names == ("gamma", "x")
    assert formula("µ + é").names == ("μ", "é"), "as Python names them"
    again = pickle.loads(pickle.dumps(gauss))
    assert again == gauss
    assert tokenize(again) == tokenize(gauss) != tokenize(formula("a + x"))
    assert {gauss: 1}[again] == 1


NUMBERS = [1, 2, 7, 0.5, 3.25]
SMALL = st.floats(-4, 4).map(lambda value: round(value, 2))
UNARY = ["exp", "sin", "tanh", "abs", "square", "erf", "sinc", "sign", "expit", "real"]
BINARY = ["atan2", "hypot", "maximum", "xlogy", "copysign", "logaddexp", "greater", "fmod"]
EXPRESSIONS = st.recursive(
    st.sampled_from(["x", "y", "z", "pi", "e", "inf", *map(str, NUMBERS)]),
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(["+", "-", "*", "/", "%", "**", "//"]), inner).map(
            "({0[0]} {0[1]} {0[2]})".format
        ),
        st.tuples(st.sampled_from("-+"), inner).map("({0[0]}{0[1]})".format),
        st.tuples(st.sampled_from(UNARY), inner).map("{0[0]}({0[1]})".format),
        st.tuples(st.sampled_from(BINARY), inner, inner).map("{0[0]}({0[1]}, {0[2]})".format),
        st.tuples(inner, st.sampled_from(["<", "<=", ">", ">=", "==", "!="]), inner, inner, inner).map(
            "where(({0[0]}) {0[1]} ({0[2]}), {0[3]}, {0[4]})".format
        ),
        st.tuples(inner, inner, inner).map("where(~(({0[0]}) < 0) & (({0[1]}) < 1), 1, clip({0[2]}, -1, 1))".format),
    ),
    max_leaves=12,
)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(EXPRESSIONS, st.sampled_from(["float64", "float32", "int32"]))
def test_a_formula_means_what_numpy_means(text, dtype):
    values = {"x": X.astype(dtype), "y": X[0].astype(dtype), "z": np.asarray(1.5).astype(dtype)}
    refusal = ""
    with np.errstate(all="ignore"):
        try:
            expected = eval(text, {"__builtins__": {}}, {**NAMESPACE, **values})
        except (ArithmeticError, TypeError, ValueError):
            with pytest.raises(InputError):
                formula(text)(**values)
            return
        try:
            made = formula(text)
            got = made(**{name: values[name] for name in made.names})
        except InputError as error:
            refusal = str(error)
    if refusal:  # of what Python computes with numbers, and a formula does not
        assert any(word in refusal for word in ("a constant", "complex", "64 bits"))
        return
    assert np.asarray(got).dtype == np.asarray(expected).dtype
    np.testing.assert_array_equal(got, expected)


def test_chained_comparisons_are_all_of_their_parts():
    np.testing.assert_array_equal(formula("-1 < x <= 1 != y")(X, 0.5), (X > -1) & (X <= 1))
    np.testing.assert_array_equal(formula("(n & 3) == 1")(np.arange(9)), np.arange(9) % 4 == 1)
    np.testing.assert_array_equal(formula("~(x < 0) | (x < -1) ^ (x < 2)")(X), ~(X < 0) | (X < -1) ^ (X < 2))


def test_every_elementwise_operator_is_a_function_or_says_why_not():
    several = {name for name in ELEMENTWISE if CATALOGUE[name].outputs != 1}
    assert several >= {"divmod", "frexp", "modf"}
    for name in ELEMENTWISE - set(functions()):
        arguments = ", ".join("xyz"[: CATALOGUE[name].arity or 1])
        with pytest.raises(InputError, match=rf"^column 1: {name} (has several results|is not elementwise|takes)"):
            formula(f"{name}({arguments})")
    assert len(functions()) >= 90


def test_functions_are_numpys():
    assert NAMESPACE["exp"] is np.exp
    assert NAMESPACE["erf"] is scipy.special.erf
    assert NAMESPACE["where"].function is np.where
    assert {type(each).__name__ for each in NAMESPACE.values()} <= {"ufunc", "Labelled", "float"}


@pytest.mark.parametrize("name", functions())
def test_every_function_is_recorded_as_a_program(name):
    arity, _ = functions()[name]
    made = formula(f"{name}({', '.join('xyz'[:arity])})")
    dtypes = ("int32",) if "bitwise" in name or name in ("gcd", "lcm") else ("float64",)
    if name == "ldexp":
        dtypes = ("float64", "int32")
    specs = [ArraySpec((3, 4), dtypes[min(i, len(dtypes) - 1)]) for i in range(arity)]
    traced = trace(made, tuple(specs))
    if name != "real":  # of a real number: the number
        selfcheck.confirm(lambda operands, literals: made(*operands), specs, [], traced)


def test_on_dask_and_xarray():
    gauss = formula(GAUSS)
    x = da.from_array(X, chunks=(2, 2))
    expected = gauss(2.0, X, 0.5, 1.5)
    for lazy in (
        gauss(2.0, x, 0.5, 1.5),
        da.map_blocks(gauss, 2.0, x, 0.5, 1.5),
        da.map_blocks(gauss, 2.0, x, mu=0.5, s=1.5, dtype="f8"),
        da.apply_gufunc(gauss, "(),(),(),()->()", 2.0, x, 0.5, 1.5),
        da.apply_gufunc(gauss, "(),(i),(),()->(i)", 2.0, x.rechunk((2, -1)), 0.5, 1.5),
    ):
        assert isinstance(lazy, da.Array)
        np.testing.assert_array_equal(lazy.compute(scheduler="sync"), expected)
    mixed = formula("where(0 < x < 1, sinc(x), clip(y, 0, 1)) + erf(x)")
    expected = np.where((X > 0) & (X < 1), np.sinc(X), np.clip(1.0, 0, 1)) + scipy.special.erf(X)
    table = xr.DataArray(X, dims=("t", "u"), coords={"t": [1, 2, 3]})
    for lazy in (table, table.chunk(t=2)):
        result = mixed(lazy, 1.0)
        assert isinstance(result, xr.DataArray)
        assert isinstance(result.data, type(lazy.data))
        np.testing.assert_array_equal(result.values, expected)
        np.testing.assert_array_equal(result.t, table.t)
    assert isinstance(mixed(xr.Dataset({"v": table}), 1.0), xr.Dataset)


def test_activation_functions_of_networks():
    made = formula("gelu(x) + relu(y) * sigmoid(x)")
    expected = 0.5 * X * (1 + scipy.special.erf(X / np.sqrt(2))) + np.maximum(X[0], 0) * scipy.special.expit(X)
    np.testing.assert_allclose(made(X, X[0]), expected, rtol=1e-14, atol=1e-16)
    lazy = made(da.from_array(X, chunks=2), X[0])
    np.testing.assert_array_equal(lazy.compute(scheduler="sync"), made(X, X[0]))
    table = made(xr.DataArray(X, dims=("t", "u")).chunk(t=2), 0.5)
    assert isinstance(table, xr.DataArray)
    np.testing.assert_array_equal(table.compute(scheduler="sync").values, made(X, 0.5))
    traced = trace(made, (ArraySpec((3, 4), "float32"), ArraySpec((4,), "float32")))
    assert {"gelu", "relu", "sigmoid"} <= {node.operator for node in traced.program.nodes}
    with pytest.raises(InputError, match="column 1: gelu of "):
        formula("gelu(x)")(np.arange(3))


def test_on_volunteers(tmp_path):
    x = da.from_array(np.linspace(-2, 2, 4096).reshape(64, 64), chunks=(32, 32))
    made = formula("where(-1 < x < 1, a * exp(-(x - mu)**2 / 2), erf(x)) + (x > 0.5)")
    whole, mapped = made(x, 2.0, 0.25), da.map_blocks(made, x, 2.0, 0.25)
    each = da.apply_gufunc(made, "(),(),()->()", x, 2.0, 0.25)
    expected = whole.compute(scheduler="sync")
    with InProcessGrid(volunteers=1, directory=tmp_path) as grid:
        for lazy in (whole, mapped, each):
            before = grid.counts()
            np.testing.assert_array_equal(lazy.compute(scheduler=grid.lab.get), expected)
            counts = {key: value - before[key] for key, value in grid.counts().items()}
            assert counts["array"] == counts["grid"] >= 4, "every task was recorded and accepted from the volunteer"


REFUSED = {
    "sin(x": r"column 4: '\(' was never closed, in",
    "'x": r"column 1: unterminated string literal, in",
    "": "the formula is empty",
    "1 + 2": "names no array",
    "x + exq(y)": r"column 5: there is no function 'exq'; did you mean exp\?",
    "arcsin(x)": r"column 1: there is no function 'arcsin'; did you mean asin\?",
    "zzzzzz(x)": "column 1: there is no function 'zzzzzz'$",
    "é + exq(y)": "column 5",
    "exp(x, y)": "column 1: exp takes 1 argument, got 2",
    "x + where(x)": "column 5: where takes 3 arguments, got 1",
    "exp(x=x)": "column 1: exp takes its arguments by their places",
    "exp(*x)": "column 5: there is no",
    "sum(x)": "column 1: sum is not elementwise",
    "astype(x)": "column 1: astype is not elementwise",
    "modf(x)": "column 1: modf has several results",
    "x.real": "column 1: there are no attributes",
    "x * np.exp(x)": "column 5: there are no attributes",
    "lambda: x": "column 1: lambda is a word of Python",
    "lambda * x": "column 1: .*lambda is a word of Python",
    "'x' + y": "column 1: there is no text",
    "f'{x}'": "column 1: there is no text",
    "x[0]": "column 1: arrays are not indexed",
    "x and y": "column 1: 'and' and 'or' do not work on arrays: write & and |",
    "y + (not x)": "column 6: 'not' does not work on arrays",
    "x > 0 & y < 1": "column 1: & binds tighter than the comparison",
    "(x) > (0) | (y)": "column 1: | binds tighter",
    "x in y": "column 1: 'is' and 'in'",
    "x @ y": "column 1: there are no matrix products",
    "x if y else z": r"column 1: 'if' does not work on arrays: write where\(",
    "(x, y)": "column 1: a formula has one result",
    "(x := y)": "column 2: nothing is assigned",
    "x = y": "column 3: ",
    "x +* y": "column 4: invalid syntax",
    "  x + (y": "column 7: ",
    "x # comment": "column 3: there are no comments",
    "x; y": "column 2: ",
    "x\0": "cannot be read|null bytes",
    "x + 1e999": "column 5: a number beyond the range of float64",
    "x + 100000000000000000000": "column 5: an integer of more than 64 bits",
    "x + 9**9**9": r"column 5: \*\* of constants: an integer of more than 64 bits",
    "x + (1 << 10**15)": "column 6: << of constants: an integer of more than 64 bits",
    "x + 1 / 0": "column 5: / of constants: division by zero",
    "x + (-8) ** 0.5": "the result is complex",
    "x + None": "column 5: None is no number",
    "[y for y in x]": "column 1: a formula has no such thing as Python's ListComp",
    "__import__('os').system('false')": "column 1: there are no attributes",
    "().__class__.__bases__[0].__subclasses__()": "column 1: there are no attributes",
    "(exp if x else sin)(y)": "column 1: 'if' does not work",
    "eval(x)": "column 1: there is no function 'eval'",
    "(" * 500 + "x" + ")" * 500: "too many nested parentheses|256 levels",
    "-" * 5000 + "x": "more than 256 levels",
    "a+" * 4000 + "a": "more than 256 levels",
    "+".join("a" * 300): "more than 256 levels",
    "x" * 20_000: "20000 characters; at most 10000",
}


@pytest.mark.parametrize("text", REFUSED, ids=lambda text: text[:24])
def test_refuses_what_is_no_formula(text):
    with pytest.raises(InputError, match=REFUSED[text]) as caught:
        formula(text)
    assert "\n" not in str(caught.value)
    assert "^" not in str(caught.value)
    assert len(str(caught.value)) < 250


@settings(max_examples=80, deadline=None, derandomize=True)
@given(st.one_of(st.text(max_size=60), st.text("xyexp(),.:[]'{}+-*/&|~<>=@!1290_ \n\\#f", max_size=40)))
def test_any_text_is_a_formula_or_an_input_error(text):
    try:
        made = formula(text)
    except InputError as error:
        result = str(error)
    else:
        result = repr(made)
        assert made.names
    assert "\n" not in result


@pytest.mark.parametrize(
    ("text", "arguments", "message"),
    [
        ("x + y", {"x": 1}, "needs x, y; missing: y"),
        ("x + y", {"x": 1, "y": 2, "yy": 3}, r"no variable 'yy'; it has x, y; did you mean y\?"),
        ("x + y", {"x": "1", "y": 2}, "'x' is '1', expected numbers"),
        ("x + y", {"x": None, "y": 2}, "'x' is None, expected numbers"),
        ("x + y", {"x": [[1], [1, 2]], "y": 2}, "'x' is no array of numbers"),
        ("1 + (x & y)", {"x": X, "y": 2}, r"column 6: & of float64 \(3, 4\) and 2: "),
        ("2 * exp(x + y)", {"x": X, "y": X[:2]}, r"column 9: \+ of float64 \(3, 4\) and float64 \(2, 4\): "),
        ("x + 300", {"x": np.zeros(3, "i1")}, "column 1: .*300 out of bounds for int8"),
    ],
)
def test_refuses_operands_with_the_column(text, arguments, message):
    with pytest.raises(InputError, match=message):
        formula(text)(**arguments)


def test_refuses_operands_by_their_number():
    made = formula("x + y")
    with pytest.raises(InputError, match="3 arrays for a formula of 2 variables"):
        made(1, 2, 3)
    with pytest.raises(InputError, match="'x' is given twice"):
        made(1, 2, x=3)
    with pytest.raises(InputError, match="a formula is text, not int"):
        formula(3)
    assert made([1, 2], 3).tolist() == [4, 5]
    assert made(2, 3) == 5
    with pytest.raises(InputError, match="64 bits"):
        formula("x ** 9 ** y")(X, 9**9)

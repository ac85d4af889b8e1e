"""Every operator on drawn operands: dtypes, shapes, layouts and values that its examples do not have.

An example gives the number of operands and attributes that make sense. Hypothesis changes its dtypes, its axes' lengths
(equal ones stay equal, one and zero among them), how the operands lie in memory, and all their elements. What the
operator then refuses NumPy must refuse too, where the operator is elementwise; what it computes is NumPy's result.
Operators of neural networks have references of their own and are tested beside them.
"""

from __future__ import annotations

import warnings
from collections import Counter
from functools import cache

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from goblin_dask.errors import InputError, ProgramError
from goblin_dask.graphs.execute import execute
from goblin_dask.graphs.operators import CATALOGUE, ELEMENTWISE, FFT, LINALG
from goblin_dask.graphs.operators.dtypes import DTYPES, HALVES

from .references import REFERENCES, reference
from .test_operators import TOLERANT, WITHOUT_REFERENCE, applied, close

LENGTHS = (0, 1, 2, 3, 5, 8, 17)
LAYOUTS = ("C", "F", "strided", "reversed", "read-only", "repeated")
OPERATORS = [
    name
    for name, operator in CATALOGUE.items()
    if name not in WITHOUT_REFERENCE and operator.arity != 0 and "NEURAL" not in {kind.name for kind in operator.kinds}
]
FINITE = LINALG | FFT | TOLERANT
"""Their results depend on the order of steps where numbers overflow: they are given moderate ones."""
ONE_DTYPE = {"pad"}
"""NumPy refuses a value of another dtype by what it is, the operator casts it."""
OWN = {"bincount": "does not fit into", "cholesky": "not positive definite"}
"""What an operator refuses and NumPy need not: a result of another shape than was declared; a singular matrix, of which
NumPy reads the other triangle."""
BEYOND = {"histogram", "concat", "stack", "cholesky"}
"""What an operator computes and NumPy need not: weights that are booleans, bfloat16 beside another dtype."""
ASSIGNING = {"setitem", "put_along_axis", "index_put"}
"""Their last operand is cast to the first's dtype: what is no integer there becomes anything."""
ORDERED = {"searchsorted": 0, "digitize": 1, "histogram": 1, "interp": 1}
"""Operands that must ascend for the result to have a meaning."""


@cache
def examples(name):
    return [(tuple(o for o in operands), attributes) for operands, attributes in CATALOGUE[name].examples()]


def palette(dtype, finite):
    """The awkward elements of a dtype."""
    if dtype.name == "bool":
        return [False, True]
    if dtype.kind in "iu":
        info = np.iinfo(dtype)
        return [0, 1, 2, 3, 5, 7] if finite else [0, 1, 2, 7, info.max, info.min, info.max - 1, info.min + 1]
    moderate = [0.0, 1.0, -1.5, 0.25, 3.0, -0.125]
    if finite:
        return moderate
    info = np.finfo(dtype) if dtype.name != "bfloat16" else np.finfo(np.float32)
    special = [np.nan, np.inf, -np.inf, -0.0, float(info.tiny), float(info.eps)]
    if dtype.name in ("float32", "float64"):
        special += [float(info.max), float(info.smallest_subnormal)]
    if dtype.kind == "c":
        return [*moderate, 1 + 2j, complex(np.nan, 1), complex(1, np.inf), complex(-0.0, -0.0)]
    return moderate + special


def laid(array, layout):
    """The same elements, lying otherwise in memory."""
    if layout == "F":
        return np.asfortranarray(array)
    if layout == "strided" and array.ndim:
        wide = np.zeros(tuple(2 * n for n in array.shape), array.dtype)
        view = wide[tuple(slice(None, None, 2) for _ in array.shape)]
        view[...] = array
        return view
    if layout == "reversed" and array.ndim:
        return np.ascontiguousarray(array[::-1])[::-1]
    if layout == "repeated" and array.ndim and array.shape[0]:
        return np.broadcast_to(array[:1], array.shape)
    if layout == "read-only":
        array = array.copy()
        array.flags.writeable = False
    return array


@st.composite
def applications(draw, name):
    """Operands and attributes."""
    operands, attributes = draw(st.sampled_from(examples(name)))
    lengths = sorted({n for o in operands for n in o.shape})
    if draw(st.booleans()):
        sizes = {n: draw(st.sampled_from(LENGTHS)) for n in lengths}
    else:
        sizes = {n: n for n in lengths}
    same = name in ONE_DTYPE or draw(st.booleans())
    chosen = draw(st.sampled_from(list(DTYPES)))
    made = []
    for number, operand in enumerate(operands):
        alone = operand.dtype != operands[0].dtype and name not in ONE_DTYPE
        keep = number > 0 and alone if same else draw(st.booleans())
        dtype = operand.dtype if keep else DTYPES[chosen if same else draw(st.sampled_from(list(DTYPES)))]
        shape = tuple(sizes[n] for n in operand.shape)
        values = palette(dtype, name in FINITE)
        seed = draw(st.integers(0, 2**32 - 1))
        random = np.random.default_rng(seed)
        with np.errstate(all="ignore"):
            array = np.asarray(np.asarray(values, object)[random.integers(len(values), size=shape)]).astype(dtype)
        array = array.reshape(shape)
        if ORDERED.get(name) == number:
            array = np.sort(array.astype("f4") if dtype.name == "bfloat16" else array, axis=-1).astype(dtype)
        made.append(laid(array, draw(st.sampled_from(LAYOUTS))))
    return tuple(made), attributes


def classes(operands):
    """What a table counts."""
    found = {operand.dtype.name for operand in operands}
    for operand in operands:
        kinds = {0: "empty", 1: "size 1"} if operand.ndim else {1: "0-d"}
        found.add(kinds.get(operand.size, "several"))
        if not operand.flags.c_contiguous:
            found.add("not contiguous")
        numbers = operand.astype("c16") if operand.dtype.kind not in "biu" else np.zeros(1)
        if not np.isfinite(numbers).all():
            found.add("not finite")
        if operand.dtype.kind in "iu" and operand.size and operand.max(initial=0) == np.iinfo(operand.dtype).max:
            found.add("extreme integers")
    if len({operand.shape for operand in operands}) > 1:
        found.add("broadcast")
    return found


def meaningful(name, operands, attributes):
    """Whether NumPy's result is defined at all."""
    if name == "astype" or (name == "round" and attributes.get("decimals", 0) < 0):
        target = DTYPES[attributes["dtype"]] if name == "astype" else operands[0].dtype
        numbers = operands[0].astype("c16")
        return target.kind not in "iu" or bool((np.isfinite(numbers) & (abs(numbers) < 100)).all())
    if name in ASSIGNING and operands[0].dtype.kind in "iub" and operands[-1].dtype.kind not in "iub":
        numbers = operands[-1].astype("c16")
        return bool((np.isfinite(numbers) & (abs(numbers) < 100)).all())
    if name == "bincount" and not operands[0].size:  # NumPy counts nothing in integers, whatever the weights
        return len(operands) == 1
    if name == "cholesky" and operands[0].size:  # of a matrix that is singular but for rounding, digits are noise
        try:
            factor = np.linalg.cholesky(operands[0].astype("c16"), upper=attributes.get("upper", False))
        except np.linalg.LinAlgError:
            return True
        pivots = np.abs(np.diagonal(factor, axis1=-2, axis2=-1))
        return bool((pivots.min(-1) > 1e-3 * pivots.max(-1)).all())
    # NumPy's empty results lack the axis of the probabilities.
    return name not in ("nanquantile", "nanmedian") or bool(operands[0].size)


@pytest.mark.full
@pytest.mark.parametrize("name", OPERATORS)
def test_on_drawn_operands(name, full, report):
    counted = Counter()

    def test(application):
        operands, attributes = application
        defaults = CATALOGUE[name].defaults
        complete = {**({"axis": defaults["axis"]} if "axis" in defaults else {}), **attributes}
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore", RuntimeWarning)
            if not meaningful(name, operands, attributes):
                return
            try:
                program, inputs = applied(name, operands, attributes)
            except (ProgramError, InputError):
                if name in ELEMENTWISE and name not in REFERENCES:
                    with pytest.raises((TypeError, ValueError)):
                        reference(name)(*operands, a=complete)
                counted["refused"] += 1
                return
            before = [operand.tobytes() for operand in operands]
            try:
                results = execute(program, inputs)
            except InputError as error:
                counted["refused"] += 1
                if OWN.get(name, "\0") in str(error):
                    return
                with pytest.raises((ValueError, TypeError, IndexError, ArithmeticError, np.linalg.LinAlgError)):
                    reference(name)(*operands, a=complete)
                return
            assert [operand.tobytes() for operand in operands] == before, "an operand was overwritten"
            try:
                wanted = reference(name)(*operands, a=complete)
            except (TypeError, np.linalg.LinAlgError):
                assert name in BEYOND
                counted["beyond"] += 1
                return
            for got, expected in zip(results, wanted if isinstance(wanted, tuple) else (wanted,), strict=False):
                if got.size and not HALVES & {o.dtype.name for o in operands} and name != "random_uniform":
                    assert got.dtype == np.asarray(expected).dtype
                close(got, np.asarray(expected), name)
        counted.update(["computed", *classes(operands)])

    settings(
        max_examples=300 if full else 8,
        deadline=None,
        derandomize=not full,
        database=None,
        suppress_health_check=list(HealthCheck),
    )(given(applications(name))(test))()
    if full:
        report(
            f"{name:20} {counted.pop('computed')} computed; {', '.join(f'{k} {n}' for k, n in sorted(counted.items()))}"
        )

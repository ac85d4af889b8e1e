"""Every operator of the catalogue: its rule is what its kernel does, and what its kernel does is what NumPy does."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

from goblin_dask.errors import InputError, ProgramError
from goblin_dask.graphs.builder import Builder
from goblin_dask.graphs.execute import execute
from goblin_dask.graphs.operators import CATALOGUE, CONTRACTION, ELEMENTWISE, FFT, LINALG, NEURAL, UFUNCS, of_kind
from goblin_dask.graphs.operators.base import Kind
from goblin_dask.graphs.program import decode, encode
from goblin_dask.messages import ArraySpec

from .references import reference

WITHOUT_REFERENCE = {"random_normal", "random_bits_part", "random_uniform_part", "random_normal_part"} | NEURAL
"""Tested by its moments and by its bits' origin below; parts against the whole in `test_parts`; layers by PyTorch."""
DATA_DEPENDENT = {"pow", "nanargmax", "nanargmin", "cholesky", "inv", "solve"}
"""Operators that refuse some numbers, as NumPy does."""
TOLERANT = (CONTRACTION | LINALG | FFT) - {"outer"}


def applied(name, operands, attributes):
    """Program of one application, its builder's operand specs and canonical attributes."""
    builder = Builder()
    values = [builder.input(ArraySpec(o.shape, o.dtype.name)) for o in operands]
    outputs = builder.add(name, values, **attributes)
    program, slots = builder.finish(outputs)
    return program, [operands[slot] for slot in slots]


def close(got, wanted, name):
    got, wanted = np.asarray(got), np.asarray(wanted)
    assert got.shape == wanted.shape
    if got.dtype.name in ("bfloat16", "float16"):
        precision = 2.0 ** (-7 if got.dtype.name == "bfloat16" else -9)
        with np.errstate(all="ignore"):
            np.testing.assert_allclose(got.astype("f4"), wanted.astype(got.dtype).astype("f4"), precision, precision)
    elif name in TOLERANT and got.dtype.kind in "fc":
        exact = np.finfo(got.dtype).eps * 1000
        np.testing.assert_allclose(got, wanted, rtol=exact, atol=exact * 100)
    else:
        np.testing.assert_array_equal(got, wanted)


def refusal(error, *words):
    for word in words:
        assert word in str(error)


@pytest.mark.full
@pytest.mark.parametrize("name", CATALOGUE)
def test_rule_kernel_and_reference_agree(name, sample):
    operator = CATALOGUE[name]
    meaning = None if name in WITHOUT_REFERENCE else reference(name)
    computed = 0
    operands: tuple[np.ndarray, ...]
    for operands, attributes in sample(list(operator.examples()), 60):
        try:
            program, inputs = applied(name, operands, attributes)
        except ProgramError as error:
            refusal(error, "attribute")
            continue
        except InputError as error:
            refusal(error, *(f"{operand.dtype.name} {operand.shape}" for operand in operands[:4]))
            if name in ELEMENTWISE:
                with pytest.raises(TypeError), np.errstate(all="ignore"):
                    reference(name)(*operands, a=attributes)
            continue
        assert decode(encode(program)) == program
        before = [operand.copy() for operand in operands]
        try:
            results = execute(program, inputs)
        except InputError:
            assert name in DATA_DEPENDENT
            with pytest.raises((ValueError, np.linalg.LinAlgError)), np.errstate(all="ignore"):
                reference(name)(*operands, a=attributes)
            continue
        computed += 1
        for operand, copy in zip(operands, before, strict=True):
            assert operand.tobytes() == copy.tobytes(), "an operand was overwritten"
        if meaning is not None:
            with warnings.catch_warnings(), np.errstate(all="ignore"):
                warnings.simplefilter("ignore")
                wanted = meaning(*operands, a=attributes)
            for got, expected in zip(results, wanted if isinstance(wanted, tuple) else (wanted,), strict=False):
                if not (expected.dtype == got.dtype or "bfloat16" in str([o.dtype for o in operands] + [got.dtype])):
                    assert got.dtype.name == "float16" or name == "random_uniform", (got.dtype, expected.dtype)
                close(got, expected, name)
    assert computed >= 2


@pytest.mark.parametrize("name", CATALOGUE)
def test_memory_is_what_the_operator_declares(name):
    """Views, layouts and reuse: what `schedule` prices and `execute` relies on."""
    operator = CATALOGUE[name]
    for operands, attributes in operator.examples():
        specs = tuple(ArraySpec(o.shape, o.dtype.name) for o in operands)
        try:
            given = operator.complete(operator.canonical(specs, attributes))
            outputs = operator.infer(specs, given)
            with np.errstate(all="ignore"):
                results = tuple(map(np.asarray, operator.kernel(np, operands, given)))
        except (InputError, TypeError, ValueError, IndexError):
            continue
        ordered = all(operand.flags.c_contiguous for operand in operands)
        for number, result in enumerate(results):
            view = number == 0 and operator.view(specs, given)
            if not view:
                assert not any(np.shares_memory(result, operand) for operand in operands)
            unbroken = operator.keeps_order or (ordered and operator.unbroken(specs, given))
            if (operator.contiguous or ordered) and (not view or unbroken):
                assert result.flags.c_contiguous
        if operator.into is None:
            continue
        out = np.full(results[0].shape, 7, results[0].dtype)
        with np.errstate(all="ignore"):
            operator.into(np, operands, given, out)
        assert out.tobytes() == results[0].tobytes()
        for slot in range(len(operands)) if operator.reusable is None else operator.reusable:
            if specs[slot] == outputs[0]:
                copies = [operand.copy() for operand in operands]
                with np.errstate(all="ignore"):
                    operator.into(np, tuple(copies), given, copies[slot])
                assert copies[slot].tobytes() == results[0].tobytes()


def test_every_ufunc_of_numpy_has_an_operator():
    ufuncs = {f for f in vars(np).values() if isinstance(f, np.ufunc)}
    others = {np.matmul, np.vecdot, np.matvec, np.vecmat, np.isnat}
    assert ufuncs - set(UFUNCS) <= others, "the last three are matrix products; dates are not computed"


def test_kinds_partition_the_catalogue():
    assert set(CATALOGUE) == set().union(*map(of_kind, Kind))
    for operator in CATALOGUE.values():
        assert operator.summary.endswith(".")
        assert "\n" not in operator.summary
        assert operator.check in ("recompute", "projection", "residual", "order", "combination")
    assert len(CATALOGUE) >= 200


def test_normal_numbers_are_normal_and_keyed():
    def draw(key, shape=(20_000,), dtype="float64"):
        (result,) = execute(*applied("random_normal", (np.asarray(key, "u8"),), {"shape": shape, "dtype": dtype}))
        return result

    sample = draw([1, 2])
    assert abs(sample.mean()) < 0.03
    assert abs(sample.std() - 1) < 0.03
    assert abs((sample**4).mean() - 3) < 0.3
    np.testing.assert_array_equal(sample, draw([1, 2]))
    assert abs(np.corrcoef(sample, draw([1, 3]))[0, 1]) < 0.03
    np.testing.assert_array_equal(draw([1, 2], dtype="float32"), sample.astype("f4"))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_halves_accumulate_in_float32(dtype):
    ones = np.ones((1, 5000)).astype(np.dtype(dtype))
    (result,) = execute(*applied("matmul", (ones, ones.T), {}))
    assert result.dtype.name == dtype
    assert float(result[0, 0]) == float(np.asarray(5000.0).astype(result.dtype))


@pytest.mark.parametrize("dtype", ["datetime64[s]", "timedelta64[ns]", "object", "U3"])
def test_other_dtypes_are_refused_by_name(dtype):
    with pytest.raises(InputError, match="no array of dtype"):
        Builder().input(ArraySpec((3,), dtype))
    with pytest.raises(InputError, match="no array of dtype"):
        Builder().constant(np.zeros(2, dtype))

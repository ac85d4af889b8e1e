"""Programs evaluated operator by operator on dask arrays, however these are cut, against the programs themselves."""

import warnings

import dask
import dask.array as da
import numpy as np
import pytest

from goblin_dask.errors import InputError
from goblin_dask.graphs.builder import Builder
from goblin_dask.graphs.execute import execute
from goblin_dask.graphs.operators import CATALOGUE, MOVEMENT
from goblin_dask.labnode.tiled.layers import LAYERS
from goblin_dask.labnode.tiled.program import tiled
from goblin_dask.labnode.tiled.rules import RULES
from goblin_dask.messages import ArraySpec

EXACT = MOVEMENT | {"max", "min", "any", "all", "sort", "argsort", "argmax", "argmin", "take", "random_uniform"}


def applied(name, operands, attributes):
    build = Builder()
    values = [build.input(ArraySpec(o.shape, o.dtype.name)) for o in operands]
    program, slots = build.finish(build.add(name, values, **attributes))
    return program, [operands[slot] for slot in slots]


def same(got, wanted, name):
    got, wanted = np.asarray(got), np.asarray(wanted)
    assert (got.shape, got.dtype) == (wanted.shape, wanted.dtype)
    if got.dtype.name == "bfloat16" and name in EXACT:
        got, wanted = got.astype("f4"), wanted.astype("f4")
    if got.dtype.kind not in "fcV" or name in EXACT:
        np.testing.assert_array_equal(got, wanted)
        return
    half = got.dtype.name in ("float16", "bfloat16")
    precision = 2.0**-6 if half else 2000 * np.finfo(got.dtype).eps
    wide = np.complex128 if got.dtype.kind == "c" else np.float64
    with np.errstate(all="ignore"):
        got, wanted = got.astype(wide), wanted.astype(wide)
        finite = np.abs(wanted[np.isfinite(wanted)])
        np.testing.assert_allclose(got, wanted, precision, precision * max(1.0, finite.max(initial=0.0)))


@pytest.mark.full
@pytest.mark.parametrize("name", sorted(CATALOGUE))
def test_every_operator_is_what_it_is_whole(name, full, sample):
    """Its examples, in blocks of one, two and three elements a side; with a tiled form or in one block."""
    computed = 0
    for operands, attributes in sample(list(CATALOGUE[name].examples()), 60):
        try:
            program, inputs = applied(name, operands, attributes)
            wanted = execute(program, inputs)
        except InputError:
            continue
        for side in (1, 2, 3) if full else (2,):
            arrays = [da.from_array(x, chunks=side) if x.size else da.from_array(x, chunks=-1) for x in inputs]
            with warnings.catch_warnings(), np.errstate(all="ignore"), dask.config.set(scheduler="sync"):
                warnings.simplefilter("ignore")  # of Dask, about many small blocks, and of NumPy, about NaN
                got = tiled(program, arrays)
                got = dask.compute(*(got if isinstance(got, tuple) else (got,)))
            assert len(got) == len(wanted)
            for one, other in zip(got, wanted, strict=True):
                same(one, other, name)
        computed += 1
        if computed == 2 and not full:
            break
    assert computed


def test_a_captured_program_is_named_as_what_it_is_not():
    class CapturedProgram:
        bound = None

    with pytest.raises(InputError, match=r"got a CapturedProgram: captured\.bound\(x\) gives both"):
        tiled(CapturedProgram(), [1])


def test_rules_are_of_operators():
    assert RULES.keys() | LAYERS.keys() <= CATALOGUE.keys()
    assert not RULES.keys() & LAYERS.keys()

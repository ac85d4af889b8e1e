"""Programs evaluated operator by operator on dask arrays, however these are cut, against the programs themselves."""

import warnings

import dask
import dask.array as da
import numpy as np
import pytest

import goblin_dask as goblin
from goblin_dask.errors import InputError, TooLarge
from goblin_dask.graphs.builder import Builder
from goblin_dask.graphs.execute import execute
from goblin_dask.graphs.operators import CATALOGUE, MOVEMENT
from goblin_dask.labnode.tiled.layers import LAYERS
from goblin_dask.labnode.tiled.program import tiled
from goblin_dask.labnode.tiled.rules import RULES
from goblin_dask.messages import ArraySpec, GridOffer

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


def models():
    torch = pytest.importorskip("torch")
    from goblin_dask.testing.models import GPT, Block

    torch.manual_seed(0)
    nn, tokens = torch.nn, torch.randint(0, 50, (8, 16))
    yield nn.TransformerEncoderLayer(64, 4, 128, batch_first=True), torch.randn(8, 16, 64)
    yield GPT(vocabulary=50, length=16, width=32, heads=4, layers=1), tokens
    yield Block(8, 16, 2), torch.randn(8, 8, 12, 12)
    yield nn.Sequential(nn.Linear(96, 200), nn.BatchNorm1d(200), nn.GELU(), nn.Linear(200, 10)), torch.randn(64, 96)


@pytest.mark.parametrize("number", range(4))
def test_models_in_blocks(number):
    """Down to volunteers whose memory is a fraction of a layer: what PyTorch gives, in many tasks."""
    import torch

    model, x = list(models())[number]
    model.eval()
    program, inputs = goblin.capture(model, x[:2]).bound(x)
    with torch.no_grad():
        wanted = model(x).numpy()
    for memory in (100_000, 300_000):
        lazy = tiled(program, inputs, offer=GridOffer(1, 1, memory=(memory,)))
        with dask.config.set(scheduler="sync"):
            np.testing.assert_allclose(lazy.compute(), wanted, rtol=1e-4, atol=1e-5)
    assert len(lazy.__dask_graph__()) > len(program.nodes)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((16, 8, 64), (16, 32, 16)),
        ((4, 6), (3, 8)),
        ((1, 12, 1, 10), (5, 1, 24)),
        ((2, 3, 1, 20), (6, 4, 5)),
        ((1,), ()),
    ],
)
def test_reshaping_merges_and_splits(one, other):
    x = np.arange(np.prod(one), dtype="f4").reshape(one)
    program, inputs = applied("reshape", [x], {"shape": other})
    for side in (2, 3):
        lazy = tiled(program, [da.from_array(each, chunks=side) for each in inputs])
        np.testing.assert_array_equal(lazy.compute(scheduler="sync"), x.reshape(other))


@pytest.mark.parametrize(
    ("attributes", "blocks"),
    [
        ({"stop": 40_000, "dtype": "int64"}, 5),
        ({"start": 7, "stop": -90_000, "step": -3, "dtype": "int32"}, 2),
        ({"start": -3, "stop": 40_000, "step": 2, "dtype": "float32"}, 2),
        ({"stop": 4000, "step": 0.1, "dtype": "float64"}, 1),
        ({"start": 2**24, "stop": 2**24 + 40_000, "dtype": "float32"}, 1),
    ],
)
def test_numbers_in_steps_are_made_in_blocks_where_these_are_the_same(attributes, blocks):
    program, _ = applied("arange", [], attributes)
    lazy = tiled(program, [], offer=GridOffer(1, 1, memory=(2_000_000,)))
    assert lazy.numblocks == (blocks,)
    np.testing.assert_array_equal(lazy.compute(scheduler="sync"), execute(program, [])[0])


def test_what_has_no_blocks_is_refused_by_name_and_with_the_numbers():
    program, inputs = applied("roll", [np.zeros((100, 100))], {"shift": (1,), "axes": (0,)})
    with pytest.raises(TooLarge, match=r"needs 0\.\d+ MB .* offers 0\.10 MB: roll of float64 \(100, 100\) has no form"):
        tiled(program, inputs, offer=GridOffer(1, 1, memory=(100_000,)))

"""The probe tells what a machine's arithmetic is, whatever the machine says."""

import dataclasses

import numpy as np
import pytest

from goblin_dask.digest import digest
from goblin_dask.graphs.backends.base import NUMPY
from goblin_dask.graphs.execute import execute
from goblin_dask.graphs.operators import CATALOGUE
from goblin_dask.messages import INLINE_LIMIT, BlobRef
from goblin_dask.store.buffers import buffer_of, spec_of
from goblin_dask.verify import probe
from goblin_dask.verify.rows import bfloat16, tf32


def refs(arrays):
    return [
        BlobRef(digest(b := buffer_of(a)), spec_of(a), b.nbytes, bytes(b)) for a in map(np.ascontiguousarray, arrays)
    ]


def answer(drawn, backend=NUMPY, **kernels):
    backend = dataclasses.replace(backend, overrides={**backend.overrides, **kernels}, inplace=False)
    return refs(execute(probe.program(), [np.array(array) for array in drawn.arrays], backend=backend))


@pytest.fixture
def drawn():
    return probe.draw(np.random.default_rng(5))


def rounding(how):
    def matmul(xp, operands, attributes):
        return CATALOGUE["matmul"].kernel(xp, tuple(how(np.ascontiguousarray(o)) for o in operands), attributes)

    return matmul


def test_it_travels_inside_its_message(drawn):
    assert all(ref.nbytes <= INLINE_LIMIT and ref.inline is not None for ref in drawn.inputs)
    assert sum(ref.nbytes for ref in drawn.inputs) < 256 * 1024


def test_this_machine_keeps_the_contract(drawn):
    contract, reason = probe.judge(drawn, answer(drawn))
    assert reason == ""
    assert contract.precision == "float32"
    assert not contract.flushes


def test_pytorch_keeps_the_contract(drawn):
    choice = pytest.importorskip("goblin_dask.graphs.backends.choice")
    pytest.importorskip("torch")
    contract, reason = probe.judge(drawn, answer(drawn, choice.backend_named("torch")))
    assert (reason, contract.precision) == ("", "float32")


@pytest.mark.parametrize(("how", "name"), [(tf32, "tf32"), (bfloat16, "bfloat16")])
def test_low_precision_posing_as_float32_is_refused_by_name(drawn, how, name):
    contract, reason = probe.judge(drawn, answer(drawn, matmul=rounding(how)))
    assert contract.precision == name
    assert name in reason


def test_flushing_and_fusing_are_measured(drawn):
    smallest = np.finfo(np.float32).smallest_normal

    def flushed(xp, operands, attributes):
        (product,) = CATALOGUE["multiply"].kernel(xp, operands, attributes)
        return (np.where(np.abs(product) < smallest, np.float32(0), product),)

    def separate(xp, operands, attributes):
        a, b = operands
        total = np.zeros((a.shape[0], b.shape[1]), np.float32)
        for k in range(a.shape[1]):
            total += a[:, k : k + 1] * b[k : k + 1]
        return (total,)

    def fused(xp, operands, attributes):
        a, b = operands
        return ((a.astype("f8") @ b.astype("f8")).astype("f4"),)

    assert probe.judge(drawn, answer(drawn, multiply=flushed))[0].flushes
    assert not probe.judge(drawn, answer(drawn, matmul=separate))[0].fused
    assert probe.judge(drawn, answer(drawn, matmul=fused))[0].fused


def test_broken_libraries_are_refused(drawn):
    def mixed_up(xp, operands, attributes):
        a, b = operands
        return (a.T @ b if a.flags.f_contiguous and not a.flags.c_contiguous else a @ b,)

    def sloppy(xp, operands, attributes):
        return ((operands[0].astype("f8") * (1 + 1e-4)).astype("f4"),)

    assert "linear algebra" in probe.judge(drawn, answer(drawn, matmul=mixed_up))[1]
    assert "exp" in probe.judge(drawn, answer(drawn, exp=sloppy))[1]


def test_what_is_no_answer_is_refused(drawn):
    other = answer(probe.draw(np.random.default_rng(6)))
    assert probe.judge(drawn, other)[1]
    right = answer(drawn)
    assert probe.judge(drawn, right[:-1])[1]
    assert probe.judge(drawn, [without_bytes(right[0]), *right[1:]])[1]
    nan = refs([np.full(ref.spec.shape, np.nan, "f4") for ref in right])
    assert probe.judge(drawn, nan)[1]


def without_bytes(ref):
    """The same without its bytes."""
    return BlobRef(ref.digest, ref.spec, ref.nbytes)

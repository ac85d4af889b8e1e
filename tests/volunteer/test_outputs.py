"""Outputs: large ones are computed in memory files, and all of them are sealed and right."""

import os

import numpy as np
import pytest

from goblin_dask.digest import digest
from goblin_dask.graphs.builder import Builder
from goblin_dask.graphs.execute import execute
from goblin_dask.messages import ArraySpec
from goblin_dask.store.buffers import array_of
from goblin_dask.store.descriptors import check_sealed, map_file
from goblin_dask.volunteer.outputs import LARGE, OutputFiles

SIDE = 1100  # 4.84 MB of float32
SQUARE = ArraySpec((SIDE, SIDE), "float32")
RNG = np.random.default_rng(0)
A, B, C = (RNG.standard_normal((SIDE, SIDE), dtype="f4") for _ in range(3))


def program_of(make):
    build = Builder()
    values = [build.input(SQUARE) for _ in range(3)]
    program, slots = build.finish(make(lambda name, *v, **a: build.add(name, v, **a)[0], *values))
    return program, [(A, B, C)[slot] for slot in slots]


def products(add, a, b, c):
    """A sum of products, that of others, and the first seen from aside, flat and again."""
    first = add("addmm", add("matmul", a, b), b, c)
    return [first, add("add", a, b), add("reshape", first, shape=(SIDE * SIDE,)), first]


def transposed(add, a, b, c):
    product = add("matmul", a, b)
    return [add("permute_dims", product, axes=(1, 0)), product]


def read_again(add, a, b, c):
    """What is computed in a memory file is an operand too, and must not be overwritten."""
    product = add("matmul", a, b)
    return [product, add("addmm", product, b, c), add("exp", add("sum", product, axes=0))]


def computed_from_inputs(add, a, b, c):
    return [a, add("setitem", add("multiply", a, b), c, start=(0, 0), length=(SIDE, SIDE), step=(1, 1))]


def half(add, a, b, c):
    return [add("matmul", add("astype", a, dtype="float16"), add("astype", b, dtype="float16"))] * 2


@pytest.mark.parametrize("make", [products, transposed, read_again, computed_from_inputs, half])
def test_outputs_are_right_and_sealed(make):
    program, inputs = program_of(make)
    expected = execute(program, inputs)
    descriptors = len(os.listdir("/proc/self/fd"))
    with OutputFiles() as files:
        outputs = files.collect(list(execute(program, inputs, allocate=files.allocate)))
    assert len(outputs) == len(expected)
    for output, want in zip(outputs, expected, strict=True):
        if output.ref.inline is None:
            check_sealed(output.fd, want.nbytes)
            data = map_file(output.fd, 0, want.nbytes)
        else:
            data = memoryview(output.ref.inline)
        assert digest(data) == output.ref.digest
        np.testing.assert_array_equal(array_of(data, output.ref.spec), want)
    del data, outputs, output
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_a_sum_of_products_is_computed_where_it_is_handed_in():
    program, inputs = program_of(lambda add, a, b, c: [add("addmm", add("matmul", a, b), b, c)])
    with OutputFiles() as files:
        (array,) = execute(program, inputs, allocate=files.allocate)
        address, (fd,) = array.ctypes.data, files._files.values()
        assert list(files._files) == [address]
        assert os.fstat(fd).st_size == array.nbytes
        arrays = [array]
        del array
        (output,) = files.collect(arrays)
        assert output.fd == fd


def test_what_is_not_collected_is_closed():
    descriptors = len(os.listdir("/proc/self/fd"))
    with OutputFiles() as files:
        array = files.allocate(SQUARE)
        assert array.nbytes >= LARGE
        assert len(os.listdir("/proc/self/fd")) > descriptors
        del array
        assert files.allocate(ArraySpec((1000, 1000), "float32")) is None
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_more_than_there_is_room_for_is_a_memory_error():
    with OutputFiles() as files, pytest.raises(MemoryError, match="no memory file of"):
        files.allocate(ArraySpec((1 << 62,), "uint8"))

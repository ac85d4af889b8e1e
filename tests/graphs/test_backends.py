"""Programs on other backends than NumPy: the same results, bit for bit where nothing is rounded."""

import warnings
from collections import Counter

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from goblin_dask.errors import InputError, ProgramError
from goblin_dask.graphs.backends.choice import backend_named
from goblin_dask.graphs.builder import Builder
from goblin_dask.graphs.execute import execute
from goblin_dask.graphs.operators import CATALOGUE, ELEMENTWISE, INDEXING, MOVEMENT
from goblin_dask.graphs.operators.dtypes import DTYPES
from goblin_dask.messages import ArraySpec
from goblin_dask.verify.recompute import check_by_recomputation

from ..gpu import here
from .test_operators import applied
from .test_operators_drawn import applications, examples, meaningful

pytest.importorskip("torch")

from goblin_dask.graphs.backends.pytorch_kernels import OWN

pytestmark = pytest.mark.filterwarnings("ignore")

ROUNDED = 64
"""Units in the last place that two libraries' functions, or orders of a sum, may be apart: of the largest element."""


def backends():
    """PyTorch on the CPU, and whatever GPUs there are."""
    return [backend_named("torch"), *map(backend_named, here())]


def same(got, wanted, name, operands=()):
    assert (got.shape, got.dtype) == (wanted.shape, wanted.dtype)
    exact = got.dtype.kind in "biu" or name in MOVEMENT | INDEXING | {"max", "min", "abs", "negative"}
    if exact and got.dtype.name != "bfloat16":
        np.testing.assert_array_equal(got, wanted)
        return
    wide = np.complex128 if got.dtype.kind == "c" else np.float64
    eps = {"bfloat16": 2.0**-8, "float16": 2.0**-10}.get(got.dtype.name) or np.finfo(got.dtype).eps
    got, wanted = got.astype(wide), wanted.astype(wide)
    with np.errstate(all="ignore"):
        sizes = [np.abs(np.asarray(each, wide)) for each in (wanted, *operands)]
        size = max(each[np.isfinite(each)].max(initial=0.0) for each in sizes)
        np.testing.assert_allclose(got, wanted, rtol=ROUNDED * eps, atol=ROUNDED * eps * size)


def overflows(name, operands):
    """Whether sums, of squares and products too, overflow: then the order of steps decides what comes out."""
    squares = (
        "norm" in name or name.endswith("_backward_data") or name in ("convolution", "convolution_backward", "var")
    )
    if not squares and name not in ("mean", "sum", "cumulative_sum"):
        return False
    numbers = [np.abs(operand.astype(np.float64)) for operand in operands if operand.dtype.kind in "fV"]
    return any(each.size and not (each.max() < (1e15 if squares else 1e30)) for each in numbers)


def both(backend, name, operands, attributes):
    """The results of an application on NumPy and on another backend; None where NumPy refuses."""
    try:
        program, inputs = applied(name, operands, attributes)
        wanted = execute(program, inputs)
    except (InputError, ProgramError):
        return None
    return execute(program, inputs, backend=backend), wanted


@pytest.mark.full
@pytest.mark.parametrize("name", sorted(CATALOGUE))
def test_examples(name, sample):
    """Every operator that a backend has a kernel of its own for, and some of the others, which are NumPy's."""
    if name not in OWN and name not in sample(sorted(CATALOGUE), 30):
        pytest.skip("NumPy's kernel, and not in the sample")
    for backend in backends():
        for operands, attributes in sample(list(CATALOGUE[name].examples()), 60):
            before = [operand.tobytes() for operand in operands]
            found = both(backend, name, operands, attributes)
            assert [operand.tobytes() for operand in operands] == before, "an operand was overwritten"
            for got, wanted in zip(*found, strict=True) if found else ():
                same(got, wanted, name, operands)


@pytest.mark.full
@pytest.mark.parametrize("name", [name for name in sorted(OWN) if CATALOGUE[name].arity != 0 and examples(name)])
def test_on_drawn_operands(name, full, report):
    """What a backend has kernels of its own for; all others are NumPy's."""
    counted = Counter()
    those = backends()

    def test(application):
        operands, attributes = application
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            if not meaningful(name, operands, attributes):
                return
            for backend in those:
                found = both(backend, name, operands, attributes)
                counted["refused" if found is None else "computed"] += 1
                if found and overflows(name, operands):
                    finding = check_by_recomputation(*applied(name, operands, attributes), found[0])
                    assert finding.verdict != "wrong", finding
                    continue
                for got, wanted in zip(*found, strict=True) if found else ():
                    same(got, wanted, name, operands)

    settings(
        max_examples=200 if full else 8,
        deadline=None,
        derandomize=not full,
        database=None,
        suppress_health_check=list(HealthCheck),
    )(given(applications(name))(test))()
    if full:
        report(f"{name:20} on torch: {counted['computed']} equal to NumPy's, {counted['refused']} refused by both")


@pytest.mark.full
@pytest.mark.parametrize("name", sorted(OWN.keys() & ELEMENTWISE))
def test_an_honest_result_is_accepted(name, full, report):
    """What the checker makes of each elementwise operator's own kernel, on numbers of all sizes and of usual ones."""
    count, random, worst = 10**6 if full else 10**4, np.random.default_rng(0), 0.0

    def drawn(dtype):
        bits = random.integers(0, 2 ** (8 * dtype.itemsize), count, dtype=f"u{dtype.itemsize}").view(dtype)
        usual = (random.standard_normal(count) * 10 ** random.uniform(-3, 3, count)).astype(dtype)
        return np.where(random.random(count) < 0.3, bits, usual)

    for dtype in ("float16", "bfloat16", "float32", "float64"):
        operands = [drawn(DTYPES[dtype]) for _ in range(CATALOGUE[name].arity or 3)]
        if name == "where":
            operands[0] = random.random(count) < 0.5
        program, inputs = applied(name, operands, {"dtype": "float32"} if name == "astype" else {})
        for backend in backends():
            finding = check_by_recomputation(program, inputs, execute(program, inputs, backend=backend))
            assert finding.verdict == "accepted", (dtype, backend.name, finding)
            worst = max(worst, finding.ratio)
    if full:
        report(f"{name:13} on torch: {count:,} results for each dtype accepted, at most {worst:.2f} of their bounds")


@pytest.mark.parametrize("name", ["native_group_norm", "native_layer_norm", "native_layer_norm_backward"])
def test_operands_with_strides(name):
    """PyTorch reads some operands of norms as if they were contiguous."""
    rng = np.random.default_rng(0)

    def drawn(*shape):
        return rng.standard_normal((*shape, 2)).astype("f4")[..., 0]

    x, last = drawn(3, 4, 5), {"normalized_shape": (5,)}
    operands, attributes = {
        "native_group_norm": ((x, drawn(4), drawn(4)), {"group": 2, "eps": 1e-5}),
        "native_layer_norm": ((x, drawn(5), drawn(5)), {**last, "eps": 1e-5}),
        "native_layer_norm_backward": (
            (drawn(3, 4, 5), x, drawn(3, 4, 1), drawn(3, 4, 1), drawn(5)),
            {**last, "output_mask": (1, 1, 1)},
        ),
    }[name]
    for got, wanted in zip(*both(backend_named("torch"), name, operands, attributes), strict=True):
        same(got, wanted, name, operands)


def test_memory_is_shared_and_inputs_are_not_written():
    backend = backend_named("torch")
    array = np.arange(12.0).reshape(3, 4)
    array.flags.writeable = False
    tensor = backend.to_device(array)
    assert tensor.data_ptr() == array.ctypes.data
    assert backend.to_host(tensor).ctypes.data == array.ctypes.data
    np.testing.assert_array_equal(backend.to_host(backend.to_device(array.T[::-1])), array.T[::-1])


def test_no_precision_is_given_up_for_speed():
    torch = pytest.importorskip("torch")
    with backend_named("torch").quiet():
        assert torch.get_float32_matmul_precision() == "highest"
        assert not torch.backends.cuda.matmul.allow_tf32
        assert not torch.backends.cudnn.allow_tf32
        assert torch.backends.cudnn.deterministic


def test_a_kernel_that_fails_is_the_task_s_error():
    build = Builder()
    x, i = build.input(ArraySpec((3, 2), "float32")), build.input(ArraySpec((2,), "int64"))
    program, _ = build.finish(build.add("embedding", [x, i]))
    with pytest.raises(InputError, match="node 0, embedding of float32"):
        execute(program, [np.ones((3, 2), "f4"), np.array([0, 7])], backend=backend_named("torch"))


@pytest.mark.parametrize("name", ["jax", "torch:", "numpy:cpu", "torch:nowhere", "cupy"])
def test_a_backend_that_is_not_here(name):
    try:
        import cupy  # noqa: F401 one machine has it, another has not
    except ImportError:
        pass
    else:
        if name == "cupy":
            pytest.skip("CuPy is here")
    with pytest.raises(InputError, match=r"no backend|has no device|install goblin-dask"):
        backend_named(name)

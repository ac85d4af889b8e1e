"""Operators of neural networks against PyTorch's own, called by their schemas."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from goblin_dask.errors import InputError, ProgramError
from goblin_dask.graphs.execute import execute
from goblin_dask.graphs.operators import CATALOGUE, NEURAL, activation
from goblin_dask.graphs.operators.base import nbytes
from goblin_dask.messages import ArraySpec

from .test_operators import applied

torch = pytest.importorskip("torch")

ROUNDED = ("float16", "bfloat16", "float32")
OVERLOADS = {"scatter_reduce": "two"}
ALIASES = {"_native_batch_norm_legit_no_stats": ("_native_batch_norm_legit", "no_stats")}
"""Where there is no default one."""
UNSURE = {
    "gelu",
    "elu_backward",
    "hardsigmoid_backward",
    "hardswish_backward",
    "hardtanh_backward",
    "softplus_backward",
}
"""Where ATen gives for an infinity or NaN one thing or another, by where in the array it is."""
COARSE = {"hardsigmoid_backward": 1e-7, "native_layer_norm_backward": 1e-11}
"""Where ATen computes float64 with a constant of float32; where rows of one element divide zero by almost zero."""
LACKING = {"uint16", "uint32", "uint64", "complex64", "complex128"}
"""Dtypes with which ATen computes next to nothing on CPUs."""
NOT_ATEN: set[str] = set()
"""Operators that ATen lacks; each has a test of its own below."""


def to_torch(array):
    array = np.ascontiguousarray(array).reshape(array.shape)
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view("u2").copy().view("i2")).view(torch.bfloat16)
    return torch.from_numpy(array.copy())


def to_numpy(tensor):
    tensor = tensor.detach().resolve_conj()
    return tensor.float().numpy() if tensor.dtype == torch.bfloat16 else tensor.numpy()


def given_to(schema, attributes, name):
    if name == "output_mask":
        return [bool(entry) for entry in attributes[name]]
    if name == "input_dtype":
        return getattr(torch, attributes[name])
    return attributes[name]


def eager(name, operands, attributes):
    """What ATen's operator gives."""
    if name == "native_batch_norm_backward":
        return eager_batch_norm_backward(operands, attributes)
    if name.endswith("_norm_backward"):
        return eager_norm_backward(name, operands, attributes)
    if attributes.get("reduce") == "set":
        array, index, source = map(to_torch, operands)
        return (torch.ops.aten.scatter.src(array, attributes["dim"], index, source),)
    aten, choice = ALIASES.get(name, (name, OVERLOADS.get(name, "default")))
    overload = getattr(getattr(torch.ops.aten, aten), choice)
    schema = overload._schema
    tensors = [a for a in schema.arguments if "Tensor" in str(a.type)]
    spare = len(operands) - sum("Optional" not in str(a.type) for a in tensors)
    spare += name == "log_sigmoid_backward"
    left, positional, named = [to_torch(o) for o in operands], [], {}
    for argument in schema.arguments:
        if argument in tensors:
            if "Optional" in str(argument.type):
                spare -= 1
                value = left.pop(0) if spare >= 0 else None
            elif argument.name == "buffer":
                continue  # of log_sigmoid_backward: what the forward pass gives beside its result
            else:
                value = left.pop(0)
        elif argument.name in attributes:
            value = given_to(schema, attributes, argument.name)
        else:
            value = DERIVED[argument.name](operands, attributes)
        if argument.kwarg_only:
            named[argument.name] = value
        else:
            positional.append(value)
    assert not left
    if name == "log_sigmoid_backward":
        positional.append(torch.ops.aten.log_sigmoid_forward(positional[1])[1])
    results = overload(*positional, **named)
    return results if isinstance(results, tuple) else (results,)


DERIVED: dict[str, Any] = {
    "N": lambda o, a: o[0].shape[0],
    "C": lambda o, a: o[0].shape[1],
    "HxW": lambda o, a: int(np.prod(o[0].shape[2:])),
    **{name: lambda o, a: False for name in ("sparse", "sparse_grad", "scale_grad_by_freq")},
    "padding_idx": lambda o, a: -1,
    "output_size": lambda o, a: list(o[0].shape[2:]),
    "training": lambda o, a: True,
    "momentum": lambda o, a: 0.1,
    "bias_sizes": lambda o, a: [o[2].shape[1] * a["groups"] if a["transposed"] else o[2].shape[0]],
}
"""Arguments of ATen's that operands and other attributes tell already."""


def eager_batch_norm_backward(operands, a):
    """Its optional operands are told apart by ``train``."""
    grad, x, *weight, mean, spread = map(to_torch, operands)
    statistics = (None, None, mean, spread) if a["train"] else (mean, spread, None, None)
    mask = [bool(entry) for entry in a["output_mask"]]
    given = (grad, x, weight[0] if weight else None, *statistics, a["train"], a["eps"], mask)
    return torch.ops.aten.native_batch_norm_backward(*given)


def eager_norm_backward(name, operands, a):
    """ATen gives no gradients by a weight or bias that there is not."""
    grad, x, mean, rstd, *weight = map(to_torch, operands)
    mask = [bool(entry) for entry in a["output_mask"]]
    if name == "native_layer_norm_backward":
        one = weight[0] if weight else torch.ones(a["normalized_shape"], dtype=x.dtype)
        given = (grad, x, a["normalized_shape"], mean, rstd, one, torch.zeros_like(one), mask)
    else:
        one = weight[0] if weight else torch.ones(x.shape[1], dtype=x.dtype)
        inner = int(np.prod(x.shape[2:]))
        given = (grad, x, mean, rstd, one, *x.shape[:2], inner, a["group"], mask)
    return getattr(torch.ops.aten, name)(*given)


def widened(operands, attributes):
    """In float64: ATen rounds float32 more often than need be, and lacks some halves on CPUs."""
    given = {k: "float64" if k == "input_dtype" else v for k, v in attributes.items()}
    if given.get("half_to_float"):
        given["half_to_float"] = False
    return tuple(o.astype("f8") if o.dtype.name in ROUNDED else o for o in operands), given


def ours(name, operands, attributes):
    program, inputs = applied(name, operands, attributes)
    return execute(program, inputs)


def close(got, wanted, coarse=0.0):
    assert got.shape == wanted.shape
    if got.dtype.kind in "iub":
        np.testing.assert_array_equal(got, wanted)
        return
    u = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-23, "float64": 2.0**-52}[got.dtype.name]
    got, wanted = got.astype("f8"), wanted.astype("f8")
    if u > 2.0**-20:
        limit = 65504 if u == 2.0**-10 else np.inf
        with np.errstate(invalid="ignore"):
            wanted = np.where(np.abs(wanted) > limit, np.sign(wanted) * np.inf, wanted)
    scale = float(np.max(np.abs(wanted), where=np.isfinite(wanted), initial=1.0))
    np.testing.assert_allclose(got, wanted, rtol=64 * u + coarse, atol=16 * u * scale + coarse)


@pytest.mark.parametrize("name", sorted(NEURAL - NOT_ATEN))
def test_every_example_is_what_torch_gives(name, sample):
    operator = CATALOGUE[name]
    compared = 0
    for operands, attributes in sample(list(operator.examples()), 50):
        try:
            program, inputs = applied(name, operands, attributes)
        except (InputError, ProgramError):
            continue
        if operands[0].dtype.name in LACKING:
            continue
        got = execute(program, inputs)
        complete = operator.complete(program.nodes[-1].attributes)
        wide, given = widened(operands, complete)
        broadcast = np.broadcast_arrays(*wide) if is_binary(name) else wide
        wanted = eager(name, broadcast, given)
        if "output_mask" in given:
            wanted = [t for t, keep in zip(wanted, given["output_mask"], strict=True) if keep]
        for result, expected in zip(got, wanted, strict=name != "log_sigmoid_forward"):
            where = np.broadcast_to(np.isfinite(operands[-1]) if name in UNSURE else True, result.shape)
            close(result[where], to_numpy(expected)[where], COARSE.get(name, 0.0))
        compared += 1
    assert compared >= 2


def is_binary(name):
    return CATALOGUE[name].arity == 2 and name in {o.name for o in activation.OPERATORS}


def enlarged():
    """Operators on arrays large enough to measure: name, operands, attributes."""
    rng = np.random.default_rng(5)

    def draw(*shape, dtype="f4"):
        return rng.normal(size=shape).astype(dtype)

    conv = {"stride": (1,), "padding": (1,), "dilation": (1,), "transposed": False, "output_padding": (0,), "groups": 2}
    x, weight, y = draw(4, 8, 40, 40), draw(16, 4, 3, 3), draw(4, 16, 40, 40)
    pool = {"kernel_size": (3,), "stride": (2,), "padding": (1,)}
    strided = draw(4, 40, 8, 40).swapaxes(1, 2)
    for dtype in ("f4", "f2", "f8"):
        a, w, g = x.astype(dtype), weight.astype(dtype), y.astype(dtype)
        yield "convolution", (a, w, draw(16, dtype=dtype)), conv
        yield "convolution", (g, w), {**conv, "transposed": True, "stride": (2,), "output_padding": (1,)}
        for mask in ((1, 1, 1), (1, 0, 0), (0, 1, 0)):
            yield "convolution_backward", (g, a, w), {**conv, "output_mask": mask}
        pooled = a[..., ::2, ::2].copy()
        for each in (a, strided.astype(dtype)):
            yield "max_pool2d_with_indices", (each,), pool
            yield "avg_pool2d", (each,), pool
        index = rng.integers(0, 1600, pooled.shape)
        yield "max_pool2d_with_indices_backward", (pooled, a, index), pool
        yield "avg_pool2d_backward", (pooled, a), pool
        flat = a.reshape(-1, 1600)
        yield "native_layer_norm", (flat, flat[0], flat[1]), {"normalized_shape": (1600,), "eps": 1e-5}
        mean = np.ones((32, 1), "f4")
        layer = {"normalized_shape": (1600,), "output_mask": (1, 1, 1)}
        yield "native_layer_norm_backward", (flat, flat, mean, mean, flat[0]), layer
        eight = draw(8, dtype=dtype)
        yield "native_group_norm", (a, eight, eight), {"group": 4, "eps": 1e-5}
        group = {"group": 4, "output_mask": (1, 1, 1)}
        yield "native_group_norm_backward", (a, a, np.ones((4, 4), "f4"), np.ones((4, 4), "f4"), eight), group
        for training in (True, False):
            batch = {"training": training, "momentum": 0.1, "eps": 1e-5}
            yield "_native_batch_norm_legit_functional", (a, eight, eight, eight, eight), batch
            back = {"train": training, "eps": 1e-5, "output_mask": (1, 1, 1)}
            yield "native_batch_norm_backward", (a, a, eight, eight, np.abs(eight)), back
        for name in ("_softmax", "_log_softmax"):
            yield name, (flat,), {"dim": 1}
            yield name, (flat,), {"dim": 0}
            yield f"{name}_backward_data", (flat, flat), {"dim": 1, "input_dtype": flat.dtype.name}
        classes = rng.integers(0, 1600, 32)
        yield "nll_loss_forward", (flat, classes, flat[0]), {"reduction": 1}
        yield "nll_loss_backward", (flat[0, 0], flat, classes, flat[0], flat[0, 1]), {"reduction": 1}
        rows = rng.integers(0, 200, 1000)
        yield "embedding", (draw(200, 64, dtype=dtype), rows), {}
        yield "embedding_dense_backward", (draw(1000, 64, dtype=dtype), rows), {"num_weights": 200}
        places = rng.integers(0, 32, (32, 1600))
        yield "gather", (flat, places), {"dim": 0}
        for reduce in ("set", "sum", "mean", "amax"):
            yield "scatter_reduce", (flat, places, flat), {"dim": 0, "reduce": reduce}
        for size in ((20, 20), (80, 80), (7, 7)):
            yield "_adaptive_avg_pool2d", (a,), {"output_size": size}
            grad = draw(4, 8, *size, dtype=dtype)
            yield "_adaptive_avg_pool2d_backward", (grad, a), {}
            yield "upsample_bilinear2d", (a,), {"output_size": size, "align_corners": False}
            more = {"input_size": a.shape, "align_corners": True}
            yield "upsample_bilinear2d_backward", (grad,), more
            yield "upsample_nearest2d", (a,), {"output_size": size}
            yield "upsample_nearest2d_backward", (grad,), {"input_size": a.shape}
        for operator in activation.OPERATORS:
            given = {"threshold": 0.1, "value": 0.0, "negative_slope": 0.1, "is_result": False}
            attributes = {k: v for k, v in given.items() if k in operator.attributes}
            yield operator.name, (a,) * (operator.arity or 1), attributes


@pytest.mark.parametrize("name", sorted({name for name, _, _ in enlarged()}))
def test_kernels_stay_within_the_memory_that_they_declare(name):
    operator = CATALOGUE[name]
    for each, operands, attributes in enlarged():
        if each != name:
            continue
        specs = tuple(ArraySpec(o.shape, o.dtype.name) for o in operands)
        given = operator.complete(operator.canonical(specs, attributes))
        outputs = operator.infer(specs, given)
        declared = sum(map(nbytes, outputs)) + operator.workspace(specs, outputs, given)
        if operator.copies_strided:
            declared += sum(nbytes(s) for s, o in zip(specs, operands, strict=True) if not o.flags.c_contiguous)
        with np.errstate(all="ignore"):
            operator.kernel(np, operands, given)
            tracemalloc.start()
            try:
                results = operator.kernel(np, operands, given)
                _, peak = tracemalloc.get_traced_memory()
            finally:
                tracemalloc.stop()
        assert results
        assert peak <= declared + 100_000, (operands[0].dtype, attributes, peak / declared)


def against_torch(name, operands, attributes):
    """Ours, where ATen computes it; a refusal, where ATen refuses."""
    operator = CATALOGUE[name]
    try:
        program, inputs = applied(name, operands, attributes)
    except InputError as error:
        if 0 in operands[0].shape:
            return error  # of no images ATen makes results of any size
        wide, given = widened(operands, {**operator.defaults, **attributes})
        with pytest.raises((RuntimeError, IndexError)):
            eager(name, wide, given)
        return error
    got = execute(program, inputs)
    wide, given = widened(operands, operator.complete(program.nodes[-1].attributes))
    for result, expected in zip(got, eager(name, wide, given), strict=True):
        close(result, to_numpy(expected), 1e-4 if result.dtype.name == "float32" else 0.0)
    return None


ONE = {"stride": (1,), "padding": (0,), "dilation": (1,), "transposed": False, "output_padding": (0,), "groups": 1}


def drawn(shape, seed=0, dtype="float64"):
    return np.random.default_rng((seed, *shape)).normal(size=shape).astype(dtype)


@st.composite
def convolutions(draw):
    rank = draw(st.integers(1, 3))

    def sizes(low, high):
        return tuple(draw(st.lists(st.integers(low, high), min_size=rank, max_size=rank)))

    groups = draw(st.integers(1, 3))
    transposed = draw(st.booleans())
    stride, dilation = sizes(1, 3), sizes(1, 3)
    more = tuple(draw(st.integers(0, max(s, d) - 1)) for s, d in zip(stride, dilation, strict=True))
    ins, outs = groups * draw(st.integers(1, 2)), groups * draw(st.integers(1, 2))
    kernel = sizes(1, 3)
    weight = (ins, outs // groups, *kernel) if transposed else (outs, ins // groups, *kernel)
    attributes = {
        "stride": stride,
        "padding": sizes(0, 3),
        "dilation": dilation,
        "transposed": transposed,
        "output_padding": more if transposed else (0,) * rank,
        "groups": groups,
    }
    return (draw(st.integers(0, 3)), ins, *sizes(1, 6)), weight, outs, attributes


@settings(max_examples=50, deadline=None)
@given(convolutions(), st.sampled_from(["float32", "float64"]), st.booleans())
def test_convolutions_and_their_gradients(case, dtype, biased):
    shape, weight, outs, attributes = case
    x, w = drawn(shape, 1, dtype), drawn(weight, 2, dtype)
    if against_torch("convolution", (x, w, drawn((outs,), 3, dtype))[: 3 if biased else 2], attributes):
        return
    (y,) = ours("convolution", (x, w), attributes)
    against_torch("convolution_backward", (drawn(y.shape, 4, dtype), x, w), {**attributes, "output_mask": (1, 1, 1)})


@st.composite
def poolings(draw):
    rank = draw(st.integers(2, 3))

    def sizes(low, high):
        return tuple(draw(st.lists(st.integers(low, high), min_size=rank, max_size=rank)))

    kernel = sizes(1, 4)
    attributes = {
        "kernel_size": kernel,
        "stride": draw(st.sampled_from([(), sizes(1, 4)])),
        "padding": tuple(draw(st.integers(0, k // 2)) for k in kernel),
        "ceil_mode": draw(st.booleans()),
    }
    batch = draw(st.sampled_from([(), (0,), (1,), (2,)]))
    return rank, (*batch, draw(st.integers(1, 2)), *sizes(1, 7)), attributes


@settings(max_examples=50, deadline=None)
@given(poolings(), st.integers(1, 3), st.booleans())
def test_largest_elements_of_windows(case, dilation, ties):
    rank, shape, attributes = case
    x = drawn(shape, 1)
    if ties:
        x = np.round(x)
        x[x > 1.2] = np.nan
        x[x < -1.2] = -np.inf
    if dilation > 1 and any(p and dilation > n for p, n in zip(attributes["padding"], shape[-rank:], strict=True)):
        return  # refused: ATen gives an index outside of the plane
    given = {**attributes, "dilation": (dilation,) * rank}
    name = f"max_pool{rank}d_with_indices"
    if against_torch(name, (x,), given):
        return
    values, index = ours(name, (x,), given)
    against_torch(f"{name}_backward", (drawn(values.shape, 2), x, index), given)


@settings(max_examples=50, deadline=None)
@given(poolings(), st.booleans(), st.sampled_from([None, 1, 3, -2]))
def test_means_of_windows(case, count_include_pad, divisor):
    rank, shape, attributes = case
    given = {**attributes, "count_include_pad": count_include_pad, "divisor_override": divisor}
    if rank == 3 and any(k > n for k, n in zip(attributes["kernel_size"], shape[-3:], strict=True)):
        return  # ATen refuses some of these, by a rule that its 2d lacks
    x = drawn(shape, 1)
    if against_torch(f"avg_pool{rank}d", (x,), given):
        return
    (y,) = ours(f"avg_pool{rank}d", (x,), given)
    against_torch(f"avg_pool{rank}d_backward", (drawn(y.shape, 2), x), given)


@settings(max_examples=50, deadline=None)
@given(st.tuples(*[st.integers(1, 7)] * 4), st.booleans(), st.none() | st.floats(0.3, 3))
def test_resampling(sizes, corners, scale):
    shape, out = (2, 1, *sizes[:2]), sizes[2:]
    x, grad = drawn(shape, 1), drawn((2, 1, *out), 2)
    against_torch("_adaptive_avg_pool2d", (x,), {"output_size": out})
    against_torch("_adaptive_avg_pool2d_backward", (grad, x), {})
    scales = {"scales_h": scale, "scales_w": None}
    against_torch("upsample_bilinear2d", (x,), {"output_size": out, "align_corners": corners, **scales})
    against_torch("upsample_bilinear2d_backward", (grad,), {"input_size": shape, "align_corners": corners, **scales})
    against_torch("upsample_nearest2d", (x,), {"output_size": out})
    against_torch("upsample_nearest2d_backward", (grad,), {"input_size": shape})


@pytest.mark.parametrize(
    ("name", "operands", "attributes", "words"),
    [
        ("embedding", (np.ones((3, 2)), np.asarray([0, 3])), {}, "indices from 0 to 3, expected 0 to 2"),
        ("gather", (np.ones(3), np.asarray([-1])), {"dim": 0}, "indices from -1 to -1, expected 0 to 2"),
        ("nll_loss_forward", (np.ones((2, 3)), np.asarray([0, 3])), {}, "targets from 0 to 3, expected 0 to 2"),
        (
            "max_pool2d_with_indices_backward",
            (np.ones((1, 1, 1)), np.ones((1, 2, 2)), np.asarray([[[4]]])),
            {"kernel_size": (2,)},
            "an index is not one of a plane of 4 elements",
        ),
    ],
)
def test_numbers_that_index_nothing_are_refused(name, operands, attributes, words):
    with pytest.raises(InputError, match=words):
        ours(name, operands, attributes)


@pytest.mark.parametrize(
    ("name", "shapes", "attributes", "words"),
    [
        ("max_pool1d_with_indices", ((1, 4),), {"kernel_size": (4,), "padding": (3,)}, "more than half of the window"),
        ("avg_pool2d", ((1, 4, 4),), {"kernel_size": (5,)}, "does not fit into an axis of 4"),
        ("_softmax", ((3,),), {"dim": 0, "half_to_float": True}, "half_to_float is of halves"),
        ("native_layer_norm", ((2, 3),), {"normalized_shape": (2,), "eps": 1e-5}, "is not how the shape"),
        (
            "native_layer_norm_backward",
            ((2, 3),) * 4,
            {"normalized_shape": (3,), "output_mask": (0, 0, 0)},
            "has shape",
        ),
        ("upsample_nearest1d", ((1, 1, 4),), {"output_size": (8,), "scales": 1e-300}, "a scale of 1e-300"),
        ("gelu", ((3,),), {"approximate": "erf"}, "expected one of 'none', 'tanh'"),
    ],
)
def test_layers_that_do_not_follow_are_refused(name, shapes, attributes, words):
    with pytest.raises((InputError, ProgramError), match=words):
        ours(name, tuple(np.ones(shape) for shape in shapes), attributes)


def test_absurd_windows_are_priced_without_looking_at_each_tap():
    """A padded window of two billion places sees one element: one tap."""
    huge = {"kernel_size": (2**31 - 1,), "padding": (2**30 - 1,)}
    (values, index) = ours("max_pool1d_with_indices", (np.ones((1, 1)),), huge)
    assert (values.item(), index.item()) == (1, 0)
    assert ours("avg_pool1d", (np.ones((1, 1)),), {**huge, "count_include_pad": False})[0].item() == 1


def test_halves_accumulate_in_float32():
    ones = np.ones((1, 4096, 1), "float16")
    assert ours("convolution", (ones, ones), ONE)[0].item() == 4096
    plane = np.full((1, 1, 80, 80), 1, "float16")
    assert ours("avg_pool2d", (plane,), {"kernel_size": (80,), "divisor_override": 1})[0].item() == 6400
    grad = np.ones((5000, 1), "float16")
    (rows,) = ours("embedding_dense_backward", (grad, np.zeros(5000, "int64")), {"num_weights": 1})
    assert rows.item() == 5000

"""PyTorch's own samples of its operators: captured, run on each backend, compared with PyTorch."""

import itertools
from collections import Counter

import numpy as np
import pytest

import goblin_dask as goblin
from goblin_dask.errors import InputError
from goblin_dask.graphs.backends.base import NUMPY
from goblin_dask.graphs.backends.choice import backend_named
from goblin_dask.graphs.capture.aten import LOWERINGS
from goblin_dask.graphs.capture.aten.creation import UNKEYED

torch = pytest.importorskip("torch")
samples = pytest.importorskip("torch.testing._internal.common_methods_invocations")

from goblin_dask.graphs.capture.torch_internals import to_numpy  # noqa: E402 needs PyTorch

from ..gpu import here  # noqa: E402

pytestmark = [pytest.mark.timeout(7200), pytest.mark.filterwarnings("ignore")]

DTYPES = (torch.float32, torch.int64, torch.complex64, torch.bool, torch.bfloat16)
EACH = 2
"""Samples of an operator and dtype that are run at most, evenly among all."""
REFUSED = 0.05

COMPOSED = {
    "linear", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "batch_norm",
    "layer_norm", "group_norm", "instance_norm", "scaled_dot_product_attention", "cross_entropy", "nll_loss",
    "softmax", "log_softmax", "embedding", "interpolate", "max_pool1d", "max_pool2d", "max_pool3d", "avg_pool1d",
    "avg_pool2d", "avg_pool3d", "adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d", "mse_loss",
    "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits", "kl_div",
    "normalize", "pad", "unfold", "bilinear", "cosine_similarity", "softmin", "glu", "selu", "celu", "softsign",
    "tanhshrink", "hardshrink", "softshrink", "prelu", "relu6", "logsigmoid", "pixel_shuffle", "pixel_unshuffle",
    "local_response_norm", "rms_norm", "pairwise_distance", "one_hot", "triplet_margin_loss", "upsample_bilinear",
    "upsample_nearest", "cdist", "std", "var", "norm", "einsum", "tensordot", "matmul", "cumsum", "logcumsumexp",
    "movedim", "swapaxes", "chunk", "hstack", "vstack", "dstack", "flatten", "unflatten", "tile", "outer", "inner",
    "kron", "diff", "trace", "isclose", "nan_to_num", "linalg.norm", "linalg.vector_norm", "linalg.matrix_norm",
    "linalg.solve", "linalg.inv", "linalg.cholesky", "linalg.svd", "linalg.qr", "linalg.eigh", "linalg.det",
    "linalg.multi_dot", "fft.fft", "fft.ifft", "fft.rfft", "fft.irfft", "fft.fft2", "fft.rfftn", "fft.hfft",
    "__getitem__", "__radd__", "__rmul__", "__rsub__", "__rdiv__", "__rpow__", "broadcast_to", "ravel", "reshape",
}  # fmt: skip
"""Functions of PyTorch that come down to operators of the catalogue."""

UNIQUE = {
    "linalg.svd": "signs of singular vectors", "linalg.qr": "signs of factors", "linalg.eigh": "signs of eigenvectors",
    "nn.functional.scaled_dot_product_attention": "dropout",
    "rand_like": "random numbers", "randn_like": "random numbers", "bernoulli": "random numbers",
    "randn": "random numbers",
}  # fmt: skip
"""Where two right results differ, and by what: of these, shapes and dtypes are compared."""


def operators():
    packets = {overload.split(".")[1] for overload in LOWERINGS.keys() - set(UNKEYED)}
    for info in samples.op_db:
        name = info.name.removeprefix("nn.functional.").removeprefix("special.")
        if "empty" not in name and (info.aten_name in packets or name in packets or name in COMPOSED):
            yield info


def cases(info):
    """Samples of an operator, evenly among all that PyTorch has."""
    for dtype in DTYPES:
        if dtype not in info.supported_dtypes("cpu"):
            continue
        try:
            found = list(itertools.islice(info.sample_inputs("cpu", dtype, requires_grad=False), 200))
        except Exception:  # a sampler that wants another device or library
            continue
        step = max(1, len(found) // EACH)
        for sample in found[::step][:EACH]:
            yield dtype, sample


def flat(value):
    leaves, _ = torch.utils._pytree.tree_flatten(value)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def close(got, wanted, dtype):
    got, wanted = to_numpy(got) if isinstance(got, torch.Tensor) else got, to_numpy(wanted)
    assert (got.shape, got.dtype) == (wanted.shape, wanted.dtype)
    if got.dtype.kind in "biu":
        np.testing.assert_array_equal(got, wanted)
        return
    low = dtype in (torch.bfloat16, torch.float16) or got.dtype.name in ("bfloat16", "float16")
    precision = 3e-2 if low else 1e-4 if got.dtype.name in ("float32", "complex64") else 1e-9
    wide = np.complex128 if got.dtype.kind == "c" else np.float64
    got, wanted = got.astype(wide), wanted.astype(wide)
    size = np.abs(wanted[np.isfinite(wanted)]).max(initial=0.0)
    np.testing.assert_allclose(got, wanted, rtol=precision, atol=precision * max(size, 1e-3))


TIES = {"topk": 1, "sort": 0}
"""Which equal element comes first is nobody's rule; and which positional argument is the axis."""


def picked(name, sample, got, expected):
    """Positions of elements in order; of equal ones any."""
    place = TIES[name]
    dim = sample.kwargs.get("dim", sample.args[place] if len(sample.args) > place else -1)
    got = torch.as_tensor(np.asarray(got))
    assert (got.shape, got.dtype) == (expected.shape, expected.dtype)
    if sample.input.ndim:
        assert torch.equal(sample.input.gather(dim, got), sample.input.gather(dim, expected))
        assert all(len(set(row.tolist())) == row.numel() for row in got.movedim(dim, -1).reshape(-1, got.shape[dim]))


def run(info, dtype, sample, backends):
    """One sample; why it was refused, or nothing."""

    def function(*tensors):
        leaves, number = list(everything), iter(tensors)
        leaves = [next(number) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        first, args, kwargs = torch.utils._pytree.tree_unflatten(leaves, structure)
        return info.op(first, *args, **kwargs)

    everything, structure = torch.utils._pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
    tensors = [leaf for leaf in everything if isinstance(leaf, torch.Tensor)]
    try:
        with torch.no_grad():
            wanted = flat(function(*(tensor.clone() for tensor in tensors)))
    except Exception:
        return "PyTorch does not compute it"
    if not wanted:
        return "no tensor comes out"
    try:
        captured = goblin.capture(function, *tensors, dynamic_batch=False)
    except InputError as error:
        return str(error)
    for backend in backends:
        found = captured(*tensors, key=1, backend=backend)
        found = flat(found[0] if captured.state else found)
        for got, expected in zip(found, wanted, strict=True):
            if info.name in UNIQUE:
                assert (got.shape, got.dtype) == (expected.shape, expected.dtype)
            elif info.name in TIES and expected.dtype == torch.int64 and expected is wanted[-1]:
                picked(info.name, sample, got, expected)
            else:
                close(got, expected, dtype)
    return ""


@pytest.mark.full
def test_samples_of_pytorch(full, sample, report):
    known = list(operators())
    chosen = sample(known, 3)
    backends = [NUMPY, backend_named("torch"), *map(backend_named, here())]
    counted, reasons = Counter(), Counter()
    for info in chosen:
        for number, (dtype, each) in enumerate(cases(info)):
            if not full and number > 2:
                break
            try:
                refused = run(info, dtype, each, backends)
            except AssertionError as error:
                raise AssertionError(f"{info.name} of {dtype}: {each}: {error}") from error
            if refused in ("PyTorch does not compute it", "no tensor comes out"):
                continue
            counted["samples"] += 1
            if refused:
                counted["refused"] += 1
                reasons[f"{info.name}: {refused.partition(', which ')[0][:160]}"] += 1
    for reason, number in reasons.most_common():
        report(f"refused {number:3}: {reason}")
    share = counted["refused"] / counted["samples"]
    report(
        f"op_db: {len(chosen)} of {len(known)} operators, {counted['samples']} samples equal to eager on "
        f"{len(backends)} backends, {counted['refused']} refused ({share:.1%})"
    )
    assert share <= REFUSED

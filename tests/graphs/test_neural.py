"""Operators of neural networks against PyTorch's own, called by their schemas."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from goblin_dask.errors import InputError, ProgramError
from goblin_dask.graphs.execute import execute
from goblin_dask.graphs.operators import CATALOGUE, NEURAL

from .test_operators import applied

torch = pytest.importorskip("torch")

ROUNDED = ("float16", "bfloat16", "float32")
OVERLOADS = {"scatter_reduce": "two"}
ALIASES = {"_native_batch_norm_legit_no_stats": ("_native_batch_norm_legit", "no_stats")}
"""Where there is no default one."""
UNSURE = {"gelu", "hardtanh_backward"}
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
def test_every_example_is_what_torch_gives(name):
    operator = CATALOGUE[name]
    compared = 0
    for operands, attributes in operator.examples():
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
    from goblin_dask.graphs.operators import activation

    return CATALOGUE[name].arity == 2 and name in {o.name for o in activation.OPERATORS}

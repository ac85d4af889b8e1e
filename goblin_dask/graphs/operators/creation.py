"""Arrays from attributes alone, and counter-based random numbers, whose key is an operand."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from goblin_dask.errors import InputError
from goblin_dask.graphs.operators import samples
from goblin_dask.graphs.operators.base import Array, Example, Kind, Operator, Specs
from goblin_dask.graphs.operators.dtypes import DTYPES
from goblin_dask.graphs.operators.rules import Bool, DType, Int, Number, Shape, Text
from goblin_dask.messages import ArraySpec

CREATION = frozenset({Kind.CREATION})
RANDOM = frozenset({Kind.RANDOM})
CONSTANT_LIMIT = 4096
"""Most bytes of a constant; larger arrays are inputs."""


def _infer_constant(specs: Specs, attributes: Any) -> Specs:
    shape, dtype = attributes["shape"], attributes["dtype"]
    if 2 * math.prod(shape) * DTYPES[dtype].itemsize != len(attributes["data"]):
        raise InputError(f"{len(attributes['data'])} hexadecimal digits are not an array {dtype} {shape}")
    if dtype == "bool" and not set(bytes.fromhex(attributes["data"])) <= {0, 1}:
        raise InputError("a boolean is the byte 0 or 1")
    return (ArraySpec(shape, dtype),)


def _constant(xp: Any, operands: tuple[Array, ...], attributes: Any) -> tuple[Array, ...]:
    data = np.frombuffer(bytearray.fromhex(attributes["data"]), DTYPES[attributes["dtype"]])
    return (xp.asarray(data.reshape(attributes["shape"])),)


def _infer_shaped(specs: Specs, attributes: Any) -> Specs:
    return (ArraySpec(attributes["shape"], attributes["dtype"]),)


def _infer_full(specs: Specs, attributes: Any) -> Specs:
    if specs[0].shape:
        raise InputError("the fill value is a scalar")
    return (ArraySpec(attributes["shape"], specs[0].dtype),)


def _full(xp: Any, operands: tuple[Array, ...], attributes: Any) -> tuple[Array, ...]:
    result = xp.empty(attributes["shape"], operands[0].dtype)
    result[...] = operands[0]
    return (result,)


def _infer_arange(specs: Specs, attributes: Any) -> Specs:
    start, stop, step = attributes["start"], attributes["stop"], attributes["step"]
    if not step or not math.isfinite((stop - start) / step):
        raise InputError(f"no number of steps of {step} leads from {start} to {stop}")
    return (ArraySpec((max(0, math.ceil((stop - start) / step)),), attributes["dtype"]),)


def _infer_eye(specs: Specs, attributes: Any) -> Specs:
    return (ArraySpec((attributes["rows"], attributes["columns"]), attributes["dtype"]),)


def _infer_linspace(specs: Specs, attributes: Any) -> Specs:
    return (ArraySpec((attributes["num"],), attributes["dtype"]),)


def _check_key(specs: Specs) -> None:
    if specs[0] != ArraySpec((2,), "uint64"):
        raise InputError("the key is an array of two uint64")


def _infer_random(specs: Specs, attributes: Any) -> Specs:
    _check_key(specs)
    dtype = attributes["dtype"]
    if dtype not in ("float32", "float64"):
        raise InputError("random numbers are float32 or float64; cast them")
    return (ArraySpec(attributes["shape"], dtype),)


def _bits(key: Array, count: int) -> Any:
    """Philox4x64-10 from counter zero: the same bits on every machine and with every version of NumPy."""
    host = key.get() if hasattr(key, "get") else key
    return np.random.Philox(key=np.asarray(host)).random_raw(count)


def unit(bits: Any, dtype: Any) -> Any:
    """Uniform in [0, 1) from the upper bits, exactly."""
    if dtype.name == "float32":
        return (bits >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _uniform(xp: Any, operands: tuple[Array, ...], attributes: Any) -> tuple[Array, ...]:
    shape, dtype = attributes["shape"], DTYPES[attributes["dtype"]]
    return (xp.asarray(unit(_bits(operands[0], math.prod(shape)), dtype).reshape(shape)),)


def _normal(xp: Any, operands: tuple[Array, ...], attributes: Any) -> tuple[Array, ...]:
    """Box and Muller's transform, in float64, of two uniform numbers for two normal ones."""
    shape, dtype = attributes["shape"], DTYPES[attributes["dtype"]]
    count = math.prod(shape)
    half = (count + 1) // 2
    uniform = unit(_bits(operands[0], 2 * half), np.dtype("float64"))
    radius, angle = np.sqrt(-2.0 * np.log1p(-uniform[:half])), 2.0 * np.pi * uniform[half:]
    normal = np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:count]
    return (xp.asarray(normal.astype(dtype).reshape(shape)),)


def _words_of(xp: Any, operands: tuple[Array, ...], attributes: Any) -> tuple[Array, ...]:
    shape = attributes["shape"]
    return (xp.asarray(_bits(operands[0], math.prod(shape)).reshape(shape)),)


def _infer_bits(specs: Specs, attributes: Any) -> Specs:
    _check_key(specs)
    return (ArraySpec(attributes["shape"], "uint64"),)


def _examples_constant() -> Iterator[Example]:
    for array in samples.arrays():
        yield (), {"data": array.tobytes().hex(), "dtype": array.dtype.name, "shape": array.shape}


def _examples_full() -> Iterator[Example]:
    for dtype in samples.ALL:
        yield (samples.sample((), dtype),), {"shape": (2, 3)}
        yield (samples.sample((), dtype),), {"shape": (0,)}


def _examples_shaped() -> Iterator[Example]:
    for dtype in samples.ALL:
        for shape in samples.SHAPES:
            yield (), {"shape": shape, "dtype": dtype}


def _examples_arange() -> Iterator[Example]:
    for dtype in ("int64", "float32", "float64", "uint8"):
        for start, stop, step in ((0, 5, 1), (5, 0, -2), (0, 1, 0.1), (3, 3, 1), (5, 1, 1), (0.5, 9.25, 1.75)):
            if not (dtype == "uint8" and step == 0.1):
                yield (), {"start": start, "stop": stop, "step": step, "dtype": dtype}


def _examples_eye() -> Iterator[Example]:
    for dtype in samples.ALL:
        yield (), {"rows": 3, "columns": 4, "k": 1, "dtype": dtype}
    yield (), {"rows": 0, "columns": 2, "dtype": "float32"}


def _examples_linspace() -> Iterator[Example]:
    for dtype in ("float32", "float64", "int64", "complex128"):
        for num in (0, 1, 5):
            yield (), {"start": -1, "stop": 2.5, "num": num, "dtype": dtype}
            yield (), {"start": 0.1, "stop": 7, "num": num, "endpoint": False, "dtype": dtype}


def _examples_random(*dtypes: str) -> Callable[[], Iterator[Example]]:
    def examples() -> Iterator[Example]:
        for shape in samples.SHAPES:
            for dtype in dtypes:
                yield (np.asarray([7, 2**64 - 1], "uint64"),), {"shape": shape, "dtype": dtype}
            if not dtypes:
                yield (np.asarray([7, 2**64 - 1], "uint64"),), {"shape": shape}

    return examples


def _create(name: str, summary: str, infer: Any, kernel: Any, examples: Any, attributes: Any, **more: Any) -> Operator:
    return Operator(name, summary, CREATION, infer, kernel, examples, arity=0, attributes=attributes, **more)


def _dtype(attributes: Any) -> Any:
    return DTYPES[attributes["dtype"]]


def _words(factor: int) -> Callable[[Specs, Specs, Any], int]:
    return lambda specs, outputs, attributes: factor * 8 * (math.prod(outputs[0].shape) + 1)


OPERATORS: tuple[Operator, ...] = (
    _create(
        "constant",
        "A small array: its bytes, little-endian, in hexadecimal digits.",
        _infer_constant,
        _constant,
        _examples_constant,
        {"data": Text(pattern="([0-9a-f]{2})*", limit=2 * CONSTANT_LIMIT), "dtype": DType(), "shape": Shape()},
        workspace=lambda specs, outputs, attributes: CONSTANT_LIMIT,
    ),
    _create(
        "zeros",
        "Zeros.",
        _infer_shaped,
        lambda xp, operands, a: (xp.zeros(a["shape"], _dtype(a)),),
        _examples_shaped,
        {"shape": Shape(), "dtype": DType()},
    ),
    _create(
        "ones",
        "Ones.",
        _infer_shaped,
        lambda xp, operands, a: (xp.ones(a["shape"], _dtype(a)),),
        _examples_shaped,
        {"shape": Shape(), "dtype": DType()},
    ),
    Operator(
        "full",
        "The operand, a scalar, everywhere.",
        CREATION,
        _infer_full,
        _full,
        _examples_full,
        attributes={"shape": Shape()},
    ),
    _create(
        "arange",
        "Numbers from ``start`` on in steps, below ``stop``.",
        _infer_arange,
        lambda xp, operands, a: (xp.arange(a["start"], a["stop"], a["step"], _dtype(a)),),
        _examples_arange,
        {"start": Number(0), "stop": Number(), "step": Number(1), "dtype": DType()},
    ),
    _create(
        "eye",
        "Ones on the diagonal number ``k``, zeros else.",
        _infer_eye,
        lambda xp, operands, a: (xp.eye(a["rows"], a["columns"], a["k"], _dtype(a)),),
        _examples_eye,
        {"rows": Int(low=0), "columns": Int(low=0), "k": Int(0), "dtype": DType()},
    ),
    _create(
        "linspace",
        "``num`` numbers at equal distances.",
        _infer_linspace,
        lambda xp, operands, a: (xp.linspace(a["start"], a["stop"], a["num"], a["endpoint"], dtype=_dtype(a)),),
        _examples_linspace,
        {"start": Number(), "stop": Number(), "num": Int(low=0), "endpoint": Bool(True), "dtype": DType()},
        workspace=_words(3),
    ),
    Operator(
        "random_uniform",
        "Uniform numbers in [0, 1) for a key.",
        RANDOM,
        _infer_random,
        _uniform,
        _examples_random("float32", "float64"),
        attributes={"shape": Shape(), "dtype": DType("float64")},
        workspace=_words(3),
    ),
    Operator(
        "random_normal",
        "Normal numbers for a key.",
        RANDOM,
        _infer_random,
        _normal,
        _examples_random("float32", "float64"),
        attributes={"shape": Shape(), "dtype": DType("float64")},
        workspace=_words(6),
    ),
    Operator(
        "random_bits",
        "Uniform uint64 for a key.",
        RANDOM,
        _infer_bits,
        _words_of,
        _examples_random(),
        attributes={"shape": Shape()},
        workspace=_words(1),
    ),
)

"""The probe that a volunteer's machine computes before it gets work: what its arithmetic is, measured and not believed.

One small program on fresh random numbers, whose right results the gateway works out for itself in float64:

* a float32 product, and one of a transposed matrix of integers: libraries that mix up transposes have been seen;
* products so short that their last bits tell a fused multiply-add, and a product below the smallest normal number;
* functions of the catalogue where libraries of approximations are tempted to save time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from goblin_dask.digest import digest
from goblin_dask.graphs.builder import Builder
from goblin_dask.graphs.program import Program, encode
from goblin_dask.graphs.schedule import schedule
from goblin_dask.messages import ArraySpec, BlobRef
from goblin_dask.store.buffers import array_of, buffer_of, spec_of
from goblin_dask.verify.commitments import mismatch
from goblin_dask.verify.operands import Array
from goblin_dask.verify.rows import bfloat16, tf32
from goblin_dask.verify.tolerances import unit_roundoff

SIZE = 96
"""Rows and columns of the products: 36 KB travel inside the message."""

FUNCTIONS = ("exp", "tanh", "sqrt", "reciprocal")
ULPS = 16.0
"""By how many roundings a function may be off."""


@dataclass(frozen=True)
class Contract:
    """What a machine's float32 is."""

    precision: str
    """``float32``, or what poses as it: ``tf32``, ``bfloat16``, ``low precision``."""
    fused: bool
    """Products are added without being rounded."""
    flushes: bool
    """Numbers below the smallest normal one become zero."""


@dataclass(frozen=True)
class Probe:
    """One machine's probe."""

    arrays: tuple[Array, ...]

    @property
    def inputs(self) -> tuple[BlobRef, ...]:
        """References, with the bytes inline."""
        buffers = [buffer_of(array) for array in self.arrays]
        return tuple(
            BlobRef(digest(buffer), spec_of(array), buffer.nbytes, bytes(buffer))
            for buffer, array in zip(buffers, self.arrays, strict=True)
        )


@cache
def program() -> Program:
    """What is computed: the same for every machine."""
    build = Builder()
    a = build.input(ArraySpec((SIZE, SIZE), "float32"))
    b = build.input(ArraySpec((SIZE, SIZE), "float32"))
    n = build.input(ArraySpec((SIZE, SIZE), "float32"))
    x, y, tiny = (build.input(ArraySpec(shape, "float32")) for shape in ((SIZE, 2), (2, 1), (SIZE,)))
    (turned,) = build.add("permute_dims", [n], axes=(1, 0))
    outputs = [
        *build.add("matmul", [a, b]),
        *build.add("matmul", [turned, n]),
        *build.add("matmul", [x, y]),
        *build.add("multiply", [tiny, tiny]),
    ]
    (positive,) = build.add("abs", [a])
    for name in FUNCTIONS:
        outputs += build.add(name, [positive])
    made, slots = build.finish(outputs)
    assert slots == tuple(range(len(made.inputs)))
    return made


@cache
def encoded() -> bytes:
    """Bytes of `program`."""
    return encode(program())


def draw(rng: np.random.Generator) -> Probe:
    """A probe that nobody can have computed before."""
    a, b = (rng.standard_normal((SIZE, SIZE), np.float32) for _ in range(2))
    integers = rng.integers(-40, 41, (SIZE, SIZE)).astype(np.float32)
    factors = (1 + rng.random((SIZE, 1), np.float32)).astype(np.float32)
    times = (1 + rng.random(1, np.float32)).astype(np.float32)
    rounded = (factors * times).astype(np.float32)
    x = np.hstack([factors, -rounded])
    y = np.array([[times[0]], [1.0]], np.float32)
    tiny = (rng.random(SIZE, np.float32) + 1) * np.float32(1e-20)
    return Probe((a, b, integers, x, y, tiny))


def judge(probe: Probe, outputs: Sequence[BlobRef]) -> tuple[Contract | None, str]:
    """What a machine's answer says of it, and why it must not get work; empty when it may.

    Parameters
    ----------
    probe : Probe
        What it was sent.
    outputs : sequence of BlobRef
        What it committed, inline.
    """
    known = schedule(program()).specs
    specs = [known[value] for value in program().outputs]
    if reason := mismatch(outputs, specs):
        return None, f"its answer to the probe is not one: {reason}"
    if any(ref.inline is None for ref in outputs):
        return None, "its answer to the probe did not come with its message"
    product, turned, short, small, *functions = [array_of(ref.inline, ref.spec) for ref in outputs]
    a, b, n, _, _, _ = (array.astype(np.float64) for array in probe.arrays)
    if not np.array_equal(turned, n.T @ n):
        return None, "it multiplies matrices of small integers wrongly: its linear algebra library is broken"
    precision = _precision(probe, product, a @ b)
    if precision != "float32":
        return Contract(precision, False, False), (
            f"it computes float32 products in {precision}: switch that off (with PyTorch: "
            "torch.backends.cuda.matmul.allow_tf32 = False), its results would not be accepted"
        )
    for name, found in zip(FUNCTIONS, functions, strict=True):
        exact = getattr(np, name)(np.abs(a))
        if not np.all(np.abs(found - exact) <= ULPS * 2 * unit_roundoff(np.float32) * np.abs(exact)):
            return None, f"its {name} of float32 is off by more than {ULPS:.0f} roundings"
    return Contract(precision, bool(np.any(short)), not np.all(small)), ""


def _precision(probe: Probe, given: Array, exact: Array) -> str:
    """What a product was computed in, by its error; the bound is the probe's own, not a guess."""
    a, b = probe.arrays[:2]
    error = float(np.sqrt(np.mean(np.square(given - exact))))
    scale = float(np.sqrt(np.mean(np.square(np.abs(a).astype(np.float64) @ np.abs(b)))))
    if error <= 4 * unit_roundoff(np.float32) * np.sqrt(SIZE) * scale:
        return "float32"
    for name, rounded in (("tf32", tf32), ("bfloat16", bfloat16)):
        low = rounded(a).astype(np.float64) @ rounded(b)
        if float(np.sqrt(np.mean(np.square(given - low)))) < 0.5 * error:
            return name
    return "low precision"

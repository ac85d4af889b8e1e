"""What can be said of a result at a glance: its shape and dtype, and whether it is suspiciously dull."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from goblin_dask.messages import ArraySpec
from goblin_dask.verify.operands import Array


def misshapen(outputs: Sequence[Array], specs: Sequence[ArraySpec]) -> str:
    """What is wrong with the number, shapes or dtypes of outputs; empty when nothing is."""
    if len(outputs) != len(specs):
        return f"{len(outputs)} outputs, expected {len(specs)}"
    for number, (array, spec) in enumerate(zip(outputs, specs, strict=True)):
        if array.shape != spec.shape or array.dtype.name != spec.dtype:
            given = f"{array.dtype.name} of shape {array.shape}"
            return f"output {number} is {given}, expected {spec.dtype} of shape {spec.shape}"
    return ""


def is_constant(array: Array) -> bool:
    """Whether an array of at least two elements holds one value only (all NaN counts).

    Two broken devices of one kind agree on zeros: where results are only compared with each other, constant ones are
    computed again by somebody who is trusted.
    """
    if array.size < 2:
        return False
    flat = array.reshape(-1)
    first = flat[:1]
    for start in range(0, flat.size, 1 << 16):
        block = flat[start : start + (1 << 16)]
        same = block == first
        if array.dtype.kind not in "biu?":
            same |= np.isnan(block) & np.isnan(first)
        if not same.all():
            return False
    return True

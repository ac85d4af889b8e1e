"""Lower precision than the one that was asked for: fast on the hardware of today, and nearly right."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from goblin_dask.graphs.execute import execute
from goblin_dask.graphs.program import Program
from goblin_dask.testing.liars.registry import LIARS, Liar, Outputs
from goblin_dask.verify.operands import Array
from goblin_dask.verify.rows import bfloat16, tf32


def _posing(rounded: Callable[[Array], Array]) -> Liar:
    """Compute with rounded operands."""

    def pose(
        program: Program,
        inputs: Sequence[Array],
        outputs: Outputs,
        rng: np.random.Generator,
        options: Mapping[str, Any],
    ) -> Outputs:
        changed = [_round(array, rounded) for array in inputs]
        return [y.astype(x.dtype) for x, y in zip(outputs, execute(program, changed), strict=True)]

    return pose


def _round(array: Array, rounded: Callable[[Array], Array]) -> Array:
    """Round a float32 or float64 array, through float32."""
    if array.dtype not in (np.float32, np.float64):
        return array
    return rounded(np.ascontiguousarray(array, np.float32)).astype(array.dtype)


LIARS["float32"] = _posing(lambda array: array)
LIARS["tf32"] = _posing(tf32)
LIARS["bfloat16"] = _posing(bfloat16)
LIARS["float16"] = _posing(lambda array: array.astype(np.float16).astype(np.float32))
LIARS["float8"] = _posing(lambda array: array.astype(ml_dtypes.float8_e5m2).astype(np.float32))

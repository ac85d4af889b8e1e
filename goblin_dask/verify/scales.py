"""How far rounding alone carries the values of a program apart: measured by a checker, kept from check to check."""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from goblin_dask.graphs.operators.dtypes import DTYPES
from goblin_dask.graphs.program import Program
from goblin_dask.graphs.schedule import schedule
from goblin_dask.verify.evaluate import DOUBLE, SINGLE, Source, apply, cast, load
from goblin_dask.verify.operands import Array
from goblin_dask.verify.sigma import distance, rms, sigma
from goblin_dask.verify.tolerances import is_floating

RENEWED = 16
"""Comparisons of one program's results after which its scales are measured again."""

PROGRAMS = 64
"""Programs whose scales a checker keeps."""


@dataclass(slots=True)
class _Known:
    scales: dict[int, float] = field(default_factory=dict)
    """Smallest scale of each value over its rms that was measured."""
    uses: int = 0


def rounds(dtype: np.dtype[np.generic]) -> bool:
    """Whether two honest machines may differ in a value of this dtype."""
    return is_floating(dtype) or dtype.kind == "c"


def measure(program: Program, inputs: Sequence[Source]) -> tuple[dict[int, float], dict[int, float], float]:
    """Run a program in float32 and in float64.

    Returns
    -------
    scales : dict of int to float
        Of each value of floating dtype: rms of the difference, as `goblin_dask.verify.sigma.sigma` takes it.
    sizes : dict of int to float
        Its rms in float64.
    flops : float
        Of both runs.
    """
    plan = schedule(program)
    last = {operand: number for number, step in enumerate(plan.steps) for operand in step.operands}
    fine: dict[int, Array] = {}
    coarse: dict[int, Array] = {}
    scales: dict[int, float] = {}
    sizes: dict[int, float] = {}
    work = 0.0
    for number, step in enumerate(plan.steps):
        for operand in step.operands:
            if operand not in fine:
                source = load(inputs[operand])
                fine[operand], coarse[operand] = cast(source, DOUBLE), cast(source, SINGLE)
        exact = apply(step, [fine[operand] for operand in step.operands], DOUBLE)
        rough = apply(step, [coarse[operand] for operand in step.operands], SINGLE)
        work += 2 * step.operator.flops(tuple(plan.specs[o] for o in step.operands), step.specs, step.attributes)
        for value, y, z, spec in zip(step.outputs, exact, rough, step.specs, strict=True):
            if value in last:
                fine[value], coarse[value] = y, z
            dtype = DTYPES[spec.dtype]
            if rounds(dtype):
                scales[value] = sigma(z, y, dtype)
                sizes[value] = rms(np.where(np.isfinite(y), y, 0))
        for operand in step.operands:
            if last[operand] == number:
                del fine[operand], coarse[operand]
                last[operand] = -1
    return scales, sizes, work


class Scales:
    """Scales of the programs whose results were compared last. Thread-safe.

    They depend on the data. What is kept is each value's smallest scale relative to its rms, and results that agree by
    that agree; where they do not, the scales of their own inputs decide.
    """

    def __init__(self) -> None:
        self._known: OrderedDict[Program, _Known] = OrderedDict()
        self._lock = threading.Lock()

    def compare(
        self,
        program: Program,
        inputs: Sequence[Source],
        values: Sequence[int],
        one: Sequence[Array],
        other: Sequence[Array],
    ) -> tuple[float, float]:
        """Compare what two machines say that some values of a program are.

        Parameters
        ----------
        program, inputs
            As for `goblin_dask.graphs.execute.execute`.
        values : sequence of int
            Numbers of the values in the program.
        one, other : sequence of array
            What they are said to be.

        Returns
        -------
        ratio : float
            Largest distance over what is accepted; infinite or NaN where they cannot both be right.
        flops : float
            That this took, beyond reading.
        """
        pairs = [(value, a, b) for value, a, b in zip(values, one, other, strict=True) if not _same(a, b)]
        if not pairs:
            return 0.0, 0.0
        if not all(rounds(a.dtype) for _, a, _ in pairs):
            return math.inf, 0.0
        if not all(value >= len(program.inputs) for value, _, _ in pairs):
            return math.inf, 0.0  # an output that is an input has one value
        known = self._use(program)
        if known is not None:
            ratio = _worst(pairs, {value: known[value] * min(rms(a), rms(b)) for value, a, b in pairs})
            if ratio <= 1:
                return ratio, 0.0
        scales, sizes, work = measure(program, inputs)
        self._keep(program, {value: scales[value] / sizes[value] for value in scales if sizes[value] > 0})
        return _worst(pairs, scales), work

    def _use(self, program: Program) -> Mapping[int, float] | None:
        with self._lock:
            known = self._known.get(program)
            if known is None:
                return None
            self._known.move_to_end(program)
            known.uses += 1
            return None if known.uses % RENEWED == 0 else known.scales

    def _keep(self, program: Program, scales: Mapping[int, float]) -> None:
        with self._lock:
            known = self._known.setdefault(program, _Known())
            known.scales = {value: min(scale, known.scales.get(value, scale)) for value, scale in scales.items()}
            while len(self._known) > PROGRAMS:
                self._known.popitem(last=False)


def _same(a: Array, b: Array) -> bool:
    return bool(np.array_equal(a, b, equal_nan=a.dtype.kind in "fcV"))


def _worst(pairs: Sequence[tuple[int, Array, Array]], scales: Mapping[int, float]) -> float:
    worst = 0.0
    for value, a, b in pairs:
        ratio = distance(a, b, scales.get(value, 0.0)).ratio
        if not ratio <= worst:
            worst = ratio
    return worst

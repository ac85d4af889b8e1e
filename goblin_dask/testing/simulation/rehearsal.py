"""What checks really say of lies: each is told once to the real check, on a small program of its class.

A simulated grid checks millions of results. Their arrays do not exist; what a validator would find is what it found in
one of a few rehearsals. That no rehearsed lie was missed does not say that none ever is: of lies whose errors cancel
(`CANCELLING`) the checker therefore misses as many as a certificate admits, whatever the rehearsals found.
"""

from __future__ import annotations

import random
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

from goblin_dask import messages as m
from goblin_dask.digest import digest
from goblin_dask.graphs.cost import flops
from goblin_dask.graphs.execute import execute
from goblin_dask.store.buffers import spec_of
from goblin_dask.testing.liars import corrupt
from goblin_dask.testing.liars.distance import distance
from goblin_dask.testing.simulation.workload import Kind, OperatorClass, draw_inputs
from goblin_dask.testing.strategies import Answer
from goblin_dask.verify.check import check_result, plan_check, thresholds
from goblin_dask.verify.operands import Array
from goblin_dask.verify.scales import RENEWED

TRIES = 5
"""Rehearsed lies of each kind."""

CANCELLING = frozenset({"pair"})
"""Corruptions that are made to be missed by a random projection."""

ABOVE = 1.001
"""Thresholds: an error that is meant to be just one is rounded like any number."""


@dataclass(frozen=True, eq=False)
class Lie:
    """One wrong result."""

    corruption: str
    outputs: Sequence[Array]
    size: float
    """Largest wrong entry over the threshold of the check."""
    number: int
    determined: bool
    """Whoever answers in this way answers with the same bits."""

    @property
    def above(self) -> bool:
        """Whether it is larger than what a check promises to find."""
        return self.size > ABOVE


@dataclass(frozen=True, slots=True)
class HandedIn:
    """The result that an attempt committed."""

    lie: Lie | None = None
    """None: the right one."""
    author: object = None
    """Who made it up: a volunteer or its ring."""

    def same(self, other: HandedIn) -> bool:
        """Whether both are the same bits, machines of one numeric class provided."""
        if self.lie is not other.lie:
            return False
        return self.lie is None or self.lie.determined or self.author == other.author


RIGHT = HandedIn()


class Rehearsal:
    """Lies about one small program, and the real check's opinion of them."""

    def __init__(self, of: OperatorClass):
        self._seed = zlib.crc32(of.name.encode())
        self.program = of.make(of.small)
        self.flops, self.plan = flops(self.program), plan_check(self.program)
        self._inputs = draw_inputs(self.program, np.random.default_rng(self._seed))
        with threadpool_limits(1):  # arrays are small, and bits must be the same in every run
            self._right = list(execute(self.program, self._inputs))
            self._thresholds = thresholds(self.program, self._inputs, self._right)
        self._lies: dict[tuple[str, float | None], list[Lie]] = {}
        self._reports: dict[tuple[Any, ...], m.CheckReport] = {}

    def lies(self, answer: Answer) -> list[Lie]:
        """Several of this way to lie; none where it changes nothing."""
        key = answer.corruption, answer.times
        if key not in self._lies:
            made = [self._make(answer, number) for number in range(2)]
            determined = all(np.array_equal(a, b, equal_nan=True) for a, b in zip(*made, strict=True))
            made += [self._make(answer, number) for number in range(2, 1 if determined else TRIES)]
            lies = []
            for number, outputs in enumerate(made[: 1 if determined else None]):
                size = distance(outputs, self._right, self._thresholds)[0]
                lies.append(Lie(answer.corruption, outputs, size, number, determined))
            self._lies[key] = [lie for lie in lies if lie.size > 0]
        return self._lies[key]

    def _make(self, answer: Answer, number: int) -> list[Array]:
        rng = np.random.default_rng((self._seed, number))
        options = {} if answer.times is None else {"times": answer.times}
        with threadpool_limits(1):
            return corrupt(
                answer.corruption, self.program, self._inputs, self._right, rng, limits=self._thresholds, **options
            )

    def another(self, lie: Lie) -> Lie:
        """The same way to lie, made up by somebody else."""
        lies = next(each for each in self._lies.values() if lie in each)
        return lies[(lies.index(lie) + 1) % len(lies)]

    def report(
        self, lie: Lie | None, method: str, replica: Lie | None = None, *, replicated: bool = False
    ) -> m.CheckReport:
        """What a validator says of a lie, or of the right result when it is compared with one."""
        key = lie, method, replica, replicated
        if key not in self._reports:
            rng = np.random.default_rng(self._seed)
            outputs, other = (self._right if one is None else one.outputs for one in (lie, replica))
            with np.errstate(all="ignore"), threadpool_limits(1):
                self._reports[key] = check_result(
                    self.program, self._inputs, outputs, method=method, rng=rng,  # type: ignore[arg-type]
                    replica=other if replicated else None,
                )  # fmt: skip
        return self._reports[key]

    def committed(self, kind: Kind, lie: Lie | None) -> tuple[m.BlobRef, ...]:
        """What the volunteer commits: of the wrong shape where the lie has a wrong one."""
        outputs = self._right if lie is None else lie.outputs
        name = "right" if lie is None else f"{lie.corruption} {lie.number}"
        blobs = []
        for number, (spec, array, right) in enumerate(zip(kind.task.outputs, outputs, self._right, strict=True)):
            given = spec_of(array) if (array.shape, array.dtype) != (right.shape, right.dtype) else spec
            size = int(np.prod(given.shape)) * array.dtype.itemsize
            blobs.append(m.BlobRef(digest(f"{kind.task.task} {number} {name}".encode()), given, size))
        return tuple(blobs)


rehearsal_of = cache(Rehearsal)


class Checker:
    """The validators of a simulated grid.

    Parameters
    ----------
    rng : random.Random
        Decides which cancelling errors are missed.
    """

    def __init__(self, rng: random.Random):
        self._rng = rng
        self._compared: Counter[Kind] = Counter()

    def __call__(
        self, kind: Kind, method: str, handed: HandedIn, replica: HandedIn | None, *, alike: bool = False
    ) -> m.CheckReport:
        """A validator's report.

        Parameters
        ----------
        method : str
            Of the order: ``auto``, ``recompute``, ``compare``, ``audit``.
        replica : HandedIn, optional
            Another owner's result.
        alike : bool
            Both come from machines of one numeric class, whose right results have the same bits.
        """
        if handed.lie is None and (replica is None or replica.lie is None):
            return self._honest(kind, method, replica is not None and not alike)
        rehearsal = rehearsal_of(kind.of)
        other = None if replica is None else replica.lie
        if replica is not None and other is not None and other is handed.lie and not handed.same(replica):
            other = rehearsal.another(other)
        report = rehearsal.report(handed.lie, method, other, replicated=replica is not None)
        projected = method == "auto" and replica is None and kind.plan.method == "algebraic"
        cancels = handed.lie is not None and handed.lie.corruption in CANCELLING
        if projected and cancels and self._rng.random() < kind.plan.miss:
            report = m.CheckReport("accepted", "algebraic", 1.0, miss=kind.plan.miss, flops=rehearsal.plan.flops)
        return report

    def cost(self, kind: Kind, report: m.CheckReport) -> float:
        """FLOPs of a check, from those that it took in the rehearsal."""
        rehearsal = rehearsal_of(kind.of)
        if report.flops == rehearsal.plan.flops:
            return kind.plan.flops
        return kind.flops * report.flops / rehearsal.flops

    def _honest(self, kind: Kind, method: str, rounded: bool) -> m.CheckReport:
        """Of a right result; `rounded`: it is compared with one that rounding distinguishes."""
        rehearsal, plan = rehearsal_of(kind.of), rehearsal_of(kind.of).plan
        if method == "auto":
            return m.CheckReport("accepted", plan.method, 0.5, flops=plan.flops, miss=plan.miss)
        work = rehearsal.flops if method in ("recompute", "audit") else 0.0
        if rounded:  # how far rounding goes is measured from time to time, by two runs
            self._compared[kind] += 1
            work += 2 * rehearsal.flops * (self._compared[kind] % RENEWED == 0)
        return m.CheckReport("accepted", "replicate" if method == "compare" else "recompute", 0.5, flops=work)

"""`check_result`: how one result is checked."""

from __future__ import annotations

import math
import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import attrgetter
from typing import Literal

import numpy as np

from goblin_dask.errors import GoblinError
from goblin_dask.graphs.cost import bytes_read, bytes_written, flops
from goblin_dask.graphs.operators import CONTRACTION
from goblin_dask.graphs.operators.base import Kind, Specs
from goblin_dask.graphs.program import Program
from goblin_dask.graphs.schedule import Step, schedule
from goblin_dask.messages import CheckMethod, CheckReport
from goblin_dask.verify.algebraic import check_algebraically
from goblin_dask.verify.bounds import carry
from goblin_dask.verify.claims import check_claims, claimed_thresholds, claims_of
from goblin_dask.verify.decompose import Matrices, decompose
from goblin_dask.verify.evaluate import Source, needed
from goblin_dask.verify.operands import Array, OperandStatistics
from goblin_dask.verify.product import Finding
from goblin_dask.verify.recompute import check_by_recomputation, equal
from goblin_dask.verify.scales import Scales
from goblin_dask.verify.structural import is_constant, misshapen
from goblin_dask.verify.tolerances import INTEGER_PROJECTIONS, MISS, PROJECTIONS, ROWS

FAST = 5e10
"""FLOP/s of a matrix product by BLAS, on one thread of an ordinary machine."""
RATES = ((Kind.LINALG, 2e10), (Kind.FFT, 5e9))
"""FLOP/s of LAPACK's and of transforms, there."""
SLOW = 1e9
"""FLOP/s of everything else."""
SECONDS_PER_ELEMENT = 2.5e-9
"""Of the algebraic check of a product, for each element of operands and result."""
SECONDS_PER_TILE = 1e-3
"""Of the algebraic check, whatever the size."""
REPLICATED = 0.1
"""Seconds of a recomputation that a checker does itself, whatever the bytes."""
REPLICATED_BYTE = 5e-9
"""Seconds of a recomputation for each byte of inputs and outputs, which comparing replicas has to read."""
SECONDS_PER_CLAIM = 5e-4
"""Of the check by a relation, whatever the size."""


@dataclass(frozen=True)
class CheckPlan:
    """How a program's results are going to be checked, and what that costs."""

    method: Literal["algebraic", "relation", "recompute"]
    flops: float
    """Of the check."""
    bytes: int
    """Read by the check: inputs and outputs, once each."""
    miss: float
    """Upper bound of the probability that an error above the thresholds passes."""
    seconds: float = 0.0
    """Estimate on one thread of an ordinary machine, for comparison with others only."""


@lru_cache(maxsize=128)
def _decomposed(program: Program) -> tuple[Matrices, ...] | None:
    return decompose(program)


def _by_blas(dtype: str) -> bool:
    return dtype[0] in "fc" or dtype == "bfloat16"


def _seconds(program: Program) -> float:
    """Estimate of a program's time."""
    plan, total = schedule(program), 0.0
    for step in plan.steps:
        total += _work(step, plan.specs) / _rate(step)
    return total


def _work(step: Step, specs: Specs) -> float:
    return step.operator.flops(tuple(specs[value] for value in step.operands), step.specs, step.attributes)


def _rate(step: Step) -> float:
    if step.operator.name in CONTRACTION:
        return FAST if _by_blas(step.specs[0].dtype) else SLOW
    return next((rate for kind, rate in RATES if kind in step.operator.kinds), SLOW)


@lru_cache(maxsize=1024)
def plan_check(program: Program) -> CheckPlan:
    """Choose the cheapest sound check of a program, without its data."""
    total, size = flops(program), bytes_read(program) + bytes_written(program)
    found = _decomposed(program)
    if found is None:
        recomputed = CheckPlan("recompute", total, size, 0.0, _seconds(program))
        claims = claims_of(program)
        if claims is None:
            return recomputed
        seconds = len(claims.claims) * SECONDS_PER_CLAIM + claims.elements * SECONDS_PER_ELEMENT
        seconds += sum(weight * _seconds(part) for part, weight in claims.recomputed)
        related = CheckPlan("relation", claims.flops + 4 * claims.elements, size, claims.miss, seconds)
        return min(related, recomputed, key=attrgetter("seconds"))
    plan = schedule(program)
    wanted = sorted({v for m in found for term in m.piece.terms for v in (term.left, term.right)})
    before = set(needed(program, wanted))
    recompute, prologue = _seconds(program), sum(_work(plan.steps[number], plan.specs) for number in before)
    seconds, work, tiles = 3 * prologue / SLOW, 3.0 * prologue, 0
    miss = 0.0
    operands: set[tuple[int, int]] = set()
    for m in found:
        dtype = plan.specs[program.outputs[m.output]].dtype
        fast = _by_blas(dtype)
        area = m.extent(m.batch) * m.extent(m.rows) * m.extent(m.columns)
        tiles += m.extent(m.batch)
        seconds += area * SECONDS_PER_ELEMENT
        if dtype == "bool":
            work += m.flops
            seconds += m.flops / FAST
            continue
        projections = PROJECTIONS if fast else INTEGER_PROJECTIONS
        miss = max(miss, MISS if fast else 2.0**-INTEGER_PROJECTIONS)
        work += 2.0 * projections * area + 2.0 * ROWS * m.flops / 2 / max(m.extent(m.rows), 1)
        for term in m.piece.terms:
            for value in (term.left, term.right):
                if (value, m.output if value >= len(program.inputs) else 0) not in operands:
                    operands.add((value, m.output if value >= len(program.inputs) else 0))
                    elements = math.prod(plan.specs[value].shape)
                    work += 4.0 * projections * elements
                    seconds += elements * (SECONDS_PER_ELEMENT if fast else projections / SLOW)
    seconds += tiles * SECONDS_PER_TILE
    if seconds < recompute:
        return CheckPlan("algebraic", work, size, miss, seconds)
    return CheckPlan("recompute", total, size, 0.0, recompute)


def is_heavy(program: Program) -> bool:
    """Whether nothing but computing it again can check it, and a checker had better leave that to others."""
    if flops(program) < REPLICATED * SLOW:
        return False  # as nearly all: said without a plan
    plan = plan_check(program)
    return plan.method == "recompute" and plan.seconds > max(REPLICATED, REPLICATED_BYTE * plan.bytes)


def check_result(
    program: Program,
    inputs: Sequence[Source],
    outputs: Sequence[Array],
    *,
    method: CheckMethod = "auto",
    replica: Sequence[Array] | None = None,
    values: Sequence[int] = (),
    rng: np.random.Generator | None = None,
    statistics: OperandStatistics | None = None,
    scales: Scales | None = None,
    digests: Sequence[Hashable] | None = None,
) -> CheckReport:
    """Check the outputs that somebody says a program has for some inputs.

    Parameters
    ----------
    inputs : sequence of array or callable
        As for `goblin_dask.graphs.execute.execute`; read-only memory maps will do.
    outputs : sequence of array
        Committed before this call, as the random numbers are drawn in it.
    method : {"auto", "recompute", "compare", "audit"}
        ``auto``: algebraic or recomputation, whichever `plan_check` finds cheaper. ``compare``: with `replica`.
        ``audit``: recomputed, and then compared with `replica`.
    replica : sequence of array, optional
        The same outputs from another owner's volunteer.
    values : sequence of int, optional
        For ``compare``: numbers of the program's values that `outputs` and `replica` are, in place of its outputs. Then
        they are only compared; which of them is right is not asked.
    rng : numpy.random.Generator, optional
        For measurements only; default: from the operating system's entropy.
    statistics : OperandStatistics, optional
        Keeps what is known of operands between checks, under `digests`.
    scales : Scales, optional
        Keeps what is known of programs' rounding between comparisons.
    digests : sequence of str, optional
        Addresses of the inputs.

    Returns
    -------
    CheckReport
        ``failed`` when the program cannot be computed on these inputs, which says nothing of the outputs.
    """
    started = time.thread_time()
    plan = plan_check(program)

    def report(finding: Finding, name: str, work: float) -> CheckReport:
        settled = "settle" if finding.settled and finding.verdict != "accepted" else name
        return CheckReport(
            verdict=finding.verdict,
            method=settled,
            ratio=float(finding.ratio),
            settled=finding.settled,
            reason=finding.reason,
            seconds=time.thread_time() - started,
            flops=work,
            miss=finding.miss,
        )

    claimed = tuple(values) or program.outputs
    known = schedule(program).specs
    if not all(0 <= value < len(known) for value in claimed):
        return CheckReport("failed", "replicate", reason=f"the program has {len(known)} values, not one {max(claimed)}")
    specs = [known[value] for value in claimed]
    if reason := misshapen(outputs, specs):
        return report(Finding("wrong", math.inf, reason=reason, miss=0.0), "structural", 0.0)
    try:
        if method in ("compare", "audit") and replica is not None:
            if reason := misshapen(replica, specs):
                return report(Finding("unproven", math.inf, reason=f"the replica has {reason}"), "replicate", 0.0)
            if values:
                ratio, work = (scales or Scales()).compare(program, inputs, values, outputs, replica)
                return report(_agreement(ratio), "replicate", work)
            if method == "audit":
                return report(*_audit(program, inputs, outputs, replica, plan, rng, statistics, digests, scales))
            return report(*_compare(program, inputs, outputs, replica, plan, rng, statistics, digests, scales))
        return report(*_check(program, inputs, outputs, method, plan, rng, statistics, digests, scales))
    except GoblinError as error:
        return CheckReport("failed", plan.method, reason=str(error), seconds=time.thread_time() - started)


def _check(
    program: Program,
    inputs: Sequence[Source],
    outputs: Sequence[Array],
    method: CheckMethod,
    plan: CheckPlan,
    rng: np.random.Generator | None,
    statistics: OperandStatistics | None,
    digests: Sequence[Hashable] | None,
    scales: Scales | None,
) -> tuple[Finding, str, float]:
    found = _decomposed(program)
    if method == "auto" and plan.method == "algebraic" and found is not None:
        generator = rng if rng is not None else np.random.default_rng()
        finding = check_algebraically(program, found, inputs, outputs, generator, statistics, digests)
        return finding, "algebraic", plan.flops
    claims = claims_of(program)
    if method == "auto" and plan.method == "relation" and claims is not None:
        related = check_claims(claims, inputs, outputs, rng if rng is not None else np.random.default_rng())
        if related is not None:
            return related, "relation", plan.flops
    finding = check_by_recomputation(program, inputs, outputs, (scales or Scales()) if is_heavy(program) else None)
    if finding.verdict == "unproven" and found is not None:
        # Sums may be biased: more than is expected of them, which exact rows settle.
        generator = rng if rng is not None else np.random.default_rng()
        finding = check_algebraically(program, found, inputs, outputs, generator, statistics, digests, every_row=True)
    if finding.verdict != "accepted" and claims is not None:
        # Another decomposition, or another order of equal elements, may be as right as the checker's own.
        related = check_claims(claims, inputs, outputs, rng if rng is not None else np.random.default_rng())
        if related is not None:
            finding = related
    return finding, "recompute", flops(program)


def _agreement(ratio: float) -> Finding:
    """What a distance over what is accepted says of two results."""
    if ratio <= 1:
        return Finding("accepted", ratio, miss=0.0)
    return Finding("unproven", ratio, reason=f"two volunteers' results are {ratio:.3g} times as far apart as accepted")


def _compare(
    program: Program,
    inputs: Sequence[Source],
    outputs: Sequence[Array],
    replica: Sequence[Array],
    plan: CheckPlan,
    rng: np.random.Generator | None,
    statistics: OperandStatistics | None,
    digests: Sequence[Hashable] | None,
    scales: Scales | None,
) -> tuple[Finding, str, float]:
    """Compare two owners' results; dull ones, on which broken devices agree, are checked by themselves."""
    if any(is_constant(array) for array in outputs):
        finding, name, work = _check(program, inputs, outputs, "auto", plan, rng, statistics, digests, scales)
        same = all(equal(a, b).all() for a, b in zip(outputs, replica, strict=True))
        return (finding, name, work) if same else (_agreement(math.inf), "replicate", work)
    ratio, work = (scales or Scales()).compare(program, inputs, program.outputs, outputs, replica)
    return _agreement(ratio), "replicate", work


def _audit(
    program: Program,
    inputs: Sequence[Source],
    outputs: Sequence[Array],
    replica: Sequence[Array],
    plan: CheckPlan,
    rng: np.random.Generator | None,
    statistics: OperandStatistics | None,
    digests: Sequence[Hashable] | None,
    scales: Scales | None,
) -> tuple[Finding, str, float]:
    """Recompute a result that another owner's agrees with: the two may have met."""
    finding, name, work = _check(program, inputs, outputs, "recompute", plan, rng, statistics, digests, scales)
    if finding.verdict != "accepted":
        return finding, name, work
    ratio, more = (scales or Scales()).compare(program, inputs, program.outputs, outputs, replica)
    return _agreement(ratio), name, work + more


def thresholds(
    program: Program, inputs: Sequence[Source], outputs: Sequence[Array], rng: np.random.Generator | None = None
) -> tuple[float, ...]:
    """For each output, the smallest wrong entry that a check always finds, in 99 of 100 places.

    For tests, and for those who lie on purpose.
    """
    plan, found = plan_check(program), _decomposed(program)
    if plan.method == "algebraic" and found is not None:
        generator = rng if rng is not None else np.random.default_rng()
        return check_algebraically(program, found, inputs, outputs, generator).thresholds
    claims = claims_of(program)
    claimed: dict[int, float] = {}
    if claims is not None:
        claimed = claimed_thresholds(claims, inputs, outputs, rng if rng is not None else np.random.default_rng())
    sizes = []
    for number, bounded in enumerate(carry(program, inputs, program.outputs)):
        tight = bounded.errors()[0]
        finite = tight[np.isfinite(tight)]
        sizes.append(2 * float(np.quantile(finite, 0.99)) if finite.size else 0.0)
        sizes[-1] = max(sizes[-1], claimed.get(number, 0.0))
    return tuple(sizes)

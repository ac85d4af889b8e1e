"""Nodes whose results the program hands out: they are claimed, and need not be computed again to be checked.

Such a node is checked by its operator's relation. What else the program computes, before it and from its results, is
recomputed; what comes after a claimed node takes the claimed results as they are, for these are checked themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from goblin_dask.graphs.builder import Builder
from goblin_dask.graphs.cost import flops
from goblin_dask.graphs.program import Program
from goblin_dask.graphs.schedule import Step, schedule
from goblin_dask.verify.bounds import carry
from goblin_dask.verify.evaluate import Source, load
from goblin_dask.verify.operands import Array
from goblin_dask.verify.product import Finding, worse
from goblin_dask.verify.recompute import check_by_recomputation
from goblin_dask.verify.relations import RELATIONS
from goblin_dask.verify.relations.base import Relation


@dataclass(frozen=True)
class Claim:
    """One node that has a relation, all of whose results are outputs of the program."""

    step: Step
    relation: Relation
    outputs: tuple[int, ...]
    """Which output of the program each result is."""
    elements: float
    """That its check goes over."""


@dataclass(frozen=True)
class Part:
    """A program, and where its inputs come from: an input of the whole program, or an output that was claimed."""

    program: Program
    inputs: tuple[int, ...]
    """Numbers below the whole program's count of inputs are inputs, the others its outputs."""
    outputs: tuple[int, ...]
    """Which outputs of the whole program these are; empty where they are operands of claims."""

    def sources(self, inputs: Sequence[Source], outputs: Sequence[Array]) -> list[Source]:
        """Its inputs, among those of the whole program and what was handed in."""
        return [inputs[n] if n < len(inputs) else outputs[n - len(inputs)] for n in self.inputs]


@dataclass(frozen=True)
class Claims:
    """A program's claimed nodes, and what is left to recompute."""

    claims: tuple[Claim, ...]
    operands: tuple[Part, ...]
    """Of each claim: a program whose outputs are its operands."""
    rest: Part | None
    """The outputs that are no claimed results."""

    @property
    def recomputed(self) -> tuple[tuple[Program, float], ...]:
        """Programs that the checker runs, and how often: thrice where errors are followed."""
        parts = [(part.program, 3.0) for part in self.operands if part.program.nodes]
        return (*parts, *(((self.rest.program, 1.0),) if self.rest is not None else ()))

    @property
    def flops(self) -> float:
        """Of the programs that are recomputed."""
        return sum(weight * flops(program) for program, weight in self.recomputed)

    @property
    def elements(self) -> float:
        """That relations go over."""
        return sum(claim.elements for claim in self.claims)

    @property
    def miss(self) -> float:
        """The largest of all relations."""
        return max(claim.relation.miss for claim in self.claims)


@lru_cache(maxsize=128)
def claims_of(program: Program) -> Claims | None:
    """The claims of a program; None where it has none."""
    plan = schedule(program)
    handed_out: dict[int, int] = {}
    for number, value in enumerate(program.outputs):
        handed_out.setdefault(value, number)
    claims = []
    for step in plan.steps:
        relation = RELATIONS.get(step.operator.name)
        if relation is None or not all(value in handed_out for value in step.outputs):
            continue
        specs = [plan.specs[value] for value in step.operands]
        if relation.applies(step, specs):
            outputs = tuple(handed_out[value] for value in step.outputs)
            claims.append(Claim(step, relation, outputs, relation.elements(step, specs)))
    if not claims:
        return None
    # An output that occurs twice is claimed once: its other places are compared as part of the rest.
    claimed = {number for claim in claims for number in claim.outputs}
    rest = [number for number in range(len(program.outputs)) if number not in claimed]
    cut = _Cut(program, claims)
    return Claims(
        tuple(claims),
        tuple(cut.part(claim.step.operands) for claim in claims),
        replace(cut.part([program.outputs[n] for n in rest]), outputs=tuple(rest)) if rest else None,
    )


class _Cut:
    """A program in which claimed results are inputs."""

    def __init__(self, program: Program, claims: Sequence[Claim]):
        plan = schedule(program)
        self._build = Builder()
        self._values = [self._build.input(spec) for spec in program.inputs]
        self._origins = list(range(len(program.inputs)))
        claimed = {claim.step.outputs: claim.outputs for claim in claims}
        for step in plan.steps:
            if step.outputs in claimed:
                self._values += [self._build.input(spec) for spec in step.specs]
                self._origins += [len(program.inputs) + number for number in claimed[step.outputs]]
            else:
                operands = [self._values[value] for value in step.operands]
                self._values += self._build.add(step.operator.name, operands, **step.attributes)

    def part(self, values: Sequence[int]) -> Part:
        program, slots = self._build.finish([self._values[value] for value in values])
        return Part(program, tuple(self._origins[slot] for slot in slots), ())


def check_claims(
    claims: Claims, inputs: Sequence[Source], outputs: Sequence[Array], rng: np.random.Generator
) -> Finding | None:
    """Check outputs by the relations of those that are claimed, and by recomputation of the others.

    Returns
    -------
    Finding or None
        None where a relation says nothing of these data: what is not finite, or an order of uncertain operands.
    """
    found = Finding("accepted", 0.0, miss=0.0)
    for claim, part in zip(claims.claims, claims.operands, strict=True):
        sources = [load(source) for source in part.sources(inputs, outputs)]
        operands = carry(part.program, sources, part.program.outputs)
        given = [outputs[number] for number in claim.outputs]
        finding = claim.relation.check(claim.step.attributes, operands, given, rng)
        if finding is None:
            return None
        finding.reason = f"{claim.step.operator.name}: {finding.reason}" if finding.reason else ""
        found = worse(found, finding)
        if found.verdict != "accepted":
            return found  # what was computed from it says nothing
    if claims.rest is not None:
        given = [outputs[number] for number in claims.rest.outputs]
        found = worse(found, check_by_recomputation(claims.rest.program, claims.rest.sources(inputs, outputs), given))
    return found


PROBES = 100
"""Entries that are made wrong, one at a time, to measure how sensitive a relation is."""


def claimed_thresholds(
    claims: Claims, inputs: Sequence[Source], outputs: Sequence[Array], rng: np.random.Generator
) -> dict[int, float]:
    """For each claimed output, the smallest wrong entry that its relation always finds, in 99 of 100 places.

    Measured with errors of a hundredth of the output and more, as a residual grows in proportion to a small one.
    """
    found = {}
    for claim, part in zip(claims.claims, claims.operands, strict=True):
        sources = [load(source) for source in part.sources(inputs, outputs)]
        operands = carry(part.program, sources, part.program.outputs)
        for place, number in enumerate(claim.outputs):
            output = outputs[number]
            if output.dtype.kind not in "fc" or not output.size:
                found[number] = 0.0
                continue

            def size(
                position: int,
                place: int = place,
                output: Array = output,
                claim: Claim = claim,
                operands: Any = operands,
            ) -> float:
                given = [outputs[o] for o in claim.outputs]
                for share in (1e-2, 1.0, 1e2, 1e4):
                    error = share * (float(np.abs(output).max()) or 1.0)
                    given[place] = output.copy()
                    given[place].reshape(-1)[position] += output.dtype.type(error)
                    finding = claim.relation.check(claim.step.attributes, operands, given, rng)
                    if finding is None or finding.ratio > 1:
                        break
                return error / finding.ratio if finding is not None else 0.0

            sizes = [size(position) for position in rng.integers(output.size, size=PROBES)]
            found[number] = 2 * float(np.quantile(sizes, 0.99))
    return found

"""`divide`: a program, with gradients or without, in stages that fit the volunteers' memory."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Literal

from goblin_dask.errors import InputError, TooLarge
from goblin_dask.graphs.cost import flops, peak
from goblin_dask.graphs.operators.base import describe, nbytes
from goblin_dask.graphs.program import Program
from goblin_dask.graphs.schedule import schedule
from goblin_dask.graphs.slicing import Packed, Piece, packed, piece, vectors
from goblin_dask.training.flow import Flow

Kind = Literal["forward", "backward"]

_REACH = 0.5
"""How far from its ideal place a cut may lie, in stages."""
_PRICE = 4.0
"""Bytes count this many times more at a cut that is one stage away from its ideal place."""


@dataclass(frozen=True)
class Stage:
    """A part of the way from the inputs to the loss, and back. At least one of its pieces is there."""

    forward: Piece | None
    """From what earlier stages give to what others read. None where `backward` does that as well: in the last stage of
    a program with gradients."""
    backward: Piece | None
    """From the gradients that later stages give to those of this one's parameters, and of what it reads. What it needs
    of the stage's forward course it computes again. None where nothing goes back: in evaluations, and in stages before
    all that is trained."""
    vectors: tuple[tuple[int, ...], ...]
    """The fixed inputs of the whole program that it reads, those of one dtype together: each is a blob."""

    @property
    def parameters(self) -> tuple[int, ...]:
        """The same one after another."""
        return tuple([slot for group in self.vectors for slot in group])


@dataclass(frozen=True)
class Division:
    """A program in stages; made by `divide`.

    Values have the numbers that they have in the whole program: its inputs come first. A piece reads inputs of the
    program, and values that pieces before it give, of whatever stage.
    """

    program: Program
    stages: tuple[Stage, ...]
    loss: tuple[int, ...]
    """Values: the loss, as it was asked for."""
    gradients: tuple[tuple[int, ...], ...]
    """Of each other output of the program, in their order: the values whose sum, added from left to right, it is. These
    are several where a parameter is read in several stages; else one. Some may be inputs, which no piece gives."""

    def __repr__(self) -> str:
        return f"<Division of {len(self.program.nodes):,} operators into {len(self.stages)} stages>"

    def pieces(self) -> list[tuple[int, Kind, Piece]]:
        """Stage, kind and piece, each after those that give what it reads."""
        there = [(number, stage.forward) for number, stage in enumerate(self.stages)]
        back = [(number, stage.backward) for number, stage in reversed(list(enumerate(self.stages)))]
        forward: list[tuple[int, Kind, Piece]] = [(n, "forward", part) for n, part in there if part is not None]
        return forward + [(n, "backward", part) for n, part in back if part is not None]

    def packed(self, stage: int, kind: Kind) -> Packed:
        """A piece that reads the stage's vectors in the place of its parameters: what volunteers run."""
        return self._packed[stage, kind]

    @cached_property
    def _packed(self) -> dict[tuple[int, Kind], Packed]:
        inputs = self.program.inputs
        return {(n, kind): packed(part, self.stages[n].vectors, inputs) for n, kind, part in self.pieces()}

    @cached_property
    def peaks(self) -> tuple[int, ...]:
        """Of each stage: projected peak memory of its pieces, packed, in bytes."""
        found = [0] * len(self.stages)
        for (stage, _), part in self._packed.items():
            found[stage] = max(found[stage], peak(part.program))
        return tuple(found)

    @cached_property
    def flops(self) -> tuple[float, ...]:
        """Of each stage: floating-point operations of its pieces for one micro-batch."""
        found = [0.0] * len(self.stages)
        for stage, _, part in self.pieces():
            found[stage] += flops(part.program)
        return tuple(found)

    def too_large(self, memory: int) -> tuple[int, ...]:
        """Stages one of whose pieces, packed, needs more memory than that, in bytes."""
        return tuple([number for number, needs in enumerate(self.peaks) if needs > memory])


def divide(
    program: Program,
    *,
    loss: Sequence[int],
    fixed: Collection[int],
    state: Sequence[int] = (),
    memory: int | None = None,
    stages: int | None = None,
    anyway: bool = False,
) -> Division:
    """Divide a program into stages.

    Stages do about as many FLOP, what they compute again counted, and cuts lie where few bytes cross them. See
    `goblin_dask.training.flow.Flow` for what belongs where.

    Parameters
    ----------
    program : Program
        Of a micro-batch.
    loss : sequence of int
        Positions of the outputs that end the forward course: sum and count; all outputs where there are no gradients.
    fixed : collection of int
        Slots of parameters, buffers and constants. The other inputs come with the micro-batch.
    state : sequence of int
        Positions of outputs that are no gradients, such as statistics of batch norms: forward pieces give them.
    memory : int, optional
        Bytes that a piece may need; there are as few stages as that allows.
    stages : int, optional
        How many there are to be, or as many as there can be if those are fewer.
    anyway : bool
        Leave stages that cannot be divided any more as large as they are; `Division.too_large` tells which.

    Raises
    ------
    TooLarge
        When one operator alone needs more than `memory`, or one of `stages` does, unless `anyway`.
    """
    if stages is not None and stages < 1:
        raise InputError(f"a program has at least one stage, not {stages}")
    flow = Flow(program, loss, state, fixed)
    slicer = _Slicer(flow, tuple(loss), frozenset(fixed))
    if stages is not None or memory is None:
        division = slicer.division(_even(flow, 0, flow.places, min(stages or 1, flow.places)))
    else:
        division = _smallest(slicer, memory)
    if memory is not None and not anyway and division.too_large(memory):
        raise refusal(division, memory)
    return division


def refusal(division: Division, memory: int) -> TooLarge:
    """What to say where a stage is too large for volunteers: names the largest layer of the one that is worst."""
    worst = max(range(len(division.stages)), key=lambda number: division.peaks[number])
    stage = division.stages[worst]
    pieces = [part.program for part in (stage.forward, stage.backward) if part is not None]
    plan = schedule(max(pieces, key=peak))
    sizes = [sum([nbytes(plan.specs[value]) for value in (*step.operands, *step.outputs)]) for step in plan.steps]
    largest = plan.steps[sizes.index(max(sizes))]
    layer = f"{largest.operator.name} of {describe(tuple([plan.specs[operand] for operand in largest.operands]))}"
    return TooLarge(
        division.peaks[worst],
        memory,
        f"stage {worst + 1} of {len(division.stages)} is too large, in it {layer}: take smaller micro-batches, "
        "narrower layers, or larger volunteers",
    )


# --- where to cut -----------------------------------------------------------------------------------------------------
def _even(flow: Flow, start: int, stop: int, count: int) -> list[int]:
    """Cuts that leave `count` parts of the places from `start` to `stop`, each of one place at least."""
    forward, backward = flow.work
    again = 2 if any(backward) else 1
    costs = [again * there + back for there, back in zip(forward, backward, strict=True)]
    below = list(accumulate(costs[start:stop], initial=0.0))
    spared = 0.0 if again == 1 or stop < flow.places else 1.0  # The last stage computes its forward course once.
    there = list(accumulate(forward[start:stop], initial=0.0))
    share = _share(below, [spared * each for each in there], count)
    cuts: list[int] = []
    for number in range(1, count):
        first = cuts[-1] + 1 if cuts else start + 1
        allowed = range(first, stop - (count - number) + 1)
        away = {cut: abs(below[cut - start] - number * share) for cut in allowed}
        near = [cut for cut in allowed if away[cut] <= _REACH * share]
        if near:
            cuts.append(min(near, key=lambda c: (flow.widths[c] * (1 + _PRICE * away[c] / (share or 1.0)), away[c], c)))
        else:
            cuts.append(min(allowed, key=lambda c: (away[c], c)))
    return cuts


def _share(below: list[float], spared: list[float], count: int) -> float:
    """What each of `count` parts costs where all cost as much, the last one less than what is spared in it."""
    low, high = 0.0, below[-1]
    for _ in range(50):
        middle = (low + high) / 2
        cut = min(bisect_left(below, (count - 1) * middle), len(below) - 1)
        rest = below[-1] - (count - 1) * middle - (spared[-1] - spared[cut])
        low, high = (middle, high) if rest > middle else (low, middle)
    return high


def _smallest(slicer: _Slicer, memory: int) -> Division:
    """As few stages as fit, evenly cut if that is possible."""
    flow = slicer.flow
    cuts: list[int] = []
    division = slicer.division(cuts)
    while large := division.too_large(memory):
        bounds = [0, *cuts, flow.places]
        halves = [(bounds[each], bounds[each + 1]) for each in large if bounds[each + 1] - bounds[each] > 1]
        if not halves:
            return _merged(slicer, cuts, division, memory)
        cuts = sorted(cuts + [_even(flow, start, stop, 2)[0] for start, stop in halves])
        division = slicer.division(cuts)
    division = _merged(slicer, cuts, division, memory)
    for count in range(2, len(division.stages) + 1):
        even = slicer.within(_even(flow, 0, flow.places, count), memory)
        if even is not None:
            return even
    return division


def _merged(slicer: _Slicer, cuts: list[int], division: Division, memory: int) -> Division:
    """Stages that fit, and fit together with their neighbours, put together."""
    found: list[int] | None = None
    while cuts != found:
        found = cuts
        for first in (0, 1):
            kept = [cut for number, cut in enumerate(cuts) if number % 2 != first]
            peaks = slicer.division(kept).peaks
            refused = [cut for cut in cuts if cut not in kept and peaks[bisect_right(kept, cut)] > memory]
            fewer = slicer.division(sorted(kept + refused))
            if len(fewer.too_large(memory)) <= len(division.too_large(memory)):
                cuts, division = sorted(kept + refused), fewer
    return division


# --- what the stages are ----------------------------------------------------------------------------------------------
class _Slicer:
    """Makes divisions of a program, given the cuts."""

    def __init__(self, flow: Flow, loss: tuple[int, ...], fixed: frozenset[int]):
        self.flow, self.fixed = flow, fixed
        outputs = flow.program.outputs
        self.loss = tuple([outputs[each] for each in loss])
        self.others = tuple([value for each, value in enumerate(outputs) if each not in loss])
        self.readers = [0] * len(flow.plan.specs)
        """Of each value: how many nodes read it."""
        for step in flow.plan.steps:
            for operand in set(step.operands):
                self.readers[operand] += 1

    def division(self, cuts: Sequence[int]) -> Division:
        """The division with these cuts."""
        return self._made(cuts, self._slices(cuts))

    def within(self, cuts: Sequence[int], memory: int) -> Division | None:
        """The same, or None where a piece needs more memory."""
        slices = []
        for each in self._slices(cuts):
            if each[1] is not None and peak(each[1].program) > memory:  # packed, it needs no less
                return None
            slices.append(each)
        division = self._made(cuts, slices)
        return None if division.too_large(memory) else division

    def _made(self, cuts: Sequence[int], slices: Iterable[tuple[tuple[int, Kind], Piece]]) -> Division:
        parts = dict(slices)
        stages = []
        for number in range(len(cuts) + 1):
            there, back = parts.get((number, "forward")), parts.get((number, "backward"))
            read = {slot for part in (there, back) if part is not None for slot in part.reads if slot in self.fixed}
            stages.append(Stage(there, back, vectors(self.flow.program.inputs, sorted(read))))
        gradients = tuple([tuple(self._terms(value, cuts)) for value in self.others])
        return Division(self.flow.program, tuple(stages), self.loss, gradients)

    def _slices(self, cuts: Sequence[int]) -> Iterator[tuple[tuple[int, Kind], Piece]]:
        """The pieces, the one that runs last first: so all is known that others want of it."""
        last = len(cuts)
        wanted: dict[tuple[int, Kind], set[int]] = {}
        for value in self.loss:
            self._want(value, cuts, wanted, place=self.flow.places - 1)
        for value in self.others:
            for term in self._terms(value, cuts):
                self._want(term, cuts, wanted)
        backs = any(kind == "backward" for _, kind in wanted)
        order: list[tuple[int, Kind]] = [(number, "backward") for number in range(last + 1)] if backs else []
        order += [(number, "forward") for number in reversed(range(last + 1))]
        for number, kind in order:
            gives = wanted.pop((number, kind), set())
            if (number, kind) == (last, "backward"):
                gives |= wanted.pop((last, "forward"), set()) if gives else set()
            if not gives:
                continue
            nodes, reads = self._needed(gives, number, kind, cuts)
            for value in reads:
                self._want(value, cuts, wanted)
            yield (number, kind), piece(self.flow.program, nodes, sorted(gives))

    def _want(
        self, value: int, cuts: Sequence[int], wanted: dict[tuple[int, Kind], set[int]], place: int | None = None
    ) -> None:
        """Note that a value is wanted of the piece that makes it; inputs are there."""
        if value >= self.flow.inputs:
            home, forward = self._home(value, place)
            wanted.setdefault((bisect_right(cuts, home), "forward" if forward else "backward"), set()).add(value)

    def _home(self, value: int, place: int | None = None) -> tuple[int, bool]:
        """Where a value is made, or what it lays out anew, and whether on the forward course; `place` is for one that
        anybody can make."""
        flow, source = self.flow, value
        while flow.makers[source] >= 0 and flow.free[flow.makers[source]]:
            operands = flow.plan.steps[flow.makers[source]].operands
            if len(operands) != 1:
                break
            source = operands[0]
        node = flow.makers[source]
        if node >= 0 and not flow.free[node]:
            return flow.place[node], node in flow.forward
        return flow.until[value] if place is None else place, flow.makers[value] in flow.forward

    def _needed(self, gives: Iterable[int], stage: int, kind: Kind, cuts: Sequence[int]) -> tuple[set[int], set[int]]:
        """Nodes of a piece that gives those values, and values of others that it reads."""
        flow = self.flow
        nodes: set[int] = set()
        reads: set[int] = set()
        stack = list(gives)
        while stack:
            value = stack.pop()
            node = flow.makers[value]
            own = node >= 0 and (
                flow.free[node]
                or (bisect_right(cuts, flow.place[node]) == stage and (kind == "backward" or node in flow.forward))
            )
            if not own:
                reads.add(value)
            elif node not in nodes:
                nodes.add(node)
                stack.extend(flow.plan.steps[node].operands)
        return nodes, reads

    def _terms(self, value: int, cuts: Sequence[int]) -> list[int]:
        """The values that are added to a gradient: itself, unless it is a sum over several stages."""
        flow = self.flow
        node = flow.makers[value]
        if node < 0 or node in flow.forward or flow.plan.steps[node].operator.name != "add":
            return [value]
        operands = flow.plan.steps[node].operands
        if any(flow.plan.specs[operand] != flow.plan.specs[value] for operand in operands):
            return [value]
        homes = [self._home(operand) for operand in operands]
        if any(forward for _, forward in homes) or len({bisect_right(cuts, place) for place, _ in homes}) == 1:
            return [value]
        left, right = (
            self._terms(operand, cuts)
            if self.readers[operand] == 1 and operand not in flow.program.outputs
            else [operand]
            for operand in operands
        )
        return left + right if len(right) == 1 else right + left if len(left) == 1 else [*left, operands[1]]

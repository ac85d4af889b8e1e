"""Fusion of a plan's grid tasks, so that few bytes move and the ends of programs can be checked by algebra.

Three steps:

1. *Absorb*: a task takes in the producers that it alone consumes. The partial products of a block become one sum of
   products; only its result travels. Elementwise producers are taken into every consumer that contracts them (a
   prologue is cheaper to do again than to move), but no work is put *behind* a contraction that algebra can check.
2. *Tiles*: sums of products that share rows or columns of operands become super-tiles sized by the volunteers' memory.
3. *Bundles*: many small tasks of one kind become one task with many outputs, so that each is worth its messages.

A fused task never takes longer than a fair share of the whole work, for every volunteer should have something to do.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import Any

from goblin_dask.graphs.capture.pytree import Leaf, map_tree
from goblin_dask.graphs.program import Program
from goblin_dask.graphs.rewrite import compose, side_by_side
from goblin_dask.labnode.plan import DynamicTask, GridTask, Key, LabTask, Operand, Output, Plan
from goblin_dask.labnode.price import TASK_SECONDS, Price, Prices, transfer_seconds
from goblin_dask.labnode.tiles import super_tiles
from goblin_dask.labnode.tiling import TASKS_PER_VOLUNTEER, task_memory
from goblin_dask.messages import ArraySpec, GridOffer
from goblin_dask.verify.check import plan_check

PROLOGUE_GAIN = 50.0
"""A prologue is taken into a consumer whose contraction has at least so many times its operations."""

BUNDLE_SECONDS = 5 * TASK_SECONDS
"""Tasks shorter than this are bundled, up to this."""

OPERANDS = 4096
"""Most operands of a fused task."""


def fuse(plan: Plan, offer: GridOffer, prices: Prices | None = None) -> Plan:
    """Fuse the grid tasks of a plan.

    Parameters
    ----------
    plan : Plan
        As lowered; not changed.
    offer : GridOffer
        What the volunteers offer.

    Returns
    -------
    Plan
        The same keys, made by fewer tasks. Keys that nobody reads any more are gone.
    """
    fusion = _Fusion(plan, offer, prices or Prices())
    fusion.absorb()
    fusion.tile()
    fusion.bundle()
    return Plan(
        grid=list(fusion.tasks.values()),
        lab=plan.lab,
        dynamic=plan.dynamic,
        keys=plan.keys,
        graph=plan.graph,
        specs=plan.specs,
        templates=plan.templates,
        tasks=plan.tasks,
        seconds=plan.seconds,
    )


class _Fusion:
    def __init__(self, plan: Plan, offer: GridOffer, prices: Prices) -> None:
        self.offer = offer
        self.prices = prices
        self.composed: dict[object, tuple[Program, tuple[int, ...]]] = {}
        self.tasks = dict(enumerate(self._simplified(task) for task in _in_order(plan.grid)))
        self.maker: dict[Key, int] = {o.key: number for number, task in self.tasks.items() for o in task.outputs}
        self.readers: dict[Key, set[int]] = defaultdict(set)
        for number, task in self.tasks.items():
            for operand in task.operands:
                self.readers[operand.key].add(number)
        self.others: list[LabTask | DynamicTask] = [*plan.lab, *plan.dynamic]
        self.kept = set(plan.keys)
        """Keys that somebody outside the grid tasks reads."""
        for other in self.others:
            self.kept.update(other.dependencies)
        self.memory = task_memory(offer)
        self.share = self._fair_share()
        """Longest that a fused task may take, in seconds."""
        self.checkable: dict[int, tuple[Program, bool]] = {}

    def _simplified(self, task: GridTask) -> GridTask:
        """A task of its own, with its program rewritten."""
        if id(task.program) not in self.composed:
            self.composed[id(task.program)] = compose(task.program, [])
        program, slots = self.composed[id(task.program)]
        return GridTask(program, tuple(task.operands[s] for s in slots), task.outputs, task.origins, task.offload)

    def _seconds(self, price: Price) -> float:
        return max(price.seconds, transfer_seconds(price, self.offer))

    def _fair_share(self) -> float:
        total = sum(self._seconds(self.prices(task.program)) for task in self.tasks.values())
        return max(BUNDLE_SECONDS, total / (TASKS_PER_VOLUNTEER * max(1, self.offer.volunteers)))

    # --- absorbing ------------------------------------------------------------------------------------------------

    def absorb(self) -> None:
        """Take producers into their consumers, in the order of the graph."""
        for number in list(self.tasks):
            while number in self.tasks and self._absorb_into(number):
                pass

    def _absorb_into(self, number: int) -> bool:
        task = self.tasks[number]
        producers: dict[int, dict[int, int]] = {}
        for slot, operand in enumerate(task.operands):
            maker = self.maker.get(operand.key)
            if maker is not None:
                producers.setdefault(maker, {})[slot] = _output(self.tasks[maker], operand)
        chosen = self._allowed(task, number, producers)
        if not chosen:
            return False
        pattern = (
            id(task.program),
            tuple((id(self.tasks[p].program), tuple(reads.items())) for p, reads in chosen),
        )
        if pattern not in self.composed:
            self.composed[pattern] = compose(
                task.program, [(self.tasks[producer].program, reads) for producer, reads in chosen]
            )
        program, slots = self.composed[pattern]
        if not self._acceptable(task, [self.tasks[p] for p, _ in chosen], program):
            if len(chosen) == 1:
                return False
            return any(self._absorb_one(number, producer) for producer, _ in chosen)
        self._replace(number, [producer for producer, _ in chosen], program, slots)
        return True

    def _absorb_one(self, number: int, producer: int) -> bool:
        """Absorb one producer alone, where all together were too much."""
        task, source = self.tasks[number], self.tasks[producer]
        reads = {s: _output(source, o) for s, o in enumerate(task.operands) if self.maker.get(o.key) == producer}
        pattern = (id(task.program), ((id(source.program), tuple(reads.items())),))
        if pattern not in self.composed:
            self.composed[pattern] = compose(task.program, [(source.program, reads)])
        program, slots = self.composed[pattern]
        if not self._acceptable(task, [source], program):
            return False
        self._replace(number, [producer], program, slots)
        return True

    def _allowed(
        self, task: GridTask, number: int, producers: dict[int, dict[int, int]]
    ) -> list[tuple[int, dict[int, int]]]:
        price = self.prices(task.program)
        chosen = []
        for producer, reads in producers.items():
            source = self.tasks[producer]
            keys = [output.key for output in source.outputs]
            alone = all(key not in self.kept and self.readers[key] <= {number} for key in keys)
            if alone or (
                len(keys) == 1
                and (cost := self.prices(source.program)).light
                and cost.read <= 1.5 * cost.written
                and price.contraction >= PROLOGUE_GAIN * cost.flops
            ):
                chosen.append((producer, reads))
        return chosen

    def _acceptable(self, task: GridTask, sources: list[GridTask], program: Program) -> bool:
        """Whether a composed program is short, small and still checked as cheaply as its parts were."""
        if len(program.inputs) > OPERANDS:
            return False
        price = self.prices(program)
        parts = [task, *sources]
        if price.peak > self.memory and price.peak > max(self.prices(part.program).peak for part in parts):
            return False
        if self._seconds(price) > max(self.share, *(self._seconds(self.prices(part.program)) for part in parts)):
            return False
        return self._algebraic(program) or not any(self._algebraic(part.program) for part in parts)

    def _algebraic(self, program: Program) -> bool:
        known = self.checkable.get(id(program))
        if known is None:
            known = (program, plan_check(program).method == "algebraic")
            self.checkable[id(program)] = known
        return known[1]

    def _replace(self, number: int, producers: list[int], program: Program, slots: tuple[int, ...]) -> None:
        task = self.tasks[number]
        sources = [self.tasks[producer] for producer in producers]
        declared = [*task.operands, *(operand for source in sources for operand in source.operands)]
        operands = tuple(declared[slot] for slot in slots)
        for operand in task.operands:
            self.readers[operand.key].discard(number)
        for operand in operands:  # one of the producers may be read by another of them
            self.readers[operand.key].add(number)
        origins = task.origins
        for producer, source in zip(producers, sources, strict=True):
            if all(not self.readers[o.key] and o.key not in self.kept for o in source.outputs):
                origins += source.origins
                del self.tasks[producer]
                for output in source.outputs:
                    del self.maker[output.key]
                for operand in source.operands:
                    self.readers[operand.key].discard(producer)
        self.tasks[number] = GridTask(program, operands, task.outputs, origins, task.offload)

    # --- tiles and bundles ----------------------------------------------------------------------------------------

    def tile(self) -> None:
        """Make super-tiles of sums of products that share operands."""
        self.share = self._fair_share()
        levels = self._levels()
        by_program: dict[tuple[int, int], list[int]] = defaultdict(list)
        for number, task in self.tasks.items():
            if self.prices(task.program).contraction and self._algebraic(task.program):
                by_program[id(task.program), levels[number]].append(number)
        for numbers in by_program.values():
            tasks = {number: self.tasks[number] for number in numbers}
            most = int(1.01 * self.share / max(1e-9, self._seconds(self.prices(tasks[numbers[0]].program))))
            for group in super_tiles(tasks, most, self.memory):
                self._join(group)

    def bundle(self) -> None:
        """Join small tasks of one kind that do not depend on each other."""
        levels = self._levels()
        groups: dict[tuple[int, int], list[int]] = defaultdict(list)
        for number, task in self.tasks.items():
            if self._seconds(self.prices(task.program)) < BUNDLE_SECONDS / 2:
                groups[id(task.program), levels[number]].append(number)
        for numbers in groups.values():
            price = self.prices(self.tasks[numbers[0]].program)
            each = max(self._seconds(price), 1e-6)
            workers = TASKS_PER_VOLUNTEER * max(1, self.offer.volunteers)
            operands = max(1, len(self.tasks[numbers[0]].operands))
            size = max(1, min(int(BUNDLE_SECONDS / each), -(-len(numbers) // workers), OPERANDS // operands))
            for start in range(0, len(numbers), size):
                self._join(numbers[start : start + size])

    def _levels(self) -> dict[int, int]:
        """Longest path to each grid task, through tasks of the laboratory too: equals do not depend on each other."""
        below: dict[Key, list[Key]] = {}
        for task in self.tasks.values():
            for output in task.outputs:
                below[output.key] = [operand.key for operand in task.operands]
        for other in self.others:
            below[other.key] = list(other.dependencies)
        level: dict[Key, int] = {}
        for root in below:
            stack = [root]
            while stack:
                key = stack[-1]
                waiting = [k for k in below.get(key, ()) if k not in level]
                if waiting and key not in level:
                    stack.extend(waiting)
                    continue
                level.setdefault(key, 1 + max((level[k] for k in below.get(key, ())), default=-1))
                stack.pop()
        return {number: max(level[output.key] for output in task.outputs) for number, task in self.tasks.items()}

    def _join(self, numbers: list[int]) -> None:
        """Replace tasks of one program by one task, or by two halves where one does not fit."""
        if len(numbers) < 2:
            return
        tasks = [self.tasks[number] for number in numbers]
        shared: dict[Operand, int] = {}
        reads = tuple(tuple(shared.setdefault(o, len(shared)) for o in task.operands) for task in tasks)
        program = tasks[0].program
        pattern = (id(program), reads)
        if pattern not in self.composed:
            specs: dict[int, ArraySpec] = {}
            for chosen in reads:
                specs.update(zip(chosen, program.inputs, strict=True))
            self.composed[pattern] = side_by_side(program, reads, [specs[n] for n in range(len(shared))])
        joined, slots = self.composed[pattern]
        if self.prices(joined).peak > self.memory:
            half = len(numbers) // 2
            self._join(numbers[:half])
            self._join(numbers[half:])
            return
        operands = list(shared)
        outputs: list[Output] = []
        for copy, task in enumerate(tasks):
            first = copy * len(program.outputs)
            outputs.extend(Output(output.key, _shifted(output.tree, first)) for output in task.outputs)
        fused = GridTask(
            joined,
            tuple(operands[slot] for slot in slots),
            tuple(outputs),
            sum(task.origins for task in tasks),
            tasks[0].offload,
        )
        for number, task in zip(numbers, tasks, strict=True):
            for operand in task.operands:
                self.readers[operand.key].discard(number)
            del self.tasks[number]
        number = numbers[0]
        self.tasks[number] = fused
        for output in fused.outputs:
            self.maker[output.key] = number
        for operand in fused.operands:
            self.readers[operand.key].add(number)


def _leaves(tree: Any) -> list[int]:
    """Program outputs at the arrays of a tree, in order."""
    found: list[int] = []

    def visit(value: Any) -> Any:
        if isinstance(value, Leaf):
            found.append(value.index)
        return value

    map_tree(visit, tree)
    return found


def _output(task: GridTask, operand: Operand) -> int:
    """Which output of a task's program an operand is."""
    (tree,) = [output.tree for output in task.outputs if output.key == operand.key]
    return _leaves(tree)[operand.leaf]


def _shifted(tree: Any, first: int) -> Any:
    """The tree for a program whose outputs start at `first` of a joined one's."""
    return map_tree(lambda v: replace(v, index=v.index + first) if isinstance(v, Leaf) else v, tree)


def _in_order(tasks: list[GridTask]) -> list[GridTask]:
    """Producers before consumers."""
    maker = {output.key: task for task in tasks for output in task.outputs}
    done: set[int] = set()
    order: list[GridTask] = []
    for root in tasks:
        stack = [root]
        while stack:
            task = stack[-1]
            waiting = [m for o in task.operands if (m := maker.get(o.key)) is not None and id(m) not in done]
            if waiting and id(task) not in done:
                stack.extend(waiting)
                continue
            stack.pop()
            if id(task) not in done:
                done.add(id(task))
                order.append(task)
    return order

"""`lower`: from Dask's unoptimised graph to a `Plan` of programs on blocks.

Every task is one of: a *source* or a *sink*, known by its function; an *alias* or a *view*, which only say where arrays
are; a *grid* task, whose function was recorded as a program and checked (`goblin_dask.graphs.capture.templates`); a
*dynamic* task, whose operands' shapes only its predecessors' results will tell; or a *lab* task, which runs as it is,
and the plan says why. Nothing that cannot be recorded is ever an error.
"""

from __future__ import annotations

import gc
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from goblin_dask.errors import InputError
from goblin_dask.graphs.capture.dask_internals import (
    Alias,
    DataNode,
    GraphNode,
    Request,
    Task,
    TaskRef,
)
from goblin_dask.graphs.capture.pytree import flatten, is_array, unflatten
from goblin_dask.graphs.capture.templates import Template, Templates
from goblin_dask.labnode import sources
from goblin_dask.labnode.plan import Declared, DynamicTask, GridTask, Key, LabTask, Operand, Output, Plan
from goblin_dask.messages import ArraySpec


def lower(graph: Any, keys: Any, *, check: bool = True) -> Plan:
    """Lower a graph.

    Parameters
    ----------
    graph : dict, HighLevelGraph or Expr
        As a Dask scheduler is given it.
    keys : key or (nested) list of keys
        What is wanted.
    check : bool
        Compare each recording with its function on drawn data before it is trusted. Only tests turn that off.
    """
    request = graph if isinstance(graph, Request) else Request.of(graph, keys)
    with _without_collector():
        return Lowering(request.graph, request.keys, check=check).plan()


@contextmanager
def _without_collector() -> Any:
    """Hundreds of thousands of small objects are made and none is garbage: looking for it costs half the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class Lowering:
    """One lowering: the graph, and what is known of each key so far."""

    def __init__(self, graph: Mapping[Key, GraphNode], keys: Iterable[Key], *, check: bool = True) -> None:
        self.graph = graph
        self.keys = tuple(keys)
        self.templates = Templates(check)
        self._numbers: dict[Key, int] = {}
        """Of each key done: the number of its specs in `Templates.trees`; -1 where not known."""
        self._views: dict[Key, tuple[Any, tuple[Operand, ...]]] = {}
        """Keys whose arrays are other keys': their trees, and whose arrays the leaves are."""
        self._delayed: dict[Key, LabTask] = {}
        """Sources that are in the plan only if somebody reads them by key."""
        self._literals: dict[int, tuple[Any, Key]] = {}
        self._plan = Plan(keys=self.keys, graph=graph)

    def plan(self) -> Plan:
        """Do it."""
        start = time.perf_counter()
        for key in self._ordered():
            node = self.graph[key]
            kind = type(node)
            if kind is Alias:
                self._alias(key, node.target)
            elif kind is DataNode:
                self._data(key, node)
            else:
                self._task(key, node)
        self._close()
        plan, trees = self._plan, self.templates.trees.trees
        plan.specs = {key: trees[number] for key, number in self._numbers.items() if number >= 0}
        plan.templates = len(self.templates)
        plan.tasks = len(self._numbers)
        plan.seconds = time.perf_counter() - start
        return plan

    def _ordered(self) -> list[Key]:
        """The keys that are needed, each after all that it reads."""
        graph = self.graph
        missing = [key for key in self.keys if key not in graph]
        if missing:
            raise InputError(f"the key {missing[0]!r} is wanted, but the graph does not have it")
        done: set[Key] = set()
        order: list[Key] = []
        stack: list[Key] = list(reversed(self.keys))
        open_: set[Key] = set()
        while stack:
            key = stack[-1]
            if key in done:
                stack.pop()
                continue
            waiting = [each for each in graph[key].dependencies if each not in done and each in graph]
            if waiting:
                if key in open_:
                    raise InputError(f"the graph has a cycle through the key {key!r}")
                open_.add(key)
                stack.extend(waiting)
                continue
            open_.discard(key)
            stack.pop()
            done.add(key)
            order.append(key)
        return order

    # --- one key ------------------------------------------------------------------------------------------------
    def _alias(self, key: Key, target: Key) -> None:
        number = self._numbers[key] = self._numbers.get(target, -1)
        if number < 0:
            self._lab(key, self.graph[key], (target,), "alias")
            return
        if target in self._views:
            self._views[key] = self._views[target]
            return
        leaves, tree = flatten(self.templates.trees.trees[number], lambda value: isinstance(value, ArraySpec))
        self._views[key] = (tree, tuple([Operand(target, i) for i in range(len(leaves))]))

    def _data(self, key: Key, node: DataNode) -> None:
        self._numbers[key] = self.templates.trees.number(sources.data_spec(node.value))
        self._delayed[key] = LabTask(key, node, (), "data")

    def _task(self, key: Key, node: Any) -> None:
        numbers = self._numbers
        dependencies = node.dependencies
        function = node.func
        if sources.is_sink(function):
            self._lab(key, node, tuple(dependencies), "sink")
        elif sources.is_getter(function):
            self._getter(key, node)
        elif sources.is_load(function):
            self._lab(key, node, tuple(dependencies), "source")
        elif not dependencies:
            declared = sources.declared_specs(node)
            known = sources.source_spec(node) if declared is None else declared
            self._lab(key, node, (), "source", number=self.templates.trees.number(known), declared=declared)
        elif any(numbers.get(each, -1) < 0 for each in dependencies):
            numbers[key] = -1
            self._plan.dynamic.append(DynamicTask(key, node, tuple(dependencies)))
        else:
            self._traced(key, node)

    def _getter(self, key: Key, node: Any) -> None:
        region = sources.region_of(node, self.graph)
        spec = None if region is None else sources.region_spec(region)
        if region is None or spec is None:
            self._lab(key, node, tuple(node.dependencies), "source")
            return
        # The array stands in the task itself, so that nobody has to keep it under a key of its own.
        task = Task(key, node.func, region.array, region.index, *node.args[2:])
        self._numbers[key] = self.templates.trees.number(spec)
        self._plan.lab.append(LabTask(key, task, (), "source", region=region))

    def _traced(self, key: Key, node: Any) -> None:
        template = self.templates.of(node, self._numbers)
        self._numbers[key] = template.result
        if template.unsure is not None:
            self._plan.dynamic.append(DynamicTask(key, node, tuple(node.dependencies)))
        elif template.reason:
            self._lab(key, node, tuple(node.dependencies), "lab", template.reason, template.result)
        else:
            operands = self._operands(template)
            if template.program is None:
                self._views[key] = (template.tree, operands)
            else:
                self._plan.grid.append(GridTask(template.program, operands, (Output(key, template.tree),)))

    def _operands(self, template: Template) -> tuple[Operand, ...]:
        refs, views = self.templates.skeletons.refs, self._views
        operands = []
        for kind, what, leaf in template.sources:
            if kind == "operand":
                key = refs[what]
                operands.append(views[key][1][leaf] if key in views else Operand(key, leaf))
            else:
                operands.append(self._literal(self.templates.skeletons.literals[what] if kind == "literal" else what))
        return tuple(operands)

    def _literal(self, array: Any) -> Operand:
        """An array that stands in a task's arguments, under a key of its own."""
        known = self._literals.get(id(array))
        if known is None:
            key = ("literal", len(self._literals))
            while key in self.graph:
                key = ("literal", key)  # type: ignore[assignment]
            known = self._literals[id(array)] = (array, key)
            self._plan.lab.append(LabTask(key, DataNode(key, array), (), "data"))
        return Operand(known[1])

    def _lab(
        self,
        key: Key,
        node: Any,
        dependencies: tuple[Key, ...],
        kind: str,
        reason: str = "",
        number: int = -1,
        declared: Any = None,
    ) -> None:
        self._numbers[key] = number
        self._plan.lab.append(LabTask(key, node, dependencies, kind, reason, declared=declared))

    # --- the end ------------------------------------------------------------------------------------------------
    def _close(self) -> None:
        """Add what is read by key: views and data that so far stand for nothing but other keys and themselves."""
        plan, views, delayed = self._plan, self._views, self._delayed
        read: set[Key] = set(plan.keys)
        late: list[LabTask | DynamicTask] = [*plan.lab, *plan.dynamic]
        for task in late:
            read.update(task.dependencies)
        for key in [each for each in read if each in views]:
            tree, operands = views[key]
            bases = tuple(dict.fromkeys(operand.key for operand in operands))
            if self._is_whole(key, operands, bases):
                plan.lab.append(LabTask(key, Alias(key, bases[0]), bases, "alias"))
            else:
                node = Task(key, pick, DataNode(None, tree), DataNode(None, operands), bases, *map(TaskRef, bases))
                plan.lab.append(LabTask(key, node, bases, "view"))
            read.update(bases)
        for grid in plan.grid:
            read.update([operand.key for operand in grid.operands])
        plan.lab.extend(delayed[key] for key in delayed if key in read)

    def _is_whole(self, key: Key, operands: tuple[Operand, ...], bases: tuple[Key, ...]) -> bool:
        """Whether a view is all of one other key's value, as it is."""
        if len(bases) != 1 or self._numbers[key] != self._numbers[bases[0]]:
            return False
        return [operand.leaf for operand in operands] == list(range(self.templates.trees.sizes[self._numbers[key]]))


def pick(tree: Any, operands: tuple[Operand, ...], keys: tuple[Key, ...], *values: Any) -> Any:
    """The value of a ``view``: a tree of other keys' arrays, or of the references to them; nothing is computed."""
    leaves = {key: arrays_of(value) for key, value in zip(keys, values, strict=True)}
    return unflatten(tree, [leaves[operand.key][operand.leaf] for operand in operands])


def arrays_of(value: Any) -> list[Any]:
    """Arrays of a tree in the order in which `Operand.leaf` counts them; references to arrays count as arrays."""
    return flatten(value, lambda each: is_array(each) or hasattr(each, "spec"))[0]


def check_declared(array: Declared, specs: Mapping[Key, Any]) -> None:
    """Refuse a dask array one of whose blocks is not what the array says of it.

    Another precision is none of our business: Dask's own `percentile` of float32 is float64, and says float32.

    Parameters
    ----------
    array : Declared
    specs : mapping
        What is known of its blocks: `Plan.specs` before they are computed, their own afterwards.

    Raises
    ------
    InputError
        Naming the block, and both shapes and dtypes.
    """
    for key, shape in array.blocks():
        spec = specs.get(key)
        if not isinstance(spec, ArraySpec):
            continue
        known = all(math.isnan(said) or said == size for said, size in zip(shape, spec.shape, strict=False))
        kinds = {np.dtype(name).kind for name in (spec.dtype, array.dtype)}
        if len(shape) != len(spec.shape) or not known or len(kinds) > 1:
            raise InputError(
                f"block {key[1:]} of {key[0]} is declared {array.dtype} {shape}, but its function returns "  # type: ignore[index]
                f"{spec.dtype} {spec.shape}; give map_blocks the right dtype= and chunks="
            )


# --- at run time ------------------------------------------------------------------------------------------------
class LateLowering:
    """Lowers the `DynamicTask`s of one plan as their operands become known; they share templates.

    Thread-safe. Functions are told apart by identity, so one of these serves one plan, which it outlives by nothing.
    """

    def __init__(self) -> None:
        self._templates = Templates(inputs=False)
        self._lock = threading.Lock()
        self._kept: list[Any] = []

    def trace_at_run_time(
        self, task: DynamicTask, operands: Mapping[Key, Any], values: Callable[[Key], Any] | None = None
    ) -> GridTask | str:
        """A program for a task whose operands are known by now, or the reason why there is none.

        Parameters
        ----------
        task : DynamicTask
        operands : mapping
            Of each key that it reads, the tree with an `ArraySpec` in the place of each array; None where a program
            cannot hold the value (`goblin_dask.graphs.capture.pytree.specs_of` raises then).
        values : callable, optional
            Gives a key's value itself. Asked for only where the function raises on all drawn data, so that it can be
            compared with its program on nothing but the real ones.
        """
        node = task.task
        if not isinstance(node, Task):
            return "it is no call of a function"
        with self._lock:
            self._kept.append(node)
            templates = self._templates
            numbers = {key: templates.trees.number(tree) for key, tree in operands.items()}
            if any(numbers.get(key, -1) < 0 for key in node.dependencies):
                return "an operand is no plain array of numbers"
            template = templates.of(node, numbers)
            refs = list(templates.skeletons.refs)
            if template.unsure is not None and values is not None:
                try:
                    template = templates.settle(node, template, [values(key) for key in refs])
                except Exception as error:  # the researcher's function: in the laboratory it raises where it shows
                    return f"the function raises {type(error).__name__}: {error}"
            if template.reason:
                return template.reason
            if template.program is None:
                return "it computes nothing: its value is made of its operands' arrays"
            if any(kind != "operand" for kind, _, _ in template.sources):
                return "it needs an array of its own that is too large for a program"
            inputs = tuple(Operand(refs[what], leaf) for _, what, leaf in template.sources)
            return GridTask(template.program, inputs, (Output(task.key, template.tree),))


def summary(plan: Plan) -> dict[str, Any]:
    """How much of a graph is for the grid, and why the rest is not.

    A task counts that reads at least one array and is neither source nor sink. Aliases move nothing and do not count.
    """
    grid = sum(task.origins for task in plan.grid)
    lab = [task for task in plan.lab if task.kind == "lab"]
    total = grid + len(lab) + len(plan.dynamic)
    return {
        "grid": grid,
        "lab": len(lab),
        "dynamic": len(plan.dynamic),
        "share": grid / total if total else 1.0,
        "reasons": dict(Counter(task.reason for task in lab)),
    }

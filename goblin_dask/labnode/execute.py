"""A plan, run on the lab's Dask cluster: `Run` makes the Dask graph, and is what its tasks call.

Keys of that graph are ``kind-job-number``; their values are `Stored` trees of references, never arrays. Tasks carry
nothing but the names of their run and of their own key: what they do lies in the run, in the process where the uplink
and the workers of the laboratory are.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Executor, Future
from typing import Any, Protocol

from dask.highlevelgraph import HighLevelGraph, MaterializedLayer
from distributed import Reschedule

from goblin_dask import messages as m
from goblin_dask.digest import Digest
from goblin_dask.errors import GoblinError
from goblin_dask.graphs.capture.dask_internals import GraphNode, Task, TaskRef
from goblin_dask.graphs.capture.pytree import Leaf, flatten, is_array, unflatten
from goblin_dask.graphs.execute import execute
from goblin_dask.graphs.program import Program
from goblin_dask.labnode.assemble import Stored
from goblin_dask.labnode.calls import Call, Local, numbered
from goblin_dask.labnode.lowering import LateLowering
from goblin_dask.labnode.originals import call_on_copies_if_need_be, run_originals
from goblin_dask.labnode.plan import DynamicTask, GridTask, Key, LabTask, Plan, Region
from goblin_dask.labnode.residents import Residents, reachable
from goblin_dask.labnode.sources import check_returned
from goblin_dask.labnode.uplink import Accepted, GridLink, NotOnGrid, Order, Prepared
from goblin_dask.store.arrays import source_region, write_region
from goblin_dask.store.blobs import BlobStore
from goblin_dask.store.chunks import load_array, store_array
from goblin_dask.store.refs import ChunkRef
from goblin_dask.verify.check import check_result
from goblin_dask.verify.policy import UNCHECKED
from goblin_dask.verify.sampling import ANNOTATION

logger = logging.getLogger(__name__)


class Observer(Protocol):
    """Who is told how a run goes; called from any thread."""

    def grid_state(self, key: str, state: str) -> None: ...
    def grid_done(self, key: str, accepted: Accepted, origins: int) -> None: ...
    def lab_done(self, key: str, kind: str, reason: str, origins: int) -> None: ...
    def keeps(self, key: str, digests: tuple[Digest, ...]) -> None:
        """The value of `key` refers to these blobs, until `key` is released."""


Place = tuple[str, int | None]
"""Where the value of a researcher's key is: key of the lab's graph, and position when that holds several."""

RUNS: dict[str, Run] = {}
"""Runs of this process by name; their tasks find them here."""


class Run:
    """One job's plan while it runs.

    Parameters
    ----------
    name : str
        ``job-number``: the job's random identity, and how often it was run; becomes part of every key.
    plan : Plan
    link : GridLink
    blobs : BlobStore
    pool : Executor
        Runs programs that the grid gave back, and traces at run time.
    observer : Observer
    policy : Policy
    prepared : callable
        `Prepared` of a program, shared between runs.
    residents : Residents, optional
        Actors that tasks in the laboratory may call.
    """

    def __init__(
        self,
        name: str,
        plan: Plan,
        *,
        link: GridLink,
        blobs: BlobStore,
        pool: Executor,
        observer: Observer,
        policy: m.Policy,
        prepared: Callable[[Program], Prepared],
        residents: Residents | None = None,
    ):
        self.name = name
        self._job = name.partition("-")[0]
        self.plan = plan
        self.places: dict[Key, Place] = {}
        self._read = {operand.key for task in plan.grid for operand in task.operands}
        """Keys that programs compute with."""
        self._link, self._blobs, self._pool, self._observer = link, blobs, pool, observer
        self._policy, self._prepared, self._late = policy, prepared, LateLowering()
        self._residents = residents
        self._calls: dict[str, Call] = {}
        self._locals: dict[str, Local] = {}
        self._waiting: dict[str, Future[Accepted]] = {}
        self._unchecked: dict[str, tuple[Call, tuple[ChunkRef, ...], tuple[ChunkRef, ...]]] = {}
        """Program, inputs and outputs of results that were accepted without a check."""
        self.reopened = False
        """Whether such a result was withdrawn: what was made of it must not be used."""
        self._cancelled = False
        self._lock = threading.Lock()
        self.priority_of: Callable[[str], tuple[int, ...]] = lambda key: ()
        RUNS[name] = self

    def close(self) -> None:
        """Nothing of this run is asked for any more."""
        RUNS.pop(self.name, None)
        with self._lock:
            self._cancelled = True
            waiting = list(self._waiting.values())
        for future in waiting:
            future.cancel()

    # --- the graph ----------------------------------------------------------------------------------------------

    def graph(self) -> tuple[HighLevelGraph, list[str]]:
        """The lab's Dask graph, and the keys whose values are wanted."""
        plan = self.plan
        uplink: dict[str, Task] = {}
        lab: dict[str, Task] = {}
        aliases: dict[Key, Key] = {}
        number = 0

        def fresh(kind: str) -> str:
            nonlocal number
            number += 1
            return f"{kind}-{self.name}-{number:07d}"

        for task in plan.grid:
            key = fresh("grid")
            several = len(task.outputs) > 1
            for position, output in enumerate(task.outputs):
                self.places[output.key] = (key, position if several else None)
        for each in plan.lab:
            if each.kind == "alias":
                (aliases[each.key],) = each.dependencies
            else:
                self.places[each.key] = (fresh("lab"), None)
        for dynamic in plan.dynamic:
            self.places[dynamic.key] = (fresh("dynamic"), None)
        for alias in aliases:
            target = aliases[alias]
            while target in aliases:
                target = aliases[target]
            self.places[alias] = self.places[target]

        for task in plan.grid:
            key = self.places[task.outputs[0].key][0]
            if task.offload:
                uplink[key] = self._grid_node(key, task, on_grid)
            else:
                lab[key] = self._grid_node(key, task, program_in_lab)
        for each in plan.lab:
            if each.kind != "alias":
                key = self.places[each.key][0]
                lab[key] = self._local_node(key, each, in_lab)
        for dynamic in plan.dynamic:
            key = self.places[dynamic.key][0]
            uplink[key] = self._local_node(key, dynamic, when_known)
        sampled = {ANNOTATION: self.name} if self._policy.method == "sample" else {}
        layers = {
            "uplink": MaterializedLayer(uplink, annotations={"resources": {"uplink": 1}, **sampled}),
            "lab": MaterializedLayer(lab, annotations={"resources": {"lab": 1}}),
        }
        wanted = list(dict.fromkeys(self.places[key][0] for key in plan.keys))
        return HighLevelGraph(layers, {"uplink": set(), "lab": set()}), wanted

    def _operands(self, task: GridTask) -> tuple[list[str], tuple[tuple[int, int | None, int], ...]]:
        positions: dict[str, int] = {}
        operands = []
        for operand in task.operands:
            key, position = self.places[operand.key]
            operands.append((positions.setdefault(key, len(positions)), position, operand.leaf))
        return list(positions), tuple(operands)

    def _call(self, task: GridTask, operands: tuple[tuple[int, int | None, int], ...]) -> Call:
        trees = []
        for output in task.outputs:
            leaves, tree = numbered(output.tree)
            trees.append((tree, leaves))
        return Call(task, self._prepared(task.program), operands, tuple(trees), len(task.outputs) > 1)

    def _grid_node(self, key: str, task: GridTask, function: Callable[..., Any]) -> Task:
        dependencies, operands = self._operands(task)
        self._calls[key] = self._call(task, operands)
        return Task(key, function, self.name, key, *map(TaskRef, dependencies))

    def _local_node(self, key: str, task: LabTask | DynamicTask, function: Callable[..., Any]) -> Task:
        positions: dict[str, int] = {}
        names = []
        for dependency in task.dependencies:
            lab_key, position = self.places[dependency]
            names.append((dependency, positions.setdefault(lab_key, len(positions)), position))
        self._locals[key] = Local(task, tuple(names))
        return Task(key, function, self.name, key, *map(TaskRef, positions))

    def value(self, key: Key, values: Mapping[str, Any]) -> Stored:
        """Value of a researcher's key, from the values of the lab's keys."""
        lab_key, position = self.places[key]
        value = values[lab_key]
        found: Stored = value if position is None else value[position]
        return found

    # --- tasks, called by Dask's workers --------------------------------------------------------------------------

    async def on_grid(self, key: str, values: tuple[Any, ...]) -> Any:
        """A grid task. On the uplink's loop."""
        call = self._calls[key]
        return await self._compute(key, call, call.inputs(values), call.known(values))

    def program_in_lab(self, key: str, values: tuple[Any, ...]) -> Any:
        """A grid task that is not worth its way to the grid. In a thread of a lab worker."""
        call = self._calls[key]
        return self._here(key, call, call.inputs(values), call.known(values), call.task.reason)

    async def _compute(
        self, key: str, call: Call, inputs: tuple[ChunkRef, ...] | None, known: Mapping[Key, Stored]
    ) -> Any:
        observer = self._observer
        work = functools.partial(asyncio.get_running_loop().run_in_executor, self._pool)
        if inputs is None:
            return await work(self._here, key, call, inputs, known, "")
        order = Order(
            call.program,
            inputs,
            self.priority_of(key),
            self._policy,
            self._job,
            on_state=lambda state: observer.grid_state(key, state),
            on_reopened=self._on_reopened,
            cold=not any(output.key in self._read for output in call.task.outputs),
        )
        with self._lock:
            if self._cancelled:
                raise Reschedule
            future = self._waiting[key] = self._link.submit(order)
        try:
            accepted = await asyncio.wrap_future(future)
            observer.grid_done(key, accepted, call.task.origins)
            if accepted.verdict.method == UNCHECKED:
                self._unchecked[key] = (call, inputs, accepted.outputs)
            return self._finished(key, call, accepted.outputs)
        except NotOnGrid as error:
            return await work(self._here, key, call, inputs, known, str(error))
        except asyncio.CancelledError:
            # Dask has released the task: whatever it returns now is thrown away, and an error would be logged
            raise Reschedule from None
        finally:
            self._waiting.pop(key, None)

    def _on_reopened(self) -> None:
        self.reopened = True

    async def recheck(self, key: str) -> bool:
        """Have a finished task verified in full; whether its result stands. On the loop of Dask's scheduler."""
        if (task := self._unchecked.pop(key, None)) is None:
            return True
        self._keep(f"recheck-{key}", (*task[1], *task[2]))  # Dask may let go of it meanwhile, when all have read it
        try:
            return await self._recheck(key, *task)
        finally:
            self._keep(f"recheck-{key}", ())

    async def _recheck(self, key: str, call: Call, inputs: tuple[ChunkRef, ...], outputs: tuple[ChunkRef, ...]) -> bool:
        order = Order(call.program, inputs, self.priority_of(key), m.Policy(), self._job)
        try:
            accepted = await asyncio.wrap_future(self._link.submit(order))
        except NotOnGrid:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._pool, self._stands, call.program.program, inputs, outputs)
        self._observer.grid_done(key, accepted, call.task.origins)
        # an honest result may have another digest, where machines round differently: then the verified one is used
        return [ref.digest for ref in accepted.outputs] == [ref.digest for ref in outputs]

    def _stands(self, program: Program, inputs: tuple[ChunkRef, ...], outputs: tuple[ChunkRef, ...]) -> bool:
        sources = [functools.partial(load_array, self._blobs, ref) for ref in inputs]
        found = [load_array(self._blobs, ref) for ref in outputs]
        return check_result(program, sources, found, method="recompute").verdict == "accepted"

    def _here(
        self, key: str, call: Call, inputs: tuple[ChunkRef, ...] | None, known: Mapping[Key, Stored], reason: str
    ) -> Any:
        """A grid task in the laboratory: by its program or, where that refuses these data, by Dask's own tasks."""
        refusal: Exception | None = None
        if inputs is not None:
            try:
                result = self._finished(key, call, self._execute(call.program.program, inputs))
            except (GoblinError, ValueError, ArithmeticError) as error:
                refusal = error
        if inputs is None or refusal is not None:
            reason = f"its program is not for these data: {refusal or 'they have other shapes than was expected'}"
            result = self._by_originals(key, call, known)
        self._observer.lab_done(key, "lab", reason, call.task.origins)
        return result

    def _by_originals(self, key: str, call: Call, known: Mapping[Key, Stored]) -> Any:
        wanted = [output.key for output in call.task.outputs]
        values = run_originals(self.plan.graph, wanted, {name: self.read(value) for name, value in known.items()})
        stored = tuple(self.write(values[name]) for name in wanted)
        self._keep(key, tuple(ref for value in stored for ref in value.refs))
        return stored if call.several else stored[0]

    def _finished(self, key: str, call: Call, outputs: tuple[ChunkRef, ...]) -> Any:
        self._keep(key, outputs)
        stored = tuple(Stored(tree, tuple(outputs[leaf] for leaf in leaves)) for tree, leaves in call.trees)
        return stored if call.several else stored[0]

    def released(self, key: str) -> None:
        """Dask does not want this key any more, whatever it was doing."""
        with self._lock:
            future = self._waiting.get(key)
        if future is not None:
            future.cancel()

    def _execute(self, program: Program, inputs: Iterable[ChunkRef]) -> tuple[ChunkRef, ...]:
        sources = [functools.partial(load_array, self._blobs, ref) for ref in inputs]
        return tuple(store_array(self._blobs, array) for array in execute(program, sources))

    async def when_known(self, key: str, values: tuple[Any, ...]) -> Any:
        """A task whose operands' shapes were not known before. On the uplink's loop."""
        local = self._locals[key]
        operands = local.values(values)
        loop = asyncio.get_running_loop()
        task = local.task
        assert isinstance(task, DynamicTask)
        specs = {name: stored.specs() for name, stored in operands.items()}
        traced = await loop.run_in_executor(
            self._pool, self._late.trace_at_run_time, task, specs, lambda name: self.read(operands[name])
        )
        if isinstance(traced, str):
            return await loop.run_in_executor(self._pool, self._run_node, key, task.task, operands, "lab", traced)
        refs = tuple(operands[operand.key].refs[operand.leaf] for operand in traced.operands)
        return await self._compute(key, self._call(traced, ()), refs, operands)

    def in_lab(self, key: str, values: tuple[Any, ...]) -> Stored:
        """A task of the laboratory. In a thread of a lab worker."""
        local = self._locals[key]
        task = local.task
        assert isinstance(task, LabTask)
        if task.region is not None and task.kind == "sink":
            (block,) = local.values(values).values()
            self._write(task.region, block)
            self._observer.lab_done(key, task.kind, task.reason, 1)
            return Stored(None, ())
        if task.region is not None:
            ref = source_region(task.region.array, task.region.index, self._blobs)
            self._keep(key, (ref,))
            self._observer.lab_done(key, task.kind, task.reason, 1)
            return Stored(Leaf(0), (ref,))
        return self._run_node(key, task.task, local.values(values), task.kind, task.reason, task.declared)

    def _write(self, region: Region, value: Stored) -> None:
        block = value.block
        if block is None:  # masked, or of a dtype that no blob holds: as Zarr takes it
            region.array[region.index] = self.read(value)
        else:
            write_region(region.array, region.index, block, self._blobs)

    def _run_node(
        self,
        key: str,
        node: GraphNode,
        operands: Mapping[Key, Stored],
        kind: str,
        reason: str,
        declared: Any = None,
    ) -> Stored:
        if kind == "view":
            stored = Stored.of_references(node({name: value.references() for name, value in operands.items()}))
        else:
            values = {name: self.read(value) for name, value in operands.items()}
            with reachable(self._residents):
                stored = self.write(call_on_copies_if_need_be(node, values))
            if declared is not None:
                check_returned(node.key, declared, stored.specs())
            if kind == "lab" and not any(map(_reads_array, values.values())):
                kind = "source"
        self._keep(key, stored.refs)
        self._observer.lab_done(key, kind, reason, 1)
        return stored

    def _keep(self, key: str, refs: tuple[ChunkRef, ...]) -> None:
        self._observer.keeps(key, tuple(ref.digest for ref in refs if ref.inline is None and ref.place is None))

    # --- trees ------------------------------------------------------------------------------------------------------

    def read(self, stored: Stored) -> Any:
        """The tree with its arrays, mapped where they are files."""
        return unflatten(stored.tree, [load_array(self._blobs, ref) for ref in stored.refs])

    def write(self, value: Any) -> Stored:
        """References to the arrays of a tree; what blobs cannot hold (masked arrays, objects) stays in the tree."""
        arrays, tree = flatten(value, is_array)
        return Stored(tree, tuple(store_array(self._blobs, array) for array in arrays))


def _reads_array(value: Any) -> bool:
    return bool(flatten(value, lambda each: hasattr(each, "__array__"))[0])


async def on_grid(run: str, key: str, *values: Any) -> Any:
    """Task of the lab's graph: compute on the grid. Keys are passed, for a coroutine has no thread to ask."""
    return await _run(run).on_grid(key, values)


async def when_known(run: str, key: str, *values: Any) -> Any:
    """Task of the lab's graph: trace now, compute on the grid or else here."""
    return await _run(run).when_known(key, values)


def program_in_lab(run: str, key: str, *values: Any) -> Any:
    """Task of the lab's graph: a program of the grid's, here."""
    return _run(run).program_in_lab(key, values)


def in_lab(run: str, key: str, *values: Any) -> Any:
    """Task of the lab's graph: compute here."""
    return _run(run).in_lab(key, values)


def _run(name: str) -> Run:
    run = RUNS.get(name)
    if run is None:
        raise Reschedule  # its job was cancelled: Dask has not heard of it yet
    return run

"""The recordings of a captured program: one with the size of the batch open, and others for single sizes.

Each is a graph of ATen's operators, which is said in operators of the catalogue for the shapes of a call.
"""

from __future__ import annotations

import copy
import operator
import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from goblin_dask.errors import InputError, NotTraceable
from goblin_dask.graphs.backends.base import Backend
from goblin_dask.graphs.capture.alike import difference, drawn
from goblin_dask.graphs.capture.aten import LOWERINGS
from goblin_dask.graphs.capture.aten.base import Call, Ref, Streams, drawing
from goblin_dask.graphs.capture.aten.creation import DRAWING
from goblin_dask.graphs.capture.aten.elementwise import NUMBERS
from goblin_dask.graphs.capture.graph import Graph
from goblin_dask.graphs.capture.pytree import Leaf
from goblin_dask.graphs.capture.sizes import Sizes
from goblin_dask.graphs.execute import execute
from goblin_dask.graphs.trace import Traced, record
from goblin_dask.graphs.tracer.array import Tracer
from goblin_dask.graphs.tracer.casting import astype
from goblin_dask.graphs.tracer.recorder import spec_of
from goblin_dask.messages import ArraySpec

if TYPE_CHECKING:
    from goblin_dask.graphs.capture.origin import Origin  # needs PyTorch

KEPT = 16
"""Programs that are kept, one for each set of shapes that was called last."""

SINGLE = 16
"""Sizes of the batch that may have a recording of their own."""

ORDERS = r"aten\.(sort|topk|argsort|argmax|argmin|max|min)\."
"""Operators among whose results are places of equal elements, of which PyTorch takes any."""

Array = np.ndarray[Any, Any]


class Recordings:
    """All recordings of one captured program.

    Parameters
    ----------
    graph : Graph
        With the size of the batch open.
    origin : Origin
        What was captured.
    example : sequence
        Leaves of the arguments that it was recorded on; the tensors among them as arrays.
    batched, axis
        Which leaves have the batch, and along which axis.
    """

    def __init__(self, graph: Graph, origin: Origin | None, example: Sequence[Any], batched: Sequence[bool], axis: int):
        self.open, self._origin, self.example = graph, origin, tuple(example)
        self.sizes = graph.sizes or Sizes(2)
        """For which sizes the open graph holds; not asked for where no argument has a batch."""
        self.batched, self.axis = tuple(batched), axis
        self.parameters: dict[str, Array] = graph.arrays
        self.reads = {name: spec_of(array) for name, array in graph.arrays.items()}
        self._tensors = tuple(isinstance(leaf, np.ndarray) for leaf in example)
        self.draws = draws(graph)
        self._single: dict[int, Graph] = {}
        """By size of the batch; of none and of one it is the open one, where that was seen to do."""
        self.apart: set[int | None] = set()
        """Sizes of a batch of which was seen that its elements do not depend on others; None for the open one."""
        self._programs: OrderedDict[Any, Traced] = OrderedDict()
        _require_known(graph.calls)

    def __getstate__(self) -> dict[str, Any]:
        """Data alone: what was captured stays where it is."""
        return {**self.__dict__, "_origin": None, "_programs": OrderedDict()}

    def bare(self) -> Recordings:
        """What blocks need where they are computed: neither arrays nor PyTorch."""
        other = copy.copy(self)
        other.parameters, other.example = {}, ()
        other.open = replace(self.open, arrays={}, structure=None)
        other._single = {size: replace(graph, arrays={}, structure=None) for size, graph in self._single.items()}
        return other

    # --- which graph ------------------------------------------------------------------------------------------------
    def hold(self, size: int) -> bool:
        """Whether the recording with an open batch holds for a size of it beyond doubt."""
        return self.sizes.hold(size)

    def small(self) -> list[int]:
        """The sizes below two for which the open recording was seen to do."""
        return [size for size, graph in self._single.items() if graph is self.open]

    def graph_for(self, leaves: Sequence[Any]) -> Graph:
        """The graph for arguments: arrays, or their specs.

        Raises
        ------
        InputError
            When the open one does not hold for their batch, and there can be no other.
        """
        size = next((leaf.shape[self.axis] for leaf, has in zip(leaves, self.batched, strict=True) if has), None)
        return self.open if size is None else self.graph_of(size)

    def graph_of(self, size: int) -> Graph:
        """The graph for one size of the batch; as `graph_for`."""
        if self.hold(size):
            return self.open
        if size not in self._single:
            self._single[size] = self._recorded(size)
        return self._single[size]

    def _recorded(self, size: int) -> Graph:
        """A graph for one size of the batch, compared with the program itself."""
        broken, origin = self.sizes.broken(size), self._origin
        what = f"a batch of {size} needs a recording of its own, for the captured one holds where {broken or 'n > 1'}"
        if origin is None:
            raise InputError(f"{what}: call it with such a batch once where it was captured, and send it then")
        if not origin.same_mode:
            raise InputError(
                f"{what}, and the module is not in the mode that it was captured in: call train() or eval()"
            )
        leaves = self.drawn(size)
        if sum(graph is not self.open for graph in self._single.values()) >= SINGLE:
            raise InputError(f"{what}, and {SINGLE} sizes have one: give batches of fewer sizes")
        if self.unlike(self.open, self.drawn(self.sizes.recorded)):
            raise InputError(f"{what}, and the program is not what it was when it was captured: capture it again")
        try:
            graph = origin.record(leaves, self.parameters)
            _require_known(graph.calls)
        except InputError as error:
            raise InputError(f"{what}, and there can be none: {error}") from None
        if (draws(graph), [name for name, _ in graph.state]) != (self.draws, [name for name, _ in self.open.state]):
            raise InputError(
                f"{what}, and it draws or changes other things than the captured one: capture it by itself"
            )
        unlike = self.unlike(graph, leaves)
        if unlike:
            raise InputError(f"{what}, and that is not right: {unlike}")
        return graph

    # --- against the program itself -----------------------------------------------------------------------------------
    def require_alike(self) -> None:
        """Compare with the program itself on the example, and on a second size of the batch where conditions are set.

        Of batches of none and of one PyTorch takes no account: whether the open graph does for them is tried.

        Raises
        ------
        InputError
            When they are not alike.
        """
        unlike = self.unlike(self.open, self.example)
        if not unlike and self.sizes.conditions:
            recorded = self.sizes.recorded
            other = next(filter(self.hold, range(recorded + 1, 4 * recorded + 1)), None)
            unlike = self.unlike(self.open, self.drawn(other)) if other else ""
        if unlike:
            raise InputError(unlike)
        if not any(self.batched) or self.draws or _orders(self.open):
            return  # what is drawn, and places, cannot be compared
        for size in (0, 1):
            if self.sizes.broken(size) is None and not self.unlike(self.open, self.drawn(size)):
                self._single[size] = self.open

    def drawn(self, size: int) -> list[Any]:
        """Leaves like the example's, with a batch of some size."""
        random, leaves = np.random.default_rng(0), []
        for leaf, has in zip(self.example, self.batched, strict=True):
            tensor = isinstance(leaf, np.ndarray)
            leaves.append(drawn(leaf, self.axis if has else None, size, random) if tensor else leaf)
        return leaves

    def unlike(self, graph: Graph, leaves: Sequence[Any]) -> str:
        """How what a graph gives is not what the program itself gives; nothing where both are alike.

        Where random numbers are drawn, shapes alone can be compared.
        """
        try:
            found = self.compute(leaves, self.parameters, np.zeros(2, np.uint64) if self.draws else None, graph=graph)
            wanted = self._origin.eager(leaves, self.parameters) if self._origin is not None else ()
        except InputError as error:
            return str(error)
        return difference(found, wanted, values=not self.draws, places=not _orders(graph))

    # --- programs -----------------------------------------------------------------------------------------------------
    def traced(self, leaves: Sequence[Any]) -> Traced:
        """The program for arguments of some shapes."""
        specs = tuple(leaf if isinstance(leaf, ArraySpec) else None for leaf in leaves)
        found = self._programs.pop(specs, None) or self._trace(self.graph_for(leaves), specs)
        self._programs[specs] = found
        if len(self._programs) > KEPT:
            self._programs.popitem(last=False)
        return found

    def _trace(self, graph: Graph, specs: Sequence[Any]) -> Traced:
        arrays = list(self.reads.values())
        key = [ArraySpec((2,), "uint64")] if self.draws else []

        def evaluated(route: Any, given: list[Any], known: list[Any]) -> Any:
            count = len(specs)
            named = dict(zip(self.reads, given[count : count + len(arrays)], strict=True))
            return evaluate(graph, given[:count], named, given[-1] if key else None)

        try:
            return record(evaluated, [*specs, *arrays, *key], ())
        except NotTraceable as error:
            raise InputError(str(error)) from error

    def sources(
        self, values: Sequence[Any], arrays: Mapping[str, Any], key: Any, graph: Graph | None = None
    ) -> tuple[Traced, list[Array]]:
        """The program for some arguments, and its inputs."""
        specs = [spec_of(value) if tensor else None for tensor, value in zip(self._tensors, values, strict=True)]
        traced = self.traced(specs) if graph is None else self._trace(graph, specs)
        operands = [value for tensor, value in zip(self._tensors, values, strict=True) if tensor]
        operands += list(arrays.values())
        if key is not None:
            operands.append(key)
        return traced, [operands[where] if kind == "operand" else where for kind, where in traced.slots]

    def evaluate(self, leaves: Sequence[Any], arrays: Mapping[str, Any], key: Any) -> list[Any]:
        """As `compute`, on tracers."""
        return evaluate(self.graph_for(leaves), leaves, arrays, key)

    def compute(
        self,
        values: Sequence[Any],
        arrays: Mapping[str, Any],
        key: Any,
        backend: Backend | None = None,
        graph: Graph | None = None,
    ) -> list[Any]:
        """The leaves of the result, then the new state, of leaves of the arguments; NumPy's arrays all."""
        traced, sources = self.sources(values, arrays, key, graph)
        found = execute(traced.program, sources, backend=backend) if traced.program is not None else sources
        return [found[each.index] if isinstance(each, Leaf) else each for each in traced.tree]


# --- a graph in the catalogue's operators -----------------------------------------------------------------------------
def draws(graph: Graph) -> bool:
    """Whether a graph draws random numbers."""
    return any(call.target in DRAWING for call in graph.calls)


def _orders(graph: Graph) -> bool:
    return any(re.match(ORDERS, call.target) for call in graph.calls)


def _require_known(calls: Sequence[Call]) -> None:
    for call in calls:
        if call.target.startswith("operator."):
            name = call.target.removeprefix("operator.")
            known = name == "getitem" or name in NUMBERS
        else:
            known = call.target in LOWERINGS
        if not known:
            where = f", which {call.where} comes to" if call.where else ""
            raise InputError(f"the catalogue has no operator for {call.target}{where}")


def evaluate(graph: Graph, leaves: Sequence[Any], arrays: Mapping[str, Any], key: Any) -> list[Any]:
    """Record a graph on tracers; the leaves of the result, then the new state."""
    values: dict[str, Any] = {}
    for slot in graph.slots:
        match slot.kind:
            case "leaf":
                values[slot.name] = leaves[slot.index]
            case "array":
                values[slot.name] = arrays[slot.target]
            case _:
                values[slot.name] = slot.value
    token = drawing.set(Streams(key))
    try:
        for call in graph.calls:
            values[call.name] = _apply(call, values)
    finally:
        drawing.reset(token)
    state = [ref for _, ref in graph.state]
    return [values[each.name] if isinstance(each, Ref) else each for each in (*graph.outputs, *state)]


def _apply(call: Call, values: Mapping[str, Any]) -> Any:
    def filled(value: Any) -> Any:
        if isinstance(value, Ref):
            return values[value.name]
        if isinstance(value, (tuple, list)):
            return [filled(each) for each in value]
        return value

    args, kwargs = [filled(each) for each in call.args], {name: filled(each) for name, each in call.kwargs.items()}
    if call.target == "operator.getitem":
        return operator.getitem(*args)
    if call.target.startswith("operator."):
        return NUMBERS[call.target.removeprefix("operator.")](*args, **kwargs)
    try:
        found = LOWERINGS[call.target](call, *args, **kwargs)
    except NotTraceable as error:
        where = f", at {call.where}" if call.where else ""
        raise NotTraceable(f"{call.target}: {error}{where}") from error
    dtypes = iter(call.dtypes)
    typed = [
        astype(each, next(dtypes, each.dtype)) if isinstance(each, Tracer) else each
        for each in (found if isinstance(found, tuple) else (found,))
    ]
    return tuple(typed) if isinstance(found, tuple) else typed[0]

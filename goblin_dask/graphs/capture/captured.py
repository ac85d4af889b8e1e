"""`capture`: a PyTorch module or function becomes a `CapturedProgram`, which runs wherever arrays do.

A captured program is data: operators of ATen's, translated to the catalogue's for the shapes that it is called with. It
needs PyTorch to be made and to take or return tensors, not to compute.
"""

from __future__ import annotations

import math
import operator
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from goblin_dask.errors import InputError, NotTraceable
from goblin_dask.graphs.backends.base import Backend
from goblin_dask.graphs.capture.aten import LOWERINGS
from goblin_dask.graphs.capture.aten.base import Call, Ref, Streams, drawing
from goblin_dask.graphs.capture.aten.creation import DRAWING
from goblin_dask.graphs.capture.aten.elementwise import NUMBERS
from goblin_dask.graphs.capture.pytree import Leaf
from goblin_dask.graphs.execute import execute
from goblin_dask.graphs.program import Program
from goblin_dask.graphs.trace import Traced, record
from goblin_dask.graphs.tracer.array import Tracer
from goblin_dask.graphs.tracer.casting import astype
from goblin_dask.graphs.tracer.recorder import spec_of
from goblin_dask.messages import ArraySpec

KEPT = 16
"""Programs that are kept, one for each set of shapes that was called last."""

ORDERS = r"aten\.(sort|topk|argsort|argmax|argmin|max|min)\."
"""Operators among whose results are places of equal elements, of which PyTorch takes any."""
ALIKE = {"float16": 3e-2, "bfloat16": 1e-1, "float32": 1e-3, "complex64": 1e-3}
"""Relative distance, as root mean square, of a captured program from the module itself; 1e-9 in double precision."""


def capture(
    function: Callable[..., Any],
    *args: Any,
    dynamic_batch: bool = True,
    batch_axis: int = 0,
    **kwargs: Any,
) -> CapturedProgram:
    """Capture a PyTorch module or function.

    The module's mode is captured with it: a module that is to be used both for training and for evaluation is captured
    twice. Its parameters and buffers are copied.

    Parameters
    ----------
    function : torch.nn.Module or callable
    *args, **kwargs
        An example of its arguments: tensors, numbers, and lists, tuples and dicts of them. Of tensors, shapes and
        dtypes count; everything else is part of the program.
    dynamic_batch : bool
        Whether the size of the batch stays open: the length along `batch_axis` of the first tensor, and of all others
        that have the same length there.
    batch_axis : int
        Axis of the batch.

    Returns
    -------
    CapturedProgram

    Raises
    ------
    InputError
        When PyTorch cannot record it, when it holds for one size of the batch only, when the catalogue has no operator
        for something in it (with the line of the module), or when the captured program does not give what the module
        gives on the example.

    Examples
    --------
    >>> import torch
    >>> net = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.GELU()).eval()
    >>> captured = capture(net, torch.zeros(2, 8))
    >>> captured(np.zeros((5, 8), "float32")).shape
    (5, 4)
    """
    try:
        from goblin_dask.graphs.capture import torch_internals
    except ImportError as error:
        raise InputError("there is no PyTorch here: install goblin-dask[torch]") from error
    leaves, structure = torch_internals.flatten((args, kwargs))
    tensors = [number for number, leaf in enumerate(leaves) if torch_internals.is_tensor(leaf)]
    batched = _batched(leaves, tensors, batch_axis) if dynamic_batch else [False] * len(leaves)
    graph = torch_internals.export(function, structure, leaves, batched, batch_axis)
    captured = CapturedProgram(graph, structure, leaves, batched, batch_axis)
    captured._check(function, leaves)
    return captured


def _batched(leaves: Sequence[Any], tensors: Sequence[int], axis: int) -> list[bool]:
    """Which leaves have the batch."""
    ranks = [leaves[number].ndim for number in tensors]
    first = next((number for number, rank in zip(tensors, ranks, strict=True) if rank > axis), None)
    if first is None:
        raise InputError(f"no argument is a tensor with an axis {axis} for the batch: capture with dynamic_batch=False")
    size = leaves[first].shape[axis]
    if not size:
        raise InputError("the example has a batch of no elements; one or more are needed")
    return [number in tensors and leaf.ndim > axis and leaf.shape[axis] == size for number, leaf in enumerate(leaves)]


class CapturedProgram:
    """A captured module or function; made by `capture`.

    Attributes
    ----------
    parameters : dict of str to numpy.ndarray
        Parameters, buffers and constants that it reads, by name; what the module uses twice is there once.
    state : tuple of str
        Buffers that it changes, and arguments, as ``argument 0``. Then a call returns a pair: the result, and a dict of
        what they become. Nothing is written into the module, nor kept here.
    draws : bool
        Whether it draws random numbers (dropout), and so needs a ``key``.
    batched : tuple of bool
        Which leaves of the arguments have the batch, along ``batch_axis``.
    """

    def __init__(self, graph: Any, structure: Any, leaves: Sequence[Any], batched: Sequence[bool], axis: int):
        from goblin_dask.graphs.capture.torch_internals import dtype_name, is_tensor

        self._graph, self._structure, self.batch_axis = graph, structure, axis
        self._leaves = [ArraySpec(tuple(x.shape), dtype_name(x.dtype)) if is_tensor(x) else x for x in leaves]
        self.batched = tuple(batched)
        self.parameters: dict[str, np.ndarray[Any, Any]] = graph.arrays
        self.state = tuple(name for name, _ in graph.state)
        self.draws = any(call.target in DRAWING for call in graph.calls)
        self._programs: OrderedDict[Any, Traced] = OrderedDict()
        self._orders = any(re.match(ORDERS, call.target) for call in graph.calls)
        _require_known(graph.calls)

    def __repr__(self) -> str:
        shapes = ", ".join(
            f"{leaf.dtype}{self._open_shape(leaf, batched)}".replace("'", "")
            for leaf, batched in zip(self._leaves, self.batched, strict=True)
            if isinstance(leaf, ArraySpec)
        )
        size = sum(array.size for array in self.parameters.values())
        return f"<CapturedProgram of {shapes}; {size:,} parameters, {len(self._graph.calls)} operators>"

    def _open_shape(self, leaf: ArraySpec, batched: bool) -> tuple[Any, ...]:
        return tuple("batch" if batched and i == self.batch_axis else n for i, n in enumerate(leaf.shape))

    # --- calling ----------------------------------------------------------------------------------------------------
    def __call__(
        self,
        *args: Any,
        key: int | None = None,
        state: Mapping[str, Any] | None = None,
        backend: Backend | None = None,
        **kwargs: Any,
    ) -> Any:
        """Compute, as the module would.

        Parameters
        ----------
        *args, **kwargs
            As in the example, with any size of the batch. Tensors give tensors, NumPy arrays NumPy arrays; Dask arrays
            give Dask arrays, each block along the batch being a batch of its own.
        key : int, optional
            Decides on the random numbers, where it draws some.
        state : mapping of str to array, optional
            Buffers, or other parameters, in the place of those that were captured.
        backend : Backend, optional
            Where it is computed here; NumPy by default. Dask arrays are computed where their graph is.

        Returns
        -------
        object
            As the module's; a pair of it and of the new state where there is `state`.

        Raises
        ------
        InputError
            For arguments unlike the example's.
        """
        from goblin_dask.graphs.capture import torch_internals

        leaves, structure = torch_internals.flatten((args, kwargs))
        if structure != self._structure:
            raise InputError(f"the arguments are not built like the example's: {structure}, captured {self._structure}")
        tensors = any(map(torch_internals.is_tensor, leaves)) or not any(hasattr(leaf, "dtype") for leaf in leaves)
        values = [torch_internals.to_numpy(x) if torch_internals.is_tensor(x) else x for x in leaves]
        self._check_leaves(values)
        arrays = self._arrays(state)
        if any(_is_dask(value) for value in values):
            flat = self._over_dask(values, arrays, key)
        else:
            flat = self.compute(values, arrays, self._key(key), backend)
            if tensors:
                flat = [torch_internals.to_tensor(x) if isinstance(x, np.ndarray) else x for x in flat]
        count = len(self._graph.outputs)
        result = torch_internals.unflatten(flat[:count], self._graph.structure)
        return (result, dict(zip(self.state, flat[count:], strict=True))) if self.state else result

    def bound(self, *args: Any, key: int | None = None, **kwargs: Any) -> tuple[Program, list[np.ndarray[Any, Any]]]:
        """The program for some arguments, as in a call, and its inputs: for `execute`, or for ``lab.run``.

        Raises
        ------
        InputError
            For arguments unlike the example's.
        """
        from goblin_dask.graphs.capture import torch_internals

        leaves, _ = torch_internals.flatten((args, kwargs))
        values = [torch_internals.to_numpy(x) if torch_internals.is_tensor(x) else x for x in leaves]
        self._check_leaves(values)
        traced, sources = self._sources(values, self.parameters, self._key(key))
        return _computing(traced), sources

    def program(self, batch: int | None = None) -> Program:
        """The program for one size of the batch; the example's by default. `bound` gives its inputs as well."""
        leaves = [self._sized(leaf, b, batch) for leaf, b in zip(self._leaves, self.batched, strict=True)]
        return _computing(self._traced(leaves))

    def specs_of_results(self, batch: int) -> list[ArraySpec | None]:
        """Shapes and dtypes of the leaves of the result, for a size of the batch; None for what is no array."""
        leaves = [self._sized(leaf, b, batch) for leaf, b in zip(self._leaves, self.batched, strict=True)]
        specs = self._traced(leaves).specs[: len(self._graph.outputs)]
        return [spec if isinstance(spec, ArraySpec) else None for spec in specs]

    def _sized(self, leaf: Any, batched: bool, batch: int | None) -> Any:
        if not batched or batch is None:
            return leaf
        return ArraySpec((*leaf.shape[: self.batch_axis], batch, *leaf.shape[self.batch_axis + 1 :]), leaf.dtype)

    def _key(self, key: int | None) -> np.ndarray[Any, Any] | None:
        if not self.draws:
            return None
        if key is None:
            raise InputError("this program draws random numbers: give a key=, an integer that decides on them")
        return np.array([key % 2**64, 0], np.uint64)

    def _arrays(self, state: Mapping[str, Any] | None) -> dict[str, Any]:
        if not state:
            return self.parameters
        from goblin_dask.graphs.capture.torch_internals import is_tensor, to_numpy

        arrays = dict(self.parameters)
        for name, value in state.items():
            if name not in arrays:
                raise InputError(f"there is no parameter or buffer {name!r}; there are {', '.join(arrays) or 'none'}")
            array = to_numpy(value) if is_tensor(value) else np.asarray(value)
            if spec_of(array) != spec_of(arrays[name]):
                raise InputError(f"{name} is {spec_of(array)}, captured was {spec_of(arrays[name])}")
            arrays[name] = array
        return arrays

    def _check_leaves(self, values: Sequence[Any]) -> None:
        batch: Any = None
        for number, (leaf, value, batched) in enumerate(zip(self._leaves, values, self.batched, strict=True)):
            if not isinstance(leaf, ArraySpec):
                if value is not leaf and value != leaf:
                    raise InputError(
                        f"argument {number} is {value!r}; {leaf!r} was captured, and is part of the program"
                    )
                continue
            if not hasattr(value, "dtype") or not hasattr(value, "shape"):
                raise InputError(f"argument {number} is a {type(value).__name__}, a tensor or array was captured")
            axis = self.batch_axis if batched else -1
            fits = len(value.shape) == len(leaf.shape) and all(
                i == axis or a == b for i, (a, b) in enumerate(zip(value.shape, leaf.shape, strict=True))
            )
            if not fits or value.dtype != np.dtype(leaf.dtype):
                wanted = tuple("batch" if i == axis else n for i, n in enumerate(leaf.shape))
                raise InputError(
                    f"argument {number} is {value.dtype} {value.shape}, captured was {leaf.dtype} {wanted}"
                )
            if batched:
                size = value.shape[axis]
                if batch is not None and size != batch and not (math.isnan(size) or math.isnan(batch)):
                    raise InputError(f"argument {number} has a batch of {size}, the arguments before it one of {batch}")
                batch = size

    # --- recording ----------------------------------------------------------------------------------------------------
    def _traced(self, leaves: Sequence[Any]) -> Traced:
        specs = tuple(leaf if isinstance(leaf, ArraySpec) else None for leaf in leaves)
        found = self._programs.pop(specs, None)
        if found is None:
            arrays = [spec_of(array) for array in self.parameters.values()]
            key = [ArraySpec((2,), "uint64")] if self.draws else []

            def evaluate(route: Any, given: list[Any], known: list[Any]) -> Any:
                count = len(leaves)
                named = dict(zip(self.parameters, given[count : count + len(arrays)], strict=True))
                return self.evaluate(given[:count], named, given[-1] if key else None)

            operands = [leaf if isinstance(leaf, ArraySpec) else None for leaf in leaves]
            try:
                found = record(evaluate, [*operands, *arrays, *key], ())
            except NotTraceable as error:
                raise InputError(str(error)) from error
        self._programs[specs] = found
        if len(self._programs) > KEPT:
            self._programs.popitem(last=False)
        return found

    def evaluate(self, leaves: Sequence[Any], arrays: Mapping[str, Any], key: Any) -> list[Any]:
        """Record the graph on tracers; the leaves of the result, then the new state."""
        values: dict[str, Any] = {}
        for slot in self._graph.slots:
            match slot.kind:
                case "leaf":
                    values[slot.name] = leaves[slot.index]
                case "array":
                    values[slot.name] = arrays[slot.target]
                case _:
                    values[slot.name] = slot.value
        token = drawing.set(Streams(key))
        try:
            for call in self._graph.calls:
                values[call.name] = _apply(call, values)
        finally:
            drawing.reset(token)
        state = [ref for _, ref in self._graph.state]
        return [values[each.name] if isinstance(each, Ref) else each for each in (*self._graph.outputs, *state)]

    def compute(
        self, values: Sequence[Any], arrays: Mapping[str, Any], key: Any, backend: Backend | None = None
    ) -> list[Any]:
        """The leaves of the result, then the new state, of leaves of the arguments; NumPy's arrays all."""
        traced, sources = self._sources(values, arrays, key)
        found = execute(traced.program, sources, backend=backend) if traced.program is not None else sources
        return [found[each.index] if isinstance(each, Leaf) else each for each in traced.tree]

    def _sources(
        self, values: Sequence[Any], arrays: Mapping[str, Any], key: Any
    ) -> tuple[Traced, list[np.ndarray[Any, Any]]]:
        """The recording for some arguments, and its inputs."""
        specs = [spec_of(v) if isinstance(leaf, ArraySpec) else v for leaf, v in zip(self._leaves, values, strict=True)]
        traced = self._traced(specs)
        operands = [v for leaf, v in zip(self._leaves, values, strict=True) if isinstance(leaf, ArraySpec)]
        operands += list(arrays.values())
        if key is not None:
            operands.append(key)
        return traced, [operands[where] if kind == "operand" else where for kind, where in traced.slots]

    # --- Dask ---------------------------------------------------------------------------------------------------------
    def _over_dask(self, values: Sequence[Any], arrays: Mapping[str, Any], key: int | None) -> list[Any]:
        """Block by block along the batch."""
        from goblin_dask.graphs.capture.blocks import over_blocks

        if self.state or self.draws:
            what = "changes state" if self.state else "draws random numbers"
            raise InputError(f"this program {what}, which blocks of a Dask array cannot share: call it batch by batch")
        return over_blocks(self, values, arrays)

    # --- the check of a capture ---------------------------------------------------------------------------------------
    def _check(self, function: Callable[..., Any], leaves: Sequence[Any]) -> None:
        """Compare with the module on the example; where random numbers are drawn, shapes alone can be."""
        from goblin_dask.graphs.capture import torch_internals

        values = [torch_internals.to_numpy(x) if torch_internals.is_tensor(x) else x for x in leaves]
        found = self.compute(values, self.parameters, self._key(0))
        wanted = torch_internals.eager(function, self._structure, leaves)
        for number, (a, b) in enumerate(zip(found, wanted, strict=False)):
            if not torch_internals.is_tensor(b):
                continue
            b = torch_internals.to_numpy(b)
            if not isinstance(a, np.ndarray) or (a.shape, a.dtype) != (b.shape, b.dtype):
                raise InputError(f"the captured program's result {number} is not of the module's shape and dtype")
            if not self.draws and not (self._orders and b.dtype.kind in "iu") and not _alike(a, b):
                raise InputError(
                    f"the captured program's result {number} is not what the module gives on the example: it does "
                    "something that cannot be recorded, such as to depend on numbers outside of its arguments"
                )


def _computing(traced: Traced) -> Program:
    if traced.program is None:
        raise InputError("nothing is computed: every result is an argument as it is")
    return traced.program


def _alike(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> bool:
    if a.dtype.kind in "biu":
        return bool(np.mean(a != b) <= 0.01) if a.size else True  # positions of equal maxima, rounded numbers
    wide = np.complex128 if a.dtype.kind == "c" else np.float64
    a, b, tolerance = a.astype(wide), b.astype(wide), ALIKE.get(a.dtype.name, 1e-9)
    with np.errstate(all="ignore"):
        finite = np.isfinite(b)
        same = (a == b) | (np.isnan(a) & np.isnan(b))
        difference, size = np.where(finite, np.abs(a - b), 0), np.where(finite, np.abs(b), 0)
    apart = float(np.sqrt(np.mean(np.square(difference)))) if a.size else 0.0
    scale = float(np.sqrt(np.mean(np.square(size)))) if a.size else 0.0
    return bool(np.mean(same | finite) >= 0.99 if a.size else True) and apart <= tolerance * max(scale, 1e-30)


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


def _is_dask(value: Any) -> bool:
    return hasattr(value, "__dask_graph__")

"""`capture`: a PyTorch module or function becomes a `CapturedProgram`, which runs wherever arrays do.

A captured program is data: operators of ATen's, translated to the catalogue's for the shapes that it is called with. It
needs PyTorch to be made and to take or return tensors, not to compute.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from goblin_dask.errors import InputError
from goblin_dask.graphs.backends.base import Backend
from goblin_dask.graphs.capture.pytree import is_array
from goblin_dask.graphs.capture.recordings import Recordings
from goblin_dask.graphs.program import Program
from goblin_dask.graphs.trace import Traced
from goblin_dask.graphs.tracer.recorder import spec_of
from goblin_dask.messages import ArraySpec


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

    PyTorch records a program as it runs for the example, with the size of the batch open. Where the program takes
    another course for another size (``if x.shape[0] > 3``), it is recorded anew for that size, and compared with the
    module there, when it is first called with it; so the module is kept.

    Parameters
    ----------
    function : torch.nn.Module or callable
    *args, **kwargs
        An example of its arguments: tensors or NumPy arrays, numbers, and lists, tuples and dicts of them. Of tensors,
        shapes and dtypes count; everything else is part of the program.
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
        from goblin_dask.graphs.capture.origin import Origin
    except ImportError as error:
        raise InputError("there is no PyTorch here: install goblin-dask[torch]") from error
    if batch_axis < 0:
        raise InputError(f"batch_axis is {batch_axis}; axes are counted from the first, which is 0")
    given, structure = torch_internals.flatten((args, kwargs))
    leaves = [_tensor(number, leaf) for number, leaf in enumerate(given)]
    tensors = [number for number, leaf in enumerate(leaves) if torch_internals.is_tensor(leaf)]
    batched = _batched(leaves, tensors, batch_axis) if dynamic_batch else [False] * len(leaves)
    examples = torch_internals.examples(leaves, batched, batch_axis)
    graph = torch_internals.export(function, structure, examples, batched, batch_axis)
    arrays = [torch_internals.to_numpy(x) if torch_internals.is_tensor(x) else x for x in examples]
    recordings = Recordings(graph, Origin(function, structure, leaves), arrays, batched, batch_axis)
    recordings.require_alike()
    return CapturedProgram(recordings, structure, leaves)


def _tensor(number: int, leaf: Any) -> Any:
    """A leaf of the example; NumPy's arrays as tensors."""
    if not isinstance(leaf, np.ndarray):
        return leaf
    if not is_array(leaf):
        raise InputError(f"argument {number} is an array of dtype {leaf.dtype}, of which there are no tensors")
    from goblin_dask.graphs.capture.torch_internals import to_tensor

    return to_tensor(leaf)


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

    def __init__(self, recordings: Recordings, structure: Any, leaves: Sequence[Any]):
        from goblin_dask.graphs.capture.torch_internals import dtype_name, is_tensor

        self.recordings, self._structure = recordings, structure
        self._leaves = [ArraySpec(tuple(x.shape), dtype_name(x.dtype)) if is_tensor(x) else x for x in leaves]
        self.batched, self.batch_axis = recordings.batched, recordings.axis
        self.parameters = recordings.parameters
        self.state = tuple(name for name, _ in recordings.open.state)
        self.draws = recordings.draws

    def __repr__(self) -> str:
        shapes = ", ".join(
            f"{leaf.dtype}{self._open_shape(leaf, batched)}".replace("'", "")
            for leaf, batched in zip(self._leaves, self.batched, strict=True)
            if isinstance(leaf, ArraySpec)
        )
        size = sum(array.size for array in self.parameters.values())
        return f"<CapturedProgram of {shapes}; {size:,} parameters, {len(self.recordings.open.calls)} operators>"

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
            give Dask arrays, each block along the batch being a batch of its own. A program whose elements of the batch
            depend on each other (``x.softmax(0)``) is refused there, where there are several blocks.
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
            For arguments unlike the example's, and for a size of the batch of which there can be no recording.
        """
        from goblin_dask.graphs.capture import torch_internals

        leaves = self._given(args, kwargs)
        tensors = any(map(torch_internals.is_tensor, leaves)) or not any(hasattr(leaf, "dtype") for leaf in leaves)
        values = [torch_internals.to_numpy(x) if torch_internals.is_tensor(x) else x for x in leaves]
        self._check_leaves(values)
        arrays = self._arrays(state)
        if any(_is_dask(value) for value in values):
            graph, flat = self.recordings.open, self._over_dask(values, arrays, key)
        else:
            graph = self.recordings.graph_for(values)
            flat = self.recordings.compute(values, arrays, self._key(key), backend)
            if tensors:
                flat = [torch_internals.to_tensor(x) if isinstance(x, np.ndarray) else x for x in flat]
        count = len(graph.outputs)
        result = torch_internals.unflatten(flat[:count], graph.structure)
        return (result, dict(zip(self.state, flat[count:], strict=True))) if self.state else result

    def bound(self, *args: Any, key: int | None = None, **kwargs: Any) -> tuple[Program, list[np.ndarray[Any, Any]]]:
        """The program for some arguments, as in a call, and its inputs: for `execute`, or for ``lab.run``.

        Arguments may be Dask arrays here, of any chunks: it is one program for the whole batch, whose operators are cut
        into blocks, so that elements of the batch may depend on each other.

        Raises
        ------
        InputError
            For arguments unlike the example's.
        """
        from goblin_dask.graphs.capture import torch_internals

        leaves = self._given(args, kwargs)
        values = [torch_internals.to_numpy(x) if torch_internals.is_tensor(x) else x for x in leaves]
        self._check_leaves(values)
        if any(math.isnan(length) for value in values for length in getattr(value, "shape", ())):
            raise InputError("an argument is a Dask array of unknown shape: call its compute_chunk_sizes first")
        traced, sources = self.recordings.sources(values, self.parameters, self._key(key))
        return _computing(traced), sources

    def program(self, batch: int | None = None) -> Program:
        """The program for one size of the batch; the example's by default. `bound` gives its inputs as well."""
        leaves = [self._sized(leaf, b, batch) for leaf, b in zip(self._leaves, self.batched, strict=True)]
        return _computing(self.recordings.traced(leaves))

    def specs_of_results(self, batch: int) -> list[ArraySpec | None]:
        """Shapes and dtypes of the leaves of the result, for a size of the batch; None for what is no array."""
        leaves = [self._sized(leaf, b, batch) for leaf, b in zip(self._leaves, self.batched, strict=True)]
        specs = self.recordings.traced(leaves).specs[: len(self.recordings.graph_for(leaves).outputs)]
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

    def _given(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """The leaves of arguments that are built like the example's."""
        from goblin_dask.graphs.capture.torch_internals import flatten, unflatten

        leaves, structure = flatten((args, kwargs))
        if structure == self._structure:
            return leaves
        positional, named = unflatten(self._leaves, self._structure)
        if len(args) != len(positional):
            raise InputError(f"{_count(len(args), 'argument')} given, {len(positional)} captured")
        if kwargs.keys() != named.keys():
            captured = ", ".join(named) or "none"
            raise InputError(f"arguments by name are {', '.join(kwargs) or 'none'}; captured were {captured}")
        for name, value in (*enumerate(args), *kwargs.items()):
            example = positional[name] if isinstance(name, int) else named[name]
            if flatten(value)[1] != flatten(example)[1]:
                what = "a tensor" if isinstance(example, ArraySpec) else f"another {type(example).__name__}"
                raise InputError(f"argument {name} is a {type(value).__name__}; {what} was captured")
        raise InputError("the arguments by name are not in the order of the example's")

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

    # --- Dask ---------------------------------------------------------------------------------------------------------
    def _over_dask(self, values: Sequence[Any], arrays: Mapping[str, Any], key: int | None) -> list[Any]:
        """Block by block along the batch."""
        from goblin_dask.graphs.capture.blocks import over_blocks

        if self.state or self.draws:
            what = "changes state" if self.state else "draws random numbers"
            raise InputError(f"this program {what}, which blocks of a Dask array cannot share: call it batch by batch")
        return over_blocks(self, values, arrays)


def _computing(traced: Traced) -> Program:
    if traced.program is None:
        raise InputError("nothing is computed: every result is an argument as it is")
    return traced.program


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _is_dask(value: Any) -> bool:
    return hasattr(value, "__dask_graph__")

"""`capture_gradients`: a module and its loss become one program, from parameters and a micro-batch to gradients."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from goblin_dask.errors import InputError
from goblin_dask.graphs.backends.base import Backend
from goblin_dask.graphs.capture.captured import CapturedProgram
from goblin_dask.graphs.capture.folds import taken_out
from goblin_dask.graphs.capture.recordings import Recordings
from goblin_dask.graphs.program import Program

Array = np.ndarray[Any, Any]

ALIKE = {"float16": 5e-2, "bfloat16": 2e-1, "float32": 2e-3, "float64": 1e-8}
"""Largest distance of a gradient from eager's, over the largest of the gradient's elements."""
FLOOR = 1e-3
"""A gradient's largest element is taken for at least this share of the largest of all: what is zero but for rounding,
such as that of a bias before a batch norm, is compared with that."""


@dataclass(frozen=True)
class Gradients:
    """What a micro-batch gives."""

    total: Array
    """Sum of the loss; a scalar."""
    count: Array
    """What the sum is divided by to be the mean; a scalar. Zero where no target counts."""
    gradients: dict[str, Array]
    """Of `total`, by parameter."""
    state: dict[str, Array]
    """Of each buffer that changes: what it becomes, or, where there is a `Fold`, what the micro-batch contributes."""


def capture_gradients(
    module: Any, loss: Callable[..., Any], inputs: Any, target: Any, *, check: bool = True
) -> CapturedGradients:
    """Capture loss and gradients of a module for micro-batches of one shape.

    The module is captured in its mode, and not written to.

    Parameters
    ----------
    module : torch.nn.Module
    loss : callable
        Of the module's result and the target; see `goblin_dask.graphs.capture.losses.Summed` for how it is counted.
    inputs : tensor, or tuple of its arguments
    target : tensor, or tree of tensors
        An example of a micro-batch.
    check : bool
        Compare with autograd on the example, random numbers alike. Turn it off only for a second shape of a module
        whose first one was compared.

    Raises
    ------
    InputError
        When PyTorch cannot record it, when something in it has no operator in the catalogue, draws random numbers
        that no key decides on, or when its gradients are not what autograd gives on the example.

    Examples
    --------
    >>> import torch
    >>> captured = capture_gradients(torch.nn.Linear(3, 2), torch.nn.functional.mse_loss,
    ...                              torch.zeros(4, 3), torch.ones(4, 2))
    >>> captured.gradients
    ('weight', 'bias')
    """
    try:
        from goblin_dask.graphs.capture import torch_internals, torch_joint_internals
        from goblin_dask.graphs.capture.losses import Summed
    except ImportError as error:
        raise InputError("there is no PyTorch here: install goblin-dask[torch]") from error
    summed = Summed(loss)
    pair = (inputs if isinstance(inputs, tuple) else (inputs,), target)
    leaves, structure = torch_internals.flatten(pair)
    if not any(map(torch_internals.is_tensor, leaves)):
        raise InputError("the example has no tensor: tensors of inputs and targets are needed")
    joint = torch_joint_internals.joint(module, summed, structure, leaves)
    if not joint.gradients:
        raise InputError("the loss depends on no parameter that requires a gradient")
    captured = CapturedGradients(joint, structure, leaves)
    if check:
        key = np.array([0, 0], np.uint64) if captured.draws else None
        eager = torch_joint_internals.eager(module, summed, structure, leaves, key)
        _require_alike(captured, captured(*pair, key=0), eager)
    return captured


class CapturedGradients:
    """Loss and gradients of a module, for micro-batches of one shape; made by `capture_gradients`.

    Attributes
    ----------
    parameters : dict of str to numpy.ndarray
        All arrays that the program reads but the micro-batch: copies of parameters, buffers and constants.
    trained : dict of str to str
        By name of each parameter of the module that requires a gradient, the name that it has here: what shares memory
        has one.
    gradients : tuple of str
        Those of which there is a gradient, in the order of the results.
    state : tuple of str
        Buffers that the program changes.
    folds : dict of str to Fold
        How contributions to buffers are put together. Of buffers in `state` that are not among them, the new value
        depends on the old one, and micro-batches have to hand it on from one to the next.
    draws : bool
        Whether it needs a key.
    """

    def __init__(self, joint: Any, structure: Any, leaves: Any):
        from goblin_dask.graphs.capture.torch_internals import is_tensor, to_numpy

        graph = joint.graph
        slots = {slot.name: slot.target for slot in graph.slots if slot.kind == "array"}
        state = dict(graph.state)
        calls, self.folds = taken_out(graph.calls, slots, state, graph.arrays)
        read = {slot.target for slot in graph.slots if slot.kind == "array"}
        arrays = {name: array for name, array in graph.arrays.items() if name in read}
        graph = dataclasses.replace(graph, calls=tuple(calls), arrays=arrays)
        example = [to_numpy(leaf) if is_tensor(leaf) else leaf for leaf in leaves]
        self._recordings = Recordings(graph, None, example, [False] * len(leaves), 0)
        self._captured = CapturedProgram(self._recordings, structure, leaves)
        self.parameters: dict[str, Array] = arrays
        self.trained: dict[str, str] = joint.trained
        self.gradients: tuple[str, ...] = joint.gradients
        self.state = self._captured.state
        self.draws = self._captured.draws

    def __repr__(self) -> str:
        return f"<CapturedGradients of {len(self.gradients)} parameters, {len(self.program().nodes):,} operators>"

    def program(self) -> Program:
        """The program: its results are the sum, the count, the gradients and the state."""
        return self._captured.program()

    def sources(self, leaves: Any, parameters: Mapping[str, Any], key: Any) -> list[Any]:
        """Inputs of the program, in its order, from what `leaves` gives, all of `parameters` and the key, if any.

        Nothing is looked at but shapes and dtypes.
        """
        return self._recordings.sources(leaves, parameters, key)[1]

    def __call__(
        self,
        inputs: Any,
        target: Any,
        *,
        key: int | None = None,
        parameters: Mapping[str, Any] | None = None,
        backend: Backend | None = None,
    ) -> Gradients:
        """Compute it here.

        Parameters
        ----------
        inputs, target
            A micro-batch like the example: tensors or arrays.
        key : int, optional
            Decides on the random numbers, where some are drawn.
        parameters : mapping of str to array, optional
            In the place of those that were captured.
        backend : Backend, optional
            NumPy by default.
        """
        captured = self._captured
        values = self.leaves(inputs, target)
        found = self._recordings.compute(values, captured._arrays(parameters), captured._key(key), backend)
        return self.named([np.asarray(each) for each in found])

    def leaves(self, inputs: Any, target: Any) -> list[Any]:
        """A micro-batch as a list of arrays.

        Raises
        ------
        InputError
            For one unlike the example.
        """
        from goblin_dask.graphs.capture import torch_internals

        pair = (inputs if isinstance(inputs, tuple) else (inputs,), target)
        leaves, structure = torch_internals.flatten(pair)
        if structure != self._captured._structure:
            raise InputError("the micro-batch is not built like the example's")
        values = [torch_internals.to_numpy(x) if torch_internals.is_tensor(x) else x for x in leaves]
        self._captured._check_leaves(values)
        return values

    def named(self, results: list[Any]) -> Gradients:
        """Results of the program by their names."""
        count = len(self.gradients)
        return Gradients(
            results[0],
            results[1],
            dict(zip(self.gradients, results[2 : 2 + count], strict=True)),
            dict(zip(self.state, results[2 + count :], strict=True)),
        )


# --- the check of a capture -------------------------------------------------------------------------------------------
def _require_alike(captured: CapturedGradients, found: Gradients, eager: Any) -> None:
    """Compare with what autograd gives: sum, count, gradients and buffers."""
    from goblin_dask.graphs.capture.torch_internals import to_numpy

    total, count, of_names, buffers = eager
    if not _near(found.count, to_numpy(count), 0.0):
        raise InputError(f"the captured program counts {found.count}, the loss {to_numpy(count)}")
    if not _near(found.total, to_numpy(total), 0.0):
        raise InputError(f"the captured program's loss is {found.total}, the module's {to_numpy(total)}")
    wanted: dict[str, Array] = {}
    for name, gradient in of_names.items():
        known = captured.trained[name]
        array = to_numpy(gradient)
        wanted[known] = wanted[known] + array if known in wanted else array
    if set(wanted) != set(found.gradients):
        names = ", ".join(sorted(set(wanted) ^ set(found.gradients)))
        raise InputError(f"of {names}, either the captured program or autograd alone has a gradient")
    largest = max((float(np.nanmax(np.abs(each), initial=0)) for each in wanted.values()), default=0.0)
    for name, gradient in wanted.items():
        if not _near(found.gradients[name], gradient, FLOOR * largest):
            raise InputError(
                f"the captured program's gradient of {name} is not autograd's on the example: the module does "
                "something that cannot be recorded, such as to depend on numbers outside of its arguments"
            )
    for name, value in found.state.items():
        fold = captured.folds.get(name)
        value = value if fold is None else fold(captured.parameters[name], value)
        if not _near(value, to_numpy(buffers[name]), 0.0):
            raise InputError(f"the buffer {name} does not become what it becomes in the module")


def _near(found: Array, wanted: Array, floor: float) -> bool:
    """Whether they differ by rounding; `floor` is the least that the largest element is taken for."""
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        return False
    wide = np.complex128 if wanted.dtype.kind == "c" else np.float64
    a, b = found.astype(wide), wanted.astype(wide)
    finite = np.isfinite(b)
    if not np.array_equal(a[~finite], b[~finite], equal_nan=True):
        return False
    a, b = a[finite], b[finite]
    scale = max(float(np.max(np.abs(b), initial=0)), floor)
    return bool(np.max(np.abs(a - b), initial=0) <= ALIKE.get(wanted.dtype.name, 1e-8) * scale)

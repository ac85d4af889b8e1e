"""The module or function that was captured: what it gives, and how it is recorded for one size of the batch alone.

It stays in the process that captured it: a captured program that travels leaves it behind.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from goblin_dask.errors import InputError
from goblin_dask.graphs.capture import torch_internals
from goblin_dask.graphs.capture.graph import Graph
from goblin_dask.graphs.tracer.recorder import spec_of

Array = np.ndarray[Any, Any]


class Origin:
    """A module or function; nothing is written into it.

    Parameters
    ----------
    function : torch.nn.Module or callable
    structure, leaves
        Of the example of its arguments, ``(args, kwargs)``.
    """

    def __init__(self, function: Callable[..., Any], structure: Any, leaves: Sequence[Any]):
        self._function, self._structure = function, structure
        self._modes = torch_internals.modes(function)
        self._devices = [leaf.device if torch_internals.is_tensor(leaf) else None for leaf in leaves]

    @property
    def same_mode(self) -> bool:
        """Whether every module is in the mode, of training or of evaluation, in which it was captured."""
        return torch_internals.modes(self._function) == self._modes

    def record(self, leaves: Sequence[Any], parameters: Mapping[str, Array]) -> Graph:
        """The graph for leaves of these shapes alone, reading the parameters that were captured.

        Raises
        ------
        InputError
            When PyTorch cannot record it, or it reads what was not captured.
        """
        none = [False] * len(leaves)
        graph = torch_internals.export(self._function, self._structure, self._tensors(leaves), none, 0)
        own, names = torch_internals.names_of_state(self._function), {}
        for name, array in graph.arrays.items():
            if name in own and name in parameters and spec_of(array) == spec_of(parameters[name]):
                names[name] = name
                continue
            same = (other for other, known in parameters.items() if _identical(array, known))
            names[name] = next(same, "")
            if not names[name]:
                raise InputError(f"the program reads {name}, an array that it did not read when it was captured")
        slots = tuple(replace(slot, target=names.get(slot.target, slot.target)) for slot in graph.slots)
        return replace(graph, slots=slots, arrays={})

    def eager(self, leaves: Sequence[Any], parameters: Mapping[str, Array]) -> list[Any]:
        """What the program itself gives, with parameters in the places of those that it has now.

        Raises
        ------
        InputError
            When it raises anything.
        """
        try:
            found = torch_internals.eager(self._function, self._structure, self._tensors(leaves), parameters)
        except Exception as error:  # the researcher's function may raise anything
            first = next(iter(str(error).splitlines()), "")
            raise InputError(f"the program itself raises {type(error).__name__}: {first}") from error
        return [torch_internals.to_numpy(each) if torch_internals.is_tensor(each) else each for each in found]

    def _tensors(self, leaves: Sequence[Any]) -> list[Any]:
        return [
            torch_internals.to_tensor(leaf).to(device) if isinstance(leaf, np.ndarray) else leaf
            for leaf, device in zip(leaves, self._devices, strict=True)
        ]


def _identical(a: Array, b: Array) -> bool:
    """Bit for bit."""
    return spec_of(a) == spec_of(b) and np.array_equal(a.reshape(-1).view(np.uint8), b.reshape(-1).view(np.uint8))

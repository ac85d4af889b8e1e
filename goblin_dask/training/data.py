"""What is trained on: rows by their numbers, and the order in which they come.

The order follows from a seed and the number of the epoch alone, so that a position in it, an epoch and an offset, is
all that a checkpoint has to keep.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, SequentialSampler
from torch.utils.data import default_collate as collated

from goblin_dask.errors import InputError

Batch = tuple[tuple[Any, ...], Any]
"""Arguments of the module, and the target."""


class Rows:
    """Rows of a data set.

    Parameters
    ----------
    data : torch.utils.data.Dataset, DataLoader, or pair of arrays
        Arrays are NumPy's, tensors, Zarr's, or anything else that is indexed by a slice or an array of numbers.
        An item of a data set is a pair of input and target; the input may be a tuple of several arguments. Of a
        `DataLoader` its data set and `collate_fn` are used, and its batch size and shuffling where none are given.

    Raises
    ------
    InputError
        For data that cannot be read by the numbers of their rows.
    """

    def __init__(self, data: Any):
        self.batch: int | None = None
        self.shuffle = False
        collate: Callable[[Any], Any] = collated
        if isinstance(data, DataLoader):
            plain = isinstance(data.sampler, (RandomSampler, SequentialSampler))
            if not plain or type(data.batch_sampler) is not BatchSampler:
                raise InputError("a DataLoader with a sampler of its own: give the data set, and shuffle=True or False")
            self.batch, self.shuffle = data.batch_size, isinstance(data.sampler, RandomSampler)
            data, collate = data.dataset, data.collate_fn
        if isinstance(data, IterableDataset):
            raise InputError("an IterableDataset cannot be read by numbers of rows, which a round and a resume need")
        self._pair: tuple[Any, Any] | None = None
        if isinstance(data, Dataset) or (hasattr(data, "__getitem__") and not isinstance(data, (tuple, list))):
            self._data, self._collate = data, collate
        elif isinstance(data, (tuple, list)) and len(data) == 2 and all(hasattr(each, "shape") for each in data):
            self._pair = data[0], data[1]
            if data[0].shape[:1] != data[1].shape[:1]:
                raise InputError(f"inputs have {data[0].shape[0]} rows, targets {data[1].shape[0]}")
        else:
            raise InputError(
                "data are a torch Dataset, a DataLoader, or a pair of arrays with as many rows, "
                f"not {type(data).__name__}"
            )
        if not len(self):
            raise InputError("there are no rows to train on")

    def __len__(self) -> int:
        return int(self._pair[0].shape[0]) if self._pair is not None else len(self._data)  # type: ignore[arg-type]

    def __call__(self, numbers: Iterable[int]) -> Batch:
        """Rows of some numbers, in that order, as one batch."""
        if self._pair is None:
            inputs, target = self._collate([self._data[int(number)] for number in numbers])
            return tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,), target
        x, y = (_taken(array, np.array([*numbers], np.int64)) for array in self._pair)
        return (x,), y


def _taken(array: Any, numbers: np.ndarray[Any, Any]) -> torch.Tensor:
    if isinstance(array, torch.Tensor):
        return array[torch.from_numpy(numbers)]
    if hasattr(array, "oindex"):  # Zarr: in the order in which it is stored, each chunk once
        order = np.argsort(numbers)
        rows = array.oindex[numbers[order]]
        found = np.empty_like(rows)
        found[order] = rows
    else:
        found = np.asarray(array[numbers])
    return torch.from_numpy(np.ascontiguousarray(found))


@dataclass
class Position:
    """Where in the order of the data training is."""

    epoch: int = 0
    offset: int = 0
    """Rows of this epoch that were trained on."""

    def rows(self, count: int, batch: int, shuffle: bool, seed: int) -> np.ndarray[Any, Any]:
        """Numbers of the rows of the batch that comes now, out of `count`. The last one of an epoch may be smaller."""
        order = np.random.default_rng([seed, self.epoch]).permutation(count) if shuffle else np.arange(count)
        return order[self.offset : self.offset + batch]

    def advance(self, done: int, count: int) -> None:
        """So many rows of `count` were trained on."""
        self.offset += done
        if self.offset >= count:
            self.epoch, self.offset = self.epoch + 1, 0


def parts(numbers: np.ndarray[Any, Any], micro_batch: int) -> list[np.ndarray[Any, Any]]:
    """A batch in micro-batches, the last of which may be smaller."""
    return [numbers[start : start + micro_batch] for start in range(0, len(numbers), micro_batch)]

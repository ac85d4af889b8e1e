"""ATen's operators in terms of the catalogue's: one function for each overload, without a line of PyTorch.

`torch_internals` reads a captured graph into `Call`s; here it is said what each of them records. Who adds an operator
finds the module by what it does, and registers a function under ATen's name.
"""

from goblin_dask.graphs.capture.aten import creation, elementwise, indexing, linear, neural, reductions, shaping
from goblin_dask.graphs.capture.aten.base import LOWERINGS

_TABLES = (creation, elementwise, indexing, linear, neural, reductions, shaping)
"""Imported for what they register."""

__all__ = ["LOWERINGS"]

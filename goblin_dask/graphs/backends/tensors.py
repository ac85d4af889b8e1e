"""NumPy's arrays and PyTorch's tensors: the same memory under two names."""

from __future__ import annotations

import warnings
from typing import Any

import ml_dtypes
import numpy as np
import torch

from goblin_dask.graphs.operators.base import Array

Tensor = torch.Tensor

# Read-only memory is read: inputs are mapped files, and no kernel here writes into an operand.
warnings.filterwarnings("ignore", message="The given NumPy array is not writable", category=UserWarning)

_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
NUMPY_DTYPES: dict[torch.dtype, np.dtype[Any]] = {
    getattr(torch, name): np.dtype(name)
    for name in (
        "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32",
        "float64", "complex64", "complex128",
    )
} | {torch.bfloat16: _BFLOAT16}  # fmt: skip
TORCH_DTYPES = {dtype: name for name, dtype in NUMPY_DTYPES.items()}


def to_tensor(array: Array) -> Tensor:
    """A NumPy array as a tensor that shares its memory, where PyTorch can."""
    if array.dtype == _BFLOAT16:
        return to_tensor(array.view(np.int16)).view(torch.bfloat16)
    if not array.flags.aligned or any(stride < 0 or stride % array.itemsize for stride in array.strides):
        array = np.ascontiguousarray(array)
    return torch.from_numpy(array)


def to_array(tensor: Tensor) -> Array:
    """A tensor as a NumPy array; of a CPU's tensor, the same memory."""
    tensor = tensor.cpu().resolve_conj().resolve_neg()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(_BFLOAT16)
    return tensor.numpy()
